//! Benchmarks as commands: what every one of them does alike.

use std::process::{Command, Output};

/// Runs `pagetide bench BENCHMARK` with these words, results going below `directory`.
fn bench(benchmark: &str, directory: &std::path::Path, words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagetide"))
        .args(["bench", benchmark, "--out"])
        .arg(directory.join("out"))
        .args(words)
        .output()
        .expect("it starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text is UTF-8")
}

/// It ends with 2 and one line, and leaves nothing behind.
pub(crate) fn assert_refused(benchmark: &str, words: &[&str], wanted: &str) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let output = bench(benchmark, directory.path(), words);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{words:?}: {message}");
    assert!(message.contains(wanted), "{words:?}: {message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    let left = std::fs::read_dir(directory.path()).expect("it is there");
    assert_eq!(left.count(), 0, "{words:?}");
}

/// It prints a table with a line for `series`, and leaves a page, a drawing and the data.
pub(crate) fn assert_measures(benchmark: &str, words: &[&str], series: &[&str]) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let output = bench(benchmark, directory.path(), words);
    let (table, message) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{message}");
    for text in [series, &["Page: "]].concat() {
        assert!(table.contains(text), "{text}\n{table}");
    }
    for ending in ["html", "svg", "json"] {
        let file = directory.path().join(format!("out/{benchmark}.{ending}"));
        assert!(file.metadata().expect("a file").len() > 1000, "{ending}");
    }
}
