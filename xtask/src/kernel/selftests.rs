//! The kernel's selftests: which ones, and how they are built.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use fs_err as fs;

use super::make::{self, is_object};
use super::tree::Tree;
use super::{Arch, Variant, build, source};
use crate::command::Run;
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
    /// Those of memfd
    Memfd,
}

impl Suite {
    const ALL: [Self; 3] = [Self::Kvm, Self::Mm, Self::Memfd];

    /// Where the tests are in the source.
    pub(crate) fn directory(self) -> &'static str {
        match self {
            Self::Kvm => "tools/testing/selftests/kvm",
            Self::Mm => "tools/testing/selftests/mm",
            Self::Memfd => "tools/testing/selftests/memfd",
        }
    }

    /// Where they are built, in a build directory.
    fn output(self) -> &'static str {
        match self {
            Self::Kvm => "selftests-kvm",
            Self::Mm => "selftests-mm",
            Self::Memfd => "selftests-memfd",
        }
    }

    /// What the lists of tests begin its tests' names with.
    fn prefix(self) -> &'static str {
        match self {
            Self::Kvm => "",
            Self::Mm => "mm/",
            Self::Memfd => "memfd/",
        }
    }
}

/// Which steps of `cargo xtask test` run a selftest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Runs {
    /// All that run selftests.
    Always,
    /// `selftests`, in a VM with a thread for each CPU: it shows what CPUs that share one thread cannot, contention.
    Parallel,
    /// `selftests`, in a VM whose memory is mostly in ZONE_MOVABLE.
    Movable,
    /// `debug`: it takes long.
    Debug,
    /// `gigantic`: it fills huge pages of 1G, which a software CPU takes minutes for.
    Gigantic,
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
    /// How many huge pages there are while it runs, if it needs a certain number.
    pub(crate) huge_pages: Option<u32>,
    /// What it is run with.
    pub(crate) arguments: Vec<String>,
}

impl Selftest {
    /// Its source, as the lists of tests name it.
    pub(crate) fn listed(&self) -> String {
        format!("{}{}", self.suite.prefix(), self.source)
    }

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

    pub(crate) fn parse(line: &str) -> Result<Self> {
        let (head, arguments) = line.split_once(" -- ").unwrap_or((line, ""));
        let mut words = head.split_whitespace();
        let named = words.next().context("no test named")?;
        let others = [Suite::Mm, Suite::Memfd];
        let found = others
            .into_iter()
            .find_map(|suite| Some((suite, named.strip_prefix(suite.prefix())?)));
        let (suite, source) = found.unwrap_or((Suite::Kvm, named));
        let mut test = Self {
            suite,
            source: source.to_owned(),
            arch: None,
            runs: Runs::Always,
            shadow: false,
            ours: false,
            huge_pages: None,
            arguments: Vec::new(),
        };
        for word in words {
            match word {
                "arch=x86_64" => test.arch = Some(Arch::X86_64),
                "arch=arm64" => test.arch = Some(Arch::Arm64),
                "run=no" => test.runs = Runs::Never,
                "run=parallel" => test.runs = Runs::Parallel,
                "run=movable" => test.runs = Runs::Movable,
                "run=debug" => test.runs = Runs::Debug,
                "run=gigantic" => test.runs = Runs::Gigantic,
                "shadow" => test.shadow = true,
                "series" => test.ours = true,
                _ => match word.strip_prefix("huge_pages=").map(str::parse) {
                    Some(Ok(count)) => test.huge_pages = Some(count),
                    _ => bail!("{word:?} is not known"),
                },
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

/// The tests that are built with a kernel.
pub(crate) fn built(variant: Variant, paths: &Paths) -> Result<Vec<Selftest>> {
    let mut tests = list(variant.arch, paths)?;
    tests.retain(|test| !(variant.stock && test.ours));
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

/// Where a VM has them.
pub(crate) fn directory_in_vm(variant: Variant, paths: &Paths) -> PathBuf {
    match variant.arch {
        Arch::X86_64 => directory(variant, paths),
        Arch::Arm64 => PathBuf::from("/selftests"),
    }
}

/// Builds the listed tests and puts them where [`directory`] says.
pub(super) fn build(variant: Variant, paths: &Paths, tree: &Tree, build: &Path) -> Result<()> {
    let out = directory(variant, paths);
    files::fresh_dir(&out)?;
    let tests = built(variant, paths)?;
    for test in &tests {
        if !test.is_in(tree) {
            let (source, directory) = (&test.source, test.suite.directory());
            bail!("kernel/selftests.list names {source}.c in {directory}, which the tree lacks");
        }
    }
    let what = format!("building the {} selftests", variant.name());
    let progress = Progress::start(&what, None, is_compile);
    let run = Compile {
        arch: variant.arch,
        tree,
        build,
        headers: &build.join(HEADERS),
        settings: &[LIBRARIES],
        log: &build::log(variant, paths),
    };
    run.tests(&tests, paths, &progress)?;
    progress.done();
    for test in &tests {
        fs::copy(test.program(build), out.join(test.name()))?;
    }
    Ok(())
}

/// Where a build directory has the headers for userspace.
pub(super) const HEADERS: &str = "usr/include";

/// What is linked.
pub(super) const LIBRARIES: &str = "LDLIBS=-static -ldl -pthread";

/// The same for the kernel's own tests, with libraries that only those of memory management call.
const MORE_LIBRARIES: &str = "LDLIBS=-static -lnuma -lcap -luring -lrt -lm -ldl -pthread";

/// The same for arm64, where there are only the C library's.
const FEWER_LIBRARIES: &str = "LDLIBS=-static -lrt -lm -ldl -pthread";

/// khugepaged.c of 6.12.118 does not include the header that has it.
const SKIP: &str = "EXTRA_CFLAGS=-DKSFT_SKIP=4";

/// Builds tests of the tree of a kernel that has been built, which `tests` chooses. Returns them, and where their
/// programs are.
pub(crate) fn build_upstream(
    variant: Variant,
    paths: &Paths,
    tests: impl FnOnce(&Path) -> Result<Vec<Selftest>>,
) -> Result<(Vec<Selftest>, PathBuf)> {
    let name = if variant.stock { "stock" } else { "patched" };
    let _lock = make::lock_tree(paths, name)?;
    let tree = Tree::open(paths, &source::ensure(paths)?, name)?;
    let tests = tests(tree.path())?;
    let out = variant.out(paths).join("upstream");
    files::fresh_dir(&out)?;
    let log = variant.out(paths).join("upstream.log");
    files::remove(&log)?;
    let build = tree.path().join(format!("build-{}", variant.name()));
    let progress = Progress::start("building the kernel's own tests", None, is_compile);
    // The script notes whether tests have liburing. The makefile calls it with the first word of CC, which is no
    // compiler, and so has none: tests leave out what io_uring pins. A compiler for arm64 finds the headers, but no library.
    let (libraries, compiler) = match variant.arch {
        Arch::X86_64 => (MORE_LIBRARIES, "gcc"),
        Arch::Arm64 => (FEWER_LIBRARIES, "false"),
    };
    Run::new("sh")
        .args(["check_config.sh", compiler])
        .dir(&tree.path().join(Suite::Mm.directory()))
        .logged(&log, &progress)?;
    let run = Compile {
        arch: variant.arch,
        tree: &tree,
        build: &build,
        // The build directory may be gone.
        headers: &variant.out(paths).join(HEADERS),
        settings: &[libraries, SKIP],
        log: &log,
    };
    run.tests(&tests, paths, &progress)?;
    progress.done();
    for test in &tests {
        fs::copy(test.program(&build), out.join(test.name()))?;
    }
    Ok((tests, out))
}

/// How tests are compiled: in a build directory, static so that an initramfs can hold them.
pub(super) struct Compile<'a> {
    pub(super) arch: Arch,
    pub(super) tree: &'a Tree,
    pub(super) build: &'a Path,
    /// The kernel's headers.
    pub(super) headers: &'a Path,
    /// Variables of the makefile: what is linked, for example.
    pub(super) settings: &'a [&'a str],
    pub(super) log: &'a Path,
}

impl Compile<'_> {
    /// Compiles these.
    pub(super) fn tests(
        &self,
        tests: &[Selftest],
        paths: &Paths,
        progress: &Progress,
    ) -> Result<()> {
        let (tree, build) = (self.tree.path(), self.build);
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
            let run = make::in_directory(&tree.join(suite.directory()));
            make::settings(run, paths, self.arch, tree)
                .arg(format!("OUTPUT={}", output.display()))
                .arg(format!("KHDR_INCLUDES=-isystem {}", self.headers.display()))
                .args(self.settings)
                .args(programs)
                .logged(self.log, progress)?;
        }
        Ok(())
    }
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
        let runs = |line: &str| parse(line).unwrap()[0].runs;
        assert_eq!(runs("d run=debug\n"), Runs::Debug);
        assert_eq!(runs("d run=gigantic\n"), Runs::Gigantic);
        assert_eq!(runs("d run=movable\n"), Runs::Movable);
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
        assert_eq!(tests[0].listed(), "mm/a-b");
        let test = Selftest::parse("memfd/memfd_test huge_pages=8 -- hugetlbfs").unwrap();
        assert_eq!((test.suite, test.huge_pages), (Suite::Memfd, Some(8)));
        assert!(Selftest::parse("mm/a huge_pages=x").is_err());
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
