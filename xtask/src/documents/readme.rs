//! README is read to its end: it stays short, and begins with what a stranger wants.

use crate::paths::Paths;

/// The most words of README, counted as wc does.
const MOST_WORDS: usize = 900;

#[test]
fn readme_is_short_and_begins_with_a_picture_and_a_command_to_try() {
    let text = std::fs::read_to_string(Paths::find().unwrap().in_root("README.md")).unwrap();
    let words = text.split_whitespace().count();
    assert!(words <= MOST_WORDS, "{words} words");
    let first: Vec<&str> = text.lines().take(20).collect();
    for part in ["![", "docs/images/", "pagetide try"] {
        assert!(first.iter().any(|line| line.contains(part)), "{part}");
    }
}
