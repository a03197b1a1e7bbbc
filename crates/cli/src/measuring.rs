//! What every benchmark does around its measurement.

use pagetide_bench::facts::Facts;
use pagetide_bench::progress::{self, Progress, Quiet};
use pagetide_bench::rounds::Environment;
use pagetide_bench::timing::Timing;

/// Prints the warnings and starts the progress bar, unless `quiet`.
pub(crate) fn start_progress(quiet: bool, warnings: &[String]) -> Box<dyn Progress> {
    if quiet {
        return Box::new(Quiet);
    }
    // Before there is a bar, which on a terminal would take them along.
    for warning in warnings {
        eprintln!("warning: {warning}");
    }
    progress::on_stderr()
}

/// What a report says of where its figures come from.
pub(crate) fn environment(timing: Timing, lost_runs: u32, warnings: Vec<String>) -> Environment {
    Environment {
        timing,
        facts: Facts::gather(timing),
        lost_runs_outside: lost_runs,
        warnings,
    }
}
