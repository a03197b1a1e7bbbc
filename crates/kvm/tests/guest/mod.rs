//! A VM with a guest that checks a data region and reports what it reads: for tests of slot
//! transactions.
//!
//! ```text
//! 0x1000  code      0x2000  page tables (identity, the first GiB in 2 MiB pages)
//! 0x8000  one page of parameters per vCPU
//! 256 MiB data: slot 1, 64 pages; the first word of each page is the page's number
//! ```

#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::panic, reason = "a failed helper fails its test")]

use std::error::Error;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment};
use pagetide_kvm::{BoundVcpu, Exit, Kvm, Method, Signals, SlotFlags, Vcpu, Vm};
use pagetide_memory::{Backing, FaultInAccess, GuestAddress, PageIndex, Region};

pub(crate) const PAGE: u64 = 4096;
pub(crate) const DATA: u64 = 256 << 20;
pub(crate) const DATA_PAGES: u64 = 64;
pub(crate) const LOW_SLOT: u32 = 0;
pub(crate) const DATA_SLOT: u32 = 1;
pub(crate) const LOW_BYTES: u64 = 2 << 20;
/// The time limit of any step; a software CPU is slow.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

const CODE: u64 = 0x1000;
const TABLES: u64 = 0x2000;
const PARAMETERS: u64 = 0x8000;

/// The guest's port, and the values that it writes there.
pub(crate) const REPORT: u16 = 0x10;
pub(crate) const PEEKED: u16 = 0x11;
/// A round is complete, and the host has requested reports.
pub(crate) const ROUND: u32 = 1;
/// A page does not contain its number.
pub(crate) const WRONG: u32 = 2;

/// A vCPU's parameters, as words from the start of its page.
#[derive(Clone, Copy)]
#[repr(u64)]
pub(crate) enum Word {
    /// The first page's address.
    Base,
    /// The number of pages.
    Pages,
    /// The first page's number.
    First,
    /// The guest's count of complete rounds.
    Rounds,
    /// Not 0: report each round.
    Report,
    /// The word of each page to which the guest writes.
    Column,
}

// The guest. rdi: its parameters, which do not change.
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

unsafe extern "C" {
    static kvm_test_guest_start: u8;
    static kvm_test_guest_peek: u8;
    static kvm_test_guest_end: u8;
}

fn code() -> &'static [u8] {
    let start = &raw const kvm_test_guest_start;
    let end = &raw const kvm_test_guest_end;
    // SAFETY: both are in one section of read-only data, in this order, and are never freed.
    unsafe { std::slice::from_raw_parts(start, end.addr() - start.addr()) }
}

fn peek_address() -> u64 {
    let start = (&raw const kvm_test_guest_start).addr();
    CODE + ((&raw const kvm_test_guest_peek).addr() - start) as u64
}

/// A VM with its memory.
pub(crate) struct Machine {
    pub(crate) vm: Vm,
    pub(crate) low: Arc<Region>,
    pub(crate) data: Arc<Region>,
}

impl Machine {
    /// None, after printing the reason, where this host cannot run one.
    pub(crate) fn new() -> Option<Arc<Self>> {
        Self::with(Backing::Shmem)
    }

    pub(crate) fn with(backing: Backing) -> Option<Arc<Self>> {
        Self::with_signals(backing, Signals::install().expect("handlers"))
    }

    pub(crate) fn with_signals(backing: Backing, signals: Signals) -> Option<Arc<Self>> {
        let vm: Result<Vm, Box<dyn Error>> = Kvm::open()
            .map_err(Into::into)
            .and_then(|kvm| kvm.create_vm(signals).map_err(Into::into));
        let vm = vm.inspect_err(|error| println!("SKIP: {error}")).ok()?;
        // Some processors need memory for KVM's own use; where they do not, the call may be refused.
        let _ = vm.fd().set_tss_address(0xfffb_d000);
        let low = Region::new(GuestAddress(0), LOW_BYTES, Backing::Shmem).expect("2 MiB");
        let data = Region::new(GuestAddress(DATA), DATA_PAGES * PAGE, backing).expect("64 pages");
        let machine = Self {
            vm,
            low: Arc::new(low),
            data: Arc::new(data),
        };
        machine.write(CODE, code());
        let entry = |at: u64, value: u64| machine.write(at, &value.to_le_bytes());
        entry(TABLES, (TABLES + PAGE) | 0x23);
        entry(TABLES + PAGE, (TABLES + 2 * PAGE) | 0x23);
        for index in 0..512 {
            entry(TABLES + 2 * PAGE + index * 8, (index << 21) | 0xe3);
        }
        if backing == Backing::Shmem {
            number_pages(&machine.data, 0);
        }
        for (slot, region) in [(LOW_SLOT, &machine.low), (DATA_SLOT, &machine.data)] {
            let added = machine
                .vm
                .add_region(slot, Arc::clone(region), SlotFlags::default());
            added.expect("an empty slot");
        }
        Some(Arc::new(machine))
    }

    pub(crate) fn write(&self, gpa: u64, bytes: &[u8]) {
        self.low
            .write_service(PageIndex(gpa / PAGE), gpa % PAGE, bytes)
            .expect("low memory");
    }

    pub(crate) fn set(&self, vcpu: u32, word: Word, value: u64) {
        let gpa = PARAMETERS + u64::from(vcpu) * PAGE + word as u64 * 8;
        self.write(gpa, &value.to_le_bytes());
    }

    pub(crate) fn get(&self, vcpu: u32, word: Word) -> u64 {
        let mut bytes = [0; 8];
        let page = PageIndex(PARAMETERS / PAGE + u64::from(vcpu));
        self.low
            .read_service(page, word as u64 * 8, &mut bytes)
            .expect("low memory");
        u64::from_le_bytes(bytes)
    }

    /// A vCPU that walks `count` pages from page `first` of the data on, forever.
    pub(crate) fn vcpu(&self, id: u32, first: u64, count: u64) -> Vcpu {
        let vcpu = self.vm.create_vcpu(id).expect("a vCPU");
        let kvm = Kvm::open().expect("it was there");
        let cpuid = kvm.fd().get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        vcpu.fd()
            .set_cpuid2(&cpuid.expect("some"))
            .expect("its own");
        self.set(id, Word::Base, DATA + first * PAGE);
        self.set(id, Word::Pages, count);
        self.set(id, Word::First, first);
        self.set(id, Word::Column, 8 * (1 + u64::from(id)));
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
        start(&vcpu, id, CODE, 0);
        vcpu
    }

    /// The word that a vCPU reads at `gpa`, or the exit that occurs instead.
    pub(crate) fn peek(&self, vcpu: &mut BoundVcpu<'_>, gpa: u64) -> Result<u32, Exit> {
        vcpu.complete_io().expect("at most an OUT");
        start(vcpu, vcpu.id(), peek_address(), gpa);
        match vcpu.run().expect("no failure") {
            Exit::IoOut { port: PEEKED, data } => Ok(data),
            exit => Err(exit),
        }
    }
}

/// Writes each page's number to its first word.
pub(crate) fn number_pages(region: &Region, first: u64) {
    region
        .fault_in(region.all_pages(), FaultInAccess::Write)
        .expect("memory");
    for page in region.all_pages().iter() {
        let number = (first + page.0).to_le_bytes();
        region.write_service(page, 0, &number).expect("memory");
    }
}

fn start(vcpu: &Vcpu, id: u32, rip: u64, rsi: u64) {
    let regs = kvm_regs {
        rip,
        rsi,
        rdi: PARAMETERS + u64::from(id) * PAGE,
        rflags: 2,
        ..kvm_regs::default()
    };
    vcpu.set_regs(&regs).expect("registers");
}

/// The methods without an intermediate layout; omits those that this kernel lacks, after printing the
/// reason.
pub(crate) fn whole_methods(vm: &Vm) -> Vec<Method> {
    if vm.capabilities().slot_list {
        vec![Method::Quiesce, Method::List]
    } else {
        println!(
            "SKIP: this kernel lacks KVM_CAP_SET_USER_MEMORY_REGION_LIST; only quiesce was tested"
        );
        vec![Method::Quiesce]
    }
}

/// Splits a slot in the middle, or merges two that were split; returns the resulting slots.
pub(crate) fn toggle(machine: &Machine, method: Method, slots: &[u32]) -> Vec<u32> {
    let mut transaction = machine.vm.transaction();
    let made = match *slots {
        [whole] => {
            let half = machine.vm.slot(whole).expect("it is there").range.bytes() / 2;
            transaction.split(whole, half).to_vec()
        }
        [one, other] => vec![transaction.merge(one, other)],
        _ => panic!("one slot or two"),
    };
    let done = transaction
        .commit_with(method)
        .unwrap_or_else(|error| panic!("{error}"));
    made.iter()
        .map(|slot| done.slot(*slot).expect("it was made"))
        .collect()
}

/// Waits until a condition holds.
pub(crate) fn wait_until(what: &str, is: impl Fn() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < LIMIT, "{what} takes too long");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Runs `work` in a separate thread.
pub(crate) struct Limited<T> {
    what: &'static str,
    result: mpsc::Receiver<T>,
    thread: JoinHandle<()>,
}

impl<T: Send + 'static> Limited<T> {
    pub(crate) fn spawn(what: &'static str, work: impl FnOnce() -> T + Send + 'static) -> Self {
        let (sender, result) = mpsc::channel();
        let thread = thread::spawn(move || {
            let _ = sender.send(work());
        });
        Self {
            what,
            result,
            thread,
        }
    }

    /// Whether it has finished after `time`.
    pub(crate) fn is_done_after(&self, time: Duration) -> bool {
        thread::sleep(time);
        self.thread.is_finished()
    }

    /// Waits for the end; exceeding the limit is a failure, and so is a panic.
    pub(crate) fn join(self) -> T {
        self.join_within(LIMIT)
    }

    pub(crate) fn join_within(self, limit: Duration) -> T {
        match self.result.recv_timeout(limit) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => panic!("{} takes too long", self.what),
            Err(RecvTimeoutError::Disconnected) => panic!("{} panicked", self.what),
        }
    }
}
