//! The page map under loom: each test runs for every possible order of its threads' steps, and for
//! every value that a load may return. A thread that is never woken is a deadlock, which loom reports.
//!
//!     RUSTFLAGS="--cfg loom" cargo test --package pagetide-memory --lib loom

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicBool;
use loom::thread::{self, JoinHandle};

use super::*;

const PAGE: PageIndex = PageIndex(0);
const ONE: PageRange = PageRange::single(PAGE);
const LONG: Duration = Duration::from_secs(3600);

/// A map and the content of its pages: loom reports an access to the content that no edge of the map
/// orders after the access before it.
struct World {
    map: PageMap,
    content: UnsafeCell<u32>,
}

impl World {
    fn new(pages: u64) -> Arc<Self> {
        Arc::new(Self {
            map: PageMap::new(pages).unwrap(),
            content: UnsafeCell::new(0),
        })
    }

    /// The owner's writes before it finishes.
    fn write(&self) {
        // SAFETY: loom checks that this is the only access.
        self.content.with_mut(|content| unsafe { *content += 1 });
    }

    /// The reads of a thread that has seen the page Present.
    fn read(&self) {
        // SAFETY: loom checks that no thread writes meanwhile.
        let installs = self.content.with(|content| unsafe { *content });
        assert_eq!(installs, 1, "the content was installed once");
    }

    fn install(&self, guard: ClaimGuard<'_>) -> bool {
        self.write();
        guard.finish(Settled::Present).is_wanted()
    }

    /// Content arrives. `None` if it was dropped; otherwise whether a wake-up was wanted.
    fn arrive(&self) -> Option<bool> {
        self.map.claim_arrived(ONE).map(|guard| self.install(guard))
    }

    /// A userfaultfd reader: whether the page's installer will issue the wake-up.
    fn leave_wake(&self) -> bool {
        match self.map.want_wake(PAGE) {
            Some(PageState::Present) => {
                self.read();
                false
            }
            Some(state) => state == PageState::Installing,
            None => panic!("the map has the page"),
        }
    }
}

/// Runs `work` in a separate thread.
fn spawn<T: 'static>(
    world: &Arc<World>,
    work: impl FnOnce(&World) -> T + 'static,
) -> JoinHandle<T> {
    let world = Arc::clone(world);
    thread::spawn(move || work(&world))
}

fn claim(world: &World) -> Claim<'_> {
    world.map.claim_run(PAGE, ONE)
}

fn won(claim: Claim<'_>) -> ClaimGuard<'_> {
    match claim {
        Claim::Won(guard) => guard,
        other => panic!("{other:?}"),
    }
}

fn pend(world: &World) {
    assert_eq!(world.map.pend_run(PAGE, ONE), Pend::Made(ONE));
}

/// Runs `test` for every order of its threads' steps.
fn model(test: impl Fn() + Send + Sync + 'static) {
    loom::model(test);
}

/// Runs `test` for those orders in which threads are preempted at most three times: with loops in
/// several threads there are too many orders.
fn model_in_part(test: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(test);
}

#[test]
fn loom_two_claims_have_one_owner() {
    model(|| {
        let world = World::new(1);
        let take = |world: &World| match claim(world) {
            Claim::Won(guard) => {
                world.install(guard);
                true
            }
            Claim::Lost(PageState::Present) => {
                world.read();
                false
            }
            Claim::Lost(PageState::Installing) => false,
            other => panic!("{other:?}"),
        };
        let other = spawn(&world, take);
        let mine = take(&world);
        assert!(mine ^ other.join().unwrap());
        world.read();
    });
}

#[test]
fn loom_an_arrival_and_a_claim_have_one_owner_of_each_page() {
    model(|| {
        let world = World::new(2);
        let both = PageRange::new(PAGE, 2);
        let other = spawn(&world, move |world| {
            let guard = world.map.claim_arrived(both)?;
            let pages = guard.pages();
            let _ = guard.finish(Settled::Present);
            Some(pages)
        });
        let mine = match world.map.claim_run(PageIndex(1), both) {
            Claim::Won(guard) => {
                let pages = guard.pages();
                let _ = guard.finish(Settled::Present);
                Some(pages)
            }
            _ => None,
        };
        let theirs = other.join().unwrap();
        let total = [mine, theirs].into_iter().flatten().map(PageRange::count);
        assert_eq!(total.sum::<u64>(), world.map.counts().present);
        if let (Some(mine), Some(theirs)) = (mine, theirs) {
            assert!(mine.intersection(theirs).is_empty());
        }
    });
}

#[test]
fn loom_a_wake_left_to_an_owner_is_issued() {
    model(|| {
        let world = World::new(1);
        std::mem::forget(won(claim(&world)));
        let readers = [
            spawn(&world, World::leave_wake),
            spawn(&world, World::leave_wake),
        ];
        let given = world.install(ClaimGuard::new(&world.map, ONE, false));
        let promised = readers.map(|reader| reader.join().unwrap());
        assert_eq!(given, promised[0] || promised[1]);
        assert!(!world.map.is_wake_wanted(PAGE));
    });
}

#[test]
fn loom_a_waiter_sees_the_owner_finish() {
    model(|| {
        let world = World::new(1);
        let guard = won(claim(&world));
        let waiters = [(); 2].map(|()| {
            spawn(&world, |world| {
                assert_eq!(world.map.wait(PAGE, LONG), Some(PageState::Present));
                world.read();
            })
        });
        world.install(guard);
        for waiter in waiters {
            waiter.join().unwrap();
        }
    });
}

#[test]
fn loom_a_waiter_takes_over_after_an_owner_abandons() {
    model_in_part(|| {
        let world = World::new(1);
        let guard = won(claim(&world));
        let waiters = [(); 2].map(|()| {
            spawn(&world, |world| {
                loop {
                    match claim(world) {
                        Claim::Won(guard) => {
                            world.install(guard);
                            return;
                        }
                        Claim::Lost(PageState::Present) => return world.read(),
                        Claim::Lost(PageState::Installing) => {
                            world.map.wait(PAGE, LONG);
                        }
                        other => panic!("{other:?}"),
                    }
                }
            })
        });
        assert_eq!(guard.abandon(), WakeWanted::No);
        for waiter in waiters {
            waiter.join().unwrap();
        }
        world.read();
    });
}

#[test]
fn loom_a_wake_left_to_an_owner_that_abandons_is_returned() {
    for is_pending in [false, true] {
        model(move || {
            let world = World::new(1);
            if is_pending {
                pend(&world);
            }
            let guard = won(claim(&world));
            let reader = spawn(&world, World::leave_wake);
            let given = guard.abandon().is_wanted();
            assert_eq!(given, reader.join().unwrap());
            assert!(!world.map.is_wake_wanted(PAGE));
            assert_eq!(world.arrive(), Some(false));
        });
    }
}

#[test]
fn loom_a_waiter_sees_the_page_withdrawn() {
    model(|| {
        let world = World::new(1);
        pend(&world);
        let waiter = spawn(&world, |world| {
            assert_eq!(world.map.wait(PAGE, LONG), Some(PageState::Absent));
        });
        world.map.unpend(ONE);
        waiter.join().unwrap();
    });
}

#[test]
fn loom_a_removed_page_stays_removed() {
    model_in_part(|| {
        let world = World::new(1);
        pend(&world);
        let arrival = spawn(&world, World::arrive);
        let before = loop {
            match world.map.remove(PAGE) {
                Removal::Done { before } => break before,
                Removal::Installing => {
                    world.map.wait_for_owner(PAGE, LONG);
                }
                other => panic!("{other:?}"),
            }
        };
        let arrived = arrival.join().unwrap();
        match before {
            PageState::Present => {
                world.read();
                assert!(arrived.is_some());
            }
            PageState::Pending => assert_eq!(arrived, None),
            other => panic!("{other:?}"),
        }
        assert_eq!(world.map.state(PAGE), Some(PageState::Removed));
    });
}

#[test]
fn loom_a_waiter_sees_the_page_removed() {
    model(|| {
        let world = World::new(1);
        pend(&world);
        let waiter = spawn(&world, |world| {
            assert_eq!(world.map.wait(PAGE, LONG), Some(PageState::Removed));
        });
        assert!(matches!(world.map.remove(PAGE), Removal::Done { .. }));
        waiter.join().unwrap();
    });
}

#[test]
fn loom_a_stop_is_not_missed() {
    model(|| {
        let world = World::new(1);
        pend(&world);
        let stopping = Arc::new(AtomicBool::new(false));
        let is_stopping = Arc::clone(&stopping);
        let waiter = spawn(&world, move |world| {
            loop {
                let epoch = world.map.epoch();
                if is_stopping.load(Ordering::Acquire) {
                    return;
                }
                let state = world.map.wait_since(PAGE, epoch, LONG);
                assert_eq!(state, Some(PageState::Pending));
            }
        });
        stopping.store(true, Ordering::Release);
        world.map.notify_all();
        waiter.join().unwrap();
    });
}
