//! Counts operations, and measures how long the longest current one has been running.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// The current operation of one thread.
type Doing = (u64, String, Instant, Arc<dyn Fn() -> String + Send + Sync>);

macro_rules! ops {
    ($($name:ident),* $(,)?) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Op { $($name),* }
    };
}

ops! {
    Life, Touch, Write, Exit, Discard, Advise, Punch, Push, PrefetchWhole, PrefetchStopped,
    Attach, Protect, ChildContent, ChildZeroes, ChildLost, Resume, ReplaceSource, Export, Verified, Removed, AnsweredAtOnce, AnsweredLater,
    AnsweredWrongly, Failed, Dropped, Hung, Cancelled,
}

#[derive(Default)]
pub struct Tally {
    counts: Mutex<BTreeMap<Op, u64>>,
    doing: Mutex<Vec<Doing>>,
    next: Mutex<u64>,
    pub is_over: AtomicBool,
}

impl Tally {
    pub fn count(&self, op: Op) {
        self.count_many(op, 1);
    }

    pub fn count_many(&self, op: Op, times: u64) {
        *self.counts.lock().unwrap().entry(op).or_default() += times;
    }

    pub fn of(&self, op: Op) -> u64 {
        self.counts.lock().unwrap().get(&op).copied().unwrap_or(0)
    }

    /// Performs `work` under the watchdog, which calls `dump` if the work takes too long.
    pub fn watch<T>(
        &self,
        what: impl Into<String>,
        dump: &Arc<dyn Fn() -> String + Send + Sync>,
        work: impl FnOnce() -> T,
    ) -> T {
        let number = {
            let mut next = self.next.lock().unwrap();
            *next += 1;
            *next
        };
        let doing = (number, what.into(), Instant::now(), Arc::clone(dump));
        self.doing.lock().unwrap().push(doing);
        let result = work();
        self.doing.lock().unwrap().retain(|doing| doing.0 != number);
        result
    }

    /// Ends the process if any operation takes longer than `limit`.
    pub fn guard(&self, limit: Duration) {
        while !self.is_over.load(Ordering::Acquire) {
            thread::sleep(Duration::from_millis(200));
            let doing = self.doing.lock().unwrap();
            let mut is_stuck = false;
            for (_, what, since, dump) in &*doing {
                if since.elapsed() > limit {
                    is_stuck = true;
                    eprintln!("STUCK for {:?}: {what}\n{}", since.elapsed(), dump());
                }
            }
            if is_stuck {
                eprintln!("{}", sleeping());
                crate::give_up();
            }
        }
    }
}

/// Where each thread of this process and of its children sleeps in the kernel, as far as that is shown to it.
fn sleeping() -> String {
    let me = std::process::id().to_string();
    let is_child = |process: &String| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let parent = stat.rsplit(") ").next().unwrap_or_default();
        parent.split(' ').nth(1) == Some(&me)
    };
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let names = all.filter_map(|entry| entry.file_name().into_string().ok());
    let ours = names.filter(|name| *name == me || is_child(name));
    let tasks = ours.flat_map(|process| std::fs::read_dir(format!("/proc/{process}/task")));
    let mut text = String::new();
    for task in tasks.flatten().flatten() {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let (name, stack) = (read("comm"), read("stack"));
        let calls: Vec<_> = stack
            .lines()
            .filter_map(|line| line.split(' ').nth(1))
            .collect();
        let calls = calls.join(" < ");
        text += &format!("{}: {}: {calls}\n", task.path().display(), name.trim());
    }
    text
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = self.counts.lock().unwrap();
        let mut sep = "";
        for (op, count) in &*counts {
            write!(f, "{sep}{count} {op:?}")?;
            sep = ", ";
        }
        Ok(())
    }
}
