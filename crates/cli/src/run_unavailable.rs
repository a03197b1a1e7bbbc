//! `pagetide run` where there is no machine for Linux guests.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Args;

use crate::failure::Failure;

pub(crate) const EXAMPLES: &str = "Not available on this architecture.";

/// Any arguments.
#[derive(Debug, Args)]
pub(crate) struct RunArguments {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    _arguments: Vec<OsString>,
}

/// `pagetide run` boots x86-64 guests only.
#[derive(Debug, thiserror::Error)]
#[error(
    "pagetide run boots x86-64 guests, and is not available on {}",
    std::env::consts::ARCH
)]
struct NotAvailable;

/// Ends with the error.
pub(crate) fn run(_: &RunArguments) -> Result<ExitCode, Failure> {
    Err(Failure::bad_input(NotAvailable))
}
