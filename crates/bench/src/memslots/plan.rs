//! What a memslot benchmark is asked to do, and whether that makes sense.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::rounds::{OptionError, named};

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
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// One ioctl for all slots.
    List,
    /// Every vCPU is stopped outside KVM_RUN, and slots are deleted and created.
    Quiesce,
    /// Slots are deleted and created while vCPUs run.
    Plain,
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
    Method { List => "list", Quiesce => "quiesce", Plain => "plain" }
    Guest { Touch => "touch", Spin => "spin" }
}

impl From<Method> for pagetide_kvm::Method {
    fn from(method: Method) -> Self {
        match method {
            Method::List => Self::List,
            Method::Quiesce => Self::Quiesce,
            Method::Plain => Self::Plain,
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
            methods: vec![Method::List, Method::Quiesce, Method::Plain],
            guest: Guest::Touch,
            commits: 50,
            runs: 7,
        }
    }
}

/// Why a plan makes no sense. Each message names the option to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// An option that all benchmarks take.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// `--commits 0` or too many.
    #[error("--commits {0}: a run makes 1 to {MAX_COMMITS} commits")]
    BadCommits(u32),
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

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
