//! Notices to the owner of a pager.

use std::sync::Arc;

use thiserror::Error;

use crate::error::{PrefetchError, ResolveError, ServeError};
use crate::fault::RegionId;
use crate::source::SourceError;

/// A report to the owner of a pager. Cheap to clone.
///
/// No notice ends the pager: other regions continue, and the owner decides about the VM.
#[derive(Clone, Debug, Error)]
pub enum Notice {
    /// A region's source has failed as often as the retry policy permits. A thread that touches a
    /// missing page waits until the owner resumes the region, replaces its source or abandons it.
    #[error("region {region:?} is stalled: its source has failed too often")]
    Stalled {
        /// The region.
        region: RegionId,
        /// The last failure.
        #[source]
        last: Arc<SourceError>,
    },
    /// A fault from a userfaultfd could not be resolved. The faulting thread stays asleep until the
    /// page is delivered otherwise, or the region is resumed or removed.
    #[error("a fault that came by a userfaultfd could not be resolved")]
    Unresolved(#[source] Arc<ResolveError>),
    /// Content for which a thread waits has arrived, and could not be installed. The region is stalled:
    /// threads that wait for the page continue to wait until the owner resumes it.
    #[error("content that arrived for region {region:?} could not be installed")]
    NotInstalled {
        /// The region.
        region: RegionId,
        /// The error.
        #[source]
        source: Arc<crate::error::InstallFailure>,
    },
    /// Content of prefetch could not be installed. No thread waits for it: prefetch tries again, and at last
    /// leaves the page out. Once for each region and prefetch.
    #[error("content that prefetch has fetched for region {region:?} could not be installed")]
    NotPrefetched {
        /// The region.
        region: RegionId,
        /// The error.
        #[source]
        source: Arc<crate::error::InstallFailure>,
    },
    /// The process that owns a foreign region's memory has exited.
    #[error("the process that owns the memory of region {region:?} has exited")]
    ProcessGone {
        /// The region.
        region: RegionId,
    },
    /// A reader thread has ended early.
    #[error("a reader thread has ended early")]
    Reader(#[source] Arc<ServeError>),
    /// A reader thread panicked.
    #[error("a reader thread panicked: {message}")]
    ReaderPanicked {
        /// The panic's message.
        message: String,
    },
    /// Prefetch has ended early.
    #[error("prefetch has ended early")]
    Prefetch(#[source] Arc<PrefetchError>),
    /// Installed pages could not be mapped in stage 2. Paging continues, with more faults by the guest.
    #[error("pages of region {region:?} could not be mapped in stage 2")]
    Population {
        /// The region.
        region: RegionId,
        /// The mapper's error.
        #[source]
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// The process forked. The child's memory is not paged: what was missing then is poisoned when the child
    /// touches it.
    #[error("the process that owns the memory of region {region:?} forked: the child is not paged")]
    Forked {
        /// The region.
        region: RegionId,
    },
}

impl Notice {
    /// The region that it is about, if it is about one.
    pub fn region(&self) -> Option<RegionId> {
        match self {
            Self::Stalled { region, .. }
            | Self::NotInstalled { region, .. }
            | Self::NotPrefetched { region, .. }
            | Self::ProcessGone { region }
            | Self::Population { region, .. }
            | Self::Forked { region } => Some(*region),
            Self::Unresolved(error) => error.region(),
            Self::Reader(_) | Self::ReaderPanicked { .. } | Self::Prefetch(_) => None,
        }
    }

    /// The region whose waiting threads [`Pager::resume`](crate::Pager::resume) lets try again. None for a fault on a page that other code than the pager has mapped.
    pub fn resumable(&self) -> Option<RegionId> {
        match self {
            Self::Stalled { region, .. } | Self::NotInstalled { region, .. } => Some(*region),
            Self::Unresolved(error) => match &**error {
                ResolveError::Content { fault, .. }
                | ResolveError::Install { fault, .. }
                | ResolveError::Remap { fault, .. } => error.may_pass().then_some(fault.region),
                _ => None,
            },
            _ => None,
        }
    }

    /// Whether a vCPU or another thread may be asleep until the owner acts.
    pub fn needs_action(&self) -> bool {
        match self {
            Self::Stalled { .. }
            | Self::Unresolved(_)
            | Self::NotInstalled { .. }
            | Self::Reader(_)
            | Self::ReaderPanicked { .. }
            | Self::Prefetch(_) => true,
            Self::NotPrefetched { .. }
            | Self::ProcessGone { .. }
            | Self::Population { .. }
            | Self::Forked { .. } => false,
        }
    }
}
