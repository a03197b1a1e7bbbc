//! The image that has a name now.
//!
//! A name leads to one image today and to another one tomorrow. Each VM that starts asks what its socket's name leads to
//! ([`pagetide_sources::Standing`]): an image that was replaced is opened anew, and the former one stays for the VMs
//! that have it. A file that was written to is refused until the server is told to read its options again: nobody else
//! knows when it is complete.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagetide_pager::ServeError;
use pagetide_sources::{
    BlobError, Digest, FileIdentity, ImageError, Location, OpenError, Standing, StateFile, open,
};
use thiserror::Error;

use crate::image::{OpenImage, ServedImage};
use crate::log_limit::{LogLimit, log_limited};
use crate::metrics::Metrics;
use crate::options::{Binding, Options};

/// Why there is no image for a VM.
#[derive(Debug, Error)]
pub enum NoImage {
    /// The image could not be opened.
    #[error("opening the image {location}")]
    Open {
        /// The image.
        location: Location,
        /// The reason.
        #[source]
        source: Box<OpenError>,
    },
    /// The options leave no thread to read the image.
    #[error("starting to read the image {location}")]
    Readers {
        /// The image.
        location: Location,
        /// The reason.
        #[source]
        source: ServeError,
    },
    /// What its name leads to could not be found out.
    #[error("looking at the image {location}")]
    Look {
        /// The image.
        location: Location,
        /// The reason.
        #[source]
        source: ImageError,
    },
    /// Its file was written to.
    #[error(
        "the image {location} was written to while it was served: it had {before}, and has {now}; if it is complete, reload the server (SIGHUP), and next time write a new file and rename it"
    )]
    Rewritten {
        /// The image.
        location: Location,
        /// The file when it was opened.
        before: FileIdentity,
        /// The file now.
        now: FileIdentity,
    },
    /// The state file cannot be looked at.
    #[error("looking at the state file of the image {location}")]
    State {
        /// The image.
        location: Location,
        /// The reason.
        #[source]
        source: BlobError,
    },
    /// One of the image and its state file was replaced, and the other was not.
    #[error(
        "of the image {location} and its state file {}, only the {replaced} was replaced: they are not of one snapshot; replace both, or reload the server (SIGHUP) if they are",
        state_file.display()
    )]
    OneOfTwo {
        /// The image.
        location: Location,
        /// The state file.
        state_file: PathBuf,
        /// Which one was replaced.
        replaced: &'static str,
    },
    /// The state file is of a VM with more memory than the image has.
    #[error(
        "the state file {} is of a VM with {wanted} bytes of memory, and the image {location} has {bytes}",
        state_file.display()
    )]
    OtherState {
        /// The image.
        location: Location,
        /// The state file.
        state_file: PathBuf,
        /// The memory of the VM.
        wanted: u64,
        /// The length of the image.
        bytes: u64,
    },
    /// It is another image than the binding names.
    #[error(
        "the image {location} has the digest {found}, and the binding of its socket names {wanted}"
    )]
    OtherDigest {
        /// The image.
        location: Location,
        /// Its digest.
        found: Digest,
        /// The digest in the binding.
        wanted: Digest,
    },
}

/// Lines on images that were opened anew, which a store can have replaced for each VM.
static ANEW: LogLimit = LogLimit::new();

/// An image by its location.
#[derive(Debug)]
pub(crate) struct NamedImage {
    location: Location,
    /// Held while the image is opened anew, which a store or a disk can make slow.
    opening: Mutex<()>,
    /// What was opened there last. Held only to look at it, and to put another one there.
    current: Mutex<Arc<OpenImage>>,
}

impl NamedImage {
    pub(crate) fn open(
        location: &Location,
        options: &Options,
        metrics: &Metrics,
    ) -> Result<Self, NoImage> {
        let opened = open_at(location, options, metrics)?;
        Ok(Self {
            location: location.clone(),
            opening: Mutex::default(),
            current: Mutex::new(Arc::new(opened)),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Arc<OpenImage>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was opened last, whatever the name leads to now.
    pub(crate) fn opened(&self) -> Arc<OpenImage> {
        Arc::clone(&self.lock())
    }

    /// Tells what was opened. A diff that was named in place of an image looks like sparse memory: its holes are to be
    /// seen.
    pub(crate) fn tell(&self) {
        let opened = self.opened();
        tracing::info!(
            image = opened.image.name(),
            digest = %opened.image.digest(),
            bytes = opened.image.bytes(),
            hole_bytes = opened.image.hole_bytes(),
            "an image is open; holes of a raw file read as zeroes"
        );
    }

    /// What the name leads to now, for a VM that starts now.
    fn now(&self, options: &Options, metrics: &Metrics) -> Result<Arc<OpenImage>, NoImage> {
        // A store's answer is waited for without the lock.
        let opened = self.opened();
        match self.look(&opened)? {
            Standing::Same => Ok(opened),
            Standing::Replaced => self.replace(&opened, options, metrics),
            Standing::Rewritten { before, now } => Err(NoImage::Rewritten {
                location: self.location.clone(),
                before,
                now,
            }),
        }
    }

    /// Opens what the name leads to, if it is not what was opened last: also a file that was written to, which is
    /// complete by the word of whoever asks for this.
    pub(crate) fn reload(&self, options: &Options, metrics: &Metrics) -> Result<(), NoImage> {
        let opened = self.opened();
        match self.look(&opened)? {
            Standing::Same => Ok(()),
            Standing::Replaced | Standing::Rewritten { .. } => {
                self.replace(&opened, options, metrics).map(drop)
            }
        }
    }

    fn look(&self, opened: &OpenImage) -> Result<Standing, NoImage> {
        let standing = opened.image.standing();
        standing.map_err(|source| NoImage::Look {
            location: self.location.clone(),
            source,
        })
    }

    /// Opens the image anew, unless another VM has done so.
    fn replace(
        &self,
        former: &Arc<OpenImage>,
        options: &Options,
        metrics: &Metrics,
    ) -> Result<Arc<OpenImage>, NoImage> {
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        let current = self.opened();
        if !Arc::ptr_eq(&current, former) {
            return Ok(current);
        }
        let opened = Arc::new(open_at(&self.location, options, metrics)?);
        log_limited!(
            info,
            ANEW,
            image = opened.image.name(),
            former_digest = %former.image.digest(),
            digest = %opened.image.digest(),
            bytes = opened.image.bytes(),
            hole_bytes = opened.image.hole_bytes(),
            "the image was opened anew: VMs that start from now on get what its name leads to now"
        );
        metrics.watch_instead(&former.image, &opened.image);
        *self.lock() = Arc::clone(&opened);
        Ok(opened)
    }
}

fn open_at(
    location: &Location,
    options: &Options,
    metrics: &Metrics,
) -> Result<OpenImage, NoImage> {
    let image = open(location, &options.images).map_err(|source| NoImage::Open {
        location: location.clone(),
        source: Box::new(source),
    })?;
    let started = OpenImage::new(image, location, options, metrics);
    started.map_err(|source| NoImage::Readers {
        location: location.clone(),
        source,
    })
}

/// What the VMs of one socket get.
#[derive(Debug)]
pub(crate) struct Offer {
    named: Arc<NamedImage>,
    binding: Binding,
    /// What the last VM got.
    served: Mutex<Option<Served>>,
}

/// An image, and the state file that was beside it when it was first served.
#[derive(Clone, Debug)]
struct Served {
    image: Arc<ServedImage>,
    state: Option<FileIdentity>,
}

impl Offer {
    pub(crate) fn new(named: Arc<NamedImage>, binding: Binding) -> Self {
        Self {
            named,
            binding,
            served: Mutex::default(),
        }
    }

    /// The name of the image for messages.
    pub(crate) fn name(&self) -> String {
        self.binding.image.to_string()
    }

    /// The image for a VM that starts now.
    pub(crate) fn now(
        &self,
        options: &Options,
        metrics: &Metrics,
    ) -> Result<Arc<ServedImage>, NoImage> {
        let opened = self.named.now(options, metrics)?;
        self.serve(&opened, options)
    }

    /// The image that was opened last, for a VM that was restored from it.
    pub(crate) fn opened(&self, options: &Options) -> Result<Arc<ServedImage>, NoImage> {
        self.serve(&self.named.opened(), options)
    }

    fn serve(
        &self,
        opened: &Arc<OpenImage>,
        options: &Options,
    ) -> Result<Arc<ServedImage>, NoImage> {
        self.check_digest(opened)?;
        let state = self.look_at_state(opened)?;
        let mut served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(former) = &*served {
            self.check_both(former, opened, state)?;
            if former.image.is_of(opened) {
                return Ok(Arc::clone(&former.image));
            }
        }
        let image = Arc::new(ServedImage::new(opened, &self.binding, options));
        let new = Arc::clone(&image);
        *served = Some(Served { image, state });
        Ok(new)
    }

    /// The state file that is beside the image now, if the binding names one.
    fn look_at_state(&self, opened: &OpenImage) -> Result<Option<FileIdentity>, NoImage> {
        let Some(path) = &self.binding.state_file else {
            return Ok(None);
        };
        let location = || self.binding.image.clone();
        let state = StateFile::at(path).map_err(|source| NoImage::State {
            location: location(),
            source,
        })?;
        let bytes = opened.image.bytes();
        match state.memory_bytes {
            Some(wanted) if wanted > bytes => Err(NoImage::OtherState {
                location: location(),
                state_file: path.clone(),
                wanted,
                bytes,
            }),
            _ => Ok(Some(state.identity)),
        }
    }

    /// Checks that image and state file were replaced together, or not at all: a VMM reads the one and gets the other.
    fn check_both(
        &self,
        former: &Served,
        opened: &Arc<OpenImage>,
        state: Option<FileIdentity>,
    ) -> Result<(), NoImage> {
        let Some(state_file) = &self.binding.state_file else {
            return Ok(());
        };
        // Another name or mode of the file opens it anew, and replaces nothing.
        let (before, now) = (&former.image.image, &opened.image);
        let is_same =
            before.digest() == now.digest() && before.file_identity() == now.file_identity();
        let replaced = match (is_same, former.state == state) {
            (true, false) => "state file",
            (false, true) => "image",
            _ => return Ok(()),
        };
        Err(NoImage::OneOfTwo {
            location: self.binding.image.clone(),
            state_file: state_file.clone(),
            replaced,
        })
    }

    fn check_digest(&self, opened: &OpenImage) -> Result<(), NoImage> {
        let found = opened.image.digest();
        match self.binding.digest {
            Some(wanted) if wanted != found => Err(NoImage::OtherDigest {
                location: self.binding.image.clone(),
                found,
                wanted,
            }),
            _ => Ok(()),
        }
    }
}
