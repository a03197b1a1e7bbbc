//! Writing an image: chunks of guest memory, in order.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::ops::Range;

use pagetide_memory::Urgency;
use pagetide_pager::Filled;

use super::base::BaseReference;
use super::codec::{Encoded, Encoder, is_zero};
use super::create::{CreateError, Holes};
use super::format::{HEADER_BYTES, Header};
use super::index::{Encoding, Entry, Index, StoredChunk};
use super::info::ImageInfo;
use super::parallel::in_order;
use super::reader::PagetideImage;
use super::target::Target;
use crate::digest::Digest;
use crate::guest_image::GuestImage;
use crate::open::Location;

/// Guest memory that one job reads, in bytes, unless a chunk is longer.
pub(crate) const JOB_BYTES: u32 = 1 << 20;

/// What a chunk of guest memory is, before it has a place in the file.
#[derive(Debug)]
enum Chunk {
    Zero,
    Base,
    Data(Encoded),
}

/// Guest memory that becomes an image. Each thread has one of its own.
pub(super) trait Memory {
    /// Fills `content` from `offset` on; puts the ranges of it that are no holes into `data`, in ascending order.
    fn read(
        &mut self,
        offset: u64,
        content: &mut [u8],
        data: &mut Vec<Range<usize>>,
    ) -> Result<(), CreateError>;
}

/// What is written.
pub(super) struct Plan<'a> {
    pub(super) memory_bytes: u64,
    pub(super) chunk_bytes: u32,
    pub(super) base: Option<&'a PagetideImage>,
    pub(super) reference: Option<BaseReference>,
    pub(super) holes: Holes,
    pub(super) threads: NonZeroUsize,
}

/// Writes the image `image` into `target`, from memory that each thread opens for itself. Returns its description, and how
/// many bytes of the memory were holes.
pub(super) fn write_image<M: Memory>(
    target: &Target,
    image: &Location,
    plan: Plan<'_>,
    open: impl Fn() -> Result<M, CreateError> + Sync,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(ImageInfo, u64), CreateError> {
    let (bytes, mut hole_bytes) = (plan.memory_bytes, 0);
    let mut writer = Writer::new(target, bytes, plan.chunk_bytes, plan.reference);
    let source = ChunkSource {
        base: plan.base,
        holes: plan.holes,
        memory_bytes: bytes,
        chunk_bytes: u64::from(plan.chunk_bytes),
    };
    progress(0, bytes);
    in_order(
        bytes.div_ceil(source.job_bytes()),
        plan.threads,
        || Worker::new(open()?),
        |worker, job| source.job(worker, job),
        |(chunks, holes)| {
            hole_bytes += holes;
            for chunk in chunks {
                writer.add(chunk)?;
            }
            progress(writer.memory_bytes(), bytes);
            Ok(())
        },
    )?;
    let info = writer.finish(&image.to_string())?;
    Ok((info, hole_bytes))
}

/// What one thread has.
struct Worker<M> {
    memory: M,
    encoder: Encoder,
    content: Vec<u8>,
    of_base: Vec<u8>,
    data: Vec<Range<usize>>,
}

impl<M: Memory> Worker<M> {
    fn new(memory: M) -> Result<Self, CreateError> {
        Ok(Self {
            memory,
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

    /// Reads and encodes the chunks of a job. Says how many bytes of it were holes.
    fn job<M: Memory>(
        &self,
        worker: &mut Worker<M>,
        job: u64,
    ) -> Result<(Vec<Chunk>, u64), CreateError> {
        let begin = job * self.job_bytes();
        let bytes = (self.memory_bytes - begin).min(self.job_bytes());
        let length = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut content = std::mem::take(&mut worker.content);
        let mut data = std::mem::take(&mut worker.data);
        content.resize(length(bytes), 0);
        worker.memory.read(begin, &mut content, &mut data)?;
        let data_bytes: usize = data.iter().map(ExactSizeIterator::len).sum();
        let hole_bytes = bytes.saturating_sub(data_bytes as u64);
        let parts = content.chunks_mut(length(self.chunk_bytes));
        let mut at = 0;
        let chunks = parts.map(|content| {
            let range = at..at + content.len();
            at = range.end;
            self.chunk(worker, begin + range.start as u64, content, range, &data)
        });
        let chunks: Result<_, _> = chunks.collect();
        worker.content = content;
        worker.data = data;
        Ok((chunks?, hole_bytes))
    }

    /// Encodes the chunk of guest memory at `offset`; it is at `range` of its job, of which `data` is
    /// data.
    fn chunk<M>(
        &self,
        worker: &mut Worker<M>,
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
