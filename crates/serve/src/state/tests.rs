use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::{Duration, Instant};

use pagetide_test_support::{Sleeper, eventually, in_a_process_of_its_own, within_patience};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, accept_with, socketpair};
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};

use super::access::{lock, make_directory};
use super::left::kept_vm;
use super::reach::left_by_others;
use super::*;

/// No test waits for so long unless it fails.
const PATIENCE: Duration = Duration::from_secs(300);

fn description(regions: &[(u64, u64, u64, u64)]) -> Description {
    let kept = |&(address, bytes, page_bytes, offset): &_| KeptRegion {
        address,
        bytes,
        page_bytes,
        offset,
    };
    Description {
        format: FORMAT,
        socket: "a.sock".into(),
        image: "a.mem".into(),
        digest: String::new(),
        file: None,
        is_native: false,
        recording_since_us: None,
        label: None,
        regions: regions.iter().map(kept).collect(),
    }
}

/// It may keep VMs.
#[test]
fn a_keeper_that_cannot_be_reached_is_not_replaced() {
    use std::os::unix::net::UnixDatagram;
    let directory = tempfile::tempdir().unwrap();
    // Connecting fails, and not because nobody is there.
    let path = directory.path().join(SOCKET);
    let _socket = UnixDatagram::bind(&path).unwrap();
    let replaced = directory.path().join("replaced");
    let options = StateOptions {
        directory: directory.path().to_owned(),
        keeper: vec!["touch".into(), replaced.clone().into()],
    };
    let error = State::open(&options, None, OnFailure::Stall, &Metrics::default()).unwrap_err();
    assert!(matches!(error, StateError::Directory { .. }), "{error}");
    assert!(path.exists() && !replaced.exists());
    // A socket that a killed keeper has left.
    std::fs::remove_file(&path).unwrap();
    drop(wire::listen_at(&path).unwrap());
    let error = State::open(&options, None, OnFailure::Stall, &Metrics::default()).unwrap_err();
    assert!(matches!(error, StateError::Keeper { .. }), "{error}");
    assert!(replaced.exists());
}

/// The greatest length that the message names is one at which a keeper can listen.
#[test]
fn a_path_is_too_long_only_if_the_keepers_socket_cannot_be_there() {
    let place = tempfile::tempdir().unwrap();
    let root = place.path().as_os_str().len() + 1;
    let named = |bytes: usize| place.path().join("x".repeat(bytes - root));
    let Err(StateError::TooLong { bytes, most, .. }) = check_length(&named(100)) else {
        panic!("it is too long");
    };
    assert_eq!((bytes, most), (100, 92));
    assert!(check_length(&named(most + 1)).is_err());
    let longest = named(most);
    check_length(&longest).unwrap();
    make_directory(&longest).unwrap();
    wire::listen_at(&longest.join(SOCKET)).unwrap();
    // With a byte more the name that the socket has at first is too long.
    let longer = named(most + 1);
    make_directory(&longer).unwrap();
    wire::listen_at(&longer.join(SOCKET)).unwrap_err();
}

/// Kind: an end that is taken for a refusal. A server that is started again at once meets the keeper of the one before.
#[test]
fn a_keeper_that_is_ending_is_replaced() {
    for accepts in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(SOCKET);
        let listener = wire::listen_at(&path).unwrap();
        let replaced = directory.path().join("replaced");
        let options = StateOptions {
            directory: directory.path().to_owned(),
            keeper: vec!["touch".into(), replaced.clone().into()],
        };
        let error = std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut polled = [PollFd::new(&listener, PollFlags::IN)];
                poll(&mut polled, None).unwrap();
                std::fs::remove_file(path).unwrap();
                let flags = SocketFlags::CLOEXEC;
                let server = accepts.then(|| accept_with(&listener, flags).unwrap());
                drop(listener);
                drop(server);
            });
            State::open(&options, None, OnFailure::Stall, &Metrics::default()).unwrap_err()
        });
        assert!(matches!(error, StateError::Keeper { .. }), "{error}");
        assert!(replaced.exists());
    }
}

#[test]
fn a_lock_is_waited_for_within_its_limit() {
    let directory = tempfile::tempdir().unwrap();
    let first = lock(directory.path(), Duration::ZERO).unwrap();
    let (limit, begun) = (Duration::from_millis(20), Instant::now());
    let error = lock(directory.path(), limit).unwrap_err();
    assert!(begun.elapsed() >= limit);
    let process = format!("process {} has locked", std::process::id());
    assert!(error.to_string().contains(&process), "{error}");
    std::thread::scope(|scope| {
        let next = scope.spawn(|| lock(directory.path(), PATIENCE));
        drop(first);
        next.join().unwrap().unwrap();
    });
}

/// Kind: the cause of an error is known to another process, and is not said.
#[test]
fn a_keeper_that_has_locked_the_directory_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let _lock = lock(directory.path(), Duration::ZERO).unwrap();
    let options = StateOptions {
        directory: directory.path().to_owned(),
        keeper: vec!["false".into()],
    };
    let error = State::open(&options, None, OnFailure::Stall, &Metrics::default()).unwrap_err();
    let text = crate::vm::chain(&error);
    let process = format!("process {} has locked", std::process::id());
    assert!(
        text.contains("did not start") && text.contains(&process),
        "{text}"
    );
}

/// A keeper that is stopped has a listening socket, and never says anything.
#[test]
fn a_keeper_that_does_not_answer_is_named() {
    let (socket, _silent) = connection();
    let directory = std::path::Path::new("/state");
    let limit = Duration::from_millis(1);
    let error = left_by_others(&socket, directory, OnFailure::Stall, limit).err();
    let Some(StateError::Directory { source, .. }) = error else {
        panic!("{error:?}");
    };
    let process = format!("(process {})", std::process::id());
    let text = source.to_string();
    assert!(
        text.contains(&process) && text.contains("kill -CONT"),
        "{text}"
    );

    // The servers that have given up are still waiting to be accepted, and leave no room for the next.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(SOCKET);
    let _listener = wire::listen_at(&path).unwrap();
    let error = (0..1000).find_map(|_| wire::connect(&path, limit).err());
    assert_eq!(error.unwrap().kind(), io::ErrorKind::WouldBlock);
}

/// The two ends of a connection to a keeper.
fn connection() -> (OwnedFd, OwnedFd) {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    socketpair(AddressFamily::UNIX, kind, flags, None).unwrap()
}

/// A keeper that this server starts may find that another one has the directory, which is ending. The server waits for its own.
#[test]
fn a_server_waits_for_its_keeper_while_another_one_ends() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(SOCKET);
    let started = directory.path().join("started");
    let command = format!("echo once >> {}; exec sleep 20", started.display());
    let options = StateOptions {
        directory: directory.path().to_owned(),
        keeper: ["sh", "-c", &command].map(Into::into).to_vec(),
    };
    let keeper = std::thread::spawn({
        let started = started.clone();
        move || {
            let begun = Instant::now();
            while !started.exists() {
                assert!(begun.elapsed() < PATIENCE, "no keeper was started");
                std::thread::sleep(Duration::from_millis(1));
            }
            // The other one. It ends when the server has connected.
            let listener = wire::listen_at(&path).unwrap();
            poll(&mut [PollFd::new(&listener, PollFlags::IN)], None).unwrap();
            std::fs::remove_file(&path).unwrap();
            drop(listener);
            // Some attempts of the server find none. If none comes in this time, the test shows less.
            std::thread::sleep(Duration::from_millis(100));
            let listener = wire::listen_at(&path).unwrap();
            let server = accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
            wire::send(server.as_fd(), &wire::Message::Done, &[]).unwrap();
            server
        }
    });
    let opened = State::open(&options, None, OnFailure::Stall, &Metrics::default());
    let (_state, left) = opened.unwrap();
    assert!(left.is_empty());
    assert_eq!(std::fs::read_to_string(started).unwrap(), "once\n");
    keeper.join().unwrap();
}

/// After a panic, threads may go on serving VMs: the keeper must not hand these to another server.
#[test]
fn a_panic_does_not_end_the_connection_to_the_keeper() {
    for panics in [true, false] {
        let (server, keeper) = connection();
        let state = Arc::new(State::unattended());
        let is_lost = Arc::new(AtomicBool::new(false));
        let lost = Arc::clone(&is_lost);
        let lost = move || lost.store(true, Ordering::Release);
        state.start(server, lost, None).unwrap();
        let connection = KeeperConnection::of(&state);
        let dropping = std::thread::spawn(move || {
            let _connection = connection;
            assert!(!panics, "this panic is the test's");
        });
        assert_eq!(dropping.join().is_err(), panics);
        if !panics {
            let said = wire::receive(keeper.as_fd()).unwrap();
            assert!(matches!(said, Some((wire::Message::End, _))), "{said:?}");
        }
        // A connection that has not ended sees its keeper's end.
        drop(keeper);
        let thread = state.thread.lock().unwrap().take();
        thread.map(JoinHandle::join).transpose().unwrap();
        assert_eq!(is_lost.load(Ordering::Acquire), panics);
    }
}

/// Kind: what is given up is still held. A keeper has one server at a time, and another connection of the same server is refused.
#[test]
fn a_keeper_is_left_before_another_is_reached() {
    let (server, keeper) = connection();
    let (next, next_keeper) = connection();
    // No message of a keeper.
    rustix::io::write(&keeper, b"?").unwrap();
    let book = Arc::new(Book::new().unwrap());
    let next = Mutex::new(Some(next));
    let of_replacement = Arc::clone(&book);
    let (left, has_left) = std::sync::mpsc::channel();
    let replace: book::Replace = Box::new(move || {
        let flags = rustix::net::RecvFlags::DONTWAIT;
        let heard = rustix::net::recv(&keeper, &mut [0; 8], flags);
        left.send(heard.map(|(_, bytes)| bytes)).unwrap();
        of_replacement.end();
        next.lock()
            .unwrap()
            .take()
            .ok_or_else(|| io::Error::other("once"))
    });
    book.talk(server, || {}, Some(&replace));
    // The end of the connection.
    assert_eq!(has_left.recv().unwrap(), Ok(0));
    drop(next_keeper);
}

/// A VM that a keeper is to hold.
fn held_vm() -> Held {
    let (stream, _guest) = connection();
    let maps = map_file(4096).unwrap();
    let uffd = Arc::clone(&maps);
    Held {
        uffd,
        stream,
        maps,
        description: b"{}".to_vec(),
        label: None,
    }
}

/// From now on this process gets no further descriptor. Returns the limit of before.
fn without_descriptors() -> Rlimit {
    let lowest = std::fs::File::open("/dev/null").unwrap();
    let current = Some(u64::try_from(lowest.as_raw_fd()).unwrap());
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current, ..before }).unwrap();
    before
}

/// Kind: what this process lacks is taken for another's end. Each keeper that was started instead would have met the same.
#[test]
fn a_server_without_descriptors_keeps_its_keeper() {
    let this = "state::tests::a_server_without_descriptors_keeps_its_keeper";
    in_a_process_of_its_own(this, || {
        let (server, keeper) = connection();
        let held = held_vm();
        let book = Arc::new(Book::new().unwrap());
        let before = without_descriptors();
        let lost = Arc::new(AtomicBool::new(false));
        let talking = std::thread::spawn({
            let (book, lost) = (Arc::clone(&book), Arc::clone(&lost));
            move || book.talk(server, || lost.store(true, Ordering::Release), None)
        });
        book.keep(1, held);
        assert!(!book.is_held(1) && book.takes_none() && !book.is_lost());
        setrlimit(Resource::Nofile, before).unwrap();
        let (said, descriptors) = wire::receive(keeper.as_fd()).unwrap().unwrap();
        assert_eq!(said, wire::Message::Keep { id: 1 });
        assert_eq!(descriptors.len(), wire::DESCRIPTORS);
        wire::send(keeper.as_fd(), &wire::Message::Acknowledged { id: 1 }, &[]).unwrap();
        let begun = Instant::now();
        while !book.is_held(1) {
            assert!(begun.elapsed() < PATIENCE, "the keeper's answer");
        }
        assert!(!book.takes_none());
        book.end();
        talking.join().unwrap();
        assert!(!lost.load(Ordering::Acquire));
    });
}

/// Kind: an end that waits for what this process lacks. The keeper would take it for that of a server which was killed.
#[test]
fn a_server_without_descriptors_says_its_end() {
    let this = "state::tests::a_server_without_descriptors_says_its_end";
    in_a_process_of_its_own(this, || {
        let (server, keeper) = connection();
        let held = held_vm();
        let book = Arc::new(Book::new().unwrap());
        let before = without_descriptors();
        let its = Arc::clone(&book);
        let talking = std::thread::spawn(move || its.talk(server, || {}, None));
        book.keep(1, held);
        eventually("the lack", || book.takes_none());
        book.end();
        within_patience("the end", move || talking.join().unwrap());
        setrlimit(Resource::Nofile, before).unwrap();
        let said = wire::receive(keeper.as_fd()).unwrap();
        assert!(matches!(said, Some((wire::Message::End, _))), "{said:?}");
    });
}

/// Kind: one peer's cost is everybody's. A keeper that is stopped leaves no room in its queue.
#[test]
fn a_keeper_that_takes_nothing_holds_up_neither_vms_nor_the_end() {
    let (server, _keeper) = connection();
    while wire::send_now(server.as_fd(), &wire::Message::Done, &[]).is_ok() {}
    let book = Arc::new(Book::new().unwrap());
    let its = Arc::clone(&book);
    let talking = std::thread::spawn(move || its.talk(server, || {}, None));
    let its = Arc::clone(&book);
    within_patience("a VM", move || its.keep(1, held_vm()));
    assert!(!book.is_held(1) && !book.is_lost());
    book.end();
    within_patience("the end", move || talking.join().unwrap());
}

static SIGNALS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count_signal(_: libc::c_int) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

/// Kind: a signal is taken for a failure. The kernel resumes no connection that has a time limit.
#[test]
fn a_signal_while_a_keeper_accepts_nobody_fails_no_server() {
    let this = "state::tests::a_signal_while_a_keeper_accepts_nobody_fails_no_server";
    in_a_process_of_its_own(this, || {
        let handler = count_signal as *const () as usize;
        // SAFETY: signal requires a handler that may run at any time: this one adds to an atomic number.
        unsafe { libc::signal(libc::SIGUSR1, handler) };
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(SOCKET);
        let listener = wire::listen_at(&path).unwrap();
        // There is no room for a further one.
        let connect = || wire::connect(&path, Duration::from_millis(1)).ok();
        let _waiting: Vec<_> = std::iter::from_fn(connect).collect();
        let (send, thread) = std::sync::mpsc::channel();
        let server = Sleeper::spawn("a server that connects", move || {
            send.send(rustix::thread::gettid()).unwrap();
            wire::connect(&path, PATIENCE)
        });
        let (process, thread) = (std::process::id(), thread.recv().unwrap());
        let thread = thread.as_raw_nonzero().get();
        // SAFETY: tgkill takes three numbers.
        let sent = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGUSR1) };
        assert_eq!(sent, 0);
        eventually("the signal", || SIGNALS.load(Ordering::Relaxed) == 1);
        server.wait_until_asleep();
        accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
        server.join().unwrap();
    });
}

#[test]
fn a_directory_that_another_user_could_write_to_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state");
    make_directory(&path).unwrap();
    for mode in [0o777, 0o770, 0o1777, 0o702] {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        let error = make_directory(&path).unwrap_err();
        assert!(
            error.to_string().contains("chmod go-w"),
            "{mode:o}: {error}"
        );
    }
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    make_directory(&path).unwrap();
    if std::os::unix::fs::chown(&path, Some(65_534), None).is_ok() && geteuid().is_root() {
        let error = make_directory(&path).unwrap_err();
        assert!(error.to_string().contains("user 65534"), "{error}");
    }
}

/// What it says may mean something else.
#[test]
fn a_vm_that_another_version_has_kept_stays_with_the_keeper() {
    for format in [0, FORMAT, FORMAT + 1] {
        let description = Description {
            format,
            ..description(&[(4096, 8192, 4096, 0)])
        };
        let text = serde_json::to_vec(&description).unwrap();
        let (stream, _) = UnixStream::pair().unwrap();
        let descriptors = vec![
            std::fs::File::open("/dev/null").unwrap().into(),
            stream.into(),
            map_file(4096)
                .unwrap()
                .as_fd()
                .try_clone_to_owned()
                .unwrap(),
            write_description(&text).unwrap(),
        ];
        let taken = kept_vm(7, descriptors);
        assert_eq!(taken.is_ok(), format == FORMAT, "{taken:?}");
    }
}

/// A VM matters more than what it is called.
#[test]
fn a_vm_whose_label_is_missing_or_wrong_is_served_without() {
    let mut labelled = description(&[(4096, 8192, 4096, 0)]);
    let label = VmLabel::new("web-7", "").unwrap();
    labelled.set_label(Some(&label));
    let text = serde_json::to_string(&labelled).unwrap();
    let read = |text: &str| serde_json::from_str::<Description>(text).unwrap();
    assert_eq!(read(&text).label(), Some(label));
    let field = ",\"label\":[\"web-7\",\"\"]";
    let others = [
        text.replace(field, ""),
        text.replace("web-7", "a\\nb"),
        text.replace("[\"web-7\",\"\"]", "{\"id\":7}"),
    ];
    for other in others {
        assert_ne!(other, text);
        let found = read(&other);
        assert_eq!(found.label(), None);
        assert_eq!(found.vm_regions().unwrap().len(), 1);
    }
}

/// Nothing that a VMM could not send is taken over, whoever wrote it.
#[test]
fn a_description_has_the_bounds_of_the_handshake() {
    const HUGE: u64 = 2 << 20;
    let sound = [(4096, 8192, 4096, 4096), (HUGE, HUGE, HUGE, HUGE)];
    let found = description(&sound).vm_regions().unwrap();
    assert_eq!(found.len(), 2);
    assert_eq!((found[0].bytes(), found[1].offset), (8192, HUGE));
    let unsound: [&[(u64, u64, u64, u64)]; 9] = [
        &[],
        &[(4096, 8192, 512, 0)],
        &[(4097, 8192, 4096, 0)],
        &[(4096, 8191, 4096, 0)],
        &[(4096, 0, 4096, 0)],
        &[(4096, 8192, 4096, 1)],
        &[(4096, 8192, 4096, u64::MAX - 4095)],
        &[(4096, 8 << 40, 4096, 0)],
        &[(4096, 8192, 4096, 0), (8192, 4096, 4096, 8192)],
    ];
    for regions in unsound {
        assert_eq!(description(regions).vm_regions(), None, "{regions:?}");
    }
    let many: Vec<_> = (1..=MAX_REGIONS as u64 + 1)
        .map(|page| (page << 12, 4096, 4096, page << 12))
        .collect();
    assert_eq!(description(&many).vm_regions(), None);
    assert!(description(&many[1..]).vm_regions().is_some());
}
