//! Functions by their places in the source, and the document that lists them.

use std::fmt::Write;

use crate::items::{ident, item};

/// A function of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Function {
    /// Its file, below crates/.
    pub(super) file: String,
    /// With its type, or without, for one that has none.
    pub(super) name: String,
    /// The lines of code in its body.
    lines: usize,
}

impl Function {
    /// The function that begins at a line, counted from 1, of a file with this text. `None` if none does: a derived
    /// function has the line of its `derive`.
    pub(super) fn at(file: &str, text: &str, line: usize) -> Option<Self> {
        let lines: Vec<_> = text.lines().collect();
        let at = line.checked_sub(1)?;
        let (_, behind) = lines.get(at)?.split_once("fn ")?;
        let indentation = |line: &str| line.len() - line.trim_start().len();
        let own = indentation(lines.get(at)?);
        let outer = lines.get(..at)?.iter().rev().copied();
        let mut outer = outer.filter(|line| !line.trim().is_empty() && indentation(line) < own);
        let kind = outer.next().and_then(|line| item(line.trim_start()));
        // A macro's parameter is no type.
        let kind = kind.filter(|kind| !kind.starts_with('$'));
        let name = ident(behind);
        Some(Self {
            file: file.to_owned(),
            name: kind.map_or_else(|| name.to_owned(), |kind| format!("{kind}::{name}")),
            lines: body(lines.get(at..)?, own),
        })
    }

    /// Whether its body is one line at most, such as a field's: its name says it all.
    fn is_short(&self) -> bool {
        self.lines <= 1
    }
}

/// The lines of code in the body of the function that `lines` begin with: rustfmt has laid them out.
fn body(lines: &[&str], indentation: usize) -> usize {
    let end = format!("{:indentation$}}}", "");
    let behind = lines.iter().skip_while(|line| !line.ends_with('{'));
    let inner = behind.skip(1).take_while(|line| **line != end);
    let is_code = |line: &&&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
    inner.filter(is_code).count()
}

const HEAD: &str = "\
# The functions of a fault

`cargo xtask trace` writes this file, from a recorded trace of one fault of each kind
(`crates/vmm/examples/one_fault.rs`) in a build without optimisation. It has the functions of our crates that were
entered, each once, in the order in which they were entered first. A closure belongs to the function around it, and a
derived function has no code to read. The *short* ones have one line, such as the name of a field: who reads the path
need not go there.
";

/// The document.
pub(super) fn document(kinds: &[(&str, Vec<Function>)]) -> String {
    let mut text = HEAD.to_owned();
    for (title, functions) in kinds {
        let long: Vec<_> = functions.iter().filter(|it| !it.is_short()).collect();
        let short: Vec<_> = functions.iter().filter(|it| it.is_short()).collect();
        let all: Vec<_> = functions.iter().collect();
        let _ = write!(
            text,
            "\n## {title}\n\n{} functions in {} files; without the short ones {} in {}.\n\n\
             | file | functions |\n|---|---|\n",
            all.len(),
            files(&all).len(),
            long.len(),
            files(&long).len(),
        );
        for (file, names) in files(&long) {
            let _ = writeln!(text, "| {file} | {} |", names.join(", "));
        }
        let names: Vec<_> = files(&short)
            .into_iter()
            .flat_map(|(_, names)| names)
            .collect();
        let _ = writeln!(text, "\nShort: {}.", names.join(", "));
    }
    text
}

/// The files, in the order in which their functions come first.
fn files<'f>(functions: &[&'f Function]) -> Vec<(&'f str, Vec<String>)> {
    let mut files: Vec<(&str, Vec<String>)> = Vec::new();
    for function in functions {
        let name = format!("`{}`", function.name);
        match files.iter_mut().find(|(file, _)| *file == function.file) {
            Some((_, names)) => names.push(name),
            None => files.push((&function.file, vec![name])),
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
impl<T> Drop for Use<T> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(false);
    }

    pub(crate) fn call<R>(
        &self,
        user: impl FnOnce() -> R,
    ) -> R {
        // Not counted.
        let _use = self;

        user()
    }
}

#[derive(Clone)]
struct Other;

fn free() {}
";

    fn at(line: usize) -> Option<(String, usize)> {
        let function = Function::at("a.rs", TEXT, line)?;
        Some((function.name, function.lines))
    }

    #[test]
    fn a_function_is_found_by_its_line() {
        assert_eq!(at(3), Some(("Use::drop".into(), 1)));
        assert_eq!(at(7), Some(("Use::call".into(), 2)));
        assert_eq!(at(21), Some(("free".into(), 0)));
        assert_eq!([at(0), at(1), at(18), at(100)], [None, None, None, None]);
    }

    #[test]
    fn files_keep_the_order_of_their_first_functions() {
        let function = |file: &str, name: &str, lines| Function {
            file: file.into(),
            name: name.into(),
            lines,
        };
        let entered = [
            function("b.rs", "B::x", 2),
            function("a.rs", "y", 3),
            function("b.rs", "B::z", 2),
            function("c.rs", "C::len", 1),
        ];
        let text = document(&[("A fault", entered.to_vec())]);
        let end = "## A fault\n\n4 functions in 3 files; without the short ones 3 in 2.\n\n\
                   | file | functions |\n|---|---|\n| b.rs | `B::x`, `B::z` |\n| a.rs | `y` |\n\n\
                   Short: `C::len`.\n";
        assert!(text.ends_with(end), "{text}");
    }
}
