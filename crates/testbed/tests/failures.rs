//! Whatever goes wrong ends the run with its cause, and the machine can be run again.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod support;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_kvm::{Exit, FaultExit, SlotError, SlotFlags};
use pagetide_memory::{GuestAddress, PageRange, PopulateAccess, Region};
use pagetide_testbed::{
    ConfigError, DATA_GPA, FailureCause, FaultHandler, Handled, HandlerError, Machine,
    MachineConfig, MachineError, NoFaults, Order, Touch, Workload,
};
use support::{SEED, chain, fill, machine};

const MIB: u64 = 1 << 20;
const READ: Workload = Workload::new(Touch::ReadPattern(SEED), Order::Sequential);
const SPIN: Workload = Workload::new(Touch::Spin, Order::Sequential);
const EXITS: SlotFlags = SlotFlags {
    absent_mapping_fault: true,
    log_dirty: false,
    readonly: false,
};

fn reads_well(machine: &mut Machine) {
    fill(machine.data(), SEED).expect("the data region is there");
    let result = machine.run(&READ, Arc::new(NoFaults));
    result.unwrap_or_else(|failure| panic!("after a failure: {}", chain(&failure)));
}

#[test]
fn a_guest_that_spins_is_stopped_from_outside() {
    let Some(mut machine) = machine(MachineConfig::new(4, MIB)) else {
        return;
    };
    for round in 0..20 {
        let stopper = machine.stopper();
        let outside = thread::spawn(move || {
            // Before, at and after the guests' start.
            thread::sleep(Duration::from_millis(round));
            stopper.stop("the page reader died");
        });
        let started = Instant::now();
        let failure = machine
            .run(&SPIN, Arc::new(NoFaults))
            .expect_err("spinning never ends");
        outside.join().expect("no panic");
        assert!(
            matches!(*failure.cause, FailureCause::Stopped(_)),
            "{failure}"
        );
        assert!(
            chain(&failure).ends_with("the page reader died"),
            "{}",
            chain(&failure)
        );
        assert!(failure.lost.is_empty(), "{failure}");
        assert!(
            started.elapsed() < Duration::from_secs(8),
            "kicks took {:?}",
            started.elapsed()
        );
    }
    reads_well(&mut machine);
}

#[test]
fn a_stop_before_the_run_ends_it_at_once() {
    let Some(mut machine) = machine(MachineConfig::new(1, MIB)) else {
        return;
    };
    machine.stopper().stop("too early");
    let failure = machine
        .run(&SPIN, Arc::new(NoFaults))
        .expect_err("stopped before");
    assert!(
        matches!(*failure.cause, FailureCause::Stopped(_)),
        "{failure}"
    );
    reads_well(&mut machine);
}

#[test]
fn a_run_without_progress_is_ended_with_the_registers() {
    let stall_timeout = Duration::from_millis(400);
    let config = MachineConfig {
        stall_timeout,
        ..MachineConfig::new(2, MIB)
    };
    let Some(mut machine) = machine(config) else {
        return;
    };
    let started = Instant::now();
    let failure = machine
        .run(&SPIN, Arc::new(NoFaults))
        .expect_err("spinning never ends");
    assert!(
        matches!(*failure.cause, FailureCause::Stalled { .. }),
        "{failure}"
    );
    assert!(started.elapsed() >= stall_timeout);
    assert_eq!(failure.vcpus.len(), 2);
    for state in &failure.vcpus {
        let rip = state.rip.expect("registers can be read");
        assert!((0x1000..0x5000).contains(&rip), "{state}");
        assert_eq!((state.touched, state.pages, state.done), (0, 256, false));
    }
    reads_well(&mut machine);
}

#[test]
fn an_exception_in_the_guest_is_named() {
    let Some(mut machine) = machine(MachineConfig::new(2, MIB)) else {
        return;
    };
    // Identity mapping ends with the gigabyte of the data.
    let workload = Workload {
        elsewhere: Some(GuestAddress(0x20_0000_0000)),
        ..READ
    };
    let failure = machine
        .run(&workload, Arc::new(NoFaults))
        .expect_err("not mapped");
    let FailureCause::Exception {
        vector, cr2, rip, ..
    } = *failure.cause
    else {
        panic!("{failure}")
    };
    assert_eq!(vector, 14, "{failure}");
    assert_eq!(cr2 & !0xf_ffff, 0x20_0000_0000, "{failure}");
    assert!((0x1000..0x5000).contains(&rip), "{failure}");
    reads_well(&mut machine);
}

#[test]
fn an_access_outside_all_memory_is_named() {
    let Some(mut machine) = machine(MachineConfig::new(2, MIB)) else {
        return;
    };
    let outside = GuestAddress(DATA_GPA + (512 << 20));
    let workload = Workload {
        elsewhere: Some(outside),
        ..READ
    };
    let failure = machine
        .run(&workload, Arc::new(NoFaults))
        .expect_err("no slot there");
    assert!(
        matches!(
            *failure.cause,
            FailureCause::UnexpectedExit { exit: Exit::Mmio { gpa, write: false, .. }, .. }
                if gpa == outside
        ),
        "{failure}"
    );
    reads_well(&mut machine);
}

#[test]
fn impossible_machines_are_refused() {
    let Some(_machine) = machine(MachineConfig::new(1, MIB)) else {
        return;
    };
    let refused = |config| Machine::new(config).expect_err("impossible");
    let error = refused(MachineConfig::new(0, MIB));
    assert!(
        matches!(error, MachineError::Config(ConfigError::NoVcpus)),
        "{error}"
    );
    let error = refused(MachineConfig::new(1 << 20, 4096));
    assert!(
        matches!(
            error,
            MachineError::Config(ConfigError::TooManyVcpus { .. })
        ),
        "{error}"
    );
    let error = refused(MachineConfig::new(1, 1 << 62));
    assert!(
        matches!(
            error,
            MachineError::Config(ConfigError::TooMuchMemory { .. })
        ),
        "{error}"
    );

    let other = Arc::new(MachineConfig::new(2, MIB).data_region().expect("2 MiB"));
    let error = Machine::with_region(MachineConfig::new(1, MIB), other).expect_err("too large");
    assert!(
        matches!(error, MachineError::Config(ConfigError::WrongRegion { .. })),
        "{error}"
    );
}

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

/// A machine whose data slot exits on absent pages.
fn exiting_machine(config: MachineConfig) -> Option<Machine> {
    let machine = machine(config)?;
    if !machine.capabilities().absent_mapping_fault {
        println!("SKIP: this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT");
        return None;
    }
    machine
        .set_slot_flags(EXITS)
        .expect("the capability is there");
    fill(machine.data(), SEED).expect("the data region is there");
    Some(machine)
}

/// Maps the page of each fault.
struct Populate {
    region: Arc<Region>,
    faults: AtomicU64,
}

impl Populate {
    fn new(machine: &Machine) -> Arc<Self> {
        Arc::new(Self {
            region: Arc::clone(machine.data()),
            faults: AtomicU64::new(0),
        })
    }
}

impl FaultHandler for Populate {
    fn handle(&self, _vcpu: u32, fault: FaultExit) -> Result<Handled, HandlerError> {
        self.faults.fetch_add(1, Ordering::Relaxed);
        let page = self
            .region
            .page_of_gpa(fault.gpa)
            .ok_or("a fault outside the region")?;
        self.region
            .populate(PageRange::single(page), PopulateAccess::Write)?;
        Ok(Handled::Retry)
    }
}

#[test]
fn every_page_faults_once_and_is_resolved_by_the_vcpu() {
    let Some(mut machine) = exiting_machine(MachineConfig::new(2, MIB)) else {
        return;
    };
    for _ in 0..3 {
        machine
            .data()
            .zap_guest(machine.data().all_pages())
            .expect("shmem can be zapped");
        let handler = Populate::new(&machine);
        let outcome = machine
            .run(&READ, Arc::<Populate>::clone(&handler))
            .unwrap_or_else(|failure| panic!("{}", chain(&failure)));
        assert_eq!(handler.faults.load(Ordering::Relaxed), 512);
        assert_eq!(
            outcome.vcpus.iter().map(|vcpu| vcpu.faults).sum::<u64>(),
            512
        );
    }
}

#[test]
fn the_flag_can_be_toggled_on_a_live_slot() {
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
        let handler = Populate::new(&machine);
        machine
            .run(&READ, Arc::<Populate>::clone(&handler))
            .expect("every page is there");
        assert_eq!(handler.faults.load(Ordering::Relaxed) > 0, exits);
    }
}

/// Fails after some faults, while others wait for ever.
struct Failing {
    good: Arc<Populate>,
    waiting: (Mutex<bool>, Condvar),
    stopped: AtomicBool,
}

impl FaultHandler for Failing {
    fn handle(&self, vcpu: u32, fault: FaultExit) -> Result<Handled, HandlerError> {
        if self.good.faults.load(Ordering::Relaxed) < 20 {
            return self.good.handle(vcpu, fault);
        }
        if vcpu == 0 {
            return Err("no such page".into());
        }
        let (stopped, changed) = &self.waiting;
        let guard = stopped.lock().expect("nobody panics");
        drop(
            changed
                .wait_while(guard, |stopped| !*stopped)
                .expect("nobody panics"),
        );
        Err("stopped".into())
    }

    fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        *self.waiting.0.lock().expect("nobody panics") = true;
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
        .expect_err("a page lacks");
    let FailureCause::Handler {
        vcpu: 0,
        fault,
        rip: Some(_),
        ..
    } = &*failure.cause
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
    reads_well(&mut machine);
}

struct Panicking;

impl FaultHandler for Panicking {
    fn handle(&self, _vcpu: u32, _fault: FaultExit) -> Result<Handled, HandlerError> {
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
    let FailureCause::Panicked { message, .. } = &*failure.cause else {
        panic!("{failure}")
    };
    assert_eq!(message, "out of ideas");
    machine
        .set_slot_flags(SlotFlags::default())
        .expect("flags can be cleared");
    reads_well(&mut machine);
}
