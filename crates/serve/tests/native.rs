//! VMMs that speak the native protocol: every request, and what it promises.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use pagetide_memory::{PageIndex, PageMapImage, PageState};
use pagetide_serve::Options;
use pagetide_serve::native::client::Client;
use pagetide_serve::native::message::{
    Message, PageMapPart, RefusedCode, Region, VmState, WorkingSetAction, WorkingSetState,
};
use rustix::fs::{FallocateFlags, SealFlags, fallocate, fstat, ftruncate};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use support::native::*;
use support::*;

#[test]
fn both_protocols_are_served_at_one_socket() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(16);
    let running = Running::start(place.options());
    let (native, plain) = (Guest::new(16), Guest::new(16));
    let client = attached(&native, &place.socket());
    let _stream = plain.connect(&place.socket());
    for page in 0..16 {
        native.check(page, &content(page));
        plain.check(page, &content(page));
    }
    assert_eq!(client.welcome().image_bytes, 16 * PAGE as u64);
    assert_eq!(client.welcome().version, 2);
    client.goodbye().unwrap();
    eventually("the VM's end", || {
        let totals = running.metrics.totals();
        equals((totals.vms_ended, totals.vms), &(1, 1))
    });
}

/// Two regions, two userfaultfds.
#[test]
fn regions_may_have_userfaultfds_of_their_own() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(16);
    let _running = Running::start(place.options());
    let (first, second) = (Guest::new(8), Guest::new(4));
    let mut client = connect(&place.socket());
    let regions = vec![
        Region {
            uffd: 1,
            ..Region::missing(first.address(0) as u64, 8 * PAGE as u64, 4 * PAGE as u64)
        },
        Region::missing(second.address(0) as u64, 4 * PAGE as u64, 12 * PAGE as u64),
    ];
    let descriptors = [second.uffd.as_fd(), first.uffd.as_fd()];
    let done = client.attach(&attach_of(&first, regions), &descriptors);
    assert_eq!(done.unwrap().regions, 2);
    first.check(7, &content(11));
    second.check(3, &content(15));
}

#[test]
fn a_working_set_is_recorded_saved_and_replayed_on_request() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let socket = place.socket();
    // By itself the server does neither.
    let _running = Running::start(Options {
        clients_record: true,
        ..place.options()
    });
    let guest = Guest::new(64);
    let mut client = attached(&guest, &socket);
    guest.check(1, &content(1));
    let nothing = client.working_set(WorkingSetAction::Save);
    assert_eq!(code(nothing), RefusedCode::WorkingSet);
    let nothing = client.working_set(WorkingSetAction::Replay);
    assert_eq!(code(nothing), RefusedCode::WorkingSet);
    let state = client.working_set(WorkingSetAction::Record).unwrap();
    assert_eq!(state, (WorkingSetState::Recording, 0));
    for page in [40, 7, 41] {
        guest.check(page, &content(page));
    }
    let state = client.working_set(WorkingSetAction::Save).unwrap();
    assert_eq!(state, (WorkingSetState::Off, 3));
    guest.check(2, &content(2));
    let other = Guest::new(64);
    let mut replaying = attached(&other, &socket);
    let state = replaying.working_set(WorkingSetAction::Replay).unwrap();
    assert_eq!(state, (WorkingSetState::Replaying, 3));
    eventually("the replay", || equals(other.resident(), &3));
    for page in [7, 40, 41] {
        other.check(page, &content(page));
    }
    assert_eq!(replaying.health().unwrap().faults, 0, "all came ahead");
    let state = replaying.working_set(WorkingSetAction::Record).unwrap();
    assert_eq!(state.0, WorkingSetState::Recording);
    other.check(9, &content(9));
    replaying.working_set(WorkingSetAction::Off).unwrap();
    replaying.goodbye().unwrap();
    let saved = pagetide_serve::WorkingSet::load(&place.working_set());
    assert_eq!(saved.unwrap().unwrap().touches.len(), 3, "nothing after it");
}

#[test]
fn memory_with_a_memfd_is_filled_once_and_shared() {
    if !has_userfaultfd() || !has_minor() {
        return;
    }
    let place = Place::new(64);
    let _running = Running::start(place.options());
    let file = memfd(80, SealFlags::SHRINK);
    let guest = Guest::of_file(file.as_fd(), 80, MapFlags::SHARED);
    let mut client = connect(&place.socket());
    // The image at page 10 of the file.
    let region = Region::missing(guest.address(10) as u64, 64 * PAGE as u64, 0);
    let attach = attach_of(&guest, vec![region.minor(1, 10 * PAGE as u64)]);
    let descriptors = [guest.uffd.as_fd(), file.as_fd()];
    client.attach(&attach, &descriptors).unwrap();
    for page in [0, 63, 31] {
        guest.check(10 + page, &content(page));
    }
    let file = std::fs::File::from(file);
    let mut found = vec![0; PAGE];
    file.read_exact_at(&mut found, 41 * PAGE as u64).unwrap();
    assert!(found == content(31), "the content is in the file");
    assert_eq!(fstat(&file).unwrap().st_blocks, 3 * 8, "and nothing else");
    // A vhost-user back end writes to a page, and the guest reads it.
    file.write_all_at(&[0xaa; PAGE], 10 * PAGE as u64).unwrap();
    guest.check(10, &[0xaa; PAGE]);
    client.drain(|_, _| {}).unwrap();
    client.goodbye().unwrap();
    (32..64).for_each(|page| guest.check(10 + page, &content(page)));
}

#[test]
fn memfds_that_endanger_the_server_are_refused() {
    if !has_userfaultfd() || !has_minor() {
        return;
    }
    let place = Place::new(8);
    let running = Running::start(Options {
        // The huge region is longer than the image.
        any_length: true,
        ..place.options()
    });
    let guest = Guest::of_file(memfd(8, SealFlags::SHRINK).as_fd(), 8, MapFlags::SHARED);
    let plain = std::fs::File::open(place.image()).unwrap();
    let minor = region(&guest).minor(1, 0);
    let short = memfd(4, SealFlags::SHRINK);
    let refused = [
        (memfd(8, SealFlags::empty()), RefusedCode::NotSealed),
        (memfd(8, SealFlags::GROW), RefusedCode::NotSealed),
        (plain.into(), RefusedCode::File),
        (short, RefusedCode::File),
    ];
    for (index, (file, wanted)) in refused.iter().enumerate() {
        let mut client = connect(&place.socket());
        let attach = attach_of(&guest, vec![minor]);
        let result = client.attach(&attach, &[guest.uffd.as_fd(), file.as_fd()]);
        assert_eq!(code(result), *wanted, "file {index}");
    }
    let file = memfd(8, SealFlags::SHRINK);
    let descriptors = [guest.uffd.as_fd(), file.as_fd()];
    let mut attach = attach_of(&guest, vec![minor]);
    attach.uffd_features = 0;
    let result = connect(&place.socket()).attach(&attach, &descriptors);
    assert_eq!(code(result), RefusedCode::Descriptors);
    let huge = Region {
        address: 2 << 20,
        bytes: 2 << 20,
        page_size: pagetide_memory::PageSize::Size2M,
        ..minor
    };
    let attach = attach_of(&guest, vec![huge]);
    let result = connect(&place.socket()).attach(&attach, &descriptors);
    assert_eq!(code(result), RefusedCode::Unsupported);
    eventually("the count", || {
        equals(running.metrics.totals().vms_refused, &6)
    });
}

/// 16 clones that only read have one copy of the image, in the memfd.
#[test]
fn clones_that_only_read_share_one_copy() {
    const PAGES: usize = 1024;
    if !has_userfaultfd() || !has_minor() {
        return;
    }
    let place = Place::new(PAGES);
    let running = Running::start(place.options());
    let socket = place.socket();
    let (first, first_client, file) = cloned(&socket, PAGES);
    assert_eq!(fstat(&file).unwrap().st_blocks, 0, "it is filled lazily");
    (0..PAGES).for_each(|page| assert!(first.read(page) == content(page), "{page}"));
    let blocks = fstat(&file).unwrap().st_blocks;
    assert_eq!(usize::try_from(blocks).unwrap() * 512, PAGES * PAGE);
    let clones: Vec<_> = (0..15).map(|_| cloned(&socket, PAGES)).collect();
    for (guest, _, _) in &clones {
        (0..PAGES).for_each(|page| assert!(guest.read(page) == content(page), "{page}"));
        assert_eq!(guest.resident(), PAGES);
        let own = guest.smaps("Anonymous");
        assert!(own * 50 < (PAGES * PAGE) as u64, "{own} bytes of its own");
    }
    assert_eq!(fstat(&file).unwrap().st_blocks, blocks, "still one copy");
    let proportional: u64 = clones.iter().map(|(guest, ..)| guest.smaps("Pss")).sum();
    assert!(proportional <= (PAGES * PAGE) as u64, "{proportional}");
    first_client.goodbye().unwrap();
    drop((clones, file));
    running.ended(16);
}

#[test]
fn a_clone_changes_nothing_for_another() {
    if !has_userfaultfd() || !has_minor() {
        return;
    }
    let place = Place::new(32);
    let _running = Running::start(place.options());
    let (one, _one, file) = cloned(&place.socket(), 32);
    let (two, mut control, _) = cloned(&place.socket(), 32);
    // A write to a page that nobody has touched, and to one that both have.
    one.check(5, &content(5));
    two.check(5, &content(5));
    for page in [4, 5] {
        one.write(page, 0xee);
        assert_eq!(one.read(page)[0], 0xee);
        assert_eq!(one.read(page)[1..], content(page)[1..]);
        two.check(page, &content(page));
    }
    // A discarded page is zero here, and content there, whoever touches it first.
    let mut zeroed = content(8);
    one.check(8, &zeroed);
    one.discard(6, 4);
    zeroed.fill(0);
    for page in 6..10 {
        one.check(page, &zeroed);
        two.check(page, &content(page));
        one.check(page, &zeroed);
    }
    // The file cannot be changed by a client.
    let denied = Err(rustix::io::Errno::PERM);
    assert_eq!(rustix::io::pwrite(&file, b"x", 0).map(|_| ()), denied);
    assert_eq!(ftruncate(&file, 0), denied);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(fallocate(&file, punch, 0, 4096), denied);
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let null = std::ptr::null_mut();
    // SAFETY: mmap without MAP_FIXED replaces no other mapping.
    let mapped = unsafe { mmap(null, PAGE, prot, MapFlags::SHARED, &file, 0) };
    assert!(mapped.is_err());
    let drained = control.drain(|_, _| {}).unwrap();
    assert_eq!(drained.present, 32);
    (0..32).for_each(|page| two.check(page, &content(page)));
}

/// Zeroes of the image need no memory.
#[test]
fn holes_of_the_image_are_zeroes_in_clones() {
    if !has_userfaultfd() || !has_minor() {
        return;
    }
    let place = Place::new(4);
    let image = std::fs::File::options().write(true).open(place.image());
    image.unwrap().set_len(16 * PAGE as u64).unwrap();
    let _running = Running::start(place.options());
    let (guest, mut client, file) = cloned(&place.socket(), 16);
    (4..16).for_each(|page| guest.check(page, &[0; PAGE]));
    guest.write(9, 7);
    assert_eq!(guest.read(9)[..2], [7, 0]);
    client.drain(|_, _| {}).unwrap();
    (0..4).for_each(|page| guest.check(page, &content(page)));
    assert_eq!(fstat(&file).unwrap().st_blocks, 4 * 8);
    let mut outside = connect(&place.socket());
    let beyond = region(&guest).cloned_image();
    let attach = attach_of(&guest, vec![beyond]);
    let result = outside.attach(&attach, &[guest.uffd.as_fd()]);
    assert_eq!(code(result), RefusedCode::Regions, "share comes first");
}

/// Kind: a limit that one way in has, and another lacks. A message of a hundred bytes may claim terabytes, and the server
/// pays for each page.
#[test]
fn memory_beyond_the_image_is_refused_in_each_mode() {
    if !has_userfaultfd() || !has_minor() {
        return;
    }
    let place = Place::new(8);
    let _running = Running::start(place.options());
    let file = memfd(9, SealFlags::SHRINK);
    let refused = |guest: &Guest, region: Region, clone: bool| {
        let mut client = connect(&place.socket());
        if clone {
            client.share().unwrap();
        }
        let descriptors = match region.file {
            Some(_) => vec![guest.uffd.as_fd(), file.as_fd()],
            None => vec![guest.uffd.as_fd()],
        };
        code(client.attach(&attach_of(guest, vec![region]), &descriptors))
    };
    let guest = Guest::new(9);
    let missing = region(&guest);
    assert_eq!(refused(&guest, missing, false), RefusedCode::NoContent);
    // One page, from the end of the image on.
    let behind = Region::missing(guest.address(0) as u64, PAGE as u64, 8 * PAGE as u64);
    assert_eq!(refused(&guest, behind, false), RefusedCode::NoContent);
    let clone = missing.cloned_image();
    let with_file = Guest::of_file(file.as_fd(), 9, MapFlags::SHARED);
    let minor = region(&with_file).minor(1, 0);
    assert_eq!(refused(&with_file, minor, false), RefusedCode::NoContent);
    assert_eq!(refused(&with_file, clone, true), RefusedCode::NoContent);
}

fn state_of(parts: &[PageMapPart], page: u64) -> PageState {
    let map = PageMapImage::decode(&parts[0].bytes).unwrap();
    map.state(PageIndex(page)).unwrap()
}

#[test]
fn a_second_server_continues_from_the_page_map() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let first = Running::start(place.options());
    let mut options = place.options();
    options.bindings[0].socket = place.directory.path().join("second.sock");
    let socket = options.bindings[0].socket.clone();
    let second = Running::start(options);
    let guest = Guest::new(64);
    let mut client = attached(&guest, &place.socket());
    guest.check(3, &content(3));
    guest.write(4, 0x44);
    guest.discard(10, 2);
    assert_eq!(guest.read(10), vec![0; PAGE]);
    let parts = client.hand_over().unwrap();
    assert_eq!(parts.len(), 1);
    assert_eq!(state_of(&parts, 3), PageState::Present);
    assert_eq!(state_of(&parts, 11), PageState::Removed);
    assert_eq!(state_of(&parts, 12), PageState::Absent);
    assert_eq!(client.health().unwrap().state, VmState::HandedOver);
    assert_eq!(code(client.drain(|_, _| {})), RefusedCode::Order);
    // Nobody serves: a thread waits, and reads no zeroes.
    let waiting = guest.touch(20);
    // The thread that has served this VM answers later than it would read a fault.
    assert_eq!(client.health().unwrap().state, VmState::HandedOver);
    assert!(waiting.is_undisturbed());
    assert_eq!(guest.residents(), [3, 4, 10]);
    let mut successor = connect(&socket);
    successor.resume_from(&parts).unwrap();
    let attach = attach_of(&guest, vec![region(&guest)]);
    successor.attach(&attach, &[guest.uffd.as_fd()]).unwrap();
    assert!(waiting.join() == content(20));
    // The first server's end touches nothing.
    client.goodbye().unwrap();
    first.stop();
    guest.check(10, &[0; PAGE]);
    guest.check(11, &[0; PAGE]);
    assert_eq!(guest.read(4)[0], 0x44);
    guest.discard(3, 1);
    guest.check(3, &[0; PAGE]);
    let drained = successor.drain(|_, _| {}).unwrap();
    assert_eq!(drained.present, 64);
    (12..64).for_each(|page| guest.check(page, &content(page)));
    assert_eq!(second.metrics.totals().vms, 1);
}

/// The successor of a clone gives it memory of its own.
#[test]
fn a_clone_is_handed_over_as_missing() {
    if !has_userfaultfd() || !has_minor() {
        return;
    }
    let place = Place::new(32);
    let _first = Running::start(place.options());
    let mut options = place.options();
    options.bindings[0].socket = place.directory.path().join("second.sock");
    let socket = options.bindings[0].socket.clone();
    let _second = Running::start(options);
    let (guest, mut client, _file) = cloned(&place.socket(), 32);
    let (other, _other, _) = cloned(&place.socket(), 32);
    guest.check(1, &content(1));
    // In the file, and not mapped here.
    other.check(2, &content(2));
    guest.discard(5, 1);
    let parts = client.hand_over().unwrap();
    client.goodbye().unwrap();
    let mut successor = connect(&socket);
    successor.resume_from(&parts).unwrap();
    let attach = attach_of(&guest, vec![region(&guest)]);
    successor.attach(&attach, &[guest.uffd.as_fd()]).unwrap();
    for page in 0..32 {
        match page {
            5 => guest.check(page, &[0; PAGE]),
            _ => guest.check(page, &content(page)),
        }
    }
}

#[test]
fn page_maps_that_do_not_fit_are_refused() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(16);
    let _running = Running::start(place.options());
    let (guest, small) = (Guest::new(16), Guest::new(8));
    let map_of = |guest: &Guest| {
        let mut client = attached(guest, &place.socket());
        client.hand_over().unwrap()
    };
    let (whole, short) = (map_of(&guest), map_of(&small));
    let damaged = vec![PageMapPart {
        bytes: whole[0].bytes[1..].to_vec(),
        ..whole[0]
    }];
    let of_no_region = vec![PageMapPart {
        region: 1,
        ..whole[0].clone()
    }];
    let of_no_part = vec![PageMapPart {
        first_page: 8,
        ..short[0].clone()
    }];
    let long = vec![PageMapPart {
        bytes: vec![0; (16 << 20) + 1],
        ..whole[0]
    }];
    let twice = [whole.clone(), whole.clone()].concat();
    for (index, parts) in [short, damaged, of_no_region, of_no_part, long, twice]
        .iter()
        .enumerate()
    {
        let mut client = connect(&place.socket());
        let sent = client.resume_from(parts);
        let attach = attach_of(&guest, vec![region(&guest)]);
        let result = sent.and_then(|()| client.attach(&attach, &[guest.uffd.as_fd()]));
        let text = result.as_ref().unwrap_err().to_string();
        assert_eq!(code(result), RefusedCode::PageMap, "maps {index}");
        let is_bound = text.contains("more than 16777216 bytes");
        assert_eq!(is_bound, index == 4, "{text}");
    }
}

#[test]
fn lost_bytes_are_poisoned_and_stay_so() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(16);
    let _running = Running::start(place.options());
    let guest = Guest::new(16);
    let mut client = attached(&guest, &place.socket());
    // The whole of page 5, and a part of page 6.
    let pages = client.poison(5 * PAGE as u64, PAGE as u64 + 512).unwrap();
    assert_eq!(pages, 1);
    assert_eq!(client.poison(5 * PAGE as u64, PAGE as u64).unwrap(), 0);
    assert_eq!(client.poison(1 << 40, PAGE as u64).unwrap(), 0);
    assert_eq!(code(client.poison(u64::MAX, 2)), RefusedCode::Regions);
    let drained = client.drain(|_, _| {}).unwrap();
    assert_eq!((drained.present, drained.lost), (15, 1));
    assert_eq!(guest.resident(), 15);
    let health = client.health().unwrap();
    assert_eq!(health.lost, 1);
    guest.check(6, &content(6));
    client.goodbye().unwrap();
}

/// Content that is unavailable for a while: the VMM hears of it, and says when to try again.
#[test]
fn a_stall_is_reported_and_resumed_on_request() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let running = Running::start(Options {
        resume_after: NEVER,
        ..place.options()
    });
    let guest = Guest::new(64);
    let mut client = attached(&guest, &place.socket());
    let cut = place.cut(32);
    let waiting = guest.touch(40);
    eventually("the stall", || running.metrics.totals().stalls > 0);
    let health = client.health().unwrap();
    assert!(health.stalls > 0 && !health.last_error.is_empty());
    let notice = client.notice().unwrap();
    assert!(
        matches!(notice, Some(Message::Stalled { .. })),
        "{notice:?}"
    );
    assert!(waiting.is_undisturbed());
    assert_eq!(guest.resident(), 0);
    cut.mend();
    assert_eq!(client.resume().unwrap(), 1);
    assert!(waiting.join() == content(40));
    assert_eq!(client.health().unwrap().state, VmState::Serving);
    assert_eq!(client.resume().unwrap(), 0);
}

#[test]
fn a_server_that_ends_says_so() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(512);
    let running = Running::start(place.options());
    let guest = Guest::new(512);
    let mut client = attached(&guest, &place.socket());
    guest.check(1, &content(1));
    running.stop();
    let notice = client.notice().unwrap();
    assert!(
        matches!(notice, Some(Message::GoingAway { .. })),
        "{notice:?}"
    );
    assert!(client.health().is_err());
    (0..512).for_each(|page| assert!(guest.read(page) == content(page), "{page}"));
}

/// A client may be gone at any moment.
#[test]
fn a_client_that_says_goodbye_before_attach_is_let_go() {
    let place = Place::new(1);
    let running = Running::start(Options {
        max_vms: 1,
        ..place.options()
    });
    // One is accepted when the last has ended.
    let mut turned_away = 0;
    let mut next = || {
        eventually("the last client's end", || {
            let client = Client::connect(&place.socket());
            client.inspect_err(|_| turned_away += 1)
        })
    };
    next().goodbye().unwrap();
    drop(next());
    let _last = next();
    let totals = running.metrics.totals();
    assert_eq!((totals.vms_accepted, totals.vms_refused), (3, turned_away));
}
