//! Running other programs: errors that name the command, logs that are kept, progress that is seen.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::progress::Progress;

/// Lines of a log that an error shows.
const TAIL_LINES: usize = 30;

/// A program and its arguments, to be run to its end.
///
/// The child is started through `setpriv --pdeathsig` so that it cannot outlive a killed xtask; a
/// terminal's Ctrl-C reaches it because it stays in xtask's process group.
#[derive(Debug)]
pub(crate) struct Run {
    program: OsString,
    arguments: Vec<OsString>,
    directory: Option<PathBuf>,
    environment: Vec<(OsString, OsString)>,
}

impl Run {
    pub(crate) fn new(program: impl AsRef<OsStr>) -> Self {
        Self {
            program: program.as_ref().to_owned(),
            arguments: Vec::new(),
            directory: None,
            environment: Vec::new(),
        }
    }

    pub(crate) fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.arguments.push(argument.as_ref().to_owned());
        self
    }

    pub(crate) fn args<S: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.arguments
            .extend(arguments.into_iter().map(|a| a.as_ref().to_owned()));
        self
    }

    pub(crate) fn dir(mut self, directory: &Path) -> Self {
        self.directory = Some(directory.to_owned());
        self
    }

    pub(crate) fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.environment
            .push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// The command as a person would type it, for messages.
    pub(crate) fn shown(&self) -> String {
        let words = std::iter::once(&self.program).chain(&self.arguments);
        let words: Vec<_> = words.map(|w| w.to_string_lossy().into_owned()).collect();
        match &self.directory {
            Some(dir) => format!("{} (in {})", words.join(" "), dir.display()),
            None => words.join(" "),
        }
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "--"])
            .arg(&self.program)
            .args(&self.arguments);
        command.envs(self.environment.iter().map(|(n, v)| (n, v)));
        if let Some(dir) = &self.directory {
            command.current_dir(dir);
        }
        command
    }

    /// Runs and returns standard output; an error, with standard error in it, if it fails.
    pub(crate) fn output(&self) -> Result<Vec<u8>> {
        let output = self
            .command()
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("start {}", self.shown()))?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            bail!(
                "{} failed ({})\n{}",
                self.shown(),
                output.status,
                stderr.trim_end()
            );
        }
        Ok(output.stdout)
    }

    /// Like [`Run::output`], as text without its last newline.
    pub(crate) fn text(&self) -> Result<String> {
        let output = String::from_utf8(self.output()?)
            .with_context(|| format!("{} printed bytes that are not UTF-8", self.shown()))?;
        Ok(output.trim_end().to_owned())
    }

    /// Runs quietly; whether it succeeded.
    pub(crate) fn succeeds(&self) -> Result<bool> {
        let status = self
            .command()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .with_context(|| format!("start {}", self.shown()))?;
        Ok(status.success())
    }

    /// Runs with all output going to `log` (appended), each line of it counted by `progress`.
    /// An error names the log and shows its last lines.
    pub(crate) fn logged(&self, log: &Path, progress: &Progress) -> Result<()> {
        let mut file = open_log(log)?;
        writeln!(file, "$ {}", self.shown()).with_context(|| write_failed(log))?;
        let (reader, writer) = std::io::pipe().context("make a pipe")?;
        let mut command = self.command();
        command
            .stdin(Stdio::null())
            .stdout(writer.try_clone().context("copy a pipe")?)
            .stderr(writer);
        let mut child = command
            .spawn()
            .with_context(|| format!("start {}", self.shown()))?;
        drop(command); // its copies of the pipe's writing end keep the loop below from ending
        for line in BufReader::new(reader).split(b'\n') {
            let line = line.with_context(|| format!("read the output of {}", self.shown()))?;
            progress.line(&String::from_utf8_lossy(&line));
            file.write_all(&line)
                .and_then(|()| file.write_all(b"\n"))
                .with_context(|| write_failed(log))?;
        }
        let status = child
            .wait()
            .with_context(|| format!("wait for {}", self.shown()))?;
        if !status.success() {
            progress.abandon();
            bail!(
                "{} failed ({status})\nlast lines of {}:\n{}",
                self.shown(),
                log.display(),
                tail(log, TAIL_LINES)
            );
        }
        Ok(())
    }
}

fn open_log(log: &Path) -> Result<File> {
    if let Some(dir) = log.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    }
    File::options()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("open {}", log.display()))
}

fn write_failed(log: &Path) -> String {
    format!("write {}", log.display())
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

/// Whether a program of that name is on the PATH.
pub(crate) fn on_path(program: &str) -> bool {
    find_on_path(program).is_some()
}

/// Where on the PATH a program is.
pub(crate) fn find_on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    // Debian keeps some tools where an ordinary user's PATH does not look.
    let dirs = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    dirs.map(|dir| dir.join(program))
        .find(|file| file.is_file())
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
            .logged(&log, &Progress::hidden())
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
