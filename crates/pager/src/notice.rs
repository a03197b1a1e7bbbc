//! What the owner of a pager learns without asking.

use std::sync::Arc;

use thiserror::Error;

use crate::error::{PrefetchError, ResolveError, ServeError};
use crate::fault::RegionId;
use crate::source::SourceError;

/// Something that the owner of a pager should know of. Cheap to clone.
///
/// No notice ends the pager: other regions go on, and the owner decides what becomes of the VM.
#[derive(Clone, Debug, Error)]
pub enum Notice {
    /// A region's source has failed as often as the retry policy allows. Whoever touches a missing
    /// page waits until the owner resumes the region, replaces its source or abandons it.
    #[error("region {region:?} is stalled: its source has failed too often")]
    Stalled {
        /// The region.
        region: RegionId,
        /// The last failure.
        #[source]
        last: Arc<SourceError>,
    },
    /// A fault that came by a userfaultfd could not be resolved. The thread that faulted stays
    /// asleep until the page comes another way, or the region is removed.
    #[error("a fault that came by a userfaultfd could not be resolved")]
    Unresolved(#[source] Arc<ResolveError>),
    /// Content that arrived could not be installed. Whoever waits for the page goes on waiting.
    #[error("content that arrived for region {region:?} could not be installed")]
    NotInstalled {
        /// The region.
        region: RegionId,
        /// Why.
        #[source]
        source: Arc<crate::error::InstallFailure>,
    },
    /// The process whose memory a foreign region is has gone.
    #[error("the process that has the memory of region {region:?} has gone")]
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
        /// What it said.
        message: String,
    },
    /// Prefetch has ended early.
    #[error("prefetch has ended early")]
    Prefetch(#[source] Arc<PrefetchError>),
    /// Installed pages could not be mapped in stage 2. Paging goes on; the guest takes more faults.
    #[error("pages of region {region:?} could not be mapped in stage 2")]
    Population {
        /// The region.
        region: RegionId,
        /// What the sink said.
        #[source]
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// The process forked. The child's memory is not paged: its descriptor was closed.
    #[error("the process that has the memory of region {region:?} forked: the child is not paged")]
    Forked {
        /// The region.
        region: RegionId,
    },
}

impl Notice {
    /// Whether a vCPU or another thread may be asleep until the owner acts.
    pub fn needs_action(&self) -> bool {
        match self {
            Self::Stalled { .. }
            | Self::Unresolved(_)
            | Self::NotInstalled { .. }
            | Self::Reader(_)
            | Self::ReaderPanicked { .. }
            | Self::Prefetch(_) => true,
            Self::ProcessGone { .. } | Self::Population { .. } | Self::Forked { .. } => false,
        }
    }
}
