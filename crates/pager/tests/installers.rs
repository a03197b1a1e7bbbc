//! Which thread installs an answer: the one that completes the request, or one that serves the pager's descriptor.
//! (Threads that wait and help their source: helping.rs.)
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::sync::Arc;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pagetide_memory::{Access, Backing, FaultInAccess, PageState, Region};
use pagetide_pager::{
    Content, Contents, InFlightLimits, InstalledBy, Mode, Pager, Pool, PoolConfig, Prefetch,
    PrefetchConfig, PrefetchPlan, ReaderConfig, Readers, RegionConfig, RegionId, Request,
    Resolution, RetryPolicy, Serving, Source, Waited,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::assert_no_trouble;
use support::manual::*;

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

/// From the reading of the fault's message until the page is there, and not until it was requested.
#[test]
fn the_time_for_which_a_thread_waited_is_told_when_its_page_is_there() {
    let source = ManualSource::new();
    let Some(mut it) = HandedOver::new(Mode::Missing, Backing::Anonymous, source.source()) else {
        return;
    };
    let (send, waits) = mpsc::channel();
    it.serving
        .on_waited(move |what, time: Duration| send.send((what, time)).unwrap());
    let (reader, request) = it.touch(&source, 3, |region| check_page(region, 3));
    let asked = Instant::now();
    it.serving.process_ready().unwrap();
    assert!(waits.try_recv().is_err(), "nothing has come");
    let waited = asked.elapsed();
    complete(request);
    it.serving.process_ready().unwrap();
    join("the reader", reader);
    let (what, time) = waits.try_recv().unwrap();
    assert_eq!(what, Waited::Source);
    assert!(time >= waited, "{time:?} of {waited:?}");
    // A page that is lost has not come.
    let (reader, request) = it.touch(&source, 4, |region| {
        let _ = region.fault_in(range(4, 1), FaultInAccess::Read);
    });
    request.complete(Content::Poisoned);
    it.serving.process_ready().unwrap();
    join("the reader", reader);
    assert!(waits.try_recv().is_err());
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
