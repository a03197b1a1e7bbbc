//! Threads that are asleep, and that nobody wakes.

use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use crate::wait::{eventually, within_patience};

/// A thread of this process, or of another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task {
    pid: i32,
    tid: i32,
}

/// How often in a row a task has to be found asleep, without having run in between: it may sleep for a moment on its way.
const LOOKS: u32 = 8;

/// How often in a row it has to be found asleep if it wakes in between, since it waits with a time limit and then looks
/// again.
const LOOKS_AT_POLLING: u32 = 20;

impl Task {
    /// The calling thread.
    pub fn this() -> Self {
        Self {
            pid: rustix::process::getpid().as_raw_nonzero().get(),
            tid: rustix::thread::gettid().as_raw_nonzero().get(),
        }
    }

    /// The first thread of a process.
    pub fn of_process(pid: u32) -> Self {
        let pid = i32::try_from(pid).unwrap();
        Self { pid, tid: pid }
    }

    /// Its state as the kernel names it (`R`, `S`, `D`, ...), and how often it has gone to sleep so far; `None`
    /// once it is gone.
    pub fn state(self) -> Option<(char, u64)> {
        let file = format!("/proc/{}/task/{}/status", self.pid, self.tid);
        let status = std::fs::read_to_string(file).ok()?;
        let value = |name: &str| {
            let mut lines = status.lines();
            lines
                .find_map(|line| line.strip_prefix(name))
                .map(str::trim)
        };
        let state = value("State:")?.chars().next()?;
        let sleeps = value("voluntary_ctxt_switches:")?.parse().ok()?;
        Some((state, sleeps))
    }

    /// Waits until it is asleep, and has been for a while. Returns how often it has gone to sleep so far.
    ///
    /// # Panics
    ///
    /// If it ends, or never falls asleep.
    pub fn asleep(self, what: &str) -> u64 {
        let (mut undisturbed, mut asleep) = (0, 0);
        let mut before = None;
        eventually(&format!("{what} is asleep"), || {
            let Some((state, sleeps)) = self.state() else {
                panic!("{what} has ended, and should have fallen asleep");
            };
            let is_asleep = matches!(state, 'S' | 'D');
            asleep = if is_asleep { asleep + 1 } else { 0 };
            let is_same = is_asleep && before.replace(sleeps) == Some(sleeps);
            undisturbed = if is_same { undisturbed + 1 } else { 0 };
            if undisturbed >= LOOKS || asleep >= LOOKS_AT_POLLING {
                Ok(sleeps)
            } else {
                Err(format!("state {state} after {sleeps} sleeps"))
            }
        })
    }

    /// Waits until it sleeps outside of any system call: in an access to memory (`proc(5)`, /proc/pid/syscall).
    ///
    /// # Panics
    ///
    /// If it ends, or never does.
    pub fn asleep_in_an_access(self, what: &str) {
        let file = format!("/proc/{}/task/{}/syscall", self.pid, self.tid);
        eventually(&format!("{what} sleeps in an access"), || {
            let call = std::fs::read_to_string(&file).expect("it lives, and may be looked at");
            match call.starts_with("-1 ") {
                true => Ok(()),
                false => Err(call),
            }
        });
    }

    /// Whether it has slept without a break since it had gone to sleep so often.
    pub fn has_slept_since(self, sleeps: u64) -> bool {
        matches!(self.state(), Some(('S' | 'D', now)) if now == sleeps)
    }
}

/// A thread that was found asleep. Nothing wakes it by accident: if it has woken since, even to fall asleep again,
/// [`Sleeper::is_undisturbed`] tells.
#[derive(Debug)]
pub struct Sleeper<T> {
    what: String,
    task: Task,
    sleeps: u64,
    thread: JoinHandle<T>,
}

impl<T: Send + 'static> Sleeper<T> {
    /// Starts `work` on another thread, and returns when that thread has fallen asleep in it.
    ///
    /// # Panics
    ///
    /// If it ends, or never falls asleep.
    pub fn spawn(what: &str, work: impl FnOnce() -> T + Send + 'static) -> Self {
        let (send, receive) = mpsc::channel();
        let thread = thread::spawn(move || {
            send.send(Task::this()).unwrap();
            work()
        });
        let task = receive.recv().unwrap();
        Self {
            what: what.into(),
            task,
            sleeps: task.asleep(what),
            thread,
        }
    }

    /// Whether it has slept ever since it was found asleep.
    ///
    /// Ask after an event that comes after what might have woken it: the kernel counts a wake-up once the thread
    /// sleeps again, and shows the thread as runnable until then.
    pub fn is_undisturbed(&self) -> bool {
        self.task.has_slept_since(self.sleeps)
    }

    /// Waits until it sleeps: at once if nothing has woken it, and otherwise when it has fallen asleep again.
    ///
    /// # Panics
    ///
    /// If it ends, or never falls asleep.
    pub fn wait_until_asleep(&self) {
        self.task.asleep(&self.what);
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// What it gives, once it is woken.
    ///
    /// # Panics
    ///
    /// As it does, or if it does not end.
    pub fn join(self) -> T {
        let Self { what, thread, .. } = self;
        match within_patience(&what, move || thread.join()) {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_sleeper_is_undisturbed_until_it_is_woken() {
        let (wake, woken) = mpsc::channel::<u32>();
        let sleeper = Sleeper::spawn("a receiver", move || {
            let first = woken.recv().unwrap();
            first + woken.recv().unwrap()
        });
        assert!(sleeper.is_undisturbed());
        wake.send(1).unwrap();
        // It falls asleep again, which is not what it was.
        sleeper.task.asleep("the receiver");
        assert!(!sleeper.is_undisturbed() && !sleeper.is_finished());
        wake.send(2).unwrap();
        assert_eq!(sleeper.join(), 3);
    }

    #[test]
    fn a_thread_that_waits_with_a_limit_and_looks_again_is_asleep() {
        let (wake, woken) = mpsc::channel::<()>();
        let sleeper = Sleeper::spawn("a thread that polls", move || {
            while woken.try_recv().is_err() {
                thread::sleep(Duration::from_millis(1));
            }
        });
        wake.send(()).unwrap();
        sleeper.join();
    }

    #[test]
    fn a_thread_that_ends_is_no_sleeper() {
        let spawned = std::panic::catch_unwind(|| Sleeper::spawn("a sum", || 2 + 2));
        let panic = spawned.unwrap_err();
        let message = panic.downcast_ref::<String>().unwrap();
        assert!(message.contains("a sum has ended"), "{message}");
    }
}
