//! How long guests wait: from the reading of a fault's message until its page is there.

use std::time::{Duration, Instant};

use pagetide_memory::{PageIndex, PageState};

use crate::fault::RegionId;
use crate::pager::Pager;

/// Pages that are remembered at one time. Each is looked at after each turn, and whoever owns the memory may have any number
/// of threads.
const MOST: usize = 256;

/// What a guest waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// The thread that read the message: the content was at hand, or nothing had to be fetched.
    Here,
    /// A source, or memory that took the content later.
    Source,
}

/// The callback for ended waits.
type OnWaited = Box<dyn FnMut(Waited, Duration) + Send>;

/// A page that a thread waits for.
#[derive(Clone, Copy, Debug)]
struct Wait {
    region: RegionId,
    page: PageIndex,
    since: Instant,
}

/// What has become of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Its thread goes on.
    Resolved(RegionId, PageIndex),
    /// Its thread waits for the page.
    Waiting(RegionId, PageIndex),
    /// The same, and the kernel installs nothing for now.
    Busy(RegionId, PageIndex),
    /// Nobody waits there, or not for content.
    None,
}

/// The pages that threads wait for, and who is told when they have come.
#[derive(Default)]
pub(super) struct Waits {
    pages: Vec<Wait>,
    tell: Option<OnWaited>,
}

impl Waits {
    pub(super) fn on_waited(&mut self, tell: impl FnMut(Waited, Duration) + Send + 'static) {
        self.tell = Some(Box::new(tell));
    }

    /// Whether anybody wants to know.
    pub(super) fn is_on(&self) -> bool {
        self.tell.is_some()
    }

    /// Notes what has become of a fault whose message was read at `since`, by `now`.
    pub(super) fn note(&mut self, outcome: Outcome, since: Instant, now: Instant) {
        let Some(tell) = &mut self.tell else {
            return;
        };
        let is_known = |pages: &[Wait], region, page| {
            let is_it = |wait: &Wait| (wait.region, wait.page) == (region, page);
            pages.iter().any(is_it)
        };
        match outcome {
            // One that has waited is told of when all are looked at.
            Outcome::Resolved(region, page) if !is_known(&self.pages, region, page) => {
                tell(Waited::Here, now.saturating_duration_since(since));
            }
            // A thread that faults again on the page waits since its first fault.
            Outcome::Waiting(region, page) | Outcome::Busy(region, page)
                if self.pages.len() < MOST && !is_known(&self.pages, region, page) =>
            {
                self.pages.push(Wait {
                    region,
                    page,
                    since,
                });
            }
            Outcome::Resolved(..) | Outcome::Waiting(..) | Outcome::Busy(..) | Outcome::None => {}
        }
    }

    /// Tells of the pages that have come.
    pub(super) fn look(&mut self, pager: &Pager) {
        let (Some(tell), false) = (&mut self.tell, self.pages.is_empty()) else {
            return;
        };
        let (table, now) = (pager.table(), Instant::now());
        self.pages.retain(|wait| {
            let region = table.region(wait.region);
            match region.and_then(|region| region.map.state(wait.page)) {
                Some(PageState::Present | PageState::Zero) => {
                    tell(Waited::Source, now.saturating_duration_since(wait.since));
                    false
                }
                Some(PageState::Absent | PageState::Pending | PageState::Installing) => true,
                // It was given up, or is lost: no content has come.
                Some(PageState::Removed | PageState::Poisoned) | None => false,
            }
        });
    }
}
