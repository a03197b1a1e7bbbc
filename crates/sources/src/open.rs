//! Opening an image by its location.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;

use crate::blob::{Blob, BlobError};
use crate::file::FileBlob;
use crate::guest_image::GuestImage;
use crate::raw::RawImage;

/// The schemes of URLs that name an object.
const SCHEMES: [&str; 5] = ["s3", "gs", "az", "http", "https"];

/// Where an image is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    /// A local file.
    Path(PathBuf),
    /// An object: `s3://BUCKET/KEY`, `gs://BUCKET/KEY`, `az://CONTAINER/KEY`, `http(s)://HOST/PATH`.
    Url(String),
}

/// A location that is neither a path nor a URL of a known scheme.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ParseLocationError {
    /// An unknown scheme.
    #[error(
        "{text:?}: no image can be read from {scheme}://; use a path, file://, s3://, gs://, az://, http:// or https://"
    )]
    Scheme {
        /// The whole location.
        text: String,
        /// Its scheme.
        scheme: String,
    },
    /// No path, or no host.
    #[error("{text:?} names no image")]
    Empty {
        /// The location.
        text: String,
    },
}

impl FromStr for Location {
    type Err = ParseLocationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let empty = || ParseLocationError::Empty { text: text.into() };
        let Some((scheme, rest)) = text.split_once("://") else {
            return match text {
                "" => Err(empty()),
                path => Ok(Self::Path(path.into())),
            };
        };
        match scheme {
            _ if rest.is_empty() => Err(empty()),
            "file" => Ok(Self::Path(rest.into())),
            _ if SCHEMES.contains(&scheme) => Ok(Self::Url(text.into())),
            _ => Err(ParseLocationError::Scheme {
                text: text.into(),
                scheme: scheme.into(),
            }),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Url(url) => f.write_str(url),
        }
    }
}

impl Location {
    /// The path of a local file.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Path(path) => Some(path),
            Self::Url(_) => None,
        }
    }
}

/// How images are opened.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {}

/// Why an image could not be opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The file or object could not be read.
    #[error(transparent)]
    Blob(#[from] BlobError),
}

/// Opens the image at `location`.
///
/// # Errors
/// [`OpenError`].
pub fn open(location: &Location, _options: &OpenOptions) -> Result<Arc<dyn GuestImage>, OpenError> {
    let blob = open_blob(location)?;
    Ok(Arc::new(RawImage::new(blob)?))
}

fn open_blob(location: &Location) -> Result<Arc<dyn Blob>, OpenError> {
    match location {
        Location::Path(path) => Ok(Arc::new(FileBlob::open(path)?)),
        Location::Url(url) => Err(BlobError::NotFound { name: url.clone() }.into()),
    }
}
