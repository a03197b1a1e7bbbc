//! Working sets from pages that are present: of VMs that no server has served.
//!
//! A VMM that maps its memory file privately (Firecracker's File backend) leaves no faults to record. Its page
//! tables, or the page cache, show which pages of the file its guest has needed, without order or times.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use pagetide_memory::PageIndex;
use pagetide_sources::cached_pages;
use procfs::ProcError;
use procfs::process::{MMapPath, MemoryMap, PageInfo, Process};
use thiserror::Error;

use crate::image::beside;
use crate::recorder::RECORDED;
use crate::working_set::{Touch, WorkingSet, WorkingSetError};

/// Where present pages of a memory file are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Present {
    /// In the page tables of this process, wherever it maps the file. The kernel maps some pages around a
    /// page that is read, if they are in the page cache: they count, too.
    InProcess(i32),
    /// In the page cache, which also has what was read ahead, or by others.
    InPageCache,
}

/// Why present pages cannot be told.
#[derive(Debug, Error)]
pub enum CaptureError {
    /// The file cannot be opened.
    #[error("opening {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The kernel tells only some users what the page cache has.
    #[error(
        "{}: the kernel tells its page cache only to the file's owner and to those who may write to the file",
        path.display()
    )]
    NotTold {
        /// The file.
        path: PathBuf,
    },
    /// There is no such process, or this user must not look into it.
    #[error("reading the page tables of process {pid}")]
    Process {
        /// The process.
        pid: i32,
        /// The reason.
        #[source]
        source: ProcError,
    },
    /// The process has other memory.
    #[error("process {pid} does not map {}", path.display())]
    NotMapped {
        /// The process.
        pid: i32,
        /// The file.
        path: PathBuf,
    },
    /// The file of the working set cannot be read or written.
    #[error(transparent)]
    WorkingSet(#[from] WorkingSetError),
    /// The file has the working set of another image.
    #[error("{}: the working set of another image is there", path.display())]
    OtherImage {
        /// The file.
        path: PathBuf,
    },
}

/// The pages of the memory file `raw` that are present, in the order of their numbers.
///
/// # Errors
/// [`CaptureError`].
pub fn present_pages(raw: &Path, present: Present) -> Result<Vec<PageIndex>, CaptureError> {
    let failed = |source| CaptureError::Open {
        path: raw.into(),
        source,
    };
    let file = File::open(raw).map_err(failed)?;
    let mut pages = match present {
        Present::InPageCache => {
            cached_pages(&file).ok_or_else(|| CaptureError::NotTold { path: raw.into() })?
        }
        Present::InProcess(pid) => {
            let status = file.metadata().map_err(failed)?;
            let path = std::fs::canonicalize(raw).map_err(failed)?;
            let is_mapping = |map: &MemoryMap| {
                let (major, minor) = map.dev;
                let device = libc::makedev(major.cast_unsigned(), minor.cast_unsigned());
                // Some file systems show another device there than stat() does.
                let is_named = matches!(&map.pathname, MMapPath::Path(mapped) if *mapped == path);
                map.inode == status.ino() && (device == status.dev() || is_named)
            };
            let found = pages_in_process(pid, is_mapping);
            let found = found.map_err(|source| CaptureError::Process { pid, source })?;
            found.ok_or_else(|| CaptureError::NotMapped {
                pid,
                path: raw.into(),
            })?
        }
    };
    pages.sort_unstable();
    pages.dedup();
    Ok(pages.into_iter().map(PageIndex).collect())
}

/// The pages of a file that a process has in its page tables, or has had there before they were swapped out. `None` if
/// it does not map the file.
fn pages_in_process(
    pid: i32,
    is_mapping: impl Fn(&MemoryMap) -> bool,
) -> Result<Option<Vec<u64>>, ProcError> {
    let process = Process::new(pid)?;
    let (maps, mut tables) = (process.maps()?, process.pagemap()?);
    let page_bytes = RECORDED.bytes();
    let (mut is_mapped, mut pages) = (false, Vec::new());
    for map in maps.iter().filter(|map| is_mapping(map)) {
        is_mapped = true;
        let (start, end) = (map.address.0 / page_bytes, map.address.1 / page_bytes);
        let first = map.offset / page_bytes;
        for at in (start..end).step_by(TABLE_ENTRIES) {
            let to = end.min(at + TABLE_ENTRIES as u64);
            let entries = tables.get_range_info(to_usize(at)..to_usize(to))?;
            let numbered = (first + (at - start)..).zip(entries);
            pages.extend(
                numbered
                    .filter(|(_, entry)| is_present(entry))
                    .map(|(page, _)| page),
            );
        }
    }
    Ok(is_mapped.then_some(pages))
}

/// Entries of a page table that are read at once.
const TABLE_ENTRIES: usize = 1 << 16;

fn is_present(entry: &PageInfo) -> bool {
    use procfs::process::MemoryPageFlags;
    match entry {
        PageInfo::MemoryPage(flags) => flags.contains(MemoryPageFlags::PRESENT),
        PageInfo::SwapPage(_) => true,
    }
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

impl WorkingSet {
    /// A recording of pages that were found present: all at the start, in the order of their numbers. Pages beyond the
    /// image's end are left out.
    pub fn of_present(
        image: &dyn pagetide_sources::GuestImage,
        pages: impl IntoIterator<Item = PageIndex>,
    ) -> Self {
        let image_bytes = image.bytes();
        let end = image_bytes / RECORDED.bytes();
        let pages = pages.into_iter().filter(|page| page.0 < end);
        Self {
            image: image.digest(),
            image_bytes,
            page_size: RECORDED,
            recordings: 1,
            touches: pages.map(|page| Touch { page, at_us: 0 }).collect(),
        }
    }

    /// Merges the set into the file at `path`, as a server does with a VM's recording, and returns what is there then. A
    /// file of another image is replaced only if `may_replace` is true.
    ///
    /// # Errors
    /// [`CaptureError::WorkingSet`], [`CaptureError::OtherImage`].
    pub fn merge_into(self, path: &Path, may_replace: bool) -> Result<Self, CaptureError> {
        let merged = match Self::load(path) {
            Ok(Some(mut before)) if before.is_of(self.image, self.image_bytes) => {
                before.merge(&self);
                before
            }
            Ok(None) => self,
            Ok(Some(_)) | Err(WorkingSetError::Format { .. }) if may_replace => self,
            Ok(Some(_)) => return Err(CaptureError::OtherImage { path: path.into() }),
            Err(error) => return Err(error.into()),
        };
        merged.save(path)?;
        Ok(merged)
    }

    /// The path at which a server looks for the working set of an image that is a file.
    pub fn default_path(image: &Path) -> PathBuf {
        beside(image)
    }
}
