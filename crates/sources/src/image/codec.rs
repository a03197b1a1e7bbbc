//! One chunk: between its content and its bytes in the file.

use std::io;

use zstd::bulk::{Compressor, Decompressor};

use super::index::{Encoding, StoredChunk};

/// zstd's level: its own default. Decompression takes the same time at every level.
const LEVEL: i32 = 3;

/// Whether all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    static ZEROES: [u8; 4096] = [0; 4096];
    let mut parts = bytes.chunks(ZEROES.len());
    parts.all(|part| part == &ZEROES[..part.len()])
}

/// Why stored bytes are not a chunk's content.
#[derive(Debug)]
pub(crate) enum DecodeError {
    /// They differ from the checksum.
    Checksum,
    /// They have their checksum, and do not decompress to the chunk's length.
    Content(io::Error),
}

/// Turns stored bytes into content. Keeps its memory from chunk to chunk.
#[derive(Default)]
pub(crate) struct Decoder {
    zstd: Decompressor<'static>,
}

impl Decoder {
    /// Verifies the stored bytes of `chunk` and fills `content`, which has the chunk's length in guest
    /// memory.
    ///
    /// # Errors
    /// [`DecodeError`]; `content` is then undefined.
    pub(crate) fn decode(
        &mut self,
        chunk: &StoredChunk,
        stored: &[u8],
        content: &mut [u8],
    ) -> Result<(), DecodeError> {
        if blake3::hash(stored) != chunk.checksum {
            return Err(DecodeError::Checksum);
        }
        let given = match chunk.encoding {
            Encoding::Raw if stored.len() == content.len() => {
                content.copy_from_slice(stored);
                content.len()
            }
            Encoding::Raw => stored.len(),
            // The decompressor writes no more than `content` has room for.
            Encoding::Zstd => {
                let given = self.zstd.decompress_to_buffer(stored, content);
                given.map_err(DecodeError::Content)?
            }
        };
        match given == content.len() {
            true => Ok(()),
            false => Err(DecodeError::Content(io::Error::other(format!(
                "it has {given} bytes instead of {}",
                content.len()
            )))),
        }
    }
}

/// Turns content into stored bytes. Equal content has equal bytes.
pub(crate) struct Encoder {
    zstd: Compressor<'static>,
}

/// A chunk that is ready to be written.
#[derive(Debug)]
pub(crate) struct Encoded {
    pub(crate) encoding: Encoding,
    pub(crate) checksum: [u8; 32],
    pub(crate) bytes: Vec<u8>,
}

impl Encoder {
    /// # Errors
    /// zstd refuses its level, or has no memory.
    pub(crate) fn new() -> io::Result<Self> {
        let zstd = Compressor::new(LEVEL)?;
        Ok(Self { zstd })
    }

    /// Compresses `content`, unless that makes it no shorter.
    ///
    /// # Errors
    /// zstd has no memory.
    pub(crate) fn encode(&mut self, content: &[u8]) -> io::Result<Encoded> {
        let compressed = self.zstd.compress(content)?;
        let (encoding, bytes) = match compressed.len() < content.len() {
            true => (Encoding::Zstd, compressed),
            false => (Encoding::Raw, content.to_vec()),
        };
        Ok(Encoded {
            encoding,
            checksum: *blake3::hash(&bytes).as_bytes(),
            bytes,
        })
    }
}
