//! The parts of a report's HTML page: inline style, inline drawings, the data itself, and no address of
//! anything outside.

use std::fmt::Write;

use super::chart::{Role, declarations};
use super::grid::Grid;
use super::{ReportError, escape};
use crate::facts::Facts;
use crate::timing::Timing;

const STYLE: &str = include_str!("page.css");

/// Appends formatted text; writing to a string cannot fail.
macro_rules! push {
    ($page:expr, $($rest:tt)+) => { let _ = write!($page, $($rest)+); };
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

/// A figure that people look for.
pub(super) struct Figure {
    /// The colour that it has.
    pub(super) role: Role,
    /// What it belongs to.
    pub(super) tag: String,
    /// The figure itself.
    pub(super) value: String,
    /// What it says.
    pub(super) what: String,
}

/// The figures that people look for, in lists.
pub(super) fn lead(page: &mut String, lists: &[Vec<Figure>]) {
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

pub(super) fn count(vcpus: u32) -> String {
    if vcpus == 1 {
        "1 vCPU".to_owned()
    } else {
        format!("{vcpus} vCPUs")
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
    name: &str,
    report: &impl serde::Serialize,
) -> Result<(), ReportError> {
    // "</script" must not come up inside; in JSON a solidus may be written with an escape.
    let json = serde_json::to_string(report)?.replace("</", "<\\/");
    push!(
        page,
        "<script type=\"application/json\" id=\"{name}-data\">{json}</script>\n"
    );
    Ok(())
}
