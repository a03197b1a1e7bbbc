//! A result of the pager's benchmark as people read it.

use super::plan::{Cache, Order, Part, Plan, Series, Via, Way};
use crate::draw::{Axis, Chart, Role, short};
use crate::model::{Cell, Column, Comparison, Quantity};
use crate::options::list;
use crate::report;
use crate::report::charts::tick_ns;
use crate::report::{Figure, Grid, Shown, Table, View, count, ns, times};
use crate::stats::RatioOf;
use crate::units::{figure, latency};

/// From the release of the threads that fault (random, around), or from before the pager was started,
/// until everything was touched or installed.
pub const ELAPSED: Quantity = Quantity::new("elapsed_ns", "ns", "time");
/// Pages that were touched, or installed.
pub const PAGES: Quantity = Quantity::new("pages", "pages", "pages");
/// Faults that were read from the userfaultfd.
pub const FAULTS: Quantity = Quantity::new("faults", "faults", "faults");
/// The median time of a touch.
pub const P50: Quantity = Quantity::new("touch_p50_ns", "ns", "p50");
/// The 99th percentile.
pub const P99: Quantity = Quantity::new("touch_p99_ns", "ns", "p99");
/// The 99.9th percentile.
pub const P999: Quantity = Quantity::new("touch_p999_ns", "ns", "p99.9");
/// Times of touches.
pub const LATENCY: Quantity = Quantity::new("touch_ns", "ns", "touch");

/// The time.
pub const TIME: Column = Column::new("elapsed_ns", "ns", |run| run.get(ELAPSED));
/// Thousand pages per second, all threads together.
pub const RATE: Column = Column::new("rate_kpages_per_s", "thousand pages/s", |run| {
    Some(run.get(PAGES)? / run.get(ELAPSED)? * 1e6)
});
/// The median time of a touch.
pub const MEDIAN_LATENCY: Column = Column::new("touch_p50_ns", "ns", |run| run.get(P50));
/// Faults.
pub const FAULT_COUNT: Column = Column::new("faults", "faults", |run| run.get(FAULTS));

/// The median touch over that of the raw loop.
pub const LATENCY_OF_RAW: Comparison<Series> =
    Comparison::new("touch_p50_of_raw", MEDIAN_LATENCY, |cell, cells| {
        under(cell, cells, Way::Raw)
    });
/// The rate over that of the raw loop.
pub const RATE_OVER_RAW: Comparison<Series> =
    Comparison::new("rate_over_raw", RATE, |cell, cells| {
        under(cell, cells, Way::Raw).filter(|_| cell.series.part != Part::Fill)
    });
/// The time over that of the raw loop.
pub const TIME_OF_RAW: Comparison<Series> = Comparison::new("time_of_raw", TIME, |cell, cells| {
    under(cell, cells, Way::Raw).filter(|_| matches!(cell.series.part, Part::Fill | Part::Reader))
});
/// Faults with a replayed working set over those without.
pub const FAULTS_OF_NO_REPLAY: Comparison<Series> =
    Comparison::new("faults_of_no_replay", FAULT_COUNT, no_replay);
/// How many times as fast the workload is with a replayed working set.
pub const SPEED_OVER_NO_REPLAY: Comparison<Series> =
    Comparison::inverse("speed_over_no_replay", TIME, no_replay);
/// The workload's time over that on a private mapping of the file.
pub const TIME_OF_MAP: Comparison<Series> = Comparison::new("time_of_map", TIME, |cell, cells| {
    under(cell, cells, Way::Map)
});

/// The same with another way.
fn under<'c>(
    cell: &'c Cell<Series>,
    cells: &'c [Cell<Series>],
    way: Way,
) -> Option<&'c Cell<Series>> {
    // The server has one reader.
    let readers = match cell.series.part {
        Part::Random => cell.series.readers.or(Some(1)),
        _ => None,
    };
    let series = Series {
        way,
        readers,
        ..cell.series
    };
    let mut others = cells.iter().filter(|_| cell.series.way != way);
    others.find(|other| other.vcpus == cell.vcpus && other.series == series)
}

fn no_replay<'c>(cell: &'c Cell<Series>, cells: &'c [Cell<Series>]) -> Option<&'c Cell<Series>> {
    under(cell, cells, Way::Server).filter(|_| matches!(cell.series.way, Way::Replay | Way::Clone))
}

/// A figure that the project wants.
struct Target {
    what: &'static str,
    /// Whose figure it is.
    series: Series,
    threads: u32,
    value: Wanted,
    /// The most that it may be; for a rate the least.
    limit: f64,
}

enum Wanted {
    AtMost(&'static Comparison<Series>),
    AtLeast(&'static Comparison<Series>),
    /// The median, in seconds.
    Seconds,
    /// The median of the median touch.
    MedianMicroseconds,
}

/// A series of nothing but a part and a way.
const fn of(part: Part, way: Way) -> Series {
    Series {
        part,
        order: None,
        via: None,
        around: None,
        cache: None,
        way,
        readers: None,
    }
}

const RANDOM: Series = Series {
    order: Some(Order::Random),
    readers: Some(1),
    ..of(Part::Random, Way::Engine)
};

const fn around_64(via: Via) -> Series {
    Series {
        via: Some(via),
        around: Some(64),
        ..of(Part::Around, Way::Engine)
    }
}

const fn replay(cache: Cache, way: Way) -> Series {
    Series {
        cache: Some(cache),
        ..of(Part::Replay, way)
    }
}

const TARGETS: [Target; 16] = {
    use Wanted::{AtLeast, AtMost, MedianMicroseconds, Seconds};
    const fn target(
        what: &'static str,
        series: Series,
        threads: u32,
        value: Wanted,
        limit: f64,
    ) -> Target {
        Target {
            what,
            series,
            threads,
            value,
            limit,
        }
    }
    let (copy, more) = (around_64(Via::Copy), around_64(Via::Continue));
    let (warm, cold) = (
        replay(Cache::Warm, Way::Replay),
        replay(Cache::Cold, Way::Replay),
    );
    let (warm_clone, cold_clone) = (
        replay(Cache::Warm, Way::Clone),
        replay(Cache::Cold, Way::Clone),
    );
    [
        target(
            "median touch, of raw",
            RANDOM,
            1,
            AtMost(&LATENCY_OF_RAW),
            1.05,
        ),
        target(
            "rate of 8 threads, over raw",
            RANDOM,
            8,
            AtLeast(&RATE_OVER_RAW),
            0.95,
        ),
        target("rate, over raw", copy, 1, AtLeast(&RATE_OVER_RAW), 0.9),
        target("rate, over raw", more, 1, AtLeast(&RATE_OVER_RAW), 0.9),
        target(
            "time, of raw",
            of(Part::Fill, Way::Engine),
            1,
            AtMost(&TIME_OF_RAW),
            1.15,
        ),
        target(
            "time, of raw",
            of(Part::Fill, Way::Server),
            1,
            AtMost(&TIME_OF_RAW),
            1.15,
        ),
        target(
            "seconds (512M)",
            of(Part::Reader, Way::Engine),
            1,
            Seconds,
            0.35,
        ),
        target(
            "seconds (512M)",
            of(Part::Reader, Way::Server),
            1,
            Seconds,
            0.35,
        ),
        target(
            "faults, of no replay",
            warm,
            1,
            AtMost(&FAULTS_OF_NO_REPLAY),
            0.03,
        ),
        target(
            "speed, over no replay",
            warm,
            1,
            AtLeast(&SPEED_OVER_NO_REPLAY),
            3.0,
        ),
        target(
            "time, of a private mapping",
            warm,
            1,
            AtMost(&TIME_OF_MAP),
            1.5,
        ),
        target(
            "time, of a private mapping",
            cold,
            1,
            AtMost(&TIME_OF_MAP),
            0.7,
        ),
        target(
            "time, of a private mapping",
            warm_clone,
            1,
            AtMost(&TIME_OF_MAP),
            1.1,
        ),
        target(
            "time, of a private mapping",
            cold_clone,
            1,
            AtMost(&TIME_OF_MAP),
            0.7,
        ),
        target(
            "median touch, \u{b5}s",
            of(Part::Image, Way::Server),
            1,
            MedianMicroseconds,
            80.0,
        ),
        target(
            "seconds (512M)",
            of(Part::Unpack, Way::Server),
            1,
            Seconds,
            0.25,
        ),
    ]
};

/// The targets, as far as they were measured.
fn targets(view: &View<'_, Plan>) -> Option<Grid> {
    let rows = TARGETS.iter().filter_map(|target| {
        let cell = view.cell(target.threads, target.series)?;
        let ratio = |comparison: &Comparison<Series>| -> Option<f64> {
            let ratio: RatioOf = comparison.of(cell, &view.cells)?;
            Some(ratio.paired.median)
        };
        let limit = figure(target.limit);
        let (value, wanted, is_met) = match target.value {
            Wanted::AtMost(comparison) => {
                let value = ratio(comparison)?;
                (value, format!("at most {limit}"), value <= target.limit)
            }
            Wanted::AtLeast(comparison) => {
                let value = ratio(comparison)?;
                (value, format!("at least {limit}"), value >= target.limit)
            }
            Wanted::Seconds if view.plan().memory.0 == 512 << 20 => {
                let value = cell.spread(TIME)?.median / 1e9;
                (value, format!("at most {limit}"), value <= target.limit)
            }
            Wanted::Seconds => return None,
            Wanted::MedianMicroseconds => {
                let value = cell.spread(MEDIAN_LATENCY)?.median / 1e3;
                (value, format!("at most {limit}"), value <= target.limit)
            }
        };
        let is_met = if is_met { "yes" } else { "no" };
        let name = format!("{}: {}", target.series, target.what);
        Some((
            target.threads,
            name,
            [figure(value), wanted, is_met.to_owned()],
        ))
    });
    Table::by_name(Plan::SERIES, rows)
        .column("measured", |row| row[0].clone())
        .column("target", |row| row[1].clone())
        .column("met", |row| row[2].clone())
        .if_any()
}

impl Shown for Plan {
    const SERIES: &'static str = "series";
    const READING: &'static str = "\
        A thread that touches a missing page sleeps until somebody has read the message of the \
        userfaultfd and installed the page. <b>raw</b> is the shortest loop that does so, from a mapping \
        of the file: the floor. <b>engine</b> is the pager of this project with the file as its source, \
        <b>server</b> all of <code>pagetide serve</code> in this process. <b>fill</b> is the time to \
        install all of memory, <b>reader</b> that of a thread that reads all of it in random order \
        meanwhile. <b>replay</b> is a workload whose first touches were recorded and are fetched ahead, \
        beside the same without (<b>server</b>), for a clone by the native protocol (<b>clone</b>), and a \
        private mapping of the file (<b>map</b>). \
        <b>image</b> are faults on one page of each chunk of a compressed image, and <b>unpack</b> is the \
        time to install all of it.";

    fn title(&self) -> String {
        let parts = list(&self.parts).replace(',', ", ");
        format!("Demand paging of {} from a file: {parts}", self.memory)
    }

    fn published(&self) -> Option<report::Published> {
        None
    }

    fn tables(view: &View<'_, Self>) -> Vec<(&'static str, Option<Grid>)> {
        vec![
            ("Results", Some(results(view))),
            ("Comparison", comparison(view)),
            ("Targets", targets(view)),
        ]
    }

    fn legend(view: &View<'_, Self>) -> Vec<String> {
        vec![format!(
            "vCPUs: threads that touch memory. Medians of {} rounds, lowest and highest round; touches: \
             all runs together. Ratios: medians of the ratios of runs of the same round.",
            view.plan().runs
        )]
    }

    fn notes(view: &View<'_, Self>) -> Vec<String> {
        let plan = view.plan();
        let has = |part| plan.parts.contains(&part);
        let notes = [
            Some(
                "After every run the touched pages, and after fills all of memory, were compared with the \
                 file; a difference would have ended the benchmark.",
            ),
            (has(Part::Random) || has(Part::Around)).then_some(
                "random, and around with 1 page: at most 64 MiB of memory, each page of which is touched \
                 once, by one of the threads. One thread that faults, and the thread that resolves its \
                 faults, share one CPU: the median touch includes waking both, which costs several \
                 times as much across CPUs.",
            ),
            has(Part::Replay).then_some(
                "replay: 10 000 touches of random pages, each with six passes over the page, from before \
                 the VM connects; no other prefetch. cold: the file was taken out of the page cache. clone: \
                 the memory is a private mapping of the server's memfd, which another clone has filled \
                 (warm) or nobody (cold).",
            ),
            (has(Part::Image) || has(Part::Unpack)).then_some(
                "image, unpack: chunks of 64 KiB, every other one zeroes, the others compressed 3 to 1, the \
                 image in the page cache, a new server for each run. image: one touch of each chunk that \
                 is not zeroes, in random order.",
            ),
        ];
        notes.into_iter().flatten().map(str::to_owned).collect()
    }

    fn role(_: &View<'_, Self>, series: Series) -> Role {
        Role::Series(match series.way {
            Way::Raw => 0,
            Way::Engine => 1,
            Way::Server => 2,
            Way::Replay => 3,
            Way::Map => 4,
            Way::Clone => 5,
        })
    }

    /// The engine against the raw loop, where it is the shortest fault.
    fn lead(view: &View<'_, Self>) -> Vec<Vec<Figure>> {
        let cells = view
            .cells
            .iter()
            .filter(|cell| cell.series.way == Way::Engine);
        let figures = cells.filter_map(|cell| {
            let ratio = LATENCY_OF_RAW.of(cell, &view.cells)?;
            Some(Figure {
                role: Self::role(view, cell.series),
                tag: cell.series.to_string(),
                value: times(ratio.paired.median),
                what: format!("the raw loop's median touch, {}", count(cell.vcpus)),
            })
        });
        vec![figures.collect()]
    }

    fn charts(view: &View<'_, Self>) -> Vec<Chart> {
        type Show = fn(f64) -> String;
        let kpages: Show = |rate| format!("{} thousand pages/s", figure(rate));
        let from_zero = Axis::FromZero { at_least: 0.0 };
        type Panel = (&'static str, &'static [Part], Column, Axis, Show, Show);
        let charts: [Panel; 3] = [
            (
                "The median touch",
                &[Part::Random, Part::Image],
                MEDIAN_LATENCY,
                Axis::Logarithmic,
                tick_ns,
                ns,
            ),
            (
                "Thousand pages a second",
                &[Part::Random, Part::Around],
                RATE,
                from_zero,
                short,
                kpages,
            ),
            (
                "Until everything is there",
                &[Part::Fill, Part::Reader, Part::Replay, Part::Unpack],
                TIME,
                Axis::Logarithmic,
                tick_ns,
                ns,
            ),
        ];
        let charts = charts
            .into_iter()
            .filter_map(|(title, parts, column, axis, tick, show)| {
                let series = view
                    .series()
                    .into_iter()
                    .filter(|one| parts.contains(&one.part));
                let lines: Vec<_> = series
                    .map(|one| view.line(one, one.to_string(), |cell| cell.spread(column), show))
                    .filter(|line| !line.points.is_empty())
                    .collect();
                let titles = [
                    title.to_owned(),
                    "median, lowest and highest run".to_owned(),
                ];
                (!lines.is_empty()).then(|| view.chart(titles, axis, tick, lines))
            });
        charts.collect()
    }

    fn drawing(view: &View<'_, Self>) -> Vec<Chart> {
        Self::charts(view)
    }
}

fn results(view: &View<'_, Plan>) -> Grid {
    Table::of(Plan::SERIES, &view.cells)
        .median("time", TIME, ns)
        .extremes("low..high", TIME, ns)
        .median("thousand pages/s", RATE, figure)
        .median("faults", FAULT_COUNT, figure)
        .maybe("touch p50", |cell| {
            Some(latency(cell.latency(LATENCY)?.p50_ns))
        })
        .maybe("p99", |cell| Some(latency(cell.latency(LATENCY)?.p99_ns)))
        .maybe("p99.9", |cell| {
            Some(latency(cell.latency(LATENCY)?.p999_ns))
        })
        .grid()
}

fn comparison(view: &View<'_, Plan>) -> Option<Grid> {
    let cells = &view.cells;
    let all = [
        &LATENCY_OF_RAW,
        &RATE_OVER_RAW,
        &TIME_OF_RAW,
        &SPEED_OVER_NO_REPLAY,
        &TIME_OF_MAP,
    ];
    let is_compared =
        |cell: &&Cell<Series>| all.iter().any(|ratio| ratio.of(cell, cells).is_some());
    Table::of(Plan::SERIES, cells.iter().filter(is_compared))
        .ratio("p50, of raw", &LATENCY_OF_RAW, cells)
        .ratio_extremes("low..high", &LATENCY_OF_RAW, cells)
        .ratio("rate, over raw", &RATE_OVER_RAW, cells)
        .ratio_extremes("low..high", &RATE_OVER_RAW, cells)
        .ratio("time, of raw", &TIME_OF_RAW, cells)
        .ratio("faults, of no replay", &FAULTS_OF_NO_REPLAY, cells)
        .ratio("speed, over no replay", &SPEED_OVER_NO_REPLAY, cells)
        .ratio("time, of map", &TIME_OF_MAP, cells)
        .if_any()
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
