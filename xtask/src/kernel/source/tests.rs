//! The kind of fault that these tests are about: a source is taken for another one than it is.

use super::*;
use crate::command::Run;

const TREE: &str = "0123456789abcdef0123456789abcdef01234567";

fn base(versions: &[&str]) -> Base {
    let lines: String = versions.iter().map(|v| format!("version {v}\n")).collect();
    Base::parse(&format!(
        "# why\npackage linux-source-6.12\n{lines}tree {TREE}\n"
    ))
    .unwrap()
}

fn serving(versions: &[&str]) -> Archives {
    Archives {
        versions: versions
            .iter()
            .map(|&version| (version.to_owned(), 0))
            .collect(),
        ..Archives::default()
    }
}

/// A repository in the cache with one file, and its tree.
fn repository(dir: &Path, key: &str, content: &str) -> String {
    let top = dir.join("top");
    std::fs::create_dir_all(&top).unwrap();
    std::fs::write(top.join("file"), content).unwrap();
    let import = Import::begin(dir, key).unwrap();
    import.directory(&top, "message").unwrap();
    let tree = import.tree().unwrap();
    import.finish().unwrap();
    tree
}

#[test]
fn base_names_package_versions_and_tree() {
    let base = base(&["6.12.1-1", "6.12.1-1~deb12u1"]);
    assert_eq!(base.version(), "6.12.1-1");
    assert_eq!(base.versions.len(), 2);
    assert_eq!(
        (base.package.as_str(), base.tree.as_str()),
        ("linux-source-6.12", TREE)
    );
    assert_eq!(base.stable_series(), "6.12.");
}

#[test]
fn base_refuses_what_it_does_not_know() {
    let tree = format!("tree {TREE}\n");
    for bad in [
        format!("package a\nversion 1\nbranch x\n{tree}"),
        format!("package a\n{tree}"),
        format!("version 1\n{tree}"),
        format!("package a\npackage b\nversion 1\n{tree}"),
        "package a\nversion 1\n".to_owned(),
        "package a\nversion 1\ntree 0123\n".to_owned(),
    ] {
        assert!(Base::parse(&bad).is_err(), "{bad}");
    }
}

#[test]
fn the_base_is_taken_from_whichever_suite_has_it() {
    let base = base(&["6.12.118-1"]);
    for version in ["6.12.118-1", "6.12.118-1~deb12u1"] {
        let mut served = serving(&["6.12.119-1", version, "6.12.117-1"]);
        let choice = served.choice(&base).unwrap();
        assert_eq!(choice, Choice::Base(version.into(), 0));
    }
    for other in ["6.12.118-10", "6.12.118-1+deb13u1", "6.12.118"] {
        assert!(!base.has(other), "{other}");
    }
}

#[test]
fn a_base_that_is_gone_has_the_newest_of_its_series_as_substitute() {
    let mut served = serving(&["6.13.2-1", "6.12.121-1", "6.12.120-1"]);
    let choice = served.choice(&base(&["6.12.118-1"])).unwrap();
    assert_eq!(choice, Choice::Substitute("6.12.121-1".into(), 0));
}

#[test]
fn a_suite_that_cannot_be_reached_matters_only_without_the_base() {
    let partly = |versions: &[&str]| Archives {
        unreachable: vec![("trixie".into(), anyhow::anyhow!("no route"))],
        ..serving(versions)
    };
    let base = base(&["6.12.118-1"]);
    assert!(partly(&["6.12.118-1"]).choice(&base).is_ok());
    for versions in [&["6.12.121-1"][..], &[]] {
        let error = format!("{:#}", partly(versions).choice(&base).unwrap_err());
        for part in ["6.12.118-1", "trixie", "no route", GIVEN] {
            assert!(error.contains(part), "{error}");
        }
    }
    assert!(partly(&["6.12.121-1"]).newest(&base).is_err());
}

#[test]
fn a_base_from_the_future_has_no_substitute() {
    let mut served = serving(&["6.12.118-1", "6.12.117-1"]);
    let error = served
        .choice(&base(&["6.12.500-1"]))
        .unwrap_err()
        .to_string();
    for part in ["6.12.500-1", "6.12.118-1", "kernel/BASE", GIVEN] {
        assert!(error.contains(part), "{error}");
    }
    let error = serving(&[])
        .choice(&base(&["6.12.1-1"]))
        .unwrap_err()
        .to_string();
    assert!(error.contains("no linux-source-6.12 at all"), "{error}");
}

/// A package as Debian makes it, with one file in the source.
fn package(dir: &Path, content: &str) -> PathBuf {
    let (root, top) = (dir.join("package"), dir.join("linux-source-6.12"));
    for directory in [root.join("DEBIAN"), root.join("usr/src"), top.clone()] {
        std::fs::create_dir_all(directory).unwrap();
    }
    std::fs::write(top.join("Makefile"), content).unwrap();
    let control = "Package: linux-source-6.12\nVersion: 1\nArchitecture: all\nMaintainer: A <a@localhost>\n\
                   Description: a test\n";
    std::fs::write(root.join("DEBIAN/control"), control).unwrap();
    let tarball = root.join("usr/src/linux-source-6.12.tar.xz");
    let tar = Run::new("tar").arg("-cJf").arg(tarball).arg("-C").arg(dir);
    tar.arg("linux-source-6.12").output().unwrap();
    let file = dir.join("package.deb");
    let build = Run::new("dpkg-deb").args(["--root-owner-group", "--build"]);
    build.arg(&root).arg(&file).output().unwrap();
    file
}

#[test]
fn a_package_with_another_content_is_refused_and_leaves_nothing() {
    let (here, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = package(here.path(), "VERSION = 6\n");
    let mut base = base(&["6.12.1-1"]);
    let import = |base: &Base| {
        let fetch = |_: &Path| Ok(file.clone());
        import_package(cache.path(), base, "6.12.1-1", Some(base), fetch)
    };
    let error = format!("{:#}", import(&base).unwrap_err());
    assert!(error.contains(TREE) && error.contains("mirror"), "{error}");
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0);
    let words = error.split([' ', ',']);
    let is_tree = |word: &&str| word.len() == 40 && *word != TREE;
    base.tree = words.into_iter().find(is_tree).unwrap().to_owned();
    import(&base).unwrap();
    assert_eq!(
        cached(cache.path(), &base).unwrap().unwrap().origin,
        Origin::Base
    );
}

#[test]
fn a_package_that_cannot_be_fetched_or_unpacked_leaves_nothing() {
    let cache = tempfile::tempdir().unwrap();
    let base = base(&["6.12.1-1"]);
    let nothing = |_: &Path| bail!("no network");
    let cut = |into: &Path| {
        std::fs::create_dir_all(into).unwrap();
        std::fs::write(into.join("cut.deb"), "!<arch>\n").unwrap();
        Ok(into.join("cut.deb"))
    };
    assert!(import_package(cache.path(), &base, "6.12.1-1", None, nothing).is_err());
    assert!(import_package(cache.path(), &base, "6.12.1-1", None, cut).is_err());
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0);
}

#[test]
fn a_cached_source_with_another_tree_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let tree = repository(dir.path(), "6.12.1-1", "content");
    let mut base = base(&["6.12.1-1"]);
    let error = format!("{:#}", cached(dir.path(), &base).unwrap_err());
    assert!(error.contains(&tree) && error.contains(TREE), "{error}");
    assert!(error.contains("kernel/BASE"), "{error}");
    base.tree = tree;
    let source = cached(dir.path(), &base).unwrap().unwrap();
    assert_eq!(
        (source.origin.clone(), source.notice(&base)),
        (Origin::Base, None)
    );
}

#[test]
fn a_byte_makes_another_tree() {
    let dir = tempfile::tempdir().unwrap();
    let tree = repository(dir.path(), "a", "content");
    assert_eq!(repository(dir.path(), "b", "content"), tree);
    assert_ne!(repository(dir.path(), "c", "Content"), tree);
}

#[test]
fn a_substitute_is_told_of_and_not_kept_for_good() {
    let dir = tempfile::tempdir().unwrap();
    repository(dir.path(), "6.12.9-1", "content");
    let base = base(&["6.12.1-1"]);
    let note = substitute_note(dir.path(), &base);
    std::fs::write(&note, "6.12.9-1\n").unwrap();
    let source = cached(dir.path(), &base).unwrap().unwrap();
    let notice = source.notice(&base).unwrap();
    assert!(
        notice.contains("6.12.9-1") && notice.contains("6.12.1-1"),
        "{notice}"
    );
    let old = std::time::SystemTime::now() - 2 * ASKED_AGAIN;
    let file = std::fs::File::options().write(true).open(&note).unwrap();
    file.set_modified(old).unwrap();
    assert_eq!(cached(dir.path(), &base).unwrap(), None);
}

#[test]
fn an_import_that_does_not_end_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let import = Import::begin(dir.path(), "6.12.1-1").unwrap();
    assert!(
        import
            .directory(Path::new("/nonexistent"), "message")
            .is_err()
    );
    drop(import);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_directory_becomes_one_commit() {
    let dir = tempfile::tempdir().unwrap();
    let (top, repository) = (dir.path().join("top"), dir.path().join("git"));
    std::fs::create_dir_all(top.join("a b")).unwrap();
    std::fs::write(top.join("a b/file"), "text\n").unwrap();
    std::os::unix::fs::symlink("a b/file", top.join("link")).unwrap();
    let init = Run::new("git").args(["init", "--quiet", "--bare"]);
    init.arg(&repository).output().unwrap();
    let progress = Progress::spinner("a test");
    import::fast_import(&repository, &top, "package 1", &progress).unwrap();
    let list = git(
        &repository,
        ["ls-tree", "-r", "--format=%(objectmode) %(path)", "base"],
    );
    assert_eq!(list.text().unwrap(), "100644 a b/file\n120000 link");
}

/// A kernel's source, as far as anybody looks at it here.
fn kernel(top: &Path) {
    std::fs::create_dir_all(top).unwrap();
    let makefile = "VERSION = 6\nPATCHLEVEL = 12\nSUBLEVEL = 7\nEXTRAVERSION =\nNAME = x\n";
    std::fs::write(top.join("Makefile"), makefile).unwrap();
}

#[test]
fn a_tarball_a_directory_and_a_repository_are_one_source() {
    let dir = tempfile::tempdir().unwrap();
    let (top, cache) = (
        dir.path().join("linux-6.12.7 %20"),
        dir.path().join("cache"),
    );
    std::fs::create_dir(&cache).unwrap();
    kernel(&top);
    let tarball = dir.path().join("linux.tar");
    let tar = Run::new("tar")
        .arg("-cf")
        .arg(&tarball)
        .arg("-C")
        .arg(dir.path());
    tar.arg("linux-6.12.7 %20").output().unwrap();
    // Each in a cache of its own, so that each is made.
    let imported = |name: &str, place: &Path| {
        let cache = cache.join(name);
        std::fs::create_dir(&cache).unwrap();
        given::ensure(&cache, place).unwrap()
    };
    let from_directory = imported("directory", &top);
    assert_eq!(from_directory.version, "6.12.7");
    let from_tarball = imported("tarball", &tarball);
    for arguments in ["init --quiet", "add .", "commit --quiet -m x"] {
        git(&top, arguments.split(' ')).output().unwrap();
    }
    let from_repository = imported("repository", &top);
    assert!(!from_repository.git.join("shallow").exists());
    for other in [from_tarball, from_repository] {
        assert_eq!(
            (&other.tree, &other.key),
            (&from_directory.tree, &from_directory.key)
        );
    }
    let notice = from_directory.notice(&base(&["6.12.1-1"])).unwrap();
    assert!(
        notice.contains("not checked") && notice.contains("6.12.7"),
        "{notice}"
    );

    std::fs::write(top.join("Makefile"), "VERSION = 6\n").unwrap();
    let error = given::ensure(&cache, &top).unwrap_err().to_string();
    assert!(
        error.contains("not committed") && error.contains("Makefile"),
        "{error}"
    );
}

#[test]
fn a_directory_that_has_changed_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let (top, cache) = (dir.path().join("linux"), dir.path().join("cache"));
    std::fs::create_dir(&cache).unwrap();
    kernel(&top);
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&top, &link).unwrap();
    let before = given::ensure(&cache, &link).unwrap();
    // What was read once is not read again: no import would find the directory as it is.
    let is_note = |name: &String| name.starts_with("given-as-");
    let notes = || {
        versions_in(&cache)
            .unwrap()
            .into_iter()
            .filter(is_note)
            .count()
    };
    assert_eq!(
        (given::ensure(&cache, &link).unwrap(), notes()),
        (before.clone(), 1)
    );
    std::fs::write(top.join("file"), "more").unwrap();
    let after = given::ensure(&cache, &link).unwrap();
    assert_ne!((after.tree, notes()), (before.tree, 1));
}

#[test]
fn what_is_no_pristine_source_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (top, cache) = (dir.path().join("linux"), dir.path().join("cache"));
    std::fs::create_dir(&cache).unwrap();
    kernel(&top);
    std::fs::write(top.join(".config"), "").unwrap();
    let refused = |place: &Path| format!("{:#}", given::ensure(&cache, place).unwrap_err());
    assert!(
        refused(&top).contains("a kernel was built there"),
        "{}",
        refused(&top)
    );
    std::fs::remove_file(top.join(".config")).unwrap();
    let socket = std::os::unix::net::UnixListener::bind(top.join("socket")).unwrap();
    let why = refused(&top);
    assert!(why.contains("socket is no file"), "{why}");
    drop(socket);
    std::fs::remove_file(top.join("socket")).unwrap();
    std::fs::write(top.join("Makefile"), "all:\n").unwrap();
    assert!(
        refused(&top).contains("no kernel's source"),
        "{}",
        refused(&top)
    );
    let file = dir.path().join("cut.tar.xz");
    std::fs::write(&file, "no tarball").unwrap();
    assert!(refused(&file).contains("tar -xf"), "{}", refused(&file));
    assert!(refused(&dir.path().join("nowhere")).contains("No such file"));
    let left = std::fs::read_dir(&cache).unwrap();
    assert_eq!(left.count(), 0, "the cache is left half made");
}
