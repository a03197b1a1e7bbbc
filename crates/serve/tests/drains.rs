//! Drains by the native protocol: a VMM that asked for one has complete memory, or hears why not.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pagetide_serve::Options;
use pagetide_serve::native::client::Client;
use pagetide_serve::native::message::{
    Message, RefusedCode, VmState, WorkingSetAction, WorkingSetState,
};
use pagetide_test_support::{NoOtherThread, in_a_process_of_its_own};
use rustix::fs::{SealFlags, ftruncate};
use rustix::mm::MapFlags;
use support::native::*;
use support::*;

#[test]
fn a_drained_guest_is_complete_without_its_server() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(4096);
    let running = Running::start(place.options());
    let guest = Guest::new(4096);
    let mut client = attached(&guest, &place.socket());
    guest.check(4000, &content(4000));
    let health = client.health().unwrap();
    assert_eq!(health.state, VmState::Serving);
    assert_eq!((health.pages, health.lost, health.faults), (4096, 0, 1));
    assert!(health.present <= 1 && health.last_error.is_empty());
    let drained = client.drain(|_, pages| assert_eq!(pages, 4096)).unwrap();
    assert_eq!((drained.present, drained.lost), (4096, 0));
    client.goodbye().unwrap();
    // The server's part is over: nothing is missing, and discarding memory waits for nobody.
    running.stop();
    assert_eq!(guest.resident(), 4096);
    (0..4096).for_each(|page| assert!(guest.read(page) == content(page), "{page}"));
    let guest = Arc::new(guest);
    let discarded = Arc::clone(&guest);
    within_patience("a balloon", move || discarded.discard(0, 8));
    assert_eq!(guest.read(3), vec![0; PAGE]);
}

/// Until content is there, a drain goes on. A guest waits, so that no attempt of prefetch counts.
#[test]
fn a_drain_waits_for_content_that_is_unavailable() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let running = Running::start(Options {
        drain_patience: NEVER,
        ..place.options()
    });
    let guest = Guest::new(64);
    let mut client = attached(&guest, &place.socket());
    let cut = place.cut(32);
    let waiting = guest.touch(40);
    eventually("the stall", || running.metrics.totals().stalls > 0);
    let reports = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&reports);
    let draining = std::thread::spawn(move || {
        let count = |present, _| {
            assert!(present < 64);
            counted.fetch_add(1, Ordering::Release);
        };
        client.drain(count).unwrap()
    });
    // Each comes instead of the drain's end.
    eventually("reports of progress", || {
        let reports = reports.load(Ordering::Acquire);
        if reports < 5 { Err(reports) } else { Ok(()) }
    });
    assert!(waiting.is_undisturbed() && guest.resident() <= 32);
    cut.mend();
    let drained = within_patience("the drain", move || draining.join().unwrap());
    assert_eq!(drained.present, 64);
    assert!(waiting.join() == content(40));
    assert_eq!(guest.resident(), 64);
}

/// Memory that takes no content, here because its file ends before it.
#[test]
fn a_drain_is_refused_if_memory_cannot_be_written() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let running = Running::start(place.options());
    let file = memfd(64, SealFlags::empty());
    let guest = Guest::of_file(file.as_fd(), 64, MapFlags::SHARED);
    ftruncate(&file, 60 * PAGE as u64).unwrap();
    let mut client = attached(&guest, &place.socket());
    let (drained, mut client) =
        within_patience("the drain", move || (client.drain(|_, _| {}), client));
    assert_eq!(code(drained), RefusedCode::NoContent);
    let health = client.health().unwrap();
    assert_eq!((health.state, health.present), (VmState::Serving, 60));
    assert!(
        health.last_error.contains("could not be installed"),
        "{}",
        health.last_error
    );
    assert_eq!(running.metrics.totals().stalls, 0);
    // The next one tries again.
    ftruncate(&file, 64 * PAGE as u64).unwrap();
    assert_eq!(client.drain(|_, _| {}).unwrap().present, 64);
    (0..64).for_each(|page| guest.check(page, &content(page)));
}

/// Here a guest waits for content, and its region has stalled: no attempt of prefetch counts.
#[test]
fn a_drain_without_progress_is_refused() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let running = Running::start(Options {
        // The limit that this test reaches.
        drain_patience: Duration::from_millis(100),
        ..place.options()
    });
    let guest = Guest::new(64);
    let mut client = attached(&guest, &place.socket());
    let cut = place.cut(32);
    let waiting = guest.touch(40);
    eventually("the stall", || running.metrics.totals().stalls > 0);
    let (drained, mut client) =
        within_patience("the drain", move || (client.drain(|_, _| {}), client));
    assert_eq!(code(drained), RefusedCode::NoContent);
    assert!(waiting.is_undisturbed());
    cut.mend();
    assert!(waiting.join() == content(40));
    // A slow machine may reach the limit again.
    let drained = eventually("a drain", || client.drain(|_, _| {}));
    assert_eq!(drained.present, 64);
}

/// A page that cannot be read neither keeps a drain for ever, nor is the memory said to be complete.
#[test]
fn a_drain_is_refused_if_a_page_cannot_be_read() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let (options, damage) = place.damaged(63);
    let running = Running::start(options);
    let guest = Guest::new(64);
    let mut client = attached(&guest, &place.socket());
    let (drained, mut client) =
        within_patience("the drain", move || (client.drain(|_, _| {}), client));
    assert_eq!(code(drained), RefusedCode::NoContent);
    let health = client.health().unwrap();
    assert_eq!((health.state, health.present), (VmState::Serving, 63));
    eventually("the count", || {
        running.metrics.totals().pages_set_aside == 1
    });
    assert_eq!(running.metrics.totals().stalls, 0);
    // The next one tries again.
    damage.mend();
    assert_eq!(client.drain(|_, _| {}).unwrap().present, 64);
    guest.check(63, &content(63));
    client.goodbye().unwrap();
}

#[test]
fn a_drain_of_memory_without_content_is_refused() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(8);
    let _running = Running::start(Options {
        any_length: true,
        ..place.options()
    });
    let guest = Guest::new(16);
    let mut client = attached(&guest, &place.socket());
    assert_eq!(code(client.drain(|_, _| {})), RefusedCode::NoContent);
    guest.check(7, &content(7));
    let parts = client.hand_over().unwrap();
    let first_pages: Vec<u64> = parts.iter().map(|part| part.first_page).collect();
    assert_eq!(first_pages, [0, 8]);
}

/// An image whose last page cannot be read for a while, and a VM that has touched nothing.
fn without_last_page() -> (Damage, Running, Guest, Client) {
    let place = Place::new(64);
    let guest = Guest::new(64);
    let (options, damage) = place.damaged(63);
    let running = Running::start(options);
    let client = attached(&guest, &place.socket());
    guest.check(0, &content(0));
    (damage, running, guest, client)
}

#[test]
fn a_server_that_ends_tries_again_what_it_could_not_fetch() {
    if !has_userfaultfd() {
        return;
    }
    let (damage, running, guest, _client) = without_last_page();
    running.stopper.stop();
    eventually("the rest was given up", || {
        running.metrics.totals().pages_set_aside > 0
    });
    damage.mend();
    running.wait();
    assert_eq!(guest.resident(), 64);
    (0..64).for_each(|page| assert!(guest.read(page) == content(page), "{page}"));
}

/// Nothing else ends the drain, which lacks a page.
#[test]
fn a_second_signal_ends_the_drain() {
    if !has_userfaultfd() {
        return;
    }
    let (_damage, running, guest, mut client) = without_last_page();
    running.stopper.stop();
    eventually("the rest", || equals(guest.resident(), &63));
    running.stopper.stop();
    let mut notices = Vec::new();
    // Until the connection's end.
    eventually("the end", || match client.notice() {
        Ok(notice) => {
            notices.extend(notice);
            None
        }
        Err(_) => Some(()),
    });
    let [
        Message::GoingAway { within_ms: first },
        Message::GoingAway { within_ms: then },
    ] = notices[..]
    else {
        panic!("{notices:?}");
    };
    assert!(first > 0 && then == 0);
    running.wait();
    (0..63).for_each(|page| assert!(guest.read(page) == content(page), "{page}"));
}

/// Kind: what cannot be done now ends the VM. Here no thread can be started.
#[test]
fn what_needs_a_thread_is_refused_without_one_and_may_be_repeated() {
    let this = "what_needs_a_thread_is_refused_without_one_and_may_be_repeated";
    in_a_process_of_its_own(this, || {
        if !has_userfaultfd() {
            return;
        }
        let place = Place::new(64);
        let running = Running::start(Options {
            clients_record: true,
            ..place.options()
        });
        let guest = Guest::new(64);
        let mut client = attached(&guest, &place.socket());
        client.working_set(WorkingSetAction::Record).unwrap();
        guest.check(40, &content(40));
        let none = NoOtherThread::begin(&[]);
        let drained = client.drain(|_, _| {});
        let replayed = client.working_set(WorkingSetAction::Replay);
        let saved = client.working_set(WorkingSetAction::Save);
        drop(none);
        assert_eq!(code(drained), RefusedCode::Internal);
        assert_eq!(code(replayed), RefusedCode::Internal);
        assert_eq!(code(saved), RefusedCode::Internal);
        guest.check(41, &content(41));
        guest.check(42, &content(42));
        let saved = client.working_set(WorkingSetAction::Save).unwrap();
        assert_eq!(saved, (WorkingSetState::Off, 3), "the recording went on");
        assert_eq!(client.drain(|_, _| {}).unwrap().present, 64);
        client.goodbye().unwrap();
        running.stop();
    });
}
