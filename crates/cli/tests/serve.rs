//! `pagetide serve` as a process: what it refuses, and how it ends. What it serves is tested by crates/serve.

use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};

use pagetide_test_support::{PATIENCE, eventually};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

#[path = "serve/file.rs"]
mod file;
#[path = "serve/guest.rs"]
mod guest;
#[path = "serve/kept.rs"]
mod kept;
#[path = "serve/labels.rs"]
mod labels;
#[path = "serve/threads.rs"]
mod threads;
#[path = "serve/told.rs"]
mod told;

struct Place {
    directory: TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self {
            directory: tempfile::tempdir().expect("a temporary directory"),
        };
        fs::write(place.path("image"), vec![7; 8192]).expect("a temporary file");
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// `SOCKET=IMAGE`.
    fn binding(&self) -> String {
        format!(
            "{}={}",
            self.path("socket").display(),
            self.path("image").display()
        )
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagetide"));
        command
            .current_dir(self.directory.path())
            .env_remove("RUST_LOG")
            .arg("serve")
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// A server that has started: until it says so, a signal ends the process as it is. Its messages go to the file
    /// `log`.
    fn start(&self, words: &[&str]) -> Child {
        let (binding, log) = (self.binding(), self.path("log"));
        let words = [&[binding.as_str()], words].concat();
        let child = self
            .command(&words)
            .stderr(fs::File::create(&log).expect("a temporary file"))
            .spawn()
            .expect("it starts");
        logged(&log, "listening");
        child
    }
}

fn ended(child: &mut Child) -> ExitStatus {
    eventually("its end", || child.try_wait().expect("it is a child"))
}

/// Waits until a file has a whole line with `wanted`. Returns the line.
fn logged(file: &Path, wanted: &str) -> String {
    eventually(wanted, || {
        let log = fs::read_to_string(file).expect("UTF-8");
        let mut lines = log.split_inclusive('\n');
        let line = lines.find(|line| line.contains(wanted) && line.ends_with('\n'));
        line.map(str::to_owned).ok_or(log)
    })
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("the child is there");
}

fn assert_refused(output: &Output, wanted: &str) {
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains(wanted), "{wanted:?} is not in {message:?}");
    assert!(
        message.starts_with("pagetide: ") && message.lines().count() == 1,
        "{message:?}"
    );
}

#[test]
fn what_makes_no_sense_is_refused_in_one_line() {
    let place = Place::new();
    let binding = place.binding();
    let missing = format!("{}=/no/such/image", place.path("other").display());
    let nowhere = format!(
        "/no/such/directory/socket={}",
        place.path("image").display()
    );
    let again = format!(
        "{}={}",
        place.path("./socket").display(),
        place.path("other-image").display()
    );
    fs::write(place.path("other-image"), vec![8; 8192]).expect("a temporary file");
    fs::write(place.path("empty"), "").expect("a temporary file");
    let cases: [(&[&str], &str); 21] = [
        (&[&binding, &again], "the socket is named twice, for "),
        (&[], "SOCKET=IMAGE"),
        (&["socket"], "is not SOCKET=IMAGE"),
        (
            &["socket=ftp://host/image"],
            "no image can be read from ftp://",
        ),
        (&[&missing], "/no/such/image does not exist"),
        (&[&nowhere], "listening at /no/such/directory/socket"),
        (&[&binding, "--working-set", "maybe"], "--working-set"),
        (&[&binding, "--prefetch", "yes"], "--prefetch"),
        (&[&binding, "--on-failure", "panic"], "--on-failure"),
        (&[&binding, "--fault-around", "3"], "a power of two"),
        (&[&binding, "--socket-mode", "888"], "a mode such as 660"),
        (&[&binding, "--metrics", "localhost"], "unix:PATH"),
        (&[&binding, "--socket-owner", "root"], "UID:GID"),
        (&[&binding, "--seccomp", "maybe"], "--seccomp"),
        (&[&binding, "--cache-size", "1G"], "there is no --cache"),
        (&[&binding, "--cache-size", "much"], "is not a size"),
        (&[&binding, "--max-vms", "0"], "--max-vms is 1 at least"),
        (
            &[&binding, "--max-vms-per-user", "0"],
            "--max-vms-per-user is 1 at least",
        ),
        (&[&binding, "--stop-limit", "86401"], "seconds up to a day"),
        (&["socket=empty"], "empty is no guest memory: it is empty"),
        (
            &[&binding, "--metrics", "unix:/no/such/metrics"],
            "serving the metrics at unix:/no/such/metrics",
        ),
    ];
    for (words, wanted) in cases {
        let output = place.command(words).output().expect("it starts");
        assert_refused(&output, wanted);
        assert!(!place.path("socket").exists(), "{words:?}");
    }
}

/// A script that passes many words sees which one it was.
#[test]
fn a_word_that_is_not_utf_8_is_named() {
    let place = Place::new();
    let pair = OsString::from_vec(b"a.sock=image-\xff.mem".to_vec());
    let output = place.command(&[&place.binding()]).arg(pair).output();
    let output = output.expect("it starts");
    assert_refused(&output, r#"not taken here: "a.sock=image-\xFF.mem"; "#);
}

#[test]
fn a_state_directory_with_too_long_a_path_is_refused_with_the_length() {
    let place = Place::new();
    let directory = place.path(&"x".repeat(100));
    let state = directory.to_str().expect("UTF-8");
    let binding = place.binding();
    for more in [&["--check"][..], &[]] {
        let words = [&[&binding, "--state", state], more].concat();
        let output = place.command(&words).output().expect("it starts");
        let bytes = state.len();
        let wanted = format!("{state}: its path has {bytes} bytes and may have 92, ");
        assert_refused(&output, &wanted);
        assert!(!directory.exists());
    }
}

/// Kind: a check that changes what it looks at.
#[test]
fn a_check_makes_no_directory_for_working_sets() {
    let place = Place::new();
    let directory = place.path("sets");
    let words = ["--working-set-dir", "sets", "--check"];
    let output = place.command(&words).arg(place.binding()).output();
    let output = output.expect("it starts");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(!directory.exists());
}

#[test]
fn sigterm_ends_it_with_0_and_removes_the_socket() {
    let place = Place::new();
    for number in [Signal::TERM, Signal::INT] {
        let mut child = place.start(&["--log", "json"]);
        signal(&child, number);
        assert_eq!(ended(&mut child).code(), Some(0));
        assert!(!place.path("socket").exists());
        let messages = fs::read_to_string(place.path("log")).expect("UTF-8");
        for line in messages.lines() {
            let line: serde_json::Value = serde_json::from_str(line).expect("a JSON object");
            assert!(line["message"].is_string(), "{line}");
        }
        assert!(messages.contains("listening"), "{messages}");
    }
}

/// The end does not wait for the store, which would make it an error of the image.
#[test]
fn sigterm_ends_a_server_that_waits_for_a_silent_store() {
    let place = Place::new();
    let store = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = store.local_addr().expect("bound");
    let binding = format!("{}=http://{address}/image", place.path("socket").display());
    let mut child = place.command(&[&binding]).spawn().expect("it starts");
    let (_silent, _) = store.accept().expect("a request");
    signal(&child, Signal::TERM);
    assert_eq!(ended(&mut child).code(), Some(0));
}

/// Options that are read again open an image, and the store is silent for as long as it likes.
#[test]
fn a_silent_store_at_sighup_holds_up_neither_vms_nor_the_end() {
    let place = Place::new();
    let store = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = store.local_addr().expect("bound");
    let config = place.path("serve.toml");
    let sockets = |more: &str| {
        let (socket, image) = (place.path("socket"), place.path("image"));
        let text = format!("seccomp = \"off\"\n[sockets]\n{socket:?} = {image:?}\n{more}");
        fs::write(&config, text).expect("a temporary file");
    };
    sockets("");
    let log = place.path("log");
    let mut child = place
        .command(&["--config", "serve.toml"])
        .stderr(fs::File::create(&log).expect("a temporary file"))
        .spawn()
        .expect("it starts");
    let socket = place.path("socket");
    eventually("the socket", || socket.exists());
    sockets(&format!("\"other\" = \"http://{address}/image\"\n"));
    signal(&child, Signal::HUP);
    let (_silent, _) = store.accept().expect("a request");
    assert!(is_served(&socket));
    signal(&child, Signal::TERM);
    assert_eq!(ended(&mut child).code(), Some(0));
    assert!(!socket.exists());
    // It has not waited until it gave the store up.
    let log = fs::read_to_string(&log).expect("UTF-8");
    assert!(!log.contains("had not ended in time"), "{log}");
    assert!(!log.contains("not served"), "{log}");
}

/// Images are looked at again, and there is nothing to read.
#[test]
fn sighup_without_a_file_says_that_the_options_stay() {
    let place = Place::new();
    let mut child = place.start(&[]);
    signal(&child, Signal::HUP);
    let log = place.path("log");
    logged(&log, "images and sockets are looked at again");
    let log = fs::read_to_string(log).expect("UTF-8");
    assert!(log.contains("there is no file of options"), "{log}");
    signal(&child, Signal::TERM);
    assert_eq!(ended(&mut child).code(), Some(0));
}

/// With both numbers, and what to do. Where there are enough, nothing is said.
#[test]
fn too_few_descriptors_for_all_vms_are_told_at_the_start() {
    let place = Place::new();
    for (max_vms, is_told) in [("69", true), ("68", false)] {
        let log = place.path("log");
        let mut child = Command::new("sh")
            .args(["-c", "ulimit -n 1024; exec \"$0\" \"$@\""])
            .args([env!("CARGO_BIN_EXE_pagetide"), "serve", &place.binding()])
            .args(["--max-vms", max_vms])
            .stderr(fs::File::create(&log).expect("a temporary file"))
            .spawn()
            .expect("it starts");
        logged(&log, "listening");
        signal(&child, Signal::TERM);
        assert_eq!(ended(&mut child).code(), Some(0));
        let log = fs::read_to_string(&log).expect("UTF-8");
        let told = log.lines().find(|line| line.contains("LimitNOFILE="));
        assert_eq!(told.is_some(), is_told, "{log}");
        let says = |wanted| told.is_none_or(|line| line.contains(wanted));
        assert!(says("descriptors=1024 vms=68 max_vms=69"), "{log}");
    }
}

#[test]
fn a_socket_that_a_killed_server_left_is_used_again() {
    let place = Place::new();
    let mut child = place.start(&[]);
    child.kill().expect("it runs");
    assert!(!ended(&mut child).success());
    assert!(place.path("socket").exists());
    let mut child = place.start(&["--socket-mode", "660"]);
    eventually("the new socket", || {
        UnixStream::connect(place.path("socket")).is_ok()
    });
    let mode = fs::metadata(place.path("socket"))
        .expect("it is there")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o660);
    // A second server at the same socket.
    let second = place
        .command(&[&place.binding()])
        .output()
        .expect("it starts");
    assert_refused(&second, "another process listens");
    signal(&child, Signal::TERM);
    assert_eq!(ended(&mut child).code(), Some(0));
}

/// Connects, and sends what no VMM sends: a server that listens there ends the stream.
fn is_served(socket: &Path) -> bool {
    let Ok(mut stream) = UnixStream::connect(socket) else {
        return false;
    };
    stream.write_all(b"{}").expect("it accepts");
    stream
        .set_read_timeout(Some(PATIENCE))
        .expect("a time limit");
    matches!(stream.read(&mut [0; 1]), Ok(0))
}

/// As systemd does: the socket is descriptor 3, and a message is expected when the server is ready.
/// The command as a service manager starts it that has opened a socket.
fn activated(place: &Place, listener: std::os::unix::net::UnixListener) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" \"$@\" 3<&0"])
        .args([env!("CARGO_BIN_EXE_pagetide"), "serve", &place.binding()])
        .stdin(std::os::fd::OwnedFd::from(listener));
    command
}

#[test]
fn a_service_managers_socket_without_a_binding_is_named() {
    let place = Place::new();
    let other = place.path("other");
    let listener = std::os::unix::net::UnixListener::bind(&other).expect("it binds");
    let mut child = activated(&place, listener)
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    eventually("the server", || is_served(&place.path("socket")));
    signal(&child, Signal::TERM);
    let mut log = String::new();
    let stderr = child.stderr.as_mut().expect("it is piped");
    stderr.read_to_string(&mut log).expect("UTF-8");
    assert_eq!(ended(&mut child).code(), Some(0));
    let line = log.lines().find(|line| line.contains("has no binding"));
    assert!(
        line.is_some_and(|line| line.contains(&other.display().to_string())),
        "{log}"
    );
}

/// What a service manager is told.
struct Messages(std::os::unix::net::UnixDatagram);

impl Messages {
    fn at(path: &Path) -> Self {
        let socket = std::os::unix::net::UnixDatagram::bind(path).expect("it binds");
        socket
            .set_read_timeout(Some(PATIENCE))
            .expect("a time limit");
        Self(socket)
    }

    fn next(&self) -> String {
        let mut buffer = [0; 256];
        let bytes = self.0.recv(&mut buffer).expect("a message");
        String::from_utf8_lossy(&buffer[..bytes]).into_owned()
    }
}

/// Whatever becomes of the reload: a service manager would wait for its end.
#[test]
fn a_service_manager_is_told_of_a_reload_and_of_its_end() {
    let place = Place::new();
    let messages = Messages::at(&place.path("notify"));
    let (socket, image) = (place.path("socket"), place.path("image"));
    let good = format!("[sockets]\n{socket:?} = {image:?}\n");
    fs::write(place.path("serve.toml"), &good).expect("a temporary file");
    let mut child = place
        .command(&["--config", "serve.toml", "--stop-limit", "60"])
        .env("NOTIFY_SOCKET", place.path("notify"))
        .spawn()
        .expect("it starts");
    assert_eq!(messages.next(), "READY=1");
    assert!(is_served(&socket));
    for text in [
        good.clone(),
        "prefetch = 7".to_owned(),
        format!("{good}\"other\" = \"/no/such/image\"\n"),
        format!(
            "{good}\"{}\" = {image:?}\n",
            place.path("./socket").display()
        ),
    ] {
        fs::write(place.path("serve.toml"), text).expect("a temporary file");
        signal(&child, Signal::HUP);
        let told = messages.next();
        let time = told.strip_prefix("RELOADING=1\nMONOTONIC_USEC=");
        assert!(time.is_some_and(|us| us.parse::<u64>().is_ok()), "{told}");
        assert_eq!(messages.next(), "READY=1");
    }
    signal(&child, Signal::TERM);
    // A unit whose TimeoutStopSec= is shorter waits as long as the drain may take.
    assert_eq!(messages.next(), "STOPPING=1\nEXTEND_TIMEOUT_USEC=66500000");
    assert_eq!(ended(&mut child).code(), Some(0));
}

#[test]
fn a_service_managers_socket_is_used_and_it_is_told() {
    let place = Place::new();
    let socket = place.path("socket");
    let listener = std::os::unix::net::UnixListener::bind(&socket).expect("it binds");
    let notify = place.path("notify");
    let messages = Messages::at(&notify);
    let mut child = activated(&place, listener)
        .env("NOTIFY_SOCKET", &notify)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    assert!(messages.next().contains("READY=1"));
    assert!(is_served(&socket));
    signal(&child, Signal::TERM);
    assert!(messages.next().contains("STOPPING=1"));
    assert_eq!(ended(&mut child).code(), Some(0));
    assert!(socket.exists(), "it is the service manager's");
}

/// Not all of a VM is there: nobody can serve it, and the log says which it is.
#[test]
fn what_a_service_manager_has_stored_is_taken_back() {
    let place = Place::new();
    let notify = place.path("notify");
    let _messages = std::os::unix::net::UnixDatagram::bind(&notify).expect("it binds");
    let (stored, _) = UnixStream::pair().expect("a pair");
    let mut child = Command::new("sh")
        .args(["-c", "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" \"$@\" 3<&0"])
        .args([env!("CARGO_BIN_EXE_pagetide"), "serve", &place.binding()])
        .env("LISTEN_FDNAMES", "pagetide-vm-7")
        .env("NOTIFY_SOCKET", &notify)
        .env("FDSTORE", "64")
        .stdin(std::os::fd::OwnedFd::from(stored))
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    eventually("the server", || is_served(&place.path("socket")));
    signal(&child, Signal::TERM);
    let mut log = String::new();
    let stderr = child.stderr.as_mut().expect("it is piped");
    stderr.read_to_string(&mut log).expect("UTF-8");
    assert_eq!(ended(&mut child).code(), Some(0));
    let line = log.lines().find(|line| line.contains("vm=7"));
    let reason = "the service manager has not all of its descriptors";
    assert!(line.is_some_and(|line| line.contains(reason)), "{log}");
}

fn get(mut stream: impl Read + Write, path: &str) -> String {
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )
    .expect("it listens");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("UTF-8");
    answer
}

fn unix(path: &Path) -> UnixStream {
    eventually("the metrics", || UnixStream::connect(path))
}

#[test]
fn metrics_are_served_at_a_unix_socket_and_at_a_port() {
    let place = Place::new();
    let path = place.path("metrics");
    let mut child = place.start(&["--metrics", &format!("unix:{}", path.display())]);
    let answer = get(unix(&path), "/metrics");
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("pagetide_vms 0"),
        "{answer}"
    );
    assert!(get(unix(&path), "/health").contains("ok"));
    assert!(get(unix(&path), "/else").starts_with("HTTP/1.1 404"));
    signal(&child, Signal::TERM);
    assert_eq!(ended(&mut child).code(), Some(0));
    assert!(!path.exists());

    // A port that is free.
    let log = place.path("log");
    let words = ["--metrics", "127.0.0.1:0", "--log", "json"];
    let mut child = place
        .command(&[&[place.binding().as_str()], &words[..]].concat())
        .stderr(fs::File::create(&log).expect("a temporary file"))
        .spawn()
        .expect("it starts");
    let line = logged(&log, "\"address\"");
    let line: serde_json::Value = serde_json::from_str(&line).expect("a JSON object");
    let address = line["address"].as_str().expect("the metrics' address");
    let answer = get(TcpStream::connect(address).expect("it listens"), "/metrics");
    assert!(answer.contains("pagetide_faults_total 0"), "{answer}");
    signal(&child, Signal::TERM);
    assert_eq!(ended(&mut child).code(), Some(0));
}

/// `Seccomp:` of each thread of a process: 2 is a filter.
fn filters(child: &Child) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", child.id())).expect("it runs");
    let status = |task: fs::DirEntry| fs::read_to_string(task.path().join("status")).ok();
    let texts = tasks.filter_map(|task| status(task.ok()?));
    texts
        .flat_map(|text| {
            let lines = text
                .lines()
                .filter_map(|line| line.strip_prefix("Seccomp:"));
            lines.map(|mode| mode.trim().to_owned()).collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn system_calls_are_filtered_on_all_threads_unless_that_is_off() {
    let own = fs::read_to_string("/proc/self/status").expect("/proc is mounted");
    if !own.contains("Seccomp:") {
        println!("SKIP: the kernel has no seccomp");
        return;
    }
    let place = Place::new();
    fs::write(place.path("serve.toml"), "seccomp = \"off\"\n").expect("a temporary file");
    for (words, wanted) in [
        (&[][..], "2"),
        (&["--seccomp", "on"], "2"),
        (&["--seccomp", "log"], "2"),
        (&["--seccomp", "off"], "0"),
        (&["--config", "serve.toml"], "0"),
        (&["--config", "serve.toml", "--seccomp", "on"], "2"),
    ] {
        let mut child = place.start(words);
        eventually("the filter", || {
            let filters = filters(&child);
            match filters.len() > 1 && filters.iter().all(|mode| mode == wanted) {
                true => Ok(()),
                false => Err(filters),
            }
        });
        assert!(is_served(&place.path("socket")));
        signal(&child, Signal::TERM);
        assert_eq!(ended(&mut child).code(), Some(0));
    }
}
