//! kernel/upstream.list, and what KVM's makefile adds to it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use fs_err as fs;

use crate::files;
use crate::kernel::Arch;
use crate::kernel::selftests::{Selftest, Suite};
use crate::paths::Paths;

/// What the list says of an architecture.
#[derive(Debug)]
pub(super) struct List {
    arch: Arch,
    tests: Vec<Selftest>,
    quick: Vec<Selftest>,
    left_out: BTreeMap<String, String>,
    differs: BTreeMap<String, Difference>,
}

/// How a test fails on the series, and why it has to.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Difference {
    /// What it then prints.
    pub(super) text: String,
    pub(super) reason: String,
}

impl List {
    pub(super) fn read(arch: Arch, paths: &Paths) -> Result<Self> {
        let file = paths.in_root("kernel/upstream.list");
        Self::parse(&fs::read_to_string(&file)?, arch)
            .with_context(|| format!("in {}", file.display()))
    }

    fn parse(text: &str, arch: Arch) -> Result<Self> {
        let mut list = Self {
            arch,
            tests: Vec::new(),
            quick: Vec::new(),
            left_out: BTreeMap::new(),
            differs: BTreeMap::new(),
        };
        for line in files::lines(text) {
            list.line(line).with_context(|| format!("{line:?}"))?;
        }
        Ok(list)
    }

    fn line(&mut self, line: &str) -> Result<()> {
        if let Some((source, rest)) = line.split_once(" differs: ") {
            let (text, reason) = rest.split_once(" because ").context("no \" because \"")?;
            let (text, reason) = (text.to_owned(), reason.to_owned());
            let difference = Difference { text, reason };
            self.differs.insert(source.to_owned(), difference);
            return Ok(());
        }
        if let Some((what, reason)) = line.split_once(" left out: ") {
            let mut words = what.split(' ');
            let source = words.next().unwrap_or_default();
            let only = words
                .next()
                .map(|word| format!("arch={}", self.arch.name()) == word);
            if only.unwrap_or(true) {
                self.left_out.insert(source.to_owned(), reason.to_owned());
            }
            return Ok(());
        }
        let (tests, line) = match line.strip_prefix("quick ") {
            Some(line) => (&mut self.quick, line),
            None => (&mut self.tests, line),
        };
        let test = Selftest::parse(line)?;
        if test.arch.is_none_or(|only| only == self.arch) {
            tests.push(test);
        }
        Ok(())
    }

    /// All tests that a tree has, as far as this list does not leave them out.
    pub(super) fn tests(&self, tree: &Path) -> Result<Vec<Selftest>> {
        let makefile = tree.join(Suite::Kvm.directory()).join("Makefile");
        self.with(&fs::read_to_string(makefile)?)
    }

    /// Those that are run each time.
    pub(super) fn quick(&self) -> &[Selftest] {
        &self.quick
    }

    fn with(&self, makefile: &str) -> Result<Vec<Selftest>> {
        let built: BTreeSet<_> = of_makefile(makefile, self.arch).collect();
        for source in self.of_kvm() {
            let arch = self.arch.name();
            ensure!(
                built.contains(source.as_str()),
                "kernel/upstream.list names {source}, which KVM's makefile does not build for {arch}"
            );
        }
        let listed = |source: &str| self.tests.iter().any(|test| test.listed() == source);
        let others = of_makefile(makefile, self.arch)
            .filter(|source| !listed(source))
            .filter_map(|source| Selftest::parse(source).ok());
        let all = others.chain(self.tests.iter().cloned());
        let all = all.filter(|test| !self.left_out.contains_key(&test.listed()));
        Ok(all.collect())
    }

    /// All of KVM's tests that the list names.
    fn of_kvm(&self) -> impl Iterator<Item = String> {
        let left_out = self.left_out.keys();
        let left_out = left_out.filter_map(|source| Selftest::parse(source).ok());
        let all = left_out.chain(self.tests.iter().chain(&self.quick).cloned());
        let of_kvm = all.filter(|test| test.suite == Suite::Kvm);
        of_kvm.map(|test| test.listed())
    }

    /// How a test fails on the series.
    pub(super) fn difference(&self, test: &Selftest) -> Option<&Difference> {
        self.differs.get(&test.listed())
    }

    pub(super) fn left_out(&self) -> impl Iterator<Item = (&str, &str)> {
        let pairs = self.left_out.iter();
        pairs.map(|(source, reason)| (source.as_str(), reason.as_str()))
    }
}

/// The programs that KVM's makefile builds for an architecture.
fn of_makefile(text: &str, arch: Arch) -> impl Iterator<Item = &str> {
    let directory = match arch {
        Arch::X86_64 => "x86_64",
        Arch::Arm64 => "aarch64",
    };
    let lists = ["", "_EXTENDED"].map(|kind| format!("TEST_GEN_PROGS{kind}_{directory}"));
    text.lines().filter_map(move |line| {
        let (list, source) = line.split_once('=')?;
        let list = list.trim_end_matches(['+', ' ']);
        lists.iter().any(|name| name == list).then(|| source.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAKEFILE: &str = "\
TEST_GEN_PROGS_x86_64 = x86_64/a_test
TEST_GEN_PROGS_x86_64 += b_test
TEST_GEN_PROGS_x86_64 += c_test
TEST_GEN_PROGS_EXTENDED_x86_64 += x86_64/d_test
TEST_GEN_PROGS_aarch64 += b_test
TEST_GEN_PROGS_aarch64 += c_test
TEST_GEN_PROGS_aarch64 += aarch64/e_test
TEST_GEN_PROGS += $(TEST_GEN_PROGS_$(ARCH_DIR))
";

    const LIST: &str = "\
b_test -- -i 1
b_test -- -i 2
b_test differs: bad flag because it is known
c_test left out: slow
mm/cow
mm/numa left out: no reason
mm/cow arch=arm64 left out: no library
quick b_test
";

    fn labels(tests: &[Selftest]) -> Vec<String> {
        tests.iter().map(Selftest::label).collect()
    }

    #[test]
    fn the_makefiles_tests_are_all_there_but_those_left_out() {
        let list = List::parse(LIST, Arch::X86_64).unwrap();
        let tests = list.with(MAKEFILE).unwrap();
        assert_eq!(
            labels(&tests),
            ["a_test", "d_test", "b_test -i 1", "b_test -i 2", "cow"]
        );
        let difference = list.difference(&tests[2]).unwrap();
        assert_eq!(difference.text, "bad flag");
        assert_eq!(difference.reason, "it is known");
        assert_eq!(list.difference(&tests[0]), None);
        let left_out: Vec<_> = list.left_out().collect();
        assert_eq!(left_out, [("c_test", "slow"), ("mm/numa", "no reason")]);
        assert_eq!(labels(list.quick()), ["b_test"]);
    }

    #[test]
    fn another_architecture_has_other_tests() {
        let list = List::parse(LIST, Arch::Arm64).unwrap();
        let tests = list.with(MAKEFILE).unwrap();
        assert_eq!(labels(&tests), ["e_test", "b_test -i 1", "b_test -i 2"]);
        assert_eq!(list.left_out().count(), 3);
    }

    #[test]
    fn a_test_that_is_not_built_is_an_error() {
        for line in ["x86_64/a_test -- -i 1", "x86_64/d_test left out: slow"] {
            let list = |line: &str, arch| List::parse(line, arch).unwrap().with(MAKEFILE);
            assert!(list(line, Arch::X86_64).is_ok());
            let error = list(line, Arch::Arm64).unwrap_err().to_string();
            assert!(error.contains("does not build for arm64"), "{error}");
            let (source, rest) = line.split_once(' ').unwrap();
            let line = format!("{source} arch=x86_64 {rest}");
            assert!(list(&line, Arch::Arm64).is_ok());
        }
    }

    #[test]
    fn the_list_can_be_read() {
        for arch in [Arch::X86_64, Arch::Arm64] {
            let list = List::read(arch, &Paths::find().unwrap()).unwrap();
            assert!(list.tests.len() > 10 && !list.left_out.is_empty());
            assert!(!list.quick.is_empty());
        }
    }
}
