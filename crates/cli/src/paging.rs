//! `pagetide bench paging`.

use pagetide_bench::paging::{Machines, run as measure_paging};

use crate::args::PagingArguments;
use crate::failure::Failure;
use crate::measuring::measure;

/// Checks everything that can be checked, measures, and writes the result.
pub(crate) fn run(arguments: &PagingArguments) -> Result<(), Failure> {
    let plan = arguments.plan();
    plan.check().map_err(Failure::bad_input)?;
    measure(
        &arguments.result,
        |timing| Machines::prepare(&plan, timing).map_err(Failure::bad_input),
        |machines, environment, progress| measure_paging(&plan, machines, environment, progress),
    )
}
