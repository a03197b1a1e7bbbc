//! The guest on x86-64: 64-bit code that reports by OUT.

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment};
use pagetide_kvm::{BoundVcpu, Exit, Kvm, Vcpu, Vm};

use super::{PAGE, TABLES};

/// The guest's ports, and what it writes there.
pub(crate) const REPORT: u16 = 0x10;
pub(crate) const PEEKED: u16 = 0x11;
/// A round is over, and the host asked for a report.
const ROUND: u32 = 1;
/// A page does not have its number.
const WRONG: u32 = 2;

// The guest. rdi: its parameters, which nothing changes.
core::arch::global_asm!(
    ".pushsection .rodata.kvm_test_guest, \"a\", @progbits",
    ".globl kvm_test_guest_start, kvm_test_guest_peek, kvm_test_guest_end",
    "kvm_test_guest_start:",
    "2: mov rsi, [rdi]",
    "   mov rcx, [rdi + 8]",
    "   mov rbx, [rdi + 16]",
    "   mov rdx, [rdi + 40]",
    "3: cmp [rsi], rbx",
    "   jne 6f",
    "4: mov [rsi + rdx], rbx",
    "   add rsi, 4096",
    "   inc rbx",
    "   dec rcx",
    "   jnz 3b",
    "   inc qword ptr [rdi + 24]",
    "   cmp qword ptr [rdi + 32], 0",
    "   je 2b",
    "   mov eax, 1",
    "   out 0x10, eax",
    "   jmp 2b",
    "6: mov eax, 2",
    "   out 0x10, eax",
    "   jmp 4b",
    // One word, at rsi.
    "kvm_test_guest_peek:",
    "   mov eax, [rsi]",
    "   out 0x11, eax",
    "   jmp kvm_test_guest_peek",
    "kvm_test_guest_end:",
    ".popsection",
);

/// Some processors need a place for KVM's own use; where it is not needed it may be refused.
pub(super) fn prepare(vm: &Vm) {
    let _ = vm.fd().set_tss_address(0xfffb_d000);
}

/// The words of the page tables, by address: the first GiB in 2 MiB pages.
pub(super) fn page_tables() -> impl Iterator<Item = (u64, u64)> {
    let upper = [
        (TABLES, (TABLES + PAGE) | 0x23),
        (TABLES + PAGE, (TABLES + 2 * PAGE) | 0x23),
    ];
    let pages = (0..512).map(|index| (TABLES + 2 * PAGE + index * 8, (index << 21) | 0xe3));
    upper.into_iter().chain(pages)
}

/// Gives a new vCPU all registers but those of [`start`].
pub(super) fn set_up(_: &Vm, vcpu: &Vcpu) {
    let kvm = Kvm::open().expect("it was there");
    let cpuid = kvm.fd().get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
    vcpu.fd()
        .set_cpuid2(&cpuid.expect("some"))
        .expect("its own");
    let mut sregs = vcpu.sregs().expect("registers");
    let segment = |selector, type_, long: bool| kvm_segment {
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        db: u8::from(!long),
        s: 1,
        l: u8::from(long),
        g: 1,
        ..kvm_segment::default()
    };
    sregs.cs = segment(8, 0xb, true);
    let data = segment(16, 3, false);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = kvm_segment {
        s: 0,
        g: 0,
        db: 0,
        limit: 0xffff,
        ..segment(0, 0xb, false)
    };
    (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (0x8001_0033, TABLES, 0x20, 0x500);
    vcpu.set_sregs(&sregs).expect("long mode");
}

/// Has the guest go on at `code`, with these parameters, and `at` as the address of a peek.
pub(super) fn start(vcpu: &Vcpu, code: u64, parameters: u64, at: u64) {
    let regs = kvm_regs {
        rip: code,
        rsi: at,
        rdi: parameters,
        rflags: 2,
        ..kvm_regs::default()
    };
    vcpu.set_regs(&regs).expect("registers");
}

pub(super) fn is_round(exit: &Exit) -> bool {
    is_report(exit, ROUND)
}

pub(super) fn is_wrong(exit: &Exit) -> bool {
    is_report(exit, WRONG)
}

fn is_report(exit: &Exit, wanted: u32) -> bool {
    matches!(*exit, Exit::IoOut { port: REPORT, data } if data == wanted)
}

/// The word that a peek read, if that is what the exit reports.
pub(super) fn peeked(_: &BoundVcpu<'_>, exit: &Exit) -> Option<u32> {
    match *exit {
        Exit::IoOut { port: PEEKED, data } => Some(data),
        _ => None,
    }
}
