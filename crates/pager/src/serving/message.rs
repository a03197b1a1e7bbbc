//! What a fault that was read from a userfaultfd asks for, by the address space that it comes from.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use pagetide_memory::{Access, PageIndex, PageRange, PageSize, PageState, Wish};
use pagetide_uapi::userfaultfd::{InstallError, PageFault, UserRange, Wake};

use super::Serving;
use super::waits::Outcome;
use crate::again::Again;
use crate::channel::{Channel, Role};
use crate::children::answer_by_poison;
use crate::counters::Counters;
use crate::error::{InstallFailure, ResolveError, WAIT_SLICE};
use crate::fault::{Delivery, Fault, RegionId, Resolution};
use crate::install::wake;
use crate::log_limit::log_limited;
use crate::memory::zero_range;
use crate::notice::Notice;
use crate::pager::Pager;
use crate::spaces::{InSpace, map_in_space};

impl Serving {
    /// Resolves a fault that was read.
    pub(super) fn resolve(
        &mut self,
        pager: &Pager,
        channel: &Channel,
        message: &PageFault,
    ) -> Outcome {
        if channel.role == Role::Child {
            // Nobody tracks the writes of a child.
            answer_by_poison(channel, message);
            return Outcome::None;
        }
        // If the page was unmapped or moved since, the faulting thread has left, or faults again.
        let Some((region, page)) = channel.locate(message.address) else {
            answer_vacated(channel, message);
            return Outcome::None;
        };
        let access = if message.write {
            Access::Write
        } else {
            Access::Read
        };
        if message.write_protected {
            self.resolver.count_write();
            end_protection(pager, channel, message, region, page);
            return Outcome::None;
        }
        let resolved = match channel.role {
            Role::Space => {
                self.resolve_in_space(pager, channel, message.address, region, page, access)
            }
            Role::Region | Role::Child => self.resolver.resolve_message(region, page, access),
        };
        match resolved {
            // A region that is being removed wakes its sleeping threads itself.
            Err(ResolveError::Removed { .. } | ResolveError::Outside { .. })
            | Ok(Resolution::Unmapped | Resolution::Poisoned) => Outcome::None,
            Ok(Resolution::LeftToInstaller) => Outcome::Waiting(region, page),
            Ok(_) => Outcome::Resolved(region, page),
            // No failure.
            Err(ResolveError::Install {
                source: InstallFailure::Busy { .. },
                ..
            }) => Outcome::Busy(region, page),
            Err(error) => {
                if matches!(
                    error,
                    ResolveError::Content { .. }
                        | ResolveError::Install { .. }
                        | ResolveError::Remap { .. }
                ) {
                    leave_asleep(pager, region, page, &error);
                }
                pager.notify(Notice::Unresolved(Arc::new(error)));
                Outcome::Waiting(region, page)
            }
        }
    }

    /// Resolves a fault of an address space that shares a region's memory: first in the region, and then there.
    fn resolve_in_space(
        &mut self,
        pager: &Pager,
        channel: &Channel,
        address: u64,
        id: RegionId,
        page: PageIndex,
        access: Access,
    ) -> Result<Resolution, ResolveError> {
        let mut again = Again::for_a_turn();
        loop {
            let table = pager.table();
            let found = table.region(id).filter(|region| !region.is_closed());
            let Some(region) = found else {
                return Ok(Resolution::Unmapped);
            };
            let fault = Fault {
                region: id,
                page,
                gpa: region.gpa_of(page),
                access,
                vcpu: None,
                delivery: Delivery::Uffd,
            };
            match map_in_space(pager, region, channel, address, page) {
                InSpace::Done => return Ok(Resolution::AlreadyPresent),
                InSpace::Missing => match self.resolver.resolve_message(id, page, access)? {
                    // The installer wakes the threads of all address spaces.
                    Resolution::LeftToInstaller => return Ok(Resolution::LeftToInstaller),
                    _ => continue,
                },
                InSpace::Later => {
                    let paused = again.pause();
                    paused.map_err(|source| ResolveError::Install { fault, source })?;
                }
                InSpace::Refused(source) => return Err(ResolveError::Remap { fault, source }),
            }
        }
    }
}

/// A write to a page that is there and protected: the write goes on, and the owner is told of it.
fn end_protection(
    pager: &Pager,
    channel: &Channel,
    message: &PageFault,
    id: RegionId,
    page: PageIndex,
) {
    let table = pager.table();
    let Some(region) = table.region(id) else {
        return;
    };
    if let Some(observer) = &region.observer {
        let fault = Fault {
            region: id,
            page,
            gpa: region.gpa_of(page),
            access: Access::Write,
            vcpu: None,
            delivery: Delivery::Uffd,
        };
        let observed = catch_unwind(AssertUnwindSafe(|| observer.0.written(&fault)));
        if observed.is_err() {
            log_limited!(error, %fault, "an observer panicked");
        }
    }
    let bytes = 1_u64 << region.page_shift();
    let range = UserRange {
        start: message.address & !(bytes - 1),
        bytes,
    };
    let mut again = Again::for_a_turn();
    loop {
        match channel.uffd.unprotect(range) {
            Ok(()) => {}
            // The process changes its address space.
            Err(InstallError::Again { .. }) => {
                pager.read_events(channel);
                // An event may have moved the page, and another one may be at its address.
                let is_there = channel.locate(message.address) == Some((id, page));
                if is_there && again.pause().is_ok() {
                    continue;
                }
                // Other faults first, or its page by its new address.
                channel.defer([*message]);
                pager.poller.report_deferred();
            }
            // Not mapped any more, or gone.
            Err(InstallError::NoMapping | InstallError::Gone) => {
                let _ = channel.uffd.wake(range);
            }
            Err(error) => log_limited!(error, %error, %range, "UFFDIO_WRITEPROTECT"),
        }
        return;
    }
}

/// Answers a fault at an address that no region has, if the process has moved its memory away from there and kept the address
/// (`MREMAP_DONTUNMAP`): nobody else would wake its thread.
fn answer_vacated(channel: &Channel, message: &PageFault) {
    if !channel.is_vacated(message.address) {
        return;
    }
    // It may be memory whose content nobody here knows: of another mapping, or of a region that is about to be added.
    if !channel.knows_vacated() {
        return answer_by_poison(channel, message);
    }
    let page_bytes = PageSize::Size4K.bytes();
    let range = UserRange {
        start: message.address & !(page_bytes - 1),
        bytes: page_bytes,
    };
    // Fails where nothing is mapped any more, or where the pages are larger: then a wake-up is all there is.
    if zero_range(PageSize::Size4K, &channel.uffd, range, Wake::Wake).is_err() {
        let _ = channel.uffd.wake(range);
    }
}

/// The fault's page is still missing, or not mapped. Its thread stays asleep until the page is delivered otherwise, or, if
/// the failure may pass, until the region is resumed.
fn leave_asleep(pager: &Pager, region: RegionId, page: PageIndex, error: &ResolveError) {
    let table = pager.table();
    let Some(region) = table.region(region) else {
        return;
    };
    let wish = match error.may_pass() {
        true => Wish::Asleep,
        false => Wish::AsleepForGood,
    };
    // The page is there, and would fail again at once.
    if matches!(error, ResolveError::Remap { .. }) {
        region.missing().leave_at_settled(page);
        return;
    }
    let left = loop {
        match region.missing().leave_asleep(&region.map, page, wish) {
            // Its owner may only wake the thread, which must not be woken.
            Err(PageState::Installing) if wish == Wish::AsleepForGood => {
                region.map.wait_for_owner(page, WAIT_SLICE);
            }
            Err(PageState::Installing) => {
                if region.map.want_wake(page) == Some(PageState::Installing) {
                    return;
                }
            }
            left => break left,
        }
    };
    if left.is_ok() {
        return pager.submit(region);
    }
    if let Some(served) = region.served(page) {
        // The page was settled since, by a thread that did not find this sleeper.
        let (page, mut counters) = (PageRange::single(page), Counters::default());
        wake(
            region,
            served,
            &served.channel.lock_installs(),
            &mut counters,
            page,
        );
        pager.count(&counters);
    }
}
