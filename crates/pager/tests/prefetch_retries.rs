//! Prefetch of content that the memory does not take for a while: the prefetch goes on elsewhere, tries
//! again, and stalls nothing.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pagetide_memory::{Backing, GuestAddress, Region};
use pagetide_pager::{
    Contents, Filled, Mode, Notice, Pager, Prefetch, PrefetchConfig, PrefetchPlan, ReadAt,
    RegionConfig, RegionId, Request, RetryPolicy, Room, Source,
};
use support::manual::*;

const PAGES: u64 = 64;

/// The memory's file ends before this page.
const CUT: u64 = 20;

/// Has all content at once, and counts how often it is asked.
#[derive(Default)]
struct AtOnce(AtomicU64);

impl Source for AtOnce {
    fn submit(&self, request: Request) {
        self.0.fetch_add(1, Ordering::AcqRel);
        complete(request);
    }

    fn fill_now(&self, at: ReadAt, room: &mut Room<'_>) -> Option<Filled> {
        self.0.fetch_add(1, Ordering::AcqRel);
        fill(at.gpa, room.buffer()?);
        Some(Filled::Bytes)
    }
}

/// Two regions. The file of the first one ends before its end.
struct Cut {
    regions: [Arc<Region>; 2],
    ids: [RegionId; 2],
    source: Arc<AtOnce>,
    pager: Arc<Pager>,
}

impl Cut {
    fn new(policy: RetryPolicy) -> Option<Self> {
        let first = region(PAGES, Backing::Shmem)?;
        let second = region_at(GuestAddress(GPA.0 + PAGES * PAGE), PAGES, Backing::Shmem)?;
        let source = Arc::new(AtOnce::default());
        let pager = Pager::new().unwrap();
        let add = |region: &Arc<Region>| {
            let contents = Contents::Source(Arc::<AtOnce>::clone(&source));
            let config = RegionConfig::local(Arc::clone(region), Mode::Missing, contents);
            pager.add(config.retry_policy(policy)).unwrap()
        };
        let ids = [add(&first), add(&second)];
        rustix::fs::ftruncate(first.file().unwrap(), CUT * PAGE).unwrap();
        Some(Self {
            regions: [first, second],
            ids,
            source,
            pager,
        })
    }

    fn prefetch(&self, first: Vec<(RegionId, pagetide_memory::PageRange)>) -> Prefetch {
        let batch_bytes = 16 * PAGE;
        let then = self.pager.region_ids();
        let plan = PrefetchPlan { first, then };
        Prefetch::spawn_plan(&self.pager, PrefetchConfig { batch_bytes }, plan).unwrap()
    }

    /// What the memory takes is there, and nothing is stalled.
    fn check_the_rest(&self) {
        (0..CUT).for_each(|page| check_page(&self.regions[0], page));
        (0..PAGES).for_each(|page| check_page(&self.regions[1], page));
        for id in self.ids {
            assert!(!self.pager.source_status(id).unwrap().is_stalled);
        }
    }
}

#[test]
fn it_goes_on_when_the_memory_takes_content_again() {
    let patient = RetryPolicy {
        attempts: u32::MAX,
        longest_backoff: Duration::from_millis(20),
        ..PERSISTENT
    };
    let Some(cut) = Cut::new(patient) else {
        return;
    };
    let told = notices(&cut.pager);
    let ahead = cut.prefetch(Vec::new());
    match told.recv_timeout(PATIENCE).unwrap() {
        notice @ Notice::NotPrefetched { region, .. } => {
            assert_eq!(region, cut.ids[0]);
            assert!(!notice.needs_action() && notice.resumable().is_none());
        }
        other => panic!("{other}"),
    }
    let all_others = || cut.pager.progress().present == CUT + PAGES;
    eventually("the rest", all_others);
    let asked = cut.source.0.load(Ordering::Acquire);
    eventually("further attempts", || {
        cut.source.0.load(Ordering::Acquire) > asked + 100
    });
    assert!(!ahead.is_finished());
    cut.check_the_rest();
    let file = cut.regions[0].file().unwrap();
    rustix::fs::ftruncate(file, PAGES * PAGE).unwrap();
    let ended = within_patience("prefetch", || ahead.finish()).unwrap();
    assert!(ended.is_complete);
    (0..PAGES).for_each(|page| check_page(&cut.regions[0], page));
    assert!(told.try_recv().is_err(), "one notice");
}

#[test]
fn it_ends_when_the_memory_takes_no_content_for_good() {
    let policy = RetryPolicy {
        attempts: 3,
        longest_backoff: Duration::from_millis(1),
        ..PERSISTENT
    };
    for has_order in [false, true] {
        let Some(cut) = Cut::new(policy) else {
            return;
        };
        let told = notices(&cut.pager);
        let first = vec![(cut.ids[0], range(CUT - 4, 8))];
        let ahead = cut.prefetch(if has_order { first } else { Vec::new() });
        let ended = within_patience("prefetch", || ahead.finish()).unwrap();
        assert!(!ended.is_complete);
        cut.check_the_rest();
        assert_eq!(cut.pager.progress().present, CUT + PAGES);
        assert!(matches!(
            told.try_recv().unwrap(),
            Notice::NotPrefetched { .. }
        ));
        assert!(told.try_recv().is_err(), "one notice");
    }
}

#[test]
fn it_is_stopped_while_it_waits_for_the_memory() {
    let slow = RetryPolicy {
        attempts: u32::MAX,
        first_backoff: Duration::MAX,
        longest_backoff: Duration::MAX,
        ..PERSISTENT
    };
    let Some(cut) = Cut::new(slow) else {
        return;
    };
    let ahead = cut.prefetch(Vec::new());
    eventually("the rest", || cut.pager.progress().present == CUT + PAGES);
    let ended = within_patience("the end", || ahead.stop()).unwrap();
    assert!(!ended.is_complete);
}
