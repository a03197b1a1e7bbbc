//! The kernel's own tests on one kernel.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use fs_err as fs;

use super::super::selftests::{NODES, SWAP};
use super::super::tally::Tally;
use super::super::{host, log_file};
use super::compare::Ran;
use crate::kernel::selftests::Selftest;
use crate::kernel::{Arch, Variant};
use crate::paths::Paths;
use crate::progress::{self, Progress};
use crate::vm::{self, Finished, Job, JobOutcome, Output, Pagetide, VmArgs};

/// For one VM, all tests of a kernel in the best case.
const VM_TIMEOUT: u64 = 4 * 3600;

/// How long after its time a test may still run.
const STALL: Duration = Duration::from_secs(120);

/// How many VMs a kernel's tests may lose.
const LOST: usize = 10;

/// The test of migration wants three threads.
const CPUS: u32 = 4;

/// Huge pages for the tests that need them, unless the list says how many a test needs.
const HUGE_PAGES: u32 = 256;

/// Where a kernel is told how many there are to be.
const NR_HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";

/// No heap at a random address: khugepaged fails if its heap is where it wants its test's memory.
const HEAP: (&str, &str) = ("/proc/sys/kernel/randomize_va_space", "1");

/// Waits until the kernel has chosen its clock source, which takes two seconds: before, tests of clocks are skipped.
const CLOCK: &str = "for i in $(seq 100); do \
    grep -q tsc-early /sys/devices/system/clocksource/clocksource0/current_clocksource || exit 0; sleep 0.1; done; exit 1";

/// Where the tests run, and make files: in the VM's memory, as all of an arm64 VM's directories are.
const SCRATCH: &str = "/tmp";

/// What became of all tests on a kernel.
#[derive(Default)]
pub(super) struct OnKernel {
    pub(super) ran: Vec<Ran>,
    /// What each one printed.
    pub(super) printed: Vec<String>,
    pub(super) complaints: Vec<String>,
    /// How long each one ran.
    times: Vec<(String, Duration)>,
    /// What all have printed.
    log: PathBuf,
    /// The console of each VM.
    consoles: Vec<PathBuf>,
}

impl OnKernel {
    /// Adds the times to the tally, and where the VMs' logs are, in case a test has failed.
    pub(super) fn tell(&self, lane: &str, tally: &mut Tally) {
        for (test, time) in &self.times {
            tally.time(lane, test, *time);
        }
        tally.leaves(lane, "output.log", &self.log);
        for (number, console) in (1..).zip(&self.consoles) {
            tally.leaves(lane, &format!("console-{number}.log"), console);
        }
    }
}

/// All tests on a kernel.
pub(super) struct Lane<'a> {
    /// In messages and names of files.
    pub(super) name: String,
    pub(super) variant: Variant,
    /// For one test.
    pub(super) limit: Duration,
    pub(super) tests: &'a [Selftest],
    /// Where their programs are.
    pub(super) directory: &'a Path,
    pub(super) paths: &'a Paths,
}

impl Lane<'_> {
    /// Runs the tests, in one VM, and in a new one after each VM that is lost.
    pub(super) fn run(&self) -> Result<OnKernel> {
        let log = log_file(self.paths, &self.name)?;
        let args = self.machine();
        let before = self.before();
        let mut all = OnKernel {
            log: log.clone(),
            ..OnKernel::default()
        };
        let mut lost = 0;
        while all.ran.len() < self.tests.len() && lost < LOST {
            let left = &self.tests[all.ran.len()..];
            let jobs = left.iter().map(|test| self.job(test));
            let jobs: Vec<Job> = before.iter().cloned().chain(jobs).collect();
            let progress = Progress::spinner(&format!("{} tests in a VM", left.len()));
            let mut tell = |number: usize, Finished { ended, time }: Finished| {
                let test = number.checked_sub(before.len());
                let name = test.and_then(|number| left.get(number));
                let name = name.map_or_else(|| "preparation".into(), Selftest::label);
                let seconds = time.as_secs_f64();
                progress::print(&format!(
                    "{}: {name}: {ended} after {seconds:.1} s",
                    self.name
                ));
            };
            let outcome = vm::boot(&args, &jobs, Output::Keep(&mut tell), self.paths)?;
            progress.done();
            all.complaints.extend(outcome.complaints.iter().cloned());
            all.consoles.push(outcome.console.clone());
            let jobs = outcome.jobs();
            for (test, job) in left.iter().zip(jobs.into_iter().skip(before.len())) {
                host::append(&log, &test.label(), &[&job.stdout, &job.stderr])?;
                let ended = job.finished.is_some();
                let time = job.finished.map(|finished| finished.time);
                all.times.extend(time.map(|time| (test.label(), time)));
                let reason = outcome.lost.as_deref().unwrap_or("it ended early");
                all.add(&job, reason);
                if !ended {
                    progress::print(&format!("{}: {}: lost: {reason}", self.name, test.label()));
                    lost += 1;
                    break;
                }
            }
        }
        while all.ran.len() < self.tests.len() {
            let reason = "not run: too many VMs were lost before it".to_owned();
            all.ran.push(Ran::lost(reason));
            all.printed.push(String::new());
        }
        fs::write(log.with_extension("complaints"), all.complaints.join("\n"))?;
        Ok(all)
    }

    fn machine(&self) -> VmArgs {
        let mut args = VmArgs {
            pagetide: Pagetide::None,
            timeout: VM_TIMEOUT,
            stall: Some(STALL),
            memory: "6G".into(),
            cpus: Some(CPUS),
            programs: self.programs(),
            ..VmArgs::new(self.variant)
        };
        args.append.push(format!("hugepages={HUGE_PAGES}"));
        if self.variant.upstream {
            args.append.push(NODES.into());
        }
        args
    }

    /// What an arm64 VM's initramfs has in /bin: each program once, whatever it is run with.
    fn programs(&self) -> Vec<PathBuf> {
        let names = match self.variant.arch {
            Arch::X86_64 => BTreeSet::new(),
            Arch::Arm64 => self.tests.iter().map(Selftest::name).collect(),
        };
        let files = names.into_iter().map(|name| self.directory.join(name));
        files.collect()
    }

    /// What a VM does before the tests. An arm64 VM has no shell, and one clock source.
    fn before(&self) -> Vec<Job> {
        let clock = (self.variant.arch == Arch::X86_64).then_some(CLOCK);
        let swap = self.variant.upstream.then_some(SWAP);
        let scripts = clock.into_iter().chain(swap);
        let job = |script: &str| {
            let command = ["sh", "-c", script].map(OsString::from);
            Job::new(command.into(), self.directory)
        };
        scripts.map(job).collect()
    }

    fn job(&self, test: &Selftest) -> Job {
        let program = match self.variant.arch {
            Arch::X86_64 => self.directory.join(test.name()),
            Arch::Arm64 => Path::new("/bin").join(test.name()),
        };
        let mut command = vec![program.into_os_string()];
        command.extend(test.arguments.iter().map(OsString::from));
        let pages = test.huge_pages.unwrap_or(HUGE_PAGES);
        Job {
            timeout: Some(self.limit),
            settings: vec![
                (NR_HUGEPAGES, pages.to_string()),
                (HEAP.0, HEAP.1.to_owned()),
            ],
            ..Job::new(command, Path::new(SCRATCH))
        }
    }
}

impl OnKernel {
    fn add(&mut self, job: &JobOutcome, lost: &str) {
        let [out, err] = [&job.stdout, &job.stderr].map(|b| String::from_utf8_lossy(b));
        let text = format!("{out}{err}");
        self.ran.push(match job.finished {
            Some(finished) => Ran::of(finished.ended, &text),
            None => Ran::lost(format!("the VM was lost: {lost}")),
        });
        self.printed.push(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane<'a>(arch: Arch, tests: &'a [Selftest], paths: &'a Paths) -> Lane<'a> {
        Lane {
            name: "a".into(),
            variant: Variant {
                upstream: arch == Arch::X86_64,
                ..Variant::patched(arch)
            },
            limit: Duration::from_secs(7),
            tests,
            directory: Path::new("/out"),
            paths,
        }
    }

    #[test]
    fn an_arm64_vm_gets_each_program_once_and_finds_it_in_bin() {
        let paths = Paths::at(Path::new("/nonexistent"));
        let tests = ["aarch64/a_test", "b_test -- -i 1", "b_test -- -i 2"];
        let tests = tests.map(|line| Selftest::parse(line).unwrap());
        let lane = lane(Arch::Arm64, &tests, &paths);
        let programs = ["/out/a_test", "/out/b_test"].map(PathBuf::from);
        assert_eq!(lane.machine().programs, programs);
        let commands: Vec<_> = tests.iter().map(|test| lane.job(test).command).collect();
        assert_eq!(commands[0], ["/bin/a_test"]);
        assert_eq!(commands[2], ["/bin/b_test", "-i", "2"]);
        assert!(lane.before().is_empty());
    }

    #[test]
    fn an_x86_64_vm_has_this_machines_files_a_clock_source_and_swap() {
        let paths = Paths::at(Path::new("/nonexistent"));
        let tests = [Selftest::parse("x86_64/a_test huge_pages=3").unwrap()];
        let lane = lane(Arch::X86_64, &tests, &paths);
        assert!(lane.machine().programs.is_empty());
        let job = lane.job(&tests[0]);
        assert_eq!(job.command, ["/out/a_test"]);
        assert_eq!(job.timeout, Some(Duration::from_secs(7)));
        assert!(job.settings.contains(&(NR_HUGEPAGES, "3".to_owned())));
        let before = lane.before();
        let scripts: Vec<_> = before.iter().map(|job| job.command.last()).collect();
        assert_eq!(
            scripts,
            [CLOCK, SWAP].map(OsString::from).each_ref().map(Some)
        );
    }
}
