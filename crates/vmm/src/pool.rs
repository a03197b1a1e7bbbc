//! The pool: a thread for each vCPU, which enters the guest and hands its exits to the hooks.

use std::any::Any;
use std::io;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pagetide_kvm::{BoundVcpu, Exit, Vcpu};
use pagetide_memory::GuestRange;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::control::{Control, Stopper};
use crate::failure::PoolFailure;
use crate::hooks::{Handled, HookError, Next, VcpuHooks};

/// How often the threads of a stopped pool are kicked until they have come back.
const KICK_INTERVAL: Duration = Duration::from_millis(50);

/// How a pool runs its threads.
#[derive(Clone, Debug, Default)]
pub struct PoolConfig {
    /// Host CPUs to which the threads are pinned, in turn; empty if they are not.
    pub cpus: Vec<usize>,
}

/// What a pool counts of a vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VcpuCounts {
    /// Exits from KVM_RUN, of any kind.
    pub exits: u64,
    /// Exits that were memory faults.
    pub faults: u64,
    /// Exits because of signals.
    pub interruptions: u64,
    /// Bytes that KVM_PRE_FAULT_MEMORY handled.
    pub pre_faulted_bytes: u64,
    /// Calls of KVM_PRE_FAULT_MEMORY that handled less than asked for, which is no error.
    pub pre_fault_failures: u64,
}

impl VcpuCounts {
    /// What was counted since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            exits: self.exits - before.exits,
            faults: self.faults - before.faults,
            interruptions: self.interruptions - before.interruptions,
            pre_faulted_bytes: self.pre_faulted_bytes - before.pre_faulted_bytes,
            pre_fault_failures: self.pre_fault_failures - before.pre_fault_failures,
        }
    }
}

/// A vCPU on its thread, as hooks see it.
#[derive(Debug)]
pub struct PoolVcpu<'vcpu> {
    bound: BoundVcpu<'vcpu>,
    counts: VcpuCounts,
}

impl PoolVcpu<'_> {
    /// What was counted of this vCPU up to now, the present exit included.
    #[must_use]
    pub fn counts(&self) -> VcpuCounts {
        self.counts
    }

    fn pre_fault(&mut self, range: GuestRange) {
        match self.bound.pre_fault(range) {
            Ok(bytes) => {
                self.counts.pre_faulted_bytes += bytes;
                self.counts.pre_fault_failures += u64::from(bytes < range.bytes());
            }
            Err(error) => {
                tracing::debug!("{error}");
                self.counts.pre_fault_failures += 1;
            }
        }
    }
}

impl<'vcpu> Deref for PoolVcpu<'vcpu> {
    type Target = BoundVcpu<'vcpu>;

    fn deref(&self) -> &Self::Target {
        &self.bound
    }
}

impl DerefMut for PoolVcpu<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.bound
    }
}

/// vCPUs that run. Dropping it stops them, without waiting for them.
#[derive(Debug)]
pub struct VcpuPool {
    control: Arc<Control>,
    stopper: Stopper,
    threads: Vec<(u32, JoinHandle<Vcpu>)>,
    /// Those that got no thread, because the pool was stopped first.
    idle: Vec<Vcpu>,
    lost: Vec<u32>,
}

/// How a pool ended.
#[derive(Debug)]
pub struct PoolEnd {
    /// The vCPUs whose threads came back, in the order in which they were given.
    pub vcpus: Vec<Vcpu>,
    /// The numbers of the others. Their threads may still run.
    pub lost: Vec<u32>,
    /// What went wrong first, unless somebody has taken it ([`Stopper::take_failure`]). A lost vCPU
    /// is a failure, too.
    pub failure: Option<PoolFailure>,
}

impl VcpuPool {
    /// Starts a thread for each vCPU (`vcpuN`). From now on `stopper` stops this pool; one that was
    /// asked before has it stopped already, and no guest is entered. Kicks that the vCPUs have not
    /// noticed yet are forgotten. A thread that cannot be started fails the pool.
    ///
    /// # Errors
    /// [`PoolFailure::NoVcpus`].
    pub fn start(
        vcpus: Vec<Vcpu>,
        hooks: Arc<dyn VcpuHooks>,
        stopper: &Stopper,
        config: &PoolConfig,
    ) -> Result<Self, PoolFailure> {
        if vcpus.is_empty() {
            return Err(PoolFailure::NoVcpus);
        }
        let mut vcpus = vcpus;
        vcpus.iter_mut().for_each(Vcpu::forget_kicks);
        let kicks = vcpus.iter().map(Vcpu::kick_handle).collect();
        let control = Arc::new(Control::new(hooks, kicks));
        stopper.begin(&control);
        let mut pool = Self {
            control,
            stopper: stopper.clone(),
            threads: Vec::new(),
            idle: Vec::new(),
            lost: Vec::new(),
        };
        for (place, vcpu) in vcpus.into_iter().enumerate() {
            if pool.control.is_stopped() {
                pool.idle.push(vcpu);
                pool.control.thread_ended();
                continue;
            }
            let cpu = config.cpus.get(place % config.cpus.len().max(1)).copied();
            pool.spawn(vcpu, place, cpu);
        }
        Ok(pool)
    }

    fn spawn(&mut self, mut vcpu: Vcpu, place: usize, cpu: Option<usize>) {
        let id = vcpu.id();
        let control = Arc::clone(&self.control);
        let body = move || {
            run_thread(&mut vcpu, &control, place, cpu);
            vcpu
        };
        match thread::Builder::new().name(format!("vcpu{id}")).spawn(body) {
            Ok(thread) => self.threads.push((id, thread)),
            // The vCPU went with the closure.
            Err(source) => {
                self.lost.push(id);
                self.control.thread_ended();
                self.control
                    .finish(Some(PoolFailure::Spawn { vcpu: id, source }));
            }
        }
    }

    /// Waits until the pool is stopped, has failed or all vCPUs have left, at most for `timeout`;
    /// whether that is so.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.control.wait_until_over(timeout)
    }

    /// All vCPUs' exits so far: a number that moves as long as guests come out.
    #[must_use]
    pub fn exits(&self) -> u64 {
        self.control.exits()
    }

    /// Makes every vCPU leave the guest once ([`VcpuHooks::on_interrupted`]).
    pub fn kick_all(&self) {
        self.control.kick_all();
    }

    /// Waits for the threads, at most for `grace`; those of a stopped pool are kicked until they come
    /// back. The pool is over then: vCPUs that have not come back are lost, and leave when they can.
    #[must_use]
    pub fn join(mut self, grace: Duration) -> PoolEnd {
        let start = Instant::now();
        let mut all_ended = false;
        while !all_ended && start.elapsed() < grace {
            all_ended = self.control.wait_for_ends(KICK_INTERVAL.min(grace));
            // A signal that a hook's own waiting swallowed does not come twice by itself.
            if !all_ended && self.control.is_stopped() {
                self.control.kick_all();
            }
        }
        let (mut vcpus, lost) = collect(std::mem::take(&mut self.threads), all_ended);
        vcpus.append(&mut self.idle);
        self.lost.extend(lost);
        let lost = std::mem::take(&mut self.lost);
        let told = self.control.take_failure();
        let failure = told.or_else(|| {
            Some(PoolFailure::Lost {
                vcpu: *lost.first()?,
            })
        });
        PoolEnd {
            vcpus,
            lost,
            failure,
        }
    }
}

impl Drop for VcpuPool {
    fn drop(&mut self) {
        if !self.control.wait_for_ends(Duration::ZERO) {
            self.control.finish(None);
        }
        self.stopper.forget();
    }
}

/// Joins the threads that have ended, and names those that have not.
fn collect(threads: Vec<(u32, JoinHandle<Vcpu>)>, all_ended: bool) -> (Vec<Vcpu>, Vec<u32>) {
    let (mut vcpus, mut lost) = (Vec::new(), Vec::new());
    for (id, thread) in threads {
        // Where all have said that they end, joining waits for an instant at most.
        let ended = (all_ended || thread.is_finished()).then(|| thread.join());
        match ended {
            Some(Ok(vcpu)) => vcpus.push(vcpu),
            // Still running; or a panic outside the guarded part, and the vCPU went with it.
            None | Some(Err(_)) => lost.push(id),
        }
    }
    (vcpus, lost)
}

/// A thread's whole life.
fn run_thread(vcpu: &mut Vcpu, control: &Control, place: usize, cpu: Option<usize>) {
    // Counted also if something below panics outside catch_unwind, so that nobody waits for ever.
    struct EndGuard<'control>(&'control Control);
    impl Drop for EndGuard<'_> {
        fn drop(&mut self) {
            self.0.thread_ended();
        }
    }
    let _guard = EndGuard(control);

    let id = vcpu.id();
    // Unwind safe: after a panic the vCPU is only asked for registers and set afresh.
    match catch_unwind(AssertUnwindSafe(|| drive(vcpu, control, place, cpu))) {
        Ok(Ok(Next::End)) => control.finish(None),
        Ok(Ok(_)) => {}
        Ok(Err(failure)) => control.finish(Some(failure)),
        Err(panic) => {
            let message = panic_message(&*panic);
            control.finish(Some(PoolFailure::Panicked { vcpu: id, message }));
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

/// Runs a vCPU until it leaves, alone or with all others.
fn drive(
    vcpu: &mut Vcpu,
    control: &Control,
    place: usize,
    cpu: Option<usize>,
) -> Result<Next, PoolFailure> {
    let id = vcpu.id();
    if let Some(cpu) = cpu {
        pin(cpu).map_err(|source| PoolFailure::Pin {
            vcpu: id,
            cpu,
            source,
        })?;
    }
    let bound = vcpu
        .bind()
        .map_err(|source| PoolFailure::Bind { vcpu: id, source })?;
    let mut vcpu = PoolVcpu {
        bound,
        counts: VcpuCounts::default(),
    };
    let result = enter_until_left(&mut vcpu, control, place);
    // The guest's last exit may be an OUT that KVM completes at the next entry: do it now, while
    // nothing depends on the registers.
    match vcpu.bound.complete_io() {
        Err(error) if result.is_ok() => Err(PoolFailure::Run(error)),
        _ => result,
    }
}

fn pin(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(io::Error::from)
}

fn enter_until_left(
    vcpu: &mut PoolVcpu<'_>,
    control: &Control,
    place: usize,
) -> Result<Next, PoolFailure> {
    let hooks = control.hooks();
    let started = hooks.on_thread_start(vcpu);
    started.map_err(|source| refused(vcpu, None, source))?;
    // Asked after each exit: hooks may have swallowed the signal of a kick.
    while !control.is_stopped() {
        let exit = vcpu.bound.run().map_err(PoolFailure::Run)?;
        vcpu.counts.exits += 1;
        control.count_exit(place);
        let next = match exit {
            Exit::Fault(fault) => {
                vcpu.counts.faults += 1;
                hooks.on_fault(vcpu, fault).map(|handled| {
                    if let Handled::PreFaultThenRetry(range) = handled {
                        vcpu.pre_fault(range);
                    }
                    Next::Enter
                })
            }
            Exit::Interrupted => {
                vcpu.counts.interruptions += 1;
                if control.is_stopped() {
                    break;
                }
                hooks.on_interrupted(vcpu).map(|()| Next::Enter)
            }
            exit => hooks.on_exit(vcpu, exit),
        };
        match next.map_err(|source| refused(vcpu, Some(exit), source))? {
            Next::Enter => {}
            end @ (Next::Leave | Next::End) => return Ok(end),
            Next::Unexpected => {
                return Err(PoolFailure::UnexpectedExit {
                    vcpu: vcpu.id(),
                    exit,
                    rip: vcpu.rip(),
                });
            }
        }
    }
    Ok(Next::Leave)
}

fn refused(vcpu: &PoolVcpu<'_>, exit: Option<Exit>, source: HookError) -> PoolFailure {
    PoolFailure::Hook {
        vcpu: vcpu.id(),
        exit,
        rip: vcpu.rip(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_gives_nothing_back_is_lost() {
        let thread = thread::spawn(|| -> Vcpu { std::panic::resume_unwind(Box::new("gone")) });
        let (vcpus, lost) = collect(vec![(3, thread)], true);
        assert!(vcpus.is_empty());
        assert_eq!(lost, [3]);
    }
}
