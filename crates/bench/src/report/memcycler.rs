//! A result on memory errors as people read it.

use pagetide_memory::{Backing, FailurePolicy};

use super::chart::{self, DrawError, Role};
use super::document::{Common, Shown};
use super::grid::{Grid, NOTHING, Table, extremes};
use super::html::{Figure, count};
use crate::memcycler::{Mappings, MemcyclerReport, Plan, Point, RunRecord};
use crate::units::{ByteSize, decimal, figure, float, latency, whole};

impl Shown for MemcyclerReport {
    const NAME: &'static str = "memcycler";
    const READING: &'static str = "\
        Every vCPU cycles through its part of memory: it reads a word, compares it and writes the next \
        number. While it does, some of the memory's 2 MiB pieces get an uncorrected error each, of \
        4 KiB. With <b>default</b> the kernel takes the whole page of a hugetlb pool, or splits a \
        transparent huge page. With <b>keep</b> (MFD_MF_KEEP_UE_MAPPED) it takes the 4 KiB and leaves \
        the rest as it is, mapped huge.";
    type Plan = Plan;

    fn common(&self) -> Common<'_, Plan> {
        Common {
            plan: &self.plan,
            origin: &self.origin,
            notes: &self.notes,
        }
    }

    fn title(&self) -> String {
        format!(
            "Memory errors under a running guest: {} cycled through for {} s",
            self.plan.memory, self.plan.seconds
        )
    }

    fn tables(&self) -> Vec<(&'static str, Option<Grid>)> {
        vec![
            ("Results", Some(results(self))),
            ("What the kernel leaves", Some(left(self))),
        ]
    }

    fn every_run(&self) -> Grid {
        let rows = self.points.iter().flat_map(|point| {
            let runs = point.runs.iter();
            runs.map(|run| (point.vcpus, point.series.to_string(), run))
        });
        Table::by_name("series", rows)
            .column("round", |run| run.round.to_string())
            .column("errors", |run| run.errors.to_string())
            .column("unhandled", |run| run.errors_unhandled.to_string())
            .column("in lost memory", |run| {
                run.errors_in_lost_memory.to_string()
            })
            .column("measured", |run| latency(run.elapsed_ns))
            .maybe("words/µs", |run| run.rate_words_per_us().map(figure))
            .column("each second", |run| {
                let rates = run.seconds_words_per_us.iter();
                rates
                    .map(|rate| figure(*rate))
                    .collect::<Vec<_>>()
                    .join(" ")
            })
            .column("before, 4K/2M/1G", |run| sizes(&run.before))
            .column("after", |run| sizes(&run.after))
            .column("unusable", |run| ByteSize(run.unusable_bytes).about())
            .column("corrupted", |run| ByteSize(run.corrupted_bytes).about())
            .maybe("died of", |run| run.died_of.clone())
            .grid()
    }

    fn legend(&self) -> Vec<String> {
        vec![
            format!(
                "hit: the memory's 2 MiB pieces that errors were for. words/µs: 64-bit words read, compared and written per microsecond, all vCPUs \
                 together, after the errors; median of {} rounds, lowest and highest round. change: \
                 against the same without errors, by round. lost: what vCPUs could not use any more \
                 or what the kernel counts as corrupted, if that is more.",
                self.plan.runs
            ),
            "mappings: second-stage mappings of 4K/2M/1G by KVM's count, those of the guest's code \
             and tables included; the last round's. unusable: what vCPUs could not use any more. \
             corrupted: growth of HardwareCorrupted in /proc/meminfo."
                .to_owned(),
            format!("published: {}.", self.published.source),
        ]
    }

    fn role(&self, name: &str) -> Option<Role> {
        let policy = name.split(", ").nth(1)?.parse::<FailurePolicy>().ok()?;
        Some(chart::memcycler::role(policy))
    }

    /// What the largest share of memory costs.
    fn lead(&self) -> Vec<Vec<Figure>> {
        let most = self.plan.poison_percent.iter().copied().max();
        let hit = self.points.iter().filter(|point| {
            point.series.poison_percent > 0 && Some(point.series.poison_percent) == most
        });
        let figures = hit.map(|point| Figure {
            role: chart::memcycler::role(point.series.policy),
            tag: point.series.to_string(),
            value: lost(&point),
            what: format!(
                "lost, and {} of the rate, {}",
                change(self, point).unwrap_or_else(|| NOTHING.to_owned()),
                count(point.vcpus)
            ),
        });
        vec![figures.collect()]
    }

    fn charts(&self) -> Result<Vec<String>, DrawError> {
        chart::memcycler::all(self)
    }

    fn drawing(&self) -> Result<String, DrawError> {
        chart::memcycler::standalone(self)
    }
}

fn results(report: &MemcyclerReport) -> Grid {
    let rows = report.points.iter();
    let rows = rows.map(|point| (point.vcpus, point.series.to_string(), point));
    let mut grid = Table::by_name("series", rows)
        .column("hit %", |point| decimal(point.hit_percent, 1))
        .maybe("words/µs", |point| {
            point.rate_words_per_us.map(|rate| figure(rate.median))
        })
        .maybe("low..high", |point| {
            point.rate_words_per_us.as_ref().map(extremes)
        })
        .maybe("change", |point| change(report, point))
        .maybe("low..high", |point| {
            let rate = report.ratio(point.vcpus, point.series)?.rate.paired;
            Some(format!("{}..{}", signed(rate.min), signed(rate.max)))
        })
        .maybe("published", |point| published(report, point))
        .column("lost", lost)
        .column("guest", guest)
        .grid();
    let published = &report.published;
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
fn left(report: &MemcyclerReport) -> Grid {
    let rows = report.points.iter().filter_map(|point| {
        let run: &RunRecord = point.runs.last()?;
        Some((point.vcpus, point.series.to_string(), run))
    });
    Table::by_name("series", rows)
        .column("errors", |run| run.errors.to_string())
        .column("mappings before, 4K/2M/1G", |run| sizes(&run.before))
        .column("after", |run| sizes(&run.after))
        .column("unusable", |run| ByteSize(run.unusable_bytes).about())
        .column("corrupted", |run| ByteSize(run.corrupted_bytes).about())
        .grid()
}

/// A ratio as what it changes: `-5.06 %`.
fn signed(ratio: f64) -> String {
    let percent = (ratio - 1.0) * 100.0;
    // No "-0.00".
    let percent = if percent.abs() < 0.005 { 0.0 } else { percent };
    format!("{percent:+.2} %")
}

fn change(report: &MemcyclerReport, point: &Point) -> Option<String> {
    let ratio = report.ratio(point.vcpus, point.series)?;
    Some(signed(ratio.rate.paired.median))
}

/// The published change that belongs beside ours: theirs is of transparent huge pages that were split.
fn published(report: &MemcyclerReport, point: &Point) -> Option<String> {
    let series = point.series;
    let alike = series.backing == Backing::Thp && series.policy == FailurePolicy::KernelDefault;
    let rate = report.published.at(series.poison_percent);
    let rate = rate.filter(|rate| alike && rate.poison_percent > 0)?;
    Some(format!("-{:.2} %", rate.loss_percent))
}

fn lost(point: &&Point) -> String {
    ByteSize(whole(point.lost_bytes.median)).about()
}

fn guest(point: &&Point) -> String {
    let died = point.runs.iter().filter(|run| run.died_of.is_some());
    let working = |run: &RunRecord| run.words > 0;
    match died.count() {
        // Its vCPUs go on, and have nothing to do.
        0 if !point.runs.iter().any(working) => "has no memory left".to_owned(),
        0 => "survived".to_owned(),
        died => format!("died in {died} of {}", point.runs.len()),
    }
}

fn sizes(mappings: &Mappings) -> String {
    let Mappings {
        mappings_4k,
        mappings_2m,
        mappings_1g,
    } = *mappings;
    let sizes = [mappings_4k, mappings_2m, mappings_1g];
    sizes.map(figure_of).join("/")
}

fn figure_of(count: u64) -> String {
    match count {
        0 => "0".to_owned(),
        count if count < 100 => count.to_string(),
        count => figure(float(count)),
    }
}
