//! What every benchmark does around its measurement.

use std::path::PathBuf;

use clap::Args;
use pagetide_base::terminal_width;
use pagetide_bench::benchmark::{self, Benchmark};
use pagetide_bench::progress::{self, Progress, Quiet};
use pagetide_bench::report::{Environment, OutDir, Report, Shown, benchmark_of};
use pagetide_bench::timing::Timing;
use pagetide_bench::{memcycler, memslots, pager, paging, populate};

use crate::all;
use crate::failure::Failure;
use crate::print;

/// What is to become of the result.
#[derive(Debug, Args)]
pub(crate) struct ResultArguments {
    /// Directory for the page, the drawing and the data (html, svg, json); is made if need be
    #[arg(long, value_name = "DIR", default_value = "target/pagetide")]
    out: PathBuf,

    /// Print the result as JSON instead of a table
    #[arg(long)]
    json: bool,

    /// Show no progress
    #[arg(long, short)]
    quiet: bool,

    /// For scripts that repeat this command when its virtual machine is lost: how often that
    /// happened so far. It is stated in the result
    #[arg(long, value_name = "N", default_value_t = 0)]
    lost_runs: u32,
}

/// A benchmark's command line.
pub(crate) trait BenchArguments {
    /// The benchmark.
    type Plan: Shown;

    /// What is asked for.
    fn plan(&self) -> Self::Plan;

    /// Whether the methods to compare were given, and not only left to their default.
    fn methods_asked(&self) -> bool {
        true
    }

    /// What is to become of the result.
    fn result(&self) -> &ResultArguments;
}

/// Checks everything that can be checked, measures, writes and prints the result.
pub(crate) fn run<A: BenchArguments>(arguments: &A) -> Result<(), Failure> {
    let mut plan = arguments.plan();
    plan.check().map_err(Failure::bad_input)?;
    let timing = Timing::from_environment().map_err(Failure::bad_input)?;
    let prepared = plan.prepare(arguments.methods_asked(), timing);
    let (mut machines, warnings) = prepared.map_err(Failure::bad_input)?;
    let arguments = arguments.result();
    let mut out = OutDir::prepare(&arguments.out).map_err(Failure::bad_input)?;

    let mut progress = start_progress(arguments.quiet, &warnings);
    let environment = Environment {
        lost_runs_outside: arguments.lost_runs,
        warnings,
        ..Environment::gather(timing)
    };
    let result = benchmark::run(&plan, &mut machines, environment, &mut *progress);
    // The bar goes before anything else is printed.
    drop(progress);
    let result = result.map_err(Failure::failed)?;
    show(&result, arguments.json, &mut out)
}

/// Writes the result's files and prints it.
fn show<B: Shown>(result: &Report<B>, json: bool, out: &mut OutDir) -> Result<(), Failure> {
    result.write(out).map_err(Failure::failed)?;
    let text = if json {
        result.json().map_err(Failure::failed)?
    } else {
        let page = out.path().join(format!("{}.html", B::NAME));
        let table = result.table(terminal_width()).map_err(Failure::failed)?;
        format!("{table}\nPage: {}\n", page.display())
    };
    print(&text)
}

/// A report to open.
#[derive(Debug, Args)]
pub(crate) struct ShowArguments {
    /// The JSON of a report, of this version or the first
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Also write the page, the drawing and the data (html, svg, json) to this directory; is made if
    /// need be
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Print the report as JSON of this version instead of a table
    #[arg(long)]
    json: bool,
}

/// The report cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot open the report {}", .path.display())]
struct OpenReportError {
    path: PathBuf,
    #[source]
    source: Box<dyn std::error::Error>,
}

/// Opens a report and prints it.
pub(crate) fn open(arguments: &ShowArguments) -> Result<(), Failure> {
    let failure = |source| unreadable(arguments, source);
    let text = std::fs::read_to_string(&arguments.file).map_err(|error| failure(error.into()))?;
    let Some((reports, left_out)) = all::parts_of(&text) else {
        return open_one(&text, arguments);
    };
    let mut reports = reports.iter();
    reports.try_for_each(|report| open_one(report, arguments))?;
    // JSON has nothing but reports.
    match arguments.json {
        true => Ok(()),
        false => print(&left_out),
    }
}

fn open_one(text: &str, arguments: &ShowArguments) -> Result<(), Failure> {
    let failure = |source| unreadable(arguments, source);
    match benchmark_of(text)
        .map_err(|error| failure(error.into()))?
        .as_str()
    {
        memslots::Plan::NAME => open_as::<memslots::Plan>(text, arguments),
        populate::Plan::NAME => open_as::<populate::Plan>(text, arguments),
        memcycler::Plan::NAME => open_as::<memcycler::Plan>(text, arguments),
        pager::Plan::NAME => open_as::<pager::Plan>(text, arguments),
        // Whatever else it is, its error says so.
        _ => open_as::<paging::Plan>(text, arguments),
    }
}

fn unreadable(arguments: &ShowArguments, source: Box<dyn std::error::Error>) -> Failure {
    let path = arguments.file.clone();
    Failure::bad_input(OpenReportError { path, source })
}

fn open_as<B: Shown>(text: &str, arguments: &ShowArguments) -> Result<(), Failure> {
    let failure = |source| unreadable(arguments, source);
    let report = Report::<B>::from_json(text).map_err(|error| failure(error.into()))?;
    // The table reads every record, whatever is printed.
    let table = report.table(terminal_width());
    let table = table.map_err(|error| failure(error.into()))?;
    let shown = if arguments.json {
        report.json().map_err(Failure::failed)?
    } else {
        table
    };
    if let Some(out) = &arguments.out {
        let mut out = OutDir::prepare(out).map_err(Failure::bad_input)?;
        report.write(&mut out).map_err(Failure::failed)?;
    }
    print(&shown)
}

/// Prints the warnings and starts the progress bar, unless `quiet`.
fn start_progress(quiet: bool, warnings: &[String]) -> Box<dyn Progress> {
    if quiet {
        return Box::new(Quiet);
    }
    // Before there is a bar, which on a terminal would take them along.
    for warning in warnings {
        eprintln!("warning: {warning}");
    }
    progress::on_stderr()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fmt::Debug;

    use clap::Parser;

    use super::*;

    /// A benchmark's arguments without the command around them.
    #[derive(Debug, Parser)]
    #[command(no_binary_name = true)]
    struct Alone<A: Args> {
        #[command(flatten)]
        arguments: A,
    }

    /// What these words ask for.
    pub(crate) fn plan<'a, A: BenchArguments + Args>(
        words: impl IntoIterator<Item = &'a str>,
    ) -> A::Plan {
        let parsed = Alone::<A>::try_parse_from(words);
        parsed
            .unwrap_or_else(|error| unreachable!("{error}"))
            .arguments
            .plan()
    }

    /// The command that a report of the plan shows asks for the plan.
    pub(crate) fn assert_understood<A>(wanted: &A::Plan)
    where
        A: BenchArguments<Plan: PartialEq + Debug> + Args,
    {
        let command = wanted.command();
        // "pagetide bench NAME" comes first.
        assert_eq!(&plan::<A>(command.split(' ').skip(3)), wanted, "{command}");
    }
}
