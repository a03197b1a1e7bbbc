//! Resolving faults: the claim, and what to do when it is lost.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pagetide_kvm::{Access, FaultExit};
use pagetide_memory::{Claim, PageRange, PageState, PopulateAccess, Removal};
use pagetide_uapi::userfaultfd::{InstallError, Mode, UserRange, Userfaultfd, Wake};

use crate::counters::Counters;
use crate::error::ResolveError;
use crate::fault::{Delivery, Fault, Resolution};
use crate::install::MAX_TRIES;
use crate::pager::Pager;
use crate::pulse::{OwnLines, Seat};
use crate::site::Site;
use crate::tracker::Tracker;

/// How long a thread sleeps for an owner before it looks whether the pager was stopped.
pub(crate) const WAIT_SLICE: Duration = Duration::from_millis(50);

/// What a thread brings along to resolve faults: its counters, its memory of the last faults, and a
/// buffer. Not shared, so that threads do not write to each other's cache lines.
#[derive(Debug, Default)]
pub struct Worker {
    pub(crate) counters: Counters,
    pub(crate) tracker: Tracker,
    /// Where content is put together that the kernel then copies; empty until it is needed.
    pub(crate) buffer: Vec<u8>,
    seat: Seat,
}

impl Worker {
    /// A worker that has done nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// What it counted so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    #[inline]
    pub(crate) fn resolve(
        &mut self,
        pager: &Pager,
        fault: &Fault,
    ) -> Result<Resolution, ResolveError> {
        self.counters.faults += 1;
        let outside = || ResolveError::Outside { gpa: fault.gpa };
        let (site, span) = Site::of(pager, fault.region, fault.page).ok_or_else(outside)?;
        // A run must not leave its registration: the kernel installs within one mapping only.
        let window = match pager.settings.fault_around_pages {
            1 => PageRange::single(fault.page),
            pages => PageRange::window(fault.page, pages).intersection(span.pages),
        };
        loop {
            match site.paged.map.claim_run(fault.page, window) {
                Claim::Won(run) => {
                    pager.pulse.beat(&self.seat, fault);
                    return self.bring_in(&site, fault, run);
                }
                Claim::Lost(state) => {
                    if let Some(resolution) = self.lost(&site, fault, state)? {
                        return Ok(resolution);
                    }
                }
                Claim::Outside => return Err(outside()),
            }
        }
    }

    /// What to do about a page that could not be claimed. `None`: claim it again.
    fn lost(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        state: PageState,
    ) -> Result<Option<Resolution>, ResolveError> {
        match state {
            PageState::Present | PageState::Zero => {
                self.counters.already_present += 1;
                let resolved = match fault.delivery {
                    Delivery::Exit => self.exit_on_present(site, fault, state),
                    Delivery::Uffd => self.message_on_present(site, fault),
                    Delivery::Prefetch => Ok(Resolution::AlreadyPresent),
                };
                match resolved {
                    Err(error) if error.is_poison() => self.lost_since(site, fault).map(Some),
                    resolved => resolved.map(Some),
                }
            }
            PageState::InFlight => {
                self.counters.lost_claims += 1;
                match fault.delivery {
                    Delivery::Exit => self.join_owner(site, fault),
                    Delivery::Uffd => Ok(leave_to_owner(site, fault)),
                    Delivery::Prefetch => Ok(Some(Resolution::LeftToOwner)),
                }
            }
            PageState::Removed => match site.paged.map.claim_removed(fault.page) {
                Claim::Won(run) => self.bring_in_zero(site, fault, run).map(Some),
                Claim::Lost(_) | Claim::Outside => Ok(None),
            },
            PageState::Poisoned => self.poisoned(site, fault).map(Some),
            // Abandoned between the claim and the look.
            PageState::Absent => Ok(None),
        }
    }

    /// An exit lost its claim: the owner is at work on this page, so wait for it.
    fn join_owner(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
    ) -> Result<Option<Resolution>, ResolveError> {
        self.counters.waits += 1;
        let limit = site.pager.settings.owner_timeout;
        let mut waited = Duration::ZERO;
        loop {
            match site.paged.map.wait(fault.page, WAIT_SLICE) {
                Some(PageState::InFlight) => {}
                Some(PageState::Present | PageState::Zero) => {
                    return Ok(Some(Resolution::JoinedOwner));
                }
                // The owner failed, or the page is not what it was: look again.
                Some(_) => return Ok(None),
                None => return Err(ResolveError::Outside { gpa: fault.gpa }),
            }
            waited += WAIT_SLICE;
            if site.pager.is_stopped() {
                return Err(ResolveError::Stopped { fault: *fault });
            }
            if waited >= limit {
                return Err(ResolveError::OwnerStalled {
                    fault: *fault,
                    waited,
                });
            }
        }
    }

    /// An exit on a page that is present. Most often the page came between the exit and now, and
    /// entering the guest again is all it takes. If the same exit comes again, it was not that:
    /// either the mapping was lost (reclaimed, zapped), or it is there and fast GUP cannot take it
    /// for this access (a page mapped read-only). Of the zero page that is known beforehand.
    fn exit_on_present(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        state: PageState,
    ) -> Result<Resolution, ResolveError> {
        let needs_copy = state == PageState::Zero && fault.access == Access::Write;
        if self.count_repeats(site, fault)? == 0 && !needs_copy {
            return Ok(Resolution::AlreadyPresent);
        }
        if site.pager.settings.mode == Mode::Minor {
            // Before populating, which would wait in the userfaultfd if the mapping was lost.
            let range = site.paged.user_range(PageRange::single(fault.page));
            match site.uffd.continue_pages(range, Wake::DontWake) {
                Ok(()) => {
                    self.counters.reinstalls += 1;
                    self.tracker.progress();
                    return Ok(Resolution::Reinstalled);
                }
                Err(InstallError::Exists { .. }) => {}
                Err(InstallError::Again { .. }) => {
                    self.counters.again += 1;
                    return Ok(Resolution::AlreadyPresent);
                }
                Err(source) => {
                    return Err(ResolveError::Install {
                        fault: *fault,
                        source,
                    });
                }
            }
        }
        self.populate(site, fault)?;
        Ok(Resolution::Populated)
    }

    /// A message about a page that is present. Either the thread fell asleep while the page was
    /// installed without a wake, so that it has to be woken; or the mapping was lost since, and has
    /// to be made again from the page cache.
    fn message_on_present(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
    ) -> Result<Resolution, ResolveError> {
        self.count_repeats(site, fault)?;
        let range = site.paged.user_range(PageRange::single(fault.page));
        if site.pager.settings.mode == Mode::Minor {
            match site.uffd.continue_pages(range, Wake::Wake) {
                Ok(()) => {
                    self.counters.reinstalls += 1;
                    self.tracker.progress();
                    return Ok(Resolution::Reinstalled);
                }
                Err(InstallError::Exists { .. }) => {}
                Err(InstallError::Again { .. }) => self.counters.again += 1,
                Err(source) => {
                    return Err(ResolveError::Install {
                        fault: *fault,
                        source,
                    });
                }
            }
        }
        self.wake(site, range);
        Ok(Resolution::AlreadyPresent)
    }

    /// Counts a fault on a page that is present; too many of them are an error.
    fn count_repeats(&mut self, site: &Site<'_>, fault: &Fault) -> Result<u32, ResolveError> {
        let times = self.tracker.came_again(fault.region, fault.page);
        if times >= site.pager.settings.no_progress_limit {
            return Err(ResolveError::NoProgress {
                fault: *fault,
                times,
            });
        }
        Ok(times)
    }

    /// Makes a page that is mapped present for the access of an exit.
    pub(crate) fn populate(&mut self, site: &Site<'_>, fault: &Fault) -> Result<(), ResolveError> {
        self.counters.populates += 1;
        let access = match fault.access {
            Access::Read | Access::Exec => PopulateAccess::Read,
            Access::Write | Access::Unstated => PopulateAccess::Write,
        };
        site.paged
            .region
            .populate(PageRange::single(fault.page), access)
            .map_err(|source| ResolveError::Populate {
                fault: *fault,
                source,
            })
    }

    pub(crate) fn wake(&mut self, site: &Site<'_>, range: UserRange) {
        site.wake(&mut self.counters, range);
    }

    /// A page that was present has an uncorrected error since.
    fn lost_since(&mut self, site: &Site<'_>, fault: &Fault) -> Result<Resolution, ResolveError> {
        if let Removal::Done(_) = site.paged.map.poison(fault.page) {
            self.counters.poisoned += 1;
        }
        self.poisoned(site, fault)
    }

    /// A fault on a page whose content is lost. Poison is put into the guest mapping whoever asks:
    /// when the userfaultfd is closed one day, the page must not read as zeroes.
    pub(crate) fn poisoned(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
    ) -> Result<Resolution, ResolveError> {
        let is_asleep = fault.delivery == Delivery::Uffd;
        if !site.pager.settings.can_poison {
            return if is_asleep {
                Err(ResolveError::CannotPoison { fault: *fault })
            } else {
                Ok(Resolution::Poisoned)
            };
        }
        let range = site.paged.user_range(PageRange::single(fault.page));
        let wake = if is_asleep {
            Wake::Wake
        } else {
            Wake::DontWake
        };
        match poison_page(site.uffd, range, wake) {
            Ok(()) => {}
            // Poisoned before; a page that was mapped when it was poisoned keeps its mapping, to
            // which the hardware has its own answer.
            Err(InstallError::Exists { .. } | InstallError::Again { .. }) if is_asleep => {
                self.wake(site, range);
            }
            Err(InstallError::Exists { .. }) => {}
            Err(source) => {
                return Err(ResolveError::Install {
                    fault: *fault,
                    source,
                });
            }
        }
        Ok(Resolution::Poisoned)
    }
}

/// UFFDIO_POISON for a single page, again while something else changes the address space.
pub(crate) fn poison_page(
    uffd: &Userfaultfd,
    page: UserRange,
    wake: Wake,
) -> Result<(), InstallError> {
    for _ in 0..MAX_TRIES {
        match uffd.poison_pages(page, wake) {
            Err(InstallError::Again { .. }) => std::thread::yield_now(),
            result => return result,
        }
    }
    Err(InstallError::Again { installed_bytes: 0 })
}

/// A reader lost its claim and must not wait: the owner wakes the sleeper. `None` if the owner was
/// done before it could be asked.
fn leave_to_owner(site: &Site<'_>, fault: &Fault) -> Option<Resolution> {
    match site.paged.map.want_wake(fault.page) {
        Some(PageState::InFlight) => Some(Resolution::LeftToOwner),
        _ => None,
    }
}

/// Resolves the exits of one vCPU, on that vCPU's thread.
#[derive(Debug)]
pub struct Resolver {
    pager: Arc<Pager>,
    vcpu: u32,
    worker: Worker,
}

impl Resolver {
    pub(crate) fn new(pager: Arc<Pager>, vcpu: u32) -> Self {
        Self {
            pager,
            vcpu,
            worker: Worker::new(),
        }
    }

    /// Resolves an exit: with `Ok` the guest may be entered again (but see
    /// [`Resolution::Poisoned`]); with an error it must not.
    #[inline]
    pub fn resolve_exit(&mut self, exit: &FaultExit) -> Result<Resolution, ResolveError> {
        let fault = self.pager.fault_of_exit(self.vcpu, exit)?;
        self.worker.resolve(&self.pager, &fault)
    }

    /// What it counted so far.
    pub fn counters(&self) -> &Counters {
        self.worker.counters()
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        self.pager.count(self.worker.counters());
    }
}

/// A resolver for each vCPU, for callers that share one handler among all vCPU threads. Each vCPU's
/// is on cache lines of its own, and only its own thread uses it: the lock is never contended.
#[derive(Debug)]
pub struct ExitResolvers {
    pager: Arc<Pager>,
    resolvers: Box<[OwnLines<Mutex<Resolver>>]>,
}

impl ExitResolvers {
    /// Resolvers for the vCPUs `0..vcpus`.
    pub fn new(pager: &Arc<Pager>, vcpus: u32) -> Self {
        let resolvers = (0..vcpus).map(|vcpu| OwnLines(Mutex::new(pager.resolver(vcpu))));
        Self {
            pager: Arc::clone(pager),
            resolvers: resolvers.collect(),
        }
    }

    /// The pager behind them.
    pub fn pager(&self) -> &Arc<Pager> {
        &self.pager
    }

    /// Resolves an exit of vCPU `vcpu`, see [`Resolver::resolve_exit`].
    #[inline]
    pub fn resolve(&self, vcpu: u32, exit: &FaultExit) -> Result<Resolution, ResolveError> {
        let resolver = usize::try_from(vcpu)
            .ok()
            .and_then(|index| self.resolvers.get(index));
        match resolver {
            Some(OwnLines(resolver)) => {
                // A resolver whose thread panicked holds counters and a memory of faults only.
                resolver
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .resolve_exit(exit)
            }
            None => self.pager.resolver(vcpu).resolve_exit(exit),
        }
    }

    /// What they counted so far, together.
    pub fn counters(&self) -> Counters {
        let mut sum = Counters::default();
        for OwnLines(resolver) in &self.resolvers {
            sum.add(
                resolver
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .counters(),
            );
        }
        sum
    }
}
