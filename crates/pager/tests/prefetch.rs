//! Pages that arrive before first touch, alone and while other threads fault on the same pages.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pagetide_memory::{Access, Backing, GuestAddress, GuestRange, PageIndex, PageState, Region};
use pagetide_pager::{
    Contents, Counters, Filled, Holes, Mode, Pager, PatternSource, Prefetch, PrefetchConfig,
    Progress, ReaderConfig, Readers, RegionConfig, RegionId, UffdLayout, Urgency,
};
use support::manual::*;
use support::{HugePages, eventually, pool_for};

/// The origin of the content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Where {
    Computed,
    PageCache,
    AtOnce,
    /// Threads answer with a delay.
    Elsewhere,
}

/// A way to page a region in.
#[derive(Clone, Copy, Debug)]
struct Way {
    mode: Mode,
    backing: Backing,
    content: Where,
    uffds: u64,
    fault_around: u64,
    batch_bytes: u64,
}

const PLAIN: Way = Way {
    mode: Mode::Minor,
    backing: Backing::Shmem,
    content: Where::Computed,
    uffds: 1,
    fault_around: 1,
    batch_bytes: 16 * PAGE,
};

/// Huge pages come last, because they may have to be skipped.
const WAYS: [Way; 13] = [
    PLAIN,
    Way {
        batch_bytes: 0,
        ..PLAIN
    },
    Way {
        uffds: 4,
        fault_around: 8,
        batch_bytes: u64::MAX,
        ..PLAIN
    },
    Way {
        content: Where::PageCache,
        fault_around: 16,
        ..PLAIN
    },
    Way {
        content: Where::AtOnce,
        fault_around: 4,
        ..PLAIN
    },
    Way {
        content: Where::Elsewhere,
        uffds: 2,
        ..PLAIN
    },
    Way {
        mode: Mode::Missing,
        ..PLAIN
    },
    Way {
        mode: Mode::Missing,
        content: Where::Elsewhere,
        fault_around: 8,
        ..PLAIN
    },
    Way {
        mode: Mode::Missing,
        backing: Backing::Anonymous,
        uffds: 2,
        fault_around: 4,
        ..PLAIN
    },
    Way {
        mode: Mode::Missing,
        backing: Backing::Anonymous,
        content: Where::AtOnce,
        batch_bytes: 0,
        ..PLAIN
    },
    Way {
        backing: Backing::Thp,
        ..PLAIN
    },
    Way {
        backing: Backing::Hugetlb2M,
        ..PLAIN
    },
    Way {
        mode: Mode::Missing,
        backing: Backing::Hugetlb2M,
        content: Where::Elsewhere,
        ..PLAIN
    },
];

fn computed() -> Contents {
    Contents::Local(Arc::new(PatternSource::new(fill)))
}

impl Way {
    /// Huge pages for its region, if needed.
    fn pool(self) -> Option<HugePages> {
        pool_for(2, self.backing)
    }

    fn region(self) -> Option<Arc<Region>> {
        // Small enough for a software CPU, which computes all of its content.
        let pages = match self.backing {
            Backing::Hugetlb2M | Backing::Hugetlb1G => 2,
            Backing::Thp => 512,
            Backing::Shmem | Backing::Anonymous => 256,
        };
        region(pages, self.backing)
    }

    fn pager(self, region: &Arc<Region>) -> (Arc<Pager>, RegionId) {
        let each = region.bytes() / self.uffds;
        let part = |part| GuestRange::new(GuestAddress(GPA.0 + part * each), each).unwrap();
        let contents = match self.content {
            Where::Computed => computed(),
            Where::PageCache => {
                let content = content(GPA, region.bytes());
                region.write_service(PageIndex(0), 0, &content).unwrap();
                Contents::PageCache(Holes::AreMissing)
            }
            Where::AtOnce => Contents::Source(Arc::new(SubmitFn(complete))),
            Where::Elsewhere => {
                let source = ReadFn(|at: pagetide_pager::ReadAt, buffer: &mut [u8]| {
                    fill(at.gpa, buffer);
                    Ok(Filled::Bytes)
                });
                let config = pagetide_pager::PoolConfig::default();
                Contents::Source(pagetide_pager::Pool::new(source, config).unwrap())
            }
        };
        let pager = Pager::new().unwrap();
        let config = RegionConfig::local(Arc::clone(region), self.mode, contents)
            .fault_around(self.fault_around)
            .userfaultfds(UffdLayout::PerRange((0..self.uffds).map(part).collect()));
        let id = pager.add(config).unwrap();
        (pager, id)
    }

    fn is_local(self) -> bool {
        matches!(self.content, Where::Computed | Where::PageCache)
    }

    fn prefetch(self, pager: &Arc<Pager>) -> Prefetch {
        let batch_bytes = self.batch_bytes;
        Prefetch::spawn(pager, PrefetchConfig { batch_bytes }).unwrap()
    }
}

/// Reads a page of any size as the guest would.
fn check(region: &Region, page: u64) {
    let bytes = region.page_size().bytes();
    let mut seen = vec![0; usize::try_from(bytes).unwrap()];
    region.read_guest(PageIndex(page), 0, &mut seen).unwrap();
    let gpa = GuestAddress(region.gpa().0 + page * bytes);
    assert!(seen == content(gpa, bytes), "page {page}");
}

fn page_by_page(pager: &Arc<Pager>) -> Prefetch {
    Prefetch::spawn(pager, PrefetchConfig { batch_bytes: PAGE }).unwrap()
}

#[test]
fn every_page_arrives_without_a_fault() {
    for way in WAYS {
        let _pool = way.pool();
        let Some(region) = way.region() else { continue };
        within_patience(&format!("{way:?}"), move || {
            let (pager, _) = way.pager(&region);
            let total = region.pages();
            let nothing = Progress {
                total,
                ..Progress::default()
            };
            assert_eq!(pager.progress(), nothing);
            let ended = way.prefetch(&pager).finish().unwrap();
            assert!(ended.is_complete);
            // The thread of an answer counts it after its pages have become present.
            eventually("the counts of the last answer", || {
                pager.counted().pages >= total
            });
            let counted = pager.counted();
            let expected = Counters {
                pages: total,
                ahead_pages: total,
                zero_pages: counted.zero_pages,
                installs: counted.installs,
                answers: counted.answers,
                ..Counters::default()
            };
            assert_eq!(counted, expected, "{way:?}");
            assert_eq!(way.is_local(), counted.answers == 0);
            if way.is_local() {
                assert_eq!(ended.counters, expected);
            }
            let all = Progress {
                present: total,
                ..nothing
            };
            assert_eq!(pager.progress(), all);
            // A mapping may get lost at any time, for example if khugepaged replaces many by a huge
            // one.
            let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
            (0..total).for_each(|page| check(&region, page));
            readers.stop();
            let again = way.prefetch(&pager).finish().unwrap();
            assert!(again.is_complete);
            assert_eq!(again.counters, Counters::default());
        });
    }
}

#[test]
fn faults_and_prefetch_share_the_same_pages() {
    for way in WAYS {
        let _pool = way.pool();
        let Some(region) = way.region() else { continue };
        within_patience(&format!("{way:?}"), move || {
            for _ in 0..2 {
                let (pager, id) = way.pager(&region);
                let readers = Readers::spawn(&pager, ReaderConfig::new(2)).unwrap();
                let prefetch = way.prefetch(&pager);
                thread::scope(|scope| {
                    // In the same direction as prefetch, so that they meet; in the other direction; and
                    // by exits.
                    scope.spawn(|| (0..region.pages()).for_each(|page| check(&region, page)));
                    let backwards = (0..region.pages()).rev();
                    scope.spawn(|| backwards.for_each(|page| check(&region, page)));
                    scope.spawn(|| {
                        let mut resolver = pager.resolver(Some(0)).unwrap();
                        for page in (0..region.pages()).map(|page| page * 7 % region.pages()) {
                            let at = region.gpa_of_page(PageIndex(page)).unwrap();
                            let _ = resolver.resolve_exit(at, Access::Write).unwrap();
                            check(&region, page);
                        }
                    });
                });
                assert!(prefetch.finish().unwrap().is_complete);
                readers.stop();
                // The thread that delivers the last answer counts after its pages are there.
                eventually("the last count", || pager.counted().pages >= region.pages());
                let counted = pager.counted();
                assert_eq!(counted.pages, region.pages(), "{way:?}: each page once");
                assert_eq!(counted.exists, 0, "{way:?}");
                assert!(pager.trouble().is_none(), "{way:?}");
                pager.remove(id).unwrap();
                drop(pager);
                region.punch(region.all_pages()).unwrap();
            }
        });
    }
}

#[test]
fn all_regions_are_walked() {
    let pager = Pager::new().unwrap();
    let offsets = [0, 64 * PAGE, 1 << 30];
    let mut regions = Vec::new();
    for (index, offset) in offsets.into_iter().enumerate() {
        let Some(region) = region_at(GuestAddress(GPA.0 + offset), 64, Backing::Shmem) else {
            return;
        };
        let contents = match index {
            1 => Contents::Source(Arc::new(SubmitFn(complete))),
            _ => computed(),
        };
        let config = RegionConfig::local(Arc::clone(&region), Mode::Minor, contents);
        pager.add(config).unwrap();
        regions.push(region);
    }
    // From within the second one, so that the walk wraps around.
    let _ = join("the exit", exit(&pager, 64 + 10)).unwrap();
    let ended = within_patience("prefetch", {
        let pager = Arc::clone(&pager);
        move || page_by_page(&pager).finish().unwrap()
    });
    assert!(ended.is_complete);
    assert_eq!(pager.counted().pages, 3 * 64);
    for region in &regions {
        (0..64).for_each(|page| check_page(region, page));
    }
}

#[test]
fn it_continues_at_the_last_fault() {
    let Some(region) = region(64, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let (pager, _) = serve(&region, Mode::Minor, manual.source(), PERSISTENT);
    let waiting = exit(&pager, 40);
    complete(manual.next());
    let _ = join("the exit", waiting).unwrap();
    let ahead = page_by_page(&pager);
    eventually("prefetch", || {
        if let Some(request) = manual.take_if(|_| true) {
            complete(request);
        }
        ahead.is_finished()
    });
    let asked = manual.log().into_iter();
    let asked: Vec<_> = asked
        .map(|asked| (asked.pages.first().0, asked.urgency))
        .collect();
    let expected = [(40, Urgency::Urgent)]
        .into_iter()
        .chain((41..64).chain(0..40).map(|page| (page, Urgency::Bulk)));
    assert_eq!(asked, expected.collect::<Vec<_>>());
}

#[test]
fn threads_that_sleep_on_pages_of_a_batch_are_woken_with_it() {
    let Some(region) = region(64, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let (pager, _) = serve(&region, Mode::Minor, manual.source(), PERSISTENT);
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let ahead = PLAIN.prefetch(&pager);
    let bulk = manual.next_bulk();
    let touchers = [1, 7, 15].map(|page| {
        let region = Arc::clone(&region);
        thread::spawn(move || check_page(&region, page))
    });
    // The source holds the urgent requests without an answer.
    let _kept = [(); 3].map(|()| manual.next_urgent());
    complete(bulk);
    for toucher in touchers {
        join("a toucher", toucher);
    }
    drop(readers);
    assert!(
        !within_patience("prefetch", || ahead.stop())
            .unwrap()
            .is_complete
    );
}

#[test]
fn discarded_pages_are_not_fetched() {
    let Some((region, pager, id)) = local(64, Mode::Minor, |gpa, buffer| {
        fill(gpa, buffer);
        Ok(Filled::Bytes)
    }) else {
        return;
    };
    pager.discard(id, range(20, 1)).unwrap();
    let ended = within_patience("prefetch", {
        let pager = Arc::clone(&pager);
        move || PLAIN.prefetch(&pager).finish().unwrap()
    });
    assert!(ended.is_complete);
    assert_eq!(ended.counters.pages, 63);
    assert_eq!(state(&pager, 20), PageState::Removed);
    check_page(&region, 21);
}

#[test]
fn prefetch_pauses_for_faults_and_still_completes() {
    // A thread that faults may get no processor for as long as prefetch would have to notice its faults.
    eventually("a pause of prefetch", || match pauses() {
        Some(0) => Err("a prefetch without a pause"),
        _ => Ok(()),
    });
}

/// How often prefetch pauses while there are many faults; `None` without userfaultfd.
fn pauses() -> Option<u64> {
    // Bulk requests are slow: 1000 pages a second. Faults must be fast, so no content is computed.
    let (region, pager, _) = local(4096, Mode::Minor, |_, _| {
        if thread::current().name() == Some("pt-prefetch") {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(Filled::Zero)
    })?;
    within_patience("prefetch", move || {
        let prefetch = page_by_page(&pager);
        let mut resolver = pager.resolver(Some(0)).unwrap();
        // The thread of prefetch may begin late.
        eventually("prefetch's first page", || pager.progress().present > 0);
        // Downwards, so that prefetch does not run ahead of it; the last few pages are left to
        // prefetch. The faults last for tens of its batches.
        let batch = Duration::from_millis(1);
        for page in (32..region.pages()).rev() {
            if page.is_multiple_of(64) {
                thread::sleep(batch);
            }
            let _ = resolver.resolve_exit(gpa(page), Access::Read).unwrap();
        }
        let ended = prefetch.finish().unwrap();
        assert!(ended.is_complete);
        let pages = ended.counters.pages + resolver.counters().pages;
        assert_eq!(pages, region.pages());
        assert!(ended.counters.pages > 0);
        Some(ended.counters.yields)
    })
}
