//! VMMs whose memory has further address spaces: of vhost-user back ends, attached by the native protocol.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::os::fd::AsFd;

use pagetide_serve::native::FEATURE_SPACES;
use pagetide_serve::native::message::{AttachSpace, RefusedCode, SpaceRegion, VmState};
use pagetide_serve::{Options, UserLimits};
use rustix::fs::SealFlags;
use rustix::mm::MapFlags;
use support::native::*;
use support::*;

/// A vhost-user back end: its userfaultfd comes through the VMM.
#[test]
fn a_further_address_space_gets_the_same_memory() {
    if !has_userfaultfd() || !has_minor() {
        return;
    }
    let place = Place::new(16);
    let running = Running::start(place.options());
    let file = memfd(16, SealFlags::SHRINK);
    let guest = Guest::of_file(file.as_fd(), 16, MapFlags::SHARED);
    let back_end = Guest::of_file(file.as_fd(), 16, MapFlags::SHARED);
    let mut client = connect(&place.socket());
    assert_ne!(client.welcome().features & FEATURE_SPACES, 0);
    let attach = attach_of(&guest, vec![region(&guest).minor(1, 0)]);
    let descriptors = [guest.uffd.as_fd(), file.as_fd()];
    client.attach(&attach, &descriptors).unwrap();
    let space = client.attach_space(&space_of(&back_end), back_end.uffd.as_fd());
    let space = space.unwrap();
    for page in [3, 4] {
        back_end.check(page, &content(page));
        guest.check(page, &content(page));
    }
    guest.check(5, &content(5));
    back_end.check(5, &content(5));
    back_end.write(6, 0x66);
    guest.check(6, &with_first(content(6), 0x66));
    guest.write(7, 0x77);
    back_end.check(7, &with_first(content(7), 0x77));
    assert_eq!(client.detach_space(space).unwrap(), 1);
    assert_eq!(code(client.detach_space(space)), RefusedCode::Regions);
    // The VM goes on without it, and with another one.
    guest.check(8, &content(8));
    let second = Guest::of_file(file.as_fd(), 16, MapFlags::SHARED);
    let attached = client.attach_space(&space_of(&second), second.uffd.as_fd());
    attached.unwrap();
    second.check(9, &content(9));
    assert_eq!(client.health().unwrap().state, VmState::Serving);
    client.drain(|_, _| {}).unwrap();
    client.goodbye().unwrap();
    for page in 10..16 {
        guest.check(page, &content(page));
        second.check(page, &content(page));
    }
    running.ended(1);
}

/// Kind: what has ended stays charged.
#[test]
fn a_detached_address_space_is_charged_no_more() {
    if !has_userfaultfd() || !has_minor() {
        return;
    }
    if !has_poison() {
        println!("SKIP: without UFFDIO_POISON the space's userfaultfd stays open, and charged");
        return;
    }
    let place = Place::new(4);
    let limits = UserLimits {
        descriptors: 60,
        ..UserLimits::default()
    };
    let _running = Running::start(Options {
        user_limits: Some(limits),
        ..place.options()
    });
    let file = memfd(4, SealFlags::SHRINK);
    let guest = Guest::of_file(file.as_fd(), 4, MapFlags::SHARED);
    let mut client = connect(&place.socket());
    let attach = attach_of(&guest, vec![region(&guest).minor(1, 0)]);
    let descriptors = [guest.uffd.as_fd(), file.as_fd()];
    client.attach(&attach, &descriptors).unwrap();
    for _ in 0..64 {
        let back_end = Guest::of_file(file.as_fd(), 4, MapFlags::SHARED);
        let space = client.attach_space(&space_of(&back_end), back_end.uffd.as_fd());
        client.detach_space(space.unwrap()).unwrap();
    }
    guest.check(3, &content(3));
}

/// A page whose first byte was written.
fn with_first(mut page: Vec<u8>, value: u8) -> Vec<u8> {
    page[0] = value;
    page
}

#[test]
fn address_spaces_that_cannot_be_served_are_refused() {
    if !has_userfaultfd() || !has_minor() {
        return;
    }
    let place = Place::new(16);
    let _running = Running::start(place.options());
    let file = memfd(16, SealFlags::SHRINK);
    let guest = Guest::of_file(file.as_fd(), 16, MapFlags::SHARED);
    let back_end = Guest::of_file(file.as_fd(), 16, MapFlags::SHARED);
    let mut client = connect(&place.socket());
    let attach = attach_of(&guest, vec![region(&guest).minor(1, 0)]);
    let descriptors = [guest.uffd.as_fd(), file.as_fd()];
    client.attach(&attach, &descriptors).unwrap();
    let right = space_of(&back_end);
    let with = |region: u32, address: u64| AttachSpace {
        regions: vec![SpaceRegion { region, address }],
        ..right.clone()
    };
    let address = right.regions[0].address;
    let uffd = back_end.uffd.as_fd();
    for (space, wanted) in [
        (with(1, address), RefusedCode::Regions),
        (with(0, address + 1), RefusedCode::Regions),
        (with(0, u64::MAX - 4095), RefusedCode::Regions),
        (
            AttachSpace {
                uffd_features: 1 << 7,
                ..right.clone()
            },
            RefusedCode::Descriptors,
        ),
        (
            AttachSpace {
                regions: [&right.regions[..], &right.regions[..]].concat(),
                ..right.clone()
            },
            RefusedCode::Paging,
        ),
    ] {
        assert_eq!(code(client.attach_space(&space, uffd)), wanted, "{space:?}");
    }
    // No userfaultfd, and none at all.
    assert_eq!(
        code(client.attach_space(&right, file.as_fd())),
        RefusedCode::Descriptors
    );
    // None of this has attached a part of it.
    client.attach_space(&right, uffd).unwrap();
    back_end.check(3, &content(3));
    guest.check(4, &content(4));
    // Memory that the VMM has not handed over as a file.
    let private = Guest::new(16);
    let mut other = attached(&private, &place.socket());
    assert_eq!(code(other.attach_space(&right, uffd)), RefusedCode::Paging);
    private.check(1, &content(1));
}
