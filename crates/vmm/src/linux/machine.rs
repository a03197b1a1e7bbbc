//! A Linux guest before it runs.

use std::sync::Arc;

use kvm_bindings::{KVM_CAP_TSC_DEADLINE_TIMER, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use pagetide_kvm::poison::{MachineCheckForm, prepare_cpuid};
use pagetide_kvm::{Kvm, SlotError, SlotFlags, Vcpu, Vm};
use pagetide_memory::{GuestRange, Region};

use crate::control::Stopper;
use crate::failure::SetupError;
use crate::hooks::HookError;
use crate::page_tables;
use crate::x86_64::Platform;

use super::balloon::{self, OnGivenUp};
use super::boot_params::{self, Boot};
use super::config::LinuxConfig;
use super::content::ContentFile;
use super::cpuid::{self, Host};
use super::error::LinuxError;
use super::image::Kernel;
use super::initrd::Initrd;
use super::layout::{BOOT_PARAMS, COMMAND_LINE, GDT, MAPPED_GIGABYTES, MP_TABLE, TABLES};
use super::memory::Ram;
use super::{mp_table, vcpu};

/// A VM with a kernel in its memory, ready to run once.
#[derive(Debug)]
pub struct LinuxMachine {
    pub(super) config: LinuxConfig,
    pub(super) vcpus: Vec<Vcpu>,
    pub(super) vm: Arc<Vm>,
    machine_checks: MachineCheckForm,
    pub(super) ram: Ram,
    pub(super) on_given_up: OnGivenUp,
    pub(super) stopper: Stopper,
}

impl LinuxMachine {
    /// Makes the VM, and its memory as [`LinuxConfig::regions`] does, and loads kernel and initrd.
    ///
    /// # Errors
    /// [`LinuxError`] says what is missing or cannot be. What the caller gave is checked before KVM
    /// is asked for anything.
    pub fn new(config: &LinuxConfig) -> Result<Self, LinuxError> {
        Self::build(config, None, None)
    }

    /// As [`LinuxMachine::new`], over regions that the caller made, with [`LinuxConfig::regions`] for
    /// instance. Kernel, initrd and boot data are written through the service mapping of a region
    /// that has one, and nothing has to be present for the guest when it starts: a pager over the
    /// regions may bring in these pages like any other.
    ///
    /// # Errors
    /// As [`LinuxMachine::new`], and [`LinuxConfigError::WrongRegions`](super::LinuxConfigError) if
    /// the regions are not where the guest's memory is.
    pub fn with_regions(
        config: &LinuxConfig,
        regions: Vec<Arc<Region>>,
    ) -> Result<Self, LinuxError> {
        Self::build(config, Some(regions), None)
    }

    pub(super) fn build(
        config: &LinuxConfig,
        regions: Option<Vec<Arc<Region>>>,
        content: Option<ContentFile>,
    ) -> Result<Self, LinuxError> {
        let layout = config.layout()?;
        let command_line = config.command_line()?;
        let kernel = Kernel::read(&config.kernel, layout)?;
        let last_address = kernel.header.map(|header| header.initrd_addr_max);
        let initrd = config
            .initrd
            .as_ref()
            .map(|path| Initrd::open(path, kernel.end, last_address, layout))
            .transpose()?;

        let kvm = Kvm::open()?;
        config.check_vcpus(u32::try_from(kvm.max_vcpus()).unwrap_or(u32::MAX))?;
        let vm = kvm.create_vm_with_signals()?;
        let platform = Platform::new(&kvm, &vm)?;
        config.check_end(layout, platform.gpa_limit())?;
        create_timer(&vm)?;

        let ram = Ram::new(layout, regions.map_or_else(|| config.regions(), Ok)?)?;
        let ram = ram.loaded_into(content);
        kernel.copy_to(&ram)?;
        let boot = Boot {
            layout,
            header: kernel.header,
            command_line_bytes: u32::try_from(command_line.as_bytes().len()).unwrap_or(0),
            initrd: initrd.as_ref().map(Initrd::place),
        };
        if let Some(initrd) = initrd {
            initrd.copy_to(&ram)?;
        }
        write_boot_data(&ram, &boot, command_line.as_bytes_with_nul(), config.vcpus)?;
        for (slot, region) in (0..).zip(ram.regions()) {
            vm.add_region(slot, Arc::clone(region), SlotFlags::default())?;
        }
        let (vcpus, machine_checks) = create_vcpus(&vm, &platform, config.vcpus, kernel.entry)?;
        Ok(Self {
            config: config.clone(),
            vcpus,
            vm: Arc::new(vm),
            machine_checks,
            on_given_up: balloon::punched(ram.regions()),
            ram,
            stopper: Stopper::default(),
        })
    }

    /// The virtual machine itself, for what works on its memory from other threads.
    #[must_use]
    pub fn vm(&self) -> &Arc<Vm> {
        &self.vm
    }

    /// Its memory, by address: slot 0, and above 4 GiB slot 1.
    #[must_use]
    pub fn regions(&self) -> &[Arc<Region>] {
        self.ram.regions()
    }

    /// Changes the flags of all its memory slots, which does not touch what the guest has mapped.
    ///
    /// # Errors
    /// See [`SlotError`]; the flags of the slot that was refused, and of those after it, stay.
    pub fn set_slot_flags(&self, flags: SlotFlags) -> Result<(), SlotError> {
        let mut slots = (0..).zip(self.regions());
        slots.try_for_each(|(slot, _)| self.vm.set_slot_flags(slot, flags))
    }

    /// The vCPUs, in the order of their numbers.
    #[must_use]
    pub fn vcpus(&self) -> &[Vcpu] {
        &self.vcpus
    }

    /// Has `discard` called with memory that the guest has given up (a line `discard GPA BYTES` on
    /// `ttyS1`), on the thread of the vCPU that said so, which goes on afterwards. The range is whatever the
    /// guest said. An error ends the run. Unless this is called, what is whole pages of a region is given
    /// back to the host, pages with an uncorrected error too: they read as zeroes then, and the guest has
    /// given them up. A VMM whose pager serves the regions must have this call the pager's `discard`,
    /// which would not know of it otherwise.
    pub fn on_given_up(
        &mut self,
        discard: impl Fn(GuestRange) -> Result<(), HookError> + Send + Sync + 'static,
    ) {
        self.on_given_up = Arc::new(discard).into();
    }

    /// Whose processors' machine checks the guest expects.
    #[must_use]
    pub fn machine_checks(&self) -> MachineCheckForm {
        self.machine_checks
    }

    /// A handle that ends the run from outside: with [`LinuxEnd::Stopped`](super::LinuxEnd), or, if it
    /// gives a cause, as a failure.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }
}

/// The PC's timer, for kernels that look for it before they find KVM's clock.
fn create_timer(vm: &Vm) -> Result<(), SetupError> {
    let config = kvm_pit_config {
        // Port 0x61 answers in the kernel, too.
        flags: KVM_PIT_SPEAKER_DUMMY,
        ..kvm_pit_config::default()
    };
    vm.fd()
        .create_pit2(config)
        .map_err(SetupError::on_vm("KVM_CREATE_PIT2"))
}

/// What the kernel finds in the first megabyte.
fn write_boot_data(
    ram: &Ram,
    boot: &Boot,
    command_line: &[u8],
    vcpus: u32,
) -> Result<(), LinuxError> {
    ram.write_words(GDT, &vcpu::descriptors())?;
    let tables = page_tables::build(TABLES, &MAPPED_GIGABYTES).unwrap_or_default();
    ram.write_words(TABLES, &tables)?;
    ram.write(BOOT_PARAMS, &boot_params::build(boot))?;
    ram.write(COMMAND_LINE, command_line)?;
    // More were refused.
    let processors = u8::try_from(vcpus).unwrap_or(mp_table::MAX_PROCESSORS);
    ram.write(MP_TABLE, &mp_table::build(processors))?;
    Ok(())
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
        let vcpu = vm.create_vcpu(id)?;
        // More were refused.
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
