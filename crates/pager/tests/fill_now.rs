//! Content that a source has without waiting is installed without a request; and observers see each touch
//! of a missing page.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use pagetide_memory::{Access, Backing, GuestAddress, HostAddress, HostRange, Region, Urgency};
use pagetide_pager::{
    Contents, Fault, Filled, InFlightLimits, Mode, Observer, Pager, Prefetch, PrefetchConfig,
    ReadAt, RegionConfig, Request, Room, Source,
};
use support::manual::*;

/// Has the pages for which `is_local` holds; answers requests for the others at once.
struct Half {
    is_local: fn(u64) -> bool,
    is_broken: bool,
    filled: Mutex<Vec<u64>>,
    requested: Mutex<Vec<u64>>,
}

impl Half {
    fn new(is_local: fn(u64) -> bool) -> Arc<Self> {
        Arc::new(Self {
            is_local,
            is_broken: false,
            filled: Mutex::default(),
            requested: Mutex::default(),
        })
    }

    fn requested(&self) -> Vec<u64> {
        let mut pages = self.requested.lock().unwrap().clone();
        pages.sort_unstable();
        pages
    }
}

impl Source for Half {
    fn submit(&self, request: Request) {
        let pages = request.pages().iter().map(|page| page.0);
        self.requested.lock().unwrap().extend(pages);
        complete(request);
    }

    fn fill_now(&self, at: ReadAt, room: &mut Room<'_>) -> Option<Filled> {
        assert!(!self.is_broken, "a broken source");
        let first = at.offset_bytes / PAGE;
        let pages = first..first + room.bytes() / PAGE;
        assert_eq!(at.gpa, GuestAddress(GPA.0 + at.offset_bytes));
        if !pages.clone().all(self.is_local) {
            return None;
        }
        self.filled.lock().unwrap().extend(pages);
        fill(at.gpa, room.buffer()?);
        Some(Filled::Bytes)
    }
}

fn serve_around(region: &Arc<Region>, half: &Arc<Half>, around: u64) -> Arc<Pager> {
    let pager = Pager::new().unwrap();
    let source: Arc<dyn Source> = Arc::<Half>::clone(half);
    let contents = Contents::Source(source);
    let config = RegionConfig::local(Arc::clone(region), Mode::Missing, contents);
    pager.add(config.fault_around(around)).unwrap();
    pager
}

#[test]
fn content_that_needs_no_waiting_is_not_requested() {
    for (mode, backing) in WAYS {
        let Some(region) = region(16, backing) else {
            return;
        };
        let half = Half::new(|page| page % 2 == 0);
        let (pager, _) = serve(&region, mode, Arc::<Half>::clone(&half), PERSISTENT);
        for page in 0..16 {
            let _ = join("an exit", exit(&pager, page)).unwrap();
        }
        check_all(&region);
        let odd: Vec<u64> = (1..16).step_by(2).collect();
        assert_eq!(half.requested(), odd);
        assert_eq!(pager.counted().requests, 8);
    }
}

/// A neighbour whose content would have to be fetched does not delay a page whose content is there.
#[test]
fn a_neighbour_that_has_to_be_requested_is_left_out() {
    let Some(region) = region(16, Backing::Shmem) else {
        return;
    };
    let half = Half::new(|page| page != 5);
    let pager = serve_around(&region, &half, 8);
    let _ = join("an exit", exit(&pager, 2)).unwrap();
    assert_eq!(*half.filled.lock().unwrap(), [2]);
    let _ = join("an exit", exit(&pager, 9)).unwrap();
    assert_eq!(pager.counted().requests, 0);
    assert_eq!(
        *half.filled.lock().unwrap(),
        [2, 8, 9, 10, 11, 12, 13, 14, 15]
    );
}

#[test]
fn prefetch_installs_what_is_there_and_requests_the_rest() {
    for (mode, backing) in WAYS {
        let Some(region) = region(64, backing) else {
            return;
        };
        let half = Half::new(|page| page < 40);
        let (pager, _) = serve(&region, mode, Arc::<Half>::clone(&half), PERSISTENT);
        let batch_bytes = 8 * PAGE;
        let running = Prefetch::spawn(&pager, PrefetchConfig { batch_bytes }).unwrap();
        assert!(running.finish().unwrap().is_complete);
        check_all(&region);
        assert_eq!(half.requested(), (40..64).collect::<Vec<u64>>());
        assert_eq!(pager.counted().ahead_pages, 64);
    }
}

/// Its content costs CPU time, and no waiting.
#[derive(Default)]
struct Decompressed {
    /// Not answered yet.
    requests: Mutex<Vec<Request>>,
    /// How often it was asked for what costs nothing.
    asked: AtomicU64,
    filled: Mutex<Vec<u64>>,
}

impl Source for Decompressed {
    fn submit(&self, request: Request) {
        self.requests.lock().unwrap().push(request);
    }

    fn fill_now(&self, at: ReadAt, room: &mut Room<'_>) -> Option<Filled> {
        if at.urgency == Urgency::Bulk {
            self.asked.fetch_add(1, Ordering::Release);
            return None;
        }
        let first = at.offset_bytes / PAGE;
        let pages = first..first + room.bytes() / PAGE;
        self.filled.lock().unwrap().extend(pages);
        fill(at.gpa, room.buffer()?);
        Some(Filled::Bytes)
    }
}

/// A pager over memory of which so many pages may be on their way.
fn paged_with_room_for(
    pages: u64,
    region: &Arc<Region>,
    source: &Arc<impl Source + 'static>,
) -> Arc<Pager> {
    let source: Arc<dyn Source> = Arc::clone(source) as Arc<dyn Source>;
    let limits = InFlightLimits {
        bulk_bytes: pages * PAGE,
        ..InFlightLimits::default()
    };
    let config = RegionConfig::local(Arc::clone(region), Mode::Missing, Contents::Source(source));
    let pager = Pager::new().unwrap();
    pager.add(config.in_flight_limits(limits)).unwrap();
    pager
}

/// Kind: a thread that waits for others to do what it could do itself, and takes their work out of another processor's cache.
#[test]
fn prefetch_reads_by_itself_while_its_source_has_enough_to_do() {
    const PAGES: u64 = 64;
    const BATCH: u64 = 8;
    let Some(region) = region(PAGES, Backing::Shmem) else {
        return;
    };
    let source = Arc::new(Decompressed::default());
    let pager = paged_with_room_for(BATCH, &region, &source);
    let id = pager.region_ids()[0];
    pager.suspend(id).unwrap();
    let batch_bytes = BATCH * PAGE;
    let running = Prefetch::spawn(&pager, PrefetchConfig { batch_bytes }).unwrap();
    // Not while the region is suspended.
    eventually("prefetch comes back to it", || {
        source.asked.load(Ordering::Acquire) > 2
    });
    assert!(source.filled.lock().unwrap().is_empty());
    pager.resume(id).unwrap();
    eventually("all other pages", || {
        pager.progress().present == PAGES - BATCH
    });
    let requests = std::mem::take(&mut *source.requests.lock().unwrap());
    assert_eq!(requests.len(), 1);
    requests.into_iter().for_each(complete);
    let ended = within_patience("prefetch", move || running.finish().unwrap());
    assert!(ended.is_complete);
    let rest: Vec<u64> = (BATCH..PAGES).collect();
    assert_eq!(*source.filled.lock().unwrap(), rest);
    check_all(&region);
}

/// Prefetches two batches of which one may be on its way, and answers both requests. The source counts how often it is
/// asked: at the third time, the second batch has found no room, and the first request is still unanswered.
fn prefetch_two_batches(
    pager: &Arc<Pager>,
    batch_pages: u64,
    requests: &Mutex<Vec<Request>>,
    asked: &AtomicU64,
) {
    let batch_bytes = batch_pages * PAGE;
    let running = Prefetch::spawn(pager, PrefetchConfig { batch_bytes }).unwrap();
    for batch in 1..=2 {
        eventually("a request, and a third look", || {
            !requests.lock().unwrap().is_empty() && asked.load(Ordering::Acquire) > 2
        });
        let requests = std::mem::take(&mut *requests.lock().unwrap());
        assert_eq!(requests.len(), 1, "batch {batch}");
        requests.into_iter().for_each(complete);
    }
    let ended = within_patience("prefetch", move || running.finish().unwrap());
    assert!(ended.is_complete);
}

/// Kind: a thread that is busy for long with one piece of work sees to nothing else.
#[test]
fn prefetch_leaves_long_batches_to_the_threads_of_its_source() {
    const BATCH: u64 = (8 << 20) / PAGE;
    let Some(region) = region(2 * BATCH, Backing::Shmem) else {
        return;
    };
    let source = Arc::new(Decompressed::default());
    let pager = paged_with_room_for(BATCH, &region, &source);
    prefetch_two_batches(&pager, BATCH, &source.requests, &source.asked);
    assert!(source.filled.lock().unwrap().is_empty());
    check_all(&region);
}

/// Says that it has all content, of which the kernel finds nothing.
#[derive(Default)]
struct Gone {
    /// Not answered yet.
    requests: Mutex<Vec<Request>>,
    /// How often it was asked in passing, and how often for a batch to be read at once.
    asked: [AtomicU64; 2],
}

impl Source for Gone {
    fn submit(&self, request: Request) {
        self.requests.lock().unwrap().push(request);
    }

    fn mapped_now(&self, at: ReadAt, bytes: u64) -> Option<HostRange> {
        let asked = &self.asked[usize::from(at.urgency == Urgency::Urgent)];
        asked.fetch_add(1, Ordering::Release);
        HostRange::new(HostAddress(1 << 46), usize::try_from(bytes).unwrap()).ok()
    }
}

/// Kind: what has just failed is tried again at once, by the same way.
#[test]
fn what_could_not_be_installed_is_requested_and_not_read_again() {
    const BATCH: u64 = 8;
    let Some(region) = region(2 * BATCH, Backing::Anonymous) else {
        return;
    };
    let source = Arc::new(Gone::default());
    let pager = paged_with_room_for(BATCH, &region, &source);
    prefetch_two_batches(&pager, BATCH, &source.requests, &source.asked[0]);
    assert_eq!(source.asked[1].load(Ordering::Acquire), 0);
    check_all(&region);
}

#[test]
fn a_source_that_panics_without_waiting_is_asked_by_a_request() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let mut half = Half::new(|_| true);
    Arc::get_mut(&mut half).unwrap().is_broken = true;
    let mode = Mode::Missing;
    let (pager, _) = serve(&region, mode, Arc::<Half>::clone(&half), PERSISTENT);
    let _ = join("an exit", exit(&pager, 1)).unwrap();
    assert_eq!(half.requested(), [1]);
}

/// Has its content in its own memory, as far as that reaches; the kernel finds nothing after it.
struct Mapped {
    content: Vec<u8>,
    /// The offset of the first whole page in it, and the number of pages from there on.
    start: usize,
    pages: u64,
    /// The addresses that it says it has.
    claimed_pages: u64,
    requested: Mutex<Vec<u64>>,
}

impl Mapped {
    fn new(pages: u64, claimed_pages: u64) -> Arc<Self> {
        let mut content = vec![0; usize::try_from((pages + 1) * PAGE).unwrap()];
        let start = content
            .as_ptr()
            .align_offset(usize::try_from(PAGE).unwrap());
        let bytes = usize::try_from(pages * PAGE).unwrap();
        fill(GPA, &mut content[start..start + bytes]);
        Arc::new(Self {
            content,
            start,
            pages,
            claimed_pages,
            requested: Mutex::default(),
        })
    }
}

impl Source for Mapped {
    fn submit(&self, request: Request) {
        let pages = request.pages().iter().map(|page| page.0);
        self.requested.lock().unwrap().extend(pages);
        complete(request);
    }

    fn mapped_now(&self, at: ReadAt, bytes: u64) -> Option<HostRange> {
        let end = at.offset_bytes + bytes;
        if end > self.claimed_pages * PAGE {
            return None;
        }
        // Addresses of nothing: the kernel finds no content there.
        let start = match end <= self.pages * PAGE {
            true => {
                let offset = usize::try_from(at.offset_bytes).unwrap();
                self.content[self.start + offset..]
                    .as_ptr()
                    .expose_provenance()
            }
            false => 1 << 46,
        };
        HostRange::new(HostAddress(start), usize::try_from(bytes).unwrap()).ok()
    }
}

#[test]
fn mapped_content_is_installed_from_where_it_is() {
    let Some(region) = region(64, Backing::Anonymous) else {
        return;
    };
    let mode = Mode::Missing;
    let mapped = Mapped::new(64, 64);
    let (pager, _) = serve(&region, mode, Arc::<Mapped>::clone(&mapped), PERSISTENT);
    let _ = join("an exit", exit(&pager, 7)).unwrap();
    let running = Prefetch::spawn(&pager, PrefetchConfig::default()).unwrap();
    assert!(running.finish().unwrap().is_complete);
    check_all(&region);
    assert!(mapped.requested.lock().unwrap().is_empty());
    assert_eq!(pager.counted().ahead_pages, 63);
}

/// A file may be truncated after its source has found the content: no page reads as zeroes.
#[test]
fn mapped_content_that_has_gone_is_requested() {
    let Some(region) = region(16, Backing::Anonymous) else {
        return;
    };
    let mode = Mode::Missing;
    let mapped = Mapped::new(8, 12);
    let (pager, _) = serve(&region, mode, Arc::<Mapped>::clone(&mapped), PERSISTENT);
    for page in [3, 9, 14] {
        let _ = join("an exit", exit(&pager, page)).unwrap();
    }
    assert_eq!(*mapped.requested.lock().unwrap(), [9, 14]);
    let batch_bytes = 4 * PAGE;
    let running = Prefetch::spawn(&pager, PrefetchConfig { batch_bytes }).unwrap();
    assert!(running.finish().unwrap().is_complete);
    check_all(&region);
}

/// In MINOR mode this process would have to read it, which a truncated file would end by a signal.
#[test]
fn mapped_content_is_not_read_by_this_process() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let mode = Mode::Minor;
    let mapped = Mapped::new(0, 4);
    let (pager, _) = serve(&region, mode, Arc::<Mapped>::clone(&mapped), PERSISTENT);
    let _ = join("an exit", exit(&pager, 1)).unwrap();
    assert_eq!(*mapped.requested.lock().unwrap(), [1]);
}

#[derive(Default)]
struct Seen(Mutex<Vec<(u64, Access)>>);

impl Observer for Seen {
    fn touched(&self, fault: &Fault) {
        self.0.lock().unwrap().push((fault.page.0, fault.access));
    }
}

/// Pages that came ahead, or by fault-around, are not touched.
#[test]
fn an_observer_sees_each_touch_of_a_missing_page() {
    let Some(region) = region(32, Backing::Shmem) else {
        return;
    };
    let mode = Mode::Missing;
    for contents in [
        Contents::Source(Half::new(|page| page % 3 != 0) as Arc<dyn Source>),
        support::pattern(),
    ] {
        let seen = Arc::new(Seen::default());
        let pager = Pager::new().unwrap();
        let observer: Arc<dyn Observer> = Arc::<Seen>::clone(&seen);
        let config = RegionConfig::local(Arc::clone(&region), mode, contents);
        let id = pager.add(config.fault_around(4).observe(observer)).unwrap();
        for page in [17, 3, 18, 3, 30] {
            let _ = join("an exit", exit(&pager, page)).unwrap();
        }
        let read = |&(page, access): &(u64, Access)| {
            assert_eq!(access, Access::Read);
            page
        };
        let pages: Vec<u64> = seen.0.lock().unwrap().iter().map(read).collect();
        assert!(
            pages == [17, 3, 30] || pages == [17, 3, 18, 30],
            "{pages:?}"
        );
        pager.remove(id).unwrap();
        drop(pager);
        region.punch(region.all_pages()).unwrap();
    }
}
