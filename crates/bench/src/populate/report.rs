//! The result of a population benchmark, as data. The JSON file is this, field by field;
//! `docs/guide/benchmarks.md` documents each field.

use pagetide_memory::Backing;
use serde::{Deserialize, Serialize};

use super::plan::{Method, Plan, Series};
use super::published::Published;
use crate::rounds::{InRound, Origin, paired};
use crate::stats::{RatioOf, Spread};
use crate::units::float;

/// Name and version of the JSON form. A field's meaning never changes under one version.
pub const SCHEMA: &str = "pagetide.populate/1";

/// The result of a population benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PopulateReport {
    /// [`SCHEMA`].
    pub schema: String,
    /// Where the figures come from.
    #[serde(flatten)]
    pub origin: Origin,
    /// What was measured.
    pub plan: Plan,
    /// One entry for each number of vCPUs and series, in the plan's order.
    pub points: Vec<Point>,
    /// Each population compared with none, with others and with one thread, as far as they were
    /// measured.
    pub ratios: Vec<Ratio>,
    /// What others published.
    pub published: Published,
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
    /// Nanoseconds until all of memory was written to, population included.
    pub total_ns: Spread,
    /// Nanoseconds until all of memory was written to, from the vCPUs' release.
    pub guest_ns: Spread,
    /// Nanoseconds of the population; `None` without one.
    pub population_ns: Option<Spread>,
    /// GiB populated per second; `None` without a population.
    pub rate_gib_per_s: Option<Spread>,
    /// Thousand second-stage mappings made per second; `None` without a population.
    pub rate_kmappings_per_s: Option<Spread>,
    /// Nanoseconds per second-stage mapping: of the population, or without one of the guest.
    pub ns_per_mapping: Option<Spread>,
    /// Second-stage faults that vCPUs took while they wrote to everything.
    pub exits: Spread,
    /// Runs that were lost here and repeated.
    pub lost_runs: u32,
}

/// One measured run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecord {
    /// The round, from 1.
    pub round: u32,
    /// From the vCPUs' release until the last one had written to its last page.
    pub guest_ns: u64,
    /// The population; 0 without one.
    pub population_ns: u64,
    /// Threads, or vCPUs, that populated.
    pub threads: u32,
    /// Bytes that they dealt with: all memory slots.
    pub populated_bytes: u64,
    /// Second-stage mappings of 4 KiB that the population made.
    pub mappings_4k: u64,
    /// Those of 2 MiB.
    pub mappings_2m: u64,
    /// Those of 1 GiB.
    pub mappings_1g: u64,
    /// Second-stage mappings of any size at the end.
    pub mappings_after: u64,
    /// Second-stage faults that vCPUs took during the population.
    pub population_exits: u64,
    /// Second-stage faults that vCPUs took while they wrote to everything.
    pub exits: u64,
    /// Pages that prefetch brought in; 0 without it.
    #[serde(default)]
    pub prefetched_pages: u64,
    /// Of the exits, those that a pager served; 0 without one.
    #[serde(default)]
    pub pager_faults: u64,
}

impl InRound for RunRecord {
    fn round(&self) -> u32 {
        self.round
    }
}

impl RunRecord {
    /// Population and guest together, in nanoseconds.
    #[must_use]
    pub fn total_ns(&self) -> u64 {
        self.population_ns.saturating_add(self.guest_ns)
    }

    /// Mappings that the population made.
    #[must_use]
    pub fn mappings(&self) -> u64 {
        self.mappings_4k + self.mappings_2m + self.mappings_1g
    }

    /// Nanoseconds per mapping: of the population, or without one of the guest's own faults. `None`
    /// if nothing was mapped.
    #[must_use]
    pub fn ns_per_mapping(&self) -> Option<f64> {
        let (ns, mappings) = match self.population_ns {
            0 => (self.guest_ns, self.mappings_after),
            ns => (ns, self.mappings()),
        };
        (mappings > 0).then(|| float(ns) / float(mappings))
    }
}

/// A population compared with others at the same number of vCPUs with the same backing; what was not
/// measured is `None`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The population.
    pub series: Series,
    /// Time until all is written to, population included, over that without one: below 1 it pays.
    pub total: Option<RatioOf>,
    /// The guest's time alone, over that without a population.
    pub guest: Option<RatioOf>,
    /// How many times as fast as the guest's own faults memory is populated: the guest's time per
    /// mapping without a population over the population's.
    pub over_faults: Option<RatioOf>,
    /// How many times as fast as KVM_PRE_FAULT_MEMORY with as many threads.
    pub over_pre_fault: Option<RatioOf>,
    /// How many times as fast as with one thread.
    pub over_one_thread: Option<RatioOf>,
    /// The guest's time with prefetch and incremental population over that with prefetch alone.
    #[serde(default)]
    pub of_prefetch: Option<RatioOf>,
}

impl PopulateReport {
    /// The result of one series at one number of vCPUs.
    #[must_use]
    pub fn point(&self, vcpus: u32, series: Series) -> Option<&Point> {
        find(&self.points, vcpus, series)
    }

    /// The comparison of one series with none at one number of vCPUs.
    #[must_use]
    pub fn ratio(&self, vcpus: u32, series: Series) -> Option<&Ratio> {
        self.ratios
            .iter()
            .find(|ratio| ratio.vcpus == vcpus && ratio.series == series)
    }

    /// The series of one backing, in the order in which they come.
    #[must_use]
    pub fn series(&self, backing: Backing) -> Vec<Series> {
        let mut seen = Vec::new();
        for point in &self.points {
            if point.series.backing == backing && !seen.contains(&point.series) {
                seen.push(point.series);
            }
        }
        seen
    }

    /// The backings that were measured.
    #[must_use]
    pub fn backings(&self) -> Vec<Backing> {
        let mut seen = Vec::new();
        for point in &self.points {
            if !seen.contains(&point.series.backing) {
                seen.push(point.series.backing);
            }
        }
        seen
    }
}

fn find(points: &[Point], vcpus: u32, series: Series) -> Option<&Point> {
    points
        .iter()
        .find(|point| point.vcpus == vcpus && point.series == series)
}

/// Compares every population with none, run by run of the same round.
pub(super) fn compare(points: &[Point]) -> Vec<Ratio> {
    let populations = points
        .iter()
        .filter(|point| point.series.method != Method::None);
    populations
        .filter_map(|point| ratio(point, points))
        .collect()
}

fn ratio(point: &Point, points: &[Point]) -> Option<Ratio> {
    let Point { vcpus, series, .. } = *point;
    let other = |change: &dyn Fn(&mut Series)| {
        let mut other = series;
        change(&mut other);
        find(points, vcpus, other).filter(|_| other != series)
    };
    // With a pager memory itself has to come first: that is no comparison of populations.
    let none = other(&|series| {
        series.method = Method::None;
        series.threads = None;
    })
    .filter(|_| !series.method.is_paged());
    let total = |run: &RunRecord| Some(float(run.total_ns()));
    let guest = |run: &RunRecord| Some(float(run.guest_ns));
    let per_mapping = RunRecord::ns_per_mapping;
    let times = |slower: Option<&Point>| paired(&slower?.runs, &point.runs, per_mapping);
    let found = Ratio {
        vcpus,
        series,
        total: none.and_then(|none| paired(&point.runs, &none.runs, total)),
        guest: none.and_then(|none| paired(&point.runs, &none.runs, guest)),
        over_faults: times(none),
        over_pre_fault: times(
            other(&|series| series.method = Method::PreFault)
                .filter(|_| series.method == Method::Populate),
        ),
        over_one_thread: times(
            other(&|series| series.threads = Some(1)).filter(|_| series.method.has_threads()),
        ),
        of_prefetch: other(&|series| series.method = Method::Prefetch)
            .filter(|_| series.method == Method::PrefetchPopulate)
            .and_then(|alone| paired(&point.runs, &alone.runs, guest)),
    };
    let any = [
        found.total,
        found.over_faults,
        found.over_pre_fault,
        found.over_one_thread,
        found.of_prefetch,
    ];
    any.iter().any(Option::is_some).then_some(found)
}
