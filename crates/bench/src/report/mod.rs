//! Results as people and programs read them: a terminal table, JSON, SVG and one self-contained HTML
//! page. All of them follow from the report's records.

pub(crate) mod charts;
mod grid;
mod html;
mod notes;
mod old;
mod out;
mod terminal;

pub use grid::Grid;
pub(crate) use grid::{NOTHING, Table, extremes, ns, times};
pub use html::Figure;
pub(crate) use html::count;
pub use out::{OutDir, OutError};

use serde::{Deserialize, Serialize};

use crate::benchmark::{Benchmark, summaries};
use crate::draw::{Chart, DrawError, Role, panels};
use crate::facts::Facts;
use crate::model::{Cell, Column, Record, cells};
use crate::noise::Busy;
use crate::timing::Timing;

/// Name and version of the JSON form. A field's meaning never changes under one version.
/// `docs/design/reports.md` documents it.
pub const SCHEMA: &str = "pagetide.report/2";

/// The environment that the caller knows of.
#[derive(Debug, Clone)]
pub struct Environment {
    /// What a nanosecond means.
    pub timing: Timing,
    /// Where the figures come from.
    pub facts: Facts,
    /// Runs of the whole benchmark that were lost before this one.
    pub lost_runs_outside: u32,
    /// What was found to be doubtful before anything ran.
    pub warnings: Vec<String>,
    /// Whether to watch what others take of the CPUs during runs.
    pub watches_cpus: bool,
}

impl Environment {
    /// This machine's, as far as it can be seen from here: nothing lost before, nothing doubtful.
    #[must_use]
    pub fn gather(timing: Timing) -> Self {
        Self {
            timing,
            facts: Facts::gather(timing),
            lost_runs_outside: 0,
            warnings: Vec::new(),
            watches_cpus: true,
        }
    }

    /// The same for made-up runs, in which this machine's load has no part.
    #[cfg(test)]
    pub(crate) fn of_made_up(timing: Timing) -> Self {
        Self {
            watches_cpus: false,
            ..Self::gather(timing)
        }
    }
}

/// Where the figures of a report come from. In JSON its fields are the report's own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// What a nanosecond means here.
    pub timing: Timing,
    /// The machine, its kernel, the build.
    pub facts: Facts,
    /// Runs that were lost and repeated, seen from inside.
    pub lost_runs: u32,
    /// Runs of the whole benchmark that the caller lost before this one and repeated.
    pub lost_runs_outside: u32,
}

/// The result of a benchmark, as data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Report<B: Benchmark> {
    /// [`SCHEMA`].
    pub schema: String,
    /// [`Benchmark::NAME`].
    pub benchmark: String,
    /// Where the figures come from.
    #[serde(flatten)]
    pub origin: Origin,
    /// The command that measures the same.
    pub command: String,
    /// What was measured.
    pub plan: B,
    /// Figures that others published for the same experiment.
    #[serde(default)]
    pub published: Option<Published>,
    /// What a reader must know to read the figures right.
    pub notes: Vec<String>,
    /// Every value.
    pub records: Vec<Record>,
}

/// Figures that others published for the same experiment, to stand beside ours.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Published {
    /// Where they were published, and for what hardware and parameters.
    pub source: String,
    /// Every value.
    pub records: Vec<Record>,
}

impl Published {
    /// Values by series, axes and column.
    pub(crate) fn new<const N: usize>(
        source: &str,
        values: impl IntoIterator<Item = (String, [(&'static str, serde_json::Value); N], Column, f64)>,
    ) -> Self {
        let values = values.into_iter();
        let record = |(series, axes, column, value): (_, [_; N], Column, _)| Record {
            run: None,
            over_runs: None,
            series,
            axes: axes
                .into_iter()
                .map(|(name, at)| (String::from(name), at))
                .collect(),
            quantity: column.name.to_owned(),
            unit: column.unit.to_owned(),
            value,
            text: None,
        };
        Self {
            source: source.to_owned(),
            records: values.map(record).collect(),
        }
    }
}

/// Why a report could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A chart could not be drawn.
    #[error(transparent)]
    Draw(#[from] DrawError),
    /// The data could not be turned into JSON, or the text is no report.
    #[error("the report as JSON")]
    Json(#[from] serde_json::Error),
    /// A report of something else, or of a version that this program does not know.
    #[error(
        "a report of schema '{found}', benchmark '{benchmark}', is none that this program opens"
    )]
    Unknown {
        /// Its schema.
        found: String,
        /// Its benchmark.
        benchmark: String,
    },
    /// A file could not be written.
    #[error(transparent)]
    Out(#[from] OutError),
}

impl<B: Shown> Report<B> {
    /// The report of these records of single runs.
    pub(crate) fn new(
        plan: B,
        mut records: Vec<Record>,
        lost_runs: u32,
        environment: Environment,
    ) -> Result<Self, serde_json::Error> {
        records.extend(summaries::<B>(&records, environment.timing)?);
        let mut report = Self {
            schema: SCHEMA.to_owned(),
            benchmark: B::NAME.to_owned(),
            origin: Origin {
                timing: environment.timing,
                facts: environment.facts,
                lost_runs,
                lost_runs_outside: environment.lost_runs_outside,
            },
            command: plan.command(),
            published: plan.published(),
            plan,
            notes: Vec::new(),
            records,
        };
        report.notes = notes::of(&report.view()?);
        report.notes.extend(environment.warnings);
        Ok(report)
    }

    /// The report with its records sorted into cells.
    ///
    /// # Errors
    /// The records are not those of the benchmark.
    pub fn view(&self) -> Result<View<'_, B>, serde_json::Error> {
        Ok(View {
            report: self,
            cells: cells(&self.records)?,
        })
    }

    /// The report as JSON, one record a line.
    ///
    /// # Errors
    /// A number in the report is none that JSON knows.
    pub fn json(&self) -> Result<String, ReportError> {
        let head = Self {
            records: Vec::new(),
            ..self.clone()
        };
        let text = serde_json::to_string_pretty(&head)?;
        let head = text.strip_suffix("[]\n}").unwrap_or(&text);
        let records: Vec<String> = self
            .records
            .iter()
            .map(|record| Ok(format!("    {}", serde_json::to_string(record)?)))
            .collect::<Result<_, serde_json::Error>>()?;
        Ok(format!("{head}[\n{}\n  ]\n}}\n", records.join(",\n")))
    }

    /// Reads a report from its JSON, of this version or the first.
    ///
    /// # Errors
    /// The text is no report of this benchmark.
    pub fn from_json(text: &str) -> Result<Self, ReportError> {
        let value: serde_json::Value = serde_json::from_str(text)?;
        let schema = value["schema"].as_str().unwrap_or_default().to_owned();
        if schema == format!("pagetide.{}/1", B::NAME) {
            return Ok(old::open(&value)?);
        }
        let benchmark = value["benchmark"].as_str().unwrap_or_default().to_owned();
        if schema != SCHEMA || benchmark != B::NAME {
            return Err(ReportError::Unknown {
                found: schema,
                benchmark,
            });
        }
        Ok(serde_json::from_value(value)?)
    }

    /// The report as a table for a terminal, with what a reader must know below it. `width` is that
    /// of the terminal in characters; `None` lets lines be as long as they are.
    ///
    /// # Errors
    /// The records are not those of the benchmark.
    pub fn table(&self, width: Option<u16>) -> Result<String, ReportError> {
        Ok(terminal::text(&self.view()?, width))
    }

    /// The most telling figures as a drawing in SVG.
    ///
    /// # Errors
    /// The drawing failed.
    pub fn svg(&self) -> Result<String, ReportError> {
        Ok(panels(&B::drawing(&self.view()?))?)
    }

    /// The report as one HTML page that needs no other file.
    ///
    /// # Errors
    /// A drawing failed, or the data is none that JSON knows.
    pub fn html(&self) -> Result<String, ReportError> {
        html::page(&self.view()?)
    }

    /// Writes `NAME.json`, `NAME.svg` and `NAME.html` into `out`, each as a whole or not at all.
    ///
    /// # Errors
    /// A drawing failed, or a file could not be written.
    pub fn write(&self, out: &mut OutDir) -> Result<(), ReportError> {
        let files = [
            ("json", self.json()?),
            ("svg", self.svg()?),
            ("html", self.html()?),
        ];
        for (ending, content) in &files {
            out.write(&format!("{}.{ending}", B::NAME), content)?;
        }
        Ok(())
    }
}

/// A report with its records sorted into cells.
#[derive(Debug)]
pub struct View<'report, B: Benchmark> {
    /// The report.
    pub report: &'report Report<B>,
    /// One cell for each number of vCPUs and series, in the plan's order.
    pub cells: Vec<Cell<B::Series>>,
}

impl<B: Shown> View<'_, B> {
    /// What was measured.
    #[must_use]
    pub fn plan(&self) -> &B {
        &self.report.plan
    }

    /// What a nanosecond means.
    #[must_use]
    pub fn timing(&self) -> Timing {
        self.report.origin.timing
    }

    /// One series at one number of vCPUs.
    #[must_use]
    pub fn cell(&self, vcpus: u32, series: B::Series) -> Option<&Cell<B::Series>> {
        let mut cells = self.cells.iter();
        cells.find(|cell| cell.vcpus == vcpus && cell.series == series)
    }

    /// The series that were measured, in the order in which they first come.
    #[must_use]
    pub fn series(&self) -> Vec<B::Series> {
        let mut seen = Vec::new();
        for cell in &self.cells {
            if !seen.contains(&cell.series) {
                seen.push(cell.series);
            }
        }
        seen
    }

    /// Whether others kept the machine busy.
    pub(crate) fn busy(&self) -> Option<Busy> {
        Busy::of(&self.cells)
    }

    /// What was measured, in a line, with a mark if the machine was busy.
    pub(crate) fn title(&self) -> String {
        let title = self.plan().title();
        match self.busy() {
            Some(busy) => format!("{title} ({})", busy.headline()),
            None => title,
        }
    }
}

/// What a benchmark has to say in the forms that all reports have.
pub trait Shown: Benchmark {
    /// The heading of the column that names the series.
    const SERIES: &'static str;
    /// How to read it, a paragraph; HTML.
    const READING: &'static str;

    /// What was measured, in a line.
    fn title(&self) -> String;

    /// Figures that others published for the same experiment.
    fn published(&self) -> Option<Published>;

    /// Tables under headings, which only the page shows: the results, and what is made of them as far
    /// as there is something.
    fn tables(view: &View<'_, Self>) -> Vec<(&'static str, Option<Grid>)>;

    /// What the columns mean.
    fn legend(view: &View<'_, Self>) -> Vec<String>;

    /// What a reader must know that is this benchmark's own.
    fn notes(view: &View<'_, Self>) -> Vec<String>;

    /// The colour of a series.
    fn role(view: &View<'_, Self>, series: Self::Series) -> Role;

    /// The figures that people look for, in lists.
    fn lead(view: &View<'_, Self>) -> Vec<Vec<Figure>>;

    /// Charts for the page.
    fn charts(view: &View<'_, Self>) -> Vec<Chart>;

    /// The most telling charts, side by side in a file of their own.
    fn drawing(view: &View<'_, Self>) -> Vec<Chart>;
}

/// The name of the benchmark that a report is of; empty if the text is JSON and no report.
///
/// # Errors
/// The text is no JSON.
pub fn benchmark_of(text: &str) -> Result<String, ReportError> {
    let value: serde_json::Value = serde_json::from_str(text)?;
    let of_version_1 = value["schema"].as_str().and_then(|schema| {
        let name = schema.strip_prefix("pagetide.")?;
        name.strip_suffix("/1")
    });
    let name = value["benchmark"].as_str().or(of_version_1);
    Ok(name.unwrap_or_default().to_owned())
}

/// Text for HTML and SVG, in content and in attributes.
pub(crate) fn escape(text: &str) -> String {
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
