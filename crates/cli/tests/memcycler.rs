//! `pagetide bench memcycler` as a command: what it refuses, and what it leaves.

mod common;

use common::{assert_measures, assert_refused};
use pagetide_memory::{Backing, FailurePolicy};
use pagetide_uapi::probe::Probe;

const BENCHMARK: &str = "memcycler";

#[test]
fn bad_arguments_are_refused_in_one_line() {
    let cases: &[(&[&str], &str)] = &[
        (&["--vcpus", "0"], "--vcpus 0: a virtual machine"),
        (&["--memory", "0"], "--memory 0: there is nothing"),
        (
            &["--memory", "3M"],
            "--memory 3M: not a multiple of the 2097152-byte",
        ),
        (&["--backing", "paper"], "[possible values: shmem, thp"),
        (&["--backing", "shmem"], "--backing shmem: it has no huge"),
        (&["--poison", "101"], "--poison 101: 0 to 100 percent"),
        (&["--poison", "-1"], "'-1'"),
        (&["--policy", "hope"], "[possible values: default, keep]"),
        (&["--seconds", "0"], "--seconds 0: a run is measured"),
        (&["--runs", "0"], "--runs 0: nothing would be measured"),
    ];
    for (words, wanted) in cases {
        assert_refused(BENCHMARK, words, wanted);
    }
}

#[test]
fn what_is_missing_is_named() {
    if !Probe::run().has("/dev/kvm") {
        assert_refused(BENCHMARK, &[], "/dev/kvm");
        return;
    }
    if FailurePolicy::Keep.is_available(Backing::Thp) {
        println!("SKIP: this kernel has MFD_MF_KEEP_UE_MAPPED");
    } else {
        let wanted = "--policy keep: this kernel lacks MFD_MF_KEEP_UE_MAPPED";
        assert_refused(BENCHMARK, &["--policy", "default,keep"], wanted);
    }
    // More than any pool has: 1 PiB.
    let words = [
        "--backing",
        "hugetlb-2m",
        "--memory",
        "1024T",
        "--poison",
        "0",
    ];
    assert_refused(BENCHMARK, &words, "--backing hugetlb-2m: ");
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
        "--memory",
        "2M",
        "--poison",
        "0",
        "--seconds",
        "1",
        "--runs",
        "1",
    ];
    assert_measures(BENCHMARK, &words, &["thp, default, 0 %"]);
}
