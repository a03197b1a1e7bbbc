//! Prefetch in the order of a plan, as a recorded working set has it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pagetide_memory::{Backing, PageRange, PageState};
use pagetide_pager::{
    Contents, Filled, Mode, Pager, Prefetch, PrefetchConfig, PrefetchPlan, ReadAt, RegionConfig,
    RegionId, Request, Room, Serving, Source, Waited,
};
use support::manual::*;

/// Has everything without waiting, and notes what was asked for.
#[derive(Default)]
struct Noting(Mutex<Vec<PageRange>>);

impl Source for Noting {
    fn submit(&self, request: Request) {
        panic!("{request:?}: everything is here");
    }

    fn fill_now(&self, at: ReadAt, room: &mut Room<'_>) -> Option<Filled> {
        let pages = range(at.offset_bytes / PAGE, room.bytes() / PAGE);
        self.0.lock().unwrap().push(pages);
        fill(at.gpa, room.buffer()?);
        Some(Filled::Bytes)
    }
}

/// A pager with one region.
struct Served {
    region: Arc<pagetide_memory::Region>,
    pager: Arc<Pager>,
    id: RegionId,
    noting: Arc<Noting>,
}

fn served(pages: u64) -> Option<Served> {
    let region = region(pages, Backing::Anonymous)?;
    let noting = Arc::new(Noting::default());
    let source: Arc<dyn Source> = Arc::<Noting>::clone(&noting);
    let pager = Pager::new().unwrap();
    let contents = Contents::Source(source);
    let config = RegionConfig::local(Arc::clone(&region), Mode::Missing, contents);
    let id = pager.add(config).unwrap();
    Some(Served {
        region,
        pager,
        id,
        noting,
    })
}

const BATCH: PrefetchConfig = PrefetchConfig {
    batch_bytes: 4 * PAGE,
};

#[test]
fn the_first_pages_come_in_their_order_and_nothing_else_comes() {
    let Some(Served {
        pager, id, noting, ..
    }) = served(64)
    else {
        return;
    };
    let first = vec![
        (id, range(40, 6)),
        (id, range(3, 1)),
        // Already there by then, apart from one.
        (id, range(39, 3)),
        // Beyond the end.
        (id, range(63, 10)),
        (id, range(64, 10)),
    ];
    let then = Vec::new();
    let running = Prefetch::spawn_plan(&pager, BATCH, PrefetchPlan { first, then }).unwrap();
    let end = within_patience("prefetch", || running.finish()).unwrap();
    assert!(end.is_complete);
    let asked = noting.0.lock().unwrap().clone();
    assert_eq!(
        asked,
        [
            range(40, 4),
            range(44, 2),
            range(3, 1),
            range(39, 1),
            range(63, 1)
        ]
    );
    assert_eq!(pager.counts(id).unwrap().present, 9);
    assert_eq!(pager.counted().ahead_pages, 9);
}

#[test]
fn the_regions_that_follow_are_fetched_wholly_and_others_are_not() {
    let Some(Served {
        region, pager, id, ..
    }) = served(16)
    else {
        return;
    };
    let far = pagetide_memory::GuestAddress(GPA.0 + (1 << 30));
    let other = region_at(far, 16, Backing::Anonymous).unwrap();
    let contents = Contents::Source(Arc::new(Noting::default()));
    let config = RegionConfig::local(other, Mode::Missing, contents);
    let other_id = pager.add(config).unwrap();
    let plan = PrefetchPlan {
        first: vec![(other_id, range(2, 1))],
        then: vec![id],
    };
    let running = Prefetch::spawn_plan(&pager, BATCH, plan).unwrap();
    assert!(
        within_patience("prefetch", || running.finish())
            .unwrap()
            .is_complete
    );
    check_all(&region);
    assert_eq!(pager.counts(other_id).unwrap().present, 1);
}

/// A page of the plan whose source has no room is requested when there is room again.
#[test]
fn a_plan_waits_for_its_source() {
    let Some(region) = region(32, Backing::Anonymous) else {
        return;
    };
    let manual = ManualSource::new();
    let pager = Pager::new().unwrap();
    let limits = pagetide_pager::InFlightLimits {
        bulk_bytes: 4 * PAGE,
        ..pagetide_pager::InFlightLimits::default()
    };
    let config = RegionConfig::local(Arc::clone(&region), Mode::Missing, manual.contents());
    let id = pager
        .add(config.in_flight_limits(limits).retry_policy(PERSISTENT))
        .unwrap();
    let plan = PrefetchPlan {
        first: vec![(id, range(20, 8)), (id, range(0, 4))],
        then: Vec::new(),
    };
    let running = Prefetch::spawn_plan(&pager, BATCH, plan).unwrap();
    for pages in [range(20, 4), range(24, 4), range(0, 4)] {
        let request = manual.next_bulk();
        assert_eq!(request.pages(), pages);
        complete(request);
    }
    assert!(
        within_patience("prefetch", || running.finish())
            .unwrap()
            .is_complete
    );
    eventually("the pages", || pager.counts(id).unwrap().present == 12);
    assert_eq!(state(&pager, 4), PageState::Absent);
}

/// A server shows the progress of a prefetch before it ends.
#[test]
fn counts_are_visible_while_it_runs() {
    let Some(Served {
        pager, id, noting, ..
    }) = served(64)
    else {
        return;
    };
    let held = noting.0.lock().unwrap();
    let running = Prefetch::spawn(&pager, BATCH).unwrap();
    drop(held);
    eventually("the counts", || pager.counted().ahead_pages == 64);
    assert_eq!(pager.counts(id).unwrap().present, 64);
    let end = within_patience("prefetch", || running.finish()).unwrap();
    assert_eq!(end.counters.ahead_pages, 64);
    assert_eq!(pager.counted().ahead_pages, 64, "counted once");
}

#[test]
fn the_time_of_each_resolved_fault_is_reported() {
    let Some(Served { region, pager, .. }) = served(8) else {
        return;
    };
    let (send, times) = std::sync::mpsc::channel();
    let mut serving = Serving::new(&pager, 4);
    serving.on_resolved(move |time: Duration| send.send(time).unwrap());
    let (send, waits) = std::sync::mpsc::channel();
    serving.on_waited(move |what, time: Duration| send.send((what, time)).unwrap());
    let reading = std::thread::spawn(move || check_page(&region, 5));
    let mut resolved = 0;
    while resolved == 0 {
        resolved += serving.process_ready().unwrap();
    }
    join("the reader", reading);
    assert_eq!(times.try_iter().count(), resolved);
    // The content was at hand.
    let waits: Vec<_> = waits.try_iter().collect();
    assert_eq!(waits.len(), resolved);
    assert!(
        waits.iter().all(|(what, _)| *what == Waited::Here),
        "{waits:?}"
    );
}
