//! The result of a memslot benchmark, as data. The JSON file is this, field by field;
//! `docs/guide/benchmarks.md` documents each field.

use serde::{Deserialize, Serialize};

use super::plan::{Method, Op, Plan, Series};
use super::published::Published;
use crate::latency::Latency;
use crate::rounds::{InRound, Origin, paired};
use crate::stats::{RatioOf, Spread};
use crate::units::float;

/// Name and version of the JSON form. A field's meaning never changes under one version.
pub const SCHEMA: &str = "pagetide.memslots/1";

/// The result of a memslot benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemslotsReport {
    /// [`SCHEMA`].
    pub schema: String,
    /// Where the figures come from.
    #[serde(flatten)]
    pub origin: Origin,
    /// What was measured.
    pub plan: Plan,
    /// One entry for each number of vCPUs and series, in the plan's order.
    pub points: Vec<Point>,
    /// Quiesce compared with list, where both were measured.
    pub ratios: Vec<Ratio>,
    /// Each series with more vCPUs compared with itself at the least number of them.
    pub growth: Vec<Growth>,
    /// Whether time that a vCPU waited for a processor is taken off what it was kept.
    pub knows_stolen_time: bool,
    /// Figures that others published for a boot; `None` if no boot was measured.
    pub published: Option<Published>,
    /// What a reader must know to read the figures right.
    pub notes: Vec<String>,
}

/// One series at one number of vCPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The series.
    pub series: Series,
    /// The measured runs, by round.
    pub runs: Vec<RunRecord>,
    /// Time of a commit, over all runs; `None` without commits.
    pub commit: Option<Latency>,
    /// The part that the transaction tells: how long the gate was closed (quiesce), or the time of
    /// the ioctls; `None` without commits.
    pub inside: Option<Latency>,
    /// The longest time that a vCPU was kept from the guest by a commit (or in a stretch of time
    /// without one), over all runs.
    pub kept: Latency,
    /// The longest time that each vCPU was kept, over all commits, vCPUs and runs.
    pub kept_each: Latency,
    /// The runs' median commit, nanoseconds; `None` without commits.
    pub commit_p50_ns: Option<Spread>,
    /// The runs' median time kept, nanoseconds.
    pub kept_p50_ns: Spread,
    /// The runs' median of what each vCPU was kept, nanoseconds.
    pub kept_each_p50_ns: Spread,
    /// The runs' longest time kept, nanoseconds.
    pub kept_max_ns: Spread,
    /// All commits of a boot together, milliseconds a boot; only for boots.
    pub boot_ms: Option<Spread>,
    /// Work that the guest did not get done, in percent of what it does without commits in the same
    /// time; `None` without commits.
    pub lost_percent: Option<Spread>,
    /// Accesses per commit that found no slot; `None` without commits.
    pub holes_per_commit: Option<Spread>,
    /// Runs that were lost here and repeated.
    pub lost_runs: u32,
}

/// One measured run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// The round, from 1.
    pub round: u32,
    /// Measured commits.
    pub commits: u32,
    /// From the first commit's beginning until after the last.
    pub elapsed_ns: u64,
    /// Clock readings of all vCPUs in that time.
    pub steps: u64,
    /// All measured commits together.
    pub commit_total_ns: u64,
    /// The median commit; 0 without commits.
    pub commit_p50_ns: u64,
    /// The median time kept.
    pub kept_p50_ns: u64,
    /// The median, over commits and vCPUs, of what each vCPU was kept.
    pub kept_each_p50_ns: u64,
    /// The longest time kept.
    pub kept_max_ns: u64,
    /// Accesses that found no slot.
    pub holes: u64,
}

impl InRound for RunRecord {
    fn round(&self) -> u32 {
        self.round
    }
}

impl RunRecord {
    /// Clock readings per nanosecond: the rate of the guest's work.
    #[must_use]
    pub fn rate(&self) -> f64 {
        float(self.steps) / float(self.elapsed_ns.max(1))
    }
}

/// Quiesce compared with list: above 1, the list is better.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The change.
    pub op: Op,
    /// Median time kept, quiesce over list.
    pub kept_p50: RatioOf,
    /// Median of what each vCPU was kept, quiesce over list.
    pub kept_each_p50: RatioOf,
    /// Longest time kept, quiesce over list.
    pub kept_max: RatioOf,
    /// Median time of a commit, quiesce over list.
    pub commit_p50: RatioOf,
}

/// A series compared with itself at fewer vCPUs: 1 if vCPUs are kept as long however many there are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Growth {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The number that it is compared with.
    pub over_vcpus: u32,
    /// The series.
    pub series: Series,
    /// Median of the longest time that any vCPU was kept.
    pub kept_p50: RatioOf,
    /// Median of what each vCPU was kept.
    pub kept_each_p50: RatioOf,
}

impl MemslotsReport {
    /// The result of one series at one number of vCPUs.
    #[must_use]
    pub fn point(&self, vcpus: u32, series: Series) -> Option<&Point> {
        self.points
            .iter()
            .find(|point| point.vcpus == vcpus && point.series == series)
    }
}

/// Compares quiesce with list, run by run of the same round.
pub(super) fn compare(points: &[Point]) -> Vec<Ratio> {
    let find = |vcpus: u32, op: Op, method: Method| {
        points
            .iter()
            .find(|point| point.vcpus == vcpus && point.series == Series::Commits { op, method })
    };
    let mut ratios = Vec::new();
    for list in points
        .iter()
        .filter(|point| point.series.method() == Some(Method::List))
    {
        let Some(op) = list.series.op() else { continue };
        let Some(quiesce) = find(list.vcpus, op, Method::Quiesce) else {
            continue;
        };
        let ratio = |value| ratio(quiesce, list, value);
        let compared = || {
            Some(Ratio {
                vcpus: list.vcpus,
                op,
                kept_p50: ratio(|run| run.kept_p50_ns)?,
                kept_each_p50: ratio(|run| run.kept_each_p50_ns)?,
                kept_max: ratio(|run| run.kept_max_ns)?,
                commit_p50: ratio(|run| run.commit_p50_ns)?,
            })
        };
        ratios.extend(compared());
    }
    ratios
}

/// Compares each point with that of the same series at the least number of vCPUs, run by run of the same
/// round.
pub(super) fn grow(points: &[Point]) -> Vec<Growth> {
    let grown = |point: &Point| {
        let of_series = points.iter().filter(|other| other.series == point.series);
        let least = of_series.min_by_key(|other| other.vcpus)?;
        (point.vcpus > least.vcpus).then_some(())?;
        Some(Growth {
            vcpus: point.vcpus,
            over_vcpus: least.vcpus,
            series: point.series,
            kept_p50: ratio(point, least, |run| run.kept_p50_ns)?,
            kept_each_p50: ratio(point, least, |run| run.kept_each_p50_ns)?,
        })
    };
    points.iter().filter_map(grown).collect()
}

/// A clock that reads 0 took less than its grain.
fn ratio(over: &Point, under: &Point, value: fn(&RunRecord) -> u64) -> Option<RatioOf> {
    paired(&over.runs, &under.runs, |run| {
        Some(float(value(run).max(1)))
    })
}
