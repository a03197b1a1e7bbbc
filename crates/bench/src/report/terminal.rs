//! A report for a terminal.

use super::grid::{bullet, lines};
use super::{Shown, View};

/// Names and values of a report's environment.
pub(super) fn environment<B: Shown>(view: &View<'_, B>) -> Vec<(&'static str, String)> {
    let mut lines = view.report.origin.facts.lines();
    lines.push(("Timing", view.timing().to_string()));
    lines
}

/// What the columns mean, and what a reader must know.
pub(super) fn remarks<B: Shown>(view: &View<'_, B>) -> Vec<String> {
    let mut remarks = B::legend(view);
    remarks.extend_from_slice(&view.report.notes);
    remarks
}

/// The report for a terminal of this width in characters.
pub(super) fn text<B: Shown>(view: &View<'_, B>, width: Option<u16>) -> String {
    let mut text = format!("{}\n", view.title());
    for grid in B::tables(view).into_iter().filter_map(|(_, grid)| grid) {
        text.push_str(&format!("\n{}\n", lines(&grid, width)));
    }
    text.push('\n');
    let wrap = usize::from(width.unwrap_or(100)).clamp(40, 110);
    for remark in remarks(view) {
        text.push_str(&bullet(&remark, wrap));
    }
    text.push('\n');
    for (name, value) in environment(view) {
        text.push_str(&format!("{name:<15}{value}\n"));
    }
    text
}
