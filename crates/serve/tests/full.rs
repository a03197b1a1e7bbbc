//! A VMM's memory that takes no content, because its file system is full (ENOMEM): threads wait, and go on
//! when there is room.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::io::Write;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pagetide_serve::native::client::Client;
use pagetide_serve::native::message::{Message, VmState};
use pagetide_serve::{OnFailure, Options};
use pagetide_test_support::{FullMemoryFile, in_a_process_of_its_own};
use rustix::mm::MapFlags;
use support::native::*;
use support::*;

const PAGES: usize = 64;

/// The server tries nothing again before the VMM says so.
fn only_on_request(place: &Place) -> Options {
    Options {
        resume_after: NEVER,
        ..place.options()
    }
}

/// A server, and a VM whose memory has no room.
fn vm(place: &Place, options: Options) -> Option<(FullMemoryFile, Running, Guest, Client)> {
    if !has_userfaultfd() {
        return None;
    }
    let full = FullMemoryFile::new((PAGES * PAGE) as u64)?;
    let running = Running::start(options);
    let guest = Guest::of_file(full.memory.as_fd(), PAGES, MapFlags::SHARED);
    let client = attached(&guest, &place.socket());
    Some((full, running, guest, client))
}

#[test]
fn a_thread_waits_for_room_and_goes_on() {
    let place = Place::new(PAGES);
    let Some((full, running, guest, mut client)) = vm(&place, only_on_request(&place)) else {
        return;
    };
    let waiting = guest.touch(5);
    eventually("the stall", || running.metrics.totals().stalls > 0);
    let health = client.health().unwrap();
    assert_eq!(health.state, VmState::Stalled);
    assert!(
        health.last_error.contains("Cannot allocate memory"),
        "{}",
        health.last_error
    );
    eventually("the gauge", || {
        running.metrics.totals().stalled_regions == 1
    });
    assert!(waiting.is_undisturbed());
    assert_eq!(guest.resident(), 0);
    full.make_room();
    client.resume().unwrap();
    assert!(waiting.join() == content(5));
    let stalled = client.notice().unwrap();
    assert!(
        matches!(stalled, Some(Message::Stalled { .. })),
        "{stalled:?}"
    );
    eventually("the gauge", || {
        running.metrics.totals().stalled_regions == 0
    });
}

/// Nobody asks the server to try again.
#[test]
fn a_thread_that_waits_for_room_goes_on_by_itself() {
    let place = Place::new(PAGES);
    let Some((full, running, guest, mut client)) = vm(&place, place.options()) else {
        return;
    };
    let waiting = guest.touch(5);
    eventually("the stall", || running.metrics.totals().stalls > 0);
    full.make_room();
    assert!(waiting.join() == content(5));
    let is_resumed = |notice: Option<Message>| matches!(notice, Some(Message::Resumed { .. }));
    eventually("the report", || is_resumed(client.notice().unwrap()));
}

/// A page that the guest has given up needs no content, but a page of memory.
#[test]
fn a_thread_waits_for_room_for_a_discarded_page() {
    let place = Place::new(PAGES);
    let Some((full, running, guest, mut client)) = vm(&place, only_on_request(&place)) else {
        return;
    };
    full.make_room();
    guest.check(5, &content(5));
    guest.punch(5, 1);
    full.take_room();
    let waiting = guest.touch(5);
    eventually("the stall", || running.metrics.totals().stalls > 0);
    // It answers after what it does for the fault.
    let faults = client.health().unwrap().faults;
    assert_eq!(faults, 2, "a failed fault must not wake its thread");
    assert!(waiting.is_undisturbed());
    assert_eq!(guest.resident(), 0);
    full.make_room();
    client.resume().unwrap();
    assert_eq!(waiting.join(), vec![0; PAGE]);
}

/// No thread waits: the VMM neither stalls nor is killed.
#[test]
fn prefetch_without_room_harms_nobody() {
    let place = Place::new(PAGES);
    let mut options = place.options();
    options.prefetch = true;
    options.on_failure = OnFailure::Kill;
    let Some((full, running, guest, mut client)) = vm(&place, options) else {
        return;
    };
    eventually("the error", || {
        client.health().unwrap().last_error.contains("prefetch")
    });
    full.make_room();
    assert_eq!(client.drain(|_, _| {}).unwrap().present, PAGES as u64);
    let totals = running.metrics.totals();
    assert_eq!((totals.stalls, totals.vms_killed), (0, 0));
    (0..PAGES).for_each(|page| guest.check(page, &content(page)));
}

/// Counts the lines of the log on VMs that stall.
#[derive(Clone, Default)]
struct Lines(Arc<AtomicU64>);

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        if String::from_utf8_lossy(line).contains("VM stalled") {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Kind: a line of the log for each of something that a client can make any number of. What a user may have logged is for all of
/// its VMs.
#[test]
fn the_lines_on_one_vm_are_limited_however_often_it_stalls() {
    const STALLS: u64 = 200;
    let this = "the_lines_on_one_vm_are_limited_however_often_it_stalls";
    in_a_process_of_its_own(this, || {
        let lines = Lines::default();
        let its = lines.clone();
        let log = tracing_subscriber::fmt().with_writer(move || its.clone());
        log.init();
        let place = Place::new(PAGES);
        let Some((full, running, guest, mut client)) = vm(&place, only_on_request(&place)) else {
            return;
        };
        let waiting = guest.touch(5);
        for stalls in 1..=STALLS {
            eventually("a stall", || {
                equals(running.metrics.totals().stalls, &stalls)
            });
            if stalls == STALLS {
                full.make_room();
            }
            assert_eq!(client.resume().unwrap(), 1);
        }
        assert!(waiting.join() == content(5));
        // More than the limit if this takes longer than its period.
        let lines = lines.0.load(Ordering::Relaxed);
        assert!((1..STALLS / 2).contains(&lines), "{lines}");
    });
}
