//! The package's service under a real systemd, in a system of its own.

use anyhow::{Context, Result};

use super::clean_root::{self, CleanRoot};
use super::host::{self, How};
use super::lab::{self, SYSTEMD};
use super::log_file;
use super::tally::{Tally, Verdict};
use crate::command::Run;
use crate::files;
use crate::package::{self, Profile};
use crate::paths::Paths;

/// Its systemd has a store for descriptors that it tells services of.
const RELEASE: &str = "trixie";

/// Has the test program boot the system on this machine.
pub(super) fn run(paths: &Paths, tally: &mut Tally) -> Result<()> {
    let programs = host::chosen(Some(SYSTEMD), host::programs(paths)?)?;
    let Some(root) = system(paths, tally)? else {
        return Ok(());
    };
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

/// Has it do so in a VM.
pub(super) fn in_vm(paths: &Paths, tally: &mut Tally) -> Result<()> {
    let Some(root) = system(paths, tally)? else {
        return Ok(());
    };
    let archive = paths.target().join("test/systemd.tar");
    let pack = Run::new("tar").arg("-C").arg(root.directory());
    pack.arg("-cf").arg(&archive).arg(".").output()?;
    drop(root);
    let ran = lab::systemd(&archive, paths, tally);
    files::remove(&archive)?;
    ran
}

/// A system with the package of the command that the tests call, if this machine can make one.
fn system(paths: &Paths, tally: &mut Tally) -> Result<Option<CleanRoot>> {
    if let Some(reason) = clean_root::unavailable()? {
        tally.add(SYSTEMD, "all tests", Verdict::Skipped(reason));
        return Ok(None);
    }
    let package = package::build(Profile::Dev, paths)?;
    let root = CleanRoot::with_systemd(RELEASE, paths)?;
    let file = root.copy_in(&package)?;
    root.run("dpkg").arg("--install").arg(file).output()?;
    Ok(Some(root))
}
