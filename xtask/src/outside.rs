//! What lies outside of this machine, or outside of xtask's control, and may fail: the network, Debian's mirrors,
//! PyPI, the space on the disk.
//!
//! A download is tried again where that helps. An error then says that the outside is its cause, and what to do.

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Error, Result};

use crate::progress;

/// What is waited before a download is tried again.
const PAUSES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(8)];

/// Who serves a download.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Service {
    Debian,
    PyPi,
}

/// Why something failed that depends on the outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    DiskFull,
    /// The service cannot be reached.
    Network,
    /// The service answers, but not with what was asked for.
    Answer,
    /// Another program installs packages at the same time.
    Locked,
}

/// What programs and the kernel say, in lower case. The first that a text has is its cause.
const SIGNS: [(&str, Cause); 24] = [
    ("no space left on device", Cause::DiskFull),
    ("disk quota exceeded", Cause::DiskFull),
    ("don't have enough free space", Cause::DiskFull),
    ("could not get lock", Cause::Locked),
    ("unable to acquire the dpkg frontend lock", Cause::Locked),
    ("temporary failure resolving", Cause::Network),
    ("temporary failure in name resolution", Cause::Network),
    ("name or service not known", Cause::Network),
    ("could not resolve", Cause::Network),
    ("couldn't resolve host", Cause::Network),
    ("network is unreachable", Cause::Network),
    ("no route to host", Cause::Network),
    ("connection refused", Cause::Network),
    ("connection reset", Cause::Network),
    ("connection timed out", Cause::Network),
    ("connection failed", Cause::Network),
    ("could not connect to", Cause::Network),
    ("read timed out", Cause::Network),
    ("newconnectionerror", Cause::Network),
    ("connecttimeouterror", Cause::Network),
    ("failed to fetch", Cause::Answer),
    ("hash sum mismatch", Cause::Answer),
    ("unable to locate package", Cause::Answer),
    ("could not find a version", Cause::Answer),
];

impl Cause {
    fn of(text: &str) -> Option<Self> {
        let text = last_command(text).to_lowercase();
        let mut signs = SIGNS.iter();
        let found = signs.find(|(sign, _)| text.contains(sign))?;
        Some(found.1)
    }

    /// Whether the same may go well a little later.
    fn passes(self) -> bool {
        match self {
            Self::DiskFull => false,
            Self::Network | Self::Answer | Self::Locked => true,
        }
    }

    /// The cause, and what to do.
    fn advice(self, service: Service) -> String {
        let (name, proxy, stale) = match service {
            Service::Debian => (
                "Debian's mirror",
                "apt's Acquire::http::Proxy",
                "`apt-get update` tells whether its lists can be had; if it is being updated, try again later, or \
                 name another mirror in /etc/apt",
            ),
            Service::PyPi => (
                "PyPI",
                "HTTPS_PROXY, or pip's option `proxy`",
                "Try again later; if an index other than pypi.org is set (pip's option `index-url`), it has to serve \
                 this file",
            ),
        };
        match self {
            Self::DiskFull => format!("the disk is full, and that is the cause. {MAKE_ROOM}"),
            Self::Network => format!(
                "the network is the cause: {name} cannot be reached. Is there a network, and a proxy if it takes one \
                 ({proxy})?"
            ),
            Self::Answer => {
                format!(
                    "{name} is the cause, or the way to it: what was asked for did not come. {stale}"
                )
            }
            Self::Locked => {
                "another program that installs packages is the cause: try again when it has ended"
                    .into()
            }
        }
    }
}

/// What to do about a full disk.
const MAKE_ROOM: &str = "`df -h` says which disk is full; most is in the checkout's target/ and in the cache \
     (~/.cache/pagetide, or PAGETIDE_CACHE). Free some of it, or put the cache elsewhere";

/// The output of the last command of a log: lines before `$ COMMAND` belong to another one.
fn last_command(text: &str) -> &str {
    text.rfind("\n  $ ").map_or(text, |start| &text[start..])
}

/// What to do, if a text tells of a full disk and not yet what to do: any program may find one.
pub(crate) fn disk_full(text: &str) -> Option<String> {
    let is_it = Cause::of(text) == Some(Cause::DiskFull) && !text.contains(MAKE_ROOM);
    is_it.then(|| format!("a disk is full, unless it is one that a test has filled. {MAKE_ROOM}"))
}

/// How many MiB a directory's disk has free for this user.
pub(crate) fn free_mib(dir: &Path) -> Option<u64> {
    let status = rustix::fs::statvfs(dir).ok()?;
    Some(status.f_bavail.saturating_mul(status.f_frsize) >> 20)
}

/// What is to be said before all tests run, if their disk has less room than they take.
pub(crate) fn little_room(free_mib: u64, is_cold: bool) -> Option<String> {
    /// What `make test` adds to a clone and a cache that have nothing: CONTRIBUTING.md has the same.
    const COLD_MIB: u64 = 30 << 10;
    /// What it adds to those that have all: the tests' own files, and logs.
    const WARM_MIB: u64 = 4 << 10;
    let takes_mib = if is_cold { COLD_MIB } else { WARM_MIB };
    (free_mib < takes_mib).then(|| {
        format!(
            "the checkout's disk has {} GiB free, and all tests take about {} GiB there and in the cache \
             (~/.cache/pagetide, or PAGETIDE_CACHE): they may fail. Make room, or put the cache elsewhere",
            free_mib >> 10,
            takes_mib >> 10
        )
    })
}

impl Service {
    /// Does what needs the service; again, a few times and after a pause, if it fails for a cause that may pass. An
    /// error whose cause is outside says so, and what to do.
    pub(crate) fn again(self, what: &str, action: impl FnMut() -> Result<()>) -> Result<()> {
        self.again_after(&PAUSES, what, action)
    }

    fn again_after(
        self,
        pauses: &[Duration],
        what: &str,
        mut action: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let mut pauses = pauses.iter();
        let mut tries = 0;
        loop {
            tries += 1;
            let Err(error) = action() else {
                return Ok(());
            };
            let cause = Cause::of(&format!("{error:#}"));
            let pause = cause
                .filter(|cause| cause.passes())
                .and_then(|_| pauses.next());
            let Some(&pause) = pause else {
                return Err(self.explained(error, cause, what, tries));
            };
            let seconds = pause.as_secs();
            progress::warn(&format!(
                "{what} failed; trying again in {seconds} s: {error:#}"
            ));
            // The outside tells nobody when it is well again.
            thread::sleep(pause);
        }
    }

    fn explained(self, error: Error, cause: Option<Cause>, what: &str, tries: usize) -> Error {
        let Some(cause) = cause else {
            return error;
        };
        let often = match tries {
            1 => String::new(),
            tries => format!(" {tries} times"),
        };
        error.context(format!("{what} failed{often}: {}", cause.advice(self)))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::command::Run;
    use crate::progress::Progress;

    const AT_ONCE: [Duration; 2] = [Duration::ZERO; 2];

    /// A script that counts its runs in a file, and fails in the first ones with a message.
    fn script(directory: &Path, failures: u32, message: &str) -> Result<()> {
        let text =
            r#"echo run >> runs; test "$(wc -l < runs)" -gt "$0" || { echo "$1" >&2; exit 100; }"#;
        let run = Run::new("sh").args(["-c", text, &failures.to_string(), message]);
        let log = directory.join("log");
        run.dir(directory)
            .logged(&log, &Progress::spinner("a script"))
    }

    /// What comes of the script, and how often it ran.
    fn tried(failures: u32, message: &str) -> (Result<()>, usize) {
        let directory = tempfile::tempdir().unwrap();
        let result = Service::Debian.again_after(&AT_ONCE, "the download", || {
            script(directory.path(), failures, message)
        });
        let runs = std::fs::read_to_string(directory.path().join("runs")).unwrap();
        (result, runs.lines().count())
    }

    #[test]
    fn what_fails_twice_and_then_succeeds_has_succeeded() {
        let (result, runs) = tried(2, "E: Failed to fetch http://mirror.example/a.deb");
        result.unwrap();
        assert_eq!(runs, 3);
    }

    #[test]
    fn an_error_names_the_network_and_how_often_it_was_tried() {
        let (result, runs) = tried(9, "W: Temporary failure resolving 'mirror.example'");
        let error = format!("{:#}", result.unwrap_err());
        assert_eq!(runs, 3);
        for part in [
            "the download failed 3 times: the network is the cause",
            "Debian's mirror cannot be reached",
            "Acquire::http::Proxy",
            "'mirror.example'",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn a_full_disk_is_not_tried_again() {
        let (result, runs) = tried(9, "write error: No space left on device");
        let error = format!("{:#}", result.unwrap_err());
        assert_eq!(runs, 1);
        assert!(
            error.contains("the download failed: the disk is full"),
            "{error}"
        );
        // It is said once.
        assert_eq!(disk_full(&error), None);
        assert!(disk_full("write a: No space left on device (os error 28)").is_some());
        assert_eq!(disk_full("no such file"), None);
    }

    #[test]
    fn little_room_is_said_before_the_tests() {
        let said = little_room(6 << 10, true).unwrap();
        assert!(
            said.starts_with("the checkout's disk has 6 GiB free, and all tests take about 30 GiB"),
            "{said}"
        );
        assert_eq!(little_room(6 << 10, false), None);
        assert_eq!(little_room(30 << 10, true), None);
        assert!(little_room(1 << 10, false).is_some());
        assert!(free_mib(Path::new("/")).is_some());
    }

    #[test]
    fn what_the_outside_did_not_cause_fails_at_once_and_as_it_is() {
        let (result, runs) = tried(9, "dpkg: error processing package");
        let error = format!("{:#}", result.unwrap_err());
        assert_eq!(runs, 1);
        assert!(error.starts_with("sh -c"), "{error}");
    }

    #[test]
    fn each_service_has_its_own_advice() {
        let unreachable = "NewConnectionError: [Errno -3] Temporary failure in name resolution\n\
                           ERROR: Could not find a version that satisfies the requirement moto==5";
        assert_eq!(Cause::of(unreachable), Some(Cause::Network));
        assert_eq!(
            Cause::of("E: Unable to locate package a"),
            Some(Cause::Answer)
        );
        assert!(Cause::Network.advice(Service::PyPi).contains("PyPI"));
        assert!(Cause::Answer.advice(Service::PyPi).contains("index-url"));
        assert!(
            Cause::Answer
                .advice(Service::Debian)
                .contains("apt-get update")
        );
        let locked = "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 7";
        assert_eq!(Cause::of(locked), Some(Cause::Locked));
    }

    #[test]
    fn an_earlier_command_of_the_log_is_not_the_cause() {
        let log = "apt-get install a failed\nlast lines of log:\n  $ apt-get update\n  Connection refused\n  \
                   $ apt-get install a\n  dpkg: error processing package a\n";
        assert_eq!(Cause::of(log), None);
    }
}
