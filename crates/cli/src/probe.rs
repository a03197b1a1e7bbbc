//! `pagetide probe`.

use pagetide_bench::report::{probe_table, terminal_width};
use pagetide_uapi::probe::Probe;

use crate::args::ProbeArguments;
use crate::failure::Failure;
use crate::print;

/// Asks the kernel and prints what it says.
pub(crate) fn run(arguments: &ProbeArguments) -> Result<(), Failure> {
    let probe = Probe::run();
    let text = if arguments.json {
        serde_json::to_string_pretty(&probe).map_err(Failure::failed)? + "\n"
    } else {
        probe_table(&probe, terminal_width())
    };
    print(&text)
}
