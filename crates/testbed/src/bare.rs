//! What every bare machine has: a VM, low memory, data memory and vCPUs.

use std::sync::Arc;

use pagetide_kvm::{SlotFlags, Vcpu, Vm};
use pagetide_memory::{GuestAddress, Region};
use pagetide_vmm::{SetupError, Stopper};

use crate::arch;
use crate::config::ConfigError;
use crate::error::{GuestError, MachineError};
use crate::layout::{DATA_SLOT, LOW_SLOT, Layout};
use crate::low_memory::LowMemory;
use crate::payload::Word;

/// A bare machine without its vCPUs.
#[derive(Debug)]
pub(crate) struct Bare {
    pub(crate) vm: Arc<Vm>,
    pub(crate) low: Arc<LowMemory>,
    pub(crate) data: Arc<Region>,
    pub(crate) stopper: Stopper,
    /// Number of vCPUs.
    pub(crate) count: u32,
}

impl Bare {
    /// Creates the VM and its vCPUs. `layout` checks the configuration against the most vCPUs and the gpa
    /// limit of this KVM, `data` makes the data region, and `payload` is the code beside the workload.
    pub(crate) fn new(
        count: u32,
        layout: impl FnOnce(u32, u64) -> Result<Layout, ConfigError>,
        data: impl FnOnce(&Layout) -> Result<Arc<Region>, MachineError>,
        payload: &[u8],
    ) -> Result<(Self, Vec<Vcpu>), MachineError> {
        let (kvm, vm, platform) = arch::Platform::create_vm()?;
        let max_vcpus = u32::try_from(kvm.max_vcpus()).unwrap_or(u32::MAX);
        let layout = layout(max_vcpus, platform.gpa_limit())?;
        let data = data(&layout)?;
        let low = LowMemory::new(layout)?;
        arch::write_code(&low, payload)?;
        for (slot, region) in [(LOW_SLOT, &low.region), (DATA_SLOT, &data)] {
            vm.add_region(slot, Arc::clone(region), SlotFlags::default())
                .map_err(SetupError::from)?;
        }
        let mut vcpus = Vec::new();
        for id in 0..count {
            let vcpu = vm.create_vcpu(id).map_err(SetupError::from)?;
            platform.prepare(&vcpu)?;
            vcpus.push(vcpu);
        }
        let bare = Self {
            vm: Arc::new(vm),
            low: Arc::new(low),
            data,
            stopper: Stopper::default(),
            count,
        };
        Ok((bare, vcpus))
    }

    /// The sum of a word of all vCPUs.
    pub(crate) fn sum(&self, word: Word) -> Result<u64, MachineError> {
        (0..self.count).try_fold(0_u64, |sum, vcpu| {
            Ok(sum.wrapping_add(self.low.word(vcpu, word)?))
        })
    }

    /// Whether a vCPU's guest found wrong words.
    pub(crate) fn check_words(&self, vcpu: u32) -> Result<(), GuestError> {
        let word = |word| self.low.word(vcpu, word);
        match word(Word::Wrong)? {
            0 => Ok(()),
            count => Err(GuestError::WrongWord {
                vcpu,
                count,
                gpa: GuestAddress(word(Word::WrongGpa)?),
                found: word(Word::WrongFound)?,
                expected: word(Word::WrongExpected)?,
            }),
        }
    }
}

/// The exception that a vCPU's guest has reported.
pub(crate) fn exception(low: &LowMemory, vcpu: u32) -> GuestError {
    let read = || {
        let word = |word| low.word(vcpu, word);
        Ok(GuestError::Exception {
            vcpu,
            vector: word(Word::ExceptionVector)?,
            error_code: word(Word::ExceptionErrorCode)?,
            rip: word(Word::ExceptionRip)?,
            cr2: word(Word::ExceptionCr2)?,
        })
    };
    read().unwrap_or_else(|error: MachineError| error.into())
}
