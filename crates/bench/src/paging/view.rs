//! A paging result as people read it.

use super::plan::{Access, Delivery, Plan, Series, Uffds};
use super::published::{Published, PublishedRate};
use crate::benchmark::Benchmark;
use crate::draw::{Axis, Chart, Kind, Line, Point, Role, short};
use crate::model::{Cell, Column, Comparison, Quantity, Run};
use crate::report;
use crate::report::charts::{self, tick_ns};
use crate::report::{Figure, Grid, NOTHING, Shown, Table, View, count, times};
use crate::stats::Spread;
use crate::timing::Timing;
use crate::units::{ByteSize, decimal, figure, float, latency};

/// From the vCPUs' release to the last one's end.
pub const ELAPSED: Quantity = Quantity::new("elapsed_ns", "ns", "elapsed");
/// Pages made present (for `none`: touched).
pub const PAGES: Quantity = Quantity::new("pages", "pages", "pages");
/// Faults that left the guest through KVM_RUN and were resolved by the vCPU's own thread.
pub const EXITS: Quantity = Quantity::new("exits", "faults", "exits");
/// Faults that came as messages of a userfaultfd and were resolved by a reader thread.
pub const MESSAGES: Quantity = Quantity::new("messages", "faults", "messages");
/// Latencies of the touches that faulted (for `none`: of all), as the guest saw them; none where nobody
/// knows which ones faulted.
pub const LATENCY: Quantity = Quantity::new("latency_ns", "ns", "latency");

/// Thousand pages per second, all vCPUs together.
pub const RATE: Column = Column::new("rate_kpages_per_s", "thousand pages/s", |run| {
    // Pages per nanosecond times 1e9, divided by a thousand.
    Some(run.get(PAGES)? / run.get(ELAPSED)? * 1e6)
});
/// The same divided by the number of vCPUs.
pub const RATE_PER_VCPU: Column = Column::new(
    "rate_per_vcpu_kpages_per_s",
    "thousand pages/s per vCPU",
    |run: &Run| Some((RATE.value)(run)? / f64::from(run.vcpus)),
);
/// Executed instructions per page made present.
pub const INSTRUCTIONS: Column = Column {
    timing: Some(Timing::Instructions),
    ..Column::new("instructions_per_page", "instructions/page", |run| {
        Some(run.get(ELAPSED)? / run.get(PAGES)?)
    })
};

/// Rate of exits over rate of userfaultfd: above 1, exits are faster.
pub const RATE_OVER_UFFD: Comparison<Series> = Comparison::new("rate_over_uffd", RATE, uffd);
/// Instructions of exits over those of userfaultfd: below 1, exits are cheaper.
pub const INSTRUCTIONS_OVER_UFFD: Comparison<Series> =
    Comparison::new("instructions_over_uffd", INSTRUCTIONS, uffd);

/// What exits are compared with.
fn uffd<'c>(cell: &'c Cell<Series>, cells: &'c [Cell<Series>]) -> Option<&'c Cell<Series>> {
    let alike = |other: &&Cell<Series>| {
        other.vcpus == cell.vcpus && other.series.delivery == Delivery::Uffd
    };
    let uffd = cells.iter().find(alike)?;
    (cell.series.delivery == Delivery::Exit).then_some(uffd)
}

/// The last colour for a fault-around size; further sizes take it as well.
const LAST_AROUND: usize = 6;

impl Shown for Plan {
    const SERIES: &'static str = "delivery";
    const READING: &'static str = "\
        A virtual machine starts with memory that is not present yet. \
        Each vCPU touches its pages one by one; each first touch is a fault that a thread must \
        resolve. With <b>uffd</b> the fault becomes a message in a userfaultfd, the vCPU sleeps \
        in the kernel, and a reader thread makes the page present and wakes the vCPU. With <b>exit</b> \
        the vCPU leaves KVM_RUN and its own thread makes the page present: there is no queue, no lock \
        that all vCPUs share, and no thread to wake. <b>none</b> is the floor: the host has the page, \
        and only the stage-2 tables are filled.";

    fn title(&self) -> String {
        let switches = [
            (self.overlap, ", all vCPUs over all of memory"),
            (self.pre_fault, ", exits pre-fault"),
            (self.populate, ", exits with and without population"),
            (self.pin, ", vCPUs pinned"),
        ];
        let switches = switches.map(|(on, words)| if on { words } else { "" });
        format!(
            "Demand paging: {} per vCPU, {} {}, {} {}{}",
            self.per_vcpu,
            self.backing,
            self.mode.to_string().to_uppercase(),
            self.order,
            match self.access {
                Access::Write => "writes",
                Access::Read => "reads",
            },
            switches.concat(),
        )
    }

    fn published(&self) -> Option<report::Published> {
        let published = Published::beside(self)?;
        let column = if published.per_vcpu {
            RATE_PER_VCPU
        } else {
            RATE
        };
        let values = published.rates.iter().flat_map(|rate| {
            let of = |delivery: Delivery, value: u32| {
                let axes = [
                    ("vcpus", rate.vcpus.into()),
                    ("delivery", delivery.to_string().into()),
                ];
                (delivery.to_string(), axes, column, f64::from(value))
            };
            [
                of(Delivery::Uffd, rate.uffd_kpages_per_s),
                of(Delivery::Exit, rate.exit_kpages_per_s),
            ]
        });
        Some(report::Published::new(&published.source, values))
    }

    fn tables(view: &View<'_, Self>) -> Vec<(&'static str, Option<Grid>)> {
        vec![
            ("Results", Some(results(view))),
            ("Exits over userfaultfd", comparison(view)),
        ]
    }

    fn legend(view: &View<'_, Self>) -> Vec<String> {
        let plan = view.plan();
        let mut lines = vec![format!(
            "rate: thousand pages of {} made present per second, all vCPUs together; median of {} \
             rounds, lowest and highest round, interquartile range. p50, p99, max: latency of a fault \
             as the guest sees it; {NOTHING} where nobody knows which touches faulted.",
            ByteSize(plan.backing.page_size().bytes()),
            plan.runs
        )];
        if !exits_over_uffd(view).is_empty() {
            lines.push(
                "times uffd: median of the ratios of runs of the same round, and the ratio of the two \
                 medians. Rate: above 1, exits are faster. Instructions: below 1, exits are cheaper."
                    .to_owned(),
            );
        }
        if let Some(published) = Published::beside(plan) {
            lines.push(format!(
                "published: thousand pages per second, {}; {}.",
                rate_of(published.per_vcpu),
                published.source
            ));
        }
        lines
    }

    fn notes(view: &View<'_, Self>) -> Vec<String> {
        notes(view)
    }

    /// The colour follows from what the series is, so that it is the same in every chart whatever else
    /// was measured.
    fn role(view: &View<'_, Self>, series: Series) -> Role {
        let place = match series.delivery {
            Delivery::None => 0,
            Delivery::Uffd => 1,
            Delivery::Exit if series.fault_around == 1 => 2,
            Delivery::Exit => {
                let wide = view
                    .series()
                    .into_iter()
                    .filter(|other| other.fault_around > 1);
                3 + wide.take_while(|other| *other != series).count()
            }
        };
        Role::Series(place.min(LAST_AROUND))
    }

    /// Exits over userfaultfd, by vCPUs.
    fn lead(view: &View<'_, Self>) -> Vec<Vec<Figure>> {
        let published = Published::beside(view.plan());
        let list = |series: Series| {
            let cells = exits_over_uffd(view).into_iter();
            let figures = cells
                .filter(|cell| cell.series == series)
                .filter_map(|cell| {
                    let counted = (view.timing() == Timing::Instructions)
                        .then(|| INSTRUCTIONS_OVER_UFFD.of(cell, &view.cells))
                        .flatten();
                    let (ratio, what) = match counted {
                        Some(cost) => (cost, "the instructions of uffd"),
                        None => (RATE_OVER_UFFD.of(cell, &view.cells)?, "the rate of uffd"),
                    };
                    let beside = published_ratio(published.as_ref(), cell)
                        .filter(|_| counted.is_none())
                        .map_or_else(String::new, |ratio| format!(", published {}", times(ratio)));
                    Some(Figure {
                        role: Self::role(view, series),
                        tag: series.to_string(),
                        value: times(ratio.paired.median),
                        what: format!("{what}, {}{beside}", count(cell.vcpus)),
                    })
                });
            figures.collect()
        };
        let exits = view.series().into_iter();
        exits
            .filter(|series| series.delivery == Delivery::Exit)
            .map(list)
            .collect()
    }

    fn charts(view: &View<'_, Self>) -> Vec<Chart> {
        let published = Published::beside(view.plan());
        let rates = [
            Some(rates(view, published.as_ref())),
            published.as_ref().map(published_rates),
        ];
        let counted = instructions(view).into_iter();
        let ratios = ratios(view, published.as_ref());
        // Where a nanosecond is an instruction, the cost is the result and the rate follows from it.
        let charts: Vec<_> = if view.timing() == Timing::Instructions {
            counted
                .chain(ratios)
                .chain(rates.into_iter().flatten())
                .collect()
        } else {
            rates
                .into_iter()
                .flatten()
                .chain(ratios)
                .chain(counted)
                .collect()
        };
        charts.into_iter().chain(latencies(view)).collect()
    }

    /// Rates, ours beside the published ones.
    fn drawing(view: &View<'_, Self>) -> Vec<Chart> {
        let published = Published::beside(view.plan());
        let mut charts = vec![rates(view, published.as_ref())];
        charts.extend(published.as_ref().map(published_rates));
        charts
    }
}

/// The cells that are compared with userfaultfd.
fn exits_over_uffd<'v>(view: &'v View<'_, Plan>) -> Vec<&'v Cell<Series>> {
    let cells = view.cells.iter();
    cells
        .filter(|cell| RATE_OVER_UFFD.of(cell, &view.cells).is_some())
        .collect()
}

/// The main table.
fn results(view: &View<'_, Plan>) -> Grid {
    let published = Published::beside(view.plan());
    let ns = |value: fn(&crate::latency::Latency) -> u64| {
        move |cell: &&Cell<Series>| cell.latency(LATENCY).as_ref().map(value).map(latency)
    };
    let mut table = Table::of(Plan::SERIES, &view.cells)
        .median("rate", RATE, figure)
        .extremes("low..high", RATE, figure)
        .maybe("IQR", |cell| Some(figure(cell.spread(RATE)?.iqr())))
        .median("per vCPU", RATE_PER_VCPU, figure)
        .maybe("p50", ns(|seen| seen.p50_ns))
        .maybe("p99", ns(|seen| seen.p99_ns))
        .maybe("max", ns(|seen| seen.max_ns));
    if view.timing() == Timing::Instructions {
        table = table.median("instructions/page", INSTRUCTIONS, figure);
    }
    if let Some(published) = &published {
        table = table.maybe("published", |cell| {
            let rate = published
                .at(cell.vcpus)
                .filter(|_| cell.series.fault_around == 1)?;
            match cell.series.delivery {
                Delivery::None => None,
                Delivery::Uffd => Some(figure(f64::from(rate.uffd_kpages_per_s))),
                Delivery::Exit => Some(figure(f64::from(rate.exit_kpages_per_s))),
            }
        });
    }
    table.grid()
}

/// Exits over userfaultfd; `None` if they were not both measured.
fn comparison(view: &View<'_, Plan>) -> Option<Grid> {
    let published = Published::beside(view.plan());
    let mut table = Table::of(Plan::SERIES, exits_over_uffd(view))
        .ratio("rate, times uffd", &RATE_OVER_UFFD, &view.cells)
        .ratio_extremes("low..high", &RATE_OVER_UFFD, &view.cells)
        .ratio_of_medians("of medians", &RATE_OVER_UFFD, &view.cells);
    if view.timing() == Timing::Instructions {
        table = table
            .ratio(
                "instructions, times uffd",
                &INSTRUCTIONS_OVER_UFFD,
                &view.cells,
            )
            .ratio_extremes("low..high", &INSTRUCTIONS_OVER_UFFD, &view.cells)
            .ratio_of_medians("of medians", &INSTRUCTIONS_OVER_UFFD, &view.cells);
    }
    if published.is_some() {
        table = table.maybe("published", |cell| {
            published_ratio(published.as_ref(), cell).map(times)
        });
    }
    table.if_any()
}

/// The published ratio that belongs beside one of ours.
fn published_ratio(published: Option<&Published>, cell: &Cell<Series>) -> Option<f64> {
    let published = published.filter(|_| cell.series.fault_around == 1)?;
    published.at(cell.vcpus).map(PublishedRate::ratio)
}

fn rate_of(per_vcpu: bool) -> &'static str {
    if per_vcpu {
        "each vCPU"
    } else {
        "all vCPUs together"
    }
}

fn show_rate(rate: f64) -> String {
    format!("{} thousand pages/s", figure(rate))
}

/// One line for each series.
fn lines(
    view: &View<'_, Plan>,
    value: impl Fn(&Cell<Series>) -> Option<Spread>,
    show: impl Fn(f64) -> String,
) -> Vec<Line> {
    let series = view.series().into_iter();
    series
        .map(|one| view.line(one, one.to_string(), &value, &show))
        .collect()
}

/// Rates over vCPUs, ours.
fn rates(view: &View<'_, Plan>, published: Option<&Published>) -> Chart {
    let per_vcpu = published.is_some_and(|published| published.per_vcpu);
    let column = if per_vcpu { RATE_PER_VCPU } else { RATE };
    let counted = match view.timing() {
        Timing::Instructions => "; 1 ns = 1 instruction",
        _ => "",
    };
    let subtitle = format!(
        "thousand pages/s, {}; median, lowest and highest run{counted}",
        rate_of(per_vcpu)
    );
    let title = "Rate, measured here".to_owned();
    let lines = lines(view, |cell| cell.spread(column), show_rate);
    view.chart(
        [title, subtitle],
        Axis::FromZero { at_least: 0.0 },
        short,
        lines,
    )
}

/// Rates over vCPUs, as published.
fn published_rates(published: &Published) -> Chart {
    let line = |delivery: Delivery, role, value: fn(&PublishedRate) -> u32| {
        let figures = published.rates.iter().enumerate().map(|(place, rate)| {
            let name = format!("published, {delivery}, {} vCPUs", rate.vcpus);
            (place, name, f64::from(value(rate)))
        });
        charts::published(&delivery.to_string(), role, figures, show_rate)
    };
    Chart {
        title: "Rate, published".to_owned(),
        subtitle: format!(
            "thousand pages/s, {}; 256-core x86",
            rate_of(published.per_vcpu)
        ),
        axis: "vCPUs",
        places: published.rates.iter().map(|rate| rate.vcpus).collect(),
        kind: Kind::Lines,
        scale: Axis::FromZero { at_least: 0.0 },
        format: short,
        lines: vec![
            line(Delivery::Uffd, Role::Series(1), |rate| {
                rate.uffd_kpages_per_s
            }),
            line(Delivery::Exit, Role::Series(2), |rate| {
                rate.exit_kpages_per_s
            }),
        ],
    }
}

/// Exit over uffd, ours and published in one picture: a ratio can be compared across machines.
fn ratios(view: &View<'_, Plan>, published: Option<&Published>) -> Option<Chart> {
    let show = |ratio: f64| format!("{}x", figure(ratio));
    let over = |cell: &Cell<Series>| Some(RATE_OVER_UFFD.of(cell, &view.cells)?.paired);
    let mut lines = lines(view, over, show);
    lines.retain(|line| !line.points.is_empty());
    if lines.is_empty() {
        return None;
    }
    lines.extend(published.map(|published| {
        let places = view.plan().vcpus.iter().enumerate();
        let figures = places.filter_map(|(place, &vcpus)| {
            let name = format!("published, {vcpus} vCPUs");
            Some((place, name, published.at(vcpus)?.ratio()))
        });
        charts::published("published exit", Role::Muted, figures, show)
    }));
    let title = "How many times the rate of uffd".to_owned();
    let subtitle = "median of the rounds' own ratios, lowest and highest round; logarithmic";
    let tick = |ratio: f64| format!("{}x", decimal(ratio, 3));
    Some(view.chart([title, subtitle.to_owned()], Axis::Doubling, tick, lines))
}

/// Instructions per page by vCPUs, where they are known.
fn instructions(view: &View<'_, Plan>) -> Option<Chart> {
    if view.timing() != Timing::Instructions {
        return None;
    }
    let show = |cost: f64| format!("{} instructions per page", figure(cost));
    let lines = lines(view, |cell| cell.spread(INSTRUCTIONS), show);
    let title = "Instructions per page made present".to_owned();
    let subtitle = "host kernel, hypervisor, guest and Pagetide together; median and extremes";
    let axis = Axis::FromZero { at_least: 0.0 };
    let chart = view.chart([title, subtitle.to_owned()], axis, short, lines);
    Some(Chart {
        kind: Kind::Bars,
        ..chart
    })
}

/// Latencies of faults by vCPUs: median, 99th percentile, longest.
fn latencies(view: &View<'_, Plan>) -> Option<Chart> {
    let line = |series: Series| {
        let places = view.plan().vcpus.iter().enumerate();
        let points = places.filter_map(|(place, &vcpus)| {
            let seen = view.cell(vcpus, series)?.latency(LATENCY)?;
            let figures = [
                ("median", seen.p50_ns),
                ("99 %", seen.p99_ns),
                ("longest", seen.max_ns),
            ];
            let tell = figures
                .map(|(name, ns)| format!("{series}, {vcpus} vCPUs, {name}: {}", latency(ns)));
            Some(Point {
                place,
                low: float(seen.p50_ns),
                middle: float(seen.p99_ns),
                high: float(seen.max_ns),
                tell: tell.to_vec(),
            })
        });
        Line {
            label: series.to_string(),
            role: Plan::role(view, series),
            dashed: false,
            points: points.collect(),
        }
    };
    let lines: Vec<_> = view.series().into_iter().map(line).collect();
    if lines.iter().all(|line| line.points.is_empty()) {
        return None;
    }
    let title = "Latency of a fault, seen by the guest".to_owned();
    let subtitle = "filled: median; ring: 99th percentile; tick: longest; logarithmic".to_owned();
    let chart = view.chart([title, subtitle], Axis::Logarithmic, tick_ns, lines);
    Some(Chart {
        kind: Kind::Latencies,
        ..chart
    })
}

/// What a reader must know to read the figures right.
fn notes(view: &View<'_, Plan>) -> Vec<String> {
    let plan = view.plan();
    let around = plan.fault_around.iter().any(|&pages| pages > 1);
    let unknown =
        |series: &Series| series.delivery == Delivery::Uffd && !plan.every_touch_faults(*series);
    let host_cpus = view.report.origin.facts.host_cpus;
    let busiest = plan.most_vcpus();
    let readers = match plan.readers {
        None => "as many reader threads as vCPUs (as in the published experiment)".to_owned(),
        Some(1) => "1 reader thread".to_owned(),
        Some(readers) => format!("{readers} reader threads"),
    };
    let uffds = match plan.uffds {
        Uffds::Single => "one userfaultfd for all of memory",
        Uffds::PerVcpu => "one userfaultfd per vCPU",
    };
    let other_readers = plan
        .readers
        .filter(|here| plan.vcpus.iter().any(|vcpus| vcpus != here))
        .filter(|_| Published::beside(plan).is_some());
    let notes = [
        Some(
            "After every run each page's content was compared with what it should be; a difference \
             would have ended the benchmark."
                .to_owned(),
        ),
        plan.deliveries.contains(&Delivery::None).then(|| {
            "none: the host's page tables are filled before the run, so a touch costs the stage-2 \
             fault alone. Its latencies are those of all touches."
                .to_owned()
        }),
        around.then(|| {
            "With fault-around, one exit makes a whole aligned block of pages present. Rates count \
             pages; latencies are those of the touches that left the guest."
                .to_owned()
        }),
        plan.overlap.then(|| {
            "All vCPUs touch all of memory: a page counts once, whichever vCPU faulted on it first."
                .to_owned()
        }),
        plan.series().iter().any(unknown).then(|| {
            "uffd: no latencies, since where one fault may serve several touches nobody outside \
             the guest knows which ones waited."
                .to_owned()
        }),
        plan.pre_fault.then(|| {
            "exit: after each install the vCPU's thread fills the stage-2 tables for the installed \
             pages (--pre-fault), so that the pages around a fault cost no stage-2 fault of their own."
                .to_owned()
        }),
        plan.populate.then(|| {
            "populated: after each install of more than one page the vCPU's thread maps the present \
             pages of the block in the stage-2 tables (KVM_POPULATE_MEMORY, PRESENT_ONLY) before it \
             enters the guest again."
                .to_owned()
        }),
        plan.pin
            .then(|| "Each vCPU's thread is pinned to a host CPU, in turn (--pin).".to_owned()),
        Some(format!("uffd: {uffds} with {readers}.")),
        other_readers.map(|here| {
            format!("published: as many readers as vCPUs; here {here} for any number of vCPUs.")
        }),
        (busiest > host_cpus).then(|| {
            format!(
                "Up to {busiest} vCPUs share {host_cpus} host CPUs, and reader threads share them as \
                 well: totals cannot grow beyond what these do, and the longest latencies are waits \
                 for a CPU."
            )
        }),
        (plan.total_bytes(1) < 16 << 20 && view.timing() != Timing::Function).then(|| {
            format!(
                "{} per vCPU is little; with 16M or more, start-up effects vanish.",
                plan.per_vcpu
            )
        }),
    ];
    notes.into_iter().flatten().collect()
}
