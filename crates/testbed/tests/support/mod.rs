//! Helpers of the tests of a machine.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::sync::Arc;
use std::time::Duration;

use pagetide_kvm::OpenError as KvmError;
use pagetide_memory::{AccessError, PageIndex, Region, RegionError};
use pagetide_testbed::{Machine, MachineConfig, MachineError, RunFailure, Seed, pattern};
use pagetide_uapi::userfaultfd::OpenError;
use pagetide_vmm::SetupError;

/// The seed of the tests' content.
pub(crate) const SEED: Seed = Seed::new(0x5eed);

/// A machine; None, with the reason printed, where this host has no KVM or no huge pages. Any other error fails
/// the test.
pub(crate) fn machine(mut config: MachineConfig) -> Option<Machine> {
    if !virtualises() {
        // See deaf_to_signals(): there, a longer wait does not help.
        config.stop_grace = Duration::from_secs(2);
    }
    match Machine::new(config) {
        Ok(machine) => Some(machine),
        Err(
            error @ (MachineError::UnsupportedArchitecture
            | MachineError::Setup(SetupError::Kvm(
                KvmError::Missing(_) | KvmError::Permission(_),
            ))
            | MachineError::Data(
                RegionError::HugepagesNotReserved { .. }
                | RegionError::NoHugepagePool { .. }
                | RegionError::NoTransparentHugepages,
            )),
        ) => {
            println!("SKIP: {}", chain(&error));
            None
        }
        Err(error) => panic!("{}", chain(&error)),
    }
}

/// Whether this host has no userfaultfd, or none with the features needed.
pub(crate) fn is_lack(error: &OpenError) -> bool {
    match error {
        OpenError::NotSupported
        | OpenError::NoPermission { .. }
        | OpenError::MissingFeatures { .. } => true,
        OpenError::Open(_) => false,
    }
}

/// An error with all its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Fills a region with its pattern, through the service mapping where there is one.
pub(crate) fn fill(region: &Arc<Region>, seed: Seed) -> Result<(), AccessError> {
    let page_bytes = region.page_size().bytes();
    let mut bytes = vec![0; usize::try_from(page_bytes).expect("64-bit host")];
    for page in region.all_pages().iter() {
        let gpa = region.gpa_of_page(page).expect("a page of the region");
        pattern::fill(gpa, seed, &mut bytes);
        write(region, page, &bytes)?;
    }
    Ok(())
}

/// Writes at a page's start.
pub(crate) fn write(region: &Region, page: PageIndex, bytes: &[u8]) -> Result<(), AccessError> {
    if region.service().is_some() {
        region.write_service(page, 0, bytes)
    } else {
        region.write_guest(page, 0, bytes)
    }
}

/// Whether the vCPUs' threads did not end because this /dev/kvm emulates the processor: there, signals do not end
/// a wait for a userfaultfd. Elsewhere it is a failure.
pub(crate) fn deaf_to_signals(failure: &RunFailure) -> bool {
    if failure.lost.is_empty() {
        return false;
    }
    assert!(!virtualises(), "{failure}");
    println!(
        "SKIP: this KVM does not run on hardware virtualisation, and ignores signals: {failure}"
    );
    true
}

/// Whether the processor has hardware virtualisation.
pub(crate) fn virtualises() -> bool {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpuinfo
        .split_whitespace()
        .any(|flag| flag == "svm" || flag == "vmx")
}
