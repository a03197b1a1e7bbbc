//! What `pagetide bench` takes.

use std::ffi::OsString;

use clap::{Parser, Subcommand};

use crate::all::{self, AllArguments};
use crate::failure::Failure;
use crate::measuring::{self, ShowArguments};
use crate::memcycler::MemcyclerArguments;
use crate::memslots::MemslotsArguments;
use crate::pager::PagerArguments;
use crate::paging::PagingArguments;
use crate::populate::PopulateArguments;

#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// How fast absent guest memory comes in: through userfaultfd, and through KVM exits
    ///
    /// Virtual machines start with memory that is not there yet. Each vCPU touches its pages one by
    /// one, and each first touch is a fault that a thread resolves: a reader thread that gets a
    /// userfaultfd message while the vCPU sleeps (uffd), or the vCPU's own thread after KVM_RUN
    /// returned to it (exit). Both run interleaved, several times; the content of memory is
    /// verified after every run. The result is a table on standard output, and a page, a drawing
    /// and the data in files.
    #[command(after_long_help = crate::paging::EXAMPLES)]
    Paging(PagingArguments),
    /// What changing memory slots costs running vCPUs: by one ioctl, by stopping the vCPUs, or by
    /// deleting and creating slots while they run
    ///
    /// A virtual machine's vCPUs walk its memory while the memory slots below it are split, merged,
    /// resized, or given other flags. Measured are the time of a commit, the longest time that a
    /// vCPU was kept out of the guest by a commit (its stall), the work that the guest did not get done,
    /// and how often a guest accessed memory that had no slot. All methods run interleaved, several times; every word that a guest
    /// reads, and all of memory at the end, is verified. The result is a table on standard output,
    /// and a page, a drawing and the data in files.
    #[command(after_long_help = crate::memslots::EXAMPLES)]
    Memslots(MemslotsArguments),
    /// How fast stage-2 tables fill before vCPUs access memory, and what that saves the guest
    ///
    /// After a restore or a migration the host has a virtual machine's memory, and each first access
    /// of a vCPU to a page leaves the guest. Measured are the time until all vCPUs have written to
    /// all memory, with and without the population before it, the population's rate, and the faults
    /// that vCPUs took, by KVM's own count. All series run interleaved, several times; the content
    /// of memory is verified after every run. The result is a table on standard output, and a page,
    /// a drawing and the data in files.
    #[command(after_long_help = crate::populate::EXAMPLES)]
    Populate(PopulateArguments),
    /// What memory errors take from a running guest: speed, and memory
    ///
    /// A virtual machine's vCPUs cycle through their memory: each reads a word, compares it and
    /// writes the next number. Meanwhile some of the memory's 2M pieces get an uncorrected error
    /// each (simulated, MADV_HWPOISON; the host loses the 4 KiB until it is restarted). Measured
    /// are the rate, which is shown each second, against that without errors, the bytes that are
    /// lost, what becomes of the stage-2 mappings, and whether the guest survives. All series
    /// run interleaved, several times; content is verified throughout. The result is a table on
    /// standard output, and a page, a drawing and the data in files.
    #[command(after_long_help = crate::memcycler::EXAMPLES)]
    Memcycler(MemcyclerArguments),
    /// What the pager and its server add to the shortest loop that pages from a file
    ///
    /// Threads of this process touch memory whose content is in a file, and wait in a userfaultfd for
    /// it; there is no virtual machine, and KVM is not needed. Measured are the latency and rate of
    /// faults, fault-around, the time until all of memory is there, and a workload with its working set
    /// replayed, by the engine, by the whole server over its socket, and by a loop in this program that
    /// does nothing else. All series run interleaved, several times; the content of memory is verified
    /// after every run. The result is a table on standard output, and a page, a drawing and the data in
    /// files.
    #[command(after_long_help = crate::pager::EXAMPLES)]
    Pager(PagerArguments),
    /// All of these, one after the other, and one file of results
    ///
    /// They compare what the tables of the documentation compare. What this machine cannot run is left out, and the file says
    /// why. On a kernel with the series it takes root, since memory errors are simulated (memcycler), and half an hour or more.
    /// docs/guide/hardware.md is the guide for a host of bare metal.
    #[command(after_long_help = crate::all::EXAMPLES)]
    All(AllArguments),
    /// Show the report of an earlier benchmark
    ///
    /// Prints the table of a report, from the JSON that a benchmark left in its --out directory; with
    /// --out, also draws its page. Reports of version 1 open as well, and the file of `pagetide bench all`.
    Show(ShowArguments),
}

impl Bench {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        match self {
            Self::Paging(arguments) => measuring::run(arguments),
            Self::Memslots(arguments) => measuring::run(arguments),
            Self::Populate(arguments) => measuring::run(arguments),
            Self::Memcycler(arguments) => measuring::run(arguments),
            Self::Pager(arguments) => measuring::run(arguments),
            Self::All(arguments) => all::run(arguments, run_line),
            Self::Show(arguments) => measuring::open(arguments),
        }
    }
}

/// A command line after `pagetide bench`.
#[derive(Debug, Parser)]
#[command(no_binary_name = true)]
struct Line {
    #[command(subcommand)]
    bench: Bench,
}

/// Runs a benchmark of `pagetide bench all`.
fn run_line(words: Vec<OsString>) -> Result<(), Failure> {
    let line = Line::try_parse_from(words);
    line.map_err(Failure::bad_input)?.bench.run()
}

#[cfg(test)]
mod tests {
    use pagetide_bench::benchmark::Benchmark;

    use super::*;
    use crate::measuring::BenchArguments;

    /// Whether the plan makes sense, on whatever machine.
    fn check(arguments: &impl BenchArguments) -> Result<(), String> {
        let checked = arguments.plan().check();
        checked.map_err(|error| error.to_string())
    }

    #[test]
    fn the_lines_of_all_are_understood() {
        for line in all::WHOLE.iter().chain(all::QUICK).copied().flatten() {
            let parsed = Line::try_parse_from(line.split(' '));
            let checked = match parsed.map(|parsed| parsed.bench) {
                Ok(Bench::Paging(arguments)) => check(&arguments),
                Ok(Bench::Memslots(arguments)) => check(&arguments),
                Ok(Bench::Populate(arguments)) => check(&arguments),
                Ok(Bench::Memcycler(arguments)) => check(&arguments),
                Ok(Bench::Pager(arguments)) => check(&arguments),
                other => Err(format!("{other:?}")),
            };
            assert_eq!(checked, Ok(()), "{line}");
        }
    }
}
