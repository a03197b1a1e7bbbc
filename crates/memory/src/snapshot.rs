//! A value that is looked up often and changes seldom, and each thread's own hold of it.
//!
//! Each thread holds the value that it used last, so that a look costs a comparison, and no reference
//! count that other threads change too. When the value is replaced, so is what idle threads hold; one
//! that is at work replaces its own when it is done. So a former value is let go of as soon as the last
//! thread that works on it has finished (after a panic: when it looks again, or at the next
//! replacement).

use std::sync::{Arc, PoisonError, Weak};

use crate::exclusive::Exclusive;
use crate::sync::{ArcSwap, AtomicU64, Guard, Mutex, MutexGuard, Ordering, fence};

/// A value, and those who hold it.
#[derive(Debug, Default)]
pub struct Snapshots<T> {
    current: ArcSwap<T>,
    /// Counts replacements.
    version: AtomicU64,
    holds: Mutex<Vec<Weak<Hold<T>>>>,
}

/// What one thread holds.
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
        // Version first: if the value is replaced in between, it is renewed once more.
        self.version = snapshots.version.load(Ordering::Acquire);
        self.value = snapshots.current.load_full();
    }
}

impl<T: Default> Snapshots<T> {
    /// The value of now. For threads without a hold of their own.
    #[inline]
    pub fn current(&self) -> Guard<Arc<T>> {
        self.current.load()
    }

    /// Replaces the value, also where threads hold it that are not at work. A former value may be dropped
    /// here, and must not use these snapshots then.
    pub fn replace(&self, value: T) {
        self.current.store(Arc::new(value));
        self.version.fetch_add(1, Ordering::AcqRel);
        // Pairs with the fence of `with`: a hold that is found in use here is let go of after this, and
        // its thread sees the version then.
        fence(Ordering::SeqCst);
        self.lock_holds().retain(|hold| {
            let Some(hold) = hold.upgrade() else {
                return false;
            };
            // If it is in use, its thread renews it.
            hold.0.try_with(|held| held.renew(self));
            true
        });
    }

    /// A hold for one thread.
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

    /// Calls `look` with the value, as it is at the beginning of the call. `look` must not use the same
    /// hold: it would spin for ever.
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
            // It is in use here as well: the value may be replaced once more meanwhile.
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

    /// Also by a thread that is at work while the value is replaced, or just done.
    #[test]
    fn loom_a_former_value_is_let_go_of() {
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

    #[test]
    fn loom_two_replacements_and_a_look() {
        loom::model(|| {
            let snapshots = Shared::new(Snapshots::<u32>::default());
            let hold = snapshots.hold();
            let its = Shared::clone(&snapshots);
            let worker = thread::spawn(move || {
                let first = its.with(&hold, |value| *value);
                assert!(first <= its.with(&hold, |value| *value), "never back");
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
    fn a_value_that_was_replaced_is_let_go_of() {
        let snapshots = Snapshots::<u32>::default();
        let (idle, busy) = (snapshots.hold(), snapshots.hold());
        let first = Arc::downgrade(&snapshots.current.load_full());
        assert_eq!(first.strong_count(), 3);
        snapshots.with(&busy, |_| {
            snapshots.replace(1);
            assert_eq!(first.strong_count(), 1, "the busy one's");
        });
        assert_eq!(first.strong_count(), 0);
        let second = Arc::downgrade(&snapshots.current.load_full());
        drop((idle, busy));
        assert_eq!(second.strong_count(), 1);
        snapshots.replace(2);
        assert_eq!(second.strong_count(), 0);
        let holds = snapshots.holds.lock().unwrap().len();
        assert_eq!(holds, 0, "those that are gone are forgotten");
    }

    #[test]
    fn a_look_sees_the_value_of_its_moment() {
        let snapshots = Snapshots::<u32>::default();
        let hold = snapshots.hold();
        assert_eq!(snapshots.with(&hold, |value| *value), 0);
        snapshots.replace(1);
        assert_eq!(snapshots.with(&hold, |value| *value), 1);
    }
}
