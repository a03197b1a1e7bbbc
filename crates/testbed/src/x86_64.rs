//! The state in which vCPUs enter the guest: long mode, flat segments, interrupts off.

use std::io;

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_MP_STATE_RUNNABLE, Msrs, kvm_dtable, kvm_mp_state,
    kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs, kvm_vcpu_events,
};
use pagetide_kvm::{Kvm, Vcpu, Vm};

use crate::error::MachineError;
use crate::guest;
use crate::layout::{CODE, GDT, IDT, Layout, TABLES};

const CODE_SELECTOR: u16 = 0x08;
const DATA_SELECTOR: u16 = 0x10;

// Flat 64-bit descriptors, present, ring 0, accessed; see the AMD64 manual, volume 2, 4.7 and 4.8.
pub(crate) const CODE_DESCRIPTOR: u64 = 0x00af_9b00_0000_ffff;
pub(crate) const DATA_DESCRIPTOR: u64 = 0x00cf_9300_0000_ffff;

const CR0_PE: u64 = 1 << 0;
const CR0_MP: u64 = 1 << 1;
const CR0_ET: u64 = 1 << 4;
const CR0_NE: u64 = 1 << 5;
const CR0_WP: u64 = 1 << 16;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// Bit 1 is always set; interrupts are off.
pub(crate) const RFLAGS: u64 = 1 << 1;

/// Three pages for KVM on Intel processors, just below the firmware's place.
const TSS_ADDRESS: usize = 0xfffb_d000;

/// What KVM can emulate of the processor, for every vCPU alike.
#[derive(Debug)]
pub(crate) struct Platform {
    cpuid: CpuId,
}

impl Platform {
    /// Asks KVM, and gives the VM its interrupt controllers.
    pub(crate) fn new(kvm: &Kvm, vm: &Vm) -> Result<Self, MachineError> {
        let failed = |operation| {
            move |errno: kvm_ioctls::Error| MachineError::Setup {
                operation,
                source: io::Error::from(errno),
            }
        };
        let cpuid = kvm
            .fd()
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(failed("KVM_GET_SUPPORTED_CPUID"))?;
        vm.fd()
            .set_tss_address(TSS_ADDRESS)
            .map_err(failed("KVM_SET_TSS_ADDR"))?;
        vm.fd()
            .create_irq_chip()
            .map_err(failed("KVM_CREATE_IRQCHIP"))?;
        Ok(Self { cpuid })
    }

    /// What KVM_GET_SUPPORTED_CPUID said.
    pub(crate) fn cpuid(&self) -> &CpuId {
        &self.cpuid
    }

    /// The first gpa that the guest's processor cannot address.
    pub(crate) fn gpa_limit(&self) -> u64 {
        let bits = self
            .cpuid
            .as_slice()
            .iter()
            .find(|entry| entry.function == 0x8000_0008)
            .map_or(36, |entry| entry.eax & 0xff);
        1 << bits.clamp(32, 47)
    }

    /// What is set once in a vCPU's life.
    pub(crate) fn prepare(&self, vcpu: &Vcpu) -> Result<(), MachineError> {
        vcpu.fd()
            .set_cpuid2(&self.cpuid)
            .map_err(|errno| setup(vcpu.id(), "KVM_SET_CPUID2", errno))
    }
}

pub(crate) fn setup(vcpu: u32, operation: &'static str, errno: kvm_ioctls::Error) -> MachineError {
    MachineError::VcpuSetup {
        vcpu,
        operation,
        source: io::Error::from(errno),
    }
}

/// The GDT and the IDT, as (gpa, content) to be written to low memory.
pub(crate) fn descriptor_tables() -> [(u64, Vec<u64>); 2] {
    let gdt = vec![0, CODE_DESCRIPTOR, DATA_DESCRIPTOR];
    let idt = (0..32)
        .flat_map(|vector| interrupt_gate(CODE + guest::vectors_offset() + vector * 16))
        .collect();
    [(GDT, gdt), (IDT, idt)]
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

fn segment(selector: u16, type_: u8, long: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        dpl: 0,
        db: u8::from(!long),
        s: 1,
        l: u8::from(long),
        g: 1,
        avl: 0,
        unusable: 0,
        padding: 0,
    }
}

/// 64-bit mode with flat segments: where a GDT has them, and the page tables' address.
pub(crate) struct LongMode {
    pub(crate) code: u16,
    pub(crate) data: u16,
    pub(crate) gdt: u64,
    pub(crate) gdt_entries: u16,
    pub(crate) tables: u64,
}

impl LongMode {
    /// Sets all but the interrupts' registers.
    pub(crate) fn put_into(&self, sregs: &mut kvm_sregs) {
        sregs.cs = segment(self.code, 0xb, true);
        let data = segment(self.data, 0x3, false);
        (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
        // A busy 64-bit TSS, which Intel processors insist on; nothing uses it.
        sregs.tr = kvm_segment {
            s: 0,
            g: 0,
            db: 0,
            limit: 0xffff,
            ..segment(0, 0xb, false)
        };
        sregs.ldt = kvm_segment {
            unusable: 1,
            present: 0,
            ..kvm_segment::default()
        };
        sregs.gdt = kvm_dtable {
            base: self.gdt,
            limit: self.gdt_entries * 8 - 1,
            ..kvm_dtable::default()
        };
        sregs.cr0 = CR0_PE | CR0_MP | CR0_ET | CR0_NE | CR0_WP | CR0_PG;
        sregs.cr2 = 0;
        sregs.cr3 = self.tables;
        sregs.cr4 = CR4_PAE;
        sregs.efer = EFER_LME | EFER_LMA;
    }
}

/// Puts a vCPU at the start of the workload.
pub(crate) fn reset(vcpu: &Vcpu, layout: &Layout) -> Result<(), MachineError> {
    let id = vcpu.id();
    let fd = vcpu.fd();
    let mut sregs = fd
        .get_sregs()
        .map_err(|errno| setup(id, "KVM_GET_SREGS", errno))?;
    LongMode {
        code: CODE_SELECTOR,
        data: DATA_SELECTOR,
        gdt: GDT,
        gdt_entries: 3,
        tables: TABLES,
    }
    .put_into(&mut sregs);
    sregs.idt = kvm_dtable {
        base: IDT,
        limit: 32 * 16 - 1,
        ..kvm_dtable::default()
    };
    sregs.interrupt_bitmap = [0; 4];
    fd.set_sregs(&sregs)
        .map_err(|errno| setup(id, "KVM_SET_SREGS", errno))?;
    let regs = kvm_regs {
        rip: CODE,
        rsp: layout.stack_end(id.into()),
        rdi: layout.params(id.into()),
        rflags: RFLAGS,
        ..kvm_regs::default()
    };
    fd.set_regs(&regs)
        .map_err(|errno| setup(id, "KVM_SET_REGS", errno))?;
    // Whatever a failed run left pending.
    fd.set_vcpu_events(&kvm_vcpu_events::default())
        .map_err(|errno| setup(id, "KVM_SET_VCPU_EVENTS", errno))?;
    // With an in-kernel interrupt controller all but vCPU 0 would wait for a start-up IPI.
    fd.set_mp_state(kvm_mp_state {
        mp_state: KVM_MP_STATE_RUNNABLE,
    })
    .map_err(|errno| setup(id, "KVM_SET_MP_STATE", errno))
}

/// Lets a vCPU that was [`reset`] enter at another address.
pub(crate) fn enter_at(vcpu: &Vcpu, rip: u64) -> Result<(), MachineError> {
    let failed = |operation| {
        move |source| MachineError::VcpuSetup {
            vcpu: vcpu.id(),
            operation,
            source,
        }
    };
    let mut regs = vcpu.regs().map_err(failed("KVM_GET_REGS"))?;
    regs.rip = rip;
    vcpu.set_regs(&regs).map_err(failed("KVM_SET_REGS"))
}

/// Has KVM write the time stolen from a vCPU to `gpa`, a multiple of 64 (MSR_KVM_STEAL_TIME, as
/// the guest itself would); false if this KVM does not.
pub(crate) fn tell_steal_time(vcpu: &Vcpu, gpa: u64) -> Result<bool, MachineError> {
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
    let set = vcpu
        .set_msrs(&msrs)
        .map_err(|source| MachineError::VcpuSetup {
            vcpu: vcpu.id(),
            operation: "KVM_SET_MSRS",
            source,
        })?;
    Ok(set == 1)
}

/// The frequency of the guest's time stamp counter, in kHz.
pub(crate) fn tsc_khz(vcpu: &Vcpu) -> Result<u32, MachineError> {
    vcpu.fd()
        .get_tsc_khz()
        .map_err(|errno| setup(vcpu.id(), "KVM_GET_TSC_KHZ", errno))
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
