//! vCPUs that run a bare payload for ever, until they are told to end: what every such payload has.
//!
//! A payload is code at [`CODE`], a page that all vCPUs read and the host writes ([`CONTROL`]), a page of
//! words for each vCPU, most of which the guest writes, and a table for each vCPU, which is the payload's own.
//! The exception handler is that of `guest/workload.s`.

mod error;
mod running;

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_kvm::{Kvm, SlotFlags, StatsError, Vcpu, Vm};
use pagetide_memory::{GuestAddress, Region};
use pagetide_vmm::Stopper;

use crate::arch;
use crate::config::{self, ConfigError};
use crate::error::MachineError;
use crate::layout::{DATA_SLOT, LOW_SLOT, Layout};
use crate::low_memory::LowMemory;
use crate::stage_two::StageTwo;
use crate::walk::lock;

pub use error::EndlessError;
pub(crate) use running::{Payload, Running};

/// Where the code goes: the free pages between the descriptor tables and the page tables.
pub(crate) const CODE: u64 = 0x8000;
/// Room for it.
#[cfg(all(test, target_arch = "x86_64"))]
pub(crate) const CODE_BYTES: u64 = 0x8000;
/// The page that all vCPUs read and the host writes.
pub(crate) const CONTROL: u64 = 0x7000;

/// A word that every payload has: on the page at [`CONTROL`], by its offset.
#[derive(Clone, Copy, Debug)]
#[repr(u64)]
pub(crate) enum Control {
    /// Not 0: end soon.
    Stop = 8,
}

/// A word that every payload has: on a vCPU's parameter page, by its offset. What the guest writes all the
/// time is apart from what it only reads, and from what KVM writes: in cache lines of its own.
#[derive(Clone, Copy, Debug)]
#[repr(u64)]
pub(crate) enum Word {
    /// Where the vCPU's table is.
    Table = 1024,
    /// Entries in it.
    Count = 1032,
    /// Steps so far: it grows as long as the vCPU gets anywhere.
    Steps = 2048,
    /// Rounds so far.
    Rounds = 2064,
    /// Words that were not as expected, and the first of them.
    Wrong = 2072,
    WrongGpa = 2080,
    WrongFound = 2088,
    WrongExpected = 2096,
}

/// Such vCPUs, and their VM.
#[derive(Debug)]
pub(crate) struct Endless {
    count: u32,
    stall_timeout: Duration,
    vm: Vm,
    low: LowMemory,
    data: Arc<Region>,
    /// None once they run.
    vcpus: Mutex<Vec<Vcpu>>,
    stopper: Stopper,
}

impl Endless {
    /// Makes the VM: `data` is its data memory, `code` the payload, each vCPU has a table of
    /// `table_bytes` bytes, and no vCPU may make no step for longer than `stall_timeout`.
    pub(crate) fn new(
        vcpus: u32,
        data: Arc<Region>,
        code: &[u8],
        table_bytes: u64,
        stall_timeout: Duration,
    ) -> Result<Self, MachineError> {
        arch::check()?;
        let kvm = Kvm::open()?;
        let vm = kvm.create_vm_with_signals()?;
        let platform = arch::Platform::new(&kvm, &vm)?;
        let max = u32::try_from(kvm.max_vcpus()).unwrap_or(u32::MAX);
        config::check(vcpus, max, data.bytes(), platform.gpa_limit())?;
        // The table takes the place of a log of touches, 4 bytes each.
        let touches = table_bytes.div_ceil(4);
        let layout = Layout::new(vcpus, data.bytes(), touches)
            .ok_or(ConfigError::LogTooLarge { touches, vcpus })?;
        let low = LowMemory::new(layout)?;
        arch::write_code(&low)?;
        low.write(CODE, code)?;
        vm.add_region(LOW_SLOT, Arc::clone(low.region()), SlotFlags::default())?;
        vm.add_region(DATA_SLOT, Arc::clone(&data), SlotFlags::default())?;
        let mut made = Vec::new();
        for id in 0..vcpus {
            let vcpu = vm.create_vcpu(id)?;
            platform.prepare(&vcpu)?;
            arch::reset(&vcpu, low.layout())?;
            arch::enter_at(&vcpu, CODE)?;
            made.push(vcpu);
        }
        Ok(Self {
            count: vcpus,
            stall_timeout,
            vm,
            low,
            data,
            vcpus: Mutex::new(made),
            stopper: Stopper::default(),
        })
    }

    pub(crate) fn vm(&self) -> &Vm {
        &self.vm
    }

    pub(crate) fn data(&self) -> &Arc<Region> {
        &self.data
    }

    /// Does something to each vCPU before any runs.
    pub(crate) fn each(
        &self,
        mut work: impl FnMut(&Vcpu) -> Result<(), MachineError>,
    ) -> Result<(), MachineError> {
        lock(&self.vcpus).iter().try_for_each(&mut work)
    }

    /// What KVM counts of the VM's stage-2 tables; the vCPUs' own counts are not asked for.
    pub(crate) fn stage_two(&self) -> Result<StageTwo, StatsError> {
        StageTwo::read(&self.vm, [].into_iter())
    }

    /// Where a vCPU's table is.
    pub(crate) fn table(&self, vcpu: u32) -> u64 {
        self.low.layout().log(vcpu.into())
    }

    pub(crate) fn low(&self) -> &LowMemory {
        &self.low
    }

    /// Where a vCPU has a word, by its offset in the parameter page.
    pub(crate) fn gpa(&self, vcpu: u32, offset: u64) -> u64 {
        self.low.layout().params(vcpu.into()) + offset
    }

    pub(crate) fn set_word(&self, vcpu: u32, offset: u64, value: u64) -> Result<(), MachineError> {
        self.low.write_words(self.gpa(vcpu, offset), &[value])
    }

    pub(crate) fn word(&self, vcpu: u32, offset: u64) -> Result<u64, EndlessError> {
        Ok(self.low.word(self.gpa(vcpu, offset))?)
    }

    /// The sum of a word of all vCPUs.
    pub(crate) fn sum(&self, offset: u64) -> Result<u64, EndlessError> {
        (0..self.count).try_fold(0u64, |sum, vcpu| {
            Ok(sum.wrapping_add(self.word(vcpu, offset)?))
        })
    }

    /// Writes a word of the page that all vCPUs read.
    pub(crate) fn control(&self, offset: u64, value: u64) -> Result<(), EndlessError> {
        Ok(self.low.write_words(CONTROL + offset, &[value])?)
    }

    /// Waits until a word of each vCPU has grown by `more`.
    pub(crate) fn await_each(&self, offset: u64, more: u64) -> Result<(), EndlessError> {
        let wanted: Vec<u64> = (0..self.count)
            .map(|vcpu| Ok(self.word(vcpu, offset)? + more))
            .collect::<Result<_, EndlessError>>()?;
        let mut moved = Instant::now();
        let mut last_steps = 0;
        let mut pause = Duration::from_micros(20);
        for (vcpu, wanted) in (0..).zip(wanted) {
            while self.word(vcpu, offset)? < wanted {
                self.check()?;
                let steps = self.word(vcpu, Word::Steps as u64)?;
                if steps != last_steps {
                    (last_steps, moved) = (steps, Instant::now());
                }
                if moved.elapsed() > self.stall_timeout {
                    let limit = self.stall_timeout;
                    return Err(EndlessError::Stalled {
                        vcpu,
                        limit,
                        rip: None,
                    });
                }
                thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(1));
            }
            moved = Instant::now();
        }
        Ok(())
    }

    /// How many words guests found wrong, and the first of them.
    pub(crate) fn wrong_words(&self) -> Result<(u64, Option<EndlessError>), EndlessError> {
        let mut first = None;
        let mut count = 0;
        for vcpu in 0..self.count {
            let wrong = self.word(vcpu, Word::Wrong as u64)?;
            count += wrong;
            if wrong > 0 && first.is_none() {
                first = Some(vcpu);
            }
        }
        let Some(vcpu) = first else {
            return Ok((0, None));
        };
        let error = EndlessError::WrongWord {
            vcpu,
            gpa: GuestAddress(self.word(vcpu, Word::WrongGpa as u64)?),
            found: self.word(vcpu, Word::WrongFound as u64)?,
            expected: self.word(vcpu, Word::WrongExpected as u64)?,
            count,
        };
        Ok((count, Some(error)))
    }
}

/// Compares a page's words with what they should be.
pub(crate) fn compare_words(
    gpa: u64,
    found: &[u8],
    expected: impl Fn(u64) -> u64,
) -> Result<(), EndlessError> {
    for (gpa, found) in (gpa..).step_by(8).zip(found.as_chunks::<8>().0) {
        let (found, expected) = (u64::from_le_bytes(*found), expected(gpa));
        if found != expected {
            return Err(EndlessError::WrongEnd {
                gpa: GuestAddress(gpa),
                found,
                expected,
            });
        }
    }
    Ok(())
}
