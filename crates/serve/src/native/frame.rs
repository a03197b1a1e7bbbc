//! Frames: the lengths, types and ids of messages, and their incremental decoding.

use thiserror::Error;

/// The first bytes of a connection, in both directions.
pub const MAGIC: [u8; 8] = *b"PTNATIVE";

/// The bytes of a frame's header.
pub const HEADER_BYTES: usize = 12;

/// The longest payload: 1 MiB.
pub const MAX_PAYLOAD_BYTES: usize = 1 << 20;

/// The receiver skips the frame if it does not know its type.
pub const FLAG_OPTIONAL: u16 = 1;

/// Another part of the same page map follows.
pub const FLAG_MORE: u16 = 2;

/// A frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The message's type.
    pub kind: u16,
    /// [`FLAG_OPTIONAL`], [`FLAG_MORE`].
    pub flags: u16,
    /// The request's number; 0 in notices.
    pub id: u32,
    /// The message's fields.
    pub payload: Vec<u8>,
}

/// Why bytes are no frames. The bytes after it have no meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FrameError {
    /// The connection does not begin with [`MAGIC`].
    #[error("the connection does not begin with PTNATIVE")]
    Magic,
    /// The payload is too long.
    #[error("a frame of {bytes} bytes: {MAX_PAYLOAD_BYTES} is the limit")]
    TooLong {
        /// The length in the header.
        bytes: u32,
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

    /// Whether another part follows.
    pub fn has_more(&self) -> bool {
        self.flags & FLAG_MORE != 0
    }

    /// Appends the frame's bytes to `bytes`.
    ///
    /// # Errors
    /// [`FrameError::TooLong`]; nothing was appended.
    pub fn encode(&self, bytes: &mut Vec<u8>) -> Result<(), FrameError> {
        let length = u32::try_from(self.payload.len()).unwrap_or(u32::MAX);
        if self.payload.len() > MAX_PAYLOAD_BYTES {
            return Err(FrameError::TooLong { bytes: length });
        }
        bytes.extend(length.to_le_bytes());
        bytes.extend(self.kind.to_le_bytes());
        bytes.extend(self.flags.to_le_bytes());
        bytes.extend(self.id.to_le_bytes());
        bytes.extend(&self.payload);
        Ok(())
    }
}

/// Decodes the bytes of one direction as they arrive. Memory is allocated only for bytes that have
/// arrived: [`Self::push`] takes them, and the caller bounds how many it passes before it takes the frames.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
    /// Bytes at the start that were decoded.
    taken: usize,
    has_begun: bool,
}

impl Decoder {
    /// A decoder for the start of a connection.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes that have arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.taken > 0 {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The bytes that have arrived and were not decoded yet.
    pub fn buffered(&self) -> usize {
        self.bytes.len() - self.taken
    }

    /// Whether [`Self::next_frame`] returns a frame or an error without further bytes.
    pub fn has_frame(&self) -> bool {
        !matches!(self.ahead(), Ok(None))
    }

    /// Takes the next frame; `None` if it has not arrived as a whole. A header is refused at the first of
    /// its fields that has no valid value.
    ///
    /// # Errors
    /// [`FrameError`]; every further call returns it too.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let rest = self.bytes.get(self.taken..).unwrap_or_default();
        if !self.has_begun && rest.starts_with(&MAGIC) {
            self.has_begun = true;
            self.taken += MAGIC.len();
        }
        let Some((frame, bytes)) = self.ahead()? else {
            return Ok(None);
        };
        let frame = Frame {
            kind: frame.kind,
            flags: frame.flags,
            id: frame.id,
            payload: frame.payload.to_vec(),
        };
        self.taken += bytes;
        Ok(Some(frame))
    }

    /// The next frame, and its bytes with those before it; `None` if it has not arrived as a whole.
    fn ahead(&self) -> Result<Option<(Ahead<'_>, usize)>, FrameError> {
        let mut rest = self.bytes.get(self.taken..).unwrap_or_default();
        let before = rest.len();
        if !self.has_begun {
            let here = rest.len().min(MAGIC.len());
            if rest.get(..here) != MAGIC.get(..here) {
                return Err(FrameError::Magic);
            }
            rest = rest.get(here..).unwrap_or_default();
        }
        let Some((length, _)) = rest.split_first_chunk() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length);
        let wanted = usize::try_from(length).unwrap_or(usize::MAX);
        if wanted > MAX_PAYLOAD_BYTES {
            return Err(FrameError::TooLong { bytes: length });
        }
        let Some((header, rest)) = rest.split_first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let [_, _, _, _, k0, k1, f0, f1, i0, i1, i2, i3] = *header;
        let flags = u16::from_le_bytes([f0, f1]);
        if flags & !(FLAG_OPTIONAL | FLAG_MORE) != 0 {
            return Err(FrameError::Flags { flags });
        }
        let Some((payload, rest)) = rest.split_at_checked(wanted) else {
            return Ok(None);
        };
        let frame = Ahead {
            kind: u16::from_le_bytes([k0, k1]),
            flags,
            id: u32::from_le_bytes([i0, i1, i2, i3]),
            payload,
        };
        Ok(Some((frame, before - rest.len())))
    }
}

/// A frame whose payload is still in the decoder's bytes.
struct Ahead<'a> {
    kind: u16,
    flags: u16,
    id: u32,
    payload: &'a [u8],
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(kind: u16, payload: &[u8]) -> Frame {
        Frame {
            kind,
            flags: 0,
            id: 7,
            payload: payload.to_vec(),
        }
    }

    fn bytes_of(frames: &[Frame]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for frame in frames {
            frame.encode(&mut bytes).unwrap();
        }
        bytes
    }

    #[test]
    fn the_longest_payload_passes_and_a_longer_one_does_not() {
        let longest = frame(1, &vec![9; MAX_PAYLOAD_BYTES]);
        let mut decoder = Decoder::new();
        decoder.push(&bytes_of(std::slice::from_ref(&longest)));
        assert_eq!(decoder.next_frame(), Ok(Some(longest)));
        let longer = frame(1, &vec![9; MAX_PAYLOAD_BYTES + 1]);
        let too_long = FrameError::TooLong {
            bytes: (MAX_PAYLOAD_BYTES + 1).try_into().unwrap(),
        };
        assert_eq!(longer.encode(&mut Vec::new()), Err(too_long));
        let mut bytes = MAGIC.to_vec();
        bytes.extend(u32::MAX.to_le_bytes());
        bytes.extend([0; 8]);
        let mut decoder = Decoder::new();
        decoder.push(&bytes);
        let found = decoder.next_frame();
        assert_eq!(found, Err(FrameError::TooLong { bytes: u32::MAX }));
        assert!(
            decoder.bytes.capacity() < 1000,
            "nothing is allocated for it"
        );
    }

    #[test]
    fn another_beginning_is_found_at_its_first_wrong_byte() {
        for bad in ["x", "PTNATIVF", "[{}]", " PTNATIVE"] {
            let mut decoder = Decoder::new();
            decoder.push(bad.as_bytes());
            assert_eq!(decoder.next_frame(), Err(FrameError::Magic), "{bad}");
        }
        let mut decoder = Decoder::new();
        decoder.push(b"PTNAT");
        assert_eq!(decoder.next_frame(), Ok(None));
    }

    /// The server takes frames again and again as long as there is one: an error that is announced and does
    /// not come would keep it busy.
    #[test]
    fn what_is_announced_comes_after_every_byte() {
        let header = |length: u32, flags: u16| {
            let mut bytes = MAGIC.to_vec();
            bytes.extend(length.to_le_bytes());
            bytes.extend(4_u16.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend([0; 4]);
            bytes
        };
        let longest = u32::try_from(MAX_PAYLOAD_BYTES).unwrap();
        for bytes in [
            header(longest + 1, 0),
            header(u32::MAX, 1),
            header(longest, 0),
            header(9, 8),
            header(0, 1),
            b"PTNATIVF".to_vec(),
        ] {
            let mut decoder = Decoder::new();
            for (at, byte) in bytes.iter().enumerate() {
                decoder.push(&[*byte]);
                let is_announced = decoder.has_frame();
                let next = decoder.next_frame();
                assert_eq!(is_announced, next != Ok(None), "{at}: {bytes:x?}");
            }
        }
    }

    #[test]
    fn unknown_flags_are_refused() {
        let mut bad = frame(1, b"");
        bad.flags = 4;
        let mut decoder = Decoder::new();
        decoder.push(&bytes_of(&[bad]));
        assert_eq!(decoder.next_frame(), Err(FrameError::Flags { flags: 4 }));
    }

    proptest! {
        #[test]
        fn frames_survive_any_division(
            payloads in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..50), 0..8),
            step in 1_usize..40,
        ) {
            let frames: Vec<Frame> = payloads.iter().map(|payload| frame(3, payload)).collect();
            let mut decoder = Decoder::new();
            let mut found = Vec::new();
            for part in bytes_of(&frames).chunks(step) {
                decoder.push(part);
                let has_frame = decoder.has_frame();
                let before = found.len();
                while let Some(frame) = decoder.next_frame().unwrap() {
                    found.push(frame);
                }
                prop_assert_eq!(has_frame, found.len() > before);
            }
            prop_assert_eq!(found, frames);
            prop_assert_eq!(decoder.buffered(), 0);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let mut decoder = Decoder::new();
            decoder.push(&MAGIC);
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.next_frame() {}
        }
    }
}
