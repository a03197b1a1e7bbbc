//! A VMM's memory that takes no content, because its file system is full (ENOMEM): threads wait, and go on
//! when there is room.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::os::fd::{AsFd, OwnedFd};

use pagetide_serve::native::client::Client;
use pagetide_serve::native::message::{Message, VmState};
use pagetide_serve::{OnFailure, Options};
use rustix::fs::{Mode, OFlags, ftruncate, open, openat};
use rustix::io::pwrite;
use rustix::mm::MapFlags;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use support::native::*;
use support::*;

const PAGES: usize = 64;

/// The memory's file in a file system that another file fills.
struct Full {
    memory: OwnedFd,
    filler: OwnedFd,
}

impl Full {
    fn new() -> Option<Self> {
        let place = tempfile::tempdir().unwrap();
        let size = Some(c"size=256k");
        if let Err(errno) = mount("none", place.path(), "tmpfs", MountFlags::empty(), size) {
            println!("SKIP: a file system cannot be mounted: {errno}");
            return None;
        }
        let directory = open(place.path(), OFlags::DIRECTORY, Mode::empty());
        // It lives as long as the files.
        unmount(place.path(), UnmountFlags::DETACH).unwrap();
        let directory = directory.unwrap();
        let create = |name| {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
            openat(&directory, name, flags, Mode::RUSR | Mode::WUSR).unwrap()
        };
        let full = Self {
            memory: create("memory"),
            filler: create("filler"),
        };
        ftruncate(&full.memory, (PAGES * PAGE) as u64).unwrap();
        full.take_room();
        Some(full)
    }

    fn take_room(&self) {
        while pwrite(&self.filler, &[1; PAGE], length(&self.filler)).is_ok_and(|bytes| bytes > 0) {}
    }

    fn make_room(&self) {
        ftruncate(&self.filler, 0).unwrap();
    }
}

fn length(file: &OwnedFd) -> u64 {
    u64::try_from(rustix::fs::fstat(file).unwrap().st_size).unwrap()
}

/// A server, and a VM whose memory has no room.
fn vm(place: &Place, options: Options) -> Option<(Full, Running, Guest, Client)> {
    if !has_userfaultfd() {
        return None;
    }
    let full = Full::new()?;
    let running = Running::start(options);
    let guest = Guest::of_file(full.memory.as_fd(), PAGES, MapFlags::SHARED);
    let client = attached(&guest, &place.socket());
    Some((full, running, guest, client))
}

#[test]
fn a_thread_waits_for_room_and_goes_on() {
    let place = Place::new(PAGES);
    let Some((full, running, guest, mut client)) = vm(&place, place.options()) else {
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
    assert!(!waiting.is_finished());
    full.make_room();
    let found = within_patience("the page", move || waiting.join().unwrap());
    assert!(found == content(5));
    let stalled = client.notice().unwrap();
    assert!(
        matches!(stalled, Some(Message::Stalled { .. })),
        "{stalled:?}"
    );
    eventually("the report", || {
        matches!(client.notice().unwrap(), Some(Message::Resumed { .. }))
    });
    eventually("the gauge", || {
        running.metrics.totals().stalled_regions == 0
    });
}

/// A page that the guest has given up needs no content, but a page of memory.
#[test]
fn a_thread_waits_for_room_for_a_discarded_page() {
    let place = Place::new(PAGES);
    let Some((full, running, guest, mut client)) = vm(&place, place.options()) else {
        return;
    };
    full.make_room();
    guest.check(5, &content(5));
    guest.punch(5, 1);
    full.take_room();
    let waiting = guest.touch(5);
    eventually("the stall", || running.metrics.totals().stalls > 0);
    std::thread::sleep(std::time::Duration::from_millis(100));
    let faults = client.health().unwrap().faults;
    assert_eq!(faults, 2, "a failed fault must not wake its thread");
    assert!(!waiting.is_finished());
    full.make_room();
    let found = within_patience("the page", move || waiting.join().unwrap());
    assert_eq!(found, vec![0; PAGE]);
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
