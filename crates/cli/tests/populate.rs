//! `pagetide bench populate` as a command: what it refuses, and what it leaves.

use std::process::{Command, Output};

use pagetide_uapi::probe::Probe;

fn populate(directory: &std::path::Path, words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagetide"))
        .args(["bench", "populate", "--out"])
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
    let output = populate(directory.path(), words);
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
        (&["--memory", "0"], "--memory 0: there is nothing"),
        (&["--memory", "4K"], "--memory 4K: 2 equal parts"),
        (&["--backing", "paper"], "[possible values: shmem, thp"),
        (&["--backing", "anonymous"], "--backing anonymous: its"),
        (&["--method", "magic"], "[possible values: none, pre-fault"),
        (&["--threads", "0"], "--threads 0: 1 to 256"),
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
    } else if probe.has("KVM_CAP_POPULATE_MEMORY") {
        println!("SKIP: this kernel has KVM_CAP_POPULATE_MEMORY");
    } else {
        let wanted = "this kernel lacks KVM_CAP_POPULATE_MEMORY";
        assert_refused(&["--method", "none,populate"], wanted);
    }
    if probe.has("/dev/kvm") {
        assert_refused(&["--memory", "1024T"], "--memory 1024T: ");
    }
}

#[test]
fn a_run_prints_a_table_and_leaves_three_files() {
    if !Probe::run().has("/dev/kvm") {
        println!("SKIP: no /dev/kvm");
        return;
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let words = ["--vcpus", "1,2", "--memory", "1M", "--runs", "1"];
    let output = populate(directory.path(), &words);
    let (table, told) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{told}");
    assert!(
        table.contains("shmem, one-reader") && table.contains("Page: "),
        "{table}"
    );
    for name in ["populate.html", "populate.svg", "populate.json"] {
        let file = directory.path().join("out").join(name);
        assert!(file.metadata().expect("a file").len() > 1000, "{name}");
    }
}
