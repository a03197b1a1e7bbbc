//! The `pagetide` command: arguments in, text out.
//!
//! Exit status: 0; 1 if what was tried failed; 2 if the command line makes no sense or this machine
//! lacks something that it asks for. Either is reported in one line on standard error. `pagetide run` ends
//! with its guest's status.

#[cfg(feature = "bench")]
mod all;
mod args;
#[cfg(feature = "serve")]
mod ctl;
#[cfg(all(
    test,
    target_arch = "x86_64",
    feature = "serve",
    feature = "bench",
    feature = "guest"
))]
mod documents;
mod failure;
mod generated;
#[cfg(feature = "serve")]
mod image;
mod left_out;
mod log;
#[cfg(feature = "bench")]
mod measuring;
#[cfg(feature = "bench")]
mod memcycler;
#[cfg(feature = "bench")]
mod memslots;
#[cfg(feature = "bench")]
mod pager;
#[cfg(feature = "bench")]
mod paging;
#[cfg(feature = "bench")]
mod populate;
mod probe;
#[cfg(all(feature = "guest", target_arch = "x86_64"))]
mod run;
#[cfg(all(feature = "guest", not(target_arch = "x86_64")))]
#[path = "run_unavailable.rs"]
mod run;
#[cfg(feature = "serve")]
mod serve;
#[cfg(feature = "serve")]
mod service_manager;
#[cfg(all(feature = "guest", target_arch = "x86_64"))]
mod terminal;
#[cfg(feature = "serve")]
mod trial;
#[cfg(feature = "serve")]
mod working_set;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

use args::{Arguments, Command};
use failure::{Failure, Unparsable};

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
        #[cfg(feature = "serve")]
        Command::Serve(_) | Command::Keep(_) | Command::Porter => {}
        _ => log::of_verb(),
    }
    match &arguments.command {
        #[cfg(feature = "serve")]
        Command::Serve(arguments) => return serve(arguments),
        #[cfg(feature = "serve")]
        Command::Keep(arguments) => keep(arguments)?,
        #[cfg(feature = "serve")]
        Command::Porter => serve::receive_descriptors()?,
        #[cfg(feature = "serve")]
        Command::Try(arguments) => trial::run(arguments)?,
        #[cfg(feature = "serve")]
        Command::Ctl(arguments) => ctl::run(arguments)?,
        #[cfg(feature = "serve")]
        Command::Image(image) => image.run()?,
        #[cfg(feature = "serve")]
        Command::WorkingSet(working_set) => working_set.run()?,
        #[cfg(feature = "guest")]
        Command::Run(arguments) => return run::run(arguments),
        #[cfg(feature = "bench")]
        Command::Bench(bench) => bench.run()?,
        Command::Probe(arguments) => probe::run(arguments)?,
        Command::Completions(arguments) => generated::completions(arguments)?,
        Command::Man(arguments) => generated::manual(arguments)?,
        // All that is left.
        #[cfg(not(feature = "serve"))]
        Command::Serve(_) | Command::Keep(_) => return Err(left_out::refusal("serve")),
        #[cfg(not(feature = "serve"))]
        Command::Try(_) => return Err(left_out::refusal("try")),
        #[cfg(not(feature = "serve"))]
        Command::Ctl(_) => return Err(left_out::refusal("ctl")),
        #[cfg(not(feature = "serve"))]
        Command::Image(_) => return Err(left_out::refusal("image")),
        #[cfg(not(feature = "serve"))]
        Command::WorkingSet(_) => return Err(left_out::refusal("working-set")),
        #[cfg(not(feature = "guest"))]
        Command::Run(_) => return Err(left_out::refusal("run")),
        #[cfg(not(feature = "bench"))]
        Command::Bench(_) => return Err(left_out::refusal("bench")),
    }
    Ok(ExitCode::SUCCESS)
}

/// Serves, with the messages of a service.
#[cfg(feature = "serve")]
fn serve(arguments: &serve::ServeArguments) -> Result<ExitCode, Failure> {
    let line = serve::line();
    let log = log::of_service(arguments.log(), &line);
    let ended = serve::run(arguments, &line, &log);
    log.flush();
    ended
}

/// Keeps VMs, with the messages of a service.
#[cfg(feature = "serve")]
fn keep(arguments: &serve::KeepArguments) -> Result<(), Failure> {
    let log = log::of_service(serve::LogFormat::Text, &indicatif::ProgressBar::hidden());
    let ended = serve::keep(arguments);
    log.flush();
    ended
}

/// Prints to standard output. A reader that has seen enough (`| head`) is no failure.
fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result.map_err(Failure::failed),
    }
}
