//! One CPU for all threads of this process.

use std::{fs, io};

use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Lists threads.
type Threads = Box<dyn Fn() -> io::Result<Vec<Pid>>>;

/// While this lives, every thread of the process runs on one CPU. The kernel otherwise wakes a thread on the
/// CPU of the thread that wakes it, or on another one, for whole runs at a time. Where a wake-up across CPUs costs
/// several times as much as all the rest of a fault, a series would show only that choice.
pub(super) struct OneCpu {
    allowed: CpuSet,
    threads: Threads,
}

impl OneCpu {
    pub(super) fn begin() -> io::Result<Self> {
        Self::of(Box::new(threads))
    }

    fn of(threads: Threads) -> io::Result<Self> {
        let allowed = sched_getaffinity(None)?;
        let mut one = CpuSet::new();
        if let Some(cpu) = cpus(&allowed).next() {
            one.set(cpu);
        }
        let guard = Self { allowed, threads };
        guard.set(&one)?;
        Ok(guard)
    }

    /// Threads that begin meanwhile have the set of the thread that starts them.
    fn set(&self, set: &CpuSet) -> io::Result<()> {
        for thread in (self.threads)()? {
            match sched_setaffinity(Some(thread), set) {
                // The thread has ended.
                Ok(()) | Err(Errno::SRCH) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

impl Drop for OneCpu {
    fn drop(&mut self) {
        // The threads had these CPUs before.
        let _ = self.set(&self.allowed);
    }
}

fn cpus(set: &CpuSet) -> impl Iterator<Item = usize> + '_ {
    (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu))
}

fn threads() -> io::Result<Vec<Pid>> {
    let mut threads = Vec::new();
    for task in fs::read_dir("/proc/self/task")? {
        let name = task?.file_name();
        let id = name.to_str().and_then(|name| name.parse().ok());
        threads.extend(id.and_then(Pid::from_raw));
    }
    Ok(threads)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use rustix::thread::gettid;

    use super::*;

    fn mine() -> Vec<usize> {
        cpus(&sched_getaffinity(None).unwrap()).collect()
    }

    /// With the threads of this test only: others test at the same time.
    #[test]
    fn all_threads_have_one_cpu_and_then_the_former_ones() {
        let before = mine();
        let (ask, asked) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let other = thread::spawn(move || {
            for () in asked {
                tell.send((gettid(), mine())).unwrap();
            }
        });
        let others = || {
            ask.send(()).unwrap();
            told.recv().unwrap()
        };
        let (id, its) = others();
        assert_eq!(its, before);
        let all = threads().unwrap();
        assert!(all.contains(&id) && all.contains(&gettid()));
        let both = [id, gettid()].to_vec();
        let one = OneCpu::of(Box::new(move || Ok(both.clone()))).unwrap();
        assert_eq!(mine(), before[..1]);
        assert_eq!(others(), (id, mine()));
        drop(one);
        assert_eq!((mine(), others()), (before.clone(), (id, before)));
        drop(ask);
        other.join().unwrap();
    }
}
