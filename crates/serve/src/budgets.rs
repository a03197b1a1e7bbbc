//! What the clients of one user may take of a server: connections, and lines of the log.
//!
//! A user is known by the kernel (SO_PEERCRED). Whatever the clients of one user do, others connect, and their lines are
//! in the log.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::log_limit::LogLimit;

/// Lines of the log on refused clients of one user, within the period of a [`LogLimit`].
const REFUSAL_LINES: u32 = 100;

/// Users that are remembered although they have no connection: a client that connects again and again has the limits
/// of one.
const IDLE_USERS: usize = 1024;

/// The users of a server.
#[derive(Debug, Default)]
pub(crate) struct Budgets(Mutex<HashMap<u32, Arc<User>>>);

/// What one user has taken.
#[derive(Debug)]
struct User {
    connections: Mutex<usize>,
    refusals_logged: LogLimit,
}

impl User {
    fn lock(&self) -> MutexGuard<'_, usize> {
        // A number: nothing panics between two changes that belong together.
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection of a user, until it is dropped.
#[derive(Debug)]
pub(crate) struct Charge(Arc<User>);

impl Budgets {
    /// Charges a connection to a user; `None` if the user has so many already.
    pub(crate) fn charge(&self, uid: u32, limit: usize) -> Option<Charge> {
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if users.len() > IDLE_USERS {
            users.retain(|_, user| *user.lock() > 0);
        }
        let user = users.entry(uid).or_insert_with(|| {
            Arc::new(User {
                connections: Mutex::default(),
                refusals_logged: LogLimit::of(REFUSAL_LINES),
            })
        });
        let mut connections = user.lock();
        if *connections >= limit {
            return None;
        }
        *connections += 1;
        drop(connections);
        Some(Charge(Arc::clone(user)))
    }
}

impl Charge {
    /// Whether a line on a refusal of this user's client may be logged: the number of lines that were dropped before it.
    pub(crate) fn may_log_refusal(&self) -> Option<u64> {
        self.0.refusals_logged.pass()
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_at_its_limit_takes_nothing_of_another() {
        let budgets = Budgets::default();
        let first: Vec<_> = (0..3).map_while(|_| budgets.charge(1, 2)).collect();
        assert_eq!(first.len(), 2);
        assert!(budgets.charge(2, 2).is_some());
        drop(first);
        assert!(budgets.charge(1, 1).is_some());
    }

    #[test]
    fn the_lines_of_a_user_are_limited_however_often_it_connects() {
        let budgets = Budgets::default();
        let logged = (0..1000).filter(|_| {
            let charge = budgets.charge(1, 1).unwrap();
            charge.may_log_refusal().is_some()
        });
        assert_eq!(logged.count(), 100);
        let other = budgets.charge(2, 1).unwrap();
        assert_eq!(other.may_log_refusal(), Some(0));
    }

    #[test]
    fn users_without_a_connection_are_forgotten_when_there_are_many() {
        let budgets = Budgets::default();
        let _kept = budgets.charge(u32::MAX, 1).unwrap();
        for uid in 0..3000 {
            drop(budgets.charge(uid, 1));
        }
        assert!(budgets.0.lock().unwrap().len() <= IDLE_USERS + 2);
        assert!(budgets.charge(u32::MAX, 1).is_none());
    }
}
