//! The state in which vCPUs start: the first one in 64-bit mode at the kernel's entry, the others
//! waiting for its start-up IPI, as the interrupt controller leaves them.

use std::io;

use kvm_bindings::{
    CpuId, KVM_MP_STATE_HALTED, KVM_MP_STATE_INIT_RECEIVED, KVM_MP_STATE_UNINITIALIZED, Msrs,
    kvm_msr_entry, kvm_regs,
};
use pagetide_kvm::Vcpu;

use crate::failure::SetupError;
use crate::x86_64::{CODE_DESCRIPTOR, DATA_DESCRIPTOR, LongMode, RFLAGS};

use super::layout::{BOOT_PARAMS, GDT, TABLES};

// The selectors that the boot protocol demands.
const BOOT_CS: u16 = 0x10;
const BOOT_DS: u16 = 0x18;

const MSR_MTRR_DEFAULT_TYPE: u32 = 0x2ff;
/// Enabled, write-back: as firmware leaves it. Without it kernels with CONFIG_MTRR give up the PAT.
const MTRR_WRITE_BACK: u64 = (1 << 11) | 6;

const INTERRUPT_FLAG: u64 = 1 << 9;

/// The boot processor's descriptors, as they lie at [`GDT`].
pub(super) fn descriptors() -> [u64; 4] {
    [0, 0, CODE_DESCRIPTOR, DATA_DESCRIPTOR]
}

/// What firmware sets on every processor.
pub(super) fn set_msrs(vcpu: &Vcpu) -> Result<(), SetupError> {
    let entry = kvm_msr_entry {
        index: MSR_MTRR_DEFAULT_TYPE,
        data: MTRR_WRITE_BACK,
        ..kvm_msr_entry::default()
    };
    let failed = SetupError::on_vcpu(vcpu.id(), "KVM_SET_MSRS");
    let Ok(msrs) = Msrs::from_entries(&[entry]) else {
        return Err(failed(io::ErrorKind::OutOfMemory.into()));
    };
    // A KVM without that register has guests that do without it.
    vcpu.set_msrs(&msrs).map_err(failed).map(|_| ())
}

/// Has the guest's time stamp counter run at the host's rate, as KVM knows it now.
///
/// KVM gives a new vCPU the rate that it found when it was loaded. On a host that has corrected its
/// rate since, and that cannot scale counters, it fails to, and goes on with a counter that stands
/// still for itself and runs for the guest: each of the guest's deadlines is then late by the
/// host's uptime. Seen in QEMU's software CPU.
pub(super) fn set_tsc_rate(vcpu: &Vcpu) {
    const AS_THE_HOST: u32 = 0;
    if let Err(errno) = vcpu.fd().set_tsc_khz(AS_THE_HOST) {
        // Then KVM's own choice stays, which usually is the same.
        tracing::debug!("vCPU {}: KVM_SET_TSC_KHZ failed: {errno}", vcpu.id());
    }
}

/// Switches on what extended state KVM offers, as the guest will.
///
/// KVM tells the size of the state that is on by CPUID, and learns of a change when the guest makes
/// it; QEMU's software CPU does not tell it of that.
pub(super) fn set_extended_state(vcpu: &Vcpu, cpuid: &CpuId) -> Result<(), SetupError> {
    const STATE_COMPONENTS: u32 = 0xd;
    let id = vcpu.id();
    let offered = cpuid
        .as_slice()
        .iter()
        .find(|entry| entry.function == STATE_COMPONENTS && entry.index == 0)
        .map_or(0, |entry| {
            (u64::from(entry.edx) << 32) | u64::from(entry.eax)
        });
    // Without XSAVE there is nothing to switch on.
    let Some(xcrs) = (offered != 0).then(|| vcpu.fd().get_xcrs()) else {
        return Ok(());
    };
    let mut xcrs = xcrs.map_err(SetupError::on_vcpu(id, "KVM_GET_XCRS"))?;
    for xcr in &mut xcrs.xcrs {
        if xcr.xcr == 0 {
            xcr.value = offered;
        }
    }
    vcpu.fd()
        .set_xcrs(&xcrs)
        .map_err(SetupError::on_vcpu(id, "KVM_SET_XCRS"))
}

/// Puts the boot processor at the kernel's 64-bit entry.
pub(super) fn enter_kernel(vcpu: &Vcpu, entry: u64) -> Result<(), SetupError> {
    let id = vcpu.id();
    let mut sregs = vcpu
        .sregs()
        .map_err(SetupError::on_vcpu(id, "KVM_GET_SREGS"))?;
    LongMode {
        code: BOOT_CS,
        data: BOOT_DS,
        gdt: GDT,
        gdt_entries: 4,
        tables: TABLES,
    }
    .put_into(&mut sregs);
    vcpu.set_sregs(&sregs)
        .map_err(SetupError::on_vcpu(id, "KVM_SET_SREGS"))?;
    let regs = kvm_regs {
        rip: entry,
        rsi: BOOT_PARAMS,
        rflags: RFLAGS,
        ..kvm_regs::default()
    };
    vcpu.set_regs(&regs)
        .map_err(SetupError::on_vcpu(id, "KVM_SET_REGS"))
}

/// Whether a vCPU will never run again by itself: it waits to be started, or halted with its
/// interrupts off.
pub(super) fn is_dead(vcpu: &Vcpu) -> Result<bool, SetupError> {
    let state = vcpu
        .fd()
        .get_mp_state()
        .map_err(SetupError::on_vcpu(vcpu.id(), "KVM_GET_MP_STATE"))?;
    match state.mp_state {
        KVM_MP_STATE_UNINITIALIZED | KVM_MP_STATE_INIT_RECEIVED => Ok(true),
        KVM_MP_STATE_HALTED => {
            let regs = vcpu
                .regs()
                .map_err(SetupError::on_vcpu(vcpu.id(), "KVM_GET_REGS"))?;
            Ok(regs.rflags & INTERRUPT_FLAG == 0)
        }
        _ => Ok(false),
    }
}
