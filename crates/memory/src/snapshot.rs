//! A value that is read often and replaced seldom, with one hold per thread.
//!
//! Each thread holds the value that it used last. A read then costs one comparison of versions and no
//! reference count that other threads write. Replacing the value renews the holds of idle threads; a
//! busy thread renews its own hold when it finishes. A previous value is therefore released as soon as
//! the last thread that uses it has finished (after a panic: at that thread's next read, or at the next
//! replacement).

use std::sync::{Arc, PoisonError, Weak};

use crate::exclusive::Exclusive;
use crate::sync::{ArcSwap, AtomicU64, Guard, Mutex, MutexGuard, Ordering, fence};

/// A value and the holds on it.
#[derive(Debug, Default)]
pub struct Snapshots<T> {
    current: ArcSwap<T>,
    /// The number of replacements.
    version: AtomicU64,
    holds: Mutex<Vec<Weak<Hold<T>>>>,
}

/// One thread's hold on the value.
#[derive(Debug)]
pub struct Hold<T>(Exclusive<Held<T>>);

#[derive(Debug)]
struct Held<T> {
    value: Arc<T>,
    version: u64,
}

impl<T> Held<T> {
    #[cold]
    fn renew(&mut self, snapshots: &Snapshots<T>) {
        // Version first: if the value is replaced in between, the hold is renewed once more.
        self.version = snapshots.version.load(Ordering::Acquire);
        self.value = snapshots.current.load_full();
    }
}

impl<T: Default> Snapshots<T> {
    /// The current value, for threads without a hold.
    #[inline]
    pub fn current(&self) -> Guard<Arc<T>> {
        self.current.load()
    }

    /// Replaces the value, including in the holds of idle threads. May drop a previous value, whose
    /// destructor must not use these snapshots.
    pub fn replace(&self, value: T) {
        self.current.store(Arc::new(value));
        self.version.fetch_add(1, Ordering::AcqRel);
        // Pairs with the fence of `with`: a hold that is found in use here is released after this
        // fence, and its thread then sees the new version.
        fence(Ordering::SeqCst);
        self.lock_holds().retain(|hold| {
            let Some(hold) = hold.upgrade() else {
                return false;
            };
            // The thread that uses the hold renews it.
            hold.0.try_with(|held| held.renew(self));
            true
        });
    }

    /// Creates a hold for one thread.
    pub fn hold(&self) -> Arc<Hold<T>> {
        let mut held = Held {
            value: Arc::default(),
            version: 0,
        };
        let mut holds = self.lock_holds();
        held.renew(self);
        let hold = Arc::new(Hold(Exclusive::new(held)));
        holds.push(Arc::downgrade(&hold));
        hold
    }

    /// Calls `look` with the value as of the beginning of the call. `look` must not use the same hold:
    /// it would spin forever.
    #[inline]
    pub fn with<R>(&self, hold: &Hold<T>, look: impl FnOnce(&T) -> R) -> R {
        let (result, mut version) = hold.0.with(|held| {
            if held.version != self.version.load(Ordering::Acquire) {
                held.renew(self);
            }
            (look(&held.value), held.version)
        });
        loop {
            fence(Ordering::SeqCst);
            if version == self.version.load(Ordering::Relaxed) {
                return result;
            }
            // Renewing uses the hold as well, so another replacement may have skipped it meanwhile.
            version = hold.0.with(|held| {
                held.renew(self);
                held.version
            });
        }
    }

    fn lock_holds(&self) -> MutexGuard<'_, Vec<Weak<Hold<T>>>> {
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use loom::sync::Arc as Shared;
    use loom::thread;

    use super::*;

    /// This includes a thread that is busy during the replacement, or has just finished.
    #[test]
    fn loom_a_previous_value_is_released() {
        loom::model(|| {
            let snapshots = Shared::new(Snapshots::<u32>::default());
            let hold = snapshots.hold();
            let former = Arc::downgrade(&snapshots.current.load_full());
            let its = Shared::clone(&snapshots);
            let worker = thread::spawn(move || {
                its.with(&hold, |_| ());
                hold
            });
            snapshots.replace(1);
            let hold = worker.join().unwrap();
            assert_eq!(former.strong_count(), 0);
            assert_eq!(snapshots.with(&hold, |value| *value), 1);
        });
    }

    /// All orders take 39 s, and those with three preemptions two. The step `stress` takes all of them.
    #[test]
    fn loom_two_replacements_and_a_look() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound.get_or_insert(3);
        model.check(|| {
            let snapshots = Shared::new(Snapshots::<u32>::default());
            let hold = snapshots.hold();
            let its = Shared::clone(&snapshots);
            let worker = thread::spawn(move || {
                let first = its.with(&hold, |value| *value);
                assert!(
                    first <= its.with(&hold, |value| *value),
                    "values never go back"
                );
                hold
            });
            snapshots.replace(1);
            let former = Arc::downgrade(&snapshots.current.load_full());
            snapshots.replace(2);
            let hold = worker.join().unwrap();
            assert_eq!(former.strong_count(), 0);
            assert_eq!(snapshots.with(&hold, |value| *value), 2);
        });
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_replaced_value_is_released() {
        let snapshots = Snapshots::<u32>::default();
        let (idle, busy) = (snapshots.hold(), snapshots.hold());
        let first = Arc::downgrade(&snapshots.current.load_full());
        assert_eq!(first.strong_count(), 3);
        snapshots.with(&busy, |_| {
            snapshots.replace(1);
            assert_eq!(first.strong_count(), 1, "the busy hold's reference");
        });
        assert_eq!(first.strong_count(), 0);
        let second = Arc::downgrade(&snapshots.current.load_full());
        drop((idle, busy));
        assert_eq!(second.strong_count(), 1);
        snapshots.replace(2);
        assert_eq!(second.strong_count(), 0);
        let holds = snapshots.holds.lock().unwrap().len();
        assert_eq!(holds, 0, "dropped holds leave the list");
    }

    #[test]
    fn a_read_returns_the_current_value() {
        let snapshots = Snapshots::<u32>::default();
        let hold = snapshots.hold();
        assert_eq!(snapshots.with(&hold, |value| *value), 0);
        snapshots.replace(1);
        assert_eq!(snapshots.with(&hold, |value| *value), 1);
    }
}
