use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pagetide_kvm::OpenError as KvmError;
use pagetide_pager::{Filled, LocalSource, SourceError};
use pagetide_test_support::within_patience;
use pagetide_testbed::{MachineConfig, Order, Touch, Workload};
use pagetide_uapi::userfaultfd::OpenError as UffdError;

use super::*;
use crate::benchmark::Benchmark;
use crate::one_line;
use crate::paging::machines::page_in;
use crate::paging::plan::Series;
use crate::paging::preflight::Missing;
use crate::prepare::PrepareError;
use crate::timing::Timing;
use crate::units::ByteSize;

#[test]
fn each_page_has_to_come_in_once() {
    let counted = Counted {
        exits: 4,
        messages: 1,
        pages: 64,
    };
    assert_eq!(counted.check(64), Ok(()));
    assert_eq!(
        counted.check(65).unwrap_err().to_string(),
        "64 pages were installed, and memory has 65: not every page came in once"
    );
    assert!(counted.check(63).is_err());
}

#[test]
fn ranges_of_vcpus_cover_memory() {
    let region = Region::new(
        GuestAddress(1 << 32),
        4 << 20,
        pagetide_memory::Backing::Shmem,
    )
    .unwrap();
    let mut plan = Plan::default();
    assert_eq!(layout(&plan, &region, 4).unwrap(), UffdLayout::Single);
    plan.uffds = Uffds::PerVcpu;
    let UffdLayout::PerRange(ranges) = layout(&plan, &region, 4).unwrap() else {
        unreachable!()
    };
    let starts: Vec<_> = ranges
        .iter()
        .map(|range| range.start().0 - (1 << 32))
        .collect();
    assert_eq!(starts, [0, 1 << 20, 2 << 20, 3 << 20]);
    assert!(ranges.iter().all(|range| range.bytes() == 1 << 20));
}

/// Content for the first few pages, and then what happens to a source.
struct DyingSource {
    pages: AtomicU64,
    panics: bool,
}

impl LocalSource for DyingSource {
    fn fill(&self, gpa: GuestAddress, _: &mut [u8]) -> Result<Filled, SourceError> {
        if self.pages.fetch_add(1, Ordering::Relaxed) < 5 {
            return Ok(Filled::Zero);
        }
        assert!(!self.panics, "the source fell over at {gpa}");
        Err(SourceError::Unavailable("the other end is gone".into()))
    }
}

/// How long a [`StuckSource`] takes for a page.
const STUCK: Duration = Duration::from_secs(4);

/// A source that does not answer in time.
struct StuckSource;

impl LocalSource for StuckSource {
    fn fill(&self, _: GuestAddress, _: &mut [u8]) -> Result<Filled, SourceError> {
        std::thread::sleep(STUCK);
        Ok(Filled::Zero)
    }
}

/// Runs a machine with 2 vCPUs whose memory comes from `source`. `None` where this host has not what
/// that takes. Also returned is the pager, if it still is.
fn run_with(
    source: impl LocalSource + 'static,
    delivery: Delivery,
    change: impl FnOnce(&mut MachineConfig),
) -> Option<(RunFailure, Weak<Pager>)> {
    let mut plan = Plan {
        vcpus: vec![2],
        per_vcpu: ByteSize(256 << 10),
        mode: Mode::Missing,
        deliveries: vec![delivery],
        ..Plan::default()
    };
    match plan.prepare(true, Timing::Native) {
        Ok(_) => {}
        Err(
            error @ (PrepareError::Kvm(KvmError::Missing(_) | KvmError::Permission(_))
            | PrepareError::Userfaultfd(
                UffdError::NotSupported | UffdError::NoPermission { .. },
            )
            | PrepareError::Missing(Missing::AbsentMappingFault)),
        ) => {
            println!("SKIP: {}", one_line(&error));
            return None;
        }
        Err(error) => unreachable!("{}", one_line(&error)),
    }
    let job = Job {
        plan: &plan,
        vcpus: 2,
        series: Series {
            delivery,
            fault_around: 1,
            populate: false,
        },
        seed: 1,
    };
    let mut config = MachineConfig::new(2, plan.per_vcpu.0);
    change(&mut config);
    let region = Arc::new(config.data_region().unwrap());
    let mut machine = Machine::with_region(config, Arc::clone(&region)).unwrap();
    let contents = Contents::Local(Arc::new(source));
    let paging = Paging::begin_with(contents, &job, &region, &machine).unwrap();
    let pager = Arc::downgrade(&paging.pager);
    let workload = Workload::new(Touch::ReadZero, Order::Sequential);
    let failure = within_patience("a run whose source fails", move || {
        page_in(&mut machine, &workload, paging).expect_err("the source fails")
    });
    Some((failure, pager))
}

/// How a run ends whose source dies after five pages.
fn run_with_dying_source(delivery: Delivery, panics: bool) -> Option<String> {
    let source = DyingSource {
        pages: AtomicU64::new(0),
        panics,
    };
    // Whether the vCPUs come back makes no difference, so they are not waited for long.
    let (failure, _) = run_with(source, delivery, |config| config.stop_grace = STUCK / 8)?;
    Some(one_line(&failure))
}

/// A vCPU's thread that does not come back leaves the pager as it is; one that does, ends it. Which
/// of both it is, is up to the KVM: an emulated one does not end its waiting when it is kicked.
fn stuck(delivery: Delivery) {
    let ended = run_with(StuckSource, delivery, |config| {
        config.stall_timeout = STUCK / 20;
        config.stop_grace = STUCK / 20;
    });
    let Some((failure, pager)) = ended else {
        return;
    };
    let came_back = !one_line(&failure).contains("did not end");
    // In the source, kicks do not reach it.
    assert!(!came_back || delivery == Delivery::Uffd, "{failure:?}");
    assert_eq!(
        matches!(failure, RunFailure::Lost(_)),
        came_back,
        "{failure:?}"
    );
    assert_eq!(pager.upgrade().is_none(), came_back);
}

#[test]
fn a_vcpu_asleep_in_a_userfaultfd_keeps_it_open() {
    stuck(Delivery::Uffd);
}

#[test]
fn a_vcpu_asleep_in_the_source_keeps_its_pager() {
    stuck(Delivery::Exit);
}

#[test]
fn a_reader_whose_source_fails_ends_the_run_with_the_cause() {
    let Some(message) = run_with_dying_source(Delivery::Uffd, false) else {
        return;
    };
    assert!(
        message.contains("a fault that came by a userfaultfd could not be resolved"),
        "{message}"
    );
    assert!(
        message.ends_with("the source failed: the other end is gone"),
        "{message}"
    );
}

#[test]
fn a_source_that_panics_under_a_reader_ends_the_run_with_the_cause() {
    let Some(message) = run_with_dying_source(Delivery::Uffd, true) else {
        return;
    };
    assert!(
        message.contains("the source panicked: the source fell over at 0x1000"),
        "{message}"
    );
}

#[test]
fn a_vcpu_whose_source_fails_ends_the_run_with_the_cause() {
    let Some(message) = run_with_dying_source(Delivery::Exit, false) else {
        return;
    };
    assert!(message.contains("cannot resolve"), "{message}");
    assert!(
        message.ends_with("the source failed: the other end is gone"),
        "{message}"
    );
}

#[test]
fn a_source_that_panics_under_a_vcpu_ends_the_run_with_the_cause() {
    let Some(message) = run_with_dying_source(Delivery::Exit, true) else {
        return;
    };
    assert!(
        message.contains("the source panicked: the source fell over at 0x1000"),
        "{message}"
    );
}
