//! The report as one HTML page: inline style, inline drawings, the data itself, and no address of
//! anything outside.

use std::fmt::Write;

use super::chart::{self, Role, declarations, for_page};
use super::grid::{self, Grid, times};
use super::{ReportError, escape};
use crate::facts::Facts;
use crate::paging::{Delivery, PagingReport, RunRecord, Series};
use crate::timing::Timing;
use crate::units::{figure, float, latency};

const STYLE: &str = include_str!("page.css");

/// Appends formatted text; writing to a string cannot fail.
macro_rules! push {
    ($page:expr, $($rest:tt)+) => { let _ = write!($page, $($rest)+); };
}

/// The whole page.
pub(crate) fn page(report: &PagingReport) -> Result<String, ReportError> {
    let mut page = String::new();
    head(&mut page, &grid::title(report));
    page.push_str("<main>\n");
    header(
        &mut page,
        &grid::title(report),
        (&report.origin.facts, report.origin.timing, report.plan.runs),
    );
    warning(&mut page, report.origin.timing);
    lead(&mut page, report);
    charts(&mut page, report)?;
    tables(&mut page, report);
    reading(&mut page, report);
    environment(
        &mut page,
        (&report.origin.facts, report.origin.timing),
        &report.plan.command(),
    );
    page.push_str("</main>\n");
    data(&mut page, "paging-data", report)?;
    page.push_str("</body>\n</html>\n");
    Ok(page)
}

pub(super) fn head(page: &mut String, title: &str) {
    let title = escape(title);
    push!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n:root{{--back:#f5f6f8;{}}}\n\
         @media (prefers-color-scheme:dark){{:root{{--back:#0e1115;{}}}}}\n{STYLE}</style>\n\
         </head>\n<body>\n",
        declarations(false),
        declarations(true),
    );
}

pub(super) fn header(page: &mut String, title: &str, (facts, timing, runs): (&Facts, Timing, u32)) {
    push!(
        page,
        "<header>\n<h1>{}</h1>\n<p class=\"sub\">Linux {} &middot; {} &middot; {} timing &middot; \
         {} rounds &middot; {}</p>\n</header>\n",
        escape(title),
        escape(&facts.kernel_release),
        escape(&facts.kvm),
        timing,
        runs,
        escape(&facts.started_utc),
    );
}

/// What is about to be misread comes first.
pub(super) fn warning(page: &mut String, timing: Timing) {
    if timing.is_lab() {
        push!(
            page,
            "<p class=\"warn\">{}</p>\n",
            escape(timing.explanation())
        );
    }
}

/// The figures that people look for: exits over userfaultfd, by vCPUs.
fn lead(page: &mut String, report: &PagingReport) {
    if report.ratios.is_empty() {
        return;
    }
    let all = report.series();
    for &series in all
        .iter()
        .filter(|series| series.delivery == Delivery::Exit)
    {
        push!(page, "<ul class=\"lead\" style=\"margin-bottom:14px\">\n");
        for &vcpus in &report.plan.vcpus {
            let Some(ratio) = report.ratio(vcpus, series) else {
                continue;
            };
            let (value, what) = match &ratio.instructions {
                Some(cost) => (cost.paired.median, "the instructions of uffd"),
                None => (ratio.rate.paired.median, "the rate of uffd"),
            };
            let published = grid::published_ratio(report, vcpus, series)
                .filter(|_| ratio.instructions.is_none())
                .map_or_else(String::new, |ratio| format!(", published {}", times(ratio)));
            push!(
                page,
                "<li style=\"--series:var({})\"><span class=\"tag\">{}</span><b>{}</b>\
                 <span>{what}, {}{published}</span></li>\n",
                Role::of(series, &all).variable(),
                escape(&series.to_string()),
                times(value),
                count(vcpus),
            );
        }
        page.push_str("</ul>\n");
    }
}

pub(super) fn count(vcpus: u32) -> String {
    if vcpus == 1 {
        "1 vCPU".to_owned()
    } else {
        format!("{vcpus} vCPUs")
    }
}

fn charts(page: &mut String, report: &PagingReport) -> Result<(), ReportError> {
    let mut drawings = Vec::new();
    let instructions = chart::instructions(report)?;
    // Where a nanosecond is an instruction, the cost is the result and the rate follows from it.
    let cost_first = report.origin.timing == Timing::Instructions;
    if cost_first {
        drawings.extend(instructions.clone());
        drawings.extend(chart::ratios(report)?);
    }
    drawings.push(chart::rates(report)?);
    if let Some(published) = &report.published {
        drawings.push(chart::published_rates(published)?);
    }
    if !cost_first {
        drawings.extend(chart::ratios(report)?);
        drawings.extend(instructions);
    }
    drawings.extend(chart::latencies(report)?);
    page.push_str("<h2>Charts</h2>\n<div class=\"charts\">\n");
    for drawing in drawings {
        push!(page, "<figure>{}</figure>\n", for_page(&drawing));
    }
    page.push_str("</div>\n");
    Ok(())
}

fn tables(page: &mut String, report: &PagingReport) {
    let all = report.series();
    let role = |name: &str| {
        let found = all.iter().find(|series| series.to_string() == name);
        found.map(|&series| Role::of(series, &all))
    };
    page.push_str("<h2>Results</h2>\n");
    table(page, &grid::results(report), role);
    if let Some(comparison) = grid::comparison(report) {
        page.push_str("<h2>Exits over userfaultfd</h2>\n");
        table(page, &comparison, role);
    }
    page.push_str("<details><summary>Every run</summary>\n");
    table(page, &every_run(report), role);
    page.push_str("</details>\n");
}

/// One row for each measured run.
fn every_run(report: &PagingReport) -> Grid {
    let row = |vcpus: u32, series: Series, run: &RunRecord| {
        vec![
            vcpus.to_string(),
            series.to_string(),
            run.round.to_string(),
            latency(run.elapsed_ns),
            figure(float(run.pages)),
            figure(float(run.exits)),
            figure(float(run.messages)),
            figure(run.rate_kpages_per_s()),
        ]
    };
    let rows = report.points.iter().flat_map(|point| {
        point
            .runs
            .iter()
            .map(move |run| row(point.vcpus, point.series, run))
    });
    let headings = [
        "vCPUs",
        "delivery",
        "round",
        "elapsed",
        "pages",
        "exits",
        "messages",
        "thousand pages/s",
    ];
    Grid {
        headings: headings.map(str::to_owned).to_vec(),
        words: 2,
        rows: rows.collect(),
    }
}

/// A table; `role` is that of a series by its name, whose colour stands before it.
pub(super) fn table(page: &mut String, grid: &Grid, role: impl Fn(&str) -> Option<Role>) {
    page.push_str("<div class=\"scroll\"><table>\n<thead><tr>");
    // The number of vCPUs stands at the left, like the words.
    let class = |column: usize| {
        if column < grid.words {
            " class=\"word\""
        } else {
            ""
        }
    };
    for (column, heading) in grid.headings.iter().enumerate() {
        push!(
            page,
            "<th scope=\"col\"{}>{}</th>",
            class(column),
            escape(heading)
        );
    }
    page.push_str("</tr></thead>\n<tbody>\n");
    let mut last: Option<&String> = None;
    for row in &grid.rows {
        let first = row.first() != last;
        last = row.first();
        page.push_str(if first {
            "<tr class=\"first\">"
        } else {
            "<tr>"
        });
        for (column, text) in row.iter().enumerate() {
            let role = if column == 1 { role(text) } else { None };
            let dot = role.map_or_else(String::new, |role| {
                let variable = role.variable();
                format!("<span class=\"dot\" style=\"--series:var({variable})\"></span>")
            });
            // As on a terminal, a number of vCPUs stands once above its rows.
            let text = if column == 0 && !first { "" } else { text };
            push!(page, "<td{}>{dot}{}</td>", class(column), escape(text));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody></table></div>\n");
}

fn reading(page: &mut String, report: &PagingReport) {
    page.push_str(
        "<h2>How to read this</h2>\n<p>A virtual machine starts with memory that is not there yet. \
         Each vCPU touches its pages one by one; each first touch is a fault that somebody must \
         resolve. With <b>uffd</b> the fault becomes a message in a userfaultfd, the vCPU sleeps \
         in the kernel, and a reader thread makes the page present and wakes it. With <b>exit</b> \
         the vCPU leaves KVM_RUN and its own thread makes the page present: no queue, no lock that \
         all vCPUs share, nobody to wake. <b>none</b> is the floor: the host has the page, and \
         only the second-stage tables are filled.</p>\n<ul class=\"notes\">\n",
    );
    for note in grid::legend(report).iter().chain(&report.notes) {
        push!(page, "<li>{}</li>\n", escape(note));
    }
    page.push_str("</ul>\n");
}

pub(super) fn environment(page: &mut String, (facts, timing): (&Facts, Timing), command: &str) {
    page.push_str("<h2>Environment</h2>\n<dl>\n");
    let timing = ("Timing", timing.to_string());
    for (name, value) in facts.lines().into_iter().chain([timing]) {
        push!(
            page,
            "<dt>{}</dt><dd>{}</dd>\n",
            escape(name),
            escape(&value)
        );
    }
    page.push_str("</dl>\n<h2>The same again</h2>\n");
    push!(page, "<pre><code>{}</code></pre>\n", escape(command));
}

/// The data itself, for programs that read the page.
pub(super) fn data(
    page: &mut String,
    id: &str,
    report: &impl serde::Serialize,
) -> Result<(), ReportError> {
    // "</script" must not come up inside; in JSON a solidus may be written with an escape.
    let json = serde_json::to_string(report)?.replace("</", "<\\/");
    push!(
        page,
        "<script type=\"application/json\" id=\"{id}\">{json}</script>\n"
    );
    Ok(())
}
