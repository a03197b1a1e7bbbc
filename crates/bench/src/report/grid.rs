//! The result as rows and columns, and those as text for a terminal.

use comfy_table::{
    Attribute, Cell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle,
};

use crate::paging::{Delivery, PagingReport, Point, PublishedRate, Series};
use crate::stats::Spread;
use crate::timing::Timing;
use crate::units::{figure, latency};

/// Rows and columns of text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Grid {
    /// Column headings; all columns but the first `words` are numbers.
    pub(crate) headings: Vec<String>,
    /// How many columns at the left are words.
    pub(crate) words: usize,
    /// The rows; each is as long as the headings.
    pub(crate) rows: Vec<Vec<String>>,
}

/// What stands where there is no figure.
pub(crate) const NOTHING: &str = "\u{2013}";

/// A column: its heading and the text for a point.
type Column<'a> = (&'a str, Box<dyn Fn(&Point) -> Option<String> + 'a>);

/// The main table.
pub(crate) fn results(report: &PagingReport) -> Grid {
    let mut columns: Vec<Column<'_>> = vec![
        (
            "rate",
            Box::new(|point| Some(figure(point.rate_kpages_per_s.median))),
        ),
        (
            "low..high",
            Box::new(|point| Some(extremes(&point.rate_kpages_per_s))),
        ),
        (
            "IQR",
            Box::new(|point| Some(figure(point.rate_kpages_per_s.iqr()))),
        ),
        (
            "per vCPU",
            Box::new(|point| Some(figure(point.rate_per_vcpu_kpages_per_s.median))),
        ),
        (
            "p50",
            Box::new(|point| point.latency.map(|seen| latency(seen.p50_ns))),
        ),
        (
            "p99",
            Box::new(|point| point.latency.map(|seen| latency(seen.p99_ns))),
        ),
        (
            "max",
            Box::new(|point| point.latency.map(|seen| latency(seen.max_ns))),
        ),
    ];
    if report.origin.timing == Timing::Instructions {
        let cost = |point: &Point| point.instructions_per_page;
        columns.push((
            "instructions/page",
            Box::new(move |p| cost(p).map(|s| figure(s.median))),
        ));
    }
    if let Some(published) = &report.published {
        columns.push((
            "published",
            Box::new(|point| {
                let rate = published
                    .at(point.vcpus)
                    .filter(|_| point.series.fault_around == 1)?;
                match point.series.delivery {
                    Delivery::None => None,
                    Delivery::Uffd => Some(figure(f64::from(rate.uffd_kpages_per_s))),
                    Delivery::Exit => Some(figure(f64::from(rate.exit_kpages_per_s))),
                }
            }),
        ));
    }
    let rows = report.points.iter().map(|point| {
        let mut row = vec![point.vcpus.to_string(), point.series.to_string()];
        row.extend(
            columns
                .iter()
                .map(|(_, text)| text(point).unwrap_or_else(|| NOTHING.into())),
        );
        row
    });
    let mut headings = vec!["vCPUs".to_owned(), "delivery".to_owned()];
    headings.extend(columns.iter().map(|(heading, _)| (*heading).to_owned()));
    Grid {
        headings,
        words: 2,
        rows: rows.collect(),
    }
}

/// Exits over userfaultfd; `None` if they were not both measured.
pub(crate) fn comparison(report: &PagingReport) -> Option<Grid> {
    if report.ratios.is_empty() {
        return None;
    }
    let instructions = report.origin.timing == Timing::Instructions;
    let mut headings = vec![
        "vCPUs",
        "delivery",
        "rate, times uffd",
        "low..high",
        "of medians",
    ];
    if instructions {
        headings.extend(["instructions, times uffd", "low..high", "of medians"]);
    }
    if report.published.is_some() {
        headings.push("published");
    }
    let rows = report.ratios.iter().map(|ratio| {
        let rate = &ratio.rate;
        let mut row = vec![
            ratio.vcpus.to_string(),
            ratio.series.to_string(),
            times(rate.paired.median),
            extremes(&rate.paired),
            times(rate.of_medians),
        ];
        if instructions {
            row.extend(ratio.instructions.map_or_else(
                || [NOTHING; 3].map(str::to_owned),
                |cost| {
                    [
                        times(cost.paired.median),
                        extremes(&cost.paired),
                        times(cost.of_medians),
                    ]
                },
            ));
        }
        if report.published.is_some() {
            row.push(
                published_ratio(report, ratio.vcpus, ratio.series)
                    .map_or_else(|| NOTHING.into(), times),
            );
        }
        row
    });
    let rows = rows.collect();
    Some(Grid {
        headings: headings.into_iter().map(str::to_owned).collect(),
        words: 2,
        rows,
    })
}

/// The published ratio that belongs beside one of ours.
pub(crate) fn published_ratio(report: &PagingReport, vcpus: u32, series: Series) -> Option<f64> {
    let published = report
        .published
        .as_ref()
        .filter(|_| series.fault_around == 1)?;
    published.at(vcpus).map(PublishedRate::ratio)
}

/// A ratio with its sign.
pub(crate) fn times(ratio: f64) -> String {
    format!("{}\u{d7}", figure(ratio))
}

pub(crate) fn extremes(spread: &Spread) -> String {
    format!("{}..{}", figure(spread.min), figure(spread.max))
}

/// What the columns of [`results`] and [`comparison`] mean.
pub(crate) fn legend(report: &PagingReport) -> Vec<String> {
    let mut lines = vec![format!(
        "rate: thousand pages of {} made present per second, all vCPUs together; median of {} \
         rounds, lowest and highest round, interquartile range. p50, p99, max: latency of a fault \
         as the guest sees it; {NOTHING} where nobody knows which touches faulted.",
        crate::units::ByteSize(report.plan.page_bytes),
        report.plan.runs
    )];
    if !report.ratios.is_empty() {
        lines.push(
            "times uffd: median of the ratios of runs of the same round, and the ratio of the two \
             medians. Rate: above 1, exits are faster. Instructions: below 1, exits are cheaper."
                .to_owned(),
        );
    }
    if let Some(published) = &report.published {
        lines.push(format!(
            "published: thousand pages per second, {}; {}.",
            if published.per_vcpu {
                "each vCPU"
            } else {
                "all vCPUs together"
            },
            published.source
        ));
    }
    lines
}

/// The whole report for a terminal.
pub(crate) fn terminal(report: &PagingReport, width: Option<u16>) -> String {
    let mut text = String::new();
    text.push_str(&title(report));
    text.push_str("\n\n");
    text.push_str(&lines(&results(report), width));
    text.push('\n');
    if let Some(comparison) = comparison(report) {
        text.push('\n');
        text.push_str(&lines(&comparison, width));
        text.push('\n');
    }
    text.push('\n');
    let wrap = usize::from(width.unwrap_or(100)).clamp(40, 110);
    for note in legend(report).iter().chain(&report.notes) {
        text.push_str(&bullet(note, wrap));
    }
    text.push('\n');
    for (name, value) in report.origin.facts.lines() {
        text.push_str(&format!("{name:<15}{value}\n"));
    }
    text.push_str(&format!("{:<15}{}\n", "Timing", report.origin.timing));
    text
}

/// What was measured, in a line.
pub(crate) fn title(report: &PagingReport) -> String {
    let plan = &report.plan;
    let switches = [
        (plan.overlap, ", all vCPUs over all of memory"),
        (plan.pre_fault, ", exits pre-fault"),
        (plan.pin, ", vCPUs pinned"),
    ];
    let switches = switches.map(|(on, words)| if on { words } else { "" });
    format!(
        "Demand paging: {} per vCPU, {} {}, {} {}{}",
        crate::units::ByteSize(plan.per_vcpu_bytes),
        plan.backing,
        plan.mode.to_uppercase(),
        plan.order,
        match plan.access.as_str() {
            "write" => "writes",
            _ => "reads",
        },
        switches.concat(),
    )
}

/// Lines above, below, and under the headings.
const STYLE: TableStyle = TableStyle::new()
    .top_border(LineStyle::none().fill('─').junction('─'))
    .header_separator(LineStyle::none().fill('─').junction('─'))
    .bottom_border(LineStyle::none().fill('─').junction('─'));

/// Rows and columns as text.
pub(crate) fn lines(grid: &Grid, width: Option<u16>) -> String {
    let mut table = Table::new();
    table.load_style(STYLE);
    table.set_header(
        grid.headings
            .iter()
            .map(|heading| Cell::new(heading).add_attribute(Attribute::Bold)),
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
            Cell::new(text).set_alignment(side)
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
