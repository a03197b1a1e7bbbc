//! An image is an object and not a name: each VM gets what its socket's name leads to when it starts, and keeps it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::fs::{self, File, FileTimes};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use pagetide_serve::StartError;
use pagetide_serve::native::client::Client;
use pagetide_serve::native::message::RefusedCode;
use pagetide_sources::{Digest, Location, OpenOptions, open};
use rustix::time::{ClockId, clock_gettime};
use support::native::*;
use support::*;

const PAGES: usize = 64;

/// A time long ago: a write of the same tick of the kernel's clock as the write before it moves no time.
fn set_old(path: &Path) {
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    let file = File::options().write(true).open(path).unwrap();
    file.set_times(FileTimes::new().set_modified(time)).unwrap();
}

/// Waits for the next tick of the kernel's clock: the server looks at a file once in each.
fn wait_for_tick() {
    let now = || clock_gettime(ClockId::MonotonicCoarse).tv_nsec;
    let before = now();
    eventually("a tick", || now() != before);
}

/// The content of another image.
fn other(page: usize) -> Vec<u8> {
    content(page + 5000)
}

fn write_other(path: &Path) {
    let bytes: Vec<u8> = (0..PAGES).flat_map(other).collect();
    fs::write(path, bytes).unwrap();
    set_old(path);
}

fn place() -> Place {
    let place = Place::new(PAGES);
    set_old(&place.image());
    place
}

fn digest(path: &Path) -> Digest {
    let image = open(&Location::Path(path.into()), &OpenOptions::default());
    image.unwrap().digest()
}

/// Connects, and is refused.
fn refused(running: &Running, place: &Place) {
    let before = running.metrics.totals().vms_refused;
    let guest = Guest::new(PAGES);
    let stream = guest.connect(&place.socket());
    wait_for_end(&stream);
    drop(stream);
    let after = || equals(running.metrics.totals().vms_refused, &(before + 1));
    eventually("the refusal", after);
}

#[test]
fn a_vm_gets_the_file_that_has_the_name_when_it_starts_and_keeps_it() {
    if !has_userfaultfd() {
        return;
    }
    let place = place();
    let running = Running::start(place.options());
    let first = Guest::new(PAGES);
    let _first = first.connect(&place.socket());
    first.check(3, &content(3));
    let new = place.directory.path().join("new");
    write_other(&new);
    fs::rename(&new, place.image()).unwrap();
    // Without a word to the server.
    let second = Guest::new(PAGES);
    let _second = second.connect(&place.socket());
    for page in 0..PAGES {
        second.check(page, &other(page));
        first.check(page, &content(page));
    }
    let native = Guest::new(PAGES);
    let client = attached(&native, &place.socket());
    assert_eq!(client.welcome().image, digest(&place.image()));
    native.check(9, &other(9));
    // A name that leads nowhere.
    fs::remove_file(place.image()).unwrap();
    refused(&running, &place);
    let refusal = Client::connect(&place.socket());
    assert_eq!(code(refusal.map(drop)), RefusedCode::NoContent);
    second.discard(1, 1);
    second.check(1, &[0; PAGE]);
}

/// A file that is completed in place, as the base of a diff that is merged into it: what was a hole at the start is no
/// zero page any more.
#[test]
fn a_file_that_is_written_to_stalls_its_vms_and_is_refused_to_new_ones() {
    if !has_userfaultfd() {
        return;
    }
    let place = place();
    let file = File::options().write(true).open(place.image()).unwrap();
    file.set_len(32 * PAGE as u64).unwrap();
    file.set_len(PAGES as u64 * PAGE as u64).unwrap();
    set_old(&place.image());
    let running = Running::start(place.options());
    let guest = Guest::new(PAGES);
    let stream = guest.connect(&place.socket());
    guest.check(40, &[0; PAGE]);
    for page in 32..PAGES {
        file.write_all_at(&content(page), (page * PAGE) as u64)
            .unwrap();
    }
    wait_for_tick();
    refused(&running, &place);
    let waiting = guest.touch(50);
    eventually("the stall", || equals(running.metrics.totals().stalls, &1));
    assert!(waiting.is_undisturbed());
    assert_eq!(guest.residents(), [40]);
    // By the word of whoever reloads the server, the file is complete.
    running.stopper.reload(place.options());
    eventually("the reload", || {
        let client = Client::connect(&place.socket()).ok()?;
        (client.welcome().image == digest(&place.image())).then_some(())
    });
    let new = Guest::new(PAGES);
    let _stream = new.connect(&place.socket());
    for page in 0..PAGES {
        new.check(page, &content(page));
    }
    assert!(waiting.is_undisturbed());
    // At its end the server poisons the page, and SIGBUS would end this process.
    std::mem::forget((guest, running, stream, waiting));
}

#[test]
fn the_image_of_another_vm_is_refused() {
    if !has_userfaultfd() {
        return;
    }
    let place = place();
    let running = Running::start(place.options());
    for (pages, regions) in [
        (32, vec![(0, 32, 0)]),
        (80, vec![(0, 80, 0)]),
        (64, vec![(0, 64, 1)]),
    ] {
        let before = running.metrics.totals().vms_refused;
        let guest = Guest::new(pages);
        let regions: Vec<_> = regions
            .iter()
            .map(|&(first, count, image_page)| guest.region(first, count, image_page))
            .collect();
        let stream = std::os::unix::net::UnixStream::connect(place.socket()).unwrap();
        let message = format!("[{}]", regions.join(","));
        let descriptor = [std::os::fd::AsFd::as_fd(&guest.uffd)];
        send(&stream, message.as_bytes(), &descriptor);
        wait_for_end(&stream);
        drop(stream);
        let after = || equals(running.metrics.totals().vms_refused, &(before + 1));
        eventually("the refusal", after);
    }
    let guest = Guest::new(PAGES);
    let _stream = guest.connect(&place.socket());
    guest.check(63, &content(63));
}

/// A VMM reads the state file and gets the memory: they are of one snapshot, or there is no VM.
#[test]
fn image_and_state_file_are_replaced_together() {
    if !has_userfaultfd() {
        return;
    }
    let place = place();
    let path = |name: &str| place.directory.path().join(name);
    let replace_state = |content: &str| {
        fs::write(path("state.new"), content).unwrap();
        fs::rename(path("state.new"), path("state")).unwrap();
    };
    replace_state("of the first snapshot");
    let mut options = place.options();
    options.bindings[0].state_file = Some(path("state"));
    let running = Running::start(options.clone());
    let served = |wanted: fn(usize) -> Vec<u8>| {
        let guest = Guest::new(PAGES);
        let stream = guest.connect(&place.socket());
        guest.check(7, &wanted(7));
        drop(stream);
    };
    served(content);
    // A change of the image's mode, and another name for it, replace nothing.
    fs::set_permissions(place.image(), fs::Permissions::from_mode(0o640)).unwrap();
    served(content);
    fs::hard_link(place.image(), path("link")).unwrap();
    served(content);
    replace_state("of the second one");
    refused(&running, &place);
    write_other(&path("new"));
    fs::rename(path("new"), place.image()).unwrap();
    served(other);
    // The memory first.
    fs::copy(place.image(), path("new")).unwrap();
    fs::rename(path("new"), place.image()).unwrap();
    refused(&running, &place);
    replace_state("of the third one");
    served(other);
    fs::remove_file(path("state")).unwrap();
    refused(&running, &place);
    running.stop();

    // The state of a VM with more memory than the image has: 1 MiB.
    let magic = 0x0710_1984_8664_0000_u64.to_le_bytes();
    let head = [
        &magic[..],
        &5_u64.to_le_bytes(),
        b"4.0.0",
        &1_u64.to_le_bytes(),
    ]
    .concat();
    fs::write(path("state"), head).unwrap();
    let Err(StartError::Image(error)) = Running::try_start(options).map(drop) else {
        panic!("the state of another VM is accepted");
    };
    assert!(
        error.to_string().contains("1048576 bytes of memory"),
        "{error}"
    );
}

#[test]
fn a_binding_may_name_the_digest_of_its_image() {
    if !has_userfaultfd() {
        return;
    }
    let place = place();
    let with = |digest| {
        let mut options = place.options();
        options.bindings[0].digest = Some(digest);
        options
    };
    let wrong = Running::try_start(with(Digest::of(b"another image")));
    let Err(StartError::Image(error)) = wrong.map(drop) else {
        panic!("another image is served");
    };
    let told = digest(&place.image()).to_string();
    assert!(error.to_string().contains(&told), "{error}");
    assert!(!place.socket().exists());

    let running = Running::start(with(digest(&place.image())));
    let guest = Guest::new(PAGES);
    let _stream = guest.connect(&place.socket());
    guest.check(1, &content(1));
    // New memory, and the state of before: a binding with a digest gets neither half.
    let new = place.directory.path().join("new");
    write_other(&new);
    fs::rename(new, place.image()).unwrap();
    refused(&running, &place);
    guest.check(2, &content(2));
}
