//! The outcome of a run, or its failure.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use pagetide_memory::GuestAddress;
use pagetide_vmm::VcpuCounts;

use crate::error::GuestError;

/// A vCPU's latencies, in the order of its touches.
#[derive(Clone, Debug)]
pub struct LatencyLog {
    pub(crate) cycles: Vec<u32>,
    pub(crate) tsc_khz: u32,
}

impl LatencyLog {
    /// The number of measured touches.
    #[must_use]
    pub fn len(&self) -> usize {
        self.cycles.len()
    }

    /// Whether no touch was measured.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cycles.is_empty()
    }

    /// Time stamp counter cycles from just before a touch to just after it, as the guest read them.
    /// `u32::MAX` stands for any larger number, and for a clock that went backwards.
    #[must_use]
    pub fn cycles(&self) -> &[u32] {
        &self.cycles
    }

    /// The latencies in nanoseconds.
    pub fn nanoseconds(&self) -> impl Iterator<Item = u64> {
        self.cycles
            .iter()
            .map(|cycles| self.to_nanoseconds(*cycles))
    }

    fn to_nanoseconds(&self, cycles: u32) -> u64 {
        u64::from(cycles) * 1_000_000 / u64::from(self.tsc_khz.max(1))
    }
}

/// One vCPU's part of a run that succeeded.
#[derive(Clone, Debug)]
pub struct VcpuOutcome {
    /// From the common start until this vCPU had touched its last page.
    pub elapsed: Duration,
    /// Pages touched: every page of its walk.
    pub touches: u64,
    /// Its counts after the start.
    pub counts: VcpuCounts,
    /// The touches that exited as memory faults, by their numbers in the order of touches, ascending. One touch
    /// may fault more than once, so there may be fewer than `counts.faults`.
    pub faulted: Vec<u32>,
    /// The latency of each touch.
    pub latencies: LatencyLog,
}

impl VcpuOutcome {
    /// The latencies of the touches that exited as memory faults, in nanoseconds.
    pub fn fault_nanoseconds(&self) -> impl Iterator<Item = u64> {
        let cycles = |touch: &u32| self.latencies.cycles.get(*touch as usize);
        self.faulted
            .iter()
            .filter_map(cycles)
            .map(|cycles| self.latencies.to_nanoseconds(*cycles))
    }
}

/// A run in which every vCPU touched every page of its walk, and read what it should.
#[derive(Clone, Debug)]
pub struct RunOutcome {
    /// From the common start until the last vCPU had touched its last page.
    pub elapsed: Duration,
    /// By vCPU number.
    pub vcpus: Vec<VcpuOutcome>,
}

/// Where a vCPU was when a run failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VcpuState {
    /// The vCPU's number.
    pub vcpu: u32,
    /// Its instruction pointer, if it could be read.
    pub rip: Option<u64>,
    /// The page that it touches or touched last, if the registers could be read.
    pub gpa: Option<GuestAddress>,
    /// Pages that it has touched.
    pub touched: u64,
    /// Pages that it was to touch.
    pub pages: u64,
    /// Whether it had finished.
    pub done: bool,
}

impl fmt::Display for VcpuState {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (touched, pages) = (self.touched, self.pages);
        write!(formatter, "vCPU {} {touched}/{pages} pages", self.vcpu)?;
        match (self.done, self.rip) {
            (true, _) => return formatter.write_str(", done"),
            (false, Some(rip)) => write!(formatter, ", rip {rip:#x}")?,
            (false, None) => formatter.write_str(", registers unknown")?,
        }
        self.gpa
            .map_or(Ok(()), |gpa| write!(formatter, ", gpa {gpa}"))
    }
}

/// A run that failed: the first failure, and where every vCPU was when it was stopped.
#[derive(Debug)]
pub struct RunFailure {
    /// The first failure.
    pub cause: Box<GuestError>,
    /// The vCPUs whose threads have ended, by number; empty if the run did not start.
    pub vcpus: Vec<VcpuState>,
    /// The vCPUs whose threads did not end in time. The machine cannot be used any more.
    pub lost: Vec<u32>,
}

impl RunFailure {
    pub(crate) fn before_start(cause: impl Into<GuestError>) -> Self {
        Self {
            cause: Box::new(cause.into()),
            vcpus: Vec::new(),
            lost: Vec::new(),
        }
    }
}

impl fmt::Display for RunFailure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        write!(formatter, "{}", self.cause)?;
        for state in self.vcpus.iter().take(SHOWN) {
            write!(formatter, "; {state}")?;
        }
        if let Some(more) = self.vcpus.len().checked_sub(SHOWN).filter(|more| *more > 0) {
            write!(formatter, "; and {more} more")?;
        }
        if !self.lost.is_empty() {
            write!(formatter, "; threads of vCPUs {:?} did not end", self.lost)?;
        }
        Ok(())
    }
}

impl Error for RunFailure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.source()
    }
}

#[cfg(test)]
mod tests {
    use pagetide_vmm::PoolFailure;

    use super::*;

    #[test]
    fn nanoseconds_follow_the_frequency() {
        let log = LatencyLog {
            cycles: vec![0, 2500, u32::MAX],
            tsc_khz: 2_500_000,
        };
        assert_eq!(
            log.nanoseconds().collect::<Vec<_>>(),
            [0, 1000, 1_717_986_918]
        );
    }

    #[test]
    fn latencies_of_faults_are_those_of_the_touches_that_faulted() {
        let outcome = VcpuOutcome {
            elapsed: Duration::ZERO,
            touches: 4,
            counts: VcpuCounts::default(),
            faulted: vec![0, 2],
            latencies: LatencyLog {
                // The longest touch did not fault: its vCPU waited for a host CPU.
                cycles: vec![500, 9000, 700, 40],
                tsc_khz: 1_000_000,
            },
        };
        assert_eq!(outcome.fault_nanoseconds().collect::<Vec<_>>(), [500, 700]);
    }

    #[test]
    fn a_failure_shows_cause_and_vcpus_and_chains_the_source() {
        let source: pagetide_vmm::HookError = "the source is gone".into();
        let failure = RunFailure {
            cause: Box::new(PoolFailure::Stopped(source).into()),
            vcpus: vec![VcpuState {
                vcpu: 1,
                rip: Some(0x1000),
                gpa: Some(GuestAddress(0x1_0000_0000)),
                touched: 3,
                pages: 4,
                done: false,
            }],
            lost: vec![2],
        };
        assert_eq!(
            failure.to_string(),
            "the run was stopped; vCPU 1 3/4 pages, rip 0x1000, gpa 0x100000000; threads of vCPUs \
             [2] did not end"
        );
        assert_eq!(
            failure.source().expect("chained").to_string(),
            "the source is gone"
        );
    }
}
