//! Runs on real machines: KVM, a guest, its memory, and a pager.

use std::sync::Arc;
use std::time::Duration;

use pagetide_kvm::{Kvm, Signals};
use pagetide_memory::{FaultInAccess, PageIndex, PageRange, Region};
use pagetide_testbed::{
    self as testbed, Content, Expected, Machine, MachineConfig, RunOutcome, Touch, Workload,
};
use pagetide_uapi::host::{HugepagePool, available_bytes};
use pagetide_uapi::userfaultfd::{Features, Userfaultfd};
use pagetide_vmm::NoFaults;

use super::pages::{Counted, Paging};
use super::plan::{Access, Delivery, Mode, Order, Plan, Series};
use super::preflight::{self, Host, Pool};
use super::view::{ELAPSED, EXITS, LATENCY, MESSAGES, PAGES};
use crate::benchmark::{Benchmark, Job, Rig, RunFailure};
use crate::facts::thp_shmem;
use crate::latency::LatencyLog;
use crate::limits;
use crate::machine::{Seeds, fill, run_failure, stall_timeout};
use crate::model::Sample;
use crate::prepare::PrepareError;
use crate::progress::Progress;
use crate::timing::Timing;

/// Selects the permutation of [`Order::Random`], the same in every run.
const ORDER_SEED: u64 = 0x7061_6765;

/// Machines to run a plan on; made anew for every run, so that no run finds what another left.
#[derive(Debug)]
pub struct Machines {
    stall_timeout: Duration,
}

impl Machines {
    /// See [`Benchmark::prepare`].
    pub(super) fn prepare(
        plan: &Plan,
        timing: Timing,
    ) -> Result<(Self, Vec<String>), PrepareError> {
        let kvm = Kvm::open()?;
        let capabilities = *kvm.create_vm(Signals::none())?.capabilities();
        let pages = plan
            .deliveries
            .iter()
            .any(|&delivery| delivery != Delivery::None);
        let features = if pages {
            Userfaultfd::available()?
        } else {
            Features::NONE
        };
        let hugepages = HugepagePool::read(plan.backing.page_size().bytes())
            .filter(|_| plan.backing.is_hugetlb())
            .map(|pool| Pool {
                free: pool.free,
                setting: pool.setting,
            });
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let host = Host {
            max_vcpus: count(kvm.max_vcpus()),
            recommended_vcpus: count(kvm.fd().get_nr_vcpus()),
            absent_mapping_fault: capabilities.absent_mapping_fault,
            pre_fault_memory: capabilities.pre_fault_memory,
            populate_memory: capabilities.populate_memory,
            minor_shmem: features.contains(Features::MINOR_SHMEM),
            minor_hugetlb: features.contains(Features::MINOR_HUGETLBFS),
            available_bytes: available_bytes()
                .into_iter()
                .chain(limits::group_bytes())
                .min(),
            hugepages,
            shmem_thp: thp_shmem(),
            descriptors: pagetide_base::raise_descriptors(),
        };
        let warnings = preflight::check(plan, &host)?;
        let machines = Self {
            stall_timeout: stall_timeout(timing),
        };
        let vcpus = plan.most_vcpus();
        drop(
            Machine::new(machines.config(plan, vcpus))
                .map_err(|source| PrepareError::Machine { vcpus, source })?,
        );
        Ok((machines, warnings))
    }

    fn config(&self, plan: &Plan, vcpus: u32) -> MachineConfig {
        MachineConfig {
            backing: plan.backing,
            overlap: plan.overlap,
            pin: plan.pin,
            stall_timeout: self.stall_timeout,
            ..MachineConfig::new(vcpus, plan.per_vcpu.0)
        }
    }
}

impl Rig<Plan> for Machines {
    fn run(&mut self, job: &Job<'_, Plan>, _: &mut dyn Progress) -> Result<Sample, RunFailure> {
        let Job {
            plan,
            vcpus,
            series,
            ..
        } = *job;
        let seeds = Seeds::of(job.seed);
        let config = self.config(plan, vcpus);
        let region = Arc::new(config.data_region().map_err(RunFailure::failed)?);
        if plan.mode == Mode::Minor || series.delivery == Delivery::None {
            fill(&region, seeds.paged).map_err(RunFailure::failed)?;
        }
        let mut machine =
            Machine::with_region(config, Arc::clone(&region)).map_err(RunFailure::failed)?;
        let workload = workload(plan, seeds);

        let (outcome, counted) = if series.delivery == Delivery::None {
            region
                .fault_in(region.all_pages(), FaultInAccess::Write)
                .map_err(RunFailure::failed)?;
            let outcome = machine
                .run(&workload, Arc::new(NoFaults))
                .map_err(run_failure)?;
            (outcome, Counted::default())
        } else {
            let paging = Paging::begin(job, &region, seeds.paged, &machine)?;
            let (outcome, counted) = page_in(&mut machine, &workload, paging)?;
            counted.check(region.pages()).map_err(RunFailure::failed)?;
            (outcome, counted)
        };

        machine
            .verify(expected(plan, seeds))
            .map_err(RunFailure::failed)?;
        let latencies = latencies(&outcome, plan, series).map_err(RunFailure::failed)?;
        Ok(Sample::default()
            .time(ELAPSED, outcome.elapsed)
            .count(PAGES, region.pages())
            .count(EXITS, counted.exits)
            .count(MESSAGES, counted.messages)
            .log(LATENCY, latencies))
    }
}

/// Runs a machine whose memory is paged in, and ends the paging.
pub(super) fn page_in(
    machine: &mut Machine,
    workload: &Workload,
    paging: Paging,
) -> Result<(RunOutcome, Counted), RunFailure> {
    let result = match machine.run(workload, paging.hooks()) {
        Err(failure) if !failure.lost.is_empty() => {
            // Ending it would close the userfaultfds, and a vCPU that sleeps in one would read
            // zeroes. So it stays, readers and all, until the process ends.
            std::mem::forget(paging);
            return Err(run_failure(failure));
        }
        result => result,
    };
    // A reader's failure stopped the run, so it is the better answer of the two.
    let counted = paging.end()?;
    Ok((result.map_err(run_failure)?, counted))
}

fn workload(plan: &Plan, seeds: Seeds) -> Workload {
    let touch = match plan.access {
        Access::Write => Touch::Write(seeds.written),
        Access::Read => Touch::ReadPattern(seeds.paged),
    };
    let order = match plan.order {
        Order::Sequential => testbed::Order::Sequential,
        Order::Random => testbed::Order::Random { seed: ORDER_SEED },
    };
    Workload::new(touch, order)
}

/// What memory must hold after a run.
fn expected(plan: &Plan, seeds: Seeds) -> Expected {
    let rest = Content::Pattern(seeds.paged);
    match plan.access {
        Access::Write => Expected {
            touched: Content::Pattern(seeds.written),
            rest,
        },
        Access::Read => Expected::all(rest),
    }
}

/// The latencies of the touches that faulted; without faults, of all.
fn latencies(
    outcome: &RunOutcome,
    plan: &Plan,
    series: Series,
) -> Result<LatencyLog, crate::latency::LatencyLogError> {
    let mut log = LatencyLog::new()?;
    for vcpu in &outcome.vcpus {
        match series.delivery {
            Delivery::Exit => vcpu.fault_nanoseconds().for_each(|ns| log.record(ns)),
            // Outside the guest nobody knows which touches these were.
            Delivery::Uffd if !plan.every_touch_faults(series) => {}
            Delivery::Uffd | Delivery::None => {
                vcpu.latencies.nanoseconds().for_each(|ns| log.record(ns));
            }
        }
    }
    Ok(log)
}

/// The part of memory that vCPU `vcpu` has for itself.
pub(super) fn own_pages(region: &Region, vcpus: u32, vcpu: u32) -> PageRange {
    let pages = region.pages() / u64::from(vcpus.max(1));
    PageRange::new(PageIndex(pages * u64::from(vcpu)), pages)
}

#[cfg(test)]
mod tests {
    use pagetide_memory::{Backing, GuestAddress};

    use super::*;

    #[test]
    fn vcpus_share_memory_evenly() {
        let region = Region::new(GuestAddress(1 << 32), 3 << 20, Backing::Shmem).unwrap();
        let parts: Vec<_> = (0..3).map(|vcpu| own_pages(&region, 3, vcpu)).collect();
        assert!(parts.iter().all(|part| part.count() == 256));
        assert_eq!(parts[2].end().0, region.pages());
    }
}
