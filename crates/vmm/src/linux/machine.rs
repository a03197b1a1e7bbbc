//! A Linux guest before it runs.

use std::fmt;
use std::sync::Arc;

use kvm_bindings::{KVM_CAP_TSC_DEADLINE_TIMER, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use pagetide_kvm::poison::{MachineCheckForm, prepare_cpuid};
use pagetide_kvm::{SlotError, SlotFlags, Vcpu, Vm};
use pagetide_memory::{GuestAddress, GuestRange, Region};

use crate::control::Stopper;
use crate::hooks::HookError;
use crate::setup::SetupError;
use crate::x86_64::Platform;

use super::config::LinuxConfig;
use super::content::ContentFile;
use super::cpuid::{self, Host};
use super::discard::{OnDiscard, punch};
use super::error::LinuxError;
use super::image::Image;
use super::{memory, mp_table, vcpu};

/// A VM with a kernel in its memory, ready to run once.
pub struct LinuxMachine {
    pub(super) config: LinuxConfig,
    pub(super) vcpus: Vec<Vcpu>,
    pub(super) vm: Arc<Vm>,
    machine_checks: MachineCheckForm,
    regions: Vec<Arc<Region>>,
    pub(super) on_discard: OnDiscard,
    pub(super) stopper: Stopper,
}

impl LinuxMachine {
    /// Creates the VM, allocates its memory as [`LinuxConfig::regions`] does, and loads kernel and initrd.
    /// The configuration and the files are checked before KVM is used.
    ///
    /// # Errors
    /// See [`LinuxError`].
    pub fn new(config: &LinuxConfig) -> Result<Self, LinuxError> {
        Self::build(config, None, None)
    }

    /// As [`LinuxMachine::new`], over regions that the caller made, with [`LinuxConfig::regions`] for
    /// instance. Kernel, initrd and boot data are written through the service mapping of a region that
    /// has one, and nothing has to be present for the guest when it starts: a pager over the regions may
    /// install these pages like any others.
    ///
    /// # Errors
    /// As [`LinuxMachine::new`], and [`LinuxConfigError::WrongRegions`](super::LinuxConfigError) if the
    /// regions are not where the guest's memory is.
    pub fn with_regions(
        config: &LinuxConfig,
        regions: Vec<Arc<Region>>,
    ) -> Result<Self, LinuxError> {
        Self::build(config, Some(regions), None)
    }

    /// With `content`, the guest's initial memory goes to that file, and nothing of it to memory.
    pub(super) fn build(
        config: &LinuxConfig,
        regions: Option<Vec<Arc<Region>>>,
        content: Option<&ContentFile>,
    ) -> Result<Self, LinuxError> {
        let layout = config.layout()?;
        let image = Image::load(config, layout)?;
        let (kvm, vm, platform) = Platform::create_vm()?;
        config.check_limits(kvm.max_vcpus(), platform.gpa_limit())?;
        create_timer(&vm)?;

        let regions = regions.map_or_else(|| config.regions(), Ok)?;
        memory::check(layout, &regions)?;
        image.copy(|gpa, bytes| match content {
            Some(content) => Ok(content.load(gpa, bytes)?),
            None => memory::write(&regions, gpa, bytes).map_err(|source| LinuxError::Write {
                gpa: GuestAddress(gpa),
                source,
            }),
        })?;
        for (slot, region) in (0..).zip(&regions) {
            vm.add_region(slot, Arc::clone(region), SlotFlags::default())
                .map_err(SetupError::from)?;
        }
        let (vcpus, machine_checks) = create_vcpus(&vm, &platform, config.vcpus, image.entry)?;
        Ok(Self {
            config: config.clone(),
            vcpus,
            vm: Arc::new(vm),
            machine_checks,
            on_discard: punch(&regions),
            regions,
            stopper: Stopper::default(),
        })
    }

    /// The VM, for threads that work on its memory.
    #[must_use]
    pub fn vm(&self) -> &Arc<Vm> {
        &self.vm
    }

    /// Its memory, by address: slot 0, and above 4 GiB slot 1.
    #[must_use]
    pub fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// Changes the flags of all memory slots, which does not unmap anything.
    ///
    /// # Errors
    /// See [`SlotError`]. The slot that KVM refused and those after it keep their flags.
    pub fn set_slot_flags(&self, flags: SlotFlags) -> Result<(), SlotError> {
        let mut slots = (0..).zip(&self.regions);
        slots.try_for_each(|(slot, _)| self.vm.set_slot_flags(slot, flags))
    }

    /// The vCPUs, by number.
    #[must_use]
    pub fn vcpus(&self) -> &[Vcpu] {
        &self.vcpus
    }

    /// Calls `discard` with memory that the guest gives up (a line `discard GPA BYTES` on `ttyS1`), on the
    /// thread of the vCPU that wrote the line, which waits for it. The range is what the guest wrote, and
    /// may be no memory at all. An error ends the run. By default, the whole pages of a region are
    /// returned to the host, poisoned ones too, and read as zeroes. If a pager serves the regions, `discard`
    /// must call the pager's `discard`, which does not notice otherwise.
    pub fn on_given_up(
        &mut self,
        discard: impl Fn(GuestRange) -> Result<(), HookError> + Send + Sync + 'static,
    ) {
        self.on_discard = Box::new(discard);
    }

    /// The kind of machine checks that the guest's processor has.
    #[must_use]
    pub fn machine_checks(&self) -> MachineCheckForm {
        self.machine_checks
    }

    /// A handle that ends the run from outside: with [`LinuxEnd::Stopped`](super::LinuxEnd), or with a
    /// cause as a failure.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }
}

impl fmt::Debug for LinuxMachine {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut machine = formatter.debug_struct("LinuxMachine");
        machine
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// The PC's timer, which kernels look for before they find KVM's clock.
fn create_timer(vm: &Vm) -> Result<(), SetupError> {
    let config = kvm_pit_config {
        // Port 0x61 is answered by KVM, too.
        flags: KVM_PIT_SPEAKER_DUMMY,
        ..kvm_pit_config::default()
    };
    vm.fd()
        .create_pit2(config)
        .map_err(SetupError::on_vm("KVM_CREATE_PIT2"))
}

fn create_vcpus(
    vm: &Vm,
    platform: &Platform,
    count: u32,
    entry: u64,
) -> Result<(Vec<Vcpu>, MachineCheckForm), LinuxError> {
    let deadline = vm
        .fd()
        .check_extension_raw(KVM_CAP_TSC_DEADLINE_TIMER.into());
    let host = Host {
        tsc_deadline: deadline > 0,
        repeats_interrupts: cpuid::is_software_cpu(),
    };
    let mut supported = platform.cpuid().clone();
    let form = prepare_cpuid(&mut supported)?;
    let mut vcpus = Vec::new();
    for id in 0..count {
        let vcpu = vm.create_vcpu(id).map_err(SetupError::from)?;
        // The configuration was checked.
        let number = u8::try_from(id).unwrap_or(mp_table::MAX_PROCESSORS);
        let cpuid = cpuid::of(&supported, number, host);
        vcpu.fd()
            .set_cpuid2(&cpuid)
            .map_err(SetupError::on_vcpu(id, "KVM_SET_CPUID2"))?;
        vcpu.enable_machine_checks()?;
        vcpu::set_tsc_rate(&vcpu);
        vcpu::set_extended_state(&vcpu, &cpuid)?;
        vcpu::set_msrs(&vcpu)?;
        vcpus.push(vcpu);
    }
    if let Some(first) = vcpus.first() {
        vcpu::enter_kernel(first, entry)?;
    }
    Ok((vcpus, form))
}
