//! `cargo xtask kernel mutate`: shows that tests guard the series, by undoing its patches one by one.

pub(super) mod change;
pub(super) mod list;
mod outcome;
mod report;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use fs_err as fs;

use super::build::{self, configure};
use super::make::{is_object, lock_tree, make};
use super::selftests::{self, Runs};
use super::series::{Patch, Series};
use super::source::{self, Base};
use super::tree::Tree;
use super::{Arch, Variant};
use crate::files;
use crate::paths::Paths;
use crate::progress::{self, Progress};
use crate::setup;
use crate::test::kunit;
use crate::vm::{self, Job, Output, Pagetide, Timing, VmArgs};

use change::Diff;
use list::{Entry, Mutation, Test};
use outcome::Verdict;
use report::{Digests, Key, Results};

/// The exit status with which a kernel selftest says that it could not run.
const KSFT_SKIP: u8 = 4;

/// For one test on the series itself.
const TEST_TIMEOUT: Duration = Duration::from_secs(300);

/// How many times as long as on the series itself a test may take on a mutation, and how much longer than that.
/// Many mutations make a test hang.
const SLOWER: (u32, Duration) = (4, Duration::from_secs(20));

/// For a test on a kernel that checks everything.
const DEBUG_TEST_TIMEOUT: Duration = Duration::from_secs(1200);

/// For a whole VM.
const VM_TIMEOUT: u64 = 3600;

/// What the steps with selftests of `cargo xtask test` have, too.
const HUGE_PAGES: &str = "hugepages=256";

/// The verb's arguments.
#[derive(Debug, Args)]
pub(crate) struct MutateArgs {
    /// Only patches with this in their names (may be given several times)
    #[arg(long, value_name = "NAME")]
    patch: Vec<String>,
    /// Only mutations of this architecture
    #[arg(long, value_enum)]
    arch: Option<Arch>,
    /// Only mutations that have no result yet, or whose change or test is another than then
    #[arg(long)]
    quick: bool,
    /// Run nothing: write the table anew from the list and the results so far
    #[arg(long, conflicts_with = "quick")]
    table: bool,
    /// Print all results as JSON, as kernel/mutations.json has them
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub(crate) fn run(args: &MutateArgs, paths: &Paths) -> Result<()> {
    let series = Series::read(paths)?;
    let entries = list::read(paths, &series)?;
    let mut results = Results::read(paths)?;
    let base = Base::read(paths)?;
    let current = digests(&entries, &series, base.tree(), paths)?;
    let planned = if args.table {
        Vec::new()
    } else {
        let source = source::ensure(paths)?;
        if !base.is_of(&source) {
            bail!(
                "results are of the base, {}, and this is {}: they would be taken for its results",
                base.version(),
                source.version
            );
        }
        plan(args, &entries, &series, &results, &current, paths)?
    };
    let wrong = if planned.is_empty() {
        eprintln!("nothing is run");
        Vec::new()
    } else {
        mutate(&planned, &entries, &series, &mut results, &current, paths)?
    };
    results.sort(&entries);
    results.write(&entries, &current, paths)?;
    if args.json {
        print!("{}", results.json()?);
    } else {
        print!("{}", results.table(&entries, &current));
    }
    if !wrong.is_empty() {
        bail!(
            "no test failed, or nothing is known:\n  {}",
            wrong.join("\n  ")
        );
    }
    Ok(())
}

/// A mutation that is to be run.
struct Planned<'a> {
    entry: &'a Entry,
    mutation: &'a Mutation,
    diff: Diff,
    /// What results of it and of its tests have to have.
    current: &'a Digests,
}

impl Planned<'_> {
    fn variant(&self) -> Variant {
        Variant {
            debug: self.mutation.is_debug(),
            upstream: self.mutation.needs_upstream_config(),
            ..Variant::patched(self.mutation.arch)
        }
    }

    fn name(&self) -> String {
        format!("{}: {}", self.entry.patch, self.mutation.change_label())
    }

    fn key<'a>(&'a self, test: &'a Test) -> Key<'a> {
        Key {
            entry: self.entry,
            mutation: self.mutation,
            test,
        }
    }

    fn digest(&self, test: &Test) -> &str {
        self.current.of(&self.key(test))
    }
}

/// The digests that current results of all tests have.
pub(super) fn digests(
    entries: &[Entry],
    series: &Series,
    base: &str,
    paths: &Paths,
) -> Result<Digests> {
    let mut digests = Digests::default();
    for entry in entries {
        let patch = patch_of(entry, series)?;
        for mutation in entry.mutations() {
            let diff = diff(entry, mutation, patch, paths)?;
            for test in &mutation.tests {
                let key = Key {
                    entry,
                    mutation,
                    test,
                };
                digests.add(&key, digest(base, &diff, test));
            }
        }
    }
    Ok(digests)
}

/// Equal as long as a result is current: for equal changes of the same base, and the same call of a test.
fn digest(base: &str, diff: &Diff, test: &Test) -> String {
    files::digest([base.to_owned(), diff.digest(), test.label()])
}

fn plan<'a>(
    args: &MutateArgs,
    entries: &'a [Entry],
    series: &Series,
    results: &Results,
    current: &'a Digests,
    paths: &Paths,
) -> Result<Vec<Planned<'a>>> {
    let mut planned = Vec::new();
    for entry in entries {
        if !args.patch.is_empty() && !args.patch.iter().any(|part| entry.patch.contains(part)) {
            continue;
        }
        let patch = patch_of(entry, series)?;
        let wanted = |mutation: &&Mutation| args.arch.is_none_or(|arch| arch == mutation.arch);
        for mutation in entry.mutations().filter(wanted) {
            let mutation = Planned {
                entry,
                mutation,
                diff: diff(entry, mutation, patch, paths)?,
                current,
            };
            let is_known = |test: &Test| {
                let known = results.current(&mutation.key(test), mutation.digest(test));
                known.is_some_and(Verdict::is_red)
            };
            if !(args.quick && mutation.mutation.tests.iter().all(is_known)) {
                planned.push(mutation);
            }
        }
    }
    if planned.is_empty() && !args.quick {
        bail!("kernel/mutations.list has no such mutation: look at --patch and --arch");
    }
    Ok(planned)
}

fn patch_of<'a>(entry: &Entry, series: &'a Series) -> Result<&'a Patch> {
    let patch = series.patches.iter().find(|patch| entry.is_of(patch));
    patch.with_context(|| format!("the series has no patch {}", entry.patch))
}

fn diff(entry: &Entry, mutation: &Mutation, patch: &Patch, paths: &Paths) -> Result<Diff> {
    let diff = Diff::of(mutation, patch, paths);
    diff.with_context(|| format!("{}: {}", entry.patch, mutation.change_label()))
}

/// An error that names every mutation that does not apply. The tree has the series.
pub(super) fn check(tree: &Tree, series: &Series, paths: &Paths) -> Result<()> {
    let mut failures = Vec::new();
    for entry in &list::read(paths, series)? {
        let patch = patch_of(entry, series)?;
        for mutation in entry.mutations() {
            let applied = diff(entry, mutation, patch, paths).and_then(|diff| diff.check(tree));
            if let Err(error) = applied {
                let (patch, change) = (&entry.patch, mutation.change_label());
                failures.push(format!("{patch}: {change}: {error:#}"));
            }
        }
    }
    if !failures.is_empty() {
        bail!("{}", failures.join("\n"));
    }
    Ok(())
}

/// Runs mutations in a tree of their own, writing down each result as it comes. Returns those that no test
/// noticed, or of which nothing is known.
fn mutate(
    planned: &[Planned<'_>],
    entries: &[Entry],
    series: &Series,
    results: &mut Results,
    current: &Digests,
    paths: &Paths,
) -> Result<Vec<String>> {
    // Their selftests, which no mutation changes. (In the tree's own directory, and before it is locked.)
    let mut variants: Vec<Variant> = Vec::new();
    for mutation in planned {
        let variant = mutation.variant();
        if !variants.contains(&variant) {
            setup::require(&setup::kernel_tools(variant.arch))?;
            build::ensure(variant, paths)?;
            variants.push(variant);
        }
    }
    let name = "mutate";
    let _lock = lock_tree(paths, name)?;
    let tree = Tree::open(paths, &source::ensure(paths)?, name)?;
    tree.drop_unfinished()?;
    tree.apply(series)?;
    let mut lab = Lab {
        paths,
        tree: &tree,
        limits: Vec::new(),
    };
    for variant in variants {
        let all = planned.iter().filter(|p| p.variant() == variant);
        lab.baseline(variant, all.flat_map(|p| &p.mutation.tests))?;
    }
    let mut wrong = Vec::new();
    let lab = &lab;
    thread::scope(|scope| {
        // One mutation is built while the tests of the one before run: a VM keeps a single processor busy.
        let mut running: Option<(&Planned<'_>, ScopedJoinHandle<'_, Result<Vec<Verdict>>>)> = None;
        let mut next = planned.iter().enumerate();
        loop {
            let built = next.next().map(|(index, mutation)| {
                let (number, count, name) = (index + 1, planned.len(), mutation.name());
                progress::print(&format!("mutation {number} of {count}: {name}"));
                (mutation, lab.mutant(mutation, index % 2))
            });
            if let Some((mutation, tests)) = running.take() {
                let verdicts = tests.join().unwrap_or_else(|_| Err(anyhow!("a panic")));
                record(mutation, verdicts, results, &mut wrong);
                // What takes hours shall not be lost with a run that is ended.
                results.sort(entries);
                results.write(entries, current, paths)?;
            }
            match built {
                Some((mutation, Ok(image))) => {
                    let tests = scope.spawn(move || lab.verdicts(mutation, &image));
                    running = Some((mutation, tests));
                }
                Some((mutation, Err(error))) => {
                    record(mutation, Err(error), results, &mut wrong);
                }
                None => return Ok(wrong),
            }
        }
    })
}

/// Notes what the tests of a mutation said. What is as it should not be is added to `wrong`.
fn record(
    mutation: &Planned<'_>,
    verdicts: Result<Vec<Verdict>>,
    results: &mut Results,
    wrong: &mut Vec<String>,
) {
    let name = mutation.name();
    match verdicts {
        Err(error) => {
            progress::print(&format!("  {name}: {error:#}"));
            wrong.push(format!("{name}: {error:#}"));
        }
        Ok(verdicts) => {
            for (test, verdict) in mutation.mutation.tests.iter().zip(verdicts) {
                let told = format!("{name}: {}: {verdict:?}", test.label());
                progress::print(&format!("  {told}"));
                if !verdict.is_red() {
                    wrong.push(told);
                }
                results.add(&mutation.key(test), mutation.digest(test), verdict);
            }
        }
    }
}

/// The tree in which mutations are built.
struct Lab<'a> {
    paths: &'a Paths,
    tree: &'a Tree,
    /// How long a mutation's test may take, by the test's label.
    limits: Vec<(Variant, String, Duration)>,
}

impl Lab<'_> {
    fn log(&self, variant: Variant) -> PathBuf {
        let name = format!("kernel/mutate-{}.log", variant.name());
        self.paths.target().join(name)
    }

    /// The series itself passes every test, or a failure would say nothing.
    fn baseline<'b>(
        &mut self,
        variant: Variant,
        tests: impl Iterator<Item = &'b Test>,
    ) -> Result<()> {
        let mut unique: Vec<&Test> = Vec::new();
        for test in tests {
            if !unique.contains(&test) {
                unique.push(test);
            }
        }
        let image = self.build(variant, "the series without a mutation", 0)?;
        let (verdicts, times): (Vec<_>, Vec<_>) =
            self.tests(variant, &image, &unique)?.into_iter().unzip();
        let (factor, more) = SLOWER;
        for (test, time) in unique.iter().zip(times) {
            let limit = time * factor + more;
            self.limits.push((variant, test.label(), limit));
        }
        let failed = unique.iter().zip(verdicts);
        let failed = failed.filter(|(_, verdict)| *verdict != Verdict::Green);
        let failed: Vec<_> = failed
            .map(|(test, verdict)| format!("{}: {verdict:?}", test.label()))
            .collect();
        if !failed.is_empty() {
            bail!(
                "the series itself does not pass these tests, so that they show nothing:\n  {}",
                failed.join("\n  ")
            );
        }
        Ok(())
    }

    /// The image of a kernel with a mutation. The tree is restored in any case.
    fn mutant(&self, planned: &Planned<'_>, number: usize) -> Result<PathBuf> {
        let applied = planned.diff.apply(self.tree)?;
        let image = self.build(planned.variant(), &planned.name(), number);
        applied.restore()?;
        image
    }

    /// The verdicts of the mutation's tests.
    fn verdicts(&self, planned: &Planned<'_>, image: &Path) -> Result<Vec<Verdict>> {
        let tests: Vec<_> = planned.mutation.tests.iter().collect();
        let verdicts = self.tests(planned.variant(), image, &tests)?;
        Ok(verdicts.into_iter().map(|(verdict, _)| verdict).collect())
    }

    /// Builds the tree as it is; returns a copy of the image that the next build with another number keeps.
    fn build(&self, variant: Variant, what: &str, number: usize) -> Result<PathBuf> {
        let (log, output) = (self.log(variant), format!("build-{}", variant.name()));
        let tree = self.tree.path();
        files::remove(&log)?;
        configure(variant, self.paths, tree, &output, &log)?;
        let progress = Progress::start(&format!("building {what}"), None, is_object);
        make(self.paths, variant.arch, tree, &output)
            .arg(variant.arch.image_name())
            .logged(&log, &progress)?;
        progress.done();
        // The next build must not change the image of a VM that runs.
        let copy = log.with_extension(format!("image-{number}"));
        fs::copy(tree.join(&output).join(variant.arch.image_path()), &copy)?;
        Ok(copy)
    }

    /// Runs tests on a kernel, in a VM for each set of kernel parameters.
    fn tests(
        &self,
        variant: Variant,
        image: &Path,
        tests: &[&Test],
    ) -> Result<Vec<(Verdict, Duration)>> {
        let listed = selftests::list(variant.arch, self.paths)?;
        let runs_parallel = |test: &Test| {
            let mut listed = listed.iter().filter(|known| known.name() == test.program);
            listed.any(|known| known.runs == Runs::Parallel)
        };
        let mut machines: BTreeMap<(&[String], bool), Vec<usize>> = BTreeMap::new();
        for (index, test) in tests.iter().enumerate() {
            machines
                .entry((test.parameters.as_slice(), runs_parallel(test)))
                .or_default()
                .push(index);
        }
        let not_run = (Verdict::Nothing("it was not run".into()), Duration::ZERO);
        let mut verdicts = vec![not_run; tests.len()];
        for ((parameters, is_parallel), indices) in machines {
            let group: Vec<_> = indices.iter().map(|&index| tests[index]).collect();
            let timing = match is_parallel {
                true => Timing::Parallel,
                false => Timing::Function,
            };
            let found = self.machine(variant, image, (parameters, timing), &group)?;
            for (index, verdict) in indices.into_iter().zip(found) {
                verdicts[index] = verdict;
            }
        }
        Ok(verdicts)
    }

    fn machine(
        &self,
        variant: Variant,
        image: &Path,
        (parameters, timing): (&[String], Timing),
        tests: &[&Test],
    ) -> Result<Vec<(Verdict, Duration)>> {
        let mut args = VmArgs {
            timing,
            cpus: Some(2),
            pagetide: Pagetide::None,
            timeout: VM_TIMEOUT,
            // With less there is no room for a huge page of 1G.
            memory: "6G".into(),
            append: vec![HUGE_PAGES.into()],
            image: Some(image.to_owned()),
            ..VmArgs::new(variant)
        };
        args.append.extend(parameters.iter().cloned());
        for suite in tests.iter().filter_map(|test| test.kunit()) {
            args.append.extend(kunit::append(suite));
        }
        let jobs: Vec<Job> = tests.iter().map(|test| self.job(variant, test)).collect();
        let progress = Progress::spinner(&format!("{} tests in a VM", jobs.len()));
        let outcome = vm::boot(&args, &jobs, Output::Keep(&mut |_, _| {}), self.paths)?;
        progress.done();
        let said = fs::read(&outcome.console)?;
        let console = String::from_utf8_lossy(&said);
        let mut verdicts = Vec::new();
        for (test, job) in tests.iter().zip(outcome.jobs()) {
            let verdict = match (job.finished, &outcome.lost) {
                (Some(finished), _) => {
                    let [out, err] = [&job.stdout, &job.stderr].map(|b| String::from_utf8_lossy(b));
                    match test.kunit() {
                        Some(suite) => match kunit::failure(&console, suite) {
                            None => Verdict::Green,
                            Some(what) => Verdict::Red(what),
                        },
                        None => Verdict::of(finished.ended, &format!("{out}{err}")),
                    }
                }
                (None, lost) => {
                    let reason = lost.as_deref().unwrap_or("its VM ended before it");
                    Verdict::Nothing(format!("the VM was lost: {reason}"))
                }
            };
            // Whichever of them made the kernel complain.
            let verdict = verdict.of_complaints(&outcome.complaints);
            let time = job
                .finished
                .map_or(Duration::ZERO, |finished| finished.time);
            verdicts.push((verdict, time));
        }
        Ok(verdicts)
    }

    fn job(&self, variant: Variant, test: &Test) -> Job {
        let directory = selftests::directory_in_vm(variant, self.paths);
        let program = match test.kunit() {
            Some(_) => "true".into(),
            None => directory.join(&test.program).into_os_string(),
        };
        let arguments = test.arguments.iter().filter(|_| test.kunit().is_none());
        let mut command: Vec<OsString> = vec![program];
        command.extend(arguments.map(OsString::from));
        let label = test.label();
        let mut limits = self.limits.iter();
        let limit = limits.find(|(of, name, _)| *of == variant && *name == label);
        let timeout = match limit {
            Some((_, _, limit)) => *limit,
            None if variant.debug => DEBUG_TEST_TIMEOUT,
            None => TEST_TIMEOUT,
        };
        Job {
            timeout: Some(timeout),
            ..Job::new(command, &directory)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_of_one_base() {
        let patch = Patch {
            name: "01-a/0001-b.patch".into(),
            content: b"Subject: b\n\ndiff --git a/a.c b/a.c\n@@ -1 +1 @@\n-a\n+b\n".to_vec(),
        };
        let test = Test {
            parameters: Vec::new(),
            program: "a_test".into(),
            arguments: Vec::new(),
        };
        let mutation = Mutation {
            arch: Arch::X86_64,
            change: list::Change::Revert {
                file: None,
                hunk: None,
            },
            tests: vec![test.clone()],
        };
        let diff = Diff::of(&mutation, &patch, &Paths::find().unwrap()).unwrap();
        assert_eq!(digest("1", &diff, &test), digest("1", &diff, &test));
        assert_ne!(digest("1", &diff, &test), digest("2", &diff, &test));
    }
}
