//! Work trees: the source with the series applied, one clone for each checkout and use.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use fs_err as fs;

use super::git::git;
use super::make::LOCKS;
use super::prune;
use super::series::{Patch, Series};
use super::source::{self, BASE_BRANCH, Origin, Source};
use crate::command::Run;
use crate::files;
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
        let key = source.key.replace(['~', ':'], "-");
        paths.work().join(key).join(name)
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

    /// A tree that is there, of a source that is not known.
    fn unknown(path: PathBuf) -> Self {
        let unknown = String::new();
        let source = Source {
            version: unknown.clone(),
            tree: unknown.clone(),
            origin: Origin::Base,
            key: unknown,
            git: path.clone(),
        };
        Self { path, source }
    }

    fn create(&self) -> Result<()> {
        let progress = Progress::spinner(&format!("laying out {}", self.path.display()));
        let temporary = self.path.with_extension("new");
        files::fresh_dir(&temporary)?;
        let git = |arguments: &str| git(&temporary, arguments.split(' '));
        let clone = git("clone --quiet --shared --no-checkout").arg(&self.source.git);
        clone.arg(".").output()?;
        // Two cores write files faster than one; an untracked cache keeps `git status` quick.
        for setting in [
            "gc.auto 0",
            "checkout.workers 2",
            "core.untrackedCache true",
        ] {
            git("config").words(setting).output()?;
        }
        fs::write(temporary.join(".git/info/exclude"), "/build-*/\n")?;
        git(&format!(
            "checkout --quiet -b {BRANCH} origin/{BASE_BRANCH}"
        ))
        .output()?;
        git(&format!("tag {BASE_BRANCH}")).output()?;
        fs::rename(&temporary, &self.path)?;
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
        let parse = self.git(["rev-parse", "--verify", "--quiet"]);
        parse.arg(format!("{name}^{{commit}}")).text()
    }

    /// An error, saying what to do, if the tree holds work that kernel/series does not have.
    pub(crate) fn refuse_unexported(&self) -> Result<()> {
        let path = self.path.display();
        const STATES: &str = "rebase-apply rebase-merge MERGE_HEAD CHERRY_PICK_HEAD";
        for state in STATES.split(' ') {
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

    /// For a tree that nobody edits: ends what a run that was killed has left unfinished, so that the tree
    /// is as it was after the last series that was applied.
    pub(super) fn drop_unfinished(&self) -> Result<()> {
        for left in ["index.lock", "rebase-apply", "rebase-merge"] {
            let left = self.path.join(".git").join(left);
            match left.symlink_metadata() {
                Ok(status) if status.is_dir() => fs::remove_dir_all(&left)?,
                Ok(_) => fs::remove_file(&left)?,
                Err(_) => {}
            }
        }
        let expected = self.expected_head()?;
        if self.commit("HEAD")? != expected || !self.edited()?.is_empty() {
            self.git(["reset", "--quiet", "--hard", &expected])
                .output()?;
        }
        Ok(())
    }

    /// Files of the source that were edited and not committed.
    pub(super) fn edited(&self) -> Result<Vec<String>> {
        let status = self.git(["status", "--porcelain", "--untracked-files=no"]);
        let status = status.text()?;
        let files = status.lines().filter_map(|line| line.get(3..));
        Ok(files.map(str::to_owned).collect())
    }

    /// Brings the tree to the series. Patches that are applied already stay, so that only files
    /// that later patches touch get new times and are built again.
    pub(crate) fn apply(&self, series: &Series) -> Result<()> {
        self.refuse_unexported()?;
        let applied = self.applied()?;
        let both = applied.iter().zip(&series.patches);
        let same = both
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
            let (path, wanted) = (self.path.display(), series.patches.len());
            let found = commits.len();
            bail!("{path} has {found} commits, but kernel/series names {wanted} patches");
        }
        let applied = |(patch, commit): (&Patch, String)| Applied {
            digest: patch.digest(),
            commit,
        };
        let applied: Vec<_> = series.patches.iter().zip(commits).map(applied).collect();
        self.note_applied(&applied)
    }

    /// The commits since the pristine source, oldest first.
    pub(super) fn commits(&self) -> Result<Vec<String>> {
        let list = self.git(["rev-list", "--reverse", "--first-parent"]);
        let list = list.arg(format!("{BASE_BRANCH}..HEAD")).text()?;
        Ok(list.lines().map(str::to_owned).collect())
    }

    /// Applies patches with `git am`; on failure the tree is as it was and the error names the
    /// patch, the hunk and the source.
    pub(super) fn am(&self, patches: &[Patch]) -> Result<()> {
        if patches.is_empty() {
            return Ok(());
        }
        let mailbox = self.path.join(".git/pagetide-am");
        files::fresh_dir(&mailbox)?;
        let mut am = self
            .git(["am", "--quiet", "--keep-non-patch"])
            .words("--committer-date-is-author-date --no-gpg-sign --no-3way --whitespace=nowarn");
        for (index, patch) in patches.iter().enumerate() {
            let file = mailbox.join(format!("{index:04}"));
            fs::write(&file, &patch.content)?;
            am = am.arg(file);
        }
        let Err(error) = am.output() else {
            return Ok(());
        };
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
        let next = fs::read_to_string(self.path.join(".git/rebase-apply/next"));
        let next = next.ok().and_then(|text| text.trim().parse::<usize>().ok());
        next.map_or(0, |next| next.saturating_sub(1))
    }

    fn applied_file(&self) -> PathBuf {
        self.path.join(".git/pagetide-applied")
    }

    fn applied(&self) -> Result<Vec<Applied>> {
        let text = files::text_if_any(&self.applied_file())?;
        let lines = text.lines().filter_map(|line| line.split_once(' '));
        let applied = lines.map(|(digest, commit)| Applied {
            digest: digest.into(),
            commit: commit.into(),
        });
        Ok(applied.collect())
    }

    fn expected_head(&self) -> Result<String> {
        match self.applied()?.pop() {
            Some(applied) => Ok(applied.commit),
            None => self.commit(BASE_BRANCH),
        }
    }

    fn note_applied(&self, applied: &[Applied]) -> Result<()> {
        let lines = applied
            .iter()
            .map(|a| format!("{} {}\n", a.digest, a.commit));
        Ok(fs::write(self.applied_file(), lines.collect::<String>())?)
    }
}

/// Whether a checkout's directory of trees (`VERSION/NAME`) holds work that was never exported, as far
/// as can be told; a tree that cannot be understood counts.
pub(super) fn has_unexported(dir: &Path) -> bool {
    let Ok(versions) = std::fs::read_dir(dir) else {
        return true;
    };
    let versions = versions.flatten().map(|version| version.path());
    versions
        .filter(|path| !path.ends_with(LOCKS))
        .any(|version| {
            let path = version.join("patched");
            path.exists() && Tree::unknown(path).refuse_unexported().is_err()
        })
}

/// What a person needs to mend a patch that does not apply.
fn describe_failure(patch: &Patch, output: &str, source: &Source) -> String {
    let text = String::from_utf8_lossy(&patch.content);
    let (name, version) = (&patch.name, &source.version);
    let mut message = format!("kernel/patches/{name} does not apply to {version}");
    if let Origin::Substitute { base } = &source.origin {
        message += &format!(" (kernel/BASE says {base}, which Debian serves no longer)");
    }
    let failures = failed_hunks(output);
    for (file, line) in &failures {
        match find_hunk(&text, file, *line) {
            Some((number, hunk)) => message += &format!("\n{file}, hunk {number}:\n{hunk}"),
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
            let start = text[4..].split([',', ' ']).next();
            if start.and_then(|number| number.parse().ok()) == Some(line) {
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
pub(super) mod tests;
