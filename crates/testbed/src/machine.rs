//! A bare machine that can run any number of walks.

use std::io;
use std::sync::Arc;

use pagetide_kvm::{Capabilities, Populator, SlotError, SlotFlags, StatsError, Vcpu, Vm};
use pagetide_memory::{GuestAddress, Region};
use pagetide_vmm::{PoolConfig, Stopper};
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::arch;
use crate::bare::Bare;
use crate::config::{ConfigError, MachineConfig};
use crate::error::MachineError;
use crate::layout::{DATA_GPA, DATA_SLOT};
use crate::stage_two::StageTwo;

/// A VM with its memory and vCPUs.
#[derive(Debug)]
pub struct Machine {
    pub(crate) config: MachineConfig,
    pub(crate) bare: Bare,
    // None while the vCPU's thread has it, and for ever if the thread did not end.
    pub(crate) vcpus: Vec<Option<Vcpu>>,
    pub(crate) tsc_khz: u32,
    pub(crate) pool: PoolConfig,
}

impl Machine {
    /// A machine with a data region of its own.
    ///
    /// # Errors
    /// See [`MachineError`].
    pub fn new(config: MachineConfig) -> Result<Self, MachineError> {
        Self::build(config, None)
    }

    /// A machine over a data region that the caller made, with [`MachineConfig::data_region`] for
    /// instance.
    ///
    /// # Errors
    /// As [`Machine::new`], and [`ConfigError::WrongRegion`] if address, size or backing differ.
    pub fn with_region(config: MachineConfig, data: Arc<Region>) -> Result<Self, MachineError> {
        Self::build(config, Some(data))
    }

    fn build(config: MachineConfig, data: Option<Arc<Region>>) -> Result<Self, MachineError> {
        let (bare, vcpus) = Bare::new(
            config.vcpus,
            |max_vcpus, gpa_limit| config.layout(max_vcpus, gpa_limit),
            |layout| {
                let Some(data) = data else {
                    return config
                        .data_region()
                        .map(Arc::new)
                        .map_err(MachineError::Data);
                };
                let found = (data.gpa(), data.bytes(), data.backing());
                let bytes = layout.data_bytes();
                if found == (GuestAddress(DATA_GPA), bytes, config.backing) {
                    return Ok(data);
                }
                Err(ConfigError::wrong_region(&data, bytes, config.backing).into())
            },
            &[],
        )?;
        let tsc_khz = vcpus.first().map_or(Ok(0), arch::tsc_khz)?;
        let cpus = match config.pin {
            true => allowed_cpus()?,
            false => Vec::new(),
        };
        Ok(Self {
            config,
            bare,
            vcpus: vcpus.into_iter().map(Some).collect(),
            tsc_khz,
            pool: PoolConfig { cpus },
        })
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &MachineConfig {
        &self.config
    }

    /// The data region.
    #[must_use]
    pub fn data(&self) -> &Arc<Region> {
        &self.bare.data
    }

    /// The VM, for threads that work on its memory.
    #[must_use]
    pub fn vm(&self) -> &Arc<Vm> {
        &self.bare.vm
    }

    /// The vCPUs, by number, but for those that a failed run has lost.
    pub fn vcpus(&self) -> impl Iterator<Item = &Vcpu> {
        self.vcpus.iter().flatten()
    }

    /// The capabilities of this kernel's KVM.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        self.bare.vm.capabilities()
    }

    /// A populator of this machine's memory; its vCPUs are idle between runs.
    #[must_use]
    pub fn populator(&mut self) -> Populator<'_> {
        Populator::new(&self.bare.vm).idle_vcpus(self.vcpus.iter_mut().flatten())
    }

    /// KVM's counts of this machine's stage-2 tables.
    ///
    /// # Errors
    /// KVM's statistics cannot be read.
    pub fn stage_two(&self) -> Result<StageTwo, StatsError> {
        StageTwo::read(&self.bare.vm, self.vcpus())
    }

    /// A handle that stops this machine's runs from outside.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.bare.stopper.clone()
    }

    /// Changes the flags of the data slot, which does not unmap anything. Give the data region to a pager before you
    /// ask for exits.
    ///
    /// # Errors
    /// See [`SlotError`]; the slot keeps its flags.
    pub fn set_slot_flags(&self, flags: SlotFlags) -> Result<(), SlotError> {
        self.bare.vm.set_slot_flags(DATA_SLOT, flags)
    }
}

/// The host CPUs that this thread may use.
fn allowed_cpus() -> Result<Vec<usize>, MachineError> {
    let set =
        sched_getaffinity(None).map_err(|errno| MachineError::Affinity(io::Error::from(errno)))?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|cpu| set.is_set(*cpu))
        .collect())
}
