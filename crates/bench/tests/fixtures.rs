//! Reports of version 1, each from a real run in the lab, show the same figures as they did then.
//!
//! `NAME-1.json` is the data of such a run, `NAME-1.txt` the table that the program of that time printed
//! of it, and `NAME-1.page.txt` what its page had in pictures and headlines. Words have changed since;
//! figures, rows, columns, pictures and notes have not.

use std::path::PathBuf;

use pagetide_bench::report::{Report, Shown};
use pagetide_bench::{memcycler, memslots, paging, populate};

fn fixture(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name);
    std::fs::read_to_string(path).expect("a fixture")
}

/// Numbers in a text, with their signs, units of size and thousands.
fn numbers(text: &str) -> Vec<String> {
    let joined = text.replace("&#39;", "'").replace('\u{202f}', "");
    let words = joined.split(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '-' | '+')));
    let words = words.map(|word| word.trim_matches(|c| matches!(c, '.' | '-')));
    words
        .filter(|word| word.contains(|c: char| c.is_ascii_digit()))
        .map(str::to_owned)
        .collect()
}

/// The rows of all tables of a terminal's text.
fn rows(text: &str) -> Vec<Vec<String>> {
    let tables = text.lines().take_while(|line| !line.starts_with("- "));
    tables
        .skip(1)
        .map(numbers)
        .filter(|row| !row.is_empty())
        .collect()
}

/// Of a page's HTML what a `NAME-1.page.txt` has.
fn page(html: &str) -> Vec<String> {
    let (shown, _) = html.split_once("<script").expect("data");
    let mut found = Vec::new();
    let texts = |of: &str, start: &str, end: &str| -> Vec<String> {
        let parts = of.split(start).skip(1);
        parts
            .filter_map(|part| Some(part.split_once(end)?.0.trim().to_owned()))
            .collect()
    };
    for lead in texts(shown, "<span class=\"tag\">", "</li>") {
        found.push(format!("lead: {lead}"));
    }
    for figure in texts(shown, "<figure>", "</figure>") {
        found.push("chart:".to_owned());
        for point in texts(&figure, "<title>", "</title>") {
            found.push(format!("point: {point}"));
        }
    }
    found
}

/// Kind and numbers of each line.
fn figures<'a>(lines: impl IntoIterator<Item = &'a str>) -> Vec<(String, Vec<String>)> {
    let split = |line: &str| {
        let (kind, rest) = line.split_once(':').expect("a kind");
        let numbers = if kind == "chart" {
            Vec::new()
        } else {
            numbers(rest)
        };
        (kind.to_owned(), numbers)
    };
    let mut lines: Vec<_> = lines.into_iter().map(split).collect();
    lines.sort();
    lines
}

fn reproduces<B: Shown>() {
    let name = B::NAME;
    let json = fixture(&format!("{name}-1.json"));
    let report = Report::<B>::from_json(&json).expect("a report of version 1");
    let (then, now) = (
        fixture(&format!("{name}-1.txt")),
        report.table(None).expect("a table"),
    );
    let (then_rows, now_rows) = (rows(&then), rows(&now));
    assert_eq!(
        then_rows.len(),
        now_rows.len(),
        "rows of\n{then}\nand\n{now}"
    );
    for (then, now) in then_rows.iter().zip(&now_rows) {
        assert_eq!(then, now, "{name}");
    }
    let old: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let notes: Vec<String> = serde_json::from_value(old["notes"].clone()).expect("notes");
    assert_eq!(report.notes, notes);
    let then = fixture(&format!("{name}-1.page.txt"));
    let html = report.html().expect("a page");
    let now = page(&html);
    let (then, now) = (
        figures(then.lines()),
        figures(now.iter().map(String::as_str)),
    );
    for (then, now) in then.iter().zip(&now) {
        assert_eq!(then, now, "{name}");
    }
    assert_eq!(then.len(), now.len(), "{name}");
    // What was opened is a report like any other.
    let json = report.json().expect("JSON");
    assert!(
        Report::<B>::from_json(&json).expect("the same") == report,
        "{name}"
    );
}

#[test]
fn paging_is_reproduced() {
    reproduces::<paging::Plan>();
}

#[test]
fn memslots_is_reproduced() {
    reproduces::<memslots::Plan>();
}

#[test]
fn populate_is_reproduced() {
    reproduces::<populate::Plan>();
}

#[test]
fn memcycler_is_reproduced() {
    reproduces::<memcycler::Plan>();
}

#[test]
fn a_report_of_something_else_is_refused() {
    let json = fixture("paging-1.json");
    for (from, to) in [
        ("pagetide.paging/1", "pagetide.paging/3"),
        ("pagetide.paging/1", "pagetide.populate/1"),
        ("\"vcpus\":2,\"series\"", "\"vcpus\":\"two\",\"series\""),
        ("\"delivery\":\"uffd\"", "\"delivery\":\"mail\""),
    ] {
        let changed = json.replace(from, to);
        assert_ne!(changed, json, "{from}");
        let error = Report::<paging::Plan>::from_json(&changed);
        assert!(error.is_err(), "{to}");
    }
    for text in [
        "",
        "{}",
        "[]",
        "{\"schema\":\"pagetide.paging/1\"}",
        "\u{0}",
    ] {
        assert!(Report::<paging::Plan>::from_json(text).is_err(), "{text:?}");
    }
}
