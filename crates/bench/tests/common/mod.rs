//! What tests of whole benchmarks share.

use pagetide_bench::benchmark::run;
use pagetide_bench::one_line;
use pagetide_bench::prepare::PrepareError;
use pagetide_bench::progress::Quiet;
use pagetide_bench::report::{Environment, Report, Shown};
use pagetide_bench::timing::Timing;

/// The clock that these tests run by.
pub(crate) fn timing() -> Timing {
    Timing::from_environment().expect("the lab sets a known mode")
}

/// Runs a plan with what this machine has of it; a word for what it lacks. `None`, and a word why, if
/// the plan cannot be run here for a reason that `is_lack` takes for one; any other is a failure.
pub(crate) fn measure<B: Shown>(
    mut plan: B,
    is_lack: fn(&PrepareError) -> bool,
) -> Option<Report<B>> {
    plan.check().expect("tests make plans that make sense");
    let (mut machines, warnings) = match plan.prepare(false, timing()) {
        Ok(prepared) => prepared,
        Err(error) if is_lack(&error) => {
            println!("SKIP: {}", one_line(&error));
            return None;
        }
        Err(error) => unreachable!("{}", one_line(&error)),
    };
    for warning in warnings.iter().filter(|text| text.contains("lacks")) {
        println!("SKIP: {warning}");
    }
    let environment = Environment {
        warnings,
        ..Environment::gather(timing())
    };
    // Wrong memory fails the run.
    let result = run(&plan, &mut machines, environment, &mut Quiet);
    Some(result.unwrap_or_else(|error| unreachable!("{}", one_line(&error))))
}
