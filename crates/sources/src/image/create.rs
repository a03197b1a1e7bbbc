//! Creating an image from a raw memory file.

use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use thiserror::Error;

use super::base::{BasePlace, BaseReference, fits, place_in};
use super::format::{
    DEFAULT_CHUNK_BYTES, FormatError, MOST_BASE_BYTES, check_chunk_bytes, check_memory_bytes,
};
use super::info::ImageInfo;
use super::layers::MOST_LAYERS;
use super::memory_file::{HoleMap, MemoryFile};
use super::parallel::default_threads;
use super::reader::PagetideImage;
use super::target::{Target, TargetError, directory_of};
use super::writer::{Memory, Plan, write_image};
use crate::blob::BlobError;
use crate::foreign::check_whole_pages;
use crate::guest_image::{GuestImage, ImageError};
use crate::open::{Location, OpenError, OpenOptions};

/// What holes of a sparse memory file mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holes {
    /// Zeroes.
    Zero,
    /// The content of the base, as in Firecracker's diff snapshots.
    Base,
}

/// How an image is created.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Bytes of guest memory in a chunk: a power of two from 4K to 4M.
    pub chunk_bytes: u32,
    /// The image whose content is not stored again.
    pub base: Option<Location>,
    /// What holes mean; without a base they are zeroes. `None` is for a diff: its holes are as in the base, and it has
    /// some.
    pub holes: Option<Holes>,
    /// Whether the memory may have any length: one that ends inside a page, and another one than the base's.
    pub any_length: bool,
    /// Whether an existing file is replaced.
    pub may_replace: bool,
    /// Threads that read, compress and hash.
    pub threads: NonZeroUsize,
    /// How the base is opened.
    pub open: OpenOptions,
}

impl Default for CreateOptions {
    fn default() -> Self {
        Self {
            chunk_bytes: DEFAULT_CHUNK_BYTES,
            base: None,
            holes: None,
            any_length: false,
            may_replace: false,
            threads: default_threads(),
            open: OpenOptions::default(),
        }
    }
}

/// What a new image is.
#[derive(Clone, Debug)]
pub struct Created {
    /// The image's description.
    pub info: ImageInfo,
    /// Bytes of guest memory that were holes of the memory file.
    pub hole_bytes: u64,
    /// What the holes became.
    pub holes: Holes,
    /// The time from the call of [`create`] until the image has its name and is on the disk.
    pub elapsed: Duration,
}

/// Why an image was not created. No file has its name then.
#[derive(Debug, Error)]
pub enum CreateError {
    /// The memory file cannot be opened.
    #[error("cannot open the memory file")]
    OpenRaw(#[source] OpenError),
    /// The memory file is a Pagetide image.
    #[error("{} is a Pagetide image already, and no raw memory", path.display())]
    IsImage {
        /// The file.
        path: PathBuf,
    },
    /// The image would replace the memory file, or its base.
    #[error("{} is read, and cannot be the new image as well", path.display())]
    SameFile {
        /// The file.
        path: PathBuf,
    },
    /// The chunk size, or the length of guest memory, that no image can have.
    #[error("cannot make such an image")]
    Format(#[from] FormatError),
    /// The base cannot be used.
    #[error("cannot use the base")]
    Base(#[source] OpenError),
    /// The base has as many layers as an image may have.
    #[error(
        "the base {name} has {MOST_LAYERS} layers, and no image can be above it; make one layer of it (pagetide image merge)"
    )]
    TooManyLayers {
        /// The base.
        name: String,
    },
    /// The base's path is longer than an image can name.
    #[error("the base's location {place} has more than {MOST_BASE_BYTES} bytes")]
    LongBase {
        /// The base's location.
        place: String,
    },
    /// The file has holes, and its file system does not say where.
    #[error(
        "{} has holes that its file system does not name, so that they cannot be taken from the base; if its holes are zeroes, say so (--holes zero)",
        path.display()
    )]
    HiddenHoles {
        /// The memory file.
        path: PathBuf,
    },
    /// The file has holes, each of a piece of the file system and not of a page.
    #[error(
        "the file system of {} gives space in pieces of {bytes} bytes, so that clean pages beside written ones are no holes and would become zeroes; have the VMM write the diff to a file system with blocks of 4096 bytes",
        path.display()
    )]
    CoarseHoles {
        /// The memory file.
        path: PathBuf,
        /// The bytes of a piece.
        bytes: u64,
    },
    /// The file has no hole, so that nothing is as in the base.
    #[error(
        "{} has no hole: it is full memory, or a diff whose holes a copy has filled with zeroes; if it is full memory, say so (--holes zero), and if it is a diff in which every page was written, that (--holes base)",
        path.display()
    )]
    NoHoles {
        /// The memory file.
        path: PathBuf,
    },
    /// The memory file and the base are not of one VM, or the VM's memory was resized.
    #[error(
        "{} has {bytes} bytes, and the base {base} has {base_bytes}: they are not of one VM; if the VM's memory was resized, permit that (--any-length)",
        path.display()
    )]
    OtherLength {
        /// The memory file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// The base.
        base: String,
        /// The length of the base's guest memory.
        base_bytes: u64,
    },
    /// The memory file could not be read.
    #[error("cannot read the memory file")]
    Raw(#[source] BlobError),
    /// The image to merge could not be read.
    #[error("cannot read the image")]
    ReadImage(#[source] ImageError),
    /// The base's content could not be read.
    #[error("cannot read the base")]
    ReadBase(#[source] ImageError),
    /// zstd failed.
    #[error("cannot compress")]
    Compress(#[source] io::Error),
    /// The image cannot be written.
    #[error(transparent)]
    Target(#[from] TargetError),
}

impl CreateError {
    /// Whether the request made no sense, so that nothing was tried.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Raw(_) | Self::ReadImage(_) | Self::ReadBase(_) | Self::Compress(_) => false,
            Self::Target(error) => error.is_refusal(),
            Self::Base(error) => error.is_refusal(),
            _ => true,
        }
    }
}

/// Creates the image `image` from the memory file `raw`. `progress` is told how many bytes of guest memory
/// are done, of how many.
///
/// The file gets its name when it is complete and on the disk.
///
/// # Errors
/// [`CreateError`]; what was at `image` before is then still there.
pub fn create(
    raw: &Path,
    image: &Location,
    options: &CreateOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Created, CreateError> {
    create_named(raw, raw, image, options, progress)
}

/// The same with a name of the memory for messages.
pub(super) fn create_named(
    raw: &Path,
    name: &Path,
    image: &Location,
    options: &CreateOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Created, CreateError> {
    let begun = Instant::now();
    check_chunk_bytes(options.chunk_bytes)?;
    let memory = MemoryFile::open(raw).map_err(|error| CreateError::OpenRaw(error.into()))?;
    refuse_same_file(raw, image)?;
    if memory.is_image().map_err(CreateError::OpenRaw)? {
        let path = name.to_owned();
        return Err(CreateError::IsImage { path });
    }
    refuse_other_kinds(&memory, name, options)?;
    check_memory_bytes(memory.bytes(), options.chunk_bytes)?;
    let base = options.base.as_ref();
    let base = base.map(|base| open_base(base, image, options));
    let (base, reference) = base.transpose()?.unzip();
    if let Some(base) = &base {
        refuse_other_length(&memory, name, base, options)?;
    }
    let holes = match base {
        Some(_) => holes_above_base(&memory, name, options.holes)?,
        None => Holes::Zero,
    };
    let mut mode = memory.mode().map_err(CreateError::Raw)?;
    if let Some(base) = &base {
        // A chunk with holes has content of the base.
        mode &= base.mode();
    }
    let before = memory.state().map_err(CreateError::Raw)?;
    let changed = || {
        let name = name.display().to_string();
        CreateError::Raw(BlobError::Changed { name })
    };
    let object = &options.open.object;
    let target = Target::begin(image, mode, options.may_replace, object)?;
    let plan = Plan {
        memory_bytes: memory.bytes(),
        chunk_bytes: options.chunk_bytes,
        base: base.as_ref(),
        reference,
        holes,
        threads: options.threads,
    };
    let open = || {
        let memory = MemoryFile::open(raw).map_err(CreateError::Raw)?;
        match memory.state().map_err(CreateError::Raw)? == before {
            true => Ok(memory),
            false => Err(changed()),
        }
    };
    let (info, hole_bytes) = write_image(&target, image, plan, open, progress)?;
    // A file that was truncated meanwhile has ended in a hole.
    if memory.state().map_err(CreateError::Raw)? != before {
        return Err(changed());
    }
    target.finish(progress)?;
    Ok(Created {
        info,
        hole_bytes,
        holes,
        elapsed: begun.elapsed(),
    })
}

impl Memory for MemoryFile {
    fn read(
        &mut self,
        offset: u64,
        content: &mut [u8],
        data: &mut Vec<Range<usize>>,
    ) -> Result<(), CreateError> {
        MemoryFile::read(self, offset, content, data).map_err(CreateError::Raw)
    }
}

/// Refuses what is no guest memory.
fn refuse_other_kinds(
    memory: &MemoryFile,
    raw: &Path,
    options: &CreateOptions,
) -> Result<(), CreateError> {
    let mut checked = memory.check_kind().map_err(CreateError::OpenRaw)?;
    if !options.any_length {
        checked = checked.and_then(|()| check_whole_pages(memory.bytes()));
    }
    checked.map_err(|source| {
        let name = raw.display().to_string();
        CreateError::OpenRaw(OpenError::NotMemory { name, source })
    })
}

/// Refuses a memory file and a base that are not of one VM.
fn refuse_other_length(
    memory: &MemoryFile,
    raw: &Path,
    base: &PagetideImage,
    options: &CreateOptions,
) -> Result<(), CreateError> {
    match options.any_length || memory.bytes() == base.bytes() {
        true => Ok(()),
        false => Err(CreateError::OtherLength {
            path: raw.to_owned(),
            bytes: memory.bytes(),
            base: base.name().to_owned(),
            base_bytes: base.bytes(),
        }),
    }
}

/// What the holes of a memory file above a base mean. A hole is a property of the file system: where that does not tell
/// which pages the VMM has written, the file is refused.
fn holes_above_base(
    memory: &MemoryFile,
    raw: &Path,
    asked: Option<Holes>,
) -> Result<Holes, CreateError> {
    if asked == Some(Holes::Zero) {
        return Ok(Holes::Zero);
    }
    let path = raw.to_owned();
    match memory.hole_map().map_err(CreateError::Raw)? {
        HoleMap::Exact => Ok(Holes::Base),
        HoleMap::None if asked == Some(Holes::Base) => Ok(Holes::Base),
        HoleMap::None => Err(CreateError::NoHoles { path }),
        HoleMap::Hidden => Err(CreateError::HiddenHoles { path }),
        HoleMap::Coarse { bytes } => Err(CreateError::CoarseHoles { path, bytes }),
    }
}

/// Refuses an image that is a file or object which is read, whatever their paths.
pub(super) fn refuse_same_file(read: &Path, image: &Location) -> Result<(), CreateError> {
    match is_same(read, image) {
        true => Err(CreateError::SameFile {
            path: read.to_owned(),
        }),
        false => Ok(()),
    }
}

/// Whether what is called `read`, which for an object is its URL without credentials, is at `new`.
pub(super) fn is_same(read: &Path, new: &Location) -> bool {
    match new {
        Location::Path(new) => {
            let read = read.canonicalize();
            read.is_ok_and(|read| new.canonicalize().is_ok_and(|new| new == read))
        }
        Location::Url(_) => *read == *new.to_string(),
    }
}

/// Opens the base, and says how the new image names it.
pub(super) fn open_base(
    location: &Location,
    image: &Location,
    options: &CreateOptions,
) -> Result<(PagetideImage, BaseReference), CreateError> {
    let base = PagetideImage::open(location, &options.open).map_err(CreateError::Base)?;
    if base.layers() >= MOST_LAYERS {
        let name = base.name().to_owned();
        return Err(CreateError::TooManyLayers { name });
    }
    let name = location.to_string();
    refuse_same_file(location.path().unwrap_or(Path::new(&name)), image)?;
    let place = name_of_base(location, image);
    for layer in &base.layers {
        refuse_same_file(Path::new(layer.blob.name()), image)?;
    }
    // What is named as the image's neighbour may be the image.
    if place.resolve(image) == *image {
        let path = PathBuf::from(image.to_string());
        return Err(CreateError::SameFile { path });
    }
    if !fits(&place) {
        let place = place.to_string();
        return Err(CreateError::LongBase { place });
    }
    let digest = base.digest();
    Ok((base, BaseReference { digest, place }))
}

/// The base's name, if both are in one directory; its absolute path or URL otherwise. An image at a URL names a local base as
/// if it were beside the image: nobody else finds a path of this machine.
fn name_of_base(base: &Location, image: &Location) -> BasePlace {
    let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    match (base, image) {
        (Location::Url(url), _) => BasePlace::of_url(url, image),
        (Location::Path(base), Location::Url(_)) => match base.file_name() {
            Some(name) => BasePlace::Beside(name.to_owned()),
            None => BasePlace::Path(canonical(base)),
        },
        (Location::Path(base), Location::Path(image)) => match base.file_name() {
            Some(name) => {
                let directory = canonical(directory_of(base));
                place_in(&canonical(directory_of(image)), &directory, name)
            }
            None => BasePlace::Path(canonical(base)),
        },
    }
}
