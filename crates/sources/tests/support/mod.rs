//! An HTTP server that misbehaves on demand.

#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "test code, of which each test uses a part"
)]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use pagetide_sources::{CacheOptions, ObjectOptions};
use rustix::net::{AddressFamily, SocketType};

/// An address at which nobody listens, as long as the socket lives: a port that was given back could be another
/// test's at once.
pub(crate) fn address_without_a_listener() -> (OwnedFd, SocketAddr) {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let address = rustix::net::getsockname(&socket).unwrap();
    (socket, address.try_into().unwrap())
}

/// What the server does with one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Well,
    /// Answers after this time.
    Slow(Duration),
    /// Answers once the gate is open.
    Gated(Gate),
    /// Never answers.
    Silent,
    /// Answers, and never sends the body's second half.
    SilentBody,
    /// A body that is shorter than the range, and says so.
    Short,
    /// A body that ends before its announced length.
    Cut,
    /// A body that is longer than the range.
    Long,
    /// Closes the connection so that the client sees a reset.
    Reset,
    Status(u16),
    /// Leads to this URL.
    Redirect(String),
    /// The bytes before the requested ones.
    WrongRange,
    /// The answer names the right range, of an object of another length.
    WrongLength,
    /// All of the object, as a server without ranges does.
    Whole,
    /// The answer lacks the ETag.
    NoEtag,
}

/// What answers wait at.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl PartialEq for Gate {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Gate {}

/// Opens a gate when it is dropped, so that no answer waits for a test that has failed.
pub(crate) struct Opens(Gate);

impl Drop for Opens {
    fn drop(&mut self) {
        *self.0.0.0.lock().unwrap() = true;
        self.0.0.1.notify_all();
    }
}

impl Gate {
    pub(crate) fn opens_in_the_end(&self) -> Opens {
        Opens(self.clone())
    }

    fn wait(&self) {
        let is_open = self.0.0.lock().unwrap();
        drop(self.0.1.wait_while(is_open, |open| !*open).unwrap());
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) range: Option<Range<u64>>,
    pub(crate) if_match: Option<String>,
    pub(crate) authorization: Option<String>,
    pub(crate) referer: Option<String>,
}

pub(crate) type Acting = Box<dyn FnMut(&Request) -> Act + Send>;

pub(crate) struct Site {
    pub(crate) content: Vec<u8>,
    /// Zeroes that the object has behind the content.
    pub(crate) zeroes: u64,
    pub(crate) etag: Option<String>,
    pub(crate) modified: Option<&'static str>,
    pub(crate) heeds_if_match: bool,
}

impl Site {
    fn bytes(&self) -> u64 {
        self.content.len() as u64 + self.zeroes
    }

    /// A range of the object, which has it.
    fn part(&self, range: &Range<u64>) -> Vec<u8> {
        let end = self.content.len();
        let within = |at: u64| usize::try_from(at).map_or(end, |at| at.min(end));
        let mut part = self.content[within(range.start)..within(range.end)].to_vec();
        part.resize(usize::try_from(range.end - range.start).unwrap(), 0);
        part
    }
}

pub(crate) struct Server {
    pub(crate) url: String,
    shared: Arc<Shared>,
}

struct Shared {
    site: Mutex<Site>,
    act: Mutex<Acting>,
    requests: Mutex<Vec<Request>>,
    /// Connections that a client closed while the server was silent.
    given_up: AtomicUsize,
    flying: AtomicUsize,
    most_flying: AtomicUsize,
    is_over: AtomicBool,
}

/// An error with its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Content in which each eight bytes differ.
pub(crate) fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let words = (0..bytes.div_ceil(8) as u64).map(|word| {
        let mixed = (word + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed.rotate_left(17);
        (mixed ^ mixed >> 29).to_le_bytes()
    });
    let mut content: Vec<u8> = words.flatten().collect();
    content.truncate(bytes);
    content
}

/// How long an answer may take where a test waits for that time: what answers well must not need it, on however slow a
/// machine.
pub(crate) const LATE: Duration = Duration::from_secs(1);

/// Small blocks, and limits that only an answer that never comes reaches. Nothing is hedged.
pub(crate) fn options() -> ObjectOptions {
    ObjectOptions {
        block_bytes: 16 << 10,
        get_bytes: 64 << 10,
        attempts: 2,
        limit: Duration::from_secs(60),
        hedge_after: Duration::from_secs(60)..=Duration::from_secs(60),
        ..ObjectOptions::default()
    }
}

impl Server {
    pub(crate) fn start(bytes: usize) -> Self {
        Self::start_behind(bytes, |connection| connection)
    }

    /// Answers at what `wrap` makes of each connection, such as TLS.
    pub(crate) fn start_behind<S: Read + Write>(
        bytes: usize,
        wrap: impl Fn(TcpStream) -> S + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            site: Mutex::new(Site {
                content: pattern(bytes, 0),
                zeroes: 0,
                etag: Some("\"first\"".into()),
                modified: Some("Mon, 02 Nov 2026 10:00:00 GMT"),
                heeds_if_match: true,
            }),
            act: Mutex::new(Box::new(|_| Act::Well)),
            requests: Mutex::default(),
            given_up: AtomicUsize::new(0),
            flying: AtomicUsize::new(0),
            most_flying: AtomicUsize::new(0),
            is_over: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        let wrap = Arc::new(wrap);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if accepting.is_over.load(Ordering::Relaxed) {
                    return;
                }
                let (shared, wrap) = (Arc::clone(&accepting), Arc::clone(&wrap));
                thread::spawn(move || {
                    stream.set_nodelay(true).unwrap();
                    shared.serve(&mut wrap(stream));
                });
            }
        });
        Self {
            url: format!("http://{address}/images/memory"),
            shared,
        }
    }

    /// The content that the server has now.
    pub(crate) fn content(&self) -> Vec<u8> {
        self.shared.site.lock().unwrap().content.clone()
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Site)) {
        change(&mut self.shared.site.lock().unwrap());
    }

    pub(crate) fn behave(&self, act: impl FnMut(&Request) -> Act + Send + 'static) {
        *self.shared.act.lock().unwrap() = Box::new(act);
    }

    /// Every request gets this.
    pub(crate) fn always(&self, act: Act) {
        self.behave(move |_| act.clone());
    }

    /// The next request gets this.
    pub(crate) fn once(&self, act: Act) {
        let mut act = Some(act);
        self.behave(move |_| act.take().unwrap_or(Act::Well));
    }

    pub(crate) fn gets(&self) -> Vec<Request> {
        let requests = self.shared.requests.lock().unwrap();
        let gets = requests.iter().filter(|request| request.method == "GET");
        gets.cloned().collect()
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.shared.requests.lock().unwrap().clone()
    }

    pub(crate) fn given_up(&self) -> usize {
        self.shared.given_up.load(Ordering::SeqCst)
    }

    /// The largest number of requests that were being answered at one time.
    pub(crate) fn most_flying(&self) -> usize {
        self.shared.most_flying.load(Ordering::SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        let host = self.url.trim_start_matches("http://");
        let _ = TcpStream::connect(host.split('/').next().unwrap());
    }
}

impl Shared {
    fn serve(&self, stream: &mut (impl Read + Write)) {
        while let Some(request) = read_request(stream) {
            self.requests.lock().unwrap().push(request.clone());
            let act = (self.act.lock().unwrap())(&request);
            let flying = self.flying.fetch_add(1, Ordering::SeqCst) + 1;
            self.most_flying.fetch_max(flying, Ordering::SeqCst);
            let goes_on = self.answer(stream, &request, &act);
            self.flying.fetch_sub(1, Ordering::SeqCst);
            if !goes_on {
                return;
            }
        }
    }

    /// Waits until the client gives up.
    fn hang(&self, stream: &mut impl Read) -> bool {
        let mut rest = [0; 64];
        while matches!(stream.read(&mut rest), Ok(1..)) {}
        self.given_up.fetch_add(1, Ordering::SeqCst);
        false
    }

    /// Whether the connection can carry another request.
    fn answer(&self, stream: &mut (impl Read + Write), request: &Request, act: &Act) -> bool {
        match act {
            // The request's last byte is unread: the kernel resets the connection.
            Act::Reset => return false,
            Act::Slow(time) => thread::sleep(*time),
            Act::Gated(gate) => gate.wait(),
            _ => {}
        }
        let mut last = [0; 1];
        if !matches!(stream.read(&mut last), Ok(1)) {
            return false;
        }
        if *act == Act::Silent {
            return self.hang(stream);
        }
        if let Act::Status(status) = act {
            let text = "an error that names http://me:word@host/?X-Sig=secret";
            let body = if request.method == "HEAD" { "" } else { text };
            let head = format!(
                "HTTP/1.1 {status} Error\r\nContent-Length: {}\r\n\r\n",
                body.len()
            );
            return stream.write_all((head + body).as_bytes()).is_ok();
        }
        if let Act::Redirect(url) = act {
            let head =
                format!("HTTP/1.1 302 Found\r\nLocation: {url}\r\nContent-Length: 0\r\n\r\n");
            return stream.write_all(head.as_bytes()).is_ok();
        }
        let site = self.site.lock().unwrap();
        let is_other = request.if_match.is_some() && request.if_match != site.etag;
        if is_other && site.heeds_if_match {
            return stream
                .write_all(b"HTTP/1.1 412 Changed\r\nContent-Length: 0\r\n\r\n")
                .is_ok();
        }
        let bytes = site.bytes();
        let mut head = String::new();
        if let Some(etag) = site.etag.as_ref().filter(|_| *act != Act::NoEtag) {
            head += &format!("ETag: {etag}\r\n");
        }
        if let Some(modified) = site.modified {
            head += &format!("Last-Modified: {modified}\r\n");
        }
        let range = request.range.clone().filter(|_| *act != Act::Whole);
        let Some(mut range) = range else {
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {bytes}\r\n{head}\r\n");
            let is_head = request.method == "HEAD";
            let body = if is_head { &[][..] } else { &site.content };
            return stream.write_all(&[head.as_bytes(), body].concat()).is_ok();
        };
        if range.start >= bytes {
            let text = b"HTTP/1.1 416 Range\r\nContent-Length: 0\r\n\r\n";
            return stream.write_all(text).is_ok();
        }
        range.end = range.end.min(bytes);
        if *act == Act::WrongRange {
            let by = range.start.min(4096);
            range = range.start - by..range.end - by.max(1);
        }
        let mut body = site.part(&range);
        match act {
            Act::Short => body.truncate(body.len() / 2),
            Act::Long => body.extend([7; 100]),
            _ => {}
        }
        let named = bytes + u64::from(*act == Act::WrongLength);
        let Range { start, end } = range;
        let last = end - 1;
        let length = body.len();
        let head = format!(
            "HTTP/1.1 206 Partial\r\nContent-Length: {length}\r\nContent-Range: bytes {start}-{last}/{named}\r\n{head}\r\n"
        );
        drop(site);
        if matches!(act, Act::Cut | Act::SilentBody) {
            body.truncate(length / 2);
        }
        let sent = stream.write_all(&[head.as_bytes(), &body].concat());
        match act {
            Act::Cut => false,
            Act::SilentBody => self.hang(stream),
            _ => sent.is_ok(),
        }
    }
}

/// Reads all of a request but its last byte.
fn read_request(stream: &mut impl Read) -> Option<Request> {
    let mut text = Vec::new();
    let mut byte = [0; 1];
    while !text.ends_with(b"\r\n\r") {
        if !matches!(stream.read(&mut byte), Ok(1)) {
            return None;
        }
        text.push(byte[0]);
    }
    let text = String::from_utf8(text).unwrap();
    let mut first = text.lines().next().unwrap().split(' ');
    let header = |name: &str| {
        let mut fields = text.lines().filter_map(|line| line.split_once(": "));
        let field = fields.find(|(field, _)| field.eq_ignore_ascii_case(name));
        field.map(|(_, value)| value.trim().to_owned())
    };
    let range = header("range").map(|range| {
        let (start, last) = range
            .strip_prefix("bytes=")
            .unwrap()
            .split_once('-')
            .unwrap();
        start.parse().unwrap()..last.parse::<u64>().unwrap() + 1
    });
    Some(Request {
        method: first.next().unwrap().into(),
        path: first.next().unwrap().into(),
        range,
        if_match: header("if-match"),
        referer: header("referer"),
        authorization: header("authorization"),
    })
}

/// A disk cache with room for everything.
pub(crate) fn cache_in(directory: &std::path::Path) -> CacheOptions {
    CacheOptions {
        directory: directory.into(),
        bytes: 1 << 30,
    }
}

/// Small blocks, of which one request takes four.
pub(crate) fn blocks_of(block_bytes: usize) -> ObjectOptions {
    ObjectOptions {
        block_bytes,
        get_bytes: 4 * block_bytes,
        ..ObjectOptions::default()
    }
}
