//! The control socket: what is served changes at the word of its clients, who learn what has become of it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;

use pagetide_serve::control::channel::{AskError, ControlSocket, Reply, ask};
use pagetide_serve::control::message::{Answer, Request, Socket, SocketState, Status};
use pagetide_serve::{Binding, BindingTable, Inherited, Options, Totals};
use pagetide_sources::Location;
use pagetide_test_support::{in_a_process_of_its_own, within_patience};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use support::*;

const PAGES: usize = 64;

/// A server that is told what to serve.
struct Told {
    place: Place,
    running: Running,
    _control: ControlSocket,
}

impl Told {
    fn start(options: impl FnOnce(&Place) -> Options) -> Self {
        Self::with(options, |_| Inherited::default())
    }

    /// The same with what a service manager gives to it.
    fn with(
        options: impl FnOnce(&Place) -> Options,
        inherited: impl FnOnce(&Place) -> Inherited,
    ) -> Self {
        let place = Place::new(PAGES);
        let options = Options {
            may_lack_bindings: true,
            ..options(&place)
        };
        let running = Running::with(options, inherited(&place)).unwrap();
        let controller = running.controller.clone();
        let path = place.directory.path().join("control");
        let control = ControlSocket::start(&path, move |request, reply| {
            controller.handle(request, reply);
        });
        Self {
            place,
            running,
            _control: control.unwrap(),
        }
    }

    fn without_bindings() -> Self {
        Self::start(|place| Options {
            bindings: Vec::new(),
            ..place.options()
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.directory.path().join(name)
    }

    fn control(&self) -> PathBuf {
        self.path("control")
    }

    fn ask(&self, request: &Request) -> Result<Answer, String> {
        match ask(&self.control(), request, PATIENCE) {
            Ok(answer) => Ok(answer),
            Err(AskError::Refused(error)) => Err(error),
            Err(error) => panic!("{error}"),
        }
    }

    fn add(&self, socket: &str, image: &str) -> Result<Answer, String> {
        let image = self.path(image).display().to_string();
        self.ask(&add(&self.path(socket), image))
    }

    fn remove(&self, socket: &str) -> Result<Answer, String> {
        let socket = self.path(socket);
        self.ask(&Request::Remove { socket })
    }

    fn drain(&self, socket: Option<&str>) -> Result<Answer, String> {
        let socket = socket.map(|socket| self.path(socket));
        self.ask(&Request::Drain { socket })
    }

    fn list(&self) -> Vec<Socket> {
        match self.ask(&Request::List) {
            Ok(Answer::Sockets(sockets)) => sockets,
            other => panic!("{other:?}"),
        }
    }

    fn states(&self) -> Vec<(SocketState, usize)> {
        let sockets = self.list();
        sockets
            .iter()
            .map(|socket| (socket.state, socket.vms))
            .collect()
    }

    fn status(&self) -> Status {
        match self.ask(&Request::Status) {
            Ok(Answer::Status(status)) => status,
            other => panic!("{other:?}"),
        }
    }
}

fn add(socket: &Path, image: String) -> Request {
    Request::Add {
        socket: socket.to_owned(),
        binding: BindingTable {
            image,
            ..BindingTable::default()
        },
    }
}

#[test]
fn an_image_is_served_when_its_add_is_answered_and_until_it_is_removed() {
    if !has_userfaultfd() {
        return;
    }
    let told = Told::without_bindings();
    assert_eq!(told.list(), []);
    let Ok(Answer::Added { digest }) = told.add("guest.sock", "guest.mem") else {
        panic!("it is not added");
    };
    // At once.
    let guest = Guest::new(PAGES);
    let stream = guest.connect(&told.place.socket());
    guest.check(3, &content(3));
    let text = told.running.metrics.text();
    let socket = told.place.socket().display().to_string();
    let vms = format!("pagetide_socket_vms{{socket=\"{socket}\",image=\"");
    let line = text.lines().find(|line| line.starts_with(&vms));
    assert!(line.is_some_and(|line| line.ends_with("\"} 1")), "{text}");
    // What is there already is no error, and nothing else takes its place.
    assert!(told.add("./guest.sock", "guest.mem").is_ok());
    fs::copy(told.place.image(), told.path("other.mem")).unwrap();
    let refused = told.add("guest.sock", "other.mem").unwrap_err();
    assert!(refused.contains("remove it first"), "{refused}");
    let sockets = told.list();
    assert_eq!(sockets.len(), 1);
    assert_eq!(sockets[0].digest, Some(digest));
    assert_eq!(told.states(), [(SocketState::Served, 1)]);
    // A reload of the server's own options takes nothing away that was added.
    let mut options = told.place.options();
    options.may_lack_bindings = true;
    options.bindings = vec![Binding::new(
        told.path("file.sock"),
        Location::Path(told.place.image()),
    )];
    told.running.stopper.reload(options);
    eventually("both", || {
        equals(
            told.states(),
            &vec![(SocketState::Served, 1), (SocketState::Served, 0)],
        )
    });
    assert_eq!(told.remove("guest.sock"), Ok(Answer::Removed { vms: 1 }));
    assert!(!told.place.socket().exists());
    guest.check(4, &content(4));
    assert_eq!(
        told.states(),
        [(SocketState::Served, 0), (SocketState::Closed, 1)]
    );
    drop(stream);
    eventually("its end", || {
        equals(told.states(), &vec![(SocketState::Served, 0)])
    });
    let refused = told.remove("guest.sock").unwrap_err();
    assert!(refused.contains("there is no such socket"), "{refused}");
}

#[test]
fn what_cannot_be_served_is_refused_by_name_and_leaves_nothing() {
    let told = Told::without_bindings();
    fs::write(told.path("blocked.sock"), "a file").unwrap();
    let named = |socket: &str, image: &str| {
        let image = image.to_owned();
        told.ask(&add(Path::new(socket), image)).unwrap_err()
    };
    let cases = [
        (
            told.add("a.sock", "missing.mem").unwrap_err(),
            "missing.mem does not exist",
        ),
        (
            told.add("blocked.sock", "guest.mem").unwrap_err(),
            "a file that is no socket",
        ),
        (
            told.add("no/a.sock", "guest.mem").unwrap_err(),
            "listening at",
        ),
        (
            named("/a.sock", "ftp://a/b"),
            "no image can be read from ftp://",
        ),
        (named("a.sock", "/a.mem"), "the path must be absolute"),
        (named("/a.sock", "a.mem"), "the path must be absolute"),
    ];
    for (refused, wanted) in cases {
        assert!(refused.contains(wanted), "{wanted:?} is not in {refused:?}");
    }
    assert_eq!(told.list(), []);
    assert!(told.status().troubles.is_empty());
}

/// A service manager has opened the socket of an image that is not there.
fn without_its_image() -> Told {
    let binding = |place: &Place| Binding {
        is_required: false,
        ..Binding::new(
            place.socket(),
            Location::Path(place.directory.path().join("late.mem")),
        )
    };
    let options = |place: &Place| Options {
        bindings: vec![binding(place)],
        ..place.options()
    };
    Told::with(options, |place| Inherited {
        listeners: vec![UnixListener::bind(place.socket()).unwrap()],
        ..Inherited::default()
    })
}

/// As before the service ran: whoever connects to a service manager's socket waits, and is not refused.
#[test]
fn at_a_service_managers_socket_vms_wait_until_its_image_is_there() {
    if !has_userfaultfd() {
        return;
    }
    let told = without_its_image();
    let connected = || {
        let guest = Guest::new(PAGES);
        let stream = guest.connect(&told.place.socket());
        (guest.touch(3), guest, stream)
    };
    let waits = || equals(told.states(), &vec![(SocketState::Waiting, 0)]);
    eventually("the failure", waits);
    let (asleep, _guest, _stream) = connected();
    // Whoever asks for it hears why not, and it stays: the server's options have it.
    let refused = told.add("guest.sock", "late.mem").unwrap_err();
    assert!(refused.contains("late.mem does not exist"), "{refused}");
    let [socket] = &told.list()[..] else {
        panic!("{:?}", told.list());
    };
    assert_eq!(socket.error, Some(refused));
    let status = told.status();
    assert_eq!((status.sockets, status.sockets_waiting), (0, 1));
    assert!(status.ready && status.troubles[0].contains("not served yet"));
    assert_eq!(told.running.metrics.totals().vms_accepted, 0);
    assert!(asleep.is_undisturbed());
    fs::copy(told.place.image(), told.path("new.mem")).unwrap();
    fs::rename(told.path("new.mem"), told.path("late.mem")).unwrap();
    eventually("its image", || told.add("guest.sock", "late.mem"));
    assert!(asleep.join() == content(3));
    // And so it is when nothing is served there any more.
    assert_eq!(told.remove("guest.sock"), Ok(Answer::Removed { vms: 1 }));
    let (asleep, _guest, _stream) = connected();
    assert!(told.add("guest.sock", "guest.mem").is_ok());
    assert!(asleep.join() == content(3));
}

/// Kind: a task that never lets its thread look at anything else. On one CPU, where the thread may run between the two steps of
/// an end.
#[test]
fn a_control_socket_ends_at_once() {
    in_a_process_of_its_own("a_control_socket_ends_at_once", || {
        let allowed = sched_getaffinity(None).unwrap();
        let mut one = CpuSet::new();
        let mut cpus = 0..CpuSet::MAX_CPU;
        one.set(cpus.find(|&cpu| allowed.is_set(cpu)).unwrap());
        sched_setaffinity(None, &one).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control");
        for round in 0..300 {
            let control = ControlSocket::start(&path, |_: Request, _: Reply<Answer>| {}).unwrap();
            let client = UnixStream::connect(&path).unwrap();
            within_patience("the end", move || drop(control));
            assert!(!path.exists(), "{round}");
            drop(client);
        }
    });
}

/// One who waits for a silent store holds up nobody else.
#[test]
fn others_are_answered_while_an_image_is_being_opened() {
    let store = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/image", store.local_addr().unwrap());
    // One image at a URL from the start on: the filter of system calls permits the network.
    let silent = |place: &Place, name: &str| Binding {
        is_required: false,
        ..Binding::new(place.directory.path().join(name), url.parse().unwrap())
    };
    let told = Told::start(|place| Options {
        bindings: vec![silent(place, "first.sock")],
        ..place.options()
    });
    let (_silent, _) = store.accept().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| told.ask(&add(&told.path("silent.sock"), url.clone())));
        eventually("its opening", || equals(told.list().len(), &2));
        assert!(told.add("guest.sock", "guest.mem").is_ok());
        assert_eq!(told.status().sockets, 1);
        assert!(!waiting.is_finished());
        assert_eq!(told.remove("silent.sock"), Ok(Answer::Removed { vms: 0 }));
        let refused = waiting.join().unwrap().unwrap_err();
        assert!(
            refused.contains("closed before its image was open"),
            "{refused}"
        );
    });
}

#[test]
fn a_drain_is_answered_when_no_vm_needs_the_server() {
    if !has_userfaultfd() {
        return;
    }
    let told = Told::without_bindings();
    told.add("guest.sock", "guest.mem").unwrap();
    told.add("other.sock", "guest.mem").unwrap();
    let connect = |socket: &str| {
        let guest = Guest::new(PAGES);
        let stream = guest.connect(&told.path(socket));
        guest.check(1, &content(1));
        assert_eq!(guest.residents(), [1]);
        (guest, stream)
    };
    let (guest, stream) = connect("guest.sock");
    let (other, _stays) = connect("other.sock");
    assert_eq!(told.drain(Some("guest.sock")), Ok(Answer::Drained));
    assert_eq!(guest.resident(), PAGES);
    wait_for_end(&stream);
    assert_eq!(other.residents(), [1]);
    assert_eq!(told.states(), [(SocketState::Served, 1)]);
    assert!(told.status().ready && !told.place.socket().exists());
    // A socket without VMs, also one that was never there, is drained.
    assert_eq!(told.drain(Some("guest.sock")), Ok(Answer::Drained));

    assert_eq!(told.drain(None), Ok(Answer::Drained));
    assert_eq!(other.resident(), PAGES);
    assert_eq!(told.list(), []);
    let status = told.status();
    assert!(!status.ready, "{status:?}");
    assert!(status.troubles[0].contains("drained"), "{status:?}");
    let refused = told.add("guest.sock", "guest.mem").unwrap_err();
    assert!(refused.contains("the server is drained"), "{refused}");
    let totals = told.running.ended(2);
    assert_eq!(totals.vms_killed, Totals::default().vms_killed);
    // A stop after the drain ends as any other.
    told.running.stopper.stop();
}

/// The server ends while VMs are being drained: both at once fetch what is missing.
#[test]
fn a_server_that_drains_can_be_stopped() {
    if !has_userfaultfd() {
        return;
    }
    let told = Told::start(|place| place.damaged(5).0);
    let guest = Guest::new(PAGES);
    let _stream = guest.connect(&told.place.socket());
    guest.check(1, &content(1));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| told.drain(None));
        // All but the damaged page.
        eventually("the pages", || equals(guest.resident(), &(PAGES - 1)));
        assert_eq!(told.states(), [(SocketState::Draining, 1)]);
        // As many others as there may be, who ask for the same and leave: they take no place for long.
        for _ in 0..64 {
            let mut stream = UnixStream::connect(told.control()).unwrap();
            let drain = b"{\"version\":1,\"request\":{\"drain\":{\"socket\":null}}}\n";
            stream.write_all(drain).unwrap();
        }
        assert!(!told.status().ready);
        assert!(!waiting.is_finished());
        told.running.stopper.stop();
        told.running.stopper.stop();
        let refused = waiting.join().unwrap().unwrap_err();
        assert!(refused.contains("the server ends"), "{refused}");
    });
}

/// What comes back for these bytes, until the server closes the connection or has said a line.
fn exchanged(told: &Told, bytes: &[u8]) -> String {
    let mut stream = UnixStream::connect(told.control()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let _ = stream.write_all(bytes);
    let mut line = Vec::new();
    let mut byte = [0];
    while matches!(stream.read(&mut byte), Ok(1)) && byte != *b"\n" {
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

#[test]
fn clients_that_make_no_sense_are_told_so_and_slow_ones_hold_up_nobody() {
    let told = Told::without_bindings();
    let mode = fs::metadata(told.control()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    for (line, wanted) in [
        ("\n", "makes no sense"),
        ("[1,2\n", "makes no sense"),
        (
            "{\"version\":2,\"request\":{\"later\":1}}\n",
            "version 2 of the control protocol",
        ),
        (
            "{\"version\":1,\"request\":\"destroy\"}\n",
            "unknown variant `destroy`",
        ),
        (
            "{\"version\":1,\"request\":\"list\",\"more\":1}\n",
            "unknown field `more`",
        ),
        (
            "{\"version\":1,\"request\":\"list\"}\n",
            "\"answer\":{\"sockets\":[]}",
        ),
    ] {
        let answer = exchanged(&told, line.as_bytes());
        assert!(answer.contains(wanted), "{wanted:?} is not in {answer:?}");
        assert!(answer.starts_with("{\"version\":1,"), "{answer}");
    }
    // A line that is too long, or of no text, and one that does not end.
    assert_eq!(exchanged(&told, &vec![b'a'; 65 << 10]), "");
    assert!(exchanged(&told, b"\xff\xfe\n").contains("makes no sense"));
    let deep = format!("{}\n", "[".repeat(60 << 10));
    assert!(exchanged(&told, deep.as_bytes()).contains("makes no sense"));
    // As many as there may be at one time, which say nothing or half of it: the next one waits until they are let go.
    let slow = |number: usize| {
        let mut stream = UnixStream::connect(told.control()).unwrap();
        stream.write_all(&b"{\"version\":1"[..number % 12]).unwrap();
        stream
    };
    let slow: Vec<UnixStream> = (0..64).map(slow).collect();
    assert!(told.status().ready);
    drop(slow);
    // Several requests on one connection, one of them before the answer to the last.
    let mut stream = UnixStream::connect(told.control()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let status = "{\"version\":1,\"request\":\"status\"}\n";
    stream.write_all(status.repeat(3).as_bytes()).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answers = String::new();
    stream.read_to_string(&mut answers).unwrap();
    assert_eq!(answers.lines().count(), 3, "{answers}");
}
