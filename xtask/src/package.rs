//! `cargo xtask package`: the Debian package of the `pagetide` command, and static commands.

mod everything;
#[cfg(test)]
mod removal_tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use fs_err as fs;
use serde_json::Value;

use crate::command::Run;
use crate::kernel::lock;
use crate::paths::Paths;
use crate::progress::Progress;
use crate::{files, setup, vm};

/// The package of the workspace that has the command.
const CRATE: &str = "pagetide-cli";

/// The version of cargo-deb. Versions differ in how they read the settings in crates/cli/Cargo.toml.
const CARGO_DEB: &str = "3.8.0";

/// The shells whose completion scripts are in the package.
const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];

/// The verb's arguments.
#[derive(Debug, Args)]
pub(crate) struct PackageArgs {
    /// Also a static command, and both for arm64, with checksums, in target/package; some twenty minutes
    #[arg(long)]
    all: bool,
}

/// Runs the verb.
pub(crate) fn run(args: &PackageArgs, paths: &Paths) -> Result<()> {
    if args.all {
        setup::require(&setup::cross_tools())?;
    }
    vm::build_pagetide(paths)?;
    let package = build(Profile::Release, paths)?;
    if args.all {
        return everything::run(&package, paths);
    }
    println!("{}", package.display());
    Ok(())
}

/// Which `pagetide` is packaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// The optimised one, for users.
    Release,
    /// The one that the tests call.
    Dev,
}

impl Profile {
    /// cargo's name of the profile.
    fn name(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Dev => "dev",
        }
    }

    /// Where cargo has the command.
    fn directory(self, paths: &Paths) -> PathBuf {
        paths.target().join(match self {
            Self::Release => "release",
            Self::Dev => "debug",
        })
    }
}

/// Makes the package of a command that has been compiled, and returns the package's place.
pub(crate) fn build(profile: Profile, paths: &Paths) -> Result<PathBuf> {
    setup::require(&setup::package_tools())?;
    let pagetide = profile.directory(paths).join("pagetide");
    stage(&staging(profile, paths), &pagetide, paths)?;
    cargo_deb_with(
        &["--strip", "--profile", profile.name()],
        &paths.target(),
        paths,
    )
}

/// Runs cargo-deb on a command that has been compiled below `target`, and returns the package's place.
fn cargo_deb_with(arguments: &[&str], target: &Path, paths: &Paths) -> Result<PathBuf> {
    let cargo_deb = cargo_deb(paths)?;
    let progress = Progress::spinner("cargo deb");
    let manifest = paths.in_root("crates/cli/Cargo.toml");
    let place = Run::new(cargo_deb)
        .words("--no-build --locked --compress-system --quiet")
        .args(arguments)
        .arg("--manifest-path")
        .arg(manifest)
        .env("CARGO_TARGET_DIR", target)
        .dir(paths.root())
        .text()?;
    progress.done();
    let place = PathBuf::from(place);
    ensure!(place.exists(), "cargo deb named {}", place.display());
    Ok(place)
}

/// Where the package's generated files are. What crates/cli/Cargo.toml calls target/release is for cargo-deb the
/// directory of the profile, wherever that is.
fn staging(profile: Profile, paths: &Paths) -> PathBuf {
    profile.directory(paths).join("package")
}

/// The directory of the compressed manual pages of the package that [`build`] made last.
pub(crate) fn manual_pages(profile: Profile, paths: &Paths) -> PathBuf {
    staging(profile, paths).join(MANUAL)
}

/// Below the staging directory.
const MANUAL: &str = "man";

/// Generates the files of the package that cargo does not build, by a command that runs here.
fn stage(staging: &Path, pagetide: &Path, paths: &Paths) -> Result<()> {
    // A page of a verb that no longer exists must not stay.
    files::fresh_dir(staging)?;
    let completions = staging.join("completions");
    fs::create_dir(&completions)?;
    for shell in SHELLS {
        let script = Run::new(pagetide).args(["completions", shell]).output()?;
        fs::write(completions.join(format!("pagetide.{shell}")), script)?;
    }
    let manual = staging.join(MANUAL);
    Run::new(pagetide).arg("man").arg(&manual).output()?;
    // cargo-deb compresses no file from there.
    Run::new("gzip")
        .args(["-9", "--no-name", "--recursive"])
        .arg(&manual)
        .output()?;
    fs::write(staging.join("THIRD-PARTY"), third_party(paths)?)?;
    Ok(())
}

/// cargo-deb, compiled once and kept in the cache.
fn cargo_deb(paths: &Paths) -> Result<PathBuf> {
    let tools = paths.cache().join("tools");
    let home = tools.join(format!("cargo-deb-{CARGO_DEB}"));
    let program = home.join("bin/cargo-deb");
    if program.exists() {
        return Ok(program);
    }
    let _lock = lock::take(&tools)?;
    if program.exists() {
        return Ok(program);
    }
    let build = tools.join(format!("build-{}", files::unique()));
    let compiles = |line: &str| line.trim_start().starts_with("Compiling ");
    let progress = Progress::start("building cargo-deb", None, compiles);
    let installed = Run::new("cargo")
        .args(["install", "cargo-deb", "--locked", "--no-default-features"])
        .args(["--version", CARGO_DEB, "--root"])
        .arg(&home)
        .arg("--target-dir")
        .arg(&build)
        // It runs for a few seconds: its compile time counts.
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
        .logged(&tools.join("cargo-deb.log"), &progress);
    // The objects have no further use; a leftover takes space and does no other harm.
    let _ = files::remove(&build);
    installed?;
    progress.done();
    Ok(program)
}

/// The libraries that are linked into the command, with their licences and notices.
fn third_party(paths: &Paths) -> Result<String> {
    let cargo = |words: &[&str]| Run::new("cargo").args(words).dir(paths.root());
    let tree = cargo(&["tree", "--locked", "--package", CRATE, "--prefix", "none"])
        .args(["--edges", "normal,no-proc-macro", "--format", "{p}"])
        .text()?;
    let linked: BTreeSet<_> = tree.lines().filter_map(name_and_version).collect();
    let metadata = cargo(&["metadata", "--locked", "--format-version=1"]).output()?;
    let metadata: Value = serde_json::from_slice(&metadata).context("cargo metadata")?;
    let mut libraries = BTreeMap::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let text = |field: &str| package[field].as_str();
        let (Some(name), Some(version), Some(manifest)) =
            (text("name"), text("version"), text("manifest_path"))
        else {
            continue;
        };
        // Packages of the workspace have no source.
        if package["source"].is_null() || !linked.contains(&(name, version)) {
            continue;
        }
        let licence = text("license").unwrap_or("see its notices");
        let directory = Path::new(manifest).parent().context("a manifest's place")?;
        let heading = format!("{name} {version}: {licence}");
        libraries.insert(heading, notices(directory)?);
    }
    ensure!(!libraries.is_empty(), "no library is linked");
    Ok(third_party_text(&libraries))
}

/// The name and the version in a line of `cargo tree`, `NAME vVERSION` and more.
fn name_and_version(line: &str) -> Option<(&str, &str)> {
    let mut words = line.split(' ');
    Some((words.next()?, words.next()?.strip_prefix('v')?))
}

/// The licences and notices in a package's directory, but for the text of the Apache License, which
/// every Debian system has.
fn notices(directory: &Path) -> Result<BTreeSet<String>> {
    const NAMES: [&str; 5] = ["COPYING", "COPYRIGHT", "LICENCE", "LICENSE", "NOTICE"];
    let mut notices = BTreeSet::new();
    for entry in fs::read_dir(directory)? {
        let file = entry?.path();
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        if !NAMES.iter().any(|wanted| name.starts_with(wanted)) || !file.is_file() {
            continue;
        }
        let text = fs::read(&file)?;
        let text = String::from_utf8_lossy(&text).trim_end().to_owned();
        if !text.trim_start().starts_with("Apache License") {
            notices.insert(text);
        }
    }
    Ok(notices)
}

/// Each library with its licence, then each notice once.
fn third_party_text(libraries: &BTreeMap<String, BTreeSet<String>>) -> String {
    let mut text = "Libraries in /usr/bin/pagetide, each with its licence. The Apache License, version 2.0, is\n\
                    in /usr/share/common-licenses/Apache-2.0. The notices of the libraries follow.\n\n"
        .to_owned();
    let mut owners: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (library, notices) in libraries {
        text += &format!("{library}\n");
        for notice in notices {
            let name = library.split(':').next().unwrap_or(library);
            owners.entry(notice).or_default().push(name);
        }
    }
    for (notice, libraries) in owners {
        text += &format!("\n---- {}\n\n{notice}\n", libraries.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_cargo_tree_is_read() {
        assert_eq!(name_and_version("clap v4.6.7"), Some(("clap", "4.6.7")));
        let local = "pagetide-cli v0.1.0 (/x/crates/cli)";
        assert_eq!(name_and_version(local), Some(("pagetide-cli", "0.1.0")));
        assert_eq!(name_and_version(""), None);
    }

    #[test]
    fn notices_are_kept_once_and_the_apache_license_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("LICENSE-MIT", "Copyright (c) A\n"),
            ("LICENSE-APACHE", "        Apache License\n   Version 2.0"),
            ("README.md", "about"),
        ] {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let notices = notices(dir.path()).unwrap();
        assert_eq!(notices, BTreeSet::from(["Copyright (c) A".to_owned()]));
        let libraries = ["a 1: MIT", "b 2: MIT"].map(|name| (name.to_owned(), notices.clone()));
        let text = third_party_text(&BTreeMap::from(libraries));
        assert!(
            text.ends_with("a 1: MIT\nb 2: MIT\n\n---- a 1, b 2\n\nCopyright (c) A\n"),
            "{text}"
        );
    }

    /// What a user of `pagetide serve` compiles. A new crate needs its reason in docs/guide/install.md.
    #[test]
    fn the_feature_serve_alone_takes_at_most_110_crates() {
        let paths = Paths::find().unwrap();
        let tree = Run::new("cargo")
            .words("tree --locked --prefix none --no-dedupe --edges normal,build --package")
            .arg(CRATE)
            .words("--no-default-features --features serve")
            .dir(paths.root())
            .text();
        let tree = tree.unwrap();
        let crates: BTreeSet<_> = tree.lines().filter_map(name_and_version).collect();
        assert!(
            (50..=110).contains(&crates.len()),
            "{} crates",
            crates.len()
        );
    }

    #[test]
    fn libraries_are_named_and_ours_are_not() {
        let text = third_party(&Paths::find().unwrap()).unwrap();
        assert!(text.contains("\nclap 4."), "{text}");
        assert!(text.contains("Permission is hereby granted"), "{text}");
        assert!(
            !text.contains("pagetide-") && !text.contains("clap_derive"),
            "{text}"
        );
    }
}
