//! Work trees: the source with the series applied, one clone for each checkout and use.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::git::git;
use super::prune;
use super::series::{Patch, Series};
use super::source::{self, BASE_BRANCH, Source};
use crate::command::Run;
use crate::paths::Paths;
use crate::progress::Progress;

/// The branch that the series is applied to.
const BRANCH: &str = "series";

/// A clone of the source's repository. It borrows the repository's objects, so it costs little more
/// than its files, and has refs of its own, so it disturbs nobody.
#[derive(Debug)]
pub(crate) struct Tree {
    path: PathBuf,
    source: Source,
}

/// A patch that the tree has, and the commit that it became.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Applied {
    digest: String,
    commit: String,
}

/// The tree in which the series is edited and built, with the series applied if nothing else is
/// in it.
pub(crate) fn developers(paths: &Paths) -> Result<Tree> {
    let source = source::ensure(paths)?;
    let fresh = !Tree::place(paths, &source, "patched").exists();
    let tree = Tree::open(paths, &source, "patched")?;
    if fresh {
        tree.apply(&Series::read(paths)?)?;
    }
    Ok(tree)
}

impl Tree {
    fn place(paths: &Paths, source: &Source, name: &str) -> PathBuf {
        // ~ and : mean something to make
        let version = source.version.replace(['~', ':'], "-");
        paths.work().join(version).join(name)
    }

    /// Opens this checkout's tree of that name, at the pristine source if it is new.
    pub(crate) fn open(paths: &Paths, source: &Source, name: &str) -> Result<Self> {
        let path = Self::place(paths, source, name);
        let tree = Self {
            path,
            source: source.clone(),
        };
        if !tree.path.exists() {
            prune::prune(paths)?;
            tree.create()
                .with_context(|| format!("make the work tree {}", tree.path.display()))?;
        }
        Ok(tree)
    }

    fn create(&self) -> Result<()> {
        let progress = Progress::spinner(&format!("laying out {}", self.path.display()));
        let temporary = self.path.with_extension("new");
        if temporary.exists() {
            std::fs::remove_dir_all(&temporary)?;
        }
        std::fs::create_dir_all(&temporary)?;
        git(
            &temporary,
            ["clone", "--quiet", "--shared", "--no-checkout"],
        )
        .arg(&self.source.git)
        .arg(".")
        .output()?;
        // Two cores write files faster than one; an untracked cache keeps `git status` quick.
        for (name, value) in [
            ("gc.auto", "0"),
            ("checkout.workers", "2"),
            ("core.untrackedCache", "true"),
        ] {
            git(&temporary, ["config", name, value]).output()?;
        }
        std::fs::write(temporary.join(".git/info/exclude"), "/build-*/\n")?;
        git(
            &temporary,
            [
                "checkout",
                "--quiet",
                "-b",
                BRANCH,
                &format!("origin/{BASE_BRANCH}"),
            ],
        )
        .output()?;
        git(&temporary, ["tag", BASE_BRANCH]).output()?;
        std::fs::rename(&temporary, &self.path)?;
        progress.done();
        Ok(())
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Which source it holds.
    pub(crate) fn source(&self) -> &Source {
        &self.source
    }

    pub(super) fn git<S: AsRef<std::ffi::OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = S>,
    ) -> Run {
        git(&self.path, arguments)
    }

    pub(super) fn commit(&self, name: &str) -> Result<String> {
        self.git([
            "rev-parse",
            "--verify",
            "--quiet",
            &format!("{name}^{{commit}}"),
        ])
        .text()
    }

    /// An error, saying what to do, if the tree holds work that kernel/series does not have.
    pub(crate) fn refuse_unexported(&self) -> Result<()> {
        let path = self.path.display();
        for state in [
            "rebase-apply",
            "rebase-merge",
            "MERGE_HEAD",
            "CHERRY_PICK_HEAD",
        ] {
            if self.path.join(".git").join(state).exists() {
                bail!("{path} is in the middle of a git operation ({state}): finish or abort it");
            }
        }
        let expected = self.expected_head()?;
        let head = self.commit("HEAD")?;
        let edited = self.edited()?;
        if head == expected && edited.is_empty() {
            return Ok(());
        }
        let mut what = Vec::new();
        if head != expected {
            what.push("commits that differ from kernel/series".to_owned());
        }
        if !edited.is_empty() {
            what.push(format!("uncommitted changes ({})", edited.join(", ")));
        }
        bail!(
            "{path} has {}.\n\
             Keep them: commit there and run `cargo xtask kernel export`; build them as they are: \
             `cargo xtask kernel build --from-tree`;\n\
             or drop them: git -C {path} reset --hard {expected}",
            what.join(" and ")
        );
    }

    /// Files of the source that were edited and not committed.
    pub(super) fn edited(&self) -> Result<Vec<String>> {
        let status = self
            .git(["status", "--porcelain", "--untracked-files=no"])
            .text()?;
        Ok(status
            .lines()
            .filter_map(|l| l.get(3..))
            .map(str::to_owned)
            .collect())
    }

    /// Brings the tree to the series. Patches that are applied already stay, so that only files
    /// that later patches touch get new times and are built again.
    pub(crate) fn apply(&self, series: &Series) -> Result<()> {
        self.refuse_unexported()?;
        let applied = self.applied()?;
        let same = applied
            .iter()
            .zip(&series.patches)
            .take_while(|(applied, patch)| applied.digest == patch.digest())
            .count();
        if same == applied.len() && same == series.patches.len() {
            return Ok(());
        }
        let start = match applied[..same].last() {
            Some(applied) => applied.commit.clone(),
            None => self.commit(BASE_BRANCH)?,
        };
        self.git(["reset", "--quiet", "--hard", &start]).output()?;
        self.note_applied(&applied[..same])?;
        self.am(&series.patches[same..])?;
        self.note_series(series)
    }

    /// Notes that the tree's commits are what this series gives.
    pub(super) fn note_series(&self, series: &Series) -> Result<()> {
        let commits = self.commits()?;
        if commits.len() != series.patches.len() {
            bail!(
                "{} has {} commits, but kernel/series names {} patches",
                self.path.display(),
                commits.len(),
                series.patches.len()
            );
        }
        let applied: Vec<Applied> = series
            .patches
            .iter()
            .zip(commits)
            .map(|(patch, commit)| Applied {
                digest: patch.digest(),
                commit,
            })
            .collect();
        self.note_applied(&applied)
    }

    /// The commits since the pristine source, oldest first.
    pub(super) fn commits(&self) -> Result<Vec<String>> {
        let range = format!("{BASE_BRANCH}..HEAD");
        let list = self
            .git(["rev-list", "--reverse", "--first-parent", &range])
            .text()?;
        Ok(list.lines().map(str::to_owned).collect())
    }

    /// Applies patches with `git am`; on failure the tree is as it was and the error names the
    /// patch, the hunk and the source.
    pub(super) fn am(&self, patches: &[Patch]) -> Result<()> {
        if patches.is_empty() {
            return Ok(());
        }
        let mailbox = self.path.join(".git/pagetide-am");
        if mailbox.exists() {
            std::fs::remove_dir_all(&mailbox)?;
        }
        std::fs::create_dir_all(&mailbox)?;
        let mut files = Vec::new();
        for (index, patch) in patches.iter().enumerate() {
            let file = mailbox.join(format!("{index:04}"));
            std::fs::write(&file, &patch.content)
                .with_context(|| format!("write {}", file.display()))?;
            files.push(file);
        }
        let result = self
            .git([
                "am",
                "--quiet",
                "--keep-non-patch",
                "--committer-date-is-author-date",
            ])
            .args(["--no-gpg-sign", "--no-3way", "--whitespace=nowarn"])
            .args(&files)
            .output();
        let Err(error) = result else { return Ok(()) };
        let done = self.am_progress();
        let aborted = self.git(["am", "--abort"]).output();
        let failure = match patches.get(done) {
            Some(patch) => describe_failure(patch, &error.to_string(), &self.source),
            None => format!("{error:#}"),
        };
        aborted.with_context(|| failure.clone())?;
        bail!(failure)
    }

    /// How many patches a `git am` that stopped had applied.
    fn am_progress(&self) -> usize {
        let next = std::fs::read_to_string(self.path.join(".git/rebase-apply/next"));
        let next = next.ok().and_then(|text| text.trim().parse::<usize>().ok());
        next.map_or(0, |next| next.saturating_sub(1))
    }

    fn applied_file(&self) -> PathBuf {
        self.path.join(".git/pagetide-applied")
    }

    fn applied(&self) -> Result<Vec<Applied>> {
        let file = self.applied_file();
        match std::fs::read_to_string(&file) {
            Ok(text) => Ok(parse_applied(&text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error).with_context(|| format!("read {}", file.display())),
        }
    }

    fn expected_head(&self) -> Result<String> {
        match self.applied()?.pop() {
            Some(applied) => Ok(applied.commit),
            None => self.commit(BASE_BRANCH),
        }
    }

    fn note_applied(&self, applied: &[Applied]) -> Result<()> {
        let text: String = applied
            .iter()
            .map(|a| format!("{} {}\n", a.digest, a.commit))
            .collect();
        let file = self.applied_file();
        std::fs::write(&file, text).with_context(|| format!("write {}", file.display()))
    }
}

/// Whether a checkout's directory of trees (`VERSION/NAME`) holds work that was never exported, as far
/// as can be told; a tree that cannot be understood counts.
pub(super) fn has_unexported(dir: &Path) -> bool {
    let Ok(versions) = std::fs::read_dir(dir) else {
        return true;
    };
    versions.flatten().any(|version| {
        let path = version.path().join("patched");
        let unknown = String::new();
        let source = Source {
            version: unknown.clone(),
            wanted: unknown,
            git: path.clone(),
        };
        path.exists() && Tree { path, source }.refuse_unexported().is_err()
    })
}

fn parse_applied(text: &str) -> Vec<Applied> {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(digest, commit)| Applied {
            digest: digest.into(),
            commit: commit.into(),
        })
        .collect()
}

/// What a person needs to mend a patch that does not apply.
fn describe_failure(patch: &Patch, output: &str, source: &Source) -> String {
    let text = String::from_utf8_lossy(&patch.content);
    let mut message = format!("kernel/patches/{} does not apply", patch.name);
    if source.version == source.wanted {
        message += &format!(" to {}", source.version);
    } else {
        message += &format!(
            " to {} (kernel/BASE says {})",
            source.version, source.wanted
        );
    }
    let failures = failed_hunks(output);
    for (file, line) in &failures {
        match find_hunk(&text, file, *line) {
            Some((number, hunk)) => {
                message += &format!("\n{file}, hunk {number}:\n{hunk}");
            }
            None => message += &format!("\n{file}, the hunk at line {line}"),
        }
    }
    if failures.is_empty() {
        message += &format!("\n{output}");
    }
    message
}

/// The `error: patch failed: FILE:LINE` lines of git am.
fn failed_hunks(output: &str) -> Vec<(String, u64)> {
    output
        .lines()
        .filter_map(|line| line.strip_prefix("error: patch failed: "))
        .filter_map(|place| place.rsplit_once(':'))
        .filter_map(|(file, line)| Some((file.to_owned(), line.trim().parse().ok()?)))
        .collect()
}

/// The number within its file, and the text, of the hunk that starts at a line of the old file.
fn find_hunk(patch: &str, file: &str, line: u64) -> Option<(usize, String)> {
    let mut number = 0;
    let mut in_file = false;
    let mut lines = patch.lines().peekable();
    while let Some(text) = lines.next() {
        if let Some(name) = text.strip_prefix("--- ") {
            in_file = name == format!("a/{file}") || name == "/dev/null";
            number = 0;
        } else if in_file && text.starts_with("@@ -") {
            number += 1;
            let start = text[4..]
                .split([',', ' '])
                .next()
                .and_then(|n| n.parse::<u64>().ok());
            if start == Some(line) {
                let mut hunk = format!("  {text}\n");
                while let Some(next) = lines.next_if(|l| l.starts_with([' ', '+', '-'])) {
                    hunk += &format!("  {next}\n");
                }
                return Some((number, hunk.trim_end_matches('\n').to_owned()));
            }
        }
    }
    None
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const PATCH: &str = "\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A <a@localhost>
Subject: [PATCH] change b

---
diff --git a/a.c b/a.c
--- a/a.c
+++ b/a.c
@@ -1,3 +1,3 @@
-one
+eins
 2
 3
@@ -5,4 +5,4 @@ f
 5
 6
-seven
+sieben
 eight
diff --git a/b.c b/b.c
--- a/b.c
+++ b/b.c
@@ -5,3 +5,3 @@
 5
 6
-x
+y
";

    #[test]
    fn hunks_are_found_by_file_and_line() {
        let (number, hunk) = find_hunk(PATCH, "a.c", 5).unwrap();
        assert_eq!(number, 2);
        assert_eq!(
            hunk,
            "  @@ -5,4 +5,4 @@ f\n   5\n   6\n  -seven\n  +sieben\n   eight"
        );
        assert_eq!(find_hunk(PATCH, "b.c", 5).unwrap().0, 1);
        assert!(find_hunk(PATCH, "b.c", 7).is_none());
    }

    #[test]
    fn failures_name_file_and_line() {
        let output = "error: patch failed: virt/kvm/kvm_main.c:1572\n\
                      error: virt/kvm/kvm_main.c: patch does not apply\n";
        assert_eq!(
            failed_hunks(output),
            [("virt/kvm/kvm_main.c".to_owned(), 1572)]
        );
    }

    fn series(names: &[(&str, &str)]) -> Series {
        let patches = names
            .iter()
            .map(|(name, content)| Patch {
                name: (*name).into(),
                content: content.as_bytes().to_vec(),
            })
            .collect();
        Series { patches }
    }

    /// A tree over a repository with the files a.c and b.c, as [`PATCH`] expects them.
    pub(crate) fn tree(dir: &Path) -> Tree {
        let path = dir.join("tree");
        std::fs::create_dir(&path).unwrap();
        git(&path, ["init", "--quiet", "-b", BRANCH])
            .output()
            .unwrap();
        std::fs::write(path.join("a.c"), "one\n2\n3\n4\n5\n6\nseven\neight\n").unwrap();
        std::fs::write(path.join("b.c"), "1\n2\n3\n4\n5\n6\nx\n").unwrap();
        git(&path, ["add", "."]).output().unwrap();
        git(&path, ["commit", "--quiet", "-m", "base"])
            .output()
            .unwrap();
        git(&path, ["tag", BASE_BRANCH]).output().unwrap();
        let source = Source {
            version: "2".into(),
            wanted: "1".into(),
            git: path.clone(),
        };
        Tree { path, source }
    }

    #[test]
    fn applying_twice_gives_the_same_commits() {
        let dir = tempfile::tempdir().unwrap();
        let tree = tree(dir.path());
        let content = PATCH.replace("Subject", "Date: Thu, 1 Jan 2026 00:00:00 +0000\nSubject");
        let series = series(&[("01-a/0001-b.patch", &content)]);
        tree.apply(&series).unwrap();
        let first = tree.commits().unwrap();
        assert_eq!(first.len(), 1);
        tree.apply(&Series::default()).unwrap();
        assert_eq!(tree.commits().unwrap(), Vec::<String>::new());
        tree.apply(&series).unwrap();
        assert_eq!(tree.commits().unwrap(), first);
    }

    #[test]
    fn a_failure_names_patch_hunk_and_source_and_leaves_the_tree() {
        let dir = tempfile::tempdir().unwrap();
        let tree = tree(dir.path());
        let bad = PATCH.replace("-seven\n", "-sept\n");
        let error = tree
            .apply(&series(&[("01-a/0001-b.patch", &bad)]))
            .unwrap_err()
            .to_string();
        for part in [
            "01-a/0001-b.patch",
            "a.c, hunk 2",
            "-sept",
            "to 2",
            "BASE says 1",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
        tree.refuse_unexported().unwrap();
    }

    #[test]
    fn unexported_work_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let tree = tree(dir.path());
        std::fs::write(tree.path.join("a.c"), "mine\n").unwrap();
        let error = tree
            .apply(&series(&[("01-a/0001-b.patch", PATCH)]))
            .unwrap_err()
            .to_string();
        assert!(error.contains("uncommitted changes (a.c)"), "{error}");
        tree.git(["commit", "--quiet", "-a", "-m", "mine"])
            .output()
            .unwrap();
        let error = tree.refuse_unexported().unwrap_err().to_string();
        assert!(error.contains("commits that differ"), "{error}");
    }
}
