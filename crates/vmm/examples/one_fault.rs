//! One fault of each kind, as `cargo xtask trace` records them: which functions it takes is in
//! docs/design/functions-of-a-fault.md. It needs a userfaultfd, and neither KVM nor our kernel.

use std::error::Error;
use std::hint::black_box;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use pagetide_kvm::FaultExit;
use pagetide_memory::{Access, Backing, GuestAddress, PageIndex, Region};
use pagetide_pager::{
    Content, Contents, Holes, Mode, Pager, ReaderConfig, Readers, RegionConfig, Request,
    Resolution, RetryPolicy, Source,
};
use pagetide_vmm::Paging;

const GPA: GuestAddress = GuestAddress(1 << 32);
const PAGES: u64 = 8;
const CONTENT: [u8; 4096] = [7; 4096];

/// What is entered between calls of these belongs to a fault.
#[inline(never)]
fn exit_begins() {}

#[inline(never)]
fn message_begins() {}

#[inline(never)]
fn fault_ends() {}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    exit()?;
    message()
}

/// An exit on a page whose content is in the page cache.
fn exit() -> Result<(), Box<dyn Error + Send + Sync>> {
    let region = Arc::new(Region::new(GPA, PAGES << 12, Backing::Shmem)?);
    for page in 0..PAGES {
        region.write_service(PageIndex(page), 0, &CONTENT)?;
    }
    let pager = Pager::new()?;
    let contents = Contents::PageCache(Holes::AreMissing);
    pager.add(RegionConfig::local(region, Mode::Minor, contents))?;
    let paging = Paging::new(&pager, 1);
    let fault = |page: u64| FaultExit {
        gpa: GuestAddress(GPA.0 + (page << 12)),
        size_bytes: 4096,
        access: Access::Read,
        absent: true,
        private: false,
        poisoned: false,
        flags: 0,
    };
    // Not the first of the thread.
    let _ = paging.resolve(0, &fault(0))?;
    let fault = fault(1);
    exit_begins();
    let resolution = paging.resolve(0, &fault)?;
    fault_ends();
    assert!(
        matches!(resolution, Resolution::Installed { .. }),
        "{resolution:?}"
    );
    Ok(())
}

/// A source whose thread answers.
struct Peer(Mutex<Sender<Request>>);

impl Source for Peer {
    fn submit(&self, request: Request) {
        if let Ok(requests) = self.0.lock() {
            // Otherwise the thread has ended, and dropping a request is an answer.
            let _ = requests.send(request);
        }
    }
}

/// A userfaultfd's message, for a page that a source delivers.
fn message() -> Result<(), Box<dyn Error + Send + Sync>> {
    let (send, requests) = channel();
    let peer = thread::spawn(move || {
        for request in requests {
            // As a peer does, it answers when the thread that has asked sleeps.
            rest();
            Request::complete(request, Content::Bytes(&CONTENT));
        }
    });
    let region = Arc::new(Region::new(GPA, PAGES << 12, Backing::Anonymous)?);
    let start = region.guest().start().0;
    let pager = Pager::new()?;
    let contents = Contents::Source(Arc::new(Peer(Mutex::new(send))));
    let config = RegionConfig::local(region, Mode::Missing, contents);
    let id = pager.add(config.retry_policy(RetryPolicy::default()))?;
    let readers = Readers::spawn(&pager, ReaderConfig::new(1))?;
    touch(start);
    rest();
    message_begins();
    touch(start + 4096);
    // The reader's turn for a fault begins and ends in its sleep.
    rest();
    fault_ends();
    readers.stop();
    pager.remove(id)?;
    drop(pager);
    assert!(peer.join().is_ok());
    Ok(())
}

/// Gives other threads the time to go back to sleep.
fn rest() {
    thread::sleep(Duration::from_millis(100));
}

/// Reads a byte, as a guest does.
fn touch(address: usize) {
    let at = std::ptr::with_exposed_provenance::<u8>(address);
    // SAFETY: read_volatile requires mapped memory: the address is in the region that the caller has.
    assert_eq!(black_box(unsafe { at.read_volatile() }), CONTENT[0]);
}
