use super::*;

const TIME: Quantity = Quantity::new("time_ns", "ns", "time");
const WORK: Quantity = Quantity::new("work", "steps", "work");
const EACH: Quantity = Quantity::new("each_second", "steps/s", "each second").each_second();
const ENDED: Quantity = Quantity::new("ended_by", "event", "ended by");
const STALL: Quantity = Quantity::new("stall_ns", "ns", "stall");
const RATE: Column = Column::new("rate", "steps/ns", |run| {
    Some(run.get(WORK)? / run.get(TIME)?)
});

#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Series {
    kind: String,
}

fn axes(vcpus: u32, kind: &str) -> Map<String, Value> {
    Map::from_iter([
        ("vcpus".to_owned(), vcpus.into()),
        ("kind".to_owned(), kind.into()),
    ])
}

fn stalls(stalls: &[u64]) -> LatencyLog {
    let mut log = LatencyLog::new().unwrap();
    stalls.iter().for_each(|&ns| log.record(ns));
    log
}

fn work(time: u64, work: u64) -> Sample {
    let time = Duration::from_nanos(time);
    Sample::default().time(TIME, time).count(WORK, work)
}

/// The records of a cell whose rounds gave these samples.
fn records(vcpus: u32, kind: &str, runs: impl IntoIterator<Item = (u32, Sample)>) -> Vec<Record> {
    let collected = Collected {
        runs: runs.into_iter().collect(),
        lost_runs: 0,
    };
    collected.records(kind, &axes(vcpus, kind))
}

/// The same, read back as the only cell.
fn cell(vcpus: u32, kind: &str, runs: impl IntoIterator<Item = (u32, Sample)>) -> Cell<Series> {
    let mut cells = cells(&records(vcpus, kind, runs)).unwrap();
    assert_eq!(cells.len(), 1);
    cells.remove(0)
}

#[test]
fn cells_become_records_and_records_cells() {
    let busy = Collected {
        runs: vec![
            (1, work(10, 100).log(STALL, stalls(&[1, 2]))),
            (2, work(20, 300).log(STALL, stalls(&[3]))),
        ],
        lost_runs: 4,
    };
    let mut all = busy.records("busy", &axes(2, "busy"));
    all.extend(records(1, "idle", [(1, work(5, 0))]));

    let first = &all[0];
    assert_eq!((first.run, &first.over_runs), (Some(1), &None));
    assert_eq!((first.quantity.as_str(), first.value), ("time_ns", 10.0));
    assert_eq!((first.unit.as_str(), first.series.as_str()), ("ns", "busy"));
    assert_eq!(first.axes, axes(2, "busy"));

    // Through JSON as well.
    let text = serde_json::to_string(&all).unwrap();
    let back: Vec<Record> = serde_json::from_str(&text).unwrap();
    assert_eq!(back, all);

    let cells: Vec<Cell<Series>> = cells(&back).unwrap();
    let [busy, idle] = &cells[..] else {
        unreachable!("{cells:?}")
    };
    assert_eq!((busy.vcpus, busy.series.kind.as_str()), (2, "busy"));
    assert_eq!((idle.vcpus, idle.series.kind.as_str()), (1, "idle"));
    let runs = busy.runs.iter();
    let counts: Vec<_> = runs
        .map(|run| (run.round, run.vcpus, run.count(TIME), run.count(WORK)))
        .collect();
    assert_eq!(counts, [(1, 2, 10, 100), (2, 2, 20, 300)]);
    let rate = busy.spread(RATE).unwrap();
    assert_eq!((rate.count, rate.min, rate.max), (2, 10.0, 15.0));
    assert_eq!(busy.over_runs(LOST_RUNS, "sum"), Some(4.0));

    // Latencies are those of all runs together.
    let stall = busy.latency(STALL).unwrap();
    assert_eq!(Some(stall), stalls(&[1, 2, 3]).summary());
    assert_eq!(idle.latency(STALL), None);
}

#[test]
fn a_log_without_latencies_makes_no_record() {
    let sample = work(1, 1).log(STALL, stalls(&[]));
    let records = records(1, "idle", [(1, sample)]);
    let names: Vec<_> = records.iter().map(|one| one.quantity.as_str()).collect();
    assert_eq!(names, ["time_ns", "work", "lost_runs"]);
}

#[test]
fn each_second_is_an_axis_of_its_own_and_stays_in_its_cell() {
    let seconds = |values: [f64; 3]| {
        let sample = work(3, 9);
        values
            .into_iter()
            .fold(sample, |sample, value| sample.value(EACH, value))
    };
    let rounds = [(1, seconds([3.0, 1.0, 2.0])), (2, seconds([5.0, 4.0, 6.0]))];
    let records = records(2, "busy", rounds);
    let of_seconds: Vec<_> = records
        .iter()
        .filter(|record| record.quantity == EACH.name)
        .map(|record| (record.run, record.axes[SECOND].as_u64(), record.value))
        .collect();
    let wanted = [
        (Some(1), Some(1), 3.0),
        (Some(1), Some(2), 1.0),
        (Some(1), Some(3), 2.0),
        (Some(2), Some(1), 5.0),
        (Some(2), Some(2), 4.0),
        (Some(2), Some(3), 6.0),
    ];
    assert_eq!(of_seconds, wanted);
    assert!(!records[0].axes.contains_key(SECOND), "{:?}", records[0]);

    let cells: Vec<Cell<Series>> = cells(&records).unwrap();
    assert_eq!(cells.len(), 1);
    assert_eq!(cells[0].runs[0].all(EACH), [3.0, 1.0, 2.0]);
    assert_eq!(cells[0].runs[1].all(EACH), [5.0, 4.0, 6.0]);
    assert_eq!(cells[0].runs[1].get(EACH), Some(5.0));
    assert!(cells[0].runs[0].all(STALL).is_empty());
}

#[test]
fn events_keep_their_words() {
    let sample = work(1, 1).event(ENDED, "vCPU 0: shutdown");
    let cell = cell(1, "busy", [(1, sample), (2, work(1, 1))]);
    let texts: Vec<_> = cell.runs.iter().map(|run| run.text(ENDED)).collect();
    assert_eq!(texts, [Some("vCPU 0: shutdown"), None]);
    let counts: Vec<_> = cell.runs.iter().map(|run| run.count(ENDED)).collect();
    assert_eq!(counts, [1, 0]);
    assert_eq!(cell.runs[0].text(TIME), None);
}

#[test]
fn a_cell_over_another_counts_only_rounds_that_both_have() {
    let alone = |work: u64| Sample::default().count(WORK, work);
    // Round 3 has no time, and so no rate.
    let over = cell(
        2,
        "busy",
        [
            (1, work(1, 100)),
            (2, work(1, 40)),
            (3, alone(7)),
            (4, work(1, 60)),
        ],
    );
    let under = cell(
        2,
        "idle",
        [
            (4, work(1, 20)),
            (3, work(1, 1)),
            (2, work(1, 10)),
            (5, work(1, 1)),
        ],
    );
    let ratio = over.over(&under, RATE).unwrap();
    let paired = ratio.paired;
    assert_eq!((paired.count, paired.min, paired.max), (2, 3.0, 4.0));
    // 50 over 15, the medians of the same rounds.
    assert!((ratio.of_medians - 50.0 / 15.0).abs() < 1e-9);
    assert_eq!(over.spread(RATE).unwrap().count, 3);

    let elsewhere = cell(2, "idle", [(9, work(1, 1))]);
    assert_eq!(over.over(&elsewhere, RATE), None);
    // Something over nothing is no ratio.
    let nothing = cell(2, "idle", [(1, work(1, 0))]);
    assert_eq!(over.over(&nothing, RATE), None);
}

#[test]
fn a_comparison_divides_in_its_direction() {
    fn idle<'c>(cell: &'c Cell<Series>, cells: &'c [Cell<Series>]) -> Option<&'c Cell<Series>> {
        let mut cells = cells.iter().filter(|_| cell.series.kind != "idle");
        cells.find(|other| other.series.kind == "idle")
    }
    let cells = [
        cell(1, "idle", [(1, work(1, 10))]),
        cell(1, "busy", [(1, work(1, 40))]),
    ];
    let median = |comparison: Comparison<Series>, place: usize| {
        let ratio = comparison.of(&cells[place], &cells);
        ratio.map(|ratio| ratio.paired.median)
    };
    assert_eq!(median(Comparison::new("x", RATE, idle), 1), Some(4.0));
    assert_eq!(median(Comparison::inverse("x", RATE, idle), 1), Some(0.25));
    assert_eq!(median(Comparison::new("x", RATE, idle), 0), None);
}

#[test]
fn a_column_of_one_timing_mode_is_of_no_other() {
    let counted = Column {
        timing: Some(Timing::Instructions),
        ..RATE
    };
    assert!(RATE.is_of(Timing::Native) && RATE.is_of(Timing::Instructions));
    assert!(!counted.is_of(Timing::Native) && counted.is_of(Timing::Instructions));
}

#[test]
fn a_place_that_is_no_series_is_an_error() {
    let mut records = records(1, "busy", [(1, work(1, 1))]);
    let read = |records: &[Record]| cells::<Series>(records);
    assert!(read(&records).is_ok());
    records[1].axes.remove("kind");
    assert!(read(&records).is_err());
    records[1].axes = axes(1, "busy");
    records[0].axes.remove("vcpus");
    assert!(read(&records).is_err());
}

#[test]
fn a_sample_gives_back_the_first_value() {
    let sample = work(10, 3).value(EACH, 7.0).value(EACH, 8.0);
    assert_eq!(sample.get(EACH), Some(7.0));
    assert_eq!(sample.get(TIME), Some(10.0));
    assert_eq!(sample.get(STALL), None);
}
