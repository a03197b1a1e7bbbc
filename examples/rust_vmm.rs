//! A VMM on kvm-ioctls and vm-memory adopts the pager: its guest runs before its memory has arrived.
//!
//! The guest is a few bytes of real-mode code that add up memory which the VMM never wrote. The pager
//! installs each page that the guest touches, in MISSING mode. Where the kernel has the Pagetide series,
//! faults are exits (KVM_CAP_ABSENT_MAPPING_FAULT), and this thread resolves them; on other kernels a
//! reader thread serves the userfaultfd.

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use kvm_bindings::{kvm_userspace_memory_region, kvm_userspace_memory_region2};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use pagetide_kvm::{Capabilities, FaultExit};
use pagetide_memory::GuestAddress as Gpa;
use pagetide_pager::{
    Contents, Mode, Pager, PatternSource, ReaderConfig, Readers, Resolution, add_guest_memory,
};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

const DATA: u64 = 0x1_0000;
const DATA_BYTES: usize = 0x8000;

/// Adds up the first byte of each page from 0x10000 on, eight of them, and writes the sum to port 0x10.
const CODE: [u8; 20] = [
    0xb8, 0x00, 0x10, // mov ax, 0x1000
    0x8e, 0xd8, // mov ds, ax
    0x31, 0xdb, // xor bx, bx
    0x30, 0xc0, // xor al, al
    0x02, 0x07, // add al, [bx]
    0x81, 0xc3, 0x00, 0x10, // add bx, 0x1000
    0x79, 0xf8, // jns to the first add
    0xe6, 0x10, // out 0x10, al
    0xf4, // hlt
];

fn main() -> anyhow::Result<()> {
    // As in any VMM: a VM, its memory, a vCPU.
    let kvm = Kvm::new().context("opening /dev/kvm")?;
    let vm = kvm.create_vm()?;
    let low = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x1000)])?;
    let data = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(DATA), DATA_BYTES)])?;
    low.write_slice(&CODE, GuestAddress(0))?;

    // To adopt the pager:
    let pager = Pager::new()?;
    let content =
        |gpa: Gpa, piece: &mut [u8]| piece.fill(u8::try_from(gpa.0 >> 12).unwrap_or(u8::MAX));
    let contents = |_, _| Contents::Local(Arc::new(PatternSource::new(content)));
    // SAFETY: the memory is dropped after the pager, and no code relies on its content before.
    unsafe { add_guest_memory(&pager, &data, Mode::Missing, contents, |config| config) }?;
    let readers = Readers::spawn(&pager, ReaderConfig::new(1))?;
    let exits = Capabilities::of(&vm).absent_mapping_flag().unwrap_or(0);

    set_memory(&vm, 0, &low, 0)?;
    set_memory(&vm, 1, &data, exits)?;
    let mut vcpu = vm.create_vcpu(0)?;
    set_registers(&vcpu)?;
    let mut resolver = pager.resolver(Some(0)).context("the pager is there")?;
    let mut sum = None;
    loop {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(0x10, bytes)) => sum = bytes.first().copied(),
            Ok(VcpuExit::Hlt) => break,
            // A missing page, with the series: resolve it on this thread and enter again.
            Ok(VcpuExit::MemoryFault { flags, gpa, size }) => {
                // KVM_RUN has failed with EFAULT or EHWPOISON, which kvm-ioctls leaves in errno: before any other call.
                let is_poisoned = kvm_ioctls::Error::last().errno() == libc::EHWPOISON;
                let fault = FaultExit::decode(flags, gpa, size, is_poisoned);
                ensure!(fault.is_resolvable(), "{fault}");
                match resolver.resolve_exit(fault.gpa, fault.access)? {
                    lost @ (Resolution::Poisoned | Resolution::Unmapped) => {
                        bail!("the page at gpa {} cannot be had: {lost:?}", fault.gpa)
                    }
                    _ => FaultExit::forget(vcpu.get_kvm_run()),
                }
            }
            Ok(other) => bail!("an exit that this guest does not cause: {other:?}"),
            // A signal, or memory that changes just now: enter again.
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {}
            Err(error) => return Err(error).context("KVM_RUN"),
        }
    }
    let wanted = (0x10..0x18).sum::<u8>();
    ensure!(sum == Some(wanted), "the guest wrote {sum:?}, not {wanted}");
    let delivery = if exits == 0 { "userfaultfd" } else { "exits" };
    drop(resolver);
    // A reader wakes the guest with the page, and counts the page a moment later.
    readers.stop();
    println!(
        "the guest read {} pages by {delivery}, sum {wanted}",
        pager.progress().present
    );
    Ok(())
}

fn set_memory(vm: &VmFd, slot: u32, memory: &GuestMemoryMmap, flags: u32) -> anyhow::Result<()> {
    let region = memory.iter().next().context("a region")?;
    let range = kvm_userspace_memory_region {
        slot,
        guest_phys_addr: region.start_addr().0,
        memory_size: region.len(),
        userspace_addr: memory.get_host_address(region.start_addr())?.addr() as u64,
        flags,
    };
    // Only the second version has the flag for exits; kernels before 6.8 lack that version.
    let set = if flags == 0 {
        // SAFETY: KVM requires memory that stays mapped while the VM runs: main drops it after the VM.
        unsafe { vm.set_user_memory_region(range) }
    } else {
        let range = kvm_userspace_memory_region2 {
            slot,
            flags,
            guest_phys_addr: range.guest_phys_addr,
            memory_size: range.memory_size,
            userspace_addr: range.userspace_addr,
            ..Default::default()
        };
        // SAFETY: as above.
        unsafe { vm.set_user_memory_region2(range) }
    };
    set.with_context(|| format!("setting memory slot {slot}"))
}

/// The guest's code is for x86-64. All else here is the same on arm64.
#[cfg(not(target_arch = "x86_64"))]
fn set_registers(_: &VcpuFd) -> anyhow::Result<()> {
    bail!(
        "this example's guest is not available on {}",
        std::env::consts::ARCH
    )
}

#[cfg(target_arch = "x86_64")]
fn set_registers(vcpu: &VcpuFd) -> anyhow::Result<()> {
    let mut sregs = vcpu.get_sregs()?;
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.get_regs()?;
    (regs.rip, regs.rflags) = (0, 2);
    Ok(vcpu.set_regs(&regs)?)
}
