//! The process that keeps VMs: one for each directory, replaced when it dies, and held up by nobody.

use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::sync::Arc;

use pagetide_serve::{Binding, Options, Server, StartError, StateOptions};
use pagetide_sources::Location;
use rustix::fs::SealFlags;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketType, connect, sendmsg, socket, sockopt,
};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::fuse::{Fuse, Hangs};
use super::support::child::Vmm;
use super::support::native::memfd;
use super::support::*;
use super::{DIRECTORY, KILLS, Serving, WAITS, discard, log};

/// A server of this process, whose keeper is another.
fn with_keeper(place: &Place) -> Options {
    let directory = place.directory.path();
    let variable = format!("{DIRECTORY}={}", directory.display());
    let this = std::env::current_exe().unwrap();
    Options {
        state: Some(StateOptions {
            directory: directory.join("state"),
            keeper: [
                "env",
                &variable,
                this.to_str().unwrap(),
                "--exact",
                "keeper",
            ]
            .map(Into::into)
            .to_vec(),
        }),
        ..place.options()
    }
}

/// The process that keeps a place's VMs.
fn keeper_of(place: &Place) -> Pid {
    let path = place.directory.path().join("state/keeper.sock");
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    sockopt::socket_peercred(&socket).unwrap().pid
}

/// Ends a keeper as the kernel does when memory is short.
fn kill(keeper: Pid) {
    kill_process(keeper, Signal::KILL).unwrap();
    wait_for_end_of(keeper);
}

fn wait_for_end_of(keeper: Pid) {
    eventually("its end", || test_kill_process(keeper).is_err());
}

/// A VM of 64 pages, of which one was touched, that a killed server has left.
fn left_by_a_server(place: &Place) -> (Arc<Guest>, UnixStream) {
    let serving = Serving::start(place, false);
    let guest = shared(64);
    let stream = guest.connect(&place.socket());
    guest.check(3, &content(3));
    serving.kill();
    (guest, stream)
}

/// Leaves a VM of a later version with a keeper, as a server of that version does.
fn leave_to_keeper(place: &Place, id: u64, stream: &UnixStream) {
    let path = place.directory.path().join("state/keeper.sock");
    let keeper = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    connect(&keeper, &SocketAddrUnix::new(path).unwrap()).unwrap();
    let file = memfd(1, SealFlags::SHRINK);
    let description = File::from(file.try_clone().unwrap());
    description.set_len(4096).unwrap();
    let text = br#"{"format":99,"socket":"","image":"","digest":"","regions":[]}"#;
    description.write_all_at(&[b' '; 4096], 0).unwrap();
    description.write_all_at(text, 0).unwrap();
    let beside = [
        file.as_fd(),
        stream.as_fd(),
        file.as_fd(),
        description.as_fd(),
    ];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&beside)));
    let text = format!(r#"{{"keep":{{"id":{id}}}}}"#);
    let parts = [IoSlice::new(text.as_bytes())];
    sendmsg(&keeper, &parts, &mut ancillary, SendFlags::empty()).unwrap();
    // What it is sent is not read: only its answer to this says that it holds the VM.
    let mut answer = [0; 256];
    while !answer.starts_with(br#"{"acknowledged""#) {
        assert!(rustix::io::read(&keeper, &mut answer).unwrap() > 0);
    }
}

/// Kind: a start that fails, or a server that never runs, and leaves a thread: the keeper, which has one server at a time,
/// refused all further ones of the process, for good.
#[test]
fn a_server_that_has_not_started_leaves_its_keeper_to_the_next() {
    let place = Place::new(4);
    let options = with_keeper(&place);
    let image = place.directory.path().join("guest.mem");
    let elsewhere = place.directory.path().join("elsewhere");
    for _ in 0..3 {
        std::fs::rename(&image, &elsewhere).unwrap();
        let error = Server::bind(options.clone()).unwrap_err();
        assert!(matches!(error, StartError::Image(_)), "{error:?}");
        std::fs::rename(&elsewhere, &image).unwrap();
        drop(Server::bind(options.clone()).unwrap());
    }
    // The keeper ends: it has neither VMs nor a server.
    let socket = place.directory.path().join("state/keeper.sock");
    eventually("the keeper's end", || !socket.exists());
}

/// Kind: what one VM needs keeps another asleep.
#[test]
fn an_image_that_is_missing_keeps_no_vm_of_another_asleep() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let (guest, stream) = left_by_a_server(&place);
    let mut options = with_keeper(&place);
    let image = place.directory.path().join("late.mem");
    let socket = place.directory.path().join("late.sock");
    let late = Binding::new(&socket, Location::Path(image.clone()));
    options.bindings.insert(0, late);
    let server = Server::bind(options).unwrap();
    assert!(server.has_vms());
    let stopper = server.stopper();
    let running = std::thread::spawn(move || server.run());
    guest.check(40, &content(40));
    // And the other one is served when its image has come.
    std::fs::copy(place.image(), image).unwrap();
    eventually("the other binding", || UnixStream::connect(&socket).is_ok());
    drop(stream);
    stopper.stop();
    running.join().unwrap().unwrap();
}

/// Kind: a file that nobody has received is closed for the last time by whoever closes the connection, here the keeper.
#[test]
fn a_file_that_hangs_holds_up_no_keeper() {
    if !has_userfaultfd() {
        return;
    }
    let Some(mut fuse) = Fuse::mount(Hangs::LastClose) else {
        return;
    };
    let place = Place::new(64);
    let serving = Serving::start(&place, false);
    let [honest, hostile] = [shared(64), shared(64)];
    let _stays = honest.connect(&place.socket());
    honest.check(1, &content(1));
    let leaves = hostile.connect(&place.socket());
    hostile.check(1, &content(1));
    serving.kill();
    fuse.give_away(|file| send(&leaves, b"x", &[file.as_fd()]));
    drop(leaves);
    eventually("the close", || fuse.closes() == 1);
    let asleep = honest.touch(2);
    let serving = Serving::start(&place, false);
    assert!(asleep.join() == content(2));
    // Nor does the child that hangs hold what a keeper locks.
    kill(keeper_of(&place));
    eventually("another keeper", || {
        log(&place).contains("another keeper gets the VMs")
    });
    serving.stop();
    fuse.end();
}

/// Kind: what is there once is made twice. Servers that start at once each start a keeper.
#[test]
fn a_directory_has_one_keeper() {
    let place = Place::new(1);
    let socket = place.directory.path().join("state/keeper.sock");
    std::fs::create_dir(socket.parent().unwrap()).unwrap();
    let keeper = || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "keeper"]);
        command.env(DIRECTORY, place.directory.path());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let inode = || std::fs::metadata(&socket).map(|status| status.ino());
    let mut first = keeper();
    let before = eventually("the keeper", inode);
    let output = keeper().wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let process = format!("process {} has locked", first.id());
    assert!(
        !output.status.success() && said.contains(&process),
        "{said}"
    );
    assert_eq!(inode().unwrap(), before);
    first.kill().unwrap();
    first.wait().unwrap();
    let mut next = keeper();
    eventually("the next keeper", || {
        inode().is_ok_and(|inode| inode != before)
    });
    next.kill().unwrap();
    next.wait().unwrap();
}

/// The same, whole: one serves, and its VMs are found when it has been killed.
#[test]
fn of_two_servers_that_start_at_once_one_serves() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let mut servers = vec![Serving::spawn(&place, &[]), Serving::spawn(&place, &[])];
    let refused = eventually("the end of one", || {
        let mut servers = servers.iter_mut();
        servers.position(|server| server.0.try_wait().unwrap().is_some())
    });
    let status = servers.remove(refused).0.wait().unwrap();
    assert!(!status.success());
    let ready = place.directory.path().join("ready");
    eventually("the other one", || ready.exists());
    let guest = shared(64);
    let _stream = guest.connect(&place.socket());
    guest.check(1, &content(1));
    servers.into_iter().for_each(Serving::kill);
    let asleep = guest.touch(2);
    let serving = Serving::start(&place, false);
    assert!(asleep.join() == content(2));
    serving.stop();
}

/// The kernel kills what takes memory, and people what they do not know. Another keeper gets the VMs of one that has gone.
#[test]
fn a_keeper_that_dies_is_replaced_and_gets_all_vms_again() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let serving = Serving::start(&place, false);
    let (before, after) = (shared(64), shared(64));
    let _before = before.connect(&place.socket());
    before.check(3, &content(3));
    discard(&before, 5, 1);
    kill(keeper_of(&place));
    let _after = after.connect(&place.socket());
    after.check(3, &content(3));
    eventually("another keeper", || {
        log(&place).contains("another keeper gets the VMs")
    });
    assert!(log(&place).contains("the keeper has ended"));
    serving.stop();
    let asleep = [&before, &after].map(|guest| guest.touch(9));
    let serving = Serving::start(&place, false);
    for asleep in asleep {
        assert!(asleep.join() == content(9));
    }
    before.check(5, &[0; PAGE]);
    serving.kill();
    let _serving = Serving::start(&place, false);
    for guest in [before, after] {
        (10..64).for_each(|page| guest.check(page, &content(page)));
    }
}

/// What was sent may not have been received: nothing is left to a keeper that has not said that it holds it.
#[test]
fn a_server_without_a_keeper_that_answers_drains_its_vms() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let guests = [shared(64), shared(64)];
    let serving = Serving::start(&place, false);
    let keeper = keeper_of(&place);
    // It takes what it is sent into the queue of its socket, and no more.
    kill_process(keeper, Signal::STOP).unwrap();
    let streams = guests.each_ref().map(|guest| {
        let stream = guest.connect(&place.socket());
        guest.check(3, &content(3));
        stream
    });
    serving.stop();
    for guest in guests {
        (0..64).for_each(|page| guest.check(page, &content(page)));
    }
    // It may have ended with its parent: the kernel hangs up on a group of processes that is stopped then.
    let _ = kill_process(keeper, Signal::KILL);
    wait_for_end_of(keeper);
    drop(streams);
    // No other can be started.
    let guest = shared(64);
    let serving = Serving::start(&place, false);
    let _stream = guest.connect(&place.socket());
    guest.check(3, &content(3));
    let keeper = keeper_of(&place);
    std::fs::remove_dir_all(place.directory.path().join("state")).unwrap();
    kill(keeper);
    eventually("the error", || {
        log(&place).contains("no other keeper was started")
    });
    serving.stop();
    (0..64).for_each(|page| guest.check(page, &content(page)));
}

/// A description of another version may mean something else: it is left alone, or its VMM ends, as is the policy.
#[test]
fn a_vm_of_another_version_waits_for_its_server_or_is_killed() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let (guest, _stream) = left_by_a_server(&place);
    let other = place.directory.path().join("other.sock");
    let listener = UnixListener::bind(&other).unwrap();
    let mut vmm = Vmm::start("vmm", &other, 8);
    let (stream, _) = listener.accept().unwrap();
    leave_to_keeper(&place, 99, &stream);
    let serving = Serving::start(&place, false);
    guest.check(4, &content(4));
    assert!(log(&place).contains("format 99, not 1"), "{}", log(&place));
    assert!(vmm.is_running());
    serving.kill();
    let _serving = Serving::with(&place, &[KILLS]);
    assert_eq!(vmm.signal(), Some(9));
    guest.check(5, &content(5));
}

/// Kind: what is noted once something has succeeded is missing when it has not yet. A VM whose image is not there now is
/// handed to each keeper like the others.
#[test]
fn a_vm_that_waits_for_its_image_outlives_its_keeper() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let elsewhere = place.directory.path().join("elsewhere");
    let (guest, _stream) = left_by_a_server(&place);
    std::fs::rename(place.image(), &elsewhere).unwrap();
    let serving = Serving::with(&place, &[WAITS]);
    kill(keeper_of(&place));
    eventually("another keeper", || {
        log(&place).contains("another keeper gets the VMs")
    });
    serving.stop();
    std::fs::rename(&elsewhere, place.image()).unwrap();
    let asleep = guest.touch(9);
    let _serving = Serving::start(&place, false);
    assert!(asleep.join() == content(9));
}

/// The same, and its VMM ends: nobody but the server can see that.
#[test]
fn a_vm_that_ends_while_it_waits_for_its_image_is_forgotten() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let (_guest, stream) = left_by_a_server(&place);
    std::fs::remove_file(place.image()).unwrap();
    let serving = Serving::with(&place, &[WAITS]);
    drop(stream);
    eventually("its end", || {
        log(&place).contains("has ended before its image was there")
    });
    // The keeper has no VM any more.
    serving.stop();
    let socket = place.directory.path().join("state/keeper.sock");
    eventually("the keeper's end", || !socket.exists());
}
