//! What one client, or all clients of one user, cost: others are served.
//!
//! The kind: one client's cost is everybody's.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::fs::Permissions;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use pagetide_serve::{Exporter, MetricsAddress, OnFailure, Options};
use support::child::{Vmm, run_as_child};
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
    let guest = Guest::new(8);
    let (_stream, turned_away) = running.connect_next(|| guest.try_to_connect(&place.socket()));
    guest.check(1, &content(1));
    let above_the_limit = ["{}", ""].map(|sends| start_client(&place, sends));
    refused(3 + turned_away);
    for mut child in above_the_limit.into_iter().chain([below_the_limit]) {
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), None);
        assert!(status.success());
    }
    assert_eq!(running.metrics.totals().vms_killed, 0);
}
