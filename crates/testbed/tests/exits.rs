//! A vCPU exits for absent memory, and its thread makes the memory present.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod support;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use pagetide_kvm::{Access, Exit, FaultExit, SlotError, SlotFlags};
use pagetide_memory::{Backing, FaultInAccess, GuestRange, PageIndex, PageRange, Region};
use pagetide_testbed::{
    Content, DATA_GPA, Expected, GuestError, Machine, MachineConfig, Order, RunOutcome, Seed,
    Touch, Workload,
};
use pagetide_vmm::{Handled, HookError, NoFaults, PoolFailure, PoolVcpu, VcpuHooks};
use support::{SEED, chain, fill, machine};

const MIB: u64 = 1 << 20;
const READ: Workload = Workload::new(Touch::ReadPattern(SEED), Order::Sequential);
const EXITS: SlotFlags = SlotFlags {
    absent_mapping_fault: true,
    log_dirty: false,
    readonly: false,
};

#[test]
fn exits_without_the_capability_are_refused_by_its_name() {
    let Some(machine) = machine(MachineConfig::new(1, MIB)) else {
        return;
    };
    if machine.capabilities().absent_mapping_fault {
        println!("SKIP: this kernel has KVM_CAP_ABSENT_MAPPING_FAULT");
        return;
    }
    let error = machine
        .set_slot_flags(EXITS)
        .expect_err("no such capability");
    assert!(
        matches!(
            error,
            SlotError::MissingCapability { slot: 1, capability, .. }
                if capability == "KVM_CAP_ABSENT_MAPPING_FAULT"
        ),
        "{error}"
    );
}

/// Switches exits on; false, with the reason printed, where the kernel has none.
fn exits(machine: &Machine) -> bool {
    if !machine.capabilities().absent_mapping_fault {
        println!("SKIP: this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT");
        return false;
    }
    // The memory is not registered: these tests make pages present by touching them, which would then wait.
    machine.data().assume_registered();
    machine
        .set_slot_flags(EXITS)
        .expect("the capability is there");
    true
}

/// A machine whose data slot exits on absent pages.
fn exiting_machine(config: MachineConfig) -> Option<Machine> {
    let machine = machine(config).filter(exits)?;
    fill(machine.data(), SEED).expect("the data region is there");
    Some(machine)
}

/// Hooks that make the page of each fault present, and the aligned window of `window` pages around it.
struct Populate {
    region: Arc<Region>,
    access: FaultInAccess,
    window: u64,
    pre_fault: bool,
    /// After so many faults all pages are unmapped again while the guest runs; 0 for never.
    zap_every: u64,
    reads: AtomicU64,
    writes: AtomicU64,
}

impl Populate {
    fn new(machine: &Machine) -> Self {
        Self {
            region: Arc::clone(machine.data()),
            access: FaultInAccess::Write,
            window: 1,
            pre_fault: false,
            zap_every: 0,
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
        }
    }

    fn faults(&self) -> u64 {
        self.reads.load(Ordering::Relaxed) + self.writes.load(Ordering::Relaxed)
    }
}

impl VcpuHooks for Populate {
    fn on_fault(&self, _vcpu: &mut PoolVcpu<'_>, fault: FaultExit) -> Result<Handled, HookError> {
        match fault.access {
            Access::Read => self.reads.fetch_add(1, Ordering::Relaxed),
            Access::Write => self.writes.fetch_add(1, Ordering::Relaxed),
            other => return Err(format!("neither read nor write: {other}").into()),
        };
        if self.zap_every > 0 && self.faults().is_multiple_of(self.zap_every) {
            self.region.zap_guest(self.region.all_pages())?;
        }
        let page = self
            .region
            .page_of_gpa(fault.gpa)
            .ok_or("a fault outside the region")?;
        let first = PageIndex(page.0 - page.0 % self.window);
        let pages = PageRange::new(first, self.window);
        self.region.fault_in(pages, self.access)?;
        if !self.pre_fault {
            return Ok(Handled::Retry);
        }
        let gpa = self
            .region
            .gpa_of_page(first)
            .ok_or("a page outside the region")?;
        Ok(Handled::PreFaultThenRetry(GuestRange::new(
            gpa,
            self.window * 4096,
        )?))
    }
}

fn run(machine: &mut Machine, workload: Workload, handler: &Arc<Populate>) -> RunOutcome {
    let outcome = machine
        .run(&workload, Arc::<Populate>::clone(handler))
        .unwrap_or_else(|failure| panic!("{}", chain(&failure)));
    let counted = outcome
        .vcpus
        .iter()
        .map(|vcpu| vcpu.counts.faults)
        .sum::<u64>();
    assert_eq!(counted, handler.faults());
    outcome
}

fn zap(machine: &Machine) {
    machine
        .data()
        .zap_guest(machine.data().all_pages())
        .expect("shmem can be zapped");
}

#[test]
fn every_page_faults_once_and_is_resolved_by_the_vcpu() {
    let Some(mut machine) = exiting_machine(MachineConfig::new(2, MIB)) else {
        return;
    };
    let written = Seed::new(77);
    let workloads = [
        (READ, 512, 0),
        (
            Workload::new(Touch::ReadPattern(SEED), Order::Random { seed: 5 }),
            512,
            0,
        ),
        (
            Workload::new(Touch::Write(written), Order::Random { seed: 6 }),
            0,
            512,
        ),
    ];
    for (workload, reads, writes) in workloads {
        zap(&machine);
        let handler = Arc::new(Populate::new(&machine));
        let outcome = run(&mut machine, workload, &handler);
        for vcpu in &outcome.vcpus {
            assert!(vcpu.faulted.iter().copied().eq(0..256));
        }
        assert_eq!(handler.reads.load(Ordering::Relaxed), reads);
        assert_eq!(handler.writes.load(Ordering::Relaxed), writes);
    }
    let (touched, rest) = (Content::Pattern(written), Content::Pattern(SEED));
    machine
        .verify(Expected { touched, rest })
        .expect("written and kept");
}

#[test]
fn pages_made_present_with_a_neighbour_do_not_exit() {
    let Some(mut machine) = exiting_machine(MachineConfig::new(2, MIB)) else {
        return;
    };
    for pre_fault in [false, true] {
        if pre_fault && !machine.capabilities().pre_fault_memory {
            println!("SKIP: this kernel lacks KVM_CAP_PRE_FAULT_MEMORY");
            continue;
        }
        zap(&machine);
        let populate = Populate {
            window: 16,
            pre_fault,
            ..Populate::new(&machine)
        };
        let handler = Arc::new(populate);
        let outcome = run(&mut machine, READ, &handler);
        assert_eq!(handler.faults(), 512 / 16);
        for vcpu in &outcome.vcpus {
            assert!(vcpu.faulted.iter().copied().eq((0..256).step_by(16)));
            assert_eq!(vcpu.counts.pre_fault_failures, 0);
            assert_eq!(
                vcpu.counts.pre_faulted_bytes,
                if pre_fault { MIB } else { 0 }
            );
        }
    }
}

#[test]
fn pages_present_read_only_exit_for_neither_reads_nor_writes() {
    let config = MachineConfig {
        backing: Backing::Anonymous,
        ..MachineConfig::new(1, MIB)
    };
    let Some(mut machine) = machine(config) else {
        return;
    };
    if !exits(&machine) {
        return;
    }
    // The page of zeroes, mapped read-only 256 times, before the guest runs.
    let pages = machine.data().all_pages();
    machine
        .data()
        .fault_in(pages, FaultInAccess::Read)
        .expect("zeroes are always there");
    let handler = Arc::new(Populate::new(&machine));
    run(
        &mut machine,
        Workload::new(Touch::ReadZero, Order::Sequential),
        &handler,
    );
    assert_eq!(handler.faults(), 0);
    run(
        &mut machine,
        Workload::new(Touch::Write(SEED), Order::Sequential),
        &handler,
    );
    // The kernel alone copies the page of zeroes.
    assert_eq!(handler.faults(), 0);
    let (touched, rest) = (Content::Pattern(SEED), Content::Zero);
    machine.verify(Expected { touched, rest }).expect("written");
}

#[test]
fn pages_unmapped_under_the_guest_are_made_present_again() {
    let config = MachineConfig {
        overlap: true,
        ..MachineConfig::new(2, 2 * MIB)
    };
    let Some(mut machine) = exiting_machine(config) else {
        return;
    };
    let mut faults = 0;
    for seed in 0..2 {
        let populate = Populate {
            zap_every: 200,
            ..Populate::new(&machine)
        };
        let handler = Arc::new(populate);
        let order = Order::Random { seed };
        run(
            &mut machine,
            Workload::new(Touch::ReadPattern(SEED), order),
            &handler,
        );
        faults += handler.faults();
    }
    assert!(faults > 1024, "{faults} faults: no page was unmapped");
    machine
        .verify(Expected::all(Content::Pattern(SEED)))
        .expect("content stayed");
}

#[test]
fn the_slots_flag_can_change_between_runs() {
    let config = MachineConfig {
        overlap: true,
        ..MachineConfig::new(2, 2 * MIB)
    };
    let Some(mut machine) = exiting_machine(config) else {
        return;
    };
    let pages = machine.data().all_pages();
    for exits in [true, false, true] {
        machine
            .set_slot_flags(SlotFlags {
                absent_mapping_fault: exits,
                ..EXITS
            })
            .expect("flags");
        machine
            .data()
            .zap_guest(pages)
            .expect("shmem can be zapped");
        let handler = Arc::new(Populate::new(&machine));
        run(&mut machine, READ, &handler);
        assert_eq!(handler.faults() > 0, exits);
    }
}

/// Hooks that fail after some faults, while other vCPUs wait until they are stopped.
struct Failing {
    good: Populate,
    waiting: (Mutex<bool>, Condvar),
    stopped: AtomicBool,
}

impl VcpuHooks for Failing {
    fn on_fault(&self, vcpu: &mut PoolVcpu<'_>, fault: FaultExit) -> Result<Handled, HookError> {
        if self.good.faults() < 20 {
            return self.good.on_fault(vcpu, fault);
        }
        if vcpu.id() == 0 {
            return Err("no such page".into());
        }
        let (stopped, changed) = &self.waiting;
        let guard = stopped.lock().expect("no thread panics");
        drop(
            changed
                .wait_while(guard, |stopped| !*stopped)
                .expect("no thread panics"),
        );
        Err("stopped".into())
    }

    fn on_stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        *self.waiting.0.lock().expect("no thread panics") = true;
        self.waiting.1.notify_all();
    }
}

#[test]
fn a_handlers_error_ends_the_run_with_its_cause() {
    let Some(mut machine) = exiting_machine(MachineConfig::new(4, MIB)) else {
        return;
    };
    machine
        .data()
        .zap_guest(machine.data().all_pages())
        .expect("shmem can be zapped");
    let handler = Arc::new(Failing {
        good: Populate::new(&machine),
        waiting: (Mutex::new(false), Condvar::new()),
        stopped: AtomicBool::new(false),
    });
    let failure = machine
        .run(&READ, Arc::<Failing>::clone(&handler))
        .expect_err("a page is missing");
    let GuestError::Vcpus(PoolFailure::Hook {
        vcpu: 0,
        exit: Some(Exit::Fault(fault)),
        rip: Some(_),
        ..
    }) = &*failure.cause
    else {
        panic!("{failure}")
    };
    assert!(fault.absent && fault.gpa.0 >= DATA_GPA, "{fault}");
    assert!(
        chain(&failure).ends_with("no such page"),
        "{}",
        chain(&failure)
    );
    assert!(
        failure.lost.is_empty() && handler.stopped.load(Ordering::Relaxed),
        "{failure}"
    );
    machine
        .set_slot_flags(SlotFlags::default())
        .expect("flags can be cleared");
    machine
        .run(&READ, Arc::new(NoFaults))
        .expect("the machine can be used again");
}

struct Panicking;

impl VcpuHooks for Panicking {
    fn on_fault(&self, _: &mut PoolVcpu<'_>, _: FaultExit) -> Result<Handled, HookError> {
        panic!("out of ideas")
    }
}

#[test]
fn a_panic_in_the_handler_ends_the_run_with_its_message() {
    let Some(mut machine) = exiting_machine(MachineConfig::new(2, MIB)) else {
        return;
    };
    machine
        .data()
        .zap_guest(machine.data().all_pages())
        .expect("shmem can be zapped");
    let failure = machine
        .run(&READ, Arc::new(Panicking))
        .expect_err("it panics");
    let GuestError::Vcpus(PoolFailure::Panicked { message, .. }) = &*failure.cause else {
        panic!("{failure}")
    };
    assert_eq!(message, "out of ideas");
    machine
        .set_slot_flags(SlotFlags::default())
        .expect("flags can be cleared");
    machine
        .run(&READ, Arc::new(NoFaults))
        .expect("the machine can be used again");
}
