//! Which thread installs an answer: the one that completes the request, one that serves the pager's descriptor, or
//! one that waits for a page and helps its source.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use pagetide_memory::{Access, Backing, FaultInAccess, GuestAddress, PageState, Region};
use pagetide_pager::{
    Content, Contents, Counters, Helper, InFlightLimits, InstalledBy, Mode, Pager, Pool,
    PoolConfig, Prefetch, PrefetchConfig, PrefetchPlan, ReaderConfig, Readers, RegionConfig,
    RegionId, Request, Resolution, RetryPolicy, Serving, Source, Urgency,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::manual::*;
use support::{assert_no_trouble, has_unix_sockets};

const PAGES: u64 = 32;

/// A region whose answers a serving thread installs. Nothing serves yet.
struct HandedOver {
    region: Arc<Region>,
    pager: Arc<Pager>,
    id: RegionId,
    serving: Serving,
}

impl HandedOver {
    fn new(mode: Mode, backing: Backing, source: Arc<dyn Source>) -> Option<Self> {
        Self::with(mode, backing, source, |config| config)
    }

    fn with(
        mode: Mode,
        backing: Backing,
        source: Arc<dyn Source>,
        set: impl FnOnce(RegionConfig) -> RegionConfig,
    ) -> Option<Self> {
        let region = region(PAGES, backing)?;
        let pager = Pager::new().unwrap();
        let contents = Contents::Source(source);
        let config = RegionConfig::local(Arc::clone(&region), mode, contents)
            .retry_policy(ONE_ATTEMPT)
            .installed_by(InstalledBy::Serving);
        let id = pager.add(set(config)).unwrap();
        let serving = Serving::new(&pager, 8);
        Some(Self {
            region,
            pager,
            id,
            serving,
        })
    }

    /// A thread that touches a page, and the request that this leads to.
    fn touch(
        &mut self,
        source: &ManualSource,
        page: u64,
        touch: impl FnOnce(&Region) + Send + 'static,
    ) -> (JoinHandle<()>, Request) {
        let region = Arc::clone(&self.region);
        let toucher = thread::spawn(move || touch(&region));
        let requests = self.serving.counters().requests;
        eventually("the fault's request", || {
            self.serving.process_ready().unwrap();
            self.serving.counters().requests > requests
        });
        let request = source.next_if("its request", |request| request.gpa() == gpa(page));
        (toucher, request)
    }

    fn is_ready(&self) -> bool {
        let mut fds = [PollFd::new(&self.serving, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
    }
}

#[test]
fn a_serving_thread_installs_what_was_handed_over() {
    for (mode, backing) in WAYS {
        let source = ManualSource::new();
        let Some(mut it) = HandedOver::new(mode, backing, source.source()) else {
            return;
        };
        let (reader, request) = it.touch(&source, 3, |region| check_page(region, 3));
        complete(request);
        // The thread that has completed it is back, and has installed nothing.
        assert_eq!(
            state(&it.pager, 3),
            PageState::Pending,
            "{mode:?} {backing}"
        );
        assert!(it.is_ready());
        it.serving.process_ready().unwrap();
        assert_eq!(state(&it.pager, 3), PageState::Present);
        join("the reader", reader);
        let counted = it.pager.counted();
        assert_eq!((counted.handed_over, counted.answers), (1, 1));
        assert_no_trouble(&it.pager);
    }
}

#[test]
fn zeroes_and_poison_take_the_same_way() {
    let source = ManualSource::new();
    let Some(mut it) = HandedOver::new(Mode::Missing, Backing::Anonymous, source.source()) else {
        return;
    };
    for (page, content, then) in [
        (1, Content::Zero, PageState::Zero),
        (2, Content::Poisoned, PageState::Poisoned),
    ] {
        let (reader, request) = it.touch(&source, page, move |region| {
            // An access that raises no signal.
            let _ = region.fault_in(range(page, 1), FaultInAccess::Read);
        });
        request.complete(content);
        assert_eq!(state(&it.pager, page), PageState::Pending);
        it.serving.process_ready().unwrap();
        assert_eq!(state(&it.pager, page), then);
        join("the reader", reader);
    }
}

/// It would be refused anyway.
#[test]
fn content_of_the_wrong_size_is_not_handed_over() {
    let source = ManualSource::new();
    let Some(it) = HandedOver::new(Mode::Minor, Backing::Shmem, source.source()) else {
        return;
    };
    let notices = notices(&it.pager);
    let waiting = exit(&it.pager, 5);
    source.next().complete(Content::Bytes(&[1; 7]));
    let last = stalled(&notices, it.id).to_string();
    assert_eq!(last, "the source delivered 7 bytes instead of 4096");
    assert_eq!(it.pager.counted().handed_over, 0);
    it.pager.stop();
    waiting.join().unwrap().unwrap_err();
}

/// Until it is installed, it counts as in flight: what a source delivers and nobody installs is bounded.
#[test]
fn what_was_handed_over_is_in_flight() {
    let source = ManualSource::new();
    let limits = InFlightLimits {
        urgent_bytes: 2 * PAGE,
        bulk_bytes: PAGE,
    };
    let set = |config: RegionConfig| config.in_flight_limits(limits);
    let Some(mut it) = HandedOver::with(Mode::Minor, Backing::Shmem, source.source(), set) else {
        return;
    };
    let region = Arc::clone(&it.region);
    let readers = [1, 2, 3].map(|page| {
        let region = Arc::clone(&region);
        thread::spawn(move || check_page(&region, page))
    });
    eventually("three faults", || {
        it.serving.process_ready().unwrap();
        it.serving.counters().requests == 3
    });
    complete(source.next());
    complete(source.next());
    assert_eq!(source.waiting(), 0);
    let status = it.pager.source_status(it.id).unwrap();
    assert_eq!(status.in_flight_bytes, 2 * PAGE);
    it.serving.process_ready().unwrap();
    complete(source.next());
    it.serving.process_ready().unwrap();
    for reader in readers {
        join("a reader", reader);
    }
}

/// One at a time, behind what threads wait for.
#[test]
fn bulk_content_waits_for_urgent_content() {
    let source = ManualSource::new();
    let Some(mut it) = HandedOver::new(Mode::Minor, Backing::Shmem, source.source()) else {
        return;
    };
    // A plan ends when all of it was requested.
    let first = [0, 1].map(|page| (it.id, range(page, 1))).to_vec();
    let then = Vec::new();
    let config = PrefetchConfig { batch_bytes: PAGE };
    let plan = PrefetchPlan { first, then };
    let prefetch = Prefetch::spawn_plan(&it.pager, config, plan).unwrap();
    within_patience("the plan", || prefetch.finish().unwrap());
    let bulk = [source.next_bulk(), source.next_bulk()];
    let (reader, urgent) = it.touch(&source, 5, |region| check_page(region, 5));
    bulk.into_iter().for_each(complete);
    complete(urgent);
    let states = |it: &HandedOver| [0, 1, 5].map(|page| state(&it.pager, page));
    let (present, pending) = (PageState::Present, PageState::Pending);
    assert_eq!(states(&it), [pending; 3]);
    it.serving.process_ready().unwrap();
    assert_eq!(states(&it), [present, pending, present]);
    assert!(it.is_ready());
    it.serving.process_ready().unwrap();
    assert_eq!(states(&it), [present; 3]);
    join("the reader", reader);
}

/// As an event loop calls it that has other work.
#[test]
fn a_budget_that_has_passed_leaves_time_for_one() {
    let source = ManualSource::new();
    let Some(mut it) = HandedOver::new(Mode::Minor, Backing::Shmem, source.source()) else {
        return;
    };
    let touched =
        [3, 4].map(|page| it.touch(&source, page, move |region| check_page(region, page)));
    let readers = touched.map(|(reader, request)| {
        complete(request);
        reader
    });
    for (third, fourth) in [
        (PageState::Present, PageState::Pending),
        (PageState::Present, PageState::Present),
    ] {
        assert!(it.is_ready());
        it.serving.process_ready_within(Duration::ZERO).unwrap();
        assert_eq!(state(&it.pager, 3), third);
        assert_eq!(state(&it.pager, 4), fourth);
    }
    for reader in readers {
        join("a reader", reader);
    }
}

/// The content that waits is installed by the thread that needs it, and not requested again.
#[test]
fn a_fault_takes_what_was_handed_over_for_prefetch() {
    let source = ManualSource::new();
    let Some(mut it) = HandedOver::new(Mode::Minor, Backing::Shmem, source.source()) else {
        return;
    };
    let first = [0, 1, 2].map(|page| (it.id, range(page, 1))).to_vec();
    let then = Vec::new();
    let config = PrefetchConfig { batch_bytes: PAGE };
    let plan = PrefetchPlan { first, then };
    let prefetch = Prefetch::spawn_plan(&it.pager, config, plan).unwrap();
    within_patience("the plan", || prefetch.finish().unwrap());
    for _ in 0..3 {
        complete(source.next_bulk());
    }
    let mut resolver = it.pager.resolver(Some(0)).unwrap();
    let _ = resolver.resolve_exit(gpa(2), Access::Read).unwrap();
    let states = [0, 1, 2].map(|page| state(&it.pager, page));
    let (present, pending) = (PageState::Present, PageState::Pending);
    assert_eq!(states, [pending, pending, present]);
    assert_eq!(resolver.counters().requests, 0);
    it.serving.process_ready().unwrap();
    it.serving.process_ready().unwrap();
    assert_eq!(it.pager.counts(it.id).unwrap().present, 3);
}

/// A thread that waits in an exit installs it if no thread serves, so that the exit does not wait for ever.
#[test]
fn an_exit_waits_for_no_serving_thread() {
    let source = ManualSource::new();
    let Some(it) = HandedOver::new(Mode::Minor, Backing::Shmem, source.source()) else {
        return;
    };
    let waiting = exit(&it.pager, 4);
    complete(source.next());
    let resolution = join("the exit", waiting);
    assert_eq!(resolution.unwrap(), Resolution::Waited);
    assert_eq!(state(&it.pager, 4), PageState::Present);
}

/// Content that is here is not late, even if its request's deadline has passed before it was installed.
#[test]
fn delivered_content_is_not_late() {
    let source = ManualSource::new();
    let set = |config: RegionConfig| {
        config.retry_policy(RetryPolicy {
            deadline: Duration::from_nanos(1),
            ..ONE_ATTEMPT
        })
    };
    let Some(mut it) = HandedOver::with(Mode::Minor, Backing::Shmem, source.source(), set) else {
        return;
    };
    let region = Arc::clone(&it.region);
    let reader = thread::spawn(move || check_page(&region, 3));
    // Not the timer's event: the deadline has passed as soon as the request is made.
    eventually("its fault", || {
        let mut fds = [PollFd::new(&it.serving, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
    });
    it.serving.process_ready().unwrap();
    complete(source.next());
    // As by the timer, whose time has come.
    it.pager.tick();
    assert_eq!(it.pager.counted().failed_requests, 0);
    it.serving.process_ready().unwrap();
    join("the reader", reader);
    let counted = it.pager.counted();
    assert_eq!((counted.failed_requests, counted.late_answers), (0, 0));
    assert_no_trouble(&it.pager);
}

/// Its pages are poisoned, and not filled with what comes too late.
#[test]
fn content_for_a_region_that_has_gone_is_dropped() {
    let source = ManualSource::new();
    let Some(mut it) = HandedOver::new(Mode::Minor, Backing::Shmem, source.source()) else {
        return;
    };
    let (reader, request) = it.touch(&source, 4, |region| {
        // An access that raises no signal.
        let _ = region.fault_in(range(4, 1), FaultInAccess::Read);
    });
    complete(request);
    it.pager.remove(it.id).unwrap();
    join("the reader", reader);
    it.serving.process_ready().unwrap();
    assert_eq!(it.pager.counted().pages, 0);
    // And with the pager.
    drop(it);
}

/// A pool's threads install nothing, and their buffers go round.
#[test]
fn a_pool_hands_its_buffers_over() {
    for (mode, backing) in WAYS {
        let reading = ReadFn(|at: pagetide_pager::ReadAt, buffer: &mut [u8]| {
            fill(at.gpa, buffer);
            Ok(pagetide_pager::Filled::Bytes)
        });
        let pool = Pool::new(reading, PoolConfig::default()).unwrap();
        let Some(it) = HandedOver::new(mode, backing, pool) else {
            return;
        };
        let HandedOver {
            region,
            pager,
            serving,
            ..
        } = it;
        drop(serving);
        let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        let prefetch = Prefetch::spawn(&pager, PrefetchConfig { batch_bytes: PAGE }).unwrap();
        let checking = [0; 3].map(|_| {
            let region = Arc::clone(&region);
            thread::spawn(move || check_all(&region))
        });
        for reader in checking {
            join("a reader", reader);
        }
        let end = within_patience("prefetch", || prefetch.finish().unwrap());
        assert!(end.is_complete);
        readers.stop();
        let counted = pager.counted();
        assert_eq!(counted.handed_over, counted.answers + counted.late_answers);
        assert_eq!(counted.pages, PAGES);
        assert_no_trouble(&pager);
    }
}

/// A peer at the other end of a socket, to which threads that wait lend themselves.
struct Remote {
    send: Mutex<UnixStream>,
    receive: UnixStream,
    state: Mutex<RemoteState>,
    changed: Condvar,
    /// Who has completed a request.
    by: Mutex<HashMap<u64, ThreadId>>,
}

#[derive(Default)]
struct RemoteState {
    requests: HashMap<u64, Request>,
    is_received: bool,
}

impl Remote {
    /// The source, and the peer's thread, which answers `answers` requests.
    fn new() -> (Arc<Self>, JoinHandle<()>) {
        let (near, mut far) = UnixStream::pair().unwrap();
        let peer = thread::spawn(move || {
            let mut asked = [0; 8];
            while far.read_exact(&mut asked).is_ok() {
                let content = content(GuestAddress(u64::from_le_bytes(asked)), PAGE);
                far.write_all(&asked).unwrap();
                far.write_all(&content).unwrap();
            }
        });
        let it = Arc::new(Self {
            send: Mutex::new(near.try_clone().unwrap()),
            receive: near,
            state: Mutex::default(),
            changed: Condvar::new(),
            by: Mutex::default(),
        });
        (it, peer)
    }

    fn lock(&self) -> MutexGuard<'_, RemoteState> {
        self.state.lock().unwrap()
    }

    /// Becomes the thread that receives; false if there is nothing to receive for it any more.
    fn take_receiver(&self, helper: &Helper<'_>) -> bool {
        let mut state = self.lock();
        while state.is_received {
            if helper.is_over() {
                return false;
            }
            let left = helper.until().saturating_duration_since(Instant::now());
            state = self.changed.wait_timeout(state, left).unwrap().0;
        }
        state.is_received = true;
        true
    }

    fn is_readable(&self, until: Instant) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(&self.receive, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::try_from(left).unwrap())).unwrap() > 0
    }

    fn receive(&self) -> (Request, Vec<u8>) {
        let mut asked = [0; 8];
        let mut content = vec![0; usize::try_from(PAGE).unwrap()];
        (&self.receive).read_exact(&mut asked).unwrap();
        (&self.receive).read_exact(&mut content).unwrap();
        let at = u64::from_le_bytes(asked);
        self.by.lock().unwrap().insert(at, thread::current().id());
        (self.lock().requests.remove(&at).unwrap(), content)
    }
}

impl Source for Remote {
    fn submit(&self, request: Request) {
        let at = request.gpa().0;
        assert_eq!(request.urgency(), Urgency::Urgent);
        self.lock().requests.insert(at, request);
        let mut send = self.send.lock().unwrap();
        send.write_all(&at.to_le_bytes()).unwrap();
    }

    fn help(&self, helper: &mut Helper<'_>) {
        if !self.take_receiver(helper) {
            return;
        }
        while !helper.is_over() && self.is_readable(helper.until()) {
            let (request, content) = self.receive();
            helper.complete(request, Content::Bytes(&content));
            self.changed.notify_all();
        }
        self.lock().is_received = false;
        self.changed.notify_all();
    }
}

#[test]
fn a_thread_that_waits_receives_its_own_page() {
    if !has_unix_sockets() {
        return;
    }
    for (mode, backing) in WAYS {
        let Some(region) = region(PAGES, backing) else {
            return;
        };
        let (source, peer) = Remote::new();
        let as_source = Arc::clone(&source) as Arc<dyn Source>;
        let (pager, _) = serve(&region, mode, as_source, ONE_ATTEMPT);
        let mut resolver = pager.resolver(Some(0)).unwrap();
        for page in 0..PAGES {
            let resolution = resolver.resolve_exit(gpa(page), Access::Read).unwrap();
            assert_eq!(resolution, Resolution::Waited);
            assert_eq!(state(&pager, page), PageState::Present);
            check_page(&region, page);
        }
        let here = thread::current().id();
        assert!(source.by.lock().unwrap().values().all(|&by| by == here));
        let expected = Counters {
            faults: PAGES,
            waits: PAGES,
            requests: PAGES,
            pages_received_by_waiter: PAGES,
            ..Counters::default()
        };
        assert_eq!(resolver.counters(), &expected, "{mode:?} {backing}");
        drop((resolver, pager, source));
        peer.join().unwrap();
    }
}

/// One receives for all, and hands on when it has its own page.
#[test]
fn threads_that_wait_receive_for_each_other() {
    const THREADS: u64 = 4;
    if !has_unix_sockets() {
        return;
    }
    let Some(region) = region(THREADS * PAGES, Backing::Shmem) else {
        return;
    };
    let (source, peer) = Remote::new();
    let as_source = Arc::clone(&source) as Arc<dyn Source>;
    let (pager, _) = serve(&region, Mode::Minor, as_source, ONE_ATTEMPT);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let mut resolver = pager.resolver(None).unwrap();
            scope.spawn(move || {
                for step in 0..PAGES {
                    let page = gpa(step * THREADS + thread);
                    let _ = resolver.resolve_exit(page, Access::Write).unwrap();
                }
            });
        }
    });
    check_all(&region);
    let counted = pager.counted();
    assert_eq!(counted.pages_received_by_waiter, THREADS * PAGES);
    assert_eq!(counted.pages, THREADS * PAGES);
    drop((pager, source));
    peer.join().unwrap();
}

/// A source that is of no help: its thread sleeps until another thread answers.
struct Helpless(Arc<ManualSource>);

impl Source for Helpless {
    fn submit(&self, request: Request) {
        self.0.submit(request);
    }

    fn help(&self, _: &mut Helper<'_>) {
        panic!("of no help");
    }
}

#[test]
fn a_source_that_panics_loses_no_wait() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let source = ManualSource::new();
    let helpless = Arc::new(Helpless(Arc::clone(&source)));
    let (pager, _) = serve(&region, Mode::Minor, helpless, ONE_ATTEMPT);
    let waiting = exit(&pager, 3);
    complete(source.next());
    assert_eq!(waiting.join().unwrap().unwrap(), Resolution::Waited);
    check_page(&region, 3);
}

/// The peer does not answer: the thread that helps returns in time for the stop.
#[test]
fn a_stop_ends_a_help() {
    if !has_unix_sockets() {
        return;
    }
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let (near, far) = UnixStream::pair().unwrap();
    let source = Arc::new(Remote {
        send: Mutex::new(near.try_clone().unwrap()),
        receive: near,
        state: Mutex::default(),
        changed: Condvar::new(),
        by: Mutex::default(),
    });
    let (pager, _) = serve(&region, Mode::Minor, source, ONE_ATTEMPT);
    let waiting = [1, 2].map(|page| exit(&pager, page));
    // Both are requested.
    let mut asked = [0; 16];
    (&far).read_exact(&mut asked).unwrap();
    pager.stop();
    for exit in waiting {
        let error = join("the exit", exit).unwrap_err();
        assert!(error.to_string().contains("stop"), "{error}");
    }
}
