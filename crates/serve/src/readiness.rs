//! Whether a server takes further VMs, and what is wrong with those that it has.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::porter::Porter;
use crate::state::State;
use crate::stopper::Stopper;

/// Looks at a server, from any thread.
#[derive(Debug)]
pub(crate) struct Readiness {
    stopper: Stopper,
    /// The VMs, with connections that are none yet.
    vms: Arc<AtomicUsize>,
    /// [`crate::Options::max_vms`].
    limit: AtomicUsize,
    /// Sockets whose image or socket is not open.
    waiting: AtomicUsize,
    /// Whether it was drained, at the word of a client of the control socket.
    is_drained: AtomicBool,
    state: Option<Arc<State>>,
    porter: Option<Arc<Porter>>,
}

/// Why a server takes no further VMs, or does not do all that it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// It takes none: it ends.
    Ending,
    /// It takes none: it was told to give its VMs all that they lack.
    Drained,
    /// It takes none: it has as many as it may.
    Full { limit: usize },
    /// VMs do not outlive it.
    NoKeeper,
    /// The server receives descriptors itself.
    NoPorter,
    /// Sockets are not served yet: their images cannot be opened, or they themselves.
    Waiting { sockets: usize },
    /// Guests wait for content, or for memory that takes it.
    Stalled { regions: u64 },
}

impl Trouble {
    /// Whether further VMs are refused because of it.
    pub(crate) fn refuses_vms(self) -> bool {
        match self {
            Self::Ending | Self::Drained | Self::Full { .. } => true,
            Self::NoKeeper | Self::NoPorter | Self::Waiting { .. } | Self::Stalled { .. } => false,
        }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ending => f.write_str("the server ends"),
            Self::Drained => f.write_str("the server was drained: it takes no further VMs"),
            Self::Full { limit } => write!(f, "no room for another VM: --max-vms is {limit}"),
            Self::NoKeeper => {
                f.write_str("no keeper takes VMs now: those that begin do not outlive the server")
            }
            Self::NoPorter => f.write_str(
                "the porter has ended: a client can hang the server's end; restart the server",
            ),
            Self::Waiting { sockets } => write!(
                f,
                "sockets that are not served yet, for reasons in the log: {sockets}"
            ),
            Self::Stalled { regions } => write!(f, "guests wait, stalled regions: {regions}"),
        }
    }
}

impl Readiness {
    pub(crate) fn new(
        stopper: Stopper,
        vms: Arc<AtomicUsize>,
        limit: usize,
        (state, porter): (Option<Arc<State>>, Option<Arc<Porter>>),
    ) -> Self {
        Self {
            stopper,
            vms,
            limit: AtomicUsize::new(limit),
            waiting: AtomicUsize::new(0),
            is_drained: AtomicBool::new(false),
            state,
            porter,
        }
    }

    /// The limit of new options.
    pub(crate) fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// How many sockets are not served yet.
    pub(crate) fn set_waiting(&self, sockets: usize) {
        self.waiting.store(sockets, Ordering::Relaxed);
    }

    /// It takes no further VMs from now on.
    pub(crate) fn set_drained(&self) {
        self.is_drained.store(true, Ordering::Relaxed);
    }

    /// How many sockets are not served yet.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// All that is wrong now.
    pub(crate) fn troubles(&self, stalled_regions: u64) -> Vec<Trouble> {
        let limit = self.limit.load(Ordering::Relaxed);
        let is_full = self.vms.load(Ordering::Relaxed) >= limit;
        let has_no_keeper = self.state.as_ref().is_some_and(|state| state.takes_none());
        let has_no_porter = self.porter.as_ref().is_some_and(|porter| porter.is_gone());
        let sockets = self.waiting();
        let all = [
            (self.stopper.is_stopping(), Trouble::Ending),
            (self.is_drained.load(Ordering::Relaxed), Trouble::Drained),
            (is_full, Trouble::Full { limit }),
            (has_no_keeper, Trouble::NoKeeper),
            (has_no_porter, Trouble::NoPorter),
            (sockets > 0, Trouble::Waiting { sockets }),
            (
                stalled_regions > 0,
                Trouble::Stalled {
                    regions: stalled_regions,
                },
            ),
        ];
        let there = all.into_iter().filter(|(is_there, _)| *is_there);
        there.map(|(_, trouble)| trouble).collect()
    }
}
