//! Population of a whole VM: every method, progress, stopping, failing.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod guest;

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::Arc;

use guest::{DATA_PAGES, LOW_BYTES, Limited, Machine, PAGE};
use pagetide_kvm::{
    PopulateFlags, PopulationError, PopulationProgress, Populator, PopulatorMethod, SlotFlags,
    Stats, Vm,
};
use pagetide_memory::{Backing, GuestAddress, Region};
use pagetide_uapi::userfaultfd::{Features, Mode, UserRange, Userfaultfd};

const BIG: u64 = 24 << 20;
const TOTAL: u64 = LOW_BYTES + DATA_PAGES * PAGE + BIG;

fn threads(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).expect("some")
}

/// A machine with additional memory, all of it absent.
fn machine() -> Option<Arc<Machine>> {
    let machine = Machine::new()?;
    let big = Region::new(GuestAddress(1 << 32), BIG, Backing::Shmem).expect("24 MiB");
    let added = machine
        .vm
        .add_region(9, Arc::new(big), SlotFlags::default());
    added.expect("an empty slot");
    Some(machine)
}

/// How many stage-2 mappings there are; None where KVM does not count them (arm64).
fn mappings(vm: &Vm) -> Option<u64> {
    let stats = Stats::of_vm(vm).expect("binary statistics");
    ["pages_4k", "pages_2m", "pages_1g"]
        .map(|size| stats.value(size).expect("readable"))
        .into_iter()
        .sum()
}

fn go_on(_: PopulationProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn every_method_populates_everything() {
    for method in [
        PopulatorMethod::Populate,
        PopulatorMethod::PreFault,
        PopulatorMethod::HostOnly,
    ] {
        let Some(machine) = machine() else { return };
        let capabilities = *machine.vm.capabilities();
        let mut vcpus: Vec<_> = (0..2).map(|id| machine.vcpu(id, 0, DATA_PAGES)).collect();
        let populator = Populator::new(&machine.vm)
            .threads(threads(3))
            .idle_vcpus(&mut vcpus)
            .method(method);
        let missing = match method {
            PopulatorMethod::Populate => !capabilities.populate_memory,
            PopulatorMethod::PreFault => !capabilities.pre_fault_memory,
            PopulatorMethod::HostOnly => false,
        };
        if missing {
            let error = populator.run(go_on).expect_err("the kernel lacks it");
            assert!(
                matches!(error, PopulationError::Unavailable { .. }),
                "{error}"
            );
            println!("SKIP: this kernel lacks {method}; the refusal was checked");
            continue;
        }
        let mut seen = Vec::new();
        let population = populator
            .run(|progress| {
                seen.push(progress.bytes);
                assert_eq!(progress.total_bytes, TOTAL);
                ControlFlow::Continue(())
            })
            .unwrap_or_else(|error| panic!("{error}"));
        println!("{population}");
        assert_eq!(population.method, method);
        assert_eq!(
            population.threads,
            if method == PopulatorMethod::PreFault {
                2
            } else {
                3
            }
        );
        assert_eq!(population.populated.mapped_bytes, TOTAL);
        assert!(seen.is_sorted() && seen.last() == Some(&TOTAL), "{seen:?}");
        let wanted = match method {
            PopulatorMethod::HostOnly => 0,
            _ => TOTAL / PAGE,
        };
        let found = mappings(&machine.vm);
        assert_eq!(found.unwrap_or(wanted), wanted, "{method}");
    }
}

#[test]
fn the_best_available_method_is_used() {
    let Some(machine) = machine() else { return };
    let capabilities = *machine.vm.capabilities();
    let mut vcpus = [machine.vcpu(0, 0, DATA_PAGES)];
    let best = Populator::new(&machine.vm).choose().expect("any kernel");
    let with_vcpus = Populator::new(&machine.vm)
        .idle_vcpus(&mut vcpus)
        .choose()
        .expect("any kernel");
    let wanted = match (capabilities.populate_memory, capabilities.pre_fault_memory) {
        (true, _) => (PopulatorMethod::Populate, PopulatorMethod::Populate),
        (false, true) => (PopulatorMethod::HostOnly, PopulatorMethod::PreFault),
        (false, false) => (PopulatorMethod::HostOnly, PopulatorMethod::HostOnly),
    };
    assert_eq!((best, with_vcpus), wanted);
    let error = Populator::new(&machine.vm)
        .method(PopulatorMethod::PreFault)
        .choose()
        .expect_err("it has no vCPU");
    assert!(
        matches!(error, PopulationError::Unavailable { .. }),
        "{error}"
    );
    let present_only = PopulateFlags {
        write: false,
        present_only: true,
    };
    let error = Populator::new(&machine.vm)
        .flags(present_only)
        .method(PopulatorMethod::HostOnly)
        .choose()
        .expect_err("it would fault memory in");
    assert_eq!(
        error.to_string(),
        "population by MADV_POPULATE_WRITE: it faults memory in, which present-only excludes"
    );
}

/// Workers sleep in the kernel for a page that is never installed.
#[test]
fn it_can_be_stopped_while_workers_wait() {
    for method in [PopulatorMethod::Populate, PopulatorMethod::PreFault] {
        let Some(machine) = Machine::with(Backing::Anonymous) else {
            return;
        };
        let uffd = match Userfaultfd::open(Features::NONE) {
            Ok(uffd) => uffd,
            Err(error) => return println!("SKIP: {error}"),
        };
        let range = UserRange {
            start: machine.data.guest().start().as_u64(),
            bytes: machine.data.bytes(),
        };
        // SAFETY: the machine outlives the userfaultfd, and no code relies on absent pages reading as
        // zeroes.
        unsafe { uffd.register(range, Mode::Missing) }.expect("anonymous memory");
        let populating = Arc::clone(&machine);
        let population = Limited::spawn("a population", move || {
            let mut vcpus = [populating.vcpu(0, 0, DATA_PAGES)];
            let populator = Populator::new(&populating.vm)
                .idle_vcpus(&mut vcpus)
                .flags(PopulateFlags::default())
                .method(method);
            // All other work has been done, and further looks find no more.
            let mut looks_left = 10;
            populator.run(|progress| {
                if progress.bytes >= LOW_BYTES {
                    looks_left -= 1;
                }
                match looks_left {
                    0 => ControlFlow::Break(()),
                    _ => ControlFlow::Continue(()),
                }
            })
        });
        match population.join() {
            Err(PopulationError::Unavailable { .. }) => {
                println!("SKIP: this kernel lacks {method}");
            }
            Err(PopulationError::Stopped { population }) => {
                assert_eq!(population.populated.mapped_bytes, LOW_BYTES, "{method}");
            }
            other => panic!("{method}: {other:?}"),
        }
        drop(uffd);
    }
}

#[test]
fn a_caller_that_stops_at_once_gets_the_progress() {
    let Some(machine) = machine() else { return };
    let populator = Populator::new(&machine.vm).threads(threads(1));
    match populator.run(|_| ControlFlow::Break(())) {
        Err(PopulationError::Stopped { population }) => {
            assert!(population.populated.bytes() < TOTAL, "{population}");
        }
        // The population completed before the stop.
        Ok(population) => assert_eq!(population.populated.bytes(), TOTAL),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_machine_without_memory_is_populated() {
    let Ok(kvm) = pagetide_kvm::Kvm::open() else {
        return println!("SKIP: no KVM");
    };
    let Ok(vm) = kvm.create_vm_with_signals() else {
        return println!("SKIP: no VM");
    };
    let population = Populator::new(&vm).run(go_on).expect("nothing to do");
    assert_eq!((population.threads, population.total_bytes), (0, 0));
}

#[test]
fn slots_with_exits_are_skipped() {
    let Some(machine) = Machine::with(Backing::Anonymous) else {
        return;
    };
    if !machine.vm.capabilities().absent_mapping_fault {
        return println!("SKIP: this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT");
    }
    let exits = SlotFlags {
        absent_mapping_fault: true,
        ..SlotFlags::default()
    };
    machine.data.assume_registered();
    machine
        .vm
        .set_slot_flags(guest::DATA_SLOT, exits)
        .expect("a flag");
    for method in [PopulatorMethod::HostOnly, PopulatorMethod::Populate] {
        let populator = Populator::new(&machine.vm).method(method);
        match populator.run(go_on) {
            Ok(population) => {
                assert_eq!(population.populated.mapped_bytes, LOW_BYTES, "{method}");
                assert_eq!(population.populated.absent_bytes, DATA_PAGES * PAGE);
            }
            Err(PopulationError::Unavailable { .. }) => {
                println!("SKIP: this kernel lacks {method}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
