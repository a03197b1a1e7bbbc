//! What a benchmark of memory errors is asked to do, and whether that makes sense.

use std::fmt;

use pagetide_memory::{Backing, FailurePolicy, PageSize};
use serde::{Deserialize, Serialize};

use super::machines::Machines;
use super::view;
use crate::benchmark::Benchmark;
use crate::model::{Column, Comparison, Quantity};
use crate::options::{PlanError, by_name, check_list, check_pages, check_runs, check_vcpus, list};
use crate::prepare::PrepareError;
use crate::timing::Timing;
use crate::units::ByteSize;

/// Largest number of vCPUs that a plan may name, whatever the kernel allows.
pub const MAX_VCPUS: u32 = 256;
/// Longest time that a run is measured for.
pub const MAX_SECONDS: u32 = 3600;

/// The pieces of memory that are hit: 2 MiB, whatever the backing.
const PIECE: u64 = PageSize::Size2M.bytes();

/// One line of the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Series {
    /// What guest memory is made of.
    #[serde(with = "by_name")]
    pub backing: Backing,
    /// What the kernel does at an error.
    #[serde(with = "by_name")]
    pub policy: FailurePolicy,
    /// How many of a hundred 2 MiB pieces have an error.
    pub poison_percent: u32,
}

impl Series {
    /// The series without errors that this one is compared with.
    #[must_use]
    pub fn baseline(self) -> Self {
        Self {
            poison_percent: 0,
            ..self
        }
    }
}

impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            backing,
            policy,
            poison_percent,
        } = self;
        f.pad(&format!("{backing}, {policy}, {poison_percent} %"))
    }
}

/// A benchmark of memory errors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The numbers of vCPUs to measure with.
    pub vcpus: Vec<u32>,
    /// Memory of all vCPUs together; each cycles through an equal part of it.
    #[serde(rename = "memory_bytes")]
    pub memory: ByteSize,
    /// What the memory is made of.
    #[serde(with = "by_name::all")]
    pub backings: Vec<Backing>,
    /// How many of a hundred 2 MiB pieces get an error; 0 is measured even if it is not named.
    pub poison_percent: Vec<u32>,
    /// What the kernel does at an error.
    #[serde(with = "by_name::all")]
    pub policies: Vec<FailurePolicy>,
    /// How long a run is measured for.
    pub seconds: u32,
    /// Measured rounds, after one that warms up.
    pub runs: u32,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            vcpus: vec![2],
            memory: ByteSize(256 << 20),
            backings: vec![Backing::Thp],
            poison_percent: vec![0, 5, 25],
            policies: vec![FailurePolicy::Keep, FailurePolicy::KernelDefault],
            seconds: 5,
            runs: 7,
        }
    }
}

impl Plan {
    /// How many pieces of 2 MiB the memory has.
    #[must_use]
    pub fn pieces(&self) -> u64 {
        self.memory.0 / PIECE
    }

    /// How many of them are hit: at least one if any, and otherwise to the nearest.
    #[must_use]
    pub fn errors(&self, poison_percent: u32) -> u64 {
        if poison_percent == 0 {
            return 0;
        }
        let hundredths = self.pieces() * u64::from(poison_percent);
        ((hundredths + 50) / 100).clamp(1, self.pieces())
    }

    /// How many huge pages of a hugetlb pool all runs together spoil: a page that had an error does
    /// not come back to the pool.
    pub(super) fn spoilt_pages(&self, backing: Backing) -> u64 {
        let pages = self.memory.0 / backing.page_size().bytes();
        let a_run = self.poison_percent.iter().map(|&percent| {
            let errors = self.errors(percent);
            errors.min(pages)
        });
        let runs = u64::from(self.runs) + 1;
        let times = runs * (self.policies.len() * self.vcpus.len()) as u64;
        a_run.sum::<u64>().saturating_mul(times)
    }
}

impl Benchmark for Plan {
    type Series = Series;
    type Machines = Machines;

    const NAME: &'static str = "memcycler";
    const QUANTITIES: &'static [Quantity] = &[
        view::ERRORS,
        view::UNHANDLED,
        view::IN_LOST_MEMORY,
        view::ELAPSED,
        view::WORDS,
        view::EACH_SECOND,
        view::BEFORE[0],
        view::BEFORE[1],
        view::BEFORE[2],
        view::AFTER[0],
        view::AFTER[1],
        view::AFTER[2],
        view::UNUSABLE,
        view::CORRUPTED,
        view::DIED_OF,
    ];
    const COLUMNS: &'static [Column] = &[view::RATE, view::LOST];
    const COMPARISONS: &'static [Comparison<Series>] = &[view::RATE_OVER_BASELINE];

    fn vcpus(&self) -> &[u32] {
        &self.vcpus
    }

    /// Of each backing and policy without errors first.
    fn series(&self) -> Vec<Series> {
        let hit = self.poison_percent.iter().filter(|percent| **percent > 0);
        let percent: Vec<u32> = std::iter::once(0).chain(hit.copied()).collect();
        let mut all = Vec::new();
        for &backing in &self.backings {
            for &policy in &self.policies {
                all.extend(percent.iter().map(|&poison_percent| Series {
                    backing,
                    policy,
                    poison_percent,
                }));
            }
        }
        all
    }

    fn runs(&self) -> u32 {
        self.runs
    }

    fn command(&self) -> String {
        format!(
            "pagetide bench memcycler --vcpus {} --memory {} --backing {} --poison {} --policy {} \
             --seconds {} --runs {}",
            list(&self.vcpus),
            self.memory,
            list(&self.backings),
            list(&self.poison_percent),
            list(&self.policies),
            self.seconds,
            self.runs
        )
    }

    fn check(&self) -> Result<(), PlanError> {
        check_vcpus(&self.vcpus, MAX_VCPUS)?;
        check_list("--backing", "thp,hugetlb-2m", &self.backings)?;
        check_list("--poison", "0,5,25", &self.poison_percent)?;
        check_list("--policy", "keep,default", &self.policies)?;
        if let Some(percent) = self.poison_percent.iter().find(|percent| **percent > 100) {
            let why = "0 to 100 percent of the memory can be hit";
            return Err(PlanError::refused(format!("--poison {percent}"), why));
        }
        let memory = self.memory;
        if memory.0 == 0 {
            return Err(PlanError::refused(
                "--memory 0",
                "there is nothing to cycle through",
            ));
        }
        for &backing in &self.backings {
            if !backing.is_hugetlb() && backing != Backing::Thp {
                let why = "it has no huge pages that an error could take; use thp or hugetlb";
                return Err(PlanError::refused(format!("--backing {backing}"), why));
            }
            let page = backing.page_size().max(PageSize::Size2M).bytes();
            check_pages("--memory", memory, page, backing)?;
        }
        for &vcpus in &self.vcpus {
            if !self.pieces().is_multiple_of(vcpus.into()) {
                let why = format!(
                    "{vcpus} equal parts are not multiples of 2M, which errors are counted in"
                );
                return Err(PlanError::refused(format!("--memory {memory}"), why));
            }
        }
        if !(1..=MAX_SECONDS).contains(&self.seconds) {
            let why = format!("a run is measured for 1 to {MAX_SECONDS} seconds");
            return Err(PlanError::refused(
                format!("--seconds {}", self.seconds),
                why,
            ));
        }
        check_runs(self.runs)
    }

    fn prepare(
        &mut self,
        methods_asked: bool,
        timing: Timing,
    ) -> Result<(Machines, Vec<String>), PrepareError> {
        Machines::prepare(self, methods_asked, timing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::benchmark::Benchmark;

    #[test]
    fn the_default_makes_sense() {
        let plan = Plan::default();
        assert_eq!(plan.check(), Ok(()));
        let names: Vec<_> = plan.series().iter().map(ToString::to_string).collect();
        let wanted = [
            "thp, keep, 0 %",
            "thp, keep, 5 %",
            "thp, keep, 25 %",
            "thp, default, 0 %",
            "thp, default, 5 %",
            "thp, default, 25 %",
        ];
        assert_eq!(names, wanted);
    }

    #[test]
    fn the_baseline_is_always_measured_once_and_first() {
        for poison_percent in [vec![25], vec![25, 0]] {
            let plan = Plan {
                poison_percent,
                ..Plan::default()
            };
            let percent: Vec<_> = plan.series().iter().map(|s| s.poison_percent).collect();
            assert_eq!(percent, [0, 25, 0, 25]);
        }
    }

    #[test]
    fn errors_are_whole_and_spoil_huge_pages() {
        let mut plan = Plan {
            memory: ByteSize(64 << 20),
            runs: 3,
            vcpus: vec![1, 2],
            ..Plan::default()
        };
        let errors = [0, 1, 5, 25, 100].map(|percent| plan.errors(percent));
        assert_eq!(errors, [0, 1, 2, 8, 32]);
        // 2 + 8 a round, 4 rounds with the one that warms up, 2 policies, 2 numbers of vCPUs.
        assert_eq!(plan.spoilt_pages(Backing::Hugetlb2M), 10 * 4 * 2 * 2);
        plan.memory = ByteSize(1 << 30);
        assert_eq!(plan.spoilt_pages(Backing::Hugetlb1G), 2 * 4 * 2 * 2);
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_its_option() {
        type Change = fn(&mut Plan);
        let cases: [(Change, &str); 12] = [
            (|plan| plan.vcpus = vec![0], "--vcpus 0: a virtual machine"),
            (|plan| plan.memory = ByteSize(0), "--memory 0: there is"),
            (
                |plan| plan.memory = ByteSize(3 << 20),
                "--memory 3M: not a multiple of the 2097152-byte pages of --backing thp",
            ),
            (
                |plan| plan.memory = ByteSize(2 << 20),
                "--memory 2M: 2 equal parts are not multiples of 2M",
            ),
            (
                |plan| plan.backings = vec![Backing::Hugetlb1G],
                "--memory 256M: not a multiple of the 1073741824-byte pages",
            ),
            (
                |plan| plan.backings = vec![Backing::Shmem],
                "--backing shmem: it has no huge pages",
            ),
            (|plan| plan.backings = vec![], "--backing names nothing"),
            (
                |plan| plan.poison_percent = vec![0, 101],
                "--poison 101: 0 to 100 percent",
            ),
            (
                |plan| plan.poison_percent = vec![5, 5],
                "--poison names 5 twice",
            ),
            (|plan| plan.policies = vec![], "--policy names nothing"),
            (|plan| plan.seconds = 0, "--seconds 0: a run is"),
            (|plan| plan.runs = 0, "--runs 0: nothing"),
        ];
        for (change, message) in cases {
            let mut plan = Plan::default();
            change(&mut plan);
            let told = plan.check().expect_err(message).to_string();
            assert!(told.starts_with(message), "{told}");
        }
    }
}
