//! Serves another process's userfaultfd from an epoll loop, like a page-fault handler beside a VMM.
//!
//! The other process is this program, started again: it allocates memory, registers it with a userfaultfd,
//! sends the descriptor over a Unix socket, and then reads the memory, which is absent.
//!
//! `epoll_handler [PAGES [AROUND]]`: the size of the memory in pages, and how many pages the pager installs
//! for each fault. The other process prints how long its reads took.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use pagetide_examples::{receive, send};
use pagetide_memory::{Backing, GuestAddress, HostAddress, HostRange, PageSize, Region};
use pagetide_pager::{Contents, Mode, Pager, PatternSource, RegionConfig, Serving};
use pagetide_uapi::userfaultfd::{Features, Userfaultfd};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

const PAGES: u64 = 256;
const AROUND: u64 = 16;

fn fill(gpa: GuestAddress, piece: &mut [u8]) {
    piece.fill(gpa.0.to_le_bytes()[2] ^ gpa.0.to_le_bytes()[1] ^ 0x5a);
}

fn main() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        [] => handler(PAGES, AROUND),
        ["guest", pages] => guest(pages.parse()?),
        [pages] => handler(pages.parse()?, AROUND),
        [pages, around] => handler(pages.parse()?, around.parse()?),
        _ => bail!("usage: epoll_handler [PAGES [AROUND]]"),
    }
}

/// The process that serves.
fn handler(pages: u64, around: u64) -> anyhow::Result<()> {
    let (ours, theirs) = UnixStream::pair()?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(["guest", &pages.to_string()])
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()?;
    let (uffd, start) = receive(&ours)?;

    // The handler has the descriptor and the address range, and nothing else of the other process.
    let uffd = Arc::new(Userfaultfd::adopt(uffd, Features::MISSING_SHMEM)?);
    let range = HostRange::new(
        HostAddress(usize::try_from(start)?),
        usize::try_from(pages << 12)?,
    )?;
    let contents = Contents::Local(Arc::new(PatternSource::new(fill)));
    let config = RegionConfig::foreign(&uffd, range, PageSize::Size4K, Mode::Missing, contents);
    let pager = Pager::new()?;
    let id = pager.add(config.fault_around(around))?;
    (&ours).write_all(b"g")?;

    // An event loop in which the pager is one descriptor among others.
    const PAGER: u64 = 0;
    const CHILD: u64 = 1;
    let mut serving = Serving::new(&pager, 32);
    let poll = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(
        &poll,
        serving.as_fd(),
        EventData::new_u64(PAGER),
        EventFlags::IN,
    )?;
    epoll::add(&poll, &ours, EventData::new_u64(CHILD), EventFlags::IN)?;
    let mut events = Vec::with_capacity(8);
    let mut faults = 0;
    'serve: loop {
        epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), None)?;
        for event in events.drain(..) {
            match event.data.u64() {
                PAGER => faults += serving.process_ready()?,
                // The guest process is done, or has exited.
                _ => break 'serve,
            }
        }
    }
    let status = child.wait()?;
    ensure!(status.success(), "the guest process ended with {status}");
    let present = pager.counts(id).context("the region is there")?.present;
    println!("{faults} faults of the other process, {present} pages installed");
    Ok(())
}

/// The process whose memory is paged.
fn guest(pages: u64) -> anyhow::Result<()> {
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let region = Region::new(GuestAddress(0), pages << 12, Backing::Shmem)?;
    let uffd = Userfaultfd::open(Features::MISSING_SHMEM)?;
    // SAFETY: register requires memory that stays mapped while the userfaultfd is open, and whose
    // zeroes no code relies on: the region is dropped after it.
    unsafe { uffd.register(region.guest().into(), Mode::Missing) }?;
    send(&socket, uffd.as_fd(), region.guest().start().as_u64())?;
    (&socket).read_exact(&mut [0])?;

    let (mut seen, mut wanted) = ([0; 4096], [0; 4096]);
    let mut times = Vec::new();
    for page in region.all_pages().iter() {
        let start = Instant::now();
        region.read_guest(page, 0, &mut seen)?;
        times.push(start.elapsed());
        // The handler's region has no gpa: its content depends on offsets.
        fill(GuestAddress(page.0 << 12), &mut wanted);
        ensure!(seen == wanted, "page {page} has other content");
    }
    drop(uffd);
    println!("{}", summary(times));
    (&socket).write_all(b"d")?;
    Ok(())
}

/// What the reads of all pages tell: their rate, and how long one took.
fn summary(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let total = times.iter().sum::<Duration>().as_secs_f64();
    let at = |percent: usize| times.get(times.len() * percent / 100).copied();
    let microseconds = |percent| at(percent).unwrap_or_default().as_secs_f64() * 1e6;
    format!(
        "{:.0} thousand pages a second; one read took {:.1} µs (median), {:.1} µs (99th percentile)",
        times.len() as f64 / total / 1e3,
        microseconds(50),
        microseconds(99)
    )
}
