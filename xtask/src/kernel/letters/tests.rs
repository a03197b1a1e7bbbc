use super::*;
use crate::kernel::export;
use crate::kernel::series::patches_dir;
use crate::kernel::tree;
use crate::paths::Paths;

const LETTER: &str = "\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
Subject: [PATCH v2 0/1] KVM: do it

Because.

[patches and files: written by `cargo xtask kernel export`]
old
[end of what `cargo xtask kernel export` writes]

The end.
";

fn patch(name: &str, subject: &str) -> Patch {
    Patch {
        name: name.into(),
        content: format!("Subject: [PATCH] {subject}\n\n").into_bytes(),
    }
}

#[test]
fn only_the_list_and_the_number_change() {
    let patches: Vec<_> = (0..12).map(|n| patch(&n.to_string(), "a")).collect();
    let patches: Vec<_> = patches.iter().collect();
    let new = refreshed(LETTER, &patches, "new\n").unwrap();
    let expected = LETTER.replace("old", "new").replace("0/1]", "00/12]");
    assert_eq!(new, expected);
    assert_eq!(refreshed(&new, &patches, "new\n").unwrap(), new);
}

#[test]
fn a_letter_without_its_marks_is_refused() {
    for mark in [BEGIN, END] {
        let error = refreshed(&LETTER.replace(mark, ""), &[], "").unwrap_err();
        assert!(error.to_string().contains(mark), "{error}");
        let twice = LETTER.replace(mark, &format!("{mark}\n\n{mark}"));
        assert!(parts(&twice).is_err());
    }
    assert!(refreshed(&LETTER.replace("Subject", "subject"), &[], "").is_err());
    let turned = LETTER
        .replace(BEGIN, "x")
        .replace(END, BEGIN)
        .replace("\nx\n", &format!("\n{END}\n"));
    assert!(parts(&turned).is_err());
}

#[test]
fn a_letter_names_every_patch() {
    let long = "KVM: a subject that is so long that the list shows it on two lines";
    let (a, b) = (
        patch("01-a/0001-a.patch", "KVM: a"),
        patch("01-a/0002-b.patch", long),
    );
    let listed = LETTER.replace(
        "old",
        "  KVM: a\n  KVM: a subject that is so long that\n    the list shows it on two lines",
    );
    names_all(&listed, &[&a, &b]).unwrap();
    let error = names_all(
        &LETTER.replace("old", long),
        &[&a, &b, &patch("01-a/0003-c.patch", "c d")],
    );
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("0003-c.patch") && !error.contains("0002"),
        "{error}"
    );
    assert!(names_all("", &[]).is_err());
    // What only the text names is not listed.
    assert!(names_all(&LETTER.replace("Because.", long), &[&b]).is_err());
}

#[test]
fn a_letter_belongs_to_a_topic() {
    let series = Series {
        patches: vec![patch("01-a/0001-a.patch", "a")],
    };
    assert!(is_letter(
        Path::new("/p/01-a/0000-cover-letter.patch"),
        &series
    ));
    assert!(!is_letter(
        Path::new("/p/02-b/0000-cover-letter.patch"),
        &series
    ));
    assert!(!is_letter(Path::new("/p/01-a/0001-a.patch"), &series));
}

/// An export refreshes the letter and leaves it where it is; a check finds it current, or says why not.
#[test]
fn an_export_keeps_letters_current() {
    let dir = tempfile::tempdir().unwrap();
    let tree = tree::tests::tree(dir.path());
    let commit = |file: &str, subject: &str| {
        std::fs::write(tree.path().join(file), "ten\n").unwrap();
        tree.git(["add", "."]).output().unwrap();
        tree.git(["commit", "-q", "-m", subject]).output().unwrap();
    };
    commit("a.c", "KVM: change a");
    tree.git(["tag", "topic/01-first"]).output().unwrap();
    commit("b.c", "KVM: change b");
    tree.git(["tag", "topic/02-second"]).output().unwrap();
    commit("new.c", "KVM: add c");
    let series = export::from_tree(&tree, &Series::default()).unwrap();

    let patches = dir.path().join("patches");
    for topic in ["01-first", "02-second"] {
        fs::create_dir_all(patches.join(topic)).unwrap();
        fs::write(place(&patches, topic), LETTER).unwrap();
        let error = check(&patches, &tree, &series, topic).unwrap_err();
        assert!(error.to_string().contains("does not name"), "{error}");
    }
    assert_eq!(refresh(&patches, &tree, &series).unwrap(), 2);
    assert_eq!(refresh(&patches, &tree, &series).unwrap(), 0);
    let second = fs::read_to_string(place(&patches, "02-second")).unwrap();
    assert!(
        second.contains("Subject: [PATCH v2 0/2] KVM: do it\n"),
        "{second}"
    );
    for line in [
        "Pagetide (2):\n  KVM: change b\n  KVM: add c\n",
        " b.c   | 8 +-------\n",
        " 2 files changed, 2 insertions(+), 7 deletions(-)\n",
        " create mode 100644 new.c\n",
    ] {
        assert!(second.contains(line), "{line:?} is not in {second}");
    }
    assert!(!second.contains("a.c"), "{second}");
    check(&patches, &tree, &series, "02-second").unwrap();

    let stale = second.replace("8 +-------", "9 +-------");
    fs::write(place(&patches, "02-second"), stale).unwrap();
    let error = check(&patches, &tree, &series, "02-second").unwrap_err();
    assert!(error.to_string().contains("not current"), "{error}");
    fs::remove_file(place(&patches, "02-second")).unwrap();
    assert!(check(&patches, &tree, &series, "02-second").is_err());
    assert_eq!(refresh(&patches, &tree, &series).unwrap(), 0);
}

/// The checkout's own letters, without a tree: what a merge of two branches forgets most easily.
#[test]
fn every_topic_of_the_series_has_a_letter_that_names_its_patches() {
    let paths = Paths::find().unwrap();
    let series = Series::read(&paths).unwrap();
    assert!(!series.topics().is_empty());
    for topic in series.topics() {
        let text = files::text_if_any(&place(&patches_dir(&paths), topic)).unwrap();
        let patches = of_topic(&series, topic);
        names_all(&text, &patches).unwrap_or_else(|error| panic!("{}: {error}", name(topic)));
        let (head, list, tail) = parts(&text).unwrap();
        assert_eq!(refreshed(&text, &patches, list).unwrap(), text, "{topic}");
        let lines = head.lines().chain(tail.lines());
        let mut lines = lines.filter(|line| !line.contains("https://"));
        let long = lines.find(|line| line.chars().count() > 78);
        assert_eq!(long, None, "{topic}");
    }
}
