//! A real porter, which lacks something.

use std::io::{Read, Write};
use std::process::id;
use std::sync::MutexGuard;

use pagetide_test_support::{equals, eventually, in_a_process_of_its_own};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};

use super::process::{MOST_CLOSING, MOST_KEPT};
use super::*;
use fuse::{Fuse, Hangs, opened_again};

#[path = "../../tests/hangs/fuse.rs"]
mod fuse;

const PROCESS: &str = concat!(module_path!(), "::process");

/// The porter's process, when another test has started it.
#[test]
fn process() {
    if std::env::args_os().eq(command()) {
        receive_descriptors().unwrap();
        std::process::exit(0);
    }
}

fn command() -> Vec<OsString> {
    let program = std::env::current_exe().unwrap();
    // Without the name of the crate.
    let (_, test) = PROCESS.split_once("::").unwrap();
    vec![program.into(), "--exact".into(), test.into()]
}

/// One at a time, so that each finds its own process.
struct Started {
    _continues: Continues,
    porter: Porter,
    pid: Pid,
    _alone: MutexGuard<'static, ()>,
}

impl Started {
    fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let running = || children(id()).into_iter().find(|&child| is_porter(child));
        eventually("no porter", || running().map_or(Ok(()), Err));
        let stopper = Stopper::new(Duration::ZERO).unwrap();
        let porter = Porter::start(&command(), stopper).unwrap();
        let pid = eventually("the porter's process", running);
        let pid = Pid::from_raw(pid.cast_signed()).unwrap();
        let started = Self {
            _continues: Continues(pid),
            porter,
            pid,
            _alone: alone,
        };
        // It has everything open that it needs.
        assert_eq!(started.receive().unwrap(), 1);
        started
    }

    /// Has a byte received beside a memory file. Returns how many descriptors came.
    fn receive(&self) -> Result<usize, Errno> {
        let (client, server) = UnixStream::pair().unwrap();
        let file = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        wire::send(client.as_fd(), b"x", &[file.as_fd()]).unwrap();
        let brought = self.porter.receive(&server, &mut [0; 16])?;
        assert_eq!(brought.bytes, 1);
        Ok(brought.descriptors.len())
    }

    fn children(&self) -> Vec<u32> {
        children(self.pid.as_raw_nonzero().get().unsigned_abs())
    }
}

/// Also those that have ended, and that nobody has reaped.
fn children(process: u32) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_child = |child: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{child}/status"));
        let parent = format!("\nPPid:\t{process}\n");
        status.is_ok_and(|status| status.contains(&parent))
    };
    numbers.filter(is_child).collect()
}

/// Whether a process has given its memory back, and closes its descriptors now.
fn is_ending(process: &u32) -> bool {
    let words = std::fs::read(format!("/proc/{process}/cmdline"));
    words.is_ok_and(|words| words.is_empty())
}

/// Continues a process that a test has stopped, also one that fails.
struct Continues(Pid);

impl Drop for Continues {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

fn is_porter(process: u32) -> bool {
    let words: Vec<Vec<u8>> = command()
        .iter()
        .map(|word| word.as_bytes().to_vec())
        .collect();
    let running = std::fs::read(format!("/proc/{process}/cmdline"));
    running.is_ok_and(|running| running.strip_suffix(b"\0") == Some(&words.join(&0)))
}

/// Kind: what is optional fails (here, to watch a child), and something is left over for ever.
#[test]
fn a_child_that_cannot_be_watched_is_reaped() {
    let started = Started::new();
    eventually("no child", || equals(started.children(), &vec![]));
    let is_free = |number: &u64| {
        let descriptor = format!("/proc/{}/fd/{number}", started.pid.as_raw_nonzero());
        std::fs::symlink_metadata(descriptor).is_err()
    };
    // For the connection and the answer: nothing is left for a child's pidfd, nor for the file that the child receives.
    let second = (0..).filter(is_free).nth(1);
    let set = |limit| prlimit(Some(started.pid), Resource::Nofile, limit).unwrap();
    let whole = set(Rlimit {
        current: second.map(|number| number + 1),
        maximum: getrlimit(Resource::Nofile).maximum,
    });
    for _ in 0..8 {
        assert_eq!(started.receive().unwrap(), 0);
    }
    set(whole);
    assert_eq!(started.receive().unwrap(), 1);
    eventually("no child", || equals(started.children(), &vec![]));
}

/// Kind: an end that is wanted is taken for a failure. A server that refused to start said, at times, that its porter had ended.
#[test]
fn the_porters_end_with_its_server_is_no_failure() {
    let Started {
        porter,
        pid,
        _continues,
        _alone,
    } = Started::new();
    let is_gone = Arc::clone(&porter.is_gone);
    // It cannot end yet, and nobody can have seen it.
    kill_process(pid, Signal::STOP).unwrap();
    drop(porter);
    assert!(is_gone.load(Ordering::Relaxed));
}

/// Kind: no room, and something is lost. Here, in the socket by which the porter is given what it is to close.
#[test]
fn sockets_that_the_porter_cannot_take_now_are_closed_later() {
    let started = Started::new();
    // Room for few.
    sockopt::set_socket_send_buffer_size(&started.porter.closings, 4096).unwrap();
    kill_process(started.pid, Signal::STOP).unwrap();
    let mut clients = Vec::new();
    while started.porter.not_taken.lock().unwrap().is_empty() {
        let (mut client, server) = UnixStream::pair().unwrap();
        client.write_all(b"x").unwrap();
        started.porter.close(server.into());
        clients.push(client);
        assert!(clients.len() < 600, "the room has no end");
    }
    kill_process(started.pid, Signal::CONT).unwrap();
    let is_at_end = |mut client: UnixStream| {
        // A reset: what the client has sent was not read.
        let _ = client.read(&mut [0]);
    };
    let last = clients.pop().unwrap();
    clients.into_iter().for_each(is_at_end);
    let (_client, server) = UnixStream::pair().unwrap();
    started.porter.close(server.into());
    is_at_end(last);
    assert!(started.porter.not_taken.lock().unwrap().is_empty());
}

/// Kind: what waits for something that may hang, and is not looked at again when that has ended.
#[test]
fn connections_that_are_kept_open_are_closed_when_others_hang_no_more() {
    in_a_process_of_its_own(
        "porter::tests::connections_that_are_kept_open_are_closed_when_others_hang_no_more",
        keep_open_and_close,
    );
}

/// In a process of its own, since a program that another test started would inherit the file, close it, and hang.
fn keep_open_and_close() {
    let started = Started::new();
    let hanging = || (0..MOST_CLOSING).map(|_| UnixStream::pair().unwrap());
    // Before the mount: where this test fails, those that are left are closed after it, and do not hang.
    let (mut clients, mut servers): (Vec<_>, Vec<_>) = hanging().unzip();
    let Some(mut fuse) = Fuse::mount(Hangs::LastClose) else {
        return;
    };
    let has_children = |count| eventually("children", || equals(started.children().len(), &count));
    has_children(0);
    fuse.give_away(|file| {
        for client in &clients {
            let file = opened_again(file);
            wire::send(client.as_fd(), b"x", &[file.as_fd()]).unwrap();
        }
    });
    while let Some(server) = servers.pop() {
        started.porter.close(server.into());
        let count = MOST_CLOSING - servers.len();
        // Until then the child takes the next one, too.
        eventually("a child that hangs in its end", || {
            let ending = started.children().into_iter().filter(is_ending);
            equals(ending.count(), &count)
        });
    }
    // One child keeps so many, and another the next.
    for count in 1..=MOST_KEPT + 1 {
        let (client, server) = UnixStream::pair().unwrap();
        started.porter.close(server.into());
        clients.push(client);
        has_children(MOST_CLOSING + count.div_ceil(MOST_KEPT));
    }
    fuse.end();
    for mut client in clients {
        client.set_nonblocking(true).unwrap();
        eventually("the end", || match client.read(&mut [0]) {
            Ok(0) => Ok(()),
            // What the client has sent was not read.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(()),
            read => Err(format!("{read:?}")),
        });
    }
    has_children(0);
}

/// Kind: a descriptor that tells of one process' end, and that another one has inherited.
#[test]
fn the_end_of_one_child_is_seen_while_another_hangs() {
    in_a_process_of_its_own(
        "porter::tests::the_end_of_one_child_is_seen_while_another_hangs",
        let_two_hang,
    );
}

fn let_two_hang() {
    let started = Started::new();
    let mounts = [(); 2].map(|()| Fuse::mount(Hangs::EachClose));
    let [Some(mut first), Some(mut second)] = mounts else {
        return;
    };
    let brought = |fuse: &Fuse| {
        let (client, server) = UnixStream::pair().unwrap();
        wire::send(client.as_fd(), b"x", &[fuse.file().as_fd()]).unwrap();
        started.porter.receive(&server, &mut [0; 16]).unwrap()
    };
    let closings = [&first, &second].map(|fuse| brought(fuse).closing);
    eventually("both closes", || {
        equals([first.closes(), second.closes()], &[1, 1])
    });
    let is_at_end = |closing: &OwnedFd| {
        let mut polled = [PollFd::new(closing, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec::default())) == Ok(1)
    };
    first.end();
    eventually("the first one's end", || {
        equals(closings.each_ref().map(is_at_end), &[true, false])
    });
    second.end();
    eventually("the second one's end", || {
        equals(closings.each_ref().map(is_at_end), &[true, true])
    });
}
