//! Runs on real machines: KVM, a guest, its memory, and what fills its second-stage tables.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagetide_kvm::{Kvm, PopulationError, PopulationProgress, PopulatorMethod, StatsError};
use pagetide_memory::{Backing, PageSize, PopulateAccess};
use pagetide_testbed::{
    Content, Expected, Machine, MachineConfig, MachineError, NoFaults, Order, Touch, Workload,
};
use pagetide_uapi::host::{HugepagePool, available_bytes};

use super::plan::{Method, Plan};
use super::rig::{Job, Rig, Sample};
use crate::facts::{THP_SHMEM, thp_shmem};
use crate::limits;
use crate::machine::{Seeds, fill, run_failure, stall_timeout};
use crate::rounds::RunFailure;
use crate::timing::Timing;
use crate::units::ByteSize;

/// Bytes from one word that the guest writes to the next: the smallest page.
const STRIDE: u64 = 4096;

/// Machines to run a plan on; made anew for every run, so that no run finds what another left.
#[derive(Debug)]
pub struct Machines {
    stall_timeout: Duration,
}

/// Why a plan cannot be run here.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// /dev/kvm cannot be used.
    #[error(transparent)]
    Kvm(#[from] pagetide_kvm::OpenError),
    /// No VM can be made.
    #[error(transparent)]
    CreateVm(#[from] pagetide_kvm::CreateVmError),
    /// KVM refuses that many vCPUs.
    #[error("--vcpus {wanted}: this kernel's KVM allows at most {most} vCPUs (KVM_CAP_MAX_VCPUS)")]
    Vcpus {
        /// Asked for.
        wanted: u32,
        /// Allowed.
        most: usize,
    },
    /// The kernel lacks what a method needs.
    #[error("--method {method}: this kernel lacks {capability}; {advice}")]
    Method {
        /// The method.
        method: Method,
        /// What it needs.
        capability: &'static str,
        /// How to get it.
        advice: &'static str,
    },
    /// Not enough memory.
    #[error("--memory {wanted}: {available} are available; lower it, or free memory")]
    Memory {
        /// Asked for.
        wanted: ByteSize,
        /// Available, in words.
        available: String,
    },
    /// The hugetlb pool has too few free pages.
    #[error(
        "--backing {backing}: {wanted} free huge pages are needed and {free} are free; write a \
         larger number to {}", .setting.display()
    )]
    Hugepages {
        /// The backing.
        backing: Backing,
        /// Needed.
        wanted: u64,
        /// Free.
        free: u64,
        /// The file that sets the pool's size.
        setting: PathBuf,
    },
    /// No such hugetlb pool.
    #[error("--backing {backing}: this kernel or CPU has no huge pages of that size")]
    NoHugepagePool {
        /// The backing.
        backing: Backing,
    },
    /// The largest machine of the plan cannot be made.
    #[error("a machine with {vcpus} vCPUs cannot be made")]
    Machine {
        /// Its number of vCPUs.
        vcpus: u32,
        /// Why.
        #[source]
        source: MachineError,
    },
    /// KVM does not say how many faults there are.
    #[error(transparent)]
    Stats(#[from] StatsError),
}

impl Machines {
    /// Finds out whether `plan` can be run here, and returns warnings about what is doubtful. If
    /// the kernel lacks what a method needs, that is an error if `methods_asked`; otherwise the
    /// method is taken out of the plan, and a warning says so.
    ///
    /// # Errors
    /// Says what is missing and how to get it.
    pub fn prepare(
        plan: &mut Plan,
        methods_asked: bool,
        timing: Timing,
    ) -> Result<(Self, Vec<String>), PrepareError> {
        let kvm = Kvm::open()?;
        let capabilities = *kvm.create_vm()?.capabilities();
        let mut warnings = Vec::new();
        let gated = [
            (
                Method::Populate,
                capabilities.populate_memory,
                "KVM_CAP_POPULATE_MEMORY",
                "boot one with the Pagetide series (cargo xtask vm -- COMMAND does), or measure \
                 --method none,pre-fault",
            ),
            (
                Method::PreFault,
                capabilities.pre_fault_memory,
                "KVM_CAP_PRE_FAULT_MEMORY",
                "it is in Linux 6.11 and later, x86 with two-dimensional paging",
            ),
        ];
        for (method, present, capability, advice) in gated {
            if present || !plan.methods.contains(&method) {
                continue;
            }
            if methods_asked {
                return Err(PrepareError::Method {
                    method,
                    capability,
                    advice,
                });
            }
            plan.methods.retain(|kept| *kept != method);
            warnings.push(format!(
                "{method} was left out: this kernel lacks {capability}"
            ));
        }
        let vcpus = plan.most_vcpus();
        if usize::try_from(vcpus).unwrap_or(usize::MAX) > kvm.max_vcpus() {
            return Err(PrepareError::Vcpus {
                wanted: vcpus,
                most: kvm.max_vcpus(),
            });
        }
        limits::raise_descriptors();
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

    /// Fills second-stage tables by threads of the host.
    fn populate(
        &self,
        machine: &mut Machine,
        method: PopulatorMethod,
        threads: u32,
        sample: &mut Sample,
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
        sample.population = start.elapsed();
        let population = match result {
            // Nothing moved any more.
            Err(error @ PopulationError::Stopped { .. }) => {
                return Err(RunFailure::Lost(Box::new(error)));
            }
            result => result.map_err(RunFailure::failed)?,
        };
        sample.threads = u32::try_from(population.threads).unwrap_or(u32::MAX);
        sample.populated_bytes = population.populated.bytes();
        if population.populated.mapped_bytes == population.total_bytes {
            Ok(())
        } else {
            Err(RunFailure::failed(Holes(population.to_string())))
        }
    }
}

/// Memory that is there was not mapped.
#[derive(Debug, thiserror::Error)]
#[error("memory was left out: {0}")]
struct Holes(String);

/// Whether there is memory enough; perhaps with a warning.
fn check_room(backing: Backing, memory: ByteSize) -> Result<Option<String>, PrepareError> {
    if backing.page_size() == PageSize::Size4K {
        let available = available_bytes().into_iter().chain(limits::group_bytes());
        return match available.min() {
            Some(available) if available < memory.0 => Err(PrepareError::Memory {
                wanted: memory,
                available: ByteSize(available).about(),
            }),
            _ => Ok(without_thp(backing, thp_shmem().as_deref())),
        };
    }
    let page = backing.page_size().bytes();
    let pool = HugepagePool::ask(page).ok_or(PrepareError::NoHugepagePool { backing })?;
    let wanted = memory.0 / page;
    if pool.free < wanted {
        let (free, setting) = (pool.free, pool.setting);
        return Err(PrepareError::Hugepages {
            backing,
            wanted,
            free,
            setting,
        });
    }
    Ok(None)
}

fn without_thp(backing: Backing, setting: Option<&str>) -> Option<String> {
    let off = matches!(setting, None | Some("never" | "deny"));
    (backing == Backing::Thp && off).then(|| {
        format!(
            "--backing thp: {THP_SHMEM} is {}, so this is shmem of 4K pages; write advise to it",
            setting.unwrap_or("not there")
        )
    })
}

impl Rig for Machines {
    fn run(&mut self, job: &Job) -> Result<Sample, RunFailure> {
        let Job {
            vcpus,
            series,
            memory,
            seed,
        } = *job;
        let seeds = Seeds::of(seed);
        let config = self.config(vcpus, memory, series.backing);
        let region = Arc::new(config.data_region().map_err(RunFailure::failed)?);
        fill(&region, seeds.paged).map_err(RunFailure::failed)?;
        region
            .populate(region.all_pages(), PopulateAccess::Write)
            .map_err(RunFailure::failed)?;
        let mut machine = Machine::with_region(config, region).map_err(RunFailure::failed)?;
        let count = |machine: &Machine| machine.stage_two().map_err(RunFailure::failed);

        let mut sample = Sample::default();
        let before = count(&machine)?;
        match series.method {
            Method::None => {}
            Method::Populate => {
                let threads = series.threads.unwrap_or(1);
                let method = PopulatorMethod::Populate;
                self.populate(&mut machine, method, threads, &mut sample)?;
            }
            Method::PreFault => {
                let threads = series.threads.unwrap_or(1);
                let method = PopulatorMethod::PreFault;
                self.populate(&mut machine, method, threads, &mut sample)?;
            }
            Method::OneReader => {
                let walk = Workload::new(Touch::ReadPattern(seeds.paged), Order::Sequential);
                let outcome = machine
                    .run(&walk.alone(), Arc::new(NoFaults))
                    .map_err(run_failure)?;
                sample.population = outcome.elapsed;
                sample.threads = 1;
                sample.populated_bytes = memory.0;
            }
        }
        let populated = count(&machine)?;
        let walk = Workload::new(Touch::Write(seeds.written), Order::Sequential);
        let outcome = machine
            .run(&walk, Arc::new(NoFaults))
            .map_err(run_failure)?;
        let after = count(&machine)?;

        let expected = Expected {
            touched: Content::Pattern(seeds.written),
            rest: Content::Pattern(seeds.paged),
        };
        machine.verify(expected).map_err(RunFailure::failed)?;
        Ok(Sample {
            guest: outcome.elapsed,
            mappings_4k: populated.mappings_4k.saturating_sub(before.mappings_4k),
            mappings_2m: populated.mappings_2m.saturating_sub(before.mappings_2m),
            mappings_1g: populated.mappings_1g.saturating_sub(before.mappings_1g),
            mappings_after: after.mappings(),
            population_exits: populated.faults_taken - before.faults_taken,
            exits: after.faults_taken - populated.faults_taken,
            ..sample
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thp_that_is_switched_off_is_a_warning() {
        for (setting, warns) in [(Some("never"), true), (None, true), (Some("advise"), false)] {
            let warning = without_thp(Backing::Thp, setting);
            assert_eq!(warning.is_some(), warns, "{setting:?}");
            assert_eq!(without_thp(Backing::Shmem, setting), None);
        }
    }
}
