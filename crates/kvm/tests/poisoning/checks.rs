//! A guest that accesses a given address, and handles machine checks.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use pagetide_kvm::poison::{MachineCheck, MachineCheckForm, prepare_cpuid};
use pagetide_kvm::{BoundVcpu, Exit, Kvm, Vcpu};
use pagetide_memory::PageIndex;

use crate::guest::{DATA_PAGES, Machine, PAGE};

/// The addresses of the guest's handler and its data in low memory.
const GDT: u64 = 0x1_0000;
const IDT: u64 = 0x1_1000;
pub(crate) const TEXT: u64 = 0x1_2000;
const STACK_TOP: u64 = 0x1_5000;
const LOG: u64 = 0x1_5000;

/// The handler of machine checks has run.
pub(crate) const CHECKED: u16 = 0x12;
/// The value that a failed access leaves in the register.
pub(crate) const SURVIVED: u32 = 0x5afe;

// The guest. rsi: the address to access. The handler logs the registers of bank 9 and of all banks,
// clears them, and continues after the instruction that failed.
core::arch::global_asm!(
    ".pushsection .rodata.kvm_test_poison, \"a\", @progbits",
    ".globl kvm_test_poison_start, kvm_test_poison_handler, kvm_test_poison_end",
    "kvm_test_poison_start:",
    "2: mov rax, [rsi]",
    "   out 0x11, eax",
    "   jmp 2b",
    "kvm_test_poison_handler:",
    "   mov edi, 0x15000",
    "   mov ebx, 0x425",
    "3: mov ecx, ebx",
    "   rdmsr",
    "   mov [rdi], eax",
    "   mov [rdi + 4], edx",
    "   add edi, 8",
    "   inc ebx",
    "   cmp ebx, 0x428",
    "   jb 3b",
    "   mov ecx, 0x17a",
    "   rdmsr",
    "   mov [rdi], eax",
    "   mov [rdi + 4], edx",
    "   xor eax, eax",
    "   xor edx, edx",
    "   wrmsr",
    "   mov ecx, 0x425",
    "   wrmsr",
    "   mov eax, [rsp]",
    "   out 0x12, eax",
    "   mov eax, 0x5afe",
    "   add qword ptr [rsp], 3",
    "   iretq",
    "kvm_test_poison_end:",
    ".popsection",
);

unsafe extern "C" {
    static kvm_test_poison_start: u8;
    static kvm_test_poison_handler: u8;
    static kvm_test_poison_end: u8;
}

fn text() -> (&'static [u8], u64) {
    let start = &raw const kvm_test_poison_start;
    let handler = (&raw const kvm_test_poison_handler).addr() - start.addr();
    let end = (&raw const kvm_test_poison_end).addr() - start.addr();
    // SAFETY: both are in one section of read-only data, in this order, and are never freed.
    let text = unsafe { std::slice::from_raw_parts(start, end) };
    (text, TEXT + handler as u64)
}

/// A CPUID with another vendor's name.
fn cpuid_of(vendor: &[u8; 12]) -> CpuId {
    let kvm = Kvm::open().expect("it was there");
    let mut cpuid = kvm
        .fd()
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .expect("some");
    let word = |index: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| vendor[4 * index + byte]));
    for leaf in cpuid.as_mut_slice() {
        if leaf.function == 0 {
            (leaf.ebx, leaf.edx, leaf.ecx) = (word(0), word(1), word(2));
        }
    }
    cpuid
}

/// A vCPU that handles machine checks in this vendor's form.
pub(crate) fn vcpu(machine: &Machine, id: u32, vendor: &[u8; 12]) -> (Vcpu, MachineCheckForm) {
    let vcpu = machine.vcpu(id, 0, DATA_PAGES);
    let mut cpuid = cpuid_of(vendor);
    let form = prepare_cpuid(&mut cpuid).expect("room");
    vcpu.fd().set_cpuid2(&cpuid).expect("its own");
    assert_eq!(vcpu.enable_machine_checks().expect("KVM has them"), form);

    let (text, handler) = text();
    machine.write(TEXT, text);
    let word = |at: u64, value: u64| machine.write(at, &value.to_le_bytes());
    word(GDT + 8, 0x00af_9b00_0000_ffff);
    word(GDT + 16, 0x00cf_9300_0000_ffff);
    // A gate of an interrupt, present, through the code segment.
    word(
        IDT + 18 * 16,
        handler & 0xffff | 8 << 16 | 0x8e << 40 | handler >> 16 << 48,
    );
    word(IDT + 18 * 16 + 8, 0);
    let mut sregs = vcpu.sregs().expect("registers");
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, 23);
    (sregs.idt.base, sregs.idt.limit) = (IDT, 19 * 16 - 1);
    sregs.cr4 |= 1 << 6;
    vcpu.set_sregs(&sregs).expect("machine checks on");
    (vcpu, form)
}

/// Makes the guest read the word at `gpa`, and returns its exit.
pub(crate) fn touch(vcpu: &mut BoundVcpu<'_>, gpa: u64) -> Exit {
    vcpu.complete_io().expect("at most an OUT");
    let mut regs = vcpu.regs().expect("registers");
    (regs.rip, regs.rsi, regs.rsp, regs.rflags) = (TEXT, gpa, STACK_TOP, 2);
    vcpu.set_regs(&regs).expect("registers");
    vcpu.run().expect("no failure")
}

pub(crate) fn logged(machine: &Machine) -> MachineCheck {
    let word = |index: u64| {
        let mut bytes = [0; 8];
        machine
            .low
            .read_service(PageIndex(LOG / PAGE), index * 8, &mut bytes)
            .expect("low memory");
        u64::from_le_bytes(bytes)
    };
    MachineCheck {
        status: word(0),
        addr: word(1),
        misc: word(2),
        mcg_status: word(3),
    }
}
