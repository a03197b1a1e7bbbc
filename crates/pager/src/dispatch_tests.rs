use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use pagetide_memory::{Access, Backing, GuestAddress, Region, Request as Requested};
use pagetide_uapi::userfaultfd::{Mode, Userfaultfd};

use super::*;
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
    let Requested::Made(pages) = region.map.request_run(PageIndex(0), all, Urgency::Bulk) else {
        panic!("the pages are absent");
    };
    pager.want(region, Wanted { pages, fault: None });
    let bulk = source.next(Urgency::Bulk);
    let mut resolver = pager.resolver(Some(0)).unwrap();
    let page = GuestAddress(5 * PAGE);
    let waiting = thread::spawn(move || resolver.resolve_exit(page, Access::Read));
    let urgent = source.next(Urgency::Urgent);
    let claim = region.map.claim_arrived(all).unwrap();
    complete(urgent);
    drop(claim);
    assert!(!waiting.is_finished());
    // Other code maps a page, so that the rest is not installed.
    rustix::io::pwrite(memory.file().unwrap(), &[7; 4096], 2 * PAGE).unwrap();
    complete(bulk);
    complete(source.next(Urgency::Urgent));
    let _ = waiting.join().unwrap().unwrap();
}
