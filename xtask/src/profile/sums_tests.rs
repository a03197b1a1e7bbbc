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

/// A report in the form of `pagetide bench`: records of runs, of all runs, and of what was published.
fn report(records: &[(&str, &str, &str, f64)]) -> String {
    let records: Vec<_> = records
        .iter()
        .map(|&(kind, delivery, quantity, value)| {
            let (key, of) = kind.split_once(' ').unwrap();
            let of = of
                .parse()
                .map_or_else(|_| of.into(), |run: u64| serde_json::json!(run));
            let mut record = serde_json::json!({
                "axes": {"delivery": delivery, "vcpus": 1}, "quantity": quantity, "value": value
            });
            record[key] = of;
            record
        })
        .collect();
    serde_json::json!({ "schema": "pagetide.report/2", "records": records }).to_string()
}

#[test]
fn the_benchmarks_runs_are_added() {
    let both = [
        ("run 1", "exit", "elapsed_ns", 100.0),
        ("run 1", "exit", "pages", 4096.0),
        ("run 1", "exit", "exits", 4096.0),
        ("run 2", "exit", "elapsed_ns", 200.0),
        ("run 2", "exit", "pages", 4096.0),
        ("over_runs median", "exit", "elapsed_ns", 150.0),
        ("over_runs median", "exit", "pages", 4096.0),
    ];
    let expected = Reported {
        runs: 2,
        pages: 8192,
        nanoseconds: 300,
    };
    assert_eq!(Reported::parse(&report(&both)).unwrap(), expected);
    let of_another = [both.as_slice(), &[("run 1", "uffd", "pages", 1.0)]].concat();
    for bad in [
        "{}".to_owned(),
        report(&[]),
        report(&both[5..]),
        report(&both[..1]),
        report(&both[1..3]),
        report(&both[..4]),
        report(&of_another),
        report(&[
            ("run 1", "exit", "pages", 0.0),
            ("run 1", "exit", "elapsed_ns", 1.0),
        ]),
    ] {
        assert!(Reported::parse(&bad).is_err(), "{bad}");
    }
}

#[test]
fn medians_of_even_numbers_lie_between() {
    assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
    assert!(Spread::of(&[]).is_none());
}
