//! A source that a test answers by hand, and a pager with one region to go with it.

use std::collections::VecDeque;
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pagetide_memory::{
    Access, Backing, FaultInAccess, FaultInError, GuestAddress, PageIndex, PageRange, PageState,
    Region,
};
use pagetide_pager::{
    BlockingSource, Contents, Filled, Mode, Notice, Pager, ReadAt, RegionConfig, RegionId, Request,
    RequestId, Resolution, ResolveError, RetryPolicy, Source, SourceError, Urgency,
};

pub use super::SMALL_WAYS as WAYS;
pub use super::sources::{LocalFn, complete, unavailable};
pub use super::{
    GPA, PAGE, PATIENCE, check_page, content, eventually, fill, join, region, region_at,
    within_patience,
};

/// Stalls after one failure, and has no effective deadline.
pub const ONE_ATTEMPT: RetryPolicy = RetryPolicy {
    deadline: Duration::from_secs(3600),
    attempts: 1,
    first_backoff: Duration::from_millis(1),
    longest_backoff: Duration::from_millis(1),
};

/// Retries many times without a pause, and has no effective deadline.
pub const PERSISTENT: RetryPolicy = RetryPolicy {
    attempts: 1000,
    ..ONE_ATTEMPT
};

/// The same with a short deadline.
pub const IMPATIENT: RetryPolicy = RetryPolicy {
    deadline: Duration::from_millis(20),
    ..PERSISTENT
};

/// The content of these pages of a region at [`GPA`].
pub fn content_of(pages: PageRange) -> Vec<u8> {
    content(
        GuestAddress(GPA.0 + pages.first().0 * PAGE),
        pages.count() * PAGE,
    )
}

pub fn check_all(region: &Region) {
    (0..region.pages()).for_each(|page| check_page(region, page));
}

/// Checks that the page is lost: the kernel returns the error for which an access would raise SIGBUS.
/// Sleeps in the userfaultfd if the page is missing.
pub fn assert_lost(region: &Region, page: u64) {
    let pages = range(page, 1);
    let touched = region.fault_in(pages, FaultInAccess::Read);
    assert_eq!(touched, Err(FaultInError::Poisoned { pages }));
}

pub fn range(first: u64, count: u64) -> PageRange {
    PageRange::new(PageIndex(first), count)
}

/// A pager that serves `region`, and the region's number.
pub fn serve(
    region: &Arc<Region>,
    mode: Mode,
    source: Arc<dyn Source>,
    policy: RetryPolicy,
) -> (Arc<Pager>, RegionId) {
    let pager = Pager::new().unwrap();
    let contents = Contents::Source(source);
    let config = RegionConfig::local(Arc::clone(region), mode, contents).retry_policy(policy);
    let id = pager.add(config).unwrap();
    (pager, id)
}

pub fn gpa(page: u64) -> GuestAddress {
    GuestAddress(GPA.0 + page * PAGE)
}

pub fn state(pager: &Pager, page: u64) -> PageState {
    let (region, page) = pager.locate(gpa(page)).unwrap();
    pager.page_state(region, page).unwrap()
}

/// A vCPU's thread that resolves an exit on a page.
pub fn exit(pager: &Arc<Pager>, page: u64) -> JoinHandle<Result<Resolution, ResolveError>> {
    let mut resolver = pager.resolver(Some(0)).unwrap();
    thread::spawn(move || resolver.resolve_exit(gpa(page), Access::Read))
}

/// Receives a pager's later notices.
pub fn notices(pager: &Pager) -> mpsc::Receiver<Notice> {
    let (send, receive) = mpsc::channel();
    pager.on_notice(move |notice| {
        let _ = send.send(notice.clone());
    });
    receive
}

/// Waits until a region is stalled; returns the last failure.
pub fn stalled(notices: &mpsc::Receiver<Notice>, id: RegionId) -> Arc<SourceError> {
    match notices.recv_timeout(PATIENCE).unwrap() {
        Notice::Stalled { region, last } if region == id => last,
        other => panic!("{other}"),
    }
}

/// A request that was made to a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requested {
    pub pages: PageRange,
    pub urgency: Urgency,
}

/// A source that holds its requests until the test answers them.
#[derive(Default)]
pub struct ManualSource {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Request>,
    log: Vec<Requested>,
    cancelled: Vec<RequestId>,
}

impl ManualSource {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    pub fn source(self: &Arc<Self>) -> Arc<dyn Source> {
        Arc::clone(self) as _
    }

    pub fn contents(self: &Arc<Self>) -> Contents {
        Contents::Source(self.source())
    }

    /// The next request that fulfils `is_it`; fails the test if none arrives.
    pub fn next_if(&self, what: &str, is_it: impl Fn(&Request) -> bool) -> Request {
        let mut found = None;
        self.wait_for(what, |state| {
            let index = state.waiting.iter().position(&is_it);
            found = index.and_then(|index| state.waiting.remove(index));
            found.is_some()
        });
        found.unwrap()
    }

    /// The oldest request that fulfils `is_it`, if any.
    pub fn take_if(&self, is_it: impl Fn(&Request) -> bool) -> Option<Request> {
        let mut state = self.lock();
        let index = state.waiting.iter().position(is_it)?;
        state.waiting.remove(index)
    }

    /// The newest request.
    pub fn take_last(&self) -> Option<Request> {
        self.lock().waiting.pop_back()
    }

    pub fn next(&self) -> Request {
        self.next_if("a request", |_| true)
    }

    pub fn next_urgent(&self) -> Request {
        self.next_if("an urgent request", |request| {
            request.urgency() == Urgency::Urgent
        })
    }

    pub fn next_bulk(&self) -> Request {
        self.next_if("a bulk request", |request| {
            request.urgency() == Urgency::Bulk
        })
    }

    /// Waits until `count` requests are waiting.
    pub fn wait_for_waiting(&self, count: usize) {
        self.wait_for("requests", |state| state.waiting.len() >= count);
    }

    pub fn wait_for_cancelled(&self, id: RequestId) {
        self.wait_for("a cancelled request", |state| state.cancelled.contains(&id));
    }

    pub fn waiting(&self) -> usize {
        self.lock().waiting.len()
    }

    pub fn cancelled(&self) -> Vec<RequestId> {
        self.lock().cancelled.clone()
    }

    /// All requests so far, in order.
    pub fn log(&self) -> Vec<Requested> {
        self.lock().log.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn wait_for(&self, what: &str, mut condition: impl FnMut(&mut State) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.lock();
        while !condition(&mut state) {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{what}: never");
            state = self.changed.wait_timeout(state, left).unwrap().0;
        }
    }
}

impl Source for ManualSource {
    fn submit(&self, request: Request) {
        let mut state = self.lock();
        state.log.push(Requested {
            pages: request.pages(),
            urgency: request.urgency(),
        });
        state.waiting.push_back(request);
        drop(state);
        self.changed.notify_all();
    }

    fn cancel(&self, _region: RegionId, id: RequestId) {
        self.lock().cancelled.push(id);
        self.changed.notify_all();
    }
}

/// A source made from a function, which `submit` calls.
pub struct SubmitFn<F>(pub F);

impl<F: Fn(Request) + Send + Sync> Source for SubmitFn<F> {
    fn submit(&self, request: Request) {
        (self.0)(request);
    }
}

/// A blocking source made from a function.
pub struct ReadFn<F>(pub F);

impl<F> BlockingSource for ReadFn<F>
where
    F: Fn(ReadAt, &mut [u8]) -> Result<Filled, SourceError> + Send + Sync,
{
    fn read(&self, at: ReadAt, buffer: &mut [u8]) -> Result<Filled, SourceError> {
        (self.0)(at, buffer)
    }
}

/// A pager with one small region whose local content `fill` computes.
pub fn local<F>(pages: u64, mode: Mode, fill: F) -> Option<(Arc<Region>, Arc<Pager>, RegionId)>
where
    F: Fn(GuestAddress, &mut [u8]) -> Result<Filled, SourceError> + Send + Sync + 'static,
{
    let region = region(pages, Backing::Shmem)?;
    let pager = Pager::new().unwrap();
    let contents = Contents::Local(Arc::new(LocalFn(fill)));
    let config = RegionConfig::local(Arc::clone(&region), mode, contents);
    let id = pager.add(config).unwrap();
    Some((region, pager, id))
}

/// Blocks threads until the test opens it. It stays open.
#[derive(Default)]
pub struct Gate {
    is_open: Mutex<(bool, usize)>,
    changed: Condvar,
}

impl Gate {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    pub fn pass(&self) {
        let mut gate = self.is_open.lock().unwrap();
        gate.1 += 1;
        self.changed.notify_all();
        while !gate.0 {
            gate = self.changed.wait(gate).unwrap();
        }
        gate.1 -= 1;
    }

    pub fn open(&self) {
        self.is_open.lock().unwrap().0 = true;
        self.changed.notify_all();
    }

    /// Waits until `threads` threads wait at it.
    pub fn wait_for(&self, threads: usize) {
        let gate = self.is_open.lock().unwrap();
        let few = |gate: &mut (bool, usize)| gate.1 < threads;
        let (_gate, waited) = self
            .changed
            .wait_timeout_while(gate, PATIENCE, few)
            .unwrap();
        assert!(!waited.timed_out(), "{threads} threads at the gate: never");
    }
}
