//! The Debian package, and `cargo install`.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use fs_err as fs;

use super::clean_root::{self, CleanRoot};
use super::host;
use super::tally::{Tally, Verdict};
use crate::command::Run;
use crate::package::Profile;
use crate::paths::Paths;
use crate::progress::Progress;
use crate::{files, package, vm};

const GROUP: &str = "package";

/// What the package's service serves.
const CONFIGURATION: &str = "/etc/pagetide/serve.toml";

/// Files that the package must have, beside its manual pages.
const FILES: [&str; 11] = [
    CONFIGURATION,
    "/usr/lib/systemd/system/multi-user.target.d/pagetide.conf",
    "/usr/bin/pagetide",
    "/usr/lib/systemd/system/pagetide.service",
    "/usr/lib/systemd/system/pagetide.socket",
    "/usr/share/bash-completion/completions/pagetide",
    "/usr/share/zsh/vendor-completions/_pagetide",
    "/usr/share/fish/vendor_completions.d/pagetide.fish",
    "/usr/share/doc/pagetide/copyright",
    "/usr/share/doc/pagetide/changelog.gz",
    "/usr/share/doc/pagetide/THIRD-PARTY",
];

/// Where manual pages are.
const MAN: &str = "/usr/share/man/man1";

/// Makes the package of the command that the tests call, installs it in a clean root, uses it and purges it.
pub(super) fn run(paths: &Paths, tally: &mut Tally) -> Result<()> {
    // The command is compiled with the tests.
    host::programs(paths)?;
    in_clean_root(Profile::Dev, GROUP, paths, tally)
}

/// The same with the optimised command, as users have it, and `cargo install`. To optimise the command takes minutes.
pub(super) fn optimised(paths: &Paths, tally: &mut Tally) -> Result<()> {
    vm::build_pagetide(paths)?;
    let group = "package (optimised)";
    count(tally, group, "cargo install", cargo_install(paths));
    in_clean_root(Profile::Release, group, paths, tally)
}

fn count(tally: &mut Tally, group: &str, name: &str, result: Result<()>) {
    let verdict = match result {
        Ok(()) => Verdict::Passed,
        Err(error) => Verdict::Failed(format!("{error:#}")),
    };
    tally.add(group, name, verdict);
}

fn in_clean_root(
    profile: Profile,
    group: &'static str,
    paths: &Paths,
    tally: &mut Tally,
) -> Result<()> {
    let package = package::build(profile, paths)?;
    let mut count = |name, result| count(tally, group, name, result);
    count("control fields", control(&package));
    if let Some(reason) = clean_root::unavailable()? {
        tally.add(group, "clean root", Verdict::Skipped(reason));
        return Ok(());
    }
    let progress = Progress::spinner("installing the package in a clean root");
    let root = CleanRoot::new(paths)?;
    let file = root.copy_in(&package)?;
    let before = root.paths()?;
    root.run("dpkg").arg("--install").arg(&file).output()?;
    count("commands", commands(&root));
    count("files", files(&root));
    count("manual pages", manual(profile, &root, paths));
    count("completions", completions(&root));
    count("configuration", configuration(&root, &file));
    count("purge", purge(&root, &before));
    progress.done();
    Ok(())
}

/// What dpkg and apt read.
fn control(package: &Path) -> Result<()> {
    let field = |name: &str| Run::new("dpkg-deb").arg("-f").arg(package).arg(name).text();
    for (name, wanted) in [
        ("Package", "pagetide"),
        ("Architecture", debian_architecture()?),
    ] {
        let found = field(name)?;
        ensure!(found == wanted, "{name} is {found}, not {wanted}");
    }
    let version = field("Version")?;
    let wanted = concat!(env!("CARGO_PKG_VERSION"), "-1");
    ensure!(version == wanted, "Version is {version}, not {wanted}");
    let depends = field("Depends")?;
    ensure!(depends.contains("libc6 (>= "), "Depends is {depends:?}");
    let description = field("Description")?;
    ensure!(
        description.lines().count() > 2,
        "Description is {description:?}"
    );
    Ok(())
}

/// Debian's name for this machine's architecture.
fn debian_architecture() -> Result<&'static str> {
    Ok(match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => anyhow::bail!("no name for {other}"),
    })
}

/// `cargo install` puts a command in place that runs.
fn cargo_install(paths: &Paths) -> Result<()> {
    let home = paths
        .target()
        .join("test")
        .join(format!("install-{}", files::unique()));
    let progress = Progress::spinner("cargo install");
    let installed = Run::new("cargo")
        .args([
            "install",
            "--quiet",
            "--locked",
            "--no-track",
            "--path",
            "crates/cli",
        ])
        .arg("--target-dir")
        .arg(paths.target())
        .arg("--root")
        .arg(&home)
        .dir(paths.root())
        .output()
        .and_then(|_| Run::new(home.join("bin/pagetide")).arg("--version").text());
    // A leftover takes space and does no other harm.
    let _ = files::remove(&home);
    progress.done();
    is_version(&installed?)
}

fn is_version(text: &str) -> Result<()> {
    let wanted = concat!("pagetide ", env!("CARGO_PKG_VERSION"));
    ensure!(text == wanted, "--version printed {text:?}, not {wanted:?}");
    Ok(())
}

/// The command runs with the libraries that the package depends on.
fn commands(root: &CleanRoot) -> Result<()> {
    is_version(&root.run("pagetide").arg("--version").text()?)?;
    let probe = root.run("pagetide").args(["probe", "--json"]).text()?;
    let probe: serde_json::Value = serde_json::from_str(&probe).context("pagetide probe --json")?;
    let asked = probe["capabilities"].as_array().map_or(0, Vec::len);
    ensure!(asked > 0, "pagetide probe asked for nothing");
    Ok(())
}

/// What an administrator has written stays, at an upgrade and if it was there before the package.
fn configuration(root: &CleanRoot, package: &Path) -> Result<()> {
    let read = || root.run("cat").arg(CONFIGURATION).text();
    let packaged = root
        .run("cat")
        .arg("/usr/share/pagetide/serve.toml")
        .text()?;
    ensure!(read()? == packaged, "{CONFIGURATION} is not the package's");
    let written = "# mine";
    for removed in [false, true] {
        if removed {
            root.run("dpkg").args(["--remove", "pagetide"]).output()?;
        }
        let write = format!("echo '{written}' >{CONFIGURATION}");
        root.run("sh").args(["-c", &write]).output()?;
        root.run("dpkg").arg("--install").arg(package).output()?;
        ensure!(read()? == written, "{CONFIGURATION} was overwritten");
    }
    Ok(())
}

fn files(root: &CleanRoot) -> Result<()> {
    let missing: Vec<_> = FILES.iter().filter(|file| !root.has(file)).collect();
    ensure!(missing.is_empty(), "missing: {missing:?}");
    let copyright = root
        .run("cat")
        .arg("/usr/share/doc/pagetide/copyright")
        .text()?;
    for licence in ["License: Apache-2.0\n", "License: Expat\n"] {
        ensure!(
            copyright.contains(licence),
            "no {licence:?} in the copyright file"
        );
    }
    let listed = root.run("dpkg-query").args(["-L", "pagetide"]).text()?;
    let other = listed
        .lines()
        .find(|path| !path.starts_with("/usr") && *path != "/.");
    ensure!(other.is_none(), "outside /usr: {other:?}");
    let verified = root.run("dpkg").args(["--verify", "pagetide"]).text()?;
    ensure!(verified.is_empty(), "dpkg --verify: {verified}");
    Ok(())
}

/// Every generated page is there, compressed.
fn manual(profile: Profile, root: &CleanRoot, paths: &Paths) -> Result<()> {
    let wanted: BTreeSet<_> = fs::read_dir(package::manual_pages(profile, paths))?
        .map(|entry| Ok(format!("{MAN}/{}", entry?.file_name().to_string_lossy())))
        .collect::<Result<_>>()?;
    ensure!(
        wanted.contains(&format!("{MAN}/pagetide.1.gz")),
        "{wanted:?}"
    );
    let listed = root.run("dpkg-query").args(["-L", "pagetide"]).text()?;
    let found: BTreeSet<_> = listed
        .lines()
        .filter(|path| path.strip_prefix(MAN).is_some_and(|name| name.len() > 1))
        .map(str::to_owned)
        .collect();
    ensure!(found == wanted, "{found:?}, not {wanted:?}");
    for page in &found {
        let text = root.run("gzip").arg("-dc").arg(page).text()?;
        ensure!(text.contains("\n.SH NAME\n"), "{page} has no NAME");
    }
    Ok(())
}

/// The shell that every Debian system has completes a verb.
fn completions(root: &CleanRoot) -> Result<()> {
    let program = "source /usr/share/bash-completion/completions/pagetide
        complete -p pagetide > /dev/null || exit
        COMP_WORDS=(pagetide pro) COMP_CWORD=1
        _pagetide pagetide pro pagetide
        echo \"${COMPREPLY[@]}\"";
    let offered = root.run("bash").args(["-c", program]).text()?;
    ensure!(
        offered == "probe",
        "bash offers {offered:?} for \"pagetide pro\""
    );
    Ok(())
}

/// Nothing is left of the package.
fn purge(root: &CleanRoot, before: &BTreeSet<String>) -> Result<()> {
    root.run("dpkg").args(["--purge", "pagetide"]).output()?;
    let after = root.paths()?;
    let left: Vec<_> = after.difference(before).collect();
    ensure!(left.is_empty(), "left: {left:?}");
    let gone: Vec<_> = before.difference(&after).collect();
    ensure!(gone.is_empty(), "removed what is not its own: {gone:?}");
    let known = root.run("dpkg-query").args(["-W", "pagetide"]).succeeds()?;
    ensure!(!known, "dpkg still lists the package");
    Ok(())
}
