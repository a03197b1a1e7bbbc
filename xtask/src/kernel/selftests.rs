//! The kernel's selftests: which ones, and how they are built.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use fs_err as fs;

use super::make::{self, is_object};
use super::tree::Tree;
use super::{Arch, Variant, build};
use crate::files;
use crate::paths::Paths;
use crate::progress::Progress;

/// A directory of selftests with a makefile of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Suite {
    /// KVM's
    Kvm,
    /// Those of memory management
    Mm,
}

impl Suite {
    const ALL: [Self; 2] = [Self::Kvm, Self::Mm];

    /// Where the tests are in the source.
    pub(super) fn directory(self) -> &'static str {
        match self {
            Self::Kvm => "tools/testing/selftests/kvm",
            Self::Mm => "tools/testing/selftests/mm",
        }
    }

    /// Where they are built, in a build directory.
    fn output(self) -> &'static str {
        match self {
            Self::Kvm => "selftests-kvm",
            Self::Mm => "selftests-mm",
        }
    }
}

/// Which steps of `cargo xtask test` run a selftest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Runs {
    /// All that run selftests.
    Always,
    /// `debug`: it takes long.
    Debug,
    /// None.
    Never,
}

/// One line of kernel/selftests.list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Selftest {
    /// The suite that it is part of.
    pub(crate) suite: Suite,
    /// The path below the suite's directory, without ".c".
    pub(crate) source: String,
    /// Only for this architecture.
    pub(crate) arch: Option<Arch>,
    pub(crate) runs: Runs,
    /// Whether it runs once more with shadow paging, i.e. without nested page tables.
    pub(crate) shadow: bool,
    /// Whether it comes with the series, so that the stock tree lacks it.
    pub(crate) ours: bool,
    /// What it is run with.
    pub(crate) arguments: Vec<String>,
}

impl Selftest {
    /// The program's name.
    pub(crate) fn name(&self) -> &str {
        self.source
            .rsplit_once('/')
            .map_or(&self.source, |(_, name)| name)
    }

    /// Its name and what it is run with, for people.
    pub(crate) fn label(&self) -> String {
        [&[self.name().to_owned()], self.arguments.as_slice()]
            .concat()
            .join(" ")
    }

    /// Whether a tree has its source.
    pub(super) fn is_in(&self, tree: &Tree) -> bool {
        let directory = tree.path().join(self.suite.directory());
        directory.join(format!("{}.c", self.source)).exists()
    }

    /// Whether one of these files is in its suite's directory.
    pub(super) fn is_near(&self, files: &[String]) -> bool {
        let directory = self.suite.directory();
        files
            .iter()
            .any(|file| Path::new(file).starts_with(directory))
    }

    /// The program, in a build directory.
    fn program(&self, build: &Path) -> PathBuf {
        build.join(self.suite.output()).join(&self.source)
    }

    fn parse(line: &str) -> Result<Self> {
        let (head, arguments) = line.split_once(" -- ").unwrap_or((line, ""));
        let mut words = head.split_whitespace();
        let named = words.next().context("no test named")?;
        let (suite, source) = match named.strip_prefix("mm/") {
            Some(source) => (Suite::Mm, source),
            None => (Suite::Kvm, named),
        };
        let mut test = Self {
            suite,
            source: source.to_owned(),
            arch: None,
            runs: Runs::Always,
            shadow: false,
            ours: false,
            arguments: Vec::new(),
        };
        for word in words {
            match word {
                "arch=x86_64" => test.arch = Some(Arch::X86_64),
                "arch=arm64" => test.arch = Some(Arch::Arm64),
                "run=no" => test.runs = Runs::Never,
                "run=debug" => test.runs = Runs::Debug,
                "shadow" => test.shadow = true,
                "series" => test.ours = true,
                _ => bail!("{word:?} is not known"),
            }
        }
        test.arguments = arguments.split_whitespace().map(str::to_owned).collect();
        Ok(test)
    }
}

/// The list's file.
pub(super) fn list_file(paths: &Paths) -> PathBuf {
    paths.in_root("kernel/selftests.list")
}

/// What it says.
pub(super) fn list_text(paths: &Paths) -> Result<String> {
    Ok(fs::read_to_string(list_file(paths))?)
}

/// The tests of an architecture.
pub(crate) fn list(arch: Arch, paths: &Paths) -> Result<Vec<Selftest>> {
    let mut tests =
        parse(&list_text(paths)?).with_context(|| format!("in {}", list_file(paths).display()))?;
    tests.retain(|test| test.arch.is_none_or(|only| only == arch));
    Ok(tests)
}

fn parse(text: &str) -> Result<Vec<Selftest>> {
    let tests = files::lines(text)
        .map(|line| Selftest::parse(line).with_context(|| format!("{line:?}")))
        .collect::<Result<Vec<_>>>()?;
    // All programs are put in one directory, whatever theirs was.
    let mut sources = BTreeMap::new();
    for test in &tests {
        let source = (test.suite.directory(), test.source.as_str());
        let first = sources.entry(test.name()).or_insert(source);
        if *first != source {
            let shown = |(directory, name): (&str, &str)| format!("{directory}/{name}");
            bail!("{} and {} have the same name", shown(*first), shown(source));
        }
    }
    Ok(tests)
}

/// Where a kernel's selftests are put.
pub(crate) fn directory(variant: Variant, paths: &Paths) -> PathBuf {
    variant.out(paths).join("selftests")
}

/// Builds the listed tests and puts them where [`directory`] says.
pub(super) fn build(variant: Variant, paths: &Paths, tree: &Tree, build: &Path) -> Result<()> {
    let out = directory(variant, paths);
    files::fresh_dir(&out)?;
    let mut tests = list(variant.arch, paths)?;
    tests.retain(|test| !(variant.stock && test.ours));
    for test in &tests {
        if !test.is_in(tree) {
            let (source, directory) = (&test.source, test.suite.directory());
            bail!("kernel/selftests.list names {source}.c in {directory}, which the tree lacks");
        }
    }
    let what = format!("building the {} selftests", variant.name());
    let progress = Progress::start(&what, None, is_compile);
    let log = build::log(variant, paths);
    compile(variant.arch, paths, tree, build, &tests, &log, &progress)?;
    progress.done();
    for test in &tests {
        fs::copy(test.program(build), out.join(test.name()))?;
    }
    Ok(())
}

/// Compiles tests in a build directory, static so that an initramfs can hold them, with the headers
/// that are installed there.
pub(super) fn compile(
    arch: Arch,
    paths: &Paths,
    tree: &Tree,
    build: &Path,
    tests: &[Selftest],
    log: &Path,
    progress: &Progress,
) -> Result<()> {
    for suite in Suite::ALL {
        // A test may be listed more than once, with other arguments.
        let programs: BTreeSet<_> = tests
            .iter()
            .filter(|test| test.suite == suite)
            .map(|test| test.program(build))
            .collect();
        if programs.is_empty() {
            continue;
        }
        let output = build.join(suite.output());
        fs::create_dir_all(&output)?;
        let run = make::in_directory(&tree.path().join(suite.directory()));
        make::settings(run, paths, arch, tree.path())
            .arg(format!("OUTPUT={}", output.display()))
            .arg(format!(
                "KHDR_INCLUDES=-isystem {}/usr/include",
                build.display()
            ))
            .arg("LDLIBS=-static -ldl -pthread")
            .args(programs)
            .logged(log, progress)?;
    }
    Ok(())
}

/// KVM's makefile prints whole command lines.
fn is_compile(line: &str) -> bool {
    is_object(line) || line.contains("gcc ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_source_words_and_arguments() {
        let tests =
            parse("# x\na_test\nx86_64/b_test arch=x86_64 run=no -- -v 2\nc series\n").unwrap();
        assert_eq!(tests.len(), 3);
        assert_eq!((tests[0].name(), tests[0].runs), ("a_test", Runs::Always));
        assert_eq!(
            (tests[1].name(), tests[1].arch),
            ("b_test", Some(Arch::X86_64))
        );
        assert_eq!(tests[1].arguments, ["-v", "2"]);
        assert!(tests[1].runs == Runs::Never && tests[2].ours);
        assert_eq!(parse("d run=debug\n").unwrap()[0].runs, Runs::Debug);
        assert!(parse("a_test arch=riscv\n").is_err());
    }

    #[test]
    fn a_prefix_names_the_suite() {
        let tests = parse("mm/a-b series -- -n 1\nx86_64/c_test\n").unwrap();
        assert_eq!((tests[0].suite, tests[0].name()), (Suite::Mm, "a-b"));
        assert_eq!(tests[0].label(), "a-b -n 1");
        assert_eq!(
            (tests[1].suite, tests[1].source.as_str()),
            (Suite::Kvm, "x86_64/c_test")
        );
        let build = Path::new("/b");
        assert_eq!(tests[0].program(build), Path::new("/b/selftests-mm/a-b"));
        assert!(tests[0].is_near(&["tools/testing/selftests/mm/Makefile".into()]));
        assert!(!tests[0].is_near(&["tools/testing/selftests/mm_other/a".into()]));
        assert!(!tests[0].is_near(&["tools/testing/selftests/kvm/Makefile".into()]));
    }

    #[test]
    fn no_program_overwrites_another() {
        assert!(parse("a_test\na_test -- -v\n").is_ok());
        assert!(parse("a_test\nx86_64/a_test\n").is_err());
        assert!(parse("a_test\nmm/a_test\n").is_err());
    }
}
