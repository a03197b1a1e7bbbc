//! The result of a paging benchmark, as data. The JSON file is this, field by field; the table and
//! the pages are drawn from it. `docs/guide/benchmarks.md` documents each field.

use serde::{Deserialize, Serialize};

use super::plan::{Delivery, Plan, Series};
use super::published::Published;
use crate::latency::Latency;
use crate::rounds::Origin;
use crate::stats::{RatioOf, Spread};
use crate::timing::Timing;
use crate::units::ByteSize;

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
    pub plan: PlanRecord,
    /// One entry for each number of vCPUs and series, in the plan's order.
    pub points: Vec<Point>,
    /// Exits compared with userfaultfd, where both were measured.
    pub ratios: Vec<Ratio>,
    /// Figures that others published for the same experiment.
    pub published: Option<Published>,
    /// What a reader must know to read the figures right.
    pub notes: Vec<String>,
}

/// What was measured: the plan in words and numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanRecord {
    /// Numbers of vCPUs.
    pub vcpus: Vec<u32>,
    /// Bytes of memory of each vCPU.
    pub per_vcpu_bytes: u64,
    /// The deliveries that were compared.
    pub deliveries: Vec<String>,
    /// Pages resolved by one exit, one series for each.
    pub fault_around: Vec<u32>,
    /// The backing's name.
    pub backing: String,
    /// Bytes of a page of the backing: the granularity in which memory is made present.
    pub page_bytes: u64,
    /// `minor` or `missing`.
    pub mode: String,
    /// `single` or `per-vcpu`.
    pub uffds: String,
    /// Reader threads; `None`: as many as vCPUs.
    pub readers: Option<u32>,
    /// Whether every vCPU touches all of memory.
    pub overlap: bool,
    /// `sequential` or `random`.
    pub order: String,
    /// `write` or `read`.
    pub access: String,
    /// Whether KVM_PRE_FAULT_MEMORY follows each install by exit.
    pub pre_fault: bool,
    /// Measured rounds.
    pub runs: u32,
    /// Whether vCPU threads were pinned.
    pub pin: bool,
}

impl From<&Plan> for PlanRecord {
    fn from(plan: &Plan) -> Self {
        Self {
            vcpus: plan.vcpus.clone(),
            per_vcpu_bytes: plan.per_vcpu.0,
            deliveries: plan.deliveries.iter().map(ToString::to_string).collect(),
            fault_around: plan.fault_around.clone(),
            backing: plan.backing.to_string(),
            page_bytes: plan.backing.page_size().bytes(),
            mode: plan.mode.to_string(),
            uffds: plan.uffds.to_string(),
            readers: plan.readers,
            overlap: plan.overlap,
            order: plan.order.to_string(),
            access: plan.access.to_string(),
            pre_fault: plan.pre_fault,
            runs: plan.runs,
            pin: plan.pin,
        }
    }
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
        let Some((exit_rates, uffd_rates)) = uffd.map(|uffd| paired_rates(exit, uffd)) else {
            continue;
        };
        let Some(rate) = RatioOf::of(&exit_rates, &uffd_rates) else {
            continue;
        };
        // Instructions per page are the reciprocal of pages per nanosecond.
        let instructions = (timing == Timing::Instructions)
            .then(|| RatioOf::of(&reciprocals(&exit_rates), &reciprocals(&uffd_rates)))
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

/// The rates of two points, in rounds that both have.
fn paired_rates(left: &Point, right: &Point) -> (Vec<f64>, Vec<f64>) {
    let both = left.runs.iter().filter_map(|run| {
        let other = right.runs.iter().find(|other| other.round == run.round)?;
        Some((run.rate_kpages_per_s(), other.rate_kpages_per_s()))
    });
    both.unzip()
}

fn reciprocals(values: &[f64]) -> Vec<f64> {
    values.iter().map(|value| 1.0 / value).collect()
}

impl PlanRecord {
    /// The command that measures the same.
    #[must_use]
    pub fn command(&self) -> String {
        let list = |values: &[String]| values.join(",");
        let numbers = |values: &[u32]| list(&values.iter().map(u32::to_string).collect::<Vec<_>>());
        let mut words = vec![
            "pagetide bench paging".to_owned(),
            format!("--vcpus {}", numbers(&self.vcpus)),
            format!("--per-vcpu {}", ByteSize(self.per_vcpu_bytes)),
            format!("--delivery {}", list(&self.deliveries)),
            format!("--fault-around {}", numbers(&self.fault_around)),
            format!("--backing {}", self.backing),
            format!("--mode {}", self.mode),
            format!("--uffds {}", self.uffds),
            format!("--order {}", self.order),
            format!("--access {}", self.access),
            format!("--runs {}", self.runs),
        ];
        words.extend(self.readers.map(|readers| format!("--readers {readers}")));
        let switches = [
            (self.overlap, "--overlap"),
            (self.pre_fault, "--pre-fault"),
            (self.pin, "--pin"),
        ];
        words.extend(
            switches
                .into_iter()
                .filter(|(on, _)| *on)
                .map(|(_, name)| name.to_owned()),
        );
        words.join(" ")
    }
}
