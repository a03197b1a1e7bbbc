//! Guest memory from an image and its layers.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use pagetide_memory::Urgency;
use pagetide_pager::Filled;

use super::cache::{ChunkCache, Key};
use super::codec::{DecodeError, Decoder};
use super::index::{Entry, StoredChunk};
use super::layers::{Head, Layer, open_layers};
use crate::blob::Blob;
use crate::digest::Digest;
use crate::guest_image::{GuestImage, ImageError, check_inside};
use crate::object::ObjectCounters;
use crate::open::{Location, OpenError, OpenOptions, open_blob};
use crate::standing::Standing;

/// Stored bytes of adjacent chunks that one read takes, at most; one chunk may have more.
const MOST_READ: u64 = 1 << 20;
/// Sets of buffers that are kept for the next reads.
const MOST_SCRATCHES: usize = 16;

/// A Pagetide image, with all its layers.
pub struct PagetideImage {
    /// The image, its base, the base's base.
    pub(crate) layers: Vec<Layer>,
    cache: ChunkCache,
    scratches: Mutex<Vec<Scratch>>,
}

/// The memory of one read, kept for the next: a fault allocates nothing.
#[derive(Default)]
struct Scratch {
    decoder: Decoder,
    /// Stored bytes.
    stored: Vec<u8>,
    /// The content of a chunk of which only a part was requested.
    content: Vec<u8>,
    parts: Vec<StoredPart>,
}

/// A requested part of a chunk of guest memory.
#[derive(Clone, Copy, Debug)]
struct Part {
    chunk: usize,
    /// Where the part begins in the chunk.
    begin: usize,
    /// Where it goes in the request's buffer.
    at: usize,
    bytes: usize,
    /// The chunk's length.
    chunk_bytes: usize,
}

/// A requested part of a stored chunk.
#[derive(Clone, Copy, Debug)]
struct StoredPart {
    number: u32,
    part: Part,
}

/// Lengths in a chunk, which has 4 MiB at most.
fn length(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

impl Layer {
    /// The parts of chunks that make up `bytes` bytes at `offset`, which guest memory has.
    fn parts(&self, offset: u64, bytes: usize) -> impl Iterator<Item = Part> {
        let end = offset + bytes as u64;
        let chunk_bytes = u64::from(self.header.chunk_bytes);
        let mut next = offset;
        std::iter::from_fn(move || {
            if next >= end {
                return None;
            }
            let chunk = next / chunk_bytes;
            let begin = next % chunk_bytes;
            let bytes = (chunk_bytes - begin).min(end - next);
            let part = Part {
                chunk: length(chunk),
                begin: length(begin),
                at: length(next - offset),
                bytes: length(bytes),
                chunk_bytes: length(self.header.bytes_of(chunk).into()),
            };
            next += bytes;
            Some(part)
        })
    }

    /// How many of `bytes` bytes at `offset` this layer has; beyond its end a base is zero.
    fn clip(&self, offset: u64, bytes: usize) -> usize {
        let rest = self.header.memory_bytes.saturating_sub(offset);
        usize::try_from(rest).map_or(bytes, |rest| rest.min(bytes))
    }

    fn chunk(&self, number: u32) -> &StoredChunk {
        &self.index.stored()[length(number.into())]
    }

    pub(crate) fn decode_error(&self, number: u32, error: DecodeError) -> ImageError {
        let name = self.blob.name().to_owned();
        let chunk = number.into();
        let offset = self.chunk(number).offset;
        match error {
            DecodeError::Checksum => ImageError::Damaged {
                name,
                chunk,
                offset,
            },
            DecodeError::Content(source) => ImageError::Undecodable {
                name,
                chunk,
                offset,
                source: Arc::new(source),
            },
        }
    }
}

impl PagetideImage {
    /// Opens the image at `location`, and all images below it.
    ///
    /// # Errors
    /// [`OpenError`]; [`OpenError::Format`] if it is no Pagetide image.
    pub fn open(location: &Location, options: &OpenOptions) -> Result<Self, OpenError> {
        let blob = open_blob(location, options)?;
        let head = Head::read(&*blob)?;
        Self::with_head(blob, &head, location, options)
    }

    /// Opens the image whose first bytes were read already.
    pub(crate) fn with_head(
        blob: Arc<dyn Blob>,
        head: &Head,
        location: &Location,
        options: &OpenOptions,
    ) -> Result<Self, OpenError> {
        let layers = open_layers(blob, head, location, options)?;
        let chunk_bytes = layers.iter().map(|layer| layer.header.chunk_bytes);
        let chunk_bytes = length(chunk_bytes.max().unwrap_or_default().into());
        Ok(Self {
            layers,
            cache: ChunkCache::new(options.cache_bytes, chunk_bytes),
            scratches: Mutex::default(),
        })
    }

    /// The number of layers, itself included: 1 without a base.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Bytes of guest memory in a chunk of this image; its base may have others.
    pub fn chunk_bytes(&self) -> u32 {
        self.layers[0].header.chunk_bytes
    }

    /// Who may read the image: those who may read all of its layers. An object of a store has no permissions, and is
    /// its owner's alone.
    pub(crate) fn mode(&self) -> u32 {
        let of_owner = 0o600;
        let modes = self.layers.iter().map(|layer| layer.blob.mode());
        modes.fold(0o777, |all, mode| all & mode.unwrap_or(of_owner))
    }

    /// Whether the maps say that these bytes, which the image has, are zero.
    pub(crate) fn is_zero(&self, offset: u64, bytes: usize) -> bool {
        is_zero(&self.layers, offset, bytes)
    }

    /// Runs `work` with buffers of an earlier read.
    fn with_scratch<T>(&self, work: impl FnOnce(&mut Scratch) -> T) -> T {
        let kept = || {
            self.scratches
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        let mut scratch = kept().pop().unwrap_or_default();
        let result = work(&mut scratch);
        let mut kept = kept();
        if kept.len() < MOST_SCRATCHES {
            kept.push(scratch);
        }
        result
    }

    /// Fills the buffer from the layers from `depth` down.
    fn fill<R: Reading>(
        &self,
        depth: usize,
        offset: u64,
        buffer: &mut [u8],
        reading: R,
        scratch: &mut Scratch,
    ) -> Result<(), R::Error> {
        let layer = &self.layers[depth];
        // Adjacent parts of the base are read as one.
        let mut of_base = 0..0;
        for part in layer.parts(offset, buffer.len()) {
            let end = part.at + part.bytes;
            match layer.index.entry(part.chunk) {
                Entry::Zero => buffer[part.at..end].fill(0),
                Entry::Base if of_base.end == part.at => of_base.end = end,
                Entry::Base => {
                    let run = std::mem::replace(&mut of_base, part.at..end);
                    let at = offset + run.start as u64;
                    self.fill_from_base(depth, at, &mut buffer[run], reading, scratch)?;
                }
                Entry::Stored(_) => {}
            }
        }
        let at = offset + of_base.start as u64;
        self.fill_from_base(depth, at, &mut buffer[of_base], reading, scratch)?;
        self.fill_stored(depth, offset, buffer, reading, scratch)
    }

    fn fill_from_base<R: Reading>(
        &self,
        depth: usize,
        offset: u64,
        buffer: &mut [u8],
        reading: R,
        scratch: &mut Scratch,
    ) -> Result<(), R::Error> {
        let has = self.layers[depth + 1..].first();
        let has = has.map_or(0, |base| base.clip(offset, buffer.len()));
        let (inside, beyond) = buffer.split_at_mut(has);
        beyond.fill(0);
        match inside.is_empty() {
            true => Ok(()),
            false => self.fill(depth + 1, offset, inside, reading, scratch),
        }
    }

    /// Fills the parts that this layer stores; chunks that are adjacent in the file in one read.
    fn fill_stored<R: Reading>(
        &self,
        depth: usize,
        offset: u64,
        buffer: &mut [u8],
        reading: R,
        scratch: &mut Scratch,
    ) -> Result<(), R::Error> {
        let layer = &self.layers[depth];
        let mut parts = std::mem::take(&mut scratch.parts);
        parts.clear();
        parts.extend(layer.parts(offset, buffer.len()).filter_map(|part| {
            let Entry::Stored(number) = layer.index.entry(part.chunk) else {
                return None;
            };
            let key = Key {
                layer: depth,
                number,
            };
            let target = &mut buffer[part.at..part.at + part.bytes];
            let is_cached = self.cache.copy(key, part.begin, target);
            (!is_cached).then_some(StoredPart { number, part })
        }));
        let mut rest = parts.as_slice();
        let mut filled = Ok(());
        while filled.is_ok() && !rest.is_empty() {
            let (run, later) = rest.split_at(adjacent(layer, rest));
            filled = self.fill_run(depth, run, buffer, reading, scratch);
            rest = later;
        }
        scratch.parts = parts;
        filled
    }

    /// Fills parts of chunks that are adjacent in the file.
    fn fill_run<R: Reading>(
        &self,
        depth: usize,
        run: &[StoredPart],
        buffer: &mut [u8],
        reading: R,
        scratch: &mut Scratch,
    ) -> Result<(), R::Error> {
        let layer = &self.layers[depth];
        let (Some(first), Some(last)) = (run.first(), run.last()) else {
            return Ok(());
        };
        let begin = layer.chunk(first.number).offset;
        let bytes = length(layer.chunk(last.number).end() - begin);
        let mut stored = std::mem::take(&mut scratch.stored);
        let read = reading.read(&*layer.blob, begin, room(&mut stored, bytes));
        let filled = read.and_then(|()| {
            run.iter().try_for_each(|part| {
                let chunk = layer.chunk(part.number);
                let from = length(chunk.offset - begin);
                let stored = &stored[from..from + length(chunk.bytes.into())];
                let decoded = self.decode(depth, part, stored, buffer, scratch);
                decoded.map_err(|error| layer.decode_error(part.number, error).into())
            })
        });
        scratch.stored = stored;
        filled
    }

    /// Decodes a chunk into its part of the buffer. A chunk of which a part was requested goes into the
    /// cache: the rest is likely to be requested soon.
    fn decode(
        &self,
        depth: usize,
        wanted: &StoredPart,
        stored: &[u8],
        buffer: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<(), DecodeError> {
        let StoredPart { number, part } = *wanted;
        let chunk = self.layers[depth].chunk(number);
        let target = &mut buffer[part.at..part.at + part.bytes];
        if part.bytes == part.chunk_bytes {
            return scratch.decoder.decode(chunk, stored, target);
        }
        let mut content = std::mem::take(&mut scratch.content);
        content.resize(part.chunk_bytes, 0);
        let decoded = scratch.decoder.decode(chunk, stored, &mut content);
        if decoded.is_ok() {
            target.copy_from_slice(&content[part.begin..part.begin + part.bytes]);
            let layer = depth;
            content = self.cache.insert(Key { layer, number }, content);
        }
        scratch.content = content;
        decoded
    }
}

/// How stored bytes are read.
trait Reading: Copy {
    type Error: From<ImageError>;

    fn read(self, blob: &dyn Blob, offset: u64, buffer: &mut [u8]) -> Result<(), Self::Error>;
}

/// However long that takes.
#[derive(Clone, Copy)]
struct Waiting(Urgency);

impl Reading for Waiting {
    type Error = ImageError;

    fn read(self, blob: &dyn Blob, offset: u64, buffer: &mut [u8]) -> Result<(), ImageError> {
        Ok(blob.read_at(offset, buffer, self.0)?)
    }
}

/// If it needs no waiting.
#[derive(Clone, Copy)]
struct AtOnce;

/// It would have to be waited for, or has failed, which a read that may wait reports.
struct NotAtOnce;

impl From<ImageError> for NotAtOnce {
    fn from(_: ImageError) -> Self {
        Self
    }
}

impl Reading for AtOnce {
    type Error = NotAtOnce;

    fn read(self, blob: &dyn Blob, offset: u64, buffer: &mut [u8]) -> Result<(), NotAtOnce> {
        match blob.read_now(offset, buffer) {
            true => Ok(()),
            false => Err(NotAtOnce),
        }
    }
}

/// The first `bytes` bytes of a buffer that grows if need be.
fn room(buffer: &mut Vec<u8>, bytes: usize) -> &mut [u8] {
    if buffer.len() < bytes {
        buffer.resize(bytes, 0);
    }
    &mut buffer[..bytes]
}

/// How many of the first parts one read takes: those whose chunks follow each other in the file.
fn adjacent(layer: &Layer, parts: &[StoredPart]) -> usize {
    let Some(first) = parts.first() else {
        return 0;
    };
    let begin = layer.chunk(first.number).offset;
    let follows = |pair: &&[StoredPart]| {
        let (before, number) = (pair[0].number, pair[1].number);
        (number == before || number == before + 1) && layer.chunk(number).end() - begin <= MOST_READ
    };
    1 + parts.windows(2).take_while(follows).count()
}

fn is_zero(layers: &[Layer], offset: u64, bytes: usize) -> bool {
    let Some((layer, below)) = layers.split_first() else {
        return true;
    };
    let bytes = layer.clip(offset, bytes);
    let mut parts = layer.parts(offset, bytes);
    parts.all(|part| match layer.index.entry(part.chunk) {
        Entry::Zero => true,
        Entry::Base => is_zero(below, offset + part.at as u64, part.bytes),
        Entry::Stored(_) => false,
    })
}

impl fmt::Debug for PagetideImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagetideImage")
            .field("name", &self.name())
            .field("digest", &self.digest())
            .field("layers", &self.layers.len())
            .finish_non_exhaustive()
    }
}

impl GuestImage for PagetideImage {
    fn name(&self) -> &str {
        self.layers[0].blob.name()
    }

    fn bytes(&self) -> u64 {
        self.layers[0].header.memory_bytes
    }

    fn digest(&self) -> Digest {
        self.layers[0].header.digest
    }

    /// Content needs no look at the files: each chunk has its checksum.
    fn standing(&self) -> Result<Standing, ImageError> {
        // All are asked before one is waited for: a new VM waits for this.
        let layers = self.layers.iter();
        let asked: Vec<_> = layers.map(|layer| layer.blob.ask_standing()).collect();
        let standing = Standing::of_all(asked.into_iter().map(|answer| answer()));
        Ok(standing?)
    }

    /// Of all layers together.
    fn counters(&self) -> Option<ObjectCounters> {
        let counted = self.layers.iter().filter_map(|layer| layer.blob.counters());
        counted.reduce(ObjectCounters::plus)
    }

    fn read(&self, offset: u64, buffer: &mut [u8], urgency: Urgency) -> Result<Filled, ImageError> {
        check_inside(offset, buffer.len(), self.bytes())?;
        if self.is_zero(offset, buffer.len()) {
            return Ok(Filled::Zero);
        }
        self.with_scratch(|scratch| self.fill(0, offset, buffer, Waiting(urgency), scratch))?;
        Ok(Filled::Bytes)
    }

    /// Zero chunks, and, of urgent urgency, chunks in the cache and chunks whose stored bytes need
    /// no waiting: to decompress 64K here takes less time than another thread takes to begin. Of bulk urgency they are left to
    /// requests, which are decompressed in parallel.
    fn read_now(&self, offset: u64, buffer: &mut [u8], urgency: Urgency) -> Option<Filled> {
        check_inside(offset, buffer.len(), self.bytes()).ok()?;
        if self.is_zero(offset, buffer.len()) {
            return Some(Filled::Zero);
        }
        match urgency {
            Urgency::Bulk => None,
            Urgency::Urgent => self
                .with_scratch(|scratch| self.fill(0, offset, buffer, AtOnce, scratch))
                .is_ok()
                .then_some(Filled::Bytes),
        }
    }
}
