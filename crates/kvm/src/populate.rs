//! Filling stage-2 tables ahead of the guest, without a vCPU (KVM_POPULATE_MEMORY).
//!
//! [`Vm::populate`] is one thread's share; [`Populator`] uses several, and knows what to do where
//! the kernel lacks the ioctl. `docs/design/populate.md` says how it is put together.

mod caller;
mod crew;
mod error;
mod methods;
mod numa;
mod pieces;
mod populator;

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

/// What is asked of a population.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PopulateFlags {
    /// Memory that is absent on the host, or there for reading only, is faulted in for writing
    /// (KVM_POPULATE_WRITE), so that copies on write are made now.
    pub write: bool,
    /// Only what the host's page tables have is mapped (KVM_POPULATE_PRESENT_ONLY). Nothing is
    /// faulted in, and no userfaultfd is waited for.
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

/// What has become of the memory that a population has dealt with, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Populated {
    /// Mapped now, by whomever.
    pub mapped_bytes: u64,
    /// Skipped, because the host has nothing there that could be mapped.
    pub absent_bytes: u64,
    /// Skipped, because of an uncorrected memory error.
    pub poisoned_bytes: u64,
}

impl Populated {
    /// All of it.
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

/// How much one ioctl is asked for: between two of them is a chance to stop, and to tell how far it
/// is. Small enough for that to be often, and large enough for the ioctl itself to cost nothing.
const CHUNK: u64 = 64 << 20;

impl Vm {
    /// Maps `range` in the stage-2 tables that all vCPUs share, so that their accesses to it do not
    /// leave the guest, and returns what became of each byte. Mappings are as huge as the memory
    /// allows. vCPUs may run, slots may change, and any number of threads may populate.
    ///
    /// Signals do not end it; see [`Vm::populate_unless`]. It holds up no slot transaction: one that
    /// stops vCPUs stops it as well, by the VM's signal for kicks to the calling
    /// thread, and it goes on afterwards; without one ([`Signals`](crate::Signals)) it ends at a page that
    /// is there, or every 64 MiB.
    ///
    /// # Errors
    /// [`PopulateError`] says how far it got.
    pub fn populate(
        &self,
        range: GuestRange,
        flags: PopulateFlags,
    ) -> Result<Populated, PopulateError> {
        self.populate_unless(range, flags, || false)
    }

    /// As [`Vm::populate`]; but ends with [`PopulateError::Interrupted`] when `stop` says so. It is
    /// asked at the start, after every 64 MiB, and when a signal came.
    ///
    /// # Errors
    /// [`PopulateError`] says how far it got.
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

/// As [`Vm::populate_unless`], for a VM that the program has made and that has no [`Vm`]. Slot
/// transactions do not hold it up, and wait for it like the program's own ioctls.
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

/// Cuts a range at multiples of [`CHUNK`].
fn chunks(range: GuestRange) -> impl Iterator<Item = GuestRange> {
    pieces::cut(range, CHUNK)
}

/// From `start` to the end of `range`; None if that is nothing.
fn rest(range: GuestRange, start: GuestAddress) -> Option<GuestRange> {
    let bytes = range.end().offset_from(start)?;
    GuestRange::new(start, bytes).ok()
}
