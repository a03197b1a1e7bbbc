//! What waits in a pool, and which of its threads are called for it.
//!
//! A pure state machine: it takes no lock, starts no thread and wakes none, but says who is to be called. One rule holds
//! after each step, and a test of this file goes through all short histories: **no request waits while a thread that
//! could serve it sleeps, or could be started, and nobody was called for it.** After a thread could not be started, the
//! request waits for those that there are. One thread is called for a request, and not all of them: most would find nothing.

use std::collections::VecDeque;

use pagetide_memory::Urgency;

use super::PoolConfig;

/// What a caller does when it has let go of the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// Wakes one thread of this kind.
    Wake(Kind),
    /// Starts a thread of this kind.
    Start(Kind),
}

/// Which requests a thread serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Urgent ones, so that these never wait for a bulk read.
    Urgent,
    /// Any, urgent ones first.
    Shared,
}

/// The threads of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Crew {
    most: usize,
    threads: usize,
    /// Threads that sleep and were not called.
    idle: usize,
    /// Threads that were called, or started, and have not looked for a request since.
    called: usize,
}

impl Crew {
    fn new(most: usize) -> Self {
        Self {
            most,
            ..Self::default()
        }
    }

    /// Calls a thread that sleeps, if there is one.
    fn wake(&mut self) -> bool {
        let is_idle = self.idle > 0;
        if is_idle {
            self.idle -= 1;
            self.called += 1;
        }
        is_idle
    }

    /// Counts one more thread, which looks for a request as it begins.
    fn start(&mut self) -> bool {
        let has_room = self.threads < self.most;
        if has_room {
            self.threads += 1;
            self.called += 1;
        }
        has_room
    }

    /// A thread has left its sleep: one that was called, or for no reason, which condition variables permit. The latter
    /// goes in the place of the one that was called, which then finds that its place is among the idle ones.
    fn leave(&mut self) {
        match self.called {
            0 => self.idle -= 1,
            _ => self.called -= 1,
        }
    }
}

/// The requests of type `T` that wait, and the threads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Queues<T> {
    urgent: VecDeque<T>,
    bulk: VecDeque<T>,
    urgent_crew: Crew,
    shared_crew: Crew,
}

impl<T> Queues<T> {
    pub(super) fn new(config: PoolConfig) -> Self {
        Self {
            urgent: VecDeque::new(),
            bulk: VecDeque::new(),
            urgent_crew: Crew::new(config.urgent_threads),
            shared_crew: Crew::new(config.shared_threads),
        }
    }

    fn crew(&mut self, kind: Kind) -> &mut Crew {
        match kind {
            Kind::Urgent => &mut self.urgent_crew,
            Kind::Shared => &mut self.shared_crew,
        }
    }

    /// Adds a request.
    pub(super) fn push(&mut self, request: T, urgency: Urgency) -> Option<Call> {
        match urgency {
            Urgency::Urgent => self.urgent.push_back(request),
            Urgency::Bulk => self.bulk.push_back(request),
        }
        self.call(true)
    }

    /// The next request for a thread of this kind, which is awake. For what it leaves, another one may have to be called.
    pub(super) fn pop(&mut self, kind: Kind) -> Option<(T, Option<Call>)> {
        let bulk = match kind {
            Kind::Urgent => None,
            Kind::Shared => Some(&mut self.bulk),
        };
        let urgent = self.urgent.pop_front();
        let request = urgent.or_else(|| bulk.and_then(VecDeque::pop_front))?;
        Some((request, self.call(true)))
    }

    /// Who is called for requests for which nobody was: a thread that sleeps, or a new one if there may be one.
    fn call(&mut self, may_start: bool) -> Option<Call> {
        let (urgent, bulk) = (self.urgent.len(), self.bulk.len());
        let for_bulk = self.shared_crew.called;
        if urgent > self.urgent_crew.called + for_bulk.saturating_sub(bulk) {
            for kind in [Kind::Urgent, Kind::Shared] {
                if self.crew(kind).wake() {
                    return Some(Call::Wake(kind));
                }
            }
            for kind in [Kind::Urgent, Kind::Shared] {
                if may_start && self.crew(kind).start() {
                    return Some(Call::Start(kind));
                }
            }
        }
        if bulk > for_bulk {
            if self.shared_crew.wake() {
                return Some(Call::Wake(Kind::Shared));
            }
            if may_start && self.shared_crew.start() {
                return Some(Call::Start(Kind::Shared));
            }
        }
        None
    }

    /// Counts the first thread of this kind, which is started before there are requests. False, if there may be none, or is
    /// one.
    pub(super) fn start_first(&mut self, kind: Kind) -> bool {
        self.crew(kind).threads == 0 && self.crew(kind).start()
    }

    /// A thread that was to be started could not be. Another one may have come to sleep meanwhile, for which nobody has
    /// called: the new one was on its way.
    pub(super) fn not_started(&mut self, kind: Kind) -> Option<Call> {
        let crew = self.crew(kind);
        crew.threads -= 1;
        crew.leave();
        self.call(false)
    }

    /// A thread ends that is awake.
    pub(super) fn end(&mut self, kind: Kind) {
        self.crew(kind).threads -= 1;
    }

    /// A thread goes to sleep.
    pub(super) fn sleep(&mut self, kind: Kind) {
        self.crew(kind).idle += 1;
    }

    /// A thread has left its sleep, or begins.
    pub(super) fn leave(&mut self, kind: Kind) {
        self.crew(kind).leave();
    }

    /// Takes out the first request of which `is_it` is true.
    pub(super) fn remove(&mut self, is_it: impl Fn(&T) -> bool) -> Option<T> {
        for queue in [&mut self.urgent, &mut self.bulk] {
            if let Some(index) = queue.iter().position(&is_it) {
                return queue.remove(index);
            }
        }
        None
    }

    /// Takes all requests out.
    pub(super) fn clear(&mut self) -> Vec<T> {
        let (urgent, bulk) = (self.urgent.drain(..), self.bulk.drain(..));
        urgent.chain(bulk).collect()
    }
}

#[cfg(test)]
#[path = "queues_tests.rs"]
mod tests;
