//! A fault whose page somebody else delivers: it is requested, and its thread waits, or helps its source meanwhile.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use pagetide_memory::{PageState, Wish};

use crate::error::{Failure, ResolveError, WAIT_SLICE, message_of};
use crate::fault::{Delivery, Fault, Resolution};
use crate::log_limit::log_limited;
use crate::resolver::{ResolverState, Site};
use crate::source::Helper;

impl ResolverState {
    /// Requests the page and the absent pages around it, unless it is requested urgently already.
    pub(crate) fn request(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
    ) -> Result<Option<Resolution>, Failure> {
        if site.pager.install_delivered_at(site.region, fault.page) {
            return Ok(None);
        }
        let is_new = match self.wish(site, fault) {
            Ok(is_new) => is_new,
            Err(PageState::Pending) => return Ok(None),
            Err(state) => return self.not_missing(site, fault, state),
        };
        if is_new {
            self.begin(site, fault);
            self.counters.requests += 1;
            site.pager.submit(site.region);
        } else {
            self.counters.lost_claims += 1;
        }
        match fault.delivery {
            // Whoever installs the page wakes the thread.
            Delivery::Uffd => Ok(Some(Resolution::LeftToInstaller)),
            Delivery::Exit => self.wait(site, fault),
        }
    }

    /// Enters in the book of missing pages that the fault's thread waits.
    fn wish(&mut self, site: &Site<'_>, fault: &Fault) -> Result<bool, PageState> {
        let wish = match fault.delivery {
            Delivery::Exit => Wish::Touched,
            Delivery::Uffd => Wish::Asleep,
        };
        let region = site.region;
        let window = region.window(site.served, fault.page);
        let mut missing = region.missing();
        missing.request(&region.map, fault.page, window, wish)
    }

    /// Another thread installs the page, or requests it: an exit waits for that, a thread in the userfaultfd is
    /// woken by it.
    pub(crate) fn wait(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
    ) -> Result<Option<Resolution>, Failure> {
        let map = &site.region.map;
        if fault.delivery == Delivery::Uffd {
            return Ok(match map.want_wake(fault.page) {
                Some(PageState::Installing) => Some(Resolution::LeftToInstaller),
                // Its state has changed: retry.
                _ => None,
            });
        }
        self.counters.waits += 1;
        loop {
            let state = match site.region.has_source() {
                true => self.help_or_sleep(site, fault),
                // Nobody delivers a page of local content that its owner has given back.
                false => map.wait_for_owner(fault.page, WAIT_SLICE),
            };
            match state {
                Some(PageState::Installing) => {}
                // Again, because the thread that installed it may have given it back to prefetch's request.
                Some(PageState::Pending) if site.region.has_source() => {
                    // An error says that the page's state has changed since: the next look finds it.
                    if self.wish(site, fault).is_ok() {
                        site.pager.submit(site.region);
                    }
                }
                Some(PageState::Present | PageState::Zero) => return Ok(Some(Resolution::Waited)),
                // The page's state has changed: retry.
                Some(_) => return Ok(None),
                None => return Err(ResolveError::Outside { gpa: fault.gpa }.into()),
            }
            if site.pager.is_stopped() {
                return Err(ResolveError::Stopped { fault: *fault }.into());
            }
            if site.region.is_closed() {
                return Err(ResolveError::Removed { fault: *fault }.into());
            }
            // Deadlines must take effect even if no thread serves the pager's descriptor, and so must content.
            site.pager.tick();
            site.pager.install_delivered_at(site.region, fault.page);
        }
    }

    /// Lends this thread to the source while the page is requested from it, and sleeps for the rest of the time.
    fn help_or_sleep(&mut self, site: &Site<'_>, fault: &Fault) -> Option<PageState> {
        let map = &site.region.map;
        let until = Instant::now() + WAIT_SLICE;
        let is_over = || map.state(fault.page) != Some(PageState::Pending);
        let missing = site.region.missing();
        let is_asked = !missing.requests.is_stalled() && !is_over();
        let source = missing.source.clone().filter(|_| is_asked);
        drop(missing);
        if let Some(source) = source {
            let mut helper = Helper::new(site.pager.weak(), fault, until, &is_over);
            let helped = catch_unwind(AssertUnwindSafe(|| source.help(&mut helper)));
            self.counters.pages_received_by_waiter += helper.received_pages();
            if let Err(panic) = helped {
                let message = message_of(&*panic);
                log_limited!(error, %fault, message, "a source panicked while a thread helped it");
            }
        }
        map.wait(fault.page, until.saturating_duration_since(Instant::now()))
    }
}
