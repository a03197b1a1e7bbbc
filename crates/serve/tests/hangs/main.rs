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
use rustix::net::SendFlags;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use support::native::*;
use support::*;

use fuse::{Fuse, Hangs};

const DIRECTORY: &str = "PAGETIDE_TEST_HANGS";
const ONE_VM: &str = "PAGETIDE_TEST_ONE_VM";

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
        max_vms_per_user: match std::env::var_os(ONE_VM) {
            Some(_) => 1,
            None => Options::default().max_vms_per_user,
        },
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
        Self::with(&[])
    }

    /// With these variables set.
    fn with(variables: &[&str]) -> Self {
        let place = Place::new(64);
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "server"])
            .env(DIRECTORY, place.directory.path())
            .envs(variables.iter().map(|name| (name, "1")))
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

    /// Stops the process, and does something while no thread of it runs.
    fn while_stopped<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.unwrap(), Signal::STOP).unwrap();
        let (_, status) = waitpid(pid, WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(status.stopped());
        let done = work(self);
        kill_process(pid.unwrap(), Signal::CONT).unwrap();
        done
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
    let Some(mut fuse) = Fuse::mount(Hangs::EachClose) else {
        return;
    };
    for (is_killed, mut serving) in servers {
        let before = fuse.closes();
        let guest = Guest::new(64);
        serving.refuse(&fuse, guest.message().as_bytes());
        eventually("the close", || fuse.closes() > before);
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
    let Some(mut fuse) = Fuse::mount(Hangs::EachClose) else {
        return;
    };
    let message = Guest::new(64).message();
    for closing in 1..=4 {
        serving.refuse(&fuse, message.as_bytes());
        eventually("the close", || fuse.closes() == closing);
    }
    // This one is not even received: it stays with its client, as a VMM's would.
    serving.refuse(&fuse, message.as_bytes());
    let limit = "take 4 messages with descriptors that are no userfaultfds and not closed yet";
    assert!(serving.log().contains(limit), "{}", serving.log());
    assert_eq!(fuse.closes(), 4);
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

/// Kind: a file that nobody has received is closed for the last time by whoever closes the connection. Here the thread that
/// accepts, when it refuses a client, a VM's thread, and the server's end.
#[test]
fn a_file_that_nobody_receives_holds_up_neither_vms_nor_the_servers_end() {
    if !has_userfaultfd() {
        return;
    }
    let _alone = alone();
    let mut serving = Serving::with(&[ONE_VM]);
    let mount = || Fuse::mount(Hangs::LastClose);
    let mounts = [mount(), mount(), mount(), mount()];
    let [
        Some(mut refused),
        Some(mut served),
        Some(mut many),
        Some(mut last),
    ] = mounts
    else {
        return;
    };
    let socket = serving.place.socket();
    let connect = || UnixStream::connect(&socket).unwrap();
    let sends = |fuse: &mut Fuse, stream: &UnixStream| {
        fuse.give_away(|file| send(stream, b"x", &[file.as_fd()]));
    };
    let guest = Guest::new(64);
    let stream = guest.connect(&socket);
    guest.check(0, &content(0));
    // The server finds it in a connection that it refuses.
    let _second = serving.while_stopped(|_| {
        let second = connect();
        sends(&mut refused, &second);
        second
    });
    eventually("the close by refusal", || refused.closes() == 1);
    // After its message: it is not read, and closed with the connection.
    sends(&mut served, &stream);
    guest.check(1, &content(1));
    drop(stream);
    eventually("the close by the VM's end", || served.closes() == 1);
    let next = Guest::new(64);
    let page = next.begin_to_read(3);
    let _stream = eventually("room", || {
        let stream = next.connect(&socket);
        eventually("an answer", || page.is_finished() || is_at_end(&stream));
        page.is_finished().then_some(stream)
    });
    // More than those that are closed at a time.
    let _many = serving.while_stopped(|_| {
        let streams: Vec<UnixStream> = (0..200).map(|_| connect()).collect();
        many.give_away(|file| {
            for stream in &streams {
                send(stream, b"x", &[fuse::opened_again(file).as_fd()]);
            }
        });
        streams
    });
    eventually("the close of the first", || many.closes() == 1);
    next.check(4, &content(4));
    // The server's end finds it in a connection that was not accepted, or was refused at last.
    let _last = serving.while_stopped(|serving| {
        let stream = connect();
        sends(&mut last, &stream);
        drop(serving.child.stdin.take());
        stream
    });
    serving.has_ended();
    for fuse in [&mut refused, &mut served, &mut many, &mut last] {
        fuse.end();
    }
}

/// Kind: what a look at a connection does not show, and the kernel drops when the next byte is read.
#[test]
fn a_file_beside_a_byte_out_of_band_holds_up_nobody_either() {
    if !has_userfaultfd() {
        return;
    }
    let _alone = alone();
    let mut serving = Serving::start();
    let Some(mut fuse) = Fuse::mount(Hangs::LastClose) else {
        return;
    };
    let stream = UnixStream::connect(serving.place.socket()).unwrap();
    fuse.give_away(|file| send_with(&stream, b"!", &[file.as_fd()], SendFlags::OOB).unwrap());
    let _ = try_to_send(&stream, b"{", &[]);
    eventually("the close", || fuse.closes() == 1);
    eventually("the end", || is_at_end(&stream));
    let guest = Guest::new(64);
    let _stream = guest.connect(&serving.place.socket());
    guest.check(1, &content(1));
    drop(serving.child.stdin.take());
    serving.has_ended();
    fuse.end();
}

/// Whether the server has closed its end.
fn is_at_end(stream: &UnixStream) -> bool {
    use std::io::Read;
    stream.set_nonblocking(true).unwrap();
    (&*stream).read(&mut [0]).is_ok_and(|bytes| bytes == 0)
}
