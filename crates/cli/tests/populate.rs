//! `pagetide bench populate` as a command: what it refuses, and what it leaves.

mod common;

use common::{assert_measures, assert_refused};
use pagetide_uapi::probe::Probe;

const BENCHMARK: &str = "populate";

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
        assert_refused(BENCHMARK, words, wanted);
    }
}

#[test]
fn what_is_missing_is_named() {
    let probe = Probe::run();
    if !probe.has("/dev/kvm") {
        assert_refused(BENCHMARK, &[], "/dev/kvm");
    } else if probe.has("KVM_CAP_POPULATE_MEMORY") {
        println!("SKIP: this kernel has KVM_CAP_POPULATE_MEMORY");
    } else {
        let wanted = "this kernel lacks KVM_CAP_POPULATE_MEMORY";
        assert_refused(BENCHMARK, &["--method", "none,populate"], wanted);
    }
    if probe.has("/dev/kvm") {
        assert_refused(BENCHMARK, &["--memory", "1024T"], "--memory 1024T: ");
    }
}

#[test]
fn a_run_prints_a_table_and_leaves_three_files() {
    if !Probe::run().has("/dev/kvm") {
        println!("SKIP: no /dev/kvm");
        return;
    }
    let words = ["--vcpus", "1,2", "--memory", "1M", "--runs", "1"];
    assert_measures(BENCHMARK, &words, &["shmem, one-reader"]);
}
