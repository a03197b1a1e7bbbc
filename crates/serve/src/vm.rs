//! One VM: from the connection of its VMM to its end, on a thread of its own.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use pagetide_memory::{GuestAddress, HostAddress, HostRange, PageIndex, PageRange, PageSize};
use pagetide_pager::{
    AddError, Contents, Counters, InFlightLimits, Mode, Notice, Observer, Pager, Prefetch,
    PrefetchConfig, PrefetchPlan, RegionConfig, RegionId, Request, RetryPolicy, ServeError,
    Serving, Source, SourceError,
};
use pagetide_sources::ImageError;
use pagetide_uapi::userfaultfd::{Features, UserRange, Userfaultfd};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use thiserror::Error;

use crate::handshake::VmRegion;
use crate::image::{ServedImage, WorkingSetPlan};
use crate::metrics::{Metrics, Totals};
use crate::options::{OnFailure, Options};
use crate::peer::Peer;
use crate::receive::{ReceiveError, Received};
use crate::recorder::Recorder;
use crate::server::Stopper;
use crate::state::{Description, KeptRegion, KeptVm, State, map_file};

/// The longest time between two looks at deadlines and counts.
const TICK: Duration = Duration::from_millis(500);

/// The same while the server ends.
const DRAIN_TICK: Duration = Duration::from_millis(20);

/// How long a guest must not touch a missing page before everything else is prefetched, while its
/// working set is being recorded: pages that come ahead are not recorded.
const QUIET_MS: u64 = 1000;

/// The pause before a stalled region is tried again.
const RESUME_AFTER: Duration = Duration::from_secs(2);

/// Messages that one read of a userfaultfd takes.
const MESSAGES_PER_READ: usize = 32;

/// A batch of prefetch: a fault on a page of a batch that is being installed waits for the whole batch.
const BATCH_BYTES: u64 = 256 << 10;

/// Why a VM was not served, or not any more.
#[derive(Debug, Error)]
pub(crate) enum VmError {
    /// The message or the descriptor was refused.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    /// A region was refused.
    #[error("region {index} cannot be paged")]
    Add {
        /// Its number in the message.
        index: usize,
        /// The reason.
        #[source]
        source: AddError,
    },
    /// The descriptors of the pager failed.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The VM could not be kept for a successor.
    #[error("keeping the VM for a successor of this server")]
    Keep(#[source] io::Error),
    /// The image is another one than the VM was restored from.
    #[error("the image {image} is another one than the VM was restored from")]
    OtherImage {
        /// The image.
        image: String,
    },
    /// What a former server has left makes no sense.
    #[error("a former server has left a VM whose regions make no sense")]
    OtherState,
    /// Waiting for the VM's descriptors failed.
    #[error("waiting for the VM's descriptors")]
    Wait(#[source] Errno),
}

/// How the service of a VM has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The VMM has closed its connection, or its process has exited.
    Gone,
    /// The server ends; every page that the guest may need is there.
    Complete,
    /// The server ends; the missing pages are poisoned, or the VMM was killed.
    FailedClosed,
    /// The VMM was killed because content was unavailable.
    Killed,
    /// The server ends, and a successor may go on.
    HandedOver,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gone => "gone",
            Self::Complete => "complete",
            Self::FailedClosed => "failed closed",
            Self::Killed => "killed",
            Self::HandedOver => "handed over",
        })
    }
}

/// What all VMs of a server share.
pub(crate) struct Common {
    pub(crate) options: Arc<Options>,
    pub(crate) metrics: Metrics,
    pub(crate) stopper: Stopper,
    /// Where VMs are kept for a successor.
    pub(crate) state: Option<Arc<State>>,
}

/// The content beyond the end of an image: there is none.
struct NoContent {
    image_bytes: u64,
}

impl Source for NoContent {
    fn submit(&self, request: Request) {
        let error = ImageError::NoSuchPage {
            offset: request.gpa().0,
            bytes: request.bytes(),
            image_bytes: self.image_bytes,
        };
        request.fail(SourceError::Unavailable(Box::new(error)));
    }
}

/// A descriptor that becomes readable at intervals.
struct Ticks(OwnedFd);

impl Ticks {
    fn every(interval: Duration) -> Result<Self, VmError> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let ticks = Self(timerfd_create(TimerfdClockId::Monotonic, flags).map_err(VmError::Wait)?);
        ticks.set(interval)?;
        Ok(ticks)
    }

    fn set(&self, interval: Duration) -> Result<(), VmError> {
        let interval = Timespec::try_from(interval).map_err(|_| VmError::Wait(Errno::INVAL))?;
        let when = Itimerspec {
            it_interval: interval,
            it_value: interval,
        };
        let set = timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &when);
        set.map(drop).map_err(VmError::Wait)
    }

    /// Makes it unreadable until the next tick.
    fn take(&self) {
        // Fails if there was no tick.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

/// A VM that is being served.
struct Vm<'a> {
    common: &'a Common,
    image: &'a ServedImage,
    peer: &'a Peer,
    pager: Arc<Pager>,
    uffd: Arc<Userfaultfd>,
    /// The VM's memory in the VMM.
    addresses: Vec<HostRange>,
    /// The regions whose content the image has.
    regions: Vec<PagedRange>,
    memory_bytes: u64,
    notices: Receiver<Notice>,
    recorder: Option<Arc<Recorder>>,
    prefetch: Option<Prefetch>,
    /// The regions beyond the end of the image.
    without_content: Vec<RegionId>,
    /// Stalled regions, and when to try them again.
    stalled: Vec<(RegionId, Instant)>,
    replayed_pages: u64,
    reported: Totals,
    keeping: Option<Keeping>,
}

/// A region of the pager, and its place in the image.
#[derive(Clone, Copy)]
struct PagedRange {
    id: RegionId,
    offset: u64,
    bytes: u64,
    page_size: PageSize,
}

/// A VM's connection.
pub(crate) struct Client {
    pub(crate) number: u64,
    /// The socket's path.
    pub(crate) socket: String,
    pub(crate) stream: UnixStream,
    /// What a former server has left of the VM.
    pub(crate) kept: Option<KeptVm>,
}

/// Serves a VM until it has gone, or the server ends. Logs its life in one line.
pub(crate) fn run(common: &Common, image: &ServedImage, mut client: Client) {
    let begun = Instant::now();
    let kept = client.kept.take();
    let Client {
        number,
        socket,
        stream,
        ..
    } = &client;
    let (number, socket) = (*number, socket.as_str());
    let peer = match Peer::of(stream) {
        Ok(peer) => peer,
        Err(error) => {
            tracing::error!(vm = number, socket, %error, "the VMM's process is unknown: refused");
            return;
        }
    };
    let mut received = Received::default();
    let served = match kept {
        None => serve(common, image, &peer, &client, &mut received),
        Some(kept) => resume(common, image, &peer, stream, kept),
    };
    let seconds = begun.elapsed().as_secs_f64();
    let (pid, uid, name) = (peer.pid, peer.uid, image.image.name());
    match served {
        Ok((end, totals, memory_bytes)) => tracing::info!(
            vm = number,
            socket,
            pid,
            uid,
            image = name,
            memory_bytes,
            seconds,
            faults = totals.faults,
            pages_for_faults = totals.pages_for_faults,
            pages_ahead = totals.pages_ahead,
            requests = totals.requests,
            failed_requests = totals.failed_requests,
            %end,
            "VM ended"
        ),
        Err(VmError::Receive(ReceiveError::Ended { bytes: 0 })) => {
            tracing::debug!(vm = number, socket, pid, "a client connected and left");
        }
        Err(error) => {
            common.metrics.count(|totals| totals.vms_refused = 1);
            tracing::error!(
                vm = number,
                socket,
                pid,
                uid,
                image = name,
                error = &error as &dyn std::error::Error,
                "VM refused"
            );
            refuse(common, &peer, stream);
        }
    }
    // Only now: the descriptor may be the last one, and the guest's missing pages must not read as zeroes.
    drop(received);
}

/// Tells the VMM that it is not served, and keeps its descriptor open until it has gone.
fn refuse(common: &Common, peer: &Peer, stream: &UnixStream) {
    if common.options.on_failure == OnFailure::Kill {
        kill(common, peer);
    }
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let _ = stream.set_nonblocking(true);
    while !common.stopper.is_stopping() && !is_closed(stream) {
        let timeout = Timespec::try_from(TICK).ok();
        let mut polled = [rustix::event::PollFd::new(
            stream,
            rustix::event::PollFlags::IN,
        )];
        if rustix::event::poll(&mut polled, timeout.as_ref()).is_err() {
            return;
        }
    }
}

fn kill(common: &Common, peer: &Peer) {
    match peer.kill() {
        Ok(()) => {
            common.metrics.count(|totals| totals.vms_killed = 1);
            tracing::error!(
                pid = peer.pid,
                "the VMM was killed: its content is unavailable"
            );
        }
        Err(error) => tracing::error!(pid = peer.pid, %error, "the VMM could not be killed"),
    }
}

/// Whether the VMM has closed its end. What it sends is dropped: the protocol has nothing after the first
/// message.
fn is_closed(stream: &UnixStream) -> bool {
    use std::io::Read;
    let mut dropped = [0; 4096];
    // Not for ever, if it keeps sending.
    for _ in 0..16 {
        match (&*stream).read(&mut dropped) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => {
                return !matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                );
            }
        }
    }
    false
}

fn serve(
    common: &Common,
    image: &ServedImage,
    peer: &Peer,
    client: &Client,
    received: &mut Received,
) -> Result<(End, Totals, u64), VmError> {
    let stopping = || common.stopper.is_stopping();
    let stream = &client.stream;
    let described = received.receive(stream, common.options.handshake_limit, stopping)?;
    let descriptor = received.descriptors.first().map(OwnedFd::try_clone);
    let Some(Ok(descriptor)) = descriptor else {
        return Err(ReceiveError::Descriptors { count: 0 }.into());
    };
    let keeping = match (&common.state, received.descriptors.first()) {
        (Some(state), Some(uffd)) => Some(Keeping::begin(state, image, client, uffd, &described)?),
        _ => None,
    };
    let uffd = Arc::new(Userfaultfd::adopt(descriptor, EVENTS).map_err(ReceiveError::from)?);
    let vm = Vm::new(common, image, peer, &uffd, &described, keeping, true)?;
    vm.live(stream)
}

/// Goes on where a former server was killed, or has ended.
fn resume(
    common: &Common,
    image: &ServedImage,
    peer: &Peer,
    stream: &UnixStream,
    kept: KeptVm,
) -> Result<(End, Totals, u64), VmError> {
    let described = kept.description.vm_regions().ok_or(VmError::OtherState)?;
    if kept.description.digest != image.image.digest().to_string() {
        return Err(VmError::OtherImage {
            image: kept.description.image,
        });
    }
    let uffd = Arc::new(Userfaultfd::adopt(kept.uffd, EVENTS).map_err(ReceiveError::from)?);
    let keeping = common.state.as_ref().map(|state| Keeping {
        state: Arc::clone(state),
        id: kept.id,
        maps: kept.maps,
        is_handed_over: false,
    });
    let vm = Vm::new(common, image, peer, &uffd, &described, keeping, false)?;
    vm.pager.recover();
    // The former server may have read the messages of threads that sleep: they fault again.
    for region in &described {
        let _ = uffd.wake(UserRange::from(region.range));
    }
    vm.live(stream)
}

/// The VMM's own features are unknown. Events that it did not ask for never come, and being ready for them
/// costs a lock.
const EVENTS: Features = Features::from_bits(
    Features::EVENT_REMOVE.bits()
        | Features::EVENT_UNMAP.bits()
        | Features::EVENT_REMAP.bits()
        | Features::EVENT_FORK.bits()
        | Features::POISON.bits(),
);

/// A VM at the keeper, and its page maps. The keeper forgets the VM when this is dropped, unless a successor
/// is to go on with it.
struct Keeping {
    state: Arc<State>,
    id: u64,
    maps: Arc<OwnedFd>,
    is_handed_over: bool,
}

impl Drop for Keeping {
    fn drop(&mut self) {
        if !self.is_handed_over {
            self.state.forget(self.id);
        }
    }
}

impl Keeping {
    fn begin(
        state: &Arc<State>,
        image: &ServedImage,
        client: &Client,
        uffd: &OwnedFd,
        described: &[VmRegion],
    ) -> Result<Self, VmError> {
        let bytes = PageSize::Size4K.bytes() + described.iter().map(map_bytes).sum::<u64>();
        let maps = map_file(bytes).map_err(VmError::Keep)?;
        let description = Description {
            socket: client.socket.clone(),
            image: image.location.as_given().into_owned(),
            digest: image.image.digest().to_string(),
            regions: described.iter().map(KeptRegion::from).collect(),
        };
        let id = state.keep(uffd, &client.stream, &maps, &description);
        Ok(Self {
            state: Arc::clone(state),
            id: id.map_err(VmError::Keep)?,
            maps,
            is_handed_over: false,
        })
    }
}

/// The bytes of the page maps of a region, of which a part may lie beyond the end of the image: each map
/// begins at a multiple of a page.
fn map_bytes(region: &VmRegion) -> u64 {
    let pages = region.bytes() >> region.page_size.shift();
    let page = PageSize::Size4K.bytes();
    (pages.div_ceil(page) + 1) * page
}

impl<'a> Vm<'a> {
    fn new(
        common: &'a Common,
        image: &'a ServedImage,
        peer: &'a Peer,
        uffd: &Arc<Userfaultfd>,
        described: &[VmRegion],
        keeping: Option<Keeping>,
        is_new: bool,
    ) -> Result<Self, VmError> {
        let pager = Pager::new()?;
        let (send, notices) = mpsc::channel();
        pager.on_notice(move |notice| {
            let _ = send.send(notice.clone());
        });
        // A guest that runs already has touched its working set.
        let plan = match is_new {
            true => image.working_set_plan(common.options.working_set),
            false => WorkingSetPlan::Nothing,
        };
        let recorder = match plan {
            WorkingSetPlan::Record => Some(Arc::new(Recorder::new())),
            WorkingSetPlan::Nothing | WorkingSetPlan::Replay(_) => None,
        };
        let mut vm = Self {
            common,
            image,
            peer,
            pager,
            uffd: Arc::clone(uffd),
            addresses: described.iter().map(|region| region.range).collect(),
            regions: Vec::new(),
            memory_bytes: described.iter().map(VmRegion::bytes).sum(),
            notices,
            recorder,
            prefetch: None,
            without_content: Vec::new(),
            stalled: Vec::new(),
            replayed_pages: 0,
            reported: Totals::default(),
            keeping,
        };
        // The first page has the messages that were read.
        let mut map_offset = PageSize::Size4K.bytes();
        for (index, region) in described.iter().enumerate() {
            vm.add(uffd, region, map_offset)
                .map_err(|source| VmError::Add { index, source })?;
            map_offset += map_bytes(region);
        }
        vm.start_prefetch(&plan)?;
        vm.report(&Counters::default());
        Ok(vm)
    }

    /// Adds a region: the part whose content the image has, and the part beyond its end.
    fn add(
        &mut self,
        uffd: &Arc<Userfaultfd>,
        region: &VmRegion,
        map_offset: u64,
    ) -> Result<(), AddError> {
        let image_bytes = self.image.image.bytes();
        let page_bytes = region.page_size.bytes();
        let here = image_bytes
            .saturating_sub(region.offset)
            .min(region.bytes());
        // A page of which the image has a part is missing as a whole.
        let here = here / page_bytes * page_bytes;
        let start = region.range.start().as_u64();
        let maps = self
            .keeping
            .as_ref()
            .map(|keeping| Arc::clone(&keeping.maps));
        let part = |skip: u64, bytes: u64, contents| -> Result<RegionConfig, AddError> {
            let bad = |_| AddError::BadRange {
                gpa: GuestAddress(region.offset),
                bytes,
            };
            let to_usize = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
            let range = HostRange::new(HostAddress(to_usize(start + skip)), to_usize(bytes));
            let range = range.map_err(bad)?;
            let config =
                RegionConfig::foreign(uffd, range, region.page_size, Mode::Missing, contents);
            // EEXIST is normal: the VMM may have written pages itself, and a second message of one fault
            // may follow the first.
            let config = config
                .gpa(GuestAddress(region.offset + skip))
                .trust_existing_pages();
            Ok(match &maps {
                None => config,
                Some(maps) => {
                    // The second part's map begins at the page after that of the first.
                    let page = PageSize::Size4K.bytes();
                    let pages_before = skip >> region.page_size.shift();
                    let offset = map_offset + pages_before.div_ceil(page) * page;
                    config.kept_in(Arc::clone(maps), offset)
                }
            })
        };
        if here > 0 {
            let contents = Contents::Source(Arc::clone(&self.image.source));
            let around = match region.page_size {
                PageSize::Size4K if self.recorder.is_none() => {
                    self.common.options.fault_around_pages
                }
                _ => 1,
            };
            let mut config = part(0, here, contents)?.fault_around(around);
            if let Some(recorder) = &self.recorder {
                let observer: Arc<dyn Observer> = Arc::<Recorder>::clone(recorder);
                config = config.observe(observer);
            }
            let limits = InFlightLimits::default();
            let id = self.pager.add(config.in_flight_limits(limits))?;
            self.regions.push(PagedRange {
                id,
                offset: region.offset,
                bytes: here,
                page_size: region.page_size,
            });
        }
        if here < region.bytes() {
            let missing = region.bytes() - here;
            tracing::error!(
                image = self.image.image.name(),
                image_bytes,
                region_offset = region.offset,
                region_bytes = region.bytes(),
                "the image ends inside the VM's memory: it has no such page for {missing} bytes, and a \
                 guest that touches them is stalled or killed"
            );
            let contents = Contents::Source(Arc::new(NoContent { image_bytes }));
            let once = RetryPolicy {
                attempts: 1,
                ..RetryPolicy::default()
            };
            let config = part(here, missing, contents)?.retry_policy(once);
            self.without_content.push(self.pager.add(config)?);
        }
        Ok(())
    }

    fn start_prefetch(&mut self, plan: &WorkingSetPlan) -> Result<(), ServeError> {
        let mut first = Vec::new();
        if let WorkingSetPlan::Replay(set) = plan {
            for run in set.runs() {
                let shift = set.page_size.shift();
                self.locate(run.first().0 << shift, run.count() << shift, &mut first);
            }
            self.replayed_pages = first.iter().map(|(_, pages)| pages.count()).sum();
            let pages = self.replayed_pages;
            self.common
                .metrics
                .count(|totals| totals.replayed_pages = pages);
        }
        // A page that comes ahead is not recorded: while recording, the rest waits for a quiet moment.
        let then = match self.common.options.prefetch && self.recorder.is_none() {
            true => self.ids(),
            false => Vec::new(),
        };
        if !first.is_empty() || !then.is_empty() {
            self.fetch(PrefetchPlan { first, then })?;
        }
        Ok(())
    }

    fn fetch(&mut self, plan: PrefetchPlan) -> Result<(), ServeError> {
        let config = PrefetchConfig {
            batch_bytes: BATCH_BYTES,
        };
        self.prefetch = Some(Prefetch::spawn_plan(&self.pager, config, plan)?);
        Ok(())
    }

    fn ids(&self) -> Vec<RegionId> {
        self.regions.iter().map(|region| region.id).collect()
    }

    /// The pages of regions in `bytes` bytes of the image from `offset` on.
    fn locate(&self, offset: u64, bytes: u64, found: &mut Vec<(RegionId, PageRange)>) {
        let end = offset.saturating_add(bytes);
        for region in &self.regions {
            let from = offset.max(region.offset);
            let to = end.min(region.offset + region.bytes);
            if from < to {
                let shift = region.page_size.shift();
                let first = (from - region.offset) >> shift;
                let last = (to - 1 - region.offset) >> shift;
                let pages = PageRange::new(PageIndex(first), last + 1 - first);
                // Small pages of one huge page name it once.
                if found.last() != Some(&(region.id, pages)) {
                    found.push((region.id, pages));
                }
            }
        }
    }

    /// Serves until the end, and cleans up.
    fn live(mut self, stream: &UnixStream) -> Result<(End, Totals, u64), VmError> {
        let end = self.run(stream)?;
        let totals = self.end(end)?;
        Ok((end, totals, self.memory_bytes))
    }

    /// Serves until the VM or the server ends.
    fn run(&mut self, stream: &UnixStream) -> Result<End, VmError> {
        const STREAM: u32 = 0;
        const STOP: u32 = 1;
        const TICKS: u32 = 2;
        // A timeout of each wait would set a timer for each fault.
        let ticks = Ticks::every(TICK)?;
        let mut serving = Serving::new(&self.pager, MESSAGES_PER_READ);
        let metrics = self.common.metrics.clone();
        serving.on_resolved(move |duration| metrics.resolved(duration));
        stream
            .set_nonblocking(true)
            .map_err(|error| VmError::Wait(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
        serving.watch(stream.as_fd(), STREAM)?;
        serving.watch(self.common.stopper.as_fd(), STOP)?;
        serving.watch(ticks.0.as_fd(), TICKS)?;
        let mut drain_until = None;
        loop {
            let readable = serving.serve_for(None)?;
            let [of_stream, stops, mut is_tick] =
                [STREAM, STOP, TICKS].map(|number| readable.contains(&number));
            if of_stream && is_closed(stream) {
                self.report(serving.counters());
                return Ok(End::Gone);
            }
            if stops && self.keeping.is_some() {
                self.report(serving.counters());
                return Ok(End::HandedOver);
            }
            if stops && drain_until.is_none() {
                // It stays readable; from now on the deadline is looked at.
                serving.unwatch(self.common.stopper.as_fd());
                drain_until = Some(self.common.stopper.deadline());
                self.drain()?;
                ticks.set(DRAIN_TICK)?;
                is_tick = true;
            }
            if let Some(end) = self.act_on_notices() {
                self.report(serving.counters());
                return Ok(end);
            }
            if is_tick {
                ticks.take();
                self.report(serving.counters());
                self.resume_stalled();
                self.prefetch_when_quiet()?;
                if let Some(deadline) = drain_until {
                    if self.is_complete() {
                        self.release(&mut serving)?;
                        return Ok(End::Complete);
                    }
                    if Instant::now() >= deadline {
                        return Ok(End::FailedClosed);
                    }
                }
            }
        }
    }

    /// The server ends: fetch whatever is missing.
    fn drain(&mut self) -> Result<(), ServeError> {
        // Ends the replay, or a prefetch that has failed.
        self.prefetch = None;
        let first = Vec::new();
        let then = self.ids();
        self.fetch(PrefetchPlan { first, then })
    }

    /// Ends the registration of memory whose pages are all there: nobody will read the events of a VMM
    /// that keeps a copy of the userfaultfd, and its next balloon request would wait for ever.
    fn release(&self, serving: &mut Serving) -> Result<(), ServeError> {
        for range in &self.addresses {
            // Fails if the VMM has unmapped a part; the rest of its memory is mapped no less.
            let _ = self.uffd.unregister(UserRange::from(*range));
        }
        // A thread of the VMM may still wait for an event to be read.
        serving.process_ready()?;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        let progress = self.pager.progress();
        progress.present + progress.poisoned == progress.total
    }

    /// While a working set is recorded, the rest of memory is fetched when the guest has been quiet.
    fn prefetch_when_quiet(&mut self) -> Result<(), ServeError> {
        let Some(recorder) = &self.recorder else {
            return Ok(());
        };
        if self.common.options.prefetch
            && self.prefetch.is_none()
            && recorder.quiet_ms() >= QUIET_MS
        {
            let (first, then) = (Vec::new(), self.ids());
            self.fetch(PrefetchPlan { first, then })?;
        }
        Ok(())
    }

    /// Handles what the pager reports.
    fn act_on_notices(&mut self) -> Option<End> {
        let mut end = None;
        while let Ok(notice) = self.notices.try_recv() {
            let pid = self.peer.pid;
            match &notice {
                Notice::ProcessGone { .. } => end = end.or(Some(End::Gone)),
                Notice::Stalled { region, .. } => {
                    self.common.metrics.count(|totals| totals.stalls = 1);
                    tracing::error!(pid, error = &notice as &dyn std::error::Error, "VM stalled");
                    // Content that does not exist will not come.
                    if !self.without_content.contains(region) {
                        self.stalled.push((*region, Instant::now() + RESUME_AFTER));
                    }
                    if self.common.options.on_failure == OnFailure::Kill {
                        kill(self.common, self.peer);
                        end = Some(End::Killed);
                    }
                }
                Notice::Unresolved(_) | Notice::NotInstalled { .. } => {
                    tracing::error!(
                        pid,
                        error = &notice as &dyn std::error::Error,
                        "a page was not installed"
                    );
                    if self.common.options.on_failure == OnFailure::Kill {
                        kill(self.common, self.peer);
                        end = Some(End::Killed);
                    }
                }
                other => {
                    tracing::warn!(pid, error = other as &dyn std::error::Error, "notice");
                }
            }
        }
        end
    }

    fn resume_stalled(&mut self) {
        let now = Instant::now();
        self.stalled.retain(|(region, at)| {
            if now < *at {
                return true;
            }
            // A region that stalls again is reported again.
            let _ = self.pager.resume(*region);
            false
        });
    }

    /// Adds what was counted since the last report.
    fn report(&mut self, serving: &Counters) {
        let mut all = self.pager.counted();
        all.add(serving);
        let now = Totals {
            faults: all.messages,
            pages_for_faults: all.pages.saturating_sub(all.ahead_pages),
            pages_ahead: all.ahead_pages,
            requests: all.requests,
            answers: all.answers,
            failed_requests: all.failed_requests,
            faults_on_removed: all.zeroed,
            pages_found: all.exists,
            again: all.again,
            replay_misses: match self.replayed_pages {
                0 => 0,
                _ => all.messages,
            },
            vms: 1,
            memory_bytes: self.memory_bytes,
            ..Totals::default()
        };
        self.common.metrics.add(&self.reported, &now);
        self.reported = now;
    }

    /// Ends the paging, and saves the working set. Returns what was counted.
    fn end(&mut self, end: End) -> Result<Totals, VmError> {
        if end == End::FailedClosed && self.common.options.on_failure == OnFailure::Kill {
            kill(self.common, self.peer);
        }
        // Its counts come with its end.
        self.prefetch = None;
        if let Some(recorder) = self.recorder.take() {
            match self.image.save(recorder.touches()) {
                Ok(None) => {}
                Ok(Some(pages)) => {
                    self.common
                        .metrics
                        .count(|totals| totals.recorded_pages = pages as u64);
                }
                Err(error) => tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "the working set was not saved"
                ),
            }
        }
        for id in self.pager.region_ids() {
            if end == End::HandedOver {
                // Nothing is poisoned; threads that sleep fault again, and the successor reads that.
                let _ = self.pager.export(id);
            } else {
                // Missing pages are poisoned before the descriptor is closed.
                let _ = self.pager.remove(id);
            }
        }
        if let Some(mut keeping) = self.keeping.take() {
            keeping.is_handed_over = end == End::HandedOver;
        }
        self.report(&Counters::default());
        let totals = self.reported;
        let none = Totals {
            vms: 0,
            memory_bytes: 0,
            ..totals
        };
        self.common.metrics.add(&totals, &none);
        Ok(totals)
    }
}
