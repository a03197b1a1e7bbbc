//! The guest on arm64: code at EL1 that reports by writes to addresses outside all memory.

use kvm_bindings::{
    KVM_REG_ARM_CORE, KVM_REG_ARM64, KVM_REG_ARM64_SYSREG, KVM_REG_SIZE_U64, kvm_regs,
    kvm_vcpu_init, user_pt_regs,
};
use pagetide_kvm::{BoundVcpu, Exit, Vcpu, Vm};
use pagetide_memory::GuestAddress;

use super::TABLES;

/// A round is over, and the host asked for a report.
const ROUND: GuestAddress = GuestAddress(0x4000_0000);
/// A page does not have its number.
const WRONG: GuestAddress = GuestAddress(0x4000_0008);
/// The word that a peek read.
const PEEKED: GuestAddress = GuestAddress(0x4000_0010);

// The guest. x0: its parameters, which nothing changes. Loads and stores are those of which the
// syndrome register has everything: KVM emulates no other outside memory.
core::arch::global_asm!(
    ".pushsection .rodata.kvm_test_guest, \"a\", %progbits",
    ".balign 4",
    ".globl kvm_test_guest_start, kvm_test_guest_peek, kvm_test_guest_end",
    "kvm_test_guest_start:",
    "   mov x6, #0x40000000",
    "   add x7, x0, #24",
    "2: ldr x1, [x0]",
    "   ldr x2, [x0, #8]",
    "   ldr x3, [x0, #16]",
    "   ldr x4, [x0, #40]",
    "3: ldr x5, [x1]",
    "   cmp x5, x3",
    "   b.ne 6f",
    "4: str x3, [x1, x4]",
    "   add x1, x1, #4096",
    "   add x3, x3, #1",
    "   subs x2, x2, #1",
    "   b.ne 3b",
    "   ldr x5, [x7]",
    "   add x5, x5, #1",
    "   stlr x5, [x7]",
    "   ldr x5, [x0, #32]",
    "   cbz x5, 2b",
    "   str x5, [x6]",
    "   b 2b",
    "6: str x5, [x6, #8]",
    "   b 4b",
    // One word, at x1.
    "kvm_test_guest_peek:",
    "   mov x6, #0x40000000",
    "7: ldr w5, [x1]",
    "   str w5, [x6, #16]",
    "   b 7b",
    "kvm_test_guest_end:",
    ".popsection",
);

/// A register of the processor's core, by its offset in `kvm_regs`.
const fn core_register(offset: usize) -> u64 {
    let words = (std::mem::offset_of!(kvm_regs, regs) + offset) / size_of::<u32>();
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE as u64 | words as u64
}

/// A system register, by the numbers in its encoding.
const fn system_register(op0: u64, op1: u64, crn: u64, crm: u64, op2: u64) -> u64 {
    let number = op0 << 14 | op1 << 11 | crn << 7 | crm << 3 | op2;
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM64_SYSREG as u64 | number
}

const X0: u64 = core_register(std::mem::offset_of!(user_pt_regs, regs));
const X1: u64 = core_register(std::mem::offset_of!(user_pt_regs, regs) + 8);
const PC: u64 = core_register(std::mem::offset_of!(user_pt_regs, pc));

const SCTLR_EL1: u64 = system_register(3, 0, 1, 0, 0);
const TTBR0_EL1: u64 = system_register(3, 0, 2, 0, 0);
const TCR_EL1: u64 = system_register(3, 0, 2, 0, 2);
const MAIR_EL1: u64 = system_register(3, 0, 10, 2, 0);

/// Write-back memory in attribute 0, device memory (nGnRE) in attribute 1.
const ATTRIBUTES: u64 = 0x04ff;
/// 39 bits of virtual address in TTBR0 alone, 4 KiB granules, write-back and shareable walks, 36 bits
/// of physical address.
const TRANSLATION: u64 = 25 | 1 << 8 | 1 << 10 | 3 << 12 | 25 << 16 | 1 << 23 | 1 << 32;
/// The bits that are always set, and M, C and I: translation and caches.
const CONTROL: u64 = 0x30d0_0800 | 1 | 1 << 2 | 1 << 12;

/// A block of the first level: valid, accessed before, shareable.
const BLOCK: u64 = 1 | 3 << 8 | 1 << 10;
/// A block of device memory, from which nothing executes.
const DEVICE: u64 = BLOCK | 1 << 2 | 3 << 53;

pub(super) fn prepare(_: &Vm) {}

/// The words of the page tables, by address: one table of 1 GiB blocks. The second GiB is where the
/// guest reports.
pub(super) fn page_tables() -> impl Iterator<Item = (u64, u64)> {
    (0..8).map(|index| {
        let attributes = if index == 1 { DEVICE } else { BLOCK };
        (TABLES + index * 8, index << 30 | attributes)
    })
}

/// Makes a new vCPU the kind of processor that this host has, which KVM_RUN requires.
pub(super) fn set_up(vm: &Vm, vcpu: &Vcpu) {
    let mut kind = kvm_vcpu_init::default();
    vm.fd()
        .get_preferred_target(&mut kind)
        .expect("a processor that KVM knows");
    vcpu.fd().vcpu_init(&kind).expect("a new vCPU");
    set(vcpu, MAIR_EL1, ATTRIBUTES);
    set(vcpu, TCR_EL1, TRANSLATION);
    set(vcpu, TTBR0_EL1, TABLES);
    set(vcpu, SCTLR_EL1, CONTROL);
}

fn set(vcpu: &Vcpu, register: u64, value: u64) {
    vcpu.fd()
        .set_one_reg(register, &value.to_le_bytes())
        .expect("a register");
}

/// Has the guest go on at `code`, with these parameters, and `at` as the address of a peek.
pub(super) fn start(vcpu: &Vcpu, code: u64, parameters: u64, at: u64) {
    set(vcpu, PC, code);
    set(vcpu, X0, parameters);
    set(vcpu, X1, at);
}

pub(super) fn is_round(exit: &Exit) -> bool {
    is_write(exit, ROUND)
}

pub(super) fn is_wrong(exit: &Exit) -> bool {
    is_write(exit, WRONG)
}

fn is_write(exit: &Exit, wanted: GuestAddress) -> bool {
    matches!(*exit, Exit::Mmio { gpa, write: true, .. } if gpa == wanted)
}

/// The word that a peek read, if that is what the exit reports.
pub(super) fn peeked(vcpu: &BoundVcpu<'_>, exit: &Exit) -> Option<u32> {
    let written = vcpu.written_mmio().filter(|_| is_write(exit, PEEKED))?;
    u32::try_from(written).ok()
}
