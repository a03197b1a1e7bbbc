//! Compiling the workspace for arm64, on this x86_64 machine.
//!
//! The programs are static, since an arm64 VM of the lab has no libraries, and without debug
//! information, since nobody measures them. If rustup has installed LLD, LLD links them: GNU ld would take a
//! fifth of the compile time.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::command::Run;
use crate::kernel::Arch;
use crate::paths::Paths;
use crate::progress::Progress;

/// Rust's name of the target.
pub(crate) const TARGET: &str = "aarch64-unknown-linux-gnu";

/// Debian's Rust. Its standard library for arm64 is a package of the architecture arm64.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// Where a toolchain of rustup has the linker for gcc, below its system root.
const LLD: &str = "lib/rustlib/x86_64-unknown-linux-gnu/bin/gcc-ld";

/// What Cargo.toml has optimised for tests that do not run on arm64.
const NOT_OPTIMISED: [&str; 12] = [
    "blake3",
    "hdrhistogram",
    "pagetide-bench",
    "pagetide-migrate",
    "pagetide-sources",
    "pagetide-testbed",
    "pagetide-vmm",
    "plotters",
    "plotters-svg",
    "stateright",
    "xxhash-rust",
    "zstd-sys",
];

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

/// The directory of LLD, if cargo's own compiler is a toolchain that has one.
fn lld() -> Option<PathBuf> {
    let sysroot = Run::new("rustc").args(["--print", "sysroot"]).text().ok()?;
    let directory = Path::new(&sysroot).join(LLD);
    directory.join("ld.lld").exists().then_some(directory)
}

/// The compiler's flags: warnings denied, programs static.
fn flags(lld: Option<&Path>) -> OsString {
    let mut flags = OsString::from("-Dwarnings\x1f-Ctarget-feature=+crt-static");
    if let Some(directory) = lld {
        flags.push("\x1f-Clink-arg=-fuse-ld=lld\x1f-Clink-arg=-B");
        flags.push(directory);
    }
    flags
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
        .env("CARGO_ENCODED_RUSTFLAGS", flags(lld().as_deref()))
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
    fn lld_links_where_a_toolchain_has_it() {
        let without = flags(None);
        assert_eq!(without, "-Dwarnings\x1f-Ctarget-feature=+crt-static");
        let with = flags(Some(Path::new("/a toolchain/gcc-ld")));
        let with = with.to_str().unwrap();
        assert!(with.starts_with(without.to_str().unwrap()), "{with}");
        assert!(
            with.ends_with("\x1f-Clink-arg=-B/a toolchain/gcc-ld"),
            "{with}"
        );
    }

    #[test]
    fn a_compiler_without_the_target_is_not_taken() {
        assert!(!has_target(Path::new("/nonexistent/rustc")));
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_library(dir.path()));
        std::fs::write(dir.path().join("libstd-1234.rlib"), "").unwrap();
        assert!(is_library(dir.path()));
    }
}
