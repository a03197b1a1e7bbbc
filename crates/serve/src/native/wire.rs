//! Fields of messages as bytes.

use super::message::{DecodeError, MAX_TEXT_BYTES};

/// Appends fields to a payload.
#[derive(Debug, Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn byte(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(super) fn short(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn word(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn long(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// Text; what is longer than the limit is cut.
    pub(super) fn text(&mut self, text: &str) {
        let mut end = text.len().min(MAX_TEXT_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.short(u16::try_from(end).unwrap_or(0));
        self.0
            .extend(text.as_bytes().get(..end).unwrap_or_default());
    }
}

/// Takes fields from a payload.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    fn chunk<const BYTES: usize>(&mut self) -> Result<[u8; BYTES], DecodeError> {
        let (chunk, rest) = self.0.split_first_chunk().ok_or(DecodeError::Short)?;
        self.0 = rest;
        Ok(*chunk)
    }

    pub(super) fn byte(&mut self) -> Result<u8, DecodeError> {
        let [byte] = self.chunk()?;
        Ok(byte)
    }

    pub(super) fn short(&mut self) -> Result<u16, DecodeError> {
        self.chunk().map(u16::from_le_bytes)
    }

    pub(super) fn word(&mut self) -> Result<u32, DecodeError> {
        self.chunk().map(u32::from_le_bytes)
    }

    pub(super) fn long(&mut self) -> Result<u64, DecodeError> {
        self.chunk().map(u64::from_le_bytes)
    }

    pub(super) fn digest(&mut self) -> Result<[u8; 32], DecodeError> {
        self.chunk()
    }

    /// A word that must be 0.
    pub(super) fn zero(&mut self) -> Result<(), DecodeError> {
        match self.word()? {
            0 => Ok(()),
            _ => Err(DecodeError::Field { field: "reserved" }),
        }
    }

    pub(super) fn text(&mut self) -> Result<String, DecodeError> {
        let bytes = usize::from(self.short()?);
        let bad = DecodeError::Field { field: "text" };
        if bytes > MAX_TEXT_BYTES {
            return Err(bad);
        }
        let (text, rest) = self.0.split_at_checked(bytes).ok_or(DecodeError::Short)?;
        self.0 = rest;
        let text = std::str::from_utf8(text).map_err(|_| bad)?;
        Ok(text.to_owned())
    }

    /// Everything that is left.
    pub(super) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    pub(super) fn end(&self) -> Result<(), DecodeError> {
        match self.0 {
            [] => Ok(()),
            more => Err(DecodeError::Long { bytes: more.len() }),
        }
    }
}
