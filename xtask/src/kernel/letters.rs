//! Cover letters: `NN-topic/0000-cover-letter.patch`, one for each topic. People write them, except the
//! list of patches and files, which is what `git format-patch --cover-letter` would write.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use fs_err as fs;

use super::series::{Patch, Series};
use super::tree::Tree;
use crate::files;

/// The file's name, in the directory of its topic.
pub(super) const FILE: &str = "0000-cover-letter.patch";

/// The lines between which `kernel export` writes.
const BEGIN: &str = "[patches and files: written by `cargo xtask kernel export`]";
const END: &str = "[end of what `cargo xtask kernel export` writes]";

/// The name below kernel/patches.
pub(super) fn name(topic: &str) -> String {
    format!("{topic}/{FILE}")
}

/// Whether a file is the cover letter of one of the series' topics.
pub(super) fn is_letter(file: &Path, series: &Series) -> bool {
    let topic = file.parent().and_then(Path::file_name);
    let is_topic = |topic: &&str| series.topics().contains(topic);
    file.ends_with(FILE)
        && topic
            .and_then(|t| t.to_str())
            .as_ref()
            .is_some_and(is_topic)
}

/// Writes the lists of patches and files of all letters below `dir`. The tree's commits are the series.
/// Returns how many letters changed.
pub(super) fn refresh(dir: &Path, tree: &Tree, series: &Series) -> Result<usize> {
    let mut changed = 0;
    for topic in series.topics() {
        let file = place(dir, topic);
        if !file.exists() {
            eprintln!("kernel/patches/{} is missing", name(topic));
            continue;
        }
        let old = fs::read_to_string(&file)?;
        let new = refreshed(
            &old,
            &of_topic(series, topic),
            &summary(tree, series, topic)?,
        );
        let new = new.with_context(|| file.display().to_string())?;
        if new != old {
            fs::write(&file, new)?;
            eprintln!("wrote kernel/patches/{}", name(topic));
            changed += 1;
        }
    }
    Ok(changed)
}

/// An error unless the topic has a letter that names each of its patches, and whose list is what
/// [`refresh`] would write. The tree's commits are the series.
pub(super) fn check(dir: &Path, tree: &Tree, series: &Series, topic: &str) -> Result<()> {
    let text = files::text_if_any(&place(dir, topic))?;
    let patches = of_topic(series, topic);
    names_all(&text, &patches)?;
    if refreshed(&text, &patches, &summary(tree, series, topic)?)? != text {
        bail!("its list of patches and files is not current: run `cargo xtask kernel export`");
    }
    Ok(())
}

fn place(dir: &Path, topic: &str) -> PathBuf {
    dir.join(name(topic))
}

fn of_topic<'a>(series: &'a Series, topic: &str) -> Vec<&'a Patch> {
    let patches = series.patches.iter();
    patches.filter(|patch| patch.topic() == topic).collect()
}

/// An error unless a letter is there and its list names every patch.
fn names_all(letter: &str, patches: &[&Patch]) -> Result<()> {
    if letter.is_empty() {
        bail!("it is missing or empty");
    }
    let (_, list, _) = parts(letter)?;
    // Long subjects are wrapped.
    let list = words(list);
    let unnamed: Vec<_> = patches
        .iter()
        .filter(|patch| !list.contains(&words(&patch.subject())))
        .map(|patch| patch.name.as_str())
        .collect();
    if !unnamed.is_empty() {
        bail!(
            "it does not name {}: run `cargo xtask kernel export`",
            unnamed.join(", ")
        );
    }
    Ok(())
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A letter's text up to the first mark and with it, between the marks, and from the second mark on.
fn parts(letter: &str) -> Result<(&str, &str, &str)> {
    let after = |mark: &str| {
        let line = format!("\n{mark}\n");
        let mut places = letter.match_indices(&line).map(|(at, _)| at);
        match (places.next(), places.next()) {
            (Some(at), None) => Ok(at),
            (None, _) => bail!("it lacks the line {mark:?}"),
            (Some(_), Some(_)) => bail!("it has the line {mark:?} twice"),
        }
    };
    let start = after(BEGIN)? + BEGIN.len() + 2;
    let end = after(END)? + 1;
    if end < start {
        bail!("its line {END:?} comes before the line {BEGIN:?}");
    }
    Ok((&letter[..start], &letter[start..end], &letter[end..]))
}

/// The letter with this list between the marks, and the number of patches in its subject.
fn refreshed(letter: &str, patches: &[&Patch], list: &str) -> Result<String> {
    let (head, _, tail) = parts(letter)?;
    let (before, rest) = head
        .split_once("\nSubject: [PATCH")
        .context("it lacks a line that begins with \"Subject: [PATCH\"")?;
    let (tag, rest) = rest
        .split_once(']')
        .context("its subject's tag has no end")?;
    // "[PATCH v2 00/17]": everything but the number stays.
    let kept = tag.split_whitespace().filter(|word| !word.contains('/'));
    let kept: String = kept.map(|word| format!(" {word}")).collect();
    let count = patches.len();
    let width = count.to_string().len();
    Ok(format!(
        "{before}\nSubject: [PATCH{kept} {:0width$}/{count}]{rest}{list}{tail}",
        0
    ))
}

/// The topic's commits by author, and what they change, as `git format-patch --cover-letter` has it.
fn summary(tree: &Tree, series: &Series, topic: &str) -> Result<String> {
    let commits = tree.commits()?;
    if commits.len() != series.patches.len() {
        let (path, wanted) = (tree.path().display(), series.patches.len());
        bail!("{path} has {} commits instead of {wanted}", commits.len());
    }
    let both = series.patches.iter().zip(&commits);
    let mut of_topic = both.filter(|(patch, _)| patch.topic() == topic);
    let (_, first) = of_topic.next().context("the topic has no patches")?;
    let last = of_topic.next_back().map_or(first, |(_, commit)| commit);
    let range = format!("{first}^..{last}");
    let authors = tree.git(["shortlog", "-w72,2,4", &range]).output()?;
    let stat = tree
        .git([
            "diff",
            "--no-ext-diff",
            "--no-renames",
            "--diff-algorithm=myers",
        ])
        .words("--stat=72 --summary")
        .arg(&range)
        .output()?;
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).context("git's list is not UTF-8");
    Ok(format!("\n{}{}\n", text(authors)?, text(stat)?))
}

#[cfg(test)]
mod tests;
