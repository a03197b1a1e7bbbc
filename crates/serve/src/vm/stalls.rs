//! What a pager reports of a VM: regions that stall are tried again, and the VMM hears of it.

use std::time::Instant;

use pagetide_pager::Notice;

use super::{End, Link, Part, Vm, chain, kill};
use crate::log_limit::log_vm;
use crate::native::message::Message;
use crate::options::OnFailure;

impl Vm<'_> {
    /// Handles what the pager reports.
    pub(super) fn act_on_notices(&mut self, link: &mut Link<'_>) -> Option<End> {
        let mut end = None;
        while let Ok(notice) = self.notices.try_recv() {
            let pid = self.peer.pid;
            let is_gone = |region| !self.pager.region_ids().contains(&region);
            if notice.region().is_some_and(is_gone) {
                // Handed over: what becomes of it is its successor's business.
                continue;
            }
            match &notice {
                Notice::ProcessGone { .. } => end = end.or(Some(End::Gone)),
                Notice::Stalled { .. } | Notice::NotInstalled { .. } | Notice::Unresolved(_) => {
                    self.last_error = chain(&notice);
                    if let Some(region) = notice.resumable() {
                        if self.stalled.iter().any(|(stalled, _)| *stalled == region) {
                            continue;
                        }
                        self.common.metrics.count(|totals| totals.stalls = 1);
                        let text = self.last_error.clone();
                        link.notify(|| Message::Stalled { regions: 1, text });
                        // Content that does not exist will not come.
                        let is_endless = matches!(notice, Notice::Stalled { .. })
                            && self.without_content.contains(&region);
                        if !is_endless {
                            let again = Instant::now() + self.common.options.resume_after;
                            self.stalled.push((region, again));
                        }
                    }
                    let what = match notice.resumable() {
                        Some(_) => "VM stalled",
                        None => "a page was not installed",
                    };
                    if let Some(notices_dropped) = self.notices_logged.pass() {
                        let error = &notice as &dyn std::error::Error;
                        log_vm!(error, self.charge, pid, notices_dropped, error, "{what}");
                    }
                    if self.common.options.on_failure == OnFailure::Kill {
                        self.kill(link);
                        end = Some(End::Killed);
                    }
                }
                other => {
                    if other.needs_action() || matches!(other, Notice::NotPrefetched { .. }) {
                        self.last_error = chain(other);
                    }
                    if let Some(notices_dropped) = self.notices_logged.pass() {
                        let error = other as &dyn std::error::Error;
                        log_vm!(warn, self.charge, pid, notices_dropped, error, "notice");
                    }
                }
            }
        }
        end
    }

    /// The regions of which some threads wait, for their source or for memory that takes no content.
    pub(super) fn stalled_regions(&self) -> u64 {
        let is_stalled = |part: &&Part| {
            let is_tried_later = || self.stalled.iter().any(|(region, _)| *region == part.id);
            // None after the end.
            let status = self.pager.source_status(part.id);
            status.is_ok_and(|status| status.is_stalled || is_tried_later())
        };
        self.parts.iter().filter(is_stalled).count() as u64
    }

    fn kill(&self, link: &mut Link<'_>) {
        link.notify(|| Message::Killed {
            text: self.last_error.clone(),
        });
        kill(self.common, self.peer, self.charge);
    }

    /// Tries stalled regions again whose time is due. Returns their number.
    pub(super) fn resume(&mut self, is_due: impl Fn(Instant) -> bool) -> usize {
        let mut resumed = 0;
        self.stalled.retain(|(region, at)| {
            let is_due = is_due(*at);
            if is_due {
                // A region that stalls again is reported again.
                resumed += usize::from(self.pager.resume(*region).is_ok());
            }
            !is_due
        });
        resumed
    }
}
