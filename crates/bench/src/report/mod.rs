//! Results as people and programs read them: a terminal table, JSON, SVG and one
//! self-contained HTML page.

mod chart;
mod document;
mod grid;
mod html;
mod memcycler;
mod memslots;
mod out;
mod paging;
mod populate;
mod probe;

pub use chart::DrawError;
pub use out::{OutDir, OutError};
pub use probe::probe_table;

use document::Shown;

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

/// A result in all its forms.
pub trait Report: serde::Serialize {
    /// What its files are called.
    const NAME: &'static str;

    /// The report as a table for a terminal, with what a reader must know below it. `width` is that
    /// of the terminal in characters; `None` lets lines be as long as they are.
    #[must_use]
    fn table(&self, width: Option<u16>) -> String;

    /// The most telling figures as a drawing in SVG.
    ///
    /// # Errors
    /// The drawing failed.
    fn svg(&self) -> Result<String, ReportError>;

    /// The report as one HTML page that needs no other file.
    ///
    /// # Errors
    /// A drawing failed, or the data is none that JSON knows.
    fn html(&self) -> Result<String, ReportError>;
}

impl<R: Shown> Report for R {
    const NAME: &'static str = <R as Shown>::NAME;

    fn table(&self, width: Option<u16>) -> String {
        document::terminal(self, width)
    }

    fn svg(&self) -> Result<String, ReportError> {
        Ok(self.drawing()?)
    }

    fn html(&self) -> Result<String, ReportError> {
        document::page(self)
    }
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

/// Reads a report back from its JSON.
///
/// # Errors
/// The text is not a report.
pub fn from_json(text: &str) -> Result<PagingReport, ReportError> {
    Ok(serde_json::from_str(text)?)
}

/// Writes `NAME.json`, `NAME.svg` and `NAME.html` into `out`, each as a whole or not at all.
///
/// # Errors
/// A drawing failed, or a file could not be written.
pub fn write<R: Report>(report: &R, out: &mut OutDir) -> Result<(), ReportError> {
    let files = [
        ("json", json(report)?),
        ("svg", report.svg()?),
        ("html", report.html()?),
    ];
    for (ending, content) in &files {
        out.write(&format!("{}.{ending}", R::NAME), content)?;
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
