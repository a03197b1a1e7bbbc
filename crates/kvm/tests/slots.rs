//! Memory slots: refusals and their errors.

use std::error::Error;
use std::sync::Arc;

use pagetide_kvm::{Kvm, SlotError, SlotFlags, Vm};
use pagetide_memory::{Backing, GuestAddress, Region, ServiceAccess};

const MIB: u64 = 1 << 20;
const PLAIN: SlotFlags = SlotFlags {
    absent_mapping_fault: false,
    log_dirty: false,
    readonly: false,
};
const EXITS: SlotFlags = SlotFlags {
    absent_mapping_fault: true,
    ..PLAIN
};

/// A VM, or None after printing the reason where this host cannot have one.
fn vm() -> Option<Vm> {
    let vm: Result<Vm, Box<dyn Error>> = Kvm::open()
        .map_err(Into::into)
        .and_then(|kvm| kvm.create_vm_with_signals().map_err(Into::into));
    vm.inspect_err(|error| println!("SKIP: {error}")).ok()
}

fn region(gpa: u64) -> Arc<Region> {
    Arc::new(Region::new(GuestAddress(gpa), MIB, Backing::Shmem).expect("1 MiB of shmem"))
}

#[test]
fn slots_are_added_changed_and_removed() {
    let Some(vm) = vm() else { return };
    let memory = region(0);
    vm.add_region(0, Arc::clone(&memory), PLAIN)
        .expect("an empty slot");
    assert_eq!(vm.slot_flags(0), Some(PLAIN));
    let logging = SlotFlags {
        log_dirty: true,
        ..PLAIN
    };
    vm.set_slot_flags(0, logging)
        .expect("every kernel logs dirty pages");
    assert_eq!(vm.slot_flags(0), Some(logging));
    let removed = vm.remove_slot(0).expect("it is there");
    assert!(Arc::ptr_eq(&removed, &memory));
    assert_eq!(vm.slot_flags(0), None);
    vm.add_region(0, memory, PLAIN).expect("empty again");
}

#[test]
fn a_slot_keeps_its_region_mapped() {
    let Some(vm) = vm() else { return };
    let memory = region(0);
    let weak = Arc::downgrade(&memory);
    vm.add_region(0, memory, PLAIN).expect("an empty slot");
    let vcpu = vm.create_vcpu(0).expect("one vCPU");
    drop(vm);
    assert!(weak.upgrade().is_some(), "the vCPU can still reach it");
    drop(vcpu);
    assert!(weak.upgrade().is_none());
}

#[test]
fn each_refusal_has_its_error() {
    let Some(vm) = vm() else { return };
    vm.add_region(0, region(0), PLAIN).expect("an empty slot");

    let error = vm
        .add_region(0, region(2 * MIB), PLAIN)
        .expect_err("in use");
    assert!(matches!(error, SlotError::InUse { slot: 0, .. }), "{error}");

    let error = vm
        .add_region(1, region(MIB / 2), PLAIN)
        .expect_err("overlaps slot 0");
    assert!(
        matches!(error, SlotError::Overlap { slot: 1, .. }),
        "{error}"
    );
    let source = error.source().expect("chained");
    let errno = source
        .downcast_ref::<std::io::Error>()
        .and_then(std::io::Error::raw_os_error);
    assert_eq!(errno, Some(libc::EEXIST));
    assert!(error.to_string().contains("0x80000..0x180000"), "{error}");
    assert_eq!(vm.slot_flags(1), None);

    for result in [vm.set_slot_flags(5, PLAIN), vm.remove_slot(5).map(|_| ())] {
        let error = result.expect_err("nothing there");
        assert!(matches!(error, SlotError::Empty { slot: 5 }), "{error}");
    }

    let slots = vm.capabilities().slots;
    let error = vm
        .add_region(slots, region(2 * MIB), PLAIN)
        .expect_err("no such slot");
    assert!(
        matches!(error, SlotError::NoSuchSlot { slot, slots: all } if (slot, all) == (slots, slots)),
        "{error}"
    );
}

/// A stock kernel annotates faults without the access.
#[test]
fn accesses_are_reported_by_kernels_with_the_series() {
    let Some(vm) = vm() else { return };
    let has = vm.capabilities();
    assert_eq!(has.memory_fault_access, has.absent_mapping_fault);
    assert!(has.memory_fault_info || !has.memory_fault_access);
}

#[test]
fn the_absent_flag_needs_its_capability_and_no_readonly() {
    let Some(vm) = vm() else { return };
    let memory = region(0);
    memory.assume_registered();
    let result = vm.add_region(0, memory, EXITS);
    if !vm.capabilities().absent_mapping_fault {
        let error = result.expect_err("the kernel does not have it");
        assert!(
            matches!(error, SlotError::MissingCapability { slot: 0, .. }),
            "{error}"
        );
        let text = error.to_string();
        assert!(
            text.contains("KVM_CAP_ABSENT_MAPPING_FAULT (10001)"),
            "{text}"
        );
        assert_eq!(vm.slot_flags(0), None);
        println!("SKIP: this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT; the refusal was checked");
        return;
    }
    result.expect("the kernel has it");
    for flags in [
        PLAIN,
        EXITS,
        SlotFlags {
            log_dirty: true,
            ..EXITS
        },
        PLAIN,
    ] {
        vm.set_slot_flags(0, flags).expect("flags of a live slot");
    }
    let readonly = SlotFlags {
        readonly: true,
        ..EXITS
    };
    let memory = region(2 * MIB);
    memory.assume_registered();
    let error = vm
        .add_region(1, memory, readonly)
        .expect_err("not together");
    assert!(matches!(error, SlotError::Invalid { slot: 1, flags, .. } if flags == readonly));
}

/// KVM's own accesses do not exit: they would fill the holes of memory that no userfaultfd watches, for good.
#[test]
fn exits_need_a_registered_region() {
    let Some(vm) = vm() else { return };
    if !vm.capabilities().absent_mapping_fault {
        return println!("SKIP: this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT");
    }
    let memory = region(0);
    let refused = |result: Result<(), SlotError>| {
        let error = result.expect_err("no userfaultfd is known");
        assert!(
            matches!(error, SlotError::NotRegistered { slot: 0, .. }),
            "{error}"
        );
        let text = error.to_string();
        assert!(text.contains("0x0..0x100000"), "{text}");
        assert!(text.contains("give the region to a pager first"), "{text}");
    };
    refused(vm.add_region(0, Arc::clone(&memory), EXITS));
    assert_eq!(vm.slot_flags(0), None);
    vm.add_region(0, Arc::clone(&memory), PLAIN).expect("plain");
    refused(vm.set_slot_flags(0, EXITS));
    assert_eq!(vm.slot_flags(0), Some(PLAIN));
    // A pager does this, before it registers the region.
    memory
        .begin_paging(ServiceAccess::ReadWrite)
        .expect("it is not paged");
    vm.set_slot_flags(0, EXITS).expect("a pager has it");
    // What a slot has, it keeps.
    memory.end_paging();
    let logging = SlotFlags {
        log_dirty: true,
        ..EXITS
    };
    vm.set_slot_flags(0, logging).expect("no page is absent");
    vm.set_slot_flags(0, PLAIN).expect("plain");
    refused(vm.set_slot_flags(0, EXITS));
    memory.assume_registered();
    vm.set_slot_flags(0, EXITS)
        .expect("the program has said so");
}
