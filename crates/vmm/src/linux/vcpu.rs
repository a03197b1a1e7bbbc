//! The vCPUs' state at the start: the first one is in 64-bit mode at the kernel's entry, the others wait for
//! its start-up IPI.

use std::io;

use kvm_bindings::{
    CpuId, KVM_MP_STATE_HALTED, KVM_MP_STATE_INIT_RECEIVED, KVM_MP_STATE_UNINITIALIZED, Msrs,
    kvm_msr_entry, kvm_regs,
};
use pagetide_kvm::Vcpu;

use crate::setup::SetupError;
use crate::x86_64::{CODE_DESCRIPTOR, DATA_DESCRIPTOR, LongMode};

use super::layout::{BOOT_PARAMS, GDT, TABLES};

// The selectors that the boot protocol demands.
const BOOT_CS: u16 = 0x10;
const BOOT_DS: u16 = 0x18;

const MSR_MTRR_DEFAULT_TYPE: u32 = 0x2ff;
/// Enabled, write-back, as firmware sets it. Without it kernels with CONFIG_MTRR disable the PAT.
const MTRR_WRITE_BACK: u64 = (1 << 11) | 6;

const INTERRUPT_FLAG: u64 = 1 << 9;

/// The boot processor's descriptors, for memory at [`GDT`].
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
    // If KVM lacks this register, guests do not use it.
    vcpu.set_msrs(&msrs).map_err(failed).map(|_| ())
}

/// Sets the rate of the guest's time stamp counter to the host's, as KVM knows it now.
///
/// KVM gives a new vCPU the rate that it measured when it was loaded. If the host has corrected its rate
/// since, and cannot scale counters, KVM fails to set that rate, and computes with a counter that stands
/// still while the guest's counter runs: each of the guest's deadlines is then late by the host's uptime.
/// Seen in QEMU's software CPU.
pub(super) fn set_tsc_rate(vcpu: &Vcpu) {
    const AS_THE_HOST: u32 = 0;
    if let Err(errno) = vcpu.fd().set_tsc_khz(AS_THE_HOST) {
        // KVM's own choice remains, which usually is the same.
        tracing::debug!("vCPU {}: KVM_SET_TSC_KHZ failed: {errno}", vcpu.id());
    }
}

/// Enables all extended state that KVM offers, as the guest will do.
///
/// CPUID reports the size of the enabled state, and KVM updates it when the guest enables more. In QEMU's
/// software CPU, KVM does not notice when the guest does so.
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
    // Without XSAVE there is nothing to enable.
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
    let mode = LongMode {
        code: BOOT_CS,
        data: BOOT_DS,
        gdt: GDT,
        gdt_entries: 4,
        tables: TABLES,
        ..LongMode::default()
    };
    let regs = kvm_regs {
        rip: entry,
        rsi: BOOT_PARAMS,
        ..kvm_regs::default()
    };
    mode.enter(vcpu, regs)
}

/// Whether a vCPU will not run again by itself: it waits for its start, or is halted with interrupts off.
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
