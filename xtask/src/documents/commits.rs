//! Commits say what changes and why.

use crate::command::Run;
use crate::paths::Paths;

/// The last commit before the rule was checked. Of those up to this one, a third have no body.
const BEFORE: &str = "a76643f00d79";

/// What is wrong with a commit's message: `area: what changes`, an empty line, and why.
fn problem(message: &str) -> Option<&'static str> {
    let (subject, rest) = message.split_once('\n').unwrap_or((message, ""));
    let area = subject.split_once(": ").map(|(area, _)| area);
    let is_area = |area: &str| {
        !area.is_empty()
            && area
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || " ,-_./".contains(c))
    };
    if !area.is_some_and(is_area) {
        Some("its subject is not `area: what changes`")
    } else if rest.trim().is_empty() {
        Some("it has no body that says why")
    } else if !rest.starts_with('\n') {
        Some("no empty line follows its subject")
    } else {
        None
    }
}

#[test]
fn every_new_commit_says_why() {
    let paths = Paths::find().unwrap();
    let git = |arguments: &[&str]| Run::new("git").args(arguments).dir(paths.root());
    let known = format!("{BEFORE}^{{commit}}");
    if !git(&["cat-file", "-e", &known]).succeeds().unwrap_or(false) {
        println!("SKIP: this checkout has no history as far back as {BEFORE}");
        return;
    }
    let range = format!("{BEFORE}..HEAD");
    let log = git(&["log", "--no-merges", "-z", "--format=%h %B", &range]);
    let log = log.text().unwrap();
    for commit in log.split('\0').filter(|commit| !commit.is_empty()) {
        let (hash, message) = commit.split_once(' ').unwrap();
        assert_eq!(problem(message), None, "{hash}: {message}");
    }
}

#[test]
fn messages_without_an_area_or_a_body_are_found() {
    assert_eq!(problem("memory, docs: do so\n\nBecause.\n"), None);
    assert!(problem("memory: do so\n").is_some());
    assert!(problem("memory: do so\nBecause.\n").is_some());
    assert!(problem("Do so\n\nBecause.\n").is_some());
    assert!(problem(": do so\n\nBecause.\n").is_some());
}
