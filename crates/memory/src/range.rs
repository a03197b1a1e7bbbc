//! Checked ranges of addresses.

use std::fmt;

use pagetide_uapi::userfaultfd::UserRange;
use thiserror::Error;

use crate::address::{GuestAddress, HostAddress};
use crate::convert::to_u64;
use crate::page::PageSize;

/// Why a range of addresses was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RangeError {
    /// The range has no bytes.
    #[error("the range at {start:#x} is empty")]
    Empty {
        /// The start of the range.
        start: u64,
    },
    /// Start or length is not a multiple of the page size.
    #[error("the range at {start:#x} of {bytes} bytes does not consist of whole {page_size} pages")]
    Unaligned {
        /// The start of the range.
        start: u64,
        /// Its length in bytes.
        bytes: u64,
        /// The page size of which both must be multiples.
        page_size: PageSize,
    },
    /// The end lies beyond the end of the address space.
    #[error("the range at {start:#x} of {bytes} bytes wraps around the address space")]
    Wraps {
        /// The start of the range.
        start: u64,
        /// Its length in bytes.
        bytes: u64,
    },
}

const fn check(start: u64, bytes: u64, page_size: PageSize) -> Result<(), RangeError> {
    if bytes == 0 {
        return Err(RangeError::Empty { start });
    }
    if !page_size.divides(start) || !page_size.divides(bytes) {
        return Err(RangeError::Unaligned {
            start,
            bytes,
            page_size,
        });
    }
    if start.checked_add(bytes).is_none() {
        return Err(RangeError::Wraps { start, bytes });
    }
    Ok(())
}

/// A range of guest physical memory: not empty, 4 KiB aligned, without overflow.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct GuestRange {
    start: GuestAddress,
    bytes: u64,
}

impl GuestRange {
    /// `bytes` bytes from `start` on, both multiples of 4 KiB.
    pub const fn new(start: GuestAddress, bytes: u64) -> Result<Self, RangeError> {
        Self::aligned(start, bytes, PageSize::Size4K)
    }

    /// `bytes` bytes from `start` on, both multiples of `page_size`.
    pub const fn aligned(
        start: GuestAddress,
        bytes: u64,
        page_size: PageSize,
    ) -> Result<Self, RangeError> {
        match check(start.0, bytes, page_size) {
            Ok(()) => Ok(Self { start, bytes }),
            Err(error) => Err(error),
        }
    }

    /// Its first byte.
    pub const fn start(self) -> GuestAddress {
        self.start
    }

    /// Its length in bytes.
    pub const fn bytes(self) -> u64 {
        self.bytes
    }

    /// The byte after its last one.
    pub const fn end(self) -> GuestAddress {
        GuestAddress(self.start.0 + self.bytes)
    }

    /// Whether `address` lies in the range.
    pub const fn contains(self, address: GuestAddress) -> bool {
        address.0 >= self.start.0 && address.0 - self.start.0 < self.bytes
    }

    /// Whether the two ranges share a byte.
    pub const fn overlaps(self, other: Self) -> bool {
        self.start.0 < other.end().0 && other.start.0 < self.end().0
    }
}

/// A range of this process's address space: not empty, 4 KiB aligned, without overflow.
///
/// The value proves nothing about what is mapped there.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostRange {
    start: HostAddress,
    bytes: usize,
}

impl HostRange {
    /// `bytes` bytes from `start` on, both multiples of 4 KiB.
    pub const fn new(start: HostAddress, bytes: usize) -> Result<Self, RangeError> {
        match check(start.as_u64(), to_u64(bytes), PageSize::Size4K) {
            Ok(()) => Ok(Self { start, bytes }),
            Err(error) => Err(error),
        }
    }

    /// A range that is valid by the caller's knowledge, such as a part of another.
    pub(crate) const fn trusted(start: HostAddress, bytes: usize) -> Self {
        Self { start, bytes }
    }

    /// Its first byte.
    pub const fn start(self) -> HostAddress {
        self.start
    }

    /// Its length in bytes.
    pub const fn bytes(self) -> usize {
        self.bytes
    }

    /// The byte after its last one.
    pub const fn end(self) -> HostAddress {
        HostAddress(self.start.0 + self.bytes)
    }

    /// Whether `address` lies in the range.
    pub const fn contains(self, address: HostAddress) -> bool {
        address.0 >= self.start.0 && address.0 - self.start.0 < self.bytes
    }

    /// The rest of the range after its first `bytes` bytes (a multiple of 4 KiB); `None` if that is
    /// empty.
    pub const fn after(self, bytes: usize) -> Option<Self> {
        if bytes >= self.bytes {
            return None;
        }
        match self.start.checked_add(bytes) {
            Some(start) => Some(Self {
                start,
                bytes: self.bytes - bytes,
            }),
            None => None,
        }
    }
}

impl From<HostRange> for UserRange {
    fn from(range: HostRange) -> Self {
        Self {
            start: range.start.as_u64(),
            bytes: to_u64(range.bytes),
        }
    }
}

macro_rules! prints_as_interval {
    ($($type:ty),*) => {$(
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}..{}", self.start(), self.end())
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}..{:?}", self.start(), self.end())
            }
        }
    )*};
}

prints_as_interval!(GuestRange, HostRange);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_ranges_are_refused() {
        let cases = [
            (0x1000, 0, RangeError::Empty { start: 0x1000 }),
            (
                0x1001,
                0x1000,
                RangeError::Unaligned {
                    start: 0x1001,
                    bytes: 0x1000,
                    page_size: PageSize::Size4K,
                },
            ),
            (
                0x1000,
                0x1800,
                RangeError::Unaligned {
                    start: 0x1000,
                    bytes: 0x1800,
                    page_size: PageSize::Size4K,
                },
            ),
            (
                u64::MAX - 0xfff,
                0x1000,
                RangeError::Wraps {
                    start: u64::MAX - 0xfff,
                    bytes: 0x1000,
                },
            ),
        ];
        for (start, bytes, expected) in cases {
            assert_eq!(GuestRange::new(GuestAddress(start), bytes), Err(expected));
        }
    }

    #[test]
    fn overlap_needs_a_shared_byte() {
        let range = |start, bytes| GuestRange::new(GuestAddress(start), bytes).unwrap();
        assert!(range(0, 0x2000).overlaps(range(0x1000, 0x1000)));
        assert!(!range(0, 0x1000).overlaps(range(0x1000, 0x1000)));
    }

    #[test]
    fn the_rest_of_a_range() {
        let range = HostRange::new(HostAddress(0x1000), 0x3000).unwrap();
        assert_eq!(
            range.after(0x1000),
            HostRange::new(HostAddress(0x2000), 0x2000).ok()
        );
        assert_eq!(range.after(0x3000), None);
    }
}
