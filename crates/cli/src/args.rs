//! The command line: what it takes, and what it says about it.

#[cfg(feature = "bench")]
mod bench;
#[cfg(feature = "serve")]
mod serving;

#[cfg(any(feature = "bench", feature = "guest"))]
use std::fmt::Display;
use std::path::PathBuf;
#[cfg(any(feature = "bench", feature = "guest"))]
use std::str::FromStr;

#[cfg(any(feature = "bench", feature = "guest"))]
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
#[cfg(any(feature = "bench", feature = "guest"))]
use pagetide_memory::{Backing, FailurePolicy};

#[cfg(feature = "bench")]
pub(crate) use bench::Bench;
#[cfg(feature = "serve")]
pub(crate) use serving::{Image, WorkingSet};

#[cfg(feature = "serve")]
use crate::ctl::CtlArguments;
#[cfg(feature = "guest")]
use crate::run::RunArguments;
#[cfg(feature = "serve")]
use crate::serve::{KeepArguments, ServeArguments};
#[cfg(feature = "serve")]
use crate::trial::TryArguments;

#[cfg(not(feature = "bench"))]
use crate::left_out::LeftOut as Bench;
#[cfg(not(feature = "guest"))]
use crate::left_out::LeftOut as RunArguments;
#[cfg(not(feature = "serve"))]
use crate::left_out::{
    LeftOut as CtlArguments, LeftOut as Image, LeftOut as KeepArguments, LeftOut as ServeArguments,
    LeftOut as TryArguments, LeftOut as WorkingSet,
};

/// What follows the commands and options: what most people came for.
fn examples() -> String {
    let left_out = crate::left_out::note();
    format!("{EXAMPLES}{left_out}")
}

const EXAMPLES: &str = "\
Examples:
  How long would a VM wait for its memory after a restore? Any file of whole pages will do:
    pagetide try snapshot.mem

  Restore Firecracker's VMs from the snapshot; each runs at once, and its memory follows:
    pagetide serve /tmp/web.sock=snapshot.mem

  What has this kernel, and what does the program do without the rest?
    pagetide probe

`pagetide COMMAND --help` says what a command does, with examples.";

/// Lets virtual machines run before their memory is there
///
/// Restores the VMs of Firecracker from snapshots, and shows what that costs: each VM runs at once, and pages
/// arrive as its guest touches them, or ahead of that.
#[derive(Debug, Parser)]
#[command(
    name = "pagetide",
    version,
    max_term_width = 100,
    arg_required_else_help = true,
    after_help = examples(),
    after_long_help = examples()
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// First what most people want. A command that was left out is not listed, and says so when it is called.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show how long a VM would wait for its memory, if it were restored from a file
    ///
    /// Serves the file to a guest in this process, which touches pages as a VM would, and shows how long it waited;
    /// beside it the same with the file mapped, and with all of it read first. Needs neither root nor
    /// KVM nor a VMM, and writes nothing.
    #[cfg_attr(feature = "serve", command(after_long_help = crate::trial::EXAMPLES))]
    #[cfg_attr(not(feature = "serve"), command(hide = true))]
    Try(TryArguments),
    /// Restore the VMs of Firecracker, and of VMMs that speak its protocol, from snapshots
    ///
    /// Listens at Unix sockets. Each VMM that connects sends its memory regions and a userfaultfd; its
    /// guest runs at once, and each page that it touches is read from the image of that socket. The
    /// pages that a guest touched are recorded, and fetched ahead of the next guest. Needs neither KVM
    /// nor a patched kernel, and no privilege beyond reading the images. No guest ever reads zeroes in
    /// place of content.
    #[cfg_attr(feature = "serve", command(after_long_help = crate::serve::EXAMPLES))]
    #[cfg_attr(not(feature = "serve"), command(hide = true))]
    Serve(ServeArguments),
    /// Tell a running `pagetide serve` what to serve, at its control socket
    #[cfg_attr(feature = "serve", command(after_long_help = crate::ctl::EXAMPLES))]
    #[cfg_attr(not(feature = "serve"), command(hide = true))]
    Ctl(CtlArguments),
    /// Show what this kernel and machine have for it, and what replaces the rest
    Probe(ProbeArguments),
    /// Create, merge, describe, verify and extract Pagetide images of guest memory
    #[cfg_attr(feature = "serve", command(subcommand))]
    #[cfg_attr(not(feature = "serve"), command(hide = true))]
    Image(Image),
    /// Describe working sets, and make them from memory that is present
    #[cfg_attr(feature = "serve", command(subcommand))]
    #[cfg_attr(not(feature = "serve"), command(hide = true))]
    WorkingSet(WorkingSet),
    /// Boot a Linux guest, with its console here
    ///
    /// The guest has processors, memory, KVM's clock and two serial ports, and nothing else: no
    /// firmware, disk or network. Any x86-64 Linux with a serial console, an MP table
    /// (CONFIG_X86_MPPARSE) and an initrd boots.
    #[cfg_attr(feature = "guest", command(after_long_help = crate::run::EXAMPLES))]
    #[cfg_attr(not(feature = "guest"), command(hide = true))]
    Run(RunArguments),
    /// Measure what paging, populating and changing guest memory costs on this machine
    #[cfg_attr(feature = "bench", command(subcommand))]
    #[cfg_attr(not(feature = "bench"), command(hide = true))]
    Bench(Bench),
    /// Print a shell's completion script for this command
    #[command(after_long_help = crate::generated::EXAMPLES)]
    Completions(CompletionsArguments),
    /// Keep VMs for `pagetide serve --state`, which starts this
    #[command(hide = true)]
    Keep(KeepArguments),
    /// Receive descriptors for `pagetide serve`, which starts this
    #[cfg(feature = "serve")]
    #[command(hide = true)]
    Porter,
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

/// The names of policies.
#[cfg(any(feature = "bench", feature = "guest"))]
pub(crate) const POLICIES: &[&str] = &[
    FailurePolicy::KernelDefault.name(),
    FailurePolicy::Keep.name(),
];

#[cfg(any(feature = "bench", feature = "guest"))]
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
#[cfg(any(feature = "bench", feature = "guest"))]
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
