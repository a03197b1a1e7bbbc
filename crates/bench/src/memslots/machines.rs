//! Runs on real machines: KVM, a guest that walks its memory, and a thread that changes its slots.

use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_kvm::{CommitError, Kvm, Signals};
use pagetide_memory::{Backing, GuestAddress, Region, RegionError};
use pagetide_testbed::{DATA_GPA, GuestError, MachineError, Walkers, WalkersConfig, Walking};

use super::changes::{self, BAR_FIRST, BAR_PAGES, DATA_PAGES, Memory, NoSuchSlot, Step};
use super::metronome::Metronome;
use super::plan::{Guest, Method, Plan, Series};
use super::view;
use crate::benchmark::{Benchmark, Job, Rig, RunFailure};
use crate::latency::{LatencyLog, LatencyLogError};
use crate::machine::{is_loss, stall_timeout};
use crate::model::Sample;
use crate::prepare::{Gate, PrepareError, check_vcpus, leave_out};
use crate::progress::Progress;
use crate::timing::Timing;

const PAGE: u64 = 4096;
/// Between a commit and the next, and what a stretch of time without a commit lasts.
const PAUSE: Duration = Duration::from_millis(5);

/// How often the emulator is to look after its other CPU, in nanoseconds.
const METRONOME_NS: u64 = 12_000;

/// Machines to run a plan on; made anew for every run.
#[derive(Debug)]
pub struct Machines {
    stall_timeout: Duration,
    /// How many CPUs the emulator hands its thread round, if it does.
    turns: u32,
    /// Where it is needed, see there.
    _metronome: Option<Metronome>,
}

/// A run went wrong.
#[derive(Debug, thiserror::Error)]
enum Wrong {
    #[error(transparent)]
    Machine(#[from] MachineError),
    #[error("devices' memory")]
    Bars(#[from] RegionError),
    #[error(transparent)]
    Walk(#[from] GuestError),
    #[error(transparent)]
    Change(#[from] NoSuchSlot),
    #[error("commit {number}")]
    Commit {
        number: u64,
        #[source]
        source: Box<CommitError>,
    },
    #[error(
        "vCPU {vcpu} {} memory at {gpa} that was not there: {holes} such accesses, and {method} \
         promises none",
        if *write { "wrote to" } else { "read" }
    )]
    Hole {
        vcpu: u32,
        gpa: GuestAddress,
        write: bool,
        holes: u64,
        method: Method,
    },
    #[error("commit {number} has not ended after {} s", limit.as_secs())]
    Stuck { number: u64, limit: Duration },
    #[error("the committing thread could not be started")]
    Spawn(#[source] std::io::Error),
    #[error("the committing thread panicked")]
    Panicked,
    #[error(transparent)]
    Latency(#[from] LatencyLogError),
}

impl Wrong {
    /// Whether this is what the lab's parallel software CPU does to runs.
    fn may_be_loss(&self) -> bool {
        match self {
            Self::Stuck { .. } => true,
            Self::Walk(error) => is_loss(error),
            _ => false,
        }
    }
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
        let list = Gate {
            method: Method::List,
            present: capabilities.slot_list,
            needs: "KVM_CAP_SET_USER_MEMORY_REGION_LIST",
            advice: "boot one with the Pagetide series (cargo xtask vm -- COMMAND does), or measure \
                     --method quiesce,delete-create",
        };
        let mut warnings = leave_out("--method", &mut plan.methods, methods_asked, [list])?;
        if plan.methods.contains(&Method::Quiesce) && !capabilities.kick_vcpus {
            warnings.push(
                "quiesce stops vCPUs by signals: this kernel lacks KVM_CAP_KICK_VCPUS".to_owned(),
            );
        }
        let vcpus = plan.most_vcpus();
        check_vcpus(&kvm, vcpus)?;
        let metronome = match timing {
            Timing::Instructions => Metronome::start(METRONOME_NS)
                .inspect_err(|error| {
                    warnings.push(format!(
                        "the emulator's CPUs may stand still for milliseconds, and vCPUs with them: \
                         no cpu-clock event to prevent it: {error}"
                    ));
                })
                .ok(),
            _ => None,
        };
        let cpus = thread::available_parallelism().map_or(1, NonZero::get);
        let machines = Self {
            stall_timeout: stall_timeout(timing),
            turns: match timing {
                Timing::Instructions => u32::try_from(cpus).unwrap_or(1),
                _ => 1,
            },
            _metronome: metronome,
        };
        drop(
            Walkers::new(machines.config(vcpus, plan.guest))
                .map_err(|source| PrepareError::Machine { vcpus, source })?,
        );
        Ok((machines, warnings))
    }

    fn config(&self, vcpus: u32, guest: Guest) -> WalkersConfig {
        WalkersConfig {
            vcpus,
            data_bytes: DATA_PAGES * PAGE,
            walk: changes::walk(),
            touch: guest == Guest::Touch,
            stall_timeout: self.stall_timeout,
        }
    }

    /// Has vCPUs of another VM walk on the CPUs that the measured one leaves idle, where the emulator has its
    /// CPUs take turns: an idle one gives its turn away, and what a vCPU waits for the others' turns would
    /// be less with few vCPUs than with many.
    fn neighbours(&self, job: &Job<'_, Plan>) -> Result<Option<Walking>, Wrong> {
        let idle = self.turns.saturating_sub(job.vcpus);
        if idle == 0 {
            return Ok(None);
        }
        let walkers = Arc::new(Walkers::new(self.config(idle, job.plan.guest))?);
        Ok(Some(walkers.start()?))
    }

    fn measure(&self, job: &Job<'_, Plan>) -> Result<Sample, Wrong> {
        let neighbours = self.neighbours(job)?;
        let walkers = Arc::new(Walkers::new(self.config(job.vcpus, job.plan.guest))?);
        let bars = Region::new(
            GuestAddress(DATA_GPA + BAR_FIRST * PAGE),
            BAR_PAGES * PAGE,
            Backing::Shmem,
        )?;
        let committer = Committer {
            memory: Memory {
                data: Arc::clone(walkers.data()),
                bars: Arc::new(bars),
            },
            walkers: Arc::clone(&walkers),
            series: job.series,
            commits: job.plan.commits_of(job.series),
            begun: Arc::new(AtomicU64::new(0)),
        };
        let walking = walkers.start()?;
        let sample = self.supervise(committer)?;
        let hole = walking.end()?;
        if let Some(neighbours) = neighbours {
            neighbours.end()?;
        }
        match (job.series.method(), hole) {
            (Some(method @ (Method::List | Method::Quiesce)), Some(hole)) => Err(Wrong::Hole {
                vcpu: hole.vcpu,
                gpa: hole.gpa,
                write: hole.write,
                holes: walkers.holes(),
                method,
            }),
            _ => Ok(sample),
        }
    }

    /// Has a thread commit, because a commit may hang; then the thread is given up.
    fn supervise(&self, committer: Committer) -> Result<Sample, Wrong> {
        let (sender, receiver) = mpsc::channel();
        let begun = Arc::clone(&committer.begun);
        thread::Builder::new()
            .name("committer".to_owned())
            .spawn(move || {
                let _ = sender.send(committer.run());
            })
            .map_err(Wrong::Spawn)?;
        let mut last = 0;
        // A vCPU that stalls is found by the committer, after as long.
        let limit = self.stall_timeout * 2;
        loop {
            match receiver.recv_timeout(limit) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Disconnected) => return Err(Wrong::Panicked),
                Err(RecvTimeoutError::Timeout) => {
                    let number = begun.load(Ordering::Relaxed);
                    if number == last {
                        return Err(Wrong::Stuck { number, limit });
                    }
                    last = number;
                }
            }
        }
    }
}

impl Rig<Plan> for Machines {
    /// Fails also where a guest saw a hole and the method promises that there is none.
    fn run(&mut self, job: &Job<'_, Plan>, _: &mut dyn Progress) -> Result<Sample, RunFailure> {
        self.measure(job).map_err(|wrong| {
            let lost = wrong.may_be_loss();
            RunFailure::of(wrong, lost)
        })
    }
}

/// What changes the slots.
struct Committer {
    walkers: Arc<Walkers>,
    memory: Memory,
    series: Series,
    commits: u32,
    /// Commits begun.
    begun: Arc<AtomicU64>,
}

/// What a run has shown so far.
struct Seen {
    commit: LatencyLog,
    commit_total: Duration,
    inside: LatencyLog,
    kept: LatencyLog,
    kept_each: LatencyLog,
    holes: u64,
}

impl Committer {
    fn run(&self) -> Result<Sample, Wrong> {
        let mut seen = Seen {
            commit: LatencyLog::new()?,
            commit_total: Duration::ZERO,
            inside: LatencyLog::new()?,
            kept: LatencyLog::new()?,
            kept_each: LatencyLog::new()?,
            holes: 0,
        };
        let (start, steps) = (Instant::now(), self.walkers.steps()?);
        for number in 0..u64::from(self.commits) {
            self.begun.store(number + 1, Ordering::Relaxed);
            match self.series {
                Series::Idle => self.watch(&mut seen, |_| Ok(()))?,
                Series::Commits { op, method } => {
                    let round = changes::round(op, number);
                    let other = |change: Option<Vec<Step>>| match change {
                        Some(change) => {
                            self.commit(number, &change, method, None)?;
                            // What was stopped runs again before it is stopped once more.
                            Ok(self.walkers.close_window().map(drop)?)
                        }
                        None => Ok::<(), Wrong>(()),
                    };
                    other(round.before)?;
                    self.watch(&mut seen, |seen| {
                        self.commit(number, &round.measured, method, Some(seen))
                    })?;
                    other(round.after)?;
                }
            }
        }
        let elapsed = start.elapsed();
        let p50 = |log: &LatencyLog| log.summary().map_or(0, |times| times.p50_ns);
        let longest = seen.kept.summary().map_or(0, |times| times.max_ns);
        Ok(Sample::default()
            .time(view::ELAPSED, elapsed)
            .count(view::COMMITS, self.commits.into())
            .count(view::STEPS, self.walkers.steps()? - steps)
            .time(view::COMMIT_TOTAL, seen.commit_total)
            .count(view::COMMIT_P50, p50(&seen.commit))
            .count(view::KEPT_P50, p50(&seen.kept))
            .count(view::KEPT_EACH_P50, p50(&seen.kept_each))
            .count(view::KEPT_MAX, longest)
            .count(view::HOLES, seen.holes)
            .count(
                view::KNOWS_STOLEN_TIME,
                self.walkers.knows_stolen_time().into(),
            )
            .log(view::COMMIT, seen.commit)
            .log(view::INSIDE, seen.inside)
            .log(view::KEPT, seen.kept)
            .log(view::KEPT_EACH, seen.kept_each))
    }

    /// Notes what vCPUs see while `work` is done, and for a while afterwards.
    fn watch(
        &self,
        seen: &mut Seen,
        work: impl FnOnce(&mut Seen) -> Result<(), Wrong>,
    ) -> Result<(), Wrong> {
        let holes = self.walkers.holes();
        self.walkers.open_window()?;
        work(seen)?;
        thread::sleep(PAUSE);
        let kept = self.walkers.close_window()?;
        seen.kept.record(kept.iter().copied().max().map_or(0, ns));
        for each in kept {
            seen.kept_each.record(ns(each));
        }
        seen.holes += self.walkers.holes() - holes;
        Ok(())
    }

    fn commit(
        &self,
        number: u64,
        change: &[Step],
        method: Method,
        seen: Option<&mut Seen>,
    ) -> Result<(), Wrong> {
        let transaction = changes::transaction(self.walkers.vm(), &self.memory, change)?;
        let start = Instant::now();
        let done = transaction
            .commit_with(method.into())
            .map_err(|source| Wrong::Commit {
                number,
                source: Box::new(source),
            })?;
        let taken = start.elapsed();
        if let Some(seen) = seen {
            seen.commit.record(ns(taken));
            seen.commit_total += taken;
            seen.inside.record(ns(match method {
                Method::Quiesce => done.quiesced,
                Method::List | Method::DeleteCreate => done.updating,
            }));
        }
        Ok(())
    }
}

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
