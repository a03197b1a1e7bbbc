//! VMs that speak Firecracker's protocol are served: every page has its content.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pagetide_serve::{OnFailure, Options, Server, StartError, WorkingSetMode};
use pagetide_sources::Location;
use rustix::net::Shutdown;
use support::*;

#[test]
fn every_page_of_every_region_has_its_content() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let running = Running::start(place.options());
    let guest = Guest::new(64);
    // As above 3 GiB of guest memory: several regions, at offsets of one file.
    let regions = [
        guest.region(0, 20, 44),
        guest.region(20, 4, 0),
        guest.region(24, 40, 4),
    ];
    let stream = UnixStream::connect(place.socket()).unwrap();
    let message = format!("[{}]", regions.join(","));
    send(&stream, message.as_bytes(), &[guest.uffd.as_fd()]);
    for page in (0..64).rev() {
        let image_page = match page {
            0..20 => page + 44,
            20..24 => page - 20,
            _ => page - 20,
        };
        guest.check(page, &content(image_page));
    }
    drop(stream);
    assert_eq!(running.ended(1).faults, 64);
    running.stop();
}

#[test]
fn a_message_may_come_in_parts_and_be_long() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(2000);
    let running = Running::start(place.options());
    let guest = Guest::new(2000);
    // Longer than one read of the server: a region for each page.
    let regions: Vec<String> = (0..2000).map(|page| guest.region(page, 1, page)).collect();
    let message = format!("[{}]", regions.join(","));
    assert!(message.len() > 200_000);
    let stream = UnixStream::connect(place.socket()).unwrap();
    let (first, rest) = message.split_at(7);
    send(&stream, first.as_bytes(), &[]);
    eventually("the server has read a part", || {
        equals(unread_by_peer(&stream), &0)
    });
    send(&stream, rest.as_bytes(), &[guest.uffd.as_fd()]);
    for page in [1999, 0, 1000] {
        guest.check(page, &content(page));
    }
    drop(running);
}

#[test]
fn any_number_of_vms_share_an_image() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let running = Running::start(Options {
        prefetch: true,
        ..place.options()
    });
    let guests: Vec<Arc<Guest>> = (0..8).map(|_| shared(64)).collect();
    let streams: Vec<_> = guests
        .iter()
        .map(|guest| guest.connect(&place.socket()))
        .collect();
    let threads: Vec<_> = guests
        .iter()
        .enumerate()
        .map(|(index, guest)| {
            let guest = Arc::clone(guest);
            thread::spawn(move || {
                for page in 0..64 {
                    let page = (page * 11 + index * 5) % 64;
                    guest.check(page, &content(page));
                    guest.write(page, 0xee);
                    assert_eq!(guest.read(page)[0], 0xee);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    eventually("the VMs", || running.metrics.totals().vms == 8);
    drop(streams);
    running.ended(8);
    // Each write went into the guest's own memory.
    assert_eq!(std::fs::read(place.image()).unwrap()[..PAGE], content(0));
}

#[test]
fn prefetch_brings_in_everything() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(512);
    let running = Running::start(Options {
        prefetch: true,
        ..place.options()
    });
    let guest = Guest::new(512);
    let stream = guest.connect(&place.socket());
    eventually("prefetch", || equals(guest.resident(), &512));
    (0..512).for_each(|page| assert!(guest.read(page) == content(page), "{page}"));
    drop(stream);
    assert_eq!(running.ended(1).faults, 0);
}

/// The file backend of a sparse file reads holes as zeroes.
#[test]
fn holes_of_the_image_are_zeroes() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(4);
    let file = std::fs::File::options()
        .write(true)
        .open(place.image())
        .unwrap();
    file.set_len(16 * PAGE as u64).unwrap();
    let _running = Running::start(place.options());
    let guest = Guest::new(16);
    let _stream = guest.connect(&place.socket());
    guest.check(3, &content(3));
    guest.check(9, &[0; PAGE]);
}

/// A compressed image, and a difference above it, of which the file has holes where nothing has changed.
#[test]
fn images_and_their_layers_are_served() {
    use pagetide_sources::image::{CreateOptions, create};
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(300);
    let path = |name: &str| place.directory.path().join(name);
    let make = |raw: &str, image: &str, base: Option<Location>| {
        let options = CreateOptions {
            base,
            ..CreateOptions::default()
        };
        create(&path(raw), &path(image).into(), &options, &mut |_, _| {}).unwrap();
    };
    let full = std::fs::File::options()
        .write(true)
        .open(place.image())
        .unwrap();
    full.set_len(512 * PAGE as u64).unwrap();
    make("guest.mem", "base.image", None);
    let diff = std::fs::File::create(path("diff.mem")).unwrap();
    diff.set_len(512 * PAGE as u64).unwrap();
    for page in [3, 299, 400] {
        diff.write_all_at(&content(page + 1000), (page * PAGE) as u64)
            .unwrap();
    }
    make(
        "diff.mem",
        "diff.image",
        Some(Location::Path(path("base.image"))),
    );

    for (image, is_diff) in [("base.image", false), ("diff.image", true)] {
        for prefetch in [false, true] {
            let mut options = place.options();
            options.bindings[0].image = Location::Path(path(image));
            options.prefetch = prefetch;
            let running = Running::start(options);
            let guest = Guest::new(512);
            let stream = guest.connect(&place.socket());
            for index in 0..512 {
                let page = index * 101 % 512;
                let wanted = match page {
                    3 | 299 | 400 if is_diff => content(page + 1000),
                    300.. => vec![0; PAGE],
                    _ => content(page),
                };
                guest.check(page, &wanted);
            }
            drop(stream);
            running.stop();
        }
    }
}

/// A byte of the image is changed: the guest that needs it waits, and all others go on.
#[test]
fn a_damaged_image_never_gives_wrong_pages() {
    use pagetide_sources::image::{CreateOptions, create};
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let image = place.directory.path().join("image");
    create(
        &place.image(),
        &image.clone().into(),
        &CreateOptions::default(),
        &mut |_, _| {},
    )
    .unwrap();
    let mut options = place.options();
    options.bindings[0].image = Location::Path(image.clone());
    let running = Running::start(options);
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&image)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 5000).unwrap();
    let guest = Guest::new(64);
    let stream = guest.connect(&place.socket());
    guest.check(39, &content(39));
    file.write_all_at(&[byte[0] ^ 1], 5000).unwrap();
    let waiting = guest.touch(0);
    eventually("the stall", || running.metrics.totals().stalls > 0);
    // Another chunk, of which the fault comes later.
    guest.check(60, &content(60));
    assert!(waiting.is_undisturbed());
    assert_eq!(guest.residents(), [39, 60]);
    file.write_all_at(&byte, 5000).unwrap();
    assert!(waiting.join() == content(0));
    drop((stream, running));
}

#[test]
fn discarded_pages_are_zeroes_and_never_the_images_again() {
    if !has_userfaultfd() {
        return;
    }
    for prefetch in [false, true] {
        let place = Place::new(256);
        let _running = Running::start(Options {
            prefetch,
            ..place.options()
        });
        let guest = shared(256);
        let _stream = guest.connect(&place.socket());
        let balloon = Arc::clone(&guest);
        within_patience("the balloon", move || {
            (0..64).for_each(|index| balloon.discard(index * 4, 2));
        });
        for page in 0..256 {
            let wanted = match page % 4 {
                0 | 1 => vec![0; PAGE],
                _ => content(page),
            };
            guest.check(page, &wanted);
        }
        // Touched, discarded, touched.
        let balloon = Arc::clone(&guest);
        within_patience("the balloon", move || balloon.discard(3, 1));
        guest.check(3, &[0; PAGE]);
    }
}

#[test]
fn huge_pages_are_installed_whole() {
    if !has_userfaultfd() {
        return;
    }
    let Some(guest) = Guest::huge(4 << 20) else {
        return;
    };
    let place = Place::new(1024);
    let running = Running::start(place.options());
    let stream = guest.connect(&place.socket());
    for page in [700, 3, 1023] {
        guest.check(page, &content(page));
    }
    drop(stream);
    assert_eq!(running.ended(1).faults, 2);
}

/// Never zeroes in place of content that does not exist.
#[test]
fn pages_beyond_the_end_of_the_image_are_never_there() {
    use pagetide_sources::image::{CreateOptions, create};
    use support::native::attached;
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(8);
    let file = std::fs::File::options()
        .write(true)
        .open(place.image())
        .unwrap();
    file.set_len(6 * PAGE as u64 + 100).unwrap();
    let image = place.directory.path().join("image");
    let any_length = CreateOptions {
        any_length: true,
        ..CreateOptions::default()
    };
    create(
        &place.image(),
        &image.clone().into(),
        &any_length,
        &mut |_, _| {},
    )
    .unwrap();
    let mut options = place.options();
    options.bindings[0].image = Location::Path(image);
    options.prefetch = true;
    options.any_length = true;
    let running = Running::start(options);
    let guest = Guest::new(16);
    let stream = attached(&guest, &place.socket());
    eventually("prefetch", || equals(guest.resident(), &6));
    let half = guest.touch(6);
    eventually("the stall", || equals(running.metrics.totals().stalls, &1));
    let beyond = guest.touch(12);
    // The server has read both faults when it reads what comes then, and nothing is on its way to either.
    guest.go_round(4);
    eventually("the server has handled all faults", || {
        let totals = running.metrics.totals();
        equals((totals.faults_on_removed, totals.in_flight_bytes), &(1, 0))
    });
    assert!(half.is_undisturbed() && beyond.is_undisturbed());
    assert_eq!(guest.residents(), [0, 1, 2, 3, 4, 5]);
    // The other VM does not notice.
    let other = Guest::new(6);
    let _other = attached(&other, &place.socket());
    other.check(5, &content(5));
    // At its end the server poisons these pages, and SIGBUS would end this process.
    std::mem::forget((guest, running, stream));
}

fn refused(place: &Place, message: &[u8], descriptors: &[std::os::fd::BorrowedFd<'_>]) {
    let stream = UnixStream::connect(place.socket()).unwrap();
    send(&stream, message, descriptors);
    wait_for_end(&stream);
}

#[test]
fn clients_that_make_no_sense_are_refused_and_others_are_served() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(16);
    let running = Running::start(place.options());
    let served = Guest::new(16);
    let _stream = served.connect(&place.socket());
    served.check(1, &content(1));
    let guest = Guest::new(16);
    let uffd = guest.uffd.as_fd();
    let file = std::fs::File::open("/dev/null").unwrap();
    let message = guest.message();
    refused(&place, b"{}", &[uffd]);
    refused(&place, b"[]", &[uffd]);
    refused(&place, message.as_bytes(), &[]);
    refused(&place, message.as_bytes(), &[uffd, uffd]);
    refused(&place, message.as_bytes(), &[file.as_fd()]);
    let twice = format!("[{},{}]", guest.region(0, 2, 0), guest.region(1, 2, 4));
    refused(&place, twice.as_bytes(), &[uffd]);
    // One that leaves.
    let stream = UnixStream::connect(place.socket()).unwrap();
    send(&stream, &message.as_bytes()[..20], &[uffd]);
    rustix::net::shutdown(&stream, Shutdown::Write).unwrap();
    wait_for_end(&stream);
    eventually("the counts", || {
        equals(running.metrics.totals().vms_refused, &7)
    });
    served.check(2, &content(2));
    // A refused guest reads no zeroes even though the client has no other copy of the descriptor.
    let _stream = guest.connect(&place.socket());
    guest.check(3, &content(3));
}

#[test]
fn a_client_that_sends_a_part_and_then_nothing_is_refused() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(16);
    let running = Running::start(Options {
        // The limit that this test reaches. Nobody else connects.
        handshake_limit: Duration::from_millis(100),
        ..place.options()
    });
    let guest = Guest::new(16);
    let part = &guest.message().into_bytes()[..20];
    refused(&place, part, &[guest.uffd.as_fd()]);
    assert_eq!(running.metrics.totals().vms_refused, 1);
}

#[test]
fn a_server_ends_once_its_last_vm_has_gone() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(4);
    let running = Running::start(Options {
        once: true,
        max_vms: 1,
        ..place.options()
    });
    // Connections without a byte, as a program makes that checks for a listener.
    for _ in 0..5 {
        drop(running.connect_next(|| UnixStream::connect(place.socket()).unwrap()));
    }
    let guest = Guest::new(4);
    let (stream, _) = running.connect_next(|| guest.try_to_connect(&place.socket()));
    guest.check(0, &content(0));
    drop(stream);
    running.wait();
    assert!(!place.socket().exists());
}

/// What guests may still need is fetched before the server ends.
#[test]
fn a_stopped_server_leaves_complete_guests_behind() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(256);
    let running = Running::start(place.options());
    let guest = shared(256);
    let _stream = guest.connect(&place.socket());
    guest.check(7, &content(7));
    let balloon = Arc::clone(&guest);
    within_patience("the balloon", move || balloon.discard(8, 1));
    running.stop();
    for page in 0..256 {
        let wanted = if page == 8 {
            vec![0; PAGE]
        } else {
            content(page)
        };
        assert!(guest.read(page) == wanted, "{page}");
    }
    // The VMM has kept its copy of the userfaultfd: its balloon must not wait for a reader of events.
    let balloon = Arc::clone(&guest);
    within_patience("the balloon", move || balloon.discard(9, 4));
    assert!(guest.read(9) == [0; PAGE]);
}

/// A guest that needs half of what an earlier one touched shows that by the pages left out of the replay.
#[test]
fn the_waste_of_a_replay_is_estimated() {
    if !has_userfaultfd() {
        return;
    }
    const PAGES: usize = 8192;
    let place = Place::new(PAGES);
    let run = |touched: std::ops::Range<usize>| {
        let running = Running::start(Options {
            working_set: WorkingSetMode::Auto,
            prefetch: false,
            ..place.options()
        });
        let guest = Guest::new(PAGES);
        let stream = guest.connect(&place.socket());
        touched.for_each(|page| guest.check(page, &content(page)));
        drop(stream);
        let totals = running.ended(1);
        running.stop();
        totals
    };
    let recorded = run(0..PAGES);
    assert_eq!((recorded.recorded_pages, recorded.sampled_pages), (8192, 0));
    let replayed = run(0..PAGES / 2);
    let (sampled, touched) = (replayed.sampled_pages, replayed.sampled_pages_touched);
    assert_eq!(replayed.replayed_pages + sampled, 8192);
    assert!((15..55).contains(&sampled), "{replayed:?}");
    assert!(
        (sampled / 4..sampled * 3 / 4).contains(&touched),
        "{replayed:?}"
    );
}

/// What a guest does after a rest belongs to its working set, too: nothing comes ahead of it, and what it did
/// before is there for the next guest meanwhile.
#[test]
fn a_guest_that_rests_before_its_workload_is_recorded_whole() {
    if !has_userfaultfd() {
        return;
    }
    for mode in [WorkingSetMode::Auto, WorkingSetMode::Record] {
        let place = Place::new(64);
        let running = Running::start(Options {
            working_set: mode,
            prefetch: true,
            ..place.options()
        });
        let saved = || {
            let set = pagetide_serve::WorkingSet::load(&place.working_set()).unwrap();
            set.map(|set| -> (Vec<u64>, u64) {
                let pages = set.touches.iter().map(|touch| touch.page.0);
                (pages.collect(), set.recordings.into())
            })
        };
        // What was recorded is written when the guest has rested for a while.
        let has_rested = |pages: &[u64]| {
            eventually("a part", || equals(saved(), &Some((pages.to_vec(), 1))));
        };
        let guest = Guest::new(64);
        let stream = guest.connect(&place.socket());
        [9, 3]
            .into_iter()
            .for_each(|page| guest.check(page, &content(page)));
        has_rested(&[9, 3]);
        let mut vms = 1;
        if mode == WorkingSetMode::Auto {
            let next = Guest::new(64);
            let stream = next.connect(&place.socket());
            eventually("prefetch", || equals(next.resident(), &64));
            eventually("the replay's count", || {
                equals(running.metrics.totals().replayed_pages, &2)
            });
            drop(stream);
            vms += 1;
        }
        // A second rest comes long after anything for which the first is a reason.
        guest.check(40, &content(40));
        has_rested(&[9, 3, 40]);
        assert_eq!(guest.residents(), [3, 9, 40], "{mode:?}");
        guest.check(5, &content(5));
        drop(stream);
        running.ended(vms);
        assert_eq!(saved(), Some((vec![9, 3, 40, 5], 1)), "{mode:?}");
    }
}

#[test]
fn a_working_set_is_recorded_and_replayed() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(1024);
    let options = || Options {
        working_set: WorkingSetMode::Auto,
        ..place.options()
    };
    let touched: Vec<usize> = (0..200).map(|index| index * 37 % 1024).collect();
    let run = |expect_faults: bool| {
        let running = Running::start(options());
        let guest = Guest::new(1024);
        let stream = guest.connect(&place.socket());
        if !expect_faults {
            eventually("the replay", || equals(guest.resident(), &200));
        }
        touched
            .iter()
            .for_each(|&page| guest.check(page, &content(page)));
        drop(stream);
        let totals = running.ended(1);
        running.stop();
        totals
    };
    let first = run(true);
    assert_eq!((first.faults, first.recorded_pages), (200, 200));
    let set = pagetide_serve::WorkingSet::load(&place.working_set())
        .unwrap()
        .unwrap();
    let pages: Vec<usize> = set
        .touches
        .iter()
        .map(|touch| usize::try_from(touch.page.0).unwrap())
        .collect();
    assert_eq!(pages, touched, "in the order of their touches");
    let second = run(false);
    assert_eq!(
        (second.faults, second.replayed_pages, second.pages_ahead),
        (0, 200, 200)
    );
    // Of another image: not used, and recorded anew.
    let mut bytes = std::fs::read(place.image()).unwrap();
    bytes[..PAGE].fill(1);
    std::fs::write(place.image(), bytes).unwrap();
    let guest = Guest::new(1024);
    let running = Running::start(options());
    let stream = guest.connect(&place.socket());
    guest.check(0, &[1; PAGE]);
    (1..16).for_each(|page| guest.check(page, &content(page)));
    drop(stream);
    assert_eq!(running.ended(1).recorded_pages, 16);
}

#[test]
fn a_server_that_cannot_start_leaves_nothing_behind() {
    let place = Place::new(1);
    std::fs::write(place.socket(), "a file").unwrap();
    assert!(matches!(
        Server::bind(place.options()),
        Err(StartError::Listen(_))
    ));
    assert_eq!(std::fs::read(place.socket()).unwrap(), b"a file");
    std::fs::remove_file(place.socket()).unwrap();
    let running = Running::start(place.options());
    assert!(matches!(
        Server::bind(place.options()),
        Err(StartError::Listen(_))
    ));
    running.stop();
    std::fs::remove_file(place.image()).unwrap();
    assert!(matches!(
        Server::bind(place.options()),
        Err(StartError::Image { .. })
    ));
    assert!(!place.socket().exists());
    assert!(matches!(
        Server::bind(Options::default()),
        Err(StartError::NoBindings)
    ));
    assert_eq!(Options::default().on_failure, OnFailure::Stall);
}
