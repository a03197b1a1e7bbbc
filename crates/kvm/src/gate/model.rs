//! Every interleaving of the gate's protocol with two vCPUs and two committers, on a model whose
//! steps are the atomic operations and the critical sections of `gate.rs`.

use std::collections::HashSet;

const VCPUS: usize = 2;
const COMMITTERS: usize = 2;
/// Ioctls that each vCPU does.
const IOCTLS: u8 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Vcpu {
    /// About to take its seat.
    Enter,
    /// Found it closed; about to take the mutex.
    Slow,
    /// Waits for `opened`.
    Waiting,
    /// In an ioctl.
    Inside,
    /// Left a closed seat; about to notify.
    Notify,
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Committer {
    /// Waits for its turn.
    Turn,
    /// Has the turn; waits until all who were admitted have entered.
    Close,
    /// Closed the gate down to this seat, under the mutex.
    Closing(usize),
    /// Looks at the seats under the mutex.
    Look,
    /// Waits for `left`.
    Waiting,
    Updating,
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    words: [(bool, u8); VCPUS],
    vcpus: [(Vcpu, u8); VCPUS],
    committers: [Committer; COMMITTERS],
    turn: Option<usize>,
    mutex: Option<usize>,
    closed: bool,
    waiting: u8,
    admitted: u8,
}

/// What is done wrong on purpose, to see that the model would find it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// Whoever leaves looks at `closed` before the word changes, not in the same operation.
    LooksBeforeLeaving,
    /// Entering does not look at the bit.
    EntersClosed,
}

impl State {
    fn start() -> Self {
        Self {
            words: [(false, 0); VCPUS],
            vcpus: [(Vcpu::Enter, IOCTLS); VCPUS],
            committers: [Committer::Turn; COMMITTERS],
            turn: None,
            mutex: None,
            closed: false,
            waiting: 0,
            admitted: 0,
        }
    }

    fn wake_committers(&mut self) {
        for committer in &mut self.committers {
            if *committer == Committer::Waiting {
                *committer = Committer::Look;
            }
        }
    }

    /// What vCPU `v` can do next; None if it must wait. A critical section is one step, possible
    /// while nobody is in the middle of a longer one.
    fn vcpu_step(&self, v: usize, flaw: Flaw) -> Option<State> {
        let mut next = self.clone();
        let (closed, count) = self.words[v];
        let (at, left) = self.vcpus[v];
        next.vcpus[v].0 = match at {
            Vcpu::Enter if closed && flaw != Flaw::EntersClosed => Vcpu::Slow,
            Vcpu::Enter => {
                next.words[v].1 = count + 1;
                Vcpu::Inside
            }
            Vcpu::Slow if self.mutex.is_some() => return None,
            Vcpu::Slow if self.closed => {
                next.waiting += 1;
                Vcpu::Waiting
            }
            Vcpu::Slow => {
                assert!(!closed, "the bit and `closed` agree under the mutex");
                next.words[v].1 = count + 1;
                Vcpu::Inside
            }
            Vcpu::Waiting if self.closed || self.mutex.is_some() => return None,
            Vcpu::Waiting => {
                assert!(!closed, "the gate stays open for whoever was admitted");
                next.words[v].1 = count + 1;
                next.admitted -= 1;
                Vcpu::Inside
            }
            Vcpu::Inside => {
                next.words[v].1 = count - 1;
                next.vcpus[v].1 = left - 1;
                let saw_closed = closed && flaw != Flaw::LooksBeforeLeaving;
                match left {
                    _ if saw_closed && count == 1 => Vcpu::Notify,
                    1 => Vcpu::Done,
                    _ => Vcpu::Enter,
                }
            }
            Vcpu::Notify if self.mutex.is_some() => return None,
            Vcpu::Notify => {
                next.wake_committers();
                if left == 0 { Vcpu::Done } else { Vcpu::Enter }
            }
            Vcpu::Done => return None,
        };
        Some(next)
    }

    fn committer_step(&self, c: usize) -> Option<State> {
        let mut next = self.clone();
        next.committers[c] = match self.committers[c] {
            Committer::Turn if self.turn.is_some() => return None,
            Committer::Turn => {
                next.turn = Some(c);
                Committer::Close
            }
            Committer::Close if self.mutex.is_some() || self.admitted > 0 => return None,
            Committer::Close => {
                next.closed = true;
                next.mutex = Some(c);
                Committer::Closing(0)
            }
            // Words change one by one, with the mutex held: vCPUs that need no mutex interleave.
            Committer::Closing(VCPUS) => {
                next.mutex = None;
                Committer::Look
            }
            Committer::Closing(seat) => {
                next.words[seat].0 = true;
                Committer::Closing(seat + 1)
            }
            Committer::Look if self.mutex.is_some() => return None,
            Committer::Look if self.words.iter().any(|(_, count)| *count > 0) => Committer::Waiting,
            Committer::Look => Committer::Updating,
            Committer::Waiting => return None,
            Committer::Updating if self.mutex.is_some() => return None,
            Committer::Updating => {
                for word in &mut next.words {
                    word.0 = false;
                }
                next.closed = false;
                next.admitted = std::mem::take(&mut next.waiting);
                next.turn = None;
                Committer::Done
            }
            Committer::Done => return None,
        };
        Some(next)
    }

    fn is_sound(&self) -> bool {
        let updating = self.committers.contains(&Committer::Updating);
        let inside = self.vcpus.iter().any(|(at, _)| *at == Vcpu::Inside);
        !(updating && inside)
    }

    fn is_over(&self) -> bool {
        self.vcpus.iter().all(|(at, _)| *at == Vcpu::Done)
            && self.committers.iter().all(|at| *at == Committer::Done)
    }
}

/// Visits every state; the number of states, or the first bad one.
fn explore(flaw: Flaw) -> Result<usize, String> {
    let mut seen = HashSet::from([State::start()]);
    let mut pending = vec![State::start()];
    while let Some(state) = pending.pop() {
        if !state.is_sound() {
            return Err(format!("a vCPU is inside during an update: {state:?}"));
        }
        let vcpus = (0..VCPUS).filter_map(|v| state.vcpu_step(v, flaw));
        let committers = (0..COMMITTERS).filter_map(|c| state.committer_step(c));
        let next: Vec<_> = vcpus.chain(committers).collect();
        if next.is_empty() && !state.is_over() {
            return Err(format!("everybody waits: {state:?}"));
        }
        for state in next {
            if seen.insert(state.clone()) {
                pending.push(state);
            }
        }
    }
    Ok(seen.len())
}

#[test]
fn no_interleaving_is_unsound_or_stuck() {
    let states = explore(Flaw::None).unwrap_or_else(|state| panic!("{state}"));
    assert!(
        states > 1000,
        "{states} states are too few to mean anything"
    );
}

#[test]
fn the_model_finds_flaws() {
    let stuck = explore(Flaw::LooksBeforeLeaving).expect_err("a lost wake-up");
    assert!(stuck.starts_with("everybody waits"), "{stuck}");
    let unsound = explore(Flaw::EntersClosed).expect_err("nothing keeps them out");
    assert!(unsound.starts_with("a vCPU is inside"), "{unsound}");
}
