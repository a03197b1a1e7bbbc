//! The identity of an image.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A BLAKE3 digest of 256 bits, printed as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

/// A text that is no digest.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("a digest has 64 hexadecimal digits, and this is {text:?}")]
pub struct ParseDigestError {
    text: String,
}

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

impl From<blake3::Hash> for Digest {
    fn from(hash: blake3::Hash) -> Self {
        Self(*hash.as_bytes())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl FromStr for Digest {
    type Err = ParseDigestError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = blake3::Hash::from_hex(text);
        parsed.map(Self::from).map_err(|_| ParseDigestError {
            text: text.chars().take(80).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_parsed_from_its_own_text() {
        let digest = Digest::of(b"guest memory");
        assert_eq!(digest.to_string().parse(), Ok(digest));
        for bad in ["", "12", "g", &digest.to_string()[1..], "é"] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }
}
