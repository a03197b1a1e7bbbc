//! A source of your own that is slow and asynchronous, and fails now and then.
//!
//! The source imitates an HTTP client or an object store. A thread answers each request later and in another
//! order, and fails every third request at first; the pager repeats it. Halfway the "server" is down for a
//! while: the region stalls until its owner resumes it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, mpsc};
use std::time::Duration;

use anyhow::{Context, ensure};
use pagetide_memory::{Backing, GuestAddress, PageIndex, Region};
use pagetide_pager::{
    Content, Contents, Mode, Notice, Pager, Prefetch, PrefetchConfig, ReaderConfig, Readers,
    RegionConfig, Request, RetryPolicy, Source, SourceError, Urgency,
};

const GPA: GuestAddress = GuestAddress(1 << 32);
const PAGES: u64 = 512;

/// The value of every byte of page `page`.
fn byte_of(page: u64) -> u8 {
    page.to_le_bytes()[0] | 1
}

/// The client: requests wait here for the thread that answers them.
#[derive(Default)]
struct Client {
    queue: Mutex<Queue>,
    more: Condvar,
    is_down: AtomicBool,
    asked: AtomicU64,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Request>,
    is_over: bool,
}

impl Source for Client {
    // The thread that faults calls this: pass the request on, and do not block.
    fn submit(&self, request: Request) {
        let mut queue = self.lock();
        match request.urgency() {
            Urgency::Urgent => queue.waiting.push_front(request),
            Urgency::Bulk => queue.waiting.push_back(request),
        }
        self.more.notify_one();
    }
}

impl Client {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("nothing panics under the lock")
    }

    /// The next request; None at the end of the program.
    fn next(&self) -> Option<Request> {
        let idle = |queue: &mut Queue| queue.waiting.is_empty() && !queue.is_over;
        let queue = self.more.wait_while(self.lock(), idle);
        let mut queue = queue.expect("nothing panics under the lock");
        queue.waiting.pop_front()
    }

    fn answer_requests(&self) {
        while let Some(request) = self.next() {
            std::thread::sleep(Duration::from_millis(1));
            let asked = self.asked.fetch_add(1, Ordering::Relaxed);
            if self.is_down.load(Ordering::Acquire) {
                request.fail(SourceError::Unavailable("connection refused".into()));
            } else if asked % 3 == 2 {
                request.fail(SourceError::Unavailable("503 Service Unavailable".into()));
            } else {
                let pages = request.pages().iter();
                let content: Vec<u8> = pages.flat_map(|page| [byte_of(page.0); 4096]).collect();
                request.complete(Content::Bytes(&content));
            }
        }
    }
}

fn main() -> anyhow::Result<()> {
    let client = Arc::new(Client::default());
    let answering = Arc::clone(&client);
    let server = std::thread::spawn(move || answering.answer_requests());

    let region = Arc::new(Region::new(GPA, PAGES << 12, Backing::Shmem)?);
    let pager = Pager::new()?;
    let (stalled, stalls) = mpsc::channel();
    pager.on_notice(move |notice| {
        println!("notice: {notice}");
        if let Notice::Stalled { region, .. } = notice {
            let _ = stalled.send(*region);
        }
    });
    let source: Arc<dyn Source> = Arc::<Client>::clone(&client);
    let config = RegionConfig::local(Arc::clone(&region), Mode::Missing, Contents::Source(source))
        .retry_policy(RetryPolicy {
            attempts: 4,
            first_backoff: Duration::from_millis(2),
            longest_backoff: Duration::from_millis(10),
            ..RetryPolicy::default()
        });
    let id = pager.add(config)?;
    let readers = Readers::spawn(&pager, ReaderConfig::new(1))?;

    let mut page = [0; 4096];
    let mut check = |index: u64| -> anyhow::Result<()> {
        region.read_guest(PageIndex(index), 0, &mut page)?;
        ensure!(
            page == [byte_of(index); 4096],
            "page {index} has other content"
        );
        Ok(())
    };
    // Read page by page, while every third request fails at first.
    (0..PAGES / 2).try_for_each(&mut check)?;
    println!(
        "half of the memory is installed, {} requests",
        client.asked.load(Ordering::Relaxed)
    );

    // The server is down. An access to a missing page waits; the owner gets a notice and resumes the region.
    client.is_down.store(true, Ordering::Release);
    let (asked, paged) = (&client, &pager);
    std::thread::scope(|scope| {
        let owner = scope.spawn(move || {
            let id = stalls.recv().context("the region was to stall")?;
            asked.is_down.store(false, Ordering::Release);
            paged.resume(id).context("the region is there")
        });
        check(PAGES / 2)?;
        owner
            .join()
            .map_err(|_| anyhow::anyhow!("the owner panicked"))?
    })?;

    // Prefetch installs the rest before the first touch.
    let prefetch = Prefetch::spawn(&pager, PrefetchConfig::default())?;
    ensure!(
        prefetch.finish()?.is_complete,
        "prefetch is to install everything"
    );
    (0..PAGES).try_for_each(&mut check)?;
    let counts = pager.counts(id).context("the region is there")?;
    println!("all {} pages are there and right", counts.present);

    readers.stop();
    client.lock().is_over = true;
    client.more.notify_all();
    server
        .join()
        .map_err(|_| anyhow::anyhow!("the client's thread panicked"))?;
    Ok(())
}
