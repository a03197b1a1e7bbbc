//! The command line: what it takes, and what it says about it.

use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use pagetide_memory::{Backing, FailurePolicy};

use crate::image::{
    CreateArguments, ExtractArguments, InfoArguments, MergeArguments, VerifyArguments,
};
use crate::measuring::ShowArguments;
use crate::memcycler::MemcyclerArguments;
use crate::memslots::MemslotsArguments;
use crate::pager::PagerArguments;
use crate::paging::PagingArguments;
use crate::populate::PopulateArguments;
use crate::working_set::{CaptureArguments, WorkingSetInfoArguments};

/// Page the memory of KVM virtual machines in, and measure it.
#[derive(Debug, Parser)]
#[command(
    name = "pagetide",
    version,
    max_term_width = 100,
    arg_required_else_help = true
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show which interfaces this kernel and machine have, and what replaces those that they lack
    Probe(ProbeArguments),
    /// Boot a Linux guest, with its console here
    ///
    /// The guest has processors, memory, KVM's clock and two serial ports, and nothing else: no
    /// firmware, disk or network. Any x86-64 Linux with a serial console, an MP table
    /// (CONFIG_X86_MPPARSE) and an initrd boots.
    #[command(after_long_help = crate::run::EXAMPLES)]
    Run(crate::run::RunArguments),
    /// Show what a VM would see that is restored from an image
    ///
    /// Serves the image to a guest in this process, which touches pages as a VM would, and shows how long it waited;
    /// beside it the same with the file mapped, and with all of it read first. Needs neither root nor
    /// KVM nor a VMM, and writes nothing.
    #[command(after_long_help = crate::trial::EXAMPLES)]
    Try(crate::trial::TryArguments),
    /// Restore the VMs of Firecracker, and of VMMs that speak its protocol, from snapshots
    ///
    /// Listens at Unix sockets. Each VMM that connects sends its memory regions and a userfaultfd; its
    /// guest runs at once, and each page that it touches is read from the image of that socket. The
    /// pages that a guest touched are recorded, and fetched ahead of the next guest. Needs neither KVM
    /// nor a patched kernel, and no privilege beyond reading the images. No guest ever reads zeroes in
    /// place of content.
    #[command(after_long_help = crate::serve::EXAMPLES)]
    Serve(crate::serve::ServeArguments),
    /// Keep VMs for `pagetide serve --state`, which starts this
    #[command(hide = true)]
    Keep(crate::serve::KeepArguments),
    /// Create, merge, describe, verify and extract Pagetide images of guest memory
    #[command(subcommand)]
    Image(Image),
    /// Describe working sets, and make them from memory that is present
    #[command(subcommand)]
    WorkingSet(WorkingSet),
    /// Measure something
    #[command(subcommand)]
    Bench(Bench),
    /// Print a shell's completion script for this command
    #[command(after_long_help = crate::generated::EXAMPLES)]
    Completions(CompletionsArguments),
    /// Write the manual pages, one per verb, into a directory
    #[command(hide = true)]
    Man(ManArguments),
}

#[derive(Debug, Args)]
pub(crate) struct ProbeArguments {
    /// Print JSON instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArguments {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub(crate) shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManArguments {
    /// The directory; the command creates it if it is missing
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Image {
    /// Make an image of a raw memory file, such as a Firecracker snapshot's
    ///
    /// The image has the memory in chunks: compressed, each with a checksum, equal chunks once, zero
    /// chunks not at all. With --base it stores only what differs from another image, and a hole of
    /// the memory file means "as in the base", as in Firecracker's diff snapshots. IMAGE gets its name
    /// when it is complete; a run that fails or is interrupted leaves no IMAGE.
    #[command(after_long_help = crate::image::EXAMPLES)]
    Create(CreateArguments),
    /// Make one layer of an image and the images below it, or a layer above another base
    ///
    /// An image has at most 16 layers, and each one costs a lookup. The new image has the same guest memory. With
    /// --base it stores what differs from that image, which need not be a layer of IMAGE.
    Merge(MergeArguments),
    /// Show what an image is: sizes, chunks, digest, base
    Info(InfoArguments),
    /// Read all of an image and of the images below it, and name what is damaged
    #[command(after_long_help = crate::image::VERIFY_NOTES)]
    Verify(VerifyArguments),
    /// Write the guest memory of an image as a raw file, with holes for zeroes
    Extract(ExtractArguments),
}

#[derive(Debug, Subcommand)]
pub(crate) enum WorkingSet {
    /// Take the pages of a memory file that are present as the working set of its guests
    ///
    /// For VMs that `pagetide serve` has not restored, and so has not recorded: a VMM that maps the memory
    /// file privately, such as Firecracker with its File backend. The set is merged into the file that
    /// `pagetide serve` replays. It has no order: pages are replayed by their addresses.
    #[command(after_long_help = crate::working_set::EXAMPLES)]
    Capture(CaptureArguments),
    /// Show what a working set is: its image, pages, ranges and recordings
    Info(WorkingSetInfoArguments),
}

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
    /// Show the report of an earlier benchmark
    ///
    /// Prints the table of a report, from the JSON that a benchmark left in its --out directory; with
    /// --out, also draws its page. Reports of version 1 open as well.
    Show(ShowArguments),
}

/// The names of policies.
pub(crate) const POLICIES: &[&str] = &[
    FailurePolicy::KernelDefault.name(),
    FailurePolicy::Keep.name(),
];

pub(crate) const BACKINGS: [&str; 5] = {
    let mut names = [""; 5];
    let mut index = 0;
    while index < names.len() {
        names[index] = Backing::ALL[index].name();
        index += 1;
    }
    names
};

/// Takes one of `names` and turns it into the value of that name.
pub(crate) fn one_of<T>(names: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err: Display + std::error::Error + Send + Sync + 'static>
        + Clone
        + Send
        + Sync
        + 'static,
{
    PossibleValuesParser::new(names).try_map(|name| name.parse::<T>())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }
}
