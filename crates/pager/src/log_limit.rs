//! Bounds the lines of the log that guests, clients and outages can cause.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines that pass within a period by default.
const LINES: u32 = 10;

/// The period.
const PERIOD: Duration = Duration::from_secs(10);

/// Lets some lines pass within each period, and counts those that it drops.
#[derive(Debug, Default)]
pub struct LogLimit(Mutex<Lines>);

#[derive(Debug)]
struct Lines {
    most: u32,
    begun: Option<Instant>,
    passed: u32,
    dropped: u64,
}

impl LogLimit {
    /// The default limit, for a static.
    pub const fn new() -> Self {
        Self::of(LINES)
    }

    /// A limit of so many lines within each period of 10 s.
    pub const fn of(most: u32) -> Self {
        Self(Mutex::new(Lines::of(most)))
    }

    /// Whether a line may be logged now: the number of lines that were dropped before it.
    pub fn pass(&self) -> Option<u64> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.pass(Instant::now())
    }

    /// The same for a line that is said once. One that the bound drops is said when it is due again.
    pub fn pass_once(&self, is_said: &AtomicBool) -> Option<u64> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if is_said.load(Ordering::Relaxed) {
            return None;
        }
        let passed = lines.pass(Instant::now());
        is_said.store(passed.is_some(), Ordering::Relaxed);
        passed
    }
}

impl Default for Lines {
    fn default() -> Self {
        Self::of(LINES)
    }
}

impl Lines {
    const fn of(most: u32) -> Self {
        Self {
            most,
            begun: None,
            passed: 0,
            dropped: 0,
        }
    }

    fn pass(&mut self, now: Instant) -> Option<u64> {
        if self.begun.is_none_or(|begun| now >= begun + PERIOD) {
            (self.begun, self.passed) = (Some(now), 0);
        }
        if self.passed == self.most {
            self.dropped += 1;
            return None;
        }
        self.passed += 1;
        Some(std::mem::take(&mut self.dropped))
    }
}

/// Logs a line that a guest, a store or an outage can cause any number of times: `log_limited!(level, fields, "text")`. All pagers
/// and images of the process share the bound, which is the line's own; the next one says how many were dropped.
#[doc(hidden)]
#[macro_export]
macro_rules! log_limited {
    ($level:ident, $($line:tt)+) => {{
        static LOGGED: $crate::log_limit::LogLimit = $crate::log_limit::LogLimit::new();
        if let Some(dropped) = LOGGED.pass() {
            let dropped = (dropped > 0).then_some(dropped);
            tracing::$level!(dropped, $($line)+);
        }
    }};
}

/// The same for a line that each of its owners says once: `log_once!(said, level, fields, "text")`, where `said` is the owner's
/// [`AtomicBool`].
#[doc(hidden)]
#[macro_export]
macro_rules! log_once {
    ($said:expr, $level:ident, $($line:tt)+) => {{
        static LOGGED: $crate::log_limit::LogLimit = $crate::log_limit::LogLimit::new();
        if let Some(dropped) = LOGGED.pass_once(&$said) {
            let dropped = (dropped > 0).then_some(dropped);
            tracing::$level!(dropped, $($line)+);
        }
    }};
}

pub use {log_limited, log_once};

#[cfg(test)]
mod tests {
    use std::path::Path;

    use pagetide_test_support::unbounded_log_lines;

    use super::*;

    /// Files whose lines have a bound of another kind, and the number of these lines: one is said once.
    const OTHERS: [(&str, usize); 1] = [("mark.rs", 1)];

    /// Kind: a line of the log for each fault, request or event, which an outage or a process can make any number of.
    #[test]
    fn no_line_is_without_a_bound() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        for (path, unbounded) in unbounded_log_lines(&sources).into_iter().flatten() {
            let other = OTHERS.iter().find(|(name, _)| path.ends_with(name));
            let permitted = other.map_or(0, |(_, lines)| *lines);
            assert_eq!(unbounded, permitted, "{}: use log_limited!", path.display());
        }
    }

    #[test]
    fn lines_beyond_the_limit_are_counted_and_not_logged() {
        let mut lines = Lines::default();
        let now = Instant::now();
        for line in 0..100 {
            let passed = lines.pass(now + PERIOD * line / 101);
            assert_eq!(passed, (line < LINES).then_some(0));
        }
        assert_eq!(lines.pass(now + PERIOD), Some(90));
        assert_eq!(lines.pass(now + PERIOD), Some(0));
    }

    /// Kind: a bound that others use up drops what is said once for good.
    #[test]
    fn a_line_that_is_said_once_is_said_though_the_bound_has_dropped_it() {
        let (limit, said) = (LogLimit::of(1), AtomicBool::new(false));
        assert_eq!(limit.pass(), Some(0));
        assert_eq!(limit.pass_once(&said), None);
        limit.0.lock().unwrap().begun = None;
        assert_eq!(limit.pass_once(&said), Some(1));
        limit.0.lock().unwrap().begun = None;
        assert_eq!(limit.pass_once(&said), None);
        assert_eq!(limit.pass(), Some(0));
    }
}
