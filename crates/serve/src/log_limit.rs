//! Bounds the lines of the log that clients can cause.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines that pass within a period by default.
const LINES: u32 = 10;

/// The period.
const PERIOD: Duration = Duration::from_secs(10);

/// Lets some lines pass within each period, and counts those that it drops.
#[derive(Debug, Default)]
pub(crate) struct LogLimit(Mutex<Lines>);

#[derive(Debug)]
struct Lines {
    most: u32,
    begun: Option<Instant>,
    passed: u32,
    dropped: u64,
}

impl LogLimit {
    /// A limit of so many lines within each period of 10 s.
    pub(crate) fn of(most: u32) -> Self {
        Self(Mutex::new(Lines::of(most)))
    }

    /// Whether a line may be logged now: the number of lines that were dropped before it.
    pub(crate) fn pass(&self) -> Option<u64> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.pass(Instant::now())
    }
}

impl Default for Lines {
    fn default() -> Self {
        Self::of(LINES)
    }
}

impl Lines {
    fn of(most: u32) -> Self {
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
