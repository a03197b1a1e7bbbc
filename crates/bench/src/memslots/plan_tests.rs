use super::*;
use crate::benchmark::Benchmark;

#[test]
fn the_default_makes_sense() {
    let plan = Plan::default();
    assert_eq!(plan.check(), Ok(()));
    assert_eq!(plan.series().len(), 1 + 5 * 3);
    assert_eq!(plan.series()[0], Series::Idle);
    assert_eq!(plan.most_vcpus(), 16);
}

#[test]
fn boots_are_whole() {
    let plan = Plan {
        commits: 87,
        ..Plan::default()
    };
    let commits = |op| {
        let method = Method::Quiesce;
        plan.commits_of(Series::Commits { op, method })
    };
    assert_eq!((commits(Op::Split), commits(Op::Boot)), (87, 172));
    assert_eq!(plan.commits_of(Series::Idle), 87);
}

#[test]
fn what_makes_no_sense_is_refused_by_its_option() {
    type Change = fn(&mut Plan);
    let cases: [(Change, &str); 10] = [
        (|plan| plan.vcpus = vec![0], "--vcpus 0: a virtual machine"),
        (|plan| plan.vcpus = vec![257], "--vcpus 257: at most 256"),
        (|plan| plan.vcpus = vec![], "--vcpus names nothing"),
        (|plan| plan.vcpus = vec![2, 2], "--vcpus names 2 twice"),
        (|plan| plan.ops = vec![], "--ops names nothing"),
        (
            |plan| plan.ops = vec![Op::Boot; 2],
            "--ops names boot twice",
        ),
        (|plan| plan.methods = vec![], "--method names nothing"),
        (|plan| plan.commits = 0, "--commits 0: a run makes 1 to"),
        (|plan| plan.runs = 0, "--runs 0: nothing"),
        (|plan| plan.runs = 1001, "--runs 1001: at most 1000"),
    ];
    for (change, message) in cases {
        let mut plan = Plan::default();
        change(&mut plan);
        let told = plan.check().expect_err(message).to_string();
        assert!(told.starts_with(message), "{told}");
    }
}

#[test]
fn names_are_read_back() {
    for name in Op::NAMES {
        assert_eq!(name.parse::<Op>().unwrap().to_string(), *name);
    }
    for name in Method::NAMES {
        assert_eq!(name.parse::<Method>().unwrap().to_string(), *name);
    }
    assert!("floppy".parse::<Op>().is_err());
}
