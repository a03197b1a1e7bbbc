//! The project's tooling: `cargo xtask VERB`. One file a verb.

mod apt;
mod bench;
mod command;
mod compile;
mod cross;
mod debian;
mod demo;
#[cfg(test)]
mod documents;
mod files;
mod fuzz;
mod guest;
mod guest_memory;
mod initramfs;
mod items;
mod kernel;
mod load;
mod moto;
mod outside;
mod package;
mod paths;
mod picture;
mod profile;
mod progress;
mod qemu;
mod setup;
mod test;
mod tour;
mod trace;
mod uapi;
mod vm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::paths::Paths;

/// Builds, boots and tests Pagetide's kernel and userspace.
///
/// Downloads and kernel trees are kept outside the checkout: in $PAGETIDE_CACHE, else
/// $XDG_CACHE_HOME/pagetide, else ~/.cache/pagetide.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Install what the other verbs need (Debian packages, as root or through sudo; an S3 server for tests)
    Setup,
    /// Build, edit and check the patched kernel
    #[command(subcommand)]
    Kernel(kernel::Verb),
    /// Run a command in a VM with our kernel and this machine's file system
    ///
    /// Ends with COMMAND's exit status; 125 if the VM was lost (it hung or panicked).
    Vm(vm::VerbArgs),
    /// Make the initramfs of Linux guests (`pagetide run`), from Debian's busybox and guest/linux
    ///
    /// Prints its place, target/guest/initramfs.cpio.
    Guest,
    /// Generate crates/uapi's constants and structures from the patched kernel's headers
    Uapi(uapi::UapiArgs),
    /// Build the Debian package of the `pagetide` command; prints its place
    Package(package::PackageArgs),
    /// Draw README's picture of a restore, docs/images/restore.svg, from a run of `pagetide try` on this machine
    Picture(picture::PictureArgs),
    /// Draw docs/tour.md: what each command ends with, in pictures of real runs, here and in the lab; some ten minutes
    Tour(tour::TourArgs),
    /// Everything that must hold: code, kernels, patches, and behaviour in VMs
    ///
    /// The last line is `N passed, N failed, N skipped`.
    Test(test::TestArgs),
    /// Run the parsers of hostile input under a fuzzer that coverage guides
    ///
    /// An input on which a property fails is written to target/fuzz/failures, and printed. What the fuzzer
    /// learns stays in target/fuzz/corpus for the next run.
    Fuzz(fuzz::FuzzArgs),
    /// What it is for, in tables: a restore on this machine, then paging with and without exits, in the lab
    ///
    /// The first table, of `pagetide try`, takes a small build. While the lab's kernel builds, memory is paged in on
    /// this machine's own kernel.
    Demo,
    /// Take the measurements that SPECIFICATION.md promises figures for
    Bench,
    /// Count where the instructions of a fault go, by function and group
    ///
    /// Boots a VM for each delivery several times over; about ten minutes. docs/design/cost-of-a-fault.md
    /// shows the result.
    Profile(profile::ProfileArgs),
    /// Write down which functions one fault takes, from a recorded trace, to docs/design/functions-of-a-fault.md
    Trace,
    /// Hold memory until it is ended: the load of `test --only busy`
    #[command(hide = true)]
    HoldMemory(load::HoldArgs),
    /// Tell where the pages of the measurements are
    Report,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = Paths::find().and_then(|paths| match &cli.verb {
        Verb::Setup => {
            setup::run()?;
            if let Err(error) = moto::install(&paths) {
                eprintln!("without an S3 server, whose tests will be skipped: {error:#}");
            }
            Ok(ExitCode::SUCCESS)
        }
        Verb::Kernel(verb) => kernel::run(verb, &paths).map(|()| ExitCode::SUCCESS),
        Verb::Vm(args) => vm::run(args, &paths),
        Verb::Guest => guest::run(&paths).map(|()| ExitCode::SUCCESS),
        Verb::Package(args) => package::run(args, &paths).map(|()| ExitCode::SUCCESS),
        Verb::Picture(args) => picture::run(args, &paths).map(|()| ExitCode::SUCCESS),
        Verb::Tour(args) => tour::run(args, &paths).map(|()| ExitCode::SUCCESS),
        Verb::Demo => demo::run(&paths),
        Verb::Bench => bench::bench(&paths),
        Verb::Profile(args) => profile::run(args, &paths),
        Verb::Trace => trace::run(&paths).map(|()| ExitCode::SUCCESS),
        Verb::Report => bench::report(&paths),
        Verb::Test(args) => test::run(args, &paths),
        Verb::HoldMemory(args) => load::hold(args).map(|()| ExitCode::SUCCESS),
        Verb::Fuzz(args) => fuzz::run(args, &paths),
        Verb::Uapi(args) => uapi::run(args, &paths).map(|()| ExitCode::SUCCESS),
    });
    // `test` says it in its last line.
    let notice = kernel::source::notice().filter(|_| !matches!(cli.verb, Verb::Test(_)));
    if let Some(notice) = notice {
        eprintln!("this was {notice}");
    }
    match result {
        Ok(code) => code,
        Err(error) => {
            let text = format!("{error:#}");
            eprintln!("error: {text}");
            if let Some(advice) = outside::disk_full(&text) {
                eprintln!("{advice}");
            }
            ExitCode::from(2)
        }
    }
}
