//! A population result as people read it.

use std::fmt::Write;

use super::chart::{self, Role, for_page};
use super::grid::{Grid, NOTHING, bullet, extremes, lines, times};
use super::{OutDir, ReportError, escape, html as page_parts, json};
use crate::populate::{Method, Point, PopulateReport};
use crate::stats::{RatioOf, Spread};
use crate::timing::Timing;
use crate::units::{ByteSize, figure, float, latency, whole};

/// Appends formatted text; writing to a string cannot fail.
macro_rules! push {
    ($page:expr, $($rest:tt)+) => { let _ = write!($page, $($rest)+); };
}

/// The report as a table for a terminal. `width` is that of the terminal in characters; `None` lets
/// lines be as long as they are.
#[must_use]
pub fn table(report: &PopulateReport, width: Option<u16>) -> String {
    let mut text = format!("{}\n\n{}\n", title(report), lines(&results(report), width));
    if let Some(grid) = comparison(report) {
        text.push_str(&format!("\n{}\n", lines(&grid, width)));
    }
    text.push('\n');
    let wrap = usize::from(width.unwrap_or(100)).clamp(40, 110);
    for note in legend(report).iter().chain(&report.notes) {
        text.push_str(&bullet(note, wrap));
    }
    text.push('\n');
    let timing = ("Timing", report.origin.timing.to_string());
    for (name, value) in report.origin.facts.lines().into_iter().chain([timing]) {
        text.push_str(&format!("{name:<15}{value}\n"));
    }
    text
}

/// The times until everything is written to, as a drawing in SVG, with and without the population.
///
/// # Errors
/// The drawing failed.
pub fn svg(report: &PopulateReport) -> Result<String, ReportError> {
    Ok(chart::populate::standalone(report)?)
}

/// Writes `populate.json`, `populate.svg` and `populate.html` into `out`, each as a whole or not at
/// all.
///
/// # Errors
/// A drawing failed, or a file could not be written.
pub fn write(report: &PopulateReport, out: &mut OutDir) -> Result<(), ReportError> {
    let files = [
        ("populate.json", json(report)?),
        ("populate.svg", svg(report)?),
        ("populate.html", html(report)?),
    ];
    for (name, content) in &files {
        out.write(name, content)?;
    }
    Ok(())
}

/// The report as one HTML page that needs no other file.
///
/// # Errors
/// A drawing failed, or the data is none that JSON knows.
pub fn html(report: &PopulateReport) -> Result<String, ReportError> {
    let mut page = String::new();
    let title = title(report);
    page_parts::head(&mut page, &title);
    page.push_str("<main>\n");
    let about = (&report.origin.facts, report.origin.timing, report.plan.runs);
    page_parts::header(&mut page, &title, about);
    page_parts::warning(&mut page, report.origin.timing);
    lead(&mut page, report);
    page.push_str("<h2>Charts</h2>\n<div class=\"charts\">\n");
    for drawing in chart::populate::all(report)? {
        push!(page, "<figure>{}</figure>\n", for_page(&drawing));
    }
    page.push_str("</div>\n<h2>Results</h2>\n");
    page_parts::table(&mut page, &results(report), role);
    if let Some(grid) = comparison(report) {
        page.push_str("<h2>Against letting vCPUs fault</h2>\n");
        page_parts::table(&mut page, &grid, role);
    }
    page.push_str("<details><summary>Every run</summary>\n");
    page_parts::table(&mut page, &every_run(report), role);
    page.push_str(
        "</details>\n<h2>How to read this</h2>\n<p>After a restore or a migration the host has a \
         virtual machine's memory, and the second-stage tables are empty: each first access of a \
         vCPU to a page is an exit. With <b>none</b> the vCPUs take them all. With <b>populate</b> \
         threads of the host fill the tables beforehand, with <b>pre-fault</b> idle vCPUs do, and \
         with <b>one-reader</b> one vCPU reads everything first.</p>\n<ul class=\"notes\">\n",
    );
    for note in legend(report).iter().chain(&report.notes) {
        push!(page, "<li>{}</li>\n", escape(note));
    }
    page.push_str("</ul>\n");
    let place = (&report.origin.facts, report.origin.timing);
    page_parts::environment(&mut page, place, &report.plan.command());
    page.push_str("</main>\n");
    page_parts::data(&mut page, "populate-data", report)?;
    page.push_str("</body>\n</html>\n");
    Ok(page)
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
    let mut rows: Vec<Vec<String>> = report
        .ratios
        .iter()
        .map(|found| {
            vec![
                found.vcpus.to_string(),
                found.series.to_string(),
                times(found.total.paired.median),
                extremes(&found.total.paired),
                times(found.guest.paired.median),
                extremes(&found.guest.paired),
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
fn lead(page: &mut String, report: &PopulateReport) {
    let most = report.plan.threads.iter().copied().max();
    let ratios: Vec<_> = report
        .ratios
        .iter()
        .filter(|ratio| ratio.series.method == Method::Populate && ratio.series.threads == most)
        .collect();
    if ratios.is_empty() {
        return;
    }
    page.push_str("<ul class=\"lead\" style=\"margin-bottom:14px\">\n");
    for ratio in ratios {
        push!(
            page,
            "<li style=\"--series:var({})\"><span class=\"tag\">{}</span><b>{}</b><span>the guest's \
             time, {} with the population, {}</span></li>\n",
            chart::populate::role(Method::Populate).variable(),
            escape(&ratio.series.to_string()),
            times(ratio.guest.paired.median),
            times(ratio.total.paired.median),
            page_parts::count(ratio.vcpus),
        );
    }
    page.push_str("</ul>\n");
}
