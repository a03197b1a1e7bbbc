//! The names of members, as `Type::function`, that the design documents mention: each exists.

use std::collections::BTreeSet;
use std::path::Path;

use super::links::collect;
use super::markdown::code_spans;
use crate::items::{ident, item};
use crate::paths::Paths;

/// A type and one of its functions or fields.
type Member = (String, String);

/// What the design documents mention that no type has.
fn problems(paths: &Paths) -> Vec<String> {
    let mut files = Vec::new();
    collect(paths.root(), paths.root(), &mut files);
    let read = |file: &Path| std::fs::read_to_string(paths.root().join(file));
    let mut known = BTreeSet::new();
    let code = files
        .iter()
        .filter(|file| file.extension().is_some_and(|extension| extension == "rs"));
    for text in code.filter_map(|file| read(file).ok()) {
        known.extend(members(&text));
    }
    let mut found = Vec::new();
    for file in &files {
        let is_document = file.extension().is_some_and(|extension| extension == "md");
        if !is_document || !file.starts_with("docs/design") {
            continue;
        }
        let text = read(file).unwrap_or_default();
        for (kind, name) in mentioned(&text) {
            if !known.contains(&(kind.clone(), name.clone())) {
                found.push(format!("{}: there is no {kind}::{name}", file.display()));
            }
        }
    }
    found
}

/// The members that a document names in code.
fn mentioned(text: &str) -> Vec<Member> {
    let spans = code_spans(text).into_iter();
    spans.filter_map(|(span, _)| member(span)).collect()
}

/// `Type::function`, perhaps with what the call takes, or with the module of the type before.
fn member(span: &str) -> Option<Member> {
    let path = span.split('(').next()?;
    let (kind, name) = path.rsplit_once("::")?;
    let kind = kind.rsplit("::").next()?;
    let is_type = kind.starts_with(|first: char| first.is_ascii_uppercase())
        && kind.contains(|letter: char| letter.is_ascii_lowercase())
        && kind.chars().all(|letter| letter.is_ascii_alphanumeric());
    let is_name = name.starts_with(|first: char| first.is_ascii_lowercase())
        && name
            .chars()
            .all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_');
    (is_type && is_name).then(|| (kind.to_owned(), name.to_owned()))
}

/// The functions and fields of the types in a file that rustfmt has laid out: an item ends at the brace with its own
/// indentation.
fn members(text: &str) -> BTreeSet<Member> {
    let mut found = BTreeSet::new();
    let mut items: Vec<(String, usize)> = Vec::new();
    for line in text.lines() {
        let words = line.trim_start();
        let indentation = line.len() - words.len();
        if let Some(kind) = item(words) {
            if line.ends_with('{') || !line.ends_with(['}', ';']) {
                items.push((kind, indentation));
            }
            continue;
        }
        if words.starts_with('}') && items.last().is_some_and(|(_, at)| *at == indentation) {
            items.pop();
            continue;
        }
        let Some((kind, at)) = items.last() else {
            continue;
        };
        if indentation != at + 4 {
            continue;
        }
        let name = match words.split_once("fn ") {
            Some((_, behind)) => ident(behind),
            None => {
                let visible = words.strip_prefix("pub(crate) ");
                let visible = visible.or_else(|| words.strip_prefix("pub(super) "));
                let field = visible
                    .or_else(|| words.strip_prefix("pub "))
                    .unwrap_or(words);
                let name = ident(field);
                match field.get(name.len()..) {
                    Some(behind) if behind.starts_with(": ") => name,
                    _ => continue,
                }
            }
        };
        found.insert((kind.clone(), name.to_owned()));
    }
    found
}

#[test]
fn the_design_documents_name_members_that_exist() {
    assert_eq!(problems(&Paths::find().unwrap()), Vec::<String>::new());
}

#[test]
fn members_are_found_in_formatted_code() {
    let text = "pub(crate) struct Pager {\n    me: Weak<Self>,\n    pub(crate) due: u64,\n}\n\n\
                impl<O: Fn() -> u8> Gate<O> {\n    pub(crate) fn enter(&self) {\n        let not: u8 = 1;\n    }\n}\n\
                unsafe impl Send for Gate<u8> {}\n\
                impl fmt::Debug for Pager {\n    fn fmt(&self) {}\n}\n\
                mod inner {\n    impl super::Walk {\n        unsafe fn step() {}\n    }\n}\nfn free() {}\n";
    let found: Vec<_> = members(text)
        .into_iter()
        .map(|(kind, name)| format!("{kind}::{name}"))
        .collect();
    let expected = [
        "Gate::enter",
        "Pager::due",
        "Pager::fmt",
        "Pager::me",
        "Walk::step",
    ];
    assert_eq!(found, expected);
}

#[test]
fn members_are_told_from_other_code() {
    let text = "`Pager::add`, `pager::Serving::process_ready(…)`, `KVM_RUN`, `Method::List`, `std::fs`, `a::b`, \
                `UFFD::x`";
    let found: Vec<_> = mentioned(text)
        .into_iter()
        .map(|(kind, name)| format!("{kind}::{name}"))
        .collect();
    assert_eq!(found, ["Pager::add", "Serving::process_ready"]);
}
