//! The ways to populate a piece of memory, best first, and one worker's part in each.

use pagetide_memory::{FaultInAccess, GuestRange, PageIndex, PageRange, Region};
use pagetide_memory::{FaultInError as HostError, PageSize};

use super::caller::BoundCaller;
use super::pieces::Piece;
use super::populator::WorkerError;
use super::{PopulateError, PopulateFlags, Populated, chunks, rest};
use crate::pre_fault::PreFaultError;
use crate::slot::Slot;
use crate::vcpu::BoundVcpu;

/// What a worker populates with.
pub(super) enum Means<'worker> {
    /// KVM_POPULATE_MEMORY.
    Ioctl(BoundCaller<'worker>),
    /// KVM_PRE_FAULT_MEMORY on this vCPU.
    PreFault(BoundVcpu<'worker>),
    /// MADV_POPULATE_READ or MADV_POPULATE_WRITE.
    Host,
}

/// What a worker is told, and whom it tells.
pub(super) struct Orders<'a> {
    pub(super) flags: PopulateFlags,
    /// Whether to give up.
    pub(super) stop: &'a dyn Fn() -> bool,
    /// Takes what has become of some more memory.
    pub(super) report: &'a dyn Fn(Populated),
}

impl Means<'_> {
    /// Populates a piece, or as much of it as there is time for.
    pub(super) fn populate(
        &mut self,
        piece: &Piece,
        orders: &Orders<'_>,
    ) -> Result<(), WorkerError> {
        for chunk in chunks(piece.range) {
            if (orders.stop)() {
                break;
            }
            match self {
                Self::Ioctl(caller) => by_ioctl(caller, chunk, orders)?,
                // The kernel's own ioctl leaves these slots alone as well.
                Self::PreFault(_) | Self::Host if piece.slot.flags.absent_mapping_fault => {
                    (orders.report)(absent(chunk.bytes()));
                }
                Self::PreFault(vcpu) => by_pre_fault(vcpu, &piece.slot, chunk, orders)?,
                Self::Host => {
                    (orders.report)(on_the_host(&piece.slot, chunk, orders.flags)?);
                }
            }
        }
        Ok(())
    }
}

fn by_ioctl(
    caller: &BoundCaller<'_>,
    chunk: GuestRange,
    orders: &Orders<'_>,
) -> Result<(), WorkerError> {
    let error = match caller.populate(chunk, orders.flags, orders.stop) {
        Ok(populated) => {
            (orders.report)(populated);
            return Ok(());
        }
        Err(error) => error,
    };
    if let Some(unfinished) = error.unfinished() {
        (orders.report)(unfinished.done);
    }
    match error {
        PopulateError::Interrupted { .. } => Ok(()),
        error => Err(error.into()),
    }
}

/// Reads are what it makes room for. Shared memory is mapped writable all the same; private memory
/// has to be made so on the host first.
fn by_pre_fault(
    vcpu: &mut BoundVcpu<'_>,
    slot: &Slot,
    chunk: GuestRange,
    orders: &Orders<'_>,
) -> Result<(), WorkerError> {
    if orders.flags.write && !slot.region.backing().has_file() {
        on_the_host(slot, chunk, orders.flags)?;
    }
    let page = slot.region.page_size();
    let mut left = Some(chunk);
    while let Some(range) = left {
        if (orders.stop)() {
            return Ok(());
        }
        let populated = match vcpu.pre_fault(range) {
            Ok(bytes) => mapped(bytes),
            Err(PreFaultError::Again { .. } | PreFaultError::Interrupted { .. }) => continue,
            Err(PreFaultError::Poisoned { range, error }) => {
                let lost = error.lost.end().offset_from(range.start()).unwrap_or(0);
                poisoned(lost.clamp(PageSize::Size4K.bytes(), range.bytes()))
            }
            Err(PreFaultError::Failed { source, range }) => match source.raw_os_error() {
                Some(libc::EFAULT) => absent(to_page_end(range, page)),
                Some(libc::EHWPOISON) => poisoned(to_page_end(range, page)),
                _ => return Err(PreFaultError::Failed { source, range }.into()),
            },
            Err(error) => return Err(error.into()),
        };
        (orders.report)(populated);
        let next = range.start().checked_add(populated.bytes());
        left = next.and_then(|next| rest(chunk, next));
    }
    Ok(())
}

/// From the start of `range` to the end of the page there, or of the range.
fn to_page_end(range: GuestRange, page: PageSize) -> u64 {
    (page.bytes() - range.start().0 % page.bytes()).min(range.bytes())
}

/// Has the host's page tables filled.
fn on_the_host(
    slot: &Slot,
    chunk: GuestRange,
    flags: PopulateFlags,
) -> Result<Populated, HostError> {
    let access = if flags.write {
        FaultInAccess::Write
    } else {
        FaultInAccess::Read
    };
    let pages = pages_of(slot, chunk);
    match slot.region.fault_in(pages, access) {
        Ok(()) => Ok(mapped(chunk.bytes())),
        Err(HostError::Poisoned { .. }) => page_by_page(&slot.region, pages, access, chunk.bytes()),
        Err(error) => Err(error),
    }
}

/// The kernel does not say which of the pages is poisoned.
fn page_by_page(
    region: &Region,
    pages: PageRange,
    access: FaultInAccess,
    bytes: u64,
) -> Result<Populated, HostError> {
    let mut bad = 0;
    for page in pages.iter() {
        match region.fault_in(PageRange::new(page, 1), access) {
            Ok(()) => {}
            Err(HostError::Poisoned { .. }) => bad += region.page_size().bytes(),
            Err(error) => return Err(error),
        }
    }
    let bad = bad.min(bytes);
    Ok(Populated {
        mapped_bytes: bytes - bad,
        ..poisoned(bad)
    })
}

/// The region's pages that `chunk`, a part of `slot`, lies in.
fn pages_of(slot: &Slot, chunk: GuestRange) -> PageRange {
    let offset = slot.offset + (chunk.start().0 - slot.range.start().0);
    let shift = slot.region.page_size().shift();
    let first = offset >> shift;
    let last = (offset + chunk.bytes() - 1) >> shift;
    PageRange::new(PageIndex(first), last - first + 1)
}

fn mapped(bytes: u64) -> Populated {
    Populated {
        mapped_bytes: bytes,
        ..Populated::default()
    }
}

fn absent(bytes: u64) -> Populated {
    Populated {
        absent_bytes: bytes,
        ..Populated::default()
    }
}

fn poisoned(bytes: u64) -> Populated {
    Populated {
        poisoned_bytes: bytes,
        ..Populated::default()
    }
}
