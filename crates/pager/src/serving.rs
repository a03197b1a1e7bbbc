//! Serving a pager's descriptor: from a VMM's own event loop, or by threads.

mod message;
mod waits;

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use pagetide_memory::Urgency;
use pagetide_uapi::userfaultfd::{EventBuffer, PageFault};
use rustix::event::epoll::Event;

use crate::again::Budget;
use crate::channel::{Channel, Role};
use crate::counters::Counters;
use crate::error::{ServeError, message_of};
use crate::notice::Notice;
use crate::pager::Pager;
use crate::poller::{DEFERRED, INTERRUPT, TIMER, other};
use crate::resolver::Resolver;
pub use waits::Waited;
use waits::{Outcome, Waits};

/// The maximal number of descriptors that one wait reports.
const READY_AT_ONCE: usize = 64;

/// The number of reads between two checks for other ready descriptors.
const READS_AT_ONCE: usize = 256;

/// The per-thread state for serving a pager's descriptor.
///
/// A VMM with its own event loop waits until [`Self::as_fd`] is readable, and then calls
/// [`Self::process_ready`]. Several threads may do so, each with a separate `Serving`. [`Readers`] are
/// such threads.
///
/// A thread that serves must not touch missing memory, unless another serves, too: nobody would resolve its fault.
/// [`Resolver::ensure_present`] makes it present first.
pub struct Serving {
    resolver: Resolver,
    buffer: EventBuffer,
    events: Vec<Event>,
    /// Channels that may have more messages.
    ready: VecDeque<Arc<Channel>>,
    faults: Vec<PageFault>,
    /// The numbers of watched descriptors that are readable.
    others: Vec<u32>,
    on_resolved: Option<OnResolved>,
    waits: Waits,
}

/// The callback for resolved faults.
type OnResolved = Box<dyn FnMut(Duration) + Send>;

impl Serving {
    /// Creates the state to serve `pager`; one read takes at most `messages_per_read` messages (at
    /// least one). A thread resolves the faults that it has read itself: more messages per read save
    /// system calls, but leave less work to other threads.
    pub fn new(pager: &Arc<Pager>, messages_per_read: usize) -> Self {
        Self {
            resolver: Resolver::new(Arc::clone(pager), None),
            buffer: EventBuffer::new(messages_per_read),
            events: Vec::with_capacity(READY_AT_ONCE),
            ready: VecDeque::new(),
            faults: Vec::new(),
            others: Vec::new(),
            on_resolved: None,
            waits: Waits::default(),
        }
    }

    /// Calls `callback` for each fault that was resolved here, or whose page was requested from a
    /// source, with the time since its message was read. Costs a reading of the clock for each fault.
    pub fn on_resolved(&mut self, callback: impl FnMut(Duration) + Send + 'static) {
        self.on_resolved = Some(Box::new(callback));
    }

    /// Calls `callback` for each page that a thread has waited for, when the page is there: with the time since the message of
    /// its fault was read here. Content that no thread which serves has installed is noticed at this one's next turn. Of the
    /// pages that wait for a source at one time, 256 are told of.
    pub fn on_waited(&mut self, callback: impl FnMut(Waited, Duration) + Send + 'static) {
        self.waits.on_waited(callback);
    }

    /// The counts so far.
    pub fn counters(&self) -> &Counters {
        self.resolver.counters()
    }

    /// Serves what is ready, without waiting: faults, events and deadlines. Returns the number of
    /// resolved faults. A fault that cannot be resolved becomes a notice ([`Notice::Unresolved`]), not
    /// an error.
    ///
    /// # Errors
    /// [`ServeError::Wait`] and [`ServeError::Read`], if the descriptors themselves fail.
    pub fn process_ready(&mut self) -> Result<usize, ServeError> {
        self.serve(Some(Duration::ZERO), || false)
    }

    /// As [`Self::process_ready`], but begins no fault, and no installation, after `budget` has passed: a fault may take
    /// as long as its source's content. What is left is reported again, as is what the kernel refuses to install for now. One
    /// of them is tried in any case, if there is one.
    ///
    /// # Errors
    /// As [`Self::process_ready`].
    pub fn process_ready_within(&mut self, budget: Duration) -> Result<usize, ServeError> {
        let _budget = Budget::of(budget);
        self.serve(Some(Duration::ZERO), || false)
    }

    /// Also waits for `fd` in [`Self::serve_for`], which reports it by `number` as long as it is readable.
    /// Only one thread may serve a pager that watches descriptors: a report goes to one of them.
    ///
    /// # Errors
    /// [`ServeError::Wait`], if the kernel refuses, as for a descriptor that is watched already.
    pub fn watch(&self, fd: BorrowedFd<'_>, number: u32) -> Result<(), ServeError> {
        let poller = &self.resolver.pager().poller;
        poller.add_other(fd, number).map_err(ServeError::Wait)
    }

    /// Ends watching a descriptor.
    pub fn unwatch(&self, fd: BorrowedFd<'_>) {
        self.resolver.pager().poller.remove_other(fd);
    }

    /// As [`Self::process_ready`], but waits until something is ready, for at most `timeout` (`None`: for
    /// ever): a VMM whose event loop has little else to do needs one call less for each fault. Returns the numbers of the
    /// watched descriptors that are readable.
    ///
    /// # Errors
    /// As [`Self::process_ready`].
    pub fn serve_for(&mut self, timeout: Option<Duration>) -> Result<&[u32], ServeError> {
        self.others.clear();
        self.serve(timeout, || false)?;
        Ok(&self.others)
    }

    /// Serves what becomes ready within `timeout`; returns after the first ready descriptors were
    /// served, or when `stopping` returns true.
    fn serve(
        &mut self,
        timeout: Option<Duration>,
        stopping: impl Fn() -> bool,
    ) -> Result<usize, ServeError> {
        if self.ready.is_empty() {
            self.wait(timeout)?;
        }
        let (mut resolved, mut installed) = (0, 0);
        // Channels with more messages take turns, so that a process with many messages does not block
        // others, or deadlines.
        for _ in 0..READS_AT_ONCE {
            // Threads wait for it.
            while Self::goes_on(resolved + installed) && self.install(Urgency::Urgent) {
                installed += 1;
            }
            let Some(channel) = self.ready.pop_front() else {
                break;
            };
            if stopping() || !Self::goes_on(resolved + installed) {
                self.ready.push_front(channel);
                break;
            }
            let served = self.serve_one(&channel).inspect_err(|_| {
                // An owner that polls is not told of them again.
                self.hand_back();
            });
            let (faults, has_more) = served?;
            resolved += faults;
            if has_more {
                self.ready.push_back(channel);
            }
        }
        // No thread waits for it, and faults may have come meanwhile: one at a time.
        if !stopping() && Self::goes_on(resolved + installed) {
            self.install(Urgency::Bulk);
        }
        self.waits.look(self.resolver.pager());
        self.hand_back();
        Ok(resolved)
    }

    /// Whether there is time for more, when so much was done. Something is done in any case.
    fn goes_on(done: usize) -> bool {
        done == 0 || !Budget::is_over()
    }

    /// Installs the next content that was handed over, if there is any.
    fn install(&self, least: Urgency) -> bool {
        let pager = self.resolver.pager();
        // Of this each turn asks three times.
        !pager.delivered.is_empty() && pager.install_delivered(least)
    }

    /// Reports what remains again, to this thread or another.
    fn hand_back(&mut self) {
        let Pager {
            poller, delivered, ..
        } = &**self.resolver.pager();
        if !delivered.is_empty() {
            poller.report_deferred();
        }
        // It is empty after most turns: no iterator, whose end takes longer than the look.
        while let Some(channel) = self.ready.pop_front() {
            poller.report_again(&channel);
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), ServeError> {
        let Self {
            resolver,
            events,
            ready,
            others,
            ..
        } = self;
        let pager = resolver.pager();
        events.clear();
        pager
            .poller
            .wait(events, timeout)
            .map_err(ServeError::Wait)?;
        let table = pager.table();
        for event in events.drain(..) {
            match event.data.u64() {
                INTERRUPT => {}
                TIMER => pager.tick(),
                DEFERRED => {
                    let kept = table
                        .channels()
                        .iter()
                        .filter(|channel| channel.has_deferred());
                    ready.extend(kept.cloned());
                    ready.extend(pager.others.which(Channel::has_deferred));
                }
                token => match other(token) {
                    Some(number) => others.push(number),
                    None => {
                        let channel = table.channel(token).cloned();
                        if let Some(channel) = channel.or_else(|| pager.others.channel(token)) {
                            ready.push_back(channel);
                        }
                    }
                },
            }
        }
        Ok(())
    }

    /// Resolves the faults of one read of a userfaultfd. Returns their number, and whether there may be
    /// more messages: if not, the read took all of them, and later ones are reported again.
    fn serve_one(&mut self, channel: &Channel) -> Result<(usize, bool), ServeError> {
        let pager = Arc::clone(self.resolver.pager());
        let mut faults = std::mem::take(&mut self.faults);
        let read = channel.read(&mut self.buffer, &mut faults, |spans, event| {
            pager.apply(channel, spans, event);
        });
        let result = match read {
            Ok(batch) if batch.lacks => {
                // The kernel installs nothing there until the message is read.
                channel.defer(faults.drain(..));
                pager.read_later(channel);
                Ok((0, false))
            }
            Ok(batch) => {
                self.resolver.count_read(faults.len(), batch.messages == 0);
                let pages_before = self.resolver.counters().pages;
                let is_timed = self.on_resolved.is_some() || self.waits.is_on();
                let read_at = is_timed.then(Instant::now);
                // What is left of them when the loop ends is stored for the next reader.
                let mut rest = Rest {
                    channel,
                    pager: &pager,
                    faults: &faults,
                    busy: Vec::new(),
                };
                while let Some((message, behind)) = rest.faults.split_first() {
                    let outcome = self.resolve(&pager, channel, message);
                    rest.faults = behind;
                    if matches!(outcome, Outcome::Busy(..)) {
                        rest.busy.push(*message);
                    }
                    if let Some(read_at) = read_at {
                        self.tell_of(outcome, read_at);
                    }
                    if Budget::is_over() {
                        break;
                    }
                }
                let resolved = faults.len() - rest.faults.len();
                drop(rest);
                // The kernel hands out faults first, and ends the read without an error where it has no descriptor for a fork.
                // It installs nothing while a fork waits to be read: where something was installed, none does. (The pages of
                // another address space are installed in the region's own.)
                let has_installed =
                    channel.role == Role::Region && self.resolver.counters().pages > pages_before;
                let may_be_unread = channel.has_forks && batch.messages > 0 && !has_installed;
                Ok((resolved, batch.is_full || may_be_unread))
            }
            Err(error) => {
                if !faults.is_empty() {
                    channel.defer(faults.drain(..));
                    pager.poller.report_deferred();
                }
                Err(ServeError::Read(error))
            }
        };
        faults.clear();
        self.faults = faults;
        result
    }
}

impl Serving {
    /// Tells of a fault whose message was read at `read_at`.
    fn tell_of(&mut self, outcome: Outcome, read_at: Instant) {
        let now = Instant::now();
        if let Some(callback) = &mut self.on_resolved {
            callback(now.saturating_duration_since(read_at));
        }
        self.waits.note(outcome, read_at, now);
    }
}

/// Faults that were read and not yet resolved. If the thread unwinds, or its budget has passed, others resolve them: also
/// the one during which it did, whose page may be missing.
struct Rest<'a> {
    channel: &'a Channel,
    pager: &'a Pager,
    faults: &'a [PageFault],
    /// Those for which the kernel installs nothing for now. They come after all others, and not at once: the thread that keeps
    /// the kernel from it may have to wait for this one's processor.
    busy: Vec<PageFault>,
}

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        if !self.faults.is_empty() {
            self.channel.defer(self.faults.iter().copied());
            self.pager.poller.report_deferred();
        }
        if !self.busy.is_empty() {
            self.channel.defer(self.busy.drain(..));
            self.pager.try_later();
        }
    }
}

impl std::fmt::Debug for Serving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Serving")
            .field("resolver", &self.resolver)
            .field("ready", &self.ready.len())
            .finish_non_exhaustive()
    }
}

impl AsFd for Serving {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.resolver.pager().poller.as_fd()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.hand_back();
    }
}

/// The configuration of the threads that serve a pager's descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReaderConfig {
    /// The number of threads, at least one. Each serves all userfaultfds.
    pub threads: usize,
    /// The maximal number of messages per read.
    pub messages_per_read: usize,
}

impl ReaderConfig {
    /// The configuration for `threads` readers: all available messages per read for a single one, fewer
    /// for many.
    pub fn new(threads: usize) -> Self {
        Self {
            threads,
            messages_per_read: (64 / threads.max(1)).max(4),
        }
    }
}

/// Running threads that serve a pager's descriptor. Dropping the value stops them.
#[derive(Debug)]
pub struct Readers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    pager: Arc<Pager>,
    stopping: AtomicBool,
    /// The sum over the threads that have ended.
    counted: Mutex<Counters>,
}

impl Shared {
    fn lock_counted(&self) -> MutexGuard<'_, Counters> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Readers {
    /// Starts threads that serve the pager's descriptor. A thread that ends early causes a notice; the
    /// others continue.
    ///
    /// # Errors
    /// [`ServeError::NoReaders`], [`ServeError::Thread`].
    pub fn spawn(pager: &Arc<Pager>, config: ReaderConfig) -> Result<Self, ServeError> {
        if config.threads == 0 {
            return Err(ServeError::NoReaders);
        }
        let shared = Arc::new(Shared {
            pager: Arc::clone(pager),
            stopping: AtomicBool::new(false),
            counted: Mutex::default(),
        });
        // If a later thread does not start, dropping this stops the earlier ones.
        let mut readers = Self {
            shared,
            threads: Vec::with_capacity(config.threads),
        };
        for index in 0..config.threads {
            let name = format!("pt-reader-{index}");
            let its = Arc::clone(&readers.shared);
            let thread = Builder::new()
                .name(name.clone())
                .spawn(move || run(&its, config.messages_per_read))
                .map_err(|source| ServeError::Thread { name, source })?;
            readers.threads.push(thread);
        }
        Ok(readers)
    }

    /// Ends the threads after their current faults. Returns their counts, which are also added to
    /// [`Pager::counted`].
    pub fn stop(mut self) -> Counters {
        self.end();
        *self.shared.lock_counted()
    }

    fn end(&mut self) {
        if self.threads.is_empty() {
            return;
        }
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.pager.poller.interrupt();
        for thread in self.threads.drain(..) {
            // The thread has caught a panic and issued a notice.
            let _ = thread.join();
        }
        self.shared.pager.poller.end_interrupt();
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.end();
    }
}

fn run(shared: &Shared, messages_per_read: usize) {
    let pager = &shared.pager;
    let mut serving = Serving::new(pager, messages_per_read);
    let stopping = || shared.stopping.load(Ordering::Acquire);
    // A resolver holds counters and a buffer, which are valid after a panic.
    let served = catch_unwind(AssertUnwindSafe(|| {
        while !stopping() {
            serving.serve(None, stopping)?;
        }
        Ok::<_, ServeError>(())
    }));
    shared.lock_counted().add(serving.counters());
    drop(serving);
    match served {
        Ok(Ok(())) => {}
        Ok(Err(error)) => pager.notify(Notice::Reader(Arc::new(error))),
        Err(panic) => pager.notify(Notice::ReaderPanicked {
            message: message_of(&*panic),
        }),
    }
}

#[cfg(test)]
mod tests {
    use pagetide_memory::{Backing, GuestAddress, Region};
    use pagetide_uapi::userfaultfd::{Mode, Userfaultfd};

    use super::*;
    use crate::{Contents, PatternSource, RegionConfig, UffdLayout};

    /// The userfaultfd itself does not report them any more.
    #[test]
    fn stored_faults_are_handed_back() {
        if let Err(error) = Userfaultfd::available() {
            println!("SKIP: {error}");
            return;
        }
        let memory = Region::new(GuestAddress(0), 8 << 12, Backing::Anonymous).unwrap();
        let memory = Arc::new(memory);
        let content = Contents::Local(Arc::new(PatternSource::new(|_, _: &mut [u8]| {})));
        let pager = Pager::new().unwrap();
        let config = RegionConfig::local(Arc::clone(&memory), Mode::Missing, content)
            .userfaultfds(UffdLayout::WithEvents);
        pager.add(config).unwrap();
        pager.table().channels()[0].defer([PageFault {
            address: memory.guest().start().as_u64(),
            write: false,
            minor: false,
            write_protected: false,
            thread: 0,
        }]);
        pager.poller.report_deferred();
        let mut first = Serving::new(&pager, 1);
        first.wait(Some(Duration::ZERO)).unwrap();
        assert_eq!(first.ready.len(), 1);
        drop(first);
        assert_eq!(Serving::new(&pager, 1).process_ready().unwrap(), 1);
    }
}
