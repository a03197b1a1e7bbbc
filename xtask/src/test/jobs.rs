//! The jobs of one VM: how they run, and what their ends mean.

use std::path::PathBuf;

use anyhow::Result;

use super::arm64;
use super::host::{self, TestProgram};
use super::libtest::Report;
use super::log_file;
use super::seed;
use super::tally::{Tally, Verdict};
use crate::kernel::selftests::Selftest;
use crate::paths::Paths;
use crate::progress::{self, Progress};
use crate::vm::{self, Ended, Finished, Job, JobOutcome, Output, VmArgs};

/// The exit status with which a kernel selftest says that it could not run.
const KSFT_SKIP: u8 = 4;

/// What one job of a VM is.
pub(super) enum Kind {
    Selftest(Selftest),
    Program(TestProgram),
    /// Passes if it exits with 0.
    Command(&'static str),
    /// Passes if it ends with the error that names what this architecture does not have.
    Refusal(&'static str),
}

/// Boots one VM for all jobs and counts what became of them. Returns the console's log.
pub(super) fn run(
    lane: &str,
    args: &VmArgs,
    jobs: &[(Kind, Job)],
    paths: &Paths,
    tally: &mut Tally,
) -> Result<PathBuf> {
    let log = log_file(paths, lane)?;
    tally.leaves(lane, "output.log", &log);
    let mut args = args.clone();
    let seed = seed::environment().map(|(name, value)| (name, value.into()));
    args.environment.extend(seed);
    let list: Vec<Job> = jobs.iter().map(|(_, job)| job.clone()).collect();
    let progress = Progress::spinner(&format!("{} jobs in a VM", jobs.len()));
    let mut tell = |number: usize, Finished { ended, time }: Finished| {
        let name = jobs
            .get(number)
            .map_or_else(String::new, |(kind, _)| kind.name());
        let seconds = time.as_secs_f64();
        let name = name.strip_prefix(&format!("{lane} ")).unwrap_or(&name);
        progress::print(&format!("{lane}: {name}: {ended} after {seconds:.1} s"));
    };
    let outcome = vm::boot(&args, &list, Output::Keep(&mut tell), paths)?;
    progress.done();
    tally.leaves(lane, "console.log", &outcome.console);
    for (kind, result) in jobs.iter().map(|(kind, _)| kind).zip(outcome.jobs()) {
        host::append(&log, &kind.name(), &[&result.stdout, &result.stderr])?;
        if let Some(Finished { time, .. }) = result.finished {
            tally.time(lane, &kind.name(), time);
        }
        kind.count(lane, &result, tally);
    }
    if let Some(reason) = &outcome.lost {
        let cause = format!("the VM was lost: {reason}\n{}", outcome.console_tail());
        tally.add(lane, "the VM", Verdict::Failed(cause));
    }
    let verdict = match outcome.complaints.join("\n  ") {
        lines if lines.is_empty() => Verdict::Passed,
        lines => Verdict::Failed(format!("{}:\n  {lines}", outcome.console.display())),
    };
    tally.add(lane, "no complaint of the kernel", verdict);
    Ok(outcome.console)
}

impl Kind {
    fn name(&self) -> String {
        match self {
            Self::Selftest(test) => test.label(),
            Self::Program(program) => program.group.clone(),
            Self::Command(name) | Self::Refusal(name) => (*name).to_owned(),
        }
    }

    fn count(&self, lane: &str, result: &JobOutcome, tally: &mut Tally) {
        let name = self.name();
        let Some(Finished { ended, .. }) = result.finished else {
            let cause = "the VM was lost before it ended".to_owned();
            tally.add(lane, &name, Verdict::Failed(cause));
            return;
        };
        let stdout = String::from_utf8_lossy(&result.stdout);
        match self {
            Self::Program(program) => {
                let cause = (ended != Ended::Exit(0)).then(|| ended.to_string());
                let report = Report::parse(&stdout);
                // A file with tests for another architecture alone belongs in the list of what is left out.
                let none = (lane == arm64::LANE && report.is_empty())
                    .then(|| "no test of it is compiled for arm64".to_owned());
                report.count(&program.group, cause.or(none).as_deref(), tally);
            }
            Self::Refusal(_) => {
                let text = format!("{stdout}{}", String::from_utf8_lossy(&result.stderr));
                tally.add(lane, &format!("{name} refuses"), refusal(ended, &text));
            }
            Self::Selftest(_) | Self::Command(_) => {
                let text = format!("{stdout}{}", String::from_utf8_lossy(&result.stderr));
                let selftest = matches!(self, Self::Selftest(_));
                tally.add(lane, &name, verdict(ended, &text, selftest));
            }
        }
    }
}

/// The verdict on a command that is not available on this architecture.
fn refusal(ended: Ended, text: &str) -> Verdict {
    if ended == Ended::Exit(2) && text.contains("not available on ") {
        Verdict::Passed
    } else {
        Verdict::Failed(format!("{ended}\n  {text}"))
    }
}

/// What a selftest's or a command's end means.
fn verdict(ended: Ended, text: &str, selftest: bool) -> Verdict {
    // Parts of a selftest that were left out: "ok 3 # SKIP reason", "1..0 # SKIP - reason".
    let skipped: Vec<_> = text
        .lines()
        .filter_map(|line| line.split_once("# SKIP"))
        .collect();
    let reason = skipped
        .iter()
        .map(|(_, reason)| reason.trim_start_matches([' ', '-']))
        .collect::<Vec<_>>()
        .join("; ");
    match ended {
        Ended::Exit(0) if selftest && !skipped.is_empty() => Verdict::Skipped(reason),
        Ended::Exit(0) => Verdict::Passed,
        Ended::Exit(KSFT_SKIP) if selftest => Verdict::Skipped(if reason.is_empty() {
            text.lines().last().unwrap_or("no reason given").to_owned()
        } else {
            reason
        }),
        _ => {
            let lines: Vec<_> = text.lines().collect();
            let first = lines.len().saturating_sub(20);
            Verdict::Failed(format!("{ended}\n  {}", lines[first..].join("\n  ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selftests_say_skip_in_two_ways() {
        let text = "1..0 # SKIP - Requirement not met: is_kvm()\n";
        let skipped = Verdict::Skipped("Requirement not met: is_kvm()".into());
        assert_eq!(verdict(Ended::Exit(4), text, true), skipped);
        assert_eq!(verdict(Ended::Exit(0), "ok 1\nok 2 # SKIP why\n", true), {
            Verdict::Skipped("why".into())
        });
        assert_eq!(verdict(Ended::Exit(0), "ok 1\n", true), Verdict::Passed);
        assert!(matches!(
            verdict(Ended::Exit(4), text, false),
            Verdict::Failed(_)
        ));
        assert!(matches!(
            verdict(Ended::Signal(6), "", true),
            Verdict::Failed(_)
        ));
    }
}
