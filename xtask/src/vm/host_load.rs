//! The load of the host, for benchmarks in a VM: there a run is marked that was measured while others
//! kept the machine busy, and a guest cannot see that.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The file's name in a VM's directory, which the VM sees.
const NAME: &str = "host-load";

/// Writes the load into a file.
pub(super) struct HostLoad {
    file: PathBuf,
    /// The VM's process.
    pid: u32,
    start: Instant,
}

impl HostLoad {
    /// For the VM that runs in process `pid` and has this directory.
    pub(super) fn new(pid: u32, run_dir: &Path) -> Self {
        Self {
            file: file(run_dir),
            pid,
            start: Instant::now(),
        }
    }

    /// Writes what there is to see now, as the kernel words it: nanoseconds since the start, the VM's
    /// processor time in ticks, the number of CPUs, the first line of `/proc/stat`, and
    /// `/proc/pressure/cpu`. Without it a benchmark does not mark its runs.
    pub(super) fn write(&self) {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let Some(own_ticks) = own_ticks(&read(&format!("/proc/{}/stat", self.pid))) else {
            return;
        };
        let stat = read("/proc/stat");
        let text = format!(
            "wall_ns {}\nown_ticks {own_ticks}\ncpus {}\n{}\n{}",
            self.start.elapsed().as_nanos(),
            cpus(&stat),
            stat.lines().next().unwrap_or_default(),
            read("/proc/pressure/cpu"),
        );
        // A reader sees the old file or the new one, never a part.
        let part = self.file.with_extension("part");
        let _ = fs::write(&part, text).and_then(|()| fs::rename(&part, &self.file));
    }
}

/// The CPUs whose times the first line of `/proc/stat` adds up, also those on which this process may not run.
fn cpus(stat: &str) -> usize {
    let lines = stat.lines().skip(1);
    lines.take_while(|line| line.starts_with("cpu")).count()
}

/// Where the load of a VM with this directory is.
pub(super) fn file(run_dir: &Path) -> PathBuf {
    run_dir.join(NAME)
}

/// User and system time in `/proc/PID/stat`: the 14th and 15th field, and the second, the name, may
/// have spaces.
fn own_ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut times = fields.split_whitespace().skip(11).map(str::parse::<u64>);
    Some(times.next()?.ok()? + times.next()?.ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_come_after_a_name_with_spaces() {
        let stat = "7 (qemu: a) b) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0\n";
        assert_eq!(own_ticks(stat), Some(300));
        assert_eq!(own_ticks("7 (x) S 1\n"), None);
        assert_eq!(own_ticks(""), None);
    }

    #[test]
    fn the_file_has_what_a_benchmark_reads() {
        let directory = tempfile::tempdir().unwrap();
        let load = HostLoad::new(std::process::id(), directory.path());
        load.write();
        let text = fs::read_to_string(file(directory.path())).unwrap();
        for wanted in ["wall_ns ", "own_ticks ", "cpus ", "cpu "] {
            assert!(text.lines().any(|line| line.starts_with(wanted)), "{text}");
        }
    }
}
