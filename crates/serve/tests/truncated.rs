//! Memory of clients that goes away while the server writes there: the server survives, and others are served.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::Arc;

use pagetide_serve::Options;
use pagetide_serve::native::message::RefusedCode;
use rustix::fs::{FallocateFlags, SealFlags, fallocate, ftruncate};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use support::native::*;
use support::*;

/// 16 MiB: prefetch takes a while.
const PAGES: usize = 4096;

/// Shared memory of a VMM by Firecracker's protocol, and by the native one in MISSING mode: the server never
/// maps it. The kernel copies there, and refuses what is beyond the end of the file.
#[test]
fn memory_that_is_truncated_harms_only_its_own_vm() {
    if !has_userfaultfd() || !has_minor() {
        return;
    }
    let place = Place::new(PAGES);
    let running = Running::start(Options {
        prefetch: true,
        ..place.options()
    });
    for (is_native, vms) in [(false, 2), (true, 4)] {
        let file = memfd(PAGES, SealFlags::empty());
        let guest = Arc::new(Guest::of_file(file.as_fd(), PAGES, MapFlags::SHARED));
        let (mut client, mut stream) = (None, None);
        match is_native {
            true => client = Some(attached(&guest, &place.socket())),
            false => stream = Some(guest.connect(&place.socket())),
        }
        guest.check(0, &content(0));
        // In the middle of the prefetch.
        ftruncate(&file, (PAGES / 2 * PAGE) as u64).unwrap();
        let other = Guest::new(PAGES);
        let other_stream = other.connect(&place.socket());
        for page in (0..PAGES).step_by(97) {
            other.check(page, &content(page));
        }
        for page in (0..PAGES / 2).step_by(97) {
            guest.check(page, &content(page));
        }
        if let Some(client) = &mut client {
            client.health().unwrap();
        }
        drop((client, stream, other_stream));
        running.ended(vms);
    }
    assert_eq!(running.metrics.totals().vms_refused, 0);
    running.stop();
}

/// A file that the server maps (MINOR) is sealed, and then nobody can truncate it. What its owner still can do,
/// punch holes, is no harm: the server writes to a new page.
#[test]
fn a_file_that_the_server_maps_cannot_be_truncated() {
    if !has_userfaultfd() || !has_minor() {
        return;
    }
    let place = Place::new(PAGES);
    let running = Running::start(Options {
        prefetch: true,
        ..place.options()
    });
    let unsealed = memfd(PAGES, SealFlags::GROW);
    let guest = Guest::of_file(unsealed.as_fd(), PAGES, MapFlags::SHARED);
    let attach = attach_of(&guest, vec![region(&guest).minor(1, 0)]);
    let descriptors = [guest.uffd.as_fd(), unsealed.as_fd()];
    let refused = connect(&place.socket()).attach(&attach, &descriptors);
    assert_eq!(code(refused), RefusedCode::NotSealed);

    let file = memfd(PAGES, SealFlags::SHRINK);
    let guest = Guest::of_file(file.as_fd(), PAGES, MapFlags::SHARED);
    let mut client = connect(&place.socket());
    let attach = attach_of(&guest, vec![region(&guest).minor(1, 0)]);
    client
        .attach(&attach, &[guest.uffd.as_fd(), file.as_fd()])
        .unwrap();
    assert!(ftruncate(&file, PAGE as u64).is_err());
    let punch = file.try_clone().unwrap();
    within_patience("the holes", move || {
        for page in (1..PAGES as u64).step_by(64) {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&punch, flags, page * PAGE as u64, PAGE as u64).unwrap();
        }
    });
    for page in (2..PAGES).step_by(64) {
        guest.check(page, &content(page));
    }
    client.goodbye().unwrap();
    running.stop();
}

/// The page of the file that has an error.
const POISONED: usize = 9;
const POISONS: &str = "PAGETIDE_TEST_POISONS";
/// The exit status of a process that cannot simulate an error.
const CANNOT: i32 = 9;

/// A process that simulates an error in a page of the file at its standard input. It may get SIGBUS for that.
#[test]
fn poisoner() {
    if std::env::var_os(POISONS).is_none() {
        return;
    }
    let file = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    // The page is in the file, without the server's content.
    let at = (POISONED * PAGE) as u64;
    fallocate(&file, FallocateFlags::empty(), at, PAGE as u64).unwrap();
    let (access, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: mmap without MAP_FIXED replaces no other mapping.
    let view = unsafe { mmap(std::ptr::null_mut(), PAGE, access, shared, &file, at) }.unwrap();
    // SAFETY: madvise requires memory that is the caller's: the mapping is new, and nothing relies on it.
    let poisoned = unsafe { libc::madvise(view, PAGE, libc::MADV_HWPOISON) };
    if poisoned != 0 {
        let error = std::io::Error::last_os_error();
        println!(
            "\nSKIP: no memory errors can be simulated (root, CONFIG_MEMORY_FAILURE): {error}"
        );
        std::process::exit(CANNOT);
    }
}

/// A page of a client's file that the kernel has taken out of use (an uncorrected memory error): the server's
/// write to it is an error of that VM.
#[test]
fn a_page_with_a_memory_error_harms_only_its_own_vm() {
    if !has_userfaultfd() || !has_minor() {
        return;
    }
    pagetide_kvm::poison::install_sigbus_handler().unwrap();
    let place = Place::new(64);
    let running = Running::start(place.options());
    let file = memfd(64, SealFlags::SHRINK);
    let guest = Guest::of_file(file.as_fd(), 64, MapFlags::SHARED);
    let poisoning = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "poisoner", "--nocapture"])
        .env(POISONS, "1")
        .stdin(Stdio::from(file.try_clone().unwrap()))
        .output()
        .unwrap();
    if poisoning.status.code() == Some(CANNOT) {
        println!("SKIP: no memory errors can be simulated (root, CONFIG_MEMORY_FAILURE)");
        return;
    }
    let mut client = connect(&place.socket());
    let attach = attach_of(&guest, vec![region(&guest).minor(1, 0)]);
    let descriptors = [guest.uffd.as_fd(), file.as_fd()];
    client.attach(&attach, &descriptors).unwrap();
    (0..=8).for_each(|page| guest.check(page, &content(page)));
    // Has the server write to all pages that are missing. The VM lives as long as the client.
    let draining = std::thread::spawn(move || (client.drain(|_, _| {}), client));
    let other = Guest::new(64);
    let _stream = other.connect(&place.socket());
    (0..64).for_each(|page| other.check(page, &content(page)));
    // What this VM has stays; the rest of its memory waits, as when content cannot be read. Which pages the server
    // has written before it met the error depends on where its prefetch began: these are older.
    (0..=8).for_each(|page| guest.check(page, &content(page)));
    // The VM without content keeps the first stop waiting, for no server of these tests gives up by time.
    running.stopper.stop();
    running.stop();
    drop(draining);
}
