//! The `pagetide` command: arguments in, text out.
//!
//! Exit status: 0; 1 if what was tried failed; 2 if the command line makes no sense or this machine
//! lacks something that it asks for. Either is reported in one line on standard error. `pagetide run` ends
//! with its guest's status.

mod args;
#[cfg(all(test, target_arch = "x86_64"))]
mod documents;
mod failure;
mod generated;
mod image;
mod log;
mod measuring;
mod memcycler;
mod memslots;
mod pager;
mod paging;
mod populate;
mod probe;
#[cfg(target_arch = "x86_64")]
mod run;
#[cfg(not(target_arch = "x86_64"))]
#[path = "run_unavailable.rs"]
mod run;
mod serve;
mod service_manager;
#[cfg(target_arch = "x86_64")]
mod terminal;
mod trial;
mod working_set;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use indicatif::ProgressBar;

use args::{Arguments, Bench, Command, Image, WorkingSet};
use failure::{Failure, Unparsable};
use serve::LogFormat;

fn main() -> ExitCode {
    match Arguments::try_parse() {
        Ok(arguments) => run(&arguments).unwrap_or_else(|failure| failure.tell()),
        // Help and the version come this way as well; they are no failures.
        Err(error) if !error.use_stderr() => {
            let printed = error.print();
            if printed.is_ok() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        // Without any command the help is the best answer.
        Err(error)
            if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand =>
        {
            let _ = error.print();
            ExitCode::from(2)
        }
        Err(error) => Failure::bad_input(Unparsable::from(&error)).tell(),
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    match &arguments.command {
        Command::Serve(arguments) => {
            let line = serve::line();
            let log = log::of_service(arguments.log(), &line);
            let ended = serve::run(arguments, &line, &log);
            log.flush();
            return ended;
        }
        Command::Keep(arguments) => {
            let log = log::of_service(LogFormat::Text, &ProgressBar::hidden());
            let ended = serve::keep(arguments);
            log.flush();
            return ended.map(|()| ExitCode::SUCCESS);
        }
        _ => log::of_verb(),
    }
    match &arguments.command {
        Command::Serve(_) | Command::Keep(_) => {}
        Command::Try(arguments) => trial::run(arguments)?,
        Command::Probe(arguments) => probe::run(arguments)?,
        Command::Run(arguments) => return run::run(arguments),
        Command::Image(Image::Create(arguments)) => image::create(arguments)?,
        Command::Image(Image::Merge(arguments)) => image::merge(arguments)?,
        Command::Image(Image::Info(arguments)) => image::info(arguments)?,
        Command::Image(Image::Verify(arguments)) => image::verify(arguments)?,
        Command::Image(Image::Extract(arguments)) => image::extract(arguments)?,
        Command::WorkingSet(WorkingSet::Capture(arguments)) => working_set::capture(arguments)?,
        Command::WorkingSet(WorkingSet::Info(arguments)) => working_set::info(arguments)?,
        Command::Bench(Bench::Paging(arguments)) => measuring::run(arguments)?,
        Command::Bench(Bench::Memslots(arguments)) => measuring::run(arguments)?,
        Command::Bench(Bench::Populate(arguments)) => measuring::run(arguments)?,
        Command::Bench(Bench::Memcycler(arguments)) => measuring::run(arguments)?,
        Command::Bench(Bench::Pager(arguments)) => measuring::run(arguments)?,
        Command::Bench(Bench::Show(arguments)) => measuring::open(arguments)?,
        Command::Completions(arguments) => generated::completions(arguments)?,
        Command::Man(arguments) => generated::manual(arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints to standard output. A reader that has seen enough (`| head`) is no failure.
fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result.map_err(Failure::failed),
    }
}
