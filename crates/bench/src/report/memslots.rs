//! A memslot result as people read it.

use std::fmt::Write;

use super::chart::{self, Role};
use super::document::{Document, PageParts};
use super::grid::{Grid, NOTHING, extremes, times};
use super::html::count;
use super::{Report, ReportError};
use crate::memslots::{MemslotsReport, Method, Point, Series};
use crate::stats::Spread;
use crate::units::{figure, float, latency, whole};

/// Appends formatted text; writing to a string cannot fail.
macro_rules! push {
    ($page:expr, $($rest:tt)+) => { let _ = write!($page, $($rest)+); };
}

impl Report for MemslotsReport {
    const NAME: &'static str = "memslots";

    fn table(&self, width: Option<u16>) -> String {
        document(self).terminal(width)
    }

    fn svg(&self) -> Result<String, ReportError> {
        Ok(chart::memslots::standalone(self)?)
    }

    fn html(&self) -> Result<String, ReportError> {
        let parts = PageParts {
            lead: lead(self),
            charts: chart::memslots::all(self)?,
            every_run: every_run(self),
            reading: READING,
            command: self.plan.command(),
            data: "memslots-data",
        };
        document(self).page(&parts, self)
    }
}

const READING: &str = "\
    A virtual machine's vCPUs walk its memory while \
         the memory slots below it change. With <b>list</b> the kernel changes all slots at once and \
         vCPUs run on. With <b>quiesce</b> every vCPU is stopped outside KVM_RUN, slots are deleted \
         and created, and the vCPUs go on. With <b>plain</b> slots are deleted and created while \
         vCPUs run, and a guest that looks in between sees a hole.";

fn document(report: &MemslotsReport) -> Document<'_> {
    let more = [
        ("Quiesce over list", comparison(report)),
        ("A boot", boot(report)),
    ];
    let more = more.into_iter();
    let more = more.filter_map(|(heading, grid)| Some((heading, grid?)));
    Document {
        title: title(report),
        origin: &report.origin,
        runs: report.plan.runs,
        tables: std::iter::once(("Results", results(report)))
            .chain(more)
            .collect(),
        notes: legend(report)
            .iter()
            .chain(&report.notes)
            .cloned()
            .collect(),
        role,
    }
}

/// What was measured, in a line.
fn title(report: &MemslotsReport) -> String {
    format!(
        "Memory slots changed below running vCPUs: {} commits a run, guest: {}",
        report.plan.commits, report.plan.guest
    )
}

/// The colour of a series, by its name: that of its method.
fn role(name: &str) -> Option<Role> {
    if name == Series::Idle.to_string() {
        return Some(chart::memslots::role(None));
    }
    let method = [Method::List, Method::Quiesce, Method::Plain];
    method
        .into_iter()
        .find(|method| name.ends_with(&format!("by {method}")))
        .map(|method| chart::memslots::role(Some(method)))
}

fn spread_ns(spread: &Spread) -> String {
    latency(whole(spread.median))
}

fn ns_extremes(spread: &Spread) -> String {
    format!(
        "{}..{}",
        latency(whole(spread.min)),
        latency(whole(spread.max))
    )
}

fn results(report: &MemslotsReport) -> Grid {
    let rows = report.points.iter().map(|point: &Point| {
        let or_nothing = |text: Option<String>| text.unwrap_or_else(|| NOTHING.to_owned());
        vec![
            point.vcpus.to_string(),
            point.series.to_string(),
            spread_ns(&point.kept_p50_ns),
            ns_extremes(&point.kept_p50_ns),
            latency(point.kept.max_ns),
            or_nothing(point.commit.map(|times| latency(times.p50_ns))),
            or_nothing(point.commit.map(|times| latency(times.p99_ns))),
            or_nothing(point.inside.map(|times| latency(times.p50_ns))),
            or_nothing(point.lost_percent.map(|lost| figure(lost.median))),
            or_nothing(point.holes_per_commit.map(|holes| figure(holes.median))),
        ]
    });
    let headings = [
        "vCPUs",
        "change",
        "kept p50",
        "low..high",
        "kept max",
        "commit p50",
        "commit p99",
        "inside p50",
        "work lost %",
        "holes/commit",
    ];
    Grid {
        headings: headings.map(str::to_owned).to_vec(),
        words: 2,
        rows: rows.collect(),
    }
}

fn comparison(report: &MemslotsReport) -> Option<Grid> {
    let rows: Vec<Vec<String>> = report
        .ratios
        .iter()
        .map(|ratio| {
            vec![
                ratio.vcpus.to_string(),
                ratio.op.to_string(),
                times(ratio.kept_p50.paired.median),
                extremes(&ratio.kept_p50.paired),
                times(ratio.kept_max.paired.median),
                times(ratio.commit_p50.paired.median),
                extremes(&ratio.commit_p50.paired),
            ]
        })
        .collect();
    let headings = [
        "vCPUs",
        "quiesce over list",
        "kept p50",
        "low..high",
        "kept max",
        "commit p50",
        "low..high",
    ];
    (!rows.is_empty()).then(|| Grid {
        headings: headings.map(str::to_owned).to_vec(),
        words: 2,
        rows,
    })
}

/// All commits of a boot, ours beside the published ones.
fn boot(report: &MemslotsReport) -> Option<Grid> {
    let published = report.published.as_ref()?;
    let rows = report.points.iter().filter_map(|point| {
        let time = point.boot_ms?;
        let method = point.series.method()?;
        Some(vec![
            point.vcpus.to_string(),
            point.series.to_string(),
            figure(time.median),
            extremes(&time),
            published
                .at(point.vcpus, method)
                .map_or_else(|| NOTHING.to_owned(), figure),
        ])
    });
    Some(Grid {
        headings: ["vCPUs", "all 86 updates", "ms", "low..high", "published ms"]
            .map(str::to_owned)
            .to_vec(),
        words: 2,
        rows: rows.collect(),
    })
}

fn every_run(report: &MemslotsReport) -> Grid {
    let rows = report.points.iter().flat_map(|point| {
        point.runs.iter().map(|run| {
            vec![
                point.vcpus.to_string(),
                point.series.to_string(),
                run.round.to_string(),
                latency(run.elapsed_ns),
                figure(float(run.steps)),
                latency(run.commit_p50_ns),
                latency(run.kept_p50_ns),
                latency(run.kept_max_ns),
                figure(float(run.holes)),
            ]
        })
    });
    let headings = [
        "vCPUs",
        "change",
        "round",
        "elapsed",
        "steps",
        "commit p50",
        "kept p50",
        "kept max",
        "holes",
    ];
    Grid {
        headings: headings.map(str::to_owned).to_vec(),
        words: 2,
        rows: rows.collect(),
    }
}

/// What the columns mean.
fn legend(report: &MemslotsReport) -> Vec<String> {
    let mut notes = vec![
        format!(
            "kept: the longest time that any vCPU was kept from the guest by a commit, as the guest \
             sees it; p50 over the commits of a run, median of {} rounds, lowest and highest round; \
             max over all commits. Without commits: in stretches of 5 ms; what is seen there is the \
             machine's own.",
            report.plan.runs
        ),
        "commit: from asking until it is done. inside: how long the gate was closed (quiesce), or the \
         time of the ioctls (list, plain)."
            .to_owned(),
        "work lost: steps of the guest, against those in the same time without commits. \
         holes/commit: accesses that left the guest because there was no slot."
            .to_owned(),
    ];
    if !report.ratios.is_empty() {
        notes.push(
            "quiesce over list: median of the ratios of runs of the same round; above 1, the list \
             keeps vCPUs for a shorter time."
                .to_owned(),
        );
    }
    if let Some(published) = &report.published {
        notes.push(format!("published: {}.", published.source));
    }
    notes
}

/// The figures that people look for: how much longer quiesce keeps vCPUs.
fn lead(report: &MemslotsReport) -> String {
    let Some(op) = report.ratios.first().map(|ratio| ratio.op) else {
        return String::new();
    };
    let mut page = String::from("<ul class=\"lead\" style=\"margin-bottom:14px\">\n");
    for ratio in report.ratios.iter().filter(|ratio| ratio.op == op) {
        push!(
            page,
            "<li style=\"--series:var({})\"><span class=\"tag\">{op}</span><b>{}</b><span>as long \
             kept by quiesce as by list, {}</span></li>\n",
            chart::memslots::role(Some(Method::Quiesce)).variable(),
            times(ratio.kept_p50.paired.median),
            count(ratio.vcpus),
        );
    }
    page.push_str("</ul>\n");
    page
}
