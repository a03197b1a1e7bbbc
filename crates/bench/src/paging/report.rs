//! The result of a paging benchmark, as data. The JSON file is this, field by field; the table and
//! the pages are drawn from it. `docs/guide/benchmarks.md` documents each field.

use serde::{Deserialize, Serialize};

use super::plan::{Delivery, Plan, Series};
use super::published::Published;
use crate::latency::Latency;
use crate::rounds::{InRound, Origin, paired};
use crate::stats::{RatioOf, Spread};
use crate::timing::Timing;

/// Name and version of the JSON form. A field's meaning never changes under one version.
pub const SCHEMA: &str = "pagetide.paging/1";

/// The result of a paging benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PagingReport {
    /// [`SCHEMA`].
    pub schema: String,
    /// Where the figures come from.
    #[serde(flatten)]
    pub origin: Origin,
    /// What was measured.
    pub plan: Plan,
    /// One entry for each number of vCPUs and series, in the plan's order.
    pub points: Vec<Point>,
    /// Exits compared with userfaultfd, where both were measured.
    pub ratios: Vec<Ratio>,
    /// Figures that others published for the same experiment.
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
    /// Thousand pages per second, all vCPUs together, over the runs.
    pub rate_kpages_per_s: Spread,
    /// Thousand pages per second and vCPU: the total divided by the number of vCPUs.
    pub rate_per_vcpu_kpages_per_s: Spread,
    /// Executed instructions per page made present: elapsed nanoseconds over pages. Only where a
    /// nanosecond is an instruction.
    pub instructions_per_page: Option<Spread>,
    /// Latency of touches that faulted, as the guest saw it, over all runs and vCPUs; `None` if
    /// nobody knows which ones faulted.
    pub latency: Option<Latency>,
    /// Runs that were lost here and repeated.
    pub lost_runs: u32,
}

/// One measured run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecord {
    /// The round, from 1.
    pub round: u32,
    /// From the vCPUs' release to the last one's end.
    pub elapsed_ns: u64,
    /// Pages that were made present (for `none`: touched).
    pub pages: u64,
    /// Faults that left the guest through KVM_RUN and were resolved by the vCPU's own thread.
    pub exits: u64,
    /// Faults that came as messages of a userfaultfd and were resolved by a reader thread.
    pub messages: u64,
}

impl InRound for RunRecord {
    fn round(&self) -> u32 {
        self.round
    }
}

/// A series of exits compared with userfaultfd at one number of vCPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The series of exits that is compared with `uffd`.
    pub series: Series,
    /// Rate of exits over rate of userfaultfd: above 1, exits are faster.
    pub rate: RatioOf,
    /// Instructions per page of exits over those of userfaultfd: below 1, exits are cheaper. Only
    /// where a nanosecond is an instruction.
    pub instructions: Option<RatioOf>,
}

impl PagingReport {
    /// The result of one series at one number of vCPUs.
    #[must_use]
    pub fn point(&self, vcpus: u32, series: Series) -> Option<&Point> {
        self.points
            .iter()
            .find(|point| point.vcpus == vcpus && point.series == series)
    }

    /// The comparison of one series with userfaultfd at one number of vCPUs.
    #[must_use]
    pub fn ratio(&self, vcpus: u32, series: Series) -> Option<&Ratio> {
        self.ratios
            .iter()
            .find(|ratio| ratio.vcpus == vcpus && ratio.series == series)
    }

    /// The series that were measured, in the order in which they first come.
    #[must_use]
    pub fn series(&self) -> Vec<Series> {
        let mut seen = Vec::new();
        for point in &self.points {
            if !seen.contains(&point.series) {
                seen.push(point.series);
            }
        }
        seen
    }
}

/// Compares every series of exits with userfaultfd, run by run of the same round.
#[must_use]
pub(super) fn compare(points: &[Point], timing: Timing) -> Vec<Ratio> {
    let mut ratios = Vec::new();
    for exit in points
        .iter()
        .filter(|point| point.series.delivery == Delivery::Exit)
    {
        let uffd = points
            .iter()
            .find(|point| point.vcpus == exit.vcpus && point.series.delivery == Delivery::Uffd);
        let Some(uffd) = uffd else { continue };
        let ratio =
            |value: fn(&RunRecord) -> f64| paired(&exit.runs, &uffd.runs, |run| Some(value(run)));
        let Some(rate) = ratio(RunRecord::rate_kpages_per_s) else {
            continue;
        };
        let instructions = (timing == Timing::Instructions)
            .then(|| ratio(|run| 1.0 / run.rate_kpages_per_s()))
            .flatten();
        ratios.push(Ratio {
            vcpus: exit.vcpus,
            series: exit.series,
            rate,
            instructions,
        });
    }
    ratios
}
