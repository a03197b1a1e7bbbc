//! `pagetide bench show`: which reports it opens, and what it refuses.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use pagetide_bench::paging::Plan;
use pagetide_bench::report::{Report, SCHEMA};
use tempfile::TempDir;

/// A report of version 1.
const OLD: &str = include_str!("../../bench/tests/fixtures/paging-1.json");

/// A directory with a file of this content, and nothing else.
fn directory(content: &[u8]) -> TempDir {
    let directory = tempfile::tempdir().expect("a temporary directory");
    fs::write(directory.path().join("report.json"), content).expect("a temporary file");
    directory
}

/// Runs `pagetide bench show` with these words in `directory`.
fn show(directory: &Path, words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagetide"))
        .current_dir(directory)
        .args(["bench", "show"])
        .args(words)
        .output()
        .expect("it starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text is UTF-8")
}

/// What it printed, where it succeeded and left `left` files in its directory.
fn printed(output: &Output, directory: &Path, left: usize) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
    assert_eq!(files(directory), left);
    text(&output.stdout)
}

fn files(directory: &Path) -> usize {
    fs::read_dir(directory).expect("it is there").count()
}

/// It ended with 2 and one line, printed nothing and wrote nothing beside the file that it was given.
fn assert_refused(content: &[u8], words: &[&str], wanted: &str) {
    let directory = directory(content);
    for more in [&[][..], &["--json"], &["--out", "out/results"]] {
        let words = [words, more].concat();
        let output = show(directory.path(), &words);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {message}");
        assert!(message.contains(wanted), "{words:?}: {message}");
        assert!(
            message.starts_with("pagetide: ") && message.lines().count() == 1,
            "{message:?}"
        );
        assert_eq!(text(&output.stdout), "", "{words:?}");
        assert_eq!(files(directory.path()), 1, "{words:?}: {message}");
    }
}

#[test]
fn a_report_of_version_1_is_a_table() {
    let directory = directory(OLD.as_bytes());
    let output = show(directory.path(), &["report.json"]);
    let table = printed(&output, directory.path(), 1);
    for wanted in [
        "Demand paging: 1M per vCPU, shmem MINOR, sequential writes",
        "exit, 16 around, populated",
        "instructions/page",
        "instructions, times uffd",
        "6.12.117",
    ] {
        assert!(table.contains(wanted), "{wanted} in\n{table}");
    }
}

#[test]
fn json_is_of_this_version_and_opens_again() {
    let old = directory(OLD.as_bytes());
    let table = printed(&show(old.path(), &["report.json"]), old.path(), 1);
    let output = show(old.path(), &["report.json", "--json"]);
    let json = printed(&output, old.path(), 1);
    assert_eq!(SCHEMA, "pagetide.report/2");
    assert!(
        json.starts_with("{\n  \"schema\": \"pagetide.report/2\",\n  \"benchmark\": \"paging\",\n"),
        "{json}"
    );
    let report = Report::<Plan>::from_json(&json).expect("a report");
    assert_eq!(report.plan.vcpus, [1, 2]);

    let new = directory(json.as_bytes());
    let again = printed(&show(new.path(), &["report.json"]), new.path(), 1);
    assert_eq!(again, table);
    let output = show(new.path(), &["report.json", "--json"]);
    assert_eq!(printed(&output, new.path(), 1), json);
}

#[test]
fn the_page_is_drawn_where_it_is_asked_for() {
    let directory = directory(OLD.as_bytes());
    let output = show(directory.path(), &["report.json", "--out", "out/results"]);
    let table = printed(&output, directory.path(), 2);
    assert!(table.contains("Demand paging"), "{table}");
    let results = directory.path().join("out/results");
    for ending in ["html", "svg", "json"] {
        let file = results.join(format!("paging.{ending}"));
        assert!(file.metadata().expect("a file").len() > 1000, "{ending}");
    }
    assert_eq!(files(&results), 3);
    let json = fs::read_to_string(results.join("paging.json")).expect("the data");
    assert!(Report::<Plan>::from_json(&json).is_ok());
}

#[test]
fn what_is_no_report_is_refused_in_one_line() {
    let cannot = "cannot open the report report.json: ";
    let no_schema = "a report of schema '', benchmark '', is none that this program opens";
    let truncated = &OLD[..OLD.len() / 2];
    let later = br#"{"schema":"pagetide.report/3","benchmark":"paging"}"#;
    let other = br#"{"schema":"pagetide.report/2","benchmark":"flying"}"#;
    let mixed = br#"{"schema":"pagetide.paging/1","benchmark":"memslots"}"#;
    let hollow = br#"{"schema":"pagetide.paging/1"}"#;
    let cases: &[(&[u8], &str)] = &[
        (b"", "EOF while parsing"),
        (b"Demand paging\nis no JSON\n", "expected value"),
        (b"\x7fELF\x02\x01\x01\xff\xfe\0\0", "valid UTF-8"),
        (b"\0\0\0\0", "expected value"),
        (truncated.as_bytes(), "EOF while parsing"),
        (b"{}", no_schema),
        (b"null", no_schema),
        (b"[1, \"schema\"]", no_schema),
        (b"{\"schema\": 2, \"benchmark\": [\"paging\"]}", no_schema),
        (later, "schema 'pagetide.report/3', benchmark 'paging'"),
        (other, "schema 'pagetide.report/2', benchmark 'flying'"),
        (mixed, "schema 'pagetide.paging/1', benchmark 'memslots'"),
        (hollow, "missing field"),
    ];
    for (content, wanted) in cases {
        assert_refused(content, &["report.json"], cannot);
        assert_refused(content, &["report.json"], wanted);
    }
}

#[test]
fn a_report_whose_records_are_of_no_series_is_refused() {
    let old = directory(OLD.as_bytes());
    let output = show(old.path(), &["report.json", "--json"]);
    let json = printed(&output, old.path(), 1);
    let strange = json.replace("\"delivery\":\"exit\"", "\"delivery\":\"pigeon\"");
    assert_ne!(strange, json);
    let directory = directory(strange.as_bytes());
    for words in [
        &["report.json"][..],
        &["report.json", "--json"],
        &["report.json", "--json", "--out", "out"],
    ] {
        let output = show(directory.path(), words);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains("unknown variant `pigeon`"), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
        assert_eq!(text(&output.stdout), "");
        assert_eq!(files(directory.path()), 1);
    }
}

#[test]
fn a_file_that_cannot_be_read_is_refused_in_one_line() {
    let missing = "cannot open the report missing.json: No such file";
    assert_refused(b"", &["missing.json"], missing);
    assert_refused(b"", &["."], "cannot open the report .: Is a directory");
    assert_refused(b"", &["--quiet"], "unexpected argument '--quiet'");
}

#[test]
fn a_directory_that_cannot_be_is_refused() {
    let directory = directory(OLD.as_bytes());
    // Also root cannot make a directory there.
    let output = show(directory.path(), &["report.json", "--out", "/proc/x/y"]);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(
        message.starts_with("pagetide: --out /proc/x/y: cannot make the directory: "),
        "{message}"
    );
    assert_eq!(message.lines().count(), 1, "{message}");
    assert_eq!(text(&output.stdout), "");
}

#[test]
fn output_that_nobody_takes_is_a_failure() {
    let directory = directory(OLD.as_bytes());
    let full = fs::File::options().write(true).open("/dev/full");
    let output = Command::new(env!("CARGO_BIN_EXE_pagetide"))
        .current_dir(directory.path())
        .args(["bench", "show", "report.json"])
        .stdout(full.expect("every Linux has it"))
        .output()
        .expect("it starts");
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(!message.contains("cannot open the report"), "{message}");
}
