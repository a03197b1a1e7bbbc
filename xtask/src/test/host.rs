//! The crates' tests on this machine.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use fs_err as fs;
use serde_json::Value;

use super::libtest::{self, Report};
use super::log_file;
use super::seed;
use super::tally::{Tally, Verdict};
use crate::command::Run;
use crate::moto;
use crate::paths::Paths;
use crate::progress::Progress;

/// After which a test program that hangs is killed.
pub(super) const TIMEOUT: Duration = Duration::from_secs(600);

/// For how long a stress test runs beside other tests.
const SHORT_STRESS: (&str, &str) = ("PAGETIDE_STRESS_SECONDS", "10");

/// For how long it runs in the step `stress`.
const LONG_STRESS: (&str, &str) = (SHORT_STRESS.0, "600");

/// How the names of the stress tests' programs end.
const STRESS: &str = "/stress";

/// A compiled test program.
#[derive(Debug, Clone)]
pub(super) struct TestProgram {
    /// Package and target, for people; the same in every place where it runs.
    pub(super) group: String,
    pub(super) package: String,
    pub(super) executable: PathBuf,
    /// Where cargo would run it.
    pub(super) directory: PathBuf,
    /// A file of tests/, in contrast to a crate's own unit tests.
    pub(super) integration: bool,
}

/// Runs every test of the workspace here, or those of the test programs whose names begin with `program`.
pub(super) fn run(program: Option<&str>, paths: &Paths, tally: &mut Tally) -> Result<()> {
    install_moto("host", paths, tally);
    let programs = chosen(program, programs(paths)?)?;
    let log = log_file(paths, "host")?;
    tally.leaves("host", "output.log", &log);
    for program in &programs {
        run_program(program, &How::default(), &log, tally)?;
    }
    match program {
        Some(_) => Ok(()),
        None => doc_tests(paths, tally),
    }
}

/// Runs the stress tests here, each for ten minutes.
pub(super) fn stress(paths: &Paths, tally: &mut Tally) -> Result<()> {
    install_moto("stress", paths, tally);
    let mut programs = programs(paths)?;
    programs.retain(|program| program.group.ends_with(STRESS));
    if programs.is_empty() {
        bail!("no test program's name ends with {STRESS}");
    }
    let log = log_file(paths, "stress")?;
    tally.leaves("stress", "output.log", &log);
    let how = How {
        part: Some("long"),
        timeout: 3 * TIMEOUT,
        environment: Some(LONG_STRESS),
        ..How::default()
    };
    for program in &programs {
        run_program(program, &how, &log, tally)?;
    }
    Ok(())
}

/// Installs the S3 server of the tests.
pub(super) fn install_moto(group: &str, paths: &Paths, tally: &mut Tally) {
    if let Err(error) = moto::install(paths) {
        // The tests say that they are skipped; this says why.
        let text = error.to_string();
        let reason = text.lines().next().unwrap_or_default().to_owned();
        tally.add(group, "moto from PyPI", Verdict::Skipped(reason));
    }
}

/// The programs whose names begin so. There must be one.
pub(super) fn chosen(
    name: Option<&str>,
    mut programs: Vec<TestProgram>,
) -> Result<Vec<TestProgram>> {
    let Some(name) = name else {
        return Ok(programs);
    };
    let all: Vec<_> = programs
        .iter()
        .map(|program| program.group.clone())
        .collect();
    programs.retain(|program| program.group.starts_with(name));
    if programs.is_empty() {
        bail!(
            "no test program's name begins with {name}. There are: {}",
            all.join(", ")
        );
    }
    Ok(programs)
}

/// How a program's tests are run.
#[derive(Debug, Clone, Copy)]
pub(super) struct How<'a> {
    /// Before the group's name in the tally, if the tests also run in other ways.
    pub(super) part: Option<&'a str>,
    /// What starts the program: another program with its arguments, or nothing.
    pub(super) starter: &'a [String],
    /// More arguments of the program.
    pub(super) arguments: &'a [String],
    /// Only tests whose names contain this. There must be one.
    pub(super) filter: Option<&'a str>,
    /// After what time the program is killed, which is a failure.
    pub(super) timeout: Duration,
    /// When the time of the whole step is over. A program that has not ended then is killed, and has not failed.
    pub(super) deadline: Option<Instant>,
    /// A variable that the tests find in their environment, in place of their default.
    pub(super) environment: Option<(&'a str, &'a str)>,
}

impl Default for How<'_> {
    fn default() -> Self {
        Self {
            part: None,
            starter: &[],
            arguments: &[],
            filter: None,
            timeout: TIMEOUT,
            deadline: None,
            environment: None,
        }
    }
}

impl How<'_> {
    /// What a program is called in the tally.
    pub(super) fn group(&self, program: &TestProgram) -> String {
        match self.part {
            Some(part) => format!("{part} {}", program.group),
            None => program.group.clone(),
        }
    }
}

/// Runs one program's tests. Returns how long each took.
pub(super) fn run_program(
    program: &TestProgram,
    how: &How<'_>,
    log: &Path,
    tally: &mut Tally,
) -> Result<Vec<(String, Duration)>> {
    let group = how.group(program);
    let begun = Instant::now();
    let left = how.deadline.map(|end| end.saturating_duration_since(begun));
    let limit = left.map_or(how.timeout, |left| left.min(how.timeout));
    let unfinished = |tally: &mut Tally, when: &str| {
        let reason = format!("the time of the step was over {when}");
        tally.add(&group, "the test program", Verdict::Skipped(reason));
    };
    // For timeout(1), no time is no limit.
    if limit.is_zero() {
        unfinished(tally, "before it began");
        return Ok(Vec::new());
    }
    let millis = limit.as_millis() + 1;
    let progress = Progress::spinner(&group);
    let output = Run::new("timeout")
        .args(["--foreground", "--signal=KILL"])
        .arg(format!("{}.{:03}", millis / 1000, millis % 1000))
        .args(how.starter)
        .arg(&program.executable)
        .args(libtest::ARGUMENTS)
        .args(how.arguments)
        .args(how.filter)
        .dir(&program.directory)
        .env("CARGO_MANIFEST_DIR", &program.directory)
        .envs([SHORT_STRESS])
        .envs(how.environment)
        .env(libtest::UNSTABLE.0, libtest::UNSTABLE.1)
        .envs(seed::environment())
        .result()?;
    progress.done();
    append(log, &group, &[&output.stdout, &output.stderr])?;
    let report = Report::parse(&String::from_utf8_lossy(&output.stdout));
    let times = report.times().to_vec();
    let is_cut = limit < how.timeout && begun.elapsed() >= limit && !output.status.success();
    if is_cut {
        report.count_results(&group, tally);
        unfinished(tally, "before it ended");
        return Ok(times);
    }
    let ended = (!output.status.success()).then(|| output.status.to_string());
    let none = how
        .filter
        .filter(|_| report.is_empty())
        .map(|filter| format!("no test is called {filter}"));
    report.count(&group, ended.or(none).as_deref(), tally);
    Ok(times)
}

/// Runs the tests in the documentation, which alone have a line in their names.
///
/// `cargo test --doc` would select other features of what crates depend on, since it leaves programs out,
/// and compile it all once more.
fn doc_tests(paths: &Paths, tally: &mut Tally) -> Result<()> {
    let progress = Progress::spinner("documentation's examples");
    let output = Run::new("cargo")
        .words("test --quiet --workspace --no-fail-fast --target-dir")
        .arg(paths.target())
        .args(["--", "--show-output", "--format=pretty", "(line "])
        .dir(paths.root())
        .envs(seed::environment())
        .result()?;
    progress.done();
    let ended = (!output.status.success()).then(|| {
        let said = String::from_utf8_lossy(&output.stderr);
        format!("{}\n{}", output.status, said.trim_end())
    });
    let report = Report::parse(&String::from_utf8_lossy(&output.stdout));
    let none = report.is_empty().then(|| "no test was found".to_owned());
    report.count("documentation", ended.or(none).as_deref(), tally);
    Ok(())
}

/// Compiles every test program of the workspace.
pub(super) fn programs(paths: &Paths) -> Result<Vec<TestProgram>> {
    let progress = Progress::spinner("compiling the tests");
    let all = Run::new("cargo").args(["test", "--workspace"]);
    let programs = compile(all, &paths.target(), paths)?;
    progress.done();
    Ok(programs)
}

/// Compiles the test programs that `test`, a `cargo test`, would run.
pub(super) fn compile(test: Run, target: &Path, paths: &Paths) -> Result<Vec<TestProgram>> {
    let output = test
        .words("--no-run --quiet --message-format=json --target-dir")
        .arg(target)
        .dir(paths.root())
        .result()?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let (errors, rest) = (
            compiler_errors(&text),
            String::from_utf8_lossy(&output.stderr),
        );
        bail!("the tests do not compile\n{errors}{rest}");
    }
    let mut programs: Vec<_> = text.lines().filter_map(parse_artifact).collect();
    programs.sort_by(|a, b| a.group.cmp(&b.group));
    Ok(programs)
}

/// One line of cargo's JSON, if it tells of a test program.
fn parse_artifact(line: &str) -> Option<TestProgram> {
    let message: Value = serde_json::from_str(line).ok()?;
    if message.get("reason")? != "compiler-artifact" || message.get("profile")?.get("test")? != true
    {
        return None;
    }
    let executable = PathBuf::from(message.get("executable")?.as_str()?);
    let manifest = PathBuf::from(message.get("manifest_path")?.as_str()?);
    let directory = manifest.parent()?.to_owned();
    let package = directory.file_name()?.to_string_lossy().into_owned();
    let target = message.get("target")?;
    let kind = target.get("kind")?.get(0)?.as_str()?;
    let name = target.get("name")?.as_str()?;
    let integration = kind == "test";
    let group = if integration {
        format!("{package}/{name}")
    } else {
        format!("{package} ({kind})")
    };
    Some(TestProgram {
        group,
        package,
        executable,
        directory,
        integration,
    })
}

fn compiler_errors(json: &str) -> String {
    json.lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter_map(|message| {
            let message = message.get("message")?;
            (message.get("level")? == "error")
                .then(|| message.get("rendered")?.as_str().map(str::to_owned))?
        })
        .collect()
}

/// Adds a program's output to a log.
pub(super) fn append(log: &Path, title: &str, parts: &[&[u8]]) -> Result<()> {
    let text = [format!("==== {title}\n").as_bytes(), &parts.concat()].concat();
    let mut file = fs::OpenOptions::new().append(true).open(log)?;
    Ok(file.write_all(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A test program that is a script, which a shell starts: a file that another thread's child still has open from
    /// when it was written cannot be executed.
    fn script(directory: &Path, text: &str) -> TestProgram {
        let executable = directory.join("program");
        std::fs::write(&executable, text).unwrap();
        TestProgram {
            group: "a/b".into(),
            package: "a".into(),
            executable,
            directory: directory.to_owned(),
            integration: true,
        }
    }

    /// What comes of a script that is run so.
    fn ran(text: &str, how: &How<'_>) -> (Tally, Vec<(String, Duration)>, String) {
        let directory = tempfile::tempdir().unwrap();
        let program = script(directory.path(), text);
        let log = directory.path().join("log");
        std::fs::write(&log, "").unwrap();
        let mut tally = Tally::default();
        let times = run_program(&program, how, &log, &mut tally).unwrap();
        (tally, times, std::fs::read_to_string(log).unwrap())
    }

    #[test]
    fn a_program_has_the_seed_and_tells_times() {
        let text = "echo \"$PART seeds $PAGETIDE_SEED $PROPTEST_RNG_SEED, $*\"\n\
                    echo 'test t ... ok <0.250s>'\n\
                    echo 'test result: ok. 1 passed; 0 failed'";
        let how = How {
            part: Some("busy load"),
            starter: &["env".into(), "PART=7".into(), "sh".into()],
            arguments: &["--test-threads=2".into()],
            ..How::default()
        };
        let (tally, times, log) = ran(text, &how);
        assert_eq!(tally.closing_line(), "1 passed, 0 failed, 0 skipped");
        assert_eq!(times, [("t".to_owned(), Duration::from_millis(250))]);
        let group = tally.times().next().unwrap().0;
        assert_eq!(group, "busy load a/b");
        let seed = seed::current();
        assert!(log.contains(&format!("7 seeds {seed} {seed}, ")), "{log}");
        assert!(log.contains("--report-time --test-threads=2"), "{log}");
    }

    #[test]
    fn a_program_that_hangs_has_failed_unless_the_steps_time_was_over() {
        let short = Duration::from_millis(200);
        let hang = "exec sleep 1000";
        let starter = &["sh".to_owned()];
        let hanging = How {
            starter,
            timeout: short,
            ..How::default()
        };
        let (tally, ..) = ran(hang, &hanging);
        assert_eq!(tally.closing_line(), "0 passed, 1 failed, 0 skipped");
        for (left, when) in [
            (short, "before it ended"),
            (Duration::ZERO, "before it began"),
        ] {
            let how = How {
                starter,
                deadline: Some(Instant::now() + left),
                ..How::default()
            };
            let (tally, ..) = ran(hang, &how);
            let details = tally.details();
            assert!(
                details.starts_with("SKIP a/b: the test program"),
                "{details}"
            );
            assert!(
                details.contains("the time of the step was over"),
                "{details}"
            );
            // A thread that was held up may find even the longer time over before the program began.
            assert!(details.contains(when) || !left.is_zero(), "{details}");
        }
    }

    #[test]
    fn programs_are_chosen_by_how_their_names_begin() {
        let directory = tempfile::tempdir().unwrap();
        let program = script(directory.path(), "");
        let names = |name| -> Result<usize> { Ok(chosen(name, vec![program.clone()])?.len()) };
        assert_eq!(names(None).unwrap(), 1);
        assert_eq!(names(Some("a/")).unwrap(), 1);
        let error = names(Some("b")).unwrap_err().to_string();
        assert!(error.ends_with("There are: a/b"), "{error}");
    }

    #[test]
    fn test_programs_are_found_in_cargos_messages() {
        let line = r#"{"reason":"compiler-artifact","manifest_path":"/w/crates/kvm/Cargo.toml",
            "target":{"kind":["test"],"name":"slots"},"profile":{"test":true},
            "executable":"/w/target/debug/deps/slots-1"}"#;
        let program = parse_artifact(line).unwrap();
        assert_eq!(program.group, "kvm/slots");
        assert!(program.integration);
        assert_eq!(program.directory, PathBuf::from("/w/crates/kvm"));
        assert!(parse_artifact(&line.replace("\"test\":true", "\"test\":false")).is_none());
        assert!(parse_artifact("not json").is_none());
    }
}
