//! Tells the crate which revision it is built from, where that is known.

use std::path::Path;
use std::process::Command;

/// What decides how the program behaves, relative to the root of the checkout.
const SOURCES: [&str; 3] = ["crates", "Cargo.toml", "Cargo.lock"];

fn main() {
    // The log of HEAD changes with every commit, checkout and reset; the sources decide whether the
    // revision is told as changed. Nearly all of them are below this crate, so that watching them
    // rebuilds little that would not be rebuilt anyway.
    let watched = SOURCES.into_iter().chain([".git/HEAD", ".git/logs/HEAD"]);
    for file in watched.map(|file| format!("../../{file}")) {
        if Path::new(&file).exists() {
            println!("cargo::rerun-if-changed={file}");
        }
    }
    if let Some(revision) = revision() {
        println!("cargo::rustc-env=PAGETIDE_BUILD_REVISION={revision}");
    }
}

/// The short hash of HEAD, with `-dirty` if sources were changed since; `None` outside a checkout.
fn revision() -> Option<String> {
    let hash = git(&["rev-parse", "--short=12", "HEAD"])?;
    let mut status = vec!["-C", "../..", "status", "--porcelain", "--"];
    status.extend(SOURCES);
    let changed = git(&status)?;
    Some(if changed.is_empty() {
        hash
    } else {
        format!("{hash}-dirty")
    })
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
