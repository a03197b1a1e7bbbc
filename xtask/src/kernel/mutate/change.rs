//! The code of a mutation: made, applied to a tree, and taken back.

use anyhow::{Context, Result, bail};
use fs_err as fs;

use super::list::{Change, Mutation};
use crate::command::Run;
use crate::files;
use crate::kernel::series::Patch;
use crate::kernel::tree::Tree;
use crate::paths::Paths;

/// A change of the code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Diff {
    text: String,
    reverse: bool,
}

impl Diff {
    /// What a mutation of a patch changes.
    pub(crate) fn of(mutation: &Mutation, patch: &Patch, paths: &Paths) -> Result<Self> {
        match &mutation.change {
            Change::Revert { file, hunk } => Ok(Self {
                text: part(patch, file.as_deref(), *hunk)?,
                reverse: true,
            }),
            Change::Patch(name) => Ok(Self {
                text: fs::read_to_string(paths.in_root(&format!("kernel/mutations/{name}.patch")))?,
                reverse: false,
            }),
        }
    }

    /// Equal for equal changes.
    pub(crate) fn digest(&self) -> String {
        files::digest([&self.text, &self.reverse.to_string()])
    }

    /// Changes a tree that has no other change. The tree is as it was when the result is dropped.
    pub(crate) fn apply<'a>(&self, tree: &'a Tree) -> Result<Applied<'a>> {
        let applied = Applied { tree };
        // Three ways: later patches may have changed lines nearby.
        self.git_apply(tree, "--3way")?
            .output()
            .context("it does not apply to the series: renew it, or name a patch in its place")?;
        Ok(applied)
    }

    /// An error if it does not apply. Files are touched only if they differ from what it expects, so that
    /// they need not be built again.
    pub(crate) fn check(&self, tree: &Tree) -> Result<()> {
        if self.git_apply(tree, "--check")?.succeeds()? {
            return Ok(());
        }
        self.apply(tree)?.restore()
    }

    fn git_apply(&self, tree: &Tree, how: &str) -> Result<Run> {
        let file = tree.path().join(".git/pagetide-mutation");
        fs::write(&file, &self.text)?;
        let apply = tree.git(["apply", "--whitespace=nowarn", how]);
        let apply = match self.reverse {
            true => apply.arg("--reverse"),
            false => apply,
        };
        Ok(apply.arg(&file))
    }
}

/// A tree with a mutation.
#[derive(Debug)]
pub(crate) struct Applied<'a> {
    tree: &'a Tree,
}

impl Applied<'_> {
    /// Takes the mutation back.
    pub(crate) fn restore(self) -> Result<()> {
        let restored = reset(self.tree);
        std::mem::forget(self);
        restored
    }
}

impl Drop for Applied<'_> {
    fn drop(&mut self) {
        if let Err(error) = reset(self.tree) {
            let tree = self.tree.path().display();
            eprintln!("{tree} has a mutation, which the next run takes back: {error:#}");
        }
    }
}

fn reset(tree: &Tree) -> Result<()> {
    tree.git(["reset", "--quiet", "--hard", "HEAD"])
        .output()
        .map(drop)
}

/// The diffs of a patch's code that runs, or those of one file, or one hunk of it.
fn part(patch: &Patch, file: Option<&str>, hunk: Option<usize>) -> Result<String> {
    let mut text = String::new();
    for diff in patch.running_code() {
        let name = diff.split(' ').next().unwrap_or_default();
        let wanted = file.is_none_or(|file| name == format!("a/{file}"));
        if wanted {
            text += "diff --git ";
            text += &match hunk {
                Some(number) => one_hunk(&diff, number)?,
                None => diff,
            };
            text.truncate(text.trim_end_matches('\n').len());
            text.push('\n');
        }
    }
    match file {
        _ if !text.is_empty() => Ok(text),
        Some(file) => bail!("the patch does not change {file}"),
        None => bail!("the patch has no code that runs"),
    }
}

/// A file's diff with one of its hunks only.
fn one_hunk(diff: &str, number: usize) -> Result<String> {
    let mut hunks = diff.split("\n@@ ");
    let head = hunks.next().unwrap_or_default();
    let hunk = number.checked_sub(1).and_then(|index| hunks.nth(index));
    let hunk = hunk.with_context(|| format!("the file has no hunk {number} in the patch"))?;
    Ok(format!("{head}\n@@ {hunk}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Arch;
    use crate::kernel::tree::tests;

    const PATCH: &str = "\
Subject: [PATCH] change a and b

---
diff --git a/Documentation/d.rst b/Documentation/d.rst
--- a/Documentation/d.rst
+++ b/Documentation/d.rst
@@ -1 +1 @@
-d
+e
diff --git a/a.c b/a.c
--- a/a.c
+++ b/a.c
@@ -1,3 +1,3 @@
-eins
+one
 2
 3
@@ -5,4 +5,4 @@ f
 5
 6
-sieben
+seven
 eight
diff --git a/b.c b/b.c
--- a/b.c
+++ b/b.c
@@ -5,3 +5,3 @@
 5
 6
-y
+x
";

    fn patch() -> Patch {
        Patch {
            name: "01-a/0001-b.patch".into(),
            content: PATCH.as_bytes().to_vec(),
        }
    }

    fn revert(file: Option<&str>, hunk: Option<usize>) -> Diff {
        let mutation = Mutation {
            arch: Arch::X86_64,
            change: Change::Revert {
                file: file.map(str::to_owned),
                hunk,
            },
            tests: Vec::new(),
        };
        Diff::of(&mutation, &patch(), &Paths::at(std::path::Path::new("/"))).unwrap()
    }

    #[test]
    fn parts_of_a_patch_are_taken_back_and_the_tree_is_restored() {
        let dir = tempfile::tempdir().unwrap();
        let tree = tests::tree(dir.path());
        let text = |file: &str| std::fs::read_to_string(tree.path().join(file)).unwrap();
        let (a, b) = (text("a.c"), text("b.c"));

        revert(None, None).check(&tree).unwrap();
        let applied = revert(None, None).apply(&tree).unwrap();
        assert!(text("a.c").contains("eins") && text("a.c").contains("sieben"));
        assert!(text("b.c").ends_with("y\n"));
        applied.restore().unwrap();
        assert_eq!((text("a.c"), text("b.c")), (a.clone(), b.clone()));

        let applied = revert(Some("a.c"), Some(2)).apply(&tree).unwrap();
        assert!(text("a.c").contains("one") && text("a.c").contains("sieben"));
        assert_eq!(text("b.c"), b);
        drop(applied);
        assert_eq!(text("a.c"), a);
        assert!(tree.edited().unwrap().is_empty());
    }

    #[test]
    fn what_does_not_apply_leaves_the_tree_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let tree = tests::tree(dir.path());
        let mut diff = revert(None, None);
        diff.reverse = false;
        assert!(diff.check(&tree).is_err());
        let error = format!("{:#}", diff.apply(&tree).unwrap_err());
        assert!(error.contains("does not apply"), "{error}");
        assert!(tree.edited().unwrap().is_empty());
    }

    #[test]
    fn a_part_that_is_not_there_is_an_error() {
        assert!(part(&patch(), Some("c.c"), None).is_err());
        assert!(part(&patch(), Some("a.c"), Some(3)).is_err());
        assert!(part(&patch(), Some("a.c"), Some(0)).is_err());
        // Documents do not run.
        assert!(part(&patch(), Some("Documentation/d.rst"), None).is_err());
    }
}
