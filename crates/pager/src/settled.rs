//! Faults on pages that are settled: present, given up or lost. None of them brings content in.

use pagetide_memory::{Access, FaultInAccess, FaultInError, PageRange, PageState, Removal};
use pagetide_uapi::userfaultfd::{InstallError, Mode, Wake};

use crate::error::{Failure, InstallFailure, ResolveError};
use crate::fault::{Delivery, Fault, Resolution};
use crate::install::{MAX_TRIES, Mark, mark_poisoned, wake, zero_pages};
use crate::resolver::{Site, Work};

impl Work {
    /// A fault on a page that is present. Most often the page came between the fault and now, and
    /// going on is all that it takes. If the same exit comes again, either the mapping was lost
    /// (reclaimed, zapped), or it is there and fast GUP cannot take it for this access (a page mapped
    /// read-only); of the zero page that is known beforehand.
    pub(crate) fn present(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        state: PageState,
    ) -> Result<Option<Resolution>, Failure> {
        let needs_copy = state == PageState::Zero && fault.access == Access::Write;
        let repeats = self.count_repeats(site, fault)?;
        let is_exit = fault.delivery == Delivery::Exit;
        if is_exit && repeats == 0 && !needs_copy {
            return Ok(Some(Resolution::AlreadyPresent));
        }
        let order = site.served.channel.order();
        let Some(place) = site
            .region
            .place(site.served, &order, PageRange::single(fault.page))
        else {
            return Ok(Some(Resolution::Unmapped));
        };
        let wake_rule = if is_exit { Wake::DontWake } else { Wake::Wake };
        // Also before populating, which would wait in the userfaultfd if the mapping was lost.
        let mapped = match site.region.mode {
            Mode::Minor => place.uffd.continue_pages(place.range, wake_rule),
            Mode::Missing => zero_pages(site.region, place.uffd, place.range, wake_rule),
        };
        match (mapped, site.region.mode) {
            (Ok(()), Mode::Minor) => {
                self.counters.reinstalls += 1;
                self.tracker.progress();
                Ok(Some(Resolution::Reinstalled))
            }
            // Nothing was mapped there, and a MISSING region's content is nowhere else: somebody gave
            // the page up without the pager's knowledge.
            (Ok(()), Mode::Missing) => {
                let _ = site.region.map.remove(fault.page);
                self.tracker.progress();
                Ok(Some(Resolution::Zeroed))
            }
            // The file lost the page: the same.
            (Err(InstallError::NoContent), Mode::Minor) => {
                drop(order);
                let _ = site.region.map.remove(fault.page);
                Ok(None)
            }
            (Err(InstallError::Exists { .. }), _) if is_exit => {
                drop(order);
                self.populate(site, fault)?;
                Ok(Some(Resolution::FaultedIn))
            }
            (Err(InstallError::Exists { .. }), _) => {
                let page = PageRange::single(fault.page);
                wake(site.region, site.served, &order, &mut self.counters, page);
                Ok(Some(Resolution::AlreadyPresent))
            }
            (Err(InstallError::Again { .. }), _) => {
                drop(order);
                self.counters.again += 1;
                site.pager.read_events(&site.served.channel);
                if is_exit {
                    return Ok(Some(Resolution::AlreadyPresent));
                }
                Ok(None)
            }
            (Err(InstallError::NoMapping | InstallError::Gone), _) => {
                Ok(Some(Resolution::Unmapped))
            }
            (Err(source), _) => Err(ResolveError::Install {
                fault: *fault,
                source: source.into(),
            }
            .into()),
        }
    }

    /// A fault on a page that was given up: it reads as zeroes. The page stays Removed, since it may
    /// be given up again at any moment: whoever comes later does the same, and the kernel keeps what
    /// is mapped.
    pub(crate) fn zero(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
    ) -> Result<Option<Resolution>, Failure> {
        let repeats = self.count_repeats(site, fault)?;
        let order = site.served.channel.order();
        let page = PageRange::single(fault.page);
        let Some(place) = site.region.place(site.served, &order, page) else {
            return Ok(Some(Resolution::Unmapped));
        };
        let wake_rule = match fault.delivery {
            Delivery::Exit => Wake::DontWake,
            Delivery::Uffd => Wake::Wake,
        };
        // What a guest wrote since is in the page cache, and must stay.
        let continued = match site.region.mode {
            Mode::Minor => place.uffd.continue_pages(place.range, wake_rule),
            Mode::Missing => Err(InstallError::NoContent),
        };
        let zeroed = match continued {
            Err(InstallError::NoContent) => {
                zero_pages(site.region, place.uffd, place.range, wake_rule)
            }
            other => other,
        };
        match zeroed {
            Ok(()) => {
                self.counters.zeroed += 1;
                // However often a page is given up and touched again: each time something was mapped.
                self.tracker.progress();
                Ok(Some(Resolution::Zeroed))
            }
            Err(InstallError::Exists { .. }) => {
                if fault.delivery == Delivery::Uffd {
                    wake(site.region, site.served, &order, &mut self.counters, page);
                    return Ok(Some(Resolution::AlreadyPresent));
                }
                drop(order);
                if repeats > 0 || fault.access == Access::Write {
                    self.populate(site, fault)?;
                    return Ok(Some(Resolution::FaultedIn));
                }
                Ok(Some(Resolution::AlreadyPresent))
            }
            Err(InstallError::Again { .. }) => {
                drop(order);
                self.counters.again += 1;
                site.pager.read_events(&site.served.channel);
                std::thread::yield_now();
                Ok(None)
            }
            Err(InstallError::NoMapping | InstallError::Gone) => Ok(Some(Resolution::Unmapped)),
            Err(InstallError::Poisoned) => {
                drop(order);
                self.lost_since(site, fault).map(Some)
            }
            Err(source) => Err(ResolveError::Install {
                fault: *fault,
                source: source.into(),
            }
            .into()),
        }
    }

    /// Counts a fault on a page that is settled; too many of them are an error.
    fn count_repeats(&mut self, site: &Site<'_>, fault: &Fault) -> Result<u32, Failure> {
        let times = self.tracker.came_again(fault.region, fault.page);
        if times >= site.region.no_progress_limit {
            return Err(ResolveError::NoProgress {
                fault: *fault,
                times,
            }
            .into());
        }
        Ok(times)
    }

    /// Makes a page that is mapped present for the access of an exit. The page may be given up at the
    /// same time: then the call sleeps in the userfaultfd like any touch, until a reader answers or a
    /// fatal signal ends the process. (Other signals end it on some kernels only.)
    pub(crate) fn populate(&mut self, site: &Site<'_>, fault: &Fault) -> Result<(), Failure> {
        self.counters.faulted_in += 1;
        let access = match fault.access {
            Access::Read | Access::Exec => FaultInAccess::Read,
            Access::Write | Access::Unstated => FaultInAccess::Write,
        };
        match site.region.target.fault_in(fault.page, access) {
            // The exit comes again if it has to.
            None | Some(Ok(()) | Err(FaultInError::Interrupted { .. })) => Ok(()),
            Some(Err(source)) => Err(ResolveError::FaultIn {
                fault: *fault,
                source,
            }
            .into()),
        }
    }

    /// A page that was present has an uncorrected error since.
    pub(crate) fn lost_since(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
    ) -> Result<Resolution, Failure> {
        if let Removal::Done { .. } = site.region.map.poison(fault.page) {
            self.counters.poisoned += 1;
        }
        self.poisoned(site, fault)
    }

    /// A fault on a page whose content is lost. Poison is put where the page is mapped, whoever asks:
    /// when the userfaultfd is closed one day, the page must not read as zeroes.
    pub(crate) fn poisoned(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
    ) -> Result<Resolution, Failure> {
        let page = PageRange::single(fault.page);
        for _ in 0..MAX_TRIES {
            let order = site.served.channel.order();
            let mark = mark_poisoned(site.region, site.served, &order, page);
            drop(order);
            match mark {
                Mark::Made => return Ok(Resolution::Poisoned),
                Mark::EventsFirst => site.pager.read_events(&site.served.channel),
                Mark::Failed => break,
            }
        }
        match fault.delivery {
            // The VMM has an answer of its own.
            Delivery::Exit => Ok(Resolution::Poisoned),
            Delivery::Uffd => Err(ResolveError::CannotPoison { fault: *fault }.into()),
        }
    }
}

/// Whether the kernel says that the page has an uncorrected error.
pub(crate) fn is_poison(error: &ResolveError) -> bool {
    matches!(
        error,
        ResolveError::FaultIn {
            source: FaultInError::Poisoned { .. },
            ..
        } | ResolveError::Install {
            source: InstallFailure::Kernel(InstallError::Poisoned),
            ..
        }
    )
}
