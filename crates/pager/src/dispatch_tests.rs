use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use pagetide_memory::{Access, Backing, GuestAddress, Region};
use pagetide_uapi::userfaultfd::{Mode, Userfaultfd};

use super::*;
use crate::claim::Claim;
use crate::{Contents, RegionConfig, RetryPolicy};

const PAGE: u64 = 4096;

/// Keeps all requests.
#[derive(Default)]
struct Kept(Mutex<Vec<Request>>);

impl Kept {
    fn requests(&self) -> std::sync::MutexGuard<'_, Vec<Request>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a request.
    fn next(&self, urgency: Urgency) -> Request {
        for _ in 0..3000 {
            let mut requests = self.requests();
            let found = requests
                .iter()
                .position(|request| request.urgency() == urgency);
            if let Some(found) = found {
                return requests.remove(found);
            }
            drop(requests);
            thread::sleep(Duration::from_millis(10));
        }
        panic!("no {urgency:?} request");
    }
}

impl Source for Kept {
    fn submit(&self, request: Request) {
        self.requests().push(request);
    }
}

fn complete(request: Request) {
    let bytes = vec![1; usize::try_from(request.bytes()).unwrap()];
    request.complete(Content::Bytes(&bytes));
}

/// The answer to a thread's request comes while prefetch's answer has claimed the page, and prefetch's answer
/// then cannot be installed: the page needs another request, since the first one has ended.
#[test]
fn a_page_whose_answer_came_during_a_claim_that_failed_is_requested_again() {
    if let Err(error) = Userfaultfd::available() {
        println!("SKIP: {error}");
        return;
    }
    let memory = Region::new(GuestAddress(0), 8 * PAGE, Backing::Shmem).unwrap();
    let memory = Arc::new(memory);
    let source = Arc::new(Kept::default());
    let pager = Pager::new().unwrap();
    let contents = Contents::Source(Arc::<Kept>::clone(&source));
    let config = RegionConfig::local(Arc::clone(&memory), Mode::Missing, contents);
    let id = pager
        .add(config.retry_policy(RetryPolicy {
            attempts: 1000,
            ..RetryPolicy::default()
        }))
        .unwrap();
    let table = pager.table();
    let region = table.region(id).unwrap();
    let all = region.all_pages();
    let requested = region
        .missing()
        .request_ahead(&region.map, PageIndex(0), all);
    assert_eq!(requested, Some(all));
    pager.submit(region);
    let bulk = source.next(Urgency::Bulk);
    let mut resolver = pager.resolver(Some(0)).unwrap();
    let page = GuestAddress(5 * PAGE);
    let waiting = thread::spawn(move || resolver.resolve_exit(page, Access::Read));
    let urgent = source.next(Urgency::Urgent);
    let claim = Claim::new(region, region.map.claim_arrived(all).unwrap());
    complete(urgent);
    drop(claim);
    assert!(!waiting.is_finished());
    // Other code maps a page, so that the rest is not installed.
    rustix::io::pwrite(memory.file().unwrap(), &[7; 4096], 2 * PAGE).unwrap();
    complete(bulk);
    complete(source.next(Urgency::Urgent));
    let _ = waiting.join().unwrap().unwrap();
}

/// Has all content at once. Meanwhile, prefetch asks for the next page, and gets an answer that is dropped; other
/// code maps that page.
struct Racing {
    memory: Arc<Region>,
    pager: Mutex<Option<(Arc<Pager>, RegionId)>>,
}

impl Source for Racing {
    fn submit(&self, request: Request) {
        complete(request);
    }

    fn fill_now(&self, _: crate::ReadAt, room: &mut crate::Room<'_>) -> Option<crate::Filled> {
        let pager = self.pager.lock().unwrap_or_else(PoisonError::into_inner);
        let (pager, id) = pager.as_ref()?;
        let next = PageRange::new(PageIndex(6), 1);
        let table = pager.table();
        let region = table.region(*id)?;
        let mut missing = region.missing();
        missing.request_ahead(&region.map, next.first(), next)?;
        missing.requests.clear();
        drop(missing);
        rustix::io::pwrite(self.memory.file()?, &[7; 4096], 6 * PAGE).ok()?;
        room.buffer()?.fill(1);
        Some(crate::Filled::Bytes)
    }
}

/// A fault succeeds although a neighbour cannot be installed, and leaves no page Pending without a request.
#[test]
fn a_fault_that_gives_a_neighbour_back_leaves_no_page_without_a_request() {
    if let Err(error) = Userfaultfd::available() {
        println!("SKIP: {error}");
        return;
    }
    let memory = Region::new(GuestAddress(0), 8 * PAGE, Backing::Shmem).unwrap();
    let memory = Arc::new(memory);
    let source = Arc::new(Racing {
        memory: Arc::clone(&memory),
        pager: Mutex::new(None),
    });
    let pager = Pager::new().unwrap();
    let contents = Contents::Source(Arc::<Racing>::clone(&source));
    let config = RegionConfig::local(memory, Mode::Missing, contents);
    let id = pager.add(config.fault_around(4)).unwrap();
    *source.pager.lock().unwrap() = Some((Arc::clone(&pager), id));
    let mut resolver = pager.resolver(Some(0)).unwrap();
    let resolved = resolver.resolve_exit(GuestAddress(5 * PAGE), Access::Read);
    assert!(resolved.is_ok(), "{resolved:?}");
    let table = pager.table();
    let map = &table.region(id).unwrap().map;
    let states: Vec<_> = (4..8)
        .filter_map(|page| map.state(PageIndex(page)))
        .collect();
    let [before, wanted, neighbour, after] = states[..] else {
        panic!("{states:?}");
    };
    assert!(before.is_settled() && wanted.is_settled() && after.is_settled());
    assert_eq!(neighbour, PageState::Absent);
    *source.pager.lock().unwrap() = None;
}
