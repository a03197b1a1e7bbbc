//! VMMs that die, content that fails, and servers that end: nobody reads zeroes, and others go on.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use pagetide_serve::{OnFailure, Options};
use pagetide_test_support::{NoDescriptor, in_a_process_of_its_own};
use support::child::{Vmm, run_as_child};
use support::native::attached;
use support::*;

const SIGBUS: i32 = 7;
const SIGKILL: i32 = 9;

fn first_word(page: usize) -> u64 {
    u64::from_le_bytes(content(page)[..8].try_into().unwrap())
}

/// The VMM's process, when it was started by another test.
#[test]
fn vmm() {
    run_as_child();
}

#[test]
fn a_vmm_that_is_killed_does_not_disturb_others() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(256);
    let running = Running::start(Options {
        prefetch: true,
        ..place.options()
    });
    let mut survivor = Vmm::start("vmm", &place.socket(), 256);
    for round in 0..8 {
        let mut vmm = Vmm::start("vmm", &place.socket(), 256);
        if round % 2 == 0 {
            assert_eq!(vmm.read(round), first_word(round));
        }
        vmm.kill();
    }
    eventually("the VMs' end", || {
        let totals = running.metrics.totals();
        equals((totals.vms_ended + totals.vms_refused, totals.vms), &(8, 1))
    });
    assert_eq!(survivor.read(255), first_word(255));
    assert!(survivor.is_running());
}

/// With `OnFailure::Kill`, a VMM that needs content which does not exist is killed.
#[test]
fn a_vmm_without_content_is_killed_if_that_is_the_policy() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(8);
    let running = Running::start(Options {
        on_failure: OnFailure::Kill,
        any_length: true,
        ..place.options()
    });
    let mut vmm = Vmm::start("vmm", &place.socket(), 16);
    assert_eq!(vmm.read(7), first_word(7));
    vmm.begin_to_read(8);
    assert_eq!(vmm.signal(), Some(SIGKILL));
    eventually("the count", || {
        equals(running.metrics.totals().vms_killed, &1)
    });
}

/// Kind: a moment's bad luck counts as a failure. While a process changes its address space, the kernel installs nothing there:
/// here for as long as a fork waits for a descriptor.
#[test]
fn memory_that_takes_nothing_for_a_while_kills_nobody() {
    let this = "memory_that_takes_nothing_for_a_while_kills_nobody";
    in_a_process_of_its_own(this, || {
        if !has_userfaultfd() {
            return;
        }
        let place = Place::new(16);
        let running = Running::start(Options {
            on_failure: OnFailure::Kill,
            ..place.options()
        });
        let guest = Guest::that_forks(16);
        let mut client = attached(&guest, &place.socket());
        guest.check(1, &content(1));
        let (go, goes) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        let forking = thread::spawn(move || {
            tell.send(rustix::thread::gettid()).unwrap();
            goes.recv().unwrap();
            fork()
        });
        // Open before there is no descriptor any more.
        let call = format!("/proc/self/task/{}/syscall", told.recv().unwrap());
        let call = std::fs::File::open(call).unwrap();
        let none = NoDescriptor::begin();
        go.send(()).unwrap();
        let forks = format!("{} ", libc::SYS_clone);
        eventually("the thread is in its fork", || {
            let mut text = [0; 4];
            call.read_exact_at(&mut text, 0).unwrap();
            forks.as_bytes().starts_with(&text[..forks.len()])
        });
        let reading = guest.begin_to_read(5);
        eventually("the server has tried in vain", || {
            client.health().unwrap().faults > 1
        });
        let totals = running.metrics.totals();
        drop(none);
        assert_eq!((totals.stalls, totals.vms_killed), (0, 0));
        assert!(within_patience("the page", || reading.join()).unwrap() == content(5));
        let child = within_patience("the fork", || forking.join()).unwrap();
        // SAFETY: asks for no status.
        let ended = unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        assert_eq!(ended, child);
        let totals = running.metrics.totals();
        assert_eq!((totals.stalls, totals.vms_killed), (0, 0));
    });
}

/// A child that ends at once. Not libc's fork, which holds the allocator's lock that the server in this process needs.
fn fork() -> i32 {
    let signal = i64::from(libc::SIGCHLD);
    // SAFETY: without a stack or flags, clone is fork.
    let child = unsafe { libc::syscall(libc::SYS_clone, signal, 0_u64, 0_u64, 0_u64, 0_u64) };
    if child == 0 {
        // SAFETY: async-signal-safe.
        unsafe { libc::_exit(0) };
    }
    i32::try_from(child).unwrap()
}

/// A VMM for which there is no room has no server, and so no content.
#[test]
fn a_vmm_above_the_limit_is_killed_if_that_is_the_policy() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(8);
    let running = Running::start(Options {
        on_failure: OnFailure::Kill,
        max_vms: 1,
        ..place.options()
    });
    let mut first = Vmm::start("vmm", &place.socket(), 8);
    assert_eq!(first.read(1), first_word(1));
    let mut second = Vmm::spawn("vmm", &place.socket(), 8);
    assert_eq!(second.signal(), Some(SIGKILL));
    eventually("the counts", || {
        let totals = running.metrics.totals();
        equals((totals.vms_refused, totals.vms_killed), &(1, 1))
    });
    assert_eq!(first.read(2), first_word(2));
}

/// A page that cannot be read kills no VMM that does not need it, and keeps no other page away.
#[test]
fn a_bad_page_that_only_prefetch_meets_kills_nobody() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(1024);
    let (options, _damage) = place.damaged(1023);
    let running = Running::start(Options {
        prefetch: true,
        on_failure: OnFailure::Kill,
        ..options
    });
    let mut vmm = Vmm::start("vmm", &place.socket(), 1024);
    eventually("the end of prefetch", || {
        equals(running.metrics.totals().pages_set_aside, &1)
    });
    assert!(vmm.is_running());
    for page in [0, 500, 1022] {
        assert_eq!(vmm.read(page), first_word(page));
    }
    let totals = running.metrics.totals();
    assert_eq!((totals.stalls, totals.vms_killed), (0, 0));
    vmm.begin_to_read(1023);
    assert_eq!(vmm.signal(), Some(SIGKILL));
    assert_eq!(running.metrics.totals().stalls, 1);
}

/// With `OnFailure::Stall`, it waits; when the server ends, it gets SIGBUS instead of zeroes. Where pages cannot be marked,
/// the server kills it.
#[test]
fn a_vmm_without_content_waits_and_never_reads_zeroes() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(8);
    let running = Running::start(Options {
        any_length: true,
        ..place.options()
    });
    let mut vmm = Vmm::start("vmm", &place.socket(), 16);
    vmm.begin_to_read(8);
    let metrics = running.metrics.clone();
    eventually("the stall", || equals(metrics.totals().stalls, &1));
    eventually("the gauge", || equals(metrics.totals().stalled_regions, &1));
    let (reader, sleeps) = vmm.asleep();
    // A drain, which fetches whatever there is, comes later.
    running.stopper.stop();
    eventually("the drain", || equals(metrics.totals().pages_ahead, &8));
    assert!(reader.has_slept_since(sleeps));
    assert!(vmm.is_running() && vmm.is_silent());
    running.stop();
    let signal = if has_poison() { SIGBUS } else { SIGKILL };
    assert_eq!(vmm.signal(), Some(signal));
    let after = metrics.totals();
    let left = [
        after.stalled_regions,
        after.waiting_requests,
        after.in_flight_bytes,
        after.vms,
    ];
    assert_eq!(left, [0; 4]);
}

/// A server that ends without the content of all pages leaves a guest whose balloon needs no reader, and whose
/// discarded pages read as zeroes.
#[test]
fn a_balloon_outlives_a_server_that_lacks_content() {
    if !has_userfaultfd() {
        return;
    }
    if !has_poison() {
        println!("SKIP: without UFFDIO_POISON such a server kills its VMMs when it ends");
        return;
    }
    let place = Place::new(8);
    let running = Running::start(Options {
        any_length: true,
        ..place.options()
    });
    let mut vmm = Vmm::start("vmm", &place.socket(), 16);
    assert_eq!(vmm.read(1), first_word(1));
    vmm.discard(2);
    running.stopper.stop();
    // All other pages of the image.
    eventually("the drain", || {
        equals(running.metrics.totals().pages_ahead, &6)
    });
    running.stop();
    assert_eq!(vmm.read(2), 0);
    vmm.discard(1);
    assert_eq!(vmm.read(1), 0);
    assert_eq!(vmm.read(7), first_word(7));
    vmm.begin_to_read(8);
    assert_eq!(vmm.signal(), Some(SIGBUS));
}

/// An image that was truncated while it is served: what was read is right, and the rest fails.
#[test]
fn a_truncated_image_stalls_its_vm_until_it_is_whole_again() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let running = Running::start(place.options());
    let mut vmm = Vmm::start("vmm", &place.socket(), 64);
    assert_eq!(vmm.read(1), first_word(1));
    let cut = place.cut(32);
    vmm.begin_to_read(32);
    eventually("the stall", || equals(running.metrics.totals().stalls, &1));
    let (reader, sleeps) = vmm.asleep();
    assert!(reader.has_slept_since(sleeps) && vmm.is_silent());
    cut.mend();
    assert_eq!(vmm.has_read(), Some(first_word(32)));
}

/// A server that ends drains its guests: what they had not touched is there afterwards.
#[test]
fn a_vmm_outlives_its_server() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(4096);
    let running = Running::start(place.options());
    let mut vmm = Vmm::start("vmm", &place.socket(), 4096);
    assert_eq!(vmm.read(4000), first_word(4000));
    running.stop();
    for page in [0, 17, 4095] {
        assert_eq!(vmm.read(page), first_word(page));
    }
}

/// The handshake limit counts from the connection, however slowly bytes come.
#[test]
fn a_client_that_sends_byte_by_byte_is_refused_in_time() {
    let place = Place::new(1);
    let running = Running::start(Options {
        // The limit that this test reaches.
        handshake_limit: Duration::from_millis(300),
        ..place.options()
    });
    let stream = std::os::unix::net::UnixStream::connect(place.socket()).unwrap();
    let sender = stream.try_clone().unwrap();
    let sending = thread::spawn(move || {
        // Until the server has closed its end.
        while std::io::Write::write_all(&mut &sender, b" ").is_ok() {
            // So often that a limit which counts from the last byte is never reached.
            thread::sleep(Duration::from_millis(10));
        }
    });
    wait_for_end(&stream);
    assert_eq!(running.metrics.totals().vms_refused, 1);
    drop(stream);
    drop(running);
    within_patience("the sender", move || sending.join().unwrap());
}
