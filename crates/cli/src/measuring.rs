//! What every benchmark does around its measurement.

use std::path::PathBuf;

use clap::Args;
use pagetide_bench::facts::Facts;
use pagetide_bench::progress::{self, Progress, Quiet};
use pagetide_bench::report::{self, OutDir, Report};
use pagetide_bench::rounds::{BenchError, Environment};
use pagetide_bench::timing::Timing;

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

/// Sees by `prepare` what can be measured, measures it by `run`, and tells and writes the result.
/// Nothing is measured before everything is checked that can be.
pub(crate) fn measure<M, R: Report>(
    arguments: &ResultArguments,
    prepare: impl FnOnce(Timing) -> Result<(M, Vec<String>), Failure>,
    run: impl FnOnce(&mut M, Environment, &mut dyn Progress) -> Result<R, BenchError>,
) -> Result<(), Failure> {
    let timing = Timing::from_environment().map_err(Failure::bad_input)?;
    let (mut machines, warnings) = prepare(timing)?;
    let mut out = OutDir::prepare(&arguments.out).map_err(Failure::bad_input)?;

    let mut progress = start_progress(arguments.quiet, &warnings);
    let environment = Environment {
        timing,
        facts: Facts::gather(timing),
        lost_runs_outside: arguments.lost_runs,
        warnings,
    };
    let result = run(&mut machines, environment, &mut *progress);
    // The bar goes before anything else is printed.
    drop(progress);
    let result = result.map_err(Failure::failed)?;

    report::write(&result, &mut out).map_err(Failure::failed)?;
    let text = if arguments.json {
        report::json(&result).map_err(Failure::failed)?
    } else {
        let page = out.path().join(format!("{}.html", R::NAME));
        let table = result.table(report::terminal_width());
        format!("{table}\nPage: {}\n", page.display())
    };
    print(&text)
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
