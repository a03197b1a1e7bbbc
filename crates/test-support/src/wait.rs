//! Waiting for a state.

use std::fmt::Debug;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// The time after which a test counts as hanging. Only a failure reaches it, on however slow a machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// What one look at a state gives: the value that was waited for, or what is there instead.
pub trait Look {
    /// What [`eventually`] returns.
    type Value;

    /// The value, or what was seen in its place, for people.
    ///
    /// # Errors
    ///
    /// What was seen, if it is not what is waited for.
    fn seen(self) -> Result<Self::Value, String>;
}

impl Look for bool {
    type Value = ();

    fn seen(self) -> Result<(), String> {
        if self {
            Ok(())
        } else {
            Err("that it does not hold".into())
        }
    }
}

impl<T> Look for Option<T> {
    type Value = T;

    fn seen(self) -> Result<T, String> {
        self.ok_or_else(|| "nothing".into())
    }
}

impl<T, S: Debug> Look for Result<T, S> {
    type Value = T;

    fn seen(self) -> Result<T, String> {
        self.map_err(|seen| format!("{seen:?}"))
    }
}

/// Waits until a look finds what is waited for, and returns it.
///
/// # Panics
///
/// After [`PATIENCE`], with `what` was waited for and what was seen last.
pub fn eventually<L: Look>(what: &str, mut look: impl FnMut() -> L) -> L::Value {
    wait(what, PATIENCE, &mut || look().seen())
}

fn wait<T>(what: &str, patience: Duration, look: &mut dyn FnMut() -> Result<T, String>) -> T {
    let begun = Instant::now();
    let mut looks = 0;
    loop {
        match look() {
            Ok(value) => return value,
            Err(seen) if begun.elapsed() >= patience => {
                panic!("{what}: not within {patience:?}; seen at last: {seen}")
            }
            Err(_) => thread::sleep(pause(looks)),
        }
        looks += 1;
    }
}

/// The pause after so many looks: soon about 4 ms, and never the same in a row. A thread that wakes every 10 ms was found awake by
/// each second look, 5 ms after the one before, for 120 s: timers that expire together are served together.
fn pause(looks: u32) -> Duration {
    const LONGEST: Duration = Duration::from_millis(5);
    /// In thousandths; the golden section, whose multiples come near no common measure.
    const STEP: u32 = 618;
    let first = Duration::from_micros(200).saturating_mul(1 << looks.min(10));
    let irregular = LONGEST * (600 + looks.wrapping_mul(STEP) % 1000 * 4 / 10) / 1000;
    first.min(irregular)
}

/// A look at a value that has to become `wanted`.
///
/// # Errors
///
/// The value that was found instead.
pub fn equals<T: PartialEq + Debug>(found: T, wanted: &T) -> Result<T, String> {
    if found == *wanted {
        Ok(found)
    } else {
        Err(format!("{found:?}, not {wanted:?}"))
    }
}

/// Runs `work` on another thread, and returns what it gives.
///
/// # Panics
///
/// As `work` does; and after [`PATIENCE`], with `what` was waited for.
pub fn within_patience<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (send, receive) = mpsc::channel();
    let thread = thread::spawn(move || {
        let _ = send.send(work());
    });
    match receive.recv_timeout(PATIENCE) {
        Ok(value) => {
            // It has nothing left to do. A test may count what is there afterwards: threads, stacks, descriptors.
            let _ = thread.join();
            value
        }
        Err(RecvTimeoutError::Timeout) => panic!("{what}: not within {PATIENCE:?}"),
        Err(RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => panic!("{what}: no result"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kind: a look at intervals that what it looks at can have, too.
    #[test]
    fn no_period_fits_the_pauses() {
        assert_eq!(pause(0), Duration::from_micros(200));
        let pauses: Vec<_> = (5..205).map(pause).collect();
        let is_usual = |pause: &Duration| (3000..5000).contains(&pause.as_micros());
        assert!(pauses.iter().all(is_usual), "{pauses:?}");
        let pairs = pauses.windows(2).map(|two| two[0] + two[1]);
        let pairs: Vec<_> = pairs.collect();
        // Longer than a timer's slack, which is 50 us.
        let is_irregular = |two: &[Duration]| two[0].abs_diff(two[1]).as_micros() > 200;
        assert!(pairs.windows(2).all(is_irregular), "{pairs:?}");
    }

    #[test]
    fn a_state_that_comes_is_returned() {
        let mut looks = 0;
        let found = eventually("three looks", || {
            looks += 1;
            if looks < 3 { Err(looks) } else { Ok("here") }
        });
        assert_eq!((found, looks), ("here", 3));
        eventually("it holds", || true);
        assert_eq!(eventually("a value", || Some(7)), 7);
        assert_eq!(eventually("a number", || equals(4, &4)), 4);
    }

    #[test]
    fn a_state_that_does_not_come_is_told_with_what_was_seen() {
        let never = std::panic::catch_unwind(|| {
            wait("the page", Duration::ZERO, &mut || equals(3, &4).seen())
        });
        let panic = never.unwrap_err();
        let message = panic.downcast_ref::<String>().unwrap();
        assert!(message.starts_with("the page: not within 0ns"), "{message}");
        assert!(message.contains("3, not 4"), "{message}");
    }

    #[test]
    fn what_a_thread_gives_or_panics_with_comes_here() {
        assert_eq!(within_patience("a sum", || 2 + 2), 4);
        let panicked = std::panic::catch_unwind(|| within_patience("a panic", || panic!("why")));
        let panic = panicked.unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"why"));
    }
}
