//! A fault whose page somebody else delivers: it is requested, and its thread waits, or helps its source meanwhile.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use pagetide_memory::{PageState, Wish};

use crate::error::{Failure, ResolveError, WAIT_SLICE, message_of};
use crate::fault::{Delivery, Fault, Resolution};
use crate::resolver::{ResolverState, Site};
use crate::source::Helper;

impl ResolverState {
    /// Requests the page and the absent pages around it, unless it is requested urgently already.
    pub(crate) fn request(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
    ) -> Result<Option<Resolution>, Failure> {
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
                true if self.help(site, fault) => map.state(fault.page),
                true => map.wait(fault.page, WAIT_SLICE),
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
            // Deadlines must take effect even if no thread serves the pager's descriptor.
            site.pager.tick();
        }
    }

    /// Lends this thread to the source. False if the source has no use for it.
    fn help(&mut self, site: &Site<'_>, fault: &Fault) -> bool {
        let Some(source) = site.region.source() else {
            return false;
        };
        let is_over = || {
            let state = site.region.map.state(fault.page);
            !matches!(state, Some(PageState::Pending | PageState::Installing))
        };
        let mut helper = Helper::new(fault, Instant::now() + WAIT_SLICE, &is_over);
        let helped = catch_unwind(AssertUnwindSafe(|| source.help(&mut helper)));
        self.counters.pages_received_by_waiter += helper.received_pages();
        helped.unwrap_or_else(|panic| {
            let message = message_of(&*panic);
            tracing::error!(%fault, message, "a source panicked while a thread helped it");
            false
        })
    }
}
