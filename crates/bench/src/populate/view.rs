//! A population result as people read it.

use pagetide_memory::Backing;

use super::plan::{Method, Plan, Series};
use super::published::Published;
use crate::benchmark::Benchmark;
use crate::draw::{Axis, Chart, Line, Role, short};
use crate::model::{Cell, Column, Comparison, Quantity, Run};
use crate::options::list;
use crate::report;
use crate::report::charts::tick_ns;
use crate::report::{Figure, Grid, NOTHING, Shown, Table, View, count, ns, times};
use crate::stats::Spread;
use crate::timing::Timing;
use crate::units::{ByteSize, figure};

/// From the vCPUs' release until the last one had written to its last page.
pub const GUEST: Quantity = Quantity::new("guest_ns", "ns", "guest");
/// From the beginning of the population to its end; 0 without one.
pub const POPULATION: Quantity = Quantity::new("population_ns", "ns", "population");
/// Threads, or vCPUs, that populated.
pub const THREADS: Quantity = Quantity::new("threads", "threads", "threads");
/// Bytes of all memory slots, which the threads went through.
pub const POPULATED: Quantity = Quantity::new("populated_bytes", "bytes", "populated");
/// Stage-2 mappings of 4 KiB that the population made, by KVM's count.
pub const MAPPINGS_4K: Quantity = Quantity::new("mappings_4k", "mappings", "4K");
/// Those of 2 MiB.
pub const MAPPINGS_2M: Quantity = Quantity::new("mappings_2m", "mappings", "2M");
/// Those of 1 GiB.
pub const MAPPINGS_1G: Quantity = Quantity::new("mappings_1g", "mappings", "1G");
/// Stage-2 mappings of any size at the end.
pub const MAPPINGS_AFTER: Quantity = Quantity::new("mappings_after", "mappings", "mappings after");
/// Stage-2 faults that vCPUs took during the population.
pub const POPULATION_EXITS: Quantity =
    Quantity::new("population_exits", "faults", "exits populating");
/// Stage-2 faults that vCPUs took while they wrote to everything.
pub const EXITS: Quantity = Quantity::new("exits", "faults", "exits");
/// Pages that prefetch brought in; 0 without it.
pub const PREFETCHED: Quantity = Quantity::new("prefetched_pages", "pages", "prefetched");
/// Of the exits, those that a pager served; 0 without one.
pub const PAGER_FAULTS: Quantity = Quantity::new("pager_faults", "faults", "pager's faults");

/// Mappings that the population made.
pub fn mappings(run: &Run) -> f64 {
    let sizes = [MAPPINGS_4K, MAPPINGS_2M, MAPPINGS_1G];
    sizes.iter().filter_map(|size| run.get(*size)).sum()
}

/// So much per second of the population; `None` without one.
fn per_second(run: &Run, amount: f64) -> Option<f64> {
    let ns = run.get(POPULATION).filter(|ns| *ns > 0.0)?;
    Some(amount / ns * 1e9)
}

/// Time until all of memory was written to, population included.
pub const TOTAL: Column = Column::new("total_ns", "ns", |run| {
    Some(run.get(POPULATION)? + run.get(GUEST)?)
});
/// Time until all of memory was written to, from the vCPUs' release.
pub const GUEST_TIME: Column = Column::new("guest_ns", "ns", |run| run.get(GUEST));
/// Time of the population.
pub const POPULATION_TIME: Column = Column::new("population_ns", "ns", |run| {
    run.get(POPULATION).filter(|ns| *ns > 0.0)
});
/// GiB populated per second.
pub const RATE: Column = Column::new("rate_gib_per_s", "GiB/s", |run| {
    per_second(run, run.get(POPULATED)? / (1u64 << 30) as f64)
});
/// Thousand stage-2 mappings made per second.
pub const MAPPING_RATE: Column =
    Column::new("rate_kmappings_per_s", "thousand mappings/s", |run| {
        per_second(run, mappings(run) / 1e3)
    });
/// Time per stage-2 mapping: of the population, or without one of the guest's own faults. `None` if
/// nothing was mapped.
pub const PER_MAPPING: Column = Column::new("ns_per_mapping", "ns/mapping", |run| {
    let (ns, mappings) = match run.get(POPULATION)? {
        0.0 => (run.get(GUEST)?, run.get(MAPPINGS_AFTER)?),
        ns => (ns, mappings(run)),
    };
    (mappings > 0.0).then(|| ns / mappings)
});
/// Stage-2 faults that vCPUs took while they wrote to everything.
pub const FAULTS: Column = Column::new("exits", "exits", |run| run.get(EXITS));

/// Time until all is written to over that without a population: below 1 the population pays.
pub const TOTAL_OF_NONE: Comparison<Series> = Comparison::new("total_of_none", TOTAL, none);
/// The guest's time alone over that without a population.
pub const GUEST_OF_NONE: Comparison<Series> = Comparison::new("guest_of_none", GUEST_TIME, none);
/// How many times as fast a mapping is made as by vCPUs that fault.
pub const OVER_FAULTS: Comparison<Series> =
    Comparison::inverse("mappings_over_faults", PER_MAPPING, none);
/// How many times as fast as by KVM_PRE_FAULT_MEMORY with as many threads.
pub const OVER_PRE_FAULT: Comparison<Series> =
    Comparison::inverse("mappings_over_pre_fault", PER_MAPPING, |cell, cells| {
        let populate = cell.series.method == Method::Populate;
        other(cell, cells, |series| series.method = Method::PreFault).filter(|_| populate)
    });
/// How many times as fast as with one thread.
pub const OVER_ONE_THREAD: Comparison<Series> =
    Comparison::inverse("mappings_over_one_thread", PER_MAPPING, |cell, cells| {
        let threads = cell.series.method.has_threads();
        other(cell, cells, |series| series.threads = Some(1)).filter(|_| threads)
    });
/// The guest's time with prefetch and population over that with prefetch alone.
pub const OF_PREFETCH: Comparison<Series> =
    Comparison::new("guest_of_prefetch", GUEST_TIME, |cell, cells| {
        let populated = cell.series.method == Method::PrefetchPopulate;
        other(cell, cells, |series| series.method = Method::Prefetch).filter(|_| populated)
    });

/// The cell at the same number of vCPUs whose series differs in what `change` sets; `None` if that is
/// the cell itself.
fn other<'c>(
    cell: &Cell<Series>,
    cells: &'c [Cell<Series>],
    change: impl Fn(&mut Series),
) -> Option<&'c Cell<Series>> {
    let mut series = cell.series;
    change(&mut series);
    let mut cells = cells.iter().filter(|_| series != cell.series);
    cells.find(|other| other.vcpus == cell.vcpus && other.series == series)
}

/// The same without a population. With a pager memory itself has to come first: that is no comparison
/// of populations.
fn none<'c>(cell: &'c Cell<Series>, cells: &'c [Cell<Series>]) -> Option<&'c Cell<Series>> {
    let without = |series: &mut Series| {
        series.method = Method::None;
        series.threads = None;
    };
    other(cell, cells, without).filter(|_| !cell.series.method.is_paged())
}

impl Shown for Plan {
    const SERIES: &'static str = "series";
    const READING: &'static str = "\
        After a restore or a migration the host has a \
        virtual machine's memory, and the stage-2 tables are empty: each first access of a \
        vCPU to a page is an exit. With <b>none</b> the vCPUs take all of these exits. With \
        <b>populate</b> threads of the host fill the tables beforehand, with <b>pre-fault</b> idle \
        vCPUs do, and with <b>one-reader</b> one vCPU reads everything first. With <b>prefetch</b> \
        memory itself comes in while the vCPUs run, and with <b>prefetch-populate</b> it is mapped \
        as it arrives.";

    fn title(&self) -> String {
        format!(
            "Population of stage-2 tables: {} of {}, written to by all vCPUs",
            self.memory,
            list(&self.backings).replace(',', ", ")
        )
    }

    fn published(&self) -> Option<report::Published> {
        let published = Published::result();
        let axes = [
            ("vcpus", published.vcpus.into()),
            ("memory_bytes", published.memory_bytes.into()),
            ("pages", published.pages.clone().into()),
        ];
        let faster = Column::new("guest_faster_percent", "%", |_| None);
        let value = f64::from(published.guest_faster_percent);
        let values = [("populate".to_owned(), axes, faster, value)];
        Some(report::Published::new(&published.source, values))
    }

    fn tables(view: &View<'_, Self>) -> Vec<(&'static str, Option<Grid>)> {
        vec![
            ("Results", Some(results(view))),
            (
                "Against letting vCPUs fault, and against each other",
                comparison(view),
            ),
        ]
    }

    fn legend(view: &View<'_, Self>) -> Vec<String> {
        let mut lines = vec![format!(
            "total: until all of memory is written to, population included; guest: without it, from \
             the vCPUs' release. Medians of {} rounds, lowest and highest round. GiB/s: all memory \
             slots, by the time of the population.",
            view.plan().runs
        )];
        if view.cells.iter().any(|cell| is_compared(view, cell)) {
            lines.push(
                "of none: median of the ratios of runs of the same round; below 1, population pays. \
                 over faults: how many times as fast a mapping is made as by vCPUs that fault; over \
                 pre-fault, over 1 thread: as by KVM_PRE_FAULT_MEMORY with as many threads, as by one \
                 thread. of prefetch: the guest's time over that with prefetch that maps nothing."
                    .to_owned(),
            );
            lines.push(format!("published: {}.", Published::result().source));
        }
        lines
    }

    fn notes(view: &View<'_, Self>) -> Vec<String> {
        notes(view)
    }

    fn role(_: &View<'_, Self>, series: Series) -> Role {
        Role::Series(match series.method {
            Method::None => 0,
            Method::PreFault => 1,
            Method::Populate => 2,
            Method::OneReader => 3,
            Method::Prefetch => 4,
            Method::PrefetchPopulate => 5,
        })
    }

    /// What is left of the guest's time.
    fn lead(view: &View<'_, Self>) -> Vec<Vec<Figure>> {
        let most = view.plan().threads.iter().copied().max();
        let cells = view
            .cells
            .iter()
            .filter(|cell| cell.series.method == Method::Populate && cell.series.threads == most);
        let figures = cells.filter_map(|cell| {
            let [total, guest] =
                [&TOTAL_OF_NONE, &GUEST_OF_NONE].map(|ratio| ratio.of(cell, &view.cells));
            Some(Figure {
                role: Self::role(view, cell.series),
                tag: cell.series.to_string(),
                value: times(guest?.paired.median),
                what: format!(
                    "the guest's time, {} with the population, {}",
                    times(total?.paired.median),
                    count(cell.vcpus)
                ),
            })
        });
        vec![figures.collect()]
    }

    /// Backing by backing: what the guest has to wait for, and how fast tables fill.
    fn charts(view: &View<'_, Self>) -> Vec<Chart> {
        let any_rate = view.cells.iter().any(|cell| cell.spread(RATE).is_some());
        let backings = view.plan().backings.iter().copied();
        let charts = backings.flat_map(|backing| {
            let [total, guest] = time_charts(view, backing);
            let rate = any_rate.then(|| rate_chart(view, backing));
            [Some(total), Some(guest), rate]
        });
        charts.flatten().collect()
    }

    /// The first backing's times, with and without the population.
    fn drawing(view: &View<'_, Self>) -> Vec<Chart> {
        let first = view.plan().backings.first();
        first.map_or_else(Vec::new, |&backing| time_charts(view, backing).into())
    }
}

/// Whether a comparison is shown for a cell.
fn is_compared(view: &View<'_, Plan>, cell: &Cell<Series>) -> bool {
    let all = [
        &TOTAL_OF_NONE,
        &OVER_FAULTS,
        &OVER_PRE_FAULT,
        &OVER_ONE_THREAD,
        &OF_PREFETCH,
    ];
    all.iter()
        .any(|comparison| comparison.of(cell, &view.cells).is_some())
}

fn results(view: &View<'_, Plan>) -> Grid {
    let table = Table::of(Plan::SERIES, &view.cells)
        .median("total", TOTAL, ns)
        .extremes("low..high", TOTAL, ns)
        .median("guest", GUEST_TIME, ns)
        .median("population", POPULATION_TIME, ns)
        .median("GiB/s", RATE, figure)
        .median("thousand mappings/s", MAPPING_RATE, figure)
        .median("exits", FAULTS, figure);
    if view.timing() == Timing::Instructions {
        table
            .median("instructions/mapping", PER_MAPPING, figure)
            .grid()
    } else {
        table.grid()
    }
}

fn comparison(view: &View<'_, Plan>) -> Option<Grid> {
    let cells = &view.cells;
    let compared = cells.iter().filter(|cell| is_compared(view, cell));
    let mut grid = Table::of(Plan::SERIES, compared)
        .ratio("total, of none", &TOTAL_OF_NONE, cells)
        .ratio_extremes("low..high", &TOTAL_OF_NONE, cells)
        .ratio("guest, of none", &GUEST_OF_NONE, cells)
        .ratio_extremes("low..high", &GUEST_OF_NONE, cells)
        .ratio("over faults", &OVER_FAULTS, cells)
        .ratio("over pre-fault", &OVER_PRE_FAULT, cells)
        .ratio("over 1 thread", &OVER_ONE_THREAD, cells)
        .ratio("of prefetch", &OF_PREFETCH, cells)
        .ratio_extremes("low..high", &OF_PREFETCH, cells)
        .if_any()?;
    let published = Published::result();
    let mut row = vec![NOTHING.to_owned(); grid.headings.len()];
    row[0] = published.vcpus.to_string();
    row[1] = format!(
        "published: {}, {} pages",
        ByteSize(published.memory_bytes),
        published.pages
    );
    row[4] = format!("about {} % faster", published.guest_faster_percent);
    grid.rows.push(row);
    Some(grid)
}

/// One line for each series of a backing that has the value.
fn lines(
    view: &View<'_, Plan>,
    backing: Backing,
    value: impl Fn(&Cell<Series>) -> Option<Spread>,
    show: fn(f64) -> String,
) -> Vec<Line> {
    let most = view.plan().threads.iter().copied().max();
    let series = view
        .series()
        .into_iter()
        .filter(|one| one.backing == backing);
    let line = |one: Series| {
        let label = match one.threads {
            Some(threads) if view.plan().threads.len() > 1 => format!("{} {threads}", one.method),
            _ => one.method.to_string(),
        };
        let mut line = view.line(one, label, &value, show);
        // The fewer threads, in the same colour.
        line.dashed = one.threads.is_some() && one.threads != most;
        line
    };
    series
        .map(line)
        .filter(|line| !line.points.is_empty())
        .collect()
}

/// The time with and without the population.
fn time_charts(view: &View<'_, Plan>, backing: Backing) -> [Chart; 2] {
    let parts = [
        (
            "Until all memory is written to",
            "population included",
            TOTAL,
        ),
        (
            "The guest's part of it",
            "population not counted",
            GUEST_TIME,
        ),
    ];
    parts.map(|(title, what, column)| {
        let subtitle = format!("{what}; median, lowest and highest run; logarithmic");
        let lines = lines(view, backing, |cell| cell.spread(column), ns);
        let title = format!("{title}: {backing}");
        view.chart([title, subtitle], Axis::Logarithmic, tick_ns, lines)
    })
}

fn rate_chart(view: &View<'_, Plan>, backing: Backing) -> Chart {
    let show = |rate: f64| format!("{} GiB/s", figure(rate));
    let lines = lines(view, backing, |cell| cell.spread(RATE), show);
    let title = format!("How fast tables fill: {backing}");
    let subtitle = "GiB/s; median, lowest and highest run".to_owned();
    view.chart(
        [title, subtitle],
        Axis::FromZero { at_least: 0.0 },
        short,
        lines,
    )
}

/// What a reader must know to read the figures right.
fn notes(view: &View<'_, Plan>) -> Vec<String> {
    let plan = view.plan();
    let has = |method| plan.methods.contains(&method);
    let mut runs = view.cells.iter().flat_map(|cell| &cell.runs);
    let counted = runs.any(|run| run.count(MAPPINGS_AFTER) > 0);
    let most = plan.threads.iter().copied().max().unwrap_or(0);
    let host_cpus = view.report.origin.facts.host_cpus;
    let busiest = plan.most_vcpus().max(most);
    let notes = [
        Some(
            "After every run memory was compared with what it should hold; a difference would have \
             ended the benchmark.",
        ),
        Some(
            "The host has all of memory in its page tables before anything is measured: only stage-2 \
             tables are filled. The guest writes one word to every 4 KiB, whatever the backing.",
        ),
        Some(
            "exits: stage-2 faults by KVM's own count (pf_taken), from the vCPUs' first entry to the \
             end. They include those of the guest's code, tables and logs, a few dozen to a few \
             hundred, unless these were populated as well.",
        ),
        (!counted).then_some(
            "This KVM does not count stage-2 mappings: it has no two-dimensional paging, or is none \
             that runs on a processor's own. Its exits mean something else then.",
        ),
        view.timing().is_lab().then_some(
            "Exits are slow in a software CPU, which flatters population: on hardware expect the \
             order of the series, not the ratios.",
        ),
        plan.backings.iter().any(|&backing| backing != Backing::Shmem).then_some(
            "With huge pages most of the guest's time is its own walk, so that \"over faults\" says \
             little: compare the guest's times.",
        ),
        has(Method::OneReader).then_some(
            "one-reader: vCPU 0 reads one word of every 4 KiB first, which counts as the population; \
             its faults are not among the exits.",
        ),
        plan.methods.iter().any(|method| method.is_paged()).then_some(
            "prefetch: memory is in the page cache only, behind a userfaultfd (minor faults), and one \
             thread brings it in while the vCPUs write; pages that vCPUs reach first come by their own \
             faults, which leave the guest where the kernel has KVM_CAP_ABSENT_MAPPING_FAULT. \
             prefetch-populate: that thread also maps each batch in stage 2. Their exits include those \
             that the pager served.",
        ),
        (has(Method::PreFault) && plan.vcpus.iter().any(|&vcpus| vcpus < most)).then_some(
            "pre-fault: each thread needs an idle vCPU, so there are no more threads than vCPUs.",
        ),
    ];
    let crowded = (busiest > host_cpus).then(|| {
        format!(
            "Up to {busiest} vCPUs or threads share {host_cpus} host CPUs: more of them than that \
             cannot be faster."
        )
    });
    let notes = notes.into_iter().flatten().map(str::to_owned);
    notes.chain(crowded).collect()
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
