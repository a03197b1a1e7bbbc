//! What a person sees of a profile.

use std::fmt::Write;

use super::groups::{Groups, OTHER};
use super::sums::{Column, Spread};

/// Functions of `other` that are shown for each series.
const SHOWN: usize = 12;

/// The tables, in Markdown: per page, the same above the floor, and what has no group yet.
pub(super) fn show(columns: &[Column], groups: &Groups) -> String {
    let names: Vec<_> = groups
        .names()
        .iter()
        .map(String::as_str)
        .chain([OTHER])
        .collect();
    let mut text = String::new();
    let series = columns.iter().map(|column| column.series.clone());

    let mut rows = vec![head("instructions per page", series.clone())];
    for (index, name) in names.iter().enumerate() {
        let cells = columns.iter().map(|column| spread(column.groups[index]));
        rows.push(row(name, cells));
    }
    let sums = columns.iter().map(|column| format!("{:.0}", column.sum()));
    rows.push(row("sum of the medians", sums));
    rows.push(row(
        "counted, all functions",
        columns.iter().map(|column| spread(column.counted)),
    ));
    rows.push(row(
        "measured by the benchmark",
        columns.iter().map(|column| spread(column.reported)),
    ));
    let differences = columns
        .iter()
        .map(|column| format!("{:.2} %", 100.0 * column.difference));
    rows.push(row("counted and measured differ by", differences));
    text += &aligned(&rows);

    if let Some((floor, above)) = columns.split_first() {
        let mut rows = vec![head(
            "above the floor",
            above.iter().map(|column| column.series.clone()),
        )];
        for (index, name) in names.iter().enumerate() {
            let base = floor.groups[index].median;
            let cells = above
                .iter()
                .map(|column| format!("{:.0}", column.groups[index].median - base));
            rows.push(row(name, cells));
        }
        let sums = above
            .iter()
            .map(|column| format!("{:.0}", column.sum() - floor.sum()));
        rows.push(row("sum", sums));
        let measured = above
            .iter()
            .map(|column| format!("{:.0}", column.reported.median - floor.reported.median));
        rows.push(row("measured by the benchmark", measured));
        text.push('\n');
        text += &aligned(&rows);
    }

    for column in columns {
        let top: Vec<_> = column
            .other
            .iter()
            .take(SHOWN)
            .filter(|(_, instructions)| *instructions >= 0.5)
            .map(|(name, instructions)| format!("{name} {instructions:.1}"))
            .collect();
        if !top.is_empty() {
            let _ = write!(text, "\nother of {}: {}\n", column.series, top.join(", "));
        }
    }
    text
}

fn head(title: &str, series: impl Iterator<Item = String>) -> Vec<String> {
    row(title, series)
}

fn row(name: &str, cells: impl Iterator<Item = String>) -> Vec<String> {
    std::iter::once(name.to_owned()).chain(cells).collect()
}

/// The median, and what the boots lie between if that is more than one figure.
fn spread(spread: Spread) -> String {
    let Spread { median, min, max } = spread;
    let range = (format!("{min:.0}"), format!("{max:.0}"));
    if range.0 == range.1 {
        format!("{median:.0}")
    } else {
        format!("{median:.0} ({}–{})", range.0, range.1)
    }
}

/// A Markdown table whose first row is its head, names to the left and figures to the right.
fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let mut text = String::new();
    for (number, row) in rows.iter().enumerate() {
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            let _ = match column {
                0 => write!(text, "| {cell:<width$} "),
                _ => write!(text, "| {cell:>width$} "),
            };
        }
        text.push_str("|\n");
        if number == 0 {
            for (column, &width) in widths.iter().enumerate() {
                let end = if column == 0 { "-" } else { ":" };
                let _ = write!(text, "|{}{end}", "-".repeat(width + 1));
            }
            text.push_str("|\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_shown_if_there_is_one() {
        let of = |median, min, max| spread(Spread { median, min, max });
        assert_eq!(of(10.2, 10.1, 10.3), "10");
        assert_eq!(of(10.0, 9.0, 12.0), "10 (9–12)");
    }

    #[test]
    fn tables_are_aligned_markdown() {
        let rows = [
            row("a", ["b".into()].into_iter()),
            row("long", ["1 (0–2)".into()].into_iter()),
        ];
        assert_eq!(
            aligned(&rows),
            "| a    |       b |\n|------|--------:|\n| long | 1 (0–2) |\n"
        );
    }
}
