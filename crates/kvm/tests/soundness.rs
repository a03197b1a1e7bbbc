//! What safe code can do with the crate: nothing that makes a guest read or write other memory than its own.
#![forbid(unsafe_code)]
#![cfg(target_arch = "x86_64")]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use kvm_ioctls::{VcpuExit, VcpuFd};
use pagetide_kvm::{Kvm, Signals, SlotFlags, Vm};
use pagetide_memory::{Backing, GuestAddress, PageIndex, Region};

/// In real mode: mov byte [0x100], 0x5a; hlt.
const CODE: [u8; 6] = [0xc6, 0x06, 0x00, 0x01, 0x5a, 0xf4];

/// A VM with one region at 0, and a vCPU that the program made by `kvm-ioctls`.
fn machine() -> Option<(Vm, Arc<Region>, VcpuFd)> {
    let kvm = match Kvm::open() {
        Ok(kvm) => kvm,
        Err(error) => {
            println!("SKIP: {error}");
            return None;
        }
    };
    let vm = kvm.create_vm(Signals::none()).expect("a VM");
    let region = Region::new(GuestAddress(0), 4 << 20, Backing::Shmem).expect("memory");
    let region = Arc::new(region);
    region.write_service(PageIndex(0), 0, &CODE).expect("code");
    vm.add_region(0, Arc::clone(&region), SlotFlags::default())
        .expect("a slot");
    let vcpu = vm.fd().create_vcpu(0).expect("a vCPU");
    let mut sregs = vcpu.get_sregs().expect("registers");
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs).expect("registers");
    let mut regs = vcpu.get_regs().expect("registers");
    (regs.rip, regs.rflags) = (0, 2);
    vcpu.set_regs(&regs).expect("registers");
    Some((vm, region, vcpu))
}

fn written(region: &Region) -> u8 {
    let mut byte = [0];
    let read = region.read_service(PageIndex(0), 0x100, &mut byte);
    read.expect("the guest's memory");
    byte[0]
}

/// The vCPU keeps KVM's VM alive. If its slots were there, the guest would write where the memory was, and where
/// the program may have something else by now.
#[test]
fn a_vcpu_that_outlives_the_vm_has_no_memory() {
    let Some((vm, region, mut vcpu)) = machine() else {
        return;
    };
    let exit = vcpu.run();
    assert!(matches!(exit, Ok(VcpuExit::Hlt)), "{exit:?}");
    assert_eq!(written(&region), 0x5a, "as long as the VM lives");
    drop(vm);

    let (vm, region, mut vcpu) = machine().expect("as before");
    drop(vm);
    // An exit without effect, or an error.
    let exit = format!("{:?}", vcpu.run());
    assert_eq!(written(&region), 0, "{exit}");
}
