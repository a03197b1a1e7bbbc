//! The whole server with images in S3: moto, behind a proxy that delays requests and injects faults.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "../../sources/tests/support/moto.rs"]
mod moto;
#[path = "support/proxy.rs"]
mod proxy;
mod support;

use std::cell::RefCell;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use moto::{Moto, put, use_server};
use pagetide_serve::native::client::Client;
use pagetide_serve::{Binding, Options, WorkingSetMode};
use pagetide_sources::{Location, ObjectOptions, OpenOptions};
use proxy::{Fault, Pace, Proxy};
use support::native::attached;
use support::*;

/// Moto's port, for a child process, which has the environment of an S3 client.
const PORT: &str = "PAGETIDE_TEST_S3_PORT";

/// The pages that the guest touches before it answers.
const TOUCHES: usize = 200;

/// Each page that is touched is in a block of its own.
const BLOCK_PAGES: usize = 16;

/// Of a request, where the times are measured.
const LATENCY: Duration = Duration::from_millis(20);

/// Runs `body` in a child process: the environment of this one cannot be changed, since other threads read it.
/// `test` is the name of the test.
fn with_s3(test: &str, body: impl FnOnce(u16, &Proxy)) {
    if let Ok(port) = std::env::var(PORT) {
        let port = port.parse().unwrap();
        // The proxy's socket is its standard input.
        let listener = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        body(port, &Proxy::start(TcpListener::from(listener), port));
        return;
    }
    if !has_userfaultfd() {
        return;
    }
    let Some(moto) = Moto::start() else {
        return;
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    child.env(PORT, moto.port.to_string());
    use_server(&mut child, port);
    // A name, which is looked up below the filter of system calls.
    child.env("AWS_ENDPOINT_URL", format!("http://localhost:{port}"));
    child.stdin(Stdio::from(OwnedFd::from(listener)));
    let output = child.output().unwrap();
    // Without the lines of the test harness, which would be taken for this process'.
    let text = String::from_utf8_lossy(&output.stdout);
    let said = text.lines().filter_map(|line| line.strip_prefix("said: "));
    said.for_each(|line| println!("{line}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
}

fn image(pages: usize) -> Vec<u8> {
    (0..pages).flat_map(content).collect()
}

fn object_options() -> ObjectOptions {
    ObjectOptions {
        block_bytes: BLOCK_PAGES * PAGE,
        // A second request for a block would be counted, too.
        hedge_after: NEVER..=NEVER,
        limit: PATIENCE,
        ..ObjectOptions::default()
    }
}

/// What the guest's first response has taken.
#[derive(Debug)]
#[allow(dead_code, reason = "they are printed")]
struct Response {
    time: Duration,
    requests: usize,
    rounds: usize,
}

/// Restores a VM, whose guest touches its pages in the given order, and answers.
fn respond(options: Options, proxy: &Proxy, pace: Pace) -> Response {
    let place = options.bindings[0].socket.clone();
    proxy.set_pace(Pace::Free);
    let running = Running::start(options);
    let guest = Guest::new(TOUCHES * BLOCK_PAGES);
    proxy.set_pace(pace);
    let begun = Instant::now();
    let stream = guest.connect(&place);
    for index in 0..TOUCHES {
        // Neighbours are touched far apart from each other.
        let page = index * 37 % TOUCHES * BLOCK_PAGES + index % BLOCK_PAGES;
        assert!(guest.read(page) == content(page), "page {page}");
    }
    let time = begun.elapsed();
    let (requests, rounds) = proxy.counted();
    drop(stream);
    running.ended(1);
    running.stop();
    Response {
        time,
        requests,
        rounds,
    }
}

/// How often the guest waits for the store until it answers: with a working set, at most a fourth of the
/// number without. (With `--nocapture`, also the times.)
#[test]
fn a_working_set_brings_the_first_response_forward() {
    with_s3(
        "a_working_set_brings_the_first_response_forward",
        |port, proxy| {
            put(port, "/images", b"");
            put(port, "/images/guest.mem", &image(TOUCHES * BLOCK_PAGES));
            let place = Place::new(1);
            // Nothing else is fetched ahead.
            let options = || Options {
                bindings: vec![Binding::new(
                    place.socket(),
                    Location::Url("s3://images/guest.mem".into()),
                )],
                working_set: WorkingSetMode::Auto,
                working_set_file: Some(place.working_set()),
                prefetch: false,
                images: OpenOptions {
                    object: object_options(),
                    ..OpenOptions::default()
                },
                ..Options::default()
            };
            for pace in [Pace::InRounds, Pace::Delayed(LATENCY)] {
                let _ = std::fs::remove_file(place.working_set());
                let without = respond(options(), proxy, pace);
                assert!(place.working_set().exists());
                let with = respond(options(), proxy, pace);
                let ratio = without.time.as_secs_f64() / with.time.as_secs_f64();
                println!(
                    "\nsaid: {pace:?}: first response without a working set {without:?}, with it {with:?}: {ratio:.1} times earlier"
                );
                if pace == Pace::InRounds {
                    // The first block was read when the image was opened, and the VM's start asks what the name leads to.
                    assert_eq!(without.rounds, TOUCHES);
                    assert!(with.rounds * 4 <= without.rounds, "{with:?}");
                }
            }
        },
    );
}

/// A VM whose object has a fault, and what its error must say.
struct Faulty {
    name: &'static str,
    fault: Fault,
    kind: &'static str,
    says: &'static str,
}

const SLOW: &str = "slow";

const FAULTY: [Faulty; 5] = [
    Faulty {
        name: "forbidden",
        fault: Fault::Status(403),
        kind: "forbidden",
        says: "s3://images/forbidden",
    },
    Faulty {
        name: "missing",
        fault: Fault::Status(404),
        kind: "not_found",
        says: "s3://images/missing",
    },
    Faulty {
        name: "broken",
        fault: Fault::Status(500),
        kind: "failed",
        says: "500",
    },
    Faulty {
        name: SLOW,
        fault: Fault::Held,
        kind: "late",
        says: "s3://images/slow",
    },
    Faulty {
        name: "cut",
        fault: Fault::Cut,
        kind: "short",
        says: "s3://images/cut",
    },
];

/// Each VM of an object that fails stalls, and its VMM hears why. The others are served meanwhile, and it has
/// its content when the fault has passed.
#[test]
fn a_fault_of_the_store_stalls_its_own_vms_and_passes() {
    const PAGES: usize = 64;
    with_s3(
        "a_fault_of_the_store_stalls_its_own_vms_and_passes",
        |port, proxy| {
            let place = Place::new(PAGES);
            put(port, "/images", b"");
            let others = ["changed", "well"];
            let names: Vec<&str> = FAULTY.iter().map(|faulty| faulty.name).collect();
            let names = [&names[..], &others].concat();
            let socket = |name: &str| -> PathBuf { place.directory.path().join(name) };
            let (mut bindings, mut of_slow) = (place.options().bindings, Vec::new());
            for name in &names {
                put(port, &format!("/images/{name}"), &image(PAGES));
                let bindings = if *name == SLOW {
                    &mut of_slow
                } else {
                    &mut bindings
                };
                bindings.push(Binding::new(
                    socket(name),
                    Location::Url(format!("s3://images/{name}")),
                ));
            }
            let options = |bindings, limit| Options {
                bindings,
                images: OpenOptions {
                    object: ObjectOptions {
                        // What was read once is read again.
                        memory_bytes: 0,
                        attempts: 2,
                        limit,
                        ..object_options()
                    },
                    ..OpenOptions::default()
                },
                ..place.options()
            };
            let running = Running::start(options(bindings, PATIENCE));
            // The one limit that this test reaches. A server of its own: a slow machine reaches the limit at any
            // time, which this one object's VM gets over.
            let slow = eventually("a server", || {
                Running::try_start(options(of_slow.clone(), Duration::from_millis(500)))
            });
            let local = Guest::new(PAGES);
            let _local = local.connect(&place.socket());
            let vms: Vec<_> = names
                .iter()
                .map(|name| {
                    let guest = Guest::new(PAGES);
                    let client = attached(&guest, &socket(name));
                    guest.check(3, &content(3));
                    (*name, guest, RefCell::new(client))
                })
                .collect();

            let stalls = |client: &RefCell<Client>| client.borrow_mut().health().unwrap().stalls;
            let before: Vec<u64> = vms.iter().map(|(.., client)| stalls(client)).collect();
            for faulty in &FAULTY {
                let path = format!("/images/{}", faulty.name);
                proxy.inject(&path, Some(faulty.fault));
            }
            let changed: Vec<u8> = image(PAGES).iter().map(|byte| !byte).collect();
            put(port, "/images/changed", &changed);
            let is_faulty = |name: &str| name != "well";
            let waiting: Vec<_> = vms
                .iter()
                .filter(|(name, ..)| is_faulty(name))
                .map(|(name, guest, _)| (*name, guest.touch(40)))
                .collect();
            for ((name, _, client), before) in vms.iter().zip(before) {
                if !is_faulty(name) {
                    continue;
                }
                eventually(name, || stalls(client) > before);
                let said = client.borrow_mut().health().unwrap().last_error;
                let wanted = FAULTY.iter().find(|faulty| faulty.name == *name);
                let wanted = wanted.map_or("s3://images/changed", |faulty| faulty.says);
                assert!(said.contains(wanted), "{name}: {said}");
                println!("\nsaid: {name}: {said}");
            }
            let texts = [running.metrics.text(), slow.metrics.text()];
            for kind in FAULTY.iter().map(|faulty| faulty.kind).chain(["changed"]) {
                let sample = format!("pagetide_source_errors_by_kind_total{{kind=\"{kind}\"}} ");
                let counts = texts.iter().flat_map(|text| text.lines());
                let mut counts = counts.filter_map(|line| line.strip_prefix(&sample));
                assert!(counts.any(|count| count != "0"), "{kind}: {texts:?}");
            }
            // Meanwhile.
            for (name, guest, client) in &vms {
                if is_faulty(name) {
                    // What is there stays, and nothing else comes.
                    assert!(guest.read(3) == content(3), "{name}");
                    assert_eq!(guest.residents(), [3], "{name}");
                } else {
                    (0..PAGES).for_each(|page| guest.check(page, &content(page)));
                    assert_eq!(stalls(client), 0);
                }
            }
            (0..PAGES).for_each(|page| local.check(page, &content(page)));
            for (name, touch) in &waiting {
                assert!(touch.is_undisturbed(), "{name}: the page came from nowhere");
            }

            for faulty in &FAULTY {
                proxy.inject(&format!("/images/{}", faulty.name), None);
            }
            // The ETag is then the former one.
            put(port, "/images/changed", &image(PAGES));
            for (name, touch) in waiting {
                assert!(touch.join() == content(40), "{name}");
            }
            for (_, guest, _) in &vms {
                (0..PAGES).for_each(|page| guest.check(page, &content(page)));
            }
            drop(vms);
            running.stop();
            slow.stop();
        },
    );
}

/// An object that cannot be opened ends nothing but the start of its server, whose error names the object.
#[test]
fn an_object_that_is_missing_or_forbidden_is_named() {
    with_s3(
        "an_object_that_is_missing_or_forbidden_is_named",
        |port, _| {
            put(port, "/images", b"");
            let place = Place::new(1);
            let refused = pagetide_serve::Server::bind(Options {
                bindings: vec![Binding::new(
                    place.socket(),
                    Location::Url("s3://images/none".into()),
                )],
                ..place.options()
            });
            let text = refused.err().unwrap().to_string();
            assert!(text.contains("s3://images/none"), "{text}");
            assert!(!place.socket().exists());
        },
    );
}
