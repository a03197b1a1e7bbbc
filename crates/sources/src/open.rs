//! Opening an image by its location.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;

use crate::blob::{Blob, BlobError};
use crate::cache::{CacheError, CacheOptions};
use crate::digest::Digest;
use crate::file::FileBlob;
use crate::foreign::NotMemory;
use crate::guest_image::GuestImage;
use crate::image::{FormatError, Head, MOST_LAYERS, PagetideImage};
use crate::mapped_ram::MappedRamError;
use crate::object::{
    ObjectBlob, ObjectOptions, ObjectOptionsError, OpenObjectError, decoded, shown,
};
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
        /// The location, without credentials and query strings.
        text: String,
        /// Its scheme.
        scheme: String,
    },
    /// A URL of a file that names no file of this machine.
    #[error(
        "{text:?}: a URL of a file has an absolute path after file://, with %3F for ? and %23 for #, and no host but localhost"
    )]
    File {
        /// The whole location.
        text: String,
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
            "file" => match local_file(text) {
                Some(path) => Ok(Self::Path(path)),
                None => Err(ParseLocationError::File { text: text.into() }),
            },
            _ if SCHEMES.contains(&scheme) => Ok(Self::Url(text.into())),
            _ => Err(ParseLocationError::Scheme {
                text: shown(text),
                scheme: scheme.into(),
            }),
        }
    }
}

/// The path that a `file://` URL names, if it is one of this machine.
fn local_file(text: &str) -> Option<PathBuf> {
    let rest = text.strip_prefix("file://")?;
    let path = rest.strip_prefix("localhost").unwrap_or(rest);
    // An unescaped ? or # is more likely a part of the file's name than anything else, and would be cut off.
    if !path.starts_with('/') || path.contains(['?', '#']) {
        return None;
    }
    let bytes = decoded(path)?;
    (!bytes.contains(&0)).then(|| OsString::from_vec(bytes).into())
}

/// Without credentials and query strings.
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Url(url) => f.write_str(&shown(url)),
        }
    }
}

impl From<PathBuf> for Location {
    fn from(path: PathBuf) -> Self {
        Self::Path(path)
    }
}

impl Location {
    /// The location as it was given, a URL with its credentials.
    pub fn as_given(&self) -> std::borrow::Cow<'_, str> {
        match self {
            Self::Path(path) => path.to_string_lossy(),
            Self::Url(url) => url.into(),
        }
    }

    /// The path of a local file.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Path(path) => Some(path),
            Self::Url(_) => None,
        }
    }
}

/// Bytes of decompressed chunks that an image keeps, unless the caller says otherwise.
pub const DEFAULT_CACHE_BYTES: usize = 32 << 20;

/// Bytes of the indexes of an image and its layers, unless the caller says otherwise: those of about 300 GiB of guest
/// memory in chunks of 64K without a zero chunk.
pub const DEFAULT_INDEX_BYTES: u64 = 256 << 20;

/// Where the base of an image may be. An image names its base, and whoever opens it reads there with rights that
/// the image's author may not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bases {
    /// In the folder of the image that names it.
    #[default]
    Beside,
    /// Anywhere: at any path and any URL.
    Anywhere,
}

/// How images are opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Bytes of decompressed chunks that a Pagetide image keeps for all its users; 0 keeps none.
    pub cache_bytes: usize,
    /// How objects of a store are read.
    pub object: ObjectOptions,
    /// Where blocks of objects are cached on disk; `None` for nowhere. Local files are never cached.
    pub cache: Option<CacheOptions>,
    /// Where bases may be.
    pub bases: Bases,
    /// The most bytes that the indexes of an image and its layers have together. While one is read, memory has it
    /// twice.
    pub index_bytes: u64,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            cache_bytes: DEFAULT_CACHE_BYTES,
            object: ObjectOptions::default(),
            cache: None,
            bases: Bases::default(),
            index_bytes: DEFAULT_INDEX_BYTES,
        }
    }
}

/// Why an image could not be opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The file or object could not be read.
    #[error(transparent)]
    Blob(#[from] BlobError),
    /// It is no Pagetide image that this program reads.
    #[error("cannot use {name}")]
    Format {
        /// The file or object.
        name: String,
        /// What is wrong.
        #[source]
        source: FormatError,
    },
    /// An image below the image cannot be opened.
    #[error("cannot open {base}, the base of {image}")]
    Base {
        /// The image.
        image: String,
        /// Its base.
        base: String,
        /// Why.
        #[source]
        source: Box<OpenError>,
    },
    /// The base is not the one that the image was made with.
    #[error(
        "{base} is not the base that {image} was made with: its digest is {found}, and the image names {wanted}"
    )]
    BaseChanged {
        /// The image.
        image: String,
        /// Its base.
        base: String,
        /// The digest that the image names.
        wanted: Digest,
        /// The base's digest.
        found: Digest,
    },
    /// It has no memory in QEMU's format mapped-ram.
    #[error("cannot take the memory out of {name}")]
    MappedRam {
        /// The file or object.
        name: String,
        /// Why.
        #[source]
        source: MappedRamError,
    },
    /// It is neither a Pagetide image nor guest memory.
    #[error("{name} is no guest memory")]
    NotMemory {
        /// The file or object.
        name: String,
        /// What it is.
        #[source]
        source: NotMemory,
    },
    /// The image names a base elsewhere than in its own folder.
    #[error(
        "{image} names {base} as its base, which is not in its own folder; if you trust the image, permit that (--bases anywhere)"
    )]
    BaseElsewhere {
        /// The image.
        image: String,
        /// Its base.
        base: String,
    },
    /// The indexes of the image and its layers are longer than the caller permits.
    #[error(
        "the index of {name} has {bytes} bytes, and all layers of an image may have {most} (--max-index)"
    )]
    LongIndex {
        /// The file or object.
        name: String,
        /// The length of its index.
        bytes: u64,
        /// The most for all layers.
        most: u64,
    },
    /// More layers than an image may have.
    #[error("{name} has more than {MOST_LAYERS} layers")]
    TooManyLayers {
        /// The file or object.
        name: String,
    },
    /// An image that is, through its base, its own base.
    #[error("{name} names as its base an image that is above it")]
    Cycle {
        /// The file or object.
        name: String,
    },
    /// The disk cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The options cannot be used.
    #[error(transparent)]
    Options(#[from] ObjectOptionsError),
}

impl From<OpenObjectError> for OpenError {
    fn from(error: OpenObjectError) -> Self {
        match error {
            OpenObjectError::Blob(error) => Self::Blob(error),
            OpenObjectError::Cache(error) => Self::Cache(error),
            OpenObjectError::Options(error) => Self::Options(error),
        }
    }
}

impl OpenError {
    /// Whether the location names no image, rather than one that is damaged or cannot be read now.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Blob(BlobError::NotFound { .. } | BlobError::Forbidden { .. }) => true,
            Self::Blob(BlobError::Failed { source, .. }) => {
                let kernels = source.downcast_ref::<std::io::Error>();
                kernels.is_some_and(|error| error.kind() == std::io::ErrorKind::InvalidInput)
            }
            Self::Format { source, .. } => !source.is_damage(),
            Self::Cache(_)
            | Self::Options(_)
            | Self::NotMemory { .. }
            | Self::MappedRam { .. }
            | Self::BaseElsewhere { .. }
            | Self::LongIndex { .. } => true,
            _ => false,
        }
    }
}

/// Opens the image at `location`: a Pagetide image, which its first bytes tell, or raw memory.
///
/// # Errors
/// [`OpenError`].
pub fn open(location: &Location, options: &OpenOptions) -> Result<Arc<dyn GuestImage>, OpenError> {
    let blob = open_blob(location, options)?;
    let head = Head::read(&*blob)?;
    if head.is_image() {
        let image = PagetideImage::with_head(blob, &head, location, options)?;
        return Ok(Arc::new(image));
    }
    Ok(Arc::new(RawImage::with_head(blob, &head)?))
}

/// Opens the file or object at `location`.
///
/// # Errors
/// [`OpenError::Blob`], [`OpenError::Cache`], [`OpenError::Options`].
pub(crate) fn open_blob(
    location: &Location,
    options: &OpenOptions,
) -> Result<Arc<dyn Blob>, OpenError> {
    match location {
        Location::Path(path) => Ok(Arc::new(FileBlob::open(path)?)),
        Location::Url(url) => {
            let blob = ObjectBlob::open(url, &options.object, options.cache.as_ref())?;
            Ok(Arc::new(blob))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_url_of_a_file_is_decoded() {
        for (text, path) in [
            ("/a b.mem", "/a b.mem"),
            ("a%20b.mem", "a%20b.mem"),
            ("file:///a.mem", "/a.mem"),
            ("file:///a%20b%3F.mem", "/a b?.mem"),
            ("file://localhost/a.mem", "/a.mem"),
        ] {
            assert_eq!(text.parse(), Ok(Location::Path(path.into())), "{text}");
        }
    }

    #[test]
    fn the_url_of_a_file_elsewhere_is_refused() {
        for text in [
            "file://host/a.mem",
            "file:///a?b.mem",
            "file:///a#b.mem",
            "file:///a%zz.mem",
            "file:///a%00.mem",
        ] {
            let file = ParseLocationError::File { text: text.into() };
            assert_eq!(text.parse::<Location>(), Err(file), "{text}");
        }
        assert!("file://".parse::<Location>().is_err());
    }
}
