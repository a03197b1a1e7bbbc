//! The book of missing pages under loom, with the page map: no thread sleeps that nobody will wake. Each test runs for
//! every order of its threads' steps in which threads are preempted at most three times.
//!
//!     RUSTFLAGS="--cfg loom" cargo test --package pagetide-memory --lib loom

use loom::sync::{Arc, Mutex, MutexGuard};
use loom::thread::{self, JoinHandle};

use super::*;
use crate::page_map::{Removal, Settled};

const PAGE: PageIndex = PageIndex(0);
const ONE: PageRange = PageRange::single(PAGE);
const LONG: std::time::Duration = std::time::Duration::from_secs(3600);

struct World {
    map: PageMap,
    book: Mutex<MissingPages<u8>>,
}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            map: PageMap::new(1).unwrap(),
            book: Mutex::new(MissingPages::default()),
        })
    }

    fn lock(&self) -> MutexGuard<'_, MissingPages<u8>> {
        self.book.lock().unwrap()
    }

    /// A userfaultfd reader, whose thread sleeps. Returns whether it relies on others to wake it.
    fn fault(&self) -> bool {
        loop {
            let touched = self.lock().touch(&self.map, PAGE, ONE, Wish::Asleep);
            match touched {
                Touch::New(_) | Touch::Known(_) => return true,
                Touch::Lost(PageState::Installing) => {
                    if self.map.want_wake(PAGE) == Some(PageState::Installing) {
                        return true;
                    }
                }
                Touch::Lost(state) if state.is_settled() => return false,
                Touch::Lost(_) => {}
                Touch::Outside => panic!("the map has the page"),
            }
        }
    }

    fn claim(&self) -> Option<(ClaimGuard<'_>, Vec<Entry<u8>>)> {
        let guard = self.map.claim_arrived(ONE)?;
        let entries = match guard.has_pending() {
            true => self.lock().take(guard.pages()),
            false => Vec::new(),
        };
        Some((guard, entries))
    }

    /// Content arrives. Returns whether threads are woken.
    fn arrive(&self) -> bool {
        let Some((guard, entries)) = self.claim() else {
            return false;
        };
        let was_asleep = entries.iter().any(|entry| entry.wish.is_asleep());
        guard.finish(Settled::Present).is_wanted() | was_asleep
    }

    /// Content arrives, and cannot be installed.
    fn fail(&self) -> bool {
        let Some((guard, entries)) = self.claim() else {
            return false;
        };
        let left = self.lock().put_back(guard, entries);
        !left.wake.is_empty()
    }

    /// The thread that installs it panics.
    fn unwind(&self) -> bool {
        if let Some((guard, entries)) = self.claim() {
            let _ = self.lock().keep(guard, entries);
        }
        false
    }

    /// The guest discards the page.
    fn remove(&self) -> bool {
        loop {
            match self.map.remove(PAGE) {
                Removal::Done {
                    before: PageState::Pending,
                } => {
                    let taken = self.lock().take(ONE);
                    return taken.iter().any(|entry| entry.wish.is_asleep());
                }
                Removal::Done { .. } => return false,
                Removal::Installing => {
                    self.map.wait_for_owner(PAGE, LONG);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Prefetch asks for the page, and gives up.
    fn plan_and_give_up(&self) -> bool {
        let _ = self.lock().plan(&self.map, PAGE, ONE);
        let mut book = self.lock();
        let is_ahead = |entry: &&Entry<u8>| !entry.wish.is_waiting();
        let ahead: Vec<_> = book
            .iter()
            .filter(is_ahead)
            .map(|entry| entry.pages)
            .collect();
        for pages in ahead {
            let withdrawn = book.withdraw(&self.map, pages);
            assert!(withdrawn.iter().all(|entry| !entry.wish.is_asleep()));
        }
        false
    }

    /// A thread that relies on others was woken, or is in the book.
    fn check(&self, relies: bool, woken: bool) {
        let book = self.lock();
        let entry = book.entry(PAGE).copied();
        let state = self.map.state(PAGE).unwrap();
        assert_eq!(entry.is_some(), state == PageState::Pending);
        let is_asleep = entry.is_some_and(|entry| entry.wish.is_asleep());
        assert!(!relies || woken || is_asleep, "{state:?}");
        assert!(!self.map.is_wake_wanted(PAGE));
    }
}

fn spawn<T: 'static>(
    world: &Arc<World>,
    work: impl FnOnce(&World) -> T + 'static,
) -> JoinHandle<T> {
    let world = Arc::clone(world);
    thread::spawn(move || work(&world))
}

/// A fault beside others, which return whether they have woken its thread.
fn beside(others: impl Fn() -> Vec<fn(&World) -> bool> + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let world = World::new();
        let others: Vec<_> = others()
            .into_iter()
            .map(|work| spawn(&world, work))
            .collect();
        let relies = world.fault();
        let woken = others
            .into_iter()
            .fold(false, |woken, other| woken | other.join().unwrap());
        world.check(relies, woken);
    });
}

#[test]
fn loom_a_fault_beside_an_arrival() {
    beside(|| vec![World::arrive]);
}

#[test]
fn loom_a_fault_beside_an_arrival_that_fails() {
    beside(|| vec![World::fail]);
    beside(|| vec![World::fail, World::arrive]);
}

#[test]
fn loom_a_fault_beside_an_owner_that_panics() {
    beside(|| vec![World::unwind]);
    beside(|| vec![World::unwind, World::arrive]);
}

#[test]
fn loom_a_fault_beside_a_discard() {
    beside(|| vec![World::remove]);
    beside(|| vec![World::remove, World::fail]);
}

#[test]
fn loom_a_fault_beside_prefetch_that_gives_up() {
    beside(|| vec![World::plan_and_give_up]);
    beside(|| vec![World::plan_and_give_up, World::fail]);
}
