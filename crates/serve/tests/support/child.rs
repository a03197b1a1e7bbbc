//! A VMM as a process of its own: this test binary, started again.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;

use super::{Guest, PATIENCE, Task, eventually};

const SOCKET: &str = "PAGETIDE_TEST_SOCKET";
const PAGES: &str = "PAGETIDE_TEST_PAGES";

/// A VMM in another process.
pub struct Vmm {
    child: Child,
    lines: Receiver<String>,
    /// The thread that does what it is told, once it has said so.
    thread: Option<u32>,
}

impl Vmm {
    /// Starts a VMM with this many pages of memory, which connects to `socket`. `test` is the name of
    /// the test that calls [`run_as_child`].
    pub fn start(test: &str, socket: &Path, pages: usize) -> Self {
        let mut vmm = Self::spawn(test, socket, pages);
        let line = vmm.wait_for("connected ");
        // A thread has a directory in /proc as a process has.
        vmm.thread = line.strip_prefix("connected ").unwrap().parse().ok();
        vmm
    }

    /// The same in a control group, of which this is the directory.
    pub fn start_in(group: &Path, test: &str, socket: &Path, pages: usize) -> Self {
        let mut command = Command::new("sh");
        command
            .args([
                "-c",
                "echo $$ > \"$GROUP/cgroup.procs\" && exec \"$0\" \"$@\"",
            ])
            .arg(std::env::current_exe().unwrap())
            .env("GROUP", group);
        let vmm = Self::run(command, test, socket, pages);
        vmm.wait_for("connected ");
        vmm
    }

    /// The same by a command that starts this test program elsewhere.
    pub fn start_by(command: Command, test: &str, socket: &Path, pages: usize) -> Self {
        let vmm = Self::run(command, test, socket, pages);
        vmm.wait_for("connected ");
        vmm
    }

    /// The same for one that may not live to say that it has connected.
    pub fn spawn(test: &str, socket: &Path, pages: usize) -> Self {
        let command = Command::new(std::env::current_exe().unwrap());
        Self::run(command, test, socket, pages)
    }

    fn run(mut command: Command, test: &str, socket: &Path, pages: usize) -> Self {
        let mut child = command
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(SOCKET, socket)
            .env(PAGES, pages.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = child.stdout.take().unwrap();
        let (send, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        Self {
            child,
            lines,
            thread: None,
        }
    }

    fn wait_for(&self, wanted: &str) -> String {
        loop {
            let line = self.lines.recv_timeout(PATIENCE).unwrap();
            if line.starts_with(wanted) {
                return line;
            }
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Has it read a page, and waits for its content's first word.
    pub fn read(&mut self, page: usize) -> u64 {
        self.begin_to_read(page);
        self.has_read().expect("the page arrives")
    }

    pub fn begin_to_read(&mut self, page: usize) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{page}").unwrap();
    }

    /// Has it discard a page, and waits until it has.
    pub fn discard(&mut self, page: usize) {
        writeln!(self.child.stdin.as_mut().unwrap(), "discard {page}").unwrap();
        self.wait_for("discarded");
    }

    /// Has it close its connection, and live on.
    pub fn leave(&mut self) {
        writeln!(self.child.stdin.as_mut().unwrap(), "leave").unwrap();
    }

    /// Has it connect again with the same memory and the same userfaultfd, and waits until it has.
    pub fn come_back(&mut self) {
        writeln!(self.child.stdin.as_mut().unwrap(), "come back").unwrap();
        self.wait_for("came back");
    }

    /// The first word of the page that it was told to read; `None` if it does not come.
    pub fn has_read(&self) -> Option<u64> {
        loop {
            let line = self.lines.recv_timeout(PATIENCE).ok()?;
            if let Some(word) = line.strip_prefix("word ") {
                return Some(word.parse().unwrap());
            }
        }
    }

    /// Its thread, which does what it is told, and how often that had gone to sleep when it was found asleep.
    pub fn asleep(&self) -> (Task, u64) {
        let task = Task::of_process(self.thread.unwrap());
        (task, task.asleep("the VMM"))
    }

    /// Whether it has said anything since.
    pub fn is_silent(&self) -> bool {
        self.lines.try_recv().is_err()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// The signal that ends it.
    pub fn signal(&mut self) -> Option<i32> {
        eventually("the VMM's end", || self.child.try_wait().unwrap()).signal()
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The VMM's process: reads the pages that it is told to. Returns at once in the test itself.
pub fn run_as_child() {
    let Ok(socket) = std::env::var(SOCKET) else {
        return;
    };
    let pages = std::env::var(PAGES).unwrap().parse().unwrap();
    let guest = Guest::new(pages);
    let mut stream = Some(guest.connect(Path::new(&socket)));
    println!("\nconnected {}", rustix::thread::gettid());
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        if let Some(page) = line.strip_prefix("discard ") {
            guest.discard(page.parse().unwrap(), 1);
            println!("\ndiscarded");
            continue;
        }
        if line == "leave" {
            stream = None;
            continue;
        }
        if line == "come back" {
            stream = Some(guest.connect(Path::new(&socket)));
            println!("\ncame back");
            continue;
        }
        let page: usize = line.parse().unwrap();
        let word = u64::from_le_bytes(guest.read(page)[..8].try_into().unwrap());
        println!("\nword {word}");
    }
    drop(stream);
    std::process::exit(0);
}
