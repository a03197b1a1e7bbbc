//! Bringing claimed pages in: content from the source, then into the guest mapping.

use pagetide_memory::{Backing, ClaimGuard, PageRange, Settled};
use pagetide_uapi::userfaultfd::{InstallError, Wake};

use crate::content::Content;
use crate::error::ResolveError;
use crate::fault::{Delivery, Fault, Resolution};
use crate::resolver::Worker;
use crate::site::Site;

/// How often the kernel may say EAGAIN in a row without having installed anything. It does so while
/// another thread changes the address space, which takes microseconds.
pub(crate) const MAX_TRIES: u32 = 10_000;

/// What else there is of the claim that a run was a part of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rest {
    /// Nothing.
    None,
    /// Pages that are not installed yet.
    InFlight,
}

impl Worker {
    /// Brings a run in that was just claimed and holds the faulting page.
    #[inline]
    pub(crate) fn bring_in(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        run: ClaimGuard<'_>,
    ) -> Result<Resolution, ResolveError> {
        self.tracker.progress();
        if site.pager.settings.in_page_cache {
            return self.install(site, fault, run, Content::PageCache);
        }
        let (run, content) = self.fetch(site, fault, run)?;
        self.install_content(site, fault, run, content)
    }

    /// Makes a page that the guest gave up read as zeroes.
    pub(crate) fn bring_in_zero(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        run: ClaimGuard<'_>,
    ) -> Result<Resolution, ResolveError> {
        self.tracker.progress();
        match self.zeroes(site, run.pages()) {
            Ok(content) => self.install_content(site, fault, run, content),
            Err(source) => {
                site.abandon(&mut self.counters, run);
                Err(ResolveError::Fetch {
                    fault: *fault,
                    source,
                })
            }
        }
    }

    fn install_content(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        run: ClaimGuard<'_>,
        content: Content,
    ) -> Result<Resolution, ResolveError> {
        if content == Content::Lost {
            return self.settle_lost(site, fault, run);
        }
        self.install(site, fault, run, content)
    }

    fn settle_lost(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        run: ClaimGuard<'_>,
    ) -> Result<Resolution, ResolveError> {
        // Settled first: whoever is woken by the poison finds the map saying so.
        self.counters.poisoned += run.pages().count();
        site.finish(&mut self.counters, run, Settled::Poisoned);
        self.poisoned(site, fault)
    }

    /// Installs a run. In the common case that is one ioctl and one atomic operation a page.
    #[inline]
    fn install(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        run: ClaimGuard<'_>,
        content: Content,
    ) -> Result<Resolution, ResolveError> {
        let pages = run.pages();
        match self.install_once(site, fault, pages, content) {
            Ok(()) => {
                self.arrived(site, fault, run, content, Rest::None);
                Ok(installed(site, pages))
            }
            Err(error) => self.install_rest(site, fault, run, content, error),
        }
    }

    /// One call has installed a run: settles it. What prefetch brought is populated first, so that
    /// what is Present costs the guest nothing. What came with a faulting page is handed over to be
    /// populated; a vCPU that waits for a single page maps it itself. So is what prefetch brought while
    /// other pages of its claim are still to come: somebody may sleep on those, see
    /// [`Self::install_once`].
    #[inline]
    fn arrived(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        run: ClaimGuard<'_>,
        content: Content,
        rest: Rest,
    ) {
        let pages = run.pages();
        self.counters.installs += 1;
        self.counters.pages += pages.count();
        let is_ahead = fault.delivery == Delivery::Prefetch;
        let now = is_ahead && rest == Rest::None;
        if now {
            site.populate(pages);
        }
        site.finish(&mut self.counters, run, settled(site, content));
        if !now && (is_ahead || pages.count() > 1) {
            site.populate_later(pages);
        }
    }

    #[inline]
    fn install_once(
        &self,
        site: &Site<'_>,
        fault: &Fault,
        pages: PageRange,
        content: Content,
    ) -> Result<(), InstallError> {
        let wake = match fault.delivery {
            Delivery::Exit => Wake::DontWake,
            // Before prefetch populates, which may wait for a slot update, and that for whoever
            // sleeps here: from now on nobody does.
            Delivery::Prefetch | Delivery::Uffd => Wake::Wake,
        };
        let range = site.paged.user_range(pages);
        match content {
            Content::PageCache => site.uffd.continue_pages(range, wake),
            Content::Zeroes => site.uffd.zero_pages(range, wake),
            Content::Buffer(filled) => {
                let skip = pages.first().0 - filled.first().0;
                let skip = site.paged.bytes_of(PageRange::new(pages.first(), skip));
                let bytes = usize::try_from(skip)
                    .ok()
                    .zip(usize::try_from(range.bytes).ok())
                    .and_then(|(skip, bytes)| self.buffer.get(skip..)?.get(..bytes))
                    .ok_or(InstallError::NoContent)?;
                site.uffd.copy_pages(range.start, bytes, wake)
            }
            Content::Lost => Err(InstallError::NoContent),
        }
    }

    /// Goes on after an installation that stopped early with `error`.
    #[cold]
    fn install_rest(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        mut run: ClaimGuard<'_>,
        content: Content,
        mut error: InstallError,
    ) -> Result<Resolution, ResolveError> {
        let mut resolution = None;
        let mut tries = 0;
        loop {
            let installed_bytes = match error {
                InstallError::Exists { installed_bytes }
                | InstallError::Again { installed_bytes } => installed_bytes,
                _ => 0,
            };
            if installed_bytes > 0 {
                tries = 0;
                let (head, rest) = run.split_at(site.paged.pages_in(installed_bytes));
                let pages = head.pages();
                self.arrived(site, fault, head, content, Rest::InFlight);
                if pages.contains(fault.page) {
                    resolution = Some(installed(site, pages));
                }
                run = rest;
            }
            match error {
                InstallError::Exists { .. } => {
                    let (there, rest) = run.split_at(1);
                    self.counters.exists += 1;
                    let is_wanted = there.pages().contains(fault.page);
                    match self.exists(site, fault, there) {
                        Ok(exists) if is_wanted => resolution = Some(exists),
                        Ok(_) => {}
                        Err(error) => {
                            site.abandon(&mut self.counters, rest);
                            return Err(error);
                        }
                    }
                    run = rest;
                }
                InstallError::Again { .. } => {
                    self.counters.again += 1;
                    tries += 1;
                    if tries > MAX_TRIES {
                        site.abandon(&mut self.counters, run);
                        return resolution.ok_or(ResolveError::Busy {
                            fault: *fault,
                            tries,
                        });
                    }
                    if installed_bytes == 0 {
                        std::thread::yield_now();
                    }
                }
                InstallError::Poisoned if run.pages().first() == fault.page => {
                    let (lost, rest) = run.split_at(1);
                    site.abandon(&mut self.counters, rest);
                    return self.settle_lost(site, fault, lost);
                }
                source => {
                    let pages = run.pages();
                    if let Some(resolution) = resolution {
                        // The trouble is a later neighbour's; its own fault will tell.
                        site.abandon(&mut self.counters, run);
                        return Ok(resolution);
                    }
                    if pages.first() == fault.page {
                        site.abandon(&mut self.counters, run);
                        return Err(ResolveError::Install {
                            fault: *fault,
                            source,
                        });
                    }
                    // The trouble is an earlier neighbour's: go on with the faulting page.
                    let (before, rest) = run.split_at(fault.page.0 - pages.first().0);
                    site.abandon(&mut self.counters, before);
                    run = rest;
                }
            }
            if run.pages().is_empty() {
                break;
            }
            match self.install_once(site, fault, run.pages(), content) {
                Ok(()) => {
                    let pages = run.pages();
                    self.arrived(site, fault, run, content, Rest::None);
                    if pages.contains(fault.page) {
                        resolution = Some(installed(site, pages));
                    }
                    break;
                }
                Err(next) => error = next,
            }
        }
        // The faulting page was in the run, and each page of the run was dealt with.
        resolution.ok_or(ResolveError::Busy {
            fault: *fault,
            tries,
        })
    }

    /// A page that was to be installed is mapped already: somebody did not ask the page map. It is
    /// present, then; but it may be the zero page or write-protected, which fast GUP does not take,
    /// so an exit makes sure of its access. Nobody has woken those who sleep on it.
    fn exists(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        there: ClaimGuard<'_>,
    ) -> Result<Resolution, ResolveError> {
        let pages = there.pages();
        let is_wanted = pages.contains(fault.page);
        if is_wanted && fault.delivery == Delivery::Exit {
            match self.populate(site, fault) {
                Ok(()) => {}
                // What is mapped there is the kernel's mark of an uncorrected error.
                Err(error) if error.is_poison() => return self.settle_lost(site, fault, there),
                Err(error) => {
                    site.abandon(&mut self.counters, there);
                    return Err(error);
                }
            }
        }
        site.finish(&mut self.counters, there, Settled::Present);
        if is_wanted && fault.delivery == Delivery::Uffd {
            self.wake(site, site.paged.user_range(pages));
        }
        Ok(Resolution::Exists)
    }
}

/// What pages with this content are from now on.
#[inline]
fn settled(site: &Site<'_>, content: Content) -> Settled {
    // Only private memory gets the shared zero page; a file gets a page of its own.
    if content == Content::Zeroes && site.paged.region.backing() == Backing::Anonymous {
        Settled::Zero
    } else {
        Settled::Present
    }
}

#[inline]
fn installed(site: &Site<'_>, pages: PageRange) -> Resolution {
    Resolution::Installed {
        gpa: site.paged.gpa_of(pages.first()),
        bytes: site.paged.bytes_of(pages),
    }
}
