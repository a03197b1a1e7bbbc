//! A VM with a guest that checks a data region and reports what it reads: for tests of slot
//! transactions.
//!
//! ```text
//! 0x1000  code      0x2000  page tables (identity)
//! 0x8000  one page of parameters per vCPU
//! 256 MiB data: slot 1, 64 pages; the first word of each page is the page's number
//! ```
//!
//! Each architecture has its own code for the guest. It reports by OUT on x86-64, and by writes outside
//! all memory on arm64.

#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::panic, reason = "a failed helper fails its test")]

use std::error::Error;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pagetide_kvm::{BoundVcpu, Exit, Kvm, Method, Signals, SlotFlags, Vcpu, Vm};
use pagetide_memory::{Backing, FaultInAccess, GuestAddress, PageIndex, Region};
use pagetide_test_support::{PATIENCE, Task};

pub(crate) use pagetide_test_support::eventually;

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86_64;
#[cfg(target_arch = "aarch64")]
use aarch64 as arch;
#[cfg(target_arch = "x86_64")]
use x86_64 as arch;

pub(crate) const PAGE: u64 = 4096;
pub(crate) const DATA: u64 = 256 << 20;
pub(crate) const DATA_PAGES: u64 = 64;
pub(crate) const LOW_SLOT: u32 = 0;
pub(crate) const DATA_SLOT: u32 = 1;
pub(crate) const LOW_BYTES: u64 = 2 << 20;
/// The time limit of any step; a software CPU is slow.
pub(crate) const LIMIT: Duration = PATIENCE;

const CODE: u64 = 0x1000;
const TABLES: u64 = 0x2000;
const PARAMETERS: u64 = 0x8000;

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
        arch::prepare(&vm);
        let low = Region::new(GuestAddress(0), LOW_BYTES, Backing::Shmem).expect("2 MiB");
        let data = Region::new(GuestAddress(DATA), DATA_PAGES * PAGE, backing).expect("64 pages");
        let machine = Self {
            vm,
            low: Arc::new(low),
            data: Arc::new(data),
        };
        machine.write(CODE, code());
        for (at, value) in arch::page_tables() {
            machine.write(at, &value.to_le_bytes());
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
        let gpa = parameters(vcpu) + word as u64 * 8;
        self.write(gpa, &value.to_le_bytes());
    }

    pub(crate) fn get(&self, vcpu: u32, word: Word) -> u64 {
        let mut bytes = [0; 8];
        let page = PageIndex(parameters(vcpu) / PAGE);
        self.low
            .read_service(page, word as u64 * 8, &mut bytes)
            .expect("low memory");
        u64::from_le_bytes(bytes)
    }

    /// A vCPU that walks `count` pages from page `first` of the data on, forever.
    pub(crate) fn vcpu(&self, id: u32, first: u64, count: u64) -> Vcpu {
        let vcpu = self.vm.create_vcpu(id).expect("a vCPU");
        self.set(id, Word::Base, DATA + first * PAGE);
        self.set(id, Word::Pages, count);
        self.set(id, Word::First, first);
        self.set(id, Word::Column, 8 * (1 + u64::from(id)));
        arch::set_up(&self.vm, &vcpu);
        arch::start(&vcpu, CODE, parameters(id), 0);
        vcpu
    }

    /// The word that a vCPU reads at `gpa`, or the exit that occurs instead.
    pub(crate) fn peek(&self, vcpu: &mut BoundVcpu<'_>, gpa: u64) -> Result<u32, Exit> {
        vcpu.complete_io().expect("at most a report");
        arch::start(vcpu, peek_address(), parameters(vcpu.id()), gpa);
        let exit = vcpu.run().expect("no failure");
        arch::peeked(vcpu, &exit).ok_or(exit)
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

/// The address of a vCPU's parameters.
fn parameters(id: u32) -> u64 {
    PARAMETERS + u64::from(id) * PAGE
}

/// Whether the guest reports that a round is complete.
pub(crate) fn is_round(exit: &Exit) -> bool {
    arch::is_round(exit)
}

/// Whether the guest reports that a page does not contain its number.
pub(crate) fn is_wrong(exit: &Exit) -> bool {
    arch::is_wrong(exit)
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

/// Runs `work` in a separate thread.
pub(crate) struct Limited<T> {
    what: &'static str,
    result: mpsc::Receiver<T>,
    task: Task,
    thread: JoinHandle<()>,
}

impl<T: Send + 'static> Limited<T> {
    pub(crate) fn spawn(what: &'static str, work: impl FnOnce() -> T + Send + 'static) -> Self {
        let (sender, result) = mpsc::channel();
        let (begin, begun) = mpsc::channel();
        let thread = thread::spawn(move || {
            let _ = begin.send(Task::this());
            let _ = sender.send(work());
        });
        Self {
            what,
            result,
            task: begun.recv().expect("it begins"),
            thread,
        }
    }

    /// Waits until it has finished, or has slept again and again as a committer does that waits for a vCPU and
    /// kicks it between its sleeps (`Gate::close`). A thread that sleeps once may wait for anything. Whether it
    /// has finished.
    pub(crate) fn is_done_or_waits_for_vcpus(&self) -> bool {
        const SLEEPS: u64 = 6;
        let sleeps = || self.task.state().map(|(_, sleeps)| sleeps);
        let first = sleeps();
        eventually(self.what, || match sleeps() {
            _ if self.thread.is_finished() => Ok(true),
            now if now >= first.map(|first| first + SLEEPS) => Ok(false),
            now => Err((first, now)),
        })
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
