//! What a memslot benchmark is asked to do, and whether that makes sense.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::machines::Machines;
use super::view;
use crate::benchmark::Benchmark;
use crate::model::{Column, Comparison, Quantity};
use crate::options::{PlanError, check_list, check_runs, check_vcpus, list, named};
use crate::prepare::PrepareError;
use crate::timing::Timing;

/// Largest number of vCPUs that a plan may name, whatever the kernel allows.
pub const MAX_VCPUS: u32 = 256;
/// Most commits of a run.
pub const MAX_COMMITS: u32 = 1_000_000;
/// Updates of a boot.
pub const BOOT_UPDATES: u32 = 86;

/// A change of the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// One slot becomes two.
    Split,
    /// Two slots become one.
    Merge,
    /// A slot becomes smaller or larger.
    Resize,
    /// Dirty logging is switched on or off.
    Flags,
    /// The 86 updates of a boot, one after the other.
    Boot,
}

/// How a layout is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// One ioctl for all slots.
    List,
    /// Every vCPU is stopped outside KVM_RUN, and slots are deleted and created.
    Quiesce,
    /// Slots are deleted and created while vCPUs run. Reports of version 1 call it `plain`.
    #[serde(alias = "plain")]
    DeleteCreate,
}

/// What the guest does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Guest {
    /// Reads and writes the memory whose slots change.
    Touch,
    /// Only reads the clock.
    Spin,
}

named! {
    Op { Split => "split", Merge => "merge", Resize => "resize", Flags => "flags", Boot => "boot" }
    Method { List => "list", Quiesce => "quiesce", DeleteCreate => "delete-create" }
    Guest { Touch => "touch", Spin => "spin" }
}

impl From<Method> for pagetide_kvm::Method {
    fn from(method: Method) -> Self {
        match method {
            Method::List => Self::List,
            Method::Quiesce => Self::Quiesce,
            Method::DeleteCreate => Self::DeleteCreate,
        }
    }
}

/// One line of the result: what is changed and how; or nothing at all, which the others are
/// compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind")]
pub enum Series {
    /// The same run without commits.
    Idle,
    /// Commits.
    Commits {
        /// What is changed.
        op: Op,
        /// How.
        method: Method,
    },
}

impl Series {
    /// The change; `None` without commits.
    #[must_use]
    pub fn op(self) -> Option<Op> {
        match self {
            Self::Idle => None,
            Self::Commits { op, .. } => Some(op),
        }
    }

    /// The method; `None` without commits.
    #[must_use]
    pub fn method(self) -> Option<Method> {
        match self {
            Self::Idle => None,
            Self::Commits { method, .. } => Some(method),
        }
    }
}

impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Idle => f.pad("without commits"),
            Self::Commits { op, method } => f.pad(&format!("{op} by {method}")),
        }
    }
}

/// A memslot benchmark.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The numbers of vCPUs to measure with.
    pub vcpus: Vec<u32>,
    /// The changes to measure.
    pub ops: Vec<Op>,
    /// The methods to compare.
    pub methods: Vec<Method>,
    /// What the guest does meanwhile.
    pub guest: Guest,
    /// Measured commits of a run; [`Op::Boot`] makes whole traces of at least as many.
    pub commits: u32,
    /// Measured rounds, after one that warms up.
    pub runs: u32,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            vcpus: vec![1, 2, 4, 8, 16],
            ops: vec![Op::Split, Op::Merge, Op::Resize, Op::Flags, Op::Boot],
            methods: vec![Method::List, Method::Quiesce, Method::DeleteCreate],
            guest: Guest::Touch,
            commits: 50,
            runs: 7,
        }
    }
}

impl Plan {
    /// Measured commits of a run.
    #[must_use]
    pub fn commits_of(&self, series: Series) -> u32 {
        match series.op() {
            Some(Op::Boot) => self.commits.next_multiple_of(BOOT_UPDATES),
            _ => self.commits,
        }
    }
}

impl Benchmark for Plan {
    type Series = Series;
    type Machines = Machines;

    const NAME: &'static str = "memslots";
    const QUANTITIES: &'static [Quantity] = &[
        view::ELAPSED,
        view::COMMITS,
        view::STEPS,
        view::COMMIT_TOTAL,
        view::COMMIT_P50,
        view::KEPT_P50,
        view::KEPT_EACH_P50,
        view::KEPT_MAX,
        view::HOLES,
        view::KNOWS_STOLEN_TIME,
    ];
    const COLUMNS: &'static [Column] = &[
        view::STALL_P50,
        view::STALL_EACH_P50,
        view::STALL_MAX,
        view::COMMIT_MEDIAN,
        view::WORK,
        view::HOLES_PER_COMMIT,
        view::BOOT,
    ];
    const COMPARISONS: &'static [Comparison<Series>] = &[
        view::STALL_OVER_LIST,
        view::STALL_EACH_OVER_LIST,
        view::STALL_MAX_OVER_LIST,
        view::COMMIT_OVER_LIST,
        view::STALL_GROWTH,
        view::STALL_EACH_GROWTH,
        view::WORK_OVER_IDLE,
    ];

    fn vcpus(&self) -> &[u32] {
        &self.vcpus
    }

    /// Without commits first, then change by change.
    fn series(&self) -> Vec<Series> {
        let commits = self.ops.iter().flat_map(|&op| {
            let methods = self.methods.iter();
            methods.map(move |&method| Series::Commits { op, method })
        });
        std::iter::once(Series::Idle).chain(commits).collect()
    }

    fn runs(&self) -> u32 {
        self.runs
    }

    fn command(&self) -> String {
        format!(
            "pagetide bench memslots --vcpus {} --ops {} --method {} --guest {} --commits {} \
             --runs {}",
            list(&self.vcpus),
            list(&self.ops),
            list(&self.methods),
            self.guest,
            self.commits,
            self.runs
        )
    }

    fn check(&self) -> Result<(), PlanError> {
        check_vcpus(&self.vcpus, MAX_VCPUS)?;
        check_list("--ops", "split,boot", &self.ops)?;
        check_list("--method", "quiesce,delete-create", &self.methods)?;
        if !(1..=MAX_COMMITS).contains(&self.commits) {
            let option = format!("--commits {}", self.commits);
            let why = format!("a run makes 1 to {MAX_COMMITS} commits");
            return Err(PlanError::refused(option, why));
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
#[path = "plan_tests.rs"]
mod tests;
