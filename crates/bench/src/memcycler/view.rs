//! A result on memory errors as people read it.

use pagetide_memory::{Backing, FailurePolicy};

use super::plan::{Plan, Series};
use super::published::Published;
use crate::benchmark::Benchmark;
use crate::draw::{Axis, Chart, Line, Role};
use crate::model::{Cell, Column, Comparison, Quantity, Run};
use crate::report;
use crate::report::charts::{self, point};
use crate::report::{Figure, Grid, NOTHING, Shown, Table, View, count};
use crate::stats::Spread;
use crate::units::{ByteSize, decimal, figure, float, whole};

/// Errors that were made.
pub const ERRORS: Quantity = Quantity::new("errors", "errors", "errors");
/// Those of them that the kernel could not handle when they were made: it could not split the huge page,
/// because a lookup held a reference, or the page had further users.
pub const UNHANDLED: Quantity = Quantity::new("errors_unhandled", "errors", "unhandled");
/// Errors that could not be made, because an earlier one had taken the memory already.
pub const IN_LOST_MEMORY: Quantity =
    Quantity::new("errors_in_lost_memory", "errors", "in lost memory");
/// The time that was measured.
pub const ELAPSED: Quantity = Quantity::new("elapsed_ns", "ns", "measured");
/// 64-bit words that all vCPUs read, compared and wrote in that time.
pub const WORDS: Quantity = Quantity::new("words", "words", "words");
/// The rate of each second of it.
pub const EACH_SECOND: Quantity =
    Quantity::new("seconds_words_per_us", "words/µs", "each second").each_second();
/// Stage-2 mappings of 4K, 2M and 1G before the first error, by KVM's count: those of the guest's code,
/// tables and data.
pub const BEFORE: [Quantity; 3] = [
    Quantity::new("before.mappings_4k", "mappings", "before, 4K"),
    Quantity::new("before.mappings_2m", "mappings", "before, 2M"),
    Quantity::new("before.mappings_1g", "mappings", "before, 1G"),
];
/// Those at the end.
pub const AFTER: [Quantity; 3] = [
    Quantity::new("after.mappings_4k", "mappings", "after, 4K"),
    Quantity::new("after.mappings_2m", "mappings", "after, 2M"),
    Quantity::new("after.mappings_1g", "mappings", "after, 1G"),
];
/// Bytes that vCPUs could not use any more.
pub const UNUSABLE: Quantity = Quantity::new("unusable_bytes", "bytes", "unusable");
/// Bytes that the kernel counts as corrupted because of this run's errors.
pub const CORRUPTED: Quantity = Quantity::new("corrupted_bytes", "bytes", "corrupted");
/// What ended the guest, if something did.
pub const DIED_OF: Quantity = Quantity::new("died_of", "event", "died of");

/// Words per microsecond; `None` if the guest did not survive.
pub const RATE: Column = Column::new("rate_words_per_us", "words/µs", |run| {
    let elapsed = run
        .get(ELAPSED)
        .filter(|ns| *ns > 0.0 && run.text(DIED_OF).is_none())?;
    Some(run.get(WORDS)? / elapsed * 1e3)
});
/// Bytes lost: those that vCPUs could not use any more, or those that the kernel counts as corrupted, if
/// these are more. A simulated error in memory that stays mapped can still be read, but is lost all the
/// same.
pub const LOST: Column = Column::new("lost_bytes", "bytes lost", |run| {
    Some(run.get(UNUSABLE)?.max(run.get(CORRUPTED)?))
});

/// The rate over that of the same backing and policy without errors: below 1, errors cost speed.
pub const RATE_OVER_BASELINE: Comparison<Series> =
    Comparison::new("rate_over_baseline", RATE, |cell, cells| {
        let baseline = cell.series.baseline();
        let mut cells = cells.iter().filter(|_| baseline != cell.series);
        cells.find(|other| other.vcpus == cell.vcpus && other.series == baseline)
    });

/// The colour of a policy.
fn role(policy: FailurePolicy) -> Role {
    Role::Series(match policy {
        FailurePolicy::KernelDefault => 1,
        FailurePolicy::Keep => 2,
    })
}

impl Shown for Plan {
    const SERIES: &'static str = "series";
    const READING: &'static str = "\
        Every vCPU cycles through its part of memory: it reads a word, compares it and writes the next \
        number. Meanwhile some of the memory's 2 MiB pieces get an uncorrected error each, of \
        4 KiB. With <b>default</b> the kernel takes the whole page of a hugetlb pool, or splits a \
        transparent huge page. With <b>keep</b> (MFD_MF_KEEP_UE_MAPPED) it takes the 4 KiB and leaves \
        the rest as it is, mapped huge.";

    fn title(&self) -> String {
        format!(
            "Memory errors under a running guest: {} cycled through for {} s",
            self.memory, self.seconds
        )
    }

    fn published(&self) -> Option<report::Published> {
        let published = Published::result();
        let loss = Column::new("loss_percent", "%", |_| None);
        let values = published.rates.iter().flat_map(|rate| {
            [(RATE, rate.words_per_us), (loss, rate.loss_percent)].map(|(column, value)| {
                let axes = [
                    ("vcpus", published.vcpus.into()),
                    ("memory_bytes", published.memory_bytes.into()),
                    ("poison_percent", rate.poison_percent.into()),
                ];
                ("thp, default".to_owned(), axes, column, value)
            })
        });
        Some(report::Published::new(&published.source, values))
    }

    fn tables(view: &View<'_, Self>) -> Vec<(&'static str, Option<Grid>)> {
        vec![
            ("Results", Some(results(view))),
            ("What the kernel leaves", Some(left(view))),
        ]
    }

    fn legend(view: &View<'_, Self>) -> Vec<String> {
        vec![
            format!(
                "hit: the memory's 2 MiB pieces that errors were for. words/µs: 64-bit words read, \
                 compared and written per microsecond, all vCPUs together, after the errors; median of \
                 {} rounds, lowest and highest round. change: against the same without errors, by \
                 round. lost: the bytes that vCPUs could not use any more or that the kernel counts as \
                 corrupted, if these are more.",
                view.plan().runs
            ),
            "mappings: stage-2 mappings of 4K/2M/1G by KVM's count, those of the guest's code and \
             tables included; the last round's. unusable: bytes that vCPUs could not use any more. \
             corrupted: growth of HardwareCorrupted in /proc/meminfo."
                .to_owned(),
            format!("published: {}.", Published::result().source),
        ]
    }

    fn notes(view: &View<'_, Self>) -> Vec<String> {
        notes(view)
    }

    fn role(_: &View<'_, Self>, series: Series) -> Role {
        role(series.policy)
    }

    /// What the largest share of memory costs.
    fn lead(view: &View<'_, Self>) -> Vec<Vec<Figure>> {
        let most = view.plan().poison_percent.iter().copied().max();
        let hit = view.cells.iter().filter(|cell| {
            cell.series.poison_percent > 0 && Some(cell.series.poison_percent) == most
        });
        let figures = hit.filter_map(|cell| {
            let change = change(view, cell).unwrap_or_else(|| NOTHING.to_owned());
            Some(Figure {
                role: role(cell.series.policy),
                tag: cell.series.to_string(),
                value: bytes(cell.spread(LOST)?.median),
                what: format!("lost, and {change} of the rate, {}", count(cell.vcpus)),
            })
        });
        vec![figures.collect()]
    }

    /// By number of vCPUs and backing: the rate and the memory that errors cost.
    fn charts(view: &View<'_, Self>) -> Vec<Chart> {
        let plan = view.plan();
        let places = plan
            .vcpus
            .iter()
            .flat_map(|&vcpus| plan.backings.iter().map(move |&backing| (vcpus, backing)));
        places.flat_map(|place| charts_at(view, place)).collect()
    }

    /// Those of the most vCPUs and the first backing.
    fn drawing(view: &View<'_, Self>) -> Vec<Chart> {
        let plan = view.plan();
        let first = plan.backings.first();
        first.map_or_else(Vec::new, |&backing| {
            charts_at(view, (plan.most_vcpus(), backing)).into()
        })
    }
}

fn bytes(bytes: f64) -> String {
    ByteSize(whole(bytes)).about()
}

fn results(view: &View<'_, Plan>) -> Grid {
    let (plan, published) = (view.plan(), Published::result());
    let mut grid = Table::of(Plan::SERIES, &view.cells)
        .column("hit %", |cell| {
            let errors = plan.errors(cell.series.poison_percent);
            decimal(float(errors) / float(plan.pieces().max(1)) * 100.0, 1)
        })
        .median("words/µs", RATE, figure)
        .extremes("low..high", RATE, figure)
        .maybe("change", |cell| change(view, cell))
        .maybe("low..high", |cell| {
            let rate = RATE_OVER_BASELINE.of(cell, &view.cells)?.paired;
            Some(format!("{}..{}", signed(rate.min), signed(rate.max)))
        })
        .maybe("published", |cell| {
            published_change(&published, cell.series)
        })
        .median("lost", LOST, bytes)
        .column("guest", |cell| guest(cell))
        .grid();
    for rate in &published.rates {
        let mut row = vec![NOTHING.to_owned(); grid.headings.len()];
        row[0] = published.vcpus.to_string();
        row[1] = format!("published: thp, default, {} %", rate.poison_percent);
        row[2] = rate.poison_percent.to_string();
        row[3] = figure(rate.words_per_us);
        if rate.poison_percent > 0 {
            row[5] = format!("-{:.2} %", rate.loss_percent);
        }
        grid.rows.push(row);
    }
    grid
}

/// Mappings and bytes, of the last round.
fn left(view: &View<'_, Plan>) -> Grid {
    let rows = view
        .cells
        .iter()
        .filter_map(|cell| Some((cell.vcpus, cell.series.to_string(), cell.runs.last()?)));
    let about = |run: &Run, of| ByteSize(run.count(of)).about();
    Table::by_name(Plan::SERIES, rows)
        .column("errors", |run| run.count(ERRORS).to_string())
        .column("mappings before, 4K/2M/1G", |run| sizes(run, BEFORE))
        .column("after", |run| sizes(run, AFTER))
        .column("unusable", |run| about(run, UNUSABLE))
        .column("corrupted", |run| about(run, CORRUPTED))
        .grid()
}

/// A ratio as what it changes: `-5.06 %`.
fn signed(ratio: f64) -> String {
    let percent = (ratio - 1.0) * 100.0;
    // No "-0.00".
    let percent = if percent.abs() < 0.005 { 0.0 } else { percent };
    format!("{percent:+.2} %")
}

fn change(view: &View<'_, Plan>, cell: &Cell<Series>) -> Option<String> {
    Some(signed(
        RATE_OVER_BASELINE.of(cell, &view.cells)?.paired.median,
    ))
}

/// The published change that belongs beside ours: theirs is of transparent huge pages that were split.
fn published_change(published: &Published, series: Series) -> Option<String> {
    let alike = series.backing == Backing::Thp && series.policy == FailurePolicy::KernelDefault;
    let rate = published.at(series.poison_percent);
    let rate = rate.filter(|rate| alike && rate.poison_percent > 0)?;
    Some(format!("-{:.2} %", rate.loss_percent))
}

fn guest(cell: &Cell<Series>) -> String {
    let died = cell.runs.iter().filter(|run| run.text(DIED_OF).is_some());
    match died.count() {
        // Its vCPUs go on, and have nothing to do.
        0 if cell.runs.iter().all(|run| run.count(WORDS) == 0) => "has no memory left".to_owned(),
        0 => "survived".to_owned(),
        died => format!("died in {died} of {}", cell.runs.len()),
    }
}

fn sizes(run: &Run, sizes: [Quantity; 3]) -> String {
    let shown = sizes.map(|size| match run.count(size) {
        count if count < 100 => count.to_string(),
        count => figure(float(count)),
    });
    shown.join("/")
}

/// The shares of memory that were hit, ascending.
fn percent(plan: &Plan) -> Vec<u32> {
    let mut percent = plan.poison_percent.clone();
    percent.retain(|percent| *percent > 0);
    percent.sort_unstable();
    percent
}

/// The rate and the memory that errors cost, over the shares of memory that were hit.
fn charts_at(view: &View<'_, Plan>, (vcpus, backing): (u32, Backing)) -> [Chart; 2] {
    let places = percent(view.plan());
    let lines = |value: &dyn Fn(&Cell<Series>) -> Option<Spread>, show: fn(f64) -> String| {
        let policies = view.plan().policies.iter();
        let line = |&policy: &FailurePolicy| {
            let points = places
                .iter()
                .enumerate()
                .filter_map(|(place, &poison_percent)| {
                    let series = Series {
                        backing,
                        policy,
                        poison_percent,
                    };
                    let spread = value(view.cell(vcpus, series)?)?;
                    Some(point(
                        place,
                        &format!("{series}, {vcpus} vCPUs"),
                        &spread,
                        show,
                    ))
                });
            Line {
                label: policy.to_string(),
                role: role(policy),
                dashed: false,
                points: points.collect(),
            }
        };
        policies.map(line).collect::<Vec<_>>()
    };
    let chart = |what: &str, subtitle: &str, scale, format, lines| Chart {
        axis: "percent of the memory's 2 MiB pieces hit",
        places: places.clone(),
        ..view.chart(
            [
                format!("{what} that errors cost: {backing}, {vcpus} vCPUs"),
                subtitle.to_owned(),
            ],
            scale,
            format,
            lines,
        )
    };
    let show: fn(f64) -> String = |percent| format!("{} %", decimal(percent, 2));
    let loss = |cell: &Cell<Series>| {
        let rate = RATE_OVER_BASELINE.of(cell, &view.cells)?.paired;
        // Speed that errors gain is noise, and would be below the axis.
        let loss = |ratio: f64| ((1.0 - ratio) * 100.0).max(0.0);
        Spread::of(&[rate.min, rate.median, rate.max].map(loss))
    };
    let mut losses = lines(&loss, show);
    if backing == Backing::Thp {
        let published = Published::result();
        let figures = places.iter().enumerate().filter_map(|(place, &percent)| {
            let name = format!("published, {percent} %");
            Some((place, name, published.at(percent)?.loss_percent))
        });
        losses.push(charts::published(
            "published default",
            Role::Muted,
            figures,
            show,
        ));
    }
    let lost = |cell: &Cell<Series>| cell.spread(LOST).filter(|lost| lost.min > 0.0);
    let lost = lines(&lost, bytes);
    [
        chart(
            "Speed",
            "percent of the rate without errors; median of the rounds, lowest and highest",
            Axis::FromZero { at_least: 1.0 },
            show,
            losses,
        ),
        chart(
            "Memory",
            "lost, as measured; median, lowest and highest run; logarithmic",
            Axis::Logarithmic,
            bytes,
            lost,
        ),
    ]
}

/// What a reader must know to read the figures right.
fn notes(view: &View<'_, Plan>) -> Vec<String> {
    let plan = view.plan();
    let runs = || view.cells.iter().flat_map(|cell| &cell.runs);
    let unhandled: u64 = runs().map(|run| run.count(UNHANDLED)).sum();
    let takes_huge_pages = plan.policies.contains(&FailurePolicy::KernelDefault)
        && plan.backings.iter().any(|backing| backing.is_hugetlb());
    let (busiest, host_cpus) = (plan.most_vcpus(), view.report.origin.facts.host_cpus);
    let notes = [
        Some(
            "Every word that a vCPU read was compared with what it had written there, and after every \
             run all of memory but what was lost; a difference would have ended the benchmark."
                .to_owned(),
        ),
        Some(
            "Errors are simulated (MADV_HWPOISON) while the guest runs: the page's data can still be \
             read where the kernel leaves it mapped. A real error would be a machine check at each \
             touch."
                .to_owned(),
        ),
        Some(
            "survived: all vCPUs went on in the memory that was left. This guest has nothing but test \
             data in the memory that is hit; an operating system may lose data that it needs."
                .to_owned(),
        ),
        takes_huge_pages.then(|| {
            "hugetlb by default: vCPUs do not cycle through what they have lost, so that their rate \
             does not show the loss; the bytes do."
                .to_owned()
        }),
        (unhandled > 0).then(|| {
            format!(
                "{unhandled} of the errors the kernel could not handle when they were made: a huge page \
                 in use could not be split, or the page had further users. It counts as corrupted, and \
                 processes that have it mapped may go on using it."
            )
        }),
        runs().any(|run| run.count(IN_LOST_MEMORY) > 0).then(|| {
            "Where an earlier error had taken the whole huge page, further errors in it could not be \
             made: errors counts those that were."
                .to_owned()
        }),
        plan.backings.contains(&Backing::Thp).then(|| {
            "thp by default: the kernel splits the huge page and takes 4 KiB; what is left is mapped \
             in pieces of 4 KiB, as in the published experiment."
                .to_owned()
        }),
        view.timing().is_lab().then(|| {
            "What stage-2 mappings of 4 KiB cost on hardware is misses of the TLB and longer page walks. \
             A software CPU has a TLB of 4 KiB entries whatever the mapping, and its walks are no \
             instructions: here the loss of speed does not show, only the mappings that cause it."
                .to_owned()
        }),
        (busiest > host_cpus)
            .then(|| format!("Up to {busiest} vCPUs share {host_cpus} host CPUs.")),
    ];
    notes.into_iter().flatten().collect()
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
