//! What the tests with Linux machines share.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::sync::Arc;

use pagetide_memory::Region;
use pagetide_pager::{BuildError, Fetch, Fetched, PageSource, Pager, PagerBuilder, SourceError};
use pagetide_uapi::userfaultfd::{Mode, OpenError};

/// An error with all its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Whether the processor has what KVM normally runs on.
pub(crate) fn virtualises() -> bool {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpuinfo
        .split_whitespace()
        .any(|flag| flag == "svm" || flag == "vmx")
}

/// What was written to the regions before the guest ran, and zeroes elsewhere. The page cache alone
/// would not do: it has holes where nothing was loaded.
struct Loaded;

impl PageSource for Loaded {
    fn fetch(&self, fetch: &mut Fetch<'_>) -> Result<Fetched, SourceError> {
        let mut content = vec![0; usize::try_from(fetch.bytes()).expect("64-bit host")];
        let first = fetch.pages().first();
        let read = fetch.region().read_service(first, 0, &mut content);
        read.map_err(|error| SourceError::Unavailable(error.into()))?;
        fetch.push(&content)?;
        Ok(Fetched::Filled)
    }
}

/// A pager over regions none of whose pages is present any more; None, with the reason printed, where
/// this host gives no userfaultfd.
pub(crate) fn pager(regions: &[Arc<Region>]) -> Option<Arc<Pager>> {
    let builder = Pager::builder(Mode::Minor, Loaded);
    let builder = regions.iter().cloned().fold(builder, PagerBuilder::region);
    match builder.build() {
        Ok(pager) => {
            assert_eq!(pager.progress().present, 0);
            Some(pager)
        }
        Err(BuildError::Open(
            error @ (OpenError::NotSupported
            | OpenError::NoPermission { .. }
            | OpenError::MissingFeatures { .. }),
        )) => {
            println!("SKIP: {}", chain(&error));
            None
        }
        Err(error) => panic!("{}", chain(&error)),
    }
}
