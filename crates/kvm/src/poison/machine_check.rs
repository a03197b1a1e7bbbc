//! Machine checks: the report of an error to the guest.
//!
//! A guest kernel kills only the process that accessed lost memory if the machine check registers hold
//! what a processor would have written there. Linux evaluates them in
//! `arch/x86/kernel/cpu/mce/severity.c`; `docs/design/poison.md` explains each bit.

use std::io;

use pagetide_memory::GuestAddress;

#[cfg(target_arch = "x86_64")]
pub use x86::prepare_cpuid;

use super::Severity;

/// The vendor whose machine checks the guest expects, by its CPUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MachineCheckForm {
    /// Intel's, and every vendor's but AMD's: every vCPU of the guest must receive a machine check
    /// ([`MachineCheck::bystander`]), because Linux waits for all of them.
    Intel,
    /// AMD's and Hygon's: only the vCPU that accessed the memory receives a machine check.
    Amd,
}

/// A machine check, as the registers of a bank show it to the guest.
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
/// AMD: an error whose data was not consumed.
const DEFERRED: u64 = 1 << 44;
/// AMD: the data is marked as poison, and the address is valid.
const POISON: u64 = 1 << 43;
/// Intel's error codes: a data load, and memory scrubbing.
const DATA_LOAD: u64 = 0x0134;
const SCRUBBING: u64 = 0x00c0;
/// The instruction pointer on the stack is valid for returning; it belongs to the error; a machine
/// check is in progress.
const RIPV: u64 = 1 << 0;
const EIPV: u64 = 1 << 1;
const MCIP: u64 = 1 << 2;
/// The address is physical and valid to 4 KiB. Linux accepts no coarser granularity.
const PHYSICAL_4K: u64 = 2 << 6 | 12;

impl MachineCheck {
    /// The machine check for an error at `gpa`. It reports 4 KiB as lost, however much the host has
    /// lost: further accesses report the rest.
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

    /// The machine check for the other vCPUs of a guest that expects Intel's form: it reports that a
    /// machine check is in progress and that this vCPU did not cause it.
    #[must_use]
    pub const fn bystander() -> Self {
        Self {
            status: VAL | UC,
            addr: 0,
            misc: 0,
            mcg_status: MCIP | RIPV,
        }
    }

    /// Whether it raises an exception. AMD's deferred errors do not: the guest finds them when it polls
    /// its banks.
    #[must_use]
    pub const fn is_exception(&self) -> bool {
        self.status & UC != 0
    }
}

/// The result of an injection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Injected {
    /// The guest receives the exception at the next KVM_RUN.
    Exception,
    /// The bank holds the error, without an exception.
    Logged,
}

/// Why a guest cannot receive a machine check as an exception. A processor would shut down, and KVM
/// would too (triple fault); or nothing would happen and the guest would repeat the access forever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotReady {
    /// CR4.MCE is clear.
    #[error("it has not enabled machine checks (CR4.MCE)")]
    TurnedOff,
    /// MCIP is set: the guest accessed lost memory while it handled a machine check.
    #[error("it is handling a machine check (MCIP)")]
    InProgress,
    /// The guest has disabled reporting, for all banks or for the one that is used.
    #[error("it has disabled the reporting of uncorrected errors")]
    NotReported,
}

/// A CPUID cannot hold another leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the CPUID has no room for the leaf that declares recovery from machine checks")]
pub struct CpuidFull;

/// Why the error could not be reported to the guest.
#[derive(Debug, thiserror::Error)]
pub enum MachineCheckError {
    /// This architecture has no machine checks, or KVM does not have them (KVM_CAP_MCE).
    #[error("vCPU {vcpu}: machine checks cannot be injected on this architecture or kernel")]
    Unsupported {
        /// The vCPU's number.
        vcpu: u32,
    },
    /// The guest cannot receive the machine check. Nothing was injected, and the guest must not be
    /// entered again.
    #[error("vCPU {vcpu}: the guest cannot receive a machine check: {why}")]
    NotReady {
        /// The vCPU's number.
        vcpu: u32,
        /// The reason.
        why: NotReady,
    },
    /// The kernel refused an ioctl.
    #[error("vCPU {vcpu}: {call} failed")]
    Failed {
        /// The vCPU's number.
        vcpu: u32,
        /// The ioctl.
        call: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

#[cfg(not(target_arch = "x86_64"))]
impl crate::Vcpu {
    /// Not supported on this architecture: arm64 guests need a synchronous external abort with a record
    /// in their ACPI tables.
    ///
    /// # Errors
    /// Always [`MachineCheckError::Unsupported`].
    pub fn enable_machine_checks(&self) -> Result<MachineCheckForm, MachineCheckError> {
        Err(MachineCheckError::Unsupported { vcpu: self.id() })
    }

    /// Not supported on this architecture.
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

    /// The number of banks of a vCPU, and the bank that is used: not one of the first, which kernels
    /// treat specially.
    const BANKS: u64 = 10;
    const BANK: u8 = 9;
    /// IA32_MCG_CAP: IA32_MCG_CTL exists; software can recover from errors.
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

    /// Declares in a CPUID, before it is set on a vCPU, what a guest needs to survive machine checks:
    /// machine checks themselves, and for AMD's form software recovery (SUCCOR), which KVM does not
    /// declare and without which Linux panics. Returns the form.
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

        /// Gives the vCPU banks of machine check registers (KVM_X86_SETUP_MCE, gated by KVM_CAP_MCE).
        /// Call this after setting the CPUID (see [`prepare_cpuid`]) and before the vCPU runs. Returns
        /// the form of machine checks that the guest expects, by that CPUID.
        ///
        /// # Errors
        /// [`MachineCheckError::Unsupported`], or the kernel's error.
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

        /// Injects a machine check into this vCPU (KVM_X86_SET_MCE), which
        /// [`Vcpu::enable_machine_checks`] has prepared. Call this on the vCPU's thread, outside
        /// [`run`](crate::BoundVcpu::run).
        ///
        /// # Errors
        /// [`MachineCheckError::NotReady`] if the guest cannot receive the exception; stop the guest
        /// then, as a processor would. Otherwise the kernel's error.
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

        /// Why KVM would shut the guest down, or not raise the exception; None if neither.
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
