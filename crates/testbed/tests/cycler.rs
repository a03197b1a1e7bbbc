//! vCPUs that cycle through their memory.

#![cfg(target_arch = "x86_64")]
#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use pagetide_kvm::OpenError as KvmError;
use pagetide_memory::{Backing, GuestAddress, PageIndex, Region};
use pagetide_testbed::{Cycler, CyclerConfig, DATA_GPA, GuestError, MachineError};
use pagetide_vmm::SetupError;
use support::chain;

const BYTES: u64 = 256 << 10;

/// None, with the reason printed, where there is no KVM.
fn cycler(vcpus: u32) -> Option<(Arc<Cycler>, Arc<Region>)> {
    let data = Region::new(GuestAddress(DATA_GPA), BYTES, Backing::Shmem).expect("256 KiB");
    let data = Arc::new(data);
    let config = CyclerConfig {
        vcpus,
        stall_timeout: Duration::from_secs(60),
    };
    match Cycler::new(config, Arc::clone(&data)) {
        Ok(cycler) => Some((Arc::new(cycler), data)),
        Err(
            error @ MachineError::Setup(SetupError::Kvm(
                KvmError::Missing(_) | KvmError::Permission(_),
            )),
        ) => {
            println!("SKIP: {}", chain(&error));
            None
        }
        Err(error) => unreachable!("{}", chain(&error)),
    }
}

#[test]
fn all_memory_is_written_again_and_again() {
    for vcpus in [1, 2, 4] {
        let Some((cycler, _)) = cycler(vcpus) else {
            return;
        };
        let cycling = cycler.start().expect("they start");
        let before = cycler.words().expect("words");
        assert!(
            before >= BYTES / 8,
            "each vCPU has completed a round: {before}"
        );
        cycler.await_round().expect("they continue");
        assert!(cycler.words().expect("words") >= before + BYTES / 8);
        assert_eq!(cycler.lost_bytes().expect("marks"), 0);
        cycling
            .end(&|_| false)
            .expect("memory holds what they wrote");
    }
}

#[test]
fn a_word_that_changes_is_found_by_the_guest() {
    let Some((cycler, data)) = cycler(2) else {
        return;
    };
    let cycling = cycler.start().expect("they start");
    data.write_service(PageIndex(43), 16, &7u64.to_le_bytes())
        .expect("in memory");
    cycler.await_round().expect("they continue");
    match cycling.end(&|_| false) {
        Err(GuestError::WrongWord { gpa, found: 7, .. }) => {
            assert_eq!(gpa, GuestAddress(DATA_GPA + 43 * 4096 + 16));
        }
        other => unreachable!("{other:?}"),
    }
}

#[test]
fn memory_that_is_not_a_multiple_of_the_vcpus_is_refused() {
    if let Some((_, data)) = cycler(1) {
        let config = CyclerConfig {
            vcpus: 3,
            stall_timeout: Duration::from_secs(60),
        };
        let error = Cycler::new(config, data).expect_err("64 pages for 3 vCPUs");
        assert!(error.to_string().contains("the data region has"), "{error}");
    }
}
