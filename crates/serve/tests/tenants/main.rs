//! A hostile tenant and an honest one on one server: all attacks at once, by one user, and nobody else loses anything.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "../support/mod.rs"]
mod support;

#[path = "../hangs/fuse.rs"]
mod fuse;

mod attacks;

use std::fs::{DirEntry, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_serve::{Binding, Options};
use pagetide_sources::Location;
use support::*;

const DIRECTORY: &str = "PAGETIDE_TEST_TENANTS";
const SOCKET: &str = "PAGETIDE_TEST_TENANTS_SOCKET";

/// Beside the socket that both tenants use: the honest one's own.
const OWN_SOCKET: &str = "own.sock";

/// Of an image without content that is as long as that of a real guest.
const LARGE_SOCKET: &str = "large.sock";
const LARGE_PAGES: u64 = 1 << 18;

/// Of each VM.
const PAGES: usize = 64;

/// Rounds of each attack of the short form.
const ROUNDS: u64 = 5;

/// What the server may have: as much as this needs for 64 VMs.
const DESCRIPTORS: u64 = 1200;
const VMS: usize = 64;
const VMS_OF_ONE_USER: usize = 48;

/// Twice what the server has shown: page maps, regions and messages of one user.
const MEMORY_BYTES: u64 = 512 << 20;

/// The server's process, when a test has started it. It is stopped by the end of its standard input.
#[test]
fn server() {
    let Some(directory) = std::env::var_os(DIRECTORY).map(PathBuf::from) else {
        return;
    };
    let limit = rustix::process::Rlimit {
        current: Some(DESCRIPTORS),
        maximum: Some(DESCRIPTORS),
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let binding = process::binding(&directory);
    let own = Binding::new(directory.join(OWN_SOCKET), binding.image.clone());
    let large = directory.join("large.mem");
    let file = std::fs::File::create(&large).unwrap();
    file.set_len(LARGE_PAGES * PAGE as u64).unwrap();
    let large = Binding::new(directory.join(LARGE_SOCKET), Location::Path(large));
    let options = Options {
        bindings: vec![binding, own, large],
        working_set: pagetide_serve::WorkingSetMode::Off,
        prefetch: false,
        socket_mode: 0o666,
        max_vms: VMS,
        max_vms_per_user: VMS_OF_ONE_USER,
        stop_limit: NEVER,
        porter: porter(),
        ..Options::default()
    };
    process::serve(&directory, options);
    std::process::exit(0);
}

/// The hostile tenant's process, when a test has started it.
#[test]
fn attacker() {
    if let Some(socket) = std::env::var_os(SOCKET) {
        attacks::run(Path::new(&socket), ROUNDS);
    }
}

fn start(test: &str, variable: &str, value: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(variable, value)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// The server starts these threads at the first VMM that it refuses, one of each, and keeps them.
const OF_REFUSALS: [&str; 2] = ["pt-refused", "pt-turned-away"];

impl Taken {
    fn serves_no_vm(&self) -> bool {
        let of_a_vm = |name: &String| name.starts_with("pt-vm-");
        !self.threads.iter().any(of_a_vm)
    }

    fn is_no_more_than(&self, before: &Self) -> bool {
        let mut left = before.threads.clone();
        left.extend(OF_REFUSALS.map(str::to_owned));
        let is_there = |name: &String| {
            let at = left.iter().position(|other| other == name);
            at.map(|at| left.swap_remove(at)).is_some()
        };
        self.descriptors <= before.descriptors && self.threads.iter().all(is_there)
    }
}

/// A server, and what it takes.
struct Serving {
    child: Child,
    place: Place,
    begun: Instant,
}

/// What a server has at one moment.
#[derive(Debug, PartialEq, Eq)]
struct Taken {
    descriptors: usize,
    /// Their names, in order.
    threads: Vec<String>,
    memory_bytes: u64,
}

impl Serving {
    fn start() -> Self {
        let place = Place::new(PAGES);
        let directory = place.directory.path();
        std::fs::set_permissions(directory, Permissions::from_mode(0o755)).unwrap();
        let child = start("server", DIRECTORY, directory);
        eventually("the server", || directory.join("ready").exists());
        Self {
            child,
            place,
            begun: Instant::now(),
        }
    }

    fn taken(&self) -> Taken {
        let process = PathBuf::from(format!("/proc/{}", self.child.id()));
        let list = |name: &str| std::fs::read_dir(process.join(name)).unwrap();
        // A thread may end between the list and its name.
        let name = |task: std::io::Result<DirEntry>| {
            let name = std::fs::read_to_string(task.unwrap().path().join("comm")).ok()?;
            Some(name.trim_end().to_owned())
        };
        let mut threads: Vec<String> = list("task").filter_map(name).collect();
        threads.sort_unstable();
        let status = std::fs::read_to_string(process.join("status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        Taken {
            descriptors: list("fd").count(),
            threads,
            memory_bytes: kib.unwrap() * 1024,
        }
    }

    /// Lines of the log on what was refused.
    fn refusals(&self) -> usize {
        let log = std::fs::read_to_string(self.place.directory.path().join("log")).unwrap();
        log.lines().filter(|line| line.contains("refused")).count()
    }

    /// As documented: seven eighths for one user, and the rest for others and for the server itself.
    fn check_bounds(&self) {
        let taken = self.taken();
        assert!(taken.descriptors < 1150, "{taken:?}");
        assert!(taken.threads.len() < 3 * VMS + 32, "{taken:?}");
        assert!(taken.memory_bytes < MEMORY_BYTES, "{taken:?}");
        // A hundred of a user and ten of the server in each 10 s, and as many in the period that has begun.
        let periods = usize::try_from(self.begun.elapsed().as_secs() / 10 + 2).unwrap();
        assert!(self.refusals() <= 120 * periods, "{}", self.refusals());
    }

    /// An honest VM, from its beginning to its end. Returns how long each touch took.
    fn honest_vm(&self, socket: &Path) -> Vec<Duration> {
        let guest = Guest::new(PAGES);
        let _stream = guest.connect(socket);
        let touch = |page| {
            let begun = Instant::now();
            guest.check(page, &content(page));
            begun.elapsed()
        };
        (0..PAGES).map(touch).collect()
    }

    fn own_socket(&self) -> PathBuf {
        self.place.directory.path().join(OWN_SOCKET)
    }

    fn stop(mut self) {
        drop(self.child.stdin.take());
        let child = &mut self.child;
        let ended = eventually("the server's end", || child.try_wait().unwrap());
        assert!(ended.success());
    }
}

/// The hostile tenant.
struct Attacker {
    child: Child,
    lines: Receiver<String>,
    done: usize,
}

impl Attacker {
    fn start(socket: &Path) -> Self {
        let mut child = start("attacker", SOCKET, socket);
        let output = child.stdout.take().unwrap();
        let (send, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        Self {
            child,
            lines,
            done: 0,
        }
    }

    /// Whether each attack has made its rounds.
    fn has_done_all(&mut self) -> Result<(), usize> {
        let lines = self.lines.try_iter();
        self.done += lines.filter(|line| line.starts_with("done ")).count();
        match self.done == attacks::COUNT {
            true => Ok(()),
            false => Err(self.done),
        }
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        // It is not killed: it has a file that cannot be closed before it says so.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Root, since the hostile tenant has another user.
fn may_run() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("SKIP: this process may not become another user");
    }
    is_root && has_userfaultfd()
}

#[test]
fn an_honest_tenant_loses_nothing_beside_a_hostile_one() {
    if !may_run() {
        return;
    }
    let serving = Serving::start();
    let socket = serving.place.socket();
    serving.honest_vm(&socket);
    let taken = |is_wanted: &dyn Fn(&Taken) -> bool| {
        let now = serving.taken();
        match is_wanted(&now) {
            true => Ok(now),
            false => Err(now),
        }
    };
    let idle = eventually("the first VM's end", || taken(&Taken::serves_no_vm));
    let mut attacker = Attacker::start(&socket);
    eventually("all attacks", || {
        serving.honest_vm(&socket);
        serving.check_bounds();
        attacker.has_done_all()
    });
    drop(attacker);
    eventually("what the server had before the attacks", || {
        taken(&|now| now.is_no_more_than(&idle))
    });
    serving.honest_vm(&socket);
    serving.stop();
}

/// Touches of honest VMs at a socket, for so long.
fn touches(serving: &Serving, socket: &Path, time: Duration) -> Vec<Duration> {
    let begun = Instant::now();
    let mut touches = Vec::new();
    while begun.elapsed() < time {
        touches.extend(serving.honest_vm(socket));
        serving.check_bounds();
    }
    touches.sort_unstable();
    touches
}

fn tell(what: &str, touches: &[Duration]) {
    let part = |percent: usize| touches[(touches.len() - 1) * percent / 100];
    let (half, most) = (part(50), part(99));
    println!(
        "{what}: {} touches, p50 {half:?}, p99 {most:?}",
        touches.len()
    );
}

/// The load is the same in all three parts: in the first, the hostile tenant has a server of its own.
#[test]
#[ignore = "a measurement of a minute: cargo test -p pagetide-serve --test tenants -- --ignored --nocapture"]
fn what_an_honest_tenant_waits_beside_a_hostile_one() {
    if !may_run() {
        return;
    }
    let seconds = std::env::var("PAGETIDE_TENANTS_SECONDS");
    let seconds: u64 = seconds.map_or(60, |text| text.parse().unwrap());
    let part = Duration::from_secs(seconds) / 3;
    let [serving, other] = [Serving::start(), Serving::start()];
    let (own, shared) = (serving.own_socket(), serving.place.socket());
    tell("alone", &touches(&serving, &own, Duration::from_secs(2)));
    for (what, attacked, socket) in [
        ("beside the same load, at another server", &other, &own),
        ("beside a hostile tenant of this server", &serving, &own),
        (
            "beside a hostile tenant of the same socket",
            &serving,
            &shared,
        ),
    ] {
        let attacker = Attacker::start(&attacked.place.socket());
        tell(what, &touches(&serving, socket, part));
        println!(
            "{:?}, lines on refusals: {}",
            serving.taken(),
            serving.refusals()
        );
        drop(attacker);
    }
    serving.stop();
    other.stop();
}
