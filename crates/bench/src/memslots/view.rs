//! A memslot result as people read it.

use super::plan::{BOOT_UPDATES, Guest, Method, Op, Plan, Series};
use super::published::Published;
use crate::benchmark::Benchmark;
use crate::draw::{Axis, Chart, Kind, Role, short};
use crate::model::{Cell, Column, Comparison, Quantity, Run};
use crate::report;
use crate::report::charts::{self, tick_ns};
use crate::report::{Figure, Grid, Shown, Table, View, count, extremes, ns, times};
use crate::stats::Spread;
use crate::timing::Timing;
use crate::units::{figure, latency};

/// From the first commit's beginning until after the last.
pub const ELAPSED: Quantity = Quantity::new("elapsed_ns", "ns", "elapsed");
/// Measured commits.
pub const COMMITS: Quantity = Quantity::new("commits", "commits", "commits");
/// Clock readings of all vCPUs in that time: the work that the guest got done.
pub const STEPS: Quantity = Quantity::new("steps", "steps", "steps");
/// All measured commits together.
pub const COMMIT_TOTAL: Quantity = Quantity::new("commit_total_ns", "ns", "all commits");
/// The median commit; 0 without commits.
pub const COMMIT_P50: Quantity = Quantity::new("commit_p50_ns", "ns", "commit p50");
/// The median, over commits, of the longest time that a commit kept any vCPU out of the guest.
pub const KEPT_P50: Quantity = Quantity::new("kept_p50_ns", "ns", "stall p50");
/// The median, over commits and vCPUs, of the time that a commit kept each vCPU out of the guest.
pub const KEPT_EACH_P50: Quantity = Quantity::new("kept_each_p50_ns", "ns", "each p50");
/// The longest time that a vCPU was kept out of the guest.
pub const KEPT_MAX: Quantity = Quantity::new("kept_max_ns", "ns", "stall max");
/// Accesses that found no slot.
pub const HOLES: Quantity = Quantity::new("holes", "accesses", "holes");
/// 1 if time that a vCPU waited for a processor is taken off its stalls.
pub const KNOWS_STOLEN_TIME: Quantity =
    Quantity::new("knows_stolen_time", "0 or 1", "knows stolen time");
/// Times of commits, as their caller sees them.
pub const COMMIT: Quantity = Quantity::new("commit_ns", "ns", "commit");
/// The part of each commit that the transaction itself reports: how long the gate was closed (quiesce),
/// or the time of the ioctls.
pub const INSIDE: Quantity = Quantity::new("inside_ns", "ns", "inside");
/// For each measured commit, or each stretch of time without one: the longest stall of a vCPU.
pub const KEPT: Quantity = Quantity::new("kept_ns", "ns", "stall");
/// The same of every vCPU: its own longest stall.
pub const KEPT_EACH: Quantity = Quantity::new("kept_each_ns", "ns", "each stall");

/// A clock that reads 0 took less than its grain.
fn at_least_1(run: &Run, quantity: Quantity) -> Option<f64> {
    run.get(quantity).map(|ns| ns.max(1.0))
}

/// The runs' median stall.
pub const STALL_P50: Column = Column::new("stall_p50_ns", "ns", |run| at_least_1(run, KEPT_P50));
/// The runs' median stall of each vCPU.
pub const STALL_EACH_P50: Column = Column::new("stall_each_p50_ns", "ns", |run| {
    at_least_1(run, KEPT_EACH_P50)
});
/// The runs' longest stall.
pub const STALL_MAX: Column = Column::new("stall_max_ns", "ns", |run| at_least_1(run, KEPT_MAX));
/// The runs' median commit.
pub const COMMIT_MEDIAN: Column = Column::new("commit_median_ns", "ns", |run| {
    at_least_1(run, COMMIT_P50).filter(|ns| *ns > 1.0)
});
/// Clock readings per microsecond: the rate of the guest's work.
pub const WORK: Column = Column::new("work_steps_per_us", "steps/µs", |run| {
    Some(run.get(STEPS)? / run.get(ELAPSED)?.max(1.0) * 1e3)
});
/// Accesses per commit that found no slot.
pub const HOLES_PER_COMMIT: Column = Column::new("holes_per_commit", "holes/commit", |run| {
    Some(run.get(HOLES)? / run.get(COMMITS)?.max(1.0))
});
/// All commits of a boot together.
pub const BOOT: Column = Column::new("boot_ms", "ms/boot", |run| {
    let commit = run.get(COMMIT_TOTAL)? / run.get(COMMITS)?.max(1.0);
    Some(commit * f64::from(BOOT_UPDATES) / 1e6)
});

/// Median stall, quiesce over list.
pub const STALL_OVER_LIST: Comparison<Series> =
    Comparison::inverse("stall_p50_quiesce_over_list", STALL_P50, quiesce);
/// Median stall of each vCPU, quiesce over list.
pub const STALL_EACH_OVER_LIST: Comparison<Series> =
    Comparison::inverse("stall_each_p50_quiesce_over_list", STALL_EACH_P50, quiesce);
/// Longest stall, quiesce over list.
pub const STALL_MAX_OVER_LIST: Comparison<Series> =
    Comparison::inverse("stall_max_quiesce_over_list", STALL_MAX, quiesce);
/// Median commit, quiesce over list.
pub const COMMIT_OVER_LIST: Comparison<Series> =
    Comparison::inverse("commit_p50_quiesce_over_list", COMMIT_MEDIAN, quiesce);
/// Median stall over that of the same series at the least number of vCPUs: 1 if a commit stalls vCPUs
/// as long however many there are.
pub const STALL_GROWTH: Comparison<Series> =
    Comparison::new("stall_p50_over_fewer_vcpus", STALL_P50, fewer);
/// The same of each vCPU.
pub const STALL_EACH_GROWTH: Comparison<Series> =
    Comparison::new("stall_each_p50_over_fewer_vcpus", STALL_EACH_P50, fewer);
/// The guest's work over its work without commits.
pub const WORK_OVER_IDLE: Comparison<Series> =
    Comparison::new("work_over_idle", WORK, |cell, cells| {
        cell.series.op()?;
        alike(cells, cell.vcpus, Series::Idle)
    });

fn alike(cells: &[Cell<Series>], vcpus: u32, series: Series) -> Option<&Cell<Series>> {
    let mut cells = cells.iter();
    cells.find(|cell| cell.vcpus == vcpus && cell.series == series)
}

/// Quiesce, for a change that a list made.
fn quiesce<'c>(list: &'c Cell<Series>, cells: &'c [Cell<Series>]) -> Option<&'c Cell<Series>> {
    let op = list
        .series
        .op()
        .filter(|_| list.series.method() == Some(Method::List))?;
    let method = Method::Quiesce;
    alike(cells, list.vcpus, Series::Commits { op, method })
}

/// The same series at the least number of vCPUs, if that is not the cell itself.
fn fewer<'c>(cell: &'c Cell<Series>, cells: &'c [Cell<Series>]) -> Option<&'c Cell<Series>> {
    let of_series = cells.iter().filter(|other| other.series == cell.series);
    of_series
        .min_by_key(|other| other.vcpus)
        .filter(|least| least.vcpus < cell.vcpus)
}

/// The cells that a comparison has a ratio of.
fn compared<'v>(
    view: &'v View<'_, Plan>,
    comparison: &Comparison<Series>,
) -> Vec<&'v Cell<Series>> {
    let cells = view.cells.iter();
    cells
        .filter(|cell| comparison.of(cell, &view.cells).is_some())
        .collect()
}

/// The colour of a method; `None` is without commits.
fn role(method: Option<Method>) -> Role {
    Role::Series(match method {
        None => 0,
        Some(Method::DeleteCreate) => 1,
        Some(Method::List) => 2,
        Some(Method::Quiesce) => 3,
    })
}

impl Shown for Plan {
    const SERIES: &'static str = "change";
    const READING: &'static str = "\
        A virtual machine's vCPUs walk its memory while \
        the memory slots below it change. With <b>list</b> the kernel changes all slots at once and \
        vCPUs run on. With <b>quiesce</b> every vCPU is stopped outside KVM_RUN, slots are deleted \
        and created, and the vCPUs go on. With <b>delete-create</b> slots are deleted and created while \
        vCPUs run, and a guest that accesses them in between finds no memory.";

    fn title(&self) -> String {
        format!(
            "Memory slots changed below running vCPUs: {} commits a run, guest: {}",
            self.commits, self.guest
        )
    }

    fn published(&self) -> Option<report::Published> {
        let published = Published::table();
        let values = published.times.iter().flat_map(|time| {
            [("ioctl", time.ioctl_ms), ("pause", time.pause_ms)].map(|(method, ms)| {
                let axes = [("vcpus", time.vcpus.into()), ("method", method.into())];
                (method.to_owned(), axes, BOOT, ms)
            })
        });
        let published = report::Published::new(&published.source, values);
        self.ops.contains(&Op::Boot).then_some(published)
    }

    fn tables(view: &View<'_, Self>) -> Vec<(&'static str, Option<Grid>)> {
        vec![
            ("Results", Some(results(view))),
            ("Quiesce over list", comparison(view)),
            ("With more vCPUs", growth(view)),
            ("A boot", boot(view)),
        ]
    }

    fn legend(view: &View<'_, Self>) -> Vec<String> {
        let lists = compared(view, &STALL_OVER_LIST);
        let grown = compared(view, &STALL_GROWTH);
        let boots = view.plan().ops.contains(&Op::Boot);
        let lines = [
            Some(format!(
                "stall: the longest time that a commit kept any vCPU out of the guest, as the guest \
                 sees it; p50 over the commits of a run, median of {} rounds, lowest and highest round; \
                 max over all commits. Without commits: in stretches of 5 ms; the stalls seen there are \
                 the machine's own. each: the stall of every vCPU by itself, p50 over commits and vCPUs; \
                 the longest of many is longer than that of few.",
                view.plan().runs
            )),
            Some(
                "commit: from the call until it returns. inside: how long the gate was closed (quiesce), \
                 or the time of the ioctls (list, delete-create)."
                    .to_owned(),
            ),
            Some(
                "work lost: steps of the guest, against those in the same time without commits. \
                 holes/commit: accesses that left the guest because there was no slot."
                    .to_owned(),
            ),
            (!lists.is_empty()).then(|| {
                "quiesce over list: median of the ratios of runs of the same round; above 1, the list \
                 stalls vCPUs for a shorter time."
                    .to_owned()
            }),
            (!grown.is_empty()).then(|| {
                "over fewer vCPUs: median of the ratios of runs of the same round; 1 where a commit \
                 stalls vCPUs as long however many there are. The row without commits is the machine's \
                 own growth."
                    .to_owned()
            }),
            boots.then(|| format!("published: {}.", Published::table().source)),
        ];
        lines.into_iter().flatten().collect()
    }

    fn notes(view: &View<'_, Self>) -> Vec<String> {
        notes(view)
    }

    fn role(_: &View<'_, Self>, series: Series) -> Role {
        role(series.method())
    }

    /// How much longer quiesce stalls vCPUs, with the first change.
    fn lead(view: &View<'_, Self>) -> Vec<Vec<Figure>> {
        let lists = compared(view, &STALL_OVER_LIST);
        let first = lists.first().and_then(|cell| cell.series.op());
        let figures = lists.into_iter().filter(|cell| cell.series.op() == first);
        let figure = |cell: &Cell<Series>| {
            Some(Figure {
                role: role(Some(Method::Quiesce)),
                tag: cell.series.op()?.to_string(),
                value: times(STALL_OVER_LIST.of(cell, &view.cells)?.paired.median),
                what: format!(
                    "as long a stall by quiesce as by list, {}",
                    count(cell.vcpus)
                ),
            })
        };
        vec![figures.filter_map(figure).collect()]
    }

    fn charts(view: &View<'_, Self>) -> Vec<Chart> {
        let stalls = view.plan().ops.iter().map(|&op| stalls(view, op));
        stalls.chain(boots(view)).collect()
    }

    /// What the first change stalls vCPUs for, and boots beside the published ones.
    fn drawing(view: &View<'_, Self>) -> Vec<Chart> {
        let first = view.plan().ops.first().map(|&op| stalls(view, op));
        first.into_iter().chain(boots(view)).collect()
    }
}

fn results(view: &View<'_, Plan>) -> Grid {
    let p50 = |cell: &Cell<Series>, of| cell.latency(of).map(|times| latency(times.p50_ns));
    let commits = |cell: &&Cell<Series>| cell.series.op().is_some();
    Table::of(Plan::SERIES, &view.cells)
        .median("stall p50", STALL_P50, ns)
        .extremes("low..high", STALL_P50, ns)
        .median("each p50", STALL_EACH_P50, ns)
        .maybe("stall max", |cell| {
            cell.latency(KEPT).map(|times| latency(times.max_ns))
        })
        .maybe("commit p50", |cell| p50(cell, COMMIT))
        .maybe("commit p99", |cell| {
            cell.latency(COMMIT).map(|times| latency(times.p99_ns))
        })
        .maybe("inside p50", |cell| p50(cell, INSIDE))
        .maybe("work lost %", |cell| {
            let ratio = WORK_OVER_IDLE.of(cell, &view.cells)?.paired;
            Some(figure((1.0 - ratio.median) * 100.0))
        })
        .maybe("holes/commit", |cell| {
            let holes = cell.spread(HOLES_PER_COMMIT).filter(|_| commits(cell))?;
            Some(figure(holes.median))
        })
        .grid()
}

fn comparison(view: &View<'_, Plan>) -> Option<Grid> {
    let cells = compared(view, &STALL_OVER_LIST).into_iter();
    let rows = cells.filter_map(|cell| Some((cell.vcpus, cell.series.op()?.to_string(), cell)));
    Table::by_name("quiesce over list", rows)
        .ratio("stall p50", &STALL_OVER_LIST, &view.cells)
        .ratio_extremes("low..high", &STALL_OVER_LIST, &view.cells)
        .ratio("each p50", &STALL_EACH_OVER_LIST, &view.cells)
        .ratio("stall max", &STALL_MAX_OVER_LIST, &view.cells)
        .ratio("commit p50", &COMMIT_OVER_LIST, &view.cells)
        .ratio_extremes("low..high", &COMMIT_OVER_LIST, &view.cells)
        .if_any()
}

fn growth(view: &View<'_, Plan>) -> Option<Grid> {
    Table::of("over fewer vCPUs", compared(view, &STALL_GROWTH))
        .maybe("over vCPUs", |cell| {
            Some(fewer(cell, &view.cells)?.vcpus.to_string())
        })
        .ratio("stall p50", &STALL_GROWTH, &view.cells)
        .ratio_extremes("low..high", &STALL_GROWTH, &view.cells)
        .ratio("each p50", &STALL_EACH_GROWTH, &view.cells)
        .ratio_extremes("low..high", &STALL_EACH_GROWTH, &view.cells)
        .if_any()
}

fn boot_spread(cell: &Cell<Series>) -> Option<Spread> {
    cell.spread(BOOT)
        .filter(|_| cell.series.op() == Some(Op::Boot))
}

/// All commits of a boot, ours beside the published ones.
fn boot(view: &View<'_, Plan>) -> Option<Grid> {
    let published = Published::table();
    let boots = view.cells.iter().filter(|cell| boot_spread(cell).is_some());
    Table::of("all 86 updates", boots)
        .median("ms", BOOT, figure)
        .maybe("low..high", |cell| boot_spread(cell).as_ref().map(extremes))
        .maybe("published ms", |cell| {
            published.at(cell.vcpus, cell.series.method()?).map(figure)
        })
        .if_any()
}

/// The stalls of a change by each method.
fn stalls(view: &View<'_, Plan>, op: Op) -> Chart {
    let methods = view.plan().methods.iter();
    let commits = methods.map(|&method| Series::Commits { op, method });
    let line = |series: Series| {
        let label = series
            .method()
            .map_or_else(|| series.to_string(), |method| method.to_string());
        let mut line = view.line(series, label, |cell| cell.spread(STALL_P50), ns);
        line.dashed = series == Series::Idle;
        line
    };
    let lines = std::iter::once(Series::Idle)
        .chain(commits)
        .map(line)
        .collect();
    let title = format!("Stall of vCPUs by a commit: {op}");
    let subtitle =
        "the vCPU with the longest stall, median commit; runs' median and extremes; log.";
    view.chart(
        [title, subtitle.to_owned()],
        Axis::Logarithmic,
        tick_ns,
        lines,
    )
}

/// Boots, ours and the published ones, if there are any.
fn boots(view: &View<'_, Plan>) -> Vec<Chart> {
    if !view.plan().ops.contains(&Op::Boot) {
        return Vec::new();
    }
    let show = |ms: f64| format!("{} ms", figure(ms));
    let lines = view.plan().methods.iter().map(|&method| {
        let series = Series::Commits {
            op: Op::Boot,
            method,
        };
        view.line(series, method.to_string(), boot_spread, show)
    });
    let title = "All commits of a boot, measured here".to_owned();
    let subtitle = "milliseconds for 86 updates; median, lowest and highest run".to_owned();
    let axis = || Axis::FromZero { at_least: 0.0 };
    let ours = view.chart([title, subtitle], axis(), short, lines.collect());
    let published = Published::table();
    let line = |label: &str, method: Method| {
        let times = published.times.iter().enumerate();
        let figures = times.filter_map(|(place, time)| {
            let name = format!("published, {label}, {} vCPUs", time.vcpus);
            Some((place, name, published.at(time.vcpus, method)?))
        });
        charts::published(label, role(Some(method)), figures, show)
    };
    let theirs = Chart {
        title: "All commits of a boot, published".to_owned(),
        subtitle: "milliseconds; their hardware".to_owned(),
        axis: "vCPUs",
        places: published.times.iter().map(|time| time.vcpus).collect(),
        kind: Kind::Lines,
        scale: axis(),
        format: short,
        lines: vec![line("ioctl", Method::List), line("pause", Method::Quiesce)],
    };
    vec![ours, theirs]
}

/// What a reader must know to read the figures right.
fn notes(view: &View<'_, Plan>) -> Vec<String> {
    let plan = view.plan();
    let mut runs = view.cells.iter().flat_map(|cell| &cell.runs);
    let knows_stolen_time = runs.all(|run| run.get(KNOWS_STOLEN_TIME) == Some(1.0));
    let pairs = plan
        .ops
        .iter()
        .any(|op| matches!(op, Op::Split | Op::Merge));
    let no_hole = plan.ops.contains(&Op::Flags) && plan.methods.contains(&Method::DeleteCreate);
    let (busiest, host_cpus) = (plan.most_vcpus(), view.report.origin.facts.host_cpus);
    let notes = [
        (view.timing() == Timing::Instructions).then(|| {
            "This emulator runs its CPUs in turn in a single thread, and takes the next CPU when an \
             interrupt comes: so that no CPU waits for milliseconds, interrupts come 61 to 83 thousand \
             times a second. That is the grain of stalls with several CPUs; the rows without commits \
             show it, and a VM with one CPU has a finer one (docs/design/vcpu-stalls.md). An idle CPU \
             would give its turn away: where there are fewer vCPUs than CPUs, another VM's vCPUs walk \
             on the others."
                .to_owned()
        }),
        Some(
            "After every run memory was compared with what it should hold, and so was every word that a \
             guest read; a difference, or a hole that list or quiesce let a guest see, would have ended \
             the benchmark."
                .to_owned(),
        ),
        Some(if knows_stolen_time {
            "stall: time that a vCPU's thread waited for a processor is taken off (KVM's steal time)."
                .to_owned()
        } else {
            "stall: this KVM reports no steal time, so time that a vCPU's thread waited for a processor \
             counts as a stall; with more vCPUs than processors that is most of it."
                .to_owned()
        }),
        pairs.then(|| {
            "Each split is followed by a merge and each merge comes after a split, by the same \
             method: the stalls of these are not counted, and the work that they cost the guest is."
                .to_owned()
        }),
        no_hole.then(|| {
            "Flags of one slot are one ioctl by any method: there is no hole to see.".to_owned()
        }),
        (plan.guest == Guest::Spin)
            .then(|| "The guest does not touch the memory whose slots change.".to_owned()),
        (busiest > host_cpus).then(|| {
            format!(
                "Up to {busiest} vCPUs share {host_cpus} host CPUs: a thread that stops vCPUs waits \
                 until each has had its turn to leave, and the time of a commit includes the waits of \
                 the committing thread for its own turn, also when vCPUs run already: stalls do not \
                 include them."
            )
        }),
    ];
    notes.into_iter().flatten().collect()
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
