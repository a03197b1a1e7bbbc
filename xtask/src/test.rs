//! `cargo xtask test`: everything that must hold before a change is taken.

mod arm64;
mod busy;
mod clean_root;
mod closing;
mod failed;
mod fuzz;
mod host;
mod jobs;
pub(crate) mod kunit;
mod lab;
mod libtest;
mod loom;
mod package;
mod roots;
mod schedule;
mod seed;
mod selftests;
mod systemd;
mod tally;
mod upstream;

use std::num::NonZero;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use fs_err as fs;

use crate::command::Run;
use crate::kernel::{Arch, check, source};
use crate::paths::Paths;
use crate::progress::Progress;
use crate::{cross, outside, setup, uapi};

use closing::{Done, End};
use tally::{Tally, Verdict};

/// The verb's arguments.
#[derive(Debug, Args)]
pub(crate) struct TestArgs {
    /// Only these steps (may be given several times) [default: all but fuzz, thorough, stress, gigantic,
    /// nodes, debug, modules, kernel-package, old-kernel, roots, systemd, systemd-vm, upstream, upstream-arm64 and busy]
    #[arg(long, value_enum, value_name = "STEP")]
    only: Vec<Step>,
    /// Take the steps so often, until something fails; each time with a new seed, unless PAGETIDE_SEED is set
    #[arg(long, value_name = "N", requires = "only")]
    repeat: Option<NonZero<u32>>,
    /// Of host, old-kernel and busy, only the test programs whose names begin so, as `serve/ends`, and no documentation
    #[arg(long, value_name = "NAME", requires = "only")]
    program: Option<String>,
}

#[cfg(test)]
impl TestArgs {
    /// Whether `make test` takes these steps, too.
    pub(crate) fn is_default(&self) -> bool {
        self.only.iter().all(|step| step.is_default())
    }
}

/// The steps. As many run at a time as there are processors, in this order, each after those that it
/// needs: first the steps that fail quickly and those that compile, then the longest. A long step that
/// starts last would run alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
enum Step {
    /// rustfmt
    Format,
    /// Build the kernels of the steps below, and the lab's QEMU
    Kernel,
    /// clippy, with warnings denied; also of the command with each of its features alone
    Clippy,
    /// Every crate's tests, on this machine
    Host,
    /// The Debian package, with the command that the tests call, installed in a clean root
    Package,
    /// The generated constants are the patched headers'
    Uapi,
    /// The tests that loom takes through every order of their threads' steps
    Loom,
    /// The whole workspace compiles for arm64, tests included, with warnings denied
    Cross,
    /// Each patch of the series applies and passes checkpatch.pl (`kernel check --quick`)
    Patches,
    /// Linux guests on the patched kernel, in a VM with one CPU
    Linux,
    /// The crates' tests on the patched kernel
    Lab,
    /// Selftests on the patched kernel
    Selftests,
    /// On arm64: the tests of uapi, memory, pager and kvm, `pagetide probe`, and selftests
    Arm64,
    /// The tests of what a kernel without the series refuses, and short benchmarks, on the stock
    /// kernel
    Stock,
    /// A few quick ones of the kernel's own tests, unmodified, on the stock kernel and on the series: see upstream
    UpstreamQuick,
    /// Selftests that shadow paging makes a difference to, with shadow paging
    Shadow,
    /// The parsers of hostile input under a fuzzer, 20 s each (only if asked for: about seven minutes with its build)
    Fuzz,
    /// In the lab, what Lab and Linux leave to this machine: every command line and kind of Linux guest. Then the
    /// Debian package with the optimised command, and `cargo install` (only if asked for: about a quarter of an hour)
    Thorough,
    /// The stress tests on this machine for ten minutes each, and loom's tests without a bound (only if asked for:
    /// about half an hour)
    Stress,
    /// The selftests that fill huge pages of 1G again and again (only if asked for: about five minutes)
    Gigantic,
    /// Selftests on a kernel with two NUMA nodes, swap and guest_memfd (only if asked for: about a quarter of an
    /// hour with its build)
    Nodes,
    /// The same on a kernel that also checks locks, RCU and memory (only if asked for: about an hour with its build)
    Debug,
    /// Selftests with KVM as modules, as distributions have it (only if asked for: about a quarter of an hour with its
    /// build)
    Modules,
    /// Selftests on the kernel of the Debian packages that `cargo xtask kernel package` makes (only if asked for: about two
    /// hours with its build)
    KernelPackage,
    /// What serves memory, on Debian 12's own kernel, Linux 6.1, which has no UFFDIO_POISON (only if asked for: about a
    /// quarter of an hour)
    OldKernel,
    /// In a fresh Debian 12 and a fresh Debian 13, README's commands up to the demo's end (only if asked for: about an
    /// hour)
    Roots,
    /// The package's service under a real systemd: stops, restarts, kill -9, a full disk and the like, 100 VMs each (only
    /// if asked for: about two minutes)
    Systemd,
    /// The same in a VM, on Debian 13's own kernel with control groups of version 2 alone, and a VMM whose group has a limit of
    /// memory (only if asked for: about half an hour)
    SystemdVm,
    /// The kernel's own tests, unmodified, on the stock kernel and on the series: none may fail on the series that
    /// passes on the stock kernel (only if asked for: about an hour with two kernels' builds)
    Upstream,
    /// The same on arm64 (only if asked for: about an hour with the stock kernel's build)
    UpstreamArm64,
    /// The crates' tests on this machine under load, on one processor, and in random order, compared with how long they
    /// take alone (only if asked for: at most 45 minutes beside compiling, after all other steps)
    Busy,
}

/// The features of the command that bring verbs (crates/cli/Cargo.toml).
const FEATURES: [&str; 4] = ["serve", "objects", "bench", "guest"];

/// The steps that compile, or call git and perl, for minutes in a first run, after which VMs run: beside compilers a
/// VM takes many times as long, since its CPUs spin for one that waits for a processor.
const COMPILE: &[Step] = &[Step::Kernel, Step::Clippy, Step::Cross, Step::Patches];

impl Step {
    /// What must have ended before. A step whose needs went wrong fails by itself.
    fn needs(self) -> &'static [Step] {
        match self {
            Self::Selftests | Self::Shadow | Self::Arm64 | Self::Stock | Self::UpstreamQuick => {
                COMPILE
            }
            // Which tests this machine could not run.
            Self::Lab | Self::Linux => &[
                Self::Kernel,
                Self::Clippy,
                Self::Cross,
                Self::Patches,
                Self::Host,
            ],
            Self::Package => &[Self::Host],
            // Both make the package.
            Self::Systemd => &[Self::Host, Self::Package],
            Self::SystemdVm => &[Self::Host, Self::Package, Self::Systemd],
            Self::Uapi
            | Self::Gigantic
            | Self::Nodes
            | Self::Debug
            | Self::Modules
            | Self::KernelPackage
            | Self::Thorough => &[Self::Kernel],
            Self::OldKernel => &[Self::Host],
            // It measures, and its load would disturb the others. It is the last of them.
            Self::Busy => {
                let all = Self::value_variants().split_last();
                all.map_or(&[], |(_, others)| others)
            }
            _ => &[],
        }
    }

    /// Whether the step is taken if none is named.
    fn is_default(self) -> bool {
        let asked = [
            Self::Fuzz,
            Self::Thorough,
            Self::Stress,
            Self::Gigantic,
            Self::Nodes,
            Self::Debug,
            Self::Modules,
            Self::KernelPackage,
            Self::OldKernel,
            Self::Roots,
            Self::Systemd,
            Self::SystemdVm,
            Self::Upstream,
            Self::UpstreamArm64,
            Self::Busy,
        ];
        !asked.contains(&self)
    }

    /// Whether the step runs test programs, among which `--program` can choose.
    fn takes_programs(self) -> bool {
        matches!(self, Self::Host | Self::OldKernel | Self::Busy)
    }

    fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// One step of the run.
struct Testing<'a> {
    paths: &'a Paths,
    /// With what the names of the test programs begin that are taken.
    program: Option<&'a str>,
    /// What the steps before it gave, and it gives.
    tally: Tally,
    host_ran: bool,
}

/// Runs the verb. The last line that it prints is `N passed, N failed, N skipped`, and, if the kernel's source is not
/// the one that kernel/BASE names, which one it is.
pub(crate) fn run(args: &TestArgs, paths: &Paths) -> Result<ExitCode> {
    setup::run()?;
    let started = Instant::now();
    let wanted = |step: &Step| match args.only.as_slice() {
        [] => step.is_default(),
        only => only.contains(step),
    };
    let steps: Vec<Step> = Step::value_variants()
        .iter()
        .copied()
        .filter(wanted)
        .collect();
    if args.program.is_some()
        && let Some(step) = steps.iter().find(|step| !step.takes_programs())
    {
        bail!(
            "--program chooses among test programs, which {} does not",
            step.name()
        );
    }
    if args.only.is_empty() {
        warn_of_little_room(paths);
    }
    let rounds = args.repeat.map_or(1, NonZero::get);
    let Rounds { last, done } = rounds_of(rounds, seed::draw, || {
        take_all(&steps, args.program.as_deref(), paths)
    })?;
    let end = End {
        rounds: (rounds > 1).then_some((last, rounds)),
        took: started.elapsed(),
        notice: source::notice(),
    };
    print!("{}", done.closing(&end));
    Ok(if done.tally.ok() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// A full disk would be found after minutes, in the middle of a compilation.
fn warn_of_little_room(paths: &Paths) {
    // What is compiled late.
    let is_cold = !cross::target(paths).exists() || !paths.work().exists();
    let free_mib = outside::free_mib(paths.root());
    if let Some(warning) = free_mib.and_then(|free_mib| outside::little_room(free_mib, is_cold)) {
        eprintln!("warning: {warning}");
    }
}

/// What has come of the rounds of a run.
struct Rounds {
    /// The number of the last one, from 1.
    last: u32,
    /// Of all rounds.
    done: Done,
}

/// Takes rounds, each begun by `begin`, until one has a failure or all were taken.
fn rounds_of(
    rounds: u32,
    begin: impl Fn() -> Result<()>,
    take: impl Fn() -> Done,
) -> Result<Rounds> {
    let mut all = Done::default();
    let mut last = 0;
    while last < rounds && !all.tally.has_failed() {
        begin()?;
        last += 1;
        if rounds > 1 {
            println!("== round {last} of {rounds}: {}", seed::assignment());
        }
        // A round knows nothing of those before it: what one left out, the next one does again.
        let Done { tally, costs } = take();
        all.tally.merge(tally);
        all.costs.merge(costs);
    }
    Ok(Rounds { last, done: all })
}

/// Takes each step once.
fn take_all(steps: &[Step], program: Option<&str>, paths: &Paths) -> Done {
    let done = Mutex::new(Done::default());
    let host_ran = AtomicBool::new(false);
    let workers = thread::available_parallelism().map_or(1, NonZero::get);
    schedule::run(steps, workers, Step::needs, |step| {
        let mut testing = Testing {
            paths,
            program,
            tally: lock(&done).tally.for_step(),
            host_ran: host_ran.load(Ordering::Relaxed),
        };
        let cost = testing.timed(step);
        host_ran.fetch_or(testing.host_ran, Ordering::Relaxed);
        let mut done = lock(&done);
        done.tally.merge(testing.tally);
        done.costs.add(&step.name(), cost);
    });
    done.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn lock(done: &Mutex<Done>) -> MutexGuard<'_, Done> {
    done.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Testing<'_> {
    /// Takes the step, and returns what that cost. What keeps it from being taken is a failure.
    fn timed(&mut self, step: Step) -> Duration {
        let name = step.name();
        println!("== {name}");
        let start = Instant::now();
        let before = self.tally.clone();
        if let Err(error) = self.step(step) {
            self.tally
                .add(&name, "step", Verdict::Failed(format!("{error:#}")));
        }
        if !self.tally.failures().is_empty() {
            match failed::keep(&name, &self.tally, self.paths) {
                Ok(folder) => self.tally.kept_in(folder),
                // The failure itself counts, and was printed.
                Err(error) => eprintln!("the logs of {name} could not be kept: {error:#}"),
            }
        }
        let counts = self.tally.since(&before);
        let cost = start.elapsed();
        println!("== {name}: {counts} in {:.0} s", cost.as_secs_f64());
        cost
    }

    fn step(&mut self, step: Step) -> Result<()> {
        match step {
            Step::Format => {
                self.cargo("format", &["fmt", "--all", "--check"])?;
                let fuzzer = "fuzz/libfuzzer/Cargo.toml";
                let arguments = ["fmt", "--check", "--manifest-path", fuzzer];
                self.cargo("format of the fuzzer", &arguments)
            }
            Step::Clippy => self.clippy(),
            Step::Host => {
                host::run(self.program, self.paths, &mut self.tally)?;
                self.host_ran = self.program.is_none();
                Ok(())
            }
            Step::Busy => busy::run(self.program, self.paths, &mut self.tally),
            Step::Loom => loom::run(loom::Bound::AsWritten, self.paths, &mut self.tally),
            Step::Fuzz => fuzz::run(self.paths, &mut self.tally),
            Step::Kernel => {
                lab::build(self.paths, &mut self.tally);
                Ok(())
            }
            Step::Uapi => {
                uapi::run(&uapi::UapiArgs::check(), self.paths)?;
                self.tally
                    .add("uapi", "generated constants", Verdict::Passed);
                Ok(())
            }
            Step::Patches => self.patches(),
            Step::Lab => lab::patched(self.paths, self.host_ran, &mut self.tally),
            Step::Linux => lab::linux(self.paths, &mut self.tally),
            Step::Shadow => selftests::shadow(self.paths, &mut self.tally),
            Step::Selftests => selftests::usual(self.paths, &mut self.tally),
            Step::Stock => lab::stock(self.paths, &mut self.tally),
            Step::UpstreamQuick => upstream::quick(self.paths, &mut self.tally),
            Step::Cross => arm64::compile(self.paths, &mut self.tally),
            Step::Arm64 => arm64::run(self.paths, &mut self.tally),
            Step::Package => package::run(self.paths, &mut self.tally),
            Step::Thorough => {
                lab::thorough(self.paths, &mut self.tally)?;
                package::optimised(self.paths, &mut self.tally)
            }
            Step::Stress => {
                loom::run(loom::Bound::None, self.paths, &mut self.tally)?;
                host::stress(self.paths, &mut self.tally)
            }
            Step::Gigantic => selftests::gigantic(self.paths, &mut self.tally),
            Step::Nodes => selftests::nodes(self.paths, &mut self.tally),
            Step::Debug => selftests::debug(self.paths, &mut self.tally),
            Step::Modules => selftests::modules(self.paths, &mut self.tally),
            Step::KernelPackage => selftests::packaged(self.paths, &mut self.tally),
            Step::OldKernel => lab::old_kernel(self.program, self.paths, &mut self.tally),
            Step::Roots => roots::run(self.paths, &mut self.tally),
            Step::Systemd => systemd::run(self.paths, &mut self.tally),
            Step::SystemdVm => systemd::in_vm(self.paths, &mut self.tally),
            Step::Upstream => upstream::run(Arch::X86_64, self.paths, &mut self.tally),
            Step::UpstreamArm64 => upstream::run(Arch::Arm64, self.paths, &mut self.tally),
        }
    }

    /// The whole workspace; then the command with each of its features alone, of which most crates are compiled by then.
    fn clippy(&mut self) -> Result<()> {
        const DENIED: [&str; 3] = ["--", "-D", "warnings"];
        let all = ["clippy", "--workspace", "--all-targets"];
        self.cargo("clippy", &[&all[..], &DENIED].concat())?;
        for feature in FEATURES {
            let one = ["clippy", "--package", "pagetide-cli"];
            let alone = ["--no-default-features", "--features", feature];
            let name = format!("clippy with feature {feature} alone");
            self.cargo(&name, &[&one[..], &alone, &DENIED].concat())?;
        }
        Ok(())
    }

    /// A cargo command that passes or fails as a whole.
    fn cargo(&mut self, name: &str, arguments: &[&str]) -> Result<()> {
        let log = log_file(self.paths, name)?;
        self.tally.leaves(name, "output.log", &log);
        let progress = Progress::spinner(&format!("cargo {}", arguments[0]));
        Run::new("cargo")
            .args(arguments)
            .dir(self.paths.root())
            .logged(&log, &progress)?;
        progress.done();
        self.tally.add(name, arguments[0], Verdict::Passed);
        Ok(())
    }

    fn patches(&mut self) -> Result<()> {
        let results = check::check(&check::CheckArgs::quick(), self.paths)?;
        for (name, failure) in results {
            self.tally.add(
                "patches",
                &name,
                failure.map_or(Verdict::Passed, Verdict::Failed),
            );
        }
        Ok(())
    }
}

/// A fresh log for a step.
fn log_file(paths: &Paths, name: &str) -> Result<std::path::PathBuf> {
    let dir = paths.target().join("test");
    fs::create_dir_all(&dir)?;
    let file = dir.join(format!("{name}.log"));
    fs::write(&file, "")?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: TestArgs,
    }

    /// What the rounds come to if the test of one of them fails.
    fn rounds(count: u32, failing: u32) -> (u32, String) {
        let begun = Cell::new(0);
        let begin = || {
            begun.set(begun.get() + 1);
            Ok(())
        };
        let take = || {
            let mut done = Done::default();
            let verdict = match begun.get() == failing {
                true => Verdict::Failed("on purpose".into()),
                false => Verdict::Passed,
            };
            done.tally.add("a", "1", verdict);
            done.costs.add("host", Duration::from_secs(2));
            done
        };
        let Rounds { last, done } = rounds_of(count, begin, take).unwrap();
        assert_eq!(last, begun.get());
        let seconds = format!("{:7}  host", 2 * last);
        assert!(done.costs.table().contains(&seconds), "{seconds}");
        (last, done.tally.closing_line())
    }

    #[test]
    fn rounds_end_with_the_first_that_fails() {
        assert_eq!(rounds(5, 3), (3, "0 passed, 1 failed, 0 skipped".into()));
        assert_eq!(rounds(5, 9), (5, "1 passed, 0 failed, 0 skipped".into()));
        assert_eq!(rounds(1, 1).0, 1);
    }

    #[test]
    fn to_repeat_takes_a_step_and_a_number() {
        let parse = |line: &str| Line::try_parse_from(line.split(' '));
        let args = parse("test --only host --repeat 20 --program serve/")
            .unwrap()
            .args;
        assert_eq!(args.repeat.map(NonZero::get), Some(20));
        assert_eq!(args.program.as_deref(), Some("serve/"));
        for wrong in [
            "test --repeat 2",
            "test --program serve/",
            "test --only host --repeat 0",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn busy_begins_when_all_others_have_ended() {
        let others = Step::Busy.needs();
        assert_eq!(others.len(), Step::value_variants().len() - 1);
        assert!(!others.contains(&Step::Busy));
    }

    #[test]
    fn a_step_says_that_it_runs_only_if_asked_for() {
        for step in Step::value_variants() {
            let value = step.to_possible_value().unwrap();
            let help = value.get_help().unwrap().to_string();
            let asked = help.contains("only if asked for");
            assert_eq!(asked, !step.is_default(), "{}", value.get_name());
        }
    }
}
