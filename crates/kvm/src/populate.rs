//! Population: mapping memory in stage 2 ahead of the guest, without a vCPU (KVM_POPULATE_MEMORY).
//!
//! [`Vm::populate`] uses the calling thread; [`Populator`] uses several threads, and falls back to
//! other methods where the kernel lacks the ioctl. `docs/design/populate.md` describes the design.

mod caller;
mod error;
mod methods;
mod numa;
mod pieces;
mod populator;
mod workers;

use std::fmt;
use std::ops::AddAssign;

use kvm_ioctls::VmFd;
use pagetide_memory::{GuestAddress, GuestRange};
use pagetide_uapi::generated as abi;

pub(crate) use caller::Caller;
pub use error::{PopulateError, Unfinished};
pub use populator::{
    Population, PopulationError, PopulationProgress, Populator, PopulatorMethod, WorkerError,
};

use crate::vm::Vm;

/// Options of a population.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PopulateFlags {
    /// Faults memory that is absent on the host, or mapped read-only, in for writing
    /// (KVM_POPULATE_WRITE), so that copy-on-write happens now.
    pub write: bool,
    /// Maps only memory that is in the host's page tables (KVM_POPULATE_PRESENT_ONLY): faults nothing
    /// in, and waits for no userfaultfd.
    pub present_only: bool,
}

impl PopulateFlags {
    /// The flags as the kernel's bits.
    #[must_use]
    pub fn bits(self) -> u32 {
        let write = if self.write {
            abi::KVM_POPULATE_WRITE
        } else {
            0
        };
        let present_only = if self.present_only {
            abi::KVM_POPULATE_PRESENT_ONLY
        } else {
            0
        };
        write | present_only
    }
}

impl fmt::Display for PopulateFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.write, self.present_only) {
            (false, false) => "no flags",
            (true, false) => "write",
            (false, true) => "present-only",
            (true, true) => "write, present-only",
        })
    }
}

/// The result of a population, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Populated {
    /// Now mapped, by this call or another.
    pub mapped_bytes: u64,
    /// Skipped because the host has no page there that could be mapped.
    pub absent_bytes: u64,
    /// Skipped because of an uncorrected memory error.
    pub poisoned_bytes: u64,
}

impl Populated {
    /// The sum of all.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.mapped_bytes + self.absent_bytes + self.poisoned_bytes
    }
}

impl AddAssign for Populated {
    fn add_assign(&mut self, other: Self) {
        self.mapped_bytes += other.mapped_bytes;
        self.absent_bytes += other.absent_bytes;
        self.poisoned_bytes += other.poisoned_bytes;
    }
}

impl fmt::Display for Populated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            mapped_bytes,
            absent_bytes,
            poisoned_bytes,
        } = self;
        write!(
            f,
            "{mapped_bytes} bytes mapped, {absent_bytes} absent, {poisoned_bytes} poisoned"
        )
    }
}

/// The size of one ioctl. Between two ioctls the caller can stop the population and observe its
/// progress: small enough for frequent checks, large enough that the system call costs nothing in
/// comparison.
const CHUNK: u64 = 64 << 20;

impl Vm {
    /// Maps `range` in the stage-2 tables that all vCPUs share, so that their accesses to it do not
    /// exit, and returns how many bytes were mapped, absent and poisoned. Mappings are as large as the
    /// memory permits. vCPUs may run, slots may change, and several threads may populate at the same
    /// time.
    ///
    /// Signals do not end it; see [`Vm::populate_unless`]. It does not delay slot transactions: a
    /// transaction that stops vCPUs also interrupts the population, by the VM's kick signal to the
    /// calling thread, and the population continues afterwards. Without a kick signal
    /// ([`Signals`](crate::Signals)) the transaction waits for the next page that is present, at most
    /// for 64 MiB.
    ///
    /// # Errors
    /// [`PopulateError`], with the progress made.
    pub fn populate(
        &self,
        range: GuestRange,
        flags: PopulateFlags,
    ) -> Result<Populated, PopulateError> {
        self.populate_unless(range, flags, || false)
    }

    /// As [`Vm::populate`], but ends with [`PopulateError::Interrupted`] when `stop` returns true.
    /// `stop` is called at the start, after every 64 MiB, and after each signal.
    ///
    /// # Errors
    /// [`PopulateError`], with the progress made.
    pub fn populate_unless(
        &self,
        range: GuestRange,
        flags: PopulateFlags,
        mut stop: impl FnMut() -> bool,
    ) -> Result<Populated, PopulateError> {
        let caller = Caller::new(self.inner(), range)?;
        let bound = caller.bind();
        let mut done = Populated::default();
        for chunk in chunks(range) {
            let result = bound.populate(chunk, flags, &mut stop);
            done += result.map_err(|error| error.within(range, done))?;
        }
        Ok(done)
    }
}

/// As [`Vm::populate_unless`], for a VM that the program created and that has no [`Vm`]. Slot
/// transactions do not interrupt it; they wait for it as for the program's own ioctls.
///
/// # Errors
/// As [`Vm::populate_unless`].
pub fn populate_vm(
    vm: &VmFd,
    range: GuestRange,
    flags: PopulateFlags,
    mut stop: impl FnMut() -> bool,
) -> Result<Populated, PopulateError> {
    let mut done = Populated::default();
    for chunk in chunks(range) {
        let result = caller::resume(chunk, flags, &mut stop, |request| {
            caller::populate_memory(vm, request)
        });
        done += result.map_err(|error| error.within(range, done))?;
    }
    Ok(done)
}

/// Splits a range at multiples of [`CHUNK`].
fn chunks(range: GuestRange) -> impl Iterator<Item = GuestRange> {
    pieces::cut(range, CHUNK)
}

/// The part of `range` from `start` on; None if that is empty.
fn rest(range: GuestRange, start: GuestAddress) -> Option<GuestRange> {
    let bytes = range.end().offset_from(start)?;
    GuestRange::new(start, bytes).ok()
}
