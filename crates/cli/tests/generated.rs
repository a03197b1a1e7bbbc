//! Completion scripts and manual pages, as shells and man read them.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

fn pagetide(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagetide"))
        .args(words)
        .output()
        .expect("it starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text is UTF-8")
}

/// Standard output of a run that succeeds.
fn printed(words: &[&str]) -> String {
    let output = pagetide(words);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// The verbs that the help of these words lists.
fn verbs(words: &[&str]) -> Vec<String> {
    let help = printed(&[words, &["--help"]].concat());
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = lines.take_while(|line| !line.is_empty());
    listed
        .filter_map(|line| line.strip_prefix("  ")?.split(' ').next())
        .filter(|name| !matches!(*name, "" | "help"))
        .map(str::to_owned)
        .collect()
}

/// Runs a program if this machine has it; its output, or None with the reason printed.
fn run(program: &str, words: &[&str]) -> Option<Output> {
    match Command::new(program).args(words).output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("SKIP: no {program}");
            None
        }
        Err(error) => unreachable!("{program}: {error}"),
    }
}

#[test]
fn every_shell_has_a_script_that_names_every_verb() {
    let verbs = [
        verbs(&[]),
        verbs(&["bench"]),
        verbs(&["ctl"]),
        verbs(&["image"]),
    ]
    .concat();
    assert!(verbs.contains(&"probe".into()) && verbs.contains(&"paging".into()));
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = printed(&["completions", shell]);
        for verb in &verbs {
            assert!(script.contains(verb.as_str()), "{shell}: {verb}");
        }
    }
}

#[test]
fn an_unknown_shell_is_refused_in_one_line() {
    let output = pagetide(&["completions", "tcsh"]);
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert_eq!(text(&output.stdout), "");
    assert!(
        told.contains("[possible values: bash, elvish, fish, powershell, zsh]"),
        "{told}"
    );
    assert_eq!(told.lines().count(), 1, "{told}");
}

/// What bash offers for the last of these words.
fn offered(script: &Path, words: &[&str]) -> Option<BTreeSet<String>> {
    let list = words.join(" ");
    let last = words.len() - 1;
    let program = format!(
        "source {script} && COMP_WORDS=({list}) COMP_CWORD={last} \
         && _pagetide pagetide '{word}' '{before}' && printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        script = script.display(),
        word = words[last],
        before = words[last - 1],
    );
    let output = run("bash", &["--norc", "-c", &program])?;
    let offers = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    Some(offers.lines().map(str::to_owned).collect())
}

#[test]
fn bash_completes_verbs_options_and_values() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let script = directory.path().join("pagetide");
    std::fs::write(&script, printed(&["completions", "bash"])).expect("it is written");
    let cases: [(&[&str], &str); 4] = [
        (&["pagetide", "pr"], "probe"),
        (&["pagetide", "bench", "pagi"], "paging"),
        (&["pagetide", "bench", "paging", "--per"], "--per-vcpu"),
        (
            &["pagetide", "bench", "paging", "--backing", "hugetlb-1"],
            "hugetlb-1g",
        ),
    ];
    for (words, wanted) in cases {
        let Some(offers) = offered(&script, words) else {
            return;
        };
        assert_eq!(offers, BTreeSet::from([wanted.to_owned()]), "{words:?}");
    }
}

#[test]
fn every_verb_has_a_manual_page() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let pages = directory.path().join("deep/man1");
    printed(&["man", pages.to_str().expect("UTF-8")]);
    let mut wanted = BTreeSet::from(["pagetide.1".to_owned()]);
    wanted.extend(verbs(&[]).iter().map(|verb| format!("pagetide-{verb}.1")));
    for group in ["bench", "ctl", "image", "working-set"] {
        let verbs = verbs(&[group]);
        wanted.extend(
            verbs
                .iter()
                .map(|verb| format!("pagetide-{group}-{verb}.1")),
        );
    }
    let entries = std::fs::read_dir(&pages).expect("the directory is there");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    let written: BTreeSet<_> = names
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    assert_eq!(written, wanted);

    let paging = std::fs::read_to_string(pages.join("pagetide-bench-paging.1")).expect("a page");
    let plain = paging.replace('\\', "");
    for part in [
        ".TH pagetide-bench-paging 1 ",
        "pagetide-bench-paging - ",
        ".SH OPTIONS",
        "--fault-around",
        ".SH EXAMPLES",
        "    pagetide bench paging --delivery uffd",
        ".SH \"EXIT STATUS\"",
        ".SH \"SEE ALSO\"",
    ] {
        assert!(plain.contains(part), "{part} in\n{plain}");
    }
}

#[test]
fn man_reads_every_page_without_a_warning() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    printed(&["man", directory.path().to_str().expect("UTF-8")]);
    for entry in std::fs::read_dir(directory.path()).expect("the directory is there") {
        let page = entry.expect("an entry").path();
        let page = page.to_str().expect("UTF-8");
        let words = ["-man", "-Tutf8", "-K", "utf8", "-ww", page];
        let Some(output) = run("groff", &words) else {
            return;
        };
        assert_eq!(text(&output.stderr), "", "{page}");
        assert!(text(&output.stdout).contains("Print help"), "{page}");
    }
}

#[test]
fn a_directory_that_cannot_be_made_is_named() {
    let output = pagetide(&["man", "/proc/version/man"]);
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("cannot write /proc/version/man: "), "{told}");
    assert_eq!(told.lines().count(), 1, "{told}");
}
