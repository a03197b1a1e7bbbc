//! Content that was not requested, or is not needed any more.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::error::Error;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, OnceLock};

use pagetide_memory::{Access, Backing, GuestRange, PageState, Region};
use pagetide_pager::{
    Content, InstallFailure, Mapper, Mode, Pager, Prefetch, PrefetchConfig, PushError,
    ReaderConfig, Readers, RegionConfig, RegionId,
};
use support::manual::*;
use support::spawn_asleep;

#[test]
fn unrequested_pages_are_installed_if_they_are_missing() {
    for (mode, backing) in WAYS {
        let Some(region) = region(8, backing) else {
            return;
        };
        let manual = ManualSource::new();
        let (pager, id) = serve(&region, mode, manual.source(), PERSISTENT);
        let waiting = exit(&pager, 2);
        let asked = manual.next();
        let pushed = pager.push(id, range(0, 4), Content::Bytes(&content_of(range(0, 4))));
        assert_eq!(pushed.unwrap(), 4);
        let _ = join("the exit", waiting).unwrap();
        // The push came before the answer; neither the answer nor a second push changes anything.
        let wrong = vec![0xee; 5 * 4096];
        asked.complete(Content::Bytes(&wrong[..4096]));
        let pushed = pager.push(id, range(0, 4), Content::Bytes(&wrong[..4 * 4096]));
        assert_eq!(pushed.unwrap(), 0);
        let five = content_of(range(3, 5));
        assert_eq!(
            pager.push(id, range(3, 5), Content::Bytes(&five)).unwrap(),
            4
        );
        check_all(&region);
    }
}

#[test]
fn pushes_of_the_wrong_size_or_place_are_refused() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let (pager, id) = serve(&region, Mode::Minor, manual.source(), PERSISTENT);
    let page = content_of(range(0, 1));
    let push = |first, count, content| pager.push(id, range(first, count), content);
    for (first, count) in [(0, 0), (8, 1), (7, 2), (u64::MAX - 1, 1), (0, u64::MAX)] {
        let refused = push(first, count, Content::Zero);
        assert!(
            matches!(refused, Err(PushError::NoSuchPages { .. })),
            "{refused:?}"
        );
    }
    let two = content_of(range(0, 2));
    for bytes in [&two[..4095], &two[..0], &two[..4097], &two] {
        let refused = push(0, 1, Content::Bytes(bytes));
        let Err(PushError::WrongSize {
            given,
            wanted: 4096,
        }) = refused
        else {
            panic!("{refused:?}");
        };
        assert_eq!(given, bytes.len() as u64);
    }
    let refused = push(0, 2, Content::Poisoned);
    assert!(matches!(refused, Err(PushError::PoisonedRun)));
    assert_eq!(pager.counts(id).unwrap().absent, 8);
    assert_eq!(push(1, 1, Content::Poisoned).unwrap(), 1);
    assert_lost(&region, 1);
    pager.remove(id).unwrap();
    let refused = push(0, 1, Content::Bytes(&page));
    assert!(matches!(refused, Err(PushError::NoSuchRegion { .. })));
}

#[test]
fn content_for_a_discarded_page_is_dropped() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let (pager, id) = serve(&region, Mode::Minor, manual.source(), PERSISTENT);
    let batch_bytes = 8 * PAGE;
    let running = Prefetch::spawn(&pager, PrefetchConfig { batch_bytes }).unwrap();
    let bulk = manual.next_bulk();
    assert_eq!(pager.discard(id, range(2, 3)).unwrap(), 3);
    complete(bulk);
    assert!(
        within_patience("prefetch", || running.finish())
            .unwrap()
            .is_complete
    );
    assert_eq!(pager.counted().pages, 5);
    assert!((2..5).all(|page| state(&pager, page) == PageState::Removed));
}

/// A thread goes on to wait for the request that it has made.
#[test]
fn a_push_that_cannot_be_installed_changes_nothing() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let (pager, id) = serve(&region, Mode::Missing, manual.source(), PERSISTENT);
    let waiting = exit(&pager, 3);
    let asked = manual.next();
    // Other code maps a page there without the pager.
    let file = region.file().unwrap();
    rustix::io::pwrite(file, &[7; 4096], 2 * PAGE).unwrap();
    let bytes = content_of(range(2, 4));
    let pushed = pager.push(id, range(2, 4), Content::Bytes(&bytes));
    let Err(PushError::Install(InstallFailure::Unexpected { page })) = &pushed else {
        panic!("{pushed:?}")
    };
    assert_eq!(*page, range(2, 1).first());
    assert_eq!(state(&pager, 3), PageState::Pending);
    assert!(!waiting.is_finished());
    complete(asked);
    let _ = join("the exit", waiting).unwrap();
    check_page(&region, 3);
    assert_eq!((manual.log().len(), manual.waiting()), (1, 0));
    for page in [2, 4, 5] {
        assert_eq!(state(&pager, page), PageState::Absent, "page {page}");
    }
    // A push does not stall: its caller gets the error.
    assert!(!pager.source_status(id).unwrap().is_stalled);
}

/// Calls this once, when the first pages were installed.
struct Meanwhile(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Mapper for Meanwhile {
    fn populate(&self, _: GuestRange) -> Result<u64, Box<dyn Error + Send + Sync>> {
        let act = self.0.lock().unwrap().take();
        act.into_iter().for_each(|act| act());
        Ok(0)
    }
}

/// A region of 64 pages, and a push to all of them, of which pages 0 to 31 cannot be installed, because other code has
/// mapped page 20. `act` is called in between.
fn push_in_part(
    region: &Arc<Region>,
    manual: &Arc<ManualSource>,
    begin: impl FnOnce(&Arc<Pager>),
    act: impl FnOnce() + Send + 'static,
) -> (Arc<Pager>, RegionId) {
    let pager = Pager::new().unwrap();
    let mapper = Arc::new(Meanwhile(Mutex::new(Some(Box::new(act)))));
    let config = RegionConfig::local(Arc::clone(region), Mode::Missing, manual.contents());
    let config = config.retry_policy(PERSISTENT).populate(mapper, 1);
    let id = pager.add(config).unwrap();
    begin(&pager);
    let file = region.file().unwrap();
    rustix::io::pwrite(file, &[7; 4096], 20 * PAGE).unwrap();
    let bytes = content_of(range(0, 64));
    let pushed = pager.push(id, range(0, 64), Content::Bytes(&bytes));
    let Err(PushError::Install(InstallFailure::Unexpected { page })) = &pushed else {
        panic!("{pushed:?}")
    };
    assert_eq!(*page, range(20, 1).first());
    (pager, id)
}

/// The answer finds its page claimed, and is dropped.
#[test]
fn a_page_whose_answer_came_during_a_push_that_failed_is_requested_again() {
    let Some(region) = region(64, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let mut waiting = None;
    let asked = Arc::clone(&manual);
    let begin = |pager: &Arc<Pager>| {
        let readers = Readers::spawn(pager, ReaderConfig::new(1)).unwrap();
        let touched = Arc::clone(&region);
        let touching = spawn_asleep("a touch", move || check_page(&touched, 3));
        waiting = Some((readers, touching));
        manual.wait_for_waiting(1);
    };
    let act = move || complete(asked.next());
    let _pager = push_in_part(&region, &manual, begin, act);
    let again = manual.next();
    assert_eq!(again.pages(), range(3, 1));
    complete(again);
    let (readers, touching) = waiting.unwrap();
    touching.join();
    readers.stop();
}

/// The exit finds the page claimed, and waits for the owner.
#[test]
fn an_exit_whose_page_goes_back_to_prefetch_requests_it_urgently() {
    let Some(region) = region(64, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let place = Arc::new(OnceLock::new());
    let (send, receive) = mpsc::channel();
    let its: Arc<OnceLock<Arc<Pager>>> = Arc::clone(&place);
    let mut ahead = None;
    let begin = |pager: &Arc<Pager>| {
        let batch_bytes = 64 * PAGE;
        ahead = Some(Prefetch::spawn(pager, PrefetchConfig { batch_bytes }).unwrap());
        manual.wait_for_waiting(1);
        place.set(Arc::clone(pager)).unwrap();
    };
    let act = move || {
        let pager = Arc::clone(its.get().unwrap());
        let waiting = spawn_asleep("the exit", move || {
            let mut resolver = pager.resolver(Some(0)).unwrap();
            resolver.resolve_exit(gpa(3), Access::Read)
        });
        send.send(waiting).unwrap();
    };
    let (pager, _) = push_in_part(&region, &manual, begin, act);
    let urgent = manual.next_urgent();
    assert_eq!(urgent.pages(), range(3, 1));
    complete(urgent);
    let _ = receive.recv().unwrap().join().unwrap();
    check_page(&region, 3);
    pager.stop();
    drop(ahead);
}
