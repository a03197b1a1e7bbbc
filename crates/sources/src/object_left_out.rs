//! Objects of stores in a program that was built without the feature `objects`: each is refused with the reason.

#[path = "object/counters.rs"]
mod counters;
#[path = "object/options.rs"]
mod options;
#[path = "object/parts.rs"]
mod parts;

use std::convert::Infallible;
use std::io;

use pagetide_memory::Urgency;
use thiserror::Error;

use crate::blob::{Blob, BlobError};
use crate::cache::CacheOptions;
use crate::standing::Standing;
use crate::upload::UploadError;
pub use counters::ObjectCounters;
pub use options::{ObjectOptions, ObjectOptionsError, OpenObjectError};
pub(crate) use parts::{decoded, shown};

/// This program has no clients of stores.
#[derive(Debug, Error)]
#[error(
    "this program was built without the feature `objects`, which reads and writes objects of stores"
)]
struct LeftOut;

/// An object of a store. No value of it exists in this program.
#[derive(Debug)]
pub struct ObjectBlob(Infallible);

impl ObjectBlob {
    /// Refuses the object.
    ///
    /// # Errors
    /// Always.
    pub fn open(
        url: &str,
        options: &ObjectOptions,
        _: Option<&CacheOptions>,
    ) -> Result<Self, OpenObjectError> {
        options.check()?;
        // Another attempt has the same end: InvalidInput is a refusal.
        let refused = io::Error::new(io::ErrorKind::InvalidInput, LeftOut);
        Err(BlobError::io(shown(url), refused).into())
    }
}

/// An object that is to be. No value of it exists in this program.
#[derive(Debug)]
pub(crate) struct Upload(Infallible);

impl Upload {
    /// Refuses the object.
    pub(crate) fn begin(url: &str, _: &ObjectOptions, _: bool) -> Result<Self, UploadError> {
        let name = shown(url);
        let source = LeftOut.into();
        Err(UploadError::Refused { name, source })
    }

    pub(crate) fn check_bytes(&self, _: u64) -> Result<(), UploadError> {
        match self.0 {}
    }

    pub(crate) fn put(
        &self,
        _: &std::fs::File,
        _: u64,
        _: &mut dyn FnMut(u64, u64),
    ) -> Result<(), UploadError> {
        match self.0 {}
    }
}

impl Blob for ObjectBlob {
    fn name(&self) -> &str {
        match self.0 {}
    }

    fn bytes(&self) -> u64 {
        match self.0 {}
    }

    fn read_at(&self, _: u64, _: &mut [u8], _: Urgency) -> Result<(), BlobError> {
        match self.0 {}
    }

    fn standing(&self) -> Result<Standing, BlobError> {
        match self.0 {}
    }

    fn check_unchanged_now(&self) -> Result<(), BlobError> {
        match self.0 {}
    }

    fn check_unchanged_lately(&self) -> Result<(), BlobError> {
        match self.0 {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{OpenError, OpenOptions, open};

    #[test]
    fn an_object_is_refused_with_the_feature_that_reads_it() {
        let location = "https://user:secret@host/a.mem".parse().unwrap();
        let error = open(&location, &OpenOptions::default()).unwrap_err();
        assert!(error.is_refusal(), "{error:?}");
        assert_eq!(error.to_string(), "reading https://host/a.mem");
        let OpenError::Blob(BlobError::Failed { source, .. }) = error else {
            unreachable!("{error:?}");
        };
        assert!(source.to_string().contains("feature `objects`"), "{source}");
    }
}
