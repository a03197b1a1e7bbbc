use super::*;
use crate::benchmark::Benchmark;

/// The default plan, changed.
fn plan(change: impl FnOnce(&mut Plan)) -> Plan {
    let mut plan = Plan::default();
    change(&mut plan);
    plan
}

#[test]
fn the_default_makes_sense() {
    assert_eq!(Plan::default().check(), Ok(()));
}

#[test]
fn every_invalid_argument_has_its_message() {
    let cases: Vec<(Plan, &str)> = vec![
        (
            plan(|p| p.vcpus.clear()),
            "--vcpus names nothing; try --vcpus 1,2,4",
        ),
        (
            plan(|p| p.vcpus = vec![1, 0]),
            "--vcpus 0: a virtual machine needs at least one vCPU",
        ),
        (
            plan(|p| p.vcpus = vec![1025]),
            "--vcpus 1025: at most 1024 vCPUs can be measured",
        ),
        (
            plan(|p| p.vcpus = vec![2, 4, 2]),
            "--vcpus names 2 twice; each value is measured once",
        ),
        (
            plan(|p| p.per_vcpu = ByteSize(0)),
            "--per-vcpu 0: each vCPU needs at least one page to touch",
        ),
        (
            plan(|p| p.per_vcpu = ByteSize(4097)),
            "--per-vcpu 4097: not a multiple of the 4096-byte pages of --backing shmem",
        ),
        (
            plan(|p| {
                p.per_vcpu = ByteSize(3 << 20);
                p.backing = Backing::Hugetlb2M;
            }),
            "--per-vcpu 3M: not a multiple of the 2097152-byte pages of --backing hugetlb-2m",
        ),
        (
            plan(|p| p.per_vcpu = ByteSize(1 << 62)),
            "--per-vcpu 4194304T times 1 vCPUs is more than a guest can address",
        ),
        (
            plan(|p| p.per_vcpu = ByteSize(1 << 49)),
            "--per-vcpu 512T times 8 vCPUs is more than a guest can address",
        ),
        (
            plan(|p| p.deliveries.clear()),
            "--delivery names nothing; try --delivery uffd,exit",
        ),
        (
            plan(|p| p.deliveries = vec![Delivery::Uffd, Delivery::Uffd]),
            "--delivery names uffd twice; each value is measured once",
        ),
        (
            plan(|p| p.fault_around.clear()),
            "--fault-around names nothing; try --fault-around 1,16",
        ),
        (
            plan(|p| p.fault_around = vec![0]),
            "--fault-around 0: must be a power of two from 1 to 512 pages",
        ),
        (
            plan(|p| p.fault_around = vec![1, 12]),
            "--fault-around 12: must be a power of two from 1 to 512 pages",
        ),
        (
            plan(|p| p.fault_around = vec![1024]),
            "--fault-around 1024: must be a power of two from 1 to 512 pages",
        ),
        (
            plan(|p| p.fault_around = vec![16, 1, 16]),
            "--fault-around names 16 twice; each value is measured once",
        ),
        (
            plan(|p| {
                p.deliveries = vec![Delivery::Uffd];
                p.fault_around = vec![1, 16];
            }),
            "--fault-around 16 needs --delivery exit: only exits resolve neighbours",
        ),
        (
            plan(|p| p.populate = true),
            "--populate needs --delivery exit and a --fault-around above 1: it maps the pages that \
             come with the faulting one",
        ),
        (
            plan(|p| p.readers = Some(0)),
            "--readers 0: without a reader thread nobody resolves userfaultfd messages",
        ),
        (
            plan(|p| p.readers = Some(5000)),
            "--readers 5000: at most 1024 reader threads",
        ),
        (plan(|p| p.runs = 0), "--runs 0: nothing would be measured"),
        (plan(|p| p.runs = 1001), "--runs 1001: at most 1000 rounds"),
        (
            plan(|p| {
                p.uffds = Uffds::PerVcpu;
                p.overlap = true;
            }),
            "--uffds per-vcpu with --overlap: memory that all vCPUs share cannot have a \
             userfaultfd for each; drop one of the two",
        ),
        (
            plan(|p| p.backing = Backing::Anonymous),
            "--mode minor with --backing anonymous: anonymous memory has no page cache to map \
             from; use --mode missing",
        ),
        (
            plan(|p| {
                p.backing = Backing::Thp;
                p.mode = Mode::Missing;
            }),
            "--mode missing with --backing thp: copying single 4K pages under a huge page can show \
             the guest wrong data; use --mode minor",
        ),
        (
            plan(|p| {
                p.deliveries = vec![Delivery::Uffd, Delivery::None];
                p.pre_fault = true;
            }),
            "--pre-fault needs --delivery exit: it is done by the vCPU's own thread",
        ),
    ];
    for (plan, message) in cases {
        let error = plan.check().expect_err(message);
        assert_eq!(error.to_string(), message);
    }
}

#[test]
fn valid_combinations_pass() {
    let cases = [
        plan(|p| {
            p.backing = Backing::Anonymous;
            p.mode = Mode::Missing;
        }),
        plan(|p| {
            p.backing = Backing::Hugetlb1G;
            p.per_vcpu = ByteSize(1 << 30);
        }),
        plan(|p| p.uffds = Uffds::PerVcpu),
        plan(|p| p.overlap = true),
        plan(|p| {
            p.vcpus = vec![MAX_VCPUS];
            p.readers = Some(MAX_READERS);
            p.fault_around = vec![1, MAX_FAULT_AROUND];
            p.runs = crate::options::MAX_RUNS;
        }),
        plan(|p| p.deliveries = vec![Delivery::None]),
    ];
    for plan in cases {
        assert_eq!(plan.check(), Ok(()), "{plan:?}");
    }
}

#[test]
fn each_fault_around_is_a_series_of_exits_only() {
    let plan = plan(|p| {
        p.deliveries = vec![Delivery::None, Delivery::Uffd, Delivery::Exit];
        p.fault_around = vec![1, 16];
    });
    let names: Vec<_> = plan.series().iter().map(ToString::to_string).collect();
    assert_eq!(names, ["none", "uffd", "exit", "exit, 16 around"]);
    let names: Vec<_> = Plan {
        populate: true,
        ..plan
    }
    .series()
    .iter()
    .map(ToString::to_string)
    .collect();
    let populated = "exit, 16 around, populated";
    assert_eq!(
        names,
        ["none", "uffd", "exit", "exit, 16 around", populated]
    );
}

#[test]
fn memory_is_that_of_all_vcpus() {
    let plan = Plan::default();
    assert_eq!(
        (plan.total_bytes(8), plan.total_pages(8)),
        (512 << 20, 131_072)
    );
    let huge = Plan {
        backing: Backing::Hugetlb2M,
        ..plan
    };
    assert_eq!(huge.total_pages(8), 256);
}

#[test]
fn readers_follow_the_vcpus_unless_given() {
    let mut plan = Plan::default();
    assert_eq!((plan.readers_for(1), plan.readers_for(8)), (1, 8));
    plan.readers = Some(2);
    assert_eq!((plan.readers_for(1), plan.readers_for(8)), (2, 2));
}

#[test]
fn names_are_the_same_everywhere() {
    assert_eq!(Delivery::NAMES, ["none", "uffd", "exit"]);
    assert_eq!("per-vcpu".parse(), Ok(Uffds::PerVcpu));
    assert_eq!(
        serde_json::to_string(&Uffds::PerVcpu).unwrap(),
        "\"per-vcpu\""
    );
    for name in Delivery::NAMES {
        let delivery: Delivery = name.parse().unwrap();
        assert_eq!(delivery.to_string(), *name);
        assert_eq!(
            serde_json::to_string(&delivery).unwrap(),
            format!("\"{name}\"")
        );
    }
    let error = "Exit".parse::<Delivery>().unwrap_err();
    assert_eq!(error.to_string(), "'Exit' is none of none, uffd, exit");
}
