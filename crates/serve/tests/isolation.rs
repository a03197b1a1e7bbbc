//! Servers without privileges, VMMs in jails, and VMMs in other pid namespaces.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::fs::{File, Permissions};
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use pagetide_serve::{Binding, OnFailure, Options, Server};
use support::*;

/// The directory of a server in a process of its own.
const DIRECTORY: &str = "PAGETIDE_TEST_DIRECTORY";
const KILLS: &str = "PAGETIDE_TEST_KILLS";
const OWNER: &str = "PAGETIDE_TEST_OWNER";
/// The directory of a jail, and what its VMM does.
const JAIL: &str = "PAGETIDE_TEST_JAIL";

/// A user and a group without any rights.
const NOBODY: u32 = 65534;
/// The user of a jail.
const JAILED: u32 = 54321;

const PAGES: usize = 64;

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("SKIP: changing the user takes root");
    }
    is_root
}

/// A directory that other users can enter.
fn open_place() -> Place {
    let place = Place::new(PAGES);
    open_to_all(place.directory.path(), 0o755);
    open_to_all(&place.image(), 0o644);
    place
}

fn open_to_all(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// The server's process, when another test has started it.
#[test]
fn server() {
    let Some(directory) = std::env::var_os(DIRECTORY).map(PathBuf::from) else {
        return;
    };
    let log = File::create(directory.join("log")).unwrap();
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(log)
        .init();
    let owner = std::env::var(OWNER).ok().map(|uid| uid.parse().unwrap());
    let bound = Server::bind(Options {
        bindings: vec![Binding::new(
            directory.join("guest.sock"),
            pagetide_sources::Location::Path(directory.join("guest.mem")),
        )],
        prefetch: false,
        on_failure: match std::env::var_os(KILLS) {
            Some(_) => OnFailure::Kill,
            None => OnFailure::Stall,
        },
        socket_owner: owner.map(|uid| (uid, uid)),
        socket_mode: 0o666,
        stop_limit: NEVER,
        handshake_limit: NEVER,
        ..Options::default()
    });
    let server = match bound {
        Ok(server) => server,
        Err(error) => {
            tracing::error!(error = &error as &dyn std::error::Error, "not started");
            std::process::exit(7);
        }
    };
    confine_process(&server);
    let stopper = server.stopper();
    // The test closes standard input to stop it.
    std::thread::spawn(move || {
        let _ = std::io::stdin().lines().count();
        stopper.stop();
    });
    std::fs::write(directory.join("ready"), "").unwrap();
    server.run().unwrap();
}

struct Serving {
    child: Child,
    directory: PathBuf,
}

/// The command of a server of `place`; `wrapper` comes before it.
fn serving(place: &Place, wrapper: &[&str]) -> Command {
    let program = std::env::current_exe().unwrap();
    let mut command = match wrapper {
        [] => Command::new(program),
        [first, rest @ ..] => {
            let mut command = Command::new(first);
            command.args(rest).arg(program);
            command
        }
    };
    command
        .args(["--exact", "server"])
        .env(DIRECTORY, place.directory.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    command
}

impl Serving {
    /// `None` if it has not started; prints the reason.
    fn start(place: &Place, mut command: Command) -> Option<Self> {
        let directory = place.directory.path().to_owned();
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                println!("SKIP: the server's process does not start: {error}");
                return None;
            }
        };
        let mut serving = Self { child, directory };
        let ready = serving.directory.join("ready");
        let ended = eventually("the server", || match ready.exists() {
            true => Some(None),
            false => serving.child.try_wait().unwrap().map(Some),
        });
        if let Some(status) = ended {
            println!("SKIP: the server's process has ended: {status}");
            return None;
        }
        Some(serving)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.join("log")).unwrap()
    }

    /// Stops it, and returns its log.
    fn stop(mut self) -> String {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success());
        self.log()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // Its input ends, and with it the server, also in another pid namespace.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

fn as_nobody(place: &Place) -> Command {
    let mut command = serving(place, &[]);
    command.uid(NOBODY).gid(NOBODY);
    command
}

fn belongs_to_nobody(place: &Place) {
    let directory = place.directory.path();
    chown(directory, Some(NOBODY), Some(NOBODY)).unwrap();
}

/// The userfaultfd is the VMM's, and a descriptor that was received serves whoever has it.
#[test]
fn a_server_without_privileges_serves() {
    if !has_userfaultfd() || !is_root() {
        return;
    }
    let place = open_place();
    belongs_to_nobody(&place);
    let Some(serving) = Serving::start(&place, as_nobody(&place)) else {
        return;
    };
    let pid = serving.child.id();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    for line in [
        "Uid:\t65534\t65534\t65534\t65534",
        "CapEff:\t0000000000000000",
    ] {
        assert!(status.contains(line), "{line:?} is not in {status}");
    }
    let guest = shared(PAGES);
    let stream = guest.connect(&place.socket());
    (0..PAGES).for_each(|page| guest.check(page, &content(page)));
    let balloon = std::sync::Arc::clone(&guest);
    within_patience("the balloon", move || balloon.discard(3, 2));
    guest.check(3, &[0; PAGE]);
    drop(stream);
    eventually("the line of the VM's life", || {
        serving.log().contains("VM ended")
    });
    let log = serving.stop();
    assert!(log.contains("uid=0"), "{log}");
}

/// What takes privileges says which.
#[test]
fn a_server_without_privileges_says_what_it_lacks() {
    if !is_root() {
        return;
    }
    let place = open_place();
    belongs_to_nobody(&place);
    let ends = |mut command: Command| -> Option<String> {
        match command.spawn().map(|mut child| child.wait().unwrap()) {
            Ok(status) if status.code() == Some(7) => {
                Some(std::fs::read_to_string(place.directory.path().join("log")).unwrap())
            }
            other => {
                println!("SKIP: the server's process does not run as nobody: {other:?}");
                None
            }
        }
    };
    let mut owned = as_nobody(&place);
    owned.env(OWNER, JAILED.to_string());
    if let Some(log) = ends(owned) {
        assert!(
            log.contains("CAP_CHOWN") && log.contains("54321:54321"),
            "{log}"
        );
        assert!(!place.socket().exists());
    }
    open_to_all(&place.image(), 0o600);
    if let Some(log) = ends(as_nobody(&place)) {
        let image = place.image().display().to_string();
        assert!(
            log.contains(&format!("access to {image} was refused")),
            "{log}"
        );
    }
}

/// A VMM as Firecracker's jailer starts it: its root is the jail, its user has no rights, and the socket is in
/// the jail. Prints the first word of each page that it is told to read.
#[test]
fn jailed() {
    let Some(jail) = std::env::var_os(JAIL) else {
        return;
    };
    // Firecracker opens /dev/userfaultfd, which its jailer has put into the jail.
    let guest = Guest::new(PAGES);
    rustix::process::chroot(&jail).unwrap();
    std::env::set_current_dir("/").unwrap();
    // SAFETY: setgroups reads no list of length 0.
    assert_eq!(unsafe { libc::setgroups(0, std::ptr::null()) }, 0);
    // SAFETY: setgid takes a number.
    assert_eq!(unsafe { libc::setgid(JAILED) }, 0);
    // SAFETY: setuid takes a number.
    assert_eq!(unsafe { libc::setuid(JAILED) }, 0);
    let stream = match UnixStream::connect("/run/pagetide.sock") {
        Ok(stream) => stream,
        Err(error) => {
            println!("\nrefused {error}");
            return;
        }
    };
    send(&stream, guest.message().as_bytes(), &[guest.uffd.as_fd()]);
    for page in 0..PAGES {
        assert!(guest.read(page) == content(page), "page {page}");
    }
    println!("\nall read");
}

/// The status and the output of a VMM in `jail`.
fn run_jailed(jail: &Path) -> (ExitStatus, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "jailed", "--nocapture"])
        .env(JAIL, jail)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut text = String::new();
    child
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    (child.wait().unwrap(), text)
}

#[test]
fn a_vmm_in_a_jail_is_served_by_a_socket_of_its_own() {
    if !has_userfaultfd() || !is_root() {
        return;
    }
    let place = Place::new(PAGES);
    let jail = place.directory.path().join("jail");
    std::fs::create_dir_all(jail.join("run")).unwrap();
    for directory in [place.directory.path(), &jail, &jail.join("run")] {
        open_to_all(directory, 0o755);
    }
    let socket = jail.join("run/pagetide.sock");
    let options = |owner| Options {
        bindings: vec![Binding::new(
            socket.clone(),
            pagetide_sources::Location::Path(place.image()),
        )],
        socket_owner: Some((owner, owner)),
        socket_mode: 0o600,
        ..place.options()
    };
    let running = Running::start(options(JAILED));
    let status = std::fs::metadata(&socket).unwrap();
    assert_eq!(
        (status.uid(), status.gid(), status.mode() & 0o777),
        (JAILED, JAILED, 0o600)
    );
    let (status, text) = run_jailed(&jail);
    if status.signal().is_some() || !status.success() && text.contains("PermissionDenied") {
        println!("SKIP: no chroot here: {text}");
        return;
    }
    assert!(status.success() && text.contains("all read"), "{text}");
    assert_eq!(running.ended(1).vms_refused, 0);
    running.stop();

    // The socket of another jail.
    let running = Running::start(options(JAILED + 1));
    let (_, text) = run_jailed(&jail);
    assert!(text.contains("refused Permission denied"), "{text}");
    assert_eq!(running.metrics.totals().vms_accepted, 0);
    running.stop();
}

/// A VMM whose process the server cannot name, since it is in another pid namespace: it is served, and its
/// line has no pid.
#[test]
fn a_vmm_in_another_pid_namespace_is_served() {
    if !has_userfaultfd() || !is_root() {
        return;
    }
    let place = open_place();
    let wrapper = ["unshare", "--pid", "--fork", "--kill-child"];
    let mut command = serving(&place, &wrapper);
    command.env(KILLS, "1");
    let Some(serving) = Serving::start(&place, command) else {
        return;
    };
    let guest = Guest::new(PAGES);
    let stream = guest.connect(&place.socket());
    (0..PAGES).for_each(|page| guest.check(page, &content(page)));
    drop(stream);
    eventually("the line of the VM's life", || {
        serving.log().contains("VM ended")
    });
    // A VMM whose message makes no sense, and that is to be killed.
    let other = UnixStream::connect(place.socket()).unwrap();
    send(&other, b"{}", &[guest.uffd.as_fd()]);
    wait_for_end(&other);
    eventually("the refusal", || serving.log().contains("VM refused"));
    let log = serving.stop();
    assert!(log.contains("in another pid namespace"), "{log}");
    assert!(log.contains("could not be killed"), "{log}");
    let life = log.lines().find(|line| line.contains("VM ended")).unwrap();
    assert!(!life.contains("pid=") && life.contains("uid=0"), "{life}");
}
