//! A pager installs a guest's memory: both deliveries, both modes, and a source that fails.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod support;

use std::error::Error;
use std::sync::Arc;

use pagetide_kvm::{Exit, SlotFlags};
use pagetide_memory::{Backing, GuestAddress, PageIndex};
use pagetide_pager::{
    AddError, Contents, Filled, Holes, LocalSource, Mode, Pager, PatternSource, ReaderConfig,
    Readers, RegionConfig, SourceError, UffdLayout,
};
use pagetide_testbed::{
    Content, Expected, GuestError, Machine, MachineConfig, Order, RunFailure, RunOutcome, Touch,
    Workload, pattern,
};
use pagetide_vmm::{Paging, PoolFailure, stop_when_in_trouble};
use support::{SEED, chain, fill, is_lack, machine};

const MIB: u64 = 1 << 20;
const RANDOM: Workload = Workload::new(Touch::ReadPattern(SEED), Order::Random { seed: 11 });

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Delivery {
    Uffd,
    Exit,
}

/// Whether this kernel has the delivery. The reason why not is printed.
fn can_deliver(machine: &Machine, delivery: Delivery) -> bool {
    let can = delivery == Delivery::Uffd || machine.capabilities().absent_mapping_fault;
    if !can {
        println!("SKIP: this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT");
    }
    can
}

/// Switches the delivery of memory that a pager has.
fn deliver(machine: &Machine, delivery: Delivery) {
    let flags = SlotFlags {
        absent_mapping_fault: delivery == Delivery::Exit,
        ..SlotFlags::default()
    };
    machine
        .set_slot_flags(flags)
        .expect("the capability is there");
}

fn pattern_source() -> impl LocalSource {
    PatternSource::new(|gpa, bytes: &mut [u8]| pattern::fill(gpa, SEED, bytes))
}

fn local(source: impl LocalSource + 'static) -> Contents {
    Contents::Local(Arc::new(source))
}

/// A pager and its readers, for one run.
struct Rig {
    pager: Arc<Pager>,
    readers: Readers,
}

impl Rig {
    /// None, with the reason printed, where this host gives no userfaultfd.
    fn new(machine: &Machine, mode: Mode, contents: Contents, fault_around: u64) -> Option<Self> {
        let ranges = (0..machine.config().vcpus).filter_map(|id| machine.config().vcpu_range(id));
        let config = RegionConfig::local(Arc::clone(machine.data()), mode, contents)
            .userfaultfds(UffdLayout::PerRange(ranges.collect()))
            .fault_around(fault_around);
        let pager = Pager::new().expect("descriptors can be had");
        match pager.add(config) {
            Ok(_) => {}
            Err(AddError::Open(error)) if is_lack(&error) => {
                println!("SKIP: {}", chain(&error));
                return None;
            }
            Err(error) => panic!("{}", chain(&error)),
        }
        let readers = Readers::spawn(&pager, ReaderConfig::new(2)).expect("threads can be had");
        Some(Self { pager, readers })
    }

    fn run(self, machine: &mut Machine, workload: &Workload) -> Result<RunOutcome, RunFailure> {
        stop_when_in_trouble(&self.pager, &machine.stopper());
        let paging = Paging::new(&self.pager, machine.config().vcpus);
        let paging = paging.pre_fault(machine.capabilities().pre_fault_memory);
        let result = machine.run(workload, Arc::new(paging));
        self.readers.stop();
        if result.is_ok() {
            assert!(self.pager.trouble().is_none(), "{:?}", self.pager.trouble());
        }
        result
    }
}

fn verify(machine: &Machine) {
    let verified = machine.verify(Expected::all(Content::Pattern(SEED)));
    verified.unwrap_or_else(|error| panic!("{}", chain(&error)));
}

#[test]
fn every_delivery_mode_and_backing_brings_the_right_content() {
    for delivery in [Delivery::Uffd, Delivery::Exit] {
        for (mode, backing) in [
            (Mode::Minor, Backing::Shmem),
            (Mode::Missing, Backing::Shmem),
            (Mode::Minor, Backing::Thp),
            (Mode::Missing, Backing::Anonymous),
            (Mode::Minor, Backing::Hugetlb2M),
            (Mode::Missing, Backing::Hugetlb2M),
        ] {
            for (overlap, fault_around) in [(false, 1), (true, 16)] {
                let per_vcpu_bytes = backing.page_size().bytes().max(MIB);
                let config = MachineConfig {
                    backing,
                    overlap,
                    ..MachineConfig::new(2, per_vcpu_bytes)
                };
                let Some(mut machine) = machine(config) else {
                    break;
                };
                if !can_deliver(&machine, delivery) {
                    return;
                }
                let rig = Rig::new(&machine, mode, local(pattern_source()), fault_around);
                let Some(rig) = rig else { break };
                deliver(&machine, delivery);
                let outcome = rig.run(&mut machine, &RANDOM).unwrap_or_else(|failure| {
                    panic!("{delivery:?} {mode:?} {backing}: {}", chain(&failure))
                });
                let faults: u64 = outcome.vcpus.iter().map(|vcpu| vcpu.counts.faults).sum();
                let pages = machine.data().pages();
                match delivery {
                    Delivery::Uffd => assert_eq!(faults, 0),
                    Delivery::Exit if overlap => assert!(faults >= pages / fault_around),
                    Delivery::Exit => assert_eq!(faults, pages),
                }
                verify(&machine);
            }
        }
    }
}

#[test]
fn one_machine_runs_many_times_over_its_page_cache() {
    let config = MachineConfig {
        overlap: true,
        ..MachineConfig::new(4, MIB)
    };
    let Some(mut machine) = machine(config) else {
        return;
    };
    fill(machine.data(), SEED).expect("the data region is there");
    for delivery in [Delivery::Uffd, Delivery::Exit] {
        if !can_deliver(&machine, delivery) {
            return;
        }
        for fault_around in [1, 8, 1] {
            let page_cache = Contents::PageCache(Holes::AreMissing);
            let rig = Rig::new(&machine, Mode::Minor, page_cache, fault_around);
            let Some(rig) = rig else { return };
            deliver(&machine, delivery);
            rig.run(&mut machine, &RANDOM).unwrap_or_else(|failure| {
                panic!("{delivery:?} {fault_around}: {}", chain(&failure))
            });
            verify(&machine);
        }
    }
}

/// A source that lacks one page.
struct Failing(GuestAddress);

impl LocalSource for Failing {
    fn fill(&self, gpa: GuestAddress, buffer: &mut [u8]) -> Result<Filled, SourceError> {
        if gpa == self.0 {
            let lost: Box<dyn Error + Send + Sync> = "the snapshot file is gone".into();
            return Err(SourceError::Unavailable(lost));
        }
        pattern_source().fill(gpa, buffer)
    }
}

#[test]
fn a_source_that_fails_stops_every_vcpu_and_is_the_cause() {
    for delivery in [Delivery::Exit, Delivery::Uffd] {
        let Some(mut machine) = machine(MachineConfig::new(4, MIB)) else {
            return;
        };
        if !can_deliver(&machine, delivery) {
            continue;
        }
        let gpa = machine
            .data()
            .gpa_of_page(PageIndex(100))
            .expect("it has more");
        let Some(rig) = Rig::new(&machine, Mode::Minor, local(Failing(gpa)), 1) else {
            return;
        };
        deliver(&machine, delivery);
        let failure = rig
            .run(&mut machine, &RANDOM)
            .expect_err("page 100 is missing");
        assert!(
            chain(&failure).ends_with("the snapshot file is gone"),
            "{}",
            chain(&failure)
        );
        match delivery {
            Delivery::Exit => {
                let GuestError::Vcpus(PoolFailure::Hook {
                    vcpu: 0,
                    exit: Some(Exit::Fault(fault)),
                    ..
                }) = &*failure.cause
                else {
                    panic!("{failure}")
                };
                assert_eq!(
                    machine.data().page_of_gpa(fault.gpa).map(|page| page.0),
                    Some(100)
                );
            }
            Delivery::Uffd => {
                assert!(
                    matches!(*failure.cause, GuestError::Vcpus(PoolFailure::Stopped(_))),
                    "{failure}"
                );
            }
        }
        if support::deaf_to_signals(&failure) {
            return;
        }
        assert!(failure.vcpus.iter().any(|vcpu| !vcpu.done), "{failure}");
    }
}
