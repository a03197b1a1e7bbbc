//! `cargo xtask kernel check --base newest`: whether the series applies to the newest source that Debian serves, as text.

use anyhow::{Result, bail};
use fs_err as fs;

use super::make::lock_tree;
use super::series::{Patch, Series};
use super::source;
use super::tree::Tree;
use crate::paths::Paths;
use crate::progress::Progress;

/// Which source a look ahead takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Ahead {
    /// The newest of the same series of stable releases that Debian serves
    Newest,
}

/// Runs it: prints each patch that does not apply, with the place.
pub(super) fn run(paths: &Paths) -> Result<()> {
    let source = source::newest(paths)?;
    let name = "ahead";
    let _lock = lock_tree(paths, name)?;
    let tree = Tree::open(paths, &source, name)?;
    let series = Series::read(paths)?;
    let progress = Progress::spinner(&format!("applying the series to {}", source.version));
    let failures = failures(&tree, &series)?;
    progress.done();
    for (patch, why) in &failures {
        println!("{patch}: FAILED: {why}");
    }
    let (count, version) = (series.patches.len(), &source.version);
    if !failures.is_empty() {
        bail!(
            "{} of {count} patches do not apply to {version}, the newest that Debian serves. Of a patch that failed, the \
             hunks that apply were taken, so that a later failure may be due to an earlier one",
            failures.len()
        );
    }
    println!("all {count} patches apply to {version}, the newest that Debian serves");
    Ok(())
}

/// The patches that do not apply, one after the other, with the reason.
fn failures(tree: &Tree, series: &Series) -> Result<Vec<(String, String)>> {
    tree.drop_unfinished()?;
    tree.apply(&Series::default())?;
    // What a patch that applied in part has added, in a run that was ended there.
    tree.git(["clean", "-d", "--quiet", "--force"]).output()?;
    let mut failures = Vec::new();
    for patch in &series.patches {
        if let Err(error) = tree.am(std::slice::from_ref(patch)) {
            failures.push((patch.name.clone(), format!("{error:#}")));
            take_what_applies(tree, patch)?;
        }
    }
    Ok(failures)
}

/// Commits the hunks of a patch that apply.
fn take_what_applies(tree: &Tree, patch: &Patch) -> Result<()> {
    let file = tree.path().join(".git/pagetide-ahead");
    fs::write(&file, &patch.content)?;
    // It fails, since a hunk does not apply.
    let _ = tree
        .git(["apply", "--reject", "--whitespace=nowarn"])
        .arg(&file)
        .succeeds()?;
    tree.git(["add", "--all", "--", ":/", ":(exclude)*.rej"])
        .output()?;
    tree.git(["commit", "--quiet", "--allow-empty", "--no-verify", "-m"])
        .arg(&patch.name)
        .output()?;
    tree.git(["clean", "--quiet", "--force", "--", "*.rej"])
        .output()
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::super::tree::tests::tree;
    use super::*;

    fn patch(name: &str, hunks: &str) -> Patch {
        let content = format!(
            "From 0 Mon Sep 17 00:00:00 2001\nFrom: A <a@localhost>\nDate: Thu, 1 Jan 2026 00:00:00 +0000\n\
             Subject: [PATCH] x\n\n---\n{hunks}--\n"
        );
        Patch {
            name: name.into(),
            content: content.into_bytes(),
        }
    }

    #[test]
    fn each_patch_that_fails_is_named_with_its_place_and_the_others_go_on() {
        let dir = tempfile::tempdir().unwrap();
        let tree = tree(dir.path());
        let good =
            "diff --git a/a.c b/a.c\n--- a/a.c\n+++ b/a.c\n@@ -1,3 +1,3 @@\n-one\n+1\n 2\n 3\n";
        let bad =
            "diff --git a/b.c b/b.c\n--- a/b.c\n+++ b/b.c\n@@ -5,3 +5,3 @@\n 5\n 6\n-other\n+y\n";
        let series = Series {
            patches: vec![
                patch("01-a/0001-x.patch", &format!("{good}{bad}")),
                patch(
                    "01-a/0002-x.patch",
                    "diff --git a/a.c b/a.c\n--- a/a.c\n+++ b/a.c\n@@ -1,3 +1,3 @@\n-1\n+eins\n 2\n 3\n",
                ),
            ],
        };
        for _ in 0..2 {
            let failures = failures(&tree, &series).unwrap();
            let [(name, why)] = failures.as_slice() else {
                panic!("{failures:?}");
            };
            assert_eq!(name, "01-a/0001-x.patch");
            assert!(why.contains("b.c, hunk 1"), "{why}");
        }
        let text = std::fs::read_to_string(tree.path().join("a.c")).unwrap();
        assert!(text.starts_with("eins\n"), "{text}");
    }
}
