//! Progress of long steps: a bar on a terminal, a plain line now and then elsewhere.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How often a step reports when nobody watches a terminal.
const PLAIN_INTERVAL: Duration = Duration::from_secs(15);

/// One long step. Finish it with [`Progress::done`]; dropping it says nothing.
#[derive(Debug)]
pub(crate) struct Progress {
    what: String,
    started: Instant,
    bar: Option<ProgressBar>,
    counts: fn(&str) -> bool,
    state: Mutex<State>,
    quiet: bool,
}

#[derive(Debug)]
struct State {
    objects: u64,
    expected: Option<u64>,
    reported: Instant,
}

impl Progress {
    /// Starts a step. Lines for which `counts` holds are its progress; `expected` is how many of
    /// them an earlier run saw.
    pub(crate) fn start(what: &str, expected: Option<u64>, counts: fn(&str) -> bool) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| bar(what, expected));
        if bar.is_none() {
            eprintln!("{what} ...");
        }
        let now = Instant::now();
        let state = State {
            objects: 0,
            expected,
            reported: now,
        };
        Self {
            what: what.into(),
            started: now,
            bar,
            counts,
            state: Mutex::new(state),
            quiet: false,
        }
    }

    /// A step of which only the elapsed time is known.
    pub(crate) fn spinner(what: &str) -> Self {
        Self::start(what, None, |_| false)
    }

    /// A step that nobody is told about.
    #[cfg(test)]
    pub(crate) fn hidden() -> Self {
        let now = Instant::now();
        let state = State {
            objects: 0,
            expected: None,
            reported: now,
        };
        let state = Mutex::new(state);
        Self {
            what: String::new(),
            started: now,
            bar: None,
            counts: |_| false,
            state,
            quiet: true,
        }
    }

    /// Tells of one line of the step's output.
    pub(crate) fn line(&self, line: &str) {
        if (self.counts)(line) {
            self.advance(1);
        } else {
            self.advance(0);
        }
    }

    /// Counts `objects` more and reports if it is time.
    pub(crate) fn advance(&self, objects: u64) {
        if self.quiet {
            return;
        }
        let Ok(mut state) = self.state.lock() else {
            return;
        };
        state.objects += objects;
        if let Some(bar) = &self.bar {
            bar.set_position(state.objects);
        } else if state.reported.elapsed() >= PLAIN_INTERVAL {
            state.reported = Instant::now();
            eprintln!(
                "{}: {} s{}",
                self.what,
                self.started.elapsed().as_secs(),
                state.shown()
            );
        }
    }

    /// Prints a line to standard output, beside the bar if there is one.
    pub(crate) fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| println!("{line}")),
            None => println!("{line}"),
        }
    }

    /// How much was counted.
    pub(crate) fn objects(&self) -> u64 {
        self.state.lock().map_or(0, |state| state.objects)
    }

    /// Ends the step with its time.
    pub(crate) fn done(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        if !self.quiet {
            eprintln!(
                "{}: done in {:.1} s",
                self.what,
                self.started.elapsed().as_secs_f64()
            );
        }
    }

    /// Takes the bar away so that an error stands alone.
    pub(crate) fn abandon(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl State {
    fn shown(&self) -> String {
        match (self.objects, self.expected) {
            (0, _) => String::new(),
            (objects, Some(expected)) => format!(", {objects} of about {expected} objects"),
            (objects, None) => format!(", {objects} objects"),
        }
    }
}

fn bar(what: &str, expected: Option<u64>) -> ProgressBar {
    let template = match expected {
        Some(_) => "{spinner} {msg} [{elapsed}] {wide_bar} {pos}/{len} objects",
        None => "{spinner} {msg} [{elapsed}] {pos} objects",
    };
    let bar = expected.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
    bar.set_draw_target(ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(what.to_owned());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
