//! How an image names its base.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::format::MOST_BASE_BYTES;
use crate::digest::Digest;
use crate::object::shown;
use crate::open::Location;

/// Where an image finds its base.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BasePlace {
    /// A file name, in the directory of the image or, for an image at a URL, beside it.
    Beside(OsString),
    /// An absolute path.
    Path(PathBuf),
    /// A URL.
    Url(String),
}

impl BasePlace {
    pub(super) fn encode(&self) -> (u32, &[u8]) {
        match self {
            Self::Beside(name) => (1, name.as_bytes()),
            Self::Path(path) => (2, path.as_os_str().as_bytes()),
            Self::Url(url) => (3, url.as_bytes()),
        }
    }

    /// Takes nothing that another kind would spell.
    pub(super) fn decode(kind: u32, bytes: &[u8]) -> Option<Self> {
        let name = || OsString::from_vec(bytes.to_vec());
        if bytes.is_empty() || bytes.contains(&0) {
            return None;
        }
        match kind {
            1 if !bytes.contains(&b'/') && bytes != b"." && bytes != b".." => {
                Some(Self::Beside(name()))
            }
            2 if bytes.starts_with(b"/") => Some(Self::Path(name().into())),
            3 => match std::str::from_utf8(bytes).ok()?.parse().ok()? {
                Location::Url(url) => Some(Self::Url(url)),
                Location::Path(_) => None,
            },
            _ => None,
        }
    }

    /// The place of a base at a URL.
    pub(super) fn of_url(url: &str, image: &Location) -> Self {
        let name = url.rsplit('/').next().unwrap_or_default();
        let beside = Self::Beside(name.into());
        // A query is no part of a name: it may be a signature, which messages leave out. In a store's key `?` is a letter.
        let has_query = url.starts_with("http") && name.contains('?');
        let is_name = !name.is_empty() && !has_query;
        let is_there = matches!(image, Location::Url(_)) && is_name;
        match is_there && beside.resolve(image) == Location::Url(url.to_owned()) {
            true => beside,
            false => Self::Url(url.to_owned()),
        }
    }

    /// The base's location, as the image at `image` names it.
    pub fn resolve(&self, image: &Location) -> Location {
        match (self, image) {
            (Self::Path(path), _) => Location::Path(path.clone()),
            (Self::Url(url), _) => Location::Url(url.clone()),
            (Self::Beside(name), Location::Path(path)) => {
                Location::Path(path.parent().unwrap_or(Path::new("")).join(name))
            }
            (Self::Beside(name), Location::Url(url)) => {
                Location::Url(beside(url, &name.to_string_lossy()))
            }
        }
    }
}

/// A URL without credentials and query string.
impl std::fmt::Display for BasePlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let path = match self {
            Self::Beside(name) => Path::new(name),
            Self::Path(path) => path,
            Self::Url(url) => return f.write_str(&shown(url)),
        };
        write!(f, "{}", path.display())
    }
}

/// The URL with its last segment replaced. A query, which HTTP has and a store's key does not, goes.
fn beside(url: &str, name: &str) -> String {
    let end = match url.starts_with("http") {
        true => url.find(['?', '#']).unwrap_or(url.len()),
        false => url.len(),
    };
    let begin = url.find("://").map_or(0, |at| at + 3);
    match url[begin..end].rfind('/') {
        Some(slash) => format!("{}/{name}", &url[..begin + slash]),
        None => format!("{}/{name}", &url[..end]),
    }
}

/// What an image says of its base.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseReference {
    /// The base's digest.
    pub digest: Digest,
    /// Where the base is.
    pub place: BasePlace,
}

/// Whether a base may have a location of this length.
pub(crate) fn fits(place: &BasePlace) -> bool {
    place.encode().1.len() <= MOST_BASE_BYTES
}

/// The bytes of a path, as a base's name: the file name, if both are in `directory`.
pub(crate) fn place_in(directory: &Path, base_directory: &Path, name: &OsStr) -> BasePlace {
    match directory == base_directory {
        true => BasePlace::Beside(name.to_owned()),
        false => BasePlace::Path(base_directory.join(name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_is_found_with_its_query_and_named_without() {
        let image: Location = "https://host/folder/top".parse().expect("a URL");
        let url = "https://host/folder/base?signature=secret";
        let place = BasePlace::of_url(url, &image);
        assert_eq!(place.resolve(&image), Location::Url(url.to_owned()));
        assert_eq!(place.to_string(), "https://host/folder/base");
        let place = BasePlace::of_url("https://host/folder/base", &image);
        assert_eq!(place, BasePlace::Beside("base".into()));
        // A store's key may have the letter.
        let image: Location = "s3://bucket/top".parse().expect("a URL");
        let place = BasePlace::of_url("s3://bucket/base?1", &image);
        assert_eq!(place, BasePlace::Beside("base?1".into()));
    }
}
