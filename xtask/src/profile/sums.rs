//! From counters to instructions per page and group.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::groups::{Groups, OTHER};

/// How far the groups' sum may be from what the benchmark measured.
pub(super) const TOLERANCE: f64 = 0.02;

/// What one boot showed of one series.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Boot {
    /// The series.
    pub(super) series: String,
    /// Pages that all its runs made present.
    pub(super) pages: u64,
    /// What the benchmark's clock showed, over all runs: a nanosecond is an instruction.
    pub(super) reported: u64,
    /// Instructions by function, over all runs.
    pub(super) functions: BTreeMap<String, u64>,
}

/// Pages and nanoseconds of the benchmark's runs, and how many there were.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Reported {
    pub(super) runs: u64,
    pub(super) pages: u64,
    pub(super) nanoseconds: u64,
}

impl Reported {
    /// Reads the benchmark's JSON, which must have one series. A record of a run has its number.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let report: Value = serde_json::from_str(text)?;
        let records = report["records"].as_array().context("no records")?;
        let of_runs = || records.iter().filter(|record| record["run"].is_u64());
        let Some(first) = of_runs().next() else {
            bail!("no record of a run");
        };
        if of_runs().any(|record| record["axes"] != first["axes"]) {
            bail!("runs of several series, not of one");
        }
        // Whole numbers, which the report has as fractions. How many runs have them, and their sum.
        let sum = |quantity: &str| {
            of_runs()
                .filter(|record| record["quantity"] == quantity)
                .map(|record| record["value"].as_f64())
                .try_fold((0, 0), |(runs, sum), value| {
                    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
                    value.map(|value| (runs + 1, sum + value.round() as u64))
                })
                .with_context(|| format!("a {quantity} that is no number"))
        };
        let (runs, pages) = sum("pages")?;
        let (timed, nanoseconds) = sum("elapsed_ns")?;
        if runs != timed {
            bail!("{runs} runs have pages, and {timed} have elapsed_ns");
        }
        let sums = Self {
            runs,
            pages,
            nanoseconds,
        };
        if sums.pages == 0 {
            bail!("no page was made present");
        }
        Ok(sums)
    }
}

/// The median of several boots, and the smallest and the largest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Spread {
    fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median = match sorted.len() % 2 {
            0 => f64::midpoint(*sorted.get(middle.checked_sub(1)?)?, sorted[middle]),
            _ => sorted[middle],
        };
        Some(Self {
            median,
            min: *sorted.first()?,
            max: *sorted.last()?,
        })
    }
}

/// One series, per page.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Column {
    /// The series.
    pub(super) series: String,
    /// By group, in the table's order, `other` last.
    pub(super) groups: Vec<Spread>,
    /// All instructions that the plugin counted.
    pub(super) counted: Spread,
    /// What the benchmark measured.
    pub(super) reported: Spread,
    /// The largest difference of the two in one boot, as a part of what was measured.
    pub(super) difference: f64,
    /// The functions of `other`, by their median, largest first.
    pub(super) other: Vec<(String, f64)>,
}

impl Column {
    /// Sums up the boots of one series.
    pub(super) fn new(series: &str, boots: &[Boot], groups: &Groups) -> Result<Self> {
        let boots: Vec<_> = boots.iter().filter(|boot| boot.series == series).collect();
        let spread = |value: &dyn Fn(&Boot) -> f64| {
            let values: Vec<_> = boots.iter().map(|boot| value(boot)).collect();
            Spread::of(&values).with_context(|| format!("no boot of {series}"))
        };
        let of_group = |boot: &Boot, group: &str| {
            let functions = boot.functions.iter();
            let sum = functions
                .filter(|(name, _)| groups.group(name) == group)
                .map(|(_, count)| count)
                .sum();
            per_page(boot, sum)
        };
        let names = groups.names().iter().map(String::as_str).chain([OTHER]);
        let counted = |boot: &Boot| per_page(boot, boot.functions.values().sum());
        let reported = |boot: &Boot| per_page(boot, boot.reported);
        let differences = boots
            .iter()
            .map(|boot| (counted(boot) / reported(boot) - 1.0).abs());
        let mut other: Vec<_> = boots
            .iter()
            .flat_map(|boot| boot.functions.keys())
            .filter(|name| groups.group(name) == OTHER)
            .map(|name| {
                let of = |boot: &Boot| {
                    per_page(boot, boot.functions.get(name).copied().unwrap_or_default())
                };
                Ok((name.clone(), spread(&of)?.median))
            })
            .collect::<Result<_>>()?;
        other.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
        other.dedup();
        Ok(Self {
            series: series.to_owned(),
            groups: names
                .map(|group| spread(&|boot: &Boot| of_group(boot, group)))
                .collect::<Result<_>>()?,
            counted: spread(&counted)?,
            reported: spread(&reported)?,
            difference: differences.fold(0.0, f64::max),
            other,
        })
    }

    /// The groups' medians, added.
    pub(super) fn sum(&self) -> f64 {
        self.groups.iter().map(|group| group.median).sum()
    }

    /// An error if the groups do not add up to what the benchmark measured: in a boot, or in the
    /// medians that the table shows.
    pub(super) fn check(&self) -> Result<()> {
        let of_medians = (self.sum() / self.reported.median - 1.0).abs();
        let difference = self.difference.max(of_medians);
        if difference > TOLERANCE {
            bail!(
                "{}: the groups' sum is {:.0} instructions per page, and the benchmark measured {:.0}; \
                 {:.1} % apart at most",
                self.series,
                self.sum(),
                self.reported.median,
                100.0 * difference
            );
        }
        Ok(())
    }
}

#[allow(clippy::cast_precision_loss)] // below 2^53 for years
fn per_page(boot: &Boot, instructions: u64) -> f64 {
    instructions as f64 / boot.pages as f64
}

#[cfg(test)]
#[path = "sums_tests.rs"]
mod tests;
