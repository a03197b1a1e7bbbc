//! Sources of content.

use std::error::Error;
use std::fmt;
use std::sync::Weak;
use std::time::Instant;

use pagetide_memory::{GuestAddress, HostRange, PageRange, Urgency};
use thiserror::Error;

use crate::fault::{Fault, RegionId};

/// Why a source delivered no content.
#[derive(Debug, Error)]
pub enum SourceError {
    /// The source lacks the content, or is unreachable.
    #[error("the source failed")]
    Unavailable(#[source] Box<dyn Error + Send + Sync>),
    /// The source delivered fewer or more bytes than requested.
    #[error("the source delivered {given} bytes instead of {wanted}")]
    WrongSize {
        /// Delivered bytes.
        given: u64,
        /// Requested bytes.
        wanted: u64,
    },
    /// There is no memory for the content.
    #[error("there is no memory for the content")]
    NoMemory,
    /// The source did not answer before the request's deadline.
    #[error("the source did not answer in time")]
    Late,
    /// The source dropped the request without an answer.
    #[error("the source dropped the request without an answer")]
    Dropped,
    /// The source panicked.
    #[error("the source panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
}

/// The requested bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadAt {
    /// The region.
    pub region: RegionId,
    /// The first byte's offset from the region's start.
    pub offset_bytes: u64,
    /// The first byte's home gpa.
    pub gpa: GuestAddress,
    /// Whether a thread waits for them. (In [`Source::fill_now`] prefetch reads with either.)
    pub urgency: Urgency,
}

/// The number of a request; unique in a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(crate) u64);

/// A source's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// All bytes of the pages, in order: exactly [`Request::bytes`].
    Bytes(&'a [u8]),
    /// The pages are all zeroes.
    Zero,
    /// The content of the pages is lost for good (an uncorrected memory error at its origin). If the
    /// request has more than one page, the engine requests smaller parts, until it has identified the
    /// lost pages.
    Poisoned,
}

/// Delivers the content of pages some time after it was requested.
///
/// The engine calls [`Self::submit`] for one request after the other, urgent ones first, and keeps the
/// bytes in flight within the region's limits. The source answers by [`Request::complete`] or
/// [`Request::fail`], on any thread and in any order; also on a thread that waits ([`Self::help`]).
pub trait Source: Send + Sync {
    /// Begins to fetch the content of `request`. Must not block, because a fault's thread calls it. May
    /// answer before it returns.
    fn submit(&self, request: Request);

    /// Fills the room, whole pages of the region, if their content is available without waiting: it is
    /// in memory, or in the page cache. `None` otherwise, and after an error; the engine then makes a
    /// request. [`Filled::Poisoned`] also leads to a request.
    ///
    /// A fault's own thread calls it before it claims the pages, of urgent urgency. Prefetch calls it for its batches: of bulk
    /// urgency, for content that costs next to nothing; and, when the limit of its requests is reached, of urgent urgency, for
    /// content that costs CPU time, as to decompress does. A
    /// source that never has content at once does not touch the room, which then takes no memory.
    fn fill_now(&self, at: ReadAt, room: &mut Room<'_>) -> Option<Filled> {
        let _ = (at, room);
        None
    }

    /// The addresses of `bytes` bytes of content, whole pages of the region, if this process has it mapped
    /// and it is available without waiting: they are installed from there. The addresses stay mapped as
    /// long as the source exists. `None` otherwise; the engine then tries [`Self::fill_now`].
    ///
    /// Only the kernel reads there. If it finds no content after all (the file was truncated), the engine
    /// makes a request.
    fn mapped_now(&self, at: ReadAt, bytes: u64) -> Option<HostRange> {
        let _ = (at, bytes);
        None
    }

    /// A thread waits for a page of the region in an exit and has nothing else to do: it receives answers here in
    /// place of the source's own thread, so that no other thread is woken on the way. Passes each answer to
    /// [`Helper::complete`]. Returns when [`Helper::is_over`], or at once if the thread is not needed: it then sleeps
    /// until another thread has installed the page.
    ///
    /// Of several threads at a time, one can receive, and the others wait until it has completed an answer or
    /// returns. When the last of them returns, whatever else is on its way is the source's own thread's business
    /// again.
    fn help(&self, helper: &mut Helper<'_>) {
        let _ = helper;
    }

    /// The request was cancelled: its deadline has passed, or its pages were delivered otherwise. A
    /// hint. A later answer is used for pages that somebody still waits for, unless the source was replaced.
    fn cancel(&self, region: RegionId, id: RequestId) {
        let _ = (region, id);
    }
}

/// A thread that waits for a page in an exit, and lends itself to the source of the region meanwhile
/// ([`Source::help`]).
pub struct Helper<'h> {
    pager: Weak<dyn Answers>,
    fault: &'h Fault,
    until: Instant,
    is_over: &'h dyn Fn() -> bool,
    received_pages: u64,
}

impl<'h> Helper<'h> {
    pub(crate) fn new(
        pager: Weak<dyn Answers>,
        fault: &'h Fault,
        until: Instant,
        is_over: &'h dyn Fn() -> bool,
    ) -> Self {
        Self {
            pager,
            fault,
            until,
            is_over,
            received_pages: 0,
        }
    }

    /// The pages of the requests that it has answered.
    pub(crate) fn received_pages(&self) -> u64 {
        self.received_pages
    }

    /// The region of the page for which the thread waits.
    pub fn region(&self) -> RegionId {
        self.fault.region
    }

    /// The home gpa of the access that waits.
    pub fn gpa(&self) -> GuestAddress {
        self.fault.gpa
    }

    /// When the thread has to return at the latest, to look for a stop and for deadlines.
    pub fn until(&self) -> Instant {
        self.until
    }

    /// Whether the thread has to return: its page is not on its way any more, or [`Self::until`] has passed.
    pub fn is_over(&self) -> bool {
        (self.is_over)() || Instant::now() >= self.until
    }

    /// Answers a request, and counts its pages as received by a thread that waits. What the thread's own pager has
    /// requested is installed here, and the rest as [`Request::complete`] does.
    pub fn complete(&mut self, request: Request, content: Content<'_>) {
        self.received_pages += request.pages().count();
        match Weak::ptr_eq(&request.answers, &self.pager) {
            true => request.complete_here(content),
            false => request.complete(content),
        }
    }
}

impl fmt::Debug for Helper<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Helper")
            .field("fault", &self.fault)
            .field("until", &self.until)
            .finish_non_exhaustive()
    }
}

/// Room for the content of whole pages, made when a source asks for it: with pages of 1 GiB it is large.
#[derive(Debug)]
pub struct Room<'r> {
    buffer: &'r mut Vec<u8>,
    bytes: u64,
}

/// A buffer that is larger is freed after its use, and not kept for the thread's next fault.
const KEPT_BYTES: usize = 4 << 20;

impl<'r> Room<'r> {
    /// Room for `bytes` bytes in a buffer that the thread keeps.
    pub(crate) fn new(buffer: &'r mut Vec<u8>, bytes: u64) -> Self {
        Self { buffer, bytes }
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The buffer, with any content. `None` if there is no memory for it.
    pub fn buffer(&mut self) -> Option<&mut [u8]> {
        let bytes = usize::try_from(self.bytes).ok()?;
        if self.buffer.len() < bytes {
            let more = bytes - self.buffer.len();
            self.buffer.try_reserve_exact(more).ok()?;
            self.buffer.resize(bytes, 0);
        }
        self.buffer.get_mut(..bytes)
    }

    /// Frees a large buffer.
    pub(crate) fn trim(buffer: &mut Vec<u8>) {
        if buffer.capacity() > KEPT_BYTES {
            *buffer = Vec::new();
        }
    }
}

/// Who gets the answers to requests.
pub(crate) trait Answers: Send + Sync {
    /// A request has failed.
    fn fail(&self, request: &Request, error: SourceError);

    /// Content has come.
    fn complete(&self, request: Request, content: Content<'_>);

    /// The same in a buffer. Returns a buffer for the next answer, of any length.
    fn complete_buffer(&self, request: Request, buffer: Vec<u8>) -> Vec<u8>;

    /// The same as [`Self::complete`], on this thread in any case.
    fn complete_here(&self, request: Request, content: Content<'_>);
}

/// A request for the content of a run of pages. The source holds it until it can answer.
///
/// Dropping a request without an answer counts as a failure.
pub struct Request {
    pub(crate) answers: Weak<dyn Answers>,
    pub(crate) region: RegionId,
    pub(crate) id: RequestId,
    pub(crate) pages: PageRange,
    pub(crate) urgency: Urgency,
    pub(crate) deadline: Instant,
    pub(crate) gpa: GuestAddress,
    pub(crate) page_shift: u32,
    /// How often the region's source had been replaced.
    pub(crate) replaced: u64,
    pub(crate) is_answered: bool,
}

impl Request {
    /// The region of the pages.
    pub fn region(&self) -> RegionId {
        self.region
    }

    /// The request's number, unique in its region.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The requested pages.
    pub fn pages(&self) -> PageRange {
        self.pages
    }

    /// The offset of the first requested byte from the region's start.
    pub fn offset_bytes(&self) -> u64 {
        self.pages.first().0 << self.page_shift
    }

    /// The number of requested bytes.
    pub fn bytes(&self) -> u64 {
        self.pages.count() << self.page_shift
    }

    /// The home gpa of the first requested byte.
    pub fn gpa(&self) -> GuestAddress {
        GuestAddress(self.gpa.0.wrapping_add(self.offset_bytes()))
    }

    /// Whether a thread waits for the pages.
    pub fn urgency(&self) -> Urgency {
        self.urgency
    }

    /// The time at which the engine cancels the request.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Answers the request: those of its pages that are still missing are installed, on this thread or another
    /// ([`InstalledBy`](crate::InstalledBy)).
    pub fn complete(mut self, content: Content<'_>) {
        self.is_answered = true;
        if let Some(answers) = self.answers.upgrade() {
            answers.complete(self, content);
        }
    }

    /// The same on this thread in any case.
    fn complete_here(mut self, content: Content<'_>) {
        self.is_answered = true;
        if let Some(answers) = self.answers.upgrade() {
            answers.complete_here(self, content);
        }
    }

    /// The same for content that fills a buffer of the source's own, which need not be copied for another thread.
    /// Returns a buffer for the source's next answer, of any length and with any bytes.
    pub fn complete_buffer(mut self, buffer: Vec<u8>) -> Vec<u8> {
        self.is_answered = true;
        match self.answers.upgrade() {
            Some(answers) => answers.complete_buffer(self, buffer),
            None => buffer,
        }
    }

    /// Reports that the content is unavailable now. The engine retries by the region's
    /// [`crate::RetryPolicy`].
    pub fn fail(mut self, error: SourceError) {
        self.is_answered = true;
        if let Some(answers) = self.answers.upgrade() {
            answers.fail(&self, error);
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if !self.is_answered
            && let Some(answers) = self.answers.upgrade()
        {
            answers.fail(self, SourceError::Dropped);
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

/// The result of a blocking or local source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// The whole buffer is filled.
    Bytes,
    /// The pages are all zeroes; the buffer is ignored.
    Zero,
    /// The content is lost for good.
    Poisoned,
}

/// Content that is computed, or read from memory: available immediately.
///
/// A fault's own thread calls it before it claims the page, so no other fault waits meanwhile. A source
/// that can be slow or fail should be a [`Source`] ([`crate::Pool`] adapts one that blocks).
pub trait LocalSource: Send + Sync {
    /// Fills `buffer`, whole pages, with the content from the home gpa `gpa` on.
    ///
    /// # Errors
    /// Any error fails the fault that needs the content: nothing is installed.
    fn fill(&self, gpa: GuestAddress, buffer: &mut [u8]) -> Result<Filled, SourceError>;
}

/// Content that is computed from its gpa, for tests and benchmarks.
#[derive(Clone, Copy, Debug)]
pub struct PatternSource<Fill> {
    fill: Fill,
}

/// The size of a piece of computed content; divides every page size.
const PIECE_BYTES: usize = 4096;

impl<Fill: Fn(GuestAddress, &mut [u8]) + Send + Sync> PatternSource<Fill> {
    /// Content computed by `fill`, which receives the gpa of a piece and the piece to fill: 4096 bytes,
    /// at a gpa that is a multiple of 4096.
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

#[cfg(test)]
mod tests {
    use super::*;

    struct NeverAtOnce;

    impl Source for NeverAtOnce {
        fn submit(&self, _: Request) {}
    }

    fn at() -> ReadAt {
        ReadAt {
            region: RegionId(0),
            offset_bytes: 0,
            gpa: GuestAddress(0),
            urgency: Urgency::Urgent,
        }
    }

    /// Each vCPU's thread and each reader would hold a gigabyte with pages of that size.
    #[test]
    fn a_source_that_never_has_content_at_once_costs_no_buffer() {
        let mut buffer = Vec::new();
        let mut room = Room::new(&mut buffer, 1 << 30);
        assert_eq!(NeverAtOnce.fill_now(at(), &mut room), None);
        assert_eq!(buffer.capacity(), 0);
    }

    #[test]
    fn a_large_buffer_is_not_kept() {
        let mut buffer = Vec::new();
        for (bytes, is_kept) in [(4096, true), (4 << 20, true), (16 << 20, false)] {
            let mut room = Room::new(&mut buffer, bytes);
            let room = room.buffer().unwrap();
            assert_eq!(room.len() as u64, bytes);
            Room::trim(&mut buffer);
            assert_eq!(buffer.capacity() > 0, is_kept, "{bytes}");
        }
    }

    #[test]
    fn more_than_there_is_memory_for_is_refused() {
        let mut buffer = Vec::new();
        assert_eq!(Room::new(&mut buffer, u64::MAX).buffer(), None);
        assert_eq!(Room::new(&mut buffer, i64::MAX as u64).buffer(), None);
    }
}
