//! Two servers under everything at once, at random: VMs that fault, discard and punch holes, in memory of
//! 4K pages, transparent huge pages and 2M pages, by both protocols; prefetch and replay; a store that
//! fails; VMMs that are killed, and clients that never finish their message; a server that is killed or
//! stopped every five seconds and goes on with its VMs. Every byte that a guest reads is checked, every
//! access ends, and at the end the servers hold what they held before.
//!
//! `PAGETIDE_STRESS_SECONDS` sets the duration (30), `PAGETIDE_SEED` the random seed. It lasts longer if something
//! that it is to show has not happened by then.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
#![allow(unreachable_pub, reason = "a test's modules")]

#[path = "../../../pager/tests/support/hugepages.rs"]
mod hugepages;
mod memory;
mod place;
mod servers;
#[path = "../../../sources/tests/support/mod.rs"]
mod store;
mod vmm;
mod vmms;

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use hugepages::HugePages;
use pagetide_test_support::{PATIENCE, Rng, eventually, seed};
use pagetide_uapi::userfaultfd::{Features, Userfaultfd};
use place::{IMAGE_PAGES, Place};
use servers::{Holdings, Serving};
use store::Act;
use vmm::Kind;
use vmms::{Socket, Vmms};

/// The longest time between two hand-overs.
const HAND_OVER_EVERY: Duration = Duration::from_secs(5);

/// VMs that each server has at a time.
const SLOTS: u64 = 3;

/// Huge pages for the VMs of one server, and some that are being freed.
const HUGE_PAGES: u64 = 2 * (SLOTS + 1) * (IMAGE_PAGES as u64 / 512);

/// Memory that a server may keep in its allocator and its caches of chunks and blocks.
const KEPT_BYTES: u64 = 96 << 20;

/// What a run shows: each of these happens.
const SHOWN: [&str; 7] = [
    "VMs",
    "reads",
    "writes",
    "discards",
    "kills of a server",
    "stops of a server",
    "errors of the store",
];

/// A limit of the servers that is not to be reached.
const NEVER: Duration = Duration::from_secs(24 * 3600);

fn from_environment<T: FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

/// What has happened, by name.
#[derive(Default)]
pub struct Tally(Mutex<BTreeMap<String, u64>>);

impl Tally {
    /// Adds `times` to a count.
    pub fn count(&self, what: &str, times: u64) {
        *self.0.lock().unwrap().entry(what.to_owned()).or_default() += times;
    }

    fn of(&self, what: &str) -> u64 {
        self.0.lock().unwrap().get(what).copied().unwrap_or(0)
    }

    /// What has not happened.
    fn missing(&self) -> Vec<&'static str> {
        let is_missing = |what: &&str| self.of(what) == 0;
        SHOWN.into_iter().filter(is_missing).collect()
    }

    fn text(&self) -> String {
        let counts = self.0.lock().unwrap();
        let counts: Vec<_> = counts
            .iter()
            .map(|(what, n)| format!("{n} {what}"))
            .collect();
        counts.join(", ")
    }
}

/// Ends the test at the first failure.
#[derive(Default)]
pub struct Failing {
    is_over: AtomicBool,
    what: Mutex<Option<String>>,
}

impl Failing {
    /// Tells of a failure, and ends the test.
    pub fn fail(&self, what: String) {
        eprintln!("FAILED: {what}");
        self.what.lock().unwrap().get_or_insert(what);
        self.is_over.store(true, Ordering::SeqCst);
    }

    /// Whether there was a failure.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Sleeps; false if the test ends meanwhile.
    pub fn sleep(&self, length: Duration) -> bool {
        let end = Instant::now() + length;
        while !self.is_over() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            // The time between two looks.
            thread::sleep(left.min(Duration::from_millis(20)));
        }
        false
    }
}

// The processes that the test starts: this program again, with one of these "tests".

#[test]
fn keeper_process() {
    servers::run_keeper();
}

#[test]
fn server_process() {
    servers::run_server();
}

#[test]
fn vmm_process() {
    vmm::run();
}

#[test]
fn everything_at_once() {
    if let Err(error) = Userfaultfd::available() {
        println!("SKIP: {error}");
        return;
    }
    let seconds = from_environment("PAGETIDE_STRESS_SECONDS").unwrap_or(30);
    let seed = seed();
    println!("PAGETIDE_STRESS_SECONDS={seconds}");
    let huge = HugePages::reserve(HUGE_PAGES);
    let kinds = kinds();
    let tally = Arc::new(Tally::default());
    let place = Place::new(seed);
    misbehave(&place.store, seed, &tally);
    run(seed, Duration::from_secs(seconds), &place, &kinds, &tally);
    drop(huge);
    println!("{seconds} s: {}", tally.text());
    let missing = tally.missing();
    assert!(missing.is_empty(), "not within {PATIENCE:?}: {missing:?}");
}

/// The kinds of memory that this machine has.
fn kinds() -> Vec<Kind> {
    let mut kinds = vec![Kind::Small, Kind::Transparent, Kind::Native];
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap();
    let mut lines = memory.lines();
    let free = lines.find_map(|line| line.strip_prefix("HugePages_Free:"));
    match free.and_then(|free| free.trim().parse::<u64>().ok()) {
        Some(HUGE_PAGES..) => kinds.push(Kind::Huge),
        free => println!(
            "SKIP: memory of 2M pages: {HUGE_PAGES} pages are needed, and {} are free \
             (/proc/sys/vm/nr_hugepages)",
            free.unwrap_or(0)
        ),
    }
    let minor = Features::MINOR_SHMEM.bits() | Features::MISSING_SHMEM.bits();
    match Userfaultfd::open(Features::from_bits(minor | Features::EVENT_REMOVE.bits())) {
        Ok(_) => kinds.push(Kind::Minor),
        Err(error) => println!("SKIP: memory with a memfd: {error}"),
    }
    kinds
}

/// The store fails once in a while, in every way.
fn misbehave(store: &store::Server, seed: u64, tally: &Arc<Tally>) {
    let mut rng = Rng::new(seed, 77);
    let tally = Arc::clone(tally);
    store.behave(move |_| {
        if !rng.one_in(12) {
            return Act::Well;
        }
        let (act, name) = match rng.below(7) {
            0 => (Act::Slow(Duration::from_millis(rng.below(300))), "slow"),
            1 => (Act::Silent, "silent"),
            2 => (Act::SilentBody, "silent in a body"),
            3 => (Act::Short, "short"),
            4 => (Act::Cut, "cut"),
            5 => (Act::Reset, "reset"),
            _ => (Act::Status(503), "with status 503"),
        };
        tally.count("errors of the store", 1);
        tally.count(&format!("answers {name}"), 1);
        act
    });
}

fn run(seed: u64, length: Duration, place: &Place, kinds: &[Kind], tally: &Arc<Tally>) {
    let failing = Failing::default();
    let kept = Serving::start(place, "kept", true);
    let steady = Serving::start(place, "steady", false);
    // What each holds once it has served, and is idle.
    let vmms = |server: &'static str, kinds: Vec<Kind>| Vmms {
        place,
        server,
        kinds,
        tally,
        failing: &failing,
    };
    let of_kept = kinds
        .iter()
        .copied()
        .filter(|kind| !kind.is_native())
        .collect();
    let (of_kept, of_steady) = (vmms("kept", of_kept), vmms("steady", kinds.to_vec()));
    for (turn, socket) in (0..).zip([Socket::File, Socket::Store, Socket::File]) {
        for vmms in [&of_kept, &of_steady] {
            vmms.live(socket, Rng::new(seed, 1000 + turn), false);
        }
    }
    place.wait_for_idle(&kept);
    place.wait_for_idle(&steady);
    let keeper = place.keeper();
    let before = [kept.pid(), steady.pid(), keeper].map(Holdings::of);
    println!("before: {before:?}");

    let end = Instant::now() + length;
    // How long it lasts decides nothing; on a slow machine it lasts longer.
    let has_all = || tally.missing().is_empty() || Instant::now() >= end + PATIENCE;
    let is_left = || !failing.is_over() && (Instant::now() < end || !has_all());
    let lives = AtomicU64::new(0);
    let kept = thread::scope(|scope| {
        let (is_left, lives, failing) = (&is_left, &lives, &failing);
        for vmms in [&of_kept, &of_steady] {
            for _ in 0..SLOTS {
                scope.spawn(move || {
                    while is_left() {
                        let life = lives.fetch_add(1, Ordering::SeqCst);
                        let mut rng = Rng::new(seed, life);
                        let socket = rng.pick(&[Socket::File, Socket::Store]);
                        vmms.live(socket, rng, true);
                    }
                });
            }
        }
        scope.spawn(move || {
            let mut rng = Rng::new(seed, 99);
            while is_left() {
                be_rude(place, &mut rng, tally);
                // A pause, so that rude clients are not the only ones.
                failing.sleep(Duration::from_millis(rng.below(200)));
            }
        });
        let handing_over = scope.spawn(move || {
            let every = HAND_OVER_EVERY.min(length / 4);
            let mut kept = kept;
            let mut turn = 0;
            while failing.sleep(every) && is_left() {
                turn += 1;
                if turn % 2 == 0 {
                    tally.count("stops of a server", 1);
                    kept.stop();
                } else {
                    tally.count("kills of a server", 1);
                    kept.kill();
                }
                // Some faults meet no server at all.
                thread::sleep(Duration::from_millis(turn * 7 % 100));
                kept = Serving::start(place, "kept", turn % 3 != 0);
            }
            kept
        });
        handing_over.join().unwrap()
    });
    if let Some(what) = failing.what.lock().unwrap().take() {
        panic!("{what}");
    }
    place.wait_for_idle(&kept);
    place.wait_for_idle(&steady);
    check_holdings(&before, &[kept.pid(), steady.pid(), keeper]);
    steady.stop();
    kept.stop();
    eventually("the keeper's end", || !place.keeper_socket().exists());
}

/// What is held when all VMs have gone is what was held before they came. Threads of pools and connections
/// to the store end some time later.
fn check_holdings(before: &[Holdings; 3], processes: &[u32; 3]) {
    let after = eventually("kept, steady and the keeper hold what they held", || {
        let after = processes.map(Holdings::of);
        let mut pairs = before.iter().zip(&after);
        match pairs.all(|(before, after)| before.has_all_of(after)) {
            true => Ok(after),
            false => Err(format!("{after:?}, not {before:?}")),
        }
    });
    println!("after: {after:?}");
}

/// A client that sends a part of a message, or nonsense, and leaves.
fn be_rude(place: &Place, rng: &mut Rng, tally: &Tally) {
    let server = rng.pick(&["kept", "steady"]);
    let socket = rng.pick(&[Socket::File, Socket::Store]);
    // A server may be between two lives.
    let Ok(mut stream) = UnixStream::connect(place.socket(server, socket)) else {
        return;
    };
    let words: [&[u8]; 5] = [
        b"",
        b"[{\"base_host_virt_addr\":4096,",
        b"PTNATIVE\x05\0",
        b"[{\"base_host_virt_addr\":4096,\"size\":4096}]",
        &[0xff; 99],
    ];
    let _ = stream.write_all(rng.pick(&words));
    tally.count("rude clients", 1);
    // It may leave before it is looked at, or later.
    thread::sleep(Duration::from_millis(rng.below(30)));
}
