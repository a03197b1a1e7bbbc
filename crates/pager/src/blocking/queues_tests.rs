//! Of a pool's queues and threads: every short history, with condition variables that wake for no reason.

use std::collections::HashSet;

use super::*;

const KINDS: [Kind; 2] = [Kind::Urgent, Kind::Shared];

/// The threads of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Threads {
    starting: usize,
    asleep: usize,
    /// Asleep, and about to leave: the condition variable has chosen them.
    chosen: usize,
    busy: usize,
}

impl Threads {
    fn all(&self) -> usize {
        self.starting + self.asleep + self.chosen + self.busy
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Pool {
    queues: Queues<Urgency>,
    threads: [Threads; 2],
    /// Requests that may still come.
    to_come: usize,
    /// Threads whose start may still fail.
    failures: usize,
}

impl Pool {
    fn new(urgent_threads: usize, shared_threads: usize, to_come: usize, failures: usize) -> Self {
        let mut queues = Queues::new(PoolConfig {
            shared_threads,
            urgent_threads,
        });
        let threads = KINDS.map(|kind| Threads {
            starting: usize::from(queues.start_first(kind)),
            ..Threads::default()
        });
        Self {
            queues,
            threads,
            to_come,
            failures,
        }
    }

    fn threads(&mut self, kind: Kind) -> &mut Threads {
        &mut self.threads[kind as usize]
    }

    /// All that may come of a call.
    fn called(mut self, call: Option<Call>) -> Vec<Self> {
        match call {
            None => vec![self],
            Some(Call::Wake(kind)) => {
                let threads = self.threads(kind);
                // A thread that has left for no reason has taken the place of one that is on its way.
                if threads.asleep > 0 {
                    threads.asleep -= 1;
                    threads.chosen += 1;
                }
                vec![self]
            }
            Some(Call::Start(kind)) => {
                self.threads(kind).starting += 1;
                vec![self]
            }
        }
    }

    /// A thread that is awake takes a request, or goes to sleep.
    fn look(mut self, kind: Kind) -> Vec<Self> {
        match self.queues.pop(kind) {
            Some((urgency, call)) => {
                assert!(kind == Kind::Shared || urgency == Urgency::Urgent);
                self.threads(kind).busy += 1;
                self.called(call)
            }
            None => {
                self.queues.sleep(kind);
                self.threads(kind).asleep += 1;
                vec![self]
            }
        }
    }

    fn nexts(&self) -> Vec<Self> {
        let mut nexts = Vec::new();
        let with = |change: &dyn Fn(&mut Self)| {
            let mut next = self.clone();
            change(&mut next);
            next
        };
        if self.to_come > 0 {
            for urgency in [Urgency::Urgent, Urgency::Bulk] {
                let mut next = with(&|pool| pool.to_come -= 1);
                let call = next.queues.push(urgency, urgency);
                nexts.extend(next.called(call));
            }
        }
        for urgency in [Urgency::Urgent, Urgency::Bulk] {
            let mut next = self.clone();
            if next.queues.remove(|&waiting| waiting == urgency).is_some() {
                nexts.push(next);
            }
        }
        for kind in KINDS {
            let threads = self.threads[kind as usize];
            let leaves = |change: &dyn Fn(&mut Threads)| {
                let mut next = with(&|pool| change(pool.threads(kind)));
                next.queues.leave(kind);
                next.look(kind)
            };
            if threads.starting > 0 {
                nexts.extend(leaves(&|threads| threads.starting -= 1));
            }
            // Not the first of its kind: without it there is no pool.
            if threads.starting > 0 && self.failures > 0 && threads.all() > 1 {
                let mut failed = with(&|pool| pool.failures -= 1);
                failed.threads(kind).starting -= 1;
                let call = failed.queues.not_started(kind);
                assert!(!matches!(call, Some(Call::Start(_))));
                nexts.extend(failed.called(call));
            }
            if threads.chosen > 0 {
                nexts.extend(leaves(&|threads| threads.chosen -= 1));
            }
            if threads.asleep > 0 {
                nexts.extend(leaves(&|threads| threads.asleep -= 1));
            }
            if threads.busy > 0 {
                nexts.extend(with(&|pool| pool.threads(kind).busy -= 1).look(kind));
            }
        }
        nexts
    }

    /// What has to hold when nobody is on the way to the queues.
    fn check(&self) {
        let Self {
            queues, threads, ..
        } = self;
        let [urgent, shared] = threads;
        for (crew, threads) in [(&queues.urgent_crew, urgent), (&queues.shared_crew, shared)] {
            let sleeping = threads.starting + threads.asleep + threads.chosen;
            assert_eq!(crew.idle + crew.called, sleeping, "{self:?}");
            assert_eq!(crew.threads, threads.all(), "{self:?}");
            assert!(crew.threads <= crew.most, "{self:?}");
        }
        let on_the_way = threads.map(|threads| threads.starting + threads.chosen);
        // A start that failed leaves a request to the threads that there are.
        let could_start = self.failures == FAILURES;
        let free = |crew: &Crew| match could_start {
            true => crew.idle + (crew.most - crew.threads),
            false => crew.idle,
        };
        let (free_urgent, free_shared) = (free(&queues.urgent_crew), free(&queues.shared_crew));
        let [for_urgent, for_any] = on_the_way;
        let bulk = queues.bulk.len();
        assert!(bulk <= for_any || free_shared == 0, "{self:?}");
        let for_urgent = for_urgent + for_any.saturating_sub(bulk);
        let is_free = free_urgent + free_shared > 0;
        assert!(queues.urgent.len() <= for_urgent || !is_free, "{self:?}");
    }
}

const FAILURES: usize = 1;

#[test]
fn no_request_waits_while_a_thread_is_free() {
    for (urgent_threads, shared_threads) in [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)] {
        let first = Pool::new(urgent_threads, shared_threads, 4, FAILURES);
        let mut seen = HashSet::from([first.clone()]);
        let mut left = vec![first];
        while let Some(pool) = left.pop() {
            pool.check();
            for next in pool.nexts() {
                if seen.insert(next.clone()) {
                    left.push(next);
                }
            }
        }
        assert!(seen.len() > 90, "{}", seen.len());
    }
}
