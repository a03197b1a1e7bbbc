//! Where the content of pages comes from.

use std::error::Error;
use std::fmt;
use std::sync::Weak;
use std::time::Instant;

use pagetide_memory::{GuestAddress, PageRange, Urgency};
use thiserror::Error;

use crate::fault::RegionId;
use crate::pager::Pager;
use crate::requests::RequestId;

/// Why content could not be had.
#[derive(Debug, Error)]
pub enum SourceError {
    /// The source has not got it, or cannot be reached.
    #[error("the source failed")]
    Unavailable(#[source] Box<dyn Error + Send + Sync>),
    /// The source gave less, or more, than the pages that were asked for.
    #[error("the source gave {given} bytes, and {wanted} were asked for")]
    WrongSize {
        /// Bytes given.
        given: u64,
        /// Bytes asked for.
        wanted: u64,
    },
    /// The source did not answer before the request's deadline.
    #[error("the source did not answer in time")]
    Late,
    /// The source dropped the request without an answer.
    #[error("the source dropped the request without an answer")]
    Dropped,
    /// The source panicked.
    #[error("the source panicked: {message}")]
    Panicked {
        /// What it said.
        message: String,
    },
}

/// What a source answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// All bytes of the pages, in order: exactly [`Request::bytes`].
    Bytes(&'a [u8]),
    /// The pages are all zeroes.
    Zero,
    /// The content of the pages is lost for good (an uncorrected memory error where it was). If more
    /// than one page was asked for, the engine asks again for less, until it knows which.
    Poisoned,
}

/// Gives pages their content some time after it is asked for.
///
/// The engine calls [`Self::submit`] for one request after the other, urgent ones first, and keeps
/// the bytes in flight within the region's limits. Answers come through [`Request::complete`] or
/// [`Request::fail`], from any thread and in any order.
pub trait Source: Send + Sync {
    /// Begins to get what `request` asks for. Must not block: a fault's thread calls it. May answer
    /// before it returns.
    fn submit(&self, request: Request);

    /// The answer to this request is no longer wanted: it is late, or its pages came another way. A
    /// hint; an answer that comes all the same is dropped.
    fn cancel(&self, region: RegionId, id: RequestId) {
        let _ = (region, id);
    }
}

/// A request for the content of a run of pages. The source keeps it until it can answer.
///
/// A request that is dropped counts as failed.
pub struct Request {
    pub(crate) pager: Weak<Pager>,
    pub(crate) region: RegionId,
    pub(crate) id: RequestId,
    pub(crate) pages: PageRange,
    pub(crate) urgency: Urgency,
    pub(crate) deadline: Instant,
    pub(crate) gpa: GuestAddress,
    pub(crate) page_shift: u32,
    pub(crate) is_answered: bool,
}

impl Request {
    /// The region that the pages are of.
    pub fn region(&self) -> RegionId {
        self.region
    }

    /// The request's number, unique in its region.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The pages asked for.
    pub fn pages(&self) -> PageRange {
        self.pages
    }

    /// The offset of the first byte asked for from the region's start.
    pub fn offset_bytes(&self) -> u64 {
        self.pages.first().0 << self.page_shift
    }

    /// How many bytes are asked for.
    pub fn bytes(&self) -> u64 {
        self.pages.count() << self.page_shift
    }

    /// The home gpa of the first byte asked for.
    pub fn gpa(&self) -> GuestAddress {
        GuestAddress(self.gpa.0.wrapping_add(self.offset_bytes()))
    }

    /// Whether somebody waits for the pages.
    pub fn urgency(&self) -> Urgency {
        self.urgency
    }

    /// When the engine gives the request up.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Answers the request: installs the pages that are still wanted, on this thread.
    pub fn complete(mut self, content: Content<'_>) {
        self.is_answered = true;
        if let Some(pager) = self.pager.upgrade() {
            pager.answer(&self, Ok(content));
        }
    }

    /// Answers that the content cannot be had now. The engine asks again by the region's
    /// [`crate::RetryPolicy`].
    pub fn fail(mut self, error: SourceError) {
        self.is_answered = true;
        if let Some(pager) = self.pager.upgrade() {
            pager.answer(&self, Err(error));
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if !self.is_answered
            && let Some(pager) = self.pager.upgrade()
        {
            pager.answer(self, Err(SourceError::Dropped));
        }
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("region", &self.region)
            .field("id", &self.id)
            .field("pages", &self.pages)
            .field("urgency", &self.urgency)
            .finish_non_exhaustive()
    }
}

/// What a blocking or local source filled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// All bytes.
    Bytes,
    /// The pages are all zeroes; the buffer is not looked at.
    Zero,
    /// The content is lost for good.
    Poisoned,
}

/// Content that is computed, or read from memory: it is there as soon as it is asked for.
///
/// A fault's own thread calls it, before it claims the page: no other fault waits meanwhile. Content
/// that can be slow or fail belongs in a [`Source`] ([`crate::Pool`] adapts one that blocks).
pub trait LocalSource: Send + Sync {
    /// Fills `buffer`, whole pages, with the content from the home gpa `gpa` on.
    ///
    /// # Errors
    /// Any error fails the fault that asked: nothing is installed.
    fn fill(&self, gpa: GuestAddress, buffer: &mut [u8]) -> Result<Filled, SourceError>;
}

/// Content that is computed from its gpa, for tests and benchmarks.
#[derive(Clone, Copy, Debug)]
pub struct PatternSource<Fill> {
    fill: Fill,
}

/// What content is computed in at a time; divides every page size.
const PIECE_BYTES: usize = 4096;

impl<Fill: Fn(GuestAddress, &mut [u8]) + Send + Sync> PatternSource<Fill> {
    /// Content by `fill`, which is given the gpa of a piece's first byte and the piece to fill: 4096
    /// bytes, at a gpa that is a multiple of 4096.
    pub fn new(fill: Fill) -> Self {
        Self { fill }
    }
}

impl<Fill: Fn(GuestAddress, &mut [u8]) + Send + Sync> LocalSource for PatternSource<Fill> {
    fn fill(&self, gpa: GuestAddress, buffer: &mut [u8]) -> Result<Filled, SourceError> {
        for (index, piece) in buffer.chunks_mut(PIECE_BYTES).enumerate() {
            let offset = (index * PIECE_BYTES) as u64;
            (self.fill)(GuestAddress(gpa.0 + offset), piece);
        }
        Ok(Filled::Bytes)
    }
}
