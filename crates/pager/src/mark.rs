//! Marking missing pages as lost: UFFDIO_POISON, in the address space of a region and in those that share it.
//!
//! A page that was marked raises SIGBUS or a machine check, also when the userfaultfd is closed; one that was not
//! reads as zeroes then.

use std::sync::atomic::{AtomicBool, Ordering};

use pagetide_memory::PageRange;
use pagetide_uapi::userfaultfd::{InstallError, UserRange, Userfaultfd, Wake};
use rustix::io::Errno;

use crate::again::Again;
use crate::channel::InstallLock;
use crate::region::{PagedRegion, Served};
use crate::space::AddressSpace;

/// The result of marking pages as poisoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Mark {
    /// None of the pages reads as zeroes any more: pages that are mapped in the address space and were
    /// absent are marked.
    Made,
    /// The process changes its address space: its events must be read first.
    EventsFirst,
    /// This kernel cannot mark pages, or refused to.
    Failed,
}

/// Marks pages in every address space of a region. Present pages retain their mapping, which the hardware reports
/// as lost. Pages that could not be marked are recorded: the userfaultfd must not be closed before they are.
pub(crate) fn mark_poisoned(
    region: &PagedRegion,
    served: &Served,
    lock: &InstallLock<'_>,
    pages: PageRange,
) -> Mark {
    let mark = mark_at_home(region, served, lock, pages);
    let mark = match poison_in_spaces(region, pages) {
        true => mark,
        false => Mark::Failed,
    };
    if mark != Mark::Made {
        region.note_unmarked();
    }
    mark
}

fn mark_at_home(
    region: &PagedRegion,
    served: &Served,
    lock: &InstallLock<'_>,
    pages: PageRange,
) -> Mark {
    if !region.can_poison {
        return no_poison();
    }
    let page_bytes = 1 << region.page_shift();
    let has_events = served.channel.has_events;
    let mut again = Again::with_patience();
    let mut rest = pages;
    while let Some(place) = region.place(served, lock, rest) {
        let may_wait = |again: &Again| !has_events || again.tries() == 0;
        match poison_range(place.uffd, place.range, page_bytes, &mut again, may_wait) {
            Mark::Made => {}
            other => return other,
        }
        (_, rest) = rest.split_at(place.pages.count());
        if rest.is_empty() {
            break;
        }
    }
    Mark::Made
}

/// What one call marks at most: meanwhile it holds the lock of the process's address space.
const STEP_BYTES: u64 = 64 << 20;

/// Marks the pages of a range that are not mapped, and wakes the threads that sleep there. Where the kernel cannot
/// serve a call now, `may_wait` decides whether to wait and call again: [`Mark::EventsFirst`] if not.
pub(crate) fn poison_range(
    uffd: &Userfaultfd,
    mut range: UserRange,
    page_bytes: u64,
    again: &mut Again,
    mut may_wait: impl FnMut(&Again) -> bool,
) -> Mark {
    let step = STEP_BYTES.max(page_bytes);
    let mut most = step;
    let mut unmarked = Unmarked::default();
    while range.bytes > 0 {
        let piece = UserRange {
            start: range.start,
            bytes: range.bytes.min(most),
        };
        most = step;
        let done = match uffd.poison_pages(piece, Wake::Wake) {
            Ok(()) => piece.bytes,
            Err(InstallError::Exists { installed_bytes }) => {
                let there = UserRange {
                    start: range.start + installed_bytes,
                    bytes: page_bytes,
                };
                match unmark(uffd, there, &mut unmarked) {
                    Ok(true) => installed_bytes,
                    Ok(false) => {
                        // A thread that sleeps there was not woken by the call that found the mapping.
                        let _ = uffd.wake(there);
                        installed_bytes + page_bytes
                    }
                    Err(InstallError::Again { .. }) => {
                        if let Some(end) = pause(again, &mut may_wait, range) {
                            return end;
                        }
                        installed_bytes
                    }
                    Err(InstallError::Gone) => return Mark::Made,
                    Err(error) => return failed(error, range),
                }
            }
            Err(InstallError::Again { installed_bytes: 0 }) => {
                if let Some(end) = pause(again, &mut may_wait, range) {
                    return end;
                }
                0
            }
            Err(InstallError::Again { installed_bytes }) => {
                again.progress();
                installed_bytes
            }
            // The kernel works in one mapping at a time, and a process may have several of one memory.
            Err(InstallError::NoMapping) if piece.bytes > page_bytes => {
                most = (piece.bytes / 2 / page_bytes * page_bytes).max(page_bytes);
                0
            }
            // Not mapped, or the process has exited: no thread can read zeroes there.
            Err(InstallError::NoMapping) => {
                // One that sleeps there has to find that out.
                let _ = uffd.wake(piece);
                page_bytes
            }
            Err(InstallError::Gone) => return Mark::Made,
            Err(InstallError::Io(Errno::INVAL)) => return no_poison(),
            Err(error) => return failed(error, range),
        };
        range.start += done;
        range.bytes -= done.min(range.bytes);
    }
    Mark::Made
}

/// The marks of protection that were taken away.
#[derive(Debug, Default)]
struct Unmarked {
    /// The last page, and how often.
    last: Option<(u64, u32)>,
    /// The memory is not registered for protection: it has no such marks.
    has_none: bool,
}

/// So often UFFDIO_POISON is called again for one page, which its owner may protect again meanwhile, or which is mapped.
const UNMARKED_TIMES: u32 = 4;

/// UFFDIO_POISON has found something at a page. If its owner has protected the page against writing, nothing may be
/// mapped there: a mark of the protection is all, which the kernel does not replace. It is taken away. Returns whether
/// UFFDIO_POISON is to be called again.
fn unmark(
    uffd: &Userfaultfd,
    page: UserRange,
    unmarked: &mut Unmarked,
) -> Result<bool, InstallError> {
    let times = match unmarked.last {
        Some((last, times)) if last == page.start => times,
        _ => 0,
    };
    if unmarked.has_none || times >= UNMARKED_TIMES {
        return Ok(false);
    }
    match uffd.unprotect(page) {
        Ok(()) => {
            unmarked.last = Some((page.start, times + 1));
            Ok(true)
        }
        Err(InstallError::NoMapping) => {
            unmarked.has_none = true;
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Waits, and returns `None` if the call is to be made again.
fn pause(
    again: &mut Again,
    may_wait: &mut impl FnMut(&Again) -> bool,
    range: UserRange,
) -> Option<Mark> {
    if !may_wait(again) {
        return Some(Mark::EventsFirst);
    }
    again.pause().err().map(|error| failed(error, range))
}

/// This kernel has no `UFFDIO_POISON`. That is said once, and not for each page.
fn no_poison() -> Mark {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        tracing::error!(
            "this kernel has no UFFDIO_POISON (Linux 6.6): lost pages cannot be marked, and threads that touch them sleep"
        );
    }
    Mark::Failed
}

fn failed(error: impl std::error::Error, range: UserRange) -> Mark {
    tracing::error!(%error, %range, "UFFDIO_POISON");
    Mark::Failed
}

/// Marks lost pages in a region's further address spaces.
fn poison_in_spaces(region: &PagedRegion, pages: PageRange) -> bool {
    let mut all_marked = true;
    for space in region.spaces.all() {
        // The caller may have the region's install lock: no events are read here. A thread that touches a page
        // which was not marked sleeps, and its fault marks the page.
        let mut again = Again::for_a_turn();
        all_marked &= poison_in(region, &space, pages, &mut again, |_| true);
    }
    all_marked
}

/// Marks lost pages in an address space. Returns whether none of them reads as zeroes.
pub(crate) fn poison_in(
    region: &PagedRegion,
    space: &AddressSpace,
    pages: PageRange,
    again: &mut Again,
    mut may_wait: impl FnMut(&Again) -> bool,
) -> bool {
    if !region.can_poison {
        return no_poison() == Mark::Made;
    }
    let page_bytes = 1 << region.page_shift();
    let mut parts = space.parts(region.id, pages).into_iter();
    parts.all(|range| {
        let uffd = &space.channel.uffd;
        poison_range(uffd, range, page_bytes, again, &mut may_wait) == Mark::Made
    })
}
