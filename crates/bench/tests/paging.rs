//! Whole paging benchmarks on this machine's KVM, tiny ones: every option that changes what the
//! machine, the pager or the verification do.

mod common;

use pagetide_bench::benchmark::Benchmark;
use pagetide_bench::paging::preflight::Missing;
use pagetide_bench::paging::{
    Access, Delivery, ELAPSED, EXITS, LATENCY, MESSAGES, Mode, Order, PAGES, Plan, RATE,
    RATE_OVER_UFFD, Uffds,
};
use pagetide_bench::prepare::PrepareError;
use pagetide_bench::report::Report;
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
fn measure(mut plan: Plan) -> Option<Report<Plan>> {
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
fn check(report: &Report<Plan>, pages_per_vcpu: u64, overlap: bool) {
    let view = report.view().expect("its own records");
    for cell in &view.cells {
        let place = format!("{} vCPUs, {}", cell.vcpus, cell.series);
        let pages = pages_per_vcpu * u64::from(cell.vcpus);
        let run = &cell.runs[0];
        let (exits, messages) = (run.count(EXITS), run.count(MESSAGES));
        assert_eq!(
            (cell.runs.len(), run.round, run.count(PAGES)),
            (1, 1, pages),
            "{place}"
        );
        let around = u64::from(cell.series.fault_around);
        // What vCPUs that meet do not fault on, another brought in; what is too many, both faulted
        // on.
        let (least, most) = match overlap {
            false => (pages / around, pages / around),
            true => (pages / around, pages * u64::from(cell.vcpus)),
        };
        match cell.series.delivery {
            Delivery::None => assert_eq!((exits, messages), (0, 0), "{place}"),
            Delivery::Uffd => {
                assert_eq!(exits, 0, "{place}");
                assert!((least..=most).contains(&messages), "{place}: {run:?}");
            }
            Delivery::Exit => {
                assert_eq!(messages, 0, "{place}");
                assert!((least..=most).contains(&exits), "{place}: {run:?}");
            }
        }
        assert!(
            cell.spread(RATE).is_some_and(|rate| rate.median > 0.0),
            "{place}"
        );
        if overlap && cell.series.delivery == Delivery::Uffd {
            assert_eq!(cell.latency(LATENCY), None, "{place}");
            continue;
        }
        let latency = cell.latency(LATENCY).expect("there were touches");
        let touches = if overlap {
            pages * u64::from(cell.vcpus)
        } else {
            pages
        };
        match cell.series.delivery {
            Delivery::None | Delivery::Uffd => assert_eq!(latency.count, touches, "{place}"),
            // Two exits of one touch, where vCPUs meet.
            Delivery::Exit if overlap => assert!(latency.count <= exits, "{place}"),
            Delivery::Exit => assert_eq!(latency.count, exits, "{place}"),
        }
        assert!(
            latency.min_ns > 0 && latency.max_ns <= run.count(ELAPSED) * 2,
            "{place}: {latency:?}"
        );
    }
    let ratio = |cell| RATE_OVER_UFFD.of(cell, &view.cells);
    for cell in &view.cells {
        let exits = cell.series.delivery == Delivery::Exit;
        assert_eq!(ratio(cell).is_some(), exits, "{}", cell.series);
    }
}

#[test]
fn shmem_minor() {
    let Some(report) = measure(plan(|_| {})) else {
        return;
    };
    check(&report, 64, false);
    let page = report.html().expect("a page");
    assert!(page.contains("</html>"));
    let json = report.json().expect("JSON");
    assert!(Report::from_json(&json).expect("the same JSON") == report);
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
fn stage_2_filled_ahead() {
    let plan = plan(|plan| {
        plan.pre_fault = true;
        plan.deliveries = vec![Delivery::Uffd, Delivery::Exit];
    });
    if let Some(report) = measure(plan) {
        check(&report, 64, false);
    }
}
