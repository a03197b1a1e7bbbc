//! The gate in front of a VM's vCPU ioctls: how a slot transaction knows that no vCPU is inside, and
//! nobody who fills stage-2 tables either.
//!
//! Each vCPU has one [`Seat`], and so has each population ([`crate::populate`]), which the table
//! calls a vCPU as well. A seat is one atomic word: how many ioctls are in flight, and one bit,
//! CLOSED. Everything that matters is decided by the order of changes to that one word, which all
//! threads agree on; no reasoning about two variables is needed.
//!
//! | who | does | when |
//! |---|---|---|
//! | a vCPU's thread | 0 to 1, or n to n+1, by compare-and-swap, never if CLOSED is set | before an ioctl |
//! | the same | n to n-1, keeping CLOSED, and notifies if CLOSED was set and n is now 0 | after it |
//! | a committer | sets CLOSED | when it closes the gate |
//! | the same | clears CLOSED | when it opens the gate |
//!
//! *Why nobody is inside during an update.* Once CLOSED is set in a word, its count can only fall:
//! entering is a compare-and-swap that expects CLOSED to be clear. The committer waits until it has
//! read 0 in every word, so from then until it clears CLOSED every count is 0. Reading the 0 that a
//! leaving thread wrote (release, acquire) puts the whole ioctl before the update; entering on the
//! word that the committer cleared puts the whole update before the next ioctl.
//!
//! *Why no wake-up is lost.* Whoever leaves learns from the same atomic operation whether CLOSED
//! was set. If it was not, the committer's setting comes later and returns the count without it. If
//! it was, the leaver takes the mutex before it notifies, so that the committer has either not
//! looked yet or is waiting.
//!
//! *Why nobody waits in a circle.* A committer waits for threads that are in an ioctl, and for those
//! alone; an ioctl waits for no committer, and no code of a caller runs while a seat is taken. A
//! thread that waits at the gate, or for its turn to commit, has no seat.
//!
//! *Why nobody starves.* Threads that waited when the gate opened enter before it closes again.
//!
//! The uncontended cost is one atomic operation on a cache line of the vCPU's own on the way in, and
//! one on the way out. `docs/decisions/0006-quiesce-gate.md` says what else was considered.

use std::sync::atomic::fence;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;

use crate::sync::{AtomicU32, Condvar, Mutex, MutexGuard, Ordering};

/// The bit that keeps new ioctls out; the bits below it count those in flight.
const CLOSED: u32 = 1 << 31;

/// The first pause before those that are still inside are kicked again, and the longest one. One
/// kick is enough for KVM_RUN (see [`crate::kick`]); other ioctls have no `immediate_exit`.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// One vCPU's word.
#[derive(Debug, Default)]
pub(crate) struct Seat(CachePadded<AtomicU32>);

impl Seat {
    /// Takes the seat if the gate is open and nobody is inside, by one atomic operation.
    #[inline]
    fn try_enter(&self) -> bool {
        self.0
            .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    /// Takes the seat beside others; false if the gate is closed.
    fn try_enter_beside(&self) -> bool {
        self.0
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |word| {
                (word & CLOSED == 0).then_some(word + 1)
            })
            .is_ok()
    }

    /// How many ioctls are in flight. Acquire: if none, all that they did has happened.
    fn inside(&self) -> u32 {
        self.0.load(Ordering::Acquire) & !CLOSED
    }

    /// Keeps new ioctls out; whether some are in flight.
    fn close(&self) -> bool {
        self.0.fetch_or(CLOSED, Ordering::AcqRel) & !CLOSED != 0
    }

    fn open(&self) {
        self.0.fetch_and(!CLOSED, Ordering::Release);
    }
}

/// What has a seat.
pub(crate) trait Occupant: Send + Sync {
    fn seat(&self) -> &Seat;
}

#[derive(Debug)]
struct State<O: ?Sized> {
    occupants: Vec<Weak<O>>,
    closed: bool,
    /// Threads that wait for the gate to open.
    waiting: usize,
    /// Threads that waited when it opened and have not entered yet.
    admitted: usize,
}

/// The gate of one VM.
#[derive(Debug)]
pub(crate) struct Gate<O: ?Sized> {
    state: Mutex<State<O>>,
    /// Somebody left a closed seat, or the last admitted thread entered: for committers.
    left: Condvar,
    /// The gate was opened: for vCPUs' threads.
    opened: Condvar,
}

impl<O: ?Sized> Default for Gate<O> {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                occupants: Vec::new(),
                closed: false,
                waiting: 0,
                admitted: 0,
            }),
            left: Condvar::new(),
            opened: Condvar::new(),
        }
    }
}

impl<O: Occupant + ?Sized> Gate<O> {
    /// Gives a new vCPU or population its seat, closed if the gate is.
    pub(crate) fn add(&self, occupant: &Arc<O>) {
        let mut state = self.state();
        if state.closed {
            occupant.seat().close();
        }
        state.occupants.retain(|known| known.strong_count() > 0);
        state.occupants.push(Arc::downgrade(occupant));
    }

    /// Whether anybody has a seat, inside or not.
    pub(crate) fn has_seats(&self) -> bool {
        let state = self.state();
        state.occupants.iter().any(|known| known.strong_count() > 0)
    }

    /// Takes a seat, waiting as long as the gate is closed. No code of a caller may run before the
    /// seat is left again.
    #[inline]
    pub(crate) fn enter(&self, seat: &Seat) {
        if !seat.try_enter() {
            self.enter_slowly(seat);
        }
    }

    #[cold]
    fn enter_slowly(&self, seat: &Seat) {
        let mut state = self.state();
        let waited = state.closed;
        if waited {
            state.waiting += 1;
            while state.closed {
                state = wait(&self.opened, state);
            }
        }
        // The bits and `closed` change together under the mutex, which is held here.
        let entered = seat.try_enter_beside();
        debug_assert!(entered, "the gate is open");
        if waited {
            state.admitted -= 1;
            if state.admitted == 0 {
                self.left.notify_all();
            }
        }
    }

    /// Leaves a seat. Whether the gate was closed meanwhile, so that a committer may have kicked
    /// this vCPU.
    #[inline]
    pub(crate) fn leave(&self, seat: &Seat) -> bool {
        let word = seat.0.fetch_sub(1, Ordering::AcqRel);
        if word & CLOSED == 0 {
            return false;
        }
        if word == CLOSED | 1 {
            self.tell_committer();
        }
        true
    }

    #[cold]
    fn tell_committer(&self) {
        // Taken and dropped: the committer has not looked at the word yet, or it waits.
        drop(self.state());
        self.left.notify_all();
    }

    /// Closes the gate and waits until no ioctl is in flight. `kick` gets those that are inside and
    /// is to make them leave; its second argument says how often it was called before.
    ///
    /// Callers must not overlap: [`crate::vm::Inner`] has a mutex for that.
    pub(crate) fn close(&self, mut kick: impl FnMut(&[Arc<O>], u32)) -> Closed<'_, O> {
        let mut state = self.state();
        while state.admitted > 0 {
            state = wait(&self.left, state);
        }
        debug_assert!(!state.closed, "committers take turns");
        state.closed = true;
        // From here on the guard opens the gate again, also if this thread panics.
        let mut closed = Closed {
            gate: self,
            found_inside: 0,
            since: Instant::now(),
        };
        let mut inside: Vec<_> = state
            .occupants
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|occupant| occupant.seat().close())
            .collect();
        // Who is gone left before it went: its last reference was given up with Release.
        fence(Ordering::Acquire);
        closed.found_inside = inside.len();
        let mut pause = FIRST_PAUSE;
        let mut kicks = 0;
        while !inside.is_empty() {
            drop(state);
            kick(&inside, kicks);
            kicks += 1;
            state = self.wait_until_left(&mut inside, pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        closed
    }

    /// Waits until those that are inside have left, or for `limit` in which none has, and keeps those
    /// that have not.
    fn wait_until_left(
        &self,
        inside: &mut Vec<Arc<O>>,
        limit: Duration,
    ) -> MutexGuard<'_, State<O>> {
        let mut state = self.state();
        let mut is_over = false;
        loop {
            inside.retain(|occupant| occupant.seat().inside() > 0);
            if is_over || inside.is_empty() {
                return state;
            }
            let (guard, result) = self
                .left
                .wait_timeout(state, limit)
                .unwrap_or_else(PoisonError::into_inner);
            state = guard;
            is_over = result.timed_out();
        }
    }

    fn state(&self) -> MutexGuard<'_, State<O>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn wait<'state, O: ?Sized>(
    condition: &Condvar,
    state: MutexGuard<'state, State<O>>,
) -> MutexGuard<'state, State<O>> {
    condition
        .wait(state)
        .unwrap_or_else(PoisonError::into_inner)
}

/// A closed gate with nobody inside. Dropping it opens the gate.
#[derive(Debug)]
pub(crate) struct Closed<'gate, O: Occupant + ?Sized> {
    gate: &'gate Gate<O>,
    /// How many vCPUs and populations were inside when the gate was closed, and were kicked.
    pub(crate) found_inside: usize,
    /// When it was closed.
    pub(crate) since: Instant,
}

impl<O: Occupant + ?Sized> Drop for Closed<'_, O> {
    fn drop(&mut self) {
        let mut state = self.gate.state();
        for occupant in state.occupants.iter().filter_map(Weak::upgrade) {
            occupant.seat().open();
        }
        state.closed = false;
        state.admitted = std::mem::take(&mut state.waiting);
        drop(state);
        self.gate.opened.notify_all();
    }
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
