//! Reading objects from a server that misbehaves.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code")]

mod support;

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use pagetide_memory::Urgency::{Bulk, Urgent};
use pagetide_pager::Filled;
use pagetide_sources::image::{CreateOptions, ExtractOptions, create_from_url, extract_to_stream};
use pagetide_sources::{
    Blob, BlobError, GuestImage as _, Location, ObjectBlob, ObjectOptions, OpenError,
    OpenObjectError, OpenOptions, PagetideImage, RawImage, Standing, open,
};
use pagetide_test_support::{Task, equals, eventually};
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
use support::{Act, Gate, LATE, Server, address_without_a_listener, chain, options, pattern};

const BLOCK: usize = 16 << 10;

fn opened(server: &Server, options: &ObjectOptions) -> ObjectBlob {
    ObjectBlob::open(&server.url, options, None).unwrap()
}

fn read(blob: &ObjectBlob, offset: usize, bytes: usize) -> Result<Vec<u8>, BlobError> {
    let mut buffer = vec![0xee; bytes];
    blob.read_at(offset as u64, &mut buffer, Urgent)?;
    Ok(buffer)
}

/// TLS begins: the peer gets a ClientHello, and what it answers instead is an error.
#[test]
fn https_begins_with_a_handshake() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}/object", listener.local_addr().unwrap());
    let peer = thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut stream, _) = listener.accept().unwrap();
        let mut first = [0; 3];
        stream.read_exact(&mut first).unwrap();
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
        first
    });
    let once = ObjectOptions {
        attempts: 1,
        ..options()
    };
    let error = ObjectBlob::open(&url, &once, None).unwrap_err();
    assert!(chain(&error).contains("127.0.0.1"), "{}", chain(&error));
    // A handshake record, TLS 1.0 as its legacy version.
    assert_eq!(peer.join().unwrap(), [0x16, 3, 1]);
}

#[test]
fn adjacent_blocks_are_one_get_and_are_kept() {
    let server = Server::start(40 * BLOCK + 5);
    let content = server.content();
    let blob = opened(&server, &options());
    assert_eq!(blob.bytes(), content.len() as u64);
    assert_eq!(blob.version(), Some("\"first\""));
    assert_eq!(blob.name(), server.url);
    assert_eq!(server.requests().len(), 1);

    let (offset, bytes) = (BLOCK + 100, 2 * BLOCK);
    assert_eq!(
        read(&blob, offset, bytes).unwrap(),
        content[offset..offset + bytes]
    );
    let gets = server.gets();
    assert_eq!(gets.len(), 1);
    assert_eq!(gets[0].range, Some(BLOCK as u64..4 * BLOCK as u64));
    assert_eq!(gets[0].if_match.as_deref(), Some("\"first\""));
    assert_eq!(
        read(&blob, offset + 1, 10).unwrap(),
        content[offset + 1..offset + 11]
    );
    assert_eq!(server.gets().len(), 1);

    // All of it: GETs of at most four blocks, and none for blocks that are there.
    assert_eq!(read(&blob, 0, content.len()).unwrap(), content);
    let gets = server.gets();
    assert_eq!(gets.len(), 1 + 1 + 10);
    for get in &gets {
        let range = get.range.clone().unwrap();
        assert!(range.end - range.start <= 4 * BLOCK as u64);
    }
    let counters = blob.counters();
    assert_eq!(counters.gets, 12);
    assert_eq!(counters.bytes, content.len() as u64);
    assert_eq!(counters.misses, 41);
    assert_eq!(counters.memory_hits, 1 + 3);

    for (offset, bytes) in [(content.len(), 1), (content.len() - 1, 2), (usize::MAX, 8)] {
        let outside = read(&blob, offset, bytes);
        assert!(matches!(outside, Err(BlobError::Outside { .. })));
        assert!(!blob.read_now(offset as u64, &mut vec![0; bytes]));
    }
    read(&blob, content.len(), 0).unwrap();
}

#[test]
fn only_blocks_in_memory_are_read_at_once() {
    let server = Server::start(8 * BLOCK);
    let content = server.content();
    let blob = opened(&server, &options());
    let mut buffer = vec![0; 100];
    assert!(!blob.read_now(50, &mut buffer));
    assert_eq!(server.gets().len(), 0);
    read(&blob, 0, 1).unwrap();
    assert!(blob.read_now(50, &mut buffer));
    assert_eq!(buffer, content[50..150]);
    // The second block is missing.
    assert!(!blob.read_now(BLOCK as u64 - 50, &mut buffer));
    assert_eq!(server.gets().len(), 1);
}

#[test]
fn memory_is_bounded() {
    let server = Server::start(8 * BLOCK);
    let content = server.content();
    for (memory, gets) in [(2, 3), (8, 2), (0, 4)] {
        let memory_bytes = memory * BLOCK;
        let options = ObjectOptions {
            memory_bytes,
            ..options()
        };
        let blob = opened(&server, &options);
        let half = content.len() / 2;
        assert_eq!(read(&blob, 0, half).unwrap(), content[..half]);
        assert_eq!(read(&blob, half, half).unwrap(), content[half..]);
        assert_eq!(read(&blob, 7 * BLOCK, BLOCK).unwrap(), content[7 * BLOCK..]);
        assert_eq!(read(&blob, 0, 10).unwrap(), content[..10]);
        assert_eq!(blob.counters().gets, gets, "{memory} blocks");
    }
}

#[test]
fn equal_reads_are_one_get() {
    let server = Server::start(8 * BLOCK);
    let content = server.content();
    let gate = Gate::default();
    let blob = opened(&server, &options());
    server.always(Act::Gated(gate.clone()));
    let (send, readers) = mpsc::channel();
    thread::scope(|scope| {
        let _opens = gate.opens_in_the_end();
        for _ in 0..8 {
            let send = send.clone();
            let (blob, content) = (&blob, &content);
            scope.spawn(move || {
                send.send(Task::this()).unwrap();
                assert_eq!(read(blob, 300, BLOCK).unwrap(), content[300..300 + BLOCK]);
            });
        }
        // All of them wait for the one answer.
        for reader in readers.iter().take(8) {
            reader.asleep("a reader");
        }
    });
    assert_eq!(server.gets().len(), 1);
    assert_eq!(blob.counters().gets, 1);
}

#[test]
fn every_fault_is_an_error_and_passes() {
    let server = Server::start(8 * BLOCK);
    let content = server.content();
    let cases = [
        (Act::Status(404), "not_found", 1),
        (Act::Status(401), "forbidden", 1),
        (Act::Status(403), "forbidden", 1),
        (Act::Status(412), "changed", 1),
        (Act::Status(416), "changed", 1),
        (Act::Status(400), "failed", 1),
        (Act::Status(500), "failed", 2),
        (Act::Status(503), "failed", 2),
        (Act::Status(429), "failed", 2),
        (Act::Silent, "late", 2),
        (Act::SilentBody, "late", 2),
        (Act::Short, "short", 2),
        (Act::Cut, "short", 2),
        (Act::Long, "failed", 2),
        (Act::Reset, "failed", 2),
        (Act::WrongRange, "failed", 2),
        (Act::WrongLength, "changed", 1),
        (Act::Whole, "failed", 1),
        (Act::NoEtag, "failed", 1),
    ];
    thread::scope(|scope| {
        for (act, kind, attempts) in cases {
            let content = &content;
            scope.spawn(move || {
                let server = Server::start(8 * BLOCK);
                let mut options = options();
                if kind == "late" {
                    options.limit = LATE;
                }
                let blob = opened(&server, &options);
                server.always(act.clone());
                let failed = read(&blob, BLOCK, 100).unwrap_err();
                assert_eq!(failed.kind(), kind, "{act:?}: {}", chain(&failed));
                assert_eq!(blob.counters().retries + 1, attempts, "{act:?}");
                assert!(!blob.read_now(BLOCK as u64, &mut [0]));

                // The server is well again.
                server.always(Act::Well);
                assert_eq!(
                    read(&blob, BLOCK, 100).unwrap(),
                    content[BLOCK..BLOCK + 100]
                );
                // One failure is not seen by a reader if another attempt can help.
                server.once(act.clone());
                let again = read(&blob, 2 * BLOCK, 100);
                match attempts {
                    1 => assert_eq!(again.unwrap_err().kind(), kind),
                    _ => assert_eq!(again.unwrap(), content[2 * BLOCK..2 * BLOCK + 100]),
                }
                assert_eq!(read(&blob, 0, content.len()).unwrap(), *content);
            });
        }
    });
}

#[test]
fn an_object_that_cannot_be_opened_says_why() {
    let server = Server::start(BLOCK);
    for (act, kind) in [
        (Act::Status(404), "not_found"),
        (Act::Status(403), "forbidden"),
        (Act::Status(500), "failed"),
        (Act::Silent, "late"),
        (Act::Reset, "failed"),
    ] {
        let options = ObjectOptions {
            limit: if act == Act::Silent {
                LATE
            } else {
                options().limit
            },
            ..options()
        };
        let before = server.gets().len();
        // A URL may be signed for GET alone.
        let is_tried = act == Act::Status(403);
        server.always(act);
        let failed = ObjectBlob::open(&server.url, &options, None).unwrap_err();
        let OpenObjectError::Blob(failed) = failed else {
            panic!("{failed}");
        };
        assert_eq!(failed.kind(), kind, "{}", chain(&failed));
        assert_eq!(server.gets().len() - before, usize::from(is_tried));
    }
    server.once(Act::Status(503));
    opened(&server, &options());
    for url in [
        "http://host",
        "s3://bucket",
        "s3://u:p@b/k",
        "http://u%@h/k",
    ] {
        let failed = ObjectBlob::open(url, &options(), None).unwrap_err();
        assert!(
            matches!(failed, OpenObjectError::Blob(BlobError::Failed { .. })),
            "{url}"
        );
    }
    // A port that is taken, and that nobody listens on.
    let taken = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&taken, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    let at: SocketAddr = getsockname(&taken).unwrap().try_into().unwrap();
    let nobody = ObjectBlob::open(&format!("http://{at}/a"), &options(), None).unwrap_err();
    assert!(matches!(
        nobody,
        OpenObjectError::Blob(BlobError::Failed { .. })
    ));
}

#[test]
fn a_replaced_object_is_noticed() {
    type Change = fn(&mut support::Site);
    let etag: Change = |site| site.etag = Some("\"second\"".into());
    let deaf: Change = |site| {
        site.etag = Some("\"second\"".into());
        site.heeds_if_match = false;
    };
    let modified: Change = |site| site.modified = Some("Mon, 02 Nov 2026 11:00:00 GMT");
    let weak: Change = |site| site.etag = Some("W/\"second\"".into());
    let length: Change = |site| site.content.truncate(7 * BLOCK);
    for (first, change, is_versioned) in [
        (Some("\"first\""), etag, true),
        (Some("\"first\""), deaf, true),
        (Some("W/\"first\""), weak, false),
        (Some("W/\"first\""), modified, false),
        (None, modified, false),
        (None, length, false),
    ] {
        let server = Server::start(8 * BLOCK);
        server.change(|site| site.etag = first.map(str::to_owned));
        let content = server.content();
        let blob = opened(&server, &options());
        assert_eq!(blob.version().is_some(), is_versioned);
        assert_eq!(read(&blob, 0, 10).unwrap(), content[..10]);
        let sent = server.gets().remove(0).if_match;
        assert_eq!(sent.is_some(), is_versioned);
        server.change(|site| {
            site.content = pattern(8 * BLOCK, 1);
            change(site);
        });
        for offset in [BLOCK, 7 * BLOCK] {
            let changed = read(&blob, offset, 10).unwrap_err();
            assert!(
                matches!(changed, BlobError::Changed { .. }),
                "{}",
                chain(&changed)
            );
            assert!(changed.is_permanent());
        }
        // What was read before is still that of the object that was opened.
        assert_eq!(read(&blob, 0, 10).unwrap(), content[..10]);
    }
}

/// Kind: what tells an object from another one ends with the process. Whoever goes on with a VM of a former server compares
/// digests, and the pages that a digest samples may be alike.
#[test]
fn the_digest_of_raw_memory_tells_objects_without_a_version_apart() {
    type Change = fn(&mut support::Site);
    let modified: Change = |site| site.modified = Some("Mon, 02 Nov 2026 11:00:00 GMT");
    let weak: Change = |site| site.etag = Some("W/\"second\"".into());
    for change in [modified, weak] {
        let server = Server::start(8 * BLOCK);
        server.change(|site| site.etag = Some("W/\"first\"".into()));
        let digest = || {
            let image = RawImage::new(Arc::new(opened(&server, &options())));
            image.unwrap().digest()
        };
        let first = digest();
        assert_eq!(first, digest());
        server.change(change);
        assert_ne!(first, digest());
    }
}

/// A query may be a signature, and basic authentication is for the host that was named.
#[test]
fn a_host_to_which_another_one_redirects_hears_of_no_secret() {
    let (named, other) = (Server::start(BLOCK), Server::start(BLOCK));
    named.always(Act::Redirect(other.url.clone()));
    let url = named.url.replace("http://", "http://user:password@");
    let blob = ObjectBlob::open(&format!("{url}?signature=secret"), &options(), None).unwrap();
    read(&blob, 0, BLOCK).unwrap();
    let heard = other.requests();
    assert!(heard.len() >= 2, "{heard:?}");
    for request in heard {
        assert_eq!((request.referer, request.authorization), (None, None));
    }
}

#[test]
fn a_second_get_answers_when_the_first_hangs() {
    for hanging in [Act::Silent, Act::SilentBody] {
        let server = Server::start(8 * BLOCK);
        let content = server.content();
        let options = ObjectOptions {
            hedge_after: Duration::from_millis(20)..=Duration::from_millis(50),
            ..options()
        };
        let blob = opened(&server, &options);
        server.once(hanging);
        assert_eq!(read(&blob, 0, BLOCK).unwrap(), content[..BLOCK]);
        let counters = blob.counters();
        assert!(
            counters.hedges >= 1 && counters.hedges_won == 1,
            "{counters:?}"
        );
        assert_eq!(counters.retries, 0);
        // The first one is ended.
        eventually("the first GET's end", || equals(server.given_up(), &1));
    }
}

#[test]
fn urgent_reads_pass_bulk_reads() {
    let server = Server::start(64 * BLOCK);
    let content = server.content();
    let options = ObjectOptions {
        gets: 4,
        bulk_gets: 2,
        get_bytes: BLOCK,
        ..options()
    };
    let blob = opened(&server, &options);
    let is_over = Arc::new(AtomicBool::new(false));
    let hanging = Arc::clone(&is_over);
    let gate = Gate::default();
    let bulk_waits = gate.clone();
    let first_half = 32 * BLOCK as u64;
    server.behave(move |request| {
        let is_bulk = request
            .range
            .as_ref()
            .is_some_and(|range| range.start < first_half);
        match is_bulk && !hanging.load(Ordering::SeqCst) {
            true => Act::Gated(bulk_waits.clone()),
            false => Act::Well,
        }
    });
    let bulk_done = AtomicUsize::new(0);
    thread::scope(|scope| {
        let _opens = gate.opens_in_the_end();
        for reader in 0..6 {
            let (blob, content, bulk_done) = (&blob, &content, &bulk_done);
            scope.spawn(move || {
                let mut buffer = vec![0; 2 * BLOCK];
                let offset = reader * 2 * BLOCK;
                blob.read_at(offset as u64, &mut buffer, Bulk).unwrap();
                assert_eq!(buffer, content[offset..offset + 2 * BLOCK]);
                bulk_done.fetch_add(1, Ordering::SeqCst);
            });
        }
        eventually("bulk GETs", || equals(server.gets().len(), &2));
        for block in 32..48 {
            let offset = block * BLOCK;
            assert_eq!(
                read(&blob, offset, 64).unwrap(),
                content[offset..offset + 64]
            );
        }
        assert_eq!(bulk_done.load(Ordering::SeqCst), 0);
        // Two places are for bulk reads: no more than these were used.
        let gets = server.gets().into_iter();
        let starts = gets.filter_map(|get| Some(get.range?.start));
        let bulk: Vec<_> = starts.filter(|&start| start < first_half).collect();
        assert_eq!(bulk.len(), 2);
        // A block for which a bulk read waits in the queue: whichever of them has not got a place.
        eventually("all bulk reads", || {
            equals(blob.counters().misses, &(12 + 16))
        });
        is_over.store(true, Ordering::SeqCst);
        let is_queued = |block: &usize| !bulk.contains(&((block * BLOCK) as u64));
        let queued = (0..12).rev().find(is_queued).unwrap() * BLOCK;
        assert_eq!(
            read(&blob, queued, 64).unwrap(),
            content[queued..queued + 64]
        );
        assert_eq!(bulk_done.load(Ordering::SeqCst), 0);
    });
    assert!(server.most_flying() <= 4);
}

#[test]
fn an_urgent_read_does_not_wait_for_a_slow_bulk_get_of_its_block() {
    let server = Server::start(8 * BLOCK);
    let content = server.content();
    let options = ObjectOptions {
        gets: 2,
        bulk_gets: 1,
        hedge_after: Duration::from_millis(30)..=Duration::from_millis(30),
        ..options()
    };
    let blob = Arc::new(opened(&server, &options));
    server.once(Act::Silent);
    let bulk = Arc::clone(&blob);
    let reader = thread::spawn(move || {
        let mut buffer = vec![0; 4 * BLOCK];
        bulk.read_at(0, &mut buffer, Bulk).map(|()| buffer)
    });
    eventually("the bulk GET", || equals(server.gets().len(), &1));
    assert_eq!(
        read(&blob, 2 * BLOCK, 64).unwrap(),
        content[2 * BLOCK..2 * BLOCK + 64]
    );
    let counters = blob.counters();
    assert_eq!((counters.hedges, counters.hedges_won), (1, 1));
    assert!(!reader.is_finished());
    // No place was left for a hedge of the bulk GET: its reader goes on waiting. The test does not.
    assert_eq!(
        server.gets()[1].range,
        Some(2 * BLOCK as u64..3 * BLOCK as u64)
    );
}

#[test]
fn dropping_the_blob_ends_its_requests() {
    let server = Server::start(8 * BLOCK);
    let options = ObjectOptions {
        get_bytes: BLOCK,
        ..options()
    };
    let blob = opened(&server, &options);
    server.behave(|request| match &request.range {
        Some(range) if range.start == 0 => Act::Status(403),
        _ => Act::Silent,
    });
    // The read ends with the first failure; the GET of the second block goes on.
    assert_eq!(read(&blob, 0, 2 * BLOCK).unwrap_err().kind(), "forbidden");
    eventually("the second GET", || equals(server.gets().len(), &2));
    assert_eq!(server.given_up(), 0);
    drop(blob);
    eventually("the second GET's end", || equals(server.given_up(), &1));
}

#[test]
fn credentials_and_queries_are_sent_and_not_shown() {
    let server = Server::start(8 * BLOCK);
    let content = server.content();
    let signed = server.url.replace("http://", "http://me:word@") + "?X-Sig=secret";
    // Like a URL that is signed for GET.
    server.behave(|request| match request.method.as_str() {
        "HEAD" => Act::Status(403),
        _ => Act::Well,
    });
    let late = ObjectOptions {
        limit: LATE,
        ..options()
    };
    let blob = ObjectBlob::open(&signed, &late, None).unwrap();
    assert_eq!(blob.name(), server.url);
    assert_eq!(blob.bytes(), content.len() as u64);
    assert_eq!(read(&blob, 5, 100).unwrap(), content[5..105]);
    for request in server.requests() {
        assert_eq!(request.authorization.as_deref(), Some("Basic bWU6d29yZA=="));
        assert_eq!(request.path, "/images/memory?X-Sig=secret");
    }
    for act in [
        Act::Status(500),
        Act::Status(403),
        Act::Reset,
        Act::Silent,
        Act::Whole,
    ] {
        server.always(act);
        let failed = read(&blob, BLOCK, 1).unwrap_err();
        let text = format!("{} {failed:?}", chain(&failed));
        assert!(!text.contains("secret") && !text.contains("word"), "{text}");
    }
    assert!(!format!("{blob:?}").contains("word"));
    let location: Location = signed.parse().unwrap();
    assert_eq!(location.to_string(), server.url);
}

#[test]
fn an_image_is_opened_by_its_url() {
    let server = Server::start(8 * BLOCK);
    let content = server.content();
    let options = OpenOptions {
        object: options(),
        ..OpenOptions::default()
    };
    let location: Location = server.url.parse().unwrap();
    let image = open(&location, &options).unwrap();
    assert_eq!(image.name(), server.url);
    let mut page = vec![0; 4096];
    assert_eq!(image.read(8192, &mut page, Urgent).unwrap(), Filled::Bytes);
    assert_eq!(page, content[8192..8192 + 4096]);
    assert_eq!(image.counters().unwrap().gets, 1);
    let digest = image.digest();
    assert_eq!(open(&location, &options).unwrap().digest(), digest);
    server.change(|site| site.etag = Some("\"second\"".into()));
    assert_ne!(open(&location, &options).unwrap().digest(), digest);

    let bad = ObjectOptions {
        block_bytes: 1000,
        ..options.object
    };
    let refused = open(
        &location,
        &OpenOptions {
            object: bad,
            ..OpenOptions::default()
        },
    );
    assert!(matches!(refused, Err(OpenError::Options(_))));
}

#[test]
fn raw_memory_at_a_url_becomes_an_image() {
    let server = Server::start(8 * BLOCK);
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let open = OpenOptions {
        object: options(),
        ..OpenOptions::default()
    };
    let options = CreateOptions {
        open: open.clone(),
        ..CreateOptions::default()
    };
    create_from_url(&server.url, &path("new").into(), &options, &mut |_, _| {}).unwrap();
    let image = PagetideImage::open(&Location::Path(path("new")), &open).unwrap();
    let mut out = Vec::new();
    extract_to_stream(
        &image,
        &mut out,
        "out",
        &ExtractOptions::default(),
        &mut |_, _| {},
    )
    .unwrap();
    assert!(out == server.content());
    // An image is no raw memory, and what is no memory becomes no image.
    let bytes = std::fs::read(path("new")).unwrap();
    for (content, wanted) in [
        (bytes, "is a Pagetide image already"),
        (vec![7; 5000], "is no guest memory"),
    ] {
        server.change(|site| site.content = content);
        let refused = create_from_url(&server.url, &path("x").into(), &options, &mut |_, _| {});
        let refused = refused.unwrap_err();
        assert!(refused.is_refusal());
        assert!(chain(&refused).contains(wanted), "{}", chain(&refused));
    }
    assert!(!path("x").exists());
}

/// The signature of a URL covers the method, also of one to which a server redirects; and some servers know no HEAD.
#[test]
fn a_server_that_refuses_head_is_asked_by_get() {
    for status in [400, 403, 405, 501] {
        let server = Server::start(8 * BLOCK);
        let content = server.content();
        server.behave(move |request| match request.method.as_str() {
            "HEAD" => Act::Status(status),
            _ => Act::Well,
        });
        let blob = opened(&server, &options());
        assert_eq!(blob.bytes(), content.len() as u64);
        assert_eq!(read(&blob, 5, 100).unwrap(), content[5..105], "{status}");
        assert_eq!(blob.standing().unwrap(), Standing::Same);
    }
    // An answer that does not say that there is nothing.
    let server = Server::start(BLOCK);
    server.always(Act::Status(405));
    let error = ObjectBlob::open(&server.url, &options(), None).unwrap_err();
    let OpenObjectError::Blob(error) = error else {
        panic!("{error}");
    };
    assert_eq!(error.kind(), "failed", "{}", chain(&error));
}

#[test]
fn a_replaced_object_is_seen() {
    let server = Server::start(8 * BLOCK);
    let blob = opened(&server, &options());
    assert_eq!(blob.standing().unwrap(), Standing::Same);
    assert_eq!(server.requests().len(), 2);
    // A store that does not answer says nothing against the object.
    server.once(Act::Status(500));
    assert_eq!(blob.standing().unwrap(), Standing::Same);
    server.change(|site| site.etag = Some("\"second\"".into()));
    assert_eq!(blob.standing().unwrap(), Standing::Replaced);
    server.once(Act::Status(404));
    assert_eq!(blob.standing().unwrap_err().kind(), "not_found");

    // Without an ETag that stands for the bytes, the time does.
    let server = Server::start(8 * BLOCK);
    server.change(|site| site.etag = None);
    let blob = opened(&server, &options());
    assert_eq!(blob.standing().unwrap(), Standing::Same);
    server.change(|site| site.modified = Some("Mon, 02 Nov 2026 10:00:01 GMT"));
    assert_eq!(blob.standing().unwrap(), Standing::Replaced);
}

/// What the client says of its cause is what helps.
#[test]
fn the_cause_of_a_failure_is_named() {
    let once = ObjectOptions {
        attempts: 1,
        ..options()
    };
    let (_socket, nobody) = address_without_a_listener();
    for (url, wanted) in [
        (format!("http://{nobody}/x"), "refused"),
        ("http://no.such.host.invalid/x".to_owned(), "lookup"),
    ] {
        let error = ObjectBlob::open(&url, &once, None).unwrap_err();
        assert!(chain(&error).contains(wanted), "{}", chain(&error));
    }
}

#[test]
fn content_is_never_wrong_whatever_the_server_does() {
    let server = Server::start(64 * BLOCK + 777);
    let content = server.content();
    let options = ObjectOptions {
        attempts: 3,
        memory_bytes: 8 * BLOCK,
        // Some answers never come. On a slow machine others are late, too, and are no error of the content.
        limit: Duration::from_millis(250),
        hedge_after: Duration::from_millis(20)..=Duration::from_millis(60),
        ..options()
    };
    let blob = opened(&server, &options);
    let mut state = 1u64;
    server.behave(move |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        match (state >> 33) % 24 {
            0 => Act::Status(500),
            1 => Act::Short,
            2 => Act::Long,
            3 => Act::Cut,
            4 => Act::Reset,
            5 => Act::WrongRange,
            6 => Act::Silent,
            7 => Act::SilentBody,
            8 => Act::Slow(Duration::from_millis(30)),
            _ => Act::Well,
        }
    });
    let good = AtomicUsize::new(0);
    thread::scope(|scope| {
        for reader in 0..4u64 {
            let (blob, content, good) = (&blob, &content, &good);
            scope.spawn(move || {
                let mut state = reader + 77;
                let mut draw = |below: usize| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    usize::try_from(state >> 33).unwrap() % below
                };
                for _ in 0..40 {
                    let offset = draw(content.len());
                    let bytes = draw((6 * BLOCK).min(content.len() - offset)) + 1;
                    let mut buffer = vec![0; bytes];
                    let urgency = if draw(2) == 0 { Urgent } else { Bulk };
                    if blob.read_now(offset as u64, &mut buffer) {
                        assert_eq!(buffer, content[offset..offset + bytes]);
                    }
                    if blob.read_at(offset as u64, &mut buffer, urgency).is_ok() {
                        assert_eq!(buffer, content[offset..offset + bytes]);
                        good.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    println!(
        "{} of 160 reads were answered",
        good.load(Ordering::Relaxed)
    );
    server.always(Act::Well);
    eventually("an answer in time", || {
        read(&blob, 0, content.len()).map(|found| assert_eq!(found, content))
    });
}
