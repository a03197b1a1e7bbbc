//! Helpers of the tests with Linux machines.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::sync::Arc;

use pagetide_memory::Region;
use pagetide_pager::{AddError, Contents, Holes, Pager, RegionConfig};
use pagetide_uapi::userfaultfd::{Mode, OpenError};
use pagetide_vmm::linux::LinuxError;

/// An error with all its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Whether the processor has hardware virtualisation.
pub(crate) fn virtualises() -> bool {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpuinfo
        .split_whitespace()
        .any(|flag| flag == "svm" || flag == "vmx")
}

/// Prints why this host cannot page memory; fails for any other error.
pub(crate) fn skip_or_panic(error: &LinuxError) {
    match error {
        LinuxError::NoExits
        | LinuxError::Region(AddError::Open(
            OpenError::NotSupported
            | OpenError::NoPermission { .. }
            | OpenError::MissingFeatures { .. },
        )) => println!("SKIP: {}", chain(error)),
        error => panic!("{}", chain(error)),
    }
}

/// A pager over regions whose content is in the page cache, none of which is present any more; None,
/// with the reason printed, where this host gives no userfaultfd.
pub(crate) fn pager(regions: &[Arc<Region>]) -> Option<Arc<Pager>> {
    let pager = Pager::new().expect("descriptors can be had");
    for region in regions {
        // The machine wrote what is not zero.
        let contents = Contents::PageCache(Holes::AreZero);
        match pager.add(RegionConfig::local(
            Arc::clone(region),
            Mode::Minor,
            contents,
        )) {
            Ok(_) => {}
            Err(AddError::Open(
                error @ (OpenError::NotSupported
                | OpenError::NoPermission { .. }
                | OpenError::MissingFeatures { .. }),
            )) => {
                println!("SKIP: {}", chain(&error));
                return None;
            }
            Err(error) => panic!("{}", chain(&error)),
        }
    }
    assert_eq!(pager.progress().present, 0);
    Some(pager)
}
