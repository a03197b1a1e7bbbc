//! Reading everything of an image, to find what is damaged.

use std::num::NonZeroUsize;

use pagetide_memory::Urgency;

use super::codec::Decoder;
use super::format::HEADER_BYTES;
use super::index::StoredChunk;
use super::layers::Layer;
use super::parallel::{default_threads, in_order};
use super::reader::PagetideImage;
use crate::guest_image::ImageError;

/// Damaged chunks that are named; the others are counted.
pub const MOST_NAMED: usize = 20;
/// Stored bytes that one job reads, unless a chunk is longer.
const JOB_BYTES: u64 = 1 << 20;

/// What [`verify`] has found.
#[derive(Debug, Default)]
pub struct Verified {
    /// Layers that were read.
    pub layers: usize,
    /// Stored chunks that were read, in all layers.
    pub chunks: u64,
    /// Their bytes in the files.
    pub stored_bytes: u64,
    /// Chunks that are damaged, or could not be read.
    pub damaged_chunks: u64,
    /// The first of them, [`MOST_NAMED`] at most, each with the layer's name.
    pub damage: Vec<ImageError>,
}

impl Verified {
    /// Whether all is as it was written.
    pub fn is_sound(&self) -> bool {
        self.damaged_chunks == 0
    }
}

/// How an image is verified.
#[derive(Clone, Debug)]
pub struct VerifyOptions {
    /// Threads that read, hash and decompress.
    pub threads: NonZeroUsize,
}

impl Default for VerifyOptions {
    fn default() -> Self {
        Self {
            threads: default_threads(),
        }
    }
}

/// Stored chunks that one job reads: a range of numbers.
type Job = std::ops::Range<u32>;

/// Reads every stored chunk of every layer, verifies its checksum and decompresses it. Header and index
/// were verified when the image was opened. `progress` is told how many stored bytes are done, of how
/// many.
pub fn verify(
    image: &PagetideImage,
    options: &VerifyOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Verified {
    let mut found = Verified {
        layers: image.layers.len(),
        ..Verified::default()
    };
    // Stored chunks fill what is between header and index.
    let data = |layer: &Layer| layer.header.index_offset - u64::from(HEADER_BYTES);
    let total = image.layers.iter().map(data).sum();
    progress(0, total);
    for layer in &image.layers {
        let jobs = jobs(layer);
        let lengths = content_lengths(layer);
        let work = |(decoder, buffers): &mut (Decoder, Buffers), job: u64| {
            let job = usize::try_from(job).ok().and_then(|job| jobs.get(job));
            let job = job.cloned().unwrap_or_default();
            let bytes = span(layer, &job).1;
            Ok((
                bytes,
                job.len() as u64,
                check(layer, job, &lengths, decoder, buffers),
            ))
        };
        let take = |(bytes, chunks, damage): (u64, u64, Vec<ImageError>)| {
            found.stored_bytes += bytes;
            found.chunks += chunks;
            found.damaged_chunks += damage.len() as u64;
            let room = MOST_NAMED - found.damage.len();
            found.damage.extend(damage.into_iter().take(room));
            progress(found.stored_bytes, total);
            Ok(())
        };
        let count = jobs.len() as u64;
        // Neither a job nor its result fails.
        let _: Result<(), std::convert::Infallible> = in_order(
            count,
            options.threads,
            || Ok(Default::default()),
            work,
            take,
        );
    }
    found
}

/// Divides the stored chunks into jobs.
fn jobs(layer: &Layer) -> Vec<Job> {
    let mut jobs: Vec<Job> = Vec::new();
    let mut bytes = 0;
    for (number, chunk) in (0..).zip(layer.index.stored()) {
        bytes += u64::from(chunk.bytes);
        match jobs.last_mut() {
            Some(job) if bytes <= JOB_BYTES => job.end = number + 1,
            _ => {
                jobs.push(number..number + 1);
                bytes = chunk.bytes.into();
            }
        }
    }
    jobs
}

/// The offset and the length of a job's bytes in the file.
fn span(layer: &Layer, job: &Job) -> (u64, u64) {
    let stored = layer.index.stored();
    let at = |number: u32| stored.get(usize::try_from(number).ok()?);
    let first = at(job.start).map_or(0, |chunk| chunk.offset);
    let end = job
        .end
        .checked_sub(1)
        .and_then(at)
        .map_or(0, StoredChunk::end);
    (first, end.saturating_sub(first))
}

/// The length of the last stored chunk's content, where it differs from the others.
struct Lengths {
    chunk_bytes: usize,
    short: Option<(u32, usize)>,
}

fn content_lengths(layer: &Layer) -> Lengths {
    let header = &layer.header;
    let length = |bytes: u32| usize::try_from(bytes).unwrap_or(usize::MAX);
    Lengths {
        chunk_bytes: length(header.chunk_bytes),
        short: layer
            .short_chunk()
            .map(|(number, bytes)| (number, length(bytes))),
    }
}

/// The memory of one thread.
#[derive(Default)]
struct Buffers {
    stored: Vec<u8>,
    content: Vec<u8>,
}

/// Reads the chunks of a job, together if that is possible.
fn check(
    layer: &Layer,
    job: Job,
    lengths: &Lengths,
    decoder: &mut Decoder,
    buffers: &mut Buffers,
) -> Vec<ImageError> {
    let length = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let (begin, bytes) = span(layer, &job);
    let Buffers { stored, content } = buffers;
    stored.resize(length(bytes), 0);
    let together = layer.blob.read_at(begin, stored, Urgency::Bulk).is_ok();
    let mut damage = Vec::new();
    for number in job {
        let Some(chunk) = layer.index.stored().get(length(number.into())) else {
            continue;
        };
        let at = length(chunk.offset - begin);
        let stored = &mut stored[at..at + length(chunk.bytes.into())];
        // Which of the chunks it is that cannot be read.
        if !together && let Err(error) = layer.blob.read_at(chunk.offset, stored, Urgency::Bulk) {
            damage.push(error.into());
            continue;
        }
        let bytes = match lengths.short {
            Some((short, bytes)) if short == number => bytes,
            _ => lengths.chunk_bytes,
        };
        content.resize(bytes, 0);
        if let Err(error) = decoder.decode(chunk, stored, content) {
            damage.push(layer.decode_error(number, error));
        }
    }
    damage
}
