//! The gate in front of a VM's vCPU ioctls: it ensures that no vCPU and no populating thread is inside
//! an ioctl while a slot transaction updates the slots.
//!
//! Each vCPU has one [`InFlight`], and so has each population ([`crate::populate`]), which the table
//! below includes under vCPUs. An `InFlight` is one atomic word: the number of ioctls in flight, and
//! two bits, CLOSED and GIVEN_UP. The order of changes to that single word decides everything, and all threads
//! agree on that order; no argument involves two variables.
//!
//! | thread | change | time |
//! |---|---|---|
//! | a vCPU's thread | 0 to 1, or n to n+1, by compare-and-swap, never if CLOSED is set | before an ioctl |
//! | the same | n to n-1, preserving CLOSED; notifies if CLOSED was set and n is now 0 | after it |
//! | a committer | sets CLOSED | when it closes the gate |
//! | the same | clears CLOSED | when it opens the gate |
//! | the same | clears CLOSED, and sets GIVEN_UP if an ioctl is in flight | when it gives up waiting for it |
//! | a vCPU's thread | clears GIVEN_UP | when it leaves: it may have been kicked |
//!
//! *No ioctl overlaps an update.* Once CLOSED is set in a word, its count can only fall: entering is a
//! compare-and-swap that expects CLOSED to be clear. The committer waits until it has read 0 in every
//! word; from then until it clears CLOSED, every count is 0. Reading the 0 that a leaving thread wrote
//! (release, acquire) orders that thread's ioctl before the update; entering on the word that the
//! committer cleared orders the update before the next ioctl.
//!
//! *No wake-up is lost.* The atomic operation of a leaving thread also returns whether CLOSED was set.
//! If it was not, the committer sets it later and sees the decreased count. If it was, the leaving
//! thread takes the mutex before it notifies, so the committer either has not read the word yet or is
//! waiting.
//!
//! *There is no deadlock.* A committer waits only for threads that are in an ioctl; an ioctl waits for
//! no committer, and no callback runs between entering and leaving. An ioctl may wait for a page that never comes:
//! the committer gives up, and what it has kicked knows so when it leaves. A thread that waits at the gate, or
//! for its turn to commit, is not counted.
//!
//! *There is no starvation.* Threads that waited when the gate opened enter before it closes again.
//!
//! Without contention, entering and leaving cost one atomic operation each, on a cache line of the
//! vCPU. `docs/decisions/0006-quiesce-gate.md` lists the alternatives.

use std::sync::atomic::fence;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;

use crate::sync::{AtomicU32, Condvar, Mutex, MutexGuard, Ordering};

/// The bit that prevents new ioctls.
const CLOSED: u32 = 1 << 31;
/// A committer has kicked, and waits no more. The bits below it count the ioctls in flight.
const GIVEN_UP: u32 = 1 << 30;
/// Not the count.
const BITS: u32 = CLOSED | GIVEN_UP;

/// The first and the longest pause before threads that are still inside are kicked again. One kick
/// suffices for KVM_RUN (see [`crate::kick`]); other ioctls have no `immediate_exit`.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// The ioctls in flight of one vCPU or population, on separate cache lines.
#[derive(Debug, Default)]
pub(crate) struct InFlight(CachePadded<AtomicU32>);

impl InFlight {
    /// Enters if the gate is open and no ioctl is in flight, by one atomic operation.
    #[inline]
    fn try_enter(&self) -> bool {
        self.0
            .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    /// Enters in addition to other ioctls; false if the gate is closed.
    fn try_enter_beside(&self) -> bool {
        self.0
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |word| {
                (word & CLOSED == 0).then_some(word + 1)
            })
            .is_ok()
    }

    /// The number of ioctls in flight. Acquire: if it is 0, all of their effects are visible.
    fn inside(&self) -> u32 {
        self.0.load(Ordering::Acquire) & !BITS
    }

    /// Prevents new ioctls; returns whether some are in flight.
    fn close(&self) -> bool {
        self.0.fetch_or(CLOSED, Ordering::AcqRel) & !BITS != 0
    }

    /// Permits new ioctls again although some are in flight that were kicked.
    fn give_up(&self) {
        let next = |word: u32| match word & !BITS {
            0 => Some(word & !CLOSED),
            _ => Some(word & !CLOSED | GIVEN_UP),
        };
        // `next` never refuses.
        let _ = self
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
    }

    fn open(&self) {
        self.0.fetch_and(!CLOSED, Ordering::Release);
    }
}

/// A vCPU or population that passes through the gate.
pub(crate) trait Participant: Send + Sync {
    fn in_flight(&self) -> &InFlight;
}

#[derive(Debug)]
struct State<O: ?Sized> {
    participants: Vec<Weak<O>>,
    closed: bool,
    /// Number of threads that wait for the gate to open.
    waiting: usize,
    /// Number of threads that waited when it opened and have not entered yet.
    admitted: usize,
}

/// The gate of one VM.
#[derive(Debug)]
pub(crate) struct Gate<O: ?Sized> {
    state: Mutex<State<O>>,
    /// The last ioctl at a closed gate ended, or the last admitted thread entered: for committers.
    left: Condvar,
    /// The gate was opened: for vCPUs' threads.
    opened: Condvar,
}

impl<O: ?Sized> Default for Gate<O> {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                participants: Vec::new(),
                closed: false,
                waiting: 0,
                admitted: 0,
            }),
            left: Condvar::new(),
            opened: Condvar::new(),
        }
    }
}

impl<O: Participant + ?Sized> Gate<O> {
    /// Adds a new vCPU or population, closed if the gate is closed.
    pub(crate) fn add(&self, participant: &Arc<O>) {
        let mut state = self.state();
        if state.closed {
            participant.in_flight().close();
        }
        state.participants.retain(|known| known.strong_count() > 0);
        state.participants.push(Arc::downgrade(participant));
    }

    /// Whether there is any vCPU or population, inside an ioctl or not.
    pub(crate) fn has_participants(&self) -> bool {
        let state = self.state();
        state
            .participants
            .iter()
            .any(|known| known.strong_count() > 0)
    }

    /// Enters; waits as long as the gate is closed. No callback may run before [`Self::leave`].
    #[inline]
    pub(crate) fn enter(&self, in_flight: &InFlight) {
        if !in_flight.try_enter() {
            self.enter_slowly(in_flight);
        }
    }

    #[cold]
    fn enter_slowly(&self, in_flight: &InFlight) {
        let mut state = self.state();
        let waited = state.closed;
        if waited {
            state.waiting += 1;
            while state.closed {
                state = wait(&self.opened, state);
            }
        }
        // The CLOSED bits and `closed` change together under the mutex, which is held here.
        let entered = in_flight.try_enter_beside();
        debug_assert!(entered, "the gate is open");
        if waited {
            state.admitted -= 1;
            if state.admitted == 0 {
                self.left.notify_all();
            }
        }
    }

    /// Leaves. Returns whether the gate was closed meanwhile, in which case a committer may have kicked
    /// this vCPU.
    #[inline]
    pub(crate) fn leave(&self, in_flight: &InFlight) -> bool {
        let word = in_flight.0.fetch_sub(1, Ordering::AcqRel);
        if word & BITS == 0 {
            return false;
        }
        if word & GIVEN_UP != 0 {
            in_flight.0.fetch_and(!GIVEN_UP, Ordering::AcqRel);
        }
        if word & !GIVEN_UP == CLOSED | 1 {
            self.notify_committer();
        }
        true
    }

    #[cold]
    fn notify_committer(&self) {
        // Taken and released: the committer has not read the word yet, or it waits.
        drop(self.state());
        self.left.notify_all();
    }

    /// Closes the gate and waits until no ioctl is in flight. `kick` receives the participants that are
    /// inside and makes them leave; its second argument is the number of earlier calls.
    ///
    /// Calls must not overlap: [`crate::vm::Inner`] has a mutex for that.
    ///
    /// # Errors
    /// After `limit`, the participants that are still inside: the gate is open again.
    pub(crate) fn close(
        &self,
        limit: Duration,
        mut kick: impl FnMut(&[Arc<O>], u32),
    ) -> Result<Closed<'_, O>, Vec<Arc<O>>> {
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
            .participants
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|participant| participant.in_flight().close())
            .collect();
        // A dropped participant left before: its last reference was released with Release.
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
            if !inside.is_empty() && closed.since.elapsed() >= limit {
                for participant in &inside {
                    participant.in_flight().give_up();
                }
                drop(state);
                drop(closed);
                return Err(inside);
            }
        }
        Ok(closed)
    }

    /// Waits until the participants in `inside` have left, or until `limit` passes without any leaving;
    /// removes those that have left.
    fn wait_until_left(
        &self,
        inside: &mut Vec<Arc<O>>,
        limit: Duration,
    ) -> MutexGuard<'_, State<O>> {
        let mut state = self.state();
        let mut is_over = false;
        loop {
            inside.retain(|participant| participant.in_flight().inside() > 0);
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

/// A closed gate with no ioctl in flight. Dropping it opens the gate.
#[derive(Debug)]
pub(crate) struct Closed<'gate, O: Participant + ?Sized> {
    gate: &'gate Gate<O>,
    /// The number of vCPUs and populations that were inside when the gate was closed, and were kicked.
    pub(crate) found_inside: usize,
    /// The time at which it was closed.
    pub(crate) since: Instant,
}

impl<O: Participant + ?Sized> Drop for Closed<'_, O> {
    fn drop(&mut self) {
        let mut state = self.gate.state();
        for participant in state.participants.iter().filter_map(Weak::upgrade) {
            participant.in_flight().open();
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
