//! Progress of long steps: a bar on a terminal, a plain line now and then elsewhere.

use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// How often a step reports when nobody watches a terminal.
const PLAIN_INTERVAL: Duration = Duration::from_secs(15);

/// The bars of all steps, a line each, on standard error.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Prints a line to standard output, above the bars of all steps.
pub(crate) fn print(line: &str) {
    BARS.suspend(|| println!("{line}"));
}

/// Prints a line to standard error, above the bars of all steps.
pub(crate) fn warn(line: &str) {
    BARS.suspend(|| eprintln!("{line}"));
}

/// One long step. Finish it with [`Progress::done`]; dropping it says nothing.
#[derive(Debug)]
pub(crate) struct Progress {
    what: String,
    /// Counts, and shows itself if standard error is a terminal.
    bar: ProgressBar,
    counts: fn(&str) -> bool,
    reported: Mutex<Instant>,
}

impl Progress {
    /// Starts a step. Lines for which `counts` holds are its progress; `expected` is how many of
    /// them an earlier run saw.
    pub(crate) fn start(what: &str, expected: Option<u64>, counts: fn(&str) -> bool) -> Self {
        let (bar, template) = match expected {
            Some(count) => {
                let template = "{spinner} {msg} [{elapsed}] {wide_bar} {pos}/{len} objects";
                (ProgressBar::new(count), template)
            }
            None => {
                let template = "{spinner} {msg} [{elapsed}] {pos} objects";
                (ProgressBar::new_spinner(), template)
            }
        };
        let bar = BARS.add(bar);
        if bar.is_hidden() {
            eprintln!("{what} ...");
        } else {
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar.set_message(what.to_owned());
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Self {
            what: what.into(),
            bar,
            counts,
            reported: Mutex::new(Instant::now()),
        }
    }

    /// A step of which only the elapsed time is known.
    pub(crate) fn spinner(what: &str) -> Self {
        Self::start(what, None, |_| false)
    }

    /// Tells of one line of the step's output.
    pub(crate) fn line(&self, line: &str) {
        self.advance(u64::from((self.counts)(line)));
    }

    /// Counts `objects` more and reports if it is time.
    pub(crate) fn advance(&self, objects: u64) {
        self.bar.inc(objects);
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        if self.bar.is_hidden() && reported.elapsed() >= PLAIN_INTERVAL {
            *reported = Instant::now();
            let counted = match (self.objects(), self.bar.length()) {
                (0, _) => String::new(),
                (objects, Some(expected)) => format!(", {objects} of about {expected} objects"),
                (objects, None) => format!(", {objects} objects"),
            };
            eprintln!("{}: {} s{counted}", self.what, self.bar.elapsed().as_secs());
        }
    }

    /// How much was counted.
    pub(crate) fn objects(&self) -> u64 {
        self.bar.position()
    }

    /// Ends the step with its time.
    pub(crate) fn done(self) {
        let seconds = self.bar.elapsed().as_secs_f64();
        self.bar.finish_and_clear();
        BARS.suspend(|| eprintln!("{}: done in {seconds:.1} s", self.what));
    }

    /// Takes the bar away so that an error stands alone.
    pub(crate) fn abandon(&self) {
        self.bar.finish_and_clear();
    }
}
