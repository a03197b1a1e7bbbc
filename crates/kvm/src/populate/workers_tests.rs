//! Stopping workers that sleep in the kernel.

use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;

use rustix::event::poll;
use rustix::io::Errno;

use super::*;
use crate::gate::{InFlight, Participant};
use crate::kick::KickedThread;
use crate::signals::Signals;

const LIMIT: Duration = pagetide_test_support::PATIENCE;

/// A worker's thread, and the number of signals sent to it.
#[derive(Debug, Default)]
struct Sleeper {
    in_flight: InFlight,
    thread: KickedThread,
    sent: AtomicUsize,
}

impl Participant for Sleeper {
    fn in_flight(&self) -> &InFlight {
        &self.in_flight
    }
}

impl Kickable for Sleeper {
    fn signal(&self) {
        self.thread.signal();
        self.sent.fetch_add(1, Ordering::SeqCst);
    }
}

/// A worker that receives a signal just before its ioctl, and sleeps there until the next signal.
fn sleep_after_first_signal(work: &Work, sleeper: &Sleeper) {
    let signals = Signals::none().install_kick().expect("a handler");
    sleeper.thread.set_here(signals);
    while sleeper.sent.load(Ordering::SeqCst) == 0 {
        thread::yield_now();
    }
    // Any system call: a pending signal is delivered at its end at the latest.
    let _ = rustix::process::getppid();
    while !work.is_stopped() || poll(&mut [], None) != Err(Errno::INTR) {}
    sleeper.thread.unset();
}

#[test]
fn a_signal_just_before_the_ioctl_is_sent_again() {
    let (ended, ends) = mpsc::channel();
    thread::spawn(move || {
        let work = Work::new(Vec::new(), PopulateFlags::default());
        thread::scope(|scope| {
            let sleeper = Arc::new(Sleeper::default());
            let mut workers = Workers::new(&work);
            workers.targets.push(sleeper.clone());
            let work = &work;
            let worker = scope.spawn(move || {
                sleep_after_first_signal(work, &sleeper);
                Ok(())
            });
            workers.workers.push(worker);
            // As if the caller's `watch` panicked.
            drop(workers);
        });
        let _ = ended.send(());
    });
    ends.recv_timeout(LIMIT).expect("the worker ends");
}
