//! `pagetide bench paging`.

use pagetide_bench::paging::{Machines, run as measure};
use pagetide_bench::report::{self, OutDir};
use pagetide_bench::timing::Timing;

use crate::args::PagingArguments;
use crate::failure::Failure;
use crate::measuring::{environment, start_progress};
use crate::print;

/// Checks everything that can be checked, measures, and writes the result.
pub(crate) fn run(arguments: &PagingArguments) -> Result<(), Failure> {
    let plan = arguments.plan();
    plan.check().map_err(Failure::bad_input)?;
    let timing = Timing::from_environment().map_err(Failure::bad_input)?;
    let (mut machines, warnings) = Machines::prepare(&plan, timing).map_err(Failure::bad_input)?;
    let mut out = OutDir::prepare(&arguments.out).map_err(Failure::bad_input)?;

    let mut progress = start_progress(arguments.quiet, &warnings);
    let environment = environment(timing, arguments.lost_runs, warnings);
    let result = measure(&plan, &mut machines, environment, &mut *progress);
    // The bar goes before anything else is printed.
    drop(progress);
    let result = result.map_err(Failure::failed)?;

    report::write(&result, &mut out).map_err(Failure::failed)?;
    let text = if arguments.json {
        report::json(&result).map_err(Failure::failed)?
    } else {
        let page = out.path().join("paging.html");
        let table = report::table(&result, report::terminal_width());
        format!("{table}\nPage: {}\n", page.display())
    };
    print(&text)
}
