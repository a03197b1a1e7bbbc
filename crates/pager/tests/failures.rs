//! What cannot be resolved ends with its cause: no hang, and nothing installed in its stead.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::error::Error;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use common::*;
use pagetide_memory::{Backing, PageIndex, PageState};
use pagetide_pager::{
    Fetch, Fetched, Mode, PageCacheSource, Pager, ReaderConfig, ReaderError, Readers, Resolution,
    ResolveError, SourceError, SpawnError,
};

fn chain(error: &dyn Error) -> Vec<String> {
    let mut words = vec![error.to_string()];
    let mut next = error.source();
    while let Some(error) = next {
        words.push(error.to_string());
        next = error.source();
    }
    words
}

#[test]
fn a_source_that_fails_ends_the_exit_with_its_cause() {
    for (mode, backing) in [
        (Mode::Minor, Backing::Shmem),
        (Mode::Missing, Backing::Anonymous),
    ] {
        let Some(region) = region(16, backing) else {
            return;
        };
        let source = SourceFn(|_: &mut Fetch<'_>| Err(unavailable("the other side hung up")));
        let pager = Pager::builder(mode, source)
            .region(Arc::clone(&region))
            .fault_around(8)
            .build();
        let pager = pager.unwrap();
        let error = pager
            .resolver(2)
            .resolve_exit(&read_exit(&region, 3))
            .unwrap_err();
        let chain = chain(&error);
        assert_eq!(
            chain[0],
            "read of gpa 0x100003000 by vCPU 2 (by exit): no content"
        );
        assert_eq!(chain.last().unwrap(), "the other side hung up");
        let map = pager.page_map(only(&pager)).unwrap();
        assert_eq!(map.counts().absent, 16);
        assert!((0..16).all(|page| !is_mapped(&region, page)));
    }
}

#[test]
fn a_source_that_gives_too_little_or_too_much_installs_nothing() {
    for (mode, given) in [
        (Mode::Minor, 4095),
        (Mode::Missing, 4095),
        (Mode::Minor, 4097),
    ] {
        let Some(region) = region(4, Backing::Shmem) else {
            return;
        };
        let source = SourceFn(move |fetch: &mut Fetch<'_>| {
            fetch.push(&vec![1; given])?;
            Ok(Fetched::Filled)
        });
        let pager = pager(&region, mode, source);
        let error = pager
            .resolver(0)
            .resolve_exit(&read_exit(&region, 0))
            .unwrap_err();
        let ResolveError::Fetch {
            source: SourceError::WrongSize { wanted, .. },
            ..
        } = error
        else {
            panic!("{error:?}");
        };
        assert_eq!(wanted, 4096);
        assert!(!is_mapped(&region, 0));
    }
}

#[test]
fn a_source_that_fails_under_a_reader_ends_the_readers_with_its_cause() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let source = SourceFn(|fetch: &mut Fetch<'_>| {
        if fetch.pages().contains(PageIndex(2)) {
            return Err(unavailable("the other side hung up"));
        }
        push_pattern(fetch)
    });
    let pager = pager(&region, Mode::Minor, source);
    let (told, on_failure) = mpsc::channel();
    pager.on_failure(move |failure| told.send(failure.to_string()).unwrap());
    let readers = Readers::spawn(&pager, ReaderConfig::new(2)).unwrap();
    let touched = Arc::clone(&region);
    let toucher = thread::spawn(move || {
        let mut seen = [1; 8];
        touched.read_guest(PageIndex(2), 0, &mut seen).unwrap();
    });

    let said = on_failure.recv_timeout(PATIENCE).unwrap();
    assert_eq!(said, "a reader thread could not resolve a fault");
    assert!(pager.is_stopped());
    let failure = pager.failure().unwrap().clone();
    let chain = chain(&failure);
    assert_eq!(chain.last().unwrap(), "the other side hung up", "{chain:?}");
    assert!(chain[1].contains("gpa 0x100002000"), "{chain:?}");

    // The other reader still serves; the page that could not be had is not there.
    within_patience("another page", {
        let region = Arc::clone(&region);
        move || check_page(&region, 1)
    });
    let stopped = within_patience("stopping", move || readers.stop());
    assert_eq!(stopped.unwrap_err().to_string(), failure.to_string());
    assert!(!toucher.is_finished(), "whoever waits for it stays asleep");
    assert_eq!(state(&pager, 2), PageState::Absent);
    assert!(!is_mapped(&region, 2));

    // A callback that comes late is told at once.
    let late = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&late);
    pager.on_failure(move |_| flag.store(true, Ordering::Relaxed));
    assert!(late.load(Ordering::Relaxed));
    // Closing the userfaultfd lets the sleeper go.
    drop(pager);
    within_patience("the toucher", move || toucher.join().unwrap());
}

#[test]
fn a_source_that_panics_under_a_reader_is_a_failure() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let pager = pager(
        &region,
        Mode::Minor,
        SourceFn(|_: &mut Fetch<'_>| panic!("out of luck")),
    );
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let touched = Arc::clone(&region);
    let toucher = thread::spawn(move || touched.read_guest(PageIndex(0), 0, &mut [0]).unwrap());
    eventually("failure", || pager.failure().is_some());
    let failure = within_patience("stopping", move || readers.stop()).unwrap_err();
    let ReaderError::Panicked { message } = failure.cause() else {
        panic!("{failure}")
    };
    assert_eq!(message, "out of luck");
    assert_eq!(state(&pager, 0), PageState::Absent);
    drop(pager);
    within_patience("the toucher", move || toucher.join().unwrap());
}

/// A source whose first fetch is held up until the test lets go of it, and ends as told.
struct Held {
    arrived: mpsc::Receiver<()>,
    release: mpsc::Sender<Result<Fetched, SourceError>>,
}

fn held() -> (
    Held,
    impl Fn(&mut Fetch<'_>) -> Result<Fetched, SourceError> + Send + Sync,
) {
    let (arrive, arrived) = mpsc::channel();
    let (release, released) = mpsc::channel();
    let released = Mutex::new(released);
    let source = move |fetch: &mut Fetch<'_>| {
        arrive.send(()).unwrap();
        let result = released.lock().unwrap().recv().unwrap();
        push_pattern(fetch)?;
        result
    };
    (Held { arrived, release }, source)
}

#[test]
fn whoever_joined_the_owner_shares_its_luck() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let (held, source) = held();
    let pager = pager(&region, Mode::Minor, SourceFn(source));
    let spawn = |vcpu| {
        let (mut resolver, region) = (pager.resolver(vcpu), Arc::clone(&region));
        spawn_asleep("exit", move || {
            let result = resolver.resolve_exit(&read_exit(&region, 1));
            (result, *resolver.counters())
        })
    };

    let owner = spawn(0);
    held.arrived.recv_timeout(PATIENCE).unwrap();
    let joiners = [spawn(1), spawn(2)];
    assert!(joiners.iter().all(|joiner| !joiner.is_finished()));
    held.release.send(Ok(Fetched::Filled)).unwrap();
    let (result, _) = owner.join().unwrap();
    assert!(matches!(result, Ok(Resolution::Installed { .. })));
    for joiner in joiners {
        let (result, counters) = joiner.join().unwrap();
        assert_eq!(result.unwrap(), Resolution::JoinedOwner);
        assert_eq!((counters.lost_claims, counters.waits), (1, 1));
    }
}

#[test]
fn after_an_owner_failed_the_next_tries_itself() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let (held, source) = held();
    let pager = pager(&region, Mode::Minor, SourceFn(source));
    let spawn = |vcpu| {
        let (mut resolver, region) = (pager.resolver(vcpu), Arc::clone(&region));
        spawn_asleep("exit", move || {
            resolver.resolve_exit(&read_exit(&region, 1))
        })
    };
    let owner = spawn(0);
    held.arrived.recv_timeout(PATIENCE).unwrap();
    let next = spawn(1);
    held.release
        .send(Err(unavailable("not this time")))
        .unwrap();
    assert!(matches!(
        owner.join().unwrap(),
        Err(ResolveError::Fetch { .. })
    ));
    held.arrived.recv_timeout(PATIENCE).unwrap();
    held.release.send(Ok(Fetched::Filled)).unwrap();
    assert!(matches!(
        next.join().unwrap(),
        Ok(Resolution::Installed { .. })
    ));
    check_page(&region, 1);
}

#[test]
fn a_sleeper_whose_owner_failed_gets_another_try() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let (held, source) = held();
    let pager = pager(&region, Mode::Minor, SourceFn(source));
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let (mut resolver, exiting) = (pager.resolver(0), Arc::clone(&region));
    let owner = thread::spawn(move || resolver.resolve_exit(&read_exit(&exiting, 1)));
    held.arrived.recv_timeout(PATIENCE).unwrap();
    let touched = Arc::clone(&region);
    let toucher = spawn_asleep("toucher", move || check_page(&touched, 1));
    let map = pager.page_map(only(&pager)).unwrap();
    eventually("message", || map.is_wake_wanted(PageIndex(1)));
    held.release
        .send(Err(unavailable("not this time")))
        .unwrap();
    owner.join().unwrap().unwrap_err();
    // Now the reader owns the page, because the sleeper was woken and faulted again.
    held.arrived.recv_timeout(PATIENCE).unwrap();
    held.release.send(Ok(Fetched::Filled)).unwrap();
    within_patience("the toucher", move || toucher.join().unwrap());
    let counters = readers.stop().unwrap();
    assert_eq!(counters.messages, 2);
}

#[test]
fn waiting_for_an_owner_ends_when_told_and_when_it_takes_too_long() {
    for stop in [true, false] {
        let Some(region) = region(4, Backing::Shmem) else {
            return;
        };
        let (held, source) = held();
        let pager = Pager::builder(Mode::Minor, SourceFn(source))
            .region(Arc::clone(&region))
            .owner_timeout(if stop {
                PATIENCE * 10
            } else {
                Duration::from_millis(200)
            })
            .build()
            .unwrap();
        let spawn = |vcpu| {
            let (mut resolver, region) = (pager.resolver(vcpu), Arc::clone(&region));
            thread::spawn(move || resolver.resolve_exit(&read_exit(&region, 1)))
        };
        let owner = spawn(0);
        held.arrived.recv_timeout(PATIENCE).unwrap();
        let begun = Instant::now();
        let joiner = spawn(1);
        if stop {
            thread::sleep(Duration::from_millis(50));
            pager.stop();
        }
        let error = within_patience("the joiner", move || joiner.join().unwrap()).unwrap_err();
        match error {
            ResolveError::Stopped { fault } => assert!(stop && fault.vcpu == Some(1)),
            ResolveError::OwnerStalled { waited, .. } => {
                assert!(!stop && waited >= Duration::from_millis(200));
                assert!(begun.elapsed() >= Duration::from_millis(200));
            }
            other => panic!("{other}"),
        }
        held.release.send(Ok(Fetched::Filled)).unwrap();
        owner.join().unwrap().unwrap();
    }
}

#[test]
fn trouble_with_a_neighbour_is_not_the_faults() {
    for (mode, backing) in [
        (Mode::Minor, Backing::Shmem),
        (Mode::Missing, Backing::Anonymous),
    ] {
        let Some(region) = region(16, backing) else {
            return;
        };
        let asked = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&asked);
        let source = SourceFn(move |fetch: &mut Fetch<'_>| {
            counter.fetch_add(1, Ordering::Relaxed);
            if fetch.pages().contains(PageIndex(6)) {
                return Err(unavailable("page 6 is gone"));
            }
            push_pattern(fetch)
        });
        let pager = Pager::builder(mode, source)
            .region(Arc::clone(&region))
            .fault_around(8)
            .build();
        let pager = pager.unwrap();
        let mut resolver = pager.resolver(0);
        let resolution = resolver.resolve_exit(&read_exit(&region, 4)).unwrap();
        assert!(matches!(
            resolution,
            Resolution::Installed { bytes: PAGE, .. }
        ));
        assert_eq!(asked.load(Ordering::Relaxed), 2);
        check_page(&region, 4);
        assert_eq!(pager.page_map(only(&pager)).unwrap().counts().absent, 15);
        assert!(matches!(
            resolver.resolve_exit(&read_exit(&region, 6)),
            Err(ResolveError::Fetch { .. })
        ));
    }
}

#[test]
fn a_reader_never_turns_missing_content_into_zeroes() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let pager = pager(&region, Mode::Minor, PageCacheSource);
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let touched = Arc::clone(&region);
    let toucher = thread::spawn(move || touched.read_guest(PageIndex(0), 0, &mut [0]).unwrap());
    eventually("failure", || pager.failure().is_some());
    assert!(!toucher.is_finished() && !is_mapped(&region, 0));
    let chain = chain(&readers.stop().unwrap_err());
    assert!(chain.last().unwrap().contains("page cache"), "{chain:?}");
    drop(pager);
    within_patience("the toucher", move || toucher.join().unwrap());
}

#[test]
fn no_readers_are_refused() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let pager = pager(&region, Mode::Minor, pattern());
    assert!(matches!(
        Readers::spawn(&pager, ReaderConfig::new(0)),
        Err(SpawnError::NoReaders)
    ));
}
