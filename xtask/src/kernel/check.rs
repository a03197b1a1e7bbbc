//! `cargo xtask kernel check`: each patch stands on its own.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use fs_err as fs;

use super::build::{configure, toolchain};
use super::make::{is_object, lock_tree, make, no_warnings};
use super::series::{Patch, Series, patches_dir};
use super::tree::Tree;
use super::{Arch, Variant, ahead, build, config, export, letters, mutate, selftests, source};
use crate::command::Run;
use crate::files::digest;
use crate::paths::Paths;
use crate::progress::Progress;
use crate::setup;

/// Changes when the checks change, so that everything is checked again.
const RECIPE: &str = "2";

/// How checkpatch.pl is called. Errors, warnings and checks all count.
///
/// Ignored: `FILE_PATH_CHANGES` asks whether MAINTAINERS needs an update for each new file, and
/// the files here are below directories that it covers. `UNKNOWN_COMMIT_ID` looks for the commit that a
/// `Fixes:` line names in the tree's history, and Debian's source has none.
const CHECKPATCH: &str = "--strict --no-summary --show-types --color=never \
                          --max-line-length=100 --ignore=FILE_PATH_CHANGES,UNKNOWN_COMMIT_ID";

/// The verb's arguments.
#[derive(Debug, Default, Args)]
pub(crate) struct CheckArgs {
    /// Build nothing: the patches apply, pass checkpatch.pl, and come back from an export as they were. What
    /// `cargo xtask test` does, which builds the whole series
    #[arg(long, conflicts_with = "whole")]
    quick: bool,
    /// Check again what passed before, unchanged, on this machine
    #[arg(long)]
    again: bool,
    /// Build the whole kernel for each patch that changes a header others include too, not only KVM,
    /// mm and the directories of its files; check everything again
    #[arg(long)]
    whole: bool,
    /// Only a look ahead: whether the series applies, as text, to this source; some minutes
    #[arg(long, value_enum, value_name = "SOURCE", conflicts_with_all = ["quick", "again", "whole"])]
    base: Option<ahead::Ahead>,
}

impl CheckArgs {
    /// With `--quick`.
    pub(crate) fn quick() -> Self {
        Self {
            quick: true,
            ..Self::default()
        }
    }
}

/// Runs the verb.
pub(crate) fn run(args: &CheckArgs, paths: &Paths) -> Result<()> {
    if let Some(ahead::Ahead::Newest) = args.base {
        return ahead::run(paths);
    }
    let results = check(args, paths)?;
    let failures = results.iter().filter(|(_, failure)| failure.is_some());
    let failed = failures.count();
    for (name, failure) in &results {
        match failure {
            None => println!("{name}: ok"),
            Some(failure) => println!("{name}: FAILED: {failure}"),
        }
    }
    if failed > 0 {
        bail!("{failed} of {} failed", results.len());
    }
    Ok(())
}

/// Checks the series: for each patch, and the series as a whole, its name and what is wrong with it.
pub(crate) fn check(args: &CheckArgs, paths: &Paths) -> Result<Vec<(String, Option<String>)>> {
    setup::require(&setup::kernel_tools(Arch::Arm64))?;
    let source = source::ensure(paths)?;
    let name = "check";
    let _lock = lock_tree(paths, name)?;
    let series = Series::read(paths)?;
    let tree = Tree::open(paths, &source, name)?;
    tree.drop_unfinished()?;
    let check = Check::new(args, paths, tree)?;
    let mut results = Vec::new();
    let mut applies = true;
    for (index, patch) in series.patches.iter().enumerate() {
        let prefix = Series {
            patches: series.patches[..=index].to_vec(),
        };
        let failure = if applies {
            failure(check.patch(&prefix))
        } else {
            Some("not checked: a patch before it does not apply".to_owned())
        };
        // What fails otherwise need not keep the next one from being checked.
        applies = applies && (failure.is_none() || check.tree.apply(&prefix).is_ok());
        results.push((patch.name.clone(), failure));
    }
    let round_trip = check.round_trip(&series, &patches_dir(paths));
    results.push(("round trip".to_owned(), failure(round_trip)));
    let mutations = check.mutations(&series);
    results.push(("mutations apply".to_owned(), failure(mutations)));
    if !args.quick {
        results.push(("KVM as modules".to_owned(), failure(modules(paths))));
    }
    for topic in series.topics() {
        let letter = check.letter(&series, topic);
        results.push((letters::name(topic), failure(letter)));
    }
    Ok(results)
}

/// The whole series links with KVM as modules: no patch calls what is not exported.
fn modules(paths: &Paths) -> Result<()> {
    let variant = Variant {
        modules: true,
        ..Variant::patched(Arch::X86_64)
    };
    build::ensure(variant, paths)?;
    build::no_warnings(variant, paths)
}

fn failure(result: Result<()>) -> Option<String> {
    result.err().map(|error| format!("{error:#}"))
}

struct Check<'a> {
    quick: bool,
    again: bool,
    whole: bool,
    paths: &'a Paths,
    tree: Tree,
    /// Everything but the patches that the results depend on.
    context: String,
    /// Whose build directories have the configuration.
    configured: RefCell<Vec<Arch>>,
}

impl<'a> Check<'a> {
    fn new(args: &CheckArgs, paths: &'a Paths, tree: Tree) -> Result<Self> {
        let mut parts = vec![RECIPE.to_owned(), tree.source().tree.clone()];
        parts.extend(CHECKPATCH.split(' ').map(str::to_owned));
        parts.extend(inputs(paths)?);
        for arch in [Arch::X86_64, Arch::Arm64] {
            parts.push(toolchain(arch)?);
        }
        Ok(Self {
            quick: args.quick,
            again: args.again || args.whole,
            whole: args.whole,
            paths,
            tree,
            context: digest(parts),
            configured: RefCell::default(),
        })
    }

    /// Checks the last patch of a prefix of the series. What passed once with everything the same
    /// is remembered.
    fn patch(&self, prefix: &Series) -> Result<()> {
        let patch = prefix.patches.last().context("no patch")?;
        let style = self.memory(["style".to_owned(), patch.digest()]);
        if self.again || !style.exists() {
            self.checkpatch(patch)?;
            remember(&style, patch)?;
        }
        let memory = |what: &str| self.memory([what.to_owned(), prefix.code_digest()]);
        let (applied, built) = (memory("applied"), memory(""));
        let passed = built.exists() || self.quick && applied.exists();
        if passed && !self.again {
            return Ok(());
        }
        self.tree.apply(prefix)?;
        if self.quick {
            return remember(&applied, patch);
        }
        let touched = touched_files(patch);
        if touched.iter().any(|file| file.contains("Kconfig")) {
            self.configured.borrow_mut().clear();
        }
        for arch in [Arch::X86_64, Arch::Arm64] {
            self.kernel(arch, patch, &touched)?;
            self.selftests(arch, patch, &touched)?;
        }
        remember(&built, patch)
    }

    /// The file whose existence says that something passed.
    fn memory(&self, what: [String; 2]) -> PathBuf {
        let parts = [self.context.clone()].into_iter().chain(what);
        self.paths.cache().join("checked").join(digest(parts))
    }

    fn checkpatch(&self, patch: &Patch) -> Result<()> {
        let output = Run::new("perl")
            .arg("scripts/checkpatch.pl")
            .words(CHECKPATCH)
            .arg(patches_dir(self.paths).join(&patch.name))
            .dir(self.tree.path())
            .result()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stdout);
            let lines = said.lines().filter(|line| !line.trim().is_empty());
            let lines: String = lines.map(|line| format!("  {line}\n")).collect();
            bail!("checkpatch.pl:\n{lines}");
        }
        Ok(())
    }

    fn log(&self, arch: Arch) -> PathBuf {
        let name = format!("kernel/check-{}.log", arch.name());
        self.paths.target().join(name)
    }

    fn build_name(arch: Arch) -> String {
        format!("build-{}", arch.name())
    }

    /// Builds what the patch may break on an architecture.
    fn kernel(&self, arch: Arch, patch: &Patch, touched: &[String]) -> Result<()> {
        let targets = targets(arch, touched, self.whole);
        match targets.as_slice() {
            [] => Ok(()),
            targets => self.make(arch, patch, targets),
        }
    }

    fn make(&self, arch: Arch, patch: &Patch, targets: &[String]) -> Result<()> {
        let log = self.log(arch);
        let name = Self::build_name(arch);
        let tree = self.tree.path();
        if !self.configured.borrow().contains(&arch) {
            configure(Variant::patched(arch), self.paths, tree, &name, &log)?;
            self.configured.borrow_mut().push(arch);
        }
        let what = format!("{}: building for {}", patch.name, arch.name());
        let progress = Progress::start(&what, None, is_object);
        let before = size(&log);
        make(self.paths, arch, tree, &name)
            .args(targets)
            .logged(&log, &progress)?;
        progress.done();
        // Only what the patch touches is compiled, so that they are its own.
        no_warnings(&log, before)
    }

    /// Builds the selftests of the suites that the patch changes.
    fn selftests(&self, arch: Arch, patch: &Patch, touched: &[String]) -> Result<()> {
        let mut tests = selftests::list(arch, self.paths)?;
        tests.retain(|test| test.is_near(touched) && test.is_in(&self.tree));
        if tests.is_empty() {
            return Ok(());
        }
        self.make(arch, patch, &["headers".to_owned()])?;
        let build = self.tree.path().join(Self::build_name(arch));
        let log = self.log(arch);
        let what = format!("{}: building the selftests for {}", patch.name, arch.name());
        let progress = Progress::start(&what, None, |line| line.contains("gcc "));
        let before = size(&log);
        let run = selftests::Compile {
            arch,
            tree: &self.tree,
            build: &build,
            headers: &build.join(selftests::HEADERS),
            settings: &[selftests::LIBRARIES],
            log: &log,
        };
        run.tests(&tests, self.paths, &progress)?;
        progress.done();
        no_warnings(&log, before)
    }

    /// Apply and export: the same files, and no others.
    fn round_trip(&self, series: &Series, dir: &Path) -> Result<()> {
        self.tree.apply(series)?;
        let exported = export::from_tree(&self.tree, series)?;
        for (old, new) in series.patches.iter().zip(&exported.patches) {
            if old != new {
                let difference = first_difference(&old.content, &new.content);
                let (old, new) = (&old.name, &new.name);
                bail!(
                    "kernel/patches/{old} comes back as {new}, {difference}; run `cargo xtask \
                     kernel export`"
                );
            }
        }
        for file in patch_files(dir)? {
            let is_it = |patch: &Patch| dir.join(&patch.name) == file;
            if !series.patches.iter().any(is_it) && !letters::is_letter(&file, series) {
                bail!("{} is not in kernel/series", file.display());
            }
        }
        Ok(())
    }

    /// What `kernel mutate` would do to the series.
    fn mutations(&self, series: &Series) -> Result<()> {
        self.tree.apply(series)?;
        mutate::check(&self.tree, series, self.paths)
    }

    /// A topic's cover letter.
    fn letter(&self, series: &Series, topic: &str) -> Result<()> {
        self.tree.apply(series)?;
        letters::check(&patches_dir(self.paths), &self.tree, series, topic)
    }
}

/// Notes that something passed, see `Check::memory`.
fn remember(memory: &Path, patch: &Patch) -> Result<()> {
    if let Some(dir) = memory.parent() {
        fs::create_dir_all(dir)?;
    }
    Ok(fs::write(memory, &patch.name)?)
}

/// The content of everything in the checkout, but the series, that the results depend on.
fn inputs(paths: &Paths) -> Result<Vec<String>> {
    let mut files = vec![selftests::list_text(paths)?];
    for arch in [Arch::X86_64, Arch::Arm64] {
        let fragments = config::fragments(Variant::patched(arch), paths);
        files.push(config::merged(&fragments)?);
    }
    Ok(files)
}

/// What to make so that a patch's compile errors and warnings show: on each architecture all of KVM
/// and the directories of the files that it changes; mm as well, or with `whole` everything, if it
/// changes a header that others include too. (Whether all that include it still compile, the build
/// of the series as a whole tells.) A file of one architecture says nothing about the other.
fn targets(arch: Arch, touched: &[String], whole: bool) -> Vec<String> {
    let kvm = format!("arch/{}/kvm/", arch.source());
    let mut list = Vec::new();
    for file in touched {
        let below = file
            .strip_prefix("arch/")
            .and_then(|rest| rest.split('/').next());
        let foreign = below.is_some_and(|name| name != arch.source());
        let inert = ["Documentation/", "tools/", "MAINTAINERS"];
        if foreign || inert.iter().any(|start| file.starts_with(start)) {
            continue;
        }
        list.push(kvm.clone());
        if file.contains("kvm") {
            continue;
        }
        if file.ends_with(".h") {
            if whole {
                return vec!["vmlinux".into()];
            }
            list.push("mm/".into());
        } else if let Some((directory, _)) = file.rsplit_once('/') {
            list.push(format!("{directory}/"));
        }
    }
    list.sort();
    list.dedup();
    list
}

/// The files that a patch changes, by their new names.
fn touched_files(patch: &Patch) -> Vec<String> {
    let text = String::from_utf8_lossy(&patch.content);
    text.lines()
        .filter_map(|line| line.strip_prefix("diff --git a/"))
        .filter_map(|names| names.rsplit_once(" b/"))
        .map(|(_, name)| name.to_owned())
        .collect()
}

fn size(file: &Path) -> usize {
    fs::metadata(file).map_or(0, |m| usize::try_from(m.len()).unwrap_or(usize::MAX))
}

fn patch_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    if !dir.exists() {
        return Ok(files);
    }
    for topic in fs::read_dir(dir)? {
        for entry in fs::read_dir(topic?.path())? {
            files.push(entry?.path());
        }
    }
    files.sort();
    Ok(files)
}

fn first_difference(old: &[u8], new: &[u8]) -> String {
    let (old, new) = (String::from_utf8_lossy(old), String::from_utf8_lossy(new));
    let mut lines = (1..).zip(old.lines().zip(new.lines()));
    match lines.find(|(_, (old, new))| old != new) {
        Some((number, (old, new))) => format!("line {number}: {old:?} became {new:?}"),
        None => {
            let (old, new) = (old.lines().count(), new.lines().count());
            format!("{old} lines became {new}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(files: &[&str]) -> Vec<String> {
        files.iter().map(|f| (*f).to_owned()).collect()
    }

    #[test]
    fn what_passed_depends_on_the_list_of_selftests() {
        let top = tempfile::tempdir().unwrap();
        let real = Paths::find().unwrap();
        let copied = Run::new("cp")
            .arg("-r")
            .arg(real.in_root("kernel"))
            .arg(top.path());
        copied.output().unwrap();
        let paths = Paths::at(top.path());
        let before = inputs(&paths).unwrap();
        assert_eq!(before, inputs(&real).unwrap());
        std::fs::write(selftests::list_file(&paths), "another_test\n").unwrap();
        assert_ne!(before, inputs(&paths).unwrap());
    }

    #[test]
    fn an_architectures_files_are_built_there_only() {
        let files = touch(&["arch/x86/kvm/mmu/mmu.c"]);
        assert_eq!(targets(Arch::X86_64, &files, false), ["arch/x86/kvm/"]);
        assert!(targets(Arch::Arm64, &files, false).is_empty());
    }

    #[test]
    fn common_files_are_built_everywhere_and_documents_nowhere() {
        let files = touch(&[
            "virt/kvm/kvm_main.c",
            "Documentation/virt/kvm/api.rst",
            "mm/gup.c",
        ]);
        assert_eq!(
            targets(Arch::X86_64, &files, false),
            ["arch/x86/kvm/", "mm/"]
        );
        assert_eq!(
            targets(Arch::Arm64, &files, false),
            ["arch/arm64/kvm/", "mm/"]
        );
        let header = touch(&["include/linux/kvm_host.h"]);
        assert_eq!(targets(Arch::Arm64, &header, true), ["arch/arm64/kvm/"]);
        let header = touch(&["include/linux/mm.h", "fs/hugetlbfs/inode.c"]);
        assert_eq!(
            targets(Arch::Arm64, &header, false),
            ["arch/arm64/kvm/", "fs/hugetlbfs/", "mm/"]
        );
        assert_eq!(targets(Arch::Arm64, &header, true), ["vmlinux"]);
    }

    #[test]
    fn touched_files_are_read_off_the_patch() {
        let content = b"diff --git a/a.c b/a.c\n+x\ndiff --git a/old b/dir/new\n".to_vec();
        let patch = Patch {
            name: "01-a/0001-b.patch".into(),
            content,
        };
        assert_eq!(touched_files(&patch), ["a.c", "dir/new"]);
    }

    #[test]
    fn differences_name_the_line() {
        assert_eq!(
            first_difference(b"a\nb\n", b"a\nc\n"),
            "line 2: \"b\" became \"c\""
        );
        assert_eq!(first_difference(b"a\n", b"a\nc\n"), "1 lines became 2");
    }
}
