//! The crates' tests on this machine.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use fs_err as fs;
use serde_json::Value;

use super::libtest::Report;
use super::log_file;
use super::tally::{Tally, Verdict};
use crate::command::Run;
use crate::moto;
use crate::paths::Paths;
use crate::progress::Progress;

/// After which a test program that hangs is killed.
const TIMEOUT_SECONDS: &str = "600";

/// For how long a stress test runs: the server's, under which the pager is, and the others.
fn stress_seconds(group: &str) -> &'static str {
    match group {
        "serve/stress" => "30",
        _ => "10",
    }
}

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

/// Runs every test of the workspace here.
pub(super) fn run(paths: &Paths, tally: &mut Tally) -> Result<()> {
    if let Err(error) = moto::install(paths) {
        // The tests say that they are skipped; this says why.
        let text = error.to_string();
        let reason = text.lines().next().unwrap_or_default().to_owned();
        tally.add("host", "moto from PyPI", Verdict::Skipped(reason));
    }
    let programs = programs(paths)?;
    let log = log_file(paths, "host")?;
    for program in &programs {
        run_program(program, None, &log, tally)?;
    }
    doc_tests(paths, tally)
}

/// Runs one program's tests, or those whose names contain `filter`. With a filter there must be one.
pub(super) fn run_program(
    program: &TestProgram,
    filter: Option<&str>,
    log: &Path,
    tally: &mut Tally,
) -> Result<()> {
    let progress = Progress::spinner(&program.group);
    let output = Run::new("timeout")
        .args(["--foreground", "--signal=KILL", TIMEOUT_SECONDS])
        .arg(&program.executable)
        .arg("--show-output")
        .args(filter)
        .dir(&program.directory)
        .env("CARGO_MANIFEST_DIR", &program.directory)
        .env("PAGETIDE_STRESS_SECONDS", stress_seconds(&program.group))
        .result()?;
    progress.done();
    append(log, &program.group, &[&output.stdout, &output.stderr])?;
    let ended = (!output.status.success()).then(|| output.status.to_string());
    let report = Report::parse(&String::from_utf8_lossy(&output.stdout));
    let none = filter
        .filter(|_| report.is_empty())
        .map(|filter| format!("no test is called {filter}"));
    report.count(&program.group, ended.or(none).as_deref(), tally);
    Ok(())
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
