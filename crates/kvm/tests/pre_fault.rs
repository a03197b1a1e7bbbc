//! KVM_PRE_FAULT_MEMORY: processed ranges and refusals.

use std::error::Error;
use std::sync::Arc;

use pagetide_kvm::{Kvm, PreFaultError, SlotFlags, Vm};
use pagetide_memory::{Backing, GuestAddress, GuestRange, Region};

const MIB: u64 = 1 << 20;

fn vm() -> Option<Vm> {
    let vm: Result<Vm, Box<dyn Error>> = Kvm::open()
        .map_err(Into::into)
        .and_then(|kvm| kvm.create_vm_with_signals().map_err(Into::into));
    vm.inspect_err(|error| println!("SKIP: {error}")).ok()
}

fn range(gpa: u64, bytes: u64) -> GuestRange {
    GuestRange::new(GuestAddress(gpa), bytes).expect("whole pages")
}

#[test]
fn ranges_are_pre_faulted_up_to_their_slots_end() {
    let Some(vm) = vm() else { return };
    let mut vcpu = vm.create_vcpu(0).expect("one vCPU");
    let memory = Region::new(GuestAddress(0), MIB, Backing::Shmem).expect("1 MiB of shmem");
    vm.add_region(0, Arc::new(memory), SlotFlags::default())
        .expect("an empty slot");
    let mut here = vcpu.bind().expect("signals work");
    if !vm.capabilities().pre_fault_memory {
        let error = here
            .pre_fault(range(0, MIB))
            .expect_err("the kernel does not have it");
        assert!(matches!(error, PreFaultError::MissingCapability), "{error}");
        println!("SKIP: this kernel lacks KVM_CAP_PRE_FAULT_MEMORY; the refusal was checked");
        return;
    }
    assert_eq!(here.pre_fault(range(0, MIB)).expect("memory"), MIB);
    assert_eq!(
        here.pre_fault(range(MIB / 2, MIB)).expect("half of it"),
        MIB / 2
    );
    let error = here.pre_fault(range(MIB, 4096)).expect_err("no slot");
    assert!(matches!(error, PreFaultError::NoSlot { .. }), "{error}");
}
