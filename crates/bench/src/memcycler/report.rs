//! The result of a benchmark of memory errors, as data. The JSON file is this, field by field;
//! `docs/guide/benchmarks.md` documents each field.

use serde::{Deserialize, Serialize};

use super::plan::{Plan, Series};
use super::published::Published;
use crate::rounds::{InRound, Origin, paired};
use crate::stats::{RatioOf, Spread};
use crate::units::float;

/// Name and version of the JSON form. A field's meaning never changes under one version.
pub const SCHEMA: &str = "pagetide.memcycler/1";

/// The result of a benchmark of memory errors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemcyclerReport {
    /// [`SCHEMA`].
    pub schema: String,
    /// Where the figures come from.
    #[serde(flatten)]
    pub origin: Origin,
    /// What was measured.
    pub plan: Plan,
    /// One entry for each number of vCPUs and series, in the plan's order.
    pub points: Vec<Point>,
    /// Each series with errors compared with the same without.
    pub ratios: Vec<Ratio>,
    /// What others published.
    pub published: Published,
    /// What a reader must know to read the figures right.
    pub notes: Vec<String>,
}

/// Stage-2 mappings, by KVM's own count: of the guest's code, tables and data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mappings {
    /// Of 4 KiB.
    pub mappings_4k: u64,
    /// Of 2 MiB.
    pub mappings_2m: u64,
    /// Of 1 GiB.
    pub mappings_1g: u64,
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
    /// Errors asked for, in percent of the memory's 2 MiB pieces; a run's `errors` are those made.
    pub hit_percent: f64,
    /// 64-bit words per microsecond, all vCPUs together, of the runs that the guest survived; `None`
    /// if it survived none.
    pub rate_words_per_us: Option<Spread>,
    /// Bytes lost by a run.
    pub lost_bytes: Spread,
    /// Runs that were lost here and repeated; these are the software CPU's.
    pub lost_runs: u32,
}

/// One measured run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// The round, from 1.
    pub round: u32,
    /// Errors that were made.
    pub errors: u64,
    /// Those of them that the kernel could not handle when they were made: it could not split the huge
    /// page, because somebody was just looking for it, or the page had further users.
    pub errors_unhandled: u64,
    /// Errors that could not be made, because an earlier one had taken the memory already.
    pub errors_in_lost_memory: u64,
    /// The time that was measured.
    pub elapsed_ns: u64,
    /// Words that all vCPUs read, compared and wrote in that time.
    pub words: u64,
    /// The rate of each second of it, words per microsecond.
    pub seconds_words_per_us: Vec<f64>,
    /// Stage-2 mappings before the first error.
    pub before: Mappings,
    /// Stage-2 mappings at the end.
    pub after: Mappings,
    /// Bytes that vCPUs could not use any more.
    pub unusable_bytes: u64,
    /// Bytes that the kernel counts as corrupted because of this run's errors.
    pub corrupted_bytes: u64,
    /// What ended the guest; `None` if it survived.
    pub died_of: Option<String>,
}

impl InRound for RunRecord {
    fn round(&self) -> u32 {
        self.round
    }
}

impl RunRecord {
    /// Words per microsecond; `None` if the guest did not survive.
    #[must_use]
    pub fn rate_words_per_us(&self) -> Option<f64> {
        let survived = self.died_of.is_none() && self.elapsed_ns > 0;
        survived.then(|| float(self.words) / float(self.elapsed_ns) * 1e3)
    }

    /// Bytes lost: what vCPUs could not use any more, or what the kernel counts as corrupted, if that is
    /// more. A simulated error in memory that stays mapped can still be read, but is lost all the same.
    #[must_use]
    pub fn lost_bytes(&self) -> u64 {
        self.unusable_bytes.max(self.corrupted_bytes)
    }
}

/// A series with errors compared with the same backing and policy without, at the same number of vCPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The series.
    pub series: Series,
    /// Its rate over that without errors: below 1, errors cost speed.
    pub rate: RatioOf,
}

impl Ratio {
    /// How much of the rate is lost, in percent: median, and the extremes in the order of loss.
    #[must_use]
    pub fn loss_percent(&self) -> f64 {
        (1.0 - self.rate.paired.median) * 100.0
    }
}

impl MemcyclerReport {
    /// The result of one series at one number of vCPUs.
    #[must_use]
    pub fn point(&self, vcpus: u32, series: Series) -> Option<&Point> {
        self.points
            .iter()
            .find(|point| point.vcpus == vcpus && point.series == series)
    }

    /// The comparison of one series at one number of vCPUs.
    #[must_use]
    pub fn ratio(&self, vcpus: u32, series: Series) -> Option<&Ratio> {
        self.ratios
            .iter()
            .find(|ratio| ratio.vcpus == vcpus && ratio.series == series)
    }
}

/// Compares every series with its baseline, run by run of the same round.
pub(super) fn compare(points: &[Point]) -> Vec<Ratio> {
    let hit = points
        .iter()
        .filter(|point| point.series.poison_percent > 0);
    let ratio = |point: &Point| {
        let baseline = points
            .iter()
            .find(|other| other.vcpus == point.vcpus && other.series == point.series.baseline())?;
        let rate = paired(&point.runs, &baseline.runs, RunRecord::rate_words_per_us)?;
        Some(Ratio {
            vcpus: point.vcpus,
            series: point.series,
            rate,
        })
    };
    hit.filter_map(ratio).collect()
}
