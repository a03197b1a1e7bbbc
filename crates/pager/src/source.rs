//! Where the content of pages comes from.

use std::error::Error;

use pagetide_memory::{AccessError, GuestAddress, PageIndex, PageRange, Region};
use thiserror::Error;

/// Why content could not be had.
#[derive(Debug, Error)]
pub enum SourceError {
    /// The source has not got it, or cannot be reached.
    #[error("the page source failed")]
    Unavailable(#[source] Box<dyn Error + Send + Sync>),
    /// The source gave less, or more, than the pages that were asked for.
    #[error("the page source gave {given} bytes, and {wanted} were asked for")]
    WrongSize {
        /// Bytes given; for more than was asked for, counting the piece that was too much.
        given: u64,
        /// Bytes asked for.
        wanted: u64,
    },
    /// The content could not be written through the service mapping.
    #[error("writing the content of a page")]
    Write(#[source] AccessError),
}

/// Where a source has its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentIn {
    /// In the page cache already: nothing is fetched, only mapped. Needs MINOR mode.
    PageCache,
    /// Elsewhere: [`PageSource::fetch`] gives it.
    Source,
}

/// What a source says of the pages it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetched {
    /// All of their bytes were pushed.
    Filled,
    /// They are all zeroes; nothing was pushed.
    Zero,
    /// Their content is lost for good (an uncorrected memory error where it was).
    Poisoned,
}

/// Gives pages their content. Called from many threads at once, for different pages.
///
/// For as long as a fetch takes, whoever faulted waits; so an urgent page ([`Fetch::is_urgent`]) must
/// not queue behind others in a source.
pub trait PageSource: Send + Sync {
    /// Where the content is.
    fn content_in(&self) -> ContentIn {
        ContentIn::Source
    }

    /// Gives the content of all of `fetch.pages()`, in order. With an error nothing is installed. If
    /// more pages were asked for than the one that faulted, an error or [`Fetched::Poisoned`] has the
    /// faulting page asked for again alone.
    fn fetch(&self, fetch: &mut Fetch<'_>) -> Result<Fetched, SourceError>;
}

/// A source's view of what it is to give.
#[derive(Debug)]
pub struct Fetch<'a> {
    region: &'a Region,
    pages: PageRange,
    pushed: u64,
    sink: Sink<'a>,
    is_urgent: bool,
}

/// Where content goes.
#[derive(Debug)]
pub(crate) enum Sink<'a> {
    /// Through the service mapping into the page cache (MINOR).
    Service,
    /// Into a buffer of exactly the pages' size, to be copied in by the kernel (MISSING).
    Buffer(&'a mut [u8]),
}

impl<'a> Fetch<'a> {
    pub(crate) fn new(region: &'a Region, pages: PageRange, sink: Sink<'a>) -> Self {
        Self {
            region,
            pages,
            pushed: 0,
            sink,
            is_urgent: true,
        }
    }

    /// The same for prefetch.
    pub(crate) fn ahead_of_faults(mut self) -> Self {
        self.is_urgent = false;
        self
    }

    /// Whether somebody waits for one of the pages. If not, it is prefetch that asks, and urgent
    /// fetches must not queue behind this one.
    pub fn is_urgent(&self) -> bool {
        self.is_urgent
    }

    /// The region that the pages are of.
    pub fn region(&self) -> &Region {
        self.region
    }

    /// The pages asked for: one run.
    pub fn pages(&self) -> PageRange {
        self.pages
    }

    /// Bytes asked for.
    pub fn bytes(&self) -> u64 {
        self.pages.count() << self.region.page_size().shift()
    }

    /// Bytes pushed so far.
    pub fn pushed(&self) -> u64 {
        self.pushed
    }

    /// The gpa that the next pushed byte belongs to.
    pub fn gpa(&self) -> GuestAddress {
        let start = self.pages.first().0 << self.region.page_size().shift();
        GuestAddress(self.region.gpa().0 + start + self.pushed)
    }

    /// The next bytes of content.
    pub fn push(&mut self, content: &[u8]) -> Result<(), SourceError> {
        let wanted = self.bytes();
        let start = self.pushed;
        let end = start.saturating_add(content.len() as u64);
        if end > wanted {
            return Err(SourceError::WrongSize { given: end, wanted });
        }
        match &mut self.sink {
            Sink::Service => {
                let page = PageIndex(self.pages.first().0);
                self.region
                    .write_service(page, start, content)
                    .map_err(SourceError::Write)?;
            }
            Sink::Buffer(buffer) => {
                let from = usize::try_from(start).ok();
                let room = from
                    .and_then(|from| buffer.get_mut(from..)?.get_mut(..content.len()))
                    .ok_or(SourceError::WrongSize { given: end, wanted })?;
                room.copy_from_slice(content);
            }
        }
        self.pushed = end;
        Ok(())
    }
}

/// Everything is in the page cache already, as after a restore into a memfd: pages only have to be
/// mapped. Costs nothing per fault.
#[derive(Clone, Copy, Debug, Default)]
pub struct PageCacheSource;

impl PageSource for PageCacheSource {
    fn content_in(&self) -> ContentIn {
        ContentIn::PageCache
    }

    fn fetch(&self, fetch: &mut Fetch<'_>) -> Result<Fetched, SourceError> {
        Err(SourceError::WrongSize {
            given: 0,
            wanted: fetch.bytes(),
        })
    }
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

impl<Fill: Fn(GuestAddress, &mut [u8]) + Send + Sync> PageSource for PatternSource<Fill> {
    fn fetch(&self, fetch: &mut Fetch<'_>) -> Result<Fetched, SourceError> {
        let mut piece = [0; PIECE_BYTES];
        while fetch.pushed() < fetch.bytes() {
            (self.fill)(fetch.gpa(), &mut piece);
            fetch.push(&piece)?;
        }
        Ok(Fetched::Filled)
    }
}

#[cfg(test)]
mod tests {
    use pagetide_memory::Backing;

    use super::*;

    const GPA: GuestAddress = GuestAddress(1 << 32);

    fn by_address(gpa: GuestAddress, piece: &mut [u8]) {
        for (offset, chunk) in piece.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *chunk = (gpa.0 + 8 * offset as u64).to_le_bytes();
        }
    }

    #[test]
    fn a_pattern_goes_to_either_sink() {
        let region = Region::new(GPA, 0x8000, Backing::Shmem).unwrap();
        let pages = PageRange::new(PageIndex(2), 3);
        let source = PatternSource::new(by_address);

        let mut buffer = vec![0; 0x3000];
        let mut fetch = Fetch::new(&region, pages, Sink::Buffer(&mut buffer));
        assert_eq!(source.fetch(&mut fetch).unwrap(), Fetched::Filled);
        assert_eq!(buffer[..8], (GPA.0 + 0x2000).to_le_bytes());
        assert_eq!(buffer[0x2ff8..], (GPA.0 + 0x4ff8).to_le_bytes());

        let mut fetch = Fetch::new(&region, pages, Sink::Service);
        assert_eq!(source.fetch(&mut fetch).unwrap(), Fetched::Filled);
        let mut seen = vec![0; 0x3000];
        region.read_service(PageIndex(2), 0, &mut seen).unwrap();
        assert_eq!(seen, buffer);
        region
            .read_service(PageIndex(5), 0, &mut seen[..8])
            .unwrap();
        assert_eq!(seen[..8], [0; 8]);
    }

    #[test]
    fn too_much_is_refused() {
        let region = Region::new(GPA, 0x8000, Backing::Shmem).unwrap();
        let mut buffer = vec![0; 0x1000];
        for sink in [Sink::Buffer(&mut buffer), Sink::Service] {
            let mut fetch = Fetch::new(&region, PageRange::single(PageIndex(7)), sink);
            fetch.push(&[1; 0x800]).unwrap();
            let error = fetch.push(&[1; 0x801]).unwrap_err();
            let SourceError::WrongSize { given, wanted } = error else {
                panic!("{error}")
            };
            assert_eq!((given, wanted), (0x1001, 0x1000));
            fetch.push(&[1; 0x800]).unwrap();
        }
    }
}
