//! What a person sees of a profile.

use std::fmt::Write;

use super::groups::{Groups, OTHER};
use super::sums::{Column, Spread};

/// Functions of `other` that are shown for each series.
const SHOWN: usize = 12;

/// The tables, in Markdown: per page, the same above the floor, and what has no group yet.
pub(super) fn show(columns: &[Column], groups: &Groups) -> String {
    let names = groups.names().iter().map(String::as_str).chain([OTHER]);
    let names: Vec<_> = names.enumerate().collect();
    let series = |column: &Column| column.series.clone();

    let mut rows = vec![row("instructions per page", columns, series)];
    for &(index, name) in &names {
        rows.push(row(name, columns, |column| spread(column.groups[index])));
    }
    let sum = |column: &Column| format!("{:.0}", column.sum());
    rows.push(row("sum of the medians", columns, sum));
    let counted = |column: &Column| spread(column.counted);
    rows.push(row("counted, all functions", columns, counted));
    let reported = |column: &Column| spread(column.reported);
    rows.push(row("measured by the benchmark", columns, reported));
    let difference = |column: &Column| format!("{:.2} %", 100.0 * column.difference);
    rows.push(row("counted and measured differ by", columns, difference));
    let mut text = aligned(&rows);

    if let Some((floor, columns)) = columns.split_first() {
        let above = |what: &dyn Fn(&Column) -> f64, column: &Column| {
            format!("{:.0}", what(column) - what(floor))
        };
        let mut rows = vec![row("above the floor", columns, series)];
        for &(index, name) in &names {
            let median = |column: &Column| column.groups[index].median;
            rows.push(row(name, columns, |column| above(&median, column)));
        }
        rows.push(row("sum", columns, |column| above(&Column::sum, column)));
        let reported = |column: &Column| column.reported.median;
        let measured = |column: &Column| above(&reported, column);
        rows.push(row("measured by the benchmark", columns, measured));
        text += &format!("\n{}", aligned(&rows));
    }

    for column in columns {
        let top = column.other.iter().take(SHOWN);
        let top: Vec<_> = top
            .filter(|(_, instructions)| *instructions >= 0.5)
            .map(|(name, instructions)| format!("{name} {instructions:.1}"))
            .collect();
        if !top.is_empty() {
            text += &format!("\nother of {}: {}\n", column.series, top.join(", "));
        }
    }
    text
}

fn row(name: &str, columns: &[Column], cell: impl Fn(&Column) -> String) -> Vec<String> {
    let cells = columns.iter().map(cell);
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
        let rows = [["a", "b"], ["long", "1 (0–2)"]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(
            aligned(&rows),
            "| a    |       b |\n|------|--------:|\n| long | 1 (0–2) |\n"
        );
    }
}
