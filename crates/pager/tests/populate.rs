//! Installed pages are passed to the mapper, and paging continues whatever the mapper does.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::thread;

use pagetide_memory::{Access, Backing, GuestRange, PageIndex, PageRange, PageState, Region};
use pagetide_pager::{
    Content, Contents, Holes, Mapper, Mode, Notice, Pager, Prefetch, PrefetchConfig, ReaderConfig,
    Readers, RegionConfig, Request, Resolution, Source, UffdLayout,
};
use support::*;

type SinkResult = Result<u64, Box<dyn Error + Send + Sync>>;

/// A mapper made from a function.
struct SinkFn<F>(F);

impl<F: Fn(GuestRange) -> SinkResult + Send + Sync> Mapper for SinkFn<F> {
    fn populate(&self, range: GuestRange) -> SinkResult {
        (self.0)(range)
    }
}

/// Records the pages that it receives; each must be mapped in the guest mapping, new, and present or
/// about to be.
#[derive(Clone)]
struct Seen {
    pages: Arc<Mutex<BTreeSet<u64>>>,
    pager: Arc<Mutex<Weak<Pager>>>,
}

impl Seen {
    fn new() -> Self {
        Self {
            pages: Arc::default(),
            pager: Arc::new(Mutex::new(Weak::new())),
        }
    }

    fn sink(&self, region: &Arc<Region>) -> Arc<dyn Mapper> {
        let (seen, region) = (self.clone(), Arc::clone(region));
        Arc::new(SinkFn(move |range: GuestRange| {
            let pager = seen.pager.lock().unwrap().upgrade();
            for page in pages(range) {
                if let Some(pager) = &pager {
                    let id = pager.region_ids()[0];
                    let state = pager.page_state(id, PageIndex(page)).unwrap();
                    let is_right = matches!(state, PageState::Installing | PageState::Present);
                    assert!(is_right, "{state:?}");
                }
                assert!(is_mapped(&region, page));
                assert!(seen.pages.lock().unwrap().insert(page), "page {page} twice");
            }
            Ok(range.bytes())
        }))
    }

    fn pages(&self) -> Vec<u64> {
        self.pages.lock().unwrap().iter().copied().collect()
    }

    /// A pager that passes installed pages to the mapper.
    fn paged(&self, region: &Arc<Region>, mode: Mode, contents: Contents, around: u64) -> Paged {
        let sink = self.sink(region);
        let paged = Paged::with(region, mode, contents, |config| {
            config.fault_around(around).populate(sink, 4)
        });
        *self.pager.lock().unwrap() = Arc::downgrade(&paged.pager);
        paged
    }
}

/// The 4 KiB pages of a range.
fn pages(range: GuestRange) -> impl Iterator<Item = u64> {
    (range.start().0 - GPA.0) / PAGE..(range.end().0 - GPA.0) / PAGE
}

fn prefetch(paged: &Paged) -> Prefetch {
    let config = PrefetchConfig {
        batch_bytes: 16 * PAGE,
    };
    Prefetch::spawn(&paged.pager, config).unwrap()
}

#[test]
fn prefetched_pages_are_populated_once() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(1024, backing) else {
            return;
        };
        within_patience("prefetch", move || {
            let seen = Seen::new();
            let paged = seen.paged(&region, mode, pattern(), 1);
            let counters = prefetch(&paged).finish().unwrap().counters;
            assert_eq!(seen.pages(), (0..1024).collect::<Vec<_>>());
            assert_eq!(counters.populated_bytes, region.bytes());
            assert_no_trouble(&paged.pager);
        });
    }
}

/// Kind: a cost that only those should bear who gain by it. Each call of the kernel costs a lookup; many short ones, the
/// last pages first, are for guests that overtake the copy. A page that is there already divides the call that meets it.
#[test]
fn a_batch_is_copied_in_pieces_for_a_mapper_alone() {
    const BATCH: u64 = 64;
    for (has_mapper, expected_installs) in [(false, 2), (true, 3)] {
        let Some(region) = region(BATCH, Backing::Shmem) else {
            return;
        };
        region.write_guest(PageIndex(3), 0, &[3]).unwrap();
        let paged = Paged::with(&region, Mode::Missing, pattern(), |config| {
            let config = config.trust_existing_pages();
            match has_mapper {
                true => config.populate(Arc::new(SinkFn(|range: GuestRange| Ok(range.bytes()))), 1),
                false => config,
            }
        });
        let config = PrefetchConfig {
            batch_bytes: BATCH * PAGE,
        };
        let ahead = Prefetch::spawn(&paged.pager, config).unwrap();
        let ahead = within_patience("prefetch", move || ahead.finish().unwrap().counters);
        let counted = (ahead.pages, ahead.exists, ahead.installs);
        assert_eq!(counted, (BATCH - 1, 1, expected_installs), "{has_mapper}");
        assert_no_trouble(&paged.pager);
    }
}

#[test]
fn vcpus_fault_while_prefetch_and_population_work() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(1024, backing) else {
            return;
        };
        within_patience("all of them", move || {
            let seen = Seen::new();
            let paged = seen.paged(&region, mode, pattern(), 1);
            let readers = Readers::spawn(&paged.pager, ReaderConfig::new(1)).unwrap();
            let prefetch = prefetch(&paged);
            let mut resolver = paged.resolver();
            thread::scope(|scope| {
                scope.spawn(|| (0..1024).rev().for_each(|page| check_page(&region, page)));
                scope.spawn(|| {
                    for page in (0..1024).map(|page| page * 613 % 1024) {
                        let _ = exit(&mut resolver, &region, page, Access::Read).unwrap();
                        check_page(&region, page);
                    }
                });
            });
            let ahead = prefetch.finish().unwrap().counters;
            readers.stop();
            drop(resolver);
            let all = paged.pager.counted();
            assert_eq!((all.pages, all.exists), (1024, 0), "{all:?}");
            assert_eq!(seen.pages().len() as u64, ahead.pages);
            assert_no_trouble(&paged.pager);
        });
    }
}

#[test]
fn runs_of_exits_are_populated_from_the_minimum_on() {
    // The faulting page is one of them.
    for (around, expected) in [(1, 0..0), (2, 0..0), (4, 16..20), (8, 16..24)] {
        let Some(region) = region(64, Backing::Shmem) else {
            return;
        };
        let seen = Seen::new();
        let paged = seen.paged(&region, Mode::Minor, pattern(), around);
        let _ = paged.read_exit(19);
        assert_eq!(seen.pages(), expected.collect::<Vec<_>>(), "{around}");
    }
}

#[test]
fn readers_populate_runs_of_several_pages() {
    for (around, expected) in [(1, 0..0), (2, 18..20), (8, 16..24)] {
        for from_source in [false, true] {
            let Some(region) = region(64, Backing::Shmem) else {
                return;
            };
            let seen = Seen::new();
            let source = ManualSource::new();
            let contents = if from_source {
                source.contents()
            } else {
                pattern()
            };
            let paged = seen.paged(&region, Mode::Minor, contents, around);
            let readers = Readers::spawn(&paged.pager, ReaderConfig::new(1)).unwrap();
            let its = Arc::clone(&region);
            let toucher = thread::spawn(move || check_page(&its, 19));
            if from_source {
                sources::complete(source.next());
            }
            join("the touch", toucher);
            readers.stop();
            let expected: Vec<_> = expected.clone().collect();
            assert_eq!(seen.pages(), expected, "{around} {from_source}");
        }
    }
}

#[test]
fn prefetched_pages_become_present_after_population() {
    let Some(region) = region(16, Backing::Shmem) else {
        return;
    };
    within_patience("the exit", move || {
        let (entered, has_entered) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let (entered, may_go_on) = (Mutex::new(entered), Mutex::new(may_go_on));
        let sink = Arc::new(SinkFn(move |range: GuestRange| {
            entered.lock().unwrap().send(range).unwrap();
            may_go_on.lock().unwrap().recv().unwrap();
            Ok(range.bytes())
        }));
        let set = |config: RegionConfig| config.populate(sink, 1);
        let paged = Paged::with(&region, Mode::Minor, pattern(), set);
        let running = prefetch(&paged);
        assert_eq!(has_entered.recv().unwrap().bytes(), region.bytes());
        // A fault in userspace need not wait: the pages are mapped there.
        check_page(&region, 3);
        assert_eq!(paged.state(3), PageState::Installing);
        let (mut resolver, its) = (paged.resolver(), Arc::clone(&region));
        let waiting = spawn_asleep("the exit", move || {
            exit(&mut resolver, &its, 3, Access::Read).unwrap()
        });
        go_on.send(()).unwrap();
        assert_eq!(join("the exit", waiting), Resolution::Waited);
        let counters = running.finish().unwrap().counters;
        assert_eq!(counters.populated_bytes, region.bytes());
    });
}

#[test]
fn a_mapper_that_fails_ends_the_population_and_not_the_paging() {
    type Fail = fn(GuestRange) -> SinkResult;
    let fails: [(Fail, &str); 2] = [
        (|_| Err("KVM is gone".into()), "KVM is gone"),
        (
            |_| std::panic::resume_unwind(Box::new("off by one")),
            "off by one",
        ),
    ];
    for (fail, said) in fails {
        let Some(region) = region(1024, Backing::Shmem) else {
            return;
        };
        within_patience("prefetch", move || {
            let middle = GPA.0 + region.bytes() / 2;
            let sink = Arc::new(SinkFn(move |range: GuestRange| {
                if range.end().0 > middle {
                    return fail(range);
                }
                Ok(range.bytes())
            }));
            let set = |config: RegionConfig| config.populate(sink, 1);
            let paged = Paged::with(&region, Mode::Minor, pattern(), set);
            let (send, notices) = mpsc::channel();
            paged.pager.on_notice(move |notice| {
                let _ = send.send(notice.clone());
            });
            let ended = prefetch(&paged).finish().unwrap();
            assert!(ended.is_complete);
            (0..1024).for_each(|page| check_page(&region, page));
            assert_eq!(ended.counters.populated_bytes, region.bytes() / 2);
            // Only once, and the owner need not act.
            let notices: Vec<_> = notices.try_iter().collect();
            let [Notice::Population { region: id, source }] = &notices[..] else {
                panic!("{notices:?}")
            };
            assert_eq!(*id, paged.id);
            assert_eq!(source.to_string(), said);
            assert!(paged.pager.trouble().is_none());
        });
    }
}

/// The origin of pages that are installed ahead of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ahead {
    Local,
    PageCache,
    Answered,
    Pushed,
}

/// Answers requests immediately.
struct AtOnce;

impl Source for AtOnce {
    fn submit(&self, request: Request) {
        sources::complete(request);
    }
}

/// Population may wait for a slot update, which may wait for memory that is being discarded.
#[test]
fn a_mapper_may_wait_for_memory_to_be_discarded() {
    use Ahead::{Answered, Local, PageCache, Pushed};
    for (mode, backing) in SMALL_WAYS {
        for from in [Local, PageCache, Answered, Pushed] {
            if from == PageCache && mode == Mode::Missing {
                continue;
            }
            let Some(region) = region(64, backing) else {
                return;
            };
            within_patience(&format!("{mode:?} {backing} {from:?}"), move || {
                let contents = match from {
                    Local => pattern(),
                    PageCache => {
                        fill_page_cache(&region);
                        Contents::PageCache(Holes::AreMissing)
                    }
                    Answered => Contents::Source(Arc::new(AtOnce)),
                    Pushed => ManualSource::new().contents(),
                };
                let (its, populated) = (Arc::clone(&region), Arc::new(AtomicU64::new(0)));
                let count = Arc::clone(&populated);
                let sink = Arc::new(SinkFn(move |range: GuestRange| {
                    let given_up = thread::scope(|scope| {
                        let giving_up = scope.spawn(|| advise_away(&its, 63, 1));
                        giving_up.join()
                    });
                    given_up.map_err(|_| "madvise failed")?;
                    count.fetch_add(range.bytes() / PAGE, Ordering::Relaxed);
                    Ok(range.bytes())
                }));
                let set = |config: RegionConfig| {
                    let config = config.userfaultfds(UffdLayout::WithEvents);
                    config.populate(sink, 1)
                };
                let paged = Paged::with(&region, mode, contents, set);
                let _readers = Readers::spawn(&paged.pager, ReaderConfig::new(1)).unwrap();
                if from == Pushed {
                    let bytes = content(GPA, 63 * PAGE);
                    let pages = PageRange::new(PageIndex(0), 63);
                    let pushed = paged.pager.push(paged.id, pages, Content::Bytes(&bytes));
                    assert_eq!(pushed.unwrap(), 63);
                } else {
                    assert!(prefetch(&paged).finish().unwrap().is_complete);
                }
                (0..63).for_each(|page| check_page(&region, page));
                check_zeroes(&region, 63);
                assert_eq!(paged.state(63), PageState::Removed);
                assert_eq!(populated.load(Ordering::Relaxed), 63);
                assert_no_trouble(&paged.pager);
            });
        }
    }
}

/// The page is unmapped on the host, so it cannot be mapped in stage 2: a mapper that receives it
/// fails, which would end the region's population.
#[test]
fn a_lost_page_is_not_populated() {
    for layout in [UffdLayout::Single, UffdLayout::WithEvents] {
        let Some(region) = region(8, Backing::Shmem) else {
            return;
        };
        if !can_poison() {
            return;
        }
        let seen = Seen::new();
        let sink = seen.sink(&region);
        let what = format!("{layout:?}");
        let set = |config: RegionConfig| config.userfaultfds(layout).populate(sink, 1);
        let paged = Paged::with(&region, Mode::Minor, ManualSource::new().contents(), set);
        let push = |page, content: Content<'_>| {
            let page = PageRange::single(PageIndex(page));
            assert_eq!(paged.pager.push(paged.id, page, content).unwrap(), 1);
        };
        push(5, Content::Poisoned);
        assert_eq!(paged.state(5), PageState::Poisoned);
        push(6, Content::Bytes(&content(gpas(6, 1).start(), PAGE)));
        assert_eq!(seen.pages(), [6], "{what}");
    }
}
