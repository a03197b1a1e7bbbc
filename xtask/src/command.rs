//! Running other programs: errors that name the command, logs that are kept, progress that is seen.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail};
use fs_err as fs;

use crate::progress::Progress;

/// Lines of a log that an error shows.
const TAIL_LINES: usize = 30;

/// What comes before the program: the child must not outlive a killed xtask.
const SETPRIV: [&str; 4] = ["setpriv", "--pdeathsig", "KILL", "--"];

/// A program and its arguments, to be run to its end. It has no input.
///
/// A terminal's Ctrl-C reaches it because it stays in xtask's process group.
#[derive(Debug)]
pub(crate) struct Run(Command);

impl Run {
    pub(crate) fn new(program: impl AsRef<OsStr>) -> Self {
        let mut command = Command::new(SETPRIV[0]);
        command.args(&SETPRIV[1..]).arg(program);
        command.stdin(Stdio::null());
        Self(command)
    }

    pub(crate) fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.0.arg(argument);
        self
    }

    pub(crate) fn args<S: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.0.args(arguments);
        self
    }

    /// Several arguments, separated by spaces.
    pub(crate) fn words(self, arguments: &str) -> Self {
        self.args(arguments.split_whitespace())
    }

    pub(crate) fn dir(mut self, directory: &Path) -> Self {
        self.0.current_dir(directory);
        self
    }

    pub(crate) fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.0.env(name, value);
        self
    }

    pub(crate) fn envs<N: AsRef<OsStr>, V: AsRef<OsStr>>(
        mut self,
        variables: impl IntoIterator<Item = (N, V)>,
    ) -> Self {
        self.0.envs(variables);
        self
    }

    /// The command as a person would type it, for messages.
    pub(crate) fn shown(&self) -> String {
        let words = self.0.get_args().skip(SETPRIV.len() - 1);
        let words: Vec<_> = words.map(OsStr::to_string_lossy).collect();
        let directory = self.0.get_current_dir();
        let place = directory.map_or_else(String::new, |dir| format!(" (in {})", dir.display()));
        words.join(" ") + &place
    }

    /// For callers that connect or start it themselves.
    pub(crate) fn command(self) -> Command {
        self.0
    }

    /// Runs, whatever the end; with all that it printed.
    pub(crate) fn result(mut self) -> Result<Output> {
        self.0
            .output()
            .with_context(|| format!("start {}", self.shown()))
    }

    /// Runs and returns standard output; an error, with standard error in it, if it fails.
    pub(crate) fn output(self) -> Result<Vec<u8>> {
        let shown = self.shown();
        let output = self.result()?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            bail!("{shown} failed ({})\n{}", output.status, stderr.trim_end());
        }
        Ok(output.stdout)
    }

    /// Like [`Run::output`], as text without its last newline.
    pub(crate) fn text(self) -> Result<String> {
        let shown = self.shown();
        let output = String::from_utf8(self.output()?)
            .with_context(|| format!("{shown} printed bytes that are not UTF-8"))?;
        Ok(output.trim_end().to_owned())
    }

    /// Runs quietly; whether it succeeded.
    pub(crate) fn succeeds(self) -> Result<bool> {
        Ok(self.result()?.status.success())
    }

    /// Runs with all output going to `log` (appended), each line of it counted by `progress`.
    /// An error names the log and shows its last lines.
    pub(crate) fn logged(mut self, log: &Path, progress: &Progress) -> Result<()> {
        let shown = self.shown();
        if let Some(dir) = log.parent() {
            fs::create_dir_all(dir)?;
        }
        let mut file = fs::OpenOptions::new().create(true).append(true).open(log)?;
        writeln!(file, "$ {shown}")?;
        let (reader, writer) = std::io::pipe().context("make a pipe")?;
        self.0
            .stdout(writer.try_clone().context("copy a pipe")?)
            .stderr(writer);
        let mut child = self.0.spawn().with_context(|| format!("start {shown}"))?;
        drop(self); // its copies of the pipe's writing end keep the loop below from ending
        for line in BufReader::new(reader).split(b'\n') {
            let mut line = line.with_context(|| format!("read the output of {shown}"))?;
            progress.line(&String::from_utf8_lossy(&line));
            line.push(b'\n');
            file.write_all(&line)?;
        }
        let status = child.wait().with_context(|| format!("wait for {shown}"))?;
        if !status.success() {
            progress.abandon();
            let (log, end) = (log.display(), tail(log, TAIL_LINES));
            bail!("{shown} failed ({status})\nlast lines of {log}:\n{end}");
        }
        Ok(())
    }
}

/// The last `count` lines of a file, indented; empty if it cannot be read.
pub(crate) fn tail(file: &Path, count: usize) -> String {
    let content = std::fs::read(file).unwrap_or_default();
    let content = String::from_utf8_lossy(&content);
    let lines: Vec<&str> = content.lines().collect();
    let first = lines.len().saturating_sub(count);
    lines[first..]
        .iter()
        .map(|line| format!("  {}\n", line.trim_end()))
        .collect()
}

/// Whether a program of that name is on the PATH, or where Debian keeps some tools and an ordinary
/// user's PATH does not look.
pub(crate) fn on_path(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path)
            .chain(["/usr/sbin".into(), "/sbin".into()])
            .any(|dir: PathBuf| dir.join(program).is_file())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_shows_the_end_of_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let run = Run::new("sh").args(["-c", "seq 100; echo broken >&2; exit 3"]);
        let error = run
            .logged(&log, &Progress::spinner("a test"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("exit status: 3"), "{error}");
        assert!(error.contains("broken") && error.contains("100"), "{error}");
        assert!(!error.contains("  50\n"), "{error}");
    }

    #[test]
    fn output_keeps_stderr_for_the_error() {
        let error = Run::new("sh")
            .args(["-c", "echo no >&2; exit 1"])
            .text()
            .unwrap_err();
        assert!(error.to_string().contains("no"), "{error}");
    }
}
