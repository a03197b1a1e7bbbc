//! Opening the images and sockets of bindings, on threads of their own: a store may be silent for as long as it likes,
//! and a file system as well.

use std::sync::Arc;
use std::thread::Builder;

use pagetide_sources::Location;
use thiserror::Error;

use crate::image::make_directory;
use crate::inbox::Outbox;
use crate::listener::{ListenError, Listener};
use crate::named_image::{NamedImage, NoImage, Offer};
use crate::options::Binding;
use crate::vm::{Common, chain};

/// Why a binding is not served.
#[derive(Debug, Error)]
#[error(transparent)]
pub(crate) enum OpenFailure {
    Image(#[from] NoImage),
    Listen(#[from] ListenError),
}

/// An image to be opened, for all bindings that have it.
pub(crate) struct Job {
    pub(crate) location: Location,
    /// The image, if it was opened before.
    pub(crate) known: Option<Arc<NamedImage>>,
    /// Whether a file that was written to is complete.
    pub(crate) is_reload: bool,
    pub(crate) common: Arc<Common>,
    pub(crate) tasks: Vec<Task>,
}

/// A binding whose image is to be opened.
pub(crate) struct Task {
    pub(crate) key: u64,
    pub(crate) binding: Binding,
    /// With the options of the binding.
    pub(crate) common: Arc<Common>,
    pub(crate) purpose: Purpose,
}

/// What is to be done with the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Listen at the socket, and serve it there.
    Listen,
    /// Serve it at the socket, which is there.
    Serve,
    /// Go on with a VM of a former server, whose thread looks whether it is the same image.
    Resume,
}

/// A binding that can be served.
pub(crate) struct Opened {
    pub(crate) offer: Arc<Offer>,
    pub(crate) listener: Option<Listener>,
}

/// What has become of a job.
pub(crate) struct Done {
    pub(crate) location: Location,
    pub(crate) image: Option<Arc<NamedImage>>,
    pub(crate) results: Vec<(u64, Result<Opened, String>)>,
}

impl Job {
    /// Opens the image, or looks at the one that is open.
    pub(crate) fn image(&self) -> Result<Arc<NamedImage>, NoImage> {
        let Common {
            options, metrics, ..
        } = &*self.common;
        if self.has_looked() {
            // Not where the options are only checked: the directory is this server's user's.
            make_directory(options);
        }
        let Some(known) = &self.known else {
            let image = NamedImage::open(&self.location, options, metrics)?;
            return Ok(Arc::new(image));
        };
        if self.is_reload {
            known.reload(options, metrics)?;
        }
        Ok(Arc::clone(known))
    }

    /// Whether it has just been found out what the image's name leads to.
    pub(crate) fn has_looked(&self) -> bool {
        self.is_reload || self.known.is_none()
    }

    fn run(&self) -> Done {
        let image = self.image();
        if let (Ok(image), None) = (&image, &self.known) {
            image.tell();
        }
        let open = |task: &Task| match &image {
            Ok(image) => task
                .open(image, self.has_looked())
                .map_err(|error| chain(&error)),
            Err(error) => Err(chain(error)),
        };
        let results = self.tasks.iter().map(|task| (task.key, open(task)));
        Done {
            location: self.location.clone(),
            results: results.collect(),
            image: image.ok(),
        }
    }

    /// The end of a job that was not done.
    fn failed(&self, why: &str) -> Done {
        let failed = |task: &Task| (task.key, Err(why.to_owned()));
        Done {
            location: self.location.clone(),
            image: None,
            results: self.tasks.iter().map(failed).collect(),
        }
    }

    /// Does it on a thread of its own, and sends what has become of it, whatever that is.
    pub(crate) fn start(self, outbox: Outbox<Done>) {
        let sender = Sender {
            job: self,
            outbox,
            done: None,
        };
        // If the thread does not start, or panics, the sender is dropped.
        let _ = Builder::new()
            .name("pt-open".into())
            .spawn(move || sender.work());
    }
}

impl Task {
    /// The binding's share: its digest is compared and its working set looked for before a VM comes.
    pub(crate) fn open(
        &self,
        image: &Arc<NamedImage>,
        has_looked: bool,
    ) -> Result<Opened, OpenFailure> {
        let options = &self.common.options;
        let offer = Arc::new(Offer::new(Arc::clone(image), self.binding.clone()));
        match (self.purpose, has_looked) {
            (Purpose::Resume, _) => {}
            (_, true) => drop(offer.opened(options)?),
            (_, false) => drop(offer.now(options, &self.common.metrics)?),
        }
        let listener = match self.purpose {
            Purpose::Listen => {
                let (mode, owner) = (options.socket_mode, options.socket_owner);
                let listener = Listener::bind(&self.binding.socket, mode, owner)?;
                Some(listener.with_porter(self.common.porter.clone()))
            }
            Purpose::Serve | Purpose::Resume => None,
        };
        Ok(Opened { offer, listener })
    }
}

/// Sends a job's result when it is dropped.
struct Sender {
    job: Job,
    outbox: Outbox<Done>,
    done: Option<Done>,
}

impl Sender {
    fn work(mut self) {
        self.done = Some(self.job.run());
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let done = self.done.take();
        let done = done.unwrap_or_else(|| self.job.failed("the thread that opens it has failed"));
        self.outbox.send(done);
    }
}
