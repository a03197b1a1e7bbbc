//! What a population benchmark is asked to do, and whether that makes sense.

use std::fmt;

use pagetide_memory::Backing;
use serde::{Deserialize, Serialize};

use super::machines::Machines;
use super::view;
use crate::benchmark::Benchmark;
use crate::model::{Column, Comparison, Quantity};
use crate::options::{PlanError, by_name, check_list, check_runs, check_vcpus, list, named};
use crate::prepare::PrepareError;
use crate::timing::Timing;
use crate::units::ByteSize;

/// Largest number of vCPUs that a plan may name, whatever the kernel allows.
pub const MAX_VCPUS: u32 = 256;
/// Most threads that populate.
pub const MAX_THREADS: u32 = 256;

/// How stage-2 tables are filled before the guest's vCPUs write to all of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Not at all: each vCPU faults.
    None,
    /// KVM_PRE_FAULT_MEMORY by idle vCPUs, a thread for each.
    PreFault,
    /// KVM_POPULATE_MEMORY by any number of threads.
    Populate,
    /// One vCPU reads everything first, and faults.
    OneReader,
    /// Not at all, and memory is not there yet either: prefetch brings it in while vCPUs run.
    Prefetch,
    /// Prefetch, and what it brings in is mapped as it arrives.
    PrefetchPopulate,
}

named! {
    Method {
        None => "none",
        PreFault => "pre-fault",
        Populate => "populate",
        OneReader => "one-reader",
        Prefetch => "prefetch",
        PrefetchPopulate => "prefetch-populate",
    }
}

impl Method {
    /// Whether it is done by threads of the host, whose number matters.
    #[must_use]
    pub fn has_threads(self) -> bool {
        matches!(self, Self::PreFault | Self::Populate)
    }

    /// Whether memory is not there at first and a pager brings it in.
    #[must_use]
    pub fn is_paged(self) -> bool {
        matches!(self, Self::Prefetch | Self::PrefetchPopulate)
    }
}

/// One line of the result.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Copy, Serialize, Deserialize)]
pub struct Series {
    /// What guest memory is made of.
    #[serde(with = "by_name")]
    pub backing: Backing,
    /// How stage-2 tables are filled.
    pub method: Method,
    /// By how many threads; `None` if the method has none.
    pub threads: Option<u32>,
}

impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            backing, method, ..
        } = self;
        f.pad(&match self.threads {
            None => format!("{backing}, {method}"),
            Some(1) => format!("{backing}, {method}, 1 thread"),
            Some(threads) => format!("{backing}, {method}, {threads} threads"),
        })
    }
}

/// A population benchmark.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The numbers of vCPUs to measure with.
    pub vcpus: Vec<u32>,
    /// Memory of all vCPUs together; each writes to an equal part of it.
    #[serde(rename = "memory_bytes")]
    pub memory: ByteSize,
    /// What the memory is made of; one series for each.
    #[serde(with = "by_name::all")]
    pub backings: Vec<Backing>,
    /// How stage-2 tables are filled.
    pub methods: Vec<Method>,
    /// Threads that fill them; one series for each.
    pub threads: Vec<u32>,
    /// Measured rounds, after one that warms up.
    pub runs: u32,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            vcpus: vec![1, 2, 4, 8],
            memory: ByteSize(256 << 20),
            backings: vec![Backing::Shmem],
            methods: vec![
                Method::None,
                Method::PreFault,
                Method::Populate,
                Method::OneReader,
                Method::Prefetch,
                Method::PrefetchPopulate,
            ],
            threads: vec![1, 2],
            runs: 7,
        }
    }
}

impl Benchmark for Plan {
    type Series = Series;
    type Machines = Machines;

    const NAME: &'static str = "populate";
    const QUANTITIES: &'static [Quantity] = &[
        view::THREADS,
        view::POPULATION,
        view::GUEST,
        view::POPULATED,
        view::MAPPINGS_4K,
        view::MAPPINGS_2M,
        view::MAPPINGS_1G,
        view::MAPPINGS_AFTER,
        view::POPULATION_EXITS,
        view::EXITS,
        view::PREFETCHED,
        view::PAGER_FAULTS,
    ];
    const COLUMNS: &'static [Column] = &[
        view::TOTAL,
        view::GUEST_TIME,
        view::POPULATION_TIME,
        view::RATE,
        view::MAPPING_RATE,
        view::PER_MAPPING,
        view::FAULTS,
    ];
    const COMPARISONS: &'static [Comparison<Series>] = &[
        view::TOTAL_OF_NONE,
        view::GUEST_OF_NONE,
        view::OVER_FAULTS,
        view::OVER_PRE_FAULT,
        view::OVER_ONE_THREAD,
        view::OF_PREFETCH,
    ];
    const TIME: Option<Quantity> = Some(view::GUEST);

    fn vcpus(&self) -> &[u32] {
        &self.vcpus
    }

    fn series(&self) -> Vec<Series> {
        let mut all = Vec::new();
        for &backing in &self.backings {
            for &method in &self.methods {
                let threads: Vec<_> = if method.has_threads() {
                    self.threads.iter().copied().map(Some).collect()
                } else {
                    vec![None]
                };
                all.extend(threads.into_iter().map(|threads| Series {
                    backing,
                    method,
                    threads,
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
            "pagetide bench populate --vcpus {} --memory {} --backing {} --method {} --threads {} \
             --runs {}",
            list(&self.vcpus),
            self.memory,
            list(&self.backings),
            list(&self.methods),
            list(&self.threads),
            self.runs
        )
    }

    fn check(&self) -> Result<(), PlanError> {
        check_vcpus(&self.vcpus, MAX_VCPUS)?;
        check_list("--backing", "shmem,thp", &self.backings)?;
        check_list("--method", "none,populate", &self.methods)?;
        check_list("--threads", "1,2", &self.threads)?;
        let mut threads = self.threads.iter();
        if let Some(bad) = threads.find(|threads| !(1..=MAX_THREADS).contains(*threads)) {
            let why = format!("1 to {MAX_THREADS} threads populate");
            return Err(PlanError::refused(format!("--threads {bad}"), why));
        }
        let memory = self.memory;
        if memory.0 == 0 {
            return Err(PlanError::refused(
                "--memory 0",
                "there is nothing to write to",
            ));
        }
        if self.backings.contains(&Backing::Anonymous) {
            let why = "its content cannot be put there beforehand; use shmem, thp or hugetlb";
            return Err(PlanError::refused("--backing anonymous", why));
        }
        for &backing in &self.backings {
            let page = backing.page_size().bytes();
            for &vcpus in &self.vcpus {
                // 1 GiB times 256 at most: no overflow is near.
                if !memory.0.is_multiple_of(page * u64::from(vcpus)) {
                    let why = format!(
                        "{vcpus} equal parts are not multiples of the {page}-byte pages of --backing \
                         {backing}"
                    );
                    return Err(PlanError::refused(format!("--memory {memory}"), why));
                }
            }
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
            "shmem, none",
            "shmem, pre-fault, 1 thread",
            "shmem, pre-fault, 2 threads",
            "shmem, populate, 1 thread",
            "shmem, populate, 2 threads",
            "shmem, one-reader",
            "shmem, prefetch",
            "shmem, prefetch-populate",
        ];
        assert_eq!(names, wanted);
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_its_option() {
        type Change = fn(&mut Plan);
        let cases: [(Change, &str); 10] = [
            (|plan| plan.vcpus = vec![0], "--vcpus 0: a virtual machine"),
            (|plan| plan.vcpus = vec![257], "--vcpus 257: at most 256"),
            (|plan| plan.memory = ByteSize(0), "--memory 0: there is"),
            (
                |plan| plan.memory = ByteSize(4 << 10),
                "--memory 4K: 2 equal parts are not multiples of the 4096-byte pages of --backing \
                 shmem",
            ),
            (
                |plan| {
                    plan.backings = vec![Backing::Hugetlb2M];
                    plan.memory = ByteSize(8 << 20);
                },
                "--memory 8M: 8 equal parts are not multiples of the 2097152-byte pages",
            ),
            (
                |plan| plan.backings = vec![Backing::Anonymous],
                "--backing anonymous: its content",
            ),
            (|plan| plan.methods = vec![], "--method names nothing"),
            (|plan| plan.threads = vec![0], "--threads 0: 1 to 256"),
            (|plan| plan.threads = vec![2, 2], "--threads names 2 twice"),
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
