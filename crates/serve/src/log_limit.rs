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
    /// The default limit, for a static.
    pub(crate) const fn new() -> Self {
        Self::of(LINES)
    }

    /// A limit of so many lines within each period of 10 s.
    pub(crate) const fn of(most: u32) -> Self {
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

/// Logs a line on a VM: `log_vm!(level, charge, fields, "text")`. A client can cause any number of such lines, so they have a
/// bound for each user, and the next line says how many were dropped.
macro_rules! log_vm {
    ($level:ident, $charge:expr, $($line:tt)+) => {
        $crate::log_limit::log_within!($level, $charge.may_log_vm(), $($line)+)
    };
}

/// The same of a client that is refused.
macro_rules! log_refusal {
    ($level:ident, $charge:expr, $($line:tt)+) => {
        $crate::log_limit::log_within!($level, $charge.may_log_refusal(), $($line)+)
    };
}

/// The same of clients whose user is not known, or is refused whatever he does: `log_limited!(level, limit, fields, "text")`.
macro_rules! log_limited {
    ($level:ident, $limit:expr, $($line:tt)+) => {
        $crate::log_limit::log_within!($level, $limit.pass(), $($line)+)
    };
}

macro_rules! log_within {
    ($level:ident, $may_log:expr, $($line:tt)+) => {
        if let Some(dropped) = $may_log {
            let dropped = (dropped > 0).then_some(dropped);
            tracing::$level!(dropped, $($line)+);
        }
    };
}

pub(crate) use {log_limited, log_refusal, log_vm, log_within};

#[cfg(test)]
mod tests {
    use super::*;

    /// The sources, beside those of vm/, that deal with clients and nothing else.
    const OF_CLIENTS: [&str; 12] = [
        "arriving.rs",
        "connection.rs",
        "control/channel.rs",
        "exporter.rs",
        "handshake.rs",
        "inbox.rs",
        "intake.rs",
        "parking.rs",
        "porter/wire.rs",
        "receive.rs",
        "turned_away.rs",
        "vm.rs",
    ];

    /// Kind: a line of the log for each of something that a client can make any number of.
    #[test]
    fn no_line_on_a_client_is_without_a_bound() {
        let sources = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src"));
        let within = std::fs::read_dir(sources.join("vm")).unwrap();
        let files = within.map(|file| file.unwrap().path());
        for file in files.chain(OF_CLIENTS.map(|file| sources.join(file))) {
            let text = std::fs::read_to_string(&file).unwrap();
            for level in ["error", "warn", "info"] {
                let unbounded = text.contains(&format!("tracing::{level}!"));
                assert!(!unbounded, "{}: use log_limit's macros", file.display());
            }
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
}
