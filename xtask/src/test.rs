//! `cargo xtask test`: everything that must hold before a change is taken.

mod host;
mod kunit;
mod lab;
mod libtest;
mod tally;

use std::num::NonZero;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};

use crate::command::Run;
use crate::kernel::{Arch, Variant, check};
use crate::paths::Paths;
use crate::progress::Progress;
use crate::{setup, uapi};

use tally::{Tally, Verdict};

/// The verb's arguments.
#[derive(Debug, Args)]
pub(crate) struct TestArgs {
    /// Only these steps (may be given several times) [default: all but debug]
    #[arg(long, value_enum, value_name = "STEP")]
    only: Vec<Step>,
}

/// The steps, in the order in which they run: what fails quickly comes first, and what leaves
/// processors idle comes last and together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Step {
    /// rustfmt
    Format,
    /// clippy, with warnings denied
    Clippy,
    /// Every crate's tests, on this machine
    Host,
    /// Build the patched kernel for x86_64; the lanes that need others build them
    Kernel,
    /// The generated constants are the patched headers'
    Uapi,
    /// Each patch of the series by itself (`kernel check --quick`)
    Patches,
    /// The crates' tests on the patched kernel
    Lab,
    /// The tests of what a kernel without the series refuses, and short benchmarks, on the stock
    /// kernel
    Stock,
    /// Selftests on arm64
    Arm64,
    /// Selftests on the patched kernel
    Selftests,
    /// Those that shadow paging makes a difference to, with shadow paging
    Shadow,
    /// Linux guests on the patched kernel, in a VM with one CPU
    Linux,
    /// Selftests on a kernel that checks locks, RCU and memory (only if asked for: about an hour
    /// with its build)
    Debug,
}

impl Step {
    /// Whether the step runs beside others: VMs, whose software CPU takes one processor, and the
    /// patches, each of which is a short build that ends with one compiler at work.
    fn is_lane(self) -> bool {
        matches!(
            self,
            Self::Patches
                | Self::Lab
                | Self::Linux
                | Self::Selftests
                | Self::Shadow
                | Self::Stock
                | Self::Arm64
                | Self::Debug
        )
    }

    /// Whether the step is taken if none is named.
    fn is_default(self) -> bool {
        self != Self::Debug
    }

    fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// The run so far.
#[derive(Clone)]
struct Testing<'a> {
    paths: &'a Paths,
    tally: Tally,
    host_ran: bool,
}

/// Runs the verb. The last line that it prints is `N passed, N failed, N skipped`.
pub(crate) fn run(args: &TestArgs, paths: &Paths) -> Result<ExitCode> {
    setup::run()?;
    let started = Instant::now();
    let mut testing = Testing {
        paths,
        tally: Tally::default(),
        host_ran: false,
    };
    let wanted = |step: &&Step| match args.only.as_slice() {
        [] => step.is_default(),
        only => only.contains(step),
    };
    let (lanes, steps): (Vec<Step>, Vec<Step>) = Step::value_variants()
        .iter()
        .filter(wanted)
        .partition(|step| step.is_lane());
    for step in steps {
        testing.timed(step);
    }
    testing.lanes(&lanes);
    print!("{}", testing.tally.details());
    println!("tested in {:.0} s", started.elapsed().as_secs_f64());
    println!("{}", testing.tally.closing_line());
    Ok(if testing.tally.ok() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

impl Testing<'_> {
    /// Takes a step. What keeps it from being taken is a failure.
    fn timed(&mut self, step: Step) {
        let name = step.name();
        println!("== {name}");
        let start = Instant::now();
        let before = self.tally.clone();
        if let Err(error) = self.step(step) {
            self.tally
                .add(&name, "step", Verdict::Failed(format!("{error:#}")));
        }
        let counts = self.tally.since(&before);
        println!(
            "== {name}: {counts} in {:.0} s",
            start.elapsed().as_secs_f64()
        );
    }

    /// Takes the steps that run beside each other, as many at a time as there are processors.
    fn lanes(&mut self, steps: &[Step]) {
        let workers = thread::available_parallelism().map_or(1, NonZero::get);
        let left = Mutex::new(steps.iter());
        let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
        let start = self.clone();
        let results = thread::scope(|scope| {
            let threads: Vec<_> = (0..workers.min(steps.len()))
                .map(|_| {
                    scope.spawn(|| {
                        let mut testing = start.clone();
                        while let Some(step) = next() {
                            testing.timed(*step);
                        }
                        testing.tally
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(thread::ScopedJoinHandle::join)
                .collect::<Vec<_>>()
        });
        for result in results {
            match result {
                Ok(tally) => self.tally.merge(tally),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    }

    fn step(&mut self, step: Step) -> Result<()> {
        match step {
            Step::Format => self.cargo("format", &["fmt", "--all", "--check"]),
            Step::Clippy => self.cargo(
                "clippy",
                &[
                    "clippy",
                    "--workspace",
                    "--all-targets",
                    "--",
                    "-D",
                    "warnings",
                ],
            ),
            Step::Host => {
                host::run(self.paths, &mut self.tally)?;
                self.host_ran = true;
                Ok(())
            }
            Step::Kernel => {
                lab::kernel(Variant::patched(Arch::X86_64), self.paths, &mut self.tally);
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
            Step::Shadow => lab::shadow(self.paths, &mut self.tally),
            Step::Selftests => lab::selftests(self.paths, &mut self.tally),
            Step::Stock => lab::stock(self.paths, &mut self.tally),
            Step::Arm64 => lab::arm64(self.paths, &mut self.tally),
            Step::Debug => lab::debug(self.paths, &mut self.tally),
        }
    }

    /// A cargo command that passes or fails as a whole.
    fn cargo(&mut self, name: &str, arguments: &[&str]) -> Result<()> {
        let log = log_file(self.paths, name)?;
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
    std::fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    let file = dir.join(format!("{name}.log"));
    std::fs::write(&file, "").with_context(|| format!("write {}", file.display()))?;
    Ok(file)
}
