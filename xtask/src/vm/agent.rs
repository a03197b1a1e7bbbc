//! guest/agent.c, the first process of a VM: built, told what to do, and understood.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};

use super::VmArgs;
use super::host_load;
use crate::compile;
use crate::kernel::Arch;
use crate::paths::Paths;

/// What QEMU and the agent call the share that is target/.
pub(super) const TARGET_TAG: &str = "target";

/// A command to run in a VM.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    /// The program and its arguments.
    pub(crate) command: Vec<OsString>,
    /// Where it runs (x86_64 only: the other VMs have no such directory).
    pub(crate) directory: PathBuf,
    /// After which it is killed, and the next one is run.
    pub(crate) timeout: Option<Duration>,
    /// Files of /proc and /sys, and what is written to them before.
    pub(crate) settings: Vec<(&'static str, String)>,
}

impl Job {
    /// A job that is given half an hour: a software CPU is slow, and more so beside other load.
    pub(crate) fn new(command: Vec<OsString>, directory: &Path) -> Self {
        Self {
            command,
            directory: directory.to_owned(),
            timeout: Some(Duration::from_secs(1800)),
            settings: Vec::new(),
        }
    }
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// By itself.
    Exit(u8),
    /// By a signal.
    Signal(u8),
    /// It was killed after its time.
    Timeout,
}

impl Ended {
    /// The exit status that a shell would give.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Exit(code) => code,
            Self::Signal(number) => 128 + (number & 0x7f),
            Self::Timeout => 124,
        }
    }
}

/// How a command ended, and how long it took in the VM's own time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Finished {
    pub(crate) ended: Ended,
    pub(crate) time: Duration,
}

impl Finished {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let how = words.next()?;
        let value = words.next()?.parse().ok()?;
        let time = Duration::from_millis(words.next()?.parse().ok()?);
        let ended = match how {
            "exit" => Ended::Exit(value),
            "signal" => Ended::Signal(value),
            "timeout" => Ended::Timeout,
            _ => return None,
        };
        Some(Self { ended, time })
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exit(code) => write!(f, "exit status {code}"),
            Self::Signal(number) => write!(f, "killed by signal {number}"),
            Self::Timeout => write!(f, "killed after its time"),
        }
    }
}

/// Reads the status port: how each command ended, and whether the agent got to its end.
pub(super) fn parse_status(text: &str) -> (Vec<Finished>, bool) {
    let mut ended = Vec::new();
    for line in text.split_inclusive('\n') {
        match line.strip_suffix('\n') {
            Some("end") => return (ended, true),
            Some(line) => ended.extend(Finished::parse(line)),
            None => {}
        }
    }
    (ended, false)
}

/// Compiles the agent, static, unless that was done before.
pub(super) fn build(arch: Arch, paths: &Paths) -> Result<PathBuf> {
    program(arch, "guest/agent.c", paths)
}

/// The same of what becomes the agent, on a kernel that has the lab's drivers as modules.
pub(crate) fn build_early(paths: &Paths) -> Result<PathBuf> {
    program(Arch::X86_64, "guest/early.c", paths)
}

fn program(arch: Arch, source: &str, paths: &Paths) -> Result<PathBuf> {
    let compiler = format!("{}gcc", arch.cross_compile());
    let headers = [paths.in_root("guest/share.h")];
    let directory = paths.target().join("vm");
    compile::static_program(&compiler, &paths.in_root(source), &headers, &directory)
}

/// What the agent is told.
pub(super) fn spec(args: &VmArgs, jobs: &[Job], run_dir: &Path, paths: &Paths) -> Result<Vec<u8>> {
    let mut spec = Vec::new();
    if args.variant.arch == Arch::X86_64 {
        push(&mut spec, ["overlay", "/tmp", "9p", TARGET_TAG])?;
        push(&mut spec, [paths.target()])?;
    }
    for (name, value) in environment(args, run_dir, paths) {
        let mut pair = OsString::from(format!("{name}="));
        pair.push(value);
        push(&mut spec, ["env".into(), pair])?;
    }
    for job in jobs {
        if args.variant.arch == Arch::X86_64 {
            push(&mut spec, ["dir".as_ref(), job.directory.as_path()])?;
        }
        let seconds = job.timeout.map_or(0, |timeout| timeout.as_secs());
        push(&mut spec, ["timeout", &seconds.to_string()])?;
        for (file, text) in &job.settings {
            push(&mut spec, ["write", file, text])?;
        }
        push(&mut spec, ["run", &job.command.len().to_string()])?;
        push(&mut spec, &job.command)?;
    }
    Ok(spec)
}

fn push<S: AsRef<OsStr>>(spec: &mut Vec<u8>, strings: impl IntoIterator<Item = S>) -> Result<()> {
    for string in strings {
        let string = string.as_ref();
        if string.as_bytes().contains(&0) {
            bail!("a NUL in {string:?}");
        }
        spec.extend_from_slice(string.as_bytes());
        spec.push(0);
    }
    Ok(())
}

/// All certificates of authorities in one file. Unless it is named, a program that may use TLS also looks at each of the 300
/// files and links beside it. That takes a software CPU 4 s over 9p, and 13 s on Linux 6.1, whenever a server starts.
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// All that the commands inherit.
fn environment(args: &VmArgs, run_dir: &Path, paths: &Paths) -> Vec<(&'static str, OsString)> {
    let (path, home) = match args.variant.arch {
        Arch::X86_64 => {
            let home = std::env::var_os("HOME").unwrap_or_else(|| "/root".into());
            (path(args.pagetide.directory(paths).as_deref()), home)
        }
        Arch::Arm64 => ("/bin:/selftests".into(), "/".into()),
    };
    let mut list = vec![
        ("PAGETIDE_TIMING", args.timing.name().into()),
        ("PAGETIDE_HOST_LOAD", host_load::file(run_dir).into()),
        ("USER", "root".into()),
        ("LANG", "C.UTF-8".into()),
        ("PATH", path),
        ("HOME", home),
    ];
    let is_given = args
        .environment
        .iter()
        .any(|(name, _)| *name == "SSL_CERT_FILE");
    if args.variant.arch == Arch::X86_64 && Path::new(CERTIFICATES).exists() && !is_given {
        list.push(("SSL_CERT_FILE", CERTIFICATES.into()));
    }
    list.extend(args.environment.iter().cloned());
    let inherited = ["TERM", "RUST_LOG", "RUST_BACKTRACE"].into_iter();
    list.extend(inherited.filter_map(|name| Some((name, std::env::var_os(name)?))));
    list
}

/// The host's PATH, after the directory that has `pagetide`, if there is to be one.
fn path(pagetide: Option<&Path>) -> OsString {
    let host = std::env::var_os("PATH").filter(|path| !path.is_empty());
    let host = host.unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let mut path = OsString::new();
    if let Some(pagetide) = pagetide {
        path.push(pagetide);
        path.push(":");
    }
    path.push(host);
    path.push(":/usr/sbin:/sbin");
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_port_is_understood() {
        let (finished, complete) = parse_status("exit 37 1500\nsignal 11 2\ntimeout 0 9\nend\n");
        assert!(complete);
        let ended: Vec<_> = finished.iter().map(|f| f.ended).collect();
        assert_eq!(ended, [Ended::Exit(37), Ended::Signal(11), Ended::Timeout]);
        let codes: Vec<_> = ended.iter().map(|ended| ended.code()).collect();
        assert_eq!(codes, [37, 139, 124]);
        assert_eq!(finished[0].time, Duration::from_millis(1500));
    }

    #[test]
    fn a_line_that_was_cut_is_no_status() {
        assert_eq!(parse_status("exit 3 1"), (Vec::new(), false));
        let (finished, complete) = parse_status("exit 3 1\nen");
        assert_eq!((finished.len(), complete), (1, false));
    }

    #[test]
    fn a_spec_cannot_hold_a_nul() {
        assert!(push(&mut Vec::new(), ["a\0b"]).is_err());
    }
}
