//! The frame that reports share: what stands in which order on a terminal and in a page.

use std::fmt::Write;

use super::chart::{Role, for_page};
use super::grid::{Grid, bullet, lines};
use super::{ReportError, escape, html};
use crate::rounds::Origin;

/// Appends formatted text; writing to a string cannot fail.
macro_rules! push {
    ($page:expr, $($rest:tt)+) => { let _ = write!($page, $($rest)+); };
}

/// What a report has to say, in order.
pub(super) struct Document<'report> {
    /// What was measured, in a line.
    pub(super) title: String,
    pub(super) origin: &'report Origin,
    /// Measured rounds.
    pub(super) runs: u32,
    /// Tables: the results, and what is made of them, under headings for the page.
    pub(super) tables: Vec<(&'static str, Grid)>,
    /// What the columns mean, and what a reader must know.
    pub(super) notes: Vec<String>,
    /// The colour of a series, by its name.
    pub(super) role: fn(&str) -> Option<Role>,
}

/// What only a page has.
pub(super) struct PageParts {
    /// The figures that people look for; HTML.
    pub(super) lead: String,
    /// Drawings in SVG.
    pub(super) charts: Vec<String>,
    /// One row for each measured run.
    pub(super) every_run: Grid,
    /// How to read it, a paragraph; HTML.
    pub(super) reading: &'static str,
    /// The command that measures the same.
    pub(super) command: String,
    /// The name of the data in it.
    pub(super) data: &'static str,
}

impl Document<'_> {
    /// The report for a terminal of this width in characters.
    pub(super) fn terminal(&self, width: Option<u16>) -> String {
        let mut text = format!("{}\n", self.title);
        for (_, grid) in &self.tables {
            text.push_str(&format!("\n{}\n", lines(grid, width)));
        }
        text.push('\n');
        let wrap = usize::from(width.unwrap_or(100)).clamp(40, 110);
        for note in &self.notes {
            text.push_str(&bullet(note, wrap));
        }
        text.push('\n');
        let timing = ("Timing", self.origin.timing.to_string());
        for (name, value) in self.origin.facts.lines().into_iter().chain([timing]) {
            text.push_str(&format!("{name:<15}{value}\n"));
        }
        text
    }

    /// The report as a page that needs no other file; `report` is the data in it.
    pub(super) fn page(
        &self,
        parts: &PageParts,
        report: &impl serde::Serialize,
    ) -> Result<String, ReportError> {
        let mut page = String::new();
        html::head(&mut page, &self.title);
        page.push_str("<main>\n");
        let Origin { timing, facts, .. } = self.origin;
        html::header(&mut page, &self.title, (facts, *timing, self.runs));
        html::warning(&mut page, *timing);
        page.push_str(&parts.lead);
        page.push_str("<h2>Charts</h2>\n<div class=\"charts\">\n");
        for drawing in &parts.charts {
            push!(page, "<figure>{}</figure>\n", for_page(drawing));
        }
        page.push_str("</div>\n");
        for (heading, grid) in &self.tables {
            push!(page, "<h2>{heading}</h2>\n");
            html::table(&mut page, grid, self.role);
        }
        page.push_str("<details><summary>Every run</summary>\n");
        html::table(&mut page, &parts.every_run, self.role);
        push!(
            page,
            "</details>\n<h2>How to read this</h2>\n<p>{}</p>\n<ul class=\"notes\">\n",
            parts.reading
        );
        for note in &self.notes {
            push!(page, "<li>{}</li>\n", escape(note));
        }
        page.push_str("</ul>\n");
        html::environment(&mut page, (facts, *timing), &parts.command);
        page.push_str("</main>\n");
        html::data(&mut page, parts.data, report)?;
        page.push_str("</body>\n</html>\n");
        Ok(page)
    }
}
