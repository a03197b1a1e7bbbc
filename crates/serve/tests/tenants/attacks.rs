//! What a hostile tenant does, all of it at once and as one user.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;

use pagetide_serve::native::frame::MAGIC;
use pagetide_serve::native::message::{Attach, Message, Region};

use super::fuse::{Fuse, Hangs};
use super::support::{Guest, PAGE, try_to_send};

const USER: u32 = 65_534;

/// What an attack has to work with.
struct Means {
    socket: PathBuf,
    /// A file that cannot be closed.
    hanging: Option<File>,
}

type Attack = fn(&Means) -> Option<()>;

/// Their names, and one round of each. A round that the server ends early is `None`, and is a round, too.
const ATTACKS: [(&str, Attack); 11] = [
    ("says nothing", say_nothing),
    ("sends a message in small parts", trickle),
    ("sends what makes no sense", nonsense),
    ("sends thousands of regions", regions),
    ("claims more memory than there is, and stays", claims),
    ("claims it in the native protocol", claims_natively),
    ("asks for files and reads no answer", shares),
    ("sends descriptors that hang", hangs),
    ("sends many descriptors", descriptors),
    ("leaves in the middle of a message", half),
    ("discards what it touches", discards),
];

pub(crate) const COUNT: usize = ATTACKS.len();

/// Attacks until standard input ends. Says when each attack has made so many rounds.
pub(crate) fn run(socket: &Path, rounds: u64) {
    // As root: anybody else would need a user namespace.
    let mut fuse = Fuse::mount(Hangs::EachClose);
    let hanging = fuse.as_ref().map(|fuse| fuse.file().try_clone().unwrap());
    let means: &'static Means = Box::leak(Box::new(Means {
        socket: socket.into(),
        hanging,
    }));
    for (name, attack) in ATTACKS {
        thread::spawn(move || {
            become_user(USER);
            for round in 1_u64.. {
                let _ = attack(means);
                if round == rounds {
                    println!("\ndone {name}");
                }
            }
        });
    }
    let _ = std::io::stdin().lines().count();
    // Otherwise this process would hang, too.
    if let Some(fuse) = &mut fuse {
        fuse.end();
    }
    std::process::exit(0);
}

/// The user at the other end of what this thread connects.
fn become_user(uid: u32) {
    let (same, uid) = (libc::c_long::from(-1), libc::c_long::from(uid));
    // SAFETY: setresuid takes three numbers. The system call, and not the C library's function, changes this thread alone.
    let changed = unsafe { libc::syscall(libc::SYS_setresuid, same, uid, same) };
    assert_eq!(changed, 0);
}

/// A guest, whose userfaultfd only root gets in many places.
fn new_guest(pages: usize) -> Guest {
    become_user(0);
    let guest = Guest::new(pages);
    become_user(USER);
    guest
}

impl Means {
    fn connect(&self) -> Option<UnixStream> {
        UnixStream::connect(&self.socket).ok()
    }

    fn send(&self, bytes: &[u8], beside: &[BorrowedFd<'_>]) -> Option<UnixStream> {
        let stream = self.connect()?;
        try_to_send(&stream, bytes, beside).ok()?;
        Some(stream)
    }
}

/// Waits until the server has ended the connection.
fn wait(mut stream: &UnixStream) {
    let _ = stream.read_to_end(&mut Vec::new());
}

fn say_nothing(means: &Means) -> Option<()> {
    let streams: Vec<_> = (0..64).filter_map(|_| means.connect()).collect();
    // Those that were turned away have ended.
    streams
        .last()
        .map(|stream| (&*stream).write_all(b"["))?
        .ok()
}

fn trickle(means: &Means) -> Option<()> {
    let mut stream = means.connect()?;
    stream.write_all(b"[").ok()?;
    for _ in 0..5000 {
        stream.write_all(b",[]").ok()?;
    }
    Some(())
}

fn nonsense(means: &Means) -> Option<()> {
    wait(&means.send(b"{}", &[])?);
    Some(())
}

fn message(regions: impl Iterator<Item = (u64, u64)>) -> Vec<u8> {
    let region = |(page, pages): (u64, u64)| {
        let (start, bytes) = (page * PAGE as u64, pages * PAGE as u64);
        format!(
            r#"{{"base_host_virt_addr":{start},"size":{bytes},"offset":{start},"page_size":4096}}"#
        )
    };
    let regions: Vec<String> = regions.map(region).collect();
    format!("[{}]", regions.join(",")).into_bytes()
}

fn userfaultfd() -> &'static Guest {
    static GUEST: std::sync::OnceLock<Guest> = std::sync::OnceLock::new();
    GUEST.get_or_init(|| new_guest(1))
}

fn regions(means: &Means) -> Option<()> {
    let message = message((1..8000).map(|page| (2 * page, 1)));
    wait(&means.send(&message, &[userfaultfd().uffd.as_fd()])?);
    Some(())
}

fn claims(means: &Means) -> Option<()> {
    let message = message(std::iter::once((1, 1 << 28)));
    let claim = |_| means.send(&message, &[userfaultfd().uffd.as_fd()]);
    let streams: Vec<UnixStream> = (0..16).filter_map(claim).collect();
    streams.iter().for_each(wait);
    Some(())
}

/// The length of a large image, of which nothing is mapped; then more than there is.
fn claims_natively(means: &Means) -> Option<()> {
    let large = means.socket.with_file_name(super::LARGE_SOCKET);
    for pages in [super::LARGE_PAGES, 1 << 28] {
        let region = Region::missing(PAGE as u64, pages * PAGE as u64, 0);
        let attach = Message::Attach(Attach {
            uffd_features: 0,
            regions: vec![region],
        });
        let mut bytes = greeting()?;
        attach.frame(2, false).encode(&mut bytes).ok()?;
        let mut stream = UnixStream::connect(&large).ok()?;
        try_to_send(&stream, &bytes, &[userfaultfd().uffd.as_fd()]).ok()?;
        // The answer to the greeting.
        let _ = stream.read(&mut [0; 64]);
    }
    Some(())
}

fn greeting() -> Option<Vec<u8>> {
    let hello = Message::Hello {
        lowest: 1,
        highest: 1,
        features: u64::MAX,
        name: "hostile".into(),
    };
    let mut bytes = MAGIC.to_vec();
    hello.frame(1, false).encode(&mut bytes).ok()?;
    Some(bytes)
}

fn shares(means: &Means) -> Option<()> {
    let mut bytes = greeting()?;
    for id in 2..200 {
        Message::Share.frame(id, false).encode(&mut bytes).ok()?;
    }
    let streams: Vec<_> = (0..8).filter_map(|_| means.send(&bytes, &[])).collect();
    drop(streams);
    Some(())
}

fn hangs(means: &Means) -> Option<()> {
    let file = means.hanging.as_ref()?;
    wait(&means.send(b"[", &[file.as_fd()])?);
    Some(())
}

fn descriptors(means: &Means) -> Option<()> {
    let (end, _other) = std::io::pipe().ok()?;
    wait(&means.send(b"[", &[end.as_fd(); 16])?);
    Some(())
}

fn half(means: &Means) -> Option<()> {
    let message = userfaultfd().message();
    let part = message.as_bytes().get(..message.len() / 2)?;
    means.send(part, &[userfaultfd().uffd.as_fd()]).map(drop)
}

/// A VM that is served, touches and discards; a thread that is not served sleeps, and is left behind.
fn discards(means: &Means) -> Option<()> {
    let guest = new_guest(super::PAGES);
    let stream = guest.try_to_connect(&means.socket);
    stream.set_nonblocking(true).ok()?;
    for page in 0..8 {
        let reader = guest.begin_to_read(page);
        while !reader.is_finished() {
            if matches!((&stream).read(&mut [0]), Ok(0)) {
                return None;
            }
            thread::yield_now();
        }
        guest.discard(page, 1);
    }
    Some(())
}
