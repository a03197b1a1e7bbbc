//! Sources for tests.

use pagetide_memory::GuestAddress;
use pagetide_pager::{Content, Filled, LocalSource, Request, SourceError};

use super::{content, fill};

/// A local source made from a function, for failures of all kinds.
pub struct LocalFn<F>(pub F);

impl<F> LocalSource for LocalFn<F>
where
    F: Fn(GuestAddress, &mut [u8]) -> Result<Filled, SourceError> + Send + Sync,
{
    fn fill(&self, gpa: GuestAddress, buffer: &mut [u8]) -> Result<Filled, SourceError> {
        (self.0)(gpa, buffer)
    }
}

/// Fills a buffer with the pattern.
pub fn fill_in(gpa: GuestAddress, buffer: &mut [u8]) -> Result<Filled, SourceError> {
    fill(gpa, buffer);
    Ok(Filled::Bytes)
}

pub fn unavailable(reason: &'static str) -> SourceError {
    SourceError::Unavailable(reason.into())
}

/// Answers a request with the pattern.
pub fn complete(request: Request) {
    let bytes = content(request.gpa(), request.bytes());
    request.complete(Content::Bytes(&bytes));
}
