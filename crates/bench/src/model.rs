//! The one model of all benchmarks: a run measures quantities, and everything that a report shows
//! follows from them.
//!
//! A benchmark says which [`Quantity`]s its runs measure, which [`Column`]s follow from the quantities
//! of one run, and which [`Comparison`]s set one cell against another. A *cell* is one series at one
//! number of vCPUs. As data, all of it is [`Record`]s, one value each (long format).

use std::collections::BTreeMap;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::latency::{Latency, LatencyLog};
use crate::stats::{RatioOf, Spread};
use crate::timing::Timing;
use crate::units::{float, whole};

/// Something that runs measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quantity {
    /// Its name in data; ends with the unit where there is one.
    pub name: &'static str,
    /// The unit: `ns`, `bytes`, or what is counted.
    pub unit: &'static str,
    /// The heading of its column.
    pub label: &'static str,
    /// Whether a run has a value for each second.
    pub each_second: bool,
}

impl Quantity {
    /// A quantity that a run has one value of.
    #[must_use]
    pub const fn new(name: &'static str, unit: &'static str, label: &'static str) -> Self {
        let each_second = false;
        Self {
            name,
            unit,
            label,
            each_second,
        }
    }

    /// The same quantity, measured in each second of a run.
    #[must_use]
    pub const fn each_second(self) -> Self {
        Self {
            each_second: true,
            ..self
        }
    }
}

/// Share of the machine's CPUs that others took during a run; see [`crate::noise`].
pub const CPU_BY_OTHERS: Quantity = Quantity::new("cpu_by_others", "of all CPUs", "CPU by others");
/// Share of a run's time in which a task waited for a CPU; see [`crate::noise`].
pub const CPU_PRESSURE: Quantity = Quantity::new("cpu_pressure", "of the time", "CPU pressure");
/// Runs of a cell that were lost and repeated.
pub const LOST_RUNS: Quantity = Quantity::new("lost_runs", "runs", "lost runs");

/// What one run gave.
#[derive(Debug, Clone, Default)]
pub struct Sample {
    values: Vec<(Quantity, f64, Option<String>)>,
    logs: Vec<(Quantity, LatencyLog)>,
}

impl Sample {
    /// A count.
    #[must_use]
    pub fn count(self, quantity: Quantity, count: u64) -> Self {
        self.value(quantity, float(count))
    }

    /// A time; the quantity's unit is nanoseconds.
    #[must_use]
    pub fn time(self, quantity: Quantity, time: Duration) -> Self {
        self.count(quantity, u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
    }

    /// A value. A quantity that is measured each second has several.
    #[must_use]
    pub fn value(mut self, quantity: Quantity, value: f64) -> Self {
        self.values.push((quantity, value, None));
        self
    }

    /// That something happened, and in which words.
    #[must_use]
    pub fn event(mut self, quantity: Quantity, words: &str) -> Self {
        self.values.push((quantity, 1.0, Some(words.to_owned())));
        self
    }

    /// Latencies, which are merged over all runs of a cell.
    #[must_use]
    pub fn log(mut self, quantity: Quantity, log: LatencyLog) -> Self {
        self.logs.push((quantity, log));
        self
    }

    /// The first value of a quantity.
    #[must_use]
    pub fn get(&self, quantity: Quantity) -> Option<f64> {
        let mut values = self.values.iter();
        values.find_map(|(of, value, _)| (*of == quantity).then_some(*value))
    }
}

/// One value of a report: of one run, or over all measured runs of a cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The round of the run, from 1; absent where the value is over all runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<u32>,
    /// How the value sums up all runs: `median`, `p99`, `sum`, ...; absent for the value of one run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over_runs: Option<String>,
    /// The series, in words.
    pub series: String,
    /// The same as values: `vcpus`, and what the benchmark's series differ in.
    pub axes: Map<String, Value>,
    /// What was measured.
    pub quantity: String,
    /// Its unit.
    pub unit: String,
    /// The value.
    pub value: f64,
    /// What happened, where the quantity is an event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// The axis of quantities that are measured each second of a run.
pub const SECOND: &str = "second";

/// What runs of one cell gave, as it comes in.
#[derive(Debug, Clone, Default)]
pub(crate) struct Collected {
    pub(crate) runs: Vec<(u32, Sample)>,
    pub(crate) lost_runs: u32,
}

impl Collected {
    /// The records of a cell with these axes, which `series` names.
    pub(crate) fn records(&self, series: &str, axes: &Map<String, Value>) -> Vec<Record> {
        let record = |quantity: Quantity, value| Record {
            run: None,
            over_runs: None,
            series: series.to_owned(),
            axes: axes.clone(),
            quantity: quantity.name.to_owned(),
            unit: quantity.unit.to_owned(),
            value,
            text: None,
        };
        let mut records = Vec::new();
        let mut logs: Vec<(Quantity, LatencyLog)> = Vec::new();
        for (round, sample) in &self.runs {
            for (index, (quantity, value, text)) in sample.values.iter().enumerate() {
                let of_quantity = |values: &[(Quantity, f64, Option<String>)]| {
                    values.iter().filter(|(of, ..)| of == quantity).count()
                };
                let mut record = Record {
                    run: Some(*round),
                    text: text.clone(),
                    ..record(*quantity, *value)
                };
                if quantity.each_second {
                    let second = 1 + of_quantity(&sample.values[..index]);
                    record.axes.insert(SECOND.to_owned(), second.into());
                }
                records.push(record);
            }
            for (quantity, log) in &sample.logs {
                match logs.iter_mut().find(|(of, _)| of == quantity) {
                    Some((_, all)) => all.merge(log),
                    None => logs.push((*quantity, log.clone())),
                }
            }
        }
        for (quantity, log) in logs {
            let summary = log.summary().map_or_else(Vec::new, Latency::figures);
            records.extend(summary.into_iter().map(|(over, value)| Record {
                over_runs: Some(over.to_owned()),
                ..record(quantity, float(value))
            }));
        }
        records.push(Record {
            over_runs: Some("sum".to_owned()),
            ..record(LOST_RUNS, f64::from(self.lost_runs))
        });
        records
    }
}

/// One measured run, read from records.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// The round, from 1.
    pub round: u32,
    /// Number of vCPUs.
    pub vcpus: u32,
    values: BTreeMap<String, Vec<f64>>,
    texts: BTreeMap<String, String>,
}

impl Run {
    /// The value of a quantity, the first if there are several.
    #[must_use]
    pub fn get(&self, quantity: Quantity) -> Option<f64> {
        self.values.get(quantity.name)?.first().copied()
    }

    /// The value of a quantity that is a count; 0 if it was not measured.
    #[must_use]
    pub fn count(&self, quantity: Quantity) -> u64 {
        self.get(quantity).map_or(0, whole)
    }

    /// All values of a quantity, second by second.
    #[must_use]
    pub fn all(&self, quantity: Quantity) -> &[f64] {
        self.values.get(quantity.name).map_or(&[], Vec::as_slice)
    }

    /// What happened, where the quantity is an event.
    #[must_use]
    pub fn text(&self, quantity: Quantity) -> Option<&str> {
        self.texts.get(quantity.name).map(String::as_str)
    }
}

/// One series at one number of vCPUs.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell<S> {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The series.
    pub series: S,
    /// The measured runs, by round.
    pub runs: Vec<Run>,
    over_runs: BTreeMap<(String, String), f64>,
}

impl<S> Cell<S> {
    /// The spread of a column over the runs that have it.
    #[must_use]
    pub fn spread(&self, column: Column) -> Option<Spread> {
        let values: Vec<f64> = self.runs.iter().filter_map(column.value).collect();
        Spread::of(&values)
    }

    /// The latencies of all runs; `None` if there were none, or nobody knows them.
    #[must_use]
    pub fn latency(&self, quantity: Quantity) -> Option<Latency> {
        let at = |over: &str| Some(whole(self.over_runs(quantity, over)?));
        Latency::of_figures(at)
    }

    /// A value over all runs.
    #[must_use]
    pub fn over_runs(&self, quantity: Quantity, over: &str) -> Option<f64> {
        let key = (quantity.name.to_owned(), over.to_owned());
        self.over_runs.get(&key).copied()
    }

    /// This cell's column over that of `under`, run by run of the same round: what drifts from round
    /// to round cancels out. `None` if there is no round in which both have it.
    #[must_use]
    pub fn over(&self, under: &Self, column: Column) -> Option<RatioOf> {
        let both = self.runs.iter().filter_map(|run| {
            let mut others = under.runs.iter();
            let other = others.find(|other| other.round == run.round)?;
            Some(((column.value)(run)?, (column.value)(other)?))
        });
        let (over, under): (Vec<f64>, Vec<f64>) = both.unzip();
        RatioOf::of(&over, &under)
    }
}

/// The cells of records, in the order in which they come. Records that summarise columns are left
/// out: they follow from the others.
///
/// # Errors
/// The axes of a record are none of the benchmark's series.
pub fn cells<S: DeserializeOwned>(records: &[Record]) -> Result<Vec<Cell<S>>, serde_json::Error> {
    let mut places: Vec<Map<String, Value>> = Vec::new();
    let mut cells: Vec<Cell<S>> = Vec::new();
    for record in records {
        let mut axes = record.axes.clone();
        axes.remove(SECOND);
        let place = places.iter().position(|known| *known == axes);
        let place = match place {
            Some(place) => place,
            None => {
                let vcpus = axes.get("vcpus").cloned().unwrap_or(Value::Null);
                cells.push(Cell {
                    vcpus: serde_json::from_value(vcpus)?,
                    series: serde_json::from_value(Value::Object(axes.clone()))?,
                    runs: Vec::new(),
                    over_runs: BTreeMap::new(),
                });
                places.push(axes);
                cells.len() - 1
            }
        };
        let cell = &mut cells[place];
        let name = record.quantity.clone();
        match (record.run, &record.over_runs) {
            (Some(round), _) => {
                let known = cell.runs.iter().position(|run| run.round == round);
                let index = known.unwrap_or(cell.runs.len());
                if known.is_none() {
                    cell.runs.push(Run {
                        round,
                        vcpus: cell.vcpus,
                        values: BTreeMap::new(),
                        texts: BTreeMap::new(),
                    });
                }
                let run = &mut cell.runs[index];
                if let Some(text) = &record.text {
                    run.texts.insert(name.clone(), text.clone());
                }
                run.values.entry(name).or_default().push(record.value);
            }
            (None, Some(over)) => {
                cell.over_runs.insert((name, over.clone()), record.value);
            }
            (None, None) => {}
        }
    }
    Ok(cells)
}

/// What follows from the quantities of one run.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    /// Its name in data.
    pub name: &'static str,
    /// Its unit.
    pub unit: &'static str,
    /// The only timing mode in which it means something, if there is one.
    pub timing: Option<Timing>,
    /// Its value; `None` where a run has none.
    pub value: fn(&Run) -> Option<f64>,
}

impl Column {
    /// A column that means something in every timing mode.
    #[must_use]
    pub const fn new(
        name: &'static str,
        unit: &'static str,
        value: fn(&Run) -> Option<f64>,
    ) -> Self {
        Self {
            name,
            unit,
            timing: None,
            value,
        }
    }

    /// Whether it means something in a timing mode.
    #[must_use]
    pub fn is_of(&self, timing: Timing) -> bool {
        self.timing.is_none_or(|only| only == timing)
    }
}

/// Finds what a cell is compared with.
pub type Under<S> = for<'c> fn(&'c Cell<S>, &'c [Cell<S>]) -> Option<&'c Cell<S>>;

/// A cell's column set against that of another cell.
#[derive(Debug)]
pub struct Comparison<S: 'static> {
    /// Its name in data.
    pub name: &'static str,
    /// What is compared.
    pub column: Column,
    /// With which cell; `None` where a cell is not compared.
    pub under: Under<S>,
    /// Whether the other cell is divided by this one: "so many times as fast".
    pub inverse: bool,
}

impl<S> Comparison<S> {
    /// This cell's column over the other's.
    #[must_use]
    pub const fn new(name: &'static str, column: Column, under: Under<S>) -> Self {
        Self {
            name,
            column,
            under,
            inverse: false,
        }
    }

    /// The other's column over this cell's.
    #[must_use]
    pub const fn inverse(name: &'static str, column: Column, under: Under<S>) -> Self {
        Self {
            inverse: true,
            ..Self::new(name, column, under)
        }
    }

    /// The ratio of a cell.
    #[must_use]
    pub fn of(&self, cell: &Cell<S>, cells: &[Cell<S>]) -> Option<RatioOf> {
        let under = (self.under)(cell, cells)?;
        if self.inverse {
            under.over(cell, self.column)
        } else {
            cell.over(under, self.column)
        }
    }
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
