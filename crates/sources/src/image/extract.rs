//! Writing an image's guest memory as a raw file.

use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use pagetide_memory::Urgency;
use pagetide_pager::Filled;
use thiserror::Error;

use super::codec::is_zero;
use super::create::is_same;
use super::parallel::{default_threads, in_order};
use super::reader::PagetideImage;
use super::target::{Target, TargetError};
use crate::guest_image::{GuestImage, ImageError};
use crate::object::ObjectOptions;
use crate::open::Location;

/// Guest memory of one job, in bytes.
const JOB_BYTES: u64 = 4 << 20;

/// The unit of holes.
const PAGE_BYTES: usize = 4096;

/// How an image is extracted.
#[derive(Clone, Debug)]
pub struct ExtractOptions {
    /// Whether an existing file is replaced.
    pub may_replace: bool,
    /// Threads that read, decompress and write.
    pub threads: NonZeroUsize,
    /// How an object is written, where the file is one.
    pub object: ObjectOptions,
}

impl Default for ExtractOptions {
    fn default() -> Self {
        Self {
            may_replace: false,
            threads: default_threads(),
            object: ObjectOptions::default(),
        }
    }
}

/// Why guest memory was not written. No file has its name then.
#[derive(Debug, Error)]
pub enum ExtractError {
    /// The file would replace the image or one of its layers.
    #[error("{} is read, and cannot be the new file as well", path.display())]
    SameFile {
        /// The file.
        path: PathBuf,
    },
    /// The image could not be read.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The file could not be written.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The stream could not be written.
    #[error("cannot write {name}")]
    Stream {
        /// Its name.
        name: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl ExtractError {
    /// Whether the request made no sense, so that nothing was tried.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::SameFile { .. } => true,
            Self::Image(_) | Self::Stream { .. } => false,
            Self::Target(error) => error.is_refusal(),
        }
    }
}

/// Writes the guest memory of `image` into the file or object `raw`; zero pages become holes of a file. `progress` is told how
/// many bytes are done, of how many. Returns how many bytes of guest memory are no holes.
///
/// # Errors
/// [`ExtractError`]; what was at `raw` before is then still there.
pub fn extract(
    image: &PagetideImage,
    raw: &Location,
    options: &ExtractOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<u64, ExtractError> {
    let names = image
        .layers
        .iter()
        .map(|layer| Path::new(layer.blob.name()));
    if let Some(layer) = names.into_iter().find(|layer| is_same(layer, raw)) {
        let path = layer.to_owned();
        return Err(ExtractError::SameFile { path });
    }
    let target = Target::begin(raw, image.mode(), options.may_replace, &options.object)?;
    target.set_bytes(image.bytes())?;
    let (mut done, mut written) = (0, 0);
    progress(0, image.bytes());
    in_order(
        image.bytes().div_ceil(JOB_BYTES),
        options.threads,
        || Ok(Vec::new()),
        |buffer, job| {
            let offset = job * JOB_BYTES;
            let bytes = (image.bytes() - offset).min(JOB_BYTES);
            Ok((bytes, copy(image, &target, offset, bytes, buffer)?))
        },
        |(bytes, data)| {
            done += bytes;
            written += data;
            progress(done, image.bytes());
            Ok::<_, ExtractError>(())
        },
    )?;
    target.finish(progress)?;
    Ok(written)
}

/// Writes the guest memory of `image` into `stream`, in order; `name` is for messages. `progress` is told how many bytes are
/// done, of how many.
///
/// # Errors
/// [`ExtractError`]; a part may have been written.
pub fn extract_to_stream(
    image: &PagetideImage,
    stream: &mut dyn Write,
    name: &str,
    options: &ExtractOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), ExtractError> {
    let failed = |source| ExtractError::Stream {
        name: name.to_owned(),
        source,
    };
    let mut done = 0;
    progress(0, image.bytes());
    in_order(
        image.bytes().div_ceil(JOB_BYTES),
        options.threads,
        || Ok(()),
        |(), job| {
            let offset = job * JOB_BYTES;
            let bytes = (image.bytes() - offset).min(JOB_BYTES);
            let mut content = vec![0; usize::try_from(bytes).unwrap_or(usize::MAX)];
            if image.read(offset, &mut content, Urgency::Bulk)? == Filled::Zero {
                content.fill(0);
            }
            Ok(content)
        },
        |content| {
            stream.write_all(&content).map_err(failed)?;
            done += content.len() as u64;
            progress(done, image.bytes());
            Ok::<_, ExtractError>(())
        },
    )?;
    stream.flush().map_err(failed)
}

/// Copies a job's bytes, runs of chunks that are not zero; returns how many these are.
fn copy(
    image: &PagetideImage,
    target: &Target,
    offset: u64,
    bytes: u64,
    buffer: &mut Vec<u8>,
) -> Result<u64, ExtractError> {
    let length = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let chunk_bytes = u64::from(image.chunk_bytes());
    let end = offset + bytes;
    let mut written = 0;
    let mut begin = offset;
    let mut at = offset;
    // A run ends at a zero chunk and at the end.
    while begin < end {
        let next = (at + chunk_bytes).min(end);
        let is_hole = at < end && image.is_zero(at, length(next - at));
        if at < end && !is_hole {
            at = next;
            continue;
        }
        if begin < at {
            buffer.resize(length(at - begin), 0);
            if image.read(begin, buffer, Urgency::Bulk)? != Filled::Zero {
                written += write_pages(target, begin, buffer)?;
            }
        }
        at = next;
        begin = next;
    }
    Ok(written)
}

/// Writes the pages of `content`, which belongs at `offset`, that are not zero; returns their bytes. Pages count from
/// the start of `content`, which is the start of a chunk.
fn write_pages(target: &Target, offset: u64, content: &[u8]) -> Result<u64, ExtractError> {
    let is_data = |page: &&[u8]| !is_zero(page);
    let mut pages = content.chunks(PAGE_BYTES).enumerate().peekable();
    let mut written = 0;
    while let Some((first, page)) = pages.next() {
        if is_zero(page) {
            continue;
        }
        let mut bytes = page.len();
        while let Some((_, page)) = pages.next_if(|(_, page)| is_data(page)) {
            bytes += page.len();
        }
        let begin = first * PAGE_BYTES;
        target.write_at(offset + begin as u64, &content[begin..begin + bytes])?;
        written += bytes as u64;
    }
    Ok(written)
}
