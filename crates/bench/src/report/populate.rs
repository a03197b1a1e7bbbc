//! A population result as people read it.

use std::fmt::Write;

use super::chart::{self, Role};
use super::document::{Document, PageParts};
use super::grid::{Grid, NOTHING, extremes, times};
use super::html::count;
use super::{Report, ReportError, escape};
use crate::populate::{Method, Point, PopulateReport};
use crate::stats::{RatioOf, Spread};
use crate::timing::Timing;
use crate::units::{ByteSize, figure, float, latency, whole};

/// Appends formatted text; writing to a string cannot fail.
macro_rules! push {
    ($page:expr, $($rest:tt)+) => { let _ = write!($page, $($rest)+); };
}

impl Report for PopulateReport {
    const NAME: &'static str = "populate";

    fn table(&self, width: Option<u16>) -> String {
        document(self).terminal(width)
    }

    fn svg(&self) -> Result<String, ReportError> {
        Ok(chart::populate::standalone(self)?)
    }

    fn html(&self) -> Result<String, ReportError> {
        let parts = PageParts {
            lead: lead(self),
            charts: chart::populate::all(self)?,
            every_run: every_run(self),
            reading: READING,
            command: self.plan.command(),
            data: "populate-data",
        };
        document(self).page(&parts, self)
    }
}

const READING: &str = "\
    After a restore or a migration the host has a \
         virtual machine's memory, and the second-stage tables are empty: each first access of a \
         vCPU to a page is an exit. With <b>none</b> the vCPUs take them all. With <b>populate</b> \
         threads of the host fill the tables beforehand, with <b>pre-fault</b> idle vCPUs do, and \
         with <b>one-reader</b> one vCPU reads everything first.";

fn document(report: &PopulateReport) -> Document<'_> {
    let more = [(
        "Against letting vCPUs fault, and against each other",
        comparison(report),
    )];
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
fn title(report: &PopulateReport) -> String {
    format!(
        "Population of second-stage tables: {} of {}, written to by all vCPUs",
        ByteSize(report.plan.memory_bytes),
        report.plan.backings.join(", ")
    )
}

/// The colour of a series, by its name: that of its method.
fn role(name: &str) -> Option<Role> {
    let method = name.split(", ").nth(1)?.parse::<Method>().ok()?;
    Some(chart::populate::role(method))
}

fn or_nothing(text: Option<String>) -> String {
    text.unwrap_or_else(|| NOTHING.to_owned())
}

fn time(spread: &Spread) -> String {
    latency(whole(spread.median))
}

fn results(report: &PopulateReport) -> Grid {
    let mut headings = vec![
        "vCPUs",
        "series",
        "total",
        "low..high",
        "guest",
        "population",
        "GiB/s",
        "thousand mappings/s",
        "exits",
    ];
    let instructions = report.origin.timing == Timing::Instructions;
    if instructions {
        headings.push("instructions/mapping");
    }
    let rows = report.points.iter().map(|point: &Point| {
        let figure_of = |spread: Option<Spread>| or_nothing(spread.map(|s| figure(s.median)));
        let mut row = vec![
            point.vcpus.to_string(),
            point.series.to_string(),
            time(&point.total_ns),
            format!(
                "{}..{}",
                latency(whole(point.total_ns.min)),
                latency(whole(point.total_ns.max))
            ),
            time(&point.guest_ns),
            or_nothing(point.population_ns.as_ref().map(time)),
            figure_of(point.rate_gib_per_s),
            figure_of(point.rate_kmappings_per_s),
            figure(point.exits.median),
        ];
        if instructions {
            row.push(figure_of(point.ns_per_mapping));
        }
        row
    });
    Grid {
        headings: headings.into_iter().map(str::to_owned).collect(),
        words: 2,
        rows: rows.collect(),
    }
}

fn comparison(report: &PopulateReport) -> Option<Grid> {
    let ratio = |ratio: Option<&RatioOf>| or_nothing(ratio.map(|r| times(r.paired.median)));
    let between = |ratio: Option<&RatioOf>| or_nothing(ratio.map(|r| extremes(&r.paired)));
    let mut rows: Vec<Vec<String>> = report
        .ratios
        .iter()
        .map(|found| {
            vec![
                found.vcpus.to_string(),
                found.series.to_string(),
                ratio(found.total.as_ref()),
                between(found.total.as_ref()),
                ratio(found.guest.as_ref()),
                between(found.guest.as_ref()),
                ratio(found.over_faults.as_ref()),
                ratio(found.over_pre_fault.as_ref()),
                ratio(found.over_one_thread.as_ref()),
            ]
        })
        .collect();
    if rows.is_empty() {
        return None;
    }
    let published = &report.published;
    let mut row = vec![NOTHING.to_owned(); 9];
    row[0] = published.vcpus.to_string();
    row[1] = format!(
        "published: {}, {} pages",
        ByteSize(published.memory_bytes),
        published.pages
    );
    row[4] = format!("about {} % faster", published.guest_faster_percent);
    rows.push(row);
    let headings = [
        "vCPUs",
        "series",
        "total, of none",
        "low..high",
        "guest, of none",
        "low..high",
        "over faults",
        "over pre-fault",
        "over 1 thread",
    ];
    Some(Grid {
        headings: headings.map(str::to_owned).to_vec(),
        words: 2,
        rows,
    })
}

fn every_run(report: &PopulateReport) -> Grid {
    let rows = report.points.iter().flat_map(|point| {
        point.runs.iter().map(|run| {
            vec![
                point.vcpus.to_string(),
                point.series.to_string(),
                run.round.to_string(),
                run.threads.to_string(),
                latency(run.population_ns),
                latency(run.guest_ns),
                figure(float(run.mappings_4k)),
                figure(float(run.mappings_2m)),
                figure(float(run.mappings_1g)),
                figure(float(run.mappings_after)),
                figure(float(run.population_exits)),
                figure(float(run.exits)),
            ]
        })
    });
    let headings = [
        "vCPUs",
        "series",
        "round",
        "threads",
        "population",
        "guest",
        "4K",
        "2M",
        "1G",
        "mappings after",
        "exits populating",
        "exits",
    ];
    Grid {
        headings: headings.map(str::to_owned).to_vec(),
        words: 2,
        rows: rows.collect(),
    }
}

/// What the columns mean.
fn legend(report: &PopulateReport) -> Vec<String> {
    let mut notes = vec![format!(
        "total: until all of memory is written to, population included; guest: without it, from \
             the vCPUs' release. Medians of {} rounds, lowest and highest round. GiB/s: all memory \
             slots, by the time of the population.",
        report.plan.runs
    )];
    if !report.ratios.is_empty() {
        notes.push(
            "of none: median of the ratios of runs of the same round; below 1, population pays. \
             over faults: how many times as fast a mapping is made as by vCPUs that fault; over \
             pre-fault, over 1 thread: as by KVM_PRE_FAULT_MEMORY with as many threads, as by one \
             thread."
                .to_owned(),
        );
        notes.push(format!("published: {}.", report.published.source));
    }
    notes
}

/// The figures that people look for: what is left of the guest's time.
fn lead(report: &PopulateReport) -> String {
    let most = report.plan.threads.iter().copied().max();
    let ratios: Vec<_> = report
        .ratios
        .iter()
        .filter(|ratio| ratio.series.method == Method::Populate && ratio.series.threads == most)
        .filter(|ratio| ratio.total.is_some())
        .collect();
    if ratios.is_empty() {
        return String::new();
    }
    let mut page = String::from("<ul class=\"lead\" style=\"margin-bottom:14px\">\n");
    for ratio in ratios {
        let (Some(total), Some(guest)) = (&ratio.total, &ratio.guest) else {
            continue;
        };
        push!(
            page,
            "<li style=\"--series:var({})\"><span class=\"tag\">{}</span><b>{}</b><span>the guest's \
             time, {} with the population, {}</span></li>\n",
            chart::populate::role(Method::Populate).variable(),
            escape(&ratio.series.to_string()),
            times(guest.paired.median),
            times(total.paired.median),
            count(ratio.vcpus),
        );
    }
    page.push_str("</ul>\n");
    page
}
