//! The table of regions, and each thread's own hold of it.
//!
//! A fault looks its region up in a table that changes seldom. Each [`crate::Resolver`] holds the
//! table that it used last, so that a fault costs a comparison, and no reference count that other
//! threads change too. When the table is replaced, so is what idle resolvers hold; one that is at work
//! replaces its own when it is done. So the memory of a region that was removed is let go of as soon as
//! the last thread that works on it has finished.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use arc_swap::{ArcSwap, Guard};
use pagetide_memory::Exclusive;

use crate::table::Table;

/// The current table, and those who hold it.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    current: ArcSwap<Table>,
    /// Counts replacements.
    version: AtomicU64,
    holds: Mutex<Vec<Weak<Hold>>>,
}

/// What one thread holds.
#[derive(Debug)]
pub(crate) struct Hold(Exclusive<Held>);

#[derive(Debug)]
struct Held {
    table: Arc<Table>,
    version: u64,
}

impl Held {
    #[cold]
    fn renew(&mut self, tables: &Tables) {
        // Version first: if the table is replaced in between, it is renewed once more.
        self.version = tables.version.load(Ordering::Acquire);
        self.table = tables.current.load_full();
    }
}

impl Tables {
    #[inline]
    pub(crate) fn current(&self) -> Guard<Arc<Table>> {
        self.current.load()
    }

    /// Replaces the table, also where threads hold it that are not at work.
    pub(crate) fn replace(&self, table: Table) {
        self.current.store(Arc::new(table));
        self.version.fetch_add(1, Ordering::AcqRel);
        // Pairs with the fence of `with`: a hold that is found in use here is let go of after this, and
        // its thread sees the version then.
        fence(Ordering::SeqCst);
        let mut holds = self.holds.lock().unwrap_or_else(PoisonError::into_inner);
        holds.retain(|hold| {
            let Some(hold) = hold.upgrade() else {
                return false;
            };
            // If it is in use, its thread renews it.
            hold.0.try_with(|held| held.renew(self));
            true
        });
    }

    /// A hold for one thread.
    pub(crate) fn hold(&self) -> Arc<Hold> {
        let mut held = Held {
            table: Arc::default(),
            version: 0,
        };
        let mut holds = self.holds.lock().unwrap_or_else(PoisonError::into_inner);
        held.renew(self);
        let hold = Arc::new(Hold(Exclusive::new(held)));
        holds.push(Arc::downgrade(&hold));
        hold
    }

    /// Calls `look` with the table, as it is at the beginning of the call.
    #[inline]
    pub(crate) fn with<T>(&self, hold: &Hold, look: impl FnOnce(&Table) -> T) -> T {
        let (result, version) = hold.0.with(|held| {
            if held.version != self.version.load(Ordering::Acquire) {
                held.renew(self);
            }
            (look(&held.table), held.version)
        });
        fence(Ordering::SeqCst);
        if version != self.version.load(Ordering::Relaxed) {
            hold.0.with(|held| held.renew(self));
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holders(table: &Weak<Table>) -> usize {
        table.strong_count()
    }

    #[test]
    fn a_table_that_was_replaced_is_let_go_of() {
        let tables = Tables::default();
        let (idle, busy) = (tables.hold(), tables.hold());
        let first = Arc::downgrade(&tables.current.load_full());
        assert_eq!(holders(&first), 3);
        tables.with(&busy, |_| {
            tables.replace(Table::default());
            assert_eq!(holders(&first), 1, "the busy one's");
        });
        assert_eq!(holders(&first), 0);
        let second = Arc::downgrade(&tables.current.load_full());
        drop((idle, busy));
        assert_eq!(holders(&second), 1);
        tables.replace(Table::default());
        assert_eq!(holders(&second), 0);
        let holds = tables.holds.lock().unwrap().len();
        assert_eq!(holds, 0, "those that are gone are forgotten");
    }

    #[test]
    fn a_fault_sees_the_table_of_its_moment() {
        let tables = Tables::default();
        let hold = tables.hold();
        let first = tables.with(&hold, |table| std::ptr::from_ref(table).addr());
        tables.replace(Table::default());
        let second = tables.with(&hold, |table| std::ptr::from_ref(table).addr());
        assert_ne!(first, second);
    }
}
