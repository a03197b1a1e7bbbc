//! vCPUs that wait in KVM for a userfaultfd that no thread serves: they can be stopped, and the failure names the
//! page. No guest reads zeroes instead.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod support;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pagetide_memory::{Backing, GuestAddress};
use pagetide_testbed::{
    Content, DATA_GPA, Expected, GuestError, Machine, MachineConfig, Order, RunFailure, Touch,
    VerifyError, Workload,
};
use pagetide_uapi::userfaultfd::{Features, Mode, UserRange, Userfaultfd};
use pagetide_vmm::{NoFaults, PoolFailure};
use support::{SEED, chain, deaf_to_signals, fill, is_lack, machine};

const MIB: u64 = 1 << 20;
const READ: Workload = Workload::new(Touch::ReadPattern(SEED), Order::Sequential);

/// A machine whose data region is registered; None with the reason printed where this host cannot.
fn registered(config: MachineConfig) -> Option<(Machine, Userfaultfd)> {
    let machine = machine(config)?;
    let uffd = match Userfaultfd::open(Features::NONE) {
        Ok(uffd) => uffd,
        Err(error) if is_lack(&error) => {
            println!("SKIP: {}", chain(&error));
            return None;
        }
        Err(error) => panic!("{}", chain(&error)),
    };
    let guest = machine.data().guest();
    let range = UserRange {
        start: guest.start().as_u64(),
        bytes: machine.data().bytes(),
    };
    // SAFETY: the machine keeps the region mapped, and is dropped after the userfaultfd by every
    // caller, or at the same time; nothing here reads absent pages as zeroes.
    let result = unsafe { uffd.register(range, Mode::Missing) };
    result.unwrap_or_else(|error| panic!("{}", chain(&error)));
    Some((machine, uffd))
}

/// A run that nothing has ended but its stall timeout. A host on which the two vCPUs do not come to their first page
/// within the shortest one has more time for it.
fn stalled(backing: Backing) -> Option<(Machine, Userfaultfd, RunFailure)> {
    let mut stall_timeout = Duration::from_secs(2);
    loop {
        let config = MachineConfig {
            backing,
            stall_timeout,
            ..MachineConfig::new(2, MIB)
        };
        let (mut machine, uffd) = registered(config)?;
        let failure = machine
            .run(&READ, Arc::new(NoFaults))
            .expect_err("no thread serves the userfaultfd");
        assert!(
            matches!(*failure.cause, GuestError::Stalled { .. }),
            "{failure}"
        );
        let have_begun = failure.vcpus.iter().all(|vcpu| vcpu.gpa.is_some());
        let is_lost = !failure.lost.is_empty();
        if have_begun || is_lost || stall_timeout >= Duration::from_secs(120) {
            return Some((machine, uffd, failure));
        }
        println!("no page within {stall_timeout:?}: {failure}");
        stall_timeout *= 4;
    }
}

#[test]
fn a_stalled_run_names_the_page_and_leaves_no_thread() {
    for backing in [Backing::Anonymous, Backing::Shmem] {
        let Some((machine, uffd, failure)) = stalled(backing) else {
            return;
        };
        if deaf_to_signals(&failure) {
            return;
        }
        let places: Vec<_> = failure
            .vcpus
            .iter()
            .map(|vcpu| (vcpu.gpa, vcpu.touched))
            .collect();
        let place = |gpa| (Some(GuestAddress(gpa)), 0);
        assert_eq!(
            places,
            [place(DATA_GPA), place(DATA_GPA + MIB)],
            "{failure}"
        );
        if backing == Backing::Anonymous {
            let error = machine
                .verify(Expected::all(Content::Zero))
                .expect_err("absent");
            assert!(matches!(error, VerifyError::Absent { .. }), "{error}");
        }
        drop(uffd);
        fill(machine.data(), SEED).expect("the memory is not registered any more");
        // Another machine, with a longer timeout.
        let config = MachineConfig {
            backing,
            ..MachineConfig::new(2, MIB)
        };
        Machine::with_region(config, Arc::clone(machine.data()))
            .expect("another")
            .run(&READ, Arc::new(NoFaults))
            .expect("the memory can be used again");
    }
}

#[test]
fn a_waiting_run_can_be_stopped_from_outside() {
    let Some((mut machine, uffd)) = registered(MachineConfig::new(2, MIB)) else {
        return;
    };
    for round in 0..10 {
        let stopper = machine.stopper();
        let outside = thread::spawn(move || {
            // Before the first page, there, and later: what is expected is the same each time.
            thread::sleep(Duration::from_millis(10 * round));
            stopper.stop("the page reader died");
        });
        let failure = machine
            .run(&READ, Arc::new(NoFaults))
            .expect_err("no thread serves the userfaultfd");
        outside.join().expect("no panic");
        assert!(
            matches!(*failure.cause, GuestError::Vcpus(PoolFailure::Stopped(_))),
            "{failure}"
        );
        if deaf_to_signals(&failure) {
            return;
        }
        assert!(
            failure.vcpus.iter().all(|vcpu| vcpu.touched == 0),
            "{failure}"
        );
    }
    drop(uffd);
}
