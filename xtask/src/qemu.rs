//! QEMU for the x86_64 lab: Debian's source with one mend (qemu/interrupt-once.patch), built in the cache.
//!
//! Without the mend, a guest of a guest sometimes gets an interrupt twice and hangs. What the lab boots are
//! VMMs with guests, so with Debian's own program it now and then loses one. If the mended one cannot be built, the
//! lab warns and uses Debian's.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};
use fs_err as fs;

use crate::apt::{self, Archive, Kind, Lists, Suite};
use crate::command::Run;
use crate::files;
use crate::kernel::{Arch, lock};
use crate::paths::Paths;
use crate::progress::Progress;
use crate::setup;

const PATCH: &str = include_str!("qemu/interrupt-once.patch");
const DEVICES: &str = include_str!("qemu/lab.mak");

/// The program's name, here and in Debian's package.
const PROGRAM: &str = "qemu-system-x86_64";
const PACKAGE: &str = "qemu-system-x86";

/// What the lab needs and nothing else, which builds in minutes.
const OPTIONS: &str = "--target-list=x86_64-softmmu --without-default-features --without-default-devices \
    --with-devices-x86_64=lab --enable-tcg --enable-virtfs --enable-attr --enable-cap-ng \
    --enable-fdt=system --enable-plugins --enable-trace-backends=nop --disable-debug-info --disable-werror";

/// Where Debian's packages put the firmware that QEMU loads.
const FIRMWARE: [&str; 3] = [
    "/usr/share/qemu",
    "/usr/share/seabios",
    "/usr/lib/ipxe/qemu",
];

/// A QEMU of the lab.
#[derive(Debug, Clone)]
pub(crate) struct Qemu {
    /// The program, and what it needs to find its firmware.
    pub(crate) command: Vec<OsString>,
    /// What `PAGETIDE_QEMU` says in the VM: `mended`, or `debian`.
    pub(crate) name: &'static str,
}

impl Qemu {
    /// The QEMU for guests of `arch`; for x86_64 the mended one. If it is not in the cache, it is built first, or
    /// Debian's is used, as `build` says.
    pub(crate) fn find(arch: Arch, build: bool, paths: &Paths) -> Self {
        static MENDED: OnceLock<Option<PathBuf>> = OnceLock::new();
        if arch == Arch::Arm64 {
            return Self::debian("qemu-system-aarch64");
        }
        if !build {
            let cached = cached(paths).ok().filter(|program| program.exists());
            return cached.map_or_else(|| Self::debian(PROGRAM), |program| Self::mended(&program));
        }
        let mended = MENDED.get_or_init(|| match ensure(paths) {
            Ok(program) => Some(program),
            Err(error) => {
                eprintln!(
                    "WARNING: the lab uses Debian's QEMU, in which guests now and then get an \
                     interrupt twice and hang: {error:#}"
                );
                None
            }
        });
        match mended {
            Some(program) => Self::mended(program),
            None => Self::debian(PROGRAM),
        }
    }

    fn mended(program: &Path) -> Self {
        let firmware = FIRMWARE.iter().flat_map(|directory| ["-L", directory]);
        Self {
            command: std::iter::once(program.into())
                .chain(firmware.map(OsString::from))
                .collect(),
            name: "mended",
        }
    }

    fn debian(program: &str) -> Self {
        Self {
            command: vec![program.into()],
            name: "debian",
        }
    }
}

/// Where the mended program is, once it has been built. Another source, mend or configuration has another place.
fn cached(paths: &Paths) -> Result<PathBuf> {
    let version = installed_version()?;
    let key = files::digest([version.as_str(), PATCH, DEVICES, OPTIONS]);
    let directory = paths
        .cache()
        .join("qemu")
        .join(key.get(..12).unwrap_or(&key));
    Ok(directory.join(PROGRAM))
}

/// The mended program, built first if it is not in the cache.
fn ensure(paths: &Paths) -> Result<PathBuf> {
    let program = cached(paths)?;
    if program.exists() {
        return Ok(program);
    }
    let cache = paths.cache().join("qemu");
    let _lock = lock::take(&cache)?;
    if !program.exists() {
        setup::require(&setup::qemu_tools())?;
        let version = installed_version()?;
        let build = cache.join("build");
        files::fresh_dir(&build)?;
        let log = cache.join("build.log");
        files::remove(&log)?;
        let source = fetch(&build, &version, &log)?;
        make(&source, &build, &log)?;
        if let Some(directory) = program.parent() {
            fs::create_dir_all(directory)?;
        }
        files::replace(&program, |temporary| {
            fs::copy(build.join("out").join(PROGRAM), temporary)?;
            Ok(())
        })?;
        files::remove(&build)?;
    }
    Ok(program)
}

/// The version of the source that Debian's installed program was built from.
fn installed_version() -> Result<String> {
    let query = Run::new("dpkg-query").args(["-W", "-f", "${source:Version}", PACKAGE]);
    query.text().context("the version of Debian's QEMU")
}

/// Downloads and unpacks Debian's source, its patches applied.
fn fetch(build: &Path, version: &str, log: &Path) -> Result<PathBuf> {
    let progress = Progress::spinner("downloading QEMU's source");
    let lists = Lists::fetch(
        &build.join("apt"),
        Kind::Sources,
        suites(&apt::release()?),
        &progress,
    )?;
    let description = lists.source("qemu", version, build, &progress)?;
    let source = build.join("source");
    Run::new("dpkg-source")
        .args(["--no-check", "-x"])
        .arg(description)
        .arg(&source)
        .logged(log, &progress)?;
    progress.done();
    Ok(source)
}

/// The suites that have sources of a release.
fn suites(release: &str) -> Vec<Suite> {
    vec![
        Suite::new(Archive::Main, release),
        Suite::new(Archive::Main, format!("{release}-updates")),
        Suite::new(Archive::Security, format!("{release}-security")),
    ]
}

/// Applies the mend and builds the one program.
fn make(source: &Path, build: &Path, log: &Path) -> Result<()> {
    let progress = Progress::spinner("building QEMU for the lab");
    let patch = build.join("mend.patch");
    fs::write(&patch, PATCH)?;
    Run::new("patch")
        .args(["-p1", "-i"])
        .arg(&patch)
        .dir(source)
        .logged(log, &progress)?;
    fs::write(
        source.join("configs/devices/x86_64-softmmu/lab.mak"),
        DEVICES,
    )?;
    let out = build.join("out");
    fs::create_dir_all(&out)?;
    Run::new(source.join("configure"))
        .words(OPTIONS)
        .dir(&out)
        .logged(log, &progress)?;
    Run::new("ninja")
        .arg(PROGRAM)
        .dir(&out)
        .logged(log, &progress)?;
    if !out.join(PROGRAM).exists() {
        bail!("ninja has built no {PROGRAM}; see {}", log.display());
    }
    progress.done();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arm64_has_debians_program() {
        let nowhere = Paths::at(Path::new("/nonexistent"));
        assert_eq!(
            Qemu::find(Arch::Arm64, true, &nowhere).command,
            ["qemu-system-aarch64"]
        );
    }

    #[test]
    fn the_patch_changes_one_line() {
        let added: Vec<&str> = PATCH.lines().filter(|line| line.starts_with('+')).collect();
        assert_eq!(added[1..], ["+            cs->exception_index = -1;"]);
    }
}
