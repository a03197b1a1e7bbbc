//! The methods of population, best first, and one worker's part in each.

use pagetide_memory::{FaultInAccess, GuestRange, PageIndex, PageRange, Region};
use pagetide_memory::{FaultInError, PageSize};

use super::caller::BoundCaller;
use super::pieces::Piece;
use super::populator::WorkerError;
use super::{PopulateError, PopulateFlags, Populated, chunks, rest};
use crate::pre_fault::PreFaultError;
use crate::slot::Slot;
use crate::vcpu::BoundVcpu;

/// A population method, bound to a worker's thread.
pub(super) enum BoundMethod<'worker> {
    /// KVM_POPULATE_MEMORY.
    Ioctl(BoundCaller<'worker>),
    /// KVM_PRE_FAULT_MEMORY on this vCPU.
    PreFault(BoundVcpu<'worker>),
    /// MADV_POPULATE_READ or MADV_POPULATE_WRITE.
    Host,
}

/// The parameters of a worker and its callbacks.
pub(super) struct Context<'a> {
    pub(super) flags: PopulateFlags,
    /// Whether to stop.
    pub(super) stop: &'a dyn Fn() -> bool,
    /// Receives the results for a part of the piece.
    pub(super) report: &'a dyn Fn(Populated),
}

impl BoundMethod<'_> {
    /// Populates a piece, until `stop` returns true.
    pub(super) fn populate(
        &mut self,
        piece: &Piece,
        context: &Context<'_>,
    ) -> Result<(), WorkerError> {
        for chunk in chunks(piece.range) {
            if (context.stop)() {
                break;
            }
            match self {
                Self::Ioctl(caller) => by_ioctl(caller, chunk, context)?,
                // KVM_POPULATE_MEMORY skips these slots as well.
                Self::PreFault(_) | Self::Host if piece.slot.flags.absent_mapping_fault => {
                    (context.report)(absent(chunk.bytes()));
                }
                Self::PreFault(vcpu) => by_pre_fault(vcpu, &piece.slot, chunk, context)?,
                Self::Host => {
                    (context.report)(fault_in_on_host(&piece.slot, chunk, context.flags)?);
                }
            }
        }
        Ok(())
    }
}

fn by_ioctl(
    caller: &BoundCaller<'_>,
    chunk: GuestRange,
    context: &Context<'_>,
) -> Result<(), WorkerError> {
    let error = match caller.populate(chunk, context.flags, context.stop) {
        Ok(populated) => {
            (context.report)(populated);
            return Ok(());
        }
        Err(error) => error,
    };
    if let Some(unfinished) = error.unfinished() {
        (context.report)(unfinished.done);
    }
    match error {
        PopulateError::Interrupted { .. } => Ok(()),
        error => Err(error.into()),
    }
}

/// KVM_PRE_FAULT_MEMORY simulates reads. Shared memory is mapped writable nevertheless; private memory
/// must first be made writable on the host.
fn by_pre_fault(
    vcpu: &mut BoundVcpu<'_>,
    slot: &Slot,
    chunk: GuestRange,
    context: &Context<'_>,
) -> Result<(), WorkerError> {
    if context.flags.write && !slot.region.backing().has_file() {
        fault_in_on_host(slot, chunk, context.flags)?;
    }
    let page = slot.region.page_size();
    let mut left = Some(chunk);
    while let Some(range) = left {
        if (context.stop)() {
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
        (context.report)(populated);
        let next = range.start().checked_add(populated.bytes());
        left = next.and_then(|next| rest(chunk, next));
    }
    Ok(())
}

/// The number of bytes from the start of `range` to the end of its first page, or of the range.
fn to_page_end(range: GuestRange, page: PageSize) -> u64 {
    (page.bytes() - range.start().0 % page.bytes()).min(range.bytes())
}

/// Fills the host's page tables.
fn fault_in_on_host(
    slot: &Slot,
    chunk: GuestRange,
    flags: PopulateFlags,
) -> Result<Populated, FaultInError> {
    let access = if flags.write {
        FaultInAccess::Write
    } else {
        FaultInAccess::Read
    };
    let pages = pages_of(slot, chunk);
    match slot.region.fault_in(pages, access) {
        Ok(()) => Ok(mapped(chunk.bytes())),
        Err(FaultInError::Poisoned { .. }) => {
            page_by_page(&slot.region, pages, access, chunk.bytes())
        }
        Err(error) => Err(error),
    }
}

/// Faults the pages in one by one, because the kernel does not report which of them is poisoned.
fn page_by_page(
    region: &Region,
    pages: PageRange,
    access: FaultInAccess,
    bytes: u64,
) -> Result<Populated, FaultInError> {
    let mut bad = 0;
    for page in pages.iter() {
        match region.fault_in(PageRange::new(page, 1), access) {
            Ok(()) => {}
            Err(FaultInError::Poisoned { .. }) => bad += region.page_size().bytes(),
            Err(error) => return Err(error),
        }
    }
    let bad = bad.min(bytes);
    Ok(Populated {
        mapped_bytes: bytes - bad,
        ..poisoned(bad)
    })
}

/// The region's pages that contain `chunk`, a part of `slot`.
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
