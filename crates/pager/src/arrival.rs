//! Content that has arrived: it is claimed, installed and settled, as far as it is still wanted.

use pagetide_memory::{PageIndex, PageRange, Removal};

use crate::counters::Counters;
use crate::error::InstallFailure;
use crate::install::{Body, Installed, Installer, MAX_TRIES, Sleepers, wake};
use crate::pager::Pager;
use crate::region::PagedRegion;

/// What became of content that arrived.
#[derive(Debug)]
pub(crate) enum Arrived {
    /// The page that was wanted most was claimed here, with this result.
    Wanted(Installed),
    /// What was still missing is installed. The page that was wanted most, if any, was not missing
    /// any more.
    Others,
}

/// Whom content is installed for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum For {
    /// A fault on this page, whose thread sleeps or not.
    Fault(PageIndex, Sleepers),
    /// Those who were left to the installer, if there are any.
    Waiters,
    /// Nobody yet.
    Nobody,
}

/// Installs `content` in those of `pages` that are Absent or Requested. Pages that are there already,
/// were given up or are lost keep what they have.
///
/// Returns at the first run that cannot be installed; the pages behind it are as they were.
pub(crate) fn arrive(
    pager: &Pager,
    region: &PagedRegion,
    counters: &mut Counters,
    pages: PageRange,
    content: Body<'_>,
    whom: For,
) -> Result<Arrived, InstallFailure> {
    let (wanted, sleepers) = match whom {
        For::Fault(page, sleepers) => (Some(page), sleepers),
        For::Waiters => (None, Sleepers::Unlikely),
        // Before population, which may wait for a slot update, and that for whoever sleeps here.
        For::Nobody => (None, Sleepers::Some),
    };
    let mut result = Arrived::Others;
    let mut rest = pages;
    let mut put_off = 0;
    while let Some(served) = region.served(rest.first()).filter(|_| !rest.is_empty()) {
        let order = served.channel.order();
        let part = rest.intersection(served.pages);
        let Some(claim) = region.map.claim_arrived(part) else {
            (_, rest) = rest.split_at(part.count());
            continue;
        };
        let run = claim.pages();
        let is_left = claim.take_wake_wanted().is_wanted();
        let sleepers = if is_left { Sleepers::Some } else { sleepers };
        let skip = PageRange::new(pages.first(), run.first().0 - pages.first().0);
        let body = content.part(region.bytes_of(skip), region.bytes_of(run));
        let wanted = wanted.filter(|&page| run.contains(page));
        let mut installer = Installer {
            region,
            served,
            order: &order,
            counters,
            sleepers,
            ahead: matches!(whom, For::Nobody).then_some(pager),
        };
        let installed = installer.install(claim, body, wanted);
        let failed = !matches!(installed, Ok(Installed::Piece(_)));
        if failed && is_left {
            // The wakes that were left to this claim are given: whoever sleeps faults again.
            wake(region, served, &order, counters, run);
        }
        drop(order);
        // Nothing is mapped in a page that is lost.
        let is_mapped = !failed && body != Body::Poisoned;
        if is_mapped && served.channel.has_events && matches!(whom, For::Nobody) {
            pager.populate(region, run, counters);
        }
        match installed? {
            Installed::EventsFirst => {
                put_off += 1;
                // A process that does nothing but discard must not hold up whoever brings its content.
                if put_off == MAX_TRIES {
                    return Err(InstallFailure::Busy { tries: put_off });
                }
                pager.read_events(&served.channel);
                continue;
            }
            Installed::Closed => return Ok(result),
            Installed::Unmapped { page, is_gone } => {
                pager.unmapped(region, page, is_gone);
                if is_gone || wanted == Some(page) {
                    return Ok(Arrived::Wanted(Installed::Unmapped { page, is_gone }));
                }
                // What lies behind it may be mapped.
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
    Ok(result)
}

impl Pager {
    /// A page was found to be mapped no longer: what arrives for it is dropped.
    pub(crate) fn unmapped(&self, region: &PagedRegion, page: PageIndex, is_gone: bool) {
        if is_gone && region.close() {
            self.notify(crate::Notice::ProcessGone { region: region.id });
        }
        if let Removal::Done { wake: wanted, .. } = region.map.remove(page)
            && wanted.is_wanted()
            && let Some(served) = region.served(page)
        {
            let order = served.channel.order();
            let mut counters = Counters::default();
            wake(
                region,
                served,
                &order,
                &mut counters,
                PageRange::single(page),
            );
            drop(order);
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

    /// A successor, or whoever poisons what is missing, must find the page as it was.
    #[test]
    fn content_for_a_region_that_closes_leaves_the_page_missing() {
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
        let whom = For::Waiters;
        arrive(&pager, region, &mut counters, pages, Body::Zero, whom).unwrap();
        for page in pages.iter() {
            assert_eq!(region.map.state(page), Some(PageState::Absent));
        }
        assert_eq!(counters.pages, 0);
    }
}
