//! Creating an image from a raw memory file.

use std::collections::HashMap;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pagetide_memory::Urgency;
use pagetide_pager::Filled;
use thiserror::Error;

use super::base::{BasePlace, BaseReference, fits, place_in};
use super::codec::{Encoded, Encoder, is_zero};
use super::format::{
    DEFAULT_CHUNK_BYTES, FormatError, HEADER_BYTES, Header, MOST_BASE_BYTES, check_chunk_bytes,
    check_memory_bytes,
};
use super::index::{Encoding, Entry, Index, StoredChunk};
use super::info::ImageInfo;
use super::layers::MOST_LAYERS;
use super::memory_file::MemoryFile;
use super::parallel::{default_threads, in_order};
use super::reader::PagetideImage;
use super::target::{Target, TargetError, directory_of};
use crate::blob::BlobError;
use crate::digest::Digest;
use crate::guest_image::{GuestImage, ImageError};
use crate::open::{Location, OpenError, OpenOptions};

/// Guest memory that one job reads, in bytes, unless a chunk is longer.
pub(crate) const JOB_BYTES: u32 = 1 << 20;

/// What holes of a sparse memory file mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holes {
    /// Zeroes.
    Zero,
    /// The content of the base, as in Firecracker's diff snapshots.
    Base,
}

/// How an image is created.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Bytes of guest memory in a chunk: a power of two from 4K to 4M.
    pub chunk_bytes: u32,
    /// The image whose content is not stored again.
    pub base: Option<Location>,
    /// What holes mean; without a base they are zeroes.
    pub holes: Holes,
    /// Whether an existing file is replaced.
    pub may_replace: bool,
    /// Threads that read, compress and hash.
    pub threads: NonZeroUsize,
    /// How the base is opened.
    pub open: OpenOptions,
}

impl Default for CreateOptions {
    fn default() -> Self {
        Self {
            chunk_bytes: DEFAULT_CHUNK_BYTES,
            base: None,
            holes: Holes::Base,
            may_replace: false,
            threads: default_threads(),
            open: OpenOptions::default(),
        }
    }
}

/// What a new image is.
#[derive(Clone, Debug)]
pub struct Created {
    /// The image's description.
    pub info: ImageInfo,
    /// The time from the call of [`create`] until the image has its name and is on the disk.
    pub elapsed: Duration,
}

/// Why an image was not created. No file has its name then.
#[derive(Debug, Error)]
pub enum CreateError {
    /// The memory file cannot be opened.
    #[error("cannot open the memory file")]
    OpenRaw(#[source] OpenError),
    /// The memory file is a Pagetide image.
    #[error("{} is a Pagetide image already, and no raw memory", path.display())]
    IsImage {
        /// The file.
        path: PathBuf,
    },
    /// The image would replace the memory file, or its base.
    #[error("{} is read, and cannot be the new image as well", path.display())]
    SameFile {
        /// The file.
        path: PathBuf,
    },
    /// The chunk size, or the length of guest memory, that no image can have.
    #[error("cannot make such an image")]
    Format(#[from] FormatError),
    /// The base cannot be used.
    #[error("cannot use the base")]
    Base(#[source] OpenError),
    /// The base has as many layers as an image may have.
    #[error("the base {name} has {MOST_LAYERS} layers, and no image can be above it")]
    TooManyLayers {
        /// The base.
        name: String,
    },
    /// The base's path is longer than an image can name.
    #[error("the base's location {place} has more than {MOST_BASE_BYTES} bytes")]
    LongBase {
        /// The base's location.
        place: String,
    },
    /// The file has holes, and its file system does not say where.
    #[error(
        "{} has holes that its file system does not name, so that they cannot be taken from the base; if its holes are zeroes, say so (--holes zero)",
        path.display()
    )]
    HiddenHoles {
        /// The memory file.
        path: PathBuf,
    },
    /// The memory file could not be read.
    #[error("cannot read the memory file")]
    Raw(#[source] BlobError),
    /// The base's content could not be read.
    #[error("cannot read the base")]
    ReadBase(#[source] ImageError),
    /// zstd failed.
    #[error("cannot compress")]
    Compress(#[source] io::Error),
    /// The image cannot be written.
    #[error(transparent)]
    Target(#[from] TargetError),
}

impl CreateError {
    /// Whether the request made no sense, so that nothing was tried.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Raw(_) | Self::ReadBase(_) | Self::Compress(_) => false,
            Self::Target(error) => !matches!(error, TargetError::Write { .. }),
            Self::Base(error) => error.is_refusal(),
            _ => true,
        }
    }
}

/// Creates the image `image` from the memory file `raw`. `progress` is told how many bytes of guest memory
/// are done, of how many.
///
/// The file gets its name when it is complete and on the disk.
///
/// # Errors
/// [`CreateError`]; what was at `image` before is then still there.
pub fn create(
    raw: &Path,
    image: &Path,
    options: &CreateOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Created, CreateError> {
    let begun = Instant::now();
    check_chunk_bytes(options.chunk_bytes)?;
    let memory = MemoryFile::open(raw).map_err(|error| CreateError::OpenRaw(error.into()))?;
    refuse_same_file(raw, image)?;
    if memory.is_image().map_err(CreateError::OpenRaw)? {
        let path = raw.to_owned();
        return Err(CreateError::IsImage { path });
    }
    check_memory_bytes(memory.bytes(), options.chunk_bytes)?;
    let base = options.base.as_ref();
    let base = base.map(|base| open_base(base, image, options));
    let (base, reference) = base.transpose()?.unzip();
    let holes = match base {
        Some(_) => options.holes,
        None => Holes::Zero,
    };
    if holes == Holes::Base && memory.hides_holes().map_err(CreateError::Raw)? {
        let path = raw.to_owned();
        return Err(CreateError::HiddenHoles { path });
    }
    let before = memory.state().map_err(CreateError::Raw)?;
    let changed = || {
        let name = raw.display().to_string();
        CreateError::Raw(BlobError::Changed { name })
    };
    let target = Target::begin(image, options.may_replace)?;
    let mut writer = Writer::new(&target, memory.bytes(), options.chunk_bytes, reference);
    let source = ChunkSource {
        base: base.as_ref(),
        holes,
        memory_bytes: memory.bytes(),
        chunk_bytes: u64::from(options.chunk_bytes),
    };
    progress(0, memory.bytes());
    in_order(
        memory.bytes().div_ceil(source.job_bytes()),
        options.threads,
        || {
            let worker = Worker::new(raw)?;
            match worker.memory.state().map_err(CreateError::Raw)? == before {
                true => Ok(worker),
                false => Err(changed()),
            }
        },
        |worker, job| source.job(worker, job),
        |chunks| {
            for chunk in chunks {
                writer.add(chunk)?;
            }
            progress(writer.memory_bytes(), memory.bytes());
            Ok(())
        },
    )?;
    // A file that was truncated meanwhile has ended in a hole.
    if memory.state().map_err(CreateError::Raw)? != before {
        return Err(changed());
    }
    let info = writer.finish(&image.display().to_string())?;
    target.finish()?;
    Ok(Created {
        info,
        elapsed: begun.elapsed(),
    })
}

/// Refuses an image that is the memory file, whatever their paths.
fn refuse_same_file(read: &Path, image: &Path) -> Result<(), CreateError> {
    let of = |path: &Path| path.canonicalize().ok();
    match of(read).is_some_and(|read| of(image) == Some(read)) {
        true => Err(CreateError::SameFile {
            path: read.to_owned(),
        }),
        false => Ok(()),
    }
}

/// Opens the base, and says how the new image names it.
fn open_base(
    location: &Location,
    image: &Path,
    options: &CreateOptions,
) -> Result<(PagetideImage, BaseReference), CreateError> {
    let base = PagetideImage::open(location, &options.open).map_err(CreateError::Base)?;
    if base.layers() >= MOST_LAYERS {
        let name = base.name().to_owned();
        return Err(CreateError::TooManyLayers { name });
    }
    let place = match location {
        Location::Url(url) => BasePlace::Url(url.clone()),
        Location::Path(path) => {
            refuse_same_file(path, image)?;
            name_of_base(path, image)
        }
    };
    if !fits(&place) {
        let place = place.to_string();
        return Err(CreateError::LongBase { place });
    }
    let digest = base.digest();
    Ok((base, BaseReference { digest, place }))
}

/// The base's file name, if both files are in one directory; its absolute path otherwise.
fn name_of_base(base: &Path, image: &Path) -> BasePlace {
    let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let directory = canonical(directory_of(base));
    match base.file_name() {
        Some(name) => place_in(&canonical(directory_of(image)), &directory, name),
        None => BasePlace::Path(canonical(base)),
    }
}

/// What a chunk of guest memory is, before it has a place in the file.
#[derive(Debug)]
enum Chunk {
    Zero,
    Base,
    Data(Encoded),
}

/// The memory of one thread.
struct Worker {
    memory: MemoryFile,
    encoder: Encoder,
    content: Vec<u8>,
    of_base: Vec<u8>,
    data: Vec<Range<usize>>,
}

impl Worker {
    fn new(raw: &Path) -> Result<Self, CreateError> {
        Ok(Self {
            memory: MemoryFile::open(raw).map_err(CreateError::Raw)?,
            encoder: Encoder::new().map_err(CreateError::Compress)?,
            content: Vec::new(),
            of_base: Vec::new(),
            data: Vec::new(),
        })
    }
}

/// Where the new image's chunks come from.
struct ChunkSource<'a> {
    base: Option<&'a PagetideImage>,
    holes: Holes,
    memory_bytes: u64,
    chunk_bytes: u64,
}

impl ChunkSource<'_> {
    fn job_bytes(&self) -> u64 {
        u64::from(JOB_BYTES).max(self.chunk_bytes)
    }

    /// Reads and encodes the chunks of a job.
    fn job(&self, worker: &mut Worker, job: u64) -> Result<Vec<Chunk>, CreateError> {
        let begin = job * self.job_bytes();
        let bytes = (self.memory_bytes - begin).min(self.job_bytes());
        let length = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut content = std::mem::take(&mut worker.content);
        let mut data = std::mem::take(&mut worker.data);
        content.resize(length(bytes), 0);
        let read = worker.memory.read(begin, &mut content, &mut data);
        read.map_err(CreateError::Raw)?;
        let parts = content.chunks_mut(length(self.chunk_bytes));
        let mut at = 0;
        let chunks = parts.map(|content| {
            let range = at..at + content.len();
            at = range.end;
            self.chunk(worker, begin + range.start as u64, content, range, &data)
        });
        let chunks = chunks.collect();
        worker.content = content;
        worker.data = data;
        chunks
    }

    /// Encodes the chunk of guest memory at `offset`; it is at `range` of its job, of which `data` is
    /// data.
    fn chunk(
        &self,
        worker: &mut Worker,
        offset: u64,
        content: &mut [u8],
        range: Range<usize>,
        data: &[Range<usize>],
    ) -> Result<Chunk, CreateError> {
        if let Some(base) = self.base {
            let holes = match self.holes {
                Holes::Base => holes_in(range, data),
                Holes::Zero => Vec::new(),
            };
            let is_hole = holes.first() == Some(&(0..content.len()));
            let inside = base.bytes().saturating_sub(offset);
            let inside = usize::try_from(inside).map_or(content.len(), |b| b.min(content.len()));
            if is_hole {
                // Beyond the base's end there is nothing to take.
                let is_zero = inside == 0 || base.is_zero(offset, inside);
                return Ok(if is_zero { Chunk::Zero } else { Chunk::Base });
            }
            let of_base = &mut worker.of_base;
            of_base.clear();
            of_base.resize(content.len(), 0);
            if inside > 0 {
                let part = &mut of_base[..inside];
                let read = base.read(offset, part, Urgency::Bulk);
                match read.map_err(CreateError::ReadBase)? {
                    Filled::Zero => part.fill(0),
                    Filled::Bytes | Filled::Poisoned => {}
                }
            }
            for hole in holes {
                content[hole.clone()].copy_from_slice(&of_base[hole]);
            }
            if content == of_base.as_slice() && !is_zero(content) {
                return Ok(Chunk::Base);
            }
        }
        if is_zero(content) {
            return Ok(Chunk::Zero);
        }
        let encoded = worker.encoder.encode(content);
        Ok(Chunk::Data(encoded.map_err(CreateError::Compress)?))
    }
}

/// The parts of `range` that are not in `data`, which is in ascending order; relative to its begin.
fn holes_in(range: Range<usize>, data: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut holes = Vec::new();
    let mut at = range.start;
    let first = data.partition_point(|data| data.end <= range.start);
    for data in &data[first..] {
        if data.start >= range.end {
            break;
        }
        if data.start > at {
            holes.push(at - range.start..data.start - range.start);
        }
        at = data.end;
    }
    if at < range.end {
        holes.push(at - range.start..range.end - range.start);
    }
    holes
}

/// Gives chunks, which come in order, their places in the file.
struct Writer<'a> {
    target: &'a Target,
    header: Header,
    index: Index,
    /// The next byte of the file.
    end: u64,
    chunks: u64,
    /// The stored chunks by content.
    by_content: HashMap<([u8; 32], Encoding), u32>,
}

impl<'a> Writer<'a> {
    fn new(
        target: &'a Target,
        memory_bytes: u64,
        chunk_bytes: u32,
        base: Option<BaseReference>,
    ) -> Self {
        let header = Header {
            memory_bytes,
            chunk_bytes,
            stored_chunks: 0,
            index_offset: HEADER_BYTES.into(),
            digest: Digest([0; 32]),
            base,
        };
        Self {
            target,
            header,
            index: Index::default(),
            end: HEADER_BYTES.into(),
            chunks: 0,
            by_content: HashMap::new(),
        }
    }

    /// Bytes of guest memory that are done.
    fn memory_bytes(&self) -> u64 {
        (self.chunks * u64::from(self.header.chunk_bytes)).min(self.header.memory_bytes)
    }

    fn add(&mut self, chunk: Chunk) -> Result<(), CreateError> {
        let entry = match chunk {
            Chunk::Zero => Entry::Zero,
            Chunk::Base => Entry::Base,
            Chunk::Data(encoded) => Entry::Stored(self.store(&encoded)?),
        };
        self.index.push(entry);
        self.chunks += 1;
        Ok(())
    }

    /// Writes the chunk, unless an equal one was written; returns its number.
    fn store(&mut self, encoded: &Encoded) -> Result<u32, CreateError> {
        let key = (encoded.checksum, encoded.encoding);
        // A short last chunk may have the stored bytes of no other: lengths differ, so content does, and
        // equal stored bytes have equal content.
        if let Some(number) = self.by_content.get(&key) {
            return Ok(*number);
        }
        self.target.write_at(self.end, &encoded.bytes)?;
        let bytes = encoded.bytes.len();
        let number = self.index.store(StoredChunk {
            offset: self.end,
            // A chunk has 4 MiB at most.
            bytes: u32::try_from(bytes).unwrap_or(u32::MAX),
            encoding: encoded.encoding,
            checksum: encoded.checksum,
        });
        self.by_content.insert(key, number);
        self.end += bytes as u64;
        Ok(number)
    }

    /// Writes the index and, last of all, the header.
    fn finish(mut self, name: &str) -> Result<ImageInfo, CreateError> {
        self.header.index_offset = self.end;
        let stored = self.index.stored().len();
        self.header.stored_chunks = u32::try_from(stored).unwrap_or(u32::MAX);
        let index = self.index.encode();
        self.header.digest = self.header.digest_with(&index);
        self.target.write_at(self.end, &index)?;
        self.target.write_at(0, &self.header.encode())?;
        Ok(ImageInfo::new(name, &self.header, &self.index))
    }
}
