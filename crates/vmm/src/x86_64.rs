//! x86-64 guests: the processor that KVM emulates, and 64-bit mode without firmware.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};
use pagetide_kvm::{Kvm, Vcpu, Vm};

use crate::setup::SetupError;

// Flat 64-bit descriptors, present, ring 0, accessed; see the AMD64 manual, volume 2, 4.7 and 4.8.
/// The descriptor of a flat 64-bit code segment.
pub const CODE_DESCRIPTOR: u64 = 0x00af_9b00_0000_ffff;
/// The descriptor of a flat data segment.
pub const DATA_DESCRIPTOR: u64 = 0x00cf_9300_0000_ffff;

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
const RFLAGS: u64 = 1 << 1;

/// Three pages for KVM on Intel processors, just below the addresses of a PC's firmware.
const TSS_ADDRESS: usize = 0xfffb_d000;

/// The processor that KVM emulates, the same for every vCPU of a VM.
#[derive(Debug)]
pub struct Platform {
    cpuid: CpuId,
}

impl Platform {
    /// Creates a VM with the signals that kick vCPUs, and its interrupt controllers.
    ///
    /// # Errors
    /// KVM cannot be used, or refuses an ioctl.
    pub fn create_vm() -> Result<(Kvm, Vm, Self), SetupError> {
        let kvm = Kvm::open()?;
        let vm = kvm.create_vm_with_signals()?;
        let platform = Self::new(&kvm, &vm)?;
        Ok((kvm, vm, platform))
    }

    /// Reads what KVM supports, and creates the VM's interrupt controllers.
    ///
    /// # Errors
    /// KVM refuses an ioctl.
    pub fn new(kvm: &Kvm, vm: &Vm) -> Result<Self, SetupError> {
        let cpuid = kvm
            .fd()
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(SetupError::on_vm("KVM_GET_SUPPORTED_CPUID"))?;
        vm.fd()
            .set_tss_address(TSS_ADDRESS)
            .map_err(SetupError::on_vm("KVM_SET_TSS_ADDR"))?;
        vm.fd()
            .create_irq_chip()
            .map_err(SetupError::on_vm("KVM_CREATE_IRQCHIP"))?;
        Ok(Self { cpuid })
    }

    /// The entries of KVM_GET_SUPPORTED_CPUID.
    #[must_use]
    pub fn cpuid(&self) -> &CpuId {
        &self.cpuid
    }

    /// The first gpa that the guest's processor cannot address.
    #[must_use]
    pub fn gpa_limit(&self) -> u64 {
        let mut entries = self.cpuid.as_slice().iter();
        let sizes = entries.find(|entry| entry.function == 0x8000_0008);
        1 << sizes.map_or(36, |entry| entry.eax & 0xff).clamp(32, 47)
    }

    /// Sets what is set once in a vCPU's life.
    ///
    /// # Errors
    /// KVM refuses an ioctl.
    pub fn prepare(&self, vcpu: &Vcpu) -> Result<(), SetupError> {
        vcpu.fd()
            .set_cpuid2(&self.cpuid)
            .map_err(SetupError::on_vcpu(vcpu.id(), "KVM_SET_CPUID2"))
    }
}

fn segment(selector: u16, type_: u8, long: bool) -> kvm_segment {
    kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        db: u8::from(!long),
        s: 1,
        l: u8::from(long),
        g: 1,
        ..kvm_segment::default()
    }
}

fn table(base: u64, bytes: u16) -> kvm_dtable {
    kvm_dtable {
        base,
        limit: bytes.saturating_sub(1),
        ..kvm_dtable::default()
    }
}

/// 64-bit mode with flat segments and interrupts off. All addresses are gpas.
#[derive(Clone, Copy, Debug, Default)]
pub struct LongMode {
    /// The selector of the code segment ([`CODE_DESCRIPTOR`]).
    pub code: u16,
    /// The selector of the data segments ([`DATA_DESCRIPTOR`]).
    pub data: u16,
    /// The address of the GDT.
    pub gdt: u64,
    /// Its entries, of 8 bytes each.
    pub gdt_entries: u16,
    /// The address of the IDT.
    pub idt: u64,
    /// Its entries, of 16 bytes each.
    pub idt_entries: u16,
    /// The address of the top page table.
    pub tables: u64,
}

impl LongMode {
    /// Puts a vCPU in this mode, with these general registers.
    ///
    /// # Errors
    /// KVM refuses an ioctl.
    pub fn enter(&self, vcpu: &Vcpu, regs: kvm_regs) -> Result<(), SetupError> {
        let id = vcpu.id();
        let mut sregs = vcpu
            .sregs()
            .map_err(SetupError::on_vcpu(id, "KVM_GET_SREGS"))?;
        self.put_into(&mut sregs);
        vcpu.set_sregs(&sregs)
            .map_err(SetupError::on_vcpu(id, "KVM_SET_SREGS"))?;
        let rflags = RFLAGS;
        vcpu.set_regs(&kvm_regs { rflags, ..regs })
            .map_err(SetupError::on_vcpu(id, "KVM_SET_REGS"))
    }

    fn put_into(&self, sregs: &mut kvm_sregs) {
        sregs.cs = segment(self.code, 0xb, true);
        let data = segment(self.data, 0x3, false);
        (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
        // A busy 64-bit TSS, which Intel processors require; nothing uses it.
        sregs.tr = kvm_segment {
            s: 0,
            g: 0,
            db: 0,
            limit: 0xffff,
            ..segment(0, 0xb, false)
        };
        sregs.ldt = kvm_segment {
            unusable: 1,
            ..kvm_segment::default()
        };
        sregs.gdt = table(self.gdt, self.gdt_entries * 8);
        sregs.idt = table(self.idt, self.idt_entries * 16);
        sregs.interrupt_bitmap = [0; 4];
        sregs.cr0 = CR0_PE | CR0_MP | CR0_ET | CR0_NE | CR0_WP | CR0_PG;
        sregs.cr2 = 0;
        sregs.cr3 = self.tables;
        sregs.cr4 = CR4_PAE;
        sregs.efer = EFER_LME | EFER_LMA;
    }
}
