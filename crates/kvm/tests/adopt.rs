//! VMs and vCPUs that the program created itself, with kvm-ioctls.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod guest;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use guest::{DATA, DATA_PAGES, DATA_SLOT, Machine, PAGE, Word, eventually, is_round, toggle};
use guest::{LOW_SLOT, Limited};
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use pagetide_kvm::{AdoptError, Capabilities, Exit, FaultExit, Kvm, Method, PopulateFlags};
use pagetide_kvm::{PopulateError, Signals, Slot, SlotError, SlotFlags, Vm, populate_vm};
use pagetide_memory::{Backing, FaultInAccess, GuestAddress, GuestRange, Region};
use rustix::fs::{MemfdFlags, memfd_create};

/// The machine's VM, adopted as by a program that uses only kvm-ioctls.
fn adopt(machine: &Machine) -> Vm {
    let kvm = kvm_ioctls::Kvm::new().expect("it was there");
    let kvm = Kvm::adopt(&kvm).expect("a descriptor");
    let signals = Signals::install().expect("handlers");
    Vm::adopt(&kvm, machine.vm.fd(), signals).expect("a VM")
}

fn descriptor(of: &impl AsRawFd) -> BorrowedFd<'_> {
    // SAFETY: open as long as the borrow lasts.
    unsafe { BorrowedFd::borrow_raw(of.as_raw_fd()) }
}

#[test]
fn an_adopted_vcpu_runs_and_is_kicked() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let theirs = machine.vcpu(0, 0, DATA_PAGES);
    let vm = adopt(&machine);
    assert!(vm.layout().is_empty(), "adopting adds no slots");
    assert_eq!(vm.capabilities(), machine.vm.capabilities());
    let mut vcpu = vm.adopt_vcpu(0, theirs.fd()).expect("a vCPU");
    machine.set(0, Word::Report, 1);
    let mut here = vcpu.bind().expect("signals work");
    let exit = here.run().expect("no failure");
    assert!(is_round(&exit), "{exit}");
    machine.set(0, Word::Report, 0);
    let kick = here.kick_handle();
    let rounds = machine.get(0, Word::Rounds);
    let kicking = Arc::clone(&machine);
    let kicker = Limited::spawn("a kick", move || {
        eventually("a round", || kicking.get(0, Word::Rounds) > rounds);
        kick.kick();
    });
    assert_eq!(here.run().expect("no failure"), Exit::Interrupted);
    kicker.join();
    // The program's vCPU is unchanged, also after the adopted one was dropped.
    drop(here);
    drop((vcpu, vm));
    assert!(theirs.rip().is_some());
}

#[test]
fn slots_that_the_program_set_can_be_changed() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let theirs = machine.vcpu(0, 0, DATA_PAGES);
    let vm = adopt(&machine);
    for slot in [LOW_SLOT, DATA_SLOT] {
        let state = machine.vm.slot(slot).expect("it is there");
        vm.adopt_slot(slot, state).expect("it is free");
    }
    let mut vcpu = vm.adopt_vcpu(0, theirs.fd()).expect("a vCPU");
    let running = Arc::clone(&machine);
    let exit = Limited::spawn("a vCPU", move || {
        let mut here = vcpu.bind().expect("signals work");
        let exit = here.run().expect("no failure");
        drop(running);
        exit
    });
    eventually("a round", || machine.get(0, Word::Rounds) > 0);
    let adopted = Machine {
        vm,
        low: Arc::clone(&machine.low),
        data: Arc::clone(&machine.data),
    };
    let mut slots = vec![DATA_SLOT];
    for _ in 0..20 {
        slots = toggle(&adopted, Method::Quiesce, &slots);
        let rounds = machine.get(0, Word::Rounds);
        eventually("a round", || machine.get(0, Word::Rounds) > rounds);
    }
    machine.set(0, Word::Report, 1);
    let exit = exit.join();
    assert!(is_round(&exit), "{exit}");
}

#[test]
fn an_impossible_slot_is_not_adopted() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let vm = adopt(&machine);
    let state = machine.vm.slot(DATA_SLOT).expect("it is there");
    let slots = vm.capabilities().slots;
    let error = vm.adopt_slot(slots, state.clone()).expect_err("too many");
    assert!(matches!(error, SlotError::NoSuchSlot { .. }), "{error}");
    for offset in [PAGE, u64::MAX] {
        let outside = Slot {
            offset,
            ..state.clone()
        };
        let error = vm.adopt_slot(DATA_SLOT, outside).expect_err("too long");
        assert!(matches!(error, SlotError::OutsideRegion { .. }), "{error}");
    }
    vm.adopt_slot(DATA_SLOT, state.clone()).expect("it is free");
    let error = vm.adopt_slot(DATA_SLOT, state.clone()).expect_err("noted");
    assert!(matches!(error, SlotError::InUse { .. }), "{error}");
    let error = vm.adopt_slot(9, state).expect_err("it overlaps");
    assert!(matches!(error, SlotError::Overlap { .. }), "{error}");
}

/// The program's VM and its guest outlive the adopted VM.
#[test]
fn memory_outlives_the_programs_vm() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let region = |gpa: u64| {
        let region = Region::new(GuestAddress(gpa), PAGE, Backing::Shmem).expect("a page");
        Arc::new(region)
    };
    let (left, taken, theirs) = (region(1 << 32), region(1 << 33), region(1 << 34));
    let vm = adopt(&machine);
    let none = SlotFlags::default();
    vm.add_region(5, Arc::clone(&left), none).expect("free");
    vm.add_region(6, Arc::clone(&taken), none).expect("free");
    vm.adopt_slot(7, Slot::whole(Arc::clone(&theirs), none))
        .expect("free");
    drop(vm.remove_slot(6).expect("it is there"));
    drop(vm);
    let regions = [left, taken, theirs];
    let known = regions.each_ref().map(Arc::downgrade);
    drop(regions);
    let is_there = known.map(|region| region.upgrade().is_some());
    assert_eq!(is_there, [true, false, false]);
}

#[test]
fn other_descriptors_are_refused() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let vcpu = machine.vcpu(0, 0, DATA_PAGES);
    let kvm = Kvm::open().expect("it was there");
    let file = memfd_create("file", MemfdFlags::CLOEXEC).expect("a file");
    for fd in [descriptor(kvm.fd()), descriptor(vcpu.fd()), file.as_fd()] {
        let error = Vm::adopt_fd(&kvm, fd, Signals::none()).expect_err("it is no VM");
        assert!(matches!(error, AdoptError::NotAVm { .. }), "{error}");
    }
    let vm = adopt(&machine);
    for fd in [descriptor(kvm.fd()), descriptor(vm.fd()), file.as_fd()] {
        let error = vm.adopt_vcpu_fd(1, fd).expect_err("it is no vCPU");
        assert!(matches!(error, AdoptError::NotAVcpu { .. }), "{error}");
    }
    vm.adopt_vcpu_fd(0, descriptor(vcpu.fd())).expect("a vCPU");
}

#[test]
fn an_adopted_vm_is_populated() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let theirs: &VmFd = machine.vm.fd();
    let range = machine.data.range();
    let flags = PopulateFlags {
        write: false,
        present_only: true,
    };
    if !Capabilities::of(theirs).populate_memory {
        let error = populate_vm(theirs, range, flags, || false).expect_err("no such ioctl");
        assert!(
            matches!(error, PopulateError::MissingCapability { .. }),
            "{error}"
        );
        println!("SKIP: this kernel lacks KVM_CAP_POPULATE_MEMORY; the refusal was checked");
        return;
    }
    let done = populate_vm(theirs, range, flags, || false).expect("memory");
    assert_eq!(done.mapped_bytes, range.bytes());
    let done = adopt(&machine).populate(range, flags).expect("memory");
    assert_eq!(done.mapped_bytes, range.bytes());
    let error = populate_vm(theirs, range, flags, || true).expect_err("it was stopped");
    assert!(
        matches!(error, PopulateError::Interrupted { .. }),
        "{error}"
    );
    let nowhere = GuestRange::new(GuestAddress(1 << 40), PAGE).expect("a page");
    let error = populate_vm(theirs, nowhere, flags, || false).expect_err("nothing there");
    assert!(matches!(error, PopulateError::NoSlot { .. }), "{error}");
}

/// This crate decodes the faults of a program that calls KVM_RUN through kvm-ioctls.
#[test]
fn a_fault_of_kvm_ioctls_is_decoded() {
    let Some(machine) = Machine::with(Backing::Anonymous) else {
        return;
    };
    let theirs = machine.vcpu(0, 0, DATA_PAGES);
    let Some(flag) = Capabilities::of(machine.vm.fd()).absent_mapping_flag() else {
        return println!("SKIP: this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT");
    };
    let exits = SlotFlags {
        absent_mapping_fault: true,
        ..SlotFlags::default()
    };
    assert_eq!(exits.bits(), flag);
    machine.data.assume_registered();
    let set = machine.vm.set_slot_flags(DATA_SLOT, exits);
    set.expect("a flag that there is");
    let own = rustix::io::dup(descriptor(theirs.fd())).expect("a descriptor");
    let raw = std::os::fd::IntoRawFd::into_raw_fd(own);
    // SAFETY: a vCPU's descriptor without another owner.
    let vcpu = unsafe { machine.vm.fd().create_vcpu_from_rawfd(raw) };
    let mut vcpu: VcpuFd = vcpu.expect("a vCPU");
    FaultExit::forget(vcpu.get_kvm_run());
    let is_fault = matches!(vcpu.run(), Ok(VcpuExit::MemoryFault { .. }));
    let errno = std::io::Error::last_os_error().raw_os_error();
    assert!(is_fault);
    let fault = FaultExit::of(vcpu.get_kvm_run(), errno.unwrap_or(0)).expect("a fault");
    assert!(fault.is_resolvable(), "{fault}");
    assert_eq!(fault.gpa, GuestAddress(DATA));
    let pages = machine.data.all_pages();
    let populated = machine.data.fault_in(pages, FaultInAccess::Write);
    populated.expect("memory");
    machine.set(0, Word::Report, 1);
    let exit = vcpu.run().expect("no failure");
    let is_report = matches!(exit, VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..));
    assert!(is_report, "{exit:?}");
}
