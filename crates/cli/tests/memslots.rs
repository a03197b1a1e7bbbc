//! `pagetide bench memslots` as a command: what it refuses, and what it leaves.

mod common;

use common::{assert_measures, assert_refused};
use pagetide_uapi::probe::Probe;

const BENCHMARK: &str = "memslots";

#[test]
fn bad_arguments_are_refused_in_one_line() {
    let cases: &[(&[&str], &str)] = &[
        (&["--vcpus", "0"], "--vcpus 0: a virtual machine"),
        (&["--vcpus", "100000"], "--vcpus 100000: at most 256"),
        (&["--ops", "explode"], "[possible values: split, merge"),
        (
            &["--method", "magic"],
            "[possible values: list, quiesce, delete-create]",
        ),
        // The words are good, so that what is wrong is the next option.
        (
            &["--method", "plain", "--commits", "0"],
            "--commits 0: a run makes",
        ),
        (&["--guest", "sleep"], "[possible values: touch, spin]"),
        (&["--commits", "0"], "--commits 0: a run makes"),
        (&["--runs", "0"], "--runs 0: nothing would be measured"),
    ];
    for (words, wanted) in cases {
        assert_refused(BENCHMARK, words, wanted);
    }
}

#[test]
fn what_is_missing_is_named() {
    let probe = Probe::run();
    if !probe.has("/dev/kvm") {
        assert_refused(BENCHMARK, &[], "/dev/kvm");
    } else if probe.has("KVM_CAP_SET_USER_MEMORY_REGION_LIST") {
        println!("SKIP: this kernel has KVM_CAP_SET_USER_MEMORY_REGION_LIST");
    } else {
        let wanted = "this kernel lacks KVM_CAP_SET_USER_MEMORY_REGION_LIST";
        assert_refused(BENCHMARK, &["--method", "list,delete-create"], wanted);
    }
}

#[test]
fn a_run_prints_a_table_and_leaves_three_files() {
    if !Probe::run().has("/dev/kvm") {
        println!("SKIP: no /dev/kvm");
        return;
    }
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
    assert_measures(BENCHMARK, &words, &["split by quiesce"]);
}
