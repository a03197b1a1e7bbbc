//! The content of claimed pages: from the source, or zeroes.

use pagetide_memory::{ClaimGuard, PageRange};
use pagetide_uapi::userfaultfd::Mode;

use crate::error::ResolveError;
use crate::fault::{Delivery, Fault};
use crate::resolver::Worker;
use crate::site::Site;
use crate::source::{Fetch, Fetched, Sink, SourceError};

/// Zeroes to fill the page cache with; divides every page size.
static ZEROES: [u8; 4096] = [0; 4096];

/// What is installed, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// What the page cache has (UFFDIO_CONTINUE).
    PageCache,
    /// What the worker's buffer has (UFFDIO_COPY). Its first byte belongs to the run's first page
    /// as it was when the buffer was filled.
    Buffer(PageRange),
    /// Zeroes (UFFDIO_ZEROPAGE).
    Zeroes,
    /// Nothing: the content is lost.
    Lost,
}

impl Worker {
    /// Has the source give the run's content. If it cannot, the run is narrowed to the faulting
    /// page and the source asked once more: a neighbour's trouble is not this fault's.
    pub(crate) fn fetch<'m>(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        mut run: ClaimGuard<'m>,
    ) -> Result<(ClaimGuard<'m>, Content), ResolveError> {
        loop {
            let narrowed = run.pages().count() == 1;
            match self.fetch_run(site, fault, run.pages()) {
                Ok(content) if narrowed || content != Content::Lost => return Ok((run, content)),
                Ok(_) => run = self.narrow(site, fault, run),
                Err(error) if !narrowed => {
                    tracing::warn!(%fault, pages = %run.pages(), %error, "no fault-around");
                    run = self.narrow(site, fault, run);
                }
                Err(source) => {
                    site.abandon(&mut self.counters, run);
                    return Err(ResolveError::Fetch {
                        fault: *fault,
                        source,
                    });
                }
            }
        }
    }

    fn fetch_run(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        pages: PageRange,
    ) -> Result<Content, SourceError> {
        let bytes = site.paged.bytes_of(pages);
        let (sink, content) = match site.pager.settings.mode {
            Mode::Minor => (Sink::Service, Content::PageCache),
            Mode::Missing => (Sink::Buffer(self.room(bytes)?), Content::Buffer(pages)),
        };
        let mut fetch = Fetch::new(&site.paged.region, pages, sink);
        if fault.delivery == Delivery::Prefetch {
            fetch = fetch.ahead_of_faults();
        }
        let fetched = site.pager.source.fetch(&mut fetch)?;
        let given = fetch.pushed();
        match fetched {
            Fetched::Filled if given == bytes => Ok(content),
            // What is missing would be somebody else's bytes, or zeroes.
            Fetched::Filled => Err(SourceError::WrongSize {
                given,
                wanted: bytes,
            }),
            Fetched::Zero => self.zeroes(site, pages),
            Fetched::Poisoned => Ok(Content::Lost),
        }
    }

    /// The worker's buffer, at least `bytes` long.
    fn room(&mut self, bytes: u64) -> Result<&mut [u8], SourceError> {
        let too_much = || SourceError::WrongSize {
            given: 0,
            wanted: bytes,
        };
        let bytes = usize::try_from(bytes).map_err(|_| too_much())?;
        if self.buffer.len() < bytes {
            let more = bytes - self.buffer.len();
            let reserved = self.buffer.try_reserve_exact(more);
            reserved.map_err(|error| SourceError::Unavailable(Box::new(error)))?;
            self.buffer.resize(bytes, 0);
        }
        self.buffer.get_mut(..bytes).ok_or_else(too_much)
    }

    /// Gets zeroes ready for the pages, by whichever way this memory takes them.
    pub(crate) fn zeroes(
        &mut self,
        site: &Site<'_>,
        pages: PageRange,
    ) -> Result<Content, SourceError> {
        let region = &site.paged.region;
        let bytes = site.paged.bytes_of(pages);
        match site.pager.settings.mode {
            Mode::Minor => {
                let mut fetch = Fetch::new(region, pages, Sink::Service);
                while fetch.pushed() < bytes {
                    fetch.push(&ZEROES)?;
                }
                Ok(Content::PageCache)
            }
            Mode::Missing if region.backing().is_hugetlb() => {
                self.room(bytes)?.fill(0);
                Ok(Content::Buffer(pages))
            }
            Mode::Missing => Ok(Content::Zeroes),
        }
    }

    /// Gives all of the run back but the faulting page.
    fn narrow<'m>(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        run: ClaimGuard<'m>,
    ) -> ClaimGuard<'m> {
        let before = fault.page.0.saturating_sub(run.pages().first().0);
        let (before, run) = run.split_at(before);
        let (run, after) = run.split_at(1);
        site.abandon(&mut self.counters, before);
        site.abandon(&mut self.counters, after);
        run
    }
}
