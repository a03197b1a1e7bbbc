//! Tests of the documents: the command parses every `pagetide` command line in them.

use std::path::Path;

use clap::Parser;

use crate::args::Arguments;

/// The `pagetide` command lines of a document: in its blocks of code, and in the code spans that begin with
/// `cargo xtask vm`. Each is cut where a shell's comment begins.
fn command_lines(text: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let (mut in_block, mut joined) = (false, String::new());
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        } else if in_block {
            match line.strip_suffix('\\') {
                Some(begun) => joined.push_str(begun),
                None => found.push(std::mem::take(&mut joined) + line),
            }
        } else {
            let spans = line.split('`').skip(1).step_by(2);
            let commands = spans.filter(|span| span.starts_with("cargo xtask vm "));
            found.extend(commands.map(str::to_owned));
        }
    }
    let lines = found.iter().map(|line| match line.split_once(" # ") {
        Some((command, _)) => command.trim_end(),
        None => line.trim_end(),
    });
    lines
        .filter_map(|line| {
            let words = words(line);
            let program = |word: &String| word == "pagetide" || word.ends_with("/pagetide");
            let at = words.iter().position(program)?;
            let command = at == 0 || words.get(at - 1).is_some_and(|word| word == "--");
            let of_the_shell = |word: &String| [">", ">>", "|", "&&", ";"].contains(&word.as_str());
            let own = words[at..].split(of_the_shell).next()?;
            command.then(|| own.to_vec())
        })
        .collect()
}

/// A line's words, as a shell splits them.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![];
    let (mut word, mut quote) = (None::<String>, None);
    for character in line.chars() {
        match quote {
            Some(end) if character == end => quote = None,
            None if matches!(character, '"' | '\'') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            None if character.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(character),
        }
    }
    words.extend(word);
    words
}

/// Why the command does not take a line, if it does not.
fn refusal(line: &[String]) -> Option<String> {
    let error = Arguments::try_parse_from(line).err()?;
    error.use_stderr().then(|| error.to_string())
}

#[test]
fn the_documents_command_lines_are_understood() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut documents = vec![root.join("README.md"), root.join("SPECIFICATION.md")];
    let guides = std::fs::read_dir(root.join("docs/guide")).unwrap();
    documents.extend(guides.map(|guide| guide.unwrap().path()));
    let mut count = 0;
    for document in documents {
        let text = std::fs::read_to_string(&document).unwrap();
        for line in command_lines(&text) {
            count += 1;
            let refused = refusal(&line);
            assert!(refused.is_none(), "{}: {refused:?}", document.display());
        }
    }
    assert!(count > 10, "{count} command lines were found");
}

#[test]
fn command_lines_are_found_and_judged() {
    let text = "Say `pagetide bench`, `cargo xtask vm -- pagetide probe --json`.\n\
                ```\npagetide run --kernel a \\\n    --vcpus 2 > b # two\n\
                target/release/pagetide bench paging --no-such-option\npagetide: told\n```\n";
    let lines = command_lines(text);
    assert_eq!(lines.len(), 3);
    let refused: Vec<_> = lines.iter().map(|line| refusal(line)).collect();
    assert!(refused[..2].iter().all(Option::is_none), "{refused:?}");
    assert!(refused[2].as_ref().unwrap().contains("--no-such-option"));
}
