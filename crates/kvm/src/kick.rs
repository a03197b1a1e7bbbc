//! Kicks: making a vCPU leave KVM_RUN from another thread.
//!
//! A signal alone can arrive just before KVM_RUN starts and is then lost; `immediate_exit` alone
//! does not reach a vCPU that is already inside. A kick sets the flag and then sends the signal, so
//! that one of the two always works: either KVM_RUN has not started and sees the flag, or it has
//! and the signal ends it, also while KVM waits for a userfaultfd on the vCPU's behalf.
//!
//! There are two kinds. A caller's kick ([`VcpuKick`]) is remembered in `pending` and becomes
//! [`Exit::Interrupted`](crate::Exit::Interrupted). A slot transaction's kick is not remembered:
//! KVM_RUN returns, and [`BoundVcpu::run`](crate::BoundVcpu::run) waits at the gate and enters
//! again. A population ([`crate::populate`]) is kicked by the signal alone: it looks for nothing
//! that could be missed, and whoever waits for it sends the signal again.

use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libc::c_int;
use rustix::thread::Pid;

use crate::gate::{Occupant, Seat};
use crate::run_page::RunPage;
use crate::signals::{self, Signals};

/// Who has a seat at a VM's gate, and how a slot transaction makes it leave.
pub(crate) trait Kickable: Occupant + Debug {
    /// Makes the next KVM_RUN return at once, if that is what it does.
    fn stop_early(&self) {}

    /// Whether KVM_KICK_VCPUS reaches it.
    fn is_vcpu(&self) -> bool {
        false
    }

    /// Sends the signal, if a thread is there to get it.
    fn signal(&self);
}

/// The thread that kicks are sent to, and by which signal. Held while the signal is sent, so that the
/// thread cannot end, and its number go to another one, between the look and the signal.
#[derive(Debug, Default)]
pub(crate) struct KickedThread(Mutex<Option<(Pid, c_int)>>);

impl KickedThread {
    /// Has kicks sent to the calling thread, if the VM has a signal for it.
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

/// What a vCPU and the kicks for it share.
#[derive(Debug)]
pub(crate) struct KickTarget {
    seat: Seat,
    pub(crate) page: RunPage,
    /// A caller's kick that no KVM_RUN has returned for. Set before `immediate_exit` and read after
    /// that was cleared, so that a kick is never forgotten (at worst it counts twice).
    pending: AtomicBool,
    /// A slot transaction closed the gate while the last ioctl was going on, so its kick may come
    /// late: the next KVM_RUN may be interrupted once on its account. Only for whoever holds the
    /// vCPU, hence without any ordering.
    late_kick: AtomicBool,
    /// The thread that runs the vCPU now.
    thread: KickedThread,
}

impl Occupant for KickTarget {
    fn seat(&self) -> &Seat {
        &self.seat
    }
}

impl KickTarget {
    pub(crate) fn new(page: RunPage) -> Self {
        Self {
            seat: Seat::default(),
            page,
            pending: AtomicBool::new(false),
            late_kick: AtomicBool::new(false),
            thread: KickedThread::default(),
        }
    }

    pub(crate) fn thread(&self) -> &KickedThread {
        &self.thread
    }

    /// Takes note that KVM_RUN was interrupted; whether a caller had kicked. For the vCPU's thread.
    pub(crate) fn take_kick(&self) -> bool {
        self.page.set_immediate_exit(false);
        self.pending.swap(false, Ordering::SeqCst)
    }

    /// Sets whether a transaction's kick may come late; what it was.
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

    /// Puts `immediate_exit` back to what callers' kicks want. For the vCPU's thread.
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

    fn is_vcpu(&self) -> bool {
        true
    }

    fn signal(&self) {
        self.thread.signal();
    }
}

/// Kicks one vCPU; any thread may hold and use it, also when the vCPU is long gone.
#[derive(Clone, Debug)]
pub struct VcpuKick {
    target: Arc<KickTarget>,
}

impl VcpuKick {
    pub(crate) fn new(target: Arc<KickTarget>) -> Self {
        Self { target }
    }

    /// Makes the present KVM_RUN, or if there is none the next one, return
    /// [`Exit::Interrupted`](crate::Exit::Interrupted). Several kicks before that count as one.
    ///
    /// In a VM without a signal for it ([`Signals`](crate::Signals)) it is for the next KVM_RUN, and
    /// for the present one if the caller then interrupts the vCPU's thread by means of its own.
    pub fn kick(&self) {
        self.target.pending.store(true, Ordering::SeqCst);
        self.target.page.set_immediate_exit(true);
        self.target.thread.signal();
    }
}
