//! kernel/mutations.list: what is undone of each patch, and which tests must then fail.

use anyhow::{Context, Result, bail};
use fs_err as fs;

use crate::kernel::Arch;
use crate::kernel::series::{Patch, Series};
use crate::paths::Paths;

/// What the list says of one patch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// `NN-topic/subject`: the patch's name without its number, which changes when patches are added.
    pub(crate) patch: String,
    pub(crate) lines: Vec<Line>,
}

/// One line of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Line {
    /// A change that makes tests fail.
    Mutation(Mutation),
    /// Why no test fails without the patch, or without a part of it.
    Untested(String),
    /// The patch changes no behaviour; for which one it prepares.
    Preparation(String),
}

/// A change of the series' code that undoes a part of a patch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mutation {
    pub(crate) arch: Arch,
    pub(crate) change: Change,
    /// All of them must fail.
    pub(crate) tests: Vec<Test>,
}

/// How the code is changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    /// The patch is taken back: all of its code, that of one file, or one hunk in it, counted from 1.
    Revert {
        file: Option<String>,
        hunk: Option<usize>,
    },
    /// kernel/mutations/NAME.patch is applied.
    Patch(String),
}

/// A test, and the machine that it runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Test {
    /// Kernel parameters.
    pub(crate) parameters: Vec<String>,
    pub(crate) program: String,
    pub(crate) arguments: Vec<String>,
}

/// What stands in a list in place of a selftest for the KUnit suite of that name.
const KUNIT: &str = "KUnit";

impl Entry {
    /// Whether this is the entry of a patch.
    pub(crate) fn is_of(&self, patch: &Patch) -> bool {
        unnumbered(&patch.name) == self.patch
    }

    pub(crate) fn mutations(&self) -> impl Iterator<Item = &Mutation> {
        self.lines.iter().filter_map(|line| match line {
            Line::Mutation(mutation) => Some(mutation),
            Line::Untested(_) | Line::Preparation(_) => None,
        })
    }
}

impl Mutation {
    /// The change, for people and for results.
    pub(crate) fn change_label(&self) -> String {
        let arch = match self.arch {
            Arch::X86_64 => "",
            Arch::Arm64 => "arm64: ",
        };
        let change = match &self.change {
            Change::Revert { file: None, .. } => "reverted".to_owned(),
            Change::Revert {
                file: Some(file),
                hunk,
            } => match hunk {
                Some(hunk) => format!("{file}, hunk {hunk}, reverted"),
                None => format!("{file} reverted"),
            },
            Change::Patch(name) => format!("mutations/{name}.patch"),
        };
        format!("{arch}{change}")
    }

    /// Whether it needs the kernel that runs KUnit, the debug kernel.
    pub(crate) fn is_debug(&self) -> bool {
        self.tests.iter().any(|test| test.kunit().is_some())
    }

    /// Whether it needs the kernel with upstream.config, which has NUMA nodes and more.
    pub(crate) fn needs_upstream_config(&self) -> bool {
        let parameters = self.tests.iter().flat_map(|test| &test.parameters);
        let mut names = parameters.filter_map(|parameter| parameter.split_once('='));
        names.any(|(name, _)| name == "numa")
    }

    fn parse(arch: Arch, what: &str, tests: &str) -> Result<Self> {
        let words: Vec<_> = what.split_whitespace().collect();
        let change = match words.as_slice() {
            ["revert"] => Change::Revert {
                file: None,
                hunk: None,
            },
            ["revert", file] => Change::Revert {
                file: Some((*file).to_owned()),
                hunk: None,
            },
            ["revert", file, hunk] => Change::Revert {
                file: Some((*file).to_owned()),
                hunk: Some(hunk.parse().with_context(|| format!("the hunk {hunk:?}"))?),
            },
            ["patch", name] if !name.contains('/') => Change::Patch((*name).to_owned()),
            _ => bail!("{what:?} is neither \"revert [FILE [HUNK]]\" nor \"patch NAME\""),
        };
        let tests = tests.split(',').map(Test::parse).collect::<Result<_>>()?;
        Ok(Self {
            arch,
            change,
            tests,
        })
    }
}

impl Test {
    /// As the list has it.
    pub(crate) fn label(&self) -> String {
        let program = std::slice::from_ref(&self.program);
        [&self.parameters[..], program, &self.arguments[..]]
            .concat()
            .join(" ")
    }

    /// The KUnit suite that it is.
    pub(crate) fn kunit(&self) -> Option<&str> {
        match self.arguments.as_slice() {
            [suite] if self.program == KUNIT => Some(suite),
            _ => None,
        }
    }

    fn parse(text: &str) -> Result<Self> {
        let mut words = text.split_whitespace().map(str::to_owned).peekable();
        let mut parameters = Vec::new();
        while let Some(parameter) = words.next_if(|word| word.contains('=')) {
            parameters.push(parameter);
        }
        Ok(Self {
            parameters,
            program: words.next().context("no test is named")?,
            arguments: words.collect(),
        })
    }
}

/// A patch's name without its number and its end.
pub(crate) fn unnumbered(name: &str) -> String {
    let (topic, file) = name.split_once('/').unwrap_or(("", name));
    let subject = file.split_once('-').map_or(file, |(_, subject)| subject);
    format!("{topic}/{}", subject.trim_end_matches(".patch"))
}

/// Reads the list. It has an entry for each patch with code that runs, in the order of the series.
pub(crate) fn read(paths: &Paths, series: &Series) -> Result<Vec<Entry>> {
    let file = paths.in_root("kernel/mutations.list");
    let entries = parse(&fs::read_to_string(&file)?).and_then(|entries| {
        complete(&entries, series)?;
        Ok(entries)
    });
    entries.with_context(|| format!("in {}", file.display()))
}

fn parse(text: &str) -> Result<Vec<Entry>> {
    let mut entries: Vec<Entry> = Vec::new();
    for line in text.lines() {
        let content = line.trim();
        if content.is_empty() || content.starts_with('#') {
            continue;
        }
        if line == line.trim_start() {
            entries.push(Entry {
                patch: content.to_owned(),
                lines: Vec::new(),
            });
            continue;
        }
        let entry = entries
            .last_mut()
            .with_context(|| format!("{content:?} comes before any patch"))?;
        let parsed = parse_line(content).with_context(|| format!("{content:?}"))?;
        entry.lines.push(parsed);
    }
    Ok(entries)
}

fn parse_line(line: &str) -> Result<Line> {
    let (what, rest) = line
        .split_once(": ")
        .context("is not of the form \"WHAT: TESTS\" or \"WHAT: REASON\"")?;
    let reason = || rest.trim().to_owned();
    Ok(match what.strip_prefix("arm64 ") {
        Some(what) => Line::Mutation(Mutation::parse(Arch::Arm64, what, rest)?),
        None if what == "untested" => Line::Untested(reason()),
        None if what == "preparation" => Line::Preparation(reason()),
        None => Line::Mutation(Mutation::parse(Arch::X86_64, what, rest)?),
    })
}

/// An error unless the entries are those of the series' patches with code that runs.
fn complete(entries: &[Entry], series: &Series) -> Result<()> {
    let wanted = series.patches.iter().filter(|patch| patch.is_functional());
    let mut entries = entries.iter();
    for patch in wanted {
        let name = unnumbered(&patch.name);
        match entries.next() {
            Some(entry) if entry.patch != name => bail!(
                "{:?} stands where {name:?} is expected: the list has each patch with code that \
                 runs once, in the series' order",
                entry.patch
            ),
            Some(entry) if entry.lines.is_empty() => bail!("{name:?} has no line"),
            Some(_) => {}
            None => bail!("{name:?} is missing"),
        }
    }
    match entries.next() {
        Some(entry) => bail!(
            "{:?} is no patch of the series with code that runs",
            entry.patch
        ),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::selftests;

    const LIST: &str = "\
# a comment
01-a/b
    revert: x_test, kvm_amd.npt=0 y_test -t 1
    revert mm/a.c 2: KUnit memory-failure
    arm64 patch c: x_test
    revert mm/a.c: numa=fake=2 x_test
    untested: the error path
01-a/d
    preparation: for e
";

    fn series(names: &[&str]) -> Series {
        let patch = |name: &&str| Patch {
            name: (*name).to_owned(),
            content: b"\ndiff --git a/mm/a.c b/mm/a.c\n+x\n".to_vec(),
        };
        Series {
            patches: names.iter().map(patch).collect(),
        }
    }

    #[test]
    fn an_entry_has_changes_tests_and_reasons() {
        let entries = parse(LIST).unwrap();
        assert_eq!(entries.len(), 2);
        let mutations: Vec<_> = entries[0].mutations().collect();
        let labels: Vec<_> = mutations.iter().map(|m| m.change_label()).collect();
        assert_eq!(
            labels,
            [
                "reverted",
                "mm/a.c, hunk 2, reverted",
                "arm64: mutations/c.patch",
                "mm/a.c reverted"
            ]
        );
        let second = &mutations[0].tests[1];
        assert_eq!(second.parameters, ["kvm_amd.npt=0"]);
        assert_eq!(second.arguments, ["-t", "1"]);
        assert_eq!(second.label(), "kvm_amd.npt=0 y_test -t 1");
        assert!(mutations[1].is_debug() && !mutations[0].is_debug());
        assert_eq!(mutations[1].tests[0].kunit(), Some("memory-failure"));
        assert!(mutations[3].needs_upstream_config() && !mutations[0].needs_upstream_config());
        assert_eq!(entries[0].lines[4], Line::Untested("the error path".into()));
        assert_eq!(entries[1].lines, [Line::Preparation("for e".into())]);
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [
            "    revert: x\n",
            "a\n    undo: x\n",
            "a\n    revert x\n",
            "a\n    revert: x,\n",
            "a\n    revert a.c two: x\n",
            "a\n    patch ../x: x\n",
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn every_patch_with_code_that_runs_has_one_entry() {
        let entries = parse(LIST).unwrap();
        let check = |names: &[&str]| complete(&entries, &series(names));
        check(&["01-a/0001-b.patch", "01-a/0007-d.patch"]).unwrap();
        assert!(check(&["01-a/0001-b.patch"]).is_err());
        assert!(check(&["01-a/0001-d.patch", "01-a/0002-b.patch"]).is_err());
        let more = [
            "01-a/0001-b.patch",
            "01-a/0002-d.patch",
            "02-e/0001-f.patch",
        ];
        let error = check(&more).unwrap_err().to_string();
        assert!(error.contains("02-e/f"), "{error}");
        let empty = parse("01-a/b\n").unwrap();
        assert!(complete(&empty, &series(&more[..1])).is_err());
    }

    /// The checkout's own list: complete, its tests are built, its patches are there, and no other.
    #[test]
    fn the_list_fits_the_series() {
        let paths = Paths::find().unwrap();
        let entries = read(&paths, &Series::read(&paths).unwrap()).unwrap();
        let mut patches = Vec::new();
        for mutation in entries.iter().flat_map(Entry::mutations) {
            let known = selftests::list(mutation.arch, &paths).unwrap();
            for test in &mutation.tests {
                let is_known = known.iter().any(|known| known.name() == test.program);
                assert!(is_known || test.kunit().is_some(), "{}", test.label());
            }
            if let Change::Patch(name) = &mutation.change {
                patches.push(format!("{name}.patch"));
            }
        }
        let directory = fs::read_dir(paths.in_root("kernel/mutations")).unwrap();
        let names = directory.map(|file| file.unwrap().file_name());
        let mut files: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
        files.sort();
        patches.sort();
        patches.dedup();
        assert_eq!(files, patches);
    }
}
