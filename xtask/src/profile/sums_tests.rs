use super::*;

fn boot(series: &str, reported: u64, functions: &[(&str, u64)]) -> Boot {
    Boot {
        series: series.into(),
        pages: 10,
        reported,
        functions: functions.iter().map(|&(n, c)| (n.into(), c)).collect(),
    }
}

fn groups() -> Groups {
    Groups::parse("[group KVM]\nkvm_*\n[group idle]\ndefault_idle\n").unwrap()
}

#[test]
fn groups_are_medians_per_page_and_add_up() {
    let boots = [
        boot("exit", 1000, &[("kvm_a", 500), ("kvm_b", 300), ("x", 200)]),
        boot("exit", 1100, &[("kvm_a", 600), ("kvm_b", 300), ("x", 200)]),
        boot("exit", 1200, &[("kvm_a", 700), ("default_idle", 500)]),
        boot("none", 9999, &[("kvm_a", 1)]),
    ];
    let column = Column::new("exit", &boots, &groups()).unwrap();
    let [kvm, idle, other] = column.groups.as_slice() else {
        unreachable!("{column:?}");
    };
    assert_eq!((kvm.median, kvm.min, kvm.max), (80.0, 70.0, 90.0));
    assert_eq!((idle.median, idle.max), (0.0, 50.0));
    assert_eq!((other.median, other.min), (20.0, 0.0));
    assert_eq!(column.counted.median, 110.0);
    assert_eq!(column.other, [("x".to_owned(), 20.0)]);
    assert!(column.difference < 1e-9);
    assert_eq!(column.sum(), 100.0);
    // The boots agree with the clock; the medians of these do not.
    assert!(column.check().is_err());
}

#[test]
fn a_sum_that_is_off_is_an_error() {
    for (counted, right) in [(1019, true), (1021, false), (979, false)] {
        let boots = [boot("uffd", 1000, &[("kvm_a", counted)])];
        let column = Column::new("uffd", &boots, &groups()).unwrap();
        assert_eq!(column.check().is_ok(), right, "{counted}");
    }
}

#[test]
fn a_series_without_a_boot_is_an_error() {
    assert!(Column::new("uffd", &[], &groups()).is_err());
}

#[test]
fn the_benchmarks_runs_are_added() {
    let text = r#"{"points": [{"runs": [
        {"pages": 4096, "elapsed_ns": 100, "round": 1},
        {"pages": 4096, "elapsed_ns": 200, "round": 2}]}]}"#;
    let expected = Reported {
        runs: 2,
        pages: 8192,
        nanoseconds: 300,
    };
    assert_eq!(Reported::parse(text).unwrap(), expected);
    for bad in [
        "{}",
        r#"{"points": []}"#,
        r#"{"points": [{"runs": []}]}"#,
        r#"{"points": [{"runs": [{"pages": 1}]}]}"#,
    ] {
        assert!(Reported::parse(bad).is_err(), "{bad}");
    }
}

#[test]
fn medians_of_even_numbers_lie_between() {
    assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
    assert!(Spread::of(&[]).is_none());
}
