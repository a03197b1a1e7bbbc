//! `cargo xtask package --all`: all that is given away of one version, with checksums.
//!
//! A static command runs on each Linux of its architecture, whatever C library that has.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fs_err as fs;

use super::{cargo_deb_with, stage};
use crate::command::Run;
use crate::kernel::Arch;
use crate::paths::Paths;
use crate::progress::Progress;
use crate::{cross, files, vm};

/// The file of the checksums, as `sha256sum --check` reads it.
const CHECKSUMS: &str = "SHA256SUMS";

/// Makes what is missing beside the package of this machine's architecture, and collects all of it in target/package.
pub(super) fn run(package: &Path, paths: &Paths) -> Result<()> {
    let out = paths.target().join("package");
    files::fresh_dir(&out)?;
    let mut collected = vec![package.to_owned(), package_of_arm64(paths)?];
    let of_x86_64 = target_of_x86_64(paths);
    compile(native(), &of_x86_64, "x86_64", paths)?;
    for arch in [Arch::X86_64, Arch::Arm64] {
        let name = format!(
            "pagetide-{}-linux-{}",
            env!("CARGO_PKG_VERSION"),
            arch.name()
        );
        let place = out.join(name);
        fs::copy(command(arch, paths), &place)?;
        collected.push(place);
    }
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
        collected.push(paths.in_root(licence));
    }
    collected.push(third_party(&out, paths)?);
    let mut names = Vec::new();
    for file in &collected {
        let name = file.file_name().context("a file has a name")?;
        if file.parent() != Some(&out) {
            fs::copy(file, out.join(name))?;
        }
        names.push(name);
    }
    let sums = Run::new("sha256sum").args(&names).dir(&out).output()?;
    fs::write(out.join(CHECKSUMS), sums)?;
    for name in names {
        let place = out.join(name);
        let kib = fs::metadata(&place)?.len().div_ceil(1 << 10);
        println!("{} ({kib} KiB)", place.display());
    }
    println!("{}", out.join(CHECKSUMS).display());
    Ok(())
}

/// The licences of the libraries in the static commands, which have the C library, too.
fn third_party(out: &Path, paths: &Paths) -> Result<PathBuf> {
    let place = out.join("THIRD-PARTY");
    let version = Run::new("dpkg-query")
        .args(["--show", "--showformat=${Version}", "libc6-dev"])
        .text()?;
    let text = super::third_party(paths)?;
    let of_libc = format!(
        "The static commands contain the GNU C Library, from Debian's libc6-dev {version}: LGPL-2.1-or-later. Pagetide's source,\n\
         from which they are linked, links them with another one.\n\n"
    );
    fs::write(&place, of_libc + &text)?;
    Ok(place)
}

/// The package of the command for arm64, whose generated files come from the command that runs here.
fn package_of_arm64(paths: &Paths) -> Result<PathBuf> {
    let target = cross::target(paths);
    compile(cross::cargo("build")?, &target, "arm64", paths)?;
    let command = command(Arch::Arm64, paths);
    let staging = command.with_file_name("package");
    stage(&staging, &vm::pagetide(paths), paths)?;
    let arguments = [
        "--no-strip",
        "--target",
        cross::TARGET,
        "--profile",
        "release",
    ];
    cargo_deb_with(&arguments, &target, paths)
}

/// A build elsewhere than in target/ leaves what is there as it is: flags differ.
fn target_of_x86_64(paths: &Paths) -> PathBuf {
    paths.target().join("static")
}

/// The static command of an architecture.
fn command(arch: Arch, paths: &Paths) -> PathBuf {
    let directory = match arch {
        Arch::X86_64 => target_of_x86_64(paths).join(NATIVE),
        Arch::Arm64 => cross::target(paths).join(cross::TARGET),
    };
    directory.join("release/pagetide")
}

const NATIVE: &str = "x86_64-unknown-linux-gnu";

/// `cargo build` of static programs for x86-64.
fn native() -> Run {
    // With a target, the flags are those of the command, and not of programs that run while it is built.
    Run::new("cargo")
        .args(["build", "--target", NATIVE])
        .env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static")
}

fn compile(cargo: Run, target: &Path, arch: &str, paths: &Paths) -> Result<()> {
    let compiles = |line: &str| line.trim_start().starts_with("Compiling ");
    let what = format!("building the static pagetide for {arch}");
    let progress = Progress::start(&what, None, compiles);
    cargo
        .words("--release --locked --package pagetide-cli --target-dir")
        .arg(target)
        .env("CARGO_PROFILE_RELEASE_DEBUG", "false")
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        .dir(paths.root())
        .logged(&paths.target().join("vm/build-static.log"), &progress)
        .with_context(|| format!("the static pagetide for {arch}"))?;
    progress.done();
    Ok(())
}
