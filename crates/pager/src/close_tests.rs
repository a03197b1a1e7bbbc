//! Tests of the end of a region.

use pagetide_memory::{
    Backing, FaultInAccess, FaultInError, GuestAddress, PageIndex, PageMap, PoisonMap, Region,
    ServiceAccess,
};
use pagetide_test_support::Sleeper;
use pagetide_uapi::userfaultfd::{Features, Mode, OpenError};

use super::*;
use crate::PatternSource;
use crate::arrival::{Purpose, arrive};
use crate::channel::{Channel, Span};
use crate::config::{InFlightLimits, RetryPolicy};
use crate::memory::Body;
use crate::memory::Local;
use crate::missing::Missing;
use crate::region::{Parts, Supply};
use crate::requests::Requests;

const PAGES: PageRange = PageRange::new(PageIndex(0), 4);
const LOST: PageRange = PageRange::single(PageIndex(1));

/// A region on a kernel that can mark pages as lost, or on one that cannot.
fn region(pager: &Pager, can_poison: bool) -> Option<PagedRegion> {
    let features = match can_poison {
        true => Features::POISON,
        false => Features::NONE,
    };
    let uffd = match Userfaultfd::open(features) {
        Ok(uffd) => Arc::new(uffd),
        Err(
            error @ (OpenError::NotSupported
            | OpenError::NoPermission { .. }
            | OpenError::MissingFeatures { .. }),
        ) => {
            println!("SKIP: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let bytes = PAGES.count() << 12;
    let memory = Region::new(GuestAddress(0), bytes, Backing::Anonymous).unwrap();
    memory.begin_paging(ServiceAccess::Closed).unwrap();
    let range = UserRange::from(memory.guest());
    // SAFETY: no code relies on the memory's zeroes, and it stays mapped until the region closes.
    unsafe { uffd.register(range, Mode::Missing) }.unwrap();
    let channel = Arc::new(Channel::new(uffd, pager.poller.next_token()));
    let span = Span {
        start: range.start,
        region: RegionId(0),
        pages: PAGES,
        shift: 12,
    };
    channel.add(span, || {}).unwrap();
    let limits = InFlightLimits::default();
    let requests = Requests::new(limits, RetryPolicy::default(), 4096);
    let parts = Parts {
        id: RegionId(0),
        map: PageMap::new(PAGES.count()).unwrap(),
        supply: Supply::Local(Arc::new(PatternSource::new(|_, _: &mut [u8]| {}))),
        served: vec![Served {
            pages: PAGES,
            channel,
        }],
        fault_around_pages: 1,
        no_progress_limit: 5,
        can_poison,
        trusts_existing: false,
        installed_by: crate::InstalledBy::default(),
        mapper: None,
        observer: None,
        lost: PoisonMap::new(),
        memory: Box::new(Local {
            region: Arc::new(memory),
            mode: Mode::Missing,
        }),
    };
    let region = PagedRegion::new(parts, Missing::new(requests, None));
    region.count_registered();
    Some(region)
}

fn settle(pager: &Pager, region: &PagedRegion, pages: PageRange, body: Body<'_>) {
    let mut counters = Counters::default();
    arrive(pager, region, &mut counters, pages, body, Purpose::Waiters).unwrap();
}

/// Closes a region without missing pages. Returns whether its userfaultfd is open afterwards.
fn is_open_after_close(pager: &Pager, region: PagedRegion) -> bool {
    let _its_owner = region.memory.local().cloned();
    settle(pager, &region, PAGES, Body::Zero);
    let uffd = Arc::downgrade(&region.served[0].channel.uffd);
    pager.close_region(&region, &mut Closing::new(&mut |_| true));
    drop(region);
    uffd.upgrade().is_some()
}

/// Closing the userfaultfd would let the lost page read as zeroes.
#[test]
fn the_userfaultfd_of_a_lost_page_stays_open_where_the_kernel_cannot_mark_it() {
    for (can_poison, is_lost) in [(false, false), (false, true), (true, false), (true, true)] {
        let pager = Pager::new().unwrap();
        let Some(region) = region(&pager, can_poison) else {
            return;
        };
        if is_lost {
            settle(&pager, &region, LOST, Body::Poisoned);
            assert_eq!(
                region.map.state(LOST.first()),
                Some(PageState::Poisoned),
                "{can_poison}"
            );
        }
        let is_open = is_open_after_close(&pager, region);
        let wanted = is_lost && !can_poison;
        assert_eq!(is_open, wanted, "lost {is_lost}, can poison {can_poison}");
    }
}

/// Its memory is unmapped next, so that a mark for each missing page would be for nothing.
#[test]
fn memory_that_nobody_else_has_ends_without_a_mark_for_each_page() {
    let pager = Pager::new().unwrap();
    for has_owner in [true, false] {
        let Some(region) = region(&pager, true) else {
            return;
        };
        let owner = region.memory.local().filter(|_| has_owner).cloned();
        let start = region.memory.shape().range.start().as_u64();
        let uffd = Arc::downgrade(&region.served[0].channel.uffd);
        pager.close_region(&region, &mut Closing::new(&mut |_| true));
        let counts = region.map.counts();
        let expected = if has_owner { (0, 4) } else { (4, 0) };
        assert_eq!((counts.absent, counts.poisoned), expected);
        // Until it is unmapped, nobody reads zeroes there.
        assert_eq!(is_readable(start), has_owner);
        drop(region);
        assert!(uffd.upgrade().is_none());
        if let Some(memory) = owner {
            let touched = memory.fault_in(PAGES, FaultInAccess::Read);
            assert!(
                matches!(touched, Err(FaultInError::Poisoned { .. })),
                "{touched:?}"
            );
        }
    }
}

/// Whether this process's mapping at an address may be read.
fn is_readable(address: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
    maps.lines().any(|line| {
        let (range, rest) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        (number(start)..number(end)).contains(&address) && rest.starts_with('r')
    })
}

/// Kind: a wait that takes the processor from whom it waits for.
#[test]
fn an_installation_in_progress_is_waited_for_asleep() {
    let pager = Pager::new().unwrap();
    let Some(region) = region(&pager, true) else {
        return;
    };
    let region = Arc::new(region);
    let installing = region.map.claim_arrived(LOST).unwrap();
    let its = Arc::clone(&region);
    let waiting = Sleeper::spawn("the end of a region", move || {
        its.settle_installing();
    });
    drop(installing);
    waiting.join();
}

/// As after a process that kept discarding memory has stopped.
#[test]
fn a_lost_page_that_could_not_be_marked_is_marked_when_its_region_closes() {
    let pager = Pager::new().unwrap();
    let Some(region) = region(&pager, true) else {
        return;
    };
    let memory = Arc::clone(region.memory.local().unwrap());
    let _ = region.poison(LOST.first());
    region.note_unmarked();
    assert!(!is_open_after_close(&pager, region));
    let touched = memory.fault_in(LOST, FaultInAccess::Read);
    assert_eq!(touched, Err(FaultInError::Poisoned { pages: LOST }));
}
