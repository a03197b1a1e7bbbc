//! An image that is served, and its working set.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pagetide_pager::{PoolConfig, ServeError, Source};
use pagetide_sources::{GuestImage, ImageSource, Location};

use crate::metrics::Metrics;
use crate::native::share::{ShareError, SharedImage};
use crate::options::{Options, WorkingSetMode};
use crate::recorder::{RECORDED, Recorder};
use crate::working_set::{WorkingSet, WorkingSetError};

/// An image that is open, with the threads that read it.
pub(crate) struct ServedImage {
    pub(crate) location: Location,
    pub(crate) image: Arc<dyn GuestImage>,
    pub(crate) source: Arc<dyn Source>,
    working_set: WorkingSetFile,
    /// The memfd that clones share, as long as one of them is there.
    shared: Mutex<Weak<SharedImage>>,
}

struct WorkingSetFile {
    path: Option<PathBuf>,
    /// Held while the file is read, merged and written.
    access: Mutex<()>,
}

/// What a VM does with its working set.
#[derive(Debug)]
pub(crate) enum WorkingSetPlan {
    /// Neither replay nor record.
    Nothing,
    /// Record its touches.
    Record,
    /// Fetch these pages first.
    Replay(WorkingSet),
}

impl ServedImage {
    /// Starts the threads that read `image`.
    pub(crate) fn start(
        image: Arc<dyn GuestImage>,
        location: &Location,
        options: &Options,
        metrics: &Metrics,
    ) -> Result<Self, ServeError> {
        let path = match (&options.working_set_file, location) {
            (Some(path), _) => Some(path.clone()),
            (None, Location::Path(path)) => Some(beside(path)),
            (None, Location::Url(_)) => None,
        };
        if path.is_none() && options.working_set != WorkingSetMode::Off {
            tracing::warn!(
                image = image.name(),
                "no working set: an image at a URL needs --working-set-file"
            );
        }
        let counted = metrics.clone();
        let name = image.name().to_owned();
        let source = ImageSource::start(
            Arc::clone(&image),
            pool(&*image, options),
            move |duration| counted.source_read(duration),
            {
                let counted = metrics.clone();
                move |error| {
                    counted.source_error(error.kind());
                    tracing::warn!(
                        image = name,
                        error = error as &dyn std::error::Error,
                        "a read failed"
                    );
                }
            },
        )?;
        Ok(Self {
            location: location.clone(),
            image,
            source,
            working_set: WorkingSetFile {
                path,
                access: Mutex::new(()),
            },
            shared: Mutex::default(),
        })
    }

    /// The image in a memfd, which all VMs that ask for it share.
    pub(crate) fn share(&self, metrics: &Metrics) -> Result<Arc<SharedImage>, ShareError> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(there) = shared.upgrade() {
            return Ok(there);
        }
        let created = Arc::new(SharedImage::create(&self.image, metrics)?);
        *shared = Arc::downgrade(&created);
        Ok(created)
    }

    /// The working set in the file, whatever the server's mode.
    pub(crate) fn saved_working_set(&self) -> Option<WorkingSet> {
        self.load(self.working_set.path.as_deref()?)
    }

    /// What a VM that starts now does.
    pub(crate) fn working_set_plan(&self, mode: WorkingSetMode) -> WorkingSetPlan {
        let Some(path) = &self.working_set.path else {
            return WorkingSetPlan::Nothing;
        };
        match mode {
            WorkingSetMode::Off => WorkingSetPlan::Nothing,
            WorkingSetMode::Record => WorkingSetPlan::Record,
            WorkingSetMode::Auto | WorkingSetMode::Replay => match self.load(path) {
                Some(set) => WorkingSetPlan::Replay(set),
                None if mode == WorkingSetMode::Auto => WorkingSetPlan::Record,
                None => {
                    tracing::error!(path = %path.display(), "there is no working set of this image to replay");
                    WorkingSetPlan::Nothing
                }
            },
        }
    }

    /// The working set in the file, if it is one of this image.
    fn load(&self, path: &Path) -> Option<WorkingSet> {
        let _access = self.access_working_set();
        self.load_alone(path)
    }

    fn access_working_set(&self) -> MutexGuard<'_, ()> {
        let access = &self.working_set.access;
        access.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// [`Self::load`] for a caller that holds the lock.
    fn load_alone(&self, path: &Path) -> Option<WorkingSet> {
        match WorkingSet::load(path) {
            Ok(Some(set)) if set.is_of(self.image.digest(), self.image.bytes()) => Some(set),
            Ok(Some(_)) => {
                tracing::warn!(path = %path.display(), "the working set is of another image and is not used");
                None
            }
            Ok(None) => None,
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "the working set is not used"
                );
                None
            }
        }
    }

    /// Whether recordings have a file.
    pub(crate) fn has_working_set_file(&self) -> bool {
        self.working_set.path.is_some()
    }

    /// Merges what was recorded of a VM so far into the file. Returns the number of its pages afterwards;
    /// `None` if there is no file to write.
    pub(crate) fn save(&self, recorder: &Recorder) -> Result<Option<usize>, WorkingSetError> {
        let Some(path) = &self.working_set.path else {
            return Ok(None);
        };
        let touches = recorder.touches();
        if touches.is_empty() {
            return Ok(None);
        }
        let mut set = WorkingSet {
            image: self.image.digest(),
            image_bytes: self.image.bytes(),
            page_size: RECORDED,
            recordings: 0,
            touches: Vec::new(),
        };
        let recorded = WorkingSet {
            // A VM counts once, however often its recording is written.
            recordings: u32::from(recorder.is_counted_now()),
            touches,
            ..set.clone()
        };
        // VMs that end at the same time would each merge what was there before both.
        let _access = self.access_working_set();
        if let Some(before) = self.load_alone(path) {
            set = before;
        }
        set.merge(&recorded);
        // Its first part may be lost with a file that was removed.
        set.recordings = set.recordings.max(1);
        set.save(path)?;
        Ok(Some(set.touches.len()))
    }
}

/// The threads that read an image. Those of an object only wait: there are as many as requests that the store
/// gets at one time.
fn pool(image: &dyn GuestImage, options: &Options) -> PoolConfig {
    if image.counters().is_none() {
        return PoolConfig::default();
    }
    let object = &options.images.object;
    PoolConfig {
        shared_threads: object.bulk_gets,
        urgent_threads: object.gets.saturating_sub(object.bulk_gets),
    }
}

/// The path of the working set of an image that is a file.
pub(crate) fn beside(image: &Path) -> PathBuf {
    let mut name = image.as_os_str().to_owned();
    name.push(".working-set");
    name.into()
}

impl std::fmt::Debug for ServedImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServedImage")
            .field("image", &self.image)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use pagetide_memory::GuestAddress;
    use pagetide_sources::{OpenOptions, open};

    use super::*;

    fn recorder_of(page: u64) -> Recorder {
        let recorder = Recorder::new();
        recorder.record(GuestAddress(page << RECORDED.shift()));
        recorder
    }

    /// Each of them reads the file, merges, and writes: no other may do so in between.
    #[test]
    fn vms_that_end_together_lose_no_recording() {
        const VMS: u64 = 8;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("guest.mem");
        fs_err::write(&path, vec![1; 4096 * usize::try_from(VMS).unwrap()]).unwrap();
        let location = Location::Path(path.clone());
        let options = Options::default();
        let opened = open(&location, &OpenOptions::default()).unwrap();
        let image = ServedImage::start(opened, &location, &options, &Metrics::default()).unwrap();
        for round in 0..16 {
            let _ = fs_err::remove_file(beside(&path));
            let together = Barrier::new(usize::try_from(VMS).unwrap());
            thread::scope(|scope| {
                for vm in 0..VMS {
                    let (image, together) = (&image, &together);
                    scope.spawn(move || {
                        let recorder = recorder_of(vm);
                        together.wait();
                        image.save(&recorder).unwrap();
                    });
                }
            });
            let set = image.saved_working_set().unwrap();
            assert_eq!(set.touches.len() as u64, VMS, "round {round}");
            assert_eq!(u64::from(set.recordings), VMS);
        }
    }
}
