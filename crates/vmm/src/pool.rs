//! The pool: one thread for each vCPU, which enters the guest and passes its exits to the hooks.

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

/// How often the threads of a stopped pool are kicked until they have ended.
const KICK_INTERVAL: Duration = Duration::from_millis(50);

/// How a pool runs its threads.
#[derive(Clone, Debug, Default)]
pub struct PoolConfig {
    /// Host CPUs to which the threads are pinned, in turn; empty for no pinning.
    pub cpus: Vec<usize>,
}

/// Counts of one vCPU in a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VcpuCounts {
    /// Exits from KVM_RUN, of any kind.
    pub exits: u64,
    /// Exits that were memory faults.
    pub faults: u64,
    /// Exits because of signals.
    pub interruptions: u64,
    /// Bytes that KVM_PRE_FAULT_MEMORY mapped.
    pub pre_faulted_bytes: u64,
    /// Calls of KVM_PRE_FAULT_MEMORY that mapped less than asked for, which is no error.
    pub pre_fault_failures: u64,
}

impl VcpuCounts {
    /// The counts since `before`.
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

/// A vCPU on its thread, for hooks.
#[derive(Debug)]
pub struct PoolVcpu<'vcpu> {
    bound: BoundVcpu<'vcpu>,
    counts: VcpuCounts,
}

impl PoolVcpu<'_> {
    /// The counts of this vCPU, the present exit included.
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

    fn hook_failed(&self, exit: Option<Exit>, source: HookError) -> PoolFailure {
        PoolFailure::Hook {
            vcpu: self.id(),
            exit,
            rip: self.rip(),
            source,
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

/// Running vCPUs. Dropping the pool stops them, and does not wait for them.
#[derive(Debug)]
pub struct VcpuPool {
    control: Arc<Control>,
    stopper: Stopper,
    threads: Vec<(u32, JoinHandle<Vcpu>)>,
    /// vCPUs without a thread, because the pool was stopped first.
    idle: Vec<Vcpu>,
    lost: Vec<u32>,
}

/// How a pool ended.
#[derive(Debug)]
pub struct PoolEnd {
    /// The vCPUs whose threads have ended, in the order in which the pool was given them.
    pub vcpus: Vec<Vcpu>,
    /// The numbers of the other vCPUs. Their threads may still run.
    pub lost: Vec<u32>,
    /// The first failure, unless [`Stopper::take_failure`] has taken it. A lost vCPU is a failure, too.
    pub failure: Option<PoolFailure>,
}

impl VcpuPool {
    /// Starts a thread for each vCPU (`vcpuN`). `stopper` stops this pool from now on; if it was used
    /// before, the pool starts stopped and enters no guest. Kicks that the vCPUs have not noticed yet
    /// are dropped. A thread that cannot be started fails the pool.
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
            // The closure had the vCPU, which is dropped with it.
            Err(source) => {
                self.lost.push(id);
                self.control.thread_ended();
                let (vcpu, cpu) = (id, None);
                let failure = PoolFailure::Thread { vcpu, cpu, source };
                self.control.finish(Some(failure));
            }
        }
    }

    /// Waits at most `timeout` until the pool is stopped, has failed, or all vCPUs have left; whether
    /// that is so.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.control.wait_until_over(timeout)
    }

    /// The exits of all vCPUs so far.
    #[must_use]
    pub fn exits(&self) -> u64 {
        self.control.exits()
    }

    /// Interrupts every vCPU once ([`VcpuHooks::on_interrupted`]).
    pub fn kick_all(&self) {
        self.control.kick_all();
    }

    /// Waits at most `grace` for the threads, and kicks those of a stopped pool until they end. vCPUs
    /// whose threads have not ended by then are lost; their threads end when they can.
    #[must_use]
    pub fn join(mut self, grace: Duration) -> PoolEnd {
        let start = Instant::now();
        let mut all_ended = false;
        while !all_ended && start.elapsed() < grace {
            all_ended = self.control.wait_for_ends(KICK_INTERVAL.min(grace));
            // A hook that waits in the kernel may have consumed the signal of the first kick.
            if !all_ended && self.control.is_stopped() {
                self.control.kick_all();
            }
        }
        let (mut vcpus, lost) = collect(std::mem::take(&mut self.threads), all_ended);
        vcpus.append(&mut self.idle);
        self.lost.extend(lost);
        let lost = std::mem::take(&mut self.lost);
        let first_lost = lost.first().map(|&vcpu| PoolFailure::Lost { vcpu });
        PoolEnd {
            vcpus,
            lost,
            failure: self.control.take_failure().or(first_lost),
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

/// Joins the threads that have ended, and returns the numbers of the others.
fn collect(threads: Vec<(u32, JoinHandle<Vcpu>)>, all_ended: bool) -> (Vec<Vcpu>, Vec<u32>) {
    let (mut vcpus, mut lost) = (Vec::new(), Vec::new());
    for (id, thread) in threads {
        // If all threads have reported their end, a join takes an instant at most.
        let ended = (all_ended || thread.is_finished()).then(|| thread.join());
        match ended {
            Some(Ok(vcpu)) => vcpus.push(vcpu),
            // Still running; or a panic outside the guarded part, which dropped the vCPU.
            None | Some(Err(_)) => lost.push(id),
        }
    }
    (vcpus, lost)
}

/// A thread from its start to its end.
fn run_thread(vcpu: &mut Vcpu, control: &Control, place: usize, cpu: Option<usize>) {
    // Reports the end also after a panic outside catch_unwind, for which join() would wait for ever.
    struct EndGuard<'control>(&'control Control);
    impl Drop for EndGuard<'_> {
        fn drop(&mut self) {
            self.0.thread_ended();
        }
    }
    let _guard = EndGuard(control);

    let id = vcpu.id();
    // Unwind safe: after a panic the vCPU's registers are only read, or all set again.
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
    let pinned = cpu.map_or(Ok(()), pin);
    pinned.map_err(|source| PoolFailure::Thread {
        vcpu: id,
        cpu,
        source,
    })?;
    let bound = vcpu
        .bind()
        .map_err(|source| PoolFailure::Bind { vcpu: id, source })?;
    let mut vcpu = PoolVcpu {
        bound,
        counts: VcpuCounts::default(),
    };
    let result = enter_until_left(&mut vcpu, control, place);
    // The guest's last exit may be an OUT that KVM completes at the next entry. Complete it now, before
    // the registers are set again.
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
    let hooks = &*control.hooks;
    hooks
        .on_thread_start(vcpu)
        .map_err(|source| vcpu.hook_failed(None, source))?;
    // After each exit: a hook that waits may have consumed the signal of a kick.
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
        match next.map_err(|source| vcpu.hook_failed(Some(exit), source))? {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_returns_no_vcpu_is_lost() {
        let thread = thread::spawn(|| -> Vcpu { std::panic::resume_unwind(Box::new("gone")) });
        let (vcpus, lost) = collect(vec![(3, thread)], true);
        assert!(vcpus.is_empty());
        assert_eq!(lost, [3]);
    }
}
