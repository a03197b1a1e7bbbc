//! The parts of a report's HTML page: inline style, inline drawings, the data itself, and no address of
//! anything outside.

use std::fmt::Write;

use super::grid::{Grid, Table};
use super::terminal::{environment, remarks};
use super::{Report, ReportError, Shown, View, escape};
use crate::draw::{Role, declarations, draw, for_page};
use crate::model::{CPU_BY_OTHERS, Quantity, Run};
use crate::units::{ByteSize, decimal, figure, latency, whole};

const STYLE: &str = include_str!("page.css");

/// Appends formatted text; writing to a string cannot fail.
macro_rules! push {
    ($page:expr, $($rest:tt)+) => { let _ = write!($page, $($rest)+); };
}

/// The report as a page that needs no other file.
pub(super) fn page<B: Shown>(view: &View<'_, B>) -> Result<String, ReportError> {
    let mut page = String::new();
    head(&mut page, view);
    lead(&mut page, &B::lead(view));
    page.push_str("<h2>Charts</h2>\n<div class=\"charts\">\n");
    for chart in B::charts(view) {
        push!(page, "<figure>{}</figure>\n", for_page(&draw(&chart)?));
    }
    page.push_str("</div>\n");
    let named = view.series().into_iter();
    let roles: Vec<_> = named
        .map(|one| (one.to_string(), B::role(view, one)))
        .collect();
    let role = |name: &str| {
        let found = roles.iter().find(|(known, _)| known == name);
        found.map(|(_, role)| *role)
    };
    for (heading, grid) in B::tables(view) {
        if let Some(grid) = grid {
            push!(page, "<h2>{heading}</h2>\n");
            table(&mut page, &grid, role);
        }
    }
    page.push_str("<details><summary>Every run</summary>\n");
    table(&mut page, &every_run(view), role);
    push!(
        page,
        "</details>\n<h2>How to read this</h2>\n<p>{}</p>\n<ul class=\"notes\">\n",
        B::READING
    );
    for remark in remarks(view) {
        push!(page, "<li>{}</li>\n", escape(&remark));
    }
    page.push_str("</ul>\n<h2>Environment</h2>\n<dl>\n");
    for (name, value) in environment(view) {
        push!(
            page,
            "<dt>{}</dt><dd>{}</dd>\n",
            escape(name),
            escape(&value)
        );
    }
    push!(
        page,
        "</dl>\n<h2>The same again</h2>\n<pre><code>{}</code></pre>\n</main>\n",
        escape(&view.report.command)
    );
    data(&mut page, view.report)?;
    page.push_str("</body>\n</html>\n");
    Ok(page)
}

/// Everything above the figures. What is about to be misread comes first.
fn head<B: Shown>(page: &mut String, view: &View<'_, B>) {
    let title = escape(&view.title());
    let facts = &view.report.origin.facts;
    push!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n:root{{--back:#f5f6f8;{}}}\n\
         @media (prefers-color-scheme:dark){{:root{{--back:#0e1115;{}}}}}\n{STYLE}</style>\n\
         </head>\n<body>\n<main>\n<header>\n<h1>{title}</h1>\n<p class=\"sub\">Linux {} &middot; {} \
         &middot; {} timing &middot; {} rounds &middot; {}</p>\n</header>\n",
        declarations(false),
        declarations(true),
        escape(&facts.kernel_release),
        escape(&facts.kvm),
        view.timing(),
        view.plan().runs(),
        escape(&facts.started_utc),
    );
    let explanation = view
        .timing()
        .is_lab()
        .then(|| view.timing().explanation().to_owned());
    let busy = view.busy().map(crate::noise::Busy::note);
    for warning in explanation.into_iter().chain(busy) {
        push!(page, "<p class=\"warn\">{}</p>\n", escape(&warning));
    }
}

/// One row for each measured run: every quantity that some run has, and the columns that follow.
fn every_run<B: Shown>(view: &View<'_, B>) -> Grid {
    let timing = view.timing();
    let rows = view.cells.iter().flat_map(|cell| {
        let runs = cell.runs.iter();
        runs.map(|run| (cell.vcpus, cell.series.to_string(), run))
    });
    let has =
        |value: &dyn Fn(&Run) -> bool| view.cells.iter().any(|cell| cell.runs.iter().any(value));
    let mut table = Table::by_name(B::SERIES, rows).column("round", |run| run.round.to_string());
    for &quantity in B::QUANTITIES.iter().chain(&[CPU_BY_OTHERS]) {
        if has(&|run| run.get(quantity).is_some()) {
            table = table.maybe(quantity.label, |run| shown(run, quantity));
        }
    }
    for column in B::COLUMNS.iter().filter(|column| column.is_of(timing)) {
        if column.unit != "ns" && has(&|run| (column.value)(run).is_some()) {
            table = table.maybe(column.unit, |run| (column.value)(run).map(figure));
        }
    }
    table.grid()
}

/// A quantity of a run in words.
fn shown(run: &Run, quantity: Quantity) -> Option<String> {
    if quantity.each_second {
        let rates: Vec<_> = run.all(quantity).iter().copied().map(figure).collect();
        return Some(rates.join(" "));
    }
    let value = run.get(quantity)?;
    Some(match (run.text(quantity), quantity.unit) {
        (Some(words), _) => words.to_owned(),
        (None, "ns") => latency(whole(value)),
        (None, "bytes") => ByteSize(whole(value)).about(),
        (None, unit) if unit == CPU_BY_OTHERS.unit => format!("{} %", decimal(value * 100.0, 0)),
        (None, _) if value.fract() == 0.0 && value < 100.0 => decimal(value, 0),
        (None, _) => figure(value),
    })
}

/// A figure that people look for.
pub struct Figure {
    /// The colour that it has.
    pub role: Role,
    /// What it belongs to.
    pub tag: String,
    /// The figure itself.
    pub value: String,
    /// What it says.
    pub what: String,
}

/// The figures that people look for, in lists.
fn lead(page: &mut String, lists: &[Vec<Figure>]) {
    for list in lists.iter().filter(|list| !list.is_empty()) {
        push!(page, "<ul class=\"lead\" style=\"margin-bottom:14px\">\n");
        for figure in list {
            push!(
                page,
                "<li style=\"--series:var({})\"><span class=\"tag\">{}</span><b>{}</b>\
                 <span>{}</span></li>\n",
                figure.role.variable(),
                escape(&figure.tag),
                escape(&figure.value),
                escape(&figure.what),
            );
        }
        page.push_str("</ul>\n");
    }
}

pub(crate) fn count(vcpus: u32) -> String {
    if vcpus == 1 {
        "1 vCPU".to_owned()
    } else {
        format!("{vcpus} vCPUs")
    }
}

/// A table; `role` is that of a series by its name, whose colour stands before it.
fn table(page: &mut String, grid: &Grid, role: impl Fn(&str) -> Option<Role>) {
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

/// The data itself, for programs that read the page.
fn data<B: Shown>(page: &mut String, report: &Report<B>) -> Result<(), ReportError> {
    // "</script" must not come up inside; in JSON a solidus may be written with an escape.
    let json = serde_json::to_string(report)?.replace("</", "<\\/");
    push!(
        page,
        "<script type=\"application/json\" id=\"{}-data\">{json}</script>\n",
        B::NAME
    );
    Ok(())
}
