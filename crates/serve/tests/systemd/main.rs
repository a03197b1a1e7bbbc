//! The package's service under a real systemd: VMs stay through all that an operator, a package's upgrade or a full disk does
//! to the service, or come to the end that fleet.md names. No VM ever reads a wrong page. And what the guides have a reader
//! type does what they say.
//!
//! `cargo xtask test --only systemd` runs it, in a system of Debian 13, whose systemd has a store for descriptors.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod container;
mod guides;
#[path = "../../../sources/tests/support/mod.rs"]
mod http;
#[path = "../../../sources/tests/support/moto.rs"]
mod moto;
#[path = "../support/mod.rs"]
mod support;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use container::Container;
use support::child::{Vmm, run_as_child};
use support::{content, eventually, has_userfaultfd};

/// The VMs that each event meets.
const VMS: usize = 100;
/// The pages of each.
const PAGES: usize = 64;

const SOCKET: &str = "/run/pagetide/vm.sock";
const DROP_IN: &str = "/etc/systemd/system/pagetide.service.d/test.conf";
const CONFIG: &str = "/etc/pagetide/serve.toml";

/// The unit as it is packaged.
const PACKAGED: &str = "";
/// As where systemd has no store.
const NO_STORE: &str = "[Service]\nFileDescriptorStoreMax=0\n";

/// A VMM's process, in the system.
#[test]
fn vmm() {
    run_as_child();
}

#[test]
fn vms_stay_through_what_happens_to_the_service() {
    if !has_userfaultfd() {
        return;
    }
    let Some(container) = Container::boot() else {
        return;
    };
    let host = Host { container };
    for (what, event) in EVENTS {
        let begun = std::time::Instant::now();
        event(&host);
        println!("{what}: {:.1} s", begun.elapsed().as_secs_f64());
    }
}

type Event = fn(&Host);

const EVENTS: [(&str, Event); 11] = [
    ("a start with the packaged file", started_as_packaged),
    ("what the guides have a reader type", guides::followed),
    ("a stop without a store", stopped_without_a_store),
    ("a stop, and a later start", stopped_and_started),
    ("a restart", restarted),
    ("kill -9", killed),
    ("an upgrade to a server of another state", upgraded),
    ("a reload", reloaded),
    ("a full disk", disk_full),
    ("the log's end", without_a_log),
    ("a store that is gone for a minute", store_gone),
];

/// The system in which the service runs.
struct Host {
    container: Container,
}

impl Host {
    /// Starts the service as a unit with a drop-in, with sockets and their images, and with nothing of an earlier start.
    fn start(&self, drop_in: &str, sockets: &[(&str, &str)]) {
        let container = &self.container;
        container.systemctl("stop pagetide.service");
        // What an earlier start has left.
        let _ = container
            .command(&["systemctl", "clean", "--what=fdstore", "pagetide"])
            .output();
        container.systemctl("reset-failed");
        for file in [DROP_IN, CONFIG, "/snapshots/web.mem"] {
            fs::create_dir_all(container.file(file).parent().unwrap()).unwrap();
        }
        fs::write(container.file(DROP_IN), drop_in).unwrap();
        let image: Vec<u8> = (0..PAGES).flat_map(content).collect();
        if !container.file("/snapshots/web.mem").exists() {
            fs::write(container.file("/snapshots/web.mem"), image).unwrap();
        }
        self.configure("off", sockets);
        container.systemctl("daemon-reload");
        container.systemctl("start pagetide.service");
    }

    fn configure(&self, working_set: &str, sockets: &[(&str, &str)]) {
        let lines = sockets
            .iter()
            .map(|(socket, image)| format!("\"{socket}\" = \"{image}\"\n"));
        let lines: String = lines.collect();
        let text =
            format!("working-set = \"{working_set}\"\nprefetch = \"off\"\n\n[sockets]\n{lines}");
        fs::write(self.container.file(CONFIG), text).unwrap();
    }

    /// VMs that have connected and read two pages.
    fn vms(&self, socket: &str) -> Vec<Vmm> {
        self.vms_of(socket, PAGES)
    }

    fn vms_of(&self, socket: &str, pages: usize) -> Vec<Vmm> {
        // An image at a URL is opened in its own time, and its socket then.
        eventually("the socket", || {
            let mut test = self.container.command(&["test", "-S", socket]);
            test.status().unwrap().success()
        });
        let mut vms: Vec<_> = (0..VMS)
            .map(|_| {
                Vmm::start_by(
                    self.container.this_program(),
                    "vmm",
                    Path::new(socket),
                    pages,
                )
            })
            .collect();
        read(&mut vms, 0..2);
        vms
    }

    /// Four for each VM.
    fn stored(&self) -> usize {
        self.container
            .property("NFileDescriptorStore")
            .parse()
            .unwrap()
    }
}

const ONE: [(&str, &str); 1] = [(SOCKET, "/snapshots/web.mem")];

fn word(page: usize) -> u64 {
    u64::from_le_bytes(content(page)[..8].try_into().unwrap())
}

/// Has all VMs read pages, and waits for all of them.
fn read(vms: &mut [Vmm], pages: std::ops::Range<usize>) {
    for page in pages {
        begin_to_read(vms, page);
        have_read(vms, page);
    }
}

fn begin_to_read(vms: &mut [Vmm], page: usize) {
    vms.iter_mut().for_each(|vm| vm.begin_to_read(page));
}

fn have_read(vms: &[Vmm], page: usize) {
    for (number, vm) in vms.iter().enumerate() {
        assert_eq!(vm.has_read(), Some(word(page)), "VM {number}, page {page}");
    }
}

fn all_run(vms: &mut [Vmm]) {
    let running = vms
        .iter_mut()
        .filter_map(|vm| vm.is_running().then_some(()))
        .count();
    assert_eq!(running, VMS);
}

/// Nobody has written anything yet.
fn started_as_packaged(host: &Host) {
    host.container.systemctl("start pagetide.service");
    let control = ["pagetide", "ctl", "--control", "/run/pagetide/control.sock"];
    let status = host
        .container
        .run(&[&control[..], &["status", "--json"]].concat());
    assert!(status.contains("\"ready\""), "{status}");
}

/// The server has no successor that could know of its VMs: it gives them all that they lack.
fn stopped_without_a_store(host: &Host) {
    host.start(NO_STORE, &ONE);
    let mut vms = host.vms(SOCKET);
    host.container.systemctl("stop pagetide.service");
    read(&mut vms, 2..PAGES);
    all_run(&mut vms);
}

fn stopped_and_started(host: &Host) {
    host.start(PACKAGED, &ONE);
    let mut vms = host.vms(SOCKET);
    host.container.systemctl("stop pagetide.service");
    assert_eq!(host.stored(), 4 * VMS);
    begin_to_read(&mut vms, 5);
    host.container.systemctl("start pagetide.service");
    have_read(&vms, 5);
    read(&mut vms, 6..12);
    all_run(&mut vms);
}

fn restarted(host: &Host) {
    host.start(PACKAGED, &ONE);
    let mut vms = host.vms(SOCKET);
    for page in 5..8 {
        begin_to_read(&mut vms, page);
        host.container.systemctl("restart pagetide.service");
        have_read(&vms, page);
    }
    all_run(&mut vms);
}

/// The unit starts another server by itself.
fn killed(host: &Host) {
    host.start(PACKAGED, &ONE);
    let mut vms = host.vms(SOCKET);
    for page in 5..8 {
        let former = host.container.property("MainPID");
        begin_to_read(&mut vms, page);
        host.container
            .systemctl("kill --kill-whom=main --signal=KILL pagetide.service");
        begin_to_read(&mut vms, page + 10);
        have_read(&vms, page);
        have_read(&vms, page + 10);
        eventually("another server", || {
            let now = host.container.property("MainPID");
            now != former && now != "0"
        });
    }
    all_run(&mut vms);
}

/// A server that another version's VMs are left to leaves them asleep, until a server of that version is back.
fn upgraded(host: &Host) {
    host.start(PACKAGED, &ONE);
    let mut vms = host.vms(SOCKET);
    host.container.systemctl("stop pagetide.service");
    let descriptions = host.container.files_of_init("memfd:pagetide-vm");
    assert_eq!(descriptions.len(), VMS);
    let renumber = |from: &str, to: &str| {
        for file in &descriptions {
            let file = fs::File::options()
                .read(true)
                .write(true)
                .open(file)
                .unwrap();
            let mut text = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
            file.read_exact_at(&mut text, 0).unwrap();
            let text = String::from_utf8(text).unwrap();
            assert!(text.contains(from), "{text}");
            file.write_all_at(text.replace(from, to).as_bytes(), 0)
                .unwrap();
        }
    };
    renumber("\"format\":1", "\"format\":2");
    begin_to_read(&mut vms, 5);
    host.container.systemctl("start pagetide.service");
    eventually("the log names the versions", || {
        let log = host.container.log();
        log.contains("format 2, not 1").then_some(()).ok_or(log)
    });
    host.container.systemctl("stop pagetide.service");
    assert!(vms.iter().all(Vmm::is_silent), "none has read anything");
    all_run(&mut vms);
    renumber("\"format\":2", "\"format\":1");
    host.container.systemctl("start pagetide.service");
    have_read(&vms, 5);
    read(&mut vms, 6..12);
    all_run(&mut vms);
}

/// VMs are served on when a further socket comes, whose VMs are served too, and when their own socket goes.
fn reloaded(host: &Host) {
    host.start(PACKAGED, &ONE);
    let mut vms = host.vms(SOCKET);
    let other = "/run/pagetide/other.sock";
    let image = "/snapshots/web.mem";
    host.configure("off", &[(SOCKET, image), (other, image)]);
    begin_to_read(&mut vms, 4);
    host.container.systemctl("reload pagetide.service");
    have_read(&vms, 4);
    let mut others = host.vms(other);
    host.configure("off", &[(other, image)]);
    begin_to_read(&mut vms, 5);
    host.container.systemctl("reload pagetide.service");
    have_read(&vms, 5);
    eventually("the socket's end", || {
        let mut test = host.container.command(&["test", "-S", SOCKET]);
        !test.status().unwrap().success()
    });
    read(&mut vms, 6..8);
    read(&mut others, 6..8);
    all_run(&mut vms);
    all_run(&mut others);
}

/// Working sets cannot be written, and nothing else can be, either.
fn disk_full(host: &Host) {
    let container = &host.container;
    fs::copy(
        container.file("/snapshots/web.mem"),
        container.file("/web.mem"),
    )
    .unwrap();
    container.run(&[
        "mount",
        "-t",
        "tmpfs",
        "-o",
        "size=1M",
        "tmpfs",
        "/snapshots",
    ]);
    container.run(&["cp", "/web.mem", "/snapshots"]);
    container.run(&[
        "sh",
        "-c",
        "dd if=/dev/zero of=/snapshots/full bs=4k; test $? = 1",
    ]);
    host.start(PACKAGED, &ONE);
    host.configure("auto", &ONE);
    container.systemctl("restart pagetide.service");
    let mut vms = host.vms(SOCKET);
    read(&mut vms, 5..8);
    container.systemctl("restart pagetide.service");
    read(&mut vms, 8..12);
    all_run(&mut vms);
    drop(vms);
    eventually("a working set that could not be written", || {
        let log = container.log();
        log.contains("No space left on device")
            .then_some(())
            .ok_or(log)
    });
    container.systemctl("stop pagetide.service");
    container.run(&["umount", "/snapshots"]);
}

/// The journal's daemon is stopped, and with it the other end of the service's standard error.
fn without_a_log(host: &Host) {
    host.start(PACKAGED, &ONE);
    let mut vms = host.vms(SOCKET);
    let container = &host.container;
    let sockets =
        "systemd-journald.socket systemd-journald-dev-log.socket systemd-journald.service";
    container.systemctl(&format!("stop {sockets}"));
    read(&mut vms, 5..8);
    let mut others = host.vms(SOCKET);
    container.systemctl("restart pagetide.service");
    read(&mut vms, 8..12);
    read(&mut others, 8..12);
    all_run(&mut vms);
    all_run(&mut others);
    let state = container.systemctl("show --value --property=ActiveState systemd-journald");
    assert_eq!(state.trim(), "inactive");
    container.systemctl("start systemd-journald.service");
}

/// Guests wait, and go on.
fn store_gone(host: &Host) {
    // So many that a read of the first ones does not bring the last ones.
    const PAGES: usize = 4096;
    let store = http::Server::start(PAGES * support::PAGE);
    let image: Vec<u8> = (0..PAGES).flat_map(content).collect();
    store.change(|site| site.content = image);
    host.start(PACKAGED, &[(SOCKET, &store.url)]);
    let mut vms = host.vms_of(SOCKET, PAGES);
    store.always(http::Act::Status(503));
    begin_to_read(&mut vms, PAGES - 1);
    std::thread::sleep(OUTAGE);
    assert!(vms.iter().all(Vmm::is_silent), "none has read anything");
    all_run(&mut vms);
    store.always(http::Act::Well);
    have_read(&vms, PAGES - 1);
    read(&mut vms, PAGES - 3..PAGES - 1);
    all_run(&mut vms);
}

/// The time that the store is gone is what this is about.
const OUTAGE: std::time::Duration = std::time::Duration::from_secs(60);
