//! The steps `upstream`, `upstream-arm64` and `upstream-quick`: the kernel's own tests, built unmodified from the
//! unpatched source, on the stock kernel and on the series. What passes on the stock kernel has to pass on the series.

mod compare;
mod lane;
mod list;
mod parts;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, anyhow};
use fs_err as fs;

use super::lab;
use super::log_file;
use super::tally::{Tally, Verdict};
use crate::kernel::selftests::{self, Selftest};
use crate::kernel::{Arch, Variant};
use crate::paths::Paths;
use crate::setup;

use compare::{Ran, compare};
use lane::{Lane, OnKernel};
use list::List;

/// For one test on the stock kernel. What takes longer is not compared.
const LIMIT: Duration = Duration::from_secs(300);

/// The same on the series. Another load of the machine must not make the difference.
const SERIES_LIMIT: Duration = Duration::from_secs(900);

/// How often a test that is worse on the series runs again on both kernels.
const AGAIN: usize = 3;

/// If more tests are worse, something else is wrong.
const MANY: usize = 20;

/// Takes the step `upstream` or `upstream-arm64`.
pub(super) fn run(arch: Arch, paths: &Paths, tally: &mut Tally) -> Result<()> {
    let list = List::read(arch, paths)?;
    let group = match arch {
        Arch::X86_64 => "upstream",
        Arch::Arm64 => "upstream-arm64",
    };
    for (source, reason) in list.left_out() {
        tally.add(group, source, Verdict::Skipped(reason.to_owned()));
    }
    // What upstream.config adds has nothing of an architecture. On arm64 the step does without, so that a stock kernel
    // is all that it builds beside those of other steps.
    let variant = Variant {
        upstream: arch == Arch::X86_64,
        ..Variant::patched(arch)
    };
    let tests = |tree: &Path| list.tests(tree);
    Comparison::build(group, variant, &list, tests, paths, tally)?.run(tally)
}

/// The short form: a few tests, on kernels that other steps build as well.
pub(super) fn quick(paths: &Paths, tally: &mut Tally) -> Result<()> {
    let arch = Arch::X86_64;
    let list = List::read(arch, paths)?;
    let tests = |_: &Path| Ok(list.quick().to_vec());
    let variant = Variant::patched(arch);
    Comparison::build("upstream-quick", variant, &list, tests, paths, tally)?.run(tally)
}

/// The same kernel without the series.
fn stock(variant: Variant) -> Variant {
    Variant {
        stock: true,
        ..variant
    }
}

/// Tests to be run on two kernels.
struct Comparison<'a> {
    /// The step's name in the tally.
    group: &'static str,
    /// The series' kernel.
    variant: Variant,
    list: &'a List,
    tests: Vec<Selftest>,
    /// Where their programs are.
    directory: PathBuf,
    paths: &'a Paths,
}

/// What became of tests on the stock kernel and on the series.
struct Both {
    stock: OnKernel,
    series: OnKernel,
}

impl<'a> Comparison<'a> {
    /// Builds both kernels, and those of the stock kernel's own tests that `tests` chooses.
    fn build(
        group: &'static str,
        variant: Variant,
        list: &'a List,
        tests: impl FnOnce(&Path) -> Result<Vec<Selftest>>,
        paths: &'a Paths,
        tally: &mut Tally,
    ) -> Result<Self> {
        setup::require(setup::upstream_tools(variant.arch))?;
        lab::kernel(stock(variant), paths, tally);
        lab::kernel(variant, paths, tally);
        let (tests, directory) = selftests::build_upstream(stock(variant), paths, tests)?;
        Ok(Self {
            group,
            variant,
            list,
            tests,
            directory,
            paths,
        })
    }

    fn run(&self, tally: &mut Tally) -> Result<()> {
        let mut both = self.on_both(&self.tests, "", tally)?;
        let mut verdicts = self.verdicts(&both);
        let failed = verdicts.iter().enumerate();
        let failed = failed.filter(|(_, verdict)| matches!(verdict, Verdict::Failed(_)));
        let failed: Vec<usize> = failed.map(|(number, _)| number).collect();
        if (1..=MANY).contains(&failed.len()) {
            let more = self.again(&failed, &both, &mut verdicts, tally)?;
            both.stock.complaints.extend(more.stock.complaints);
            both.series.complaints.extend(more.series.complaints);
        }
        self.report(&both, &verdicts)?;
        for (test, verdict) in self.tests.iter().zip(verdicts) {
            tally.add(self.group, &test.label(), verdict);
        }
        let verdict = match new_complaints(&both).join("\n  ") {
            lines if lines.is_empty() => Verdict::Passed,
            lines => Verdict::Failed(lines),
        };
        tally.add(self.group, "no new complaint of the kernel", verdict);
        Ok(())
    }

    /// Runs tests on both kernels, side by side.
    fn on_both(&self, tests: &[Selftest], suffix: &str, tally: &mut Tally) -> Result<Both> {
        let lane = |kernel: &str, variant, limit| Lane {
            name: format!("{}-{kernel}{suffix}", self.group),
            limit,
            variant,
            tests,
            directory: &self.directory,
            paths: self.paths,
        };
        let on_stock = lane("stock", stock(self.variant), LIMIT);
        let on_series = lane("series", self.variant, SERIES_LIMIT);
        let (stock, series) = std::thread::scope(|scope| {
            let stock = scope.spawn(|| on_stock.run());
            let series = on_series.run();
            let panicked = || Err(anyhow!("the thread for the stock kernel panicked"));
            (stock.join().unwrap_or_else(|_| panicked()), series)
        });
        let (stock, series) = (stock?, series?);
        stock.tell(&on_stock.name, tally);
        series.tell(&on_series.name, tally);
        Ok(Both { stock, series })
    }

    fn verdicts(&self, Both { stock, series }: &Both) -> Vec<Verdict> {
        let both = stock.ran.iter().zip(&series.ran).zip(&series.printed);
        let tests = self.tests.iter().zip(both);
        tests
            .map(
                |(test, ((stock, series), printed))| match compare(stock, series) {
                    Verdict::Failed(how) => match self.list.difference(test) {
                        Some(difference) if printed.contains(&difference.text) => {
                            Verdict::Skipped(format!("differs: {}", difference.reason))
                        }
                        _ => Verdict::Failed(how),
                    },
                    other => other,
                },
            )
            .collect()
    }

    /// Runs tests that are worse on the series a few times more, and takes those out that are as bad on the stock
    /// kernel now and then.
    fn again(
        &self,
        failed: &[usize],
        first: &Both,
        verdicts: &mut [Verdict],
        tally: &mut Tally,
    ) -> Result<Both> {
        let tests = failed.iter().flat_map(|number| {
            let test = self.tests.get(*number);
            std::iter::repeat_n(test, AGAIN).flatten().cloned()
        });
        let tests: Vec<Selftest> = tests.collect();
        let more = self.on_both(&tests, "-again", tally)?;
        let stock = more.stock.ran.chunks(AGAIN);
        let runs = stock.zip(more.series.ran.chunks(AGAIN));
        for (&number, (stock, series)) in failed.iter().zip(runs) {
            let (Some(old), Some(new)) =
                (first.stock.ran.get(number), first.series.ran.get(number))
            else {
                continue;
            };
            if let Some(Verdict::Failed(how)) = verdicts.get(number) {
                verdicts[number] = after_more(how, old, new, stock, series);
            }
        }
        Ok(more)
    }

    /// Writes a table, and says what cannot be seen in the tally.
    fn report(&self, Both { stock, series }: &Both, verdicts: &[Verdict]) -> Result<()> {
        let mut table = String::new();
        let (mut alike, mut parts) = (0, 0);
        let ran = stock.ran.iter().zip(&series.ran).zip(verdicts);
        for (test, ((stock, series), verdict)) in self.tests.iter().zip(ran) {
            if stock.passed() && series.passed() {
                alike += 1;
                parts += series.passed_parts();
            }
            let verdict = match verdict {
                Verdict::Passed => "passed".to_owned(),
                Verdict::Failed(how) => format!("FAILED: {how}"),
                Verdict::Skipped(reason) => format!("skipped: {reason}"),
            };
            let (stock, series) = (stock.told(), series.told());
            table += &format!("{}\t{stock}\t{series}\t{verdict}\n", test.label());
        }
        let file = log_file(self.paths, self.group)?.with_extension("tsv");
        fs::write(&file, table)?;
        let group = self.group;
        println!("{group}: {alike} tests with {parts} parts pass on both kernels");
        println!("{group}: {} has each test", file.display());
        Ok(())
    }
}

/// The verdict on a test that was worse on the series, after it ran a few times more on both kernels.
fn after_more(how: &str, old: &Ran, new: &Ran, stock: &[Ran], series: &[Ran]) -> Verdict {
    let worse = |stock: &Ran, other: &Ran| matches!(compare(stock, other), Verdict::Failed(_));
    let as_bad = stock
        .iter()
        .filter(|run| !run.is_lost() && !worse(run, new));
    let as_bad = as_bad.count();
    let again = series.iter().filter(|run| worse(old, run)).count();
    let (of_stock, of_series) = (stock.len(), series.len());
    if as_bad > 0 {
        Verdict::Skipped(format!(
            "unsteady on both kernels, as bad in {as_bad} of {of_stock} more runs of the stock kernel: {how}"
        ))
    } else {
        Verdict::Failed(format!(
            "{how}; of {of_series} more runs, {again} are worse on the series, and none of {of_stock} is as bad on \
             the stock kernel"
        ))
    }
}

/// What only the series' kernel said.
fn new_complaints(Both { stock, series }: &Both) -> Vec<&str> {
    let is_old = |line: &str| stock.complaints.iter().any(|old| same_complaint(old, line));
    let lines = series.complaints.iter().map(String::as_str);
    lines.filter(|line| !is_old(line)).collect()
}

/// Whether two lines of a console say the same, whatever their times, processors and processes.
fn same_complaint(a: &str, b: &str) -> bool {
    let words = |line: &str| {
        let words = line.split(|c: char| !(c.is_alphabetic() || c == '_'));
        words
            .filter(|word| !word.is_empty())
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    words(a) == words(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::Ended;

    #[test]
    fn a_test_that_is_as_bad_on_the_stock_kernel_is_unsteady() {
        let ran = |status| Ran::of(Ended::Exit(status), "");
        let (good, bad, lost) = (ran(0), ran(1), Ran::of(Ended::Timeout, ""));
        let verdict =
            |stock: &[Ran]| after_more("how", &good, &bad, stock, std::slice::from_ref(&good));
        let steady = verdict(&[good.clone(), lost]);
        assert!(matches!(steady, Verdict::Failed(_)), "{steady:?}");
        let unsteady = verdict(&[good.clone(), bad.clone()]);
        assert!(matches!(unsteady, Verdict::Skipped(_)), "{unsteady:?}");
    }

    #[test]
    fn a_complaint_is_the_same_at_another_time() {
        let a = "[   12.5] WARNING: CPU: 1 PID: 77 at mm/gup.c:12 try_get+0x1/0x2";
        let b = "[  112.9] WARNING: CPU: 0 PID: 9 at mm/gup.c:14 try_get+0x7/0x2";
        assert!(same_complaint(a, b));
        assert!(!same_complaint(
            a,
            "[ 1.0] WARNING: CPU: 1 PID: 77 at mm/gup.c:12 other+0x1/0x2"
        ));
    }
}
