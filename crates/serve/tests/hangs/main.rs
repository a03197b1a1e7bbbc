//! What a client can hang hangs nothing else: a file that does not let itself be closed, in place of a userfaultfd.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "../support/mod.rs"]
mod support;

mod fuse;

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pagetide_serve::Options;
use pagetide_serve::native::message::RefusedCode;
use rustix::fs::SealFlags;
use rustix::mm::MapFlags;
use support::native::*;
use support::*;

use fuse::Fuse;

const DIRECTORY: &str = "PAGETIDE_TEST_HANGS";

/// The server's process, when another test has started it. It is stopped by the end of its standard input.
#[test]
fn server() {
    let Some(directory) = std::env::var_os(DIRECTORY).map(PathBuf::from) else {
        return;
    };
    let options = Options {
        bindings: vec![process::binding(&directory)],
        prefetch: false,
        working_set: pagetide_serve::WorkingSetMode::Off,
        stop_limit: NEVER,
        handshake_limit: NEVER,
        porter: porter(),
        ..Options::default()
    };
    process::serve(&directory, options);
    std::process::exit(0);
}

/// A program that is started closes what it does not inherit: while the file is open here, nothing can be started.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Serving {
    child: Child,
    place: Place,
}

impl Serving {
    fn start() -> Self {
        let place = Place::new(64);
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "server"])
            .env(DIRECTORY, place.directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn();
        let ready = place.directory.path().join("ready");
        eventually("the server", || ready.exists());
        Self {
            child: child.unwrap(),
            place,
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.place.directory.path().join("log")).unwrap()
    }

    /// A client that sends a file in place of its userfaultfd, and is let go.
    fn refuse(&self, fuse: &Fuse, message: &[u8]) {
        let stream = UnixStream::connect(self.place.socket()).unwrap();
        send(&stream, message, &[fuse.file().as_fd()]);
        wait_for_end(&stream);
    }

    fn has_ended(&mut self) {
        let child = &mut self.child;
        eventually("the server's end", || child.try_wait().unwrap());
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

#[test]
fn a_file_that_cannot_be_closed_holds_up_neither_vms_nor_the_servers_end() {
    if !has_userfaultfd() {
        return;
    }
    let _alone = alone();
    let servers = [false, true].map(|is_killed| (is_killed, Serving::start()));
    let Some(mut fuse) = Fuse::mount() else {
        return;
    };
    for (is_killed, mut serving) in servers {
        let before = fuse.flushes();
        let guest = Guest::new(64);
        serving.refuse(&fuse, guest.message().as_bytes());
        eventually("the close", || fuse.flushes() > before);
        assert!(
            serving
                .log()
                .contains("/file\": a VMM sends its userfaultfd"),
            "{}",
            serving.log()
        );
        let _stream = guest.connect(&serving.place.socket());
        (0..64).for_each(|page| guest.check(page, &content(page)));
        match is_killed {
            false => drop(serving.child.stdin.take()),
            true => serving.child.kill().unwrap(),
        }
        serving.has_ended();
    }
    fuse.end();
}

/// What the server can use comes through: userfaultfds and memory, also after attach.
#[test]
fn descriptors_of_vmms_come_through_the_porter() {
    if !has_userfaultfd() || !has_minor() {
        return;
    }
    let _alone = alone();
    let serving = Serving::start();
    let socket = serving.place.socket();
    let file = memfd(64, SealFlags::SHRINK);
    let guest = Guest::of_file(file.as_fd(), 64, MapFlags::SHARED);
    let mut client = connect(&socket);
    let attach = attach_of(&guest, vec![region(&guest).minor(1, 0)]);
    let beside = [guest.uffd.as_fd(), file.as_fd()];
    client.attach(&attach, &beside).unwrap();
    guest.check(7, &content(7));
    let back_end = Guest::of_file(file.as_fd(), 64, MapFlags::SHARED);
    let space = client.attach_space(&space_of(&back_end), back_end.uffd.as_fd());
    space.unwrap();
    back_end.check(8, &content(8));
    let pipe = std::io::pipe().unwrap().0;
    let refused = connect(&socket).attach(&attach, &[guest.uffd.as_fd(), pipe.as_fd()]);
    assert_eq!(code(refused), RefusedCode::Descriptors);
    guest.check(9, &content(9));
}

/// Each is a process that does not end.
#[test]
fn files_that_cannot_be_closed_are_counted_until_they_are() {
    if !has_userfaultfd() {
        return;
    }
    let _alone = alone();
    let mut serving = Serving::start();
    let Some(mut fuse) = Fuse::mount() else {
        return;
    };
    let message = Guest::new(64).message();
    for closing in 1..=4 {
        serving.refuse(&fuse, message.as_bytes());
        eventually("the close", || fuse.flushes() == closing);
    }
    // This one is not even received: it stays with its client, as a VMM's would.
    serving.refuse(&fuse, message.as_bytes());
    let limit = "take 4 messages with descriptors that are no userfaultfds and not closed yet";
    assert!(serving.log().contains(limit), "{}", serving.log());
    assert_eq!(fuse.flushes(), 4);
    fuse.end();
    let guest = Guest::new(64);
    let page = guest.begin_to_read(3);
    let _stream = eventually("room", || {
        let stream = guest.connect(&serving.place.socket());
        eventually("an answer", || page.is_finished() || is_at_end(&stream));
        page.is_finished().then_some(stream)
    });
    guest.check(3, &content(3));
    drop(serving.child.stdin.take());
    serving.has_ended();
}

/// Whether the server has closed its end.
fn is_at_end(stream: &UnixStream) -> bool {
    use std::io::Read;
    stream.set_nonblocking(true).unwrap();
    (&*stream).read(&mut [0]).is_ok_and(|bytes| bytes == 0)
}
