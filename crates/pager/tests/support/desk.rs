//! A source that a test answers by hand, and waiting that fails instead of hanging.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses a part of this"
)]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test helper that fails is a test that fails"
)]

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
    BlockingSource, Content, Contents, Filled, LocalSource, Mode, Notice, Pager, ReadAt,
    RegionConfig, RegionId, Request, RequestId, Resolution, ResolveError, RetryPolicy, Source,
    SourceError, Urgency,
};
use pagetide_uapi::userfaultfd::{OpenError, Userfaultfd};

/// Where [`region`] puts regions.
pub const GPA: GuestAddress = GuestAddress(4 << 30);
pub const PAGE: u64 = 4096;

/// How long anything may take before a test calls it a hang. Only a failure reaches it.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Fails once and is stalled, and never expires by itself.
pub const ONE_ATTEMPT: RetryPolicy = RetryPolicy {
    deadline: Duration::from_secs(3600),
    attempts: 1,
    first_backoff: Duration::from_millis(1),
    longest_backoff: Duration::from_millis(1),
};

/// Asks again and again, at once, and never expires by itself.
pub const PERSISTENT: RetryPolicy = RetryPolicy {
    attempts: 1000,
    ..ONE_ATTEMPT
};

/// The same with a deadline that passes soon.
pub const IMPATIENT: RetryPolicy = RetryPolicy {
    deadline: Duration::from_millis(20),
    ..PERSISTENT
};

/// The modes and backings that most tests go through.
pub const WAYS: [(Mode, Backing); 3] = [
    (Mode::Minor, Backing::Shmem),
    (Mode::Missing, Backing::Shmem),
    (Mode::Missing, Backing::Anonymous),
];

/// A region of that many small pages, or `None` after saying why there is none.
pub fn region_at(gpa: GuestAddress, pages: u64, backing: Backing) -> Option<Arc<Region>> {
    match Userfaultfd::available() {
        Ok(_) => Some(Arc::new(Region::new(gpa, pages * PAGE, backing).unwrap())),
        Err(error @ (OpenError::NotSupported | OpenError::NoPermission { .. })) => {
            println!("SKIP: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The same at [`GPA`].
pub fn region(pages: u64, backing: Backing) -> Option<Arc<Region>> {
    region_at(GPA, pages, backing)
}

/// The content that every page should have: its words are their own addresses, inverted.
pub fn fill(gpa: GuestAddress, bytes: &mut [u8]) {
    for (offset, word) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = (!(gpa.0 + 8 * offset as u64)).to_le_bytes();
    }
}

pub fn content(gpa: GuestAddress, bytes: u64) -> Vec<u8> {
    let mut content = vec![0; usize::try_from(bytes).unwrap()];
    fill(gpa, &mut content);
    content
}

/// The content of these pages of a region at [`GPA`].
pub fn content_of(pages: PageRange) -> Vec<u8> {
    content(
        GuestAddress(GPA.0 + pages.first().0 * PAGE),
        pages.count() * PAGE,
    )
}

/// Reads a page as the guest would, which may fault, and compares it with the pattern.
pub fn check_page(region: &Region, page: u64) {
    let mut seen = [0; 4096];
    region.read_guest(PageIndex(page), 0, &mut seen).unwrap();
    let gpa = GuestAddress(region.gpa().0 + page * PAGE);
    let start = &seen[..16];
    assert!(
        seen[..] == content(gpa, PAGE)[..],
        "page {page}: {start:x?}"
    );
}

pub fn check_all(region: &Region) {
    (0..region.pages()).for_each(|page| check_page(region, page));
}

/// Whoever touches the page learns that it is lost, and reads nothing: the kernel says what it would
/// tell a thread by SIGBUS. Sleeps in the userfaultfd if the page is missing.
pub fn assert_lost(region: &Region, page: u64) {
    let pages = range(page, 1);
    let touched = region.fault_in(pages, FaultInAccess::Read);
    assert_eq!(touched, Err(FaultInError::Poisoned { pages }));
}

pub fn range(first: u64, count: u64) -> PageRange {
    PageRange::new(PageIndex(first), count)
}

/// A pager with that region, and the region's number.
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

/// Waits for a thread, but not for ever.
pub fn join<T>(what: &str, thread: JoinHandle<T>) -> T {
    eventually(what, || thread.is_finished());
    match thread.join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Runs `work` on another thread and waits for its end, but not for ever.
pub fn within_patience<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    join(what, thread::spawn(work))
}

/// Waits until `condition` holds.
pub fn eventually(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "{what}: never");
        thread::sleep(Duration::from_millis(1));
    }
}

/// The notices of a pager from now on.
pub fn notices(pager: &Pager) -> mpsc::Receiver<Notice> {
    let (send, receive) = mpsc::channel();
    pager.on_notice(move |notice| {
        let _ = send.send(notice.clone());
    });
    receive
}

/// Waits for a region to be stalled; what was the last failure.
pub fn stalled(notices: &mpsc::Receiver<Notice>, id: RegionId) -> Arc<SourceError> {
    match notices.recv_timeout(PATIENCE).unwrap() {
        Notice::Stalled { region, last } if region == id => last,
        other => panic!("{other}"),
    }
}

pub fn unavailable(reason: &'static str) -> SourceError {
    SourceError::Unavailable(reason.into())
}

/// Answers with the pattern.
pub fn complete(request: Request) {
    let bytes = content(request.gpa(), request.bytes());
    request.complete(Content::Bytes(&bytes));
}

/// What was asked of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    pub pages: PageRange,
    pub urgency: Urgency,
}

/// A source whose requests lie on a desk until the test answers them.
#[derive(Default)]
pub struct Desk {
    papers: Mutex<Papers>,
    changed: Condvar,
}

#[derive(Default)]
struct Papers {
    waiting: VecDeque<Request>,
    log: Vec<Asked>,
    cancelled: Vec<RequestId>,
}

impl Desk {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    pub fn source(self: &Arc<Self>) -> Arc<dyn Source> {
        Arc::clone(self) as _
    }

    /// The next request of that kind, which is expected to come.
    pub fn next_if(&self, what: &str, is_it: impl Fn(&Request) -> bool) -> Request {
        let mut found = None;
        self.wait_for(what, |papers| {
            let index = papers.waiting.iter().position(&is_it);
            found = index.and_then(|index| papers.waiting.remove(index));
            found.is_some()
        });
        found.unwrap()
    }

    /// The oldest request of that kind, if there is one.
    pub fn take_if(&self, is_it: impl Fn(&Request) -> bool) -> Option<Request> {
        let mut papers = self.lock();
        let index = papers.waiting.iter().position(is_it)?;
        papers.waiting.remove(index)
    }

    /// The newest.
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

    /// Waits until so many requests lie there.
    pub fn wait_for_waiting(&self, count: usize) {
        self.wait_for("requests", |papers| papers.waiting.len() >= count);
    }

    pub fn wait_for_cancelled(&self, id: RequestId) {
        self.wait_for("a cancelled request", |papers| {
            papers.cancelled.contains(&id)
        });
    }

    pub fn waiting(&self) -> usize {
        self.lock().waiting.len()
    }

    /// Everything that was ever asked, in order.
    pub fn log(&self) -> Vec<Asked> {
        self.lock().log.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Papers> {
        self.papers.lock().unwrap()
    }

    fn wait_for(&self, what: &str, mut condition: impl FnMut(&mut Papers) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        let mut papers = self.lock();
        while !condition(&mut papers) {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{what}: never");
            papers = self.changed.wait_timeout(papers, left).unwrap().0;
        }
    }
}

impl Source for Desk {
    fn submit(&self, request: Request) {
        let mut papers = self.lock();
        papers.log.push(Asked {
            pages: request.pages(),
            urgency: request.urgency(),
        });
        papers.waiting.push_back(request);
        drop(papers);
        self.changed.notify_all();
    }

    fn cancel(&self, _region: RegionId, id: RequestId) {
        self.lock().cancelled.push(id);
        self.changed.notify_all();
    }
}

/// A source made of a function, which is called inside `submit`.
pub struct SubmitFn<F>(pub F);

impl<F: Fn(Request) + Send + Sync> Source for SubmitFn<F> {
    fn submit(&self, request: Request) {
        (self.0)(request);
    }
}

/// A blocking source made of a function.
pub struct ReadFn<F>(pub F);

impl<F> BlockingSource for ReadFn<F>
where
    F: Fn(ReadAt, &mut [u8]) -> Result<Filled, SourceError> + Send + Sync,
{
    fn read(&self, at: ReadAt, buffer: &mut [u8]) -> Result<Filled, SourceError> {
        (self.0)(at, buffer)
    }
}

/// A local source made of a function.
pub struct LocalFn<F>(pub F);

impl<F> LocalSource for LocalFn<F>
where
    F: Fn(GuestAddress, &mut [u8]) -> Result<Filled, SourceError> + Send + Sync,
{
    fn fill(&self, gpa: GuestAddress, buffer: &mut [u8]) -> Result<Filled, SourceError> {
        (self.0)(gpa, buffer)
    }
}

/// A pager with one small region whose local content is made by `fill`.
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

/// Lets threads wait until the test opens it. Open for good once it is.
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

    /// Waits until so many threads wait at it.
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
