//! The memory at a guest-physical address after transactions have moved slots.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod guest;

use std::sync::Arc;

use guest::{DATA, DATA_PAGES, DATA_SLOT, Machine, PAGE, whole_methods};
use pagetide_kvm::{Exit, Method, SlotFlags, Vm};
use pagetide_memory::{Backing, FaultInAccess, GuestAddress, PageIndex, PageRange};

/// The guest's address of pages 16 to 31 of the data after the move.
const ELSEWHERE: u64 = 128 << 20;
const MOVED: u64 = 16;

/// Leaves pages 0 to 15 where they are, moves the next 16, and deletes the others.
fn move_a_part(machine: &Machine, method: Method, flags: SlotFlags) {
    let mut transaction = machine.vm.transaction();
    transaction.resize(DATA_SLOT, MOVED * PAGE);
    transaction.create(
        Arc::clone(&machine.data),
        MOVED * PAGE,
        MOVED * PAGE,
        GuestAddress(ELSEWHERE),
        flags,
    );
    let done = transaction.commit_with(method);
    done.unwrap_or_else(|error| panic!("{method:?}: {error}"));
}

/// The page of the data at an address, and the data's own address of it.
fn data_page(vm: &Vm, machine: &Machine, gpa: u64) -> Option<(u64, u64)> {
    let home = vm.home_of(GuestAddress(gpa))?;
    assert!(Arc::ptr_eq(&home.region, &machine.data));
    Some((home.page.0, home.gpa.0))
}

#[test]
fn a_moved_slot_is_translated_to_its_regions_pages() {
    let Some(first) = Machine::new() else { return };
    for method in whole_methods(&first.vm) {
        let machine = Machine::new().expect("there was one");
        let of = |gpa| data_page(&machine.vm, &machine, gpa);
        let home = |page: u64, offset: u64| Some((page, DATA + page * PAGE + offset));
        for page in [0, MOVED, DATA_PAGES - 1] {
            assert_eq!(of(DATA + page * PAGE + 8), home(page, 8));
        }
        assert_eq!(of(ELSEWHERE), None);
        move_a_part(&machine, method, SlotFlags::default());
        assert_eq!(of(DATA + 15 * PAGE + 0xfff), home(15, 0xfff));
        assert_eq!(of(DATA + MOVED * PAGE), None, "it has moved");
        assert_eq!(of(ELSEWHERE - 1), None);
        assert_eq!(of(ELSEWHERE), home(MOVED, 0));
        assert_eq!(of(ELSEWHERE + 15 * PAGE + 0xfff), home(31, 0xfff));
        assert_eq!(of(ELSEWHERE + 16 * PAGE), None);
        // The guest reads the same memory.
        let mut vcpu = machine.vcpu(0, 0, DATA_PAGES);
        let mut here = vcpu.bind().expect("signals work");
        for page in [MOVED, 31] {
            let gpa = ELSEWHERE + (page - MOVED) * PAGE;
            assert_eq!(machine.peek(&mut here, gpa).map(u64::from), Ok(page));
            let home = here.home_of(GuestAddress(gpa)).expect("it is there");
            assert_eq!(home.page, PageIndex(page));
        }
        let error = machine.peek(&mut here, DATA + MOVED * PAGE);
        assert!(matches!(error, Err(Exit::Mmio { .. })), "{error:?}");
    }
}

#[test]
fn huge_pages_are_numbered_in_their_own_size() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let bytes = 4 << 21;
    let region =
        match pagetide_memory::Region::new(GuestAddress(1 << 32), bytes, Backing::Hugetlb2M) {
            Ok(region) => region,
            Err(error) => return println!("SKIP: {error}"),
        };
    let added = machine
        .vm
        .add_region(9, Arc::new(region), SlotFlags::default());
    if let Err(error) = added {
        return println!("SKIP: {error}");
    }
    let at = GuestAddress((1 << 32) + (3 << 21) + 0x5000);
    let home = machine.vm.home_of(at).expect("it is there");
    assert_eq!((home.page, home.gpa), (PageIndex(3), at));
}

/// [`Vm::home_of`] finds the page of a fault exit, and the guest continues.
#[test]
fn a_fault_in_a_moved_slot_is_resolved_by_its_home() {
    let Some(machine) = Machine::with(Backing::Anonymous) else {
        return;
    };
    if machine.vm.capabilities().absent_mapping_flag().is_none() {
        return println!("SKIP: this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT");
    }
    let exits = SlotFlags {
        absent_mapping_fault: true,
        ..SlotFlags::default()
    };
    machine.data.assume_registered();
    move_a_part(&machine, Method::Quiesce, exits);
    let mut vcpu = machine.vcpu(0, 0, DATA_PAGES);
    let mut here = vcpu.bind().expect("signals work");
    let gpa = ELSEWHERE + 3 * PAGE;
    let Err(Exit::Fault(fault)) = machine.peek(&mut here, gpa) else {
        panic!("the page is absent");
    };
    assert_eq!(fault.gpa, GuestAddress(gpa));
    let home = here.home_of(fault.gpa).expect("it is there");
    assert_eq!(home.page, PageIndex(MOVED + 3));
    let page = PageRange::new(home.page, 1);
    let populated = home.region.fault_in(page, FaultInAccess::Write);
    populated.expect("memory");
    assert_eq!(machine.peek(&mut here, gpa), Ok(0), "it is this page");
}
