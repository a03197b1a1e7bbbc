//! A proxy in front of an object store: latency, faults, and a count of round trips.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

/// What happens to the GETs of one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The store's answer is this status.
    Status(u16),
    /// The answer comes when there is no such fault any more.
    Held,
    /// The connection ends in the middle of the body.
    Cut,
}

/// When a request is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// At once.
    Free,
    /// After this time.
    Delayed(Duration),
    /// With all others that wait, when no thread of this process has anything else to do: one round trip.
    /// The number of these does not depend on how fast this machine is.
    InRounds,
}

/// How often all threads of the process have to be found asleep, without having run in between, before a round
/// begins: they may sleep for a moment on their way.
const LOOKS: usize = 10;

pub(crate) struct Proxy(Arc<Shared>);

struct Shared {
    upstream: u16,
    faults: Mutex<HashMap<String, Fault>>,
    /// A fault has changed.
    lifted: Condvar,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    pace: Pace,
    requests: usize,
    rounds: usize,
    /// Requests that wait for the next round.
    held: usize,
    /// Requests that are being answered.
    answering: usize,
}

/// How often each thread of this process but the calling one has gone to sleep; `None` if one of them is awake.
fn sleeps() -> Option<Vec<(OsString, String)>> {
    let own = rustix::thread::gettid().as_raw_nonzero().to_string();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let others = tasks.filter(|task| task.file_name() != *own);
    others
        .map(|task| {
            // A thread that has just ended is no thread at rest.
            let status = std::fs::read_to_string(task.path().join("status")).ok()?;
            let value = |name| status.lines().find_map(|line| line.strip_prefix(name));
            let state = value("State:")?.trim_start();
            let sleeps = value("voluntary_ctxt_switches:")?;
            let is_asleep = state.starts_with(['S', 'D']);
            is_asleep.then(|| (task.file_name(), sleeps.to_owned()))
        })
        .collect()
}

impl Proxy {
    /// Passes what connects to `listener` on to a port of this machine.
    pub(crate) fn start(listener: TcpListener, upstream: u16) -> Self {
        let shared = Arc::new(Shared {
            upstream,
            faults: Mutex::default(),
            lifted: Condvar::new(),
            state: Mutex::new(State {
                pace: Pace::Free,
                requests: 0,
                rounds: 0,
                held: 0,
                answering: 0,
            }),
            changed: Condvar::new(),
        });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&accepting);
                thread::spawn(move || shared.serve(stream));
            }
        });
        let watching = Arc::clone(&shared);
        thread::spawn(move || watching.begin_rounds());
        Self(shared)
    }

    /// Changes the pace, and counts anew.
    pub(crate) fn set_pace(&self, pace: Pace) {
        let mut state = self.0.state.lock().unwrap();
        assert_eq!(state.held, 0, "requests wait");
        (state.pace, state.requests, state.rounds) = (pace, 0, 0);
    }

    /// Requests, and rounds of them, since the pace was set.
    pub(crate) fn counted(&self) -> (usize, usize) {
        let state = self.0.state.lock().unwrap();
        (state.requests, state.rounds)
    }

    /// What happens from now on to the GETs of the object at `path`.
    pub(crate) fn inject(&self, path: &str, fault: Option<Fault>) {
        let mut faults = self.0.faults.lock().unwrap();
        match fault {
            Some(fault) => faults.insert(path.into(), fault),
            None => faults.remove(path),
        };
        self.0.lifted.notify_all();
    }
}

impl Shared {
    fn begin_rounds(&self) {
        let (mut seen, mut looks) = (None, 0);
        loop {
            // The time between two looks.
            thread::sleep(Duration::from_millis(1));
            let is_due = {
                let state = self.state.lock().unwrap();
                state.pace == Pace::InRounds && state.held > 0 && state.answering == 0
            };
            let now = if is_due { sleeps() } else { None };
            looks = if now.is_some() && now == seen {
                looks + 1
            } else {
                0
            };
            seen = now;
            if looks == LOOKS {
                let mut state = self.state.lock().unwrap();
                state.rounds += 1;
                state.answering = std::mem::take(&mut state.held);
                self.changed.notify_all();
            }
        }
    }

    /// Waits until the request may be passed on. Returns whether it belongs to a round.
    fn wait(&self) -> bool {
        let mut state = self.state.lock().unwrap();
        state.requests += 1;
        match state.pace {
            Pace::Free => false,
            Pace::Delayed(time) => {
                drop(state);
                // What is measured is how long a guest waits for a store as slow as that.
                thread::sleep(time);
                false
            }
            Pace::InRounds => {
                let round = state.rounds;
                state.held += 1;
                while state.rounds == round {
                    state = self.changed.wait(state).unwrap();
                }
                true
            }
        }
    }

    fn serve(&self, mut client: TcpStream) {
        client.set_nodelay(true).unwrap();
        while let Some(head) = read_head(&mut client) {
            let in_round = self.wait();
            let goes_on = self.answer(&mut client, &head);
            if in_round {
                let mut state = self.state.lock().unwrap();
                state.answering -= 1;
            }
            if goes_on.is_none() {
                return;
            }
        }
    }

    /// `None` if the connection has ended.
    fn answer(&self, client: &mut TcpStream, head: &str) -> Option<()> {
        let mut words = head.split(' ');
        let (method, path) = (words.next()?, words.next()?);
        let fault = match method {
            "GET" => self.faults.lock().unwrap().get(path).copied(),
            _ => None,
        };
        match fault {
            Some(Fault::Status(status)) => {
                let answer = format!("HTTP/1.1 {status} Injected\r\nContent-Length: 0\r\n\r\n");
                return client.write_all(answer.as_bytes()).ok();
            }
            Some(Fault::Held) => {
                let faults = self.faults.lock().unwrap();
                let is_held = |faults: &mut HashMap<_, _>| faults.get(path) == Some(&Fault::Held);
                drop(self.lifted.wait_while(faults, is_held).unwrap());
            }
            Some(Fault::Cut) | None => {}
        }
        let mut upstream = TcpStream::connect(("127.0.0.1", self.upstream)).ok()?;
        let (first, rest) = head.split_once("\r\n")?;
        let request = format!("{first}\r\nConnection: close\r\n{rest}");
        upstream.write_all(request.as_bytes()).ok()?;
        let answer = read_head(&mut upstream)?;
        let lines = answer.trim_end().split("\r\n");
        let kept: Vec<&str> = lines
            .filter(|line| !line.to_ascii_lowercase().starts_with("connection:"))
            .collect();
        let mut body = Vec::new();
        if method != "HEAD" {
            upstream.read_to_end(&mut body).ok()?;
        }
        let head = format!("{}\r\n\r\n", kept.join("\r\n"));
        client.write_all(head.as_bytes()).ok()?;
        if fault == Some(Fault::Cut) {
            let _ = client.write_all(&body[..body.len() / 2]);
            return None;
        }
        client.write_all(&body).ok()
    }
}

/// A head with its empty line, byte by byte: what follows stays in the stream.
fn read_head(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    let mut byte = [0; 1];
    while !head.ends_with(b"\r\n\r\n") {
        if !matches!(stream.read(&mut byte), Ok(1)) {
            return None;
        }
        head.push(byte[0]);
    }
    String::from_utf8(head).ok()
}
