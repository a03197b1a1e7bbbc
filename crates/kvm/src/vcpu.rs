//! vCPUs: running, registers, kicks.

use std::ffi::c_void;
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use kvm_bindings::KVMIO;
use kvm_ioctls::VcpuFd;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};

use crate::exit::Exit;
use crate::gate::Participant;
use crate::kick::{KickTarget, Kickable, VcpuKick};
use crate::poison::{Report, Severity, catching};
use crate::signals::kick_signal;
use crate::vm::Inner;

/// KVM_RUN, which takes no argument. kvm-ioctls has it, but does not export it.
struct KvmRun;

// SAFETY: Ioctl requires a number and an argument that belong together, and a declaration of what the
// call writes. It has no argument, but it writes to kvm_run and to guest memory: it must not be
// declared as a call that leaves memory unchanged.
unsafe impl Ioctl for KvmRun {
    type Output = ();

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        opcode::none(KVMIO.to_le_bytes()[0], 0x80)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

/// Why KVM_RUN failed, except for an annotated memory fault.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// EFAULT without an annotation: KVM could not reach guest memory and does not report where. A
    /// retry fails again.
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
    /// EHWPOISON without an annotation, or SIGBUS for memory outside the VM's slots: the memory has an
    /// uncorrected error.
    #[error("vCPU {vcpu}: KVM_RUN: poisoned memory without an address{}", at_rip(*rip))]
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
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

fn at_rip(rip: Option<u64>) -> String {
    let name = if cfg!(target_arch = "x86_64") {
        "rip"
    } else {
        "pc"
    };
    rip.map_or_else(String::new, |rip| format!(" ({name} {rip:#x})"))
}

/// Why a vCPU could not be bound to a thread.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The thread blocks the kick signal.
    #[error("this thread blocks signal {signal}, which kicks vCPUs")]
    Blocked {
        /// The signal.
        signal: i32,
    },
    /// The thread's signal mask cannot be read.
    #[error("cannot read which signals this thread blocks")]
    Mask(#[source] io::Error),
}

/// A vCPU. To run it, a thread binds it ([`Vcpu::bind`]).
#[derive(Debug)]
pub struct Vcpu {
    id: u32,
    fd: VcpuFd,
    kick: Arc<KickTarget>,
    /// Memory with an error that was met when KVM_RUN returned for another reason: reported as the next
    /// exit.
    late_report: Option<Report>,
    // Last: the VM's memory outlives the vCPU.
    vm: Arc<Inner>,
}

impl Vcpu {
    pub(crate) fn new(id: u32, fd: VcpuFd, kick: KickTarget, vm: Arc<Inner>) -> Self {
        let kick = Arc::new(kick);
        let participant: Arc<dyn Kickable> = kick.clone();
        vm.gate().add(&participant);
        Self {
            id,
            fd,
            kick,
            late_report: None,
            vm,
        }
    }

    /// The vCPU's number at creation.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The `kvm-ioctls` handle, for the vCPU's set-up and for ioctls that this crate does not wrap.
    ///
    /// Do not use its `run`, which does not handle kicks. A slot transaction that quiesces does not
    /// wait for ioctls through this handle. Where slots may change meanwhile, use [`Vcpu::set_sregs`],
    /// [`Vcpu::set_msrs`] and the like for ioctls that access guest memory.
    #[must_use]
    pub fn fd(&self) -> &VcpuFd {
        &self.fd
    }

    /// A handle with which any thread can make this vCPU leave the guest.
    #[must_use]
    pub fn kick_handle(&self) -> VcpuKick {
        VcpuKick::new(Arc::clone(&self.kick))
    }

    /// Discards kicks that have not taken effect yet.
    pub fn forget_kicks(&mut self) {
        self.kick.take_kick();
    }

    /// Binds the vCPU to the calling thread, which then receives kicks by the VM's kick signal. Changes
    /// nothing about the process.
    ///
    /// # Errors
    /// See [`BindError`].
    pub fn bind(&mut self) -> Result<BoundVcpu<'_>, BindError> {
        let signals = self.vm.signals();
        if signals.is_blocked().map_err(BindError::Mask)? {
            let signal = kick_signal();
            return Err(BindError::Blocked { signal });
        }
        self.kick.thread().set_here(signals);
        Ok(BoundVcpu {
            vcpu: self,
            this_thread: PhantomData,
        })
    }

    /// The receiver of kicks.
    pub(crate) fn kickable(&self) -> Arc<dyn Kickable> {
        self.kick.clone()
    }

    /// Makes one ioctl that does not overlap the update of a slot transaction. `call` is this crate's
    /// own code and must wait only for that ioctl.
    pub(crate) fn held<T>(&self, call: impl FnOnce(&VcpuFd) -> T) -> T {
        let in_flight = self.kick.in_flight();
        self.vm.gate().enter(in_flight);
        let result = call(&self.fd);
        if self.vm.gate().leave(in_flight) {
            self.kick.expect_late_kick(true);
        }
        result
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
    /// Enters the guest until it exits: one ioctl, one atomic operation on either side, no allocation.
    /// A slot transaction that stops the vCPU meanwhile is not visible: the vCPU enters again when the
    /// transaction has ended.
    ///
    /// A signal other than a kick is reported as [`Exit::Interrupted`], unless it coincides with a slot
    /// transaction; use a [`VcpuKick`] for interruptions that must not be missed.
    ///
    /// # Errors
    /// [`RunError`], unless the kernel annotates the failure, which gives [`Exit::Fault`], or a signal
    /// caused it, which gives [`Exit::Interrupted`].
    #[inline]
    pub fn run(&mut self) -> Result<Exit, RunError> {
        if let Some(report) = self.vcpu.late_report.take() {
            return self.poisoned(report);
        }
        loop {
            let (result, kicked, poison) = self.enter_guest();
            // A transaction sets `immediate_exit` and sends signals only while the gate is closed and
            // this vCPU inside. `kicked` is therefore true for every KVM_RUN that a transaction
            // interrupts. If KVM_RUN ends by itself at that moment, `kicked` is true as well: the flag
            // or the signal interrupts the next KVM_RUN, which consumes both.
            let late = self.vcpu.kick.expect_late_kick(kicked);
            let Err(source) = result else {
                // The exit comes first, because it may need an answer.
                self.vcpu.late_report = poison;
                return Ok(self.vcpu.kick.page.exit());
            };
            // A kick that arrived as well stays pending, and interrupts the next KVM_RUN.
            if let Some(report) = poison {
                return self.poisoned(report);
            }
            // First the most frequent case while a guest waits for its memory.
            if source.raw_os_error() == Some(libc::EFAULT)
                && let Some(fault) = self.vcpu.kick.page.memory_fault(false)
            {
                return Ok(Exit::Fault(fault));
            }
            // A vCPU that waited for its start-up IPI received it, and KVM_RUN must be called again. A
            // kick that arrived meanwhile interrupts that call.
            if source.raw_os_error() == Some(libc::EAGAIN) {
                continue;
            }
            let interrupted = source.raw_os_error() == Some(libc::EINTR);
            if interrupted && !self.vcpu.kick.take_kick() && (kicked || late) {
                continue;
            }
            return self.explain(source);
        }
    }

    /// As [`Vcpu::held`], for an ioctl of the bound vCPU that may take long. Also returns whether a
    /// slot transaction kicked the vCPU, now or during the last ioctl, so that its signal may have
    /// arrived now.
    pub(crate) fn held_and_kicked<T>(&mut self, call: impl FnOnce(&VcpuFd) -> T) -> (T, bool) {
        let Vcpu { fd, kick, vm, .. } = &*self.vcpu;
        vm.gate().enter(kick.in_flight());
        let result = call(fd);
        let kicked = vm.gate().leave(kick.in_flight());
        // KVM_RUN has not seen `immediate_exit`, so an earlier late kick is still expected.
        let late = kick.expect_late_kick(kicked);
        kick.expect_late_kick(kicked || late);
        (result, kicked || late)
    }

    /// Whether a caller's kick is pending.
    pub(crate) fn has_kick(&self) -> bool {
        self.vcpu.kick.has_kick()
    }

    /// One KVM_RUN, which does not overlap the update of a slot transaction. Also returns whether a
    /// transaction kicked the vCPU meanwhile, and the memory with an uncorrected error that KVM_RUN
    /// met, if any.
    #[inline]
    fn enter_guest(&mut self) -> (io::Result<()>, bool, Option<Report>) {
        let Vcpu { fd, kick, vm, .. } = &*self.vcpu;
        // SAFETY: borrow_raw requires a descriptor that stays open: the vCPU keeps it.
        let fd = unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
        vm.gate().enter(kick.in_flight());
        kick.page.forget_fault();
        let (result, poison) = catching(|| {
            // SAFETY: KVM_RUN on a vCPU descriptor takes no argument. It lets the guest write to the
            // memory of the VM's slots only, which `Vm` keeps mapped and which no Rust reference
            // covers, and to kvm_run, which RunPage reads by volatile accesses.
            unsafe { ioctl(fd, KvmRun) }.map_err(io::Error::from)
        });
        (result, vm.gate().leave(kick.in_flight()), poison)
    }

    /// The result when SIGBUS was raised in KVM_RUN.
    #[cold]
    fn poisoned(&self, report: Report) -> Result<Exit, RunError> {
        match self.vm().error_at(report, Severity::ActionRequired) {
            Some(error) => Ok(Exit::Fault(error.exit())),
            // The slot was deleted in the meantime, or the memory is not this VM's.
            None => Err(RunError::Poisoned {
                vcpu: self.id,
                rip: self.rip(),
                source: io::Error::from_raw_os_error(libc::EHWPOISON),
            }),
        }
    }

    /// Translates a failed KVM_RUN for its caller.
    #[cold]
    fn explain(&self, source: io::Error) -> Result<Exit, RunError> {
        let page = &self.vcpu.kick.page;
        let errno = source.raw_os_error().unwrap_or(0);
        match errno {
            libc::EINTR => return Ok(Exit::Interrupted),
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

    /// The elements of the OUT for which [`BoundVcpu::run`] returned, each zero-extended: one, or
    /// several for a string instruction. Empty after any other exit.
    #[must_use]
    pub fn out_elements(&self) -> Vec<u32> {
        self.vcpu.kick.page.out_elements()
    }

    /// Supplies the values of the IN for which [`BoundVcpu::run`] returned; `answer` is called once per
    /// element, whose low bytes the guest receives. Does nothing after any other exit.
    pub fn answer_in(&mut self, answer: impl FnMut() -> u32) {
        self.vcpu.kick.page.answer_in(answer);
    }

    /// Supplies the value of the read outside all memory slots ([`Exit::Mmio`]) for which
    /// [`BoundVcpu::run`] returned; the guest receives the low bytes. Does nothing after any other
    /// exit.
    pub fn answer_mmio(&mut self, answer: u64) {
        self.vcpu.kick.page.answer_mmio(answer);
    }

    /// What the guest wrote outside all memory ([`Exit::Mmio`]), little endian and zero-extended;
    /// None unless [`BoundVcpu::run`] returned for such a write.
    #[must_use]
    pub fn written_mmio(&self) -> Option<u64> {
        self.vcpu.kick.page.written_mmio()
    }

    /// Completes the I/O instruction of the last exit without running the guest further, so that
    /// registers can be set afterwards. Pending kicks stay pending.
    ///
    /// # Errors
    /// As [`BoundVcpu::run`].
    pub fn complete_io(&mut self) -> Result<(), RunError> {
        self.vcpu.kick.page.set_immediate_exit(true);
        let (result, kicked, poison) = self.enter_guest();
        self.vcpu.kick.expect_late_kick(kicked);
        self.vcpu.kick.restore_immediate_exit();
        let is_interrupted = poison.is_some();
        self.vcpu.late_report = poison.or(self.vcpu.late_report);
        match result {
            Ok(()) => Ok(()),
            // The report interrupted KVM_RUN, and is returned by the next run.
            Err(_) if is_interrupted => Ok(()),
            Err(source) => self.explain(source).map(|_| ()),
        }
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
        self.vcpu.kick.thread().unset();
    }
}
