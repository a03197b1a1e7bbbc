//! Compiling the workspace for arm64, on this x86_64 machine.
//!
//! The programs are static, since an arm64 VM of the lab has no libraries, and without debug
//! information, since nobody measures them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::command::Run;
use crate::kernel::Arch;
use crate::paths::Paths;
use crate::progress::Progress;

/// Rust's name of the target.
const TARGET: &str = "aarch64-unknown-linux-gnu";

/// Debian's Rust. Its standard library for arm64 is a package of the architecture arm64.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// What Cargo.toml has optimised for tests that draw reports, which do not run on arm64.
const NOT_OPTIMISED: [&str; 2] = ["pagetide-bench", "plotters"];

/// A Rust compiler that has arm64's standard library: cargo's own, after
/// `rustup target add aarch64-unknown-linux-gnu`, or Debian's.
pub(crate) fn rustc() -> Option<PathBuf> {
    let own = std::env::var_os("RUSTC").map_or_else(|| "rustc".into(), PathBuf::from);
    [own, DEBIAN_RUSTC.into()]
        .into_iter()
        .find(|rustc| has_target(rustc))
}

fn has_target(rustc: &Path) -> bool {
    let asked = Run::new(rustc)
        .args(["--print", "target-libdir", "--target", TARGET])
        .text();
    asked.is_ok_and(|directory| is_library(Path::new(&directory)))
}

/// Whether a directory has the standard library in it.
fn is_library(directory: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(directory) else {
        return false;
    };
    entries.flatten().any(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with("libstd-") && name.ends_with(".rlib")
    })
}

/// Where everything for arm64 is compiled: a build for this machine, at the same time, has a lock on
/// `target/` itself.
pub(crate) fn target(paths: &Paths) -> PathBuf {
    paths.target().join(Arch::Arm64.name())
}

/// The `pagetide` command for arm64, once built.
pub(crate) fn pagetide(paths: &Paths) -> PathBuf {
    target(paths).join(TARGET).join("debug/pagetide")
}

/// `cargo VERB` for arm64, warnings denied.
pub(crate) fn cargo(verb: &str) -> Result<Run> {
    let Some(rustc) = rustc() else {
        bail!(
            "no Rust compiler with the target {TARGET}: `cargo xtask setup` installs Debian's, \
             or `rustup target add {TARGET}` adds it to yours"
        );
    };
    let linker = format!("{}gcc", Arch::Arm64.cross_compile());
    let mut run = Run::new("cargo").arg(verb);
    for package in NOT_OPTIMISED {
        let setting = format!("profile.dev.package.{package}.opt-level=0");
        run = run.args(["--config", &setting]);
    }
    Ok(run
        .args(["--target", TARGET])
        .env("RUSTC", rustc)
        .env("RUSTFLAGS", "-Dwarnings -Ctarget-feature=+crt-static")
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", linker))
}

/// Builds the `pagetide` command for arm64.
pub(crate) fn build_pagetide(log: &Path, paths: &Paths) -> Result<()> {
    let compiles = |line: &str| line.trim_start().starts_with("Compiling ");
    let progress = Progress::start("building pagetide for arm64", None, compiles);
    cargo("build")?
        .args(["--package", "pagetide-cli", "--target-dir"])
        .arg(target(paths))
        .dir(paths.root())
        .logged(log, &progress)
        .context("pagetide for arm64")?;
    progress.done();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compiler_without_the_target_is_not_taken() {
        assert!(!has_target(Path::new("/nonexistent/rustc")));
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_library(dir.path()));
        std::fs::write(dir.path().join("libstd-1234.rlib"), "").unwrap();
        assert!(is_library(dir.path()));
    }
}
