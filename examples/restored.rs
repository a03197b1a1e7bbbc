//! What a VMM does to have its memory restored by `pagetide serve`, in Firecracker's protocol.
//!
//! `pagetide serve vm.sock=snapshot.mem`, and beside it
//! `cargo run -p pagetide-examples --example restored vm.sock 64`, where 64 MiB is the length of snapshot.mem. Where a
//! VMM would run its vCPUs now, this program reads a word of each page, in an order that no read-ahead expects.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use pagetide_examples::send_message;
use pagetide_memory::{HostAddress, HostRange};
use pagetide_uapi::userfaultfd::{Features, Mode, Userfaultfd};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

const PAGE: usize = 4096;
/// Odd, so that its multiples come to each page of a memory whose count of pages is a power of two.
const STRIDE: usize = 40_503;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, mib] = arguments.as_slice() else {
        bail!("usage: restored SOCKET MIB");
    };
    let mib: usize = mib.parse().context("MIB is a number")?;
    ensure!(mib.is_power_of_two(), "MIB is a power of two");
    let bytes = mib << 20;

    // 1. The guest's memory, of which nothing is present, and a userfaultfd that has it registered. With
    //    EVENT_REMOVE the server hears of pages that a balloon takes away.
    // SAFETY: a new mapping at an address that the kernel chooses.
    let start = unsafe {
        mmap_anonymous(
            std::ptr::null_mut(),
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    }?;
    let start = start.cast::<u8>();
    let uffd = Userfaultfd::open(Features::EVENT_REMOVE)?;
    let range = HostRange::new(HostAddress(start.expose_provenance()), bytes)?;
    // SAFETY: register requires memory that stays mapped while the userfaultfd is open, and whose zeroes no
    // code relies on: it is mapped until the process ends.
    unsafe { uffd.register(range.into(), Mode::Missing) }?;

    // 2. One message: which memory that is, by its address here and its offset in the snapshot's memory file; and the
    //    userfaultfd. The connection stays open as long as the VM lives.
    let regions = format!(
        r#"[{{"base_host_virt_addr":{},"size":{bytes},"offset":0,"page_size":{PAGE},"page_size_kib":{PAGE}}}]"#,
        range.start().as_u64()
    );
    let begun = Instant::now();
    let connection = UnixStream::connect(socket).with_context(|| format!("connect to {socket}"))?;
    send_message(&connection, regions.as_bytes(), uffd.as_fd())?;

    // 3. The guest runs at once. Each access waits until its page is there, and no longer.
    let read = |page: usize| {
        // SAFETY: a page of the mapping.
        unsafe {
            start
                .wrapping_add(page * PAGE)
                .cast::<u64>()
                .read_volatile()
        }
    };
    let mut sum = read(0);
    let first = begun.elapsed();
    let pages = bytes / PAGE;
    for turn in 1..pages {
        sum = sum.wrapping_add(read(turn * STRIDE % pages));
    }
    println!(
        "the first page was there after {:.1} ms, all {pages} after {:.0} ms (sum {sum:016x})",
        first.as_secs_f64() * 1e3,
        begun.elapsed().as_secs_f64() * 1e3
    );
    Ok(())
}
