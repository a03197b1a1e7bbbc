//! Content that has arrived: claimed, installed and settled, as far as its pages are still missing.

use pagetide_memory::{PageIndex, PageRange};
use pagetide_uapi::userfaultfd::Wake;

use crate::again::Again;
use crate::claim::Claim;
use crate::counters::Counters;
use crate::error::InstallFailure;
use crate::install::{Installed, Installer, wake};
use crate::memory::Body;
use crate::pager::Pager;
use crate::region::PagedRegion;

/// The result of an arrival.
#[derive(Debug)]
pub(crate) enum Arrived {
    /// The page that the fault needs was claimed here, with this result.
    Wanted(Installed),
    /// All pages that were still missing are installed. The page that the fault needs, if any, was not
    /// among them.
    Others,
}

/// The reason for an installation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    /// A fault on this page, whose thread may sleep.
    Fault(PageIndex, Wake),
    /// Threads that may have left their wake-ups to the installer.
    Waiters,
    /// No access yet: prefetch, or a push.
    Ahead,
}

/// Installs `content` in those of `pages` that are Absent or Pending. Pages that are present, removed
/// or poisoned stay unchanged.
///
/// Returns at the first run that cannot be installed; the pages after it are unchanged. After
/// [`InstallFailure::Busy`] the caller, or whoever waits, comes back later.
///
/// A page with content that nobody expects there fails alone where threads wait: the others get their content. The error is
/// returned in the end, unless the fault was on another page.
pub(crate) fn arrive(
    pager: &Pager,
    region: &PagedRegion,
    counters: &mut Counters,
    pages: PageRange,
    content: Body<'_>,
    purpose: Purpose,
) -> Result<Arrived, InstallFailure> {
    let (of_fault, usual_wake) = match purpose {
        Purpose::Fault(page, wake) => (Some(page), wake),
        Purpose::Waiters => (None, Wake::DontWake),
        // Wake before populating: population may wait for a slot update, which may wait for a thread
        // that sleeps here.
        Purpose::Ahead => (None, Wake::Wake),
    };
    let (mut result, mut unexpected) = (Arrived::Others, None);
    let mut rest = pages;
    let mut again = Again::for_a_turn();
    while let Some(served) = region.served(rest.first()).filter(|_| !rest.is_empty()) {
        let lock = served.channel.lock_installs();
        let part = rest.intersection(served.pages);
        let Some(guard) = region.map.claim_arrived(part) else {
            (_, rest) = rest.split_at(part.count());
            continue;
        };
        let claim = Claim::new(region, guard);
        let run = claim.pages();
        let wake = match claim.has_sleepers() {
            true => Wake::Wake,
            false => usual_wake,
        };
        let skip = PageRange::new(pages.first(), run.first().0 - pages.first().0);
        let body = content.part(region.bytes_of(skip), region.bytes_of(run));
        let wanted = of_fault.filter(|&page| run.contains(page));
        let mut installer = Installer {
            region,
            served,
            lock: &lock,
            counters,
            wake,
            ahead: matches!(purpose, Purpose::Ahead).then_some(pager),
        };
        let installed = installer.install(claim, body, wanted);
        let failed = !matches!(installed, Ok(Installed::Piece(_)));
        drop(lock);
        // Entries that were put back may have a new job, which is to be submitted.
        let is_whole = match &installed {
            Ok(Installed::Piece(pages)) => wanted.is_none() || *pages == run,
            _ => false,
        };
        if !is_whole && region.has_source() {
            pager.submit(region);
        }
        // A lost page is not mapped.
        let is_mapped = !failed && body != Body::Poisoned;
        if is_mapped && served.channel.has_events && matches!(purpose, Purpose::Ahead) {
            pager.populate(region, run, counters);
        }
        let installed = match installed {
            Err(InstallFailure::Unexpected { page })
                if of_fault != Some(page) && !matches!(purpose, Purpose::Ahead) =>
            {
                unexpected = unexpected.or(Some(page));
                let done = run.end().0 - rest.first().0;
                (_, rest) = rest.split_at(done);
                continue;
            }
            installed => installed?,
        };
        match installed {
            Installed::EventsFirst => {
                pager.read_events(&served.channel);
                // A process that keeps discarding memory must not block the thread that delivers its
                // content.
                again.pause()?;
                continue;
            }
            Installed::Closed => return Ok(result),
            Installed::Unmapped { page, is_gone } => {
                pager.unmapped(region, page, is_gone);
                if is_gone || wanted == Some(page) {
                    return Ok(Arrived::Wanted(Installed::Unmapped { page, is_gone }));
                }
                // The pages after it may still be mapped.
                let done = page.0 + 1 - rest.first().0;
                (_, rest) = rest.split_at(done);
                continue;
            }
            installed if wanted.is_some() => result = Arrived::Wanted(installed),
            _ => {}
        }
        let done = run.end().0 - rest.first().0;
        (_, rest) = rest.split_at(done);
    }
    match unexpected.filter(|_| of_fault.is_none()) {
        Some(page) => Err(InstallFailure::Unexpected { page }),
        None => Ok(result),
    }
}

impl Pager {
    /// Records that a page is not mapped any more, so that content for it is dropped.
    pub(crate) fn unmapped(&self, region: &PagedRegion, page: PageIndex, is_gone: bool) {
        if is_gone {
            if region.close() {
                self.notify(crate::Notice::ProcessGone { region: region.id });
            }
            // The page stays missing: a process that shares the memory may live on, and finds it lost.
            region.map.notify_all();
            return;
        }
        let (_, wanted) = region.remove(page);
        if wanted.is_wanted()
            && let Some(served) = region.served(page)
        {
            let lock = served.channel.lock_installs();
            let mut counters = Counters::default();
            wake(
                region,
                served,
                &lock,
                &mut counters,
                PageRange::single(page),
            );
            drop(lock);
            self.count(&counters);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pagetide_memory::{Backing, GuestAddress, PageState, Region};
    use pagetide_uapi::userfaultfd::{Mode, Userfaultfd};

    use super::*;
    use crate::{Contents, PatternSource, RegionConfig};

    /// A successor, or the code that poisons missing pages, must find the page's earlier state.
    #[test]
    fn content_for_a_closing_region_leaves_the_page_missing() {
        if let Err(error) = Userfaultfd::available() {
            println!("SKIP: {error}");
            return;
        }
        let memory = Region::new(GuestAddress(0), 8 << 12, Backing::Anonymous).unwrap();
        let content = Contents::Local(Arc::new(PatternSource::new(|_, _: &mut [u8]| {})));
        let pager = Pager::new().unwrap();
        let config = RegionConfig::local(Arc::new(memory), Mode::Missing, content);
        let id = pager.add(config).unwrap();
        let table = pager.table();
        let region = table.region(id).unwrap();
        region.close();
        let mut counters = Counters::default();
        let pages = PageRange::new(PageIndex(2), 3);
        let purpose = Purpose::Waiters;
        arrive(&pager, region, &mut counters, pages, Body::Zero, purpose).unwrap();
        // Nor does the end of the process make its pages zeroes for those who share them.
        pager.unmapped(region, PageIndex(2), true);
        for page in pages.iter() {
            assert_eq!(region.map.state(page), Some(PageState::Absent));
        }
        assert_eq!(counters.pages, 0);
    }
}
