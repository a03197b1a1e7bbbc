//! vCPUs: run, registers, kicks.

use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use kvm_bindings::KVMIO;
use kvm_ioctls::VcpuFd;
use vmm_sys_util::ioctl::ioctl;
use vmm_sys_util::ioctl_io_nr;

use crate::exit::Exit;
use crate::kick::{self, KickTarget, VcpuKick};
use crate::vm::Inner;

// The number of KVM_RUN; kvm-ioctls has it, but keeps it to itself.
ioctl_io_nr!(KVM_RUN, KVMIO, 0x80);

/// Why KVM_RUN failed, other than a memory fault that the kernel explains.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// EFAULT without an annotation: KVM could not reach guest memory and does not say where.
    /// Retrying leads nowhere.
    #[error("vCPU {vcpu}: KVM_RUN: memory fault without an address{}", at_rip(*rip))]
    Fault {
        /// The vCPU's number.
        vcpu: u32,
        /// The guest's instruction pointer, if it could be read.
        rip: Option<u64>,
        /// EFAULT.
        #[source]
        source: io::Error,
    },
    /// EHWPOISON without an annotation: memory with an uncorrected error.
    #[error("vCPU {vcpu}: KVM_RUN: poisoned memory, no address given{}", at_rip(*rip))]
    Poisoned {
        /// The vCPU's number.
        vcpu: u32,
        /// The guest's instruction pointer, if it could be read.
        rip: Option<u64>,
        /// EHWPOISON.
        #[source]
        source: io::Error,
    },
    /// Any other errno.
    #[error("vCPU {vcpu}: KVM_RUN failed{}", at_rip(*rip))]
    Failed {
        /// The vCPU's number.
        vcpu: u32,
        /// The guest's instruction pointer, if it could be read.
        rip: Option<u64>,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

fn at_rip(rip: Option<u64>) -> String {
    rip.map_or_else(String::new, |rip| format!(" (rip {rip:#x})"))
}

/// Why a vCPU could not be bound to a thread: the kick signal's handler cannot be installed.
#[derive(Debug, thiserror::Error)]
#[error("cannot install the handler of signal {signal}, which kicks vCPUs")]
pub struct BindError {
    /// The signal.
    pub signal: i32,
    /// The kernel's answer.
    #[source]
    pub source: io::Error,
}

/// A vCPU. To run it, a thread binds it ([`Vcpu::bind`]).
#[derive(Debug)]
pub struct Vcpu {
    id: u32,
    fd: VcpuFd,
    kick: Arc<KickTarget>,
    // Last: the VM's memory outlives the vCPU.
    vm: Arc<Inner>,
}

impl Vcpu {
    pub(crate) fn new(id: u32, fd: VcpuFd, kick: KickTarget, vm: Arc<Inner>) -> Self {
        Self {
            id,
            fd,
            kick: Arc::new(kick),
            vm,
        }
    }

    /// The number that it was created with.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The `kvm-ioctls` handle, for registers and the like. Its `run` is not to be used: it knows
    /// nothing of kicks.
    #[must_use]
    pub fn fd(&self) -> &VcpuFd {
        &self.fd
    }

    /// A handle with which any thread can make this vCPU leave the guest.
    #[must_use]
    pub fn kick_handle(&self) -> VcpuKick {
        VcpuKick::new(Arc::clone(&self.kick))
    }

    /// Forgets kicks that have not been noticed yet.
    pub fn forget_kicks(&mut self) {
        self.kick.page.set_immediate_exit(false);
    }

    /// Binds the vCPU to the calling thread, to which kicks are then sent.
    ///
    /// # Errors
    /// The kick signal's handler cannot be installed.
    pub fn bind(&mut self) -> Result<BoundVcpu<'_>, BindError> {
        kick::install_handler().map_err(|source| BindError {
            signal: kick::kick_signal(),
            source,
        })?;
        self.kick.set_thread(Some(rustix::thread::gettid()));
        Ok(BoundVcpu {
            vcpu: self,
            this_thread: PhantomData,
        })
    }

    /// The guest's instruction pointer; None if it cannot be read.
    #[must_use]
    pub fn rip(&self) -> Option<u64> {
        #[cfg(target_arch = "x86_64")]
        let rip = self.fd.get_regs().ok().map(|regs| regs.rip);
        #[cfg(not(target_arch = "x86_64"))]
        let rip = None;
        rip
    }

    pub(crate) fn vm(&self) -> &Inner {
        &self.vm
    }
}

/// A vCPU on the thread that runs it. Kicks reach that thread until this value is dropped.
#[derive(Debug)]
pub struct BoundVcpu<'vcpu> {
    vcpu: &'vcpu mut Vcpu,
    /// Not Send: the binding is to this thread.
    this_thread: PhantomData<*const ()>,
}

impl BoundVcpu<'_> {
    /// Enters the guest until it exits: one ioctl, no allocation.
    ///
    /// # Errors
    /// [`RunError`], unless the kernel explains the failure, which is an [`Exit::Fault`], or a
    /// signal caused it, which is [`Exit::Interrupted`].
    #[inline]
    pub fn run(&mut self) -> Result<Exit, RunError> {
        let page = &self.vcpu.kick.page;
        page.forget_exit();
        // SAFETY: KVM_RUN on a vCPU descriptor takes no argument. It lets the guest write to the
        // memory of the VM's slots only, which `Vm` keeps mapped and which no Rust reference
        // covers, and to kvm_run, which RunPage reads by volatile accesses.
        let status = unsafe { ioctl(&self.vcpu.fd, KVM_RUN()) };
        if status == 0 {
            Ok(page.exit())
        } else {
            self.failed_run()
        }
    }

    fn failed_run(&mut self) -> Result<Exit, RunError> {
        let source = io::Error::last_os_error();
        let page = &self.vcpu.kick.page;
        let errno = source.raw_os_error().unwrap_or(0);
        match errno {
            libc::EINTR => {
                page.set_immediate_exit(false);
                return Ok(Exit::Interrupted);
            }
            libc::EFAULT | libc::EHWPOISON => {
                if let Some(fault) = page.memory_fault(errno == libc::EHWPOISON) {
                    return Ok(Exit::Fault(fault));
                }
            }
            _ => {}
        }
        let (vcpu, rip) = (self.id, self.rip());
        Err(match errno {
            libc::EFAULT => RunError::Fault { vcpu, rip, source },
            libc::EHWPOISON => RunError::Poisoned { vcpu, rip, source },
            _ => RunError::Failed { vcpu, rip, source },
        })
    }

    /// Completes the I/O instruction of the last exit without running the guest any further, so
    /// that registers can be set afresh.
    ///
    /// # Errors
    /// As [`BoundVcpu::run`].
    pub fn complete_io(&mut self) -> Result<(), RunError> {
        self.vcpu.kick.page.set_immediate_exit(true);
        let result = self.run();
        self.vcpu.kick.page.set_immediate_exit(false);
        result.map(|_| ())
    }
}

impl Deref for BoundVcpu<'_> {
    type Target = Vcpu;

    fn deref(&self) -> &Vcpu {
        self.vcpu
    }
}

impl DerefMut for BoundVcpu<'_> {
    fn deref_mut(&mut self) -> &mut Vcpu {
        self.vcpu
    }
}

impl Drop for BoundVcpu<'_> {
    fn drop(&mut self) {
        self.vcpu.kick.set_thread(None);
    }
}
