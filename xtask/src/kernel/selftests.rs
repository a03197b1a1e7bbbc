//! The kernel's KVM selftests: which ones, and how they are built.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::make::{self, is_object};
use super::tree::Tree;
use super::{Arch, Variant};
use crate::paths::Paths;
use crate::progress::Progress;

/// Where the tests are in the source.
const DIRECTORY: &str = "tools/testing/selftests/kvm";

/// One line of kernel/selftests.list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Selftest {
    /// The path below the selftests' directory, without ".c".
    pub(crate) source: String,
    /// Only for this architecture.
    pub(crate) arch: Option<Arch>,
    /// Whether `cargo xtask test` runs it.
    pub(crate) run: bool,
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

    fn parse(line: &str) -> Result<Self> {
        let (head, arguments) = line.split_once(" -- ").unwrap_or((line, ""));
        let mut words = head.split_whitespace();
        let source = words.next().context("no test named")?.to_owned();
        let mut test = Self {
            source,
            arch: None,
            run: true,
            ours: false,
            arguments: Vec::new(),
        };
        for word in words {
            match word {
                "arch=x86_64" => test.arch = Some(Arch::X86_64),
                "arch=arm64" => test.arch = Some(Arch::Arm64),
                "run=no" => test.run = false,
                "series" => test.ours = true,
                _ => bail!("{word:?} is not known"),
            }
        }
        test.arguments = arguments.split_whitespace().map(str::to_owned).collect();
        Ok(test)
    }
}

/// The list's file.
pub(crate) fn list_file(paths: &Paths) -> PathBuf {
    paths.in_root("kernel/selftests.list")
}

/// The tests of an architecture.
pub(crate) fn list(arch: Arch, paths: &Paths) -> Result<Vec<Selftest>> {
    let file = list_file(paths);
    let text =
        std::fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    let tests = parse(&text).with_context(|| format!("in {}", file.display()))?;
    Ok(tests
        .into_iter()
        .filter(|test| test.arch.is_none_or(|only| only == arch))
        .collect())
}

fn parse(text: &str) -> Result<Vec<Selftest>> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| Selftest::parse(line).with_context(|| format!("{line:?}")))
        .collect()
}

/// Where a kernel's selftests are put.
pub(crate) fn directory(variant: Variant, paths: &Paths) -> PathBuf {
    variant.out(paths).join("selftests")
}

/// Builds the listed tests, static so that an initramfs can hold them, with the headers that
/// `build` has installed.
pub(super) fn build(variant: Variant, paths: &Paths, tree: &Tree, build: &Path) -> Result<()> {
    let out = directory(variant, paths);
    if out.exists() {
        std::fs::remove_dir_all(&out).with_context(|| format!("remove {}", out.display()))?;
    }
    std::fs::create_dir_all(&out).with_context(|| format!("create {}", out.display()))?;
    let mut tests = list(variant.arch, paths)?;
    tests.retain(|test| !(variant.stock && test.ours));
    for test in &tests {
        let source = tree
            .path()
            .join(DIRECTORY)
            .join(format!("{}.c", test.source));
        if !source.exists() {
            bail!(
                "kernel/selftests.list names {}, which the tree lacks",
                source.display()
            );
        }
    }
    if tests.is_empty() {
        return Ok(());
    }

    let output = build.join("selftests-kvm");
    std::fs::create_dir_all(&output).with_context(|| format!("create {}", output.display()))?;
    let progress = Progress::start(
        &format!("building the {} selftests", variant.name()),
        None,
        is_compile,
    );
    let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let run = crate::command::Run::new("make")
        .arg("-C")
        .arg(tree.path().join(DIRECTORY))
        .arg(format!("-j{jobs}"));
    let run = make::settings(run, paths, variant.arch, tree.path());
    run.arg(format!("OUTPUT={}", output.display()))
        .arg(format!(
            "KHDR_INCLUDES=-isystem {}/usr/include",
            build.display()
        ))
        // Added to, not replaced: the makefile's own flags come through the same variables.
        .arg("LDLIBS=-static -ldl -pthread")
        .args(tests.iter().map(|test| output.join(&test.source)))
        .logged(&variant.out(paths).join("build.log"), &progress)?;
    progress.done();
    for test in &tests {
        let (from, to) = (output.join(&test.source), out.join(test.name()));
        std::fs::copy(&from, &to)
            .with_context(|| format!("copy {} to {}", from.display(), to.display()))?;
    }
    Ok(())
}

/// The selftests' makefile prints whole command lines.
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
        assert_eq!((tests[0].name(), tests[0].run), ("a_test", true));
        assert_eq!(
            (tests[1].name(), tests[1].arch),
            ("b_test", Some(Arch::X86_64))
        );
        assert_eq!(tests[1].arguments, ["-v", "2"]);
        assert!(!tests[1].run && tests[2].ours);
        assert!(parse("a_test arch=riscv\n").is_err());
    }
}
