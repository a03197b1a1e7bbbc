//! All operations at once, at random: regions of every kind are added and removed while threads touch
//! their pages and resolve exits, pages are discarded, pushed and prefetched, sources fail, and regions
//! are handed from one pager to another. Some are mapped in a further address space, which reads them as well; some have
//! children, and some protect their pages against writing.
//! Every word that is read is checked, every wait ends, and at the end no resource is left over.
//!
//! `PAGETIDE_STRESS_SECONDS` sets the duration (5), `PAGETIDE_SEED` the random seed.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
#![allow(unreachable_pub, reason = "a test's modules")]

mod child;
#[path = "../support/hugepages.rs"]
mod hugepages;
mod life;
mod memory;
mod source;
mod tally;

use std::fs::{read_dir, read_to_string};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use hugepages::HugePages;
use life::World;
use pagetide_pager::{Notice, Pager, Prefetch, PrefetchConfig, ReaderConfig, Readers};
use pagetide_test_support::{PATIENCE, Rng, equals, eventually, seed};
use pagetide_uapi::userfaultfd::Userfaultfd;
use source::Workers;
use tally::{Op, Tally};

/// Regions that live at the same time.
const SLOTS: usize = 4;

fn from_environment<T: FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

/// The resources of a process that must be released.
#[derive(Debug, PartialEq, Eq)]
struct Holdings {
    descriptors: usize,
    threads: usize,
    /// Mappings of memory files, and memory that a userfaultfd serves.
    mappings: usize,
}

fn holdings() -> Holdings {
    let smaps = read_to_string("/proc/self/smaps").unwrap();
    let is_paged = |line: &&str| {
        let flags = line.strip_prefix("VmFlags:");
        let has = |flags: &str| {
            flags
                .split_whitespace()
                .any(|flag| ["um", "ui"].contains(&flag))
        };
        line.contains("/memfd:") || flags.is_some_and(has)
    };
    Holdings {
        descriptors: read_dir("/proc/self/fd").unwrap().count(),
        threads: read_dir("/proc/self/task").unwrap().count(),
        mappings: smaps.lines().filter(is_paged).count(),
    }
}

fn all_mappings() -> usize {
    read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Pages for hugetlb regions.
static HUGE_PAGES: Mutex<Option<HugePages>> = Mutex::new(None);

fn release_huge_pages() {
    *HUGE_PAGES.lock().unwrap() = None;
}

/// Ends the process: threads that are stuck cannot be joined.
fn give_up() -> ! {
    release_huge_pages();
    std::process::exit(101)
}

#[test]
fn all_operations_at_once() {
    if let Err(error) = Userfaultfd::available() {
        println!("SKIP: {error}");
        return;
    }
    let seconds = from_environment("PAGETIDE_STRESS_SECONDS").unwrap_or(5);
    let seed = seed();
    *HUGE_PAGES.lock().unwrap() = Some(HugePages::reserve(4 * SLOTS as u64));
    let tally = Arc::new(Tally::default());
    let watchdog = {
        let tally = Arc::clone(&tally);
        thread::spawn(move || tally.guard(PATIENCE))
    };

    let before = holdings();
    let mappings_before = all_mappings();
    run(seed, Duration::from_secs(seconds), &tally);
    // Threads of pools end by themselves.
    eventually("nothing is left over", || equals(holdings(), &before));
    // The allocator retains some for each thread that existed.
    let kept = all_mappings().saturating_sub(mappings_before);
    assert!(kept < 200, "{kept} mappings are left over");

    tally.is_over.store(true, Ordering::Release);
    watchdog.join().unwrap();
    release_huge_pages();
    println!("{seconds} s: {tally}");
    assert!(tally.of(Op::Life) > 0 && tally.of(Op::Touch) > 0 && tally.of(Op::Exit) > 0);
}

fn run(seed: u64, length: Duration, tally: &Arc<Tally>) {
    let pagers = [Pager::new().unwrap(), Pager::new().unwrap()];
    let (sender, stalled) = mpsc::channel();
    let unexpected = Arc::new(Mutex::new(Vec::new()));
    for (index, pager) in pagers.iter().enumerate() {
        let (sender, unexpected) = (sender.clone(), Arc::clone(&unexpected));
        pager.on_notice(move |notice| match notice {
            Notice::Stalled { region, .. } => {
                let _ = sender.send((index, *region));
            }
            Notice::Forked { .. } => {}
            other => unexpected.lock().unwrap().push(format!("{other:?}")),
        });
    }
    drop(sender);
    let world = Arc::new(World {
        seed,
        pagers,
        workers: Workers::new(2),
        tally: Arc::clone(tally),
        lives: AtomicU64::new(0),
        forking: RwLock::new(()),
    });
    let readers: Vec<_> = [2, 1]
        .into_iter()
        .zip(&world.pagers)
        .map(|(threads, pager)| Readers::spawn(pager, ReaderConfig::new(threads)).unwrap())
        .collect();
    let end = Instant::now() + length;
    thread::scope(|scope| {
        // The owner of the regions, which resumes stalled ones.
        let owner = {
            let world = &world;
            scope.spawn(move || {
                for (turn, (pager, region)) in stalled.into_iter().enumerate() {
                    let pager = &world.pagers[pager];
                    // The region may have been removed.
                    if turn % 2 == 0 {
                        let _ = pager.resume(region);
                        tally.count(Op::Resume);
                    } else {
                        let _ = pager.replace_source(region, world.workers.source(seed, tally));
                        tally.count(Op::ReplaceSource);
                    }
                }
            })
        };
        let mut others = Vec::new();
        for _ in 0..SLOTS {
            others.push(scope.spawn(|| {
                while Instant::now() < end {
                    life::live(&world);
                }
            }));
        }
        others.push(scope.spawn(|| prefetch(&world, end)));
        for thread in others {
            let result = thread.join();
            if let Err(panic) = result {
                // A thread that waits for the rest would wait forever.
                eprintln!("{:?}", panic.downcast_ref::<String>());
                give_up();
            }
        }
        for pager in &world.pagers {
            pager.clear_on_notice();
        }
        owner.join().unwrap();
    });
    for readers in readers {
        readers.stop();
    }
    assert_eq!(*unexpected.lock().unwrap(), [""; 0]);
    for pager in &world.pagers {
        assert!(pager.region_ids().is_empty());
        println!("{:?}", pager.counted());
    }
    Arc::into_inner(world).unwrap().workers.join();
}

/// Starts and stops prefetch.
fn prefetch(world: &World, end: Instant) {
    let mut rng = Rng::new(world.seed, u64::MAX);
    let nothing: Arc<dyn Fn() -> String + Send + Sync> = Arc::new(String::new);
    while Instant::now() < end {
        let pager = &world.pagers[usize::try_from(rng.below(2)).unwrap()];
        let config = PrefetchConfig {
            batch_bytes: rng.pick(&[4096, 64 << 10, 256 << 10]),
        };
        let prefetch = Prefetch::spawn(pager, config).unwrap();
        let (op, ended) = world.tally.watch("prefetch", &nothing, || {
            if rng.one_in(4) {
                (Op::PrefetchWhole, prefetch.finish())
            } else {
                thread::sleep(Duration::from_micros(rng.below(30_000)));
                (Op::PrefetchStopped, prefetch.stop())
            }
        });
        ended.unwrap();
        world.tally.count(op);
        thread::sleep(Duration::from_millis(rng.below(50)));
    }
}
