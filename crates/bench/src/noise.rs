//! How busy others kept the machine while a run was measured.
//!
//! A figure of wall-clock time from a machine that had other work says little: a run on such a machine
//! is marked. Instruction counts do not depend on other work, and are not marked.
//!
//! Natively, `/proc/stat` has the time that all CPUs were busy or taken by a hypervisor, less what this
//! process used (CLOCK_PROCESS_CPUTIME_ID); `/proc/pressure/cpu` has the time in which a task waited for a CPU. In
//! the lab the machine that matters is outside the virtual machine: the lab keeps a file with the same
//! three figures, which [`HOST_LOAD_VARIABLE`] names.

use std::fs;
use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};

use crate::model::{CPU_BY_OTHERS, CPU_PRESSURE, Cell, Sample};
use crate::timing::Timing;
use crate::units::{float, whole};

/// The environment variable by which the lab names the file with the host's load: lines `wall_ns N`
/// (since the virtual machine's start), `own_ticks N` (its processor time), `cpus N`, then the first line
/// of the host's `/proc/stat` and the host's `/proc/pressure/cpu`.
pub const HOST_LOAD_VARIABLE: &str = "PAGETIDE_HOST_LOAD";

/// A run is marked if others took more than this share of the CPUs.
const BUSY: f64 = 0.1;

/// A run of fewer ticks of `/proc/stat` says nothing: one tick of each CPU more or less would mark it.
const LEAST_TICKS: f64 = 10.0;

/// A reading of the machine's clocks.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Reading {
    wall_ns: f64,
    /// CPU time of everybody else.
    others_ns: f64,
    /// Time in which a task waited for a CPU; the kernel may not say.
    waiting_ns: Option<f64>,
    cpus: f64,
}

/// Watches the machine during a run.
#[derive(Debug)]
pub(crate) struct Watch {
    timing: Timing,
    clock: Instant,
    start: Option<Reading>,
}

impl Watch {
    pub(crate) fn start(timing: Timing) -> Self {
        let clock = Instant::now();
        Self {
            timing,
            clock,
            start: read(timing, clock),
        }
    }

    /// Adds what was seen to the run's sample.
    pub(crate) fn end(self, sample: Sample) -> Sample {
        let (Some(start), Some(end)) = (self.start, read(self.timing, self.clock)) else {
            return sample;
        };
        let wall = end.wall_ns - start.wall_ns;
        let Some(share) = share_of_others(start, end) else {
            return sample;
        };
        let sample = sample.value(CPU_BY_OTHERS, share);
        match (start.waiting_ns, end.waiting_ns) {
            (Some(before), Some(after)) => {
                sample.value(CPU_PRESSURE, ((after - before) / wall).clamp(0.0, 1.0))
            }
            _ => sample,
        }
    }
}

/// The share of the CPUs that others took between two readings; `None` if there was too little time
/// between them.
fn share_of_others(start: Reading, end: Reading) -> Option<f64> {
    let wall_ns = end.wall_ns - start.wall_ns;
    let share = (end.others_ns - start.others_ns) / (wall_ns * end.cpus);
    (wall_ns >= ticks_ns(LEAST_TICKS)).then(|| share.clamp(0.0, 1.0))
}

fn read(timing: Timing, clock: Instant) -> Option<Reading> {
    match timing {
        Timing::Native => native(clock),
        Timing::Parallel => {
            let file = std::env::var_os(HOST_LOAD_VARIABLE)?;
            of_lab(&fs::read_to_string(file).ok()?)
        }
        Timing::Function | Timing::Instructions => None,
    }
}

fn native(clock: Instant) -> Option<Reading> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    let busy_ns = busy_ns(&stat)?;
    let own_ns = own_ns()?;
    let pressure = fs::read_to_string("/proc/pressure/cpu").ok();
    Some(Reading {
        wall_ns: clock.elapsed().as_secs_f64() * 1e9,
        others_ns: busy_ns - own_ns,
        waiting_ns: pressure.and_then(|text| waiting_ns(&text)),
        cpus: float(cpus(&stat).max(1)),
    })
}

/// The time of this process's threads.
fn own_ns() -> Option<f64> {
    let own = clock_gettime(ClockId::ProcessCPUTime);
    Some(float(u64::try_from(own.tv_sec).ok()?) * 1e9 + float(u64::try_from(own.tv_nsec).ok()?))
}

/// Time that the CPUs were busy or taken by a hypervisor, from `/proc/stat`, in nanoseconds. Time of
/// guests is part of user time there.
fn busy_ns(stat: &str) -> Option<f64> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<f64> = line
        .split_whitespace()
        .map_while(|word| word.parse().ok())
        .collect();
    let [user, nice, system, _idle, _iowait, irq, softirq, steal, ..] = ticks[..] else {
        return None;
    };
    Some(ticks_ns(user + nice + system + irq + softirq + steal))
}

/// The CPUs of which `/proc/stat` tells the times: all that are online, also those on which this process may not run.
fn cpus(stat: &str) -> u64 {
    let of_one = |line: &&str| {
        let number = line.strip_prefix("cpu");
        number.is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
    };
    stat.lines().filter(of_one).count() as u64
}

fn ticks_ns(ticks: f64) -> f64 {
    ticks / float(rustix::param::clock_ticks_per_second()) * 1e9
}

/// The total of `some` in `/proc/pressure/cpu`, in nanoseconds.
fn waiting_ns(pressure: &str) -> Option<f64> {
    let line = pressure.lines().find(|line| line.starts_with("some "))?;
    let (_, total) = line.split_once("total=")?;
    Some(total.trim().parse::<f64>().ok()? * 1e3)
}

fn of_lab(text: &str) -> Option<Reading> {
    let number = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().parse::<f64>().ok()
    };
    Some(Reading {
        wall_ns: number("wall_ns ")?,
        others_ns: busy_ns(text)? - ticks_ns(number("own_ticks ")?),
        waiting_ns: waiting_ns(text),
        cpus: number("cpus ")?.max(1.0),
    })
}

/// What to say of runs that were measured while others kept the machine busy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Busy {
    /// Runs that are marked.
    pub(crate) runs: usize,
    /// All runs whose noise is known.
    pub(crate) of: usize,
    /// The largest share of the CPUs that others took.
    pub(crate) most: f64,
}

impl Busy {
    /// What is to be said of these cells; `None` if no run is marked.
    pub(crate) fn of<S>(cells: &[Cell<S>]) -> Option<Self> {
        let runs = cells.iter().flat_map(|cell| &cell.runs);
        let shares: Vec<f64> = runs.filter_map(|run| run.get(CPU_BY_OTHERS)).collect();
        let busy = shares.iter().filter(|share| **share > BUSY);
        Some(Self {
            runs: busy.count(),
            of: shares.len(),
            most: shares.iter().copied().fold(0.0, f64::max),
        })
        .filter(|busy| busy.runs > 0)
    }

    fn percent(self) -> u64 {
        whole(self.most * 100.0)
    }

    /// For a headline.
    pub(crate) fn headline(self) -> String {
        format!(
            "on a busy machine: others took up to {} % of its CPUs",
            self.percent()
        )
    }

    /// For a note.
    pub(crate) fn note(self) -> String {
        format!(
            "The machine was busy: during {} of {} runs others took more than {} % of its CPUs, up to \
             {} %. Threads that wait for each other suffer more than those that do not, so ratios are \
             distorted as well. Measure again on an idle machine, or by instructions, which do not \
             depend on other work.",
            self.runs,
            self.of,
            whole(BUSY * 100.0),
            self.percent()
        )
    }
}

#[cfg(test)]
mod tests {
    use pagetide_test_support::eventually;

    use super::*;

    #[test]
    fn busy_time_is_that_of_all_but_the_idle() {
        let second = float(rustix::param::clock_ticks_per_second());
        let stat = "cpu  100 20 30 9000 500 4 6 40 70 0\ncpu0 1 2 3\n";
        assert_eq!(busy_ns(stat), Some(200.0 / second * 1e9));
        assert_eq!(busy_ns("cpu 1 2 3\n"), None);
        assert_eq!(busy_ns(""), None);
    }

    #[test]
    fn pressure_is_that_of_some_task() {
        let text = "some avg10=1.00 avg60=0.50 avg300=0.10 total=123\nfull avg10=0 total=9\n";
        assert_eq!(waiting_ns(text), Some(123_000.0));
        assert_eq!(waiting_ns("full total=1\n"), None);
    }

    #[test]
    fn the_labs_file_has_the_hosts_clocks() {
        let text = "wall_ns 1000\nown_ticks 30\ncpus 2\ncpu  100 20 30 9000 500 4 6 40 70 0\n\
                    some avg10=1.00 avg60=0.50 avg300=0.10 total=123\nfull total=9\n";
        let reading = of_lab(text).unwrap();
        assert_eq!((reading.wall_ns, reading.cpus), (1000.0, 2.0));
        assert_eq!(reading.others_ns, ticks_ns(170.0));
        assert_eq!(reading.waiting_ns, Some(123_000.0));
        for line in ["wall_ns 1000\n", "own_ticks 30\n", "cpus 2\n", "cpu  100"] {
            assert_eq!(of_lab(&text.replace(line, "")), None, "{line}");
        }
    }

    #[test]
    fn the_cpus_are_those_of_the_times() {
        let stat = "cpu  100 20\ncpu0 50 10\ncpu1 50 10\nintr 7\ncpus 9\n";
        assert_eq!(cpus(stat), 2);
        assert_eq!(cpus("cpu  100 20\n"), 0);
    }

    #[test]
    fn a_run_of_few_ticks_is_not_judged() {
        let at = |ticks, others| Reading {
            wall_ns: ticks_ns(ticks),
            others_ns: ticks_ns(others),
            waiting_ns: None,
            cpus: 2.0,
        };
        let share =
            |ticks, others| share_of_others(at(7.0, 100.0), at(7.0 + ticks, 100.0 + others));
        assert_eq!(share(0.0, 2.0), None);
        assert_eq!(share(9.0, 2.0), None);
        // A tick of each CPU does not mark the shortest run that is judged.
        assert!(share(10.5, 2.0).is_some_and(|share| share <= BUSY));
        let half = share(100.0, 100.0).unwrap();
        assert!((half - 0.5).abs() < 1e-9, "one of two CPUs: {half}");
        // This process took more than /proc/stat had counted.
        assert_eq!(share(100.0, -3.0), Some(0.0));
    }

    #[test]
    fn a_thread_of_another_process_is_seen() {
        let begun = Instant::now();
        // User and system time: the first and the third number of the first line.
        let all_ns = || {
            let stat = fs::read_to_string("/proc/stat").unwrap();
            let words: Vec<&str> = stat.split_whitespace().collect();
            ticks_ns(words[1].parse::<f64>().unwrap() + words[3].parse::<f64>().unwrap())
        };
        let (all_before, own_before) = (all_ns(), own_ns().unwrap());
        let watch = Watch::start(Timing::Native);
        let mut other = std::process::Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        // Once it has had a processor for a while.
        let stat = format!("/proc/{}/stat", other.id());
        eventually("a busy process", || {
            let stat = fs::read_to_string(&stat).unwrap();
            let user = stat.rsplit(')').next().unwrap().split(' ').nth(12).unwrap();
            let ticks: u64 = user.parse().unwrap();
            if ticks >= 100 { Ok(()) } else { Err(ticks) }
        });
        let sample = watch.end(Sample::default());
        let wall_ns = begun.elapsed().as_secs_f64() * 1e9;
        other.kill().unwrap();
        other.wait().unwrap();
        // This process's time is by another clock. In a VM whose host gives its processors to others, the clock of all
        // processors falls behind that one.
        let (all_ns, own_ns) = (all_ns() - all_before, own_ns().unwrap() - own_before);
        let got_ns = own_ns + ticks_ns(100.0);
        if all_ns < got_ns - ticks_ns(20.0) {
            println!(
                "SKIP: {all_ns} ns of all processors are less than the {got_ns} ns that two processes had"
            );
            return;
        }
        // All that the other process got lies within the watch, and the watch within this time.
        let share = sample.get(CPU_BY_OTHERS).unwrap();
        let cpus = float(cpus(&fs::read_to_string("/proc/stat").unwrap()));
        let seen_ns = share * cpus * wall_ns;
        assert!(seen_ns > ticks_ns(50.0), "{share} of {cpus} CPUs");
    }
}
