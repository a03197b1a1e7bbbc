//! Whole paging benchmarks on this machine's KVM, tiny ones: every option that changes what the
//! machine, the pager or the verification do.

mod common;

use pagetide_bench::benchmark::Benchmark;
use pagetide_bench::paging::preflight::Missing;
use pagetide_bench::paging::{Access, Delivery, Mode, Order, PagingReport, Plan, Uffds};
use pagetide_bench::prepare::PrepareError;
use pagetide_bench::report::{self, Report};
use pagetide_bench::units::ByteSize;
use pagetide_kvm::OpenError as KvmError;
use pagetide_memory::Backing;
use pagetide_testbed::MachineError;
use pagetide_uapi::userfaultfd::OpenError as UffdError;

/// 64 pages per vCPU, the deliveries that this kernel has, one round.
fn plan(change: impl FnOnce(&mut Plan)) -> Plan {
    let mut plan = Plan {
        vcpus: vec![1, 2],
        per_vcpu: ByteSize(256 << 10),
        deliveries: vec![Delivery::None, Delivery::Uffd, Delivery::Exit],
        fault_around: vec![1, 16],
        runs: 1,
        ..Plan::default()
    };
    change(&mut plan);
    plan
}

/// Whether an error tells of something that a host may well lack. Any other is a failure.
fn is_lack(error: &PrepareError) -> bool {
    matches!(
        error,
        PrepareError::Kvm(KvmError::Missing(_) | KvmError::Permission(_))
            | PrepareError::Userfaultfd(UffdError::NotSupported | UffdError::NoPermission { .. })
            | PrepareError::Missing(
                Missing::PreFaultMemory
                    | Missing::Minor { .. }
                    | Missing::Hugepages { .. }
                    | Missing::NoHugepagePool { .. }
            )
            | PrepareError::Machine {
                source: MachineError::UnsupportedArchitecture,
                ..
            }
    )
}

/// Runs a plan with what this machine has of it. `None`, and a word why, if that is nothing.
fn measure(mut plan: Plan) -> Option<PagingReport> {
    let lacks_exits = matches!(
        plan.prepare(false, common::timing()),
        Err(PrepareError::Missing(Missing::AbsentMappingFault))
    );
    if lacks_exits {
        println!("SKIP: delivery exit: this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT");
        plan.deliveries
            .retain(|&delivery| delivery != Delivery::Exit);
        plan.fault_around = vec![1];
        plan.pre_fault = false;
    }
    common::measure(plan, is_lack)
}

/// What must be true of any result of [`plan`]'s size.
fn check(report: &PagingReport, pages_per_vcpu: u64, overlap: bool) {
    for point in &report.points {
        let place = format!("{} vCPUs, {}", point.vcpus, point.series);
        let pages = pages_per_vcpu * u64::from(point.vcpus);
        let run = point.runs[0];
        assert_eq!(
            (point.runs.len(), run.round, run.pages),
            (1, 1, pages),
            "{place}"
        );
        let around = u64::from(point.series.fault_around);
        // What vCPUs that meet do not fault on, another brought in; what is too many, both faulted
        // on.
        let (least, most) = match overlap {
            false => (pages / around, pages / around),
            true => (pages / around, pages * u64::from(point.vcpus)),
        };
        match point.series.delivery {
            Delivery::None => assert_eq!((run.exits, run.messages), (0, 0), "{place}"),
            Delivery::Uffd => {
                assert_eq!(run.exits, 0, "{place}");
                assert!((least..=most).contains(&run.messages), "{place}: {run:?}");
            }
            Delivery::Exit => {
                assert_eq!(run.messages, 0, "{place}");
                assert!((least..=most).contains(&run.exits), "{place}: {run:?}");
            }
        }
        assert!(point.rate_kpages_per_s.median > 0.0, "{place}");
        if overlap && point.series.delivery == Delivery::Uffd {
            assert_eq!(point.latency, None, "{place}");
            continue;
        }
        let latency = point.latency.expect("there were touches");
        let touches = if overlap {
            pages * u64::from(point.vcpus)
        } else {
            pages
        };
        match point.series.delivery {
            Delivery::None | Delivery::Uffd => assert_eq!(latency.count, touches, "{place}"),
            // Two exits of one touch, where vCPUs meet.
            Delivery::Exit if overlap => assert!(latency.count <= run.exits, "{place}"),
            Delivery::Exit => assert_eq!(latency.count, run.exits, "{place}"),
        }
        assert!(
            latency.min_ns > 0 && latency.max_ns <= run.elapsed_ns * 2,
            "{place}: {latency:?}"
        );
    }
    let exits = report
        .series()
        .iter()
        .filter(|series| series.delivery == Delivery::Exit)
        .count();
    assert_eq!(report.ratios.len(), exits * report.plan.vcpus.len());
}

#[test]
fn shmem_minor() {
    let Some(report) = measure(plan(|_| {})) else {
        return;
    };
    check(&report, 64, false);
    let page = report.html().expect("a page");
    assert!(page.contains("</html>"));
    let json = report::json(&report).expect("JSON");
    assert!(report::from_json(&json).expect("the same JSON") == report);
}

#[test]
fn shmem_missing_with_random_reads() {
    let plan = plan(|plan| {
        plan.mode = Mode::Missing;
        plan.order = Order::Random;
        plan.access = Access::Read;
    });
    // In random order a block around a fault may have pages that came in before, so that a fault
    // brings in less than a block.
    if let Some(report) = measure(Plan {
        fault_around: vec![1],
        ..plan
    }) {
        check(&report, 64, false);
    }
}

#[test]
fn anonymous_memory() {
    let plan = plan(|plan| {
        plan.backing = Backing::Anonymous;
        plan.mode = Mode::Missing;
    });
    if let Some(report) = measure(plan) {
        check(&report, 64, false);
    }
}

#[test]
fn a_userfaultfd_for_each_vcpu() {
    let plan = plan(|plan| {
        plan.uffds = Uffds::PerVcpu;
        plan.readers = Some(1);
        plan.vcpus = vec![3];
    });
    if let Some(report) = measure(plan) {
        check(&report, 64, false);
    }
}

#[test]
fn vcpus_that_meet() {
    let plan = plan(|plan| {
        plan.overlap = true;
        plan.vcpus = vec![4];
        plan.order = Order::Random;
        plan.pin = true;
    });
    if let Some(report) = measure(plan) {
        check(&report, 64, true);
    }
}

#[test]
fn transparent_huge_pages() {
    let plan = plan(|plan| {
        plan.backing = Backing::Thp;
        plan.per_vcpu = ByteSize(2 << 20);
        plan.vcpus = vec![1];
    });
    if let Some(report) = measure(plan) {
        check(&report, 512, false);
    }
}

#[test]
fn huge_pages() {
    let plan = plan(|plan| {
        plan.backing = Backing::Hugetlb2M;
        plan.per_vcpu = ByteSize(4 << 20);
        plan.vcpus = vec![2];
        plan.fault_around = vec![1, 2];
    });
    if let Some(report) = measure(plan) {
        check(&report, 2, false);
    }
}

#[test]
fn second_stage_tables_filled_ahead() {
    let plan = plan(|plan| {
        plan.pre_fault = true;
        plan.deliveries = vec![Delivery::Uffd, Delivery::Exit];
    });
    if let Some(report) = measure(plan) {
        check(&report, 64, false);
    }
}
