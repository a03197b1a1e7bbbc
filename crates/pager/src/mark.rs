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
use crate::log_limit::log_limited;
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
/// as lost. The caller tries again, or notes that there are pages without marks ([`PagedRegion::note_unmarked`]): their
/// userfaultfd must not be closed.
pub(crate) fn mark_poisoned(
    region: &PagedRegion,
    served: &Served,
    lock: &InstallLock<'_>,
    pages: PageRange,
    again: &mut Again,
) -> Mark {
    let mark = mark_at_home(region, served, lock, pages, again);
    match poison_in_spaces(region, pages) {
        true => mark,
        false => Mark::Failed,
    }
}

fn mark_at_home(
    region: &PagedRegion,
    served: &Served,
    lock: &InstallLock<'_>,
    pages: PageRange,
    again: &mut Again,
) -> Mark {
    if !region.can_poison {
        return no_poison();
    }
    let page_bytes = 1 << region.page_shift();
    let has_events = served.channel.has_events;
    let mut rest = pages;
    while let Some(place) = region.place(served, lock, rest) {
        let may_wait = |again: &Again| !has_events || again.tries() == 0;
        match poison_range(place.uffd, place.range, page_bytes, again, may_wait) {
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
    let step_bytes = STEP_BYTES.max(page_bytes);
    let mut marking = Marking {
        uffd,
        page_bytes,
        step_bytes,
        most: step_bytes,
        unmarked: Unmarked::default(),
    };
    while range.bytes > 0 {
        let done = match marking.step(range) {
            Step::Done(0) => 0,
            Step::Done(bytes) => {
                again.progress();
                bytes
            }
            Step::Busy(bytes) => {
                if let Some(end) = pause(again, &mut may_wait) {
                    return end;
                }
                bytes
            }
            Step::Hole => {
                again.found_hole();
                page_bytes
            }
            Step::End(mark) => return mark,
        };
        range.start += done;
        range.bytes -= done.min(range.bytes);
    }
    Mark::Made
}

/// A range that is being marked.
struct Marking<'a> {
    uffd: &'a Userfaultfd,
    page_bytes: u64,
    step_bytes: u64,
    /// What the next call marks at most.
    most: u64,
    unmarked: Unmarked,
}

/// What has come of one call.
enum Step {
    /// So many bytes need nothing more.
    Done(u64),
    /// The same, but for what follows the kernel cannot serve a call now.
    Busy(u64),
    /// Nothing is mapped at the first page: no thread can read zeroes there.
    Hole,
    /// There is nothing more to do, or nothing can be done.
    End(Mark),
}

impl Marking<'_> {
    /// Marks the beginning of `rest`.
    fn step(&mut self, rest: UserRange) -> Step {
        let piece = UserRange {
            start: rest.start,
            bytes: rest.bytes.min(self.most),
        };
        // A process may have many holes in one memory: what a call marks at most grows again step by step.
        self.most = self.most.saturating_mul(2).min(self.step_bytes);
        match self.uffd.poison_pages(piece, Wake::Wake) {
            Ok(()) => Step::Done(piece.bytes),
            Err(InstallError::Exists { installed_bytes }) => self.found(rest, installed_bytes),
            Err(InstallError::Again { installed_bytes: 0 }) => Step::Busy(0),
            Err(InstallError::Again { installed_bytes }) => Step::Done(installed_bytes),
            // The kernel works in one mapping at a time, and a process may have several of one memory.
            Err(InstallError::NoMapping | InstallError::NoContent)
                if piece.bytes > self.page_bytes =>
            {
                let half = piece.bytes / 2 / self.page_bytes * self.page_bytes;
                self.most = half.max(self.page_bytes);
                Step::Done(0)
            }
            // Not mapped, or beyond the end of a file that was truncated.
            Err(InstallError::NoMapping | InstallError::NoContent) => {
                // One that sleeps there has to find that out.
                let _ = self.uffd.wake(piece);
                self.most = self.page_bytes;
                Step::Hole
            }
            Err(InstallError::Gone) => Step::End(Mark::Made),
            Err(InstallError::Io(Errno::INVAL)) => Step::End(no_poison()),
            Err(error) => Step::End(failed(error, rest)),
        }
    }

    /// After `marked` bytes of `rest` the call has found something.
    fn found(&mut self, rest: UserRange, marked: u64) -> Step {
        let there = UserRange {
            start: rest.start + marked,
            bytes: self.page_bytes,
        };
        match unmark(self.uffd, there, &mut self.unmarked) {
            Ok(true) => Step::Done(marked),
            Ok(false) => {
                // A thread that sleeps there was not woken by the call that found the mapping.
                let _ = self.uffd.wake(there);
                Step::Done(marked + self.page_bytes)
            }
            Err(InstallError::Again { .. }) => Step::Busy(marked),
            Err(InstallError::Gone) => Step::End(Mark::Made),
            Err(error) => Step::End(failed(error, rest)),
        }
    }
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
fn pause(again: &mut Again, may_wait: &mut impl FnMut(&Again) -> bool) -> Option<Mark> {
    // Without time, too: the caller comes back, or gives up.
    let waited = may_wait(again) && again.pause().is_ok();
    (!waited).then_some(Mark::EventsFirst)
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
    log_limited!(error, %error, %range, "UFFDIO_POISON");
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

#[cfg(test)]
mod tests {
    use std::ptr;
    use std::sync::atomic::{AtomicU8, Ordering};

    use pagetide_test_support::Sleeper;
    use pagetide_uapi::userfaultfd::{Features, Mode};
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

    use super::*;

    const PAGE: usize = 4096;

    /// Maps new pages at `at`, or where the kernel likes. They stay for the life of the process.
    fn map(at: usize, pages: usize, flags: MapFlags) -> usize {
        let at = ptr::with_exposed_provenance_mut(at);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: replaces at most pages of this module's tests, to which there is no reference.
        let start = unsafe { mmap_anonymous(at, pages * PAGE, access, MapFlags::PRIVATE | flags) };
        start.unwrap().expose_provenance()
    }

    fn byte_at(address: usize) -> u8 {
        let at = ptr::with_exposed_provenance_mut(address);
        // SAFETY: `map` has mapped the address for the life of the process.
        unsafe { AtomicU8::from_ptr(at) }.load(Ordering::Relaxed)
    }

    /// The kernel wakes nobody when it unmaps a page: the thread would sleep for ever.
    #[test]
    fn a_thread_that_sleeps_on_a_page_that_was_unmapped_is_woken() {
        let uffd = match Userfaultfd::open(Features::POISON) {
            Ok(uffd) => uffd,
            Err(error) => return println!("SKIP: {error}"),
        };
        let start = map(0, 4, MapFlags::empty());
        let range = |first: usize, pages: usize| UserRange {
            start: (start + first * PAGE) as u64,
            bytes: (pages * PAGE) as u64,
        };
        // SAFETY: the test's own memory, on whose zeroes no code relies.
        unsafe { uffd.register(range(0, 4), Mode::Missing) }.unwrap();
        let sleeper = Sleeper::spawn("a read", move || byte_at(start + 2 * PAGE));
        // Other memory takes the place of the page, so that the read ends without a signal.
        map(start + 2 * PAGE, 1, MapFlags::FIXED);
        assert!(sleeper.is_undisturbed());
        let mut again = Again::for_a_turn();
        let mark = poison_range(&uffd, range(0, 4), PAGE as u64, &mut again, |_| true);
        assert_eq!(mark, Mark::Made);
        assert_eq!(sleeper.join(), 0);
        // The pages around it are lost.
        for page in [0, 1, 3] {
            let marked = uffd.poison_pages(range(page, 1), Wake::DontWake);
            let there = InstallError::Exists { installed_bytes: 0 };
            assert_eq!(marked, Err(there), "page {page}");
        }
    }
}
