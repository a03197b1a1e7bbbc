//! Shows how far a benchmark is.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Is told how far a benchmark is.
pub trait Progress {
    /// So many runs will follow.
    fn begin(&mut self, runs: u64);
    /// A run begins.
    fn step(&mut self, what: &str);
    /// A run is over.
    fn done(&mut self);
    /// Something worth a line.
    fn message(&mut self, text: &str);
    /// All runs are over.
    fn end(&mut self);
}

/// Says nothing.
#[derive(Debug, Default)]
pub struct Quiet;

impl Progress for Quiet {
    fn begin(&mut self, _runs: u64) {}
    fn step(&mut self, _what: &str) {}
    fn done(&mut self) {}
    fn message(&mut self, _text: &str) {}
    fn end(&mut self) {}
}

/// The progress display for standard error: a bar on a terminal, plain lines elsewhere.
#[must_use]
pub fn on_stderr() -> Box<dyn Progress> {
    if std::io::stderr().is_terminal() {
        Box::new(Bar::default())
    } else {
        Box::new(Lines::new(std::io::stderr()))
    }
}

/// A bar on a terminal; nothing of it stays when the benchmark is over.
#[derive(Debug)]
struct Bar {
    bar: ProgressBar,
}

impl Default for Bar {
    fn default() -> Self {
        Self {
            bar: ProgressBar::hidden(),
        }
    }
}

impl Progress for Bar {
    fn begin(&mut self, runs: u64) {
        self.bar = ProgressBar::with_draw_target(Some(runs), ProgressDrawTarget::stderr());
        // The template is a constant that a test renders; a bad one falls back to the default bar.
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            self.bar.set_style(style.progress_chars("━╸─"));
        }
        self.bar.enable_steady_tick(Duration::from_millis(250));
    }

    fn step(&mut self, what: &str) {
        self.bar.set_message(what.to_owned());
    }

    fn done(&mut self) {
        self.bar.inc(1);
    }

    fn message(&mut self, text: &str) {
        self.bar.println(text);
    }

    fn end(&mut self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Bar {
    /// A failed benchmark leaves the terminal without a stale bar, too.
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

const TEMPLATE: &str = "{bar:20} {pos}/{len}, {eta} to go: {wide_msg}";

/// Plain lines for logs: at most one every few seconds, so that a log stays readable.
struct Lines<W> {
    out: W,
    total: u64,
    done: u64,
    last: Option<Instant>,
    interval: Duration,
}

impl<W: Write> Lines<W> {
    fn new(out: W) -> Self {
        Self {
            out,
            total: 0,
            done: 0,
            last: None,
            interval: Duration::from_secs(5),
        }
    }

    fn line(&mut self, text: &str) {
        // Nobody is helped by a benchmark that fails because its log is gone.
        let _ = writeln!(self.out, "{text}");
    }
}

impl<W: Write> Progress for Lines<W> {
    fn begin(&mut self, runs: u64) {
        self.total = runs;
        self.line(&format!("{runs} runs, the first round warms up"));
    }

    fn step(&mut self, what: &str) {
        if self.last.is_none_or(|last| last.elapsed() >= self.interval) {
            self.last = Some(Instant::now());
            let text = format!("run {} of {}: {what}", self.done + 1, self.total);
            self.line(&text);
        }
    }

    fn done(&mut self) {
        self.done += 1;
    }

    fn message(&mut self, text: &str) {
        self.line(text);
    }

    fn end(&mut self) {
        let text = format!("{} of {} runs done", self.done, self.total);
        self.line(&text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_is_valid() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
    }

    #[test]
    fn lines_are_few_and_complete() {
        let mut lines = Lines::new(Vec::new());
        lines.begin(3);
        for what in ["first", "second", "third"] {
            lines.step(what);
            lines.done();
        }
        lines.message("one was lost");
        lines.end();
        let text = String::from_utf8(lines.out).unwrap();
        assert_eq!(
            text,
            "3 runs, the first round warms up\nrun 1 of 3: first\none was lost\n3 of 3 runs done\n"
        );
    }
}
