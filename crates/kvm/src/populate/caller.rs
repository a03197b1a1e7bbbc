//! Who populates: a seat at the VM's gate, so that slot transactions that stop vCPUs can tell when
//! nobody is in the ioctl, and a thread to send the signal to that ends it.

use std::io;
use std::marker::PhantomData;
use std::sync::Arc;

use kvm_ioctls::VmFd;
use pagetide_memory::{GuestAddress, GuestRange};
use pagetide_uapi::generated as abi;
use vmm_sys_util::ioctl::ioctl_with_mut_ref;

use super::{PopulateError, PopulateFlags, Populated, Unfinished, rest};
use crate::gate::{Occupant, Seat};
use crate::kick::{Kickable, KickedThread};
use crate::vm::Inner;

/// What a thread that populates and those that interrupt it share.
#[derive(Debug, Default)]
pub(crate) struct CallerSeat {
    seat: Seat,
    thread: KickedThread,
}

impl Occupant for CallerSeat {
    fn seat(&self) -> &Seat {
        &self.seat
    }
}

impl Kickable for CallerSeat {
    fn signal(&self) {
        self.thread.signal();
    }
}

/// The right to populate, for one thread at a time.
#[derive(Debug)]
pub(crate) struct Caller<'vm> {
    vm: &'vm Inner,
    seat: Arc<CallerSeat>,
}

impl<'vm> Caller<'vm> {
    /// Takes a place at the gate. `range` is for the message if the kernel lacks the ioctl.
    pub(crate) fn new(vm: &'vm Inner, range: GuestRange) -> Result<Self, PopulateError> {
        if !vm.capabilities().populate_memory {
            return Err(PopulateError::MissingCapability {
                range,
                number: abi::KVM_CAP_POPULATE_MEMORY,
            });
        }
        let seat = Arc::new(CallerSeat::default());
        let occupant: Arc<dyn Kickable> = seat.clone();
        vm.gate().add(&occupant);
        Ok(Self { vm, seat })
    }

    /// What to send a signal to.
    pub(crate) fn seat(&self) -> Arc<CallerSeat> {
        Arc::clone(&self.seat)
    }

    /// Has signals sent to the calling thread, until the result is dropped.
    pub(crate) fn bind(&self) -> BoundCaller<'_> {
        self.seat.thread.set_here(self.vm.signals());
        BoundCaller {
            caller: self,
            this_thread: PhantomData,
        }
    }
}

/// A caller on its thread.
#[derive(Debug)]
pub(crate) struct BoundCaller<'caller> {
    caller: &'caller Caller<'caller>,
    /// Not Send: the binding is to this thread.
    this_thread: PhantomData<*const ()>,
}

impl BoundCaller<'_> {
    /// Populates `range`, going on after signals unless `stop` says otherwise.
    pub(crate) fn populate(
        &self,
        range: GuestRange,
        flags: PopulateFlags,
        stop: impl FnMut() -> bool,
    ) -> Result<Populated, PopulateError> {
        let Caller { vm, seat } = self.caller;
        resume(range, flags, stop, |request| {
            // No code of a caller runs in between, as the gate demands.
            vm.gate().enter(&seat.seat);
            let result = populate_memory(vm.fd(), request);
            // A transaction's signal that comes now or later interrupts nothing, or once more.
            vm.gate().leave(&seat.seat);
            result
        })
    }
}

impl Drop for BoundCaller<'_> {
    fn drop(&mut self) {
        self.caller.seat.thread.unset();
    }
}

/// KVM_POPULATE_MEMORY, gated by KVM_CAP_POPULATE_MEMORY; a kernel without it says ENOTTY.
pub(super) fn populate_memory(vm: &VmFd, request: &mut abi::kvm_populate_memory) -> io::Result<()> {
    // SAFETY: a VM's descriptor and the structure that this ioctl takes; the kernel writes to that
    // structure only, and maps what the VM's slots have, which whoever set them keeps mapped.
    match unsafe { ioctl_with_mut_ref(vm, abi::KVM_POPULATE_MEMORY.into(), request) } {
        0 => Ok(()),
        // At once: what follows may change errno.
        _ => Err(io::Error::last_os_error()),
    }
}

/// Calls the ioctl until the whole range is dealt with.
pub(super) fn resume(
    range: GuestRange,
    flags: PopulateFlags,
    mut stop: impl FnMut() -> bool,
    mut call: impl FnMut(&mut abi::kvm_populate_memory) -> io::Result<()>,
) -> Result<Populated, PopulateError> {
    let mut done = Populated::default();
    let mut left = range;
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
        // Nothing left, and yet an error: it came after the last page.
        let Some(next) = rest(range, gpa) else {
            return Ok(done);
        };
        left = next;
        let unfinished = unfinished(done, left);
        return Err(match source.raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN) => continue,
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

#[cfg(test)]
#[path = "caller_tests.rs"]
mod tests;
