//! Guests run while prefetch brings their memory in and population maps it.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod support;

use std::sync::Arc;

use pagetide_kvm::{SlotFlags, Stats};
use pagetide_memory::Backing;
use pagetide_pager::{
    AddError, Contents, Mode, Pager, PatternSource, Prefetch, PrefetchConfig, ReaderConfig,
    Readers, RegionConfig,
};
use pagetide_testbed::{
    Content, Expected, Machine, MachineConfig, Order, Touch, Workload, pattern,
};
use pagetide_vmm::{Paging, StageTwo, stop_when_in_trouble};
use support::{SEED, chain, is_lack, machine};

const MIB: u64 = 1 << 20;

/// A pager over the machine's data, whose content is a pattern and which has what arrives mapped in
/// stage 2 or not; None, with the reason printed, where this host gives no userfaultfd.
fn pager(machine: &Machine, mode: Mode, populates: bool) -> Option<Arc<Pager>> {
    let source = PatternSource::new(|gpa, bytes: &mut [u8]| pattern::fill(gpa, SEED, bytes));
    let contents = Contents::Local(Arc::new(source));
    let mut config = RegionConfig::local(Arc::clone(machine.data()), mode, contents);
    if populates {
        config = config.populate(Arc::new(StageTwo(Arc::clone(machine.vm()))), 2);
    }
    let pager = Pager::new().expect("descriptors can be had");
    match pager.add(config) {
        Ok(_) => {
            stop_when_in_trouble(&pager, &machine.stopper());
            Some(pager)
        }
        Err(AddError::Open(error)) if is_lack(&error) => {
            println!("SKIP: {}", chain(&error));
            None
        }
        Err(error) => panic!("{}", chain(&error)),
    }
}

fn prefetch(pager: &Arc<Pager>) -> Prefetch {
    Prefetch::spawn(pager, PrefetchConfig::default()).expect("threads can be had")
}

/// The guest reads everything; how many faults left it.
fn walk(machine: &mut Machine, pager: &Arc<Pager>) -> u64 {
    walk_in(machine, pager, Order::Random { seed: 7 })
}

fn walk_in(machine: &mut Machine, pager: &Arc<Pager>, order: Order) -> u64 {
    let workload = Workload::new(Touch::ReadPattern(SEED), order);
    let paging = Paging::new(pager, machine.config().vcpus);
    let outcome = machine.run(&workload, Arc::new(paging));
    let outcome = outcome.unwrap_or_else(|failure| panic!("{}", chain(&failure)));
    outcome.vcpus.iter().map(|vcpu| vcpu.counts.faults).sum()
}

#[test]
fn guests_run_while_their_memory_comes_ahead_of_them() {
    for exits in [false, true] {
        for (mode, backing) in [
            (Mode::Minor, Backing::Shmem),
            (Mode::Missing, Backing::Shmem),
            (Mode::Minor, Backing::Thp),
            (Mode::Missing, Backing::Anonymous),
            (Mode::Minor, Backing::Hugetlb2M),
        ] {
            let config = MachineConfig {
                backing,
                overlap: true,
                slot_flags: SlotFlags {
                    absent_mapping_fault: exits,
                    ..SlotFlags::default()
                },
                ..MachineConfig::new(2, 2 * MIB)
            };
            let Some(mut machine) = machine_with_exits(config) else {
                continue;
            };
            let has_populate = machine.capabilities().populate_memory;
            let Some(pager) = pager(&machine, mode, has_populate) else {
                return;
            };
            let what = format!("{mode:?} {backing}, exits {exits}");
            let readers = Readers::spawn(&pager, ReaderConfig::new(1)).expect("threads");
            let prefetch = prefetch(&pager);
            let faults = walk(&mut machine, &pager);
            assert!(exits || faults == 0, "{what}");
            let ended = prefetch
                .finish()
                .unwrap_or_else(|failure| panic!("{}", chain(&failure)));
            assert!(ended.is_complete, "{what}");
            readers.stop();
            assert!(pager.trouble().is_none(), "{what}: {:?}", pager.trouble());
            let counted = pager.counted();
            let pages = machine.data().pages();
            assert_eq!(counted.pages, pages, "{what}: each page once, {counted:?}");
            // The service mapping of a MISSING region is closed while it is paged.
            drop(pager);
            let verified = machine.verify(Expected::all(Content::Pattern(SEED)));
            verified.unwrap_or_else(|error| panic!("{what}: {}", chain(&error)));
        }
    }
}

/// As [`machine`]; also None, with the reason printed, if exits are asked for and there are none.
fn machine_with_exits(mut config: MachineConfig) -> Option<Machine> {
    let flags = std::mem::take(&mut config.slot_flags);
    let machine = machine(config)?;
    if flags.absent_mapping_fault && !machine.capabilities().absent_mapping_fault {
        println!("SKIP: this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT");
        return None;
    }
    machine
        .set_slot_flags(flags)
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
    Some(machine)
}

/// Stage-2 faults of all vCPUs so far, those that KVM resolved by itself included.
fn stage_2_faults(machine: &Machine) -> u64 {
    let taken = machine.vcpus().map(|vcpu| {
        let stats = Stats::of_vcpu(vcpu).unwrap_or_else(|error| panic!("{}", chain(&error)));
        let taken = stats.value("pf_taken").expect("the file can be read");
        taken.expect("x86 counts them")
    });
    taken.sum()
}

#[test]
fn what_prefetch_delivered_costs_the_guest_no_fault() {
    for backing in [Backing::Shmem, Backing::Anonymous] {
        let mode = match backing {
            Backing::Anonymous => Mode::Missing,
            _ => Mode::Minor,
        };
        let mut taken = [0; 2];
        for (with_population, taken) in [false, true].into_iter().zip(&mut taken) {
            let config = MachineConfig {
                backing,
                ..MachineConfig::new(2, 32 * MIB)
            };
            let Some(mut machine) = machine(config) else {
                return;
            };
            if !machine.capabilities().populate_memory {
                println!("SKIP: this kernel lacks KVM_CAP_POPULATE_MEMORY");
                return;
            }
            let Some(pager) = pager(&machine, mode, with_population) else {
                return;
            };
            let prefetch = prefetch(&pager);
            let ended = prefetch
                .finish()
                .unwrap_or_else(|failure| panic!("{}", chain(&failure)));
            assert!(ended.is_complete);
            if with_population {
                assert_eq!(ended.counters.populated_bytes, machine.data().bytes());
            }
            let before = stage_2_faults(&machine);
            assert_eq!(walk(&mut machine, &pager), 0, "no fault leaves the guest");
            *taken = stage_2_faults(&machine) - before;
            let (region, _) = pager.locate(machine.data().gpa()).expect("its region");
            let counts = pager.counts(region).expect("its map");
            assert_eq!(counts.present + counts.zero, machine.data().pages());
        }
        let pages = 2 * 32 * MIB / 4096;
        let [alone, populated] = taken;
        println!("{backing}: {pages} pages, stage-2 faults: {alone} alone, {populated} populated");
        // The guest's own low memory, which nobody populates, is a few dozen of them.
        assert!(alone >= pages, "{alone}");
        assert!(populated < pages / 100, "{populated}");
    }
}

/// Beside prefetch, not after it: upwards, where the vCPUs wait for each batch and touch its pages the
/// moment that they are present, and at random.
#[test]
fn what_prefetch_delivers_to_a_running_guest_costs_it_no_fault() {
    for order in [Order::Sequential, Order::Random { seed: 7 }] {
        let config = MachineConfig {
            slot_flags: SlotFlags {
                absent_mapping_fault: true,
                ..SlotFlags::default()
            },
            ..MachineConfig::new(2, 32 * MIB)
        };
        let Some(mut machine) = machine_with_exits(config) else {
            return;
        };
        if !machine.capabilities().populate_memory {
            println!("SKIP: this kernel lacks KVM_CAP_POPULATE_MEMORY");
            return;
        }
        let Some(pager) = pager(&machine, Mode::Minor, true) else {
            return;
        };
        let before = stage_2_faults(&machine);
        let prefetch = prefetch(&pager);
        // Those that left the guest brought their pages in themselves, or waited for prefetch.
        let exits = walk_in(&mut machine, &pager, order);
        let taken = stage_2_faults(&machine) - before;
        let ended = prefetch
            .finish()
            .unwrap_or_else(|failure| panic!("{}", chain(&failure)));
        assert!(pager.trouble().is_none(), "{:?}", pager.trouble());
        let delivered = ended.counters.pages;
        println!("{order:?}: {delivered} pages delivered, {exits} exits, {taken} stage-2 faults");
        assert!(delivered >= 500, "prefetch did little: {delivered}");
        // The exits are among them, and so are those on the guest's own low memory. What is left
        // met pages between installation and population. How many, is how often a software CPU turns
        // to a vCPU just then, up to a batch each time: 15 % has been seen where turns follow no clock
        // (function timing), and it is all of them without population.
        let low_memory = 64;
        let on_delivered = taken.saturating_sub(exits + low_memory);
        assert!(
            on_delivered < delivered / 2,
            "{on_delivered} stage-2 faults on {delivered} delivered pages"
        );
    }
}
