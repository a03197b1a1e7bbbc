//! An image that is served, and its working set.

use std::collections::HashMap;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pagetide_memory::PageSize;
use pagetide_pager::{InFlightLimits, Pool, PoolConfig, ServeError, Source};
use pagetide_sources::{GuestImage, ImageSource, Location};

use crate::log_limit::{LogLimit, log_limited};
use crate::metrics::Metrics;
use crate::native::share::{ShareError, SharedImage};
use crate::options::{Binding, Options, WorkingSetMode};
use crate::recorder::Recorder;
use crate::working_set_file::{LoadedSet, Silent, WorkingSetFile, WorkingSetPlan};

/// An image that is open. It never becomes another one.
pub(crate) struct OpenImage {
    pub(crate) location: Location,
    pub(crate) image: Arc<dyn GuestImage>,
    /// What reads it. Its threads are there while a VM has the image: most images of a fleet have no VM now.
    pool: Arc<Pool>,
    /// The memfd that clones share, as long as one of them is there.
    shared: Mutex<Weak<SharedImage>>,
    /// The files of its working sets: sockets may name different ones.
    working_sets: Mutex<HashMap<PathBuf, Arc<WorkingSetFile>>>,
    /// What a test reads by.
    #[cfg(test)]
    instead: Mutex<Option<Arc<dyn Source>>>,
}

impl OpenImage {
    pub(crate) fn new(
        image: Arc<dyn GuestImage>,
        location: &Location,
        options: &Options,
        metrics: &Metrics,
    ) -> Result<Self, ServeError> {
        let name = image.name().to_owned();
        let (reads, errors) = (metrics.clone(), metrics.clone());
        let lines = LogLimit::default();
        let pool = ImageSource::at_rest(
            Arc::clone(&image),
            pool(&*image, options),
            move |duration| reads.source_read(duration),
            move |error| {
                errors.source_error(error.kind());
                log_limited!(
                    warn,
                    lines,
                    image = name,
                    error = error as &dyn std::error::Error,
                    "a read failed"
                );
            },
        )?;
        Ok(Self {
            location: location.clone(),
            image,
            pool,
            shared: Mutex::default(),
            working_sets: Mutex::default(),
            #[cfg(test)]
            instead: Mutex::default(),
        })
    }

    /// What reads it for a VM.
    fn source(&self) -> Result<Arc<dyn Source>, ServeError> {
        #[cfg(test)]
        if let Some(source) = &*self.instead.lock().unwrap() {
            return Ok(Arc::clone(source));
        }
        tracing::debug!(image = self.image.name(), "an image has another reader");
        Ok(self.pool.attend()?)
    }

    /// The file of its working set at `path`, which all sockets that name it share.
    fn working_set_at(&self, path: PathBuf, mode: WorkingSetMode) -> Arc<WorkingSetFile> {
        let sets = self.working_sets.lock();
        let mut sets = sets.unwrap_or_else(PoisonError::into_inner);
        let set = sets.entry(path).or_insert_with_key(|path| {
            let (digest, bytes) = (self.image.digest(), self.image.bytes());
            let set = WorkingSetFile::new(path.clone(), digest, bytes);
            set.try_directory(mode);
            Arc::new(set)
        });
        Arc::clone(set)
    }
}

/// Lines on images without a working set: one that is replaced has another.
static NO_WORKING_SET: LogLimit = LogLimit::new();

/// An image as the VMs of one socket get it.
pub(crate) struct ServedImage {
    opened: Arc<OpenImage>,
    pub(crate) location: Location,
    pub(crate) image: Arc<dyn GuestImage>,
    working_set: Option<Arc<WorkingSetFile>>,
}

impl ServedImage {
    pub(crate) fn new(opened: &Arc<OpenImage>, binding: &Binding, options: &Options) -> Self {
        let path = working_set_path(&*opened.image, binding, options);
        if path.is_none() && options.working_set != WorkingSetMode::Off {
            log_limited!(
                warn,
                NO_WORKING_SET,
                image = opened.image.name(),
                "no working set: an image at a URL needs --working-set-dir or --working-set-file"
            );
        }
        let mode = options.working_set;
        Self {
            opened: Arc::clone(opened),
            location: opened.location.clone(),
            image: Arc::clone(&opened.image),
            working_set: path.map(|path| opened.working_set_at(path, mode)),
        }
    }

    /// What reads it for a VM.
    ///
    /// # Errors
    /// As [`Pool::attend`].
    pub(crate) fn source(&self) -> Result<Arc<dyn Source>, ServeError> {
        self.opened.source()
    }

    /// Whether it is this image.
    pub(crate) fn is_of(&self, opened: &Arc<OpenImage>) -> bool {
        Arc::ptr_eq(&self.opened, opened)
    }

    /// The image in a memfd, which all VMs that ask for it share.
    pub(crate) fn share(&self, metrics: &Metrics) -> Result<Arc<SharedImage>, ShareError> {
        let shared = self.opened.shared.lock();
        let mut shared = shared.unwrap_or_else(PoisonError::into_inner);
        if let Some(there) = shared.upgrade() {
            return Ok(there);
        }
        let created = Arc::new(SharedImage::create(&self.image, metrics)?);
        *shared = Arc::downgrade(&created);
        Ok(created)
    }

    /// The working set in the file, whatever the server's mode.
    ///
    /// # Errors
    /// [`Silent`].
    pub(crate) fn saved_working_set(&self) -> Result<Option<Arc<LoadedSet>>, Silent> {
        match &self.working_set {
            Some(file) => file.saved(),
            None => Ok(None),
        }
    }

    /// What a VM that starts now does.
    pub(crate) fn working_set_plan(&self, mode: WorkingSetMode) -> WorkingSetPlan {
        match &self.working_set {
            Some(file) => file.plan(mode),
            None => WorkingSetPlan::Nothing,
        }
    }

    /// Whether recordings are written.
    pub(crate) fn keeps_recordings(&self) -> bool {
        self.working_set
            .as_ref()
            .is_some_and(|file| file.is_writable())
    }

    /// Merges what was recorded of a VM so far into the file. Returns the number of its pages afterwards; `None` if
    /// nothing was written.
    pub(crate) fn save(&self, recorder: &Recorder) -> Option<usize> {
        self.working_set.as_ref()?.save(recorder)
    }
}

/// Where the working set of an image is: where its socket says, or all sockets; in the directory of working sets, by
/// the image's digest; or beside the image.
fn working_set_path(
    image: &dyn GuestImage,
    binding: &Binding,
    options: &Options,
) -> Option<PathBuf> {
    let named = binding.working_set_file.as_ref();
    if let Some(path) = named.or(options.working_set_file.as_ref()) {
        return Some(path.clone());
    }
    match (&options.working_set_directory, &binding.image) {
        (Some(directory), _) => Some(directory.join(format!("{}.working-set", image.digest()))),
        (None, Location::Path(path)) => Some(beside(path)),
        (None, Location::Url(_)) => None,
    }
}

/// Makes the directory of working sets, if any will be written: which pages guests touch is nobody else's business. Where
/// it cannot be made, a working set cannot be written either, and that is said. May wait for a disk.
pub(crate) fn make_directory(options: &Options) {
    if let Some(directory) = &options.working_set_directory
        && options.working_set.records()
    {
        let _ = DirBuilder::new().mode(0o700).create(directory);
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

/// A batch of prefetch: a fault on a page of a batch that is being installed waits for the whole batch.
pub(crate) const BATCH_BYTES: u64 = 256 << 10;

/// The bytes of an image that are requested for a region at one time. Of a file, prefetch requests two batches for each thread
/// that reads: more would hide no latency, and what is decompressed waits for the VM's thread in a processor's cache.
pub(crate) fn in_flight_limits(image: &dyn GuestImage, page_size: PageSize) -> InFlightLimits {
    let limits = InFlightLimits::default();
    if image.counters().is_some() {
        return limits;
    }
    let batches = 2 * PoolConfig::default().shared_threads as u64;
    let ahead = batches * page_size.bytes().max(BATCH_BYTES);
    InFlightLimits {
        bulk_bytes: limits.bulk_bytes.min(ahead),
        ..limits
    }
}

/// The path of the working set of an image that is a file.
pub(crate) fn beside(image: &Path) -> PathBuf {
    let mut name = image.as_os_str().to_owned();
    name.push(".working-set");
    name.into()
}

impl std::fmt::Debug for OpenImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenImage")
            .field("image", &self.image)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for ServedImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServedImage")
            .field("image", &self.image)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
impl ServedImage {
    /// An image that no server has opened.
    pub(crate) fn alone(
        image: Arc<dyn GuestImage>,
        location: &Location,
        options: &Options,
    ) -> Self {
        let opened = OpenImage::new(image, location, options, &Metrics::default());
        let binding = Binding::new("test.sock", location.clone());
        Self::new(&Arc::new(opened.unwrap()), &binding, options)
    }

    /// Has a source in place of the threads that read it.
    pub(crate) fn read_by(&self, source: Arc<dyn Source>) {
        *self.opened.instead.lock().unwrap() = Some(source);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use pagetide_memory::{GuestAddress, Urgency};
    use pagetide_pager::Filled;
    use pagetide_sources::{Digest, ImageError, ObjectCounters, OpenOptions, Standing, open};
    use pagetide_test_support::eventually;

    use super::*;
    use crate::recorder::RECORDED;

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
        let image = ServedImage::alone(opened, &location, &options);
        for round in 0..16 {
            let _ = fs_err::remove_file(beside(&path));
            let together = Barrier::new(usize::try_from(VMS).unwrap());
            thread::scope(|scope| {
                for vm in 0..VMS {
                    let (image, together) = (&image, &together);
                    scope.spawn(move || {
                        let recorder = recorder_of(vm);
                        together.wait();
                        image.save(&recorder);
                    });
                }
            });
            let set = eventually("the disk", || image.saved_working_set()).unwrap();
            assert_eq!(set.touches.len() as u64, VMS, "round {round}");
            assert_eq!(u64::from(set.recordings), VMS);
        }
    }

    /// An image of a store, by what a file has.
    #[derive(Debug)]
    struct Stored(Arc<dyn GuestImage>);

    impl GuestImage for Stored {
        fn name(&self) -> &str {
            self.0.name()
        }

        fn bytes(&self) -> u64 {
            self.0.bytes()
        }

        fn digest(&self) -> Digest {
            self.0.digest()
        }

        fn standing(&self) -> Result<Standing, ImageError> {
            self.0.standing()
        }

        fn read(&self, offset: u64, to: &mut [u8], urgency: Urgency) -> Result<Filled, ImageError> {
            self.0.read(offset, to, urgency)
        }

        fn counters(&self) -> Option<ObjectCounters> {
            Some(ObjectCounters::default())
        }
    }

    /// Kind: memory and processor caches that are spent on hiding a latency which is not there.
    #[test]
    fn prefetch_asks_a_file_for_less_at_one_time_than_a_store() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs_err::write(file.path(), [1; 4096]).unwrap();
        let location = Location::Path(file.path().to_owned());
        let image = open(&location, &OpenOptions::default()).unwrap();
        let of_file = |size| in_flight_limits(&*image, size).bulk_bytes;
        let default = InFlightLimits::default();
        assert_eq!(of_file(PageSize::Size4K), 2 << 20);
        // Four threads can read at one time.
        assert_eq!(of_file(PageSize::Size2M), default.bulk_bytes);
        assert_eq!(of_file(PageSize::Size1G), default.bulk_bytes);
        let of_store = in_flight_limits(&Stored(Arc::clone(&image)), PageSize::Size4K);
        assert_eq!(of_store, default);
    }
}
