//! The state in which vCPUs enter a payload: 64-bit mode, flat segments, interrupts off.

use kvm_bindings::{
    KVM_MP_STATE_RUNNABLE, Msrs, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_vcpu_events,
};
use pagetide_kvm::Vcpu;
use pagetide_vmm::SetupError;
use pagetide_vmm::x86_64::{CODE_DESCRIPTOR, DATA_DESCRIPTOR, LongMode};

use crate::error::MachineError;
use crate::layout::{CODE, GDT, IDT, Layout, PAYLOAD, TABLES};
use crate::low_memory::LowMemory;
use crate::payload::workload;

/// Where the workload is entered.
pub(crate) const WORKLOAD: u64 = CODE;

const CODE_SELECTOR: u16 = 0x08;
const DATA_SELECTOR: u16 = 0x10;
const VECTORS: u16 = 32;

/// Copies the workload with its exception handlers, a payload, and the descriptor tables to low memory.
pub(crate) fn write_code(low: &LowMemory, payload: &[u8]) -> Result<(), MachineError> {
    low.write(CODE, workload::code())?;
    low.write(PAYLOAD, payload)?;
    low.write_words(GDT, &[0, CODE_DESCRIPTOR, DATA_DESCRIPTOR])?;
    let stubs = CODE + workload::vectors();
    let gates = (0..VECTORS).flat_map(|vector| interrupt_gate(stubs + u64::from(vector) * 16));
    low.write_words(IDT, &gates.collect::<Vec<_>>())
}

/// A present 64-bit interrupt gate to `handler`.
fn interrupt_gate(handler: u64) -> [u64; 2] {
    const PRESENT_INTERRUPT_GATE: u64 = 0x8e00 << 32;
    let low = (handler & 0xffff)
        | (u64::from(CODE_SELECTOR) << 16)
        | PRESENT_INTERRUPT_GATE
        | ((handler & 0xffff_0000) << 32);
    [low, handler >> 32]
}

/// Puts a vCPU at the start of the code at `rip`.
pub(crate) fn reset(vcpu: &Vcpu, layout: &Layout, rip: u64) -> Result<(), MachineError> {
    let id = vcpu.id();
    let mode = LongMode {
        code: CODE_SELECTOR,
        data: DATA_SELECTOR,
        gdt: GDT,
        gdt_entries: 3,
        idt: IDT,
        idt_entries: VECTORS,
        tables: TABLES,
    };
    let regs = kvm_regs {
        rip,
        rsp: layout.stack_end(id.into()),
        rdi: layout.params(id.into()),
        ..kvm_regs::default()
    };
    mode.enter(vcpu, regs)?;
    // A failed run may have left events pending.
    vcpu.fd()
        .set_vcpu_events(&kvm_vcpu_events::default())
        .map_err(SetupError::on_vcpu(id, "KVM_SET_VCPU_EVENTS"))?;
    // With an in-kernel interrupt controller all but vCPU 0 would wait for a start-up IPI.
    let runnable = kvm_mp_state {
        mp_state: KVM_MP_STATE_RUNNABLE,
    };
    let set = vcpu.fd().set_mp_state(runnable);
    Ok(set.map_err(SetupError::on_vcpu(id, "KVM_SET_MP_STATE"))?)
}

/// Continues a vCPU at another address.
pub(crate) fn enter_at(vcpu: &Vcpu, rip: u64) -> Result<(), MachineError> {
    let id = vcpu.id();
    let regs = vcpu
        .regs()
        .map_err(SetupError::on_vcpu(id, "KVM_GET_REGS"))?;
    let set = vcpu.set_regs(&kvm_regs { rip, ..regs });
    Ok(set.map_err(SetupError::on_vcpu(id, "KVM_SET_REGS"))?)
}

/// Enables KVM's steal time structure of a vCPU at `gpa`, a multiple of 64 (MSR_KVM_STEAL_TIME, as the
/// guest itself would); false if this KVM has none.
pub(crate) fn enable_steal_time(vcpu: &Vcpu, gpa: u64) -> Result<bool, MachineError> {
    const MSR_KVM_STEAL_TIME: u32 = 0x4b56_4d03;
    const ENABLED: u64 = 1;
    let entry = kvm_msr_entry {
        index: MSR_KVM_STEAL_TIME,
        data: gpa | ENABLED,
        ..kvm_msr_entry::default()
    };
    let Ok(msrs) = Msrs::from_entries(&[entry]) else {
        return Ok(false);
    };
    let set = vcpu.set_msrs(&msrs);
    let set = set.map_err(SetupError::on_vcpu(vcpu.id(), "KVM_SET_MSRS"))?;
    Ok(set == 1)
}

/// The frequency of the guest's time stamp counter, in kHz.
pub(crate) fn tsc_khz(vcpu: &Vcpu) -> Result<u32, MachineError> {
    let khz = vcpu.fd().get_tsc_khz();
    Ok(khz.map_err(SetupError::on_vcpu(vcpu.id(), "KVM_GET_TSC_KHZ"))?)
}

/// The instruction pointer, and the address of the page that the workload touches or touched last
/// (in rsi, see workload.s).
pub(crate) fn position(vcpu: &Vcpu) -> Option<(u64, u64)> {
    vcpu.fd().get_regs().ok().map(|regs| (regs.rip, regs.rsi))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_point_at_their_handlers() {
        let [low, high] = interrupt_gate(0x1234_5678_9abc_def0);
        let offset = (low & 0xffff) | ((low >> 32) & 0xffff_0000) | (high << 32);
        assert_eq!(offset, 0x1234_5678_9abc_def0);
        assert_eq!((low >> 16) & 0xffff, u64::from(CODE_SELECTOR));
        assert_eq!((low >> 40) & 0xff, 0x8e);
    }
}
