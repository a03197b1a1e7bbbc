//! The file of an image's working set: read once, and written by one recording at a time.
//!
//! It is an aid: a file that cannot be read or written costs time, is warned of once, and hurts no VM.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use pagetide_memory::{PageRange, PageSize};
use pagetide_sources::Digest;

use crate::log_limit::{LogLimit, log_limited};
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

/// How long a VM that starts waits for the disk. It is then served without a working set, page by page.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a recording waits for the one before, and how many do. It is then lost.
const WRITE_PATIENCE: Duration = Duration::from_secs(30);
const MOST_WAITING: u32 = 64;

/// What a VM does with its working set.
#[derive(Debug)]
pub(crate) enum WorkingSetPlan {
    /// Neither replay nor record.
    Nothing,
    /// Record its touches.
    Record,
    /// Fetch these pages first.
    Replay(Arc<LoadedSet>),
}

/// A working set as its file has it, and the order of its replay: all VMs have the same.
#[derive(Debug)]
pub(crate) struct LoadedSet {
    set: WorkingSet,
    runs: OnceLock<Vec<PageRange>>,
}

impl LoadedSet {
    pub(crate) fn new(set: WorkingSet) -> Arc<Self> {
        let runs = OnceLock::new();
        Arc::new(Self { set, runs })
    }

    /// [`WorkingSet::runs`], made once: a set of a million pages takes a third of a second.
    pub(crate) fn runs(&self) -> &[PageRange] {
        self.runs.get_or_init(|| self.set.runs())
    }
}

impl Deref for LoadedSet {
    type Target = WorkingSet;

    fn deref(&self) -> &WorkingSet {
        &self.set
    }
}

/// The file of one image's working set.
#[derive(Debug)]
pub(crate) struct WorkingSetFile {
    path: PathBuf,
    image: Digest,
    image_bytes: u64,
    /// Not held while the disk is waited for, which can take any time.
    state: Mutex<State>,
    /// Notified when a look at the file, or a write, has ended.
    changed: Condvar,
    logged: LogLimit,
    /// Whether writing has failed. Who asks waits for nobody.
    is_unwritable: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// What was read last, and of which version of the file; without a set if it was not usable.
    loaded: Option<(FileVersion, Option<Arc<LoadedSet>>)>,
    /// The look at the file that a thread takes now, if one does.
    look: Option<Look>,
    /// Looks so far.
    looks: u64,
    /// Since when a recording is merged and written, if one is.
    writing_since: Option<Instant>,
    /// Recordings that wait for that.
    waiting: u32,
    /// Recordings that were thrown away since the last one that was written.
    small: u32,
    /// Whether it was said that there is nothing to replay.
    has_warned_of_none: bool,
}

#[derive(Clone, Copy, Debug)]
struct Look {
    number: u64,
    since: Instant,
}

/// The disk does not answer, or there is no thread that asks.
#[derive(Debug)]
pub(crate) struct Silent;

/// A look at the file, by its own thread. Its end, however it comes, is the end of the wait for it.
struct Looking(Arc<WorkingSetFile>);

impl Drop for Looking {
    fn drop(&mut self) {
        self.0.lock().look = None;
        self.0.changed.notify_all();
    }
}

/// A recording is merged and written, until this is dropped.
struct Writing(Arc<WorkingSetFile>);

impl Drop for Writing {
    fn drop(&mut self) {
        self.0.lock().writing_since = None;
        self.0.changed.notify_all();
    }
}

impl WorkingSetFile {
    pub(crate) fn new(path: PathBuf, image: Digest, image_bytes: u64) -> Self {
        Self {
            path,
            image,
            image_bytes,
            state: Mutex::default(),
            changed: Condvar::new(),
            logged: LogLimit::default(),
            is_unwritable: AtomicBool::new(false),
        }
    }

    /// Nothing panics between two changes that belong together.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds out whether a recording can be written, if one will be: before any VM records in vain.
    pub(crate) fn try_directory(&self, mode: WorkingSetMode) {
        if !mode.records() {
            return;
        }
        if let Err(error) = WorkingSet::try_directory(&self.path) {
            self.fail(&error);
        }
    }

    /// What a VM that starts now does. A VM records only if what it records can be written.
    pub(crate) fn plan(self: &Arc<Self>, mode: WorkingSetMode) -> WorkingSetPlan {
        self.plan_within(mode, PATIENCE)
    }

    fn plan_within(self: &Arc<Self>, mode: WorkingSetMode, patience: Duration) -> WorkingSetPlan {
        let record = match self.is_writable() {
            true => WorkingSetPlan::Record,
            false => WorkingSetPlan::Nothing,
        };
        match mode {
            WorkingSetMode::Off => WorkingSetPlan::Nothing,
            WorkingSetMode::Record => record,
            WorkingSetMode::Auto | WorkingSetMode::Replay => match self.look(patience) {
                Ok(Some(set)) => WorkingSetPlan::Replay(set),
                Ok(None) if mode == WorkingSetMode::Auto => record,
                Ok(None) => {
                    if !std::mem::replace(&mut self.lock().has_warned_of_none, true) {
                        tracing::error!(
                            path = %self.path.display(),
                            "there is no working set of this image to replay"
                        );
                    }
                    WorkingSetPlan::Nothing
                }
                // What it was is a set of this image, too.
                Err(Silent) => match self.lock().last() {
                    Some(set) => WorkingSetPlan::Replay(set),
                    None => WorkingSetPlan::Nothing,
                },
            },
        }
    }

    /// The working set in the file, if it is one of this image.
    ///
    /// # Errors
    /// [`Silent`].
    pub(crate) fn saved(self: &Arc<Self>) -> Result<Option<Arc<LoadedSet>>, Silent> {
        self.look(PATIENCE)
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

    /// The working set in the file. A thread looks, for all who ask meanwhile: a disk may take any time for its answer, and
    /// after `limit` nobody waits for it.
    fn look(self: &Arc<Self>, limit: Duration) -> Result<Option<Arc<LoadedSet>>, Silent> {
        self.look_by(limit, Self::load)
    }

    fn look_by(
        self: &Arc<Self>,
        limit: Duration,
        load: impl FnOnce(&Self) + Send + 'static,
    ) -> Result<Option<Arc<LoadedSet>>, Silent> {
        let mut state = self.lock();
        if state.look.is_none() {
            let its = Arc::clone(self);
            let thread = Builder::new().name("pt-working-set".into());
            let started = thread.spawn(move || {
                // Not before: its end takes the lock, which is held here.
                let looking = Looking(its);
                load(&looking.0);
            });
            if let Err(error) = started {
                log_limited!(warn, self.logged, %error, "no thread looks at the working set");
                return Err(Silent);
            }
            state.looks += 1;
            state.look = Some(Look {
                number: state.looks,
                since: Instant::now(),
            });
        }
        let number = state.looks;
        loop {
            let Some(look) = state.look.filter(|look| look.number == number) else {
                return Ok(state.last());
            };
            let left = limit.saturating_sub(look.since.elapsed());
            if left.is_zero() {
                log_limited!(
                    warn,
                    self.logged,
                    path = %self.path.display(),
                    "the disk does not answer: VMs start with the working set as it was, or without"
                );
                return Err(Silent);
            }
            let waited = self.changed.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Reads the file if it is another one than was read last.
    fn load(&self) {
        let version = FileVersion::of(&self.path);
        if matches!(&self.lock().loaded, Some((read, _)) if *read == version) {
            return;
        }
        let set = self.read().map(LoadedSet::new);
        // A file that is replaced meanwhile has another version than the one that is noted.
        self.lock().loaded = Some((version, set));
    }

    fn read(&self) -> Option<WorkingSet> {
        match WorkingSet::load_of(&self.path, self.image, self.image_bytes) {
            Ok(set) => set,
            Err(error) => {
                log_limited!(
                    warn,
                    self.logged,
                    error = &error as &dyn std::error::Error,
                    "the working set is not used"
                );
                None
            }
        }
    }

    /// Merges what was recorded of a VM so far into the file. Returns the number of its pages afterwards; `None` if
    /// nothing was written. The first failure is logged, and is the last attempt. Waits for the disk.
    pub(crate) fn save(self: &Arc<Self>, recorder: &Recorder) -> Option<usize> {
        self.save_by(recorder, |set| set.save(&self.path))
    }

    fn save_by(
        self: &Arc<Self>,
        recorder: &Recorder,
        write: impl FnOnce(&WorkingSet) -> Result<(), WorkingSetError>,
    ) -> Option<usize> {
        let _writing = self.begin_to_write(WRITE_PATIENCE)?;
        let touches = recorder.touches();
        if touches.is_empty() || !self.is_writable() {
            return None;
        }
        let before = self.look(WRITE_PATIENCE).ok()?;
        let mut set = match &before {
            Some(loaded) => loaded.set.clone(),
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
        state.loaded = Some((version, Some(LoadedSet::new(set))));
        Some(pages)
    }

    /// One recording is merged and written at a time: VMs that end at the same time would each merge what was there before
    /// both. `None` if the disk holds up one that is being written.
    fn begin_to_write(self: &Arc<Self>, patience: Duration) -> Option<Writing> {
        let mut state = self.lock();
        while let Some(since) = state.writing_since {
            let left = patience.saturating_sub(since.elapsed());
            if left.is_zero() || state.waiting == MOST_WAITING {
                log_limited!(
                    warn,
                    self.logged,
                    path = %self.path.display(),
                    "a recording is not saved: the disk has not taken the one before"
                );
                return None;
            }
            state.waiting += 1;
            let waited = self.changed.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        state.writing_since = Some(Instant::now());
        Some(Writing(Arc::clone(self)))
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
    /// What was read last.
    fn last(&self) -> Option<Arc<LoadedSet>> {
        self.loaded.as_ref().and_then(|(_, set)| set.clone())
    }

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
    use std::sync::mpsc;

    use pagetide_memory::GuestAddress;
    use pagetide_test_support::{NoOtherThread, eventually, in_a_process_of_its_own};

    use super::*;

    const PAGES: u64 = 16_384;

    fn recorder_of(pages: u64) -> Recorder {
        let recorder = Recorder::new();
        for page in 0..pages {
            recorder.record(GuestAddress(page << RECORDED.shift()));
        }
        recorder
    }

    fn file_in(directory: &Path) -> Arc<WorkingSetFile> {
        let path = directory.join("guest.mem.working-set");
        let bytes = PAGES << RECORDED.shift();
        Arc::new(WorkingSetFile::new(path, Digest::of(b"image"), bytes))
    }

    /// Of a disk that answers, on a machine that may be slow.
    fn plan(file: &Arc<WorkingSetFile>, mode: WorkingSetMode) -> WorkingSetPlan {
        file.plan_within(mode, WRITE_PATIENCE)
    }

    fn saved(file: &Arc<WorkingSetFile>) -> Option<Arc<LoadedSet>> {
        file.look(WRITE_PATIENCE).unwrap()
    }

    fn replayed(file: &Arc<WorkingSetFile>) -> Option<usize> {
        match plan(file, WorkingSetMode::Auto) {
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
            plan(&file, WorkingSetMode::Auto),
            WorkingSetPlan::Record
        ));
        file.try_directory(WorkingSetMode::Replay);
        assert!(file.is_writable(), "who replays writes nothing");
        file.try_directory(WorkingSetMode::Auto);
        assert!(!file.is_writable());
        for mode in [WorkingSetMode::Auto, WorkingSetMode::Record] {
            let plan = plan(&file, mode);
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

    /// Kind: an optional part that does not answer, and for which the main part waits.
    #[test]
    fn a_disk_that_does_not_answer_keeps_no_vm_from_starting() {
        let directory = tempfile::tempdir().unwrap();
        let file = file_in(directory.path());
        let hangs = |file: &Arc<WorkingSetFile>| {
            let (answer, answered) = mpsc::channel::<()>();
            let look = file.look_by(Duration::ZERO, move |file| {
                let _ = answered.recv();
                file.load();
            });
            assert!(look.is_err());
            answer
        };
        let ends = |answer: mpsc::Sender<()>| {
            drop(answer);
            eventually("the look has ended", || file.lock().look.is_none());
        };
        let answer = hangs(&file);
        let plan = file.plan_within(WorkingSetMode::Auto, Duration::ZERO);
        assert!(matches!(plan, WorkingSetPlan::Nothing), "{plan:?}");
        // Nobody looks beside it, and its end is an answer for all.
        assert_eq!(file.lock().looks, 1);
        ends(answer);
        assert!(saved(&file).is_none());
        assert_eq!(file.save(&recorder_of(100)), Some(100));
        let answer = hangs(&file);
        let plan = file.plan_within(WorkingSetMode::Auto, Duration::ZERO);
        assert!(matches!(&plan, WorkingSetPlan::Replay(set) if set.touches.len() == 100));
        ends(answer);
        // A look that panics has ended, too.
        let looks = file.lock().looks;
        let look = file.look_by(Duration::MAX, |_| panic!("the test's"));
        assert_eq!(look.unwrap().unwrap().touches.len(), 100);
        assert_eq!(file.lock().looks, looks + 1);
        assert_eq!(replayed(&file), Some(100));
    }

    /// Kind: what this process lacks, and a lock that the way out takes again.
    #[test]
    fn without_a_thread_nobody_looks_and_nobody_waits() {
        let this = "working_set_file::tests::without_a_thread_nobody_looks_and_nobody_waits";
        in_a_process_of_its_own(this, || {
            let directory = tempfile::tempdir().unwrap();
            let file = file_in(directory.path());
            let none = NoOtherThread::begin(&[]);
            let plan = plan(&file, WorkingSetMode::Auto);
            drop(none);
            assert!(matches!(plan, WorkingSetPlan::Nothing), "{plan:?}");
            assert!(saved(&file).is_none());
        });
    }

    #[test]
    fn what_is_recorded_waits_for_no_disk_that_does_not_take_the_one_before() {
        let directory = tempfile::tempdir().unwrap();
        let file = file_in(directory.path());
        let saved = file.save_by(&recorder_of(100), |set| {
            assert!(file.begin_to_write(Duration::ZERO).is_none());
            // Nor are there any number of them.
            file.lock().waiting = MOST_WAITING;
            assert_eq!(file.save(&recorder_of(200)), None);
            file.lock().waiting = 0;
            set.save(&file.path)
        });
        assert_eq!(saved, Some(100));
        assert_eq!(file.save(&recorder_of(200)), Some(200));
    }

    #[test]
    fn a_set_is_read_once_and_again_when_its_file_is_another_one() {
        let directory = tempfile::tempdir().unwrap();
        let file = file_in(directory.path());
        assert_eq!(file.save(&recorder_of(100)), Some(100));
        let [first, second] = [(); 2].map(|()| saved(&file).unwrap());
        assert!(Arc::ptr_eq(&first, &second));
        // Nor is the order of its replay made for each VM.
        assert!(std::ptr::eq(first.runs(), second.runs()));
        assert_eq!(first.runs(), first.set.runs());
        let mut other = first.set.clone();
        other.touches.truncate(70);
        other.save(&file.path).unwrap();
        assert_eq!(saved(&file).unwrap().touches.len(), 70);
        std::fs::write(&file.path, "no set").unwrap();
        assert!(saved(&file).is_none());
        std::fs::remove_file(&file.path).unwrap();
        assert!(saved(&file).is_none());
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
        assert!(saved(&file).is_none());
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
        assert!(saved(&file).is_none());
    }
}
