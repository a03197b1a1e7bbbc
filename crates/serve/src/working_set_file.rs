//! The file of an image's working set: read once, and written by one recording at a time.
//!
//! It is an aid: a file that cannot be read or written costs time, is warned of once, and hurts no VM.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagetide_memory::PageSize;
use pagetide_sources::Digest;

use crate::options::WorkingSetMode;
use crate::recorder::{RECORDED, Recorder};
use crate::working_set::{FileVersion, WorkingSet, WorkingSetError};

/// A recording with fewer pages may be that of a guest that has failed, or of one that has not begun.
const LEAST_PAGES: u64 = 64;

/// The part of an image's pages that is enough nevertheless.
const LEAST_PART: u64 = 64;

/// How many recordings that are too small are thrown away, one after the other. The next one is what guests of the
/// image touch.
const MOST_SMALL: u32 = 2;

/// What a VM does with its working set.
#[derive(Debug)]
pub(crate) enum WorkingSetPlan {
    /// Neither replay nor record.
    Nothing,
    /// Record its touches.
    Record,
    /// Fetch these pages first.
    Replay(Arc<WorkingSet>),
}

/// The file of one image's working set.
#[derive(Debug)]
pub(crate) struct WorkingSetFile {
    path: PathBuf,
    image: Digest,
    image_bytes: u64,
    /// Held while a recording is merged and written. A disk can take long: whoever serves a VM does not take this lock.
    writing: Mutex<()>,
    /// Held while the file is read.
    state: Mutex<State>,
    /// Whether writing has failed. Who asks waits for nobody.
    is_unwritable: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// What was read last, and of which version of the file; without a set if it was not usable.
    loaded: Option<(FileVersion, Option<Arc<WorkingSet>>)>,
    /// Recordings that were thrown away since the last one that was written.
    small: u32,
    /// Whether it was said that there is nothing to replay.
    has_warned_of_none: bool,
}

impl WorkingSetFile {
    pub(crate) fn new(path: PathBuf, image: Digest, image_bytes: u64) -> Self {
        Self {
            path,
            image,
            image_bytes,
            writing: Mutex::default(),
            state: Mutex::default(),
            is_unwritable: AtomicBool::new(false),
        }
    }

    /// Nothing panics between two changes that belong together.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds out whether a recording can be written, if one will be: before any VM records in vain.
    pub(crate) fn try_directory(&self, mode: WorkingSetMode) {
        if !matches!(mode, WorkingSetMode::Auto | WorkingSetMode::Record) {
            return;
        }
        if let Err(error) = WorkingSet::try_directory(&self.path) {
            self.fail(&error);
        }
    }

    /// What a VM that starts now does. A VM records only if what it records can be written.
    pub(crate) fn plan(&self, mode: WorkingSetMode) -> WorkingSetPlan {
        let mut state = self.lock();
        let record = match self.is_writable() {
            true => WorkingSetPlan::Record,
            false => WorkingSetPlan::Nothing,
        };
        match mode {
            WorkingSetMode::Off => WorkingSetPlan::Nothing,
            WorkingSetMode::Record => record,
            WorkingSetMode::Auto | WorkingSetMode::Replay => match self.load(&mut state) {
                Some(set) => WorkingSetPlan::Replay(set),
                None if mode == WorkingSetMode::Auto => record,
                None => {
                    if !std::mem::replace(&mut state.has_warned_of_none, true) {
                        tracing::error!(
                            path = %self.path.display(),
                            "there is no working set of this image to replay"
                        );
                    }
                    WorkingSetPlan::Nothing
                }
            },
        }
    }

    /// The working set in the file, if it is one of this image.
    pub(crate) fn saved(&self) -> Option<Arc<WorkingSet>> {
        self.load(&mut self.lock())
    }

    /// Whether recordings are written.
    pub(crate) fn is_writable(&self) -> bool {
        // No other memory is published by it.
        !self.is_unwritable.load(Ordering::Relaxed)
    }

    fn fail(&self, error: &WorkingSetError) {
        if !self.is_unwritable.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                error = error as &dyn std::error::Error,
                "working sets cannot be written: VMs of this image are served without recording, with prefetch"
            );
        }
    }

    /// Reads the file if it is another one than was read last.
    fn load(&self, state: &mut State) -> Option<Arc<WorkingSet>> {
        let version = FileVersion::of(&self.path);
        if let Some((read, set)) = &state.loaded
            && *read == version
        {
            return set.clone();
        }
        let set = self.read().map(Arc::new);
        // A file that is replaced meanwhile has another version than the one that is noted.
        state.loaded = Some((version, set.clone()));
        set
    }

    fn read(&self) -> Option<WorkingSet> {
        match WorkingSet::load_of(&self.path, self.image, self.image_bytes) {
            Ok(set) => set,
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "the working set is not used"
                );
                None
            }
        }
    }

    /// Merges what was recorded of a VM so far into the file. Returns the number of its pages afterwards; `None` if
    /// nothing was written. The first failure is logged, and is the last attempt. Waits for the disk.
    pub(crate) fn save(&self, recorder: &Recorder) -> Option<usize> {
        self.save_by(recorder, |set| set.save(&self.path))
    }

    fn save_by(
        &self,
        recorder: &Recorder,
        write: impl FnOnce(&WorkingSet) -> Result<(), WorkingSetError>,
    ) -> Option<usize> {
        // VMs that end at the same time would each merge what was there before both.
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let touches = recorder.touches();
        if touches.is_empty() || !self.is_writable() {
            return None;
        }
        let before = self.saved();
        let mut set = match &before {
            Some(set) => WorkingSet::clone(set),
            None => self.empty(),
        };
        // A VM counts once, however often its recording is written.
        let recorded = WorkingSet {
            recordings: u32::from(recorder.is_counted_now()),
            touches,
            ..self.empty()
        };
        set.merge(&recorded);
        // Its first part may be lost with a file that was removed.
        set.recordings = set.recordings.max(1);
        let pages = set.touches.len();
        if before.is_none() && self.lock().is_too_small(pages, self.least_pages()) {
            return None;
        }
        if let Err(error) = write(&set) {
            self.fail(&error);
            return None;
        }
        let version = FileVersion::of(&self.path);
        let mut state = self.lock();
        state.small = 0;
        state.loaded = Some((version, Some(Arc::new(set))));
        Some(pages)
    }

    fn empty(&self) -> WorkingSet {
        WorkingSet {
            image: self.image,
            image_bytes: self.image_bytes,
            page_size: RECORDED,
            recordings: 0,
            touches: Vec::new(),
        }
    }

    fn least_pages(&self) -> u64 {
        let pages = self.image_bytes / PageSize::Size4K.bytes();
        LEAST_PAGES.min(pages / LEAST_PART)
    }
}

impl State {
    /// Whether a first recording is thrown away for its size.
    fn is_too_small(&mut self, pages: usize, least: u64) -> bool {
        if pages as u64 >= least || self.small == MOST_SMALL {
            return false;
        }
        self.small += 1;
        tracing::info!(
            pages,
            least,
            "a recording with so few pages is not kept as the working set: the next VM records again"
        );
        true
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use pagetide_memory::GuestAddress;

    use super::*;

    const PAGES: u64 = 16_384;

    fn recorder_of(pages: u64) -> Recorder {
        let recorder = Recorder::new();
        for page in 0..pages {
            recorder.record(GuestAddress(page << RECORDED.shift()));
        }
        recorder
    }

    fn file_in(directory: &Path) -> WorkingSetFile {
        let path = directory.join("guest.mem.working-set");
        WorkingSetFile::new(path, Digest::of(b"image"), PAGES << RECORDED.shift())
    }

    fn replayed(file: &WorkingSetFile) -> Option<usize> {
        match file.plan(WorkingSetMode::Auto) {
            WorkingSetPlan::Replay(set) => Some(set.touches.len()),
            WorkingSetPlan::Record | WorkingSetPlan::Nothing => None,
        }
    }

    /// A guest that fails after one page is not what all later ones are restored by; a guest that never needs more is.
    #[test]
    fn a_small_recording_becomes_the_working_set_when_three_were_as_small() {
        let directory = tempfile::tempdir().unwrap();
        let file = file_in(directory.path());
        for _ in 0..MOST_SMALL {
            assert_eq!(file.save(&recorder_of(1)), None);
            assert_eq!(replayed(&file), None);
        }
        assert_eq!(file.save(&recorder_of(1)), Some(1));
        assert_eq!(replayed(&file), Some(1));

        std::fs::remove_file(&file.path).unwrap();
        assert_eq!(file.save(&recorder_of(1)), None);
        assert_eq!(file.save(&recorder_of(LEAST_PAGES)), Some(64));
        // A recording that is merged may be of any size.
        assert_eq!(file.save(&recorder_of(1)), Some(64));
    }

    #[test]
    fn a_file_that_cannot_be_written_is_tried_once() {
        let directory = tempfile::tempdir().unwrap();
        let missing = directory.path().join("none");
        let file = file_in(&missing);
        assert!(matches!(
            file.plan(WorkingSetMode::Auto),
            WorkingSetPlan::Record
        ));
        file.try_directory(WorkingSetMode::Replay);
        assert!(file.is_writable(), "who replays writes nothing");
        file.try_directory(WorkingSetMode::Auto);
        assert!(!file.is_writable());
        for mode in [WorkingSetMode::Auto, WorkingSetMode::Record] {
            let plan = file.plan(mode);
            assert!(matches!(plan, WorkingSetPlan::Nothing), "{plan:?}");
        }
        std::fs::create_dir(&missing).unwrap();
        assert_eq!(file.save(&recorder_of(100)), None);
        assert!(!file.path.exists());

        // One that fails later.
        let file = file_in(&missing);
        file.try_directory(WorkingSetMode::Auto);
        assert!(file.is_writable());
        std::fs::remove_dir(&missing).unwrap();
        assert_eq!(file.save(&recorder_of(100)), None);
        assert!(!file.is_writable());
    }

    /// A disk that takes seconds for a write holds up the recording alone: no VM that starts, and none that runs.
    #[test]
    fn nobody_waits_for_a_recording_that_is_being_written() {
        let directory = tempfile::tempdir().unwrap();
        let file = file_in(directory.path());
        assert_eq!(file.save(&recorder_of(100)), Some(100));
        let saved = file.save_by(&recorder_of(200), |set| {
            assert!(file.state.try_lock().is_ok(), "a VM that starts would wait");
            assert!(file.is_writable());
            assert_eq!(replayed(&file), Some(100), "what was there before");
            set.save(&file.path)
        });
        assert_eq!((saved, replayed(&file)), (Some(200), Some(200)));
    }

    #[test]
    fn a_set_is_read_once_and_again_when_its_file_is_another_one() {
        let directory = tempfile::tempdir().unwrap();
        let file = file_in(directory.path());
        assert_eq!(file.save(&recorder_of(100)), Some(100));
        let (first, second) = (file.saved().unwrap(), file.saved().unwrap());
        assert!(Arc::ptr_eq(&first, &second));
        let mut other = WorkingSet::clone(&first);
        other.touches.truncate(70);
        other.save(&file.path).unwrap();
        assert_eq!(file.saved().unwrap().touches.len(), 70);
        std::fs::write(&file.path, "no set").unwrap();
        assert_eq!(file.saved(), None);
        std::fs::remove_file(&file.path).unwrap();
        assert_eq!(file.saved(), None);
    }

    /// Its length is what whoever writes the directory wants.
    #[test]
    fn a_file_that_is_no_set_by_its_length_or_kind_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let file = file_in(directory.path());
        let long = std::fs::File::create(&file.path).unwrap();
        long.set_len(1 << 40).unwrap();
        let error = WorkingSet::load(&file.path).unwrap_err();
        assert!(matches!(error, WorkingSetError::TooLong { .. }), "{error}");
        assert_eq!(file.saved(), None);
        std::fs::remove_file(&file.path).unwrap();
        let name = file.path.clone();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &name, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let error = WorkingSet::load(&name).unwrap_err();
        assert!(matches!(error, WorkingSetError::Io { .. }), "{error}");
    }

    /// Kind: what anybody may have written is taken in before it is compared. It may be a hundred megabytes, which take ten times
    /// as many when they are decoded.
    #[test]
    fn of_a_set_of_another_image_only_the_header_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let file = file_in(directory.path());
        let other = WorkingSet {
            image: Digest::of(b"another image"),
            ..file.empty()
        };
        let mut bytes = other.encode();
        // Whoever reads on finds that it is cut.
        bytes.truncate(72);
        std::fs::write(&file.path, &bytes).unwrap();
        let of = |image| WorkingSet::load_of(&file.path, image, file.image_bytes).unwrap_err();
        let error = of(file.image);
        assert!(
            matches!(error, WorkingSetError::OtherImage { .. }),
            "{error}"
        );
        let error = of(other.image);
        assert!(matches!(error, WorkingSetError::Format { .. }), "{error}");
        assert_eq!(file.saved(), None);
    }
}
