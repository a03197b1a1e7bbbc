//! A cache directory as this process uses it. Nobody waits for a block of a disk that hangs for longer than [`LIMIT`]: the
//! store has the content, too.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use pagetide_pager::log_limit::log_limited;

use super::CacheError;
use super::directory::Directory;
use super::threads::{Job, Threads};

/// How long the disk may take for one block, or to open the directory.
pub(super) const LIMIT: Duration = Duration::from_secs(2);
/// How long nobody asks a disk that did not answer in time, except for one who looks whether it does.
const REST: Duration = Duration::from_secs(30);
/// The most threads that read from one directory. Who finds all of them at work asks the store.
const READERS: usize = 64;
/// The most threads that open directories.
const OPENERS: usize = 4;
/// The bound of blocks that wait for the disk, in bytes.
const WAITING_BYTES: usize = 16 << 20;
/// The most uses of blocks that wait to be noted, each with an open file.
const MOST_NOTES: usize = 64;

/// The directories that are open, each once: their threads are there for all objects.
static DISKS: Mutex<Vec<Weak<Disk>>> = Mutex::new(Vec::new());

/// Directories that were not opened in time, and until when nobody tries again.
static SILENT: Mutex<Vec<(PathBuf, Instant)>> = Mutex::new(Vec::new());

static OPENING: LazyLock<Threads> = LazyLock::new(|| Threads::new("pt-cache-open", OPENERS));

/// An open directory, and the threads that wait for its disk.
#[derive(Debug)]
pub(super) struct Disk {
    pub(super) directory: Arc<Directory>,
    readers: Threads,
    writer: Threads,
    /// Bytes of blocks that are to be written.
    waiting: AtomicUsize,
    /// Uses that are to be noted.
    notes: AtomicUsize,
    /// After a time without an answer: until when nobody asks.
    rests_until: Mutex<Option<Instant>>,
}

impl Disk {
    /// Opens or creates the directory.
    ///
    /// # Errors
    /// [`CacheError`], also for a directory that cannot be opened in time.
    pub(super) fn open(path: &Path) -> Result<Arc<Self>, CacheError> {
        let directory = opened_in_time(path)?;
        let mut disks = DISKS.lock().unwrap_or_else(PoisonError::into_inner);
        disks.retain(|disk| disk.strong_count() > 0);
        let open: Vec<Arc<Self>> = disks.iter().filter_map(Weak::upgrade).collect();
        let is_same = |disk: &&Arc<Self>| disk.directory.is_same(&directory);
        if let Some(disk) = open.iter().find(is_same).map(Arc::clone) {
            // One of the others may be closed here, which may take long.
            drop(disks);
            return Ok(disk);
        }
        let disk = Arc::new(Self {
            directory: Arc::new(directory),
            readers: Threads::new("pt-cache-read", READERS),
            writer: Threads::new("pt-cache-write", 1),
            waiting: AtomicUsize::new(0),
            notes: AtomicUsize::new(0),
            rests_until: Mutex::default(),
        });
        disks.push(Arc::downgrade(&disk));
        drop(disks);
        Ok(disk)
    }

    /// Has a thread do `ask` for each of `wanted`. The answers are in the order of `wanted`; `None` from the first one on that
    /// takes longer than [`LIMIT`], and for all if every thread has work.
    pub(super) fn ask<W, A>(
        &self,
        wanted: Vec<W>,
        ask: impl Fn(&W) -> A + Send + 'static,
    ) -> Vec<Option<A>>
    where
        W: Send + 'static,
        A: Send + 'static,
    {
        let count = wanted.len();
        let mut answers: Vec<Option<A>> = std::iter::repeat_with(|| None).take(count).collect();
        if count == 0 || !self.may_be_asked() {
            return answers;
        }
        let (sender, receiver) = channel();
        let job = move || {
            for one in &wanted {
                // Nobody waits any more.
                if sender.send(ask(one)).is_err() {
                    return;
                }
            }
        };
        match self.readers.run_now(Box::new(job)) {
            Ok(true) => {}
            Ok(false) => return answers,
            Err(error) => {
                log_limited!(warn, %error, "no thread reads from the disk cache: blocks are fetched instead");
                return answers;
            }
        }
        for answer in &mut answers {
            match receiver.recv_timeout(LIMIT) {
                Ok(found) => *answer = Some(found),
                Err(RecvTimeoutError::Timeout) => {
                    self.has_hung();
                    return answers;
                }
                // Its thread has panicked, or could not be started.
                Err(RecvTimeoutError::Disconnected) => return answers,
            }
        }
        self.has_answered();
        answers
    }

    /// Has the thread that writes do the job, for a block of so many bytes. False if the thread is too far behind.
    pub(super) fn write(
        self: &Arc<Self>,
        bytes: usize,
        job: impl FnOnce() + Send + 'static,
    ) -> bool {
        // One that waits alone may be of any size.
        let most = WAITING_BYTES.max(bytes);
        self.wait_to_write(|disk| &disk.waiting, bytes, most, job)
    }

    /// Has the thread that writes note a use. It is left out if the thread is too far behind.
    pub(super) fn note(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) {
        let _ = self.wait_to_write(|disk| &disk.notes, 1, MOST_NOTES, job);
    }

    /// Counts `amount` until the job is done. False if that is more than `most`, or if there is no thread.
    fn wait_to_write(
        self: &Arc<Self>,
        counter: fn(&Self) -> &AtomicUsize,
        amount: usize,
        most: usize,
        job: impl FnOnce() + Send + 'static,
    ) -> bool {
        let before = counter(self).fetch_add(amount, Relaxed);
        let counted = Counted {
            disk: Arc::clone(self),
            counter,
            amount,
        };
        if before.saturating_add(amount) > most {
            return false;
        }
        let job: Job = Box::new(move || {
            job();
            drop(counted);
        });
        self.writer.run(job).is_ok()
    }

    fn rests(&self) -> MutexGuard<'_, Option<Instant>> {
        let rests = self.rests_until.lock();
        rests.unwrap_or_else(PoisonError::into_inner)
    }

    fn may_be_asked(&self) -> bool {
        let (mut rests, now) = (self.rests(), Instant::now());
        match *rests {
            Some(until) if now < until => false,
            // This one looks, and the others wait for what it finds.
            Some(_) => {
                *rests = Some(now + REST);
                true
            }
            None => true,
        }
    }

    fn has_hung(&self) {
        if self.rests().replace(Instant::now() + REST).is_none() {
            let directory = self.directory.path().display();
            log_limited!(warn, %directory, "the disk cache does not answer: blocks are fetched instead");
        }
    }

    fn has_answered(&self) {
        if self.rests().take().is_some() {
            let directory = self.directory.path().display();
            log_limited!(info, %directory, "the disk cache answers again");
        }
    }
}

/// What waits for the thread that writes.
struct Counted {
    disk: Arc<Disk>,
    counter: fn(&Disk) -> &AtomicUsize,
    amount: usize,
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.counter)(&self.disk).fetch_sub(self.amount, Relaxed);
    }
}

fn opened_in_time(path: &Path) -> Result<Directory, CacheError> {
    let failed = |source: io::Error| CacheError::Directory {
        directory: path.into(),
        source,
    };
    let silent = || failed(io::ErrorKind::TimedOut.into());
    let now = Instant::now();
    let lock = || SILENT.lock().unwrap_or_else(PoisonError::into_inner);
    {
        let mut resting = lock();
        resting.retain(|(_, until)| now < *until);
        if resting.iter().any(|(other, _)| other == path) {
            return Err(silent());
        }
    }
    let (sender, receiver) = channel();
    let owned = path.to_owned();
    let job = move || {
        // Nobody waits any more where it cannot be sent.
        let _ = sender.send(Directory::open(&owned));
    };
    OPENING.run(Box::new(job)).map_err(failed)?;
    let opened = receiver.recv_timeout(LIMIT);
    opened.unwrap_or_else(|_| {
        lock().push((path.to_owned(), Instant::now() + REST));
        Err(silent())
    })
}
