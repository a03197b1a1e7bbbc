//! The frame that reports share: what stands in which order on a terminal and in a page.

use std::fmt::Write;

use super::chart::{DrawError, Role, for_page};
use super::grid::{Grid, bullet, lines};
use super::html::{self, Figure};
use super::{ReportError, escape};
use crate::benchmark::Benchmark;
use crate::rounds::Origin;

/// Appends formatted text; writing to a string cannot fail.
macro_rules! push {
    ($page:expr, $($rest:tt)+) => { let _ = write!($page, $($rest)+); };
}

/// What every report has.
pub(super) struct Common<'report, P> {
    pub(super) plan: &'report P,
    pub(super) origin: &'report Origin,
    /// What a reader must know.
    pub(super) notes: &'report [String],
}

/// A result, and what it has to say in the forms that all results have.
pub(super) trait Shown: serde::Serialize {
    /// What its files are called.
    const NAME: &'static str;
    /// How to read it, a paragraph; HTML.
    const READING: &'static str;
    /// What was measured.
    type Plan: Benchmark;

    /// What every report has.
    fn common(&self) -> Common<'_, Self::Plan>;

    /// What was measured, in a line.
    fn title(&self) -> String;

    /// Tables under headings, which only the page shows: the results, and what is made of them as far
    /// as there is something.
    fn tables(&self) -> Vec<(&'static str, Option<Grid>)>;

    /// One row for each measured run.
    fn every_run(&self) -> Grid;

    /// What the columns mean.
    fn legend(&self) -> Vec<String>;

    /// The colour of a series, by its name.
    fn role(&self, name: &str) -> Option<Role>;

    /// The figures that people look for, in lists.
    fn lead(&self) -> Vec<Vec<Figure>>;

    /// Drawings for the page, in SVG.
    fn charts(&self) -> Result<Vec<String>, DrawError>;

    /// The most telling figures as a drawing for a file of its own.
    fn drawing(&self) -> Result<String, DrawError>;
}

/// The tables that there are.
fn tables(report: &impl Shown) -> impl Iterator<Item = (&'static str, Grid)> {
    let tables = report.tables().into_iter();
    tables.filter_map(|(heading, grid)| Some((heading, grid?)))
}

/// What the columns mean, and what a reader must know.
fn remarks(report: &impl Shown) -> Vec<String> {
    let mut remarks = report.legend();
    remarks.extend_from_slice(report.common().notes);
    remarks
}

/// The report for a terminal of this width in characters.
pub(super) fn terminal(report: &impl Shown, width: Option<u16>) -> String {
    let mut text = format!("{}\n", report.title());
    for (_, grid) in tables(report) {
        text.push_str(&format!("\n{}\n", lines(&grid, width)));
    }
    text.push('\n');
    let wrap = usize::from(width.unwrap_or(100)).clamp(40, 110);
    for remark in remarks(report) {
        text.push_str(&bullet(&remark, wrap));
    }
    text.push('\n');
    let origin = report.common().origin;
    let timing = ("Timing", origin.timing.to_string());
    for (name, value) in origin.facts.lines().into_iter().chain([timing]) {
        text.push_str(&format!("{name:<15}{value}\n"));
    }
    text
}

/// The report as a page that needs no other file.
pub(super) fn page<R: Shown>(report: &R) -> Result<String, ReportError> {
    let mut page = String::new();
    let title = report.title();
    let role = |name: &str| report.role(name);
    let Common { plan, origin, .. } = report.common();
    let Origin { timing, facts, .. } = origin;
    html::head(&mut page, &title);
    page.push_str("<main>\n");
    html::header(&mut page, &title, (facts, *timing, plan.runs()));
    html::warning(&mut page, *timing);
    html::lead(&mut page, &report.lead());
    page.push_str("<h2>Charts</h2>\n<div class=\"charts\">\n");
    for drawing in report.charts()? {
        push!(page, "<figure>{}</figure>\n", for_page(&drawing));
    }
    page.push_str("</div>\n");
    for (heading, grid) in tables(report) {
        push!(page, "<h2>{heading}</h2>\n");
        html::table(&mut page, &grid, role);
    }
    page.push_str("<details><summary>Every run</summary>\n");
    html::table(&mut page, &report.every_run(), role);
    push!(
        page,
        "</details>\n<h2>How to read this</h2>\n<p>{}</p>\n<ul class=\"notes\">\n",
        R::READING
    );
    for remark in remarks(report) {
        push!(page, "<li>{}</li>\n", escape(&remark));
    }
    page.push_str("</ul>\n");
    html::environment(&mut page, (facts, *timing), &plan.command());
    page.push_str("</main>\n");
    html::data(&mut page, R::NAME, report)?;
    page.push_str("</body>\n</html>\n");
    Ok(page)
}
