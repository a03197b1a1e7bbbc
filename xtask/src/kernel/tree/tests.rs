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
    let mut tree = Tree::unknown(path);
    tree.source.version = "2".into();
    tree.source.origin = Origin::Substitute { base: "1".into() };
    tree
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

#[test]
fn only_a_tree_has_work_that_was_never_exported() {
    let dir = tempfile::tempdir().unwrap();
    let version = dir.path().join("6.12");
    std::fs::create_dir(&version).unwrap();
    std::fs::create_dir_all(dir.path().join(LOCKS).join("patched")).unwrap();
    assert!(!has_unexported(dir.path()));
    let tree = tree(&version);
    std::fs::rename(&tree.path, version.join("patched")).unwrap();
    assert!(!has_unexported(dir.path()));
    std::fs::write(version.join("patched/a.c"), "mine\n").unwrap();
    assert!(has_unexported(dir.path()));
    assert!(has_unexported(&dir.path().join("none")));
}

#[test]
fn what_a_killed_run_left_in_a_tree_of_its_own_is_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let tree = tree(dir.path());
    let series = series(&[("01-a/0001-b.patch", PATCH)]);
    tree.apply(&series).unwrap();
    let before = tree.commits().unwrap();
    // As after `git am` was killed: a commit that is not noted, an edited file, and a lock.
    std::fs::write(tree.path.join("a.c"), "half\n").unwrap();
    tree.git(["commit", "--quiet", "-a", "-m", "half"])
        .output()
        .unwrap();
    std::fs::write(tree.path.join("b.c"), "half\n").unwrap();
    std::fs::create_dir(tree.path.join(".git/rebase-apply")).unwrap();
    std::fs::write(tree.path.join(".git/index.lock"), "").unwrap();
    tree.refuse_unexported().unwrap_err();
    tree.drop_unfinished().unwrap();
    tree.refuse_unexported().unwrap();
    assert_eq!(tree.commits().unwrap(), before);
}
