//! A VMM on Tokio serves its own memory, and its source is asynchronous, too.
//!
//! The pager is one descriptor of the runtime, and each request of the source is a task. The runtime has one thread, as in a
//! VMM with a single event loop: another thread, as a vCPU's, touches the memory, since whoever serves must not.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use pagetide_memory::{Backing, GuestAddress, PageIndex, Region};
use pagetide_pager::{Content, Contents, Mode, Pager, RegionConfig, Request, Serving, Source};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::unix::AsyncFd;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

const GPA: GuestAddress = GuestAddress(1 << 32);
const PAGES: u64 = 256;

/// How long one turn of the loop serves faults, before other tasks have theirs.
const TURN: Duration = Duration::from_millis(1);

/// The value of every byte of page `page`.
fn byte_of(page: u64) -> u8 {
    page.to_le_bytes()[0] ^ 0x5a
}

/// A client of a store that answers later.
struct Client {
    runtime: Handle,
    asked: Arc<AtomicU64>,
}

impl Source for Client {
    // The thread that faults calls this: it only starts a task.
    fn submit(&self, request: Request) {
        let asked = Arc::clone(&self.asked);
        self.runtime.spawn(async move {
            asked.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(TURN).await;
            let pages = request.pages().iter();
            let content: Vec<u8> = pages.flat_map(|page| [byte_of(page.0); 4096]).collect();
            // A task that is dropped instead has failed: the pager asks again.
            request.complete(Content::Bytes(&content));
        });
    }
}

/// The pager's descriptor as Tokio takes it.
struct Polled(Serving);

impl AsRawFd for Polled {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl Polled {
    fn is_readable(&self) -> bool {
        let mut polled = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }
}

/// Serves faults until it is dropped.
async fn serve(serving: Serving) -> anyhow::Result<()> {
    // SAFETY: a `Serving` has one descriptor, which is open as long as it is.
    let pager = unsafe { AsyncFd::register(Polled(serving)) };
    let mut pager = pager.map_err(std::io::Error::from)?;
    loop {
        let mut ready = pager.readable_mut().await?;
        // Tokio reports a descriptor when it becomes readable, and not as long as it is: what is left of a turn has to be
        // looked for.
        while ready.get_inner().is_readable() {
            ready.get_inner_mut().0.process_ready_within(TURN)?;
            tokio::task::yield_now().await;
        }
        ready.clear_ready();
    }
}

fn main() -> anyhow::Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let region = Arc::new(Region::new(GPA, PAGES << 12, Backing::Shmem)?);
    let pager = Pager::new()?;
    let asked = Arc::new(AtomicU64::new(0));
    let source = Client {
        runtime: runtime.handle().clone(),
        asked: Arc::clone(&asked),
    };
    let contents = Contents::Source(Arc::new(source));
    let config = RegionConfig::local(Arc::clone(&region), Mode::Missing, contents);
    let id = pager.add(config.fault_around(4))?;
    runtime.block_on(async {
        let (done, is_done) = oneshot::channel();
        std::thread::spawn(move || done.send(read_all(&region)));
        // A `Serving` stays on its thread: it is polled here, and not spawned.
        tokio::select! {
            served = serve(Serving::new(&pager, 32)) => served,
            read = is_done => read.context("the reading thread")?,
        }
    })?;
    let present = pager.counts(id).context("the region is there")?.present;
    let requests = asked.load(Ordering::Relaxed);
    println!("{present} pages installed by one event loop, {requests} requests");
    Ok(())
}

/// What a vCPU's thread does: it touches memory.
fn read_all(region: &Region) -> anyhow::Result<()> {
    let mut page = [0; 4096];
    for index in 0..PAGES {
        region.read_guest(PageIndex(index), 0, &mut page)?;
        ensure!(
            page == [byte_of(index); 4096],
            "page {index} has other content"
        );
    }
    Ok(())
}
