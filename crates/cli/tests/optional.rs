//! What a server has beside its service, and cannot rely on: a log that somebody reads, a service manager that listens.

use std::fs::{self, File};
use std::io::{PipeReader, Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use pagetide_test_support::{PATIENCE, eventually};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// A server, and the directory in which it runs.
struct Server {
    child: Child,
    directory: TempDir,
}

impl Server {
    /// Starts one whose messages go to `log`.
    fn start(log: impl Into<Stdio>, words: &[&str], manager: Option<&str>) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        fs::write(directory.path().join("image"), vec![7; 8192]).expect("a temporary file");
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagetide"));
        command
            .current_dir(directory.path())
            .env_remove("RUST_LOG")
            .args(["serve", "socket=image", "--working-set", "off"])
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        if let Some(manager) = manager {
            command.env("NOTIFY_SOCKET", manager);
        }
        let child = command.spawn().expect("it starts");
        let server = Self { child, directory };
        let socket = server.path("socket");
        eventually("the socket", || socket.exists());
        server
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Connects, and sends what no VMM sends: a server that serves ends the stream, and logs that.
    fn refuses(&self) {
        let mut stream = UnixStream::connect(self.path("socket")).expect("it listens");
        stream.write_all(b"{}").expect("it accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
        assert_eq!(stream.read(&mut [0; 1]).expect("an end"), 0);
    }

    /// Its answer to a request for its metrics.
    fn metrics(&self) -> String {
        let mut stream = UnixStream::connect(self.path("metrics")).expect("it listens");
        stream
            .write_all(b"GET /metrics HTTP/1.0\r\n\r\n")
            .expect("it accepts");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        text
    }

    /// Sends SIGTERM; the status with which it ends.
    fn end(mut self) -> Option<i32> {
        kill_process(Pid::from_child(&self.child), Signal::TERM).expect("the child is there");
        eventually("its end", || self.child.try_wait().expect("a child")).code()
    }
}

/// A server whose log goes to a pipe, and the pipe's other end.
fn with_pipe(words: &[&str]) -> (Server, PipeReader) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    // What a container's log driver has left of it.
    rustix::pipe::fcntl_setpipe_size(&writer, 4096).expect("it is empty");
    (Server::start(writer, words, None), reader)
}

#[test]
fn a_log_whose_reader_has_gone_ends_nothing() {
    let (server, reader) = with_pipe(&["--metrics", "unix:metrics"]);
    drop(reader);
    server.refuses();
    server.refuses();
    eventually("the dropped lines are counted", || {
        let text = server.metrics();
        let is_counted = |line: &str| {
            let count = line.strip_prefix("pagetide_log_lines_dropped_total ");
            count.is_some_and(|count| count.parse::<u64>().is_ok_and(|count| count > 0))
        };
        match text.lines().any(is_counted) {
            true => Ok(()),
            false => Err(text),
        }
    });
    server.refuses();
    assert_eq!(server.end(), Some(0));
}

#[test]
fn a_log_that_nobody_reads_holds_nothing_up() {
    let (server, mut reader) = with_pipe(&[]);
    // Each writes more than a hundred bytes, into a pipe for 4096.
    for _ in 0..100 {
        server.refuses();
    }
    assert_eq!(server.end(), Some(0));
    let mut text = String::new();
    reader.read_to_string(&mut text).expect("UTF-8");
    assert!(text.contains("listening") && text.len() <= 4096, "{text}");
}

#[test]
fn a_log_on_a_full_disk_ends_nothing() {
    let Ok(full) = File::options().write(true).open("/dev/full") else {
        println!("SKIP: there is no /dev/full");
        return;
    };
    let server = Server::start(full, &[], None);
    server.refuses();
    assert_eq!(server.end(), Some(0));
}

#[test]
fn a_service_manager_that_does_not_read_holds_nothing_up() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("notify");
    let manager = UnixDatagram::bind(&path).expect("a socket");
    let sender = UnixDatagram::unbound().expect("a socket");
    sender.set_nonblocking(true).expect("it can");
    while sender.send_to(b"X=1", &path).is_ok() {}
    let name = path.to_str().expect("UTF-8");
    let server = Server::start(Stdio::null(), &[], Some(name));
    server.refuses();
    // It reads at last, and would end a server that had not said that it is ready.
    manager.set_read_timeout(Some(PATIENCE)).expect("a limit");
    let mut text = [0; 64];
    let is_ready = |bytes: usize, text: &[u8; 64]| text.get(..bytes) == Some(b"READY=1");
    while !is_ready(manager.recv(&mut text).expect("a message"), &text) {}
    assert_eq!(server.end(), Some(0));
}

#[test]
fn a_service_manager_of_any_name_is_told() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::SocketAddr;
    let abstract_name = format!("pagetide-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&abstract_name).expect("a name");
    let manager = UnixDatagram::bind_addr(&address).expect("a socket");
    manager.set_read_timeout(Some(PATIENCE)).expect("a limit");
    let server = Server::start(Stdio::null(), &[], Some(&format!("@{abstract_name}")));
    let heard = || {
        let mut text = [0; 64];
        let bytes = manager.recv(&mut text).expect("a message");
        String::from_utf8_lossy(&text[..bytes]).into_owned()
    };
    assert_eq!(heard(), "READY=1");
    assert_eq!(server.end(), Some(0));
    assert!(heard().starts_with("STOPPING=1\n"));
}

/// The reader of standard error may have gone before an error is told.
#[test]
fn an_error_that_nobody_reads_has_its_status() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let status = Command::new(env!("CARGO_BIN_EXE_pagetide"))
        .args(["image", "info", "/no/such/image"])
        .stderr(writer)
        .status();
    assert_eq!(status.expect("it starts").code(), Some(2));
}
