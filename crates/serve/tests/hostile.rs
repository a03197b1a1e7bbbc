//! Clients of the native protocol that make no sense: each gets a named error, and others are served.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use pagetide_serve::Options;
use pagetide_serve::native::frame::{Decoder, Frame, MAGIC};
use pagetide_serve::native::message::{Message, RefusedCode, Region};
use support::native::*;
use support::*;

/// A connection without a client's manners.
struct Raw {
    stream: UnixStream,
    decoder: Decoder,
}

impl Raw {
    fn connect(place: &Place) -> Self {
        let stream = UnixStream::connect(place.socket()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let decoder = Decoder::new();
        Self { stream, decoder }
    }

    /// After hello and welcome.
    fn greeted(place: &Place) -> Self {
        let mut raw = Self::connect(place);
        raw.send(&MAGIC, &[]);
        raw.send(&bytes_of(&hello(1, 1).frame(1, false)), &[]);
        assert!(matches!(raw.next(), Some(Message::Welcome(_))));
        raw
    }

    fn attached(place: &Place, guest: &Guest) -> Self {
        let mut raw = Self::greeted(place);
        raw.send(
            &bytes_of(&attach(guest).frame(2, false)),
            &[guest.uffd.as_fd()],
        );
        assert!(matches!(raw.next(), Some(Message::Attached { .. })));
        raw
    }

    fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        send(&self.stream, bytes, descriptors);
    }

    /// The next message; `None` at the end of the stream.
    fn next(&mut self) -> Option<Message> {
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                return Some(Message::of(&frame).unwrap());
            }
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes).unwrap() {
                0 => return None,
                count => self.decoder.push(&bytes[..count]),
            }
        }
    }

    fn refusal(&mut self) -> RefusedCode {
        match self.next() {
            Some(Message::Refused { code, .. }) => code,
            other => panic!("not refused: {other:?}"),
        }
    }
}

fn hello(lowest: u16, highest: u16) -> Message {
    Message::Hello {
        lowest,
        highest,
        features: u64::MAX,
        name: "test".into(),
    }
}

fn attach(guest: &Guest) -> Message {
    Message::Attach(attach_of(guest, vec![region(guest)]))
}

fn bytes_of(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes).unwrap();
    bytes
}

/// A frame that no encoder makes.
fn raw_frame(length: u32, kind: u16, flags: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend(kind.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend(9_u32.to_le_bytes());
    bytes.extend(payload);
    bytes
}

#[test]
fn clients_that_make_no_sense_are_refused_by_name_and_others_are_served() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let running = Running::start(place.options());
    let guest = shared(64);
    let _client = attached(&guest, &place.socket());
    let mut refused = 0;
    let mut check = |name: &str, mut raw: Raw, wanted: RefusedCode| {
        assert_eq!(raw.refusal(), wanted, "{name}");
        assert_eq!(raw.next(), None, "{name}: the connection ends");
        refused += 1;
        let page = refused % 64;
        guest.check(page, &content(page));
    };

    let raw = Raw::connect(&place);
    raw.send(b"PTNATIVF and more", &[]);
    // The magic of the server's own direction comes first, so this has an answer, too.
    check("another magic", raw, RefusedCode::Protocol);
    let raw = Raw::connect(&place);
    raw.send(&[&MAGIC[..], &[0xff; 40]].concat(), &[]);
    check("a huge length", raw, RefusedCode::Protocol);
    let early = |message: Message, wanted| {
        let raw = Raw::connect(&place);
        raw.send(&MAGIC, &[]);
        raw.send(&bytes_of(&message.frame(1, false)), &[]);
        (raw, wanted)
    };
    let (raw, wanted) = early(Message::HealthRequest, RefusedCode::Order);
    check("no hello", raw, wanted);
    let (raw, wanted) = early(hello(3, 9), RefusedCode::Version);
    check("a later version", raw, wanted);
    let (raw, wanted) = early(hello(0, 0), RefusedCode::Version);
    check("an earlier version", raw, wanted);

    let later = |bytes: &[u8], descriptors: &[BorrowedFd<'_>]| {
        let raw = Raw::greeted(&place);
        raw.send(bytes, descriptors);
        raw
    };
    let of = |message: &Message| bytes_of(&message.frame(3, false));
    let uffd = guest.uffd.as_fd();
    check(
        "a second hello",
        later(&of(&hello(1, 1)), &[]),
        RefusedCode::Order,
    );
    check(
        "drain first",
        later(&of(&Message::Drain), &[]),
        RefusedCode::Order,
    );
    check(
        "an answer",
        later(&of(&Message::Left), &[]),
        RefusedCode::Order,
    );
    let unknown = raw_frame(0, 99, 0, &[]);
    check(
        "an unknown type",
        later(&unknown, &[]),
        RefusedCode::Unsupported,
    );
    let flagged = raw_frame(0, 4, 8, &[]);
    check(
        "an unknown flag",
        later(&flagged, &[]),
        RefusedCode::Protocol,
    );
    let long = raw_frame(1, 4, 0, &[0]);
    check("a longer payload", later(&long, &[]), RefusedCode::Protocol);
    let none = of(&attach(&guest));
    check("no descriptor", later(&none, &[]), RefusedCode::Descriptors);
    let two = later(&none, &[uffd, uffd]);
    check("a descriptor too many", two, RefusedCode::Descriptors);
    let file = std::fs::File::open(place.image()).unwrap();
    let no_uffd = later(&none, &[file.as_fd()]);
    check("no userfaultfd", no_uffd, RefusedCode::Descriptors);
    let raw = Raw::greeted(&place);
    for _ in 0..3 {
        raw.send(&raw_frame(0, 99, 1, &[]), &[uffd; 8]);
    }
    check("24 descriptors", raw, RefusedCode::Descriptors);

    let with = |change: &dyn Fn(&mut Region)| {
        let mut wrong = region(&guest);
        change(&mut wrong);
        of(&Message::Attach(attach_of(&guest, vec![wrong])))
    };
    let far = u64::MAX - 4095;
    let changes: [fn(&mut Region, u64); 5] = [
        |region, _| region.bytes -= 512,
        |region, _| region.bytes = 0,
        |region, far| region.address = far,
        |region, _| region.bytes = 8 << 40,
        |region, far| region.image_offset = far,
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let raw = later(&with(&|region| change(region, far)), &[uffd]);
        check(&format!("region {index}"), raw, RefusedCode::Regions);
    }
    let other_uffd = with(&|region| region.uffd = 1);
    let raw = later(&other_uffd, &[uffd]);
    check("no such descriptor", raw, RefusedCode::Descriptors);
    let twice = vec![region(&guest), region(&guest)];
    let twice = of(&Message::Attach(attach_of(&guest, twice)));
    check("an overlap", later(&twice, &[uffd]), RefusedCode::Regions);
    let mut sigbus = attach_of(&guest, vec![region(&guest)]);
    sigbus.uffd_features = 1 << 7;
    let sigbus = of(&Message::Attach(sigbus));
    check("SIGBUS", later(&sigbus, &[uffd]), RefusedCode::Descriptors);
    eventually("the counts", || {
        let totals = running.metrics.totals();
        equals((totals.vms_refused, totals.vms), &(refused as u64, 1))
    });
}

#[test]
fn clients_that_leave_or_wait_are_forgotten() {
    // In the middle of the magic, of a header, of a payload.
    let parts = [
        &b"PTNA"[..],
        b"PTNATIVE\x10\0",
        b"PTNATIVE\x40\0\0\0\x01\0\0\0\x01\0\0\0abc",
    ];
    let place = Place::new(1);
    let running = Running::start(Options {
        max_vms: 1,
        ..place.options()
    });
    let mut all_turned_away = 0;
    // Each leaves; the last one comes after the end of all others.
    for bytes in parts.into_iter().chain([&b""[..]]) {
        let (stream, turned_away) = running.connect_next(|| {
            let stream = UnixStream::connect(place.socket()).unwrap();
            // It may have been turned away already.
            let _ = (&stream).write_all(bytes);
            stream
        });
        all_turned_away += turned_away;
        if bytes.is_empty() {
            assert_eq!(running.metrics.totals().vms_refused, all_turned_away);
        }
        drop(stream);
    }
    drop(running);

    let running = Running::start(Options {
        // The limit that these clients reach.
        handshake_limit: Duration::from_millis(100),
        ..place.options()
    });
    for bytes in parts {
        let mut raw = Raw::connect(&place);
        raw.send(bytes, &[]);
        assert_eq!(raw.refusal(), RefusedCode::Order, "late");
        assert_eq!(raw.next(), None);
    }
    eventually("the count", || {
        equals(running.metrics.totals().vms_refused, &3)
    });
}

/// After attach, a stream without meaning ends the requests and not the guest.
#[test]
fn a_guest_survives_the_nonsense_of_its_vmm() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(64);
    let running = Running::start(place.options());
    let nonsense: [&[u8]; 4] = [
        &[0xff; 300],
        &raw_frame(0, 4, 0x80, &[]),
        &raw_frame(3, 4, 0, b"abc"),
        &raw_frame(4, 6, 0, &[9, 9, 9, 9]),
    ];
    for (index, bytes) in nonsense.iter().enumerate() {
        let guest = Guest::new(64);
        let mut raw = Raw::attached(&place, &guest);
        raw.send(bytes, &[]);
        assert_eq!(raw.refusal(), RefusedCode::Protocol, "{index}");
        // No request has an answer, and each fault has.
        raw.send(&bytes_of(&Message::HealthRequest.frame(5, false)), &[]);
        (0..64).for_each(|page| guest.check(page, &content(page)));
        raw.stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(raw.next(), None);
    }
    // So does a descriptor.
    let guest = Guest::new(64);
    let mut raw = Raw::attached(&place, &guest);
    let health = bytes_of(&Message::HealthRequest.frame(5, false));
    raw.send(&health, &[guest.uffd.as_fd()]);
    assert_eq!(raw.refusal(), RefusedCode::Descriptors);
    (0..64).for_each(|page| guest.check(page, &content(page)));
    drop(raw);
    // Requests that do not belong here, or that nobody knows, are refused one by one.
    let guest = Guest::new(64);
    let mut raw = Raw::attached(&place, &guest);
    raw.send(&bytes_of(&attach(&guest).frame(5, false)), &[]);
    assert_eq!(raw.refusal(), RefusedCode::Order);
    raw.send(&bytes_of(&hello(1, 1).frame(5, false)), &[]);
    assert_eq!(raw.refusal(), RefusedCode::Order);
    raw.send(&raw_frame(0, 500, 0, &[]), &[]);
    assert_eq!(raw.refusal(), RefusedCode::Unsupported);
    raw.send(&raw_frame(0, 500, 1, &[]), &[]);
    raw.send(&bytes_of(&Message::HealthRequest.frame(5, false)), &[]);
    assert!(matches!(raw.next(), Some(Message::Health(_))));
    guest.check(9, &content(9));
    assert_eq!(running.metrics.totals().vms_refused, 0);
}

/// Sends requests, of which nobody reads the answers, until the server reads none of them any more. Returns the
/// number of bytes.
fn flood(stream: &UnixStream, guest: &Guest) -> usize {
    // The server turns to its guest at least once between any two looks: were the client to be read from, its
    // socket had taken more.
    const LOOKS: usize = 20;
    let requests = bytes_of(&Message::HealthRequest.frame(7, false)).repeat(4096);
    stream.set_nonblocking(true).unwrap();
    let (mut sent, mut looks) = (0, 0);
    eventually("the server reads no more", || {
        let before = sent;
        // From the middle of a request on, if the last was cut.
        while let Ok(count) = (&*stream).write(&requests[sent % 12..]) {
            sent += count;
            assert!(sent < 64 << 20, "the server reads without end");
        }
        looks = if sent == before { looks + 1 } else { 0 };
        guest.go_round(0);
        if looks < LOOKS { Err(sent) } else { Ok(sent) }
    })
}

/// A client that sends requests and reads nothing is served no further request. Its guest is served.
#[test]
fn a_flood_of_requests_blocks_nobody() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(256);
    let running = Running::start(place.options());
    let (flooded, other) = (Guest::new(256), Guest::new(256));
    let mut raw = Raw::attached(&place, &flooded);
    let _client = attached(&other, &place.socket());
    let sender = raw.stream.try_clone().unwrap();
    let sent = flood(&sender, &flooded);
    sender.set_nonblocking(false).unwrap();
    for page in 1..256 {
        flooded.check(page, &content(page));
        other.check(page, &content(page));
    }
    // What was asked for is answered when it is read.
    let answers = (sent / 12).min(10_000);
    for _ in 0..answers {
        assert!(matches!(raw.next(), Some(Message::Health(_))));
    }
    drop((raw, sender));
    eventually("its end", || equals(running.metrics.totals().vms_ended, &1));
}

/// A client that has left everything unread and goes is noticed.
#[test]
fn a_client_that_reads_nothing_may_still_go() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(16);
    let running = Running::start(place.options());
    let guest = Arc::new(Guest::new(16));
    let raw = Raw::attached(&place, &guest);
    flood(&raw.stream, &guest);
    (1..16).for_each(|page| guest.check(page, &content(page)));
    drop(raw);
    running.ended(1);
}
