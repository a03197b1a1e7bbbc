//! Each binding is opened on its own, and off the thread that accepts VMs: one that cannot be opened fails alone.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "../../sources/tests/support/mod.rs"]
mod http;
mod support;

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pagetide_serve::{Binding, OnFailure, Options, WorkingSetMode};
use pagetide_sources::Location;
use support::*;

const PAGES: usize = 16;

fn path(place: &Place, name: &str) -> PathBuf {
    place.directory.path().join(name)
}

/// A binding without which a server starts.
fn binding(place: &Place, socket: &str, image: &str) -> Binding {
    Binding {
        is_required: false,
        ..Binding::new(path(place, socket), Location::Path(path(place, image)))
    }
}

fn options(place: &Place, bindings: Vec<Binding>) -> Options {
    Options {
        bindings,
        ..place.options()
    }
}

/// A VM at this socket gets the content that it should.
fn assert_served(place: &Place, socket: &str, wanted: fn(usize) -> Vec<u8>) {
    let guest = Guest::new(PAGES);
    let socket = path(place, socket);
    let stream = eventually("the socket", || UnixStream::connect(&socket));
    drop(stream);
    let _stream = guest.connect(&socket);
    for page in 0..PAGES {
        guest.check(page, &wanted(page));
    }
}

fn waiting(running: &Running, sockets: usize) {
    eventually("the sockets that wait", || {
        let text = running.metrics.text();
        let wanted = format!("pagetide_sockets_waiting {sockets}\n");
        text.contains(&wanted).then_some(())
    });
}

#[test]
fn a_binding_that_cannot_be_opened_fails_alone_and_is_tried_again() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(PAGES);
    fs::write(path(&place, "blocked.sock"), "a file").unwrap();
    let running = Running::start(options(
        &place,
        vec![
            binding(&place, "late.sock", "late.mem"),
            binding(&place, "blocked.sock", "guest.mem"),
            binding(&place, "guest.sock", "guest.mem"),
        ],
    ));
    waiting(&running, 2);
    assert_served(&place, "guest.sock", content);
    assert!(!path(&place, "late.sock").exists());
    assert_eq!(fs::read(path(&place, "blocked.sock")).unwrap(), b"a file");
    fs::copy(place.image(), path(&place, "new.mem")).unwrap();
    fs::rename(path(&place, "new.mem"), path(&place, "late.mem")).unwrap();
    fs::remove_file(path(&place, "blocked.sock")).unwrap();
    assert_served(&place, "late.sock", content);
    assert_served(&place, "blocked.sock", content);
    waiting(&running, 0);
    running.stop();
    for socket in ["late.sock", "blocked.sock", "guest.sock"] {
        assert!(!path(&place, socket).exists());
    }
}

/// The store takes connections and says nothing, for as long as it is asked.
#[test]
fn a_silent_store_holds_up_no_other_binding() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(PAGES);
    let store = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = |socket: &str, image: &str| {
        let url = format!("http://{}/{image}", store.local_addr().unwrap());
        Binding {
            image: url.parse().unwrap(),
            ..binding(&place, socket, "none")
        }
    };
    // It never gives the store up, or it would serve the others afterwards.
    let options = |bindings| {
        let mut options = options(&place, bindings);
        options.images.object.limit = NEVER;
        options
    };
    let running = Running::start(options(vec![
        silent("silent.sock", "one"),
        binding(&place, "guest.sock", "guest.mem"),
    ]));
    let (_first, _) = store.accept().unwrap();
    assert_served(&place, "guest.sock", content);
    running.stopper.reload(options(vec![
        silent("silent.sock", "one"),
        silent("other.sock", "two"),
        binding(&place, "guest.sock", "guest.mem"),
        binding(&place, "new.sock", "guest.mem"),
    ]));
    let (_second, _) = store.accept().unwrap();
    assert_served(&place, "guest.sock", content);
    assert_served(&place, "new.sock", content);
    // Nor the end.
    running.stop();
    assert!(!path(&place, "guest.sock").exists());
}

/// Kind: an event that comes while an earlier one is worked on, and is lost.
#[test]
fn a_reload_while_an_image_is_opened_has_it_looked_at_again() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(PAGES);
    let store = http::Server::start(PAGES * PAGE);
    let gate = http::Gate::default();
    let opens = gate.opens_in_the_end();
    let (is_open, looks) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let (was_open, counted) = (Arc::clone(&is_open), Arc::clone(&looks));
    store.behave(move |request| {
        if request.method == "HEAD" && was_open.load(Ordering::SeqCst) {
            counted.fetch_add(1, Ordering::SeqCst);
        }
        http::Act::Gated(gate.clone())
    });
    let options = |more: Vec<Binding>| {
        let slow = Binding {
            image: store.url.parse().unwrap(),
            ..binding(&place, "slow.sock", "none")
        };
        let mut options = options(&place, [vec![slow], more].concat());
        options.images.object.limit = NEVER;
        options.images.object.hedge_after = NEVER..=NEVER;
        options
    };
    let running = Running::start(options(Vec::new()));
    eventually("the opening", || !store.requests().is_empty());
    running
        .stopper
        .reload(options(vec![binding(&place, "guest.sock", "guest.mem")]));
    // The reload has come.
    assert_served(&place, "guest.sock", content);
    is_open.store(true, Ordering::SeqCst);
    drop(opens);
    eventually("another look", || looks.load(Ordering::SeqCst) > 0);
    eventually("the socket", || path(&place, "slow.sock").exists());
    running.stop();
}

fn other(page: usize) -> Vec<u8> {
    content(page + 5000)
}

/// A VMM that was started with the new state must not get the old memory.
#[test]
fn a_socket_with_another_image_serves_nobody_until_it_is_open() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(PAGES);
    let running = Running::start(options(
        &place,
        vec![binding(&place, "guest.sock", "guest.mem")],
    ));
    assert_served(&place, "guest.sock", content);
    let with_other = options(&place, vec![binding(&place, "guest.sock", "other.mem")]);
    running.stopper.reload(with_other.clone());
    waiting(&running, 1);
    eventually("its end", || !place.socket().exists());
    let bytes: Vec<u8> = (0..PAGES).flat_map(other).collect();
    fs::write(path(&place, "new.mem"), bytes).unwrap();
    fs::rename(path(&place, "new.mem"), path(&place, "other.mem")).unwrap();
    running.stopper.reload(with_other);
    assert_served(&place, "guest.sock", other);
    // Options that make no sense change nothing.
    let twice = vec![
        binding(&place, "guest.sock", "guest.mem"),
        binding(&place, "guest.sock", "other.mem"),
    ];
    running.stopper.reload(options(&place, twice));
    running.stopper.reload(options(&place, Vec::new()));
    assert_served(&place, "guest.sock", other);
    running.stop();
}

#[test]
fn vmm_process() {
    child::run_as_child();
}

fn mode(place: &Place, socket: &str) -> u32 {
    let status = fs::metadata(path(place, socket)).unwrap();
    status.permissions().mode() & 0o777
}

#[test]
fn a_binding_may_have_options_of_its_own() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(PAGES);
    let killing = Binding {
        on_failure: Some(OnFailure::Kill),
        socket_mode: Some(0o640),
        ..binding(&place, "kill.sock", "guest.mem")
    };
    let whole = Binding {
        prefetch: Some(true),
        ..binding(&place, "whole.sock", "guest.mem")
    };
    let recorded = Binding {
        working_set: Some(WorkingSetMode::Record),
        ..binding(&place, "record.sock", "guest.mem")
    };
    let plain = binding(&place, "guest.sock", "guest.mem");
    let mut options = options(&place, vec![killing, whole, recorded, plain]);
    options.any_length = true;
    let running = Running::start(options);
    waiting(&running, 0);
    assert_eq!(
        (mode(&place, "kill.sock"), mode(&place, "guest.sock")),
        (0o640, 0o600)
    );

    let guest = Guest::new(PAGES);
    let _stream = guest.connect(&path(&place, "whole.sock"));
    eventually("all pages", || equals(guest.resident(), &PAGES));
    let guest = Guest::new(PAGES);
    let stream = guest.connect(&path(&place, "record.sock"));
    guest.check(3, &content(3));
    assert_eq!(guest.residents(), [3]);
    drop(stream);
    let recorded = || equals(running.metrics.totals().recorded_pages, &1);
    eventually("the recording", recorded);

    // Pages beyond the end of the image are never there.
    let mut killed = child::Vmm::start("vmm_process", &path(&place, "kill.sock"), 2 * PAGES);
    let mut stalled = child::Vmm::start("vmm_process", &path(&place, "guest.sock"), 2 * PAGES);
    stalled.begin_to_read(PAGES + 1);
    eventually("the stall", || running.metrics.totals().stalls > 0);
    killed.begin_to_read(PAGES + 1);
    assert_eq!(killed.signal(), Some(9));
    assert!(stalled.is_running());
}

#[test]
fn all_that_is_wrong_is_found_without_serving() {
    let place = Place::new(PAGES);
    fs::write(path(&place, "blocked.sock"), "a file").unwrap();
    let good = || binding(&place, "guest.sock", "guest.mem");
    let running = Running::start(options(&place, vec![good()]));
    assert!(pagetide_serve::check(&options(&place, vec![good()])).is_empty());
    let mut digest = binding(&place, "digest.sock", "guest.mem");
    digest.digest = Some(pagetide_sources::Digest::of(b"another image"));
    let bindings = vec![
        good(),
        binding(&place, "missing.sock", "missing.mem"),
        binding(&place, "blocked.sock", "guest.mem"),
        binding(&place, "no/such/socket", "guest.mem"),
        digest,
    ];
    let wrong = pagetide_serve::check(&options(&place, bindings));
    let told: Vec<String> = wrong.iter().map(ToString::to_string).collect();
    let wanted = [
        "missing.mem",
        "there is a file that is no socket",
        "listening at",
        "has the digest",
    ];
    assert_eq!(told.len(), wanted.len(), "{told:?}");
    for (told, wanted) in told.iter().zip(wanted) {
        assert!(told.contains(wanted), "{wanted:?} is not in {told:?}");
    }
    assert!(!path(&place, "digest.sock").exists());
    running.stop();
    assert!(pagetide_serve::check(&options(&place, Vec::new())).len() == 1);
}
