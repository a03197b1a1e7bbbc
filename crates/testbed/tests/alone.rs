//! One vCPU walks all of memory, and KVM counts its stage-2 faults.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod support;

use std::ops::ControlFlow;
use std::sync::Arc;

use pagetide_kvm::{PopulationError, PopulatorMethod};
use pagetide_testbed::{
    Content, Expected, GuestError, Machine, MachineConfig, MachineError, Order, Touch, Workload,
};
use pagetide_vmm::NoFaults;
use support::{SEED, chain, fill, machine};

const PER_VCPU: u64 = 1 << 20;
const PAGES: u64 = 2 * PER_VCPU / 4096;

fn config(alone: bool) -> MachineConfig {
    MachineConfig {
        alone,
        ..MachineConfig::new(2, PER_VCPU)
    }
}

fn filled() -> Option<Machine> {
    let machine = machine(config(true))?;
    fill(machine.data(), SEED).expect("the data region is there");
    Some(machine)
}

fn read(machine: &mut Machine, alone: bool) {
    let walk = Workload::new(Touch::ReadPattern(SEED), Order::Random { seed: 3 });
    let walk = if alone { walk.alone() } else { walk };
    let outcome = machine
        .run(&walk, Arc::new(NoFaults))
        .unwrap_or_else(|failure| panic!("{}", chain(&failure)));
    let touches: Vec<_> = outcome.vcpus.iter().map(|vcpu| vcpu.touches).collect();
    if alone {
        assert_eq!(touches, [PAGES]);
    } else {
        assert_eq!(touches, [PAGES / 2; 2]);
    }
}

#[test]
fn one_vcpu_walks_all_memory_and_then_all_vcpus_do() {
    let Some(mut machine) = filled() else { return };
    for alone in [true, false, true] {
        read(&mut machine, alone);
    }
    machine
        .verify(Expected::all(Content::Pattern(SEED)))
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
}

#[test]
fn a_machine_without_room_for_the_log_refuses() {
    let Some(mut machine) = machine(config(false)) else {
        return;
    };
    let walk = Workload::new(Touch::ReadZero, Order::Sequential).alone();
    let failure = machine
        .run(&walk, Arc::new(NoFaults))
        .expect_err("the log is too small");
    assert!(
        matches!(
            *failure.cause,
            GuestError::Machine(MachineError::NoRoomAlone)
        ),
        "{failure}"
    );
}

#[test]
fn populated_memory_costs_no_stage_2_fault() {
    let Some(mut machine) = filled() else { return };
    let populator = machine.populator().method(PopulatorMethod::Populate);
    match populator.run(|_| ControlFlow::Continue(())) {
        Ok(population) => assert_eq!(population.populated.mapped_bytes, population.total_bytes),
        Err(PopulationError::Unavailable { lacks, .. }) => return println!("SKIP: {lacks}"),
        Err(error) => panic!("{}", chain(&error)),
    }
    let populated = machine.stage_two().expect("binary statistics");
    assert!(populated.mappings() >= PAGES, "{populated:?}");
    assert_eq!(populated.faults_taken, 0, "{populated:?}");
    read(&mut machine, false);
    assert_eq!(machine.stage_two().expect("binary statistics"), populated);
}
