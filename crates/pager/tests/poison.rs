//! Poison as a state of pages, from where it comes from to the guest's machine check. At no step does
//! anybody read zeroes.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a failed helper fails its test"
)]

mod common;
#[cfg(target_arch = "x86_64")]
#[path = "../../kvm/tests/guest/mod.rs"]
mod guest;
#[cfg(target_arch = "x86_64")]
#[path = "../../kvm/tests/poisoning/mod.rs"]
mod poisoning;

use std::path::Path;
use std::sync::Arc;

use common::{
    GPA, PAGE, SourceFn, check_page, exit, fill_page_cache, is_mapped, only, pattern, push_pattern,
    read_exit, region, state, within_patience,
};
use pagetide_kvm::poison::install_sigbus_handler;
use pagetide_memory::{
    AccessError, Backing, GuestAddress, GuestRange, PageIndex, PageRange, PageState, PoisonMap,
    PopulateAccess, PopulateError, Region,
};
use pagetide_pager::{
    BuildError, Fetch, Fetched, Mode, PageCacheSource, PageSource, Pager, Prefetch, PrefetchConfig,
    Progress, ReaderConfig, Readers, Resolution, SourceError,
};
use pagetide_uapi::generated as abi;
use pagetide_uapi::userfaultfd::{Features, Userfaultfd};

/// Whether poison can be put into the guest mapping here; says why not.
fn can_poison() -> bool {
    let can = Userfaultfd::available().is_ok_and(|features| features.contains(Features::POISON));
    if !can {
        println!("SKIP: this kernel's userfaultfd lacks UFFD_FEATURE_POISON");
    }
    can
}

fn pages(first: u64, count: u64) -> GuestRange {
    GuestRange::new(GuestAddress(GPA.0 + first * PAGE), count * PAGE).unwrap()
}

fn map(ranges: &[GuestRange]) -> PoisonMap {
    let mut map = PoisonMap::new();
    for range in ranges {
        map.insert(*range).unwrap();
    }
    map
}

/// Nobody gets anything out of that page: neither a touch nor the kernel.
fn assert_lost(region: &Region, page: u64) {
    let pages = PageRange::single(PageIndex(page));
    let error = region.populate(pages, PopulateAccess::Read).unwrap_err();
    assert_eq!(error, PopulateError::Poisoned { pages });
    assert!(!is_mapped(region, page));
    if !tells_of_poison() {
        println!("SKIP: this kernel lacks CONFIG_MEMORY_FAILURE; pages were not touched");
        return;
    }
    install_sigbus_handler().unwrap();
    let mut seen = [7; 8];
    let error = region
        .read_guest(PageIndex(page), 16, &mut seen)
        .unwrap_err();
    let AccessError::Poisoned { gpa, lost } = error else {
        panic!("{error}")
    };
    let bytes = region.page_size().bytes();
    assert_eq!(gpa.0, region.gpa().0 + page * bytes + 16);
    assert_eq!(lost.bytes(), bytes);
    assert_eq!(seen, [7; 8], "nothing was read");
}

/// Whether SIGBUS says that it is about an error (`BUS_MCEERR_AR`). Without CONFIG_MEMORY_FAILURE it
/// is one like any other, and ends the process.
fn tells_of_poison() -> bool {
    Path::new("/proc/sys/vm/memory_failure_early_kill").exists()
}

/// Gives the pattern, but for one page that is lost.
fn without(lost: u64) -> impl PageSource {
    SourceFn(
        move |fetch: &mut Fetch<'_>| -> Result<Fetched, SourceError> {
            if fetch.pages().contains(PageIndex(lost)) {
                return Ok(Fetched::Poisoned);
            }
            push_pattern(fetch)
        },
    )
}

#[test]
fn what_was_lost_before_is_poisoned_from_the_start() {
    install_sigbus_handler().unwrap();
    for (mode, backing) in [
        (Mode::Minor, Backing::Shmem),
        (Mode::Missing, Backing::Anonymous),
        (Mode::Minor, Backing::Hugetlb2M),
    ] {
        if !can_poison() {
            return;
        }
        let Some(region) = region(8, backing) else {
            continue;
        };
        // A part of page 2, and pages 5 and 6.
        let size = region.page_size().bytes();
        let at =
            |page: u64, bytes| GuestRange::new(GuestAddress(GPA.0 + page * size), bytes).unwrap();
        let lost = map(&[at(2, PAGE), at(5, 2 * size)]);
        let builder = Pager::builder(mode, pattern()).region(Arc::clone(&region));
        let pager = builder.poison(lost).build().unwrap();
        within_patience("a restored guest", move || {
            for page in [2, 5, 6] {
                assert_eq!(state(&pager, page), PageState::Poisoned);
                assert_lost(&region, page);
            }
            let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
            let prefetch = Prefetch::spawn(&pager, PrefetchConfig::default()).unwrap();
            assert!(prefetch.finish().unwrap().is_complete);
            let progress = Progress {
                present: 5,
                poisoned: 3,
                total: 8,
            };
            assert_eq!(pager.progress(), progress, "{backing}");
            assert_eq!(pager.counted().poisoned, 3);
            (0..8)
                .filter(|page| ![2, 5, 6].contains(page))
                .for_each(|page| check_page(&region, page));
            readers.stop().unwrap();
            // Poison outlives the pager: nothing turns into zeroes when the userfaultfd is closed.
            drop(pager);
            for page in [2, 5, 6] {
                assert_lost(&region, page);
            }
        });
    }
}

#[test]
fn what_was_lost_may_have_been_poisoned_before() {
    for (mode, backing) in [
        (Mode::Minor, Backing::Shmem),
        (Mode::Missing, Backing::Shmem),
        (Mode::Missing, Backing::Anonymous),
    ] {
        if !can_poison() {
            return;
        }
        let Some(region) = region(4, backing) else {
            continue;
        };
        // The second time the markers of the first may still be there.
        for time in ["first", "second"] {
            let builder = Pager::builder(mode, pattern()).region(Arc::clone(&region));
            let pager = builder.poison(map(&[pages(1, 2)])).build();
            let pager =
                pager.unwrap_or_else(|error| panic!("{mode:?}, {backing}, {time}: {error}"));
            assert_eq!(pager.progress().poisoned, 2, "{mode:?}, {backing}, {time}");
            drop(pager);
            assert_lost(&region, 1);
        }
    }
}

#[test]
fn lost_content_is_gone_even_if_it_is_mapped() {
    for backing in [Backing::Shmem, Backing::Anonymous] {
        if !can_poison() {
            return;
        }
        let Some(region) = region(4, backing) else {
            continue;
        };
        // MISSING regions must not have been touched, and this one was.
        let all = PageRange::new(PageIndex(0), 4);
        region.populate(all, PopulateAccess::Write).unwrap();
        let builder = Pager::builder(Mode::Missing, pattern()).region(Arc::clone(&region));
        let _pager = builder.poison(map(&[pages(1, 2)])).build().unwrap();
        assert_lost(&region, 1);
        assert_lost(&region, 2);
    }
}

#[test]
fn what_was_lost_elsewhere_is_not_this_memorys() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    for other in [pages(4, 1), pages(3, 2)] {
        let builder = Pager::builder(Mode::Minor, pattern()).region(Arc::clone(&region));
        match builder.poison(map(&[pages(0, 1), other])).build() {
            Err(BuildError::PoisonOutside { range }) => assert_eq!(range, other),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_the_source_has_lost_is_lost_for_good() {
    install_sigbus_handler().unwrap();
    for (mode, backing) in [
        (Mode::Minor, Backing::Shmem),
        (Mode::Missing, Backing::Anonymous),
    ] {
        if !can_poison() {
            return;
        }
        let Some(region) = region(8, backing) else {
            return;
        };
        within_patience("touching lost pages", move || {
            let pager = common::pager(&region, mode, without(3));
            // By an exit, which needs nobody to be woken.
            let mut resolver = pager.resolver(0);
            for _ in 0..2 {
                let resolution = resolver.resolve_exit(&read_exit(&region, 3)).unwrap();
                assert_eq!(resolution, Resolution::Poisoned);
                assert_eq!(state(&pager, 3), PageState::Poisoned);
                assert_lost(&region, 3);
            }
            assert_eq!(resolver.counters().poisoned, 1);
            // Prefetch leaves it alone.
            let prefetch = Prefetch::spawn(&pager, PrefetchConfig::default()).unwrap();
            let end = prefetch.finish().unwrap();
            assert!(end.is_complete);
            assert_eq!((end.counters.pages, end.counters.poisoned), (7, 0));
            drop((resolver, pager));
            assert_lost(&region, 3);
        });
    }
}

#[test]
fn prefetch_counts_what_it_finds_lost() {
    let Some(region) = region(64, Backing::Shmem) else {
        return;
    };
    let pager = common::pager(&region, Mode::Minor, without(17));
    let end = within_patience("prefetch", move || {
        Prefetch::spawn(&pager, PrefetchConfig::default())
            .unwrap()
            .finish()
    });
    let counters = end.unwrap().counters;
    assert_eq!((counters.pages, counters.poisoned), (63, 1));
}

#[test]
fn errors_that_the_vmm_learns_of_are_recorded() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let pager = common::pager(&region, Mode::Minor, pattern());
    assert_eq!(pager.record_poison(pages(1, 2)), 2);
    assert_eq!(pager.record_poison(pages(2, 2)), 1);
    // Not of this pager, in part or at all.
    assert_eq!(pager.record_poison(pages(7, 3)), 1);
    assert_eq!(pager.record_poison(pages(8, 3)), 0);
    assert_eq!(pager.counted().poisoned, 4);
    let poisoned = (0..8).filter(|&page| state(&pager, page) == PageState::Poisoned);
    assert_eq!(poisoned.collect::<Vec<_>>(), [1, 2, 3, 7]);
    // Whoever brings a page in is waited for.
    let map = pager.page_map(only(&pager)).unwrap();
    let pagetide_memory::Claim::Won(claim) = map.claim(PageIndex(0)) else {
        panic!("absent")
    };
    std::thread::scope(|scope| {
        let recorder = scope.spawn(|| pager.record_poison(pages(0, 1)));
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!recorder.is_finished());
        let _ = claim.finish(pagetide_memory::Settled::Present);
        assert_eq!(recorder.join().unwrap(), 1);
    });
    assert_eq!(state(&pager, 0), PageState::Poisoned);
}

#[test]
fn what_is_recorded_stays_lost_without_the_pager() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    if !can_poison() {
        return;
    }
    for mode in [Mode::Minor, Mode::Missing] {
        let pager = common::pager(&region, mode, pattern());
        assert_eq!(pager.record_poison(pages(2, 1)), 1);
        // Nobody has touched it since.
        drop(pager);
        assert_lost(&region, 2);
        region.punch(region.all_pages()).unwrap();
    }
}

#[test]
fn what_was_lost_before_stays_lost_after_a_reset() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    if !can_poison() {
        return;
    }
    let pager = Pager::builder(Mode::Minor, pattern())
        .region(Arc::clone(&region))
        .poison(map(&[pages(1, 1)]))
        .build()
        .unwrap();
    region.zap_guest(region.all_pages()).unwrap();
    pager.reset().unwrap();
    drop(pager);
    assert_lost(&region, 1);
}

#[test]
fn a_part_of_a_huge_page_is_not_the_page() {
    let Some(region) = region(2, Backing::Hugetlb2M) else {
        return;
    };
    let pager = common::pager(&region, Mode::Minor, pattern());
    // As with the policy to keep what is good.
    assert_eq!(pager.record_poison(pages(5, 1)), 0);
    assert_eq!(pager.record_poison(pages(512, 512)), 1);
    assert_eq!(state(&pager, 0), PageState::Absent);
    assert_eq!(state(&pager, 1), PageState::Poisoned);
}

#[cfg(target_arch = "x86_64")]
mod with_a_guest {
    use super::*;

    use guest::{DATA, DATA_SLOT, Limited, Machine};
    use pagetide_kvm::poison::{MachineCheck, MachineCheckForm};
    use pagetide_kvm::{BoundVcpu, Exit, SlotFlags};
    use pagetide_memory::PageSize;
    use poisoning::checks::{CHECKED, SURVIVED, logged, touch, vcpu};
    use poisoning::{may_poison, poison};

    #[test]
    fn errors_of_present_pages_are_found_by_whoever_touches_them() {
        if !may_poison() {
            return;
        }
        install_sigbus_handler().unwrap();
        let Some(region) = region(16, Backing::Shmem) else {
            return;
        };
        fill_page_cache(&region);
        // Before the pager: the page cache has them.
        poison(&region, GuestAddress(GPA.0 + 9 * PAGE));
        let pager = common::pager(&region, Mode::Minor, PageCacheSource);
        let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        within_patience("touching", move || {
            let end = Prefetch::spawn(&pager, PrefetchConfig::default())
                .unwrap()
                .finish();
            let counters = end.unwrap().counters;
            assert_eq!((counters.pages, counters.poisoned), (15, 1));
            assert_eq!(state(&pager, 9), PageState::Poisoned);
            assert_lost(&region, 9);
            // Since then: an exit comes again and again, and finds it out.
            poison(&region, GuestAddress(GPA.0 + 4 * PAGE));
            let mut resolver = pager.resolver(0);
            let access = abi::KVM_MEMORY_EXIT_FLAG_WRITE;
            let mut resolved = || resolver.resolve_exit(&exit(&region, 4, access)).unwrap();
            assert_eq!(resolved(), Resolution::AlreadyPresent);
            assert_eq!(resolved(), Resolution::Poisoned);
            assert_eq!(state(&pager, 4), PageState::Poisoned);
            assert_eq!(resolved(), Resolution::Poisoned);
            assert_lost(&region, 4);
            (0..16)
                .filter(|page| ![4, 9].contains(page))
                .for_each(|page| check_page(&region, page));
            readers.stop().unwrap();
        });
    }

    /// The whole way, with faults delivered in both ways.
    #[test]
    fn a_moved_guest_gets_machine_checks_and_no_zeroes() {
        if !common::has_userfaultfd() || !can_poison() {
            return;
        }
        if !tells_of_poison() {
            println!("SKIP: this kernel lacks CONFIG_MEMORY_FAILURE");
            return;
        }
        for by_exit in [false, true] {
            let Some(machine) = Machine::new() else {
                return;
            };
            if by_exit {
                if !machine.vm.capabilities().absent_mapping_fault {
                    println!("SKIP: this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT");
                    continue;
                }
                let flags = SlotFlags {
                    absent_mapping_fault: true,
                    ..SlotFlags::default()
                };
                machine.vm.set_slot_flags(DATA_SLOT, flags).unwrap();
            }
            let (mut vcpu, form) = vcpu(&machine, 0, b"AuthenticAMD");
            // Page 5 was lost where the guest comes from, page 6 is lost at the source.
            let source = SourceFn(|fetch: &mut Fetch<'_>| {
                if fetch.pages().contains(PageIndex(6)) {
                    return Ok(Fetched::Poisoned);
                }
                let number = fetch.pages().first().0.to_le_bytes();
                assert_eq!(fetch.pages().count(), 1);
                fetch.push(&number)?;
                fetch.push(&[0; 4088])?;
                Ok(Fetched::Filled)
            });
            let bad = |page: u64| GuestAddress(DATA + page * PAGE);
            let pager = Pager::builder(Mode::Minor, source)
                .region(Arc::clone(&machine.data))
                .poison(map(&[GuestRange::new(bad(5), PAGE).unwrap()]))
                .build()
                .unwrap();
            let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
            Limited::spawn("a guest that was moved", move || {
                let mut vcpu = vcpu.bind().unwrap();
                let mut resolver = pager.resolver(0);
                for page in [4, 5, 6, 7, 5, 6, 4] {
                    let mut exit = touch(&mut vcpu, bad(page).0 + 8 * (page & 1));
                    while let Exit::Fault(fault) = exit {
                        let is_lost = if fault.is_resolvable() {
                            resolver.resolve_exit(&fault).unwrap() == Resolution::Poisoned
                        } else {
                            assert!(fault.poisoned, "{fault}");
                            true
                        };
                        if is_lost {
                            assert_eq!(fault.gpa, bad(page));
                            tell(&machine, &mut vcpu, form, fault.gpa);
                            exit = Exit::Halt;
                            break;
                        }
                        exit = vcpu.run().unwrap();
                    }
                    match page {
                        5 | 6 => assert_eq!(exit, Exit::Halt, "page {page} by exit: {by_exit}"),
                        4 => assert_eq!(
                            exit,
                            Exit::IoOut {
                                port: 0x11,
                                data: 4
                            }
                        ),
                        _ => assert_eq!(
                            exit,
                            Exit::IoOut {
                                port: 0x11,
                                data: 0
                            }
                        ),
                    }
                }
                let states = [4, 5, 6, 7].map(|page| {
                    let map = pager.page_map(pager.locate(bad(page)).unwrap().0).unwrap();
                    map.state(PageIndex(page)).unwrap()
                });
                use PageState::{Poisoned, Present};
                assert_eq!(states, [Present, Poisoned, Poisoned, Present]);
                readers.stop().unwrap();
            })
            .join();
        }
    }

    /// Tells the guest, and sees that it has heard and goes on.
    fn tell(
        machine: &Machine,
        vcpu: &mut BoundVcpu<'_>,
        form: MachineCheckForm,
        gpa: GuestAddress,
    ) {
        let error = machine.vm.error_of(gpa, PageSize::Size4K).unwrap();
        let check = MachineCheck::new(form, error.urgency, error.gpa);
        vcpu.inject_machine_check(&check).unwrap();
        let exit = vcpu.run().unwrap();
        assert!(matches!(exit, Exit::IoOut { port: CHECKED, .. }), "{exit}");
        assert_eq!(logged(machine), check);
        let (port, data) = (guest::PEEKED, SURVIVED);
        assert_eq!(vcpu.run().unwrap(), Exit::IoOut { port, data });
    }
}
