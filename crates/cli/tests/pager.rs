//! `pagetide bench pager` as a command: what it refuses, and what it leaves.

mod common;

use common::{assert_measures, assert_refused};
use pagetide_uapi::userfaultfd::{Features, Userfaultfd};

const BENCHMARK: &str = "pager";

#[test]
fn bad_arguments_are_refused_in_one_line() {
    let cases: &[(&[&str], &str)] = &[
        (&["--part", "magic"], "[possible values: random, around"),
        (&["--part", "fill,fill"], "--part names fill twice"),
        (&["--threads", "0"], "--threads 0: 1 to 16"),
        (&["--threads", "8"], "--threads 8: only the part random"),
        (&["--memory", "5000"], "--memory 5000: a multiple of 1M"),
        (&["--order", "backwards"], "[possible values: random, seq"),
        (&["--readers", "17"], "--readers 17: 1 to 16"),
        (&["--around", "3"], "--around 3: a power of two"),
        (&["--cache", "tepid"], "[possible values: warm, cold]"),
        (&["--runs", "0"], "--runs 0: nothing would be measured"),
    ];
    for (words, wanted) in cases {
        assert_refused(BENCHMARK, words, wanted);
    }
}

fn has_minor_faults() -> bool {
    match Userfaultfd::available() {
        Ok(features) if features.contains(Features::MINOR_SHMEM) => true,
        found => {
            println!("SKIP: no userfaultfd with minor faults of shmem: {found:?}");
            false
        }
    }
}

/// Faults of one page each are measured in 64M at most: the server then serves a VM that is shorter than its file. The
/// default is 512M.
#[test]
fn a_file_that_is_longer_than_what_is_measured_is_served() {
    if !has_minor_faults() {
        return;
    }
    let words = [
        "--part",
        "random,around",
        "--threads",
        "1",
        "--around",
        "64",
    ];
    let words = [words.as_slice(), &["--memory", "65M", "--runs", "1"]].concat();
    let series = ["random \u{2013} server"];
    assert_measures(BENCHMARK, &words, &series);
}

#[test]
fn a_run_prints_a_table_and_leaves_three_files() {
    if !has_minor_faults() {
        return;
    }
    let words = ["--threads", "1,2", "--readers", "1,2", "--memory", "4M"];
    let words = [words.as_slice(), &["--runs", "1"]].concat();
    let series = [
        "around 64 continue \u{2013} engine",
        "replay warm \u{2013} replay",
        "image \u{2013} server",
        "unpack \u{2013} server",
    ];
    assert_measures(BENCHMARK, &words, &series);
}
