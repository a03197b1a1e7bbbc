//! The package's service under a real systemd, in a system of its own.

use anyhow::{Context, Result};

use super::clean_root::{self, CleanRoot};
use super::host::{self, How};
use super::log_file;
use super::tally::{Tally, Verdict};
use crate::files;
use crate::package::{self, Profile};
use crate::paths::Paths;

/// Its systemd has a store for descriptors that it tells services of.
const RELEASE: &str = "trixie";

/// The test program that boots the system.
const PROGRAM: &str = "serve/systemd";

/// Installs the package of the command that the tests call in a system, and has the test program boot that.
pub(super) fn run(paths: &Paths, tally: &mut Tally) -> Result<()> {
    if let Some(reason) = clean_root::unavailable()? {
        tally.add(PROGRAM, "all tests", Verdict::Skipped(reason));
        return Ok(());
    }
    let programs = host::chosen(Some(PROGRAM), host::programs(paths)?)?;
    let package = package::build(Profile::Dev, paths)?;
    let root = CleanRoot::with_systemd(RELEASE, paths)?;
    let file = root.copy_in(&package)?;
    root.run("dpkg").arg("--install").arg(file).output()?;
    let directory = root.directory();
    let (log, console) = (
        log_file(paths, "systemd")?,
        directory.with_extension("console"),
    );
    tally.leaves("systemd", "output.log", &log);
    tally.leaves("systemd", "console.log", &console);
    let name = directory.to_str().context("a path in UTF-8")?;
    let how = How {
        environment: Some(("PAGETIDE_SYSTEMD_ROOT", name)),
        ..How::default()
    };
    for program in &programs {
        host::run_program(program, &how, &log, tally)?;
    }
    if !tally.has_failed() {
        files::remove(&console)?;
    }
    Ok(())
}
