//! `cargo xtask kernel export`: the work tree's commits back to patches.

use std::collections::HashMap;

use anyhow::{Context, Result, bail};
use fs_err as fs;

use super::letters;
use super::make::lock_tree;
use super::series::{Patch, Series, patches_dir};
use super::source::Base;
use super::tree::{self, Tree};
use crate::files;
use crate::paths::Paths;

/// What the series file begins with.
const SERIES_HEADER: &str = "\
# The patches, in the order in which they apply to the source that kernel/BASE names.
# Written by `cargo xtask kernel export`.
";

/// Runs the verb.
pub(crate) fn run(paths: &Paths) -> Result<()> {
    let tree = tree::developers(paths)?;
    let base = Base::read(paths)?;
    if !base.is_of(tree.source()) {
        let (found, wanted) = (&tree.source().version, base.version());
        bail!(
            "the work tree is on {found}, and patches are made on {wanted}, which kernel/BASE names"
        );
    }
    let _lock = lock_tree(paths, "patched")?;
    let edited = tree.edited()?;
    if !edited.is_empty() {
        let path = tree.path().display();
        bail!("{path} has uncommitted changes: {}", edited.join(", "));
    }
    let old = Series::read(paths)?;
    let new = from_tree(&tree, &old)?;
    write(paths, &old, &new)?;
    letters::refresh(&patches_dir(paths), &tree, &new)?;
    tree.note_series(&new)
}

/// The series that a tree's commits are.
pub(super) fn from_tree(tree: &Tree, old: &Series) -> Result<Series> {
    let mut patches = Vec::new();
    let mut numbers = HashMap::new();
    for (commit, topic) in topics(tree, old)? {
        let number = numbers
            .entry(topic.clone())
            .and_modify(|n| *n += 1)
            .or_insert(1);
        patches.push(format_patch(tree, &commit, &topic, *number)?);
    }
    Ok(Series { patches })
}

/// Each commit's topic: what a tag `topic/NN-name` on it says, else what kernel/series says of a
/// patch with the same subject, else the topic of the commit before it. Subjects and not hashes,
/// because an edited commit keeps its subject and a rebase leaves tags and notes behind.
fn topics(tree: &Tree, old: &Series) -> Result<Vec<(String, String)>> {
    let patches = old.patches.iter();
    let known: HashMap<String, &str> = patches.map(|p| (p.subject(), p.topic())).collect();
    let mut list: Vec<(String, String)> = Vec::new();
    for commit in tree.commits()? {
        let subject = tree.git(["log", "-1", "--format=%s", &commit]).text()?;
        let tags = tree.git(["tag", "--points-at", &commit, "topic/*"]);
        let tags = tags.text()?;
        let tag = tags.lines().next();
        let topic = tag
            .and_then(|tag| tag.strip_prefix("topic/"))
            .or_else(|| known.get(&subject).copied())
            .or_else(|| list.last().map(|(_, topic)| topic.as_str()))
            .with_context(|| {
                let path = tree.path().display();
                format!("no topic for {subject:?}: git -C {path} tag topic/NN-NAME {commit}")
            })?
            .to_owned();
        list.push((commit, topic));
    }
    in_order(list.iter().map(|(_, topic)| topic.as_str()))?;
    Ok(list)
}

/// An error unless topics are well named and follow one another by number.
fn in_order<'a>(topics: impl Iterator<Item = &'a str>) -> Result<()> {
    let mut last = "";
    for topic in topics {
        let number = topic.split_once('-').map_or("", |(number, _)| number);
        if number.len() != 2 || !number.bytes().all(|b| b.is_ascii_digit()) {
            bail!("{topic:?} is not of the form NN-name");
        }
        if topic < last {
            bail!("a commit of {topic} comes after one of {last}");
        }
        last = topic;
    }
    Ok(())
}

/// One commit as a patch that is the same on every machine and with every git: no hash of the
/// commit, no version, whole blob hashes.
fn format_patch(tree: &Tree, commit: &str, topic: &str, number: u32) -> Result<Patch> {
    let dir = tree.path().join(".git/pagetide-export");
    files::remove(&dir)?;
    tree.git(["-c", "core.abbrev=12"])
        .words("-c diff.suppressBlankEmpty=false format-patch --quiet -1 --no-numbered")
        .words("--no-signature --zero-commit --full-index --no-renames --diff-algorithm=myers")
        .words("--subject-prefix=PATCH --stat=72 --no-thread --encode-email-headers")
        .args([&format!("--start-number={number}"), "-o"])
        .arg(&dir)
        .arg(commit)
        .output()?;
    let left: Vec<_> = fs::read_dir(&dir)?.collect::<Result<_, _>>()?;
    let [file] = left.as_slice() else {
        let place = dir.display();
        bail!("git format-patch did not leave one file in {place}");
    };
    Ok(Patch {
        name: format!("{topic}/{}", file.file_name().to_string_lossy()),
        content: fs::read(file.path())?,
    })
}

/// Writes patches and series, and removes patches that are no longer in it.
fn write(paths: &Paths, old: &Series, new: &Series) -> Result<()> {
    let dir = patches_dir(paths);
    let mut changed = 0;
    for patch in &new.patches {
        if old.patches.contains(patch) {
            continue;
        }
        let file = dir.join(&patch.name);
        if let Some(topic) = file.parent() {
            fs::create_dir_all(topic)?;
        }
        fs::write(&file, &patch.content)?;
        eprintln!("wrote kernel/patches/{}", patch.name);
        changed += 1;
    }
    for patch in &old.patches {
        if new.patches.iter().all(|kept| kept.name != patch.name) {
            fs::remove_file(dir.join(&patch.name))?;
            eprintln!("removed kernel/patches/{}", patch.name);
            changed += 1;
        }
    }
    let lines = new.patches.iter().map(|patch| format!("{}\n", patch.name));
    let text = SERIES_HEADER.to_owned() + &lines.collect::<String>();
    fs::write(paths.in_root("kernel/series"), text)?;
    eprintln!("{} patches, {changed} changed", new.patches.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topics_follow_one_another() {
        assert!(in_order(["01-a", "01-a", "02-b"].into_iter()).is_ok());
        assert!(in_order(["01-a", "02-b", "01-a"].into_iter()).is_err());
        assert!(in_order(["a"].into_iter()).is_err());
    }

    #[test]
    fn an_exported_series_applies_to_itself() {
        let dir = tempfile::tempdir().unwrap();
        let tree = tree::tests::tree(dir.path());
        std::fs::write(tree.path().join("a.c"), "ten\n").unwrap();
        tree.git(["commit", "-qa", "-m", "KVM: change a\n\nBecause."])
            .output()
            .unwrap();
        tree.git(["tag", "topic/01-first"]).output().unwrap();
        std::fs::write(tree.path().join("b.c"), "ten\n").unwrap();
        tree.git(["commit", "-qa", "-m", "change b"])
            .output()
            .unwrap();

        let series = from_tree(&tree, &Series::default()).unwrap();
        let names: Vec<_> = series.patches.iter().map(|p| p.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "01-first/0001-KVM-change-a.patch",
                "01-first/0002-change-b.patch"
            ]
        );

        tree.git(["reset", "--quiet", "--hard", "base"])
            .output()
            .unwrap();
        tree.git(["tag", "-d", "topic/01-first"]).output().unwrap();
        tree.apply(&series).unwrap();
        let again = from_tree(&tree, &series).unwrap();
        assert_eq!(again.patches, series.patches);
    }
}
