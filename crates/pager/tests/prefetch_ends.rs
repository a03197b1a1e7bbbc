//! The ends of prefetch before every page is present, and its treatment of lost content.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "support/child.rs"]
mod child_process;
mod support;

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use child_process::{Other, be_child};
use pagetide_memory::{Backing, GuestAddress, PageSize, PageState};
use pagetide_pager::{
    Contents, Filled, Mode, Notice, Pager, PatternSource, Prefetch, PrefetchConfig, PrefetchError,
    PrefetchPlan, RegionConfig, RegionId,
};
use support::has_userfaultfd;
use support::manual::*;
use support::view::View;

/// Not a test: the program of the other process.
#[test]
fn child() {
    be_child();
}

fn prefetch(pager: &Arc<Pager>) -> Prefetch {
    let batch_bytes = 8 * PAGE;
    Prefetch::spawn(pager, PrefetchConfig { batch_bytes }).unwrap()
}

fn last_cause(error: &dyn Error) -> String {
    error.source().map_or_else(|| error.to_string(), last_cause)
}

#[test]
fn it_stops_in_the_middle_and_another_continues() {
    for is_local in [true, false] {
        let Some(region) = region(512, Backing::Shmem) else {
            return;
        };
        let gate = Gate::new();
        let passed = Arc::new(AtomicU64::new(0));
        let (at_gate, counter) = (Arc::clone(&gate), Arc::clone(&passed));
        // From the tenth batch on it is blocked.
        let hold = move || {
            if counter.fetch_add(1, Ordering::AcqRel) >= 10 {
                at_gate.pass();
            }
        };
        let contents = if is_local {
            let fill_held = move |gpa: GuestAddress, piece: &mut [u8]| {
                if (gpa.0 - GPA.0).is_multiple_of(8 * PAGE) {
                    hold();
                }
                fill(gpa, piece);
            };
            Contents::Local(Arc::new(PatternSource::new(fill_held)))
        } else {
            let source = ReadFn(move |at: pagetide_pager::ReadAt, buffer: &mut [u8]| {
                hold();
                fill(at.gpa, buffer);
                Ok(Filled::Bytes)
            });
            let config = pagetide_pager::PoolConfig {
                shared_threads: 2,
                urgent_threads: 1,
            };
            Contents::Source(pagetide_pager::Pool::new(source, config).unwrap())
        };
        let pager = Pager::new().unwrap();
        let config = RegionConfig::local(Arc::clone(&region), Mode::Minor, contents);
        let id = pager.add(config).unwrap();
        let running = prefetch(&pager);
        eventually("progress", || passed.load(Ordering::Acquire) > 10);
        assert!(!running.is_finished());
        let opening = Arc::clone(&gate);
        let stopping = thread::spawn(move || running.stop());
        if is_local {
            // It ends after the current batch.
            opening.open();
        }
        let ended = join("stopping", stopping).unwrap();
        opening.open();
        // A thread of the pool may have the content of the last batch just now.
        eventually("the last batch", || {
            let counts = pager.counts(id).unwrap();
            (counts.pending, counts.installing) == (0, 0)
        });
        let counts = pager.counts(id).unwrap();
        assert_eq!(ended.is_complete, counts.absent == 0);
        let ended = prefetch(&pager);
        assert!(
            within_patience("prefetch", || ended.finish())
                .unwrap()
                .is_complete
        );
        // A thread of the pool counts a page after others have seen it.
        eventually("the last count", || pager.counted().pages >= 512);
        assert_eq!(pager.counted().pages, 512);
        check_all(&region);
    }
}

#[test]
fn it_ends_with_the_pager_and_while_it_waits() {
    for stops_pager in [true, false] {
        let Some(region) = region(64, Backing::Shmem) else {
            return;
        };
        let manual = ManualSource::new();
        let (pager, id) = serve(&region, Mode::Minor, manual.source(), PERSISTENT);
        let waiting = exit(&pager, 5);
        let urgent = manual.next_urgent();
        let ahead = prefetch(&pager);
        eventually("the rest", || {
            if let Some(request) = manual.take_if(|_| true) {
                complete(request);
            }
            pager.counts(id).unwrap().present == 63
        });
        assert!(!ahead.is_finished(), "a page is not settled yet");
        let ended = within_patience("the end", {
            let pager = Arc::clone(&pager);
            move || {
                if stops_pager {
                    pager.stop();
                    ahead.finish()
                } else {
                    ahead.stop()
                }
            }
        });
        assert!(!ended.unwrap().is_complete);
        pager.restart();
        let ahead = prefetch(&pager);
        complete(urgent);
        assert!(
            within_patience("prefetch", || ahead.finish())
                .unwrap()
                .is_complete
        );
        let resolved = join("the exit", waiting);
        assert!(stops_pager || resolved.is_ok());
    }
}

#[test]
fn unavailable_local_content_ends_it_with_its_cause() {
    for mode in [Mode::Minor, Mode::Missing] {
        for panics in [false, true] {
            let Some((region, pager, id)) = local(256, mode, move |gpa, buffer| {
                if gpa.0 + buffer.len() as u64 > GPA.0 + 100 * PAGE {
                    assert!(!panics, "index out of bounds");
                    return Err(unavailable("the other side hung up"));
                }
                fill(gpa, buffer);
                Ok(Filled::Bytes)
            }) else {
                return;
            };
            let told = notices(&pager);
            let ahead = prefetch(&pager);
            let failure = within_patience("failing", || ahead.finish()).unwrap_err();
            assert!(matches!(*failure, PrefetchError::Resolve(_)));
            let cause = last_cause(&*failure);
            let expected = if panics {
                "the source panicked: index out of bounds"
            } else {
                "the other side hung up"
            };
            assert_eq!(cause, expected);
            let notice = told.recv_timeout(PATIENCE).unwrap();
            assert!(matches!(notice, Notice::Prefetch(_)) && notice.needs_action());
            // All available content was installed, at the end page by page. The pager continues.
            for page in 0..region.pages() {
                let there = state(&pager, page) == PageState::Present;
                assert_eq!(there, page < 100, "page {page}");
            }
            assert_eq!(pager.counts(id).unwrap().absent, 156);
            assert_eq!(pager.counted().pages, 100);
            assert!(!pager.is_stopped());
        }
    }
}

#[test]
fn lost_pages_are_found_among_their_neighbours() {
    for lost in [0, 1, 31, 63] {
        let Some((region, pager, _)) = local(64, Mode::Minor, move |gpa, buffer| {
            let first = (gpa.0 - GPA.0) / PAGE;
            if (first..first + buffer.len() as u64 / PAGE).contains(&lost) {
                return Ok(Filled::Poisoned);
            }
            fill(gpa, buffer);
            Ok(Filled::Bytes)
        }) else {
            return;
        };
        let ahead = prefetch(&pager);
        let ended = within_patience("prefetch", || ahead.finish()).unwrap();
        assert!(ended.is_complete);
        assert_eq!((ended.counters.pages, ended.counters.poisoned), (63, 1));
        assert_eq!(state(&pager, lost), PageState::Poisoned);
        let others = (0..64).filter(|&page| page != lost);
        others.for_each(|page| check_page(&region, page));
        assert_lost(&region, lost);
    }
}

/// A prefetch of all pages of a region: in their order, or in a walk.
fn prefetch_all(pager: &Arc<Pager>, id: RegionId, pages: u64, in_order: bool) -> Prefetch {
    let plan = match in_order {
        true => PrefetchPlan {
            first: vec![(id, range(0, pages))],
            then: Vec::new(),
        },
        false => PrefetchPlan {
            first: Vec::new(),
            then: vec![id],
        },
    };
    Prefetch::spawn_plan(pager, PrefetchConfig::default(), plan).unwrap()
}

/// Its pages are as missing as before.
#[test]
fn a_prefetch_of_a_region_that_is_handed_over_is_not_complete() {
    if !has_userfaultfd() {
        return;
    }
    for in_order in [false, true] {
        let pages = 4096;
        let memory = View::private(pages * PAGE);
        let uffd = memory.register(Mode::Missing);
        let source = ManualSource::new();
        let (size, mode) = (PageSize::Size4K, Mode::Missing);
        let config = RegionConfig::foreign(&uffd, memory.range(), size, mode, source.contents());
        let pager = Pager::new().unwrap();
        let id = pager.add(config.gpa(GPA)).unwrap();
        let prefetch = prefetch_all(&pager, id, pages, in_order);
        let first = source.next_bulk();
        pager.export(id).unwrap();
        drop(first);
        let end = within_patience("the prefetch", || prefetch.finish().unwrap());
        assert!(!end.is_complete, "in order: {in_order}");
    }
}

/// Kind: a thing is said to be complete that was given up. A process that shares the memory may live on.
#[test]
fn a_prefetch_of_a_region_whose_process_has_gone_is_not_complete() {
    if !Other::can_start() {
        return;
    }
    for in_order in [false, true] {
        let pages = 4096;
        let (other, uffd) = Other::start(&[]);
        let mapped = other.map(pages, Mode::Missing);
        let source = ManualSource::new();
        let (size, mode) = (PageSize::Size4K, Mode::Missing);
        let config = RegionConfig::foreign(&uffd, mapped.range(), size, mode, source.contents());
        let pager = Pager::new().unwrap();
        let told = notices(&pager);
        let id = pager.add(config.gpa(GPA)).unwrap();
        let prefetch = prefetch_all(&pager, id, pages, in_order);
        let first = source.next_bulk();
        other.kill();
        complete(first);
        let notice = told.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(notice, Notice::ProcessGone { .. }), "{notice}");
        let end = within_patience("the prefetch", || prefetch.finish().unwrap());
        assert!(!end.is_complete, "in order: {in_order}");
    }
}
