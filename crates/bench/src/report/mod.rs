//! A paging result as people and programs read it: a terminal table, JSON, SVG and one
//! self-contained HTML page.

mod chart;
mod grid;
mod html;
mod memslots;
mod out;
mod populate;
mod probe;

pub use chart::DrawError;
pub use memslots::{
    html as memslots_html, svg as memslots_svg, table as memslots_table, write as write_memslots,
};
pub use out::{OutDir, OutError};
pub use populate::{
    html as populate_html, svg as populate_svg, table as populate_table, write as write_populate,
};
pub use probe::probe_table;

use crate::paging::PagingReport;

/// Why a report could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A chart could not be drawn.
    #[error(transparent)]
    Draw(#[from] DrawError),
    /// The data could not be turned into JSON.
    #[error("cannot write the result as JSON")]
    Json(#[from] serde_json::Error),
    /// A file could not be written.
    #[error(transparent)]
    Out(#[from] OutError),
}

/// The report as a table for a terminal, with what a reader must know below it. `width` is that of
/// the terminal in characters; `None` lets lines be as long as they are.
#[must_use]
pub fn table(report: &PagingReport, width: Option<u16>) -> String {
    grid::terminal(report, width)
}

/// The width of the terminal that standard output is, in characters; `None` if it is none.
#[must_use]
pub fn terminal_width() -> Option<u16> {
    comfy_table::Table::new().width()
}

/// A report as JSON; `docs/guide/benchmarks.md` documents each field.
///
/// # Errors
/// A number in the report is none that JSON knows.
pub fn json(report: &impl serde::Serialize) -> Result<String, ReportError> {
    let mut text = serde_json::to_string_pretty(report)?;
    text.push('\n');
    Ok(text)
}

/// The rates as a drawing in SVG, ours beside the published ones.
///
/// # Errors
/// The drawing failed.
pub fn svg(report: &PagingReport) -> Result<String, ReportError> {
    Ok(chart::standalone(report)?)
}

/// The report as one HTML page that needs no other file.
///
/// # Errors
/// A drawing failed, or the data is none that JSON knows.
pub fn html(report: &PagingReport) -> Result<String, ReportError> {
    html::page(report)
}

/// Reads a report back from its JSON.
///
/// # Errors
/// The text is not a report.
pub fn from_json(text: &str) -> Result<PagingReport, ReportError> {
    Ok(serde_json::from_str(text)?)
}

/// Writes `paging.json`, `paging.svg` and `paging.html` into `out`, each as a whole or not at all.
///
/// # Errors
/// A drawing failed, or a file could not be written.
pub fn write(report: &PagingReport, out: &mut OutDir) -> Result<(), ReportError> {
    let files = [
        ("paging.json", json(report)?),
        ("paging.svg", svg(report)?),
        ("paging.html", html(report)?),
    ];
    for (name, content) in &files {
        out.write(name, content)?;
    }
    Ok(())
}

/// Text for HTML and SVG, in content and in attributes.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests;
