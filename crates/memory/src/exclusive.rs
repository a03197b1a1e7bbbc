//! A value that one thread at a time uses, almost always without contention.

use crate::sync::{AtomicBool, Ordering, UnsafeCell, spin};

/// A value that its owner's thread uses often, and other threads seldom and briefly. Taking the value
/// is one atomic exchange and returning it one store, half the cost of an uncontended mutex; this
/// matters because each fault takes it. A thread that finds the value in use spins.
#[derive(Debug, Default)]
pub struct Exclusive<T> {
    is_used: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: one thread at a time reaches the value (`is_used`), so sharing an Exclusive only moves access
// to the value from thread to thread.
unsafe impl<T: Send> Sync for Exclusive<T> {}

/// Returns the value when dropped, also during unwinding.
struct Use<'a>(&'a AtomicBool);

impl Drop for Use<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<T> Exclusive<T> {
    /// Wraps `value`.
    pub fn new(value: T) -> Self {
        Self {
            is_used: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Calls `user` with the value as soon as no other thread uses it. `user` must not call this again:
    /// the inner call would spin forever.
    #[inline]
    pub fn with<R>(&self, user: impl FnOnce(&mut T) -> R) -> R {
        while !self.take() {
            spin();
        }
        self.call(user)
    }

    /// As [`Self::with`], but returns `None` at once if the value is in use.
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
            // set `is_used`, which was unset, and no other thread reaches this point until `_use` is
            // dropped.
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

    /// loom reports an access to the value that is not ordered after the one before.
    #[test]
    fn loom_uses_are_ordered() {
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
    fn one_thread_at_a_time_uses_the_value() {
        let sum = Exclusive::new(0_u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| sum.with(|sum| *sum += 1)));
            }
        });
        assert_eq!(sum.with(|sum| *sum), 4000);
    }

    #[test]
    fn a_value_in_use_is_refused() {
        let value = Exclusive::new(1);
        value.with(|_| assert_eq!(value.try_with(|value| *value), None));
        assert_eq!(value.try_with(|value| *value), Some(1));
    }

    #[test]
    fn a_panic_returns_the_value() {
        let value = Exclusive::new(1);
        let panicked = catch_unwind(AssertUnwindSafe(|| value.with(|_| panic!("intended"))));
        assert!(panicked.is_err());
        assert_eq!(value.with(|value| *value), 1);
    }
}
