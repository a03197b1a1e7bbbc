//! Results as rows and columns, and those as text for a terminal.

use std::fmt;

use comfy_table::{Attribute, CellAlignment, ContentArrangement, LineStyle, TableStyle};

use crate::model::{Cell, Column, Comparison};
use crate::stats::Spread;
use crate::units::{figure, latency, whole};

/// Rows and columns of text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grid {
    /// Column headings; all columns but the first `words` are numbers.
    pub headings: Vec<String>,
    /// How many columns at the left are words.
    pub words: usize,
    /// The rows; each is as long as the headings.
    pub rows: Vec<Vec<String>>,
}

/// What stands where there is no figure.
pub(crate) const NOTHING: &str = "\u{2013}";

/// A table that columns are added to.
pub(crate) struct Table<R> {
    grid: Grid,
    rows: Vec<R>,
}

impl<R> Table<R> {
    /// The rows, each of which belongs to a number of vCPUs and to something with a name, such as a
    /// series; `what` is the heading of the names.
    pub(crate) fn by_name(what: &str, rows: impl IntoIterator<Item = (u32, String, R)>) -> Self {
        let rows = rows.into_iter();
        let (names, rows) = rows
            .map(|(vcpus, name, row)| (vec![vcpus.to_string(), name], row))
            .unzip();
        let grid = Grid {
            headings: vec!["vCPUs".to_owned(), what.to_owned()],
            words: 2,
            rows: names,
        };
        Self { grid, rows }
    }

    /// Adds a column that every row has a text for.
    pub(crate) fn column(self, heading: &str, text: impl Fn(&R) -> String) -> Self {
        self.maybe(heading, |row| Some(text(row)))
    }

    /// Adds a column that shows [`NOTHING`] where a row has no text for it.
    pub(crate) fn maybe(mut self, heading: &str, text: impl Fn(&R) -> Option<String>) -> Self {
        self.grid.headings.push(heading.to_owned());
        for (cells, row) in self.grid.rows.iter_mut().zip(&self.rows) {
            cells.push(text(row).unwrap_or_else(|| NOTHING.to_owned()));
        }
        self
    }

    /// The table with all its columns.
    pub(crate) fn grid(self) -> Grid {
        self.grid
    }

    /// The same; `None` if it has no rows.
    pub(crate) fn if_any(self) -> Option<Grid> {
        (!self.rows.is_empty()).then_some(self.grid)
    }
}

impl<'v, S: fmt::Display> Table<&'v Cell<S>> {
    /// A row for each cell.
    pub(crate) fn of(what: &str, cells: impl IntoIterator<Item = &'v Cell<S>>) -> Self {
        let cells = cells.into_iter();
        Self::by_name(
            what,
            cells.map(|cell| (cell.vcpus, cell.series.to_string(), cell)),
        )
    }

    /// The median of a column of the data.
    pub(crate) fn median(self, heading: &str, column: Column, show: fn(f64) -> String) -> Self {
        self.maybe(heading, |cell| Some(show(cell.spread(column)?.median)))
    }

    /// The extremes of a column of the data.
    pub(crate) fn extremes(self, heading: &str, column: Column, show: fn(f64) -> String) -> Self {
        self.maybe(heading, |cell| {
            let spread = cell.spread(column)?;
            Some(format!("{}..{}", show(spread.min), show(spread.max)))
        })
    }

    /// The median ratio of a comparison.
    pub(crate) fn ratio(self, heading: &str, of: &Comparison<S>, cells: &[Cell<S>]) -> Self {
        self.maybe(heading, |cell| {
            Some(times(of.of(cell, cells)?.paired.median))
        })
    }

    /// The extremes of a comparison's ratios.
    pub(crate) fn ratio_extremes(
        self,
        heading: &str,
        of: &Comparison<S>,
        cells: &[Cell<S>],
    ) -> Self {
        self.maybe(heading, |cell| Some(extremes(&of.of(cell, cells)?.paired)))
    }

    /// The ratio of the medians of a comparison.
    pub(crate) fn ratio_of_medians(
        self,
        heading: &str,
        of: &Comparison<S>,
        cells: &[Cell<S>],
    ) -> Self {
        self.maybe(heading, |cell| Some(times(of.of(cell, cells)?.of_medians)))
    }
}

/// A ratio with its sign.
pub(crate) fn times(ratio: f64) -> String {
    format!("{}\u{d7}", figure(ratio))
}

pub(crate) fn extremes(spread: &Spread) -> String {
    format!("{}..{}", figure(spread.min), figure(spread.max))
}

/// Nanoseconds with the unit that suits them.
pub(crate) fn ns(ns: f64) -> String {
    latency(whole(ns))
}

/// Lines above, below, and under the headings.
const STYLE: TableStyle = TableStyle::new()
    .top_border(LineStyle::none().fill('─').junction('─'))
    .header_separator(LineStyle::none().fill('─').junction('─'))
    .bottom_border(LineStyle::none().fill('─').junction('─'));

/// Rows and columns as text.
pub(crate) fn lines(grid: &Grid, width: Option<u16>) -> String {
    let mut table = comfy_table::Table::new();
    table.load_style(STYLE);
    table.set_header(
        grid.headings
            .iter()
            .map(|heading| comfy_table::Cell::new(heading).add_attribute(Attribute::Bold)),
    );
    if let Some(width) = width {
        table
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(width);
    } else {
        table.set_content_arrangement(ContentArrangement::Disabled);
    }
    let mut last = "";
    for row in &grid.rows {
        // What several rows have in common stands once above them.
        let repeated = row.first().is_some_and(|vcpus| vcpus == last);
        last = row.first().map_or("", String::as_str);
        table.add_row(row.iter().enumerate().map(|(column, text)| {
            let text = if column == 0 && repeated { "" } else { text };
            let numbers = column >= grid.words || text.bytes().all(|byte| byte.is_ascii_digit());
            let side = if numbers {
                CellAlignment::Right
            } else {
                CellAlignment::Left
            };
            comfy_table::Cell::new(text).set_alignment(side)
        }));
    }
    table.trim_fmt()
}

/// A remark as a bullet of lines at most `width` characters long, where words allow it.
pub(crate) fn bullet(text: &str, width: usize) -> String {
    let mut wrapped = String::from("-");
    let mut used = 1;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if used + 1 + length > width && used > 2 {
            wrapped.push_str("\n ");
            used = 1;
        }
        wrapped.push(' ');
        wrapped.push_str(word);
        used += 1 + length;
    }
    wrapped.push('\n');
    wrapped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remarks_wrap_between_words() {
        assert_eq!(bullet("one two three", 9), "- one two\n  three\n");
        assert_eq!(
            bullet("incomprehensibilities", 5),
            "- incomprehensibilities\n"
        );
    }
}
