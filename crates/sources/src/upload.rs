//! Why a URL has no new object.

use std::error::Error;

use thiserror::Error;

/// Why a URL has no new object. What was there before is still there, unless the store has not answered.
#[derive(Debug, Error)]
pub enum UploadError {
    /// There is an object, and it may not be replaced.
    #[error("{name} exists")]
    Exists {
        /// The URL, without credentials.
        name: String,
    },
    /// No object can be put there.
    #[error("nothing can be written to {name}")]
    Refused {
        /// The URL, without credentials.
        name: String,
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The object was not put there, or the store does not say so.
    #[error("cannot write {name}")]
    Failed {
        /// The URL, without credentials.
        name: String,
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
}

impl UploadError {
    /// Whether the request made no sense, so that nothing was tried.
    pub fn is_refusal(&self) -> bool {
        !matches!(self, Self::Failed { .. })
    }
}
