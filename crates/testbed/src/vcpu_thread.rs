//! A vCPU's thread: enter the guest, hand faults to the handler, until the guest is done.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pagetide_kvm::{BoundVcpu, Exit, FaultExit, Vcpu};
use pagetide_memory::{GuestAddress, GuestRange};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::arch;
use crate::control::Control;
use crate::guest::{Field, PORT, Report};
use crate::handler::Handled;
use crate::low_memory::LowMemory;
use crate::outcome::{FailureCause, VcpuState};
use crate::window;

/// What a vCPU counted from the start until it was done.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) elapsed: Duration,
    pub(crate) exits: u64,
    pub(crate) faults: u64,
    /// The touches that left the guest as faults, by their number, ascending.
    pub(crate) faulted: Vec<u32>,
    pub(crate) interruptions: u64,
    pub(crate) pre_faulted_bytes: u64,
    pub(crate) pre_fault_failures: u64,
}

impl Counts {
    /// Notes which touch a fault belongs to: the guest has counted those before it. One touch may
    /// fault more than once.
    fn note_touch(&mut self, touched: Option<&AtomicU64>) {
        let touch = touched.map(|touched| touched.load(Ordering::Relaxed));
        // A log has at most 2^28 entries.
        if let Some(touch) = touch.and_then(|touch| u32::try_from(touch).ok())
            && self.faulted.last() != Some(&touch)
        {
            self.faulted.push(touch);
        }
    }
}

/// What a thread gives back.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) vcpu: Vcpu,
    /// None if the run failed first.
    pub(crate) counts: Option<Counts>,
    pub(crate) state: VcpuState,
}

/// What a thread works with.
pub(crate) struct Job {
    pub(crate) control: Arc<Control>,
    pub(crate) low: Arc<LowMemory>,
    pub(crate) pages: u64,
    pub(crate) cpu: Option<usize>,
}

/// Why a vCPU did not reach its end.
enum Stop {
    /// The run failed elsewhere.
    Elsewhere,
    /// Here.
    Here(FailureCause),
}

impl From<FailureCause> for Stop {
    fn from(cause: FailureCause) -> Self {
        Stop::Here(cause)
    }
}

/// The thread's whole life.
pub(crate) fn run(mut vcpu: Vcpu, job: &Job) -> Ended {
    // Counted also if something below panics outside catch_unwind, so that nobody waits for ever.
    struct EndGuard<'job>(&'job Control);
    impl Drop for EndGuard<'_> {
        fn drop(&mut self) {
            self.0.thread_ended();
        }
    }
    let _guard = EndGuard(&job.control);

    let id = vcpu.id();
    // Unwind safe: after a panic the vCPU is only asked for registers and set afresh.
    let result = catch_unwind(AssertUnwindSafe(|| walk(&mut vcpu, job)));
    let counts = match result {
        Ok(Ok(counts)) => Some(counts),
        Ok(Err(Stop::Elsewhere)) => None,
        Ok(Err(Stop::Here(cause))) => {
            job.control.fail(cause);
            None
        }
        Err(panic) => {
            let message = panic_message(&*panic);
            job.control
                .fail(FailureCause::Panicked { vcpu: id, message });
            None
        }
    };
    let state = state_of(&vcpu, job, counts.is_some());
    Ended {
        vcpu,
        counts,
        state,
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

fn state_of(vcpu: &Vcpu, job: &Job, done: bool) -> VcpuState {
    let position = arch::position(vcpu);
    VcpuState {
        vcpu: vcpu.id(),
        rip: position.map(|(rip, _)| rip),
        gpa: position.map(|(_, gpa)| GuestAddress(gpa)),
        touched: job.low.field(vcpu.id(), Field::Touched).unwrap_or(0),
        pages: job.pages,
        done,
    }
}

fn walk(vcpu: &mut Vcpu, job: &Job) -> Result<Counts, Stop> {
    let id = vcpu.id();
    if let Some(cpu) = job.cpu {
        pin(cpu).map_err(|source| FailureCause::Pin {
            vcpu: id,
            cpu,
            source,
        })?;
    }
    let mut vcpu = vcpu
        .bind()
        .map_err(|source| FailureCause::Bind { vcpu: id, source })?;
    let result = enter_until_done(&mut vcpu, job);
    // The guest's last exit may be an OUT that KVM completes at the next entry: do it now, while
    // nothing depends on the registers.
    match vcpu.complete_io() {
        Err(error) if result.is_ok() => Err(FailureCause::Run(error).into()),
        _ => result,
    }
}

fn pin(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(io::Error::from)
}

fn enter_until_done(vcpu: &mut BoundVcpu<'_>, job: &Job) -> Result<Counts, Stop> {
    let control = &*job.control;
    let id = vcpu.id();
    let touched = job.low.field_word(id, Field::Touched);
    let mut counts = Counts::default();
    let mut start: Option<Instant> = None;
    loop {
        let exit = vcpu.run().map_err(FailureCause::Run)?;
        control.count_exit(id);
        counts.exits += 1;
        match exit {
            Exit::Fault(fault) => {
                counts.faults += 1;
                counts.note_touch(touched);
                resolve(vcpu, control, fault, &mut counts)?;
            }
            Exit::Interrupted => {
                counts.interruptions += 1;
                if control.is_stopped() {
                    return Err(Stop::Elsewhere);
                }
            }
            Exit::IoOut { port: PORT, data } => match (Report::decode(data), start) {
                (Some(Report::Ready), None) => {
                    // With room for all of them, so that none is made while the clock runs.
                    let faulted = Vec::with_capacity(usize::try_from(job.pages).unwrap_or(0));
                    start = Some(control.wait_for_start().ok_or(Stop::Elsewhere)?);
                    counts = Counts {
                        faulted,
                        ..Counts::default()
                    };
                }
                (Some(Report::Done), Some(start)) => {
                    window::end();
                    return Ok(Counts {
                        elapsed: start.elapsed(),
                        ..counts
                    });
                }
                (Some(Report::Exception), _) => {
                    return Err(exception(id, &job.low)?.into());
                }
                _ => return Err(unexpected(vcpu, exit).into()),
            },
            _ => return Err(unexpected(vcpu, exit).into()),
        }
    }
}

/// Has the handler resolve a fault.
fn resolve(
    vcpu: &mut BoundVcpu<'_>,
    control: &Control,
    fault: FaultExit,
    counts: &mut Counts,
) -> Result<(), Stop> {
    let id = vcpu.id();
    if !fault.is_resolvable() {
        let rip = vcpu.rip();
        return Err(FailureCause::UnresolvableFault {
            vcpu: id,
            fault,
            rip,
        }
        .into());
    }
    let handled = match control.handler().handle(id, fault) {
        Ok(handled) => handled,
        // Stopped while waiting: the failure that stopped it is the one to report.
        Err(_) if control.is_stopped() => return Err(Stop::Elsewhere),
        Err(source) => {
            let rip = vcpu.rip();
            return Err(FailureCause::Handler {
                vcpu: id,
                fault,
                rip,
                source,
            }
            .into());
        }
    };
    if let Handled::PreFaultThenRetry(range) = handled {
        pre_fault(vcpu, range, counts);
    }
    // A handler that returned may have swallowed the kick's signal.
    if control.is_stopped() {
        Err(Stop::Elsewhere)
    } else {
        Ok(())
    }
}

fn pre_fault(vcpu: &mut BoundVcpu<'_>, range: GuestRange, counts: &mut Counts) {
    match vcpu.pre_fault(range) {
        Ok(bytes) => {
            counts.pre_faulted_bytes += bytes;
            counts.pre_fault_failures += u64::from(bytes < range.bytes());
        }
        Err(error) => {
            tracing::debug!("{error}");
            counts.pre_fault_failures += 1;
        }
    }
}

fn unexpected(vcpu: &BoundVcpu<'_>, exit: Exit) -> FailureCause {
    FailureCause::UnexpectedExit {
        vcpu: vcpu.id(),
        exit,
        rip: vcpu.rip(),
    }
}

fn exception(vcpu: u32, low: &LowMemory) -> Result<FailureCause, FailureCause> {
    let field = |field| low.field(vcpu, field).map_err(FailureCause::Machine);
    Ok(FailureCause::Exception {
        vcpu,
        vector: field(Field::ExceptionVector)?,
        error_code: field(Field::ExceptionErrorCode)?,
        rip: field(Field::ExceptionRip)?,
        cr2: field(Field::ExceptionCr2)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_touch_that_faults_twice_is_noted_once() {
        let touched = AtomicU64::new(0);
        let mut counts = Counts::default();
        for touch in [0, 0, 16, 17, 17] {
            touched.store(touch, Ordering::Relaxed);
            counts.note_touch(Some(&touched));
        }
        assert_eq!(counts.faulted, [0, 16, 17]);
    }
}
