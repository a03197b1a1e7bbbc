//! A userfaultfd thread whose fault cannot be resolved stays asleep until the region's owner resumes
//! it. No failed fault may wake a thread: the thread would fault again at once, and for ever.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;

use pagetide_memory::{Backing, Region};
use pagetide_pager::{
    Filled, Mode, Notice, Pager, Prefetch, PrefetchConfig, ReadAt, ReaderConfig, Readers, RegionId,
    Request, RetryPolicy, Room, Source,
};
use pagetide_test_support::Sleeper;
use support::manual::*;
use support::spawn_asleep;

const PAGES: u64 = 16;

/// The first page that a [`Spoiler`] spoils.
const SPOILT: u64 = 12;

/// What becomes of the memory while a [`Spoiler`] reads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Spoils {
    /// The memory's file ends before page [`SPOILT`].
    Cuts,
    /// Other code than the pager writes page [`SPOILT`].
    Writes,
}

/// Has all content at once. While it spoils, no content can be installed at page [`SPOILT`], nor behind it where it
/// cuts.
struct Spoiler {
    region: Arc<Region>,
    how: Spoils,
    spoils: AtomicBool,
    /// How often it was asked for a page from [`SPOILT`] on.
    calls: AtomicU64,
}

impl Source for Spoiler {
    fn submit(&self, request: Request) {
        complete(request);
    }

    fn fill_now(&self, at: ReadAt, room: &mut Room<'_>) -> Option<Filled> {
        if at.gpa >= gpa(SPOILT) {
            self.calls.fetch_add(1, Ordering::AcqRel);
        }
        if self.spoils.load(Ordering::Acquire) {
            let file = self.region.file().unwrap();
            match self.how {
                Spoils::Cuts => rustix::fs::ftruncate(file, SPOILT * PAGE).unwrap(),
                Spoils::Writes => {
                    rustix::io::pwrite(file, &[7; 4096], SPOILT * PAGE).unwrap();
                }
            }
        }
        fill(at.gpa, room.buffer()?);
        Some(Filled::Bytes)
    }
}

/// Memory below a source that spoils it. No thread reads faults yet.
struct Spoiled {
    region: Arc<Region>,
    spoiler: Arc<Spoiler>,
    pager: Arc<Pager>,
    id: RegionId,
    told: Receiver<Notice>,
    /// The first page below [`SPOILT`] that nothing has touched yet.
    untouched: Cell<u64>,
}

impl Spoiled {
    fn new(how: Spoils) -> Option<Self> {
        let region = region(PAGES, Backing::Shmem)?;
        let spoiler = Arc::new(Spoiler {
            region: Arc::clone(&region),
            how,
            spoils: AtomicBool::new(true),
            calls: AtomicU64::new(0),
        });
        let source: Arc<dyn Source> = Arc::<Spoiler>::clone(&spoiler);
        let policy = RetryPolicy {
            attempts: 5,
            ..PERSISTENT
        };
        let (pager, id) = serve(&region, Mode::Missing, source, policy);
        Some(Self {
            told: notices(&pager),
            untouched: Cell::new(0),
            region,
            spoiler,
            pager,
            id,
        })
    }

    fn readers(&self) -> Readers {
        Readers::spawn(&self.pager, ReaderConfig::new(1)).unwrap()
    }

    fn touch(&self, page: u64) -> Sleeper<()> {
        let touched = Arc::clone(&self.region);
        spawn_asleep("a toucher", move || check_page(&touched, page))
    }

    fn calls(&self) -> u64 {
        self.spoiler.calls.load(Ordering::Acquire)
    }

    /// Receives a notice for each thread, and no further one: none of them is woken, faults again, and has a notice
    /// sent again.
    fn unresolved<'a>(&self, touching: impl IntoIterator<Item = &'a Sleeper<()>> + Clone) {
        for _ in touching.clone() {
            let notice = self.told.recv_timeout(PATIENCE).unwrap();
            assert!(matches!(notice, Notice::Unresolved(_)), "{notice}");
            assert_eq!(notice.resumable(), Some(self.id));
        }
        // A thread that the reader wakes after its notice has been woken now, ...
        self.resolve_another();
        for thread in touching {
            thread.wait_until_asleep();
        }
        // ... and if it has faulted again, the reader has come to that fault.
        self.resolve_another();
        let further = self.told.try_recv();
        assert!(further.is_err(), "{further:?}");
    }

    /// A fault that the only reader resolves after all earlier ones.
    fn resolve_another(&self) {
        let page = self.untouched.replace(self.untouched.get() + 1);
        assert!(page < SPOILT);
        let region = Arc::clone(&self.region);
        within_patience("a touch", move || check_page(&region, page));
    }

    /// Gives the file its length again: beyond a file's end, a woken thread would get SIGBUS.
    fn lengthen(&self) {
        rustix::fs::ftruncate(self.region.file().unwrap(), PAGES * PAGE).unwrap();
    }

    fn spoil_no_more(&self) {
        self.spoiler.spoils.store(false, Ordering::Release);
    }
}

#[test]
fn a_thread_that_was_left_asleep_faults_again_when_its_region_is_resumed() {
    let Some(memory) = Spoiled::new(Spoils::Cuts) else {
        return;
    };
    let touching = memory.touch(SPOILT);
    let _readers = memory.readers();
    for attempts in 1..=3 {
        memory.unresolved([&touching]);
        assert_eq!(memory.calls(), attempts);
        memory.lengthen();
        if attempts == 3 {
            memory.spoil_no_more();
        }
        assert!(!touching.is_finished());
        memory.pager.resume(memory.id).unwrap();
    }
    touching.join();
}

#[test]
fn a_thread_that_was_left_asleep_faults_again_when_its_region_has_another_source() {
    let Some(memory) = Spoiled::new(Spoils::Cuts) else {
        return;
    };
    let touching = memory.touch(SPOILT);
    let _readers = memory.readers();
    memory.unresolved([&touching]);
    memory.lengthen();
    memory.spoil_no_more();
    assert!(!touching.is_finished());
    let source: Arc<dyn Source> = Arc::<Spoiler>::clone(&memory.spoiler);
    memory.pager.replace_source(memory.id, source).unwrap();
    touching.join();
}

#[test]
fn threads_that_were_left_asleep_do_not_wake_each_other() {
    let Some(memory) = Spoiled::new(Spoils::Cuts) else {
        return;
    };
    let touching = [0, 0, 1, 0].map(|page| memory.touch(SPOILT + page));
    let _readers = memory.readers();
    memory.unresolved(&touching);
    assert_eq!(memory.calls(), 4);
    memory.lengthen();
    memory.spoil_no_more();
    memory.pager.resume(memory.id).unwrap();
    for thread in touching {
        join("a toucher", thread);
    }
}

/// Such a thread would read the foreign page.
#[test]
fn threads_stay_asleep_on_foreign_pages() {
    let Some(memory) = Spoiled::new(Spoils::Writes) else {
        return;
    };
    let touched = Arc::clone(&memory.region);
    let touching = spawn_asleep("a toucher", move || assert_lost(&touched, SPOILT));
    let _readers = memory.readers();
    let notice = memory.told.recv_timeout(PATIENCE).unwrap();
    assert_eq!(notice.resumable(), None, "{notice}");
    memory.spoil_no_more();
    let wakes = memory.pager.counted().wakes;
    memory.pager.resume(memory.id).unwrap();
    assert_eq!(memory.pager.counted().wakes, wakes);
    // Prefetch cannot install the page either.
    let batch_bytes = PAGES * PAGE;
    let ahead = Prefetch::spawn(&memory.pager, PrefetchConfig { batch_bytes }).unwrap();
    let ended = within_patience("prefetch", || ahead.finish()).unwrap();
    assert!(!ended.is_complete);
    assert!(!touching.is_finished());
    // The owner takes the page away, and gives the rest up.
    memory.region.punch(range(SPOILT, 1)).unwrap();
    memory.pager.abandon(memory.id).unwrap();
    touching.join();
}
