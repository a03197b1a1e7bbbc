//! Opening an image and the images below it.

use std::sync::Arc;

use pagetide_memory::Urgency;

use super::base::{BasePlace, BaseReference};
use super::format::{FormatError, HEADER_BYTES, Header, resembles};
use super::index::{Entry, Index};
use crate::blob::Blob;
use crate::open::{Bases, Location, OpenError, OpenOptions, open_blob};

/// The maximal number of layers of an image, itself included.
pub const MOST_LAYERS: usize = 16;

/// One image file or object, without what lies below it.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) blob: Arc<dyn Blob>,
    pub(crate) header: Header,
    pub(crate) index: Index,
}

/// The first bytes of a file, as many as an image's header has.
pub(crate) struct Head(Vec<u8>);

impl Head {
    /// Reads them.
    ///
    /// # Errors
    /// [`OpenError::Blob`].
    pub(crate) fn read(blob: &dyn Blob) -> Result<Self, OpenError> {
        let bytes = blob.bytes().min(HEADER_BYTES.into());
        let mut head = vec![0; usize::try_from(bytes).unwrap_or_default()];
        blob.read_at(0, &mut head, Urgency::Urgent)?;
        Ok(Self(head))
    }

    /// The bytes that were read.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether it is an image's, intact or not.
    pub(crate) fn is_image(&self) -> bool {
        resembles(&self.0)
    }
}

impl Layer {
    /// Opens the image with this head: one more read, that of the index, which takes its bytes of `room`. A file with
    /// holes costs its owner nothing; what is read of it costs whoever opens it.
    ///
    /// # Errors
    /// [`OpenError::Blob`], [`OpenError::Format`], [`OpenError::LongIndex`].
    pub(crate) fn open(
        blob: Arc<dyn Blob>,
        head: &Head,
        room: &mut IndexRoom,
    ) -> Result<Self, OpenError> {
        let malformed = |source| OpenError::Format {
            name: blob.name().to_owned(),
            source,
        };
        let header = Header::decode(&head.0, blob.bytes()).map_err(malformed)?;
        room.take(header.index_bytes())
            .map_err(|most| OpenError::LongIndex {
                name: blob.name().to_owned(),
                bytes: header.index_bytes(),
                most,
            })?;
        // The file has these bytes: the header's sums were checked against its length.
        let bytes = usize::try_from(header.index_bytes());
        let bytes = bytes.map_err(|_| {
            malformed(FormatError::MemoryBytes {
                bytes: header.memory_bytes,
            })
        })?;
        let mut index = vec![0; bytes];
        blob.read_at(header.index_offset, &mut index, Urgency::Urgent)?;
        let index = Index::decode(&index, &header).map_err(malformed)?;
        Ok(Self {
            blob,
            header,
            index,
        })
    }

    /// The number and the length of the stored chunk that is shorter than all others: that of the end of
    /// guest memory.
    pub(crate) fn short_chunk(&self) -> Option<(u32, u32)> {
        let last = self.header.entries().checked_sub(1)?;
        let bytes = self.header.bytes_of(last);
        match self.index.entry(usize::try_from(last).ok()?) {
            Entry::Stored(number) if bytes < self.header.chunk_bytes => Some((number, bytes)),
            _ => None,
        }
    }
}

/// Opens the image with this head and all images below it; the image itself comes first.
///
/// # Errors
/// [`OpenError`].
pub(crate) fn open_layers(
    blob: Arc<dyn Blob>,
    head: &Head,
    location: &Location,
    options: &OpenOptions,
) -> Result<Vec<Layer>, OpenError> {
    let mut room = IndexRoom::of(options);
    let mut layers = vec![Layer::open(blob, head, &mut room)?];
    let mut locations = vec![canonical(location)];
    while let Some((top, place)) = layers.last().zip(locations.last()) {
        let Some(reference) = &top.header.base else {
            break;
        };
        let name = top.blob.name();
        let location = canonical(&reference.place.resolve(place));
        if options.bases == Bases::Beside && !is_beside(&reference.place, &location, place) {
            return Err(OpenError::BaseElsewhere {
                image: name.to_owned(),
                base: location.to_string(),
            });
        }
        if locations.contains(&location) {
            let name = name.to_owned();
            return Err(OpenError::Cycle { name });
        }
        if layers.len() == MOST_LAYERS {
            let name = layers[0].blob.name().to_owned();
            return Err(OpenError::TooManyLayers { name });
        }
        let base = open_base(reference, name, &location, options, &mut room)?;
        layers.push(base);
        locations.push(location);
    }
    Ok(layers)
}

/// Opens the base that the image `image` names, and compares its digest.
fn open_base(
    reference: &BaseReference,
    image: &str,
    location: &Location,
    options: &OpenOptions,
    room: &mut IndexRoom,
) -> Result<Layer, OpenError> {
    let opened = open_blob(location, options)
        .and_then(|blob| Head::read(&*blob).map(|head| (blob, head)))
        .and_then(|(blob, head)| Layer::open(blob, &head, room));
    let base = opened.map_err(|source| OpenError::Base {
        image: image.to_owned(),
        base: location.to_string(),
        source: Box::new(source),
    })?;
    let found = base.header.digest;
    if found != reference.digest {
        return Err(OpenError::BaseChanged {
            image: image.to_owned(),
            base: location.to_string(),
            wanted: reference.digest,
            found,
        });
    }
    Ok(base)
}

/// Whether a base is in the folder of the image that names it, both as canonical locations.
fn is_beside(place: &BasePlace, base: &Location, image: &Location) -> bool {
    match (place, base.path(), image.path()) {
        (BasePlace::Beside(_), None, _) => true,
        (_, Some(base), Some(image)) => base.parent() == image.parent(),
        _ => false,
    }
}

/// What is left of [`OpenOptions::index_bytes`] for the layers of one image.
pub(crate) struct IndexRoom {
    most: u64,
    left: u64,
}

impl IndexRoom {
    pub(crate) fn of(options: &OpenOptions) -> Self {
        let most = options.index_bytes;
        Self { most, left: most }
    }

    /// Takes the bytes of an index; the most that there may be, if they are not left.
    fn take(&mut self, bytes: u64) -> Result<(), u64> {
        self.left = self.left.checked_sub(bytes).ok_or(self.most)?;
        Ok(())
    }
}

/// A file's path without links, so that one file has one location. A base is beside its image, and
/// not beside a link to it.
fn canonical(location: &Location) -> Location {
    match location {
        Location::Path(path) => {
            Location::Path(path.canonicalize().unwrap_or_else(|_| path.clone()))
        }
        Location::Url(_) => location.clone(),
    }
}
