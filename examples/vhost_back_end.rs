//! One guest memory in two processes, as of a VMM and its vhost-user back end, while it is restored.
//!
//! The VMM maps a memfd and hands it to the back end, which is this program, started again. The back end maps the
//! memfd, registers its mapping with a userfaultfd of its own, and sends that back with the address: as in vhost-user's
//! postcopy (POSTCOPY_ADVISE, SET_MEM_TABLE). Both then work on memory of which nothing is present. The back end reads
//! a packet that the guest left before the snapshot and writes one into a buffer that nobody has touched since; the
//! VMM sees the packet, and around it what the buffer had before.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use pagetide_examples::{receive, send};
use pagetide_memory::{Backing, GuestAddress, HostAddress, HostRange, PageIndex, Region};
use pagetide_pager::{Contents, Mode, Pager, PatternSource, ReaderConfig, Readers, RegionConfig};
use pagetide_uapi::userfaultfd::{Features, Userfaultfd};
use rustix::mm::{MapFlags, ProtFlags, mmap};

const PAGES: u64 = 64;
const PAGE: u64 = 4096;
/// The buffer from which the back end sends, and the one into which it receives.
const SENT: u64 = 9;
const RECEIVED: u64 = 40;
const PACKET: &[u8] = b"a packet from the network";
/// Where in its page a packet begins.
const AT: u64 = 100;

/// The memory's content, as of a snapshot.
fn snapshot(gpa: GuestAddress, piece: &mut [u8]) {
    piece.fill(u8::try_from(gpa.0 / PAGE).unwrap_or(u8::MAX));
}

fn main() -> anyhow::Result<()> {
    match std::env::args().nth(1).as_deref() {
        None => vmm(),
        Some("back-end") => back_end(),
        Some(other) => bail!("usage: vhost_back_end, and not {other}"),
    }
}

fn vmm() -> anyhow::Result<()> {
    let memory = Arc::new(Region::new(GuestAddress(0), PAGES * PAGE, Backing::Shmem)?);
    let pager = Pager::new()?;
    let contents = Contents::Local(Arc::new(PatternSource::new(snapshot)));
    let config = RegionConfig::local(Arc::clone(&memory), Mode::Minor, contents);
    let id = pager.add(config)?;
    let readers = Readers::spawn(&pager, ReaderConfig::new(1))?;

    let (ours, theirs) = UnixStream::pair()?;
    let mut child = Command::new(std::env::current_exe()?)
        .arg("back-end")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()?;
    send(&ours, memory.file().context("shmem has a file")?, 0)?;
    let (uffd, start) = receive(&ours)?;

    // All that the pager needs to know of the other process.
    let uffd = Arc::new(Userfaultfd::adopt(uffd, BACK_END_FEATURES)?);
    let start = HostAddress(usize::try_from(start)?);
    let there = HostRange::new(start, usize::try_from(memory.bytes())?)?;
    let space = pager.attach(&uffd, &[(id, there)])?;
    (&ours).write_all(b"g")?;

    // The back end says that it has received a packet.
    (&ours).read_exact(&mut [0])?;
    let mut page = vec![0; usize::try_from(PAGE)?];
    memory.read_guest(PageIndex(RECEIVED), 0, &mut page)?;
    let (before, rest) = page.split_at(usize::try_from(AT)?);
    let (packet, behind) = rest.split_at(PACKET.len());
    ensure!(packet == PACKET, "the packet is lost");
    let old = u8::try_from(RECEIVED)?;
    ensure!(
        before.iter().chain(behind).all(|&byte| byte == old),
        "what was around the packet is lost"
    );
    let status = child.wait()?;
    ensure!(status.success(), "the back end ended with {status}");
    pager.detach(space)?;
    readers.stop();
    let present = pager.counts(id).context("the region is there")?.present;
    println!("two processes, one memory: {present} pages were needed, and each was installed once");
    Ok(())
}

/// What the back end opens its userfaultfd with.
const BACK_END_FEATURES: Features =
    Features::from_bits(Features::MISSING_SHMEM.bits() | Features::MINOR_SHMEM.bits());

fn back_end() -> anyhow::Result<()> {
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let (file, _) = receive(&socket)?;
    let bytes = usize::try_from(PAGES * PAGE)?;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let start = unsafe {
        mmap(
            std::ptr::null_mut(),
            bytes,
            access,
            MapFlags::SHARED,
            &file,
            0,
        )
    }?;
    let start = start.cast::<u8>();
    let uffd = Userfaultfd::open(BACK_END_FEATURES)?;
    let range = HostRange::new(HostAddress(start.expose_provenance()), bytes)?;
    // SAFETY: register requires memory that stays mapped while the userfaultfd is open, and whose zeroes no
    // code relies on: it is mapped until the process ends.
    unsafe { uffd.register(range.into(), Mode::Minor) }?;
    send(&socket, uffd.as_fd(), range.start().as_u64())?;
    (&socket).read_exact(&mut [0])?;

    // Other processes write there, so bytes are read and written one by one.
    let byte = |page: u64, offset: u64| -> anyhow::Result<*mut u8> {
        Ok(start.wrapping_add(usize::try_from(page * PAGE + offset)?))
    };
    for offset in 0..PAGE {
        // SAFETY: within the mapping. The access waits until the page is there.
        let found = unsafe { byte(SENT, offset)?.read_volatile() };
        ensure!(
            u64::from(found) == SENT,
            "the packet to send is {found:#x} at {offset}"
        );
    }
    for (offset, value) in (AT..).zip(PACKET) {
        // SAFETY: as above.
        unsafe { byte(RECEIVED, offset)?.write_volatile(*value) };
    }
    (&socket).write_all(b"d")?;
    Ok(())
}
