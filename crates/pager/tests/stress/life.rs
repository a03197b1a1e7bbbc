//! The life of one region: added, touched, discarded, handed over, removed.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_memory::{Access, Backing, GuestAddress, GuestRange, PageIndex, PageRange, PageState};
use pagetide_pager::{
    Content, Contents, Holes, InFlightLimits, InstalledBy, Mode, Pager, Pool, PoolConfig,
    RegionConfig, RegionId, ResolveError, Resolver, RetryPolicy, UffdLayout,
};

use crate::child::{ChildHas, fork_to_read, found_by};
use crate::memory::{Memory, Own, Reports, fill_page_cache, local};
use crate::source::{Blocking, Local, Workers, fill, word_at};
use crate::tally::{Op, Tally};
use pagetide_test_support::Rng;
use pagetide_uapi::userfaultfd::{Features, Userfaultfd};

/// The state that all lives share.
pub struct World {
    pub seed: u64,
    /// Regions begin in the first, and some are handed to the second.
    pub pagers: [Arc<Pager>; 2],
    pub workers: Workers,
    pub tally: Arc<Tally>,
    pub lives: AtomicU64,
    /// Held for writing by a thread that forks, which waits until the event was read of each userfaultfd of this
    /// process that reports forks; and for reading while memory ends, whose events nobody reads any more. The child has
    /// copies of the descriptors, so that closing one would not end the wait.
    pub forking: RwLock<()>,
}

/// The expected state of a page.
#[derive(Default)]
struct Page {
    /// The number of discards that have begun, and that have ended.
    begun: AtomicU32,
    ended: AtomicU32,
    /// The data written to the first word since the last discard. Locked by threads that write or
    /// discard, but not by those that read the other words.
    written: Mutex<Option<u64>>,
}

/// How a region is paged.
#[derive(Clone, Debug)]
struct Way {
    gpa: u64,
    backing: Option<Backing>,
    mode: Mode,
    has_events: bool,
    contents: &'static str,
    around: u64,
    pages: u64,
    is_split: bool,
    /// A further process maps the same memory.
    is_shared: bool,
    installed_by: InstalledBy,
    /// Of memory that was handed over.
    forks: bool,
    protects: bool,
}

struct Life {
    way: Way,
    memory: Memory,
    pages: Vec<Page>,
    /// The pager that serves the region now, and the region's number there.
    at: Mutex<(usize, RegionId)>,
    is_over: AtomicBool,
}

impl World {
    fn dump(self: &Arc<Self>, life: &Arc<Life>) -> Arc<dyn Fn() -> String + Send + Sync> {
        let (world, life) = (Arc::clone(self), Arc::clone(life));
        Arc::new(move || {
            let Ok(at) = life.at.try_lock() else {
                return format!("{:?}, being handed over", life.way);
            };
            let pager = &world.pagers[at.0];
            let states: Vec<_> = (0..life.way.pages)
                .map(|page| (page, pager.page_state(at.1, PageIndex(page))))
                .filter(|(_, state)| !state.is_some_and(PageState::is_settled))
                .take(8)
                .collect();
            format!(
                "{:?}\ncounts {:?}, requests {:?}, unsettled {states:?}",
                life.way,
                pager.counts(at.1),
                pager.source_status(at.1)
            )
        })
    }
}

fn choose(rng: &mut Rng, gpa: u64) -> Way {
    let (backing, mode) = rng.pick(&[
        (Some(Backing::Shmem), Mode::Minor),
        (Some(Backing::Shmem), Mode::Missing),
        (Some(Backing::Thp), Mode::Minor),
        (Some(Backing::Anonymous), Mode::Missing),
        (Some(Backing::Hugetlb2M), Mode::Minor),
        (Some(Backing::Hugetlb2M), Mode::Missing),
        (None, Mode::Missing),
        (None, Mode::Minor),
    ]);
    let is_huge = backing == Some(Backing::Hugetlb2M);
    let contents = match rng.below(8) {
        0 => "pool",
        1..=2 => "local",
        3 if mode == Mode::Minor && backing.is_some() => "page cache",
        _ => "moody",
    };
    Way {
        gpa,
        backing,
        mode,
        has_events: rng.one_in(3),
        contents,
        around: if is_huge { 1 } else { rng.pick(&[1, 8, 64]) },
        pages: if is_huge {
            1 + rng.below(4)
        } else {
            1 + rng.below(300)
        },
        is_split: rng.one_in(3),
        is_shared: rng.one_in(2),
        installed_by: rng.pick(&[InstalledBy::Completer, InstalledBy::Serving]),
        forks: backing.is_none() && rng.one_in(4),
        protects: backing.is_none() && protection(mode) && rng.one_in(2),
    }
}

/// Whether this kernel protects such memory against writing.
fn protection(mode: Mode) -> bool {
    static AVAILABLE: LazyLock<Features> = LazyLock::new(|| Userfaultfd::available().unwrap());
    let wanted = match mode {
        Mode::Missing => Features::WRITE_PROTECT,
        Mode::Minor => Features::WRITE_PROTECT | Features::WRITE_PROTECT_FILES,
    };
    AVAILABLE.contains(wanted)
}

impl Way {
    fn memory(&self) -> Option<Memory> {
        match self.backing {
            Some(backing) => local(self.gpa, self.pages, backing).map(Memory::Local),
            None => {
                let bytes = self.pages << 12;
                let reports = Reports {
                    removals: self.has_events,
                    forks: self.forks,
                    writes: self.protects,
                };
                let own = Own::new(bytes, self.mode, reports, self.is_shared);
                Some(Memory::Own(own))
            }
        }
    }

    fn contents(&self, world: &World) -> Contents {
        match self.contents {
            "page cache" => Contents::PageCache(Holes::AreMissing),
            "local" => Contents::Local(Arc::new(Local)),
            "pool" => {
                let config = PoolConfig {
                    shared_threads: 1,
                    urgent_threads: 1,
                };
                let calls = AtomicU64::new(self.gpa);
                Contents::Source(Pool::new(Blocking { calls }, config).unwrap())
            }
            _ => Contents::Source(world.workers.source(self.gpa ^ world.seed, &world.tally)),
        }
    }

    fn config(&self, world: &World, memory: &Memory) -> RegionConfig {
        let contents = self.contents(world);
        let config = match memory {
            Memory::Local(region) => {
                let layout = if self.has_events {
                    UffdLayout::WithEvents
                } else if self.is_split && self.pages > 1 {
                    let shift = region.page_size().shift();
                    let half = (self.pages / 2) << shift;
                    let upper = (self.pages << shift) - half;
                    UffdLayout::PerRange(vec![
                        GuestRange::new(GuestAddress(self.gpa), half).unwrap(),
                        GuestRange::new(GuestAddress(self.gpa + half), upper).unwrap(),
                    ])
                } else {
                    UffdLayout::Single
                };
                RegionConfig::local(Arc::clone(region), self.mode, contents).userfaultfds(layout)
            }
            Memory::Own(own) => {
                let uffd = own.uffd.as_ref().unwrap();
                let size = memory.page_size();
                let config = RegionConfig::foreign(uffd, own.range(), size, self.mode, contents);
                let config = config.gpa(GuestAddress(self.gpa));
                match own.memfd() {
                    Some(memfd) => config.memfd(memfd),
                    None => config,
                }
            }
        };
        config
            .fault_around(self.around)
            .installed_by(self.installed_by)
            // Exits occur here without a guest, at random, and also for present pages.
            .no_progress_limit(std::num::NonZeroU32::MAX)
            .in_flight_limits(InFlightLimits {
                urgent_bytes: 256 << 10,
                bulk_bytes: 64 << 10,
            })
            .retry_policy(RetryPolicy {
                deadline: Duration::from_millis(40),
                attempts: 4,
                first_backoff: Duration::from_millis(1),
                longest_backoff: Duration::from_millis(4),
            })
    }
}

/// One region, from its beginning to its end.
pub fn live(world: &Arc<World>) {
    let number = world.lives.fetch_add(1, Ordering::Relaxed);
    let mut rng = Rng::new(world.seed, number);
    // The gpas of lives are disjoint, so that the content of one is never mistaken for another's.
    let way = choose(&mut rng, (number + 1) << 32);
    let Some(memory) = way.memory() else {
        return;
    };
    if let (Memory::Local(region), "page cache") = (&memory, way.contents) {
        fill_page_cache(region);
    }
    let id = world.pagers[0].add(way.config(world, &memory)).unwrap();
    if let Memory::Own(own) = &memory {
        own.attach(&world.pagers[0], id);
        world
            .tally
            .count_many(Op::Attach, u64::from(own.other.is_some()));
    }
    let life = Arc::new(Life {
        pages: (0..way.pages).map(|_| Page::default()).collect(),
        at: Mutex::new((0, id)),
        is_over: AtomicBool::new(false),
        memory,
        way,
    });
    world.tally.count(Op::Life);
    let end = Instant::now() + Duration::from_millis(10 + rng.below(150));
    thread::scope(|scope| {
        for toucher in 0..3 {
            let mut rng = Rng::new(world.seed, number << 8 | (toucher + 1));
            let by_exit = toucher == 2;
            let life = &life;
            scope.spawn(move || {
                let dump = world.dump(life);
                let mut resolver = None;
                while !life.is_over.load(Ordering::Acquire) {
                    if rng.one_in(32) {
                        // Most pages are present by now; the other operations change that.
                        thread::sleep(Duration::from_micros(rng.below(400)));
                    }
                    let page = rng.below(life.way.pages);
                    world
                        .tally
                        .watch(format!("touch of page {page}"), &dump, || {
                            life.touch(world, &mut rng, page, by_exit.then_some(&mut resolver));
                        });
                }
            });
        }
        let dump = world.dump(&life);
        while Instant::now() < end {
            world.tally.watch("an owner's operation", &dump, || {
                life.operate(world, &mut rng);
            });
        }
        life.is_over.store(true, Ordering::Release);
    });
    let dump = world.dump(&life);
    if rng.one_in(2) {
        world
            .tally
            .watch("verification", &dump, || life.verify(world));
    }
    let (pager, id) = *life.lock();
    let _ending = world.forking.read().unwrap();
    world
        .tally
        .watch("removal", &dump, || world.pagers[pager].remove(id).unwrap());
    world.tally.count(Op::Removed);
    drop((dump, life));
}

impl Life {
    fn lock(&self) -> MutexGuard<'_, (usize, RegionId)> {
        self.at.lock().unwrap()
    }

    fn expected(&self, page: u64, word: u64) -> u64 {
        word_at(self.way.gpa + (page << self.memory.page_size().shift()) + 8 * word)
    }

    fn touch(
        &self,
        world: &World,
        rng: &mut Rng,
        page: u64,
        resolver: Option<&mut Option<(usize, Resolver)>>,
    ) {
        let writes = rng.one_in(8);
        if let Some(resolver) = resolver {
            self.exit(
                world,
                page,
                if writes { Access::Write } else { Access::Read },
                resolver,
            );
        }
        let known = &self.pages[usize::try_from(page).unwrap()];
        if writes {
            let mut written = known.written.lock().unwrap();
            let value = rng.next();
            self.memory.store(page, 0, value);
            *written = Some(value);
            world.tally.count(Op::Write);
        } else if rng.one_in(8) {
            self.check_first_word(world, page, &known.written.lock().unwrap());
        } else {
            let word = 1 + rng.below(self.memory.page_size().bytes() / 8 - 1);
            self.check_word(world, page, word);
            world.tally.count(Op::Touch);
        }
    }

    fn check_first_word(&self, world: &World, page: u64, written: &Option<u64>) {
        let found = self.memory.load(page, 0);
        let ended = self.pages[usize::try_from(page).unwrap()]
            .ended
            .load(Ordering::Acquire);
        let wanted = match written {
            Some(value) => *value,
            None if ended > 0 => 0,
            None => self.expected(page, 0),
        };
        assert_eq!(found, wanted, "{}", self.describe(world, page, 0));
    }

    fn check_word(&self, world: &World, page: u64, word: u64) {
        let known = &self.pages[usize::try_from(page).unwrap()];
        let ended = known.ended.load(Ordering::Acquire);
        let found = self.memory.load(page, word);
        let begun = known.begun.load(Ordering::Acquire);
        let wanted = self.expected(page, word);
        let is_right = (begun == 0 || ended == 0) && found == wanted || begun > 0 && found == 0;
        assert!(
            is_right,
            "found {found:#x}: {}",
            self.describe(world, page, word)
        );
    }

    fn describe(&self, world: &World, page: u64, word: u64) -> String {
        let known = &self.pages[usize::try_from(page).unwrap()];
        let at = *self.lock();
        format!(
            "word {word} of page {page} of {:?}, content {:#x}, discards begun {:?}, ended {:?}, state {:?}",
            self.way,
            self.expected(page, word),
            known.begun,
            known.ended,
            world.pagers[at.0].page_state(at.1, PageIndex(page)),
        )
    }

    /// An exit of KVM_RUN for the page.
    fn exit(
        &self,
        world: &World,
        page: u64,
        access: Access,
        resolver: &mut Option<(usize, Resolver)>,
    ) {
        let at = self.lock().0;
        if resolver.as_ref().is_none_or(|(pager, _)| *pager != at) {
            *resolver = world.pagers[at]
                .resolver(Some(1))
                .map(|resolver| (at, resolver));
        }
        let (_, resolver) = resolver.as_mut().unwrap();
        let gpa = GuestAddress(self.way.gpa + (page << self.memory.page_size().shift()));
        match resolver.resolve_exit(gpa, access) {
            Ok(_) => world.tally.count(Op::Exit),
            // It was handed over meanwhile.
            Err(ResolveError::Outside { .. } | ResolveError::Removed { .. })
                if self.way.backing.is_none() => {}
            Err(error) => panic!("{error:?}: {:?}", self.way),
        }
    }

    /// An operation of the region's owner.
    fn operate(&self, world: &World, rng: &mut Rng) {
        let first = rng.below(self.way.pages);
        let count = (1 + rng.below(8)).min(self.way.pages - first);
        let pages = PageRange::new(PageIndex(first), count);
        match rng.below(20) {
            0..6 => self.discard(world, rng, pages),
            6..9 => self.push(world, pages),
            9..11 if self.way.backing.is_none() => self.hand_over(world),
            11 if self.way.forks && rng.one_in(8) => self.fork(world, rng),
            12..14 if self.way.protects => self.protect(world, pages),
            // Lets other threads run.
            _ => thread::sleep(Duration::from_micros(rng.below(1000))),
        }
    }

    fn discard(&self, world: &World, rng: &mut Rng, pages: PageRange) {
        let known = |page: PageIndex| &self.pages[usize::try_from(page.0).unwrap()];
        let mut written: Vec<_> = pages
            .iter()
            .map(|page| known(page).written.lock().unwrap())
            .collect();
        let (pager, id) = *self.lock();
        let pager = &world.pagers[pager];
        let is_anonymous = !matches!(
            (&self.memory, self.way.mode),
            (Memory::Local(_), _) | (Memory::Own(_), Mode::Minor)
        );
        // Discards without the pager may only affect present pages.
        let is_there = |page: PageIndex| {
            let state = pager.page_state(id, page);
            matches!(
                state,
                Some(PageState::Present | PageState::Zero | PageState::Removed)
            )
        };
        let op = match rng.below(3) {
            0 if self.way.has_events => Op::Advise,
            1 if pages.iter().all(is_there) => Op::Punch,
            _ if is_anonymous && self.way.has_events => Op::Advise,
            _ if is_anonymous => return,
            _ => Op::Discard,
        };
        pages.iter().for_each(|page| {
            known(page).begun.fetch_add(1, Ordering::AcqRel);
        });
        match op {
            Op::Advise => self.memory.advise_away(pages),
            Op::Punch => self.memory.punch(pages),
            _ => assert_eq!(pager.discard(id, pages).unwrap(), pages.count()),
        }
        world.tally.count(op);
        pages.iter().for_each(|page| {
            known(page).ended.fetch_add(1, Ordering::AcqRel);
        });
        written.iter_mut().for_each(|written| **written = None);
    }

    fn push(&self, world: &World, pages: PageRange) {
        let (pager, id) = *self.lock();
        let shift = self.memory.page_size().shift();
        let mut content = vec![0; usize::try_from(pages.count() << shift).unwrap()];
        fill(self.way.gpa + (pages.first().0 << shift), &mut content);
        let content = Content::Bytes(&content);
        let pushed = world.pagers[pager].push(id, pages, content).unwrap();
        world.tally.count_many(Op::Push, pushed);
    }

    /// Hands the region to the other pager while threads sleep on missing pages.
    fn hand_over(&self, world: &World) {
        let mut at = self.lock();
        let exported = world.pagers[at.0].export(at.1).unwrap();
        assert_eq!(exported.parts.len(), 1);
        assert_eq!(exported.image.pages(), self.way.pages);
        at.0 = 1 - at.0;
        let config = self
            .way
            .config(world, &self.memory)
            .resume_from(exported.image);
        at.1 = world.pagers[at.0].add(config).unwrap();
        if let Memory::Own(own) = &self.memory {
            assert_eq!(exported.spaces.len(), usize::from(own.other.is_some()));
            own.attach(&world.pagers[at.0], at.1);
        }
        world.tally.count(Op::Export);
    }

    /// Writes to the pages are reported, once, and go on.
    fn protect(&self, world: &World, pages: PageRange) {
        if let Memory::Own(own) = &self.memory {
            own.protect(pages);
            world.tally.count(Op::Protect);
        }
    }

    /// A child reads a word: the content, zeroes of a page that was discarded, or the signal of a page that is missing
    /// for it.
    fn fork(&self, world: &World, rng: &mut Rng) {
        let page = rng.below(self.way.pages);
        let word = 1 + rng.below(511);
        let (at, wanted) = (self.memory.address(page, word), self.expected(page, word));
        let forking = world.forking.write().unwrap();
        let child = fork_to_read(at, wanted);
        drop(forking);
        match found_by(child) {
            ChildHas::Content => world.tally.count(Op::ChildContent),
            ChildHas::Lost => world.tally.count(Op::ChildLost),
            ChildHas::Zeroes => {
                let known = &self.pages[usize::try_from(page).unwrap()];
                let begun = known.begun.load(Ordering::Acquire);
                let what = self.describe(world, page, word);
                assert!(begun > 0, "a child reads zeroes: {what}");
                world.tally.count(Op::ChildZeroes);
            }
            ChildHas::Other(status) => {
                panic!("a child: {status}: {}", self.describe(world, page, word))
            }
        }
    }

    /// Checks the whole content of the region, including missing pages.
    fn verify(&self, world: &World) {
        let words = self.memory.page_size().bytes() / 8;
        let step = (words / 512).max(1);
        for page in 0..self.way.pages {
            let written = self.pages[usize::try_from(page).unwrap()]
                .written
                .lock()
                .unwrap();
            self.check_first_word(world, page, &written);
            for word in (1..words).step_by(usize::try_from(step).unwrap()) {
                self.check_word(world, page, word);
            }
            world.tally.count(Op::Verified);
        }
    }
}
