//! What one client, or all clients of one user, cost: others are served.
//!
//! The kind: one client's cost is everybody's.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::fs::Permissions;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use pagetide_serve::native::client::ClientError;
use pagetide_serve::native::message::{PageMapPart, RefusedCode};
use pagetide_serve::{Exporter, MetricsAddress, OnFailure, Options, UserLimits};
use pagetide_test_support::{NoOtherThread, in_a_process_of_its_own};
use support::child::{Vmm, run_as_child};
use support::native::{attach_of, code, connect, region};
use support::*;

const SOCKET: &str = "PAGETIDE_TEST_CLIENT";
const SENDS: &str = "PAGETIDE_TEST_SENDS";
const OTHER_USER: u32 = 65_534;

#[test]
fn a_refused_client_that_stays_connected_takes_no_room() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(8);
    let running = Running::start(Options {
        max_vms: 2,
        ..place.options()
    });
    let refused = |_| {
        // While there is no room, a connection is closed at once.
        let (stream, _) = running.connect_next(|| {
            let mut stream = UnixStream::connect(place.socket()).unwrap();
            let _ = stream.write_all(b"{}");
            stream
        });
        wait_for_end(&stream);
        stream
    };
    let _stay: Vec<UnixStream> = (0..32).map(refused).collect();
    let guest = Guest::new(8);
    let (_stream, _) = running.connect_next(|| guest.try_to_connect(&place.socket()));
    guest.check(5, &content(5));
}

/// Kind: a VM that no count has.
#[test]
fn a_vm_without_a_thread_counts_as_refused() {
    in_a_process_of_its_own("a_vm_without_a_thread_counts_as_refused", || {
        let place = Place::new(8);
        let running = Running::start(place.options());
        let none = NoOtherThread::begin(&[]);
        // The first one is counted before the second one is accepted.
        for _ in 0..2 {
            wait_for_end(&UnixStream::connect(place.socket()).unwrap());
        }
        let refused = running.metrics.totals().vms_refused;
        drop(none);
        assert!(refused >= 1, "{refused}");
        running.stop();
    });
}

/// The same for VMMs whose userfaultfd has to stay open: they take no room of a VM.
#[test]
fn a_refused_vmm_that_stays_connected_takes_no_room() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(8);
    let running = Running::start(Options {
        max_vms: 2,
        ..place.options()
    });
    let guests: Vec<Guest> = (0..16).map(|_| Guest::new(4)).collect();
    let refused = |guest: &Guest| {
        let (stream, _) = running.connect_next(|| guest.try_to_connect(&place.socket()));
        wait_for_end(&stream);
        stream
    };
    let stay: Vec<UnixStream> = guests.iter().map(refused).collect();
    let asleep = guests[0].touch(1);
    let guest = Guest::new(8);
    let (_stream, _) = running.connect_next(|| guest.try_to_connect(&place.socket()));
    guest.check(5, &content(5));
    assert!(
        asleep.is_undisturbed(),
        "a refused VMM's memory has content"
    );
    drop(stay);
    running.stop();
    // Nobody serves it.
    std::mem::forget(asleep);
}

/// Two VMs of this user fit, whatever they are made of.
fn limited(place: &Place, limits: UserLimits) -> Running {
    Running::start(Options {
        user_limits: Some(limits),
        ..place.options()
    })
}

#[test]
fn what_a_users_vms_cost_is_limited_and_free_again_when_they_have_gone() {
    if !has_userfaultfd() {
        return;
    }
    let none = UserLimits::default();
    for limits in [
        UserLimits { pages: 16, ..none },
        UserLimits { regions: 2, ..none },
        // A VM takes 15, and there must be room for 16 while a message is received.
        UserLimits {
            descriptors: 40,
            ..none
        },
        UserLimits { threads: 7, ..none },
    ] {
        let place = Place::new(8);
        let running = limited(&place, limits);
        let guests: Vec<Guest> = (0..3).map(|_| Guest::new(8)).collect();
        let first = guests[0].connect(&place.socket());
        guests[0].check(1, &content(1));
        let second = guests[1].connect(&place.socket());
        guests[1].check(1, &content(1));
        let third = guests[2].connect(&place.socket());
        wait_for_end(&third);
        assert_eq!(running.metrics.totals().vms_refused, 1, "{limits:?}");
        guests[0].check(2, &content(2));
        drop((first, third));
        eventually("its end", || running.metrics.totals().vms_ended == 1);
        let guest = Guest::new(8);
        let _stream = eventually("room", || {
            let stream = guest.try_to_connect(&place.socket());
            let vms = || running.metrics.totals();
            eventually("an answer", || {
                let totals = vms();
                totals.vms == 2 || has_ended(&stream)
            });
            (vms().vms == 2).then_some(stream)
        });
        guest.check(3, &content(3));
        drop(second);
    }
}

/// Whether the server has closed its end.
fn has_ended(stream: &UnixStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let ended = (&*stream).read(&mut [0]).is_ok_and(|bytes| bytes == 0);
    stream.set_nonblocking(false).unwrap();
    ended
}

/// The files of shared images that this process holds.
fn shared_images() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    let names = links.filter_map(|link| std::fs::read_link(link.ok()?.path()).ok());
    names
        .filter(|name| name.to_string_lossy().contains("pagetide-image"))
        .count()
}

/// Each answer holds a descriptor until it is read.
#[test]
fn a_client_that_reads_no_answer_holds_few_descriptors() {
    let place = Place::new(8);
    let _running = Running::start(place.options());
    let mut client = connect(&place.socket());
    let files: Vec<_> = (0..16).map(|_| client.share().unwrap()).collect();
    let refused = client.share().map(drop);
    assert_eq!(code(refused), RefusedCode::Descriptors);
    // The server's own are closed with the client that it has refused, and the kernel's socket holds none.
    eventually("what was refused", || equals(shared_images(), &files.len()));
}

/// Connections of another user, which say nothing.
fn connections_of_another_user(place: &Place, count: usize) -> Option<Vec<UnixStream>> {
    let socket = place.socket();
    let connect = move || {
        let uid = libc::c_long::from(OTHER_USER);
        // SAFETY: setresuid takes three numbers. The system call, and not the C library's function, changes this
        // thread alone.
        if unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) } != 0 {
            return None;
        }
        let connect = |_| UnixStream::connect(&socket).unwrap();
        Some((0..count).map(connect).collect())
    };
    std::thread::spawn(connect).join().unwrap()
}

#[test]
fn a_user_that_takes_all_it_can_leaves_room_for_others() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(8);
    std::fs::set_permissions(place.directory.path(), Permissions::from_mode(0o755)).unwrap();
    let running = Running::start(Options {
        max_vms: 16,
        max_vms_per_user: 14,
        socket_mode: 0o666,
        handshake_limit: NEVER,
        ..place.options()
    });
    let Some(_taken) = connections_of_another_user(&place, 20) else {
        println!("SKIP: this process may not become another user");
        return;
    };
    eventually("the limit", || {
        let totals = running.metrics.totals();
        equals((totals.vms_accepted, totals.vms_refused), &(14, 6))
    });
    let guest = Guest::new(8);
    let _stream = guest.connect(&place.socket());
    guest.check(5, &content(5));
}

/// The answer to a request, without its headers.
fn get(at: std::net::SocketAddr, path: &str) -> (String, String) {
    let mut stream = std::net::TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap();
    (status.to_owned(), body.to_owned())
}

/// Whoever places VMs hears it before they are refused.
#[test]
fn a_server_says_whether_it_takes_further_vms() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(8);
    let running = Running::start(Options {
        any_length: true,
        max_vms: 1,
        stop_limit: NEVER,
        ..place.options()
    });
    let address: MetricsAddress = "127.0.0.1:0".parse().unwrap();
    let exporter = Exporter::start(&address, running.metrics.clone()).unwrap();
    let at = exporter.address().unwrap();
    let is = |path: &str, status: &str, body: &str| {
        eventually(&format!("{path} is {body:?}"), || {
            equals(get(at, path), &(status.to_owned(), body.to_owned()))
        });
    };
    is("/ready", "200", "ready\n");
    is("/health", "200", "ok\n");
    // Its second half has no content.
    let mut vmm = Vmm::start("vmm", &place.socket(), 16);
    let full = "no room for another VM: --max-vms is 1\n";
    is("/ready", "503", full);
    assert!(get(at, "/metrics").1.contains("\npagetide_ready 0\n"));
    vmm.begin_to_read(12);
    let stalled = "guests wait, stalled regions: 1\n";
    is("/health", "200", &format!("ok\n{full}{stalled}"));
    vmm.kill();
    is("/ready", "200", "ready\n");
    assert!(get(at, "/metrics").1.contains("\npagetide_ready 1\n"));
    let mut next = Vmm::start("vmm", &place.socket(), 16);
    // It is served: a client that is not yet would be refused by a server that ends.
    next.read(3);
    running.stopper.stop();
    is("/ready", "503", &format!("the server ends\n{full}"));
    running.stopper.stop();
}

/// The VMM's process, when it was started by another test.
#[test]
fn vmm() {
    run_as_child();
}

/// A client in a process of its own, when another test has started it.
#[test]
fn client() {
    let Some(socket) = std::env::var_os(SOCKET).map(PathBuf::from) else {
        return;
    };
    let mut stream = UnixStream::connect(socket).unwrap();
    // It may have been let go already.
    let _ = stream.write_all(std::env::var(SENDS).unwrap().as_bytes());
    // Until it is let go. A policy that kills would have done so before.
    let _ = stream.read_to_end(&mut Vec::new());
    std::process::exit(0);
}

fn start_client(place: &Place, sends: &str) -> Child {
    let program = std::env::current_exe().unwrap();
    let child = Command::new(program)
        .args(["--exact", "client", "--nocapture"])
        .env(SOCKET, place.socket())
        .env(SENDS, sends)
        .stdout(Stdio::null())
        .spawn();
    child.unwrap()
}

/// A program that looks whether somebody listens, a second server for the socket, a scanner.
#[test]
fn a_client_that_sends_no_userfaultfd_is_never_killed() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(8);
    let running = Running::start(Options {
        on_failure: OnFailure::Kill,
        max_vms: 1,
        ..place.options()
    });
    let refused = |number| {
        eventually("the refusal", || {
            equals(running.metrics.totals().vms_refused, &number)
        });
    };
    let below_the_limit = start_client(&place, "{}");
    refused(1);
    // It says nothing: a VMM of this process that came too early would be killed.
    let silent = || UnixStream::connect(place.socket()).unwrap();
    let (_stream, turned_away) = running.connect_next(silent);
    let above_the_limit = ["{}", ""].map(|sends| start_client(&place, sends));
    refused(3 + turned_away);
    for mut child in above_the_limit.into_iter().chain([below_the_limit]) {
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), None);
        assert!(status.success());
    }
    assert_eq!(running.metrics.totals().vms_killed, 0);
}

fn is_over_budget(refused: Result<(), ClientError>) {
    let text = refused.as_ref().unwrap_err().to_string();
    assert!(text.contains("bytes of messages and page maps"), "{text}");
    assert_eq!(code(refused), RefusedCode::Internal);
}

/// What clients have sent, and are not served for yet, is charged to their user.
#[test]
fn what_is_held_of_messages_is_bounded() {
    const PART: usize = 200 << 10;
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(16);
    let limits = UserLimits {
        bytes: 1 << 20,
        ..UserLimits::default()
    };
    let _running = limited(&place, limits);
    let send = || {
        let mut client = connect(&place.socket());
        let part = PageMapPart {
            region: 0,
            first_page: 0,
            bytes: vec![0; PART],
        };
        // An answer says that what was sent before has been taken.
        let taken = client.resume_from(&[part]).and_then(|()| client.share());
        taken.map(|_| client)
    };
    let mut holding: Vec<_> = (0..4).map(|_| send().unwrap()).collect();
    let refused = send().map(drop);
    is_over_budget(refused);
    // Room comes back with the end of a client. To decode a map takes more than it has.
    holding.clear();
    let mut client = eventually("room", send);
    let guest = Guest::new(16);
    let attach = attach_of(&guest, vec![region(&guest)]);
    let refused = client.attach(&attach, &[guest.uffd.as_fd()]).map(drop);
    is_over_budget(refused);
}
