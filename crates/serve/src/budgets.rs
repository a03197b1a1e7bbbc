//! What the clients of one user may take of a server: all that they cost is charged to one object.
//!
//! A user is known by the kernel (SO_PEERCRED). Whatever the clients of one user do, others find room, their handshakes
//! are worked on, and their lines are in the log.

mod limits;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thiserror::Error;

use crate::handshake::VmRegion;
use crate::log_limit::LogLimit;
use crate::native::message::RefusedCode;

pub use limits::UserLimits;
pub(crate) use limits::{Amounts, Resource};

/// Lines of the log on refused clients of one user, within the period of a [`LogLimit`].
const REFUSAL_LINES: u32 = 100;

/// Users that are remembered although they have no connection: a client that connects again and again has the limits
/// of one.
const IDLE_USERS: usize = 1024;

/// What a client costs from its connection on: a thread, whose stack and guard are mappings; the connection, and room for
/// what the thread opens before it knows of a VM.
const CONNECTION: Amounts = Amounts::NONE
    .with(Resource::Connections, 1)
    .with(Resource::Threads, 1)
    .with(Resource::Descriptors, 2)
    .with(Resource::Mappings, 2);

/// What a VM costs beside that, whatever its regions are: its pager's descriptors, those at the keeper, threads for
/// prefetch and for its working set, their stacks, and the page maps at the keeper.
const VM: Amounts = Amounts::NONE
    .with(Resource::Threads, 2)
    .with(Resource::Descriptors, 12)
    .with(Resource::Mappings, 5);

/// A user's clients have taken too much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "the clients of one user may take {limit} {resource} together; this one needs {wanted}, and {taken} are taken: {}",
    resource.remedy()
)]
pub struct OverBudget {
    resource: Resource,
    limit: u64,
    taken: u64,
    wanted: u64,
}

impl OverBudget {
    /// The code for a client of the native protocol.
    pub(crate) fn code(&self) -> RefusedCode {
        match self.resource {
            Resource::Regions | Resource::Pages => RefusedCode::Regions,
            Resource::Descriptors => RefusedCode::Descriptors,
            Resource::Connections | Resource::Threads | Resource::Mappings => RefusedCode::Internal,
        }
    }
}

/// The users of a server.
#[derive(Debug)]
pub(crate) struct Budgets {
    limits: UserLimits,
    users: Mutex<HashMap<u32, Arc<User>>>,
}

/// What one user has taken.
#[derive(Debug)]
struct User {
    limits: UserLimits,
    taken: Mutex<Amounts>,
    /// Held by the one handshake that is worked on.
    turn: Mutex<()>,
    refusals_logged: LogLimit,
}

impl User {
    fn lock(&self) -> MutexGuard<'_, Amounts> {
        // Numbers: nothing panics between two changes that belong together.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all of it, or nothing.
    fn take(&self, wanted: &Amounts, connections: u64) -> Result<(), OverBudget> {
        let mut taken = self.lock();
        for resource in Resource::ALL {
            let limit = self.limits.of(resource).unwrap_or(connections);
            let (taken, wanted) = (taken.of(resource), wanted.of(resource));
            if wanted > 0 && taken.saturating_add(wanted) > limit {
                return Err(OverBudget {
                    resource,
                    limit,
                    taken,
                    wanted,
                });
            }
        }
        *taken = taken.plus(wanted);
        Ok(())
    }

    fn add(&self, amounts: &Amounts) {
        let mut taken = self.lock();
        *taken = taken.plus(amounts);
    }
}

/// What a client has taken of its user's budget, until it is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    user: Arc<User>,
    taken: Mutex<Amounts>,
}

impl Budgets {
    pub(crate) fn new(limits: UserLimits) -> Self {
        Self {
            limits,
            users: Mutex::default(),
        }
    }

    /// Charges a connection to a user, of which it may have so many.
    ///
    /// # Errors
    /// [`OverBudget`] if the user has taken too much of anything.
    pub(crate) fn charge(&self, uid: u32, connections: usize) -> Result<Charge, OverBudget> {
        let user = self.user(uid);
        user.take(&CONNECTION, connections as u64)?;
        Ok(Charge {
            user,
            taken: Mutex::new(CONNECTION),
        })
    }

    /// The same for a client that is there already, whatever its user has taken.
    pub(crate) fn charge_anyway(&self, uid: u32) -> Charge {
        let user = self.user(uid);
        user.add(&CONNECTION);
        Charge {
            user,
            taken: Mutex::new(CONNECTION),
        }
    }

    fn user(&self, uid: u32) -> Arc<User> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        if users.len() > IDLE_USERS {
            users.retain(|_, user| user.lock().of(Resource::Connections) > 0);
        }
        let user = users.entry(uid).or_insert_with(|| {
            Arc::new(User {
                limits: self.limits,
                taken: Mutex::default(),
                turn: Mutex::default(),
                refusals_logged: LogLimit::of(REFUSAL_LINES),
            })
        });
        Arc::clone(user)
    }
}

impl Charge {
    /// What is charged to nobody.
    pub(crate) fn of_nobody() -> Self {
        Budgets::new(UserLimits::default()).charge_anyway(0)
    }

    /// Charges more to the client.
    ///
    /// # Errors
    /// [`OverBudget`]; nothing is charged then.
    pub(crate) fn take(&self, resource: Resource, amount: u64) -> Result<(), OverBudget> {
        self.take_all(&Amounts::NONE.with(resource, amount))
    }

    /// Charges what a VM costs, before anything is made for it.
    ///
    /// # Errors
    /// [`OverBudget`]; nothing is charged then.
    pub(crate) fn take_vm(&self, regions: &[VmRegion]) -> Result<(), OverBudget> {
        self.take_all(&of_vm(regions))
    }

    /// The same for a VM that runs already: it is charged, whatever its user has taken.
    pub(crate) fn take_vm_anyway(&self, regions: &[VmRegion]) {
        let amounts = of_vm(regions);
        let mut mine = self.lock();
        self.user.add(&amounts);
        *mine = mine.plus(&amounts);
    }

    /// Gives back all but the connection and so many descriptors: the client is refused, and stays.
    pub(crate) fn keep_descriptors(&self, count: u64) {
        let kept = Amounts::NONE
            .with(Resource::Connections, 1)
            .with(Resource::Descriptors, count);
        let mut mine = self.lock();
        let mut all = self.user.lock();
        *all = all.minus(&mine).plus(&kept);
        *mine = kept;
    }

    /// Gives back what was charged, for example room for descriptors that did not come.
    pub(crate) fn give_back(&self, resource: Resource, amount: u64) {
        let given = Amounts::NONE.with(resource, amount);
        let mut mine = self.lock();
        *mine = mine.minus(&given);
        let mut all = self.user.lock();
        *all = all.minus(&given);
    }

    /// Waits for this client's turn: of one user, one handshake is worked on at a time, so that all of them together take
    /// no more than one processor. Nobody may wait for a client meanwhile.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        self.user
            .turn
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a line on a refusal of this user's client may be logged: the number of lines that were dropped before it.
    pub(crate) fn may_log_refusal(&self) -> Option<u64> {
        self.user.refusals_logged.pass()
    }

    fn take_all(&self, wanted: &Amounts) -> Result<(), OverBudget> {
        let mut mine = self.lock();
        // The connection itself is charged.
        self.user.take(wanted, u64::MAX)?;
        *mine = mine.plus(wanted);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Amounts> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn of_vm(regions: &[VmRegion]) -> Amounts {
    let pages = |region: &VmRegion| region.bytes() >> region.page_size.shift();
    let count = regions.len() as u64;
    VM.with(Resource::Regions, count)
        .with(Resource::Pages, regions.iter().map(pages).sum())
        // A long page map is one.
        .and(Resource::Mappings, count)
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut all = self.user.lock();
        *all = all.minus(&self.lock());
    }
}

#[cfg(test)]
#[path = "budgets/tests.rs"]
mod tests;
