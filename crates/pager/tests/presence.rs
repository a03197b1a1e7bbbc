//! A thread that must not sleep makes pages present before it accesses them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use pagetide_memory::{Access, Backing, GuestAddress, GuestRange, PageIndex, PageState, Region};
use pagetide_pager::{
    Content, Contents, LocalSource, Mapper, Mode, Pager, PresenceError, RegionConfig, RegionId,
    Request, ResolveError, Resolver,
};
use support::manual::*;
use support::sources::fill_in;
use support::spawn_asleep;

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

/// Kind: a state that is looked at between two steps that belong together.
#[test]
fn an_image_waits_for_a_page_that_is_mapped_and_not_yet_settled() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let (gate, manual) = (Gate::new(), ManualSource::new());
    let mapper = Arc::new(Held(Arc::clone(&gate)));
    let pager = Pager::new().unwrap();
    let config = RegionConfig::local(Arc::clone(&region), Mode::Missing, manual.contents());
    let id = pager.add(config.populate(mapper, 512)).unwrap();
    let pushing = Arc::clone(&pager);
    let push = thread::spawn(move || {
        let bytes = content_of(range(1, 1));
        pushing
            .push(id, range(1, 1), Content::Bytes(&bytes))
            .unwrap();
    });
    gate.wait_for(1);
    // As a thread does that was woken by the installation.
    region.write_guest(PageIndex(1), 0, &[9]).unwrap();
    assert_eq!(state(&pager, 1), PageState::Installing);
    let its = Arc::clone(&pager);
    let image = spawn_asleep("an image", move || its.image(id).unwrap());
    gate.open();
    let image = join("an image", image);
    assert_eq!(image.state(PageIndex(1)), Some(PageState::Present));
    join("the push", push);
}

/// Keeps a page Installing.
struct Held(Arc<Gate>);

impl Mapper for Held {
    fn populate(&self, range: GuestRange) -> Result<u64, Box<dyn Error + Send + Sync>> {
        self.0.pass();
        Ok(range.bytes())
    }
}

/// As for a snapshot: what is missing is read from the source, and stays missing.
#[test]
fn a_paused_vm_is_read_as_a_whole_while_pages_are_missing() {
    const PAGES: u64 = 8;
    for (mode, backing) in WAYS {
        let Some(region) = region(PAGES, backing) else {
            return;
        };
        let source = Arc::new(LocalFn(fill_in));
        let contents = Contents::Local(Arc::clone(&source) as Arc<dyn LocalSource>);
        let pager = Pager::new().unwrap();
        let config = RegionConfig::local(Arc::clone(&region), mode, contents);
        let id = pager.add(config).unwrap();
        let mut resolver = pager.resolver(None).unwrap();
        ensure(&mut resolver, 1, 3, Access::Write).unwrap();
        region.write_guest(PageIndex(2), 0, &[9]).unwrap();
        pager.discard(id, range(3, 2)).unwrap();
        resolver.ensure_present(gpa(3), 1, Access::Write).unwrap();
        region.write_guest(PageIndex(3), 0, &[8]).unwrap();

        let image = pager.image(id).unwrap();
        // Prefetch goes on.
        resolver.ensure_present(gpa(6), 1, Access::Read).unwrap();
        let before = pager.progress();
        let mut seen = Vec::new();
        for page in (0..PAGES).map(PageIndex) {
            let mut bytes = [0; 4096];
            if image.state(page) == Some(PageState::Absent) {
                source.fill(gpa(page.0), &mut bytes).unwrap();
            } else {
                resolver
                    .ensure_present(gpa(page.0), PAGE, Access::Read)
                    .unwrap();
                region.read_guest(page, 0, &mut bytes).unwrap();
            }
            seen.extend(bytes);
        }
        let mut wanted = content_of(range(0, PAGES));
        let at = |page: u64| usize::try_from(page * PAGE).unwrap();
        wanted[at(3)..at(5)].fill(0);
        (wanted[at(2)], wanted[at(3)]) = (9, 8);
        assert!(seen == wanted, "{mode:?} {backing}");
        assert_eq!(pager.progress(), before, "{mode:?} {backing}");
    }
}
