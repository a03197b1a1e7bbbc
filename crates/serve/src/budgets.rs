//! What the clients of one user may take of a server: all that they cost is charged to one object.
//!
//! A user is known by the kernel (SO_PEERCRED). Whatever the clients of one user do, others find room, their handshakes
//! are worked on, and their lines are in the log.

mod limits;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thiserror::Error;

use crate::handshake::VmRegion;
use crate::log_limit::LogLimit;
use crate::native::label::VmLabel;
use crate::native::message::RefusedCode;
use crate::porter::Porter;

pub use limits::UserLimits;
pub(crate) use limits::{Amounts, Resource};

/// Lines of the log on refused clients of one user, within the period of a [`LogLimit`].
const REFUSAL_LINES: u32 = 100;

/// The same on its VMs: their ends, stalls and failures. All that a user may have end at once where a host is emptied, and none
/// of these lines is dropped.
const VM_LINES: u32 = 4096;

/// Users that are remembered although they have no connection: a client that connects again and again has the limits
/// of one.
const IDLE_USERS: usize = 1024;

const CONNECTION_DESCRIPTORS: u64 = 2;
const VM_DESCRIPTORS: u64 = 12;

/// The descriptors that a VM of one userfaultfd takes, with its connection.
pub const DESCRIPTORS_OF_A_VM: u64 = CONNECTION_DESCRIPTORS + VM_DESCRIPTORS + 1;

/// What a client costs from its connection on: a thread, whose stack and guard are mappings; the connection, and room for
/// what the thread opens before it knows of a VM.
const CONNECTION: Amounts = Amounts::NONE
    .with(Resource::Connections, 1)
    .with(Resource::Threads, 1)
    .with(Resource::Descriptors, CONNECTION_DESCRIPTORS)
    .with(Resource::Mappings, 2);

/// What a VM costs beside that, whatever its regions are: its pager's descriptors, those at the keeper, threads for
/// prefetch and for its working set, their stacks, and the page maps at the keeper.
const VM: Amounts = Amounts::NONE
    .with(Resource::Threads, 2)
    .with(Resource::Descriptors, VM_DESCRIPTORS)
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
            Resource::Descriptors | Resource::Closings => RefusedCode::Descriptors,
            Resource::Connections | Resource::Threads | Resource::Mappings | Resource::Bytes => {
                RefusedCode::Internal
            }
        }
    }
}

/// Messages with descriptors that are of no use to the server: processes that close these, of one user. Closing may hang.
const CLOSINGS: u64 = 4;

/// The users of a server.
#[derive(Debug)]
pub(crate) struct Budgets {
    limits: UserLimits,
    porter: Option<Arc<Porter>>,
    users: Mutex<HashMap<(u32, Kind), Arc<User>>>,
}

/// Whose clients are charged together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    /// A user's clients.
    Client,
    /// Those above a limit, which are looked at before they are let go: that one has too much does not keep a VMM
    /// from being killed.
    TurnedAway,
}

/// What one user has taken.
#[derive(Debug)]
struct User {
    limits: UserLimits,
    taken: Mutex<Amounts>,
    /// Held by the one handshake that is worked on.
    turn: Mutex<()>,
    /// Receives descriptors.
    porter: Option<Arc<Porter>>,
    /// Each is at its end when the descriptors of a message are closed.
    closings: Mutex<Vec<OwnedFd>>,
    refusals_logged: LogLimit,
    vms_logged: LogLimit,
}

impl User {
    fn new(limits: UserLimits, porter: Option<Arc<Porter>>) -> Self {
        Self {
            limits,
            taken: Mutex::default(),
            turn: Mutex::default(),
            porter,
            closings: Mutex::default(),
            refusals_logged: LogLimit::of(REFUSAL_LINES),
            vms_logged: LogLimit::of(VM_LINES),
        }
    }

    /// Those that have not ended.
    fn closings(&self) -> MutexGuard<'_, Vec<OwnedFd>> {
        let closings = self.closings.lock();
        let mut closings = closings.unwrap_or_else(PoisonError::into_inner);
        closings.retain(|socket| !is_at_end(socket));
        closings
    }

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
    /// What the client calls its VM. Here, since whatever is logged on a client is logged by way of its charge.
    label: OnceLock<VmLabel>,
}

impl Budgets {
    pub(crate) fn new(limits: UserLimits, porter: Option<Arc<Porter>>) -> Self {
        Self {
            limits,
            porter,
            users: Mutex::default(),
        }
    }

    /// Charges a connection to a user, of which it may have so many.
    ///
    /// # Errors
    /// [`OverBudget`] if the user has taken too much of anything.
    pub(crate) fn charge(&self, uid: u32, connections: usize) -> Result<Charge, OverBudget> {
        let user = self.user(uid, Kind::Client);
        user.take(&CONNECTION, connections as u64)?;
        Ok(Charge::new(user, CONNECTION))
    }

    /// The same for a client that is there already, whatever its user has taken.
    pub(crate) fn charge_anyway(&self, uid: u32) -> Charge {
        let user = self.user(uid, Kind::Client);
        user.add(&CONNECTION);
        Charge::new(user, CONNECTION)
    }

    fn user(&self, uid: u32, kind: Kind) -> Arc<User> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        if users.len() > IDLE_USERS {
            users.retain(|_, user| {
                // A charge, also one without a connection, has it.
                Arc::strong_count(user) > 1 || !user.closings().is_empty()
            });
        }
        let user = users.entry((uid, kind));
        let user = user.or_insert_with(|| Arc::new(User::new(self.limits, self.porter.clone())));
        Arc::clone(user)
    }

    /// What a client above a limit is charged to, without a connection.
    pub(crate) fn of_turned_away(&self, uid: u32) -> Charge {
        Charge::new(self.user(uid, Kind::TurnedAway), Amounts::NONE)
    }
}

impl Charge {
    fn new(user: Arc<User>, taken: Amounts) -> Self {
        Self {
            user,
            taken: Mutex::new(taken),
            label: OnceLock::new(),
        }
    }

    /// Names the client's VM in what is logged from now on.
    ///
    /// # Errors
    /// Its label, if it has one.
    pub(crate) fn set_label(&self, label: VmLabel) -> Result<(), VmLabel> {
        self.label.set(label)
    }

    pub(crate) fn label(&self) -> Option<&VmLabel> {
        self.label.get()
    }

    /// A client's charge at a server without others.
    #[cfg(test)]
    pub(crate) fn alone() -> Self {
        Budgets::new(UserLimits::default(), None).of_turned_away(0)
    }

    /// The process that receives descriptors, as long as there is one.
    pub(crate) fn porter(&self) -> Option<&Porter> {
        let porter = self.user.porter.as_deref();
        porter.filter(|porter| !porter.is_gone())
    }

    /// The user's messages whose descriptors are not closed yet, if there is room for another. One message of a user is
    /// received at a time.
    ///
    /// # Errors
    /// [`OverBudget`].
    pub(crate) fn closings(&self) -> Result<MutexGuard<'_, Vec<OwnedFd>>, OverBudget> {
        let closings = self.user.closings();
        let taken = closings.len() as u64;
        match taken < CLOSINGS {
            true => Ok(closings),
            false => Err(OverBudget {
                resource: Resource::Closings,
                limit: CLOSINGS,
                taken,
                wanted: 1,
            }),
        }
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

    /// The same of a line on one of this user's VMs.
    pub(crate) fn may_log_vm(&self) -> Option<u64> {
        self.user.vms_logged.pass()
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

/// Bytes that are held for a client. Given back when this is dropped.
#[derive(Debug)]
pub(crate) struct HeldBytes<'a> {
    charge: &'a Charge,
    bytes: u64,
}

impl<'a> HeldBytes<'a> {
    pub(crate) fn new(charge: &'a Charge) -> Self {
        Self { charge, bytes: 0 }
    }

    /// There are so many now.
    ///
    /// # Errors
    /// [`OverBudget`] if there is no room for more; they stay as many as they were.
    pub(crate) fn set(&mut self, bytes: usize) -> Result<(), OverBudget> {
        let bytes = bytes as u64;
        match bytes.checked_sub(self.bytes) {
            Some(0) => {}
            Some(more) => self.charge.take(Resource::Bytes, more)?,
            None => self.charge.give_back(Resource::Bytes, self.bytes - bytes),
        }
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for HeldBytes<'_> {
    fn drop(&mut self) {
        self.charge.give_back(Resource::Bytes, self.bytes);
    }
}

/// Whether the other end of a socket is closed.
fn is_at_end(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
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
