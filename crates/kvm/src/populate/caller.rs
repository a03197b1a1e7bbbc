//! A thread that populates, as a participant at the VM's gate: slot transactions that stop vCPUs can
//! wait until it has left the ioctl, and can interrupt it by a signal.

use std::io;
use std::marker::PhantomData;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kvm_ioctls::VmFd;
use pagetide_memory::{GuestAddress, GuestRange};
use pagetide_uapi::generated as abi;
use vmm_sys_util::ioctl::ioctl_with_mut_ref;

use super::{PopulateError, PopulateFlags, Populated, Unfinished, rest};
use crate::gate::{InFlight, Participant};
use crate::kick::{Kickable, KickedThread};
use crate::vm::Inner;

/// The state that a populating thread shares with the threads that interrupt it.
#[derive(Debug, Default)]
pub(crate) struct CallerTarget {
    in_flight: InFlight,
    thread: KickedThread,
}

impl Participant for CallerTarget {
    fn in_flight(&self) -> &InFlight {
        &self.in_flight
    }
}

impl Kickable for CallerTarget {
    fn signal(&self) {
        self.thread.signal();
    }
}

/// The right of one thread at a time to populate.
#[derive(Debug)]
pub(crate) struct Caller<'vm> {
    vm: &'vm Inner,
    target: Arc<CallerTarget>,
}

impl<'vm> Caller<'vm> {
    /// Joins the gate. `range` is for the message if the kernel lacks the ioctl.
    pub(crate) fn new(vm: &'vm Inner, range: GuestRange) -> Result<Self, PopulateError> {
        if !vm.capabilities().populate_memory {
            return Err(PopulateError::MissingCapability {
                range,
                number: abi::KVM_CAP_POPULATE_MEMORY,
            });
        }
        let target = Arc::new(CallerTarget::default());
        let participant: Arc<dyn Kickable> = target.clone();
        vm.gate().add(&participant);
        Ok(Self { vm, target })
    }

    /// The receiver of signals.
    pub(crate) fn target(&self) -> Arc<CallerTarget> {
        Arc::clone(&self.target)
    }

    /// Directs signals to the calling thread until the result is dropped.
    pub(crate) fn bind(&self) -> BoundCaller<'_> {
        self.target.thread.set_here(self.vm.signals());
        BoundCaller {
            caller: self,
            this_thread: PhantomData,
        }
    }
}

/// A caller bound to its thread.
#[derive(Debug)]
pub(crate) struct BoundCaller<'caller> {
    caller: &'caller Caller<'caller>,
    /// Not Send: the binding is to this thread.
    this_thread: PhantomData<*const ()>,
}

impl BoundCaller<'_> {
    /// Populates `range`; continues after signals unless `stop` returns true.
    pub(crate) fn populate(
        &self,
        range: GuestRange,
        flags: PopulateFlags,
        stop: impl FnMut() -> bool,
    ) -> Result<Populated, PopulateError> {
        let Caller { vm, target } = self.caller;
        resume(range, flags, stop, |request| {
            // No callback runs in between, as the gate requires.
            vm.gate().enter(&target.in_flight);
            let result = populate_memory(vm.fd(), request);
            // A transaction's signal that arrives now or later interrupts nothing, or the next ioctl
            // once.
            vm.gate().leave(&target.in_flight);
            result
        })
    }
}

impl Drop for BoundCaller<'_> {
    fn drop(&mut self) {
        self.caller.target.thread.unset();
    }
}

/// KVM_POPULATE_MEMORY, gated by KVM_CAP_POPULATE_MEMORY. On a kernel without the capability the result
/// is ENOTTY; KVM itself returns ENOTTY on x86-64 and EINVAL on arm64 then.
pub(super) fn populate_memory(vm: &VmFd, request: &mut abi::kvm_populate_memory) -> io::Result<()> {
    // SAFETY: a VM's descriptor and the structure that this ioctl takes; the kernel writes only to that
    // structure, and maps the memory of the VM's slots, which the owner of each slot keeps mapped.
    match unsafe { ioctl_with_mut_ref(vm, abi::KVM_POPULATE_MEMORY.into(), request) } {
        0 => Ok(()),
        _ => {
            // Immediately, because later calls may change errno.
            let error = io::Error::last_os_error();
            let is_unknown = error.raw_os_error() == Some(libc::EINVAL)
                && vm.check_extension_raw(abi::KVM_CAP_POPULATE_MEMORY.into()) <= 0;
            Err(match is_unknown {
                true => io::Error::from_raw_os_error(libc::ENOTTY),
                false => error,
            })
        }
    }
}

/// Repeats the ioctl until the whole range is processed.
pub(super) fn resume(
    range: GuestRange,
    flags: PopulateFlags,
    mut stop: impl FnMut() -> bool,
    mut call: impl FnMut(&mut abi::kvm_populate_memory) -> io::Result<()>,
) -> Result<Populated, PopulateError> {
    let mut done = Populated::default();
    let mut left = range;
    let mut tries = 0;
    loop {
        let unfinished = |done, rest| Unfinished { done, rest };
        if stop() {
            let unfinished = unfinished(done, left);
            return Err(PopulateError::Interrupted { unfinished });
        }
        let mut request = abi::kvm_populate_memory {
            gpa: left.start().0,
            size: left.bytes(),
            flags: flags.bits(),
            ..abi::kvm_populate_memory::default()
        };
        let result = call(&mut request);
        done += Populated {
            mapped_bytes: request.mapped,
            absent_bytes: request.absent,
            poisoned_bytes: request.poisoned,
        };
        let Err(source) = result else {
            return Ok(done);
        };
        let gpa = GuestAddress(request.gpa);
        // An error after the last page: the range is complete.
        let Some(next) = rest(range, gpa) else {
            return Ok(done);
        };
        left = next;
        let unfinished = unfinished(done, left);
        return Err(match source.raw_os_error() {
            Some(libc::EINTR) => continue,
            // A slot update is in progress.
            Some(libc::EAGAIN) => {
                pause(tries);
                tries = tries.saturating_add(1);
                continue;
            }
            Some(libc::ENOENT) => PopulateError::NoSlot {
                gpa,
                unfinished,
                source,
            },
            Some(libc::ENOTTY) => PopulateError::MissingCapability {
                range,
                number: abi::KVM_CAP_POPULATE_MEMORY,
            },
            Some(libc::EINVAL) => PopulateError::Invalid {
                range,
                flags,
                source,
            },
            _ => PopulateError::Failed { unfinished, source },
        });
    }
}

/// Lets a slot update go on, which may wait for the processor that this thread uses.
fn pause(tries: u32) {
    const YIELDS: u32 = 16;
    const PAUSE: Duration = Duration::from_micros(100);
    if tries < YIELDS {
        thread::yield_now();
    } else {
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
#[path = "caller_tests.rs"]
mod tests;
