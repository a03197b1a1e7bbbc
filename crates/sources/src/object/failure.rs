//! A failed request: sorted, shared by all readers of a block, and without secrets.

use std::sync::Arc;
use std::time::Duration;

use object_store::Error as StoreError;
use thiserror::Error;

use super::secrets::Secrets;
use crate::blob::BlobError;

/// What a store or its client reported, without credentials and query strings.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{text}")]
pub(crate) struct Report {
    text: Arc<str>,
}

impl Report {
    pub(crate) fn new(text: &str) -> Self {
        Self { text: text.into() }
    }
}

/// Why a request failed. Every reader that waited for it gets a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// As [`BlobError::NotFound`].
    NotFound,
    /// As [`BlobError::Forbidden`].
    Forbidden(Report),
    /// As [`BlobError::Changed`].
    Changed,
    /// As [`BlobError::Late`].
    Late(Duration),
    /// As [`BlobError::Short`].
    Short {
        /// The offset of the GET.
        offset: u64,
        /// Received bytes.
        given: u64,
        /// Requested bytes.
        wanted: u64,
    },
    /// A failure that another attempt may not see.
    Transient(Report),
    /// A failure that another attempt sees, too.
    Permanent(Report),
}

impl Failure {
    /// Whether another attempt may succeed.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Late(_) | Self::Short { .. } | Self::Transient(_) => true,
            Self::NotFound | Self::Forbidden(_) | Self::Changed | Self::Permanent(_) => false,
        }
    }

    /// The error of a read of the object called `name`.
    pub(crate) fn into_error(self, name: &str) -> BlobError {
        let name = name.to_owned();
        match self {
            Self::NotFound => BlobError::NotFound { name },
            Self::Forbidden(report) => {
                let source = Box::new(report);
                BlobError::Forbidden { name, source }
            }
            Self::Changed => BlobError::Changed { name },
            Self::Late(limit) => BlobError::Late {
                name,
                limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
            },
            Self::Short {
                offset,
                given,
                wanted,
            } => BlobError::Short {
                name,
                offset,
                given,
                wanted,
            },
            Self::Transient(report) | Self::Permanent(report) => {
                let source = Box::new(report);
                BlobError::Failed { name, source }
            }
        }
    }

    /// Sorts an error of the store. `status` is the HTTP status of the answer, 0 without one.
    pub(crate) fn sort(error: &StoreError, status: u16, secrets: &Secrets) -> Self {
        let report = secrets.report(&with_causes(error));
        match (error, status) {
            // An answer of another status does not say that there is nothing, whatever the client makes of it.
            (StoreError::NotFound { .. }, 0) | (_, 404 | 410) => Self::NotFound,
            (StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. }, _)
            | (_, 401 | 403) => Self::Forbidden(report),
            // 416: the object ends before the range, and it did not when it was opened.
            (StoreError::Precondition { .. }, _) | (_, 412 | 416) => Self::Changed,
            (_, 408 | 429) => Self::Transient(report),
            (_, 400..=499) | (StoreError::NotSupported { .. }, _) => Self::Permanent(report),
            _ => Self::Transient(report),
        }
    }
}

/// An error's text, and that of each cause that the text before it does not have.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let of_cause = cause.to_string();
        if !text.contains(&of_cause) {
            text.push_str(": ");
            text.push_str(&of_cause);
        }
        next = cause.source();
    }
    text
}
