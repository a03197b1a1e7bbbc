//! Telling the guest: machine checks.
//!
//! A guest's kernel kills the process that touched lost memory, and goes on, only if it finds in the
//! registers of the machine check what a processor would have left there. What Linux looks at is in
//! its `arch/x86/kernel/cpu/mce/severity.c`; `docs/design/poison.md` has the bits and their reasons.

use std::io;

use pagetide_memory::GuestAddress;

#[cfg(target_arch = "x86_64")]
pub use x86::prepare_cpuid;

use super::Severity;

/// Whose processors' machine checks the guest expects, by its own CPUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MachineCheckForm {
    /// Intel's, and everybody's who is not AMD: every vCPU of the guest has to be told
    /// ([`MachineCheck::bystander`]), since Linux waits for all of them.
    Intel,
    /// AMD's and Hygon's: only the vCPU that touched the memory is told.
    Amd,
}

/// A machine check as the guest finds it in the registers of a bank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineCheck {
    /// IA32_MCi_STATUS.
    pub status: u64,
    /// IA32_MCi_ADDR: a gpa.
    pub addr: u64,
    /// IA32_MCi_MISC.
    pub misc: u64,
    /// IA32_MCG_STATUS.
    pub mcg_status: u64,
}

const VAL: u64 = 1 << 63;
const UC: u64 = 1 << 61;
const EN: u64 = 1 << 60;
const MISCV: u64 = 1 << 59;
const ADDRV: u64 = 1 << 58;
/// Intel: signalled by an exception.
const S: u64 = 1 << 56;
/// Intel: action required.
const AR: u64 = 1 << 55;
/// AMD: an error that nobody has consumed.
const DEFERRED: u64 = 1 << 44;
/// AMD: the data is marked as poison, and the address is good.
const POISON: u64 = 1 << 43;
/// Intel's error codes: a load of data, and memory scrubbing.
const DATA_LOAD: u64 = 0x0134;
const SCRUBBING: u64 = 0x00c0;
/// The instruction pointer on the stack can be returned to; it belongs to the error; a machine check
/// is in progress.
const RIPV: u64 = 1 << 0;
const EIPV: u64 = 1 << 1;
const MCIP: u64 = 1 << 2;
/// The address is a physical one, and good to 4 KiB. Linux takes no coarser one.
const PHYSICAL_4K: u64 = 2 << 6 | 12;

impl MachineCheck {
    /// The machine check for an error at `gpa`. It takes 4 KiB from the guest, whatever the host has
    /// lost: the guest is told of the rest when it touches it.
    #[must_use]
    pub const fn new(form: MachineCheckForm, severity: Severity, gpa: GuestAddress) -> Self {
        let (status, misc) = match form {
            MachineCheckForm::Intel => (UC | MISCV | S, PHYSICAL_4K),
            MachineCheckForm::Amd => (POISON, 0),
        };
        let status = status
            | match (form, severity) {
                (MachineCheckForm::Intel, Severity::ActionRequired) => AR | DATA_LOAD,
                (MachineCheckForm::Intel, Severity::ActionOptional) => SCRUBBING,
                (MachineCheckForm::Amd, Severity::ActionRequired) => UC,
                (MachineCheckForm::Amd, Severity::ActionOptional) => DEFERRED,
            };
        let mcg_status = match severity {
            Severity::ActionRequired => MCIP | RIPV | EIPV,
            Severity::ActionOptional => MCIP | RIPV,
        };
        Self {
            status: status | VAL | EN | ADDRV,
            addr: gpa.0 & !0xfff,
            misc,
            mcg_status,
        }
    }

    /// What the other vCPUs of a guest that expects Intel's form are to be told: that there is a
    /// machine check, and that it is not theirs.
    #[must_use]
    pub const fn bystander() -> Self {
        Self {
            status: VAL | UC,
            addr: 0,
            misc: 0,
            mcg_status: MCIP | RIPV,
        }
    }

    /// Whether it comes as an exception. AMD's errors that nobody has consumed do not: the guest
    /// finds them when it looks at its banks.
    #[must_use]
    pub const fn is_exception(&self) -> bool {
        self.status & UC != 0
    }
}

/// What became of a machine check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Injected {
    /// The guest gets the exception at the next KVM_RUN.
    Exception,
    /// It is in the bank, without an exception.
    Logged,
}

/// Why a guest cannot take a machine check as an exception. A processor would shut down, and so would
/// KVM (a triple fault), or nothing would happen and the guest would touch the memory again for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotReady {
    /// CR4.MCE is clear.
    #[error("it has not turned machine checks on (CR4.MCE)")]
    TurnedOff,
    /// MCIP is set: it is handling one, and has touched lost memory in doing so.
    #[error("it is handling a machine check (MCIP)")]
    InProgress,
    /// It has turned reporting off, for all banks or for the one that is used.
    #[error("it has turned the reporting of uncorrected errors off")]
    NotReported,
}

/// A CPUID has no room for another leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the CPUID has no room for the leaf that says that machine checks can be survived")]
pub struct CpuidFull;

/// Why a guest could not be told.
#[derive(Debug, thiserror::Error)]
pub enum MachineCheckError {
    /// This architecture has no machine checks, or KVM does not have them (KVM_CAP_MCE).
    #[error("vCPU {vcpu}: machine checks cannot be injected on this architecture or kernel")]
    Unsupported {
        /// The vCPU's number.
        vcpu: u32,
    },
    /// The guest cannot take it; nothing was injected, and the guest must not be entered again.
    #[error("vCPU {vcpu}: the guest cannot take a machine check: {why}")]
    NotReady {
        /// The vCPU's number.
        vcpu: u32,
        /// Why.
        why: NotReady,
    },
    /// The kernel refused an ioctl.
    #[error("vCPU {vcpu}: {call} failed")]
    Failed {
        /// The vCPU's number.
        vcpu: u32,
        /// The ioctl.
        call: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

#[cfg(not(target_arch = "x86_64"))]
impl crate::Vcpu {
    /// Not on this architecture yet: an arm64 guest is told by a synchronous external abort with a
    /// record in its ACPI tables.
    ///
    /// # Errors
    /// Always [`MachineCheckError::Unsupported`].
    pub fn enable_machine_checks(&self) -> Result<MachineCheckForm, MachineCheckError> {
        Err(MachineCheckError::Unsupported { vcpu: self.id() })
    }

    /// Not on this architecture yet.
    ///
    /// # Errors
    /// Always [`MachineCheckError::Unsupported`].
    pub fn inject_machine_check(&self, _: &MachineCheck) -> Result<Injected, MachineCheckError> {
        Err(MachineCheckError::Unsupported { vcpu: self.id() })
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::io;

    use kvm_bindings::{
        CpuId, KVM_CAP_MCE, KVM_MAX_CPUID_ENTRIES, KVMIO, Msrs, kvm_cpuid_entry2, kvm_msr_entry,
        kvm_x86_mce,
    };
    use vmm_sys_util::ioctl::ioctl_with_ref;
    use vmm_sys_util::ioctl_iow_nr;

    use super::{CpuidFull, Injected, MachineCheck, MachineCheckError, MachineCheckForm, NotReady};
    use crate::os_error;
    use crate::vcpu::Vcpu;

    // kvm-ioctls lacks them.
    ioctl_iow_nr!(KVM_X86_SETUP_MCE, KVMIO, 0x9c, u64);
    ioctl_iow_nr!(KVM_X86_SET_MCE, KVMIO, 0x9e, kvm_x86_mce);

    /// How many banks a vCPU has, and the one that is used: none of the first, for which kernels have
    /// special cases.
    const BANKS: u64 = 10;
    const BANK: u8 = 9;
    /// IA32_MCG_CAP: IA32_MCG_CTL exists; software can recover.
    const MCG_CTL_P: u64 = 1 << 8;
    const MCG_SER_P: u64 = 1 << 24;

    const MSR_MCG_STATUS: u32 = 0x17a;
    const MSR_MCG_CTL: u32 = 0x17b;
    const MSR_MC9_CTL: u32 = 0x400 + 4 * BANK as u32;
    const CR4_MCE: u64 = 1 << 6;

    const LEAF_FEATURES: u32 = 1;
    const MCE_AND_MCA: u32 = 1 << 7 | 1 << 14;
    const LEAF_RAS: u32 = 0x8000_0007;
    const OVERFLOW_RECOV_AND_SUCCOR: u32 = 1 << 0 | 1 << 1;

    /// The form that a guest with this CPUID expects.
    fn form_of(cpuid: &CpuId) -> MachineCheckForm {
        let vendor = cpuid.as_slice().iter().find(|leaf| leaf.function == 0);
        let vendor = vendor.map(|leaf| [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes));
        let name = vendor.as_ref().map(|words| words.as_flattened());
        match name {
            Some(b"AuthenticAMD" | b"HygonGenuine") => MachineCheckForm::Amd,
            _ => MachineCheckForm::Intel,
        }
    }

    /// Says in a CPUID, before it is given to a vCPU, what a guest must see there to survive machine
    /// checks: machine checks at all, and for AMD's form that software can recover (SUCCOR), which
    /// KVM does not report by itself and without which Linux panics. Returns the form.
    ///
    /// # Errors
    /// [`CpuidFull`].
    pub fn prepare_cpuid(cpuid: &mut CpuId) -> Result<MachineCheckForm, CpuidFull> {
        let form = form_of(cpuid);
        let leaf = |cpuid: &CpuId, function| {
            let mut leaves = cpuid.as_slice().iter();
            leaves.position(|leaf| leaf.function == function)
        };
        if let Some(index) = leaf(cpuid, LEAF_FEATURES) {
            cpuid.as_mut_slice()[index].edx |= MCE_AND_MCA;
        }
        if form == MachineCheckForm::Amd {
            match leaf(cpuid, LEAF_RAS) {
                Some(index) => cpuid.as_mut_slice()[index].ebx |= OVERFLOW_RECOV_AND_SUCCOR,
                None => cpuid
                    .push(kvm_cpuid_entry2 {
                        function: LEAF_RAS,
                        ebx: OVERFLOW_RECOV_AND_SUCCOR,
                        ..kvm_cpuid_entry2::default()
                    })
                    .map_err(|_| CpuidFull)?,
            }
        }
        Ok(form)
    }

    impl Vcpu {
        fn mce_failed(&self, call: &'static str, source: io::Error) -> MachineCheckError {
            let vcpu = self.id();
            MachineCheckError::Failed { vcpu, call, source }
        }

        /// Gives the vCPU banks of machine check registers (KVM_X86_SETUP_MCE, gated by
        /// KVM_CAP_MCE): after its CPUID was set (see [`prepare_cpuid`]), before it runs. Returns the
        /// form of machine checks that the guest expects, by that CPUID.
        ///
        /// # Errors
        /// [`MachineCheckError::Unsupported`], or what the kernel says.
        pub fn enable_machine_checks(&self) -> Result<MachineCheckForm, MachineCheckError> {
            let banks = self.vm().fd().check_extension_raw(KVM_CAP_MCE.into());
            if u64::try_from(banks).unwrap_or(0) < BANKS {
                return Err(MachineCheckError::Unsupported { vcpu: self.id() });
            }
            let cpuid = self
                .fd()
                .get_cpuid2(KVM_MAX_CPUID_ENTRIES)
                .map_err(|errno| self.mce_failed("KVM_GET_CPUID2", os_error(errno)))?;
            let capabilities = BANKS | MCG_CTL_P | MCG_SER_P;
            let setup = self.held(|fd| {
                // SAFETY: a vCPU descriptor and the number that this ioctl reads.
                match unsafe { ioctl_with_ref(fd, KVM_X86_SETUP_MCE(), &capabilities) } {
                    0 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                }
            });
            setup.map_err(|source| self.mce_failed("KVM_X86_SETUP_MCE", source))?;
            Ok(form_of(&cpuid))
        }

        /// Has the guest get a machine check on this vCPU (KVM_X86_SET_MCE), which
        /// [`Vcpu::enable_machine_checks`] has prepared. To be called by the vCPU's thread, outside
        /// [`run`](crate::BoundVcpu::run).
        ///
        /// # Errors
        /// [`MachineCheckError::NotReady`] if the guest cannot take it as an exception; it must be
        /// stopped then, as a processor would stop. Else what the kernel says.
        pub fn inject_machine_check(
            &self,
            check: &MachineCheck,
        ) -> Result<Injected, MachineCheckError> {
            if check.is_exception()
                && let Some(why) = self.cannot_take()?
            {
                return Err(MachineCheckError::NotReady {
                    vcpu: self.id(),
                    why,
                });
            }
            let mce = kvm_x86_mce {
                status: check.status,
                addr: check.addr,
                misc: check.misc,
                mcg_status: check.mcg_status,
                bank: BANK,
                ..kvm_x86_mce::default()
            };
            let set = self.held(|fd| {
                // SAFETY: a vCPU descriptor and the structure that this ioctl reads.
                match unsafe { ioctl_with_ref(fd, KVM_X86_SET_MCE(), &mce) } {
                    0 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                }
            });
            set.map_err(|source| self.mce_failed("KVM_X86_SET_MCE", source))?;
            Ok(if check.is_exception() {
                Injected::Exception
            } else {
                Injected::Logged
            })
        }

        /// Why KVM would shut the guest down, or say nothing to it.
        fn cannot_take(&self) -> Result<Option<NotReady>, MachineCheckError> {
            let sregs = self
                .sregs()
                .map_err(|source| self.mce_failed("KVM_GET_SREGS", source))?;
            if sregs.cr4 & CR4_MCE == 0 {
                return Ok(Some(NotReady::TurnedOff));
            }
            let entry = |index| kvm_msr_entry {
                index,
                ..kvm_msr_entry::default()
            };
            let failed = |source| self.mce_failed("KVM_GET_MSRS", source);
            let mut msrs =
                Msrs::from_entries(&[MSR_MCG_STATUS, MSR_MCG_CTL, MSR_MC9_CTL].map(entry))
                    .map_err(|_| failed(io::Error::from(io::ErrorKind::OutOfMemory)))?;
            let read = self.held(|fd| fd.get_msrs(&mut msrs));
            read.map_err(|errno| failed(os_error(errno)))?;
            let values: Vec<_> = msrs.as_slice().iter().map(|msr| msr.data).collect();
            let &[status, control, bank] = &*values else {
                return Err(failed(io::Error::from(io::ErrorKind::InvalidData)));
            };
            Ok(if status & super::MCIP != 0 {
                Some(NotReady::InProgress)
            } else if control != u64::MAX || bank != u64::MAX {
                Some(NotReady::NotReported)
            } else {
                None
            })
        }
    }
}

#[cfg(test)]
mod tests;
