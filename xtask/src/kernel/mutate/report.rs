//! Results: kernel/mutations.json, and the table in kernel/README.md that is made from them.

use std::collections::HashMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use fs_err as fs;
use serde::{Deserialize, Serialize};

use super::list::{Entry, Line, Mutation, Test};
use super::outcome::Verdict;
use crate::paths::Paths;

/// The lines of kernel/README.md between which the table is written.
const BEGIN: &str = "<!-- written by `cargo xtask kernel mutate` -->";
const END: &str = "<!-- end of what `cargo xtask kernel mutate` writes -->";

/// What became of one test of one mutation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The patch's name without its number.
    pub(crate) patch: String,
    pub(crate) change: String,
    pub(crate) test: String,
    /// Of the change and of how the test is called: the result is current as long as it is the same.
    pub(crate) digest: String,
    pub(crate) verdict: Verdict,
}

/// The digests that results have to have, or they are of another change, another test or another base.
#[derive(Debug, Default)]
pub(crate) struct Digests(HashMap<[String; 3], String>);

impl Digests {
    pub(crate) fn add(&mut self, test: &Key<'_>, digest: String) {
        self.0.insert(test.names(), digest);
    }

    /// Empty if there is no such test.
    pub(crate) fn of(&self, test: &Key<'_>) -> &str {
        self.0.get(&test.names()).map_or("", String::as_str)
    }
}

/// All results, of this run and of those before.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Results {
    records: Vec<Record>,
}

impl Results {
    pub(crate) fn read(paths: &Paths) -> Result<Self> {
        let file = file(paths);
        let text = crate::files::text_if_any(&file)?;
        let records = match text.as_str() {
            "" => Vec::new(),
            text => {
                serde_json::from_str(text).with_context(|| format!("read {}", file.display()))?
            }
        };
        Ok(Self { records })
    }

    /// The result of a test of a mutation, unless either has changed since.
    pub(crate) fn current(&self, test: &Key<'_>, digest: &str) -> Option<&Verdict> {
        let record = self.records.iter().find(|record| test.is_of(record))?;
        (record.digest == digest).then_some(&record.verdict)
    }

    /// Takes a result in place of an older one.
    pub(crate) fn add(&mut self, test: &Key<'_>, digest: &str, verdict: Verdict) {
        self.records.retain(|record| !test.is_of(record));
        self.records.push(Record {
            patch: test.entry.patch.clone(),
            change: test.mutation.change_label(),
            test: test.test.label(),
            digest: digest.to_owned(),
            verdict,
        });
    }

    /// Drops results of what the list does not have any more, and puts the others in its order.
    pub(crate) fn sort(&mut self, entries: &[Entry]) {
        let mut sorted = Vec::new();
        for key in keys(entries) {
            sorted.extend(
                self.records
                    .iter()
                    .find(|record| key.is_of(record))
                    .cloned(),
            );
        }
        self.records = sorted;
    }

    /// As JSON.
    pub(crate) fn json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(&self.records)? + "\n")
    }

    /// Writes kernel/mutations.json, and the table in kernel/README.md.
    pub(crate) fn write(&self, entries: &[Entry], current: &Digests, paths: &Paths) -> Result<()> {
        fs::write(file(paths), self.json()?)?;
        let readme = paths.in_root("kernel/README.md");
        let text = fs::read_to_string(&readme)?;
        let text = replaced(&text, &self.table(entries, current));
        let text = text.with_context(|| readme.display().to_string())?;
        Ok(fs::write(&readme, text)?)
    }

    /// What each patch's tests say, and of which patches no test fails. A result that is not current counts as none.
    pub(crate) fn table(&self, entries: &[Entry], current: &Digests) -> String {
        let mut rows = String::from(
            "| patch | what is undone | test | what fails then |\n|---|---|---|---|\n",
        );
        let (mut untested, mut preparations) = (String::new(), String::new());
        let (mut red, mut ran, mut count) = (0, 0, 0);
        for entry in entries {
            let patch = cell(&entry.patch);
            for line in &entry.lines {
                match line {
                    Line::Mutation(mutation) => {
                        for test in &mutation.tests {
                            let key = Key {
                                entry,
                                mutation,
                                test,
                            };
                            let verdict = self.current(&key, current.of(&key));
                            count += 1;
                            ran += usize::from(verdict.is_some());
                            red += usize::from(verdict.is_some_and(Verdict::is_red));
                            rows += &format!(
                                "| {patch} | {} | `{}` | {} |\n",
                                cell(&mutation.change_label()),
                                cell(&test.label()),
                                cell(&told(verdict))
                            );
                        }
                    }
                    Line::Untested(reason) => {
                        untested += &format!("| {patch} | {} |\n", cell(reason));
                    }
                    Line::Preparation(reason) => {
                        preparations += &format!("| {patch} | {} |\n", cell(reason));
                    }
                }
            }
        }
        format!(
            "\nOf {count} tests, {ran} were run on this base, and {red} of these failed as they should.\n\n{rows}\n\
             Without a test that fails:\n\n| patch | why |\n|---|---|\n{untested}\n\
             Without a change of behavior:\n\n| patch | for what |\n|---|---|\n{preparations}\n"
        )
    }
}

/// One test of a mutation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Key<'a> {
    pub(crate) entry: &'a Entry,
    pub(crate) mutation: &'a Mutation,
    pub(crate) test: &'a Test,
}

impl Key<'_> {
    fn names(&self) -> [String; 3] {
        [
            self.entry.patch.clone(),
            self.mutation.change_label(),
            self.test.label(),
        ]
    }

    fn is_of(&self, record: &Record) -> bool {
        record.patch == self.entry.patch
            && record.change == self.mutation.change_label()
            && record.test == self.test.label()
    }
}

/// Every test of every mutation.
pub(crate) fn keys(entries: &[Entry]) -> impl Iterator<Item = Key<'_>> {
    entries.iter().flat_map(|entry| {
        entry.mutations().flat_map(move |mutation| {
            let key = move |test| Key {
                entry,
                mutation,
                test,
            };
            mutation.tests.iter().map(key)
        })
    })
}

fn told(verdict: Option<&Verdict>) -> String {
    match verdict {
        Some(Verdict::Red(what)) => what.clone(),
        Some(Verdict::Green) => "**nothing**".to_owned(),
        Some(Verdict::Nothing(why)) => format!("**unknown**: {why}"),
        None => "not run yet on this base".to_owned(),
    }
}

/// Text for a cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;")
}

fn file(paths: &Paths) -> PathBuf {
    paths.in_root("kernel/mutations.json")
}

/// The text with another table.
fn replaced(text: &str, table: &str) -> Result<String> {
    let lacks = |mark: &str| format!("it lacks the line {mark:?}");
    let (head, rest) = text.split_once(BEGIN).with_context(|| lacks(BEGIN))?;
    let (_, tail) = rest.split_once(END).with_context(|| lacks(END))?;
    Ok(format!("{head}{BEGIN}\n{table}\n{END}{tail}"))
}

#[cfg(test)]
mod tests {
    use super::super::list::Change;
    use super::*;
    use crate::kernel::Arch;
    use crate::kernel::series::Series;
    use crate::kernel::source::Base;

    fn entries() -> Vec<Entry> {
        let test = |program: &str| Test {
            parameters: Vec::new(),
            program: program.into(),
            arguments: Vec::new(),
        };
        let mutation = Mutation {
            arch: Arch::X86_64,
            change: Change::Patch("c".into()),
            tests: vec![test("a_test"), test("b_test")],
        };
        vec![Entry {
            patch: "01-a/b".into(),
            lines: vec![
                Line::Mutation(mutation),
                Line::Untested("a | race".into()),
                Line::Preparation("c".into()),
            ],
        }]
    }

    #[test]
    fn results_are_kept_until_something_changes() {
        let top = tempfile::tempdir().unwrap();
        let paths = Paths::at(top.path());
        std::fs::create_dir(top.path().join("kernel")).unwrap();
        let readme = top.path().join("kernel/README.md");
        std::fs::write(&readme, format!("a\n{BEGIN}\nold\n{END}\nb\n")).unwrap();
        let entries = entries();
        let keys: Vec<_> = keys(&entries).collect();

        let mut results = Results::read(&paths).unwrap();
        assert_eq!(results, Results::default());
        results.add(&keys[1], "1", Verdict::Green);
        results.add(&keys[0], "1", Verdict::Nothing("lost".into()));
        results.add(&keys[0], "2", Verdict::Red("a < b".into()));
        results.sort(&entries);
        let mut current = Digests::default();
        for (key, digest) in keys.iter().zip(["2", "1"]) {
            current.add(key, digest.into());
        }
        results.write(&entries, &current, &paths).unwrap();
        let mut again = Results::read(&paths).unwrap();
        assert_eq!(again, results);
        assert!(again.current(&keys[0], "2").unwrap().is_red());
        assert_eq!(again.current(&keys[0], "1"), None);

        let text = std::fs::read_to_string(&readme).unwrap();
        for part in [
            "Of 2 tests, 2 were run on this base, and 1 of these failed as they should.\n",
            "| 01-a/b | mutations/c.patch | `a_test` | a &lt; b |\n",
            "| 01-a/b | mutations/c.patch | `b_test` | **nothing** |\n",
            "| 01-a/b | a \\| race |\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        assert!(text.starts_with("a\n") && text.ends_with(&format!("{END}\nb\n")));
        assert!(!text.contains("old"));
        results.write(&entries, &current, &paths).unwrap();
        assert_eq!(std::fs::read_to_string(&readme).unwrap(), text);
        // On another base.
        let table = results.table(&entries, &Digests::default());
        assert!(
            table.contains("Of 2 tests, 0 were run on this base"),
            "{table}"
        );
        assert!(
            table.contains("| `a_test` | not run yet on this base |"),
            "{table}"
        );
        again.sort(&[]);
        assert_eq!(again, Results::default());
    }

    #[test]
    fn a_readme_without_marks_is_refused() {
        assert!(replaced(&format!("{BEGIN}\n"), "").is_err());
        assert!(replaced(&format!("{END}\n"), "").is_err());
    }

    /// What the checkout's README says is what its list and its results say.
    #[test]
    fn the_readme_is_current() {
        let paths = Paths::find().unwrap();
        let series = Series::read(&paths).unwrap();
        let entries = super::super::list::read(&paths, &series).unwrap();
        let base = Base::read(&paths).unwrap();
        let current = super::super::digests(&entries, &series, base.tree(), &paths).unwrap();
        let text = std::fs::read_to_string(paths.in_root("kernel/README.md")).unwrap();
        let mut results = Results::read(&paths).unwrap();
        let before = results.json().unwrap();
        results.sort(&entries);
        let sorted = results.json().unwrap();
        assert!(sorted == before, "run `cargo xtask kernel mutate --table`");
        let table = replaced(&text, &results.table(&entries, &current)).unwrap();
        assert!(table == text, "run `cargo xtask kernel mutate --table`");
    }
}
