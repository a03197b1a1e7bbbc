//! Kicks end KVM_RUN, whenever they come.
//!
//! The vCPU has no memory and no state but what KVM gives it; without an in-kernel interrupt
//! controller it is runnable from the start, and immediate_exit keeps it out of the guest.

use pagetide_kvm::{Exit, Kvm, Vcpu, Vm};

fn vcpu() -> Option<(Vm, Vcpu)> {
    let vm = match Kvm::open().map(|kvm| kvm.create_vm()) {
        Ok(Ok(vm)) => vm,
        Ok(Err(error)) => {
            println!("SKIP: {error}");
            return None;
        }
        Err(error) => {
            println!("SKIP: {error}");
            return None;
        }
    };
    let vcpu = vm.create_vcpu(0).expect("one vCPU");
    Some((vm, vcpu))
}

#[test]
fn a_kick_before_the_run_is_not_lost() {
    let Some((_vm, mut vcpu)) = vcpu() else {
        return;
    };
    let kick = vcpu.kick_handle();
    kick.kick();
    kick.kick();
    let mut here = vcpu.bind().expect("signals work");
    assert_eq!(here.run().expect("no failure"), Exit::Interrupted);
    kick.kick();
    assert_eq!(here.run().expect("no failure"), Exit::Interrupted);
}

#[test]
fn a_kick_outlives_its_vcpu() {
    let Some((vm, mut vcpu)) = vcpu() else { return };
    let kick = vcpu.kick_handle();
    drop(vcpu.bind().expect("signals work"));
    drop((vm, vcpu));
    kick.kick();
}

#[test]
fn completing_io_leaves_no_kick_behind() {
    let Some((_vm, mut vcpu)) = vcpu() else {
        return;
    };
    let kick = vcpu.kick_handle();
    let mut here = vcpu.bind().expect("signals work");
    here.complete_io().expect("there is none");
    kick.kick();
    assert_eq!(here.run().expect("no failure"), Exit::Interrupted);
    kick.kick();
    here.forget_kicks();
    here.complete_io().expect("there is none");
}
