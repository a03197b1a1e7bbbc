//! Links between documents, and the names of documents in code.

use std::path::{Path, PathBuf};

use super::markdown;
use crate::paths::Paths;

/// What the documents and the code of a checkout name that does not exist.
fn problems(paths: &Paths) -> Vec<String> {
    let mut files = Vec::new();
    collect(paths.root(), paths.root(), &mut files);
    let mut found = Vec::new();
    for file in files {
        // Its tests name documents that do not exist.
        if file == Path::new(file!()) {
            continue;
        }
        let Ok(text) = std::fs::read_to_string(paths.root().join(&file)) else {
            continue;
        };
        let name = file.display();
        if file.extension().is_some_and(|extension| extension == "md") {
            for (line, target) in markdown::links(&text) {
                if let Err(why) = follow(paths.root(), &file, &text, &target) {
                    found.push(format!("{name}:{line}: {target}: {why}"));
                }
            }
        }
        for document in named_documents(&text) {
            if !paths.root().join(document).is_file() {
                found.push(format!("{name}: {document} does not exist"));
            }
        }
    }
    found
}

/// Files that people wrote, relative to the checkout. Patches are text of the kernel's, and fixtures are
/// the output of former versions.
pub(super) fn collect(root: &Path, directory: &Path, files: &mut Vec<PathBuf>) {
    const SKIPPED: [&str; 4] = ["target", ".git", "patches", "fixtures"];
    let Ok(entries) = std::fs::read_dir(directory) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        let Ok(kind) = entry.file_type() else {
            continue;
        };
        if kind.is_dir() {
            if !SKIPPED.iter().any(|name| entry.file_name() == *name) {
                collect(root, &path, files);
            }
        } else if kind.is_file()
            && let Ok(relative) = path.strip_prefix(root)
        {
            files.push(relative.to_owned());
        }
    }
}

/// Whether a link of the document `file` leads somewhere.
fn follow(root: &Path, file: &Path, text: &str, target: &str) -> Result<(), String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return Ok(());
    }
    let (path, anchor) = match target.split_once('#') {
        Some((path, anchor)) => (path, Some(anchor)),
        None => (target, None),
    };
    let place = if path.is_empty() {
        root.join(file)
    } else {
        root.join(file.parent().unwrap_or(Path::new(""))).join(path)
    };
    if !place.exists() {
        return Err("there is no such file".into());
    }
    let Some(anchor) = anchor else { return Ok(()) };
    let text = match path {
        "" => text.to_owned(),
        _ => std::fs::read_to_string(&place).map_err(|error| error.to_string())?,
    };
    if markdown::anchors(&text).iter().any(|a| a == anchor) {
        Ok(())
    } else {
        Err("there is no such heading".into())
    }
}

/// Paths like `docs/design/lab.md` in any text, relative to the checkout.
fn named_documents(text: &str) -> impl Iterator<Item = &str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    text.match_indices("docs/").filter_map(move |(at, _)| {
        let before = text.get(..at)?.chars().next_back();
        let rest = text.get(at..)?;
        let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        let path = rest.get(..end)?.trim_end_matches('.');
        (!before.is_some_and(is_part) && path.ends_with(".md")).then_some(path)
    })
}

#[test]
fn links_and_names_of_documents_lead_somewhere() {
    let found = problems(&Paths::find().unwrap());
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn what_leads_nowhere_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let file = dir.path().join(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    };
    write("docs/a.md", "# One\n[b](../b.md#two) [self](#one)\n");
    write("b.md", "# Two\n[a](docs/a.md) <https://c/docs/d.md>\n");
    write(
        "src/c.rs",
        "//! See docs/a.md. Not of docs: https://x.org/docs/e.md\n",
    );
    let paths = Paths::at(dir.path());
    assert_eq!(problems(&paths), Vec::<String>::new());
    write("b.md", "# Three\n[a](docs/z.md) [self](#two)\n");
    write("src/c.rs", "//! See docs/y.md.\n");
    let mut found = problems(&paths);
    found.sort();
    assert_eq!(
        found,
        [
            "b.md: docs/z.md does not exist",
            "b.md:2: #two: there is no such heading",
            "b.md:2: docs/z.md: there is no such file",
            "docs/a.md:2: ../b.md#two: there is no such heading",
            "src/c.rs: docs/y.md does not exist",
        ]
    );
}
