//! Frames: the types and lengths of messages, and their incremental decoding.

use thiserror::Error;

use crate::message::max_payload_bytes;

/// The first bytes of a connection, in both directions.
pub const MAGIC: [u8; 8] = *b"PTMIGRAT";

/// The bytes of a frame's header.
pub const HEADER_BYTES: usize = 8;

/// The receiver skips the frame if it does not know its type.
pub const FLAG_OPTIONAL: u16 = 1;

/// The longest payload of a type that the receiver does not know.
pub const MAX_UNKNOWN_BYTES: u32 = 64 << 10;

/// A frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The message's type.
    pub kind: u16,
    /// [`FLAG_OPTIONAL`], or 0.
    pub flags: u16,
    /// The message's fields, and its content behind them.
    pub payload: Vec<u8>,
}

/// Why bytes are no frames. The bytes after it have no meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FrameError {
    /// The connection does not begin with [`MAGIC`].
    #[error("the connection does not begin with PTMIGRAT")]
    Magic,
    /// A payload that is longer than its type allows.
    #[error("a payload of {bytes} bytes: {limit} is the limit for type {kind:#x}")]
    TooLong {
        /// The type in the header.
        kind: u16,
        /// The length in the header.
        bytes: u32,
        /// The type's limit.
        limit: u32,
    },
    /// A flag that this version does not know.
    #[error("a frame with the unknown flags {flags:#x}")]
    Flags {
        /// All flags of the frame.
        flags: u16,
    },
}

impl Frame {
    /// Whether the receiver may skip it.
    pub fn is_optional(&self) -> bool {
        self.flags & FLAG_OPTIONAL != 0
    }

    /// Appends the frame's bytes to `out`.
    ///
    /// # Errors
    /// [`FrameError::TooLong`]: nothing was appended.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), FrameError> {
        let bytes = u32::try_from(self.payload.len()).unwrap_or(u32::MAX);
        check_length(self.kind, bytes)?;
        out.extend(bytes.to_le_bytes());
        out.extend(self.kind.to_le_bytes());
        out.extend(self.flags.to_le_bytes());
        out.extend(&self.payload);
        Ok(())
    }
}

fn check_length(kind: u16, bytes: u32) -> Result<(), FrameError> {
    match max_payload_bytes(kind).unwrap_or(MAX_UNKNOWN_BYTES) {
        limit if bytes > limit => Err(FrameError::TooLong { kind, bytes, limit }),
        _ => Ok(()),
    }
}

/// Divides the bytes of one direction of a connection into frames. It holds only bytes that have arrived.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// The bytes at the beginning of the buffer that were taken.
    taken: usize,
    has_magic: bool,
    error: Option<FrameError>,
}

impl Decoder {
    /// Adds bytes that have arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..std::mem::take(&mut self.taken));
        self.buffer.extend(bytes);
    }

    /// The bytes that have arrived and were not taken.
    pub fn buffered(&self) -> usize {
        self.buffer.len().saturating_sub(self.taken)
    }

    /// The next frame; `None` until more bytes have arrived.
    ///
    /// # Errors
    /// [`FrameError`], which stays.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let result = self.try_next();
        self.error = result.as_ref().err().copied();
        result
    }

    fn try_next(&mut self) -> Result<Option<Frame>, FrameError> {
        let rest = self.buffer.get(self.taken..).unwrap_or_default();
        if !self.has_magic {
            // The first wrong byte is an error: a peer of another protocol may send no more.
            if rest.iter().zip(&MAGIC).any(|(byte, magic)| byte != magic) {
                return Err(FrameError::Magic);
            }
            if rest.len() < MAGIC.len() {
                return Ok(None);
            }
            self.has_magic = true;
            self.taken += MAGIC.len();
            return self.try_next();
        }
        let Some((header, rest)) = rest.split_first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let &[b0, b1, b2, b3, k0, k1, f0, f1] = header;
        let bytes = u32::from_le_bytes([b0, b1, b2, b3]);
        let (kind, flags) = (u16::from_le_bytes([k0, k1]), u16::from_le_bytes([f0, f1]));
        if flags & !FLAG_OPTIONAL != 0 {
            return Err(FrameError::Flags { flags });
        }
        check_length(kind, bytes)?;
        let Some(payload) = usize::try_from(bytes)
            .ok()
            .and_then(|bytes| rest.get(..bytes))
        else {
            return Ok(None);
        };
        self.taken += HEADER_BYTES + payload.len();
        Ok(Some(Frame {
            kind,
            flags,
            payload: payload.to_vec(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(frames: &[Frame]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        frames
            .iter()
            .for_each(|frame| frame.encode(&mut bytes).unwrap());
        bytes
    }

    #[test]
    fn frames_come_out_whole_however_the_bytes_are_divided() {
        let frame = |kind, bytes| Frame {
            kind,
            flags: 1,
            payload: vec![9; bytes],
        };
        let frames = [frame(0x7001, 0), frame(0x7002, 100), frame(0x7003, 3)];
        let bytes = stream(&frames);
        for step in 1..bytes.len() {
            let mut decoder = Decoder::default();
            let mut found = Vec::new();
            for part in bytes.chunks(step) {
                decoder.push(part);
                while let Some(frame) = decoder.next_frame().unwrap() {
                    found.push(frame);
                }
            }
            assert_eq!(found, frames, "in parts of {step}");
            assert_eq!(decoder.buffered(), 0);
        }
    }

    #[test]
    fn an_error_comes_at_the_header_and_stays() {
        let error_of = |bytes: &[u8]| {
            let mut decoder = Decoder::default();
            decoder.push(bytes);
            let error = decoder.next_frame().unwrap_err();
            decoder.push(&[0; 64]);
            assert_eq!(decoder.next_frame(), Err(error));
            error
        };
        assert_eq!(error_of(b"GET "), FrameError::Magic);
        let header = |bytes: u32, kind: u16, flags: u16| {
            let mut all = MAGIC.to_vec();
            all.extend(bytes.to_le_bytes());
            all.extend(kind.to_le_bytes());
            all.extend(flags.to_le_bytes());
            all
        };
        let limit = MAX_UNKNOWN_BYTES;
        let error = FrameError::TooLong {
            kind: 0x7001,
            bytes: limit + 1,
            limit,
        };
        assert_eq!(error_of(&header(limit + 1, 0x7001, 0)), error);
        assert_eq!(error_of(&header(0, 1, 2)), FrameError::Flags { flags: 2 });
        let long = Frame {
            kind: 0x7001,
            flags: 0,
            payload: vec![0; usize::try_from(limit + 1).unwrap()],
        };
        assert_eq!(long.encode(&mut Vec::new()), Err(error));
    }
}
