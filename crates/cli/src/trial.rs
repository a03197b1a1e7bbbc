//! `pagetide try`: what a VMM would see that restores an image.

mod cache;
mod guest;
mod plan;
mod report;
mod ways;

use std::io;
use std::path::PathBuf;

use clap::Args;
use pagetide_base::units::ByteSize;
use pagetide_sources::{GuestImage, ImageError, Location, OpenOptions, PagetideImage, open};

use crate::failure::Failure;
use crate::image::{json, location};
use crate::print;
use cache::Cache;
use guest::PAGE;
use plan::{Order, plan};
use report::Document;
use ways::{mapped, read_first, served};

pub(crate) const EXAMPLES: &str = "\
Examples:
  What a Firecracker VM would see that is restored from this snapshot:
    pagetide try snapshot.mem

  The same with the file in the page cache, touching 10000 pages upwards:
    pagetide try snapshot.mem --warm --order upwards --touches 10000

The guest is a thread of this command: no VM runs, and neither root nor KVM is needed. The first word of each \
page that it touches is compared with the image. Without --warm the image leaves the page cache, which \
slows down whoever else reads it.

Exit status: 0; 1 if the image could not be restored; 2 if the command line makes no sense, or this machine \
lacks something.";

#[derive(Debug, Args)]
pub(crate) struct TryArguments {
    /// The image: a raw memory file, as Firecracker's snapshots have; a Pagetide image; or the URL of either
    #[arg(value_name = "IMAGE", value_parser = location())]
    image: Location,

    /// The order in which pages are touched [default: recorded, if there is a working set; else random]
    #[arg(long, value_name = "ORDER", value_enum)]
    order: Option<Order>,

    /// Touch at most so many pages [default: the working set's; else 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    touches: Option<u64>,

    /// Leave the image in the page cache. Otherwise each run begins without it, as after a reboot
    #[arg(long)]
    warm: bool,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Why an image was not tried.
#[derive(Debug, thiserror::Error)]
enum TryError {
    #[error(
        "{image} has {bytes} bytes, which are no whole pages of 4096 bytes: it is no memory of a guest"
    )]
    NoPages { image: String, bytes: u64 },
    #[error(
        "{image} has {} of memory, and this machine has {} available: try it on a larger machine",
        ByteSize(*.bytes).about(), ByteSize(*.available).about()
    )]
    TooLarge {
        image: String,
        bytes: u64,
        available: u64,
    },
    #[error(
        "{image} has no working set to follow: `pagetide serve` records one, or choose another --order"
    )]
    NoWorkingSet { image: String },
    #[error("a directory for the socket")]
    Directory(#[source] io::Error),
    #[error("the memory of the guest")]
    Memory(#[source] io::Error),
    #[error("connecting to the server as a VMM: is userfaultfd enabled in this kernel?")]
    Connect(#[source] io::Error),
    #[error("starting the guest's thread")]
    Thread(#[source] io::Error),
    #[error("reading the image")]
    Read(#[source] ImageError),
    #[error("mapping {}", path.display())]
    Map {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the content of the image is not available: the guest waits for a page")]
    Stalled,
    #[error("the server has refused the VM, for the reason above")]
    Refused,
    #[error("page {page} has other content than the image has: please report this")]
    Wrong { page: u64 },
}

/// `pagetide try`.
pub(crate) fn run(arguments: &TryArguments) -> Result<(), Failure> {
    // A file that is cut while the server reads it is then an error, and no signal.
    pagetide_kvm::poison::install_sigbus_handler().map_err(Failure::failed)?;
    let image = open(&arguments.image, &OpenOptions::default()).map_err(Failure::bad_input)?;
    check(&*image).map_err(Failure::bad_input)?;
    let (order, pages) = plan(arguments, &*image).map_err(Failure::bad_input)?;
    let cache = Cache::of(arguments);
    let (way, words) = served(arguments, order, image.bytes(), &pages, &cache)?;
    let mut ways = vec![way];
    if let Some(path) = cache.path.filter(|_| is_raw(&arguments.image)) {
        let way = mapped(path, image.bytes(), &pages, &cache);
        ways.push(way.map_err(Failure::failed)?);
    }
    let (way, expected) = read_first(arguments, image.bytes(), &pages, &cache)?;
    ways.push(way);
    let mut found = pages.iter().zip(words.iter().zip(&expected));
    if let Some((&page, _)) = found.find(|(_, (found, expected))| found != expected) {
        return Err(Failure::failed(TryError::Wrong { page }));
    }
    let document = Document {
        image: arguments.image.to_string(),
        memory_bytes: image.bytes(),
        order,
        touches: pages.len(),
        ways,
    };
    match arguments.json {
        true => print(&json(&document)?),
        false => print(&document.text()),
    }
}

/// Refuses what is no guest's memory, or too much for this machine.
fn check(image: &dyn GuestImage) -> Result<(), TryError> {
    let (name, bytes) = (image.name().to_owned(), image.bytes());
    if bytes == 0 || !bytes.is_multiple_of(PAGE) {
        return Err(TryError::NoPages { image: name, bytes });
    }
    match available_bytes() {
        Some(available) if bytes > available / 5 * 4 => Err(TryError::TooLarge {
            image: name,
            bytes,
            available,
        }),
        _ => Ok(()),
    }
}

/// Memory that programs can have without swapping, by /proc/meminfo.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

/// Whether an image is the memory as it is, which can be mapped.
fn is_raw(location: &Location) -> bool {
    PagetideImage::open(location, &OpenOptions::default()).is_err()
}
