//! Faults on settled pages: present, discarded or lost. None of them needs content.

use pagetide_memory::{Access, FaultInAccess, FaultInError, PageRange, PageState, Removal};
use pagetide_uapi::userfaultfd::{InstallError, Mode};

use crate::again::Again;
use crate::error::{Failure, ResolveError};
use crate::fault::{Delivery, Fault, Resolution};
use crate::install::wake;
use crate::mark::{Mark, mark_poisoned};
use crate::memory::map_again;
use crate::resolver::{ResolverState, Site};

impl ResolverState {
    /// A fault on a present page. Usually the page was installed after the fault, and a retry suffices.
    /// If the same exit recurs, either the mapping was lost (reclaimed, zapped), or it exists but fast
    /// GUP cannot take it for this access (a page mapped read-only). For a write to the zero page the
    /// latter is known beforehand.
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
        let lock = site.served.channel.lock_installs();
        let Some(place) = site
            .region
            .place(site.served, &lock, PageRange::single(fault.page))
        else {
            return Ok(Some(Resolution::Unmapped));
        };
        // Before faulting the page in, which would wait in the userfaultfd if the mapping was lost.
        let mapped = match site.region.mode {
            Mode::Minor => map_again(&place, fault.delivery.wake()),
            Mode::Missing => site.region.memory.zero(&place, fault.delivery.wake()),
        };
        match (mapped, site.region.mode) {
            (Ok(()), Mode::Minor) => {
                self.counters.reinstalls += 1;
                self.tracker.progress();
                Ok(Some(Resolution::Reinstalled))
            }
            // Nothing was mapped there, and a MISSING region has no other copy of the content: other
            // code has discarded the page.
            (Ok(()), Mode::Missing) => {
                let _ = site.region.remove(fault.page);
                self.tracker.progress();
                Ok(Some(Resolution::Zeroed))
            }
            // The file has lost the page: likewise.
            (Err(InstallError::NoContent), Mode::Minor) => {
                drop(lock);
                let _ = site.region.remove(fault.page);
                Ok(None)
            }
            (Err(InstallError::Exists { .. }), _) if is_exit => {
                drop(lock);
                self.fault_in(site, fault)?;
                Ok(Some(Resolution::FaultedIn))
            }
            (Err(InstallError::Exists { .. }), _) => {
                let page = PageRange::single(fault.page);
                wake(site.region, site.served, &lock, &mut self.counters, page);
                Ok(Some(Resolution::AlreadyPresent))
            }
            (Err(InstallError::Again { .. }), _) => {
                drop(lock);
                self.wait_for_change(site);
                if is_exit {
                    return Ok(Some(Resolution::AlreadyPresent));
                }
                Ok(None)
            }
            (Err(InstallError::NoMapping | InstallError::Gone), _) => {
                Ok(Some(Resolution::Unmapped))
            }
            (Err(source), _) => Err(ResolveError::Remap {
                fault: *fault,
                source,
            }
            .into()),
        }
    }

    /// A fault on a discarded page: it reads as zeroes. The page stays Removed, because it may be
    /// discarded again at any moment: later faults do the same, and the kernel preserves an existing
    /// mapping.
    pub(crate) fn zero(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
    ) -> Result<Option<Resolution>, Failure> {
        let repeats = self.count_repeats(site, fault)?;
        let lock = site.served.channel.lock_installs();
        let page = PageRange::single(fault.page);
        let Some(place) = site.region.place(site.served, &lock, page) else {
            return Ok(Some(Resolution::Unmapped));
        };
        match site.region.memory.zero(&place, fault.delivery.wake()) {
            Ok(()) => {
                self.counters.zeroed += 1;
                // A page may be discarded and touched repeatedly; each time a page was mapped, which is
                // progress.
                self.tracker.progress();
                Ok(Some(Resolution::Zeroed))
            }
            Err(InstallError::Exists { .. }) => {
                if fault.delivery == Delivery::Uffd {
                    wake(site.region, site.served, &lock, &mut self.counters, page);
                    return Ok(Some(Resolution::AlreadyPresent));
                }
                drop(lock);
                if repeats > 0 || fault.access == Access::Write {
                    self.fault_in(site, fault)?;
                    return Ok(Some(Resolution::FaultedIn));
                }
                Ok(Some(Resolution::AlreadyPresent))
            }
            Err(InstallError::Again { .. }) => {
                drop(lock);
                self.wait_for_change(site);
                std::thread::yield_now();
                Ok(None)
            }
            Err(InstallError::NoMapping | InstallError::Gone) => Ok(Some(Resolution::Unmapped)),
            Err(InstallError::Poisoned) => {
                drop(lock);
                self.lost_since(site, fault).map(Some)
            }
            Err(source) => Err(ResolveError::Remap {
                fault: *fault,
                source,
            }
            .into()),
        }
    }

    /// The process is changing its address space, and continues once its events were read. That may take
    /// as long as another thread keeps it from its processor: it is no lack of progress of this fault.
    fn wait_for_change(&mut self, site: &Site<'_>) {
        self.counters.again += 1;
        self.tracker.progress();
        site.pager.read_events(&site.served.channel);
    }

    /// Counts a fault on a settled page; too many repetitions are an error.
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

    /// Faults a mapped page in for the access of an exit. If the page is discarded at the same time,
    /// the call sleeps in the userfaultfd like any access, until a reader resolves the fault or a fatal
    /// signal ends the process. (Other signals end it on some kernels only.)
    pub(crate) fn fault_in(&mut self, site: &Site<'_>, fault: &Fault) -> Result<(), Failure> {
        self.counters.faulted_in += 1;
        let access = match fault.access {
            Access::Read | Access::Exec => FaultInAccess::Read,
            Access::Write | Access::Unstated => FaultInAccess::Write,
        };
        match site.region.memory.fault_in(fault.page, access) {
            // The exit recurs if necessary.
            None | Some(Ok(()) | Err(FaultInError::Interrupted { .. })) => Ok(()),
            Some(Err(source)) => Err(ResolveError::FaultIn {
                fault: *fault,
                source,
            }
            .into()),
        }
    }

    /// A present page has had an uncorrected error since.
    pub(crate) fn lost_since(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
    ) -> Result<Resolution, Failure> {
        if let (Removal::Done { .. }, _) = site.region.poison(fault.page) {
            self.counters.poisoned += 1;
        }
        self.poisoned(site, fault)
    }

    /// A fault on a lost page. The page is marked as poisoned for every delivery: after the userfaultfd
    /// is closed, it must not read as zeroes.
    pub(crate) fn poisoned(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
    ) -> Result<Resolution, Failure> {
        let page = PageRange::single(fault.page);
        let mut again = match fault.delivery {
            Delivery::Exit => Again::with_patience(),
            // Other faults wait for this thread.
            Delivery::Uffd => Again::for_a_turn(),
        };
        loop {
            let lock = site.served.channel.lock_installs();
            let mark = mark_poisoned(site.region, site.served, &lock, page, &mut again);
            drop(lock);
            match mark {
                Mark::Made => return Ok(Resolution::Poisoned),
                Mark::EventsFirst => site.pager.read_events(&site.served.channel),
                Mark::Failed => break,
            }
            match (again.pause(), fault.delivery) {
                (Ok(()), _) => {}
                (Err(_), Delivery::Exit) => break,
                (Err(source), Delivery::Uffd) => {
                    site.region.note_unmarked();
                    return Err(ResolveError::Install {
                        fault: *fault,
                        source,
                    }
                    .into());
                }
            }
        }
        site.region.note_unmarked();
        match fault.delivery {
            // The VMM handles the poison itself.
            Delivery::Exit => Ok(Resolution::Poisoned),
            Delivery::Uffd => Err(ResolveError::CannotPoison { fault: *fault }.into()),
        }
    }
}
