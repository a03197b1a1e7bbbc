//! A failure ends the run with its cause, and the machine can be run again.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod support;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use pagetide_kvm::Exit;
use pagetide_memory::GuestAddress;
use pagetide_testbed::{
    ConfigError, DATA_GPA, GuestError, Machine, MachineConfig, MachineError, Order, Touch, Workload,
};
use pagetide_vmm::{NoFaults, PoolFailure, SizeError};
use support::{SEED, chain, fill, machine};

const MIB: u64 = 1 << 20;
const READ: Workload = Workload::new(Touch::ReadPattern(SEED), Order::Sequential);
const SPIN: Workload = Workload::new(Touch::Spin, Order::Sequential);

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
            // Before, at and after the guests' start: what is expected is the same each time.
            thread::sleep(Duration::from_millis(round));
            stopper.stop("the page reader died");
        });
        let failure = machine
            .run(&SPIN, Arc::new(NoFaults))
            .expect_err("spinning never ends");
        outside.join().expect("no panic");
        assert!(
            matches!(*failure.cause, GuestError::Vcpus(PoolFailure::Stopped(_))),
            "{failure}"
        );
        assert!(
            chain(&failure).ends_with("the page reader died"),
            "{}",
            chain(&failure)
        );
        assert!(failure.lost.is_empty(), "{failure}");
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
        matches!(*failure.cause, GuestError::Vcpus(PoolFailure::Stopped(_))),
        "{failure}"
    );
    reads_well(&mut machine);
}

#[test]
fn a_run_without_progress_ends_with_the_registers() {
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
        matches!(*failure.cause, GuestError::Stalled { .. }),
        "{failure}"
    );
    // Not earlier, which no machine is too slow for.
    assert!(started.elapsed() >= stall_timeout);
    assert_eq!(failure.vcpus.len(), 2);
    for state in &failure.vcpus {
        let rip = state.rip.expect("registers can be read");
        assert!((0x1000..0x5000).contains(&rip), "{state}");
        assert_eq!((state.touched, state.pages, state.done), (0, 256, false));
    }
    // Another machine, with a longer timeout: a loaded host may stand still for 400 ms.
    let config = MachineConfig::new(2, MIB);
    reads_well(&mut Machine::with_region(config, Arc::clone(machine.data())).expect("another"));
}

#[test]
fn an_exception_in_the_guest_is_named() {
    let Some(mut machine) = machine(MachineConfig::new(2, MIB)) else {
        return;
    };
    // The identity mapping ends with the gigabyte of the data.
    let workload = Workload {
        elsewhere: Some(GuestAddress(0x20_0000_0000)),
        ..READ
    };
    let failure = machine
        .run(&workload, Arc::new(NoFaults))
        .expect_err("not mapped");
    let GuestError::Exception {
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
            GuestError::Vcpus(PoolFailure::UnexpectedExit {
                exit: Exit::Mmio { gpa, write: false, .. }, ..
            })
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
        matches!(
            error,
            MachineError::Config(ConfigError::Size(SizeError::NoVcpus))
        ),
        "{error}"
    );
    let error = refused(MachineConfig::new(1 << 20, 4096));
    assert!(
        matches!(
            error,
            MachineError::Config(ConfigError::Size(SizeError::TooManyVcpus { .. }))
        ),
        "{error}"
    );
    let error = refused(MachineConfig::new(1, 1 << 62));
    assert!(
        matches!(
            error,
            MachineError::Config(ConfigError::Size(SizeError::TooMuchMemory { .. }))
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
