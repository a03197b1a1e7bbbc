//! Uncorrected errors, simulated by MADV_HWPOISON, in the memory of a real guest: the reports to the
//! VMM and to the guest, and the survival of everything else.

#![cfg(target_arch = "x86_64")]
#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod guest;
mod poisoning;

use std::io::{PipeReader, PipeWriter, pipe};
use std::os::fd::AsRawFd;
use std::sync::{Arc, mpsc};

use guest::x86_64::PEEKED;
use guest::{DATA, DATA_PAGES, LIMIT, Limited, Machine, PAGE};
use pagetide_kvm::poison::{
    ErrorWatch, Injected, MachineCheck, MachineCheckError, NotReady, Severity, Simulated,
    simulate_error,
};
use pagetide_kvm::{BoundVcpu, Exit, Population, Populator, PopulatorMethod, SlotFlags, Vcpu};
use pagetide_memory::{
    AccessError, Backing, FailurePolicy, FaultInAccess, GuestAddress, GuestRange, PageIndex,
    PageSize, Region,
};
use poisoning::checks::{CHECKED, SURVIVED, TEXT, logged, touch, vcpu};
use poisoning::{may_poison, poison, poison_from_outside};

fn assert_reads(vcpu: &mut BoundVcpu<'_>, page: u64, expected: u64) {
    let gpa = DATA + page * PAGE;
    let expected = Exit::IoOut {
        port: PEEKED,
        data: u32::try_from(expected).expect("a small number"),
    };
    assert_eq!(touch(vcpu, gpa), expected, "page {page}");
}

#[test]
fn a_guest_survives_touching_poison() {
    if !may_poison() {
        return;
    }
    for vendor in [b"AuthenticAMD", b"GenuineIntel"] {
        let Some(machine) = Machine::new() else {
            return;
        };
        let (mut vcpu, form) = vcpu(&machine, 0, vendor);
        Limited::spawn("a guest that touches poison", move || {
            let mut vcpu = vcpu.bind().expect("signals");
            assert_reads(&mut vcpu, 3, 3);
            let bad = GuestAddress(DATA + 3 * PAGE);
            poison(&machine.data, bad);
            for _ in 0..2 {
                // The VMM's result does not depend on the report to the guest.
                for _ in 0..2 {
                    let exit = touch(&mut vcpu, bad.0 + 8);
                    let Exit::Fault(fault) = exit else {
                        panic!("{exit}")
                    };
                    assert!(fault.poisoned && !fault.is_resolvable(), "{fault}");
                    assert_eq!((fault.gpa, fault.size_bytes), (bad, PAGE));
                }
                let error = machine
                    .vm
                    .error_of(bad, PageSize::Size4K)
                    .expect("in a slot");
                assert_eq!(error.lost, GuestRange::new(bad, PAGE).expect("a page"));
                let check = MachineCheck::new(form, error.severity, error.gpa);
                let injected = vcpu.inject_machine_check(&check).expect("it is ready");
                assert_eq!(injected, Injected::Exception);
                let at = u32::try_from(TEXT).expect("low");
                let (port, data) = (CHECKED, at);
                assert_eq!(vcpu.run().expect("a handler"), Exit::IoOut { port, data });
                assert_eq!(logged(&machine), check);
                let (port, data) = (PEEKED, SURVIVED);
                assert_eq!(vcpu.run().expect("back"), Exit::IoOut { port, data });
                // All other memory remains usable.
                for page in (0..DATA_PAGES).filter(|&page| page != 3) {
                    assert_reads(&mut vcpu, page, page);
                }
            }
        })
        .join();
    }
}

#[test]
fn a_guest_that_is_not_ready_gets_no_machine_check() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let (mut vcpu, form) = vcpu(&machine, 0, b"AuthenticAMD");
    let vcpu = vcpu.bind().expect("signals");
    let check = |severity| MachineCheck::new(form, severity, GuestAddress(DATA));
    let why = |vcpu: &Vcpu| {
        let result = vcpu.inject_machine_check(&check(Severity::ActionRequired));
        match result.expect_err("it is not ready") {
            MachineCheckError::NotReady { why, .. } => why,
            error => panic!("{error}"),
        }
    };
    let msr = |index, data| {
        let entry = kvm_bindings::kvm_msr_entry {
            index,
            data,
            ..kvm_bindings::kvm_msr_entry::default()
        };
        let msrs = kvm_bindings::Msrs::from_entries(&[entry]).expect("one");
        assert_eq!(vcpu.set_msrs(&msrs).expect("settable"), 1);
    };
    for (index, bad, good, expected) in [
        (0x17a, 1 << 2, 0, NotReady::InProgress),
        (0x17b, 0, u64::MAX, NotReady::NotReported),
        (0x424, 0, u64::MAX, NotReady::NotReported),
    ] {
        msr(index, bad);
        assert_eq!(why(&vcpu), expected);
        msr(index, good);
    }
    let mut sregs = vcpu.sregs().expect("registers");
    sregs.cr4 &= !(1 << 6);
    vcpu.set_sregs(&sregs).expect("machine checks off");
    assert_eq!(why(&vcpu), NotReady::TurnedOff);
    // A machine check without an exception does not require a guest that is ready for one.
    let logged = vcpu.inject_machine_check(&check(Severity::ActionOptional));
    assert_eq!(logged.expect("AMD's form"), Injected::Logged);
}

#[test]
fn machine_checks_need_to_be_enabled() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let vcpu = machine.vcpu(0, 0, DATA_PAGES);
    let check = MachineCheck::bystander();
    let error = vcpu.inject_machine_check(&check).expect_err("no banks");
    assert!(
        matches!(
            error,
            MachineCheckError::NotReady { .. } | MachineCheckError::Failed { .. }
        ),
        "{error}"
    );
}

#[test]
fn the_vmms_own_accesses_fail_alone() {
    if !may_poison() {
        return;
    }
    pagetide_kvm::poison::install_sigbus_handler().expect("a handler");
    for backing in [Backing::Shmem, Backing::Anonymous] {
        let region = Region::new(GuestAddress(DATA), 8 * PAGE, backing).expect("8 pages");
        region
            .write_guest(PageIndex(0), 0, &[7; 8 * 4096])
            .expect("memory");
        let bad = GuestAddress(DATA + 5 * PAGE);
        poison(&region, bad);
        let lost = GuestRange::new(bad, PAGE).expect("a page");
        for _ in 0..2 {
            // Up to the page, including a part of a word.
            let mut seen = vec![0; 6 * 4096];
            let error = region
                .read_guest(PageIndex(0), 3, &mut seen)
                .expect_err("poison");
            assert_eq!(error, AccessError::Poisoned { gpa: bad, lost }, "{backing}");
            // Up to the four words that are copied together.
            assert!(seen[..5 * 4096 - 3 - 32].iter().all(|&byte| byte == 7));
            let gpa = GuestAddress(bad.0 + 100);
            let expected = AccessError::Poisoned { gpa, lost };
            let write = region.write_guest(PageIndex(5), 100, &[1]);
            assert_eq!(write.expect_err("poison"), expected, "{backing}");
            let mut word = [0];
            let read = region.read_guest(PageIndex(5), 100, &mut word);
            assert_eq!(read.expect_err("poison"), expected, "{backing}");
            if backing.has_file() {
                let read = region.read_service(PageIndex(5), 100, &mut word);
                assert_eq!(read.expect_err("poison"), expected, "{backing}");
            }
            region.write_guest(PageIndex(6), 0, &[8]).expect("healthy");
            region
                .read_guest(PageIndex(6), 0, &mut word)
                .expect("healthy");
            assert_eq!(word, [8]);
            let pages = pagetide_memory::PageRange::single(PageIndex(5));
            region
                .fault_in(pages, FaultInAccess::Read)
                .expect_err("poison");
        }
    }
}

#[test]
fn errors_without_access_are_reported() {
    if !may_poison() {
        return;
    }
    let Some(machine) = Machine::new() else {
        return;
    };
    let (sender, receiver) = mpsc::channel();
    let watch = ErrorWatch::start(&machine.vm, move |error| {
        let _ = sender.send(error);
    });
    let watch = watch.expect("a thread");
    for page in [9, 4] {
        let bad = GuestAddress(DATA + page * PAGE);
        poison_from_outside(&machine.data, bad);
        // A page has two mappings, and may be reported twice.
        let error = loop {
            let error = receiver.recv_timeout(LIMIT).expect("a report");
            if error.gpa == bad {
                break error;
            }
        };
        assert_eq!(error.severity, Severity::ActionOptional);
        assert_eq!(error.lost, GuestRange::new(bad, PAGE).expect("a page"));
    }
    drop(watch);
    poison_from_outside(&machine.data, GuestAddress(DATA + 2 * PAGE));
    let after: Vec<_> = receiver.iter().map(|error| error.gpa.0).collect();
    assert!(!after.contains(&(DATA + 2 * PAGE)), "{after:x?}");
}

#[test]
fn population_skips_poison_and_counts_it() {
    if !may_poison() {
        return;
    }
    for method in [
        PopulatorMethod::Populate,
        PopulatorMethod::PreFault,
        PopulatorMethod::HostOnly,
    ] {
        let Some(machine) = Machine::new() else {
            return;
        };
        let capabilities = *machine.vm.capabilities();
        if method == PopulatorMethod::Populate && !capabilities.populate_memory {
            println!("SKIP: this kernel lacks KVM_POPULATE_MEMORY");
            continue;
        }
        for page in [7, 8, 40] {
            poison(&machine.data, GuestAddress(DATA + page * PAGE));
        }
        let population: Population = Limited::spawn("population", move || {
            let mut vcpus = [machine.vcpu(0, 0, DATA_PAGES)];
            let population = Populator::new(&machine.vm)
                .idle_vcpus(&mut vcpus)
                .method(method)
                .run(|_| std::ops::ControlFlow::Continue(()))
                .unwrap_or_else(|error| panic!("{method}: {error}"));
            // The guest finds the rest.
            let mut vcpu = vcpus[0].bind().expect("signals");
            for page in [6u32, 9, 39, 41] {
                assert_eq!(
                    machine.peek(&mut vcpu, DATA + u64::from(page) * PAGE),
                    Ok(page)
                );
            }
            population
        })
        .join();
        println!("{population}");
        assert_eq!(population.populated.poisoned_bytes, 3 * PAGE, "{method}");
        let total = guest::LOW_BYTES + DATA_PAGES * PAGE;
        assert_eq!(population.populated.bytes(), total, "{method}");
    }
}

/// A page with an extra reference can be neither taken out of use nor split off its huge page. A vCPU
/// that maps a huge page holds a reference for a moment.
#[test]
fn an_error_that_the_kernel_cannot_handle_is_still_simulated() {
    if !may_poison() {
        return;
    }
    for backing in [Backing::Shmem, Backing::Thp] {
        let region = Region::new(GuestAddress(DATA), 2 << 20, backing).expect("memory");
        region
            .fault_in(region.all_pages(), FaultInAccess::Write)
            .expect("memory");
        let held = GuestAddress(DATA + 5 * PAGE);
        let pipe = hold(&region, held);
        let before = corrupted_kib();
        let simulated = simulate_error(&region, held).expect("root in the lab");
        assert_eq!(simulated, Simulated::Unhandled, "{backing}");
        // Other tests may simulate errors meanwhile.
        assert!(corrupted_kib() >= before + 4, "{backing}");
        drop(pipe);
    }
}

/// The amount of memory that the kernel counts as corrupted.
fn corrupted_kib() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").expect("Linux");
    let mut lines = meminfo.lines();
    let corrupted = lines.find_map(|line| line.strip_prefix("HardwareCorrupted:"));
    let kib = corrupted.and_then(|text| text.trim().strip_suffix(" kB")?.parse().ok());
    kib.expect("a kernel with CONFIG_MEMORY_FAILURE")
}

/// Holds a reference to the page at `gpa` until the pipe is dropped.
fn hold(region: &Region, gpa: GuestAddress) -> (PipeReader, PipeWriter) {
    let (reader, writer) = pipe().expect("a pipe");
    let at = region.gpa_to_hva(gpa).expect("in the region").0;
    let part = libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(at),
        iov_len: 4096,
    };
    // SAFETY: one part, a page of the region, to which the pipe takes a reference without copying.
    let spliced = unsafe { libc::vmsplice(writer.as_raw_fd(), &raw const part, 1, 0) };
    assert_eq!(spliced, 4096, "{}", std::io::Error::last_os_error());
    (reader, writer)
}

/// The part of a huge page that one error costs, by policy.
#[test]
fn the_policy_decides_how_much_an_error_costs() {
    if !may_poison() {
        return;
    }
    for (backing, policy) in [
        (Backing::Shmem, FailurePolicy::KernelDefault),
        (Backing::Shmem, FailurePolicy::Keep),
        (Backing::Hugetlb2M, FailurePolicy::KernelDefault),
        (Backing::Hugetlb2M, FailurePolicy::Keep),
    ] {
        let Some(machine) = Machine::new() else {
            return;
        };
        let gpa = GuestAddress(1 << 29);
        let huge = 2 << 20;
        let region = match Region::with_policy(gpa, 2 * huge, backing, policy) {
            Ok(region) => Arc::new(region),
            Err(error) => {
                println!("SKIP: {backing}, policy {policy}: {error}");
                continue;
            }
        };
        region
            .fault_in(region.all_pages(), FaultInAccess::Write)
            .expect("memory");
        let added = machine
            .vm
            .add_region(9, Arc::clone(&region), SlotFlags::default());
        added.expect("an empty slot");
        let (mut vcpu, _) = vcpu(&machine, 0, b"AuthenticAMD");
        let lost = Limited::spawn("a guest with an error in a huge page", move || {
            let mut vcpu = vcpu.bind().expect("signals");
            let read = |vcpu: &mut BoundVcpu<'_>, gpa| match touch(vcpu, gpa) {
                Exit::IoOut { port: PEEKED, data } => {
                    assert_eq!(data, 0);
                    None
                }
                Exit::Fault(fault) => {
                    assert!(fault.poisoned, "{fault}");
                    machine.vm.error_of(fault.gpa, PageSize::Size4K)
                }
                exit => panic!("{exit}"),
            };
            let bad = gpa.0 + 5 * PAGE;
            // With `keep` the rest stays mapped, and a simulated error does not affect it.
            if policy == FailurePolicy::KernelDefault {
                assert_eq!(read(&mut vcpu, bad), None);
            }
            poison(&region, GuestAddress(bad));
            let error = read(&mut vcpu, bad).expect("poison");
            // Exactly the reported memory is lost. The rest is checked second: it may be mapped
            // together with the bad page.
            for at in [bad]
                .into_iter()
                .chain((gpa.0..gpa.0 + 2 * huge).step_by(16 * 4096))
            {
                let lost = error.lost.contains(GuestAddress(at));
                assert_eq!(read(&mut vcpu, at).is_some(), lost, "gpa {at:#x}");
            }
            error.lost.bytes()
        })
        .join();
        println!("{backing}, policy {policy}: {lost} bytes lost");
        assert_eq!(lost, policy.lost_per_error(backing).bytes());
    }
}
