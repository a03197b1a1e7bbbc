//! What a server does to bring pages ahead is an aid: where it cannot, VMs are served no less.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use pagetide_serve::native::message::{RefusedCode, WorkingSetAction};
use pagetide_serve::{Binding, Options, WorkingSet, WorkingSetMode};
use pagetide_sources::{Digest, Location, OpenOptions, open};
use support::child::{Vmm, run_as_child};
use support::native::*;
use support::*;

const PAGES: usize = 64;

/// The VMM's process, when it was started by another test.
#[test]
fn vmm() {
    run_as_child();
}

fn digest(path: &Path) -> Digest {
    let image = open(&Location::Path(path.into()), &OpenOptions::default());
    image.unwrap().digest()
}

/// Options with which pages are recorded and come ahead, and the file of the working set.
fn recording(place: &Place, file: PathBuf) -> Options {
    Options {
        prefetch: true,
        working_set: WorkingSetMode::Auto,
        working_set_file: Some(file),
        ..place.options()
    }
}

/// A working set is an aid. Where it cannot be written, each VM gets its pages ahead, as with a set.
#[test]
fn vms_get_pages_ahead_where_no_working_set_can_be_written() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(PAGES);
    let file = place.directory.path().join("none/guest.working-set");
    for mode in [WorkingSetMode::Auto, WorkingSetMode::Record] {
        let running = Running::start(Options {
            working_set: mode,
            ..recording(&place, file.clone())
        });
        for _ in 0..2 {
            let guest = Guest::new(PAGES);
            let stream = guest.connect(&place.socket());
            eventually("all pages", || equals(guest.resident(), &PAGES));
            drop(stream);
        }
        running.stop();
    }
}

/// The directory goes while a VM records: its recording ends, and what it has not touched comes ahead.
#[test]
fn a_recording_that_cannot_be_written_any_more_ends() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(PAGES);
    let directory = place.directory.path().join("sets");
    fs::create_dir(&directory).unwrap();
    let running = Running::start(recording(&place, directory.join("set")));
    let guest = Guest::new(PAGES);
    let _stream = guest.connect(&place.socket());
    guest.check(3, &content(3));
    assert_eq!(guest.resident(), 1);
    fs::remove_dir_all(&directory).unwrap();
    eventually("all pages", || equals(guest.resident(), &PAGES));
    drop(running);
}

/// Images at other places have their sets in one directory, by their digests; a socket may have one of its own.
#[test]
fn working_sets_are_per_image_and_if_need_be_per_socket() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(PAGES);
    let path = |name: &str| place.directory.path().join(name);
    fs::write(path("second.mem"), vec![5; PAGES * PAGE]).unwrap();
    let location = |name: &str| Location::Path(path(name));
    let running = Running::start(Options {
        bindings: vec![
            Binding::new(path("a.sock"), location("guest.mem")),
            Binding::new(path("b.sock"), location("second.mem")),
            Binding {
                working_set_file: Some(path("sets/tenant")),
                ..Binding::new(path("c.sock"), location("guest.mem"))
            },
        ],
        working_set: WorkingSetMode::Auto,
        working_set_directory: Some(path("sets")),
        ..place.options()
    });
    for (index, socket) in ["a.sock", "b.sock", "c.sock"].into_iter().enumerate() {
        let guest = Guest::new(PAGES);
        let stream = guest.connect(&path(socket));
        (0..=index).for_each(|page| drop(guest.read(page)));
        drop(stream);
        running.ended(index as u64 + 1);
    }
    let set_of = |name: &str| path(&format!("sets/{}.working-set", digest(&path(name))));
    for (file, pages) in [
        (set_of("guest.mem"), 1),
        (set_of("second.mem"), 2),
        (path("sets/tenant"), 3),
    ] {
        let set = WorkingSet::load(&file).unwrap();
        assert_eq!(set.unwrap().touches.len(), pages, "{}", file.display());
    }
}

/// All tenants' VMs fetch what the working set of their image says.
#[test]
fn a_client_writes_the_working_set_only_if_the_server_lets_it() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(PAGES);
    let _running = Running::start(place.options());
    let guest = Guest::new(PAGES);
    let mut client = attached(&guest, &place.socket());
    for action in [WorkingSetAction::Record, WorkingSetAction::Save] {
        assert_eq!(code(client.working_set(action)), RefusedCode::WorkingSet);
    }
    guest.check(1, &content(1));
    client.goodbye().unwrap();
    assert!(!place.working_set().exists());
}

/// A control group with a limit of memory, of the version that this machine has.
struct Group(PathBuf);

impl Group {
    fn new(bytes: u64) -> Option<Self> {
        let root = Path::new("/sys/fs/cgroup");
        let name = format!("pagetide-test-{}", std::process::id());
        for (parent, limit) in [
            (root.join("memory"), "memory.limit_in_bytes"),
            (root.to_owned(), "memory.max"),
        ] {
            let group = Self(parent.join(&name));
            let is_made = fs::create_dir(&group.0).is_ok();
            if is_made && fs::write(group.0.join(limit), bytes.to_string()).is_ok() {
                return Some(group);
            }
        }
        println!("SKIP: no control group with a limit of memory can be made here (root)");
        None
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// The kernel kills a process at the limit of its group. Prefetch, which the guest has not asked for, stays below.
#[test]
fn prefetch_stays_below_the_limit_of_the_vmms_group() {
    const PAGES: usize = 8192;
    if !has_userfaultfd() {
        return;
    }
    // More than the process needs for itself, and less than that and its guest's 32 MiB.
    let Some(group) = Group::new(24 << 20) else {
        return;
    };
    let place = Place::new(PAGES);
    let running = Running::start(Options {
        prefetch: true,
        ..place.options()
    });
    let mut vmm = Vmm::start_in(&group.0, "vmm", &place.socket(), PAGES);
    let first_word = |page: usize| u64::from_le_bytes(content(page)[..8].try_into().unwrap());
    for page in [3, 4000, 8191] {
        assert_eq!(vmm.read(page), first_word(page));
    }
    vmm.kill();
    let totals = running.ended(1);
    assert_eq!((totals.pages_ahead, totals.vms_refused), (0, 0));

    // Without a limit all of it comes.
    let mut vmm = Vmm::start("vmm", &place.socket(), PAGES);
    assert_eq!(vmm.read(3), first_word(3));
    eventually("all pages", || {
        let totals = running.metrics.totals();
        equals(
            totals.pages_ahead + totals.pages_for_faults,
            &(PAGES as u64 + 3),
        )
    });
    vmm.kill();
}
