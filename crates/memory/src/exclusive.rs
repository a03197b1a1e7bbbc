//! A value that one thread at a time uses, where others hardly ever want it.

use crate::sync::{AtomicBool, Ordering, UnsafeCell, spin};

/// A value that is used by its owner's thread, and seldom and briefly by others. Taking it is one atomic
/// exchange and giving it back a store: half of what a mutex costs that nobody waits for, which counts
/// where it is done for each fault. Whoever finds it in use spins.
#[derive(Debug, Default)]
pub struct Exclusive<T> {
    is_used: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by one thread at a time (`is_used`), so sharing an Exclusive hands the
// value from thread to thread and no more.
unsafe impl<T: Send> Sync for Exclusive<T> {}

/// Gives the value back, also when its user unwinds.
struct Use<'a>(&'a AtomicBool);

impl Drop for Use<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<T> Exclusive<T> {
    /// For `value`.
    pub fn new(value: T) -> Self {
        Self {
            is_used: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Calls `user` with the value, as soon as nobody else uses it. Must not be called from within
    /// itself: it would spin for ever.
    #[inline]
    pub fn with<R>(&self, user: impl FnOnce(&mut T) -> R) -> R {
        while !self.take() {
            spin();
        }
        self.call(user)
    }

    /// As [`Self::with`], if nobody uses the value now.
    pub fn try_with<R>(&self, user: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.take().then(|| self.call(user))
    }

    #[inline]
    fn take(&self) -> bool {
        let taken =
            self.is_used
                .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok()
    }

    #[inline]
    fn call<R>(&self, user: impl FnOnce(&mut T) -> R) -> R {
        let _use = Use(&self.is_used);
        self.value.with_mut(|value| {
            // SAFETY: the dereferenced pointer must be valid and the only reference: this thread has
            // set `is_used`, which was unset, and nobody else gets here until `_use` is dropped.
            user(unsafe { &mut *value })
        })
    }
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// loom finds each access to the value that is not ordered after the one before it.
    #[test]
    fn loom_each_use_is_after_the_one_before() {
        loom::model(|| {
            let value = Arc::new(Exclusive::new(0));
            let its = Arc::clone(&value);
            let other = thread::spawn(move || its.with(|value| *value += 1));
            let tried = value.try_with(|value| *value += 1).is_some();
            other.join().unwrap();
            assert_eq!(value.with(|value| *value), 1 + u32::from(tried));
        });
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn one_thread_at_a_time_has_it() {
        let sum = Exclusive::new(0_u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| sum.with(|sum| *sum += 1)));
            }
        });
        assert_eq!(sum.with(|sum| *sum), 4000);
    }

    #[test]
    fn whoever_finds_it_in_use_may_go() {
        let value = Exclusive::new(1);
        value.with(|_| assert_eq!(value.try_with(|value| *value), None));
        assert_eq!(value.try_with(|value| *value), Some(1));
    }

    #[test]
    fn a_panic_gives_it_back() {
        let value = Exclusive::new(1);
        let panicked = catch_unwind(AssertUnwindSafe(|| value.with(|_| panic!("as wanted"))));
        assert!(panicked.is_err());
        assert_eq!(value.with(|value| *value), 1);
    }
}
