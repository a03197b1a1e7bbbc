//! Reports of version 1, in which each benchmark had fields of its own. Their runs become records by
//! structure: the fields of a run are the names of quantities, and those of a series are axes.

use serde_json::{Map, Value};

use super::{Origin, Report, SCHEMA, Shown};
use crate::benchmark::summaries;
use crate::model::{LOST_RUNS, Record, SECOND};

/// Opens a report of version 1.
pub(super) fn open<B: Shown>(report: &Value) -> Result<Report<B>, serde_json::Error> {
    let origin: Origin = serde_json::from_value(report.clone())?;
    let plan: B = serde_json::from_value(report["plan"].clone())?;
    let mut records = Vec::new();
    for point in list(&report["points"]) {
        let series: B::Series = serde_json::from_value(point["series"].clone())?;
        let mut axes = Map::from_iter([("vcpus".to_owned(), point["vcpus"].clone())]);
        if let Value::Object(fields) = serde_json::to_value(series)? {
            axes.extend(fields);
        }
        let point_of = Cell::<B> {
            series: series.to_string(),
            axes,
            benchmark: std::marker::PhantomData,
        };
        for run in list(&point["runs"]) {
            let round = run["round"]
                .as_u64()
                .and_then(|round| u32::try_from(round).ok());
            point_of.take(round, "", run, &mut records);
            // The first version said this of the report.
            point_of.take(round, "", &pick(report, "knows_stolen_time"), &mut records);
        }
        for (name, figures) in fields(point) {
            if figures.get("p50_ns").is_some() {
                point_of.take_latency(name, figures, &mut records);
            }
        }
        records.extend(
            point_of
                .record(LOST_RUNS.name, point["lost_runs"].as_f64())
                .map(|record| Record {
                    over_runs: Some("sum".to_owned()),
                    ..record
                }),
        );
    }
    records.extend(summaries::<B>(&records, origin.timing)?);
    Ok(Report {
        schema: SCHEMA.to_owned(),
        benchmark: B::NAME.to_owned(),
        origin,
        command: plan.command(),
        published: plan.published(),
        plan,
        notes: serde_json::from_value(report["notes"].clone())?,
        records,
    })
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn fields(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

/// One field of an object, if it has it.
fn pick(value: &Value, name: &str) -> Value {
    let field = value
        .get(name)
        .map(|field| (name.to_owned(), field.clone()));
    Value::Object(field.into_iter().collect())
}

/// One cell of an old report.
struct Cell<B> {
    series: String,
    axes: Map<String, Value>,
    benchmark: std::marker::PhantomData<B>,
}

impl<B: Shown> Cell<B> {
    /// A record of a value, without saying of which run.
    fn record(&self, quantity: &str, value: Option<f64>) -> Option<Record> {
        let known = B::QUANTITIES.iter().chain(&[LOST_RUNS]);
        let unit = known.into_iter().find(|known| known.name == quantity);
        Some(Record {
            run: None,
            over_runs: None,
            series: self.series.clone(),
            axes: self.axes.clone(),
            quantity: quantity.to_owned(),
            unit: unit.map_or("", |known| known.unit).to_owned(),
            value: value?,
            text: None,
        })
    }

    /// The fields of a run; those of an object in it get its name before theirs.
    fn take(&self, run: Option<u32>, prefix: &str, from: &Value, records: &mut Vec<Record>) {
        for (name, field) in fields(from).filter(|(name, _)| *name != "round") {
            let quantity = format!("{prefix}{name}");
            let record = |value| self.record(&quantity, value).map(|r| Record { run, ..r });
            match field {
                Value::Object(_) => self.take(run, &format!("{quantity}."), field, records),
                Value::Array(seconds) => {
                    records.extend((1u32..).zip(seconds).filter_map(|(second, value)| {
                        let mut record = record(value.as_f64())?;
                        record.axes.insert(SECOND.to_owned(), second.into());
                        Some(record)
                    }));
                }
                Value::String(words) => records.extend(record(Some(1.0)).map(|record| Record {
                    text: Some(words.clone()),
                    ..record
                })),
                Value::Bool(is) => records.extend(record(Some(f64::from(u8::from(*is))))),
                value => records.extend(record(value.as_f64())),
            }
        }
    }

    /// The latencies of all runs.
    fn take_latency(&self, name: &str, figures: &Value, records: &mut Vec<Record>) {
        let named = format!("{name}_ns");
        for (over, value) in fields(figures) {
            let over = over.trim_end_matches("_ns").to_owned();
            records.extend(self.record(&named, value.as_f64()).map(|record| Record {
                over_runs: Some(over),
                unit: "ns".to_owned(),
                ..record
            }));
        }
    }
}
