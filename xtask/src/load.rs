//! Load for the machine: processes that compute, and one that holds memory.
//!
//! They are xtask's children. They end when a [`Load`] is dropped, and with xtask, whatever ends it
//! ([`Run`]'s `setpriv`).

use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;

use crate::command::Run;

/// What the process that holds memory leaves to all others: room for the tests, and little for cached files.
const LEFT: u64 = 4 << 30;

/// The most that is held. To fill more takes longer than it is worth.
const MOST: u64 = 64 << 30;

/// How often memory that is held is touched: often enough to stay, without being one more process that computes.
const TOUCHED_EVERY: Duration = Duration::from_secs(1);

const PAGE: usize = 4096;

/// What the process says once it holds its memory.
const READY: &str = "ready";

/// The arguments of the verb, which only xtask itself uses.
#[derive(Debug, Args)]
pub(crate) struct HoldArgs {
    /// How much memory to hold and to touch again and again
    bytes: usize,
}

/// Holds memory, until this process is ended.
pub(crate) fn hold(args: &HoldArgs) -> Result<()> {
    // If memory is short after all, this process goes, and no other.
    std::fs::write("/proc/self/oom_score_adj", "1000").context("/proc/self/oom_score_adj")?;
    let mut memory = fill(args.bytes)?;
    let mut out = std::io::stdout();
    writeln!(out, "{READY}").and_then(|()| out.flush())?;
    loop {
        std::thread::sleep(TOUCHED_EVERY);
        touch(&mut memory);
    }
}

fn fill(bytes: usize) -> Result<Vec<u8>> {
    let mut memory = Vec::new();
    let room = memory.try_reserve_exact(bytes);
    room.with_context(|| format!("hold {bytes} bytes"))?;
    memory.resize(bytes, 1);
    Ok(memory)
}

/// Writes to every page.
fn touch(memory: &mut [u8]) {
    for byte in memory.iter_mut().step_by(PAGE) {
        *byte = byte.wrapping_add(1);
    }
    black_box(memory);
}

/// How much memory can be held on this machine now; `None` if that is hardly any.
pub(crate) fn holdable() -> Result<Option<u64>> {
    let read = |file: &str| std::fs::read_to_string(file).with_context(|| format!("read {file}"));
    let machine =
        available(&read("/proc/meminfo")?).context("/proc/meminfo has no MemAvailable")?;
    // Of the limits of control groups, that of this process's own is enough for a container.
    let group = read("/proc/self/cgroup").unwrap_or_default();
    let group = group.lines().find_map(|line| line.strip_prefix("0::"));
    let in_group = |file: &str| {
        let text = read(&format!("/sys/fs/cgroup{}/{file}", group?)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let group = in_group("memory.max").zip(in_group("memory.current"));
    let group = group.map_or(u64::MAX, |(most, now)| most.saturating_sub(now));
    Ok(share(machine.min(group)))
}

/// Bytes that can be had without swapping.
fn available(meminfo: &str) -> Option<u64> {
    let mut lines = meminfo.lines();
    let value = lines.find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = value.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

/// What is held of the memory that is available.
fn share(available: u64) -> Option<u64> {
    let held = available.checked_sub(LEFT)?.min(MOST);
    (held > 0).then_some(held)
}

/// The command that holds memory: this program, wherever it was moved.
pub(crate) fn holder(bytes: u64) -> Run {
    let program = format!("/proc/{}/exe", std::process::id());
    Run::new(program).args(["hold-memory", &bytes.to_string()])
}

/// Processes that load the machine until this is dropped.
#[derive(Debug)]
pub(crate) struct Load {
    children: Vec<(String, Child)>,
}

impl Load {
    /// Starts so many busy loops, and what holds memory; returns when that has said that it does, or has ended.
    pub(crate) fn start(loops: usize, holder: Option<Run>) -> Result<Self> {
        // Dropped, with what was started, if something goes wrong.
        let mut load = Self {
            children: Vec::new(),
        };
        if let Some(holder) = holder {
            let spawned = holder.command().stdout(Stdio::piped()).spawn();
            let mut child = spawned.context("start what holds memory")?;
            let said = child.stdout.take();
            load.children.push(("what holds memory".into(), child));
            let mut line = String::new();
            let said = said.context("no pipe")?;
            BufReader::new(said).read_line(&mut line)?;
        }
        for number in 1..=loops {
            let looping = Run::new("sh").args(["-c", "while :; do :; done"]);
            let child = looping.command().spawn().context("start a busy loop")?;
            load.children.push((format!("busy loop {number}"), child));
        }
        Ok(load)
    }

    /// What has ended already, which no load does by itself.
    pub(crate) fn ended(&mut self) -> Result<Vec<String>> {
        let mut ended = Vec::new();
        for (name, child) in &mut self.children {
            if let Some(status) = child.try_wait()? {
                ended.push(format!("{name}: {status}"));
            }
        }
        Ok(ended)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for (_, child) in &mut self.children {
            // One that has ended cannot be killed, and is waited for like the others.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use pagetide_test_support::{eventually, within_patience};

    use super::*;

    /// Says that it is ready, and then sleeps.
    fn ready() -> Run {
        Run::new("sh").args(["-c", "echo ready; exec sleep 100000"])
    }

    #[test]
    fn load_ends_when_it_is_dropped() {
        let mut load = Load::start(2, Some(ready())).unwrap();
        assert!(load.ended().unwrap().is_empty());
        let children = load.children.iter();
        let places: Vec<_> = children
            .map(|(_, child)| format!("/proc/{}", child.id()))
            .collect();
        assert_eq!(places.len(), 3);
        drop(load);
        // They have been waited for, so nothing of them is left.
        for place in places {
            assert!(!std::path::Path::new(&place).exists(), "{place}");
        }
    }

    #[test]
    fn load_ends_with_who_started_it() {
        let start = || {
            let mut load = Load::start(0, Some(ready())).unwrap();
            std::mem::take(&mut load.children)
        };
        // The kernel tells a child that the thread is gone which started it.
        let children = std::thread::spawn(start).join().unwrap();
        for (name, mut child) in children {
            let status = within_patience(&name, move || child.wait().unwrap());
            assert_eq!(status.signal(), Some(9));
        }
    }

    #[test]
    fn load_that_has_ended_is_told_of() {
        let mut load = Load::start(1, Some(Run::new("sh").args(["-c", "exit 3"]))).unwrap();
        let ended = eventually("the end", || match load.ended().unwrap() {
            ended if ended.is_empty() => None,
            ended => Some(ended),
        });
        assert_eq!(ended, ["what holds memory: exit status: 3"]);
    }

    #[test]
    fn all_but_some_memory_is_held() {
        assert_eq!(
            available("MemTotal: 9 kB\nMemAvailable:   8 kB\n"),
            Some(8192)
        );
        assert_eq!(available("MemTotal: 9 kB\n"), None);
        assert_eq!(share(LEFT + 4096), Some(4096));
        assert_eq!(share(LEFT), None);
        assert_eq!(share(u64::MAX), Some(MOST));
        holdable().unwrap();
    }

    #[test]
    fn memory_that_is_held_has_been_written_to() {
        let mut memory = fill(3 * PAGE).unwrap();
        touch(&mut memory);
        assert_eq!((memory[0], memory[1], memory[PAGE]), (2, 1, 2));
        assert!(fill(usize::MAX / 2).is_err());
    }
}
