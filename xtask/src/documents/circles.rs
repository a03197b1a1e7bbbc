//! The modules of the crates that say so import each other in one direction only: whoever reads one of them has to know
//! what is below it, and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::Path;

use super::links::collect;

/// Without a circle between the modules at the crate's root. Each of these has its files as one module.
const CRATES: [&str; 2] = ["crates/memory/src", "crates/pager/src"];

/// What each module imports, by the modules' names.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// A part of a file's path as the name of a module.
fn name(part: &OsStr) -> Option<&str> {
    part.to_str().map(|name| name.trim_end_matches(".rs"))
}

fn imports(source: &Path) -> Imports {
    let mut files = Vec::new();
    collect(source, source, &mut files);
    let mut found = Imports::new();
    for file in &files {
        let Some(module) = file.iter().next().and_then(name) else {
            continue;
        };
        let is_rust = file.extension().is_some_and(|extension| extension == "rs");
        let is_test = file
            .iter()
            .filter_map(name)
            .any(|part| part.ends_with("tests"));
        if !is_rust || is_test || module == "lib" {
            continue;
        }
        let text = std::fs::read_to_string(source.join(file)).unwrap_or_default();
        // Tests are at the end of their file.
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let all = found.entry(module.to_owned()).or_default();
        for line in code
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"))
        {
            let paths = line.split("crate::").skip(1);
            let is_in_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
            let modules = paths.map(|path| path.split(|letter| !is_in_name(letter)).next());
            all.extend(
                modules
                    .flatten()
                    .filter(|other| *other != module)
                    .map(str::to_owned),
            );
        }
    }
    found
}

/// The modules that are in a circle, as far as they are left when those are taken away again and again that import
/// none of the others.
fn in_circles(mut imports: Imports) -> BTreeSet<String> {
    loop {
        let modules: BTreeSet<String> = imports.keys().cloned().collect();
        let before = imports.len();
        imports.retain(|_, its| its.iter().any(|other| modules.contains(other)));
        if imports.len() == before {
            return modules;
        }
    }
}

#[test]
fn modules_import_each_other_in_one_direction() {
    let root = crate::paths::Paths::find().unwrap();
    for source in CRATES {
        let imports = imports(&root.root().join(source));
        assert!(imports.len() > 10, "{source}: {imports:?}");
        let found = in_circles(imports);
        assert!(found.is_empty(), "{source}: a circle has some of {found:?}");
    }
}

#[test]
fn a_circle_is_found() {
    let imports = |edges: &[(&str, &[&str])]| -> Imports {
        let names = |all: &[&str]| all.iter().map(|&name| name.to_owned()).collect();
        edges
            .iter()
            .map(|&(from, to)| (from.to_owned(), names(to)))
            .collect()
    };
    let straight = imports(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &["std"])]);
    assert!(in_circles(straight).is_empty());
    let round = imports(&[("a", &["b"]), ("b", &["c"]), ("c", &["b"]), ("d", &[])]);
    assert_eq!(
        in_circles(round).into_iter().collect::<Vec<_>>(),
        ["a", "b", "c"]
    );
}
