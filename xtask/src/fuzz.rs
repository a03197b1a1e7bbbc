//! `cargo xtask fuzz`: the parsers of hostile input under libFuzzer, guided by coverage
//! (docs/decisions/0022-fuzzing.md).

use std::path::{Path, PathBuf};
use std::process::{ExitCode, Output};

use anyhow::{Context, Result, bail};
use clap::Args;
use fs_err as fs;

use crate::command::Run;
use crate::paths::Paths;
use crate::progress::Progress;
use crate::setup;

/// What makes a stable rustc count the edges that an input takes, and show the fuzzer both sides of each
/// comparison.
const RUSTFLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Cdebug-assertions --cfg fuzzing";

/// Named, so that build scripts and macros, which run on this machine, are compiled without [`RUSTFLAGS`].
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// The target that fails by design, behind comparisons that chance does not pass.
const PLANTED: &str = "planted";

/// The longest input of that target.
const PLANTED_BYTES: u64 = 16;

/// The time in which the fuzzer has to find that failure: it takes some seconds.
const PLANTED_SECONDS: u64 = 120;

/// Memory that the fuzzer's process may take, and the seconds that one input may.
const LIMITS: [&str; 3] = ["-rss_limit_mb=1024", "-malloc_limit_mb=256", "-timeout=10"];

/// The verb's arguments.
#[derive(Debug, Args)]
pub(crate) struct FuzzArgs {
    /// Targets [default: all]; --list names them
    #[arg(value_name = "TARGET")]
    targets: Vec<String>,

    /// The seconds for which each target runs
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    seconds: u64,

    /// List the targets, and run none
    #[arg(long)]
    list: bool,

    /// Run the one target that is named with the input in this file, once
    #[arg(long, value_name = "FILE", conflicts_with = "list")]
    input: Option<PathBuf>,
}

/// A parser that can be fuzzed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) name: String,
    /// The longest useful input, in bytes.
    max_bytes: u64,
}

/// The fuzzer, compiled, with the places of its files.
#[derive(Debug)]
pub(crate) struct Fuzzer {
    program: PathBuf,
    /// `target/fuzz`.
    directory: PathBuf,
    regressions: PathBuf,
    pub(crate) targets: Vec<Target>,
}

/// What became of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    executions: u64,
    /// Edges that some input took.
    edges: u64,
    /// What an input did, and the file that has the input.
    pub(crate) failure: Option<String>,
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            executions, edges, ..
        } = self;
        write!(f, "{executions} inputs, {edges} edges covered")
    }
}

/// Runs the verb.
pub(crate) fn run(args: &FuzzArgs, paths: &Paths) -> Result<ExitCode> {
    let fuzzer = Fuzzer::build(paths)?;
    let chosen = choose(&fuzzer.targets, &args.targets)?;
    if args.list {
        fuzzer.targets.iter().for_each(|t| println!("{}", t.name));
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(input) = &args.input {
        let [target] = chosen.as_slice() else {
            bail!("an input is for one target: name it before --input");
        };
        return fuzzer.repeat(target, input);
    }
    fuzzer.check_guidance()?;
    println!("coverage guides the fuzzer: it found the planted failure");
    let mut code = ExitCode::SUCCESS;
    for target in chosen {
        let outcome = fuzzer.fuzz(target, args.seconds)?;
        println!("{}: {outcome}", target.name);
        if let Some(failure) = outcome.failure {
            println!("FAILED {}: {failure}", target.name);
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

/// The targets with these names; all if there are none.
fn choose<'a>(targets: &'a [Target], names: &[String]) -> Result<Vec<&'a Target>> {
    if names.is_empty() {
        return Ok(targets.iter().collect());
    }
    let find = |name: &String| {
        let found = targets.iter().find(|target| target.name == *name);
        found.with_context(|| {
            let all: Vec<_> = targets.iter().map(|t| t.name.as_str()).collect();
            format!("{name:?} is no target; the targets are {}", all.join(", "))
        })
    };
    names.iter().map(find).collect()
}

impl Fuzzer {
    /// Compiles the fuzzer, and writes the seeds.
    pub(crate) fn build(paths: &Paths) -> Result<Self> {
        setup::require(&setup::fuzz_tools())?;
        let directory = paths.target().join("fuzz");
        let progress = Progress::spinner("compiling the fuzzer");
        Run::new("cargo")
            .words("build --release --locked --target")
            .arg(TRIPLE)
            .arg("--target-dir")
            .arg(&directory)
            .dir(&paths.in_root("fuzz/libfuzzer"))
            .env("RUSTFLAGS", RUSTFLAGS)
            .logged(&directory.join("build.log"), &progress)?;
        progress.done();
        for name in ["failures", "tmp"] {
            fs::create_dir_all(directory.join(name))?;
        }
        let program = directory.join(TRIPLE).join("release/pagetide-fuzz");
        let list = Run::new(&program)
            .env("PAGETIDE_FUZZ_SEEDS", directory.join("seeds"))
            .text()?;
        let mut targets = parse_list(&list)?;
        targets.retain(|target| target.name != PLANTED);
        Ok(Self {
            program,
            directory,
            regressions: paths.in_root("fuzz/regressions"),
            targets,
        })
    }

    /// Fuzzes one target. The corpus stays for the next run.
    pub(crate) fn fuzz(&self, target: &Target, seconds: u64) -> Result<Outcome> {
        let corpus = self.directory.join("corpus").join(&target.name);
        let mut directories = vec![corpus, self.directory.join("seeds").join(&target.name)];
        let regressions = self.regressions.join(&target.name);
        if regressions.is_dir() {
            directories.push(regressions);
        }
        self.run(&target.name, target.max_bytes, seconds, &directories)
    }

    /// Checks that the fuzzer finds a failure that needs guidance.
    pub(crate) fn check_guidance(&self) -> Result<()> {
        // Not what an earlier run has found.
        let corpus = self.directory.join("corpus").join(PLANTED);
        if corpus.is_dir() {
            fs::remove_dir_all(&corpus)?;
        }
        let directories = [corpus, self.directory.join("seeds").join(PLANTED)];
        let outcome = self.run(PLANTED, PLANTED_BYTES, PLANTED_SECONDS, &directories)?;
        if outcome.failure.is_none() {
            bail!(
                "the fuzzer did not find the planted failure within {PLANTED_SECONDS} s ({outcome}): coverage \
                 does not guide it"
            );
        }
        Ok(())
    }

    fn program(&self, target: &str) -> Run {
        Run::new(&self.program)
            .env("PAGETIDE_FUZZ_TARGET", target)
            .env("TMPDIR", self.directory.join("tmp"))
            .env("RUST_BACKTRACE", "0")
    }

    fn run(
        &self,
        name: &str,
        max_bytes: u64,
        seconds: u64,
        directories: &[PathBuf],
    ) -> Result<Outcome> {
        for directory in directories {
            fs::create_dir_all(directory)?;
        }
        let failures = self.directory.join("failures");
        let progress = Progress::spinner(&format!("fuzzing {name}"));
        let output = self
            .program(name)
            .args(LIMITS)
            .arg("-print_final_stats=1")
            .arg(format!("-max_len={max_bytes}"))
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-artifact_prefix={}/{name}-", failures.display()))
            .args(directories)
            .result()?;
        progress.done();
        let log = self.directory.join(format!("{name}.log"));
        fs::write(&log, [&output.stdout[..], &output.stderr].concat())?;
        // The directories of processes that were killed or have failed.
        let temporary = self.directory.join("tmp");
        fs::remove_dir_all(&temporary)?;
        fs::create_dir_all(&temporary)?;
        outcome(&output, &log)
    }

    /// Runs an input once, with all that it prints.
    fn repeat(&self, target: &Target, input: &Path) -> Result<ExitCode> {
        let run = self.program(&target.name).args(LIMITS).arg(input);
        let mut command = run.env("RUST_BACKTRACE", "1").command();
        let status = command.status().context("start the fuzzer")?;
        Ok(match status.success() {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
        })
    }
}

/// The targets of a list, one in each line: a name, and the length of its longest input.
fn parse_list(text: &str) -> Result<Vec<Target>> {
    let parse = |line: &str| {
        let (name, max_bytes) = line.split_once(' ').context(line.to_owned())?;
        Ok(Target {
            name: name.to_owned(),
            max_bytes: max_bytes.parse().with_context(|| line.to_owned())?,
        })
    };
    text.lines().map(parse).collect()
}

/// Reads what libFuzzer printed.
fn outcome(output: &Output, log: &Path) -> Result<Outcome> {
    let text = String::from_utf8_lossy(&output.stderr);
    let counters = number_after(&text, "INFO: Loaded 1 modules   (");
    if counters.is_none_or(|counters| counters == 0) {
        let log = log.display();
        bail!("the fuzzer counts no edges: it was compiled without coverage ({log})");
    }
    let executions = number_after(&text, "stat::number_of_executed_units: ").unwrap_or(0);
    let edges = text
        .lines()
        .rev()
        .find_map(|line| number_after(line, " cov: "));
    let failure = (!output.status.success()).then(|| failure(&text, log));
    if failure.is_none() && executions == 0 {
        bail!("the fuzzer ran nothing ({})", log.display());
    }
    Ok(Outcome {
        executions,
        edges: edges.unwrap_or(0),
        failure,
    })
}

/// Why the fuzzer ended early, in some lines: the input's file first.
fn failure(text: &str, log: &Path) -> String {
    let after = |line: &str, mark: &str| line.split_once(mark).map(|(_, rest)| rest.to_owned());
    let input = text
        .lines()
        .find_map(|line| after(line, "Test unit written to "));
    let cause = text
        .lines()
        .skip_while(|line| !line.contains("panicked at "))
        .take(2)
        .collect::<Vec<_>>()
        .join(" ");
    let cause = match cause.is_empty() {
        false => cause,
        true => text
            .lines()
            .find_map(|line| after(line, "ERROR: "))
            .unwrap_or_else(|| "it ended without a report".to_owned()),
    };
    let input = input.unwrap_or_else(|| "no input was written".to_owned());
    format!("{input}: {cause} (log: {})", log.display())
}

/// The number that follows a text.
fn number_after(text: &str, mark: &str) -> Option<u64> {
    let (_, rest) = text.split_once(mark)?;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    const RUN: &str = "\
INFO: Loaded 1 modules   (53041 inline 8-bit counters): 53041 [0x1, 0x2),
#2\tINITED cov: 120 ft: 121 corp: 1/4b exec/s: 0 rss: 40Mb
#900\tNEW    cov: 170 ft: 300 corp: 9/90b lim: 21 exec/s: 900 rss: 41Mb L: 4/21 MS: 1 CMP-
Done 1234 runs in 2 second(s)
stat::number_of_executed_units: 1234
";

    fn ended(text: &str, code: i32) -> Result<Outcome> {
        let output = Output {
            status: ExitStatus::from_raw(code << 8),
            stdout: Vec::new(),
            stderr: text.as_bytes().to_vec(),
        };
        outcome(&output, Path::new("a.log"))
    }

    #[test]
    fn counts_are_read() {
        let outcome = ended(RUN, 0).unwrap();
        assert_eq!(outcome.to_string(), "1234 inputs, 170 edges covered");
        assert_eq!(outcome.failure, None);
    }

    #[test]
    fn a_failure_names_the_input_and_its_cause() {
        let text = format!(
            "{RUN}thread 'main' panicked at src/x.rs:7:\nleft is not right\nnote: more\n\
             artifact_prefix='f/'; Test unit written to f/crash-1\n"
        );
        let failure = ended(&text, 77).unwrap().failure.unwrap();
        let wanted = "f/crash-1: thread 'main' panicked at src/x.rs:7: left is not right";
        assert!(failure.starts_with(wanted), "{failure}");
        let text = format!("{RUN}==1== ERROR: libFuzzer: timeout after 10 seconds\n");
        let failure = ended(&text, 70).unwrap().failure.unwrap();
        assert!(failure.contains("timeout after 10"), "{failure}");
    }

    #[test]
    fn a_fuzzer_without_coverage_or_without_inputs_is_no_success() {
        let blind = RUN.replace("INFO: Loaded 1 modules", "INFO:");
        assert!(ended(&blind, 0).is_err());
        let idle = RUN.replace("units: 1234", "units: 0");
        assert!(ended(&idle, 0).is_err());
    }

    #[test]
    fn targets_are_chosen_by_name() {
        let targets = parse_list("a 7\nb-c 9").unwrap();
        assert_eq!(choose(&targets, &[]).unwrap().len(), 2);
        let chosen = choose(&targets, &["b-c".into()]).unwrap();
        assert_eq!(chosen, [&targets[1]]);
        let unknown = choose(&targets, &["c".into()]).unwrap_err().to_string();
        assert!(
            unknown.contains("\"c\"") && unknown.contains("a, b-c"),
            "{unknown}"
        );
        assert!(parse_list("a b").is_err());
    }
}
