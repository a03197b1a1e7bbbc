//! `pagetide bench memslots` as a command: what it refuses, and what it leaves.

use std::process::{Command, Output};

use pagetide_uapi::probe::Probe;

fn memslots(directory: &std::path::Path, words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagetide"))
        .args(["bench", "memslots", "--out"])
        .arg(directory.join("out"))
        .args(words)
        .output()
        .expect("it starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text is UTF-8")
}

/// It ended with 2 and one line, and left nothing behind.
fn assert_refused(words: &[&str], wanted: &str) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let output = memslots(directory.path(), words);
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{words:?}: {told}");
    assert!(told.contains(wanted), "{words:?}: {told}");
    assert_eq!(told.lines().count(), 1, "{told}");
    let left = std::fs::read_dir(directory.path()).expect("it is there");
    assert_eq!(left.count(), 0, "{words:?}");
}

#[test]
fn bad_arguments_are_refused_in_one_line() {
    let cases: &[(&[&str], &str)] = &[
        (&["--vcpus", "0"], "--vcpus 0: a virtual machine"),
        (&["--vcpus", "100000"], "--vcpus 100000: at most 256"),
        (&["--ops", "explode"], "[possible values: split, merge"),
        (&["--method", "magic"], "[possible values: list, quiesce"),
        (&["--guest", "sleep"], "[possible values: touch, spin]"),
        (&["--commits", "0"], "--commits 0: a run makes"),
        (&["--runs", "0"], "--runs 0: nothing would be measured"),
    ];
    for (words, wanted) in cases {
        assert_refused(words, wanted);
    }
}

#[test]
fn what_is_missing_is_named() {
    let probe = Probe::run();
    if !probe.has("/dev/kvm") {
        assert_refused(&[], "/dev/kvm");
    } else if probe.has("KVM_CAP_SET_USER_MEMORY_REGION_LIST") {
        println!("SKIP: this kernel has KVM_CAP_SET_USER_MEMORY_REGION_LIST");
    } else {
        let wanted = "this kernel lacks KVM_CAP_SET_USER_MEMORY_REGION_LIST";
        assert_refused(&["--method", "list,plain"], wanted);
    }
}

#[test]
fn a_run_prints_a_table_and_leaves_three_files() {
    if !Probe::run().has("/dev/kvm") {
        println!("SKIP: no /dev/kvm");
        return;
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let words = [
        "--vcpus",
        "1",
        "--ops",
        "split",
        "--commits",
        "3",
        "--runs",
        "1",
    ];
    let output = memslots(directory.path(), &words);
    let (table, told) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{told}");
    assert!(
        table.contains("split by quiesce") && table.contains("Page: "),
        "{table}"
    );
    for name in ["memslots.html", "memslots.svg", "memslots.json"] {
        let file = directory.path().join("out").join(name);
        assert!(file.metadata().expect("a file").len() > 1000, "{name}");
    }
}
