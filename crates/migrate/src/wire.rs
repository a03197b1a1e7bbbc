//! Fields as bytes: little-endian, in order, without padding.

use thiserror::Error;

/// The longest text.
pub const MAX_TEXT_BYTES: usize = 1024;

/// Why bytes are not what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The bytes end within a field.
    #[error("the bytes end within a field")]
    Short,
    /// Bytes are left behind the last field.
    #[error("{bytes} bytes are left behind the last field")]
    Long {
        /// Their number.
        bytes: usize,
    },
    /// A field has a value that it may not have.
    #[error("{field} has a value that is not allowed")]
    Field {
        /// The field.
        field: &'static str,
    },
    /// A message of a type that this version does not know.
    #[error("a message of the unknown type {kind:#x}")]
    Unknown {
        /// The type.
        kind: u16,
    },
}

/// Appends fields.
#[derive(Debug, Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn byte(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn short(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }

    pub(crate) fn word(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub(crate) fn long(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    /// Text; what is longer than the limit is cut.
    pub(crate) fn text(&mut self, text: &str) {
        let mut end = text.len().min(MAX_TEXT_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.short(u16::try_from(end).unwrap_or(0));
        self.bytes(text.as_bytes().get(..end).unwrap_or_default());
    }
}

/// Takes fields.
#[derive(Debug)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn array<const BYTES: usize>(&mut self) -> Result<[u8; BYTES], DecodeError> {
        let (chunk, rest) = self.0.split_first_chunk().ok_or(DecodeError::Short)?;
        self.0 = rest;
        Ok(*chunk)
    }

    pub(crate) fn byte(&mut self) -> Result<u8, DecodeError> {
        let [byte] = self.array()?;
        Ok(byte)
    }

    pub(crate) fn short(&mut self) -> Result<u16, DecodeError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn word(&mut self) -> Result<u32, DecodeError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn long(&mut self) -> Result<u64, DecodeError> {
        self.array().map(u64::from_le_bytes)
    }

    /// `BYTES` bytes that must be 0.
    pub(crate) fn zeros<const BYTES: usize>(&mut self) -> Result<(), DecodeError> {
        match self.array::<BYTES>()? {
            bytes if bytes == [0; BYTES] => Ok(()),
            _ => Err(DecodeError::Field { field: "reserved" }),
        }
    }

    pub(crate) fn text(&mut self) -> Result<String, DecodeError> {
        let bytes = usize::from(self.short()?);
        let error = DecodeError::Field { field: "text" };
        if bytes > MAX_TEXT_BYTES {
            return Err(error);
        }
        let (text, rest) = self.0.split_at_checked(bytes).ok_or(DecodeError::Short)?;
        self.0 = rest;
        Ok(std::str::from_utf8(text).map_err(|_| error)?.to_owned())
    }

    /// Everything that is left.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    pub(crate) fn end(&self) -> Result<(), DecodeError> {
        match self.0 {
            [] => Ok(()),
            more => Err(DecodeError::Long { bytes: more.len() }),
        }
    }
}
