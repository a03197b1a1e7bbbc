//! `pagetide working-set`.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{ArgGroup, Args};
use pagetide_base::units::{ByteSize, decimal};
use pagetide_serve::{CaptureError, Present, WorkingSet, WorkingSetError, present_pages};
use pagetide_sources::{Location, OpenOptions};
use serde::Serialize;

use crate::failure::Failure;
use crate::image::{Row, json, lines, location, percent, size, sorted, unopened};
use crate::print;

pub(crate) const EXAMPLES: &str = "\
Examples:
  What the guest of a Firecracker with the File backend has used so far, for the next restore:
    pagetide working-set capture snapshot.mem --pid 1234
    pagetide serve vm.sock=snapshot.mem

  The same for an image that was made of the memory file:
    pagetide image create snapshot.mem -o base.img
    pagetide working-set capture snapshot.mem --pid 1234 --image base.img

  What is in the page cache after several VMs have run from the file:
    pagetide working-set capture snapshot.mem --page-cache

--pid reads the process's page tables (/proc/PID/pagemap), as its own user or as root. The kernel maps up to 16 \
pages around a page that is read, if they are in the page cache, and reads ahead: both put pages into the \
set that no guest has touched. A set from a recording (pagetide serve --working-set record) has neither, \
and has an order.

Exit status: 0; 1 if reading or writing failed; 2 if the command line or its files make no sense.";

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("present").required(true).multiple(false))]
pub(crate) struct CaptureArguments {
    /// The raw memory file that the VMM maps
    #[arg(value_name = "RAW")]
    raw: PathBuf,

    /// Take the pages that are in the page tables of this process
    #[arg(
        long,
        value_name = "PID",
        group = "present",
        value_parser = clap::value_parser!(i32).range(1..)
    )]
    pid: Option<i32>,

    /// Take the pages that are in the page cache
    #[arg(long, group = "present")]
    page_cache: bool,

    /// The image that has the same memory, and is served: a file or a URL [default: RAW]
    #[arg(long, value_name = "IMAGE", value_parser = location())]
    image: Option<Location>,

    /// The file of the working set [default: IMAGE.working-set]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Replace the working set of another image
    #[arg(long)]
    force: bool,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct WorkingSetInfoArguments {
    /// The file of the working set
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// A request that makes no sense.
#[derive(Debug, thiserror::Error)]
enum BadRequest {
    #[error("--image {0}: an image at a URL needs --output")]
    NoPlace(String),
    #[error("{} and {image} differ in length: {raw_bytes} and {image_bytes} bytes", raw.display())]
    OtherLength {
        raw: PathBuf,
        image: String,
        raw_bytes: u64,
        image_bytes: u64,
    },
    #[error("{}: there is no such file", path.display())]
    Missing { path: PathBuf },
}

/// `pagetide working-set capture`.
pub(crate) fn capture(arguments: &CaptureArguments) -> Result<(), Failure> {
    let raw = &arguments.raw;
    let location = match &arguments.image {
        Some(image) => image.clone(),
        None => Location::Path(raw.clone()),
    };
    let output = match (&arguments.output, &location) {
        (Some(output), _) => output.clone(),
        (None, Location::Path(image)) => WorkingSet::default_path(image),
        (None, Location::Url(_)) => {
            let bad = BadRequest::NoPlace(location.to_string());
            return Err(Failure::bad_input(bad));
        }
    };
    let image = pagetide_sources::open(&location, &OpenOptions::default()).map_err(unopened)?;
    let raw_bytes = std::fs::metadata(raw).map_err(|source| {
        let path = raw.clone();
        uncaptured(CaptureError::Open { path, source })
    })?;
    let (raw_bytes, image_bytes) = (raw_bytes.len(), image.bytes());
    if raw_bytes != image_bytes {
        return Err(Failure::bad_input(BadRequest::OtherLength {
            raw: raw.clone(),
            image: location.to_string(),
            raw_bytes,
            image_bytes,
        }));
    }
    let present = match arguments.pid {
        Some(pid) => Present::InProcess(pid),
        None => Present::InPageCache,
    };
    let pages = present_pages(raw, present).map_err(uncaptured)?;
    let set = WorkingSet::of_present(&*image, pages);
    let found = set.touches.len();
    let merged = set.merge_into(&output, arguments.force);
    let merged = merged.map_err(uncaptured)?;
    let document = Document {
        found_pages: Some(found),
        ..Document::new(&merged, &output)
    };
    document.print(arguments.json)
}

/// `pagetide working-set info`.
pub(crate) fn info(arguments: &WorkingSetInfoArguments) -> Result<(), Failure> {
    let path = arguments.file.clone();
    let loaded = WorkingSet::load(&path).map_err(|error| uncaptured(error.into()))?;
    let Some(set) = loaded else {
        return Err(Failure::bad_input(BadRequest::Missing { path }));
    };
    Document::new(&set, &path).print(arguments.json)
}

/// Sorts an error: a request that made no sense, or a failure.
fn uncaptured(error: CaptureError) -> Failure {
    let is_refusal = match &error {
        CaptureError::Open { source, .. } => source.kind() == io::ErrorKind::NotFound,
        CaptureError::Process { .. } | CaptureError::NotTold { .. } => false,
        CaptureError::NotMapped { .. } | CaptureError::OtherImage { .. } => true,
        CaptureError::WorkingSet(error) => matches!(error, WorkingSetError::Format { .. }),
    };
    sorted(error, is_refusal)
}

/// What `--json` prints. Under one version of the program no field changes its meaning.
#[derive(Debug, Serialize)]
struct Document {
    /// With replacement characters where it is not UTF-8, as JSON has to be: the file is written by then.
    file: String,
    image_digest: String,
    image_bytes: u64,
    page_bytes: u64,
    pages: usize,
    /// Runs of pages that are fetched by one range each.
    ranges: usize,
    recordings: u32,
    /// From a VM's start to the first touch of the last page.
    span_us: u64,
    /// The pages that this run found, of those above.
    #[serde(skip_serializing_if = "Option::is_none")]
    found_pages: Option<usize>,
}

impl Document {
    fn new(set: &WorkingSet, file: &Path) -> Self {
        Self {
            file: file.display().to_string(),
            image_digest: set.image.to_string(),
            image_bytes: set.image_bytes,
            page_bytes: set.page_size.bytes(),
            pages: set.touches.len(),
            ranges: set.runs().len(),
            recordings: set.recordings,
            span_us: set.touches.last().map_or(0, |touch| touch.at_us),
            found_pages: None,
        }
    }

    fn print(&self, is_json: bool) -> Result<(), Failure> {
        match is_json {
            true => print(&json(self)?),
            false => print(&lines(&self.rows())),
        }
    }

    fn rows(&self) -> Vec<Row> {
        let bytes = self.pages as u64 * self.page_bytes;
        let share = decimal(percent(bytes, self.image_bytes), 1);
        let span = Duration::from_micros(self.span_us).as_secs_f64();
        let mut rows = vec![
            ("working set", self.file.clone()),
            ("image digest", self.image_digest.clone()),
            ("guest memory", size(self.image_bytes)),
            (
                "pages",
                format!("{} of {}", self.pages, ByteSize(self.page_bytes)),
            ),
            (
                "  together",
                format!("{} ({share} %)", ByteSize(bytes).about()),
            ),
            ("  in ranges", self.ranges.to_string()),
            ("recordings", self.recordings.to_string()),
            ("last touch after", format!("{} s", decimal(span, 3))),
        ];
        if let Some(found) = self.found_pages {
            rows.insert(4, ("  found now", found.to_string()));
        }
        rows
    }
}
