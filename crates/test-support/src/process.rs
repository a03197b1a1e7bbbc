//! Tests that need a process of their own.

use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{eventually, within_patience};

/// Says to a process for which test it was started.
const TEST: &str = "PAGETIDE_TEST_OF_ITS_OWN";

/// Runs a test's body in a process of its own, by this program with nothing but that test: for what belongs to a whole process, as
/// handlers of signals, and for what another test must not inherit when it starts a program. `name` is the test's, with its modules.
/// What the test skips is printed here.
///
/// # Panics
///
/// If the process fails, has not run the test, or has not ended within [`PATIENCE`](crate::PATIENCE).
pub fn in_a_process_of_its_own(name: &str, body: impl FnOnce()) {
    if std::env::var_os(TEST).is_some_and(|test| test == name) {
        return body();
    }
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    command.env(TEST, name);
    let output = within_patience(name, move || command.output().expect("a process"));
    let said = String::from_utf8_lossy(&output.stdout);
    // Behind the test's name, since one test runs at a time.
    let skipped = said
        .lines()
        .filter_map(|line| line.find("SKIP: ").map(|at| &line[at..]));
    skipped.for_each(|line| println!("{line}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    // Indented: who reads the output of this process would take these lines for its own.
    let indented = |line| format!("\n    {line}");
    let text: String = said.lines().chain(errors.lines()).map(indented).collect();
    assert!(output.status.success(), "{}:{text}", output.status);
    assert!(said.contains("1 passed"), "there is no test {name}:{text}");
}

/// As long as it lives, no thread can be started in this process, which is one of its own ([`in_a_process_of_its_own`]): its
/// address space has no room for another stack.
#[derive(Debug)]
pub struct NoOtherThread {
    before: Rlimit,
    /// Have the stacks of threads that have ended, which would be used again.
    parked: Vec<JoinHandle<()>>,
    /// Dropped to end these.
    release: Option<Sender<()>>,
}

impl NoOtherThread {
    /// From now on, when all threads with these names have ended. They would leave stacks, which a new thread would use.
    ///
    /// # Panics
    ///
    /// If they do not end, or the limit cannot be set.
    #[must_use]
    pub fn begin(short_lived: &[&str]) -> Self {
        eventually("the end of short-lived threads", || {
            let runs = threads().find(|name| short_lived.contains(&name.as_str()));
            runs.map_or(Ok(()), Err)
        });
        /// What this process may still take, which is less than a stack.
        const ROOM_BYTES: u64 = 512 << 10;
        let before = getrlimit(Resource::As);
        let statm = std::fs::read_to_string("/proc/self/statm").expect("the sizes of this process");
        let pages = statm.split(' ').next().and_then(|size| size.parse().ok());
        let pages: u64 = pages.expect("its size in pages");
        let current = Some(pages * rustix::param::page_size() as u64 + ROOM_BYTES);
        let bounded = Rlimit { current, ..before };
        setrlimit(Resource::As, bounded).expect("a limit of the address space");
        let (release, released) = channel();
        let released = Arc::new(Mutex::new(released));
        let park = || {
            let released = Arc::clone(&released);
            let wait = move || drop(released.lock().map(|released| released.recv()));
            Builder::new().spawn(wait).ok()
        };
        Self {
            before,
            parked: std::iter::from_fn(park).collect(),
            release: Some(release),
        }
    }
}

/// The names of this process's threads.
fn threads() -> impl Iterator<Item = String> {
    let threads = std::fs::read_dir("/proc/self/task").expect("this process's threads");
    // One may end meanwhile.
    threads.flatten().filter_map(|thread| {
        let name = std::fs::read_to_string(thread.path().join("comm")).ok()?;
        Some(name.trim_end().to_owned())
    })
}

impl Drop for NoOtherThread {
    fn drop(&mut self) {
        drop(self.release.take());
        for parked in self.parked.drain(..) {
            let _ = parked.join();
        }
        setrlimit(Resource::As, self.before).expect("no limit of the address space");
    }
}

/// As long as it lives, no descriptor can be opened in this process, which is one of its own ([`in_a_process_of_its_own`]): each
/// number below its limit is taken.
#[derive(Debug)]
pub struct NoDescriptor {
    before: Rlimit,
}

impl NoDescriptor {
    /// From now on.
    ///
    /// # Panics
    ///
    /// If the limit cannot be set.
    #[must_use]
    pub fn begin() -> Self {
        let before = getrlimit(Resource::Nofile);
        let lowest = std::fs::File::open("/dev/null").expect("a descriptor");
        let current = u64::try_from(lowest.as_raw_fd()).ok();
        let none = Rlimit { current, ..before };
        setrlimit(Resource::Nofile, none).expect("a limit of descriptors");
        Self { before }
    }
}

impl Drop for NoDescriptor {
    fn drop(&mut self) {
        setrlimit(Resource::Nofile, self.before).expect("the former limit of descriptors");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_and_a_test_that_is_not_there_are_failures() {
        if std::env::var_os(TEST).is_some() {
            return;
        }
        let this = "process::tests::a_failure_and_a_test_that_is_not_there_are_failures";
        in_a_process_of_its_own(this, || unreachable!("it is another process"));
        let none = std::panic::catch_unwind(|| {
            in_a_process_of_its_own("process::tests::none", || {});
        });
        assert!(none.is_err());
        let fails = "process::tests::a_test_that_fails_in_its_process";
        let failed = std::panic::catch_unwind(|| in_a_process_of_its_own(fails, || {}));
        assert!(failed.is_err());
    }

    /// Passes where it was not started by the test above.
    #[test]
    fn a_test_that_fails_in_its_process() {
        assert!(std::env::var_os(TEST).is_none());
    }

    #[test]
    fn a_thread_finds_no_room() {
        let this = "process::tests::a_thread_finds_no_room";
        in_a_process_of_its_own(this, || {
            let start = || Builder::new().spawn(|| {});
            // They leave their stacks behind, one of them when it likes.
            start().expect("a thread").join().expect("it ends");
            let short = Builder::new().name("pt-short".into()).spawn(|| {});
            drop(short.expect("a thread"));
            let none = NoOtherThread::begin(&["pt-short"]);
            assert!(start().is_err());
            drop(none);
            start().expect("a thread").join().expect("it ends");
        });
    }

    #[test]
    fn a_file_finds_no_descriptor() {
        let this = "process::tests::a_file_finds_no_descriptor";
        in_a_process_of_its_own(this, || {
            let open = || std::fs::File::open("/dev/null");
            let kept = open().expect("a descriptor");
            let none = NoDescriptor::begin();
            let refused = open().expect_err("no descriptor").raw_os_error();
            assert_eq!(refused, Some(rustix::io::Errno::MFILE.raw_os_error()));
            drop(none);
            open().expect("a descriptor");
            drop(kept);
        });
    }
}
