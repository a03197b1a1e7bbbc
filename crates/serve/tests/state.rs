//! Servers that are killed, and successors that go on: no page is lost, none is wrong, and a discarded page
//! stays zero.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

#[path = "hangs/fuse.rs"]
mod fuse;

#[path = "state/keepers.rs"]
mod keepers;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use pagetide_serve::native::label::VmLabel;
use pagetide_serve::{Binding, OnFailure, Options, StateOptions, WorkingSet, WorkingSetMode, keep};
use pagetide_test_support::NoOtherThread;
use rustix::fs::SealFlags;
use support::child::run_as_child;
use support::native::*;
use support::*;

const DIRECTORY: &str = "PAGETIDE_TEST_STATE";
const PREFETCH: &str = "PAGETIDE_TEST_PREFETCH";
const KILLS: &str = "PAGETIDE_TEST_KILLS";
const RECORDS: &str = "PAGETIDE_TEST_RECORDS";
const WAITS: &str = "PAGETIDE_TEST_WAITS";
const THREADLESS: &str = "PAGETIDE_TEST_THREADLESS";
const READERLESS: &str = "PAGETIDE_TEST_READERLESS";

/// The keeper's process, when a server has started it.
#[test]
fn keeper() {
    if let Some(directory) = std::env::var_os(DIRECTORY) {
        keep(Path::new(&directory).join("state").as_path()).unwrap();
    }
}

/// The server's process, when another test has started it.
#[test]
fn server() {
    let Some(directory) = std::env::var_os(DIRECTORY).map(PathBuf::from) else {
        return;
    };
    let word = |word: &str| word.into();
    let keeper = vec![
        std::env::current_exe().unwrap().into_os_string(),
        word("--exact"),
        word("keeper"),
    ];
    let options = Options {
        bindings: vec![Binding {
            // With the variable, it starts without the image.
            is_required: std::env::var_os(WAITS).is_none(),
            ..process::binding(&directory)
        }],
        prefetch: std::env::var_os(PREFETCH).is_some(),
        working_set: match std::env::var_os(RECORDS) {
            Some(_) => WorkingSetMode::Auto,
            None => WorkingSetMode::Off,
        },
        state: Some(StateOptions {
            directory: directory.join("state"),
            keeper,
        }),
        stop_limit: NEVER,
        handshake_limit: NEVER,
        on_failure: match std::env::var_os(KILLS) {
            Some(_) => OnFailure::Kill,
            None => OnFailure::Stall,
        },
        porter: porter(),
        // Then it ends with its last VM.
        once: threadless_from().is_some(),
        ..Options::default()
    };
    match threadless_from() {
        None => process::serve(&directory, options),
        Some(from) => process::serve_watched(&directory, options, without_threads(from)),
    }
}

/// The line of the log from which on no thread can be started, if any.
fn threadless_from() -> Option<&'static str> {
    let lines = [
        (THREADLESS, "starting the thread of a VM"),
        (READERLESS, "an image has another reader"),
    ];
    let (_, line) = { lines.into_iter() }.find(|(name, _)| std::env::var_os(name).is_some())?;
    Some(line)
}

/// No thread can be started from that line on, until the server has said what became of that.
fn without_threads(from: &'static str) -> impl Fn(&str) + Clone + Send + Sync + 'static {
    let none = Arc::new(Mutex::new(None));
    let has_begun = Arc::new(AtomicBool::new(false));
    move |line| {
        if line.contains(from) && !has_begun.swap(true, Ordering::Relaxed) {
            *none.lock().unwrap() = Some(NoOtherThread::begin(&["pt-open"]));
        } else if line.contains("stays asleep") {
            none.lock().unwrap().take();
        }
    }
}

/// A server in a process of its own.
struct Serving(Child);

impl Serving {
    fn start(place: &Place, prefetch: bool) -> Self {
        let variables: &[&str] = if prefetch { &[PREFETCH] } else { &[] };
        Self::with(place, variables)
    }

    /// With these variables set.
    fn with(place: &Place, variables: &[&str]) -> Self {
        let ready = place.directory.path().join("ready");
        let _ = std::fs::remove_file(&ready);
        let serving = Self::spawn(place, variables);
        eventually("the server", || ready.exists());
        serving
    }

    /// One that is not waited for.
    fn spawn(place: &Place, variables: &[&str]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "server"])
            .env(DIRECTORY, place.directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        command.envs(variables.iter().map(|name| (name, "1")));
        Self(command.spawn().unwrap())
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    fn stop(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}

/// What the servers of a place have logged.
fn log(place: &Place) -> String {
    std::fs::read_to_string(place.directory.path().join("log")).unwrap()
}

fn discard(guest: &Arc<Guest>, first: usize, count: usize) {
    let balloon = Arc::clone(guest);
    within_patience("the balloon", move || balloon.discard(first, count));
}

#[test]
fn a_successor_of_a_killed_server_goes_on() {
    if !has_userfaultfd() {
        return;
    }
    for prefetch in [false, true] {
        let place = Place::new(512);
        let serving = Serving::start(&place, prefetch);
        let guest = shared(512);
        let _stream = guest.connect(&place.socket());
        (0..64).for_each(|page| guest.check(page, &content(page)));
        guest.write(5, 0xee);
        discard(&guest, 10, 4);
        discard(&guest, 300, 4);
        serving.kill();

        // A thread that touches a missing page sleeps until there is a successor.
        let asleep = (!prefetch).then(|| guest.touch(400));
        let serving = Serving::start(&place, prefetch);
        if let Some(asleep) = asleep {
            assert!(asleep.join() == content(400));
        }
        for page in (0..512).rev() {
            let mut wanted = match page {
                10..14 | 300..304 => vec![0; PAGE],
                _ => content(page),
            };
            if page == 5 {
                wanted[0] = 0xee;
            }
            guest.check(page, &wanted);
        }
        discard(&guest, 20, 1);
        guest.check(20, &[0; PAGE]);
        serving.kill();
    }
}

#[test]
fn a_server_that_is_stopped_hands_its_vms_over() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(256);
    let guest = shared(256);
    let mut serving = Serving::start(&place, false);
    let stream = guest.connect(&place.socket());
    for round in 0..5 {
        guest.check(round * 3, &content(round * 3));
        discard(&guest, 100 + round, 1);
        serving.stop();
        let asleep = guest.touch(200 + round);
        serving = Serving::start(&place, false);
        assert!(asleep.join() == content(200 + round));
    }
    (100..105).for_each(|page| guest.check(page, &[0; PAGE]));
    // The keeper ends with its last VM.
    drop(stream);
    serving.stop();
    let socket = place.directory.path().join("state/keeper.sock");
    eventually("the keeper's end", || !socket.exists());
}

/// The VMM's process, when it was started by another test.
#[test]
fn vmm() {
    run_as_child();
}

/// The digest of a raw image is that of some pages. A file that was replaced, or written to, between two servers
/// has the content of another guest in the others: the VM waits for its own image.
#[test]
fn an_image_that_was_replaced_is_refused() {
    if !has_userfaultfd() {
        return;
    }
    for is_written in [false, true] {
        let place = Place::new(256);
        let original = place.directory.path().join("original");
        let serving = Serving::start(&place, false);
        let guest = shared(256);
        let _stream = guest.connect(&place.socket());
        guest.check(0, &content(0));
        serving.kill();
        // No page that the digest samples.
        let other = [0xee; PAGE];
        let status = std::fs::metadata(place.image()).unwrap();
        if is_written {
            let file = File::options().write(true).open(place.image()).unwrap();
            file.write_all_at(&other, PAGE as u64).unwrap();
        } else {
            std::fs::rename(place.image(), &original).unwrap();
            let mut bytes = std::fs::read(&original).unwrap();
            bytes[PAGE..2 * PAGE].copy_from_slice(&other);
            std::fs::write(place.image(), bytes).unwrap();
            // As `cp --preserve=timestamps` does.
            let file = File::options().write(true).open(place.image()).unwrap();
            file.set_modified(status.modified().unwrap()).unwrap();
        }
        let serving = Serving::start(&place, true);
        let asleep = guest.touch(1);
        eventually("the refusal", || {
            let log = log(&place);
            let is_refused = log.lines().any(|line| line.contains("VM refused"));
            if is_refused { Ok(()) } else { Err(log) }
        });
        // A VM that comes later is served.
        let next = Guest::new(256);
        let next_stream = next.connect(&place.socket());
        eventually("prefetch", || equals(next.resident(), &256));
        drop(next_stream);
        assert!(asleep.is_undisturbed());
        assert_eq!(guest.residents(), [0]);
        serving.kill();
        if is_written {
            let file = File::options().write(true).open(place.image()).unwrap();
            file.write_all_at(&content(1), PAGE as u64).unwrap();
            file.set_modified(status.modified().unwrap()).unwrap();
        } else {
            std::fs::rename(&original, place.image()).unwrap();
        }
        let serving = Serving::start(&place, true);
        assert!(asleep.join() == content(1));
        (0..256).for_each(|page| guest.check(page, &content(page)));
        serving.kill();
    }
}

/// A recording goes on in a successor, and counts as one. After a kill, what the guest did in the last moment is
/// missing.
#[test]
fn a_recording_goes_on_in_a_successor() {
    if !has_userfaultfd() {
        return;
    }
    for is_killed in [false, true] {
        let place = Place::new(64);
        let saved = || {
            let set = WorkingSet::load(&place.working_set()).unwrap();
            let of = |set: WorkingSet| {
                let pages: Vec<u64> = set.touches.iter().map(|touch| touch.page.0).collect();
                (pages, set.recordings)
            };
            set.map(of)
        };
        let variables = [PREFETCH, RECORDS];
        let serving = Serving::with(&place, &variables);
        let guest = shared(64);
        let stream = guest.connect(&place.socket());
        [30, 7]
            .into_iter()
            .for_each(|page| guest.check(page, &content(page)));
        match is_killed {
            false => serving.stop(),
            true => {
                let all = Some((vec![30, 7], 1));
                eventually("a part", || equals(saved(), &all));
                serving.kill();
            }
        }
        assert_eq!(saved(), Some((vec![30, 7], 1)));
        let serving = Serving::with(&place, &variables);
        [50, 2]
            .into_iter()
            .for_each(|page| guest.check(page, &content(page)));
        assert_eq!(guest.resident(), 4);
        drop(stream);
        let all = Some((vec![30, 7, 50, 2], 1));
        eventually("the rest", || equals(saved(), &all));
        serving.stop();
    }
}

/// VMMs that speak the native protocol: their memory is served on, and they learn that nobody answers any more.
#[test]
fn native_vms_outlive_their_server() {
    if !has_userfaultfd() || !has_minor() {
        return;
    }
    let place = Place::new(256);
    let serving = Serving::start(&place, false);
    let guest = shared(256);
    let mut client = attached(&guest, &place.socket());
    let (clone, mut cloning, _file) = cloned(&place.socket(), 256);
    let clone = Arc::new(clone);
    for guest in [&guest, &clone] {
        (0..32).for_each(|page| guest.check(page, &content(page)));
        guest.write(5, 0xee);
        discard(guest, 10, 4);
        discard(guest, 100, 4);
    }
    serving.kill();
    let asleep = [guest.touch(200), clone.touch(201)];
    let serving = Serving::start(&place, false);
    for (page, thread) in (200..).zip(asleep) {
        assert!(thread.join() == content(page));
    }
    assert!(client.health().is_err() && cloning.health().is_err());
    // And handed over without a kill.
    serving.stop();
    let serving = Serving::start(&place, false);
    for guest in [&guest, &clone] {
        for page in (0..256).rev() {
            let mut wanted = match page {
                10..14 | 100..104 => vec![0; PAGE],
                _ => content(page),
            };
            if page == 5 {
                wanted[0] = 0xee;
            }
            guest.check(page, &wanted);
        }
        discard(guest, 20, 1);
        guest.check(20, &[0; PAGE]);
    }
    drop((client, cloning));
    serving.stop();
    let socket = place.directory.path().join("state/keeper.sock");
    eventually("the keeper's end", || !socket.exists());
}

/// Who looks for a VM in the log finds it whichever server it has.
#[test]
fn the_label_of_a_vm_outlives_its_server() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let serving = Serving::start(&place, false);
    let guest = Guest::new(64);
    let mut client = connect(&place.socket());
    let trace_id = "4bf92f3577b34da6a3ce929d0e0e4736";
    let label = VmLabel::new("web-7", format!("00-{trace_id}-00f067aa0ba902b7-01")).unwrap();
    client.label(&label).unwrap();
    let attach = attach_of(&guest, vec![region(&guest)]);
    client.attach(&attach, &[guest.uffd.as_fd()]).unwrap();
    guest.check(1, &content(1));
    serving.kill();
    let serving = Serving::start(&place, false);
    guest.check(2, &content(2));
    // That one hands it over.
    serving.stop();
    let serving = Serving::start(&place, false);
    guest.check(3, &content(3));
    drop(client);
    let fields = format!("id=\"web-7\" trace_id=\"{trace_id}\"");
    let labelled = |text: &str| {
        let log = log(&place);
        let is_wanted = |line: &&str| line.contains(text) && line.contains(&fields);
        log.lines().filter(is_wanted).count()
    };
    // The servers that have ended in order have said so, and the last one says that the VM has.
    eventually("the VM's end", || equals(labelled("VM ended"), &2));
    assert_eq!(labelled("going on with a VM of a former server"), 2);
    serving.stop();
}

/// A VM whose VMM has handed it over itself is not the keeper's any more. Memory whose file the server writes is
/// not kept: such a VM is drained.
#[test]
fn a_vm_that_the_keeper_must_not_have_is_drained_or_left_alone() {
    if !has_userfaultfd() || !has_minor() {
        return;
    }
    let place = Place::new(64);
    let serving = Serving::start(&place, false);
    let left = shared(64);
    let mut leaving = attached(&left, &place.socket());
    left.check(1, &content(1));
    let parts = leaving.hand_over().unwrap();
    let file = memfd(64, SealFlags::SHRINK);
    let guest = Guest::of_file(file.as_fd(), 64, rustix::mm::MapFlags::SHARED);
    let mut client = connect(&place.socket());
    let attach = attach_of(&guest, vec![region(&guest).minor(1, 0)]);
    let descriptors = [guest.uffd.as_fd(), file.as_fd()];
    client.attach(&attach, &descriptors).unwrap();
    guest.check(1, &content(1));
    serving.stop();
    (0..64).for_each(|page| assert!(guest.read(page) == content(page), "page {page}"));
    // A server that starts now has no VM to go on with.
    let serving = Serving::start(&place, true);
    let next = Guest::new(64);
    let next_stream = next.connect(&place.socket());
    eventually("prefetch", || equals(next.resident(), &64));
    drop(next_stream);
    // It goes on with the VMs of a former server before it accepts others.
    assert!(
        !log(&place).contains("going on with a VM"),
        "{}",
        log(&place)
    );
    assert_eq!(left.residents(), [1]);
    let mut taken = connect(&place.socket());
    taken.resume_from(&parts).unwrap();
    let attach = attach_of(&left, vec![region(&left)]);
    taken.attach(&attach, &[left.uffd.as_fd()]).unwrap();
    (0..64).for_each(|page| left.check(page, &content(page)));
    taken.goodbye().unwrap();
    serving.stop();
}

/// Faults, discards and kills all the time: no page is ever wrong.
#[test]
fn kills_at_any_moment_lose_nothing() {
    if !has_userfaultfd() {
        return;
    }
    const PAGES: usize = 2048;
    const KILLS: usize = 12;
    let place = Place::new(PAGES);
    let guest = shared(PAGES);
    let mut serving = Serving::start(&place, true);
    let _stream = guest.connect(&place.socket());
    // A server that is killed before it has read the message has nothing to leave.
    guest.check(0, &content(0));
    let is_over = Arc::new(AtomicBool::new(false));
    let touching = {
        let (guest, is_over) = (Arc::clone(&guest), Arc::clone(&is_over));
        thread::spawn(move || {
            // Once round, and then for as long as servers are killed.
            let goes_on = |index: &usize| *index < PAGES || !is_over.load(Ordering::Acquire);
            for index in (0..).take_while(goes_on) {
                let page = index * 677 % PAGES;
                let is_discarded = page.is_multiple_of(5);
                let wanted = match is_discarded && index >= PAGES {
                    true => vec![0; PAGE],
                    false => content(page),
                };
                assert!(guest.read(page) == wanted, "page {page}");
                if is_discarded {
                    guest.discard(page, 1);
                    assert!(guest.read(page) == [0; PAGE], "page {page} was discarded");
                }
                // So slowly that the kills come during the first round.
                thread::sleep(Duration::from_micros(300));
            }
        })
    };
    for kill in 1..=KILLS {
        serving.kill();
        serving = Serving::start(&place, kill % 2 == 0);
        // A server lives for a while; when exactly it is killed does not matter.
        thread::sleep(Duration::from_millis(17));
    }
    is_over.store(true, Ordering::Release);
    within_patience("the guest", move || touching.join().unwrap());
    for page in 0..PAGES {
        let wanted = if page % 5 == 0 {
            vec![0; PAGE]
        } else {
            content(page)
        };
        guest.check(page, &wanted);
    }
    serving.kill();
}

/// Kind: what could not go on at once is given up, although its reason may pass.
#[test]
fn a_vm_whose_thread_cannot_be_started_goes_on_later() {
    if !has_userfaultfd() {
        return;
    }
    for (lack, told) in [
        (THREADLESS, "its thread was not started"),
        (READERLESS, "starting the thread pt-urgent"),
    ] {
        let place = Place::new(64);
        let serving = Serving::start(&place, false);
        let guest = shared(64);
        let stream = guest.connect(&place.socket());
        guest.check(3, &content(3));
        serving.kill();
        let asleep = guest.touch(40);
        let serving = Serving::with(&place, &[lack]);
        assert!(asleep.join() == content(40));
        let log = log(&place);
        assert!(log.contains(told), "{log}");
        // It counts as one VM: the server ends with it.
        drop(stream);
        let Serving(mut server) = serving;
        let status = within_patience("the server's end", move || server.wait().unwrap());
        assert!(status.success());
    }
}
