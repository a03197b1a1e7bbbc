//! Sources that do as a test likes.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use pagetide_memory::GuestAddress;
use pagetide_pager::{
    Content, Contents, Filled, LocalSource, RegionId, Request, RequestId, Source, SourceError,
};

use super::{PATIENCE, content, fill};

/// A local source made of a function, for misbehaviour of all kinds.
pub struct LocalFn<F>(pub F);

impl<F> LocalSource for LocalFn<F>
where
    F: Fn(GuestAddress, &mut [u8]) -> Result<Filled, SourceError> + Send + Sync,
{
    fn fill(&self, gpa: GuestAddress, buffer: &mut [u8]) -> Result<Filled, SourceError> {
        (self.0)(gpa, buffer)
    }
}

/// Fills in the pattern.
pub fn fill_in(gpa: GuestAddress, buffer: &mut [u8]) -> Result<Filled, SourceError> {
    fill(gpa, buffer);
    Ok(Filled::Bytes)
}

pub fn unavailable(reason: &'static str) -> SourceError {
    SourceError::Unavailable(reason.into())
}

/// A source that keeps its requests until the test takes them.
#[derive(Default)]
pub struct HeldSource {
    held: Mutex<VecDeque<Request>>,
    cancelled: Mutex<Vec<RequestId>>,
    more: Condvar,
}

impl HeldSource {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    pub fn contents(self: &Arc<Self>) -> Contents {
        Contents::Source(Arc::<Self>::clone(self))
    }

    /// The next request, which is expected to come.
    pub fn next(&self) -> Request {
        let begun = Instant::now();
        let mut held = self.held.lock().unwrap();
        loop {
            if let Some(request) = held.pop_front() {
                return request;
            }
            let left = PATIENCE.saturating_sub(begun.elapsed());
            assert!(!left.is_zero(), "no request comes");
            held = self.more.wait_timeout(held, left).unwrap().0;
        }
    }

    /// How many requests wait to be taken.
    pub fn waiting(&self) -> usize {
        self.held.lock().unwrap().len()
    }

    /// Which requests were cancelled so far.
    pub fn cancelled(&self) -> Vec<RequestId> {
        self.cancelled.lock().unwrap().clone()
    }
}

impl Source for HeldSource {
    fn submit(&self, request: Request) {
        self.held.lock().unwrap().push_back(request);
        self.more.notify_all();
    }

    fn cancel(&self, _region: RegionId, id: RequestId) {
        self.cancelled.lock().unwrap().push(id);
    }
}

/// Answers a request with the pattern.
pub fn complete(request: Request) {
    let bytes = content(request.gpa(), request.bytes());
    request.complete(Content::Bytes(&bytes));
}
