//! Runs on real machines: KVM, a guest that cycles through its memory, and errors in it.

use std::collections::HashSet;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use pagetide_kvm::poison::{SimulateError, Simulated, simulate_error};
use pagetide_kvm::{Kvm, StatsError};
use pagetide_memory::{AccessError, FailurePolicy, GuestAddress, Region, RegionError};
use pagetide_testbed::{
    Cycler, CyclerConfig, Cycling, DATA_GPA, GuestError, MachineError, StageTwo,
};
use pagetide_vmm::PoolFailure;

use super::errors;
use super::plan::{Plan, Series};
use super::view;
use crate::benchmark::{Benchmark, Job, Rig, RunFailure};
use crate::machine::{is_loss, stall_timeout};
use crate::model::{Quantity, Sample};
use crate::one_line;
use crate::prepare::{Gate, PrepareError, check_room, check_vcpus, leave_out};
use crate::progress::Progress;
use crate::timing::Timing;
use crate::units::{ByteSize, figure, float};

/// Between two looks at what the guest has done.
const SECOND: Duration = Duration::from_secs(1);

/// Machines to run a plan on; made anew for every run.
#[derive(Debug)]
pub struct Machines {
    stall_timeout: Duration,
    /// Whether the software CPU may be what ends a guest.
    may_lose_runs: bool,
}

/// A run went wrong.
#[derive(Debug, thiserror::Error)]
enum Wrong {
    #[error("guest memory")]
    Region(#[from] RegionError),
    #[error(transparent)]
    Machine(#[from] MachineError),
    #[error(transparent)]
    Cycle(#[from] GuestError),
    #[error(transparent)]
    Stats(#[from] StatsError),
    #[error(transparent)]
    Simulate(#[from] SimulateError),
    #[error("{made} errors were made, and the kernel counts {counted} corrupted bytes more")]
    Uncounted { made: u64, counted: u64 },
}

impl Wrong {
    /// Whether this is what the lab's parallel software CPU does to runs.
    fn may_be_loss(&self) -> bool {
        matches!(self, Self::Cycle(error) if is_loss(error))
    }
}

impl Machines {
    /// See [`Benchmark::prepare`].
    pub(super) fn prepare(
        plan: &mut Plan,
        policies_asked: bool,
        timing: Timing,
    ) -> Result<(Self, Vec<String>), PrepareError> {
        let kvm = Kvm::open()?;
        let vcpus = plan.most_vcpus();
        check_vcpus(&kvm, vcpus)?;
        let keep = FailurePolicy::Keep;
        let gate = Gate {
            method: keep,
            present: plan
                .backings
                .iter()
                .all(|&backing| keep.is_available(backing)),
            needs: "MFD_MF_KEEP_UE_MAPPED",
            advice: "boot one with the Pagetide series (cargo xtask vm -- COMMAND does), or measure \
                     --policy default",
        };
        let mut warnings = leave_out("--policy", &mut plan.policies, policies_asked, [gate])?;
        if plan.poison_percent.iter().any(|&percent| percent > 0) {
            errors::check()?;
        }
        let machines = Self {
            stall_timeout: stall_timeout(timing),
            may_lose_runs: timing.may_lose_runs(),
        };
        for &backing in &plan.backings {
            // A huge page that had an error does not come back to its pool.
            let spoilt = match backing.is_hugetlb() {
                true => plan.spoilt_pages(backing) * backing.page_size().bytes(),
                false => 0,
            };
            let needed = ByteSize(plan.memory.0.saturating_add(spoilt));
            warnings.extend(check_room(backing, needed)?);
            let series = Series {
                backing,
                policy: FailurePolicy::KernelDefault,
                poison_percent: 0,
            };
            let region = region(plan, series).map_err(MachineError::Data);
            let cycler = region.and_then(|region| machines.cycler(vcpus, region));
            let cycler = cycler.map_err(|source| PrepareError::Machine { vcpus, source })?;
            cycler.stage_two()?;
        }
        Ok((machines, warnings))
    }

    fn cycler(&self, vcpus: u32, region: Arc<Region>) -> Result<Arc<Cycler>, MachineError> {
        let config = CyclerConfig {
            vcpus,
            stall_timeout: self.stall_timeout,
        };
        Cycler::new(config, region).map(Arc::new)
    }

    fn measure(&self, job: &Job<'_, Plan>, progress: &mut dyn Progress) -> Result<Sample, Wrong> {
        let region = region(job.plan, job.series)?;
        let cycler = self.cycler(job.vcpus, Arc::clone(&region))?;
        let cycling = cycler.start()?;
        let corrupted = errors::corrupted_bytes();
        let before = cycler.stage_two()?;
        let mut lived = Life::default();
        let result = live(&cycler, job, &region, &mut lived, progress);
        let (errors, after) = (lived.made.len() as u64, cycler.stage_two()?);
        let unusable = cycler.lost_bytes()?;
        let counted = match (corrupted, errors::corrupted_bytes()) {
            (Some(before), Some(after)) => after.saturating_sub(before),
            _ => 0,
        };
        let mut sample = Sample::default()
            .count(view::ERRORS, errors)
            .count(view::UNHANDLED, lived.unhandled)
            .count(view::IN_LOST_MEMORY, lived.in_lost_memory)
            .time(view::ELAPSED, lived.elapsed)
            .count(view::WORDS, lived.words)
            .count(view::UNUSABLE, unusable)
            .count(view::CORRUPTED, counted);
        sample = mappings(mappings(sample, view::BEFORE, &before), view::AFTER, &after);
        for rate in lived.seconds {
            sample = sample.value(view::EACH_SECOND, rate);
        }
        match result.and_then(|()| end(cycling, &lived.made)) {
            Err(Wrong::Cycle(death)) if errors > 0 && self.is_death(&death) => {
                sample = sample.event(view::DIED_OF, &one_line(&death));
            }
            result => result?,
        }
        // Each error is in a page of its own; anybody's errors elsewhere may add to them.
        if counted < errors * 4096 {
            return Err(Wrong::Uncounted {
                made: errors,
                counted,
            });
        }
        Ok(sample)
    }

    /// Whether a guest that had errors ended because of them, and not because we or the software CPU
    /// cannot go on.
    fn is_death(&self, error: &GuestError) -> bool {
        let of_guest = matches!(
            error,
            GuestError::UnexpectedLoss { .. }
                | GuestError::Exception { .. }
                | GuestError::Vcpus(
                    PoolFailure::UnexpectedExit { .. }
                        | PoolFailure::Hook { .. }
                        | PoolFailure::Run(_)
                )
        );
        of_guest && !(self.may_lose_runs && is_loss(error))
    }
}

fn region(plan: &Plan, series: Series) -> Result<Arc<Region>, RegionError> {
    let Series {
        backing, policy, ..
    } = series;
    Region::with_policy(GuestAddress(DATA_GPA), plan.memory.0, backing, policy).map(Arc::new)
}

/// What a guest lived through.
#[derive(Debug, Default)]
struct Life {
    /// Where errors were made.
    made: HashSet<GuestAddress>,
    unhandled: u64,
    in_lost_memory: u64,
    elapsed: Duration,
    words: u64,
    /// Words per microsecond in each second.
    seconds: Vec<f64>,
}

/// From the first error until everything is measured.
fn live(
    cycler: &Cycler,
    job: &Job<'_, Plan>,
    region: &Region,
    lived: &mut Life,
    progress: &mut dyn Progress,
) -> Result<(), Wrong> {
    let Job { plan, series, .. } = *job;
    let errors = plan.errors(series.poison_percent);
    for gpa in errors::places(region.gpa(), plan.pieces(), errors, job.seed) {
        if is_lost(region, gpa) {
            lived.in_lost_memory += 1;
        } else {
            let simulated = simulate_error(region, gpa)?;
            lived.unhandled += u64::from(simulated == Simulated::Unhandled);
            lived.made.insert(gpa);
        }
    }
    // Whatever is lost is found out, and what can be used is mapped again.
    cycler.await_round()?;

    let (start, first) = (Instant::now(), cycler.words()?);
    let (mut at, mut words) = (start, first);
    for _ in 0..plan.seconds {
        thread::sleep(SECOND);
        let (now, total) = (Instant::now(), cycler.words()?);
        let rate = words_per_us(total - words, now - at);
        progress.message(&format!("{series}: {} words/µs", figure(rate)));
        lived.seconds.push(rate);
        (at, words) = (now, total);
    }
    (lived.elapsed, lived.words) = (at - start, words - first);
    Ok(())
}

/// Whether an error has taken the memory already. There can be no other then.
fn is_lost(region: &Region, gpa: GuestAddress) -> bool {
    let place = region.page_of_gpa(gpa).and_then(|page| {
        let offset = gpa.offset_from(region.gpa_of_page(page)?)?;
        Some((page, offset))
    });
    let read = place.map(|(page, offset)| region.read_guest(page, offset, &mut [0; 8]));
    matches!(read, Some(Err(AccessError::Poisoned { .. })))
}

/// Memory with an error is not compared: nobody may rely on what it holds.
fn end(cycling: Cycling, made: &HashSet<GuestAddress>) -> Result<(), Wrong> {
    Ok(cycling.end(&|gpa| made.contains(&gpa))?)
}

/// Adds the mappings of each size.
fn mappings(sample: Sample, [of_4k, of_2m, of_1g]: [Quantity; 3], counted: &StageTwo) -> Sample {
    sample
        .count(of_4k, counted.mappings_4k)
        .count(of_2m, counted.mappings_2m)
        .count(of_1g, counted.mappings_1g)
}

pub(super) fn words_per_us(words: u64, time: Duration) -> f64 {
    float(words) / (time.as_secs_f64() * 1e6).max(f64::MIN_POSITIVE)
}

impl Rig<Plan> for Machines {
    fn run(
        &mut self,
        job: &Job<'_, Plan>,
        progress: &mut dyn Progress,
    ) -> Result<Sample, RunFailure> {
        self.measure(job, progress).map_err(|wrong| {
            let lost = wrong.may_be_loss();
            RunFailure::of(wrong, lost)
        })
    }
}
