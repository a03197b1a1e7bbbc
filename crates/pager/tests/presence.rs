//! A thread that must not sleep makes pages present before it accesses them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pagetide_memory::{Access, Backing, GuestAddress, PageState, Region};
use pagetide_pager::{
    Content, Contents, Mode, Pager, PresenceError, RegionConfig, RegionId, Request, ResolveError,
    Resolver,
};
use support::manual::*;

/// From the middle of one page to the middle of another.
fn ensure(
    resolver: &mut Resolver,
    first: u64,
    last: u64,
    access: Access,
) -> Result<(), PresenceError> {
    let start = GuestAddress(gpa(first).0 + PAGE / 2);
    resolver.ensure_present(start, (last - first) * PAGE, access)
}

/// A region whose source answers at once, without threads: nobody serves its userfaultfd.
fn unserved(
    region: &Arc<Region>,
    mode: Mode,
    answer: impl Fn(Request) + Send + Sync + 'static,
) -> (Arc<Pager>, RegionId) {
    let pager = Pager::new().unwrap();
    let contents = Contents::Source(Arc::new(SubmitFn(answer)));
    let config = RegionConfig::local(Arc::clone(region), mode, contents);
    let id = pager.add(config).unwrap();
    (pager, id)
}

#[test]
fn pages_are_present_for_a_thread_that_nobody_would_wake() {
    for (mode, backing) in WAYS {
        let Some(region) = region(16, backing) else {
            return;
        };
        let asked = Arc::new(AtomicU64::new(0));
        let counts = Arc::clone(&asked);
        let (pager, id) = unserved(&region, mode, move |request| {
            counts.fetch_add(1, Ordering::AcqRel);
            complete(request);
        });
        let mut resolver = pager.resolver(None).unwrap();
        for access in [Access::Read, Access::Write] {
            // Also pages that are present already, however often.
            for _ in 0..1100 {
                ensure(&mut resolver, 3, 6, access).unwrap();
            }
            assert_eq!(asked.load(Ordering::Acquire), 4);
        }
        (3..=6).for_each(|page| check_page(&region, page));
        assert_eq!(state(&pager, 2), PageState::Absent);
        assert_eq!(state(&pager, 7), PageState::Absent);
        // Discarded pages are zero, and mapped.
        assert_eq!(pager.discard(id, range(4, 1)).unwrap(), 1);
        ensure(&mut resolver, 3, 6, Access::Read).unwrap();
        let mut seen = [1; 16];
        region
            .read_guest(range(4, 1).first(), 0, &mut seen)
            .unwrap();
        assert_eq!(seen, [0; 16]);
        // And so are pages whose mapping the host has taken away.
        if mode == Mode::Minor {
            region.zap_guest(range(3, 4)).unwrap();
            ensure(&mut resolver, 3, 6, Access::Read).unwrap();
            check_page(&region, 5);
        }
    }
}

#[test]
fn what_an_access_would_meet_is_an_error() {
    let Some(region) = region(16, Backing::Shmem) else {
        return;
    };
    let (pager, _) = unserved(&region, Mode::Minor, |request| {
        match request.pages().first().0 {
            5 => request.complete(Content::Poisoned),
            _ => complete(request),
        }
    });
    let mut resolver = pager.resolver(None).unwrap();
    for _ in 0..2 {
        let ensured = ensure(&mut resolver, 4, 6, Access::Read);
        let Err(PresenceError::Poisoned { gpa: at }) = ensured else {
            panic!("{ensured:?}")
        };
        assert_eq!(at, gpa(5));
    }
    // Those before it are present.
    check_page(&region, 4);
    assert_eq!(state(&pager, 6), PageState::Absent);
    let ensured = ensure(&mut resolver, 14, 16, Access::Read);
    let Err(PresenceError::Resolve(ResolveError::Outside { gpa: at })) = ensured else {
        panic!("{ensured:?}")
    };
    assert_eq!(at, gpa(16));
    check_page(&region, 15);
    let huge = resolver.ensure_present(gpa(1), u64::MAX, Access::Read);
    assert!(matches!(huge, Err(PresenceError::Resolve(_))), "{huge:?}");
    resolver.ensure_present(gpa(100), 0, Access::Read).unwrap();
    pager.stop();
    let stopped = ensure(&mut resolver, 4, 4 + 1, Access::Read);
    assert!(
        matches!(stopped, Err(PresenceError::Poisoned { .. })),
        "{stopped:?}"
    );
}
