//! The servers' and the keeper's processes, and what a process holds.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use pagetide_serve::{Binding, Options, Server, StateOptions, WorkingSetMode, keep};
use pagetide_sources::{Location, ObjectOptions, OpenOptions};
use pagetide_test_support::eventually;

use crate::place::Place;
use crate::vmms::Socket;
use crate::{KEPT_BYTES, NEVER};

const DIRECTORY: &str = "PAGETIDE_STRESS_DIRECTORY";
const SERVER: &str = "PAGETIDE_STRESS_SERVER";
const STORE: &str = "PAGETIDE_STRESS_STORE";
const PREFETCH: &str = "PAGETIDE_STRESS_PREFETCH";

fn directory() -> Option<PathBuf> {
    std::env::var_os(DIRECTORY).map(PathBuf::from)
}

/// The keeper's process; returns at once in the test itself.
pub fn run_keeper() {
    if let Some(directory) = directory() {
        keep(&directory.join("state")).unwrap();
    }
}

/// A server's process; returns at once in the test itself.
pub fn run_server() {
    let (Some(directory), Ok(name)) = (directory(), std::env::var(SERVER)) else {
        return;
    };
    let word = |word: &str| word.into();
    let keeper = vec![
        std::env::current_exe().unwrap().into_os_string(),
        word("--exact"),
        word("keeper_process"),
    ];
    let store = std::env::var(STORE).unwrap();
    let images = [
        (Socket::File, Location::Path(directory.join("guest.mem"))),
        (Socket::Store, Location::Url(store)),
    ];
    let is_kept = name == "kept";
    let options = Options {
        // The VMs of one image have memory of many lengths.
        any_length: true,
        bindings: images
            .into_iter()
            .map(|(socket, image)| {
                Binding::new(
                    directory.join(format!("{name}-{}.sock", socket.name())),
                    image,
                )
            })
            .collect(),
        prefetch: std::env::var_os(PREFETCH).is_some(),
        working_set: match is_kept {
            true => WorkingSetMode::Off,
            false => WorkingSetMode::Auto,
        },
        fault_around_pages: if is_kept { 1 } else { 16 },
        handshake_limit: NEVER,
        stop_limit: NEVER,
        state: is_kept.then(|| StateOptions {
            directory: directory.join("state"),
            keeper,
        }),
        images: OpenOptions {
            object: ObjectOptions {
                block_bytes: 16 << 10,
                get_bytes: 64 << 10,
                attempts: 2,
                limit: Duration::from_millis(400),
                ..ObjectOptions::default()
            },
            ..OpenOptions::default()
        },
        ..Options::default()
    };
    // The store may fail while its image is opened, too: a service manager starts the server again.
    let server = eventually("a server", || Server::bind(options.clone()));
    let stopper = server.stopper();
    // The test closes standard input to stop it.
    thread::spawn(move || {
        let _ = std::io::stdin().lines().count();
        stopper.stop();
    });
    std::fs::write(directory.join(format!("{name}.ready")), "").unwrap();
    server.run().unwrap();
}

/// A server in a process of its own.
pub struct Serving {
    child: Child,
    is_over: bool,
}

impl Serving {
    pub fn start(place: &Place, name: &str, prefetch: bool) -> Self {
        let ready = place.path(&format!("{name}.ready"));
        let _ = std::fs::remove_file(&ready);
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(place.path(&format!("{name}.log")));
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "server_process", "--nocapture"])
            .env(DIRECTORY, place.directory.path())
            .env(SERVER, name)
            .env(STORE, &place.store.url)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log.unwrap());
        if prefetch {
            command.env(PREFETCH, "1");
        }
        let child = command.spawn().unwrap();
        let mut serving = Self {
            child,
            is_over: false,
        };
        eventually("a server", || {
            let ended = serving.child.try_wait().unwrap();
            assert!(ended.is_none(), "a server has ended: {ended:?}");
            ready.exists()
        });
        serving
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(mut self) {
        self.end();
    }

    pub fn stop(mut self) {
        drop(self.child.stdin.take());
        let status = self.child.wait().unwrap();
        self.is_over = true;
        assert!(status.success(), "a stopped server: {status}");
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.is_over = true;
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        if !self.is_over {
            self.end();
        }
    }
}

/// The resources of a process that VMs must leave behind as they were.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holdings {
    /// All but connections to the store, which a pool keeps open for a while.
    descriptors: usize,
    threads: usize,
    /// Mappings of memory files.
    mappings: usize,
    all_mappings: usize,
    resident_bytes: u64,
}

impl Holdings {
    pub fn of(pid: u32) -> Self {
        let file = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}"));
        let maps = file("maps").unwrap_or_default();
        let status = file("status").unwrap_or_default();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let resident = resident.and_then(|text| text.split_whitespace().next());
        let resident = resident.and_then(|text| text.parse::<u64>().ok());
        Self {
            descriptors: descriptors(pid),
            threads: tasks(pid).len(),
            mappings: maps.lines().filter(|line| line.contains("/memfd:")).count(),
            all_mappings: maps.lines().count(),
            resident_bytes: resident.unwrap_or(0) * 1024,
        }
    }

    /// The threads of VMs and of clients that a server has.
    pub fn vm_threads(pid: u32) -> usize {
        let is_vm = |name: &&String| name.starts_with("pt-vm-");
        tasks(pid).iter().filter(is_vm).count()
    }

    /// Whether `after`, of the same process or a successor, has nothing more than this.
    pub fn has_all_of(&self, after: &Self) -> bool {
        // The allocator retains some for each thread that existed.
        after.descriptors <= self.descriptors
            && after.threads <= self.threads
            && after.mappings <= self.mappings
            && after.all_mappings <= self.all_mappings + 200
            && after.resident_bytes <= self.resident_bytes + KEPT_BYTES
    }
}

/// The names of a process's threads.
fn tasks(pid: u32) -> Vec<String> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    tasks.flatten().filter_map(name).collect()
}

fn descriptors(pid: u32) -> usize {
    // The tenth column has the socket's inode.
    let tcp = std::fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap_or_default();
    let of_store: HashSet<String> = tcp
        .lines()
        .filter_map(|line| line.split_whitespace().nth(9))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
        return 0;
    };
    let is_held = |path: &Path| {
        let to = std::fs::read_link(path);
        to.is_ok_and(|to| !of_store.contains(&*to.to_string_lossy()))
    };
    descriptors
        .flatten()
        .filter(|entry| is_held(&entry.path()))
        .count()
}
