//! Bytes of a fixed length that can be read at any offset: a file, or an object in a store.

use std::fmt;
use std::io;
use std::ops::Range;

use pagetide_memory::{HostRange, Urgency};
use thiserror::Error;

use crate::file::FileIdentity;
use crate::object::ObjectCounters;
use crate::standing::Standing;

/// Why bytes could not be read.
#[derive(Debug, Error)]
pub enum BlobError {
    /// There is no such file or object.
    #[error("{name} does not exist")]
    NotFound {
        /// The file or object.
        name: String,
    },
    /// Access was refused.
    #[error("access to {name} was refused")]
    Forbidden {
        /// The file or object.
        name: String,
        /// The store's or the kernel's error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A read beyond the end.
    #[error("{name} has {bytes} bytes, and bytes {}..{} were requested", range.start, range.end)]
    Outside {
        /// The file or object.
        name: String,
        /// Its length.
        bytes: u64,
        /// The requested bytes.
        range: Range<u64>,
    },
    /// The read ended early: the file was truncated, or the store sent too little.
    #[error("{name} delivered {given} of {wanted} bytes at offset {offset}")]
    Short {
        /// The file or object.
        name: String,
        /// The offset of the read.
        offset: u64,
        /// Delivered bytes.
        given: u64,
        /// Requested bytes.
        wanted: u64,
    },
    /// The object was replaced after it was opened.
    #[error("{name} has changed since it was opened")]
    Changed {
        /// The file or object.
        name: String,
    },
    /// The store did not answer in time.
    #[error("{name} did not answer within {limit_ms} ms")]
    Late {
        /// The object.
        name: String,
        /// The time limit.
        limit_ms: u64,
    },
    /// Any other failure of the store.
    #[error("reading {name}")]
    Failed {
        /// The file or object.
        name: String,
        /// The store's or the kernel's error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl BlobError {
    /// Sorts an error of the kernel.
    pub(crate) fn io(name: String, error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::NotFound { name },
            io::ErrorKind::PermissionDenied => {
                let source = Box::new(error);
                Self::Forbidden { name, source }
            }
            _ => {
                let source = Box::new(error);
                Self::Failed { name, source }
            }
        }
    }

    /// Whether another attempt cannot succeed either.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::NotFound { .. }
            | Self::Forbidden { .. }
            | Self::Outside { .. }
            | Self::Changed { .. } => true,
            Self::Short { .. } | Self::Late { .. } | Self::Failed { .. } => false,
        }
    }

    /// All that [`Self::kind`] returns.
    pub const KINDS: [&'static str; 7] = [
        "not_found",
        "forbidden",
        "outside",
        "short",
        "changed",
        "late",
        "failed",
    ];

    /// A short name for metrics: what kind of failure it was.
    pub fn kind(&self) -> &'static str {
        let [not_found, forbidden, outside, short, changed, late, failed] = Self::KINDS;
        match self {
            Self::NotFound { .. } => not_found,
            Self::Forbidden { .. } => forbidden,
            Self::Outside { .. } => outside,
            Self::Short { .. } => short,
            Self::Changed { .. } => changed,
            Self::Late { .. } => late,
            Self::Failed { .. } => failed,
        }
    }
}

/// Waits for the answer to [`Blob::ask_standing`].
pub type AskedStanding<'a> = Box<dyn FnOnce() -> Result<Standing, BlobError> + 'a>;

/// Bytes of a fixed length that can be read at any offset, from any thread.
pub trait Blob: Send + Sync + fmt::Debug {
    /// Its name for messages: a path or a URL, without credentials.
    fn name(&self) -> &str;

    /// Its length when it was opened.
    fn bytes(&self) -> u64;

    /// Fills `buffer` with the bytes from `offset` on. May wait. Urgent reads, for which a guest waits,
    /// precede bulk reads.
    ///
    /// # Errors
    /// [`BlobError`]; the buffer's content is then undefined.
    fn read_at(&self, offset: u64, buffer: &mut [u8], urgency: Urgency) -> Result<(), BlobError>;

    /// Fills `buffer` if that needs no waiting; false otherwise, and after an error.
    fn read_now(&self, offset: u64, buffer: &mut [u8]) -> bool {
        let _ = (offset, buffer);
        false
    }

    /// The addresses of `bytes` bytes from `offset` on, if they are mapped in this process and reading
    /// them needs no waiting. They stay mapped as long as the blob. Only the kernel may read there: another
    /// process may truncate the file.
    fn mapped(&self, offset: u64, bytes: u64) -> Option<HostRange> {
        let _ = (offset, bytes);
        None
    }

    /// The ranges that contain data, in ascending order; everything else reads as zeroes.
    ///
    /// # Errors
    /// [`BlobError`].
    fn data(&self) -> Result<Vec<Range<u64>>, BlobError> {
        let all = std::iter::once(0..self.bytes());
        Ok(all.filter(|range| !range.is_empty()).collect())
    }

    /// What tells whether a file of the same name is still this one; `None` if it is no file.
    fn file_identity(&self) -> Option<FileIdentity> {
        None
    }

    /// What its name leads to now. May wait, for a store's answer.
    ///
    /// # Errors
    /// [`BlobError`]: that what has the name cannot be told.
    fn standing(&self) -> Result<Standing, BlobError>;

    /// Asks for [`standing`](Self::standing), and returns what waits for the answer: several stores are asked at once. A file
    /// is looked at when that is called.
    fn ask_standing(&self) -> AskedStanding<'_> {
        Box::new(|| self.standing())
    }

    /// Checks that the content is still what it was when this was opened. A store's object needs no check: each
    /// answer has its version.
    ///
    /// # Errors
    /// [`BlobError::Changed`], or why that cannot be told.
    fn check_unchanged_now(&self) -> Result<(), BlobError>;

    /// The same, a short time ago at most: enough to say of a range that it was a hole, and too little to give out
    /// what was read.
    ///
    /// # Errors
    /// As [`check_unchanged_now`](Self::check_unchanged_now).
    fn check_unchanged_lately(&self) -> Result<(), BlobError>;

    /// The permissions of its file, if it is one.
    fn mode(&self) -> Option<u32> {
        None
    }

    /// Text that changes when the content is replaced, if the store has one (an ETag).
    fn version(&self) -> Option<&str> {
        None
    }

    /// Text that changes with most replacements of the content, if there is no version: a weak ETag, a date. Equal texts
    /// prove nothing.
    fn weak_version(&self) -> Option<String> {
        None
    }

    /// What reading has cost so far, if it is an object of a store.
    fn counters(&self) -> Option<ObjectCounters> {
        None
    }
}
