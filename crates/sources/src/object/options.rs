//! How objects are read, and how often.

use std::ops::RangeInclusive;
use std::time::Duration;

use thiserror::Error;

use crate::blob::BlobError;
use crate::cache::CacheError;

/// The sizes of a block that are accepted, in bytes.
const BLOCK_BYTES: RangeInclusive<usize> = 4 << 10..=16 << 20;

/// How an object is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectOptions {
    /// The unit of reading and caching, in bytes: a power of two from 4 KiB to 16 MiB.
    pub block_bytes: usize,
    /// The maximal number of bytes that one GET requests. At least one block is requested.
    pub get_bytes: usize,
    /// The bound of the blocks that are kept in memory, in bytes. 0 keeps none.
    pub memory_bytes: usize,
    /// The maximal number of GETs in flight, hedges included.
    pub gets: usize,
    /// The maximal number of GETs in flight for bulk reads. Less than `gets`.
    pub bulk_gets: usize,
    /// How often a GET is tried before the read fails. At least 1.
    pub attempts: u32,
    /// The time limit of one attempt, from the request to the last byte of the body.
    pub limit: Duration,
    /// The shortest and the longest silence of a server after which a second GET is sent.
    pub hedge_after: RangeInclusive<Duration>,
}

impl Default for ObjectOptions {
    fn default() -> Self {
        Self {
            block_bytes: 256 << 10,
            get_bytes: 4 << 20,
            memory_bytes: 32 << 20,
            gets: 16,
            bulk_gets: 8,
            attempts: 4,
            limit: Duration::from_secs(5),
            hedge_after: Duration::from_millis(20)..=Duration::from_secs(1),
        }
    }
}

/// Options that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ObjectOptionsError {
    /// The size of a block.
    #[error("a block has a power of two of bytes from 4 KiB to 16 MiB, not {bytes} bytes")]
    BlockBytes {
        /// The given size.
        bytes: usize,
    },
    /// The numbers of requests.
    #[error(
        "of {gets} concurrent requests, {bulk_gets} cannot be bulk: at least one of each is necessary"
    )]
    Gets {
        /// The given number of GETs.
        gets: usize,
        /// The given number of GETs for bulk reads.
        bulk_gets: usize,
    },
}

/// Why an object could not be opened.
#[derive(Debug, Error)]
pub enum OpenObjectError {
    /// The object could not be read.
    #[error(transparent)]
    Blob(#[from] BlobError),
    /// The disk cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The options cannot be used.
    #[error(transparent)]
    Options(#[from] ObjectOptionsError),
}

impl ObjectOptions {
    /// Checks the options.
    ///
    /// # Errors
    /// [`ObjectOptionsError`].
    pub(crate) fn check(&self) -> Result<(), ObjectOptionsError> {
        let &Self {
            block_bytes: bytes,
            gets,
            bulk_gets,
            ..
        } = self;
        if !bytes.is_power_of_two() || !BLOCK_BYTES.contains(&bytes) {
            return Err(ObjectOptionsError::BlockBytes { bytes });
        }
        if bulk_gets == 0 || bulk_gets >= gets {
            return Err(ObjectOptionsError::Gets { gets, bulk_gets });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_numbers_that_cannot_be_used_are_refused() {
        assert_eq!(ObjectOptions::default().check(), Ok(()));
        for block_bytes in [0, 1, 4095, 5000, 32 << 20] {
            let options = ObjectOptions {
                block_bytes,
                ..ObjectOptions::default()
            };
            let refused = ObjectOptionsError::BlockBytes { bytes: block_bytes };
            assert_eq!(options.check(), Err(refused));
        }
        for (gets, bulk_gets) in [(0, 0), (1, 1), (4, 0), (4, 5)] {
            let options = ObjectOptions {
                gets,
                bulk_gets,
                ..ObjectOptions::default()
            };
            let refused = ObjectOptionsError::Gets { gets, bulk_gets };
            assert_eq!(options.check(), Err(refused));
        }
    }
}
