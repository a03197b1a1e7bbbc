//! Address ranges in the form that the kernel's ioctls take.

use std::fmt;

use crate::generated as abi;

/// A range of this process's address space. Not checked here: the kernel requires page alignment and at
/// least one page.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct UserRange {
    /// Address of its first byte.
    pub start: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

impl UserRange {
    pub(super) fn to_abi(self) -> abi::uffdio_range {
        abi::uffdio_range {
            start: self.start,
            len: self.bytes,
        }
    }
}

impl fmt::Display for UserRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{:#x}", self.start, self.bytes)
    }
}

impl fmt::Debug for UserRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hva({self})")
    }
}
