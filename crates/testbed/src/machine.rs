//! A virtual machine that can be run again and again.

use std::io;
use std::sync::Arc;

use pagetide_kvm::{Capabilities, Kvm, Populator, SlotError, SlotFlags, StatsError, Vcpu, Vm};
use pagetide_memory::{GuestAddress, Region};
use pagetide_vmm::{PoolConfig, Stopper};
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::arch;
use crate::config::{ConfigError, MachineConfig};
use crate::error::MachineError;
use crate::layout::{DATA_GPA, DATA_SLOT, LOW_SLOT};
use crate::low_memory::LowMemory;
use crate::stage_two::StageTwo;

/// A VM with its memory and vCPUs.
#[derive(Debug)]
pub struct Machine {
    pub(crate) config: MachineConfig,
    // None while a thread has it, and for ever if the thread did not come back.
    pub(crate) vcpus: Vec<Option<Vcpu>>,
    vm: Arc<Vm>,
    pub(crate) low: Arc<LowMemory>,
    data: Arc<Region>,
    pub(crate) tsc_khz: u32,
    pub(crate) pool: PoolConfig,
    pub(crate) stopper: Stopper,
}

impl Machine {
    /// A machine with a data region of its own.
    ///
    /// # Errors
    /// [`MachineError`] says what is missing or cannot be.
    pub fn new(config: MachineConfig) -> Result<Self, MachineError> {
        Self::build(config, None)
    }

    /// A machine over a data region that the caller made, with
    /// [`MachineConfig::data_region`] for instance.
    ///
    /// # Errors
    /// As [`Machine::new`], and [`ConfigError::WrongRegion`] if address or size do not fit.
    pub fn with_region(config: MachineConfig, data: Arc<Region>) -> Result<Self, MachineError> {
        Self::build(config, Some(data))
    }

    fn build(config: MachineConfig, data: Option<Arc<Region>>) -> Result<Self, MachineError> {
        arch::check()?;
        let kvm = Kvm::open()?;
        let vm = kvm.create_vm_with_signals()?;
        let platform = arch::Platform::new(&kvm, &vm)?;
        let max_vcpus = u32::try_from(kvm.max_vcpus()).unwrap_or(u32::MAX);
        let layout = config.layout(max_vcpus, platform.gpa_limit())?;
        let data = match data {
            Some(region) => region,
            None => Arc::new(config.data_region().map_err(MachineError::Data)?),
        };
        let found = (data.gpa(), data.bytes(), data.backing());
        if found != (GuestAddress(DATA_GPA), layout.data_bytes(), config.backing) {
            let (gpa, bytes, backing) = found;
            return Err(MachineError::Config(ConfigError::WrongRegion {
                gpa,
                bytes,
                backing,
                needed_bytes: layout.data_bytes(),
                needed_backing: config.backing,
            }));
        }

        let low = LowMemory::new(layout)?;
        arch::write_code(&low)?;
        vm.add_region(LOW_SLOT, Arc::clone(low.region()), SlotFlags::default())?;
        vm.add_region(DATA_SLOT, Arc::clone(&data), config.slot_flags)?;
        let mut vcpus = Vec::new();
        for id in 0..config.vcpus {
            let vcpu = vm.create_vcpu(id)?;
            platform.prepare(&vcpu)?;
            vcpus.push(vcpu);
        }
        let tsc_khz = vcpus.first().map_or(Ok(0), arch::tsc_khz)?;
        let cpus = if config.pin {
            allowed_cpus()?
        } else {
            Vec::new()
        };
        Ok(Self {
            config,
            vcpus: vcpus.into_iter().map(Some).collect(),
            vm: Arc::new(vm),
            low: Arc::new(low),
            data,
            tsc_khz,
            pool: PoolConfig { cpus },
            stopper: Stopper::default(),
        })
    }

    /// The configuration that it was made with.
    #[must_use]
    pub fn config(&self) -> &MachineConfig {
        &self.config
    }

    /// The data region.
    #[must_use]
    pub fn data(&self) -> &Arc<Region> {
        &self.data
    }

    /// The virtual machine itself, for what works on its memory from other threads.
    #[must_use]
    pub fn vm(&self) -> &Arc<Vm> {
        &self.vm
    }

    /// The vCPUs, in the order of their numbers, but for those that a failed run has lost.
    pub fn vcpus(&self) -> impl Iterator<Item = &Vcpu> {
        self.vcpus.iter().flatten()
    }

    /// What this kernel has for the machine.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        self.vm.capabilities()
    }

    /// What populates this machine's memory; its vCPUs are idle between runs.
    #[must_use]
    pub fn populator(&mut self) -> Populator<'_> {
        Populator::new(&self.vm).idle_vcpus(self.vcpus.iter_mut().flatten())
    }

    /// What KVM counts of this machine's stage-2 tables.
    ///
    /// # Errors
    /// KVM's statistics cannot be had.
    pub fn stage_two(&self) -> Result<StageTwo, StatsError> {
        StageTwo::read(&self.vm, self.vcpus.iter().flatten())
    }

    /// A handle that stops this machine's runs from outside.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Changes the flags of the data slot, which does not touch what the guest has mapped.
    ///
    /// # Errors
    /// See [`SlotError`]; the flags stay as they were.
    pub fn set_slot_flags(&self, flags: SlotFlags) -> Result<(), SlotError> {
        self.vm.set_slot_flags(DATA_SLOT, flags)
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
