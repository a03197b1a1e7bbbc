//! Stopping workers that sleep in the kernel.

use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;

use rustix::event::poll;
use rustix::io::Errno;

use super::*;
use crate::gate::{Occupant, Seat};
use crate::kick::KickedThread;
use crate::signals::Signals;

const LIMIT: Duration = Duration::from_secs(60);

/// A worker's thread, and how often it was sent the signal.
#[derive(Debug, Default)]
struct Sleeper {
    seat: Seat,
    thread: KickedThread,
    sent: AtomicUsize,
}

impl Occupant for Sleeper {
    fn seat(&self) -> &Seat {
        &self.seat
    }
}

impl Kickable for Sleeper {
    fn signal(&self) {
        self.thread.signal();
        self.sent.fetch_add(1, Ordering::SeqCst);
    }
}

/// A worker that gets a signal just before its ioctl, and sleeps there until it gets another one.
fn sleep_after_first_signal(work: &Work, sleeper: &Sleeper) {
    let signals = Signals::none().install_kick().expect("a handler");
    sleeper.thread.set_here(signals);
    while sleeper.sent.load(Ordering::SeqCst) == 0 {
        thread::yield_now();
    }
    // Any system call: the signal is delivered at its end, if it was not before.
    let _ = rustix::process::getppid();
    while !work.is_over() || poll(&mut [], None) != Err(Errno::INTR) {}
    sleeper.thread.unset();
}

#[test]
fn a_signal_just_before_the_ioctl_is_sent_again() {
    let (ended, ends) = mpsc::channel();
    thread::spawn(move || {
        let work = Work::new(Vec::new(), PopulateFlags::default());
        thread::scope(|scope| {
            let sleeper = Arc::new(Sleeper::default());
            let mut crew = Crew::new(&work);
            crew.seats.push(sleeper.clone());
            let work = &work;
            let worker = scope.spawn(move || {
                sleep_after_first_signal(work, &sleeper);
                Ok(())
            });
            crew.workers.push(worker);
            // As when the caller's `watch` panics.
            drop(crew);
        });
        let _ = ended.send(());
    });
    ends.recv_timeout(LIMIT).expect("the worker ends");
}
