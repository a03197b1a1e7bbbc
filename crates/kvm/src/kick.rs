//! Kicks: another thread makes a vCPU leave KVM_RUN.
//!
//! A signal alone is lost if it arrives just before KVM_RUN starts; `immediate_exit` alone does not
//! reach a vCPU that is already inside. A kick sets the flag and then sends the signal. One of the two
//! always works: if KVM_RUN has not started, it sees the flag; if it has, the signal ends it, also
//! while KVM waits for a userfaultfd on the vCPU's behalf.
//!
//! There are two kinds. A caller's kick ([`VcpuKick`]) is recorded in `pending` and becomes
//! [`Exit::Interrupted`](crate::Exit::Interrupted). A slot transaction's kick is not recorded: KVM_RUN
//! returns, and [`BoundVcpu::run`](crate::BoundVcpu::run) waits at the gate and enters again. A
//! population ([`crate::populate`]) is kicked by the signal alone: it has no flag to check, and the
//! thread that waits for it sends the signal again.

use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libc::c_int;
use rustix::thread::Pid;

use crate::gate::{InFlight, Participant};
use crate::run_page::RunPage;
use crate::signals::{self, Signals};

/// A participant at a VM's gate that a slot transaction can make leave.
pub(crate) trait Kickable: Participant + Debug {
    /// Makes the next KVM_RUN return at once; only for vCPUs.
    fn stop_early(&self) {}

    /// The vCPU's number, if it is one: KVM_KICK_VCPUS reaches it.
    fn vcpu(&self) -> Option<u32> {
        None
    }

    /// Sends the signal if a thread is bound.
    fn signal(&self);
}

/// The thread that receives kicks, and the signal. Locked while the signal is sent, so that the thread
/// cannot end, and its number be reused, between the lookup and the signal.
#[derive(Debug, Default)]
pub(crate) struct KickedThread(Mutex<Option<(Pid, c_int)>>);

impl KickedThread {
    /// Directs kicks to the calling thread, if the VM has a kick signal.
    pub(crate) fn set_here(&self, signals: Signals) {
        let here = signals
            .kick()
            .map(|signal| (rustix::thread::gettid(), signal));
        *self.thread() = here;
    }

    pub(crate) fn unset(&self) {
        *self.thread() = None;
    }

    pub(crate) fn signal(&self) {
        let thread = self.thread();
        if let Some((thread, signal)) = *thread {
            signals::send(thread, signal);
        }
    }

    fn thread(&self) -> MutexGuard<'_, Option<(Pid, c_int)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The state that a vCPU shares with the threads that kick it.
#[derive(Debug)]
pub(crate) struct KickTarget {
    vcpu: u32,
    in_flight: InFlight,
    pub(crate) page: RunPage,
    /// A caller's kick for which no KVM_RUN has returned yet. Set before `immediate_exit` and read
    /// after that was cleared, so that a kick is never lost (at worst it counts twice).
    pending: AtomicBool,
    /// A slot transaction closed the gate during the last ioctl, so its kick may arrive late: it may
    /// interrupt the next KVM_RUN once. Only the holder of the vCPU accesses this, hence without
    /// ordering.
    late_kick: AtomicBool,
    /// The thread that runs the vCPU now.
    thread: KickedThread,
}

impl Participant for KickTarget {
    fn in_flight(&self) -> &InFlight {
        &self.in_flight
    }
}

impl KickTarget {
    pub(crate) fn new(vcpu: u32, page: RunPage) -> Self {
        Self {
            vcpu,
            in_flight: InFlight::default(),
            page,
            pending: AtomicBool::new(false),
            late_kick: AtomicBool::new(false),
            thread: KickedThread::default(),
        }
    }

    pub(crate) fn thread(&self) -> &KickedThread {
        &self.thread
    }

    /// Records that KVM_RUN was interrupted; returns whether a caller had kicked. For the vCPU's
    /// thread.
    pub(crate) fn take_kick(&self) -> bool {
        self.page.set_immediate_exit(false);
        self.pending.swap(false, Ordering::SeqCst)
    }

    /// Sets whether a transaction's kick may arrive late; returns the previous value.
    #[inline]
    pub(crate) fn expect_late_kick(&self, expected: bool) -> bool {
        let before = self.late_kick.load(Ordering::Relaxed);
        self.late_kick.store(expected, Ordering::Relaxed);
        before
    }

    /// Whether a caller's kick is pending.
    pub(crate) fn has_kick(&self) -> bool {
        self.pending.load(Ordering::SeqCst)
    }

    /// Restores `immediate_exit` according to callers' kicks. For the vCPU's thread.
    pub(crate) fn restore_immediate_exit(&self) {
        self.page.set_immediate_exit(false);
        if self.pending.load(Ordering::SeqCst) {
            self.page.set_immediate_exit(true);
        }
    }
}

impl Kickable for KickTarget {
    fn stop_early(&self) {
        self.page.set_immediate_exit(true);
    }

    fn vcpu(&self) -> Option<u32> {
        Some(self.vcpu)
    }

    fn signal(&self) {
        self.thread.signal();
    }
}

/// Kicks one vCPU; any thread may hold and use it, also after the vCPU was dropped.
#[derive(Clone, Debug)]
pub struct VcpuKick {
    target: Arc<KickTarget>,
}

impl VcpuKick {
    pub(crate) fn new(target: Arc<KickTarget>) -> Self {
        Self { target }
    }

    /// Makes the current KVM_RUN, or if there is none the next one, return
    /// [`Exit::Interrupted`](crate::Exit::Interrupted). Several kicks before that count as one.
    ///
    /// In a VM without a kick signal ([`Signals`]) this affects the next KVM_RUN, and
    /// the current one if the caller then interrupts the vCPU's thread by other means.
    pub fn kick(&self) {
        self.target.pending.store(true, Ordering::SeqCst);
        self.target.page.set_immediate_exit(true);
        self.target.thread.signal();
    }
}
