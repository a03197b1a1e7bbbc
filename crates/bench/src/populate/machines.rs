//! Runs on real machines: KVM, a guest, its memory, and what fills its stage-2 tables.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagetide_kvm::{Kvm, PopulationError, PopulationProgress, PopulatorMethod, Signals};
use pagetide_memory::{Backing, FaultInAccess};
use pagetide_testbed::{
    Content, Expected, Machine, MachineConfig, Order, StageTwo, Touch, Workload,
};

use pagetide_uapi::userfaultfd::{Features, Userfaultfd};
use pagetide_vmm::NoFaults;

use super::ahead::{Ahead, Arrived};
use super::plan::{Method, Plan};
use super::view;
use crate::benchmark::{Benchmark, Job, Rig, RunFailure};
use crate::machine::{Seeds, fill, run_failure, stall_timeout};
use crate::model::Sample;
use crate::prepare::{Gate, PrepareError, check_room, check_vcpus, leave_out};
use crate::progress::Progress;
use crate::timing::Timing;
use crate::units::ByteSize;

/// Bytes from one word that the guest writes to the next: the smallest page.
const STRIDE: u64 = 4096;

/// Machines to run a plan on; made anew for every run, so that no run finds what another left.
#[derive(Debug)]
pub struct Machines {
    stall_timeout: Duration,
}

impl Machines {
    /// See [`Benchmark::prepare`].
    pub(super) fn prepare(
        plan: &mut Plan,
        methods_asked: bool,
        timing: Timing,
    ) -> Result<(Self, Vec<String>), PrepareError> {
        let kvm = Kvm::open()?;
        let capabilities = *kvm.create_vm(Signals::none())?.capabilities();
        let gates = [
            Gate {
                method: Method::Populate,
                present: capabilities.populate_memory,
                needs: "KVM_CAP_POPULATE_MEMORY",
                advice: "boot one with the Pagetide series (cargo xtask vm -- COMMAND does), or \
                         measure --method none,pre-fault",
            },
            Gate {
                method: Method::PreFault,
                present: capabilities.pre_fault_memory,
                needs: "KVM_CAP_PRE_FAULT_MEMORY",
                advice: "it is in Linux 6.11 and later, x86 with two-dimensional paging",
            },
            Gate {
                method: Method::PrefetchPopulate,
                present: capabilities.populate_memory,
                needs: "KVM_CAP_POPULATE_MEMORY",
                advice: "boot one with the Pagetide series (cargo xtask vm -- COMMAND does), or \
                         measure --method prefetch",
            },
        ];
        let mut warnings = leave_out("--method", &mut plan.methods, methods_asked, gates)?;
        if plan.methods.iter().any(|method| method.is_paged()) {
            let features = Userfaultfd::available()?;
            let lacks = |needed| !features.contains(needed);
            let hugetlb = plan.backings.iter().any(|backing| backing.is_hugetlb());
            let gates = plan
                .methods
                .clone()
                .into_iter()
                .filter(|method| method.is_paged());
            let gates = gates.map(|method| Gate {
                method,
                present: !(lacks(Features::MINOR_SHMEM)
                    || hugetlb && lacks(Features::MINOR_HUGETLBFS)),
                needs: "userfaultfd's minor faults for this backing",
                advice: "they are in Linux 5.14 and later",
            });
            warnings.extend(leave_out(
                "--method",
                &mut plan.methods,
                methods_asked,
                gates,
            )?);
        }
        let vcpus = plan.most_vcpus();
        check_vcpus(&kvm, vcpus)?;
        pagetide_base::raise_descriptors();
        let machines = Self {
            stall_timeout: stall_timeout(timing),
        };
        for &backing in &plan.backings {
            warnings.extend(check_room(backing, plan.memory)?);
            let config = machines.config(vcpus, plan.memory, backing);
            let machine =
                Machine::new(config).map_err(|source| PrepareError::Machine { vcpus, source })?;
            machine.stage_two()?;
        }
        Ok((machines, warnings))
    }

    fn config(&self, vcpus: u32, memory: ByteSize, backing: Backing) -> MachineConfig {
        MachineConfig {
            backing,
            alone: true,
            stride_bytes: Some(STRIDE),
            stall_timeout: self.stall_timeout,
            ..MachineConfig::new(vcpus, memory.0 / u64::from(vcpus.max(1)))
        }
    }

    /// Fills stage-2 tables by threads of the host.
    fn populate(
        &self,
        machine: &mut Machine,
        method: PopulatorMethod,
        threads: u32,
        filled: &mut Filled,
    ) -> Result<(), RunFailure> {
        let threads = usize::try_from(threads).ok().and_then(NonZeroUsize::new);
        let populator = machine
            .populator()
            .method(method)
            .threads(threads.unwrap_or(NonZeroUsize::MIN));
        let (mut bytes, mut moved) = (0, Instant::now());
        let start = Instant::now();
        let result = populator.run(|progress: PopulationProgress| {
            if progress.bytes > bytes {
                (bytes, moved) = (progress.bytes, Instant::now());
            }
            if moved.elapsed() < self.stall_timeout {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        });
        filled.time = start.elapsed();
        let population = match result {
            // Nothing moved any more.
            Err(error @ PopulationError::Stopped { .. }) => {
                return Err(RunFailure::Lost(Box::new(error)));
            }
            result => result.map_err(RunFailure::failed)?,
        };
        filled.threads = u32::try_from(population.threads).unwrap_or(u32::MAX);
        filled.bytes = population.populated.bytes();
        if population.populated.mapped_bytes == population.total_bytes {
            Ok(())
        } else {
            Err(RunFailure::failed(Holes(population.to_string())))
        }
    }
}

/// What a population did.
#[derive(Debug, Clone, Copy, Default)]
struct Filled {
    time: Duration,
    threads: u32,
    bytes: u64,
}

/// Memory that is there was not mapped.
#[derive(Debug, thiserror::Error)]
#[error("memory was left out: {0}")]
struct Holes(String);

impl Rig<Plan> for Machines {
    fn run(&mut self, job: &Job<'_, Plan>, _: &mut dyn Progress) -> Result<Sample, RunFailure> {
        let Job {
            plan,
            vcpus,
            series,
            seed,
        } = *job;
        let memory = plan.memory;
        let seeds = Seeds::of(seed);
        let is_paged = series.method.is_paged();
        let config = self.config(vcpus, memory, series.backing);
        let region = Arc::new(config.data_region().map_err(RunFailure::failed)?);
        fill(&region, seeds.paged).map_err(RunFailure::failed)?;
        if !is_paged {
            region
                .fault_in(region.all_pages(), FaultInAccess::Write)
                .map_err(RunFailure::failed)?;
        }
        let mut machine =
            Machine::with_region(config, Arc::clone(&region)).map_err(RunFailure::failed)?;
        let count = |machine: &Machine| machine.stage_two().map_err(RunFailure::failed);

        let (mut filled, mut arrived) = (Filled::default(), Arrived::default());
        let before = count(&machine)?;
        match series.method {
            Method::None | Method::Prefetch | Method::PrefetchPopulate => {}
            Method::Populate => {
                let threads = series.threads.unwrap_or(1);
                let method = PopulatorMethod::Populate;
                self.populate(&mut machine, method, threads, &mut filled)?;
            }
            Method::PreFault => {
                let threads = series.threads.unwrap_or(1);
                let method = PopulatorMethod::PreFault;
                self.populate(&mut machine, method, threads, &mut filled)?;
            }
            Method::OneReader => {
                let walk = Workload::new(Touch::ReadPattern(seeds.paged), Order::Sequential);
                let outcome = machine
                    .run(&walk.alone(), Arc::new(NoFaults))
                    .map_err(run_failure)?;
                filled.time = outcome.elapsed;
                filled.threads = 1;
                filled.bytes = memory.0;
            }
        }
        let populated = count(&machine)?;
        let walk = Workload::new(Touch::Write(seeds.written), Order::Sequential);
        let outcome = if is_paged {
            let populates = series.method == Method::PrefetchPopulate;
            let ahead = Ahead::begin(&machine, &region, populates)?;
            let outcome;
            (outcome, arrived) = ahead.run(&mut machine, &walk)?;
            outcome
        } else {
            let outcome = machine.run(&walk, Arc::new(NoFaults));
            outcome.map_err(run_failure)?
        };
        let after = count(&machine)?;

        let expected = Expected {
            touched: Content::Pattern(seeds.written),
            rest: Content::Pattern(seeds.paged),
        };
        machine.verify(expected).map_err(RunFailure::failed)?;
        let made = |count: fn(&StageTwo) -> u64| count(&populated).saturating_sub(count(&before));
        Ok(Sample::default()
            .count(view::THREADS, filled.threads.into())
            .time(view::POPULATION, filled.time)
            .time(view::GUEST, outcome.elapsed)
            .count(view::POPULATED, filled.bytes)
            .count(view::MAPPINGS_4K, made(|counts| counts.mappings_4k))
            .count(view::MAPPINGS_2M, made(|counts| counts.mappings_2m))
            .count(view::MAPPINGS_1G, made(|counts| counts.mappings_1g))
            .count(view::MAPPINGS_AFTER, after.mappings())
            .count(view::POPULATION_EXITS, made(|counts| counts.faults_taken))
            .count(view::EXITS, after.faults_taken - populated.faults_taken)
            .count(view::PREFETCHED, arrived.prefetched_pages)
            .count(view::PAGER_FAULTS, arrived.faults))
    }
}
