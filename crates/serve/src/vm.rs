//! One VM: from the connection of its VMM to its end, on a thread of its own.

mod connection;
mod control;
mod ending;
mod keeping;
mod recording;
mod room;
mod spaces;
mod stalls;
mod start;
mod waiting;

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use pagetide_memory::{HostRange, ImportError, PageSize};
use pagetide_pager::{
    AddError, Counters, Notice, Pager, Prefetch, PrefetchPlan, RegionId, ServeError, Serving,
};
use pagetide_sources::FileIdentity;
use pagetide_uapi::userfaultfd::{UserRange, Userfaultfd};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use thiserror::Error;

use crate::budgets::{Charge, OverBudget};
use crate::connection::Connection;
use crate::image::ServedImage;
use crate::labelled::LabelledVm;
use crate::log_limit::{LogLimit, log_vm};
use crate::memory_limit::MemoryLimit;
use crate::metrics::{Metrics, Totals};
use crate::named_image::NoImage;
use crate::native::attach::AttachError;
use crate::native::message::{Message, RefusedCode};
use crate::options::{OnFailure, Options};
use crate::parking::Parking;
use crate::peer::Peer;
use crate::porter::Porter;
use crate::receive::ReceiveError;
use crate::recorder::Recorder;
use crate::sample::Sample;
use crate::state::{KeptVm, State};
use crate::stopper::Stopper;
use crate::usage::Usage;
pub(crate) use connection::run;
use control::Control;
use keeping::Keeping;
use recording::Checkpoint;
use spaces::Spaces;
use waiting::{Ticks, Watched};

/// The longest time between two looks at deadlines and counts.
const TICK: Duration = Duration::from_millis(500);

/// Messages that one read of a userfaultfd takes.
const MESSAGES_PER_READ: usize = 32;

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
    /// A client of the native protocol was not attached.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// A page map of a predecessor has no part of a region to continue.
    #[error("region {index} has no part from page {first_page} on, of which there is a page map")]
    Map {
        /// The number of the region.
        index: usize,
        /// The first page of the map.
        first_page: u64,
    },
    /// Its user's clients have taken too much.
    #[error(transparent)]
    Budget(#[from] OverBudget),
    /// There is no image for it.
    #[error(transparent)]
    NoImage(#[from] NoImage),
    /// The image is not that of a VM with so much memory.
    #[error(
        "the VM's memory ends at {vm_bytes} bytes of the memory file, and the image has {image_bytes}: the image of another snapshot, or a socket of another VM; if the VM has other memory beside, permit that (--any-length)"
    )]
    OtherLength {
        /// Where the last region ends.
        vm_bytes: u64,
        /// The length of the image.
        image_bytes: u64,
    },
    /// The threads that read the image could not be started, or descriptors of the pager failed.
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
    /// The file of the image is another one, or was written to.
    #[error(
        "the image {image} was replaced or written to since the VM was restored from it: it had {before}, and has {now}"
    )]
    ReplacedImage {
        /// The image.
        image: String,
        /// The file that the VM was restored from.
        before: FileIdentity,
        /// The file that is there now.
        now: FileIdentity,
    },
    /// What a former server has left makes no sense.
    #[error("a former server has left a VM whose regions make no sense")]
    OtherState,
    /// Waiting for the VM's descriptors failed.
    #[error("waiting for the VM's descriptors")]
    Wait(#[source] Errno),
}

impl VmError {
    /// The code for a client whose attach has failed late.
    fn code(&self) -> RefusedCode {
        match self {
            Self::Add { source, .. } => match source {
                AddError::Import(ImportError::OtherSize { .. }) => RefusedCode::PageMap,
                AddError::File(_) => RefusedCode::File,
                _ => RefusedCode::Paging,
            },
            Self::Map { .. } => RefusedCode::PageMap,
            Self::Budget(error) => error.code(),
            _ => RefusedCode::Internal,
        }
    }
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
    /// The VMM has left, by the native protocol.
    Left,
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
            Self::Left => "left",
            Self::HandedOver => "handed over",
        })
    }
}

/// What all VMs of a server share.
pub(crate) struct Common {
    /// The VMs of the same socket.
    pub(crate) usage: Arc<Usage>,
    pub(crate) options: Arc<Options>,
    pub(crate) metrics: Metrics,
    pub(crate) stopper: Stopper,
    /// Where VMs are kept for a successor.
    pub(crate) state: Option<Arc<State>>,
    /// Where refused VMMs are until they leave.
    pub(crate) parking: Arc<Parking>,
    /// Receives clients' descriptors, and closes their connections.
    pub(crate) porter: Option<Arc<Porter>>,
}

impl Common {
    /// The same with other options, for the VMs of one socket.
    pub(crate) fn with(&self, options: Options, usage: Arc<Usage>) -> Self {
        Self {
            usage,
            options: Arc::new(options),
            metrics: self.metrics.clone(),
            stopper: self.stopper.clone(),
            state: self.state.clone(),
            parking: Arc::clone(&self.parking),
            porter: self.porter.clone(),
        }
    }
}

/// A VM's connection.
pub(crate) struct Client {
    pub(crate) number: u64,
    /// The socket's path.
    pub(crate) socket: String,
    pub(crate) stream: Connection,
    /// Its process.
    pub(crate) peer: Peer,
    /// What it costs its user.
    pub(crate) charge: Charge,
    /// What a former server has left of the VM.
    pub(crate) kept: Option<KeptVm>,
}

/// A VM that is being served.
struct Vm<'a> {
    common: &'a Common,
    image: &'a Arc<ServedImage>,
    peer: &'a Peer,
    /// Bounds what is logged on it, too.
    charge: &'a Charge,
    pager: Arc<Pager>,
    /// The VM's memory in the VMM, with the userfaultfd of each part.
    addresses: Vec<(Arc<Userfaultfd>, HostRange)>,
    /// The regions whose content the image has.
    regions: Vec<PagedRange>,
    /// All regions of the pager.
    parts: Vec<Part>,
    memory_bytes: u64,
    notices: Receiver<Notice>,
    /// A VMM can cause any number of notices.
    notices_logged: LogLimit,
    /// The recorder, while it records.
    recorder: Option<Arc<Recorder>>,
    /// When what it has recorded is written.
    checkpoint: Checkpoint,
    /// The recorder that sees the faults, if there is one.
    observer: Option<Arc<Recorder>>,
    /// The pages that its replay left out.
    sample: Option<Arc<Sample>>,
    prefetch: Option<Prefetch>,
    /// How much memory the VMM may get.
    limit: MemoryLimit,
    /// Its further address spaces.
    spaces: Spaces,
    /// The regions beyond the end of the image.
    without_content: Vec<RegionId>,
    /// Stalled regions, and when to try them again.
    stalled: Vec<(RegionId, Instant)>,
    replayed_pages: u64,
    reported: Totals,
    /// The last error, as text.
    last_error: String,
    keeping: Option<Keeping>,
    /// Has it among the metrics, if it has a label.
    labelled: Option<LabelledVm>,
}

/// A region of the pager, and its place in a region of the VMM.
#[derive(Clone, Copy, Debug)]
struct Part {
    id: RegionId,
    /// The number of the VMM's region.
    region: u32,
    /// The first page there.
    first_page: u64,
}

/// The connection of a VMM.
enum Link<'a> {
    /// By Firecracker's protocol: nothing comes after the first message.
    Plain(&'a UnixStream),
    /// By the native protocol.
    Native(Box<Control<'a>>),
}

impl<'a> Link<'a> {
    fn notify(&mut self, notice: impl FnOnce() -> Message) {
        if let Self::Native(control) = self {
            control.notify(&notice());
        }
    }

    /// What the connection waits for.
    fn interest(&self) -> EventFlags {
        match self {
            // What it sends is left where it is: nothing comes after the first message.
            Self::Plain(_) => EventFlags::RDHUP,
            Self::Native(control) => control.interest(),
        }
    }

    fn stream(&self) -> &'a UnixStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Native(control) => control.stream(),
        }
    }

    /// Whether work on another thread, or a drain, is looked at often.
    fn is_busy(&self) -> bool {
        matches!(self, Self::Native(control) if control.is_busy())
    }

    /// Whether requests wait that have arrived.
    fn has_more(&self) -> bool {
        matches!(self, Self::Native(control) if control.has_more)
    }

    /// Whether the VMM was told that it needs no server any more.
    fn is_drained(&self) -> bool {
        matches!(self, Self::Native(control) if control.is_drained())
    }
}

/// A region of the pager, and its place in the image.
#[derive(Clone, Copy)]
struct PagedRange {
    id: RegionId,
    offset: u64,
    bytes: u64,
    page_size: PageSize,
}

pub(crate) fn kill(common: &Common, peer: &Peer, charge: &Charge) {
    match peer.kill() {
        Ok(()) => {
            common.metrics.count(|totals| totals.vms_killed = 1);
            log_vm!(
                error,
                charge,
                pid = peer.pid,
                "the VMM was killed: its content is unavailable"
            );
        }
        Err(error) => log_vm!(
            error,
            charge,
            pid = peer.pid,
            uid = peer.uid,
            %error,
            "the VMM could not be killed: an access to a missing page raises SIGBUS"
        ),
    }
}

/// An error and its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

impl Vm<'_> {
    /// Serves until the VM or the server ends. After an error, nothing more is served, and the VM has ended.
    fn serve(&mut self, link: &mut Link<'_>) -> Result<End, VmError> {
        let end = self.run(link);
        if end.is_err() {
            // As one that has gone: what is to happen to a refused VMM is its caller's business.
            self.end(End::Gone)?;
        }
        end
    }

    fn run(&mut self, link: &mut Link<'_>) -> Result<End, VmError> {
        const STREAM: u32 = 0;
        const STOP: u32 = 1;
        const TICKS: u32 = 2;
        // A timeout of each wait would set a timer for each fault.
        let ticks = Ticks::every(TICK)?;
        let mut interval = TICK;
        let mut connection = Watched::new(link.stream())?;
        let mut serving = Serving::new(&self.pager, MESSAGES_PER_READ);
        let metrics = self.common.metrics.clone();
        serving.on_resolved(move |duration| metrics.resolved(duration));
        let metrics = self.common.metrics.clone();
        serving.on_waited(move |what, duration| metrics.waited(what, duration));
        serving.watch(connection.poll.as_fd(), STREAM)?;
        serving.watch(self.common.stopper.as_fd(), STOP)?;
        serving.watch(ticks.0.as_fd(), TICKS)?;
        // When a drain fetches again what could not be fetched.
        let mut drain_again = None;
        let mut is_stopping = false;
        // The deadline of that drain, when the VMM was told.
        let mut announced = None;
        loop {
            connection.set_interest(link.interest())?;
            let timeout = link.has_more().then_some(Duration::ZERO);
            let readable = serving.serve_for(timeout)?;
            let [of_stream, stops, mut is_tick] =
                [STREAM, STOP, TICKS].map(|number| readable.contains(&number));
            // After the faults.
            let ready = match of_stream {
                true => connection.ready()?,
                false => EventFlags::empty(),
            };
            // Unless the VMM has gone.
            let is_handed_over = stops && self.keeping.as_ref().is_some_and(Keeping::is_held);
            if stops && !is_handed_over && !is_stopping {
                // It stays readable; from now on the deadline is looked at.
                serving.unwatch(self.common.stopper.as_fd());
                is_stopping = true;
                drain_again = Some(Instant::now() + TICK);
                let deadline = self.common.stopper.deadline();
                link.notify(|| going_away(deadline));
                announced = Some(deadline);
                self.drain_or_later();
                is_tick = true;
            }
            let ended = self.connection_ready(link, &serving, ready);
            let ended = ended.or_else(|| self.act_on_notices(link));
            if let Some(end) = ended.or(is_handed_over.then_some(End::HandedOver)) {
                if end == End::HandedOver {
                    // Nothing is poisoned: a successor goes on.
                    link.notify(|| Message::GoingAway {
                        within_ms: u32::MAX,
                    });
                }
                self.report(serving.counters());
                return Ok(end);
            }
            let wanted = match drain_again.is_some() || link.is_busy() {
                true => control::SOON,
                false => TICK,
            };
            if wanted != interval {
                ticks.set(wanted)?;
                interval = wanted;
            }
            if is_tick {
                ticks.take();
                self.report(serving.counters());
                let now = Instant::now();
                let resumed = self.resume(|at| now >= at);
                if resumed > 0 {
                    let regions = u32::try_from(resumed).unwrap_or(u32::MAX);
                    link.notify(|| Message::Resumed { regions });
                }
                self.save_when_quiet();
                if drain_again.is_none() {
                    self.end_prefetch_without_room();
                }
                if let Link::Native(control) = link {
                    control.tick(self);
                }
                if drain_again.is_none() && self.common.usage.is_draining() {
                    link.notify(|| Message::GoingAway {
                        within_ms: u32::MAX,
                    });
                    drain_again = Some(now + TICK);
                    self.drain_or_later();
                }
                if let Some(again) = drain_again {
                    if self.is_complete() {
                        self.release();
                        // A thread of the VMM may still wait for an event to be read.
                        serving.process_ready()?;
                        return Ok(End::Complete);
                    }
                    let now = Instant::now();
                    // A second signal moves it.
                    let deadline = self.common.stopper.deadline();
                    if is_stopping && announced != Some(deadline) {
                        link.notify(|| going_away(deadline));
                        announced = Some(deadline);
                    }
                    if is_stopping && now >= deadline {
                        return Ok(End::FailedClosed);
                    }
                    if now >= again && self.prefetch.as_ref().is_none_or(Prefetch::is_finished) {
                        self.drain_or_later();
                        drain_again = Some(now + TICK);
                    }
                }
            }
        }
    }

    /// Serves the connection. Returns the VM's end if the VMM has gone.
    fn connection_ready(
        &mut self,
        link: &mut Link<'_>,
        serving: &Serving,
        ready: EventFlags,
    ) -> Option<End> {
        match link {
            Link::Plain(_) => (!ready.is_empty()).then_some(End::Gone),
            Link::Native(control) if ready.is_empty() && !control.has_more => None,
            Link::Native(control) => control.serve(self, serving, ready),
        }
    }

    /// Drains. What cannot be started now, for lack of a thread, is tried again when the next drain is due: the VM goes on.
    fn drain_or_later(&mut self) {
        if let Err(error) = self.drain() {
            log_vm!(
                warn,
                self.charge,
                pid = self.peer.pid,
                error = chain(&error),
                "a drain is tried again"
            );
        }
    }

    /// Fetch whatever is missing.
    fn drain(&mut self) -> Result<(), ServeError> {
        // Ends the replay, or a prefetch that has failed.
        self.prefetch = None;
        let first = Vec::new();
        let then = self.ids();
        self.fetch(PrefetchPlan { first, then })
    }

    /// Ends the registration of memory whose pages are all there: nobody will read the events of a VMM
    /// that keeps a copy of the userfaultfd, and its next balloon request would wait for ever.
    fn release(&self) {
        for (uffd, range) in &self.addresses {
            // Fails if the VMM has unmapped a part; the rest of its memory is mapped no less.
            let _ = uffd.unregister(UserRange::from(*range));
        }
    }

    fn is_complete(&self) -> bool {
        let progress = self.pager.progress();
        progress.present + progress.poisoned == progress.total
    }

    /// Adds what was counted since the last report.
    fn report(&mut self, serving: &Counters) {
        let mut all = self.pager.counted();
        all.add(serving);
        let of_region = |part: &Part| self.pager.source_status(part.id).ok();
        // None after the end.
        let queues: Vec<_> = self.parts.iter().filter_map(of_region).collect();
        let now = Totals {
            faults: all.messages,
            pages_for_faults: all.pages.saturating_sub(all.ahead_pages),
            pages_ahead: all.ahead_pages,
            requests: all.requests,
            answers: all.answers,
            failed_requests: all.failed_requests,
            pages_set_aside: all.set_aside,
            faults_on_removed: all.zeroed,
            pages_found: all.exists,
            again: all.again,
            replay_misses: match self.replayed_pages {
                0 => 0,
                _ => all.messages,
            },
            sampled_pages: self.sample.as_ref().map_or(0, |sample| sample.pages()),
            sampled_pages_touched: self.sample.as_ref().map_or(0, |sample| sample.touched()),
            vms: 1,
            memory_bytes: self.memory_bytes,
            waiting_requests: queues
                .iter()
                .map(|queue| queue.waiting_requests as u64)
                .sum(),
            in_flight_bytes: queues.iter().map(|queue| queue.in_flight_bytes).sum(),
            stalled_regions: self.stalled_regions(),
            ..Totals::default()
        };
        self.common.metrics.add(&self.reported, &now);
        self.reported = now;
    }

    /// Kills the VMM if that is the policy, or if its missing pages cannot be marked: they would read as zeroes once this
    /// process has ended.
    fn kill_if_it_has_to_be(&self) {
        let mut addresses = self.addresses.iter();
        let is_markable = addresses.all(|(uffd, _)| uffd.can_poison());
        if !is_markable {
            log_vm!(
                error,
                self.charge,
                pid = self.peer.pid,
                "this kernel has no UFFDIO_POISON (Linux 6.6): a VMM whose content is unavailable when the server ends is killed"
            );
        }
        if !is_markable || self.common.options.on_failure == OnFailure::Kill {
            kill(self.common, self.peer, self.charge);
        }
    }

    /// Ends the paging, and saves the working set. Returns what was counted.
    fn end(&mut self, end: End) -> Result<Totals, VmError> {
        if end == End::FailedClosed {
            self.kill_if_it_has_to_be();
        }
        // Its counts come with its end.
        self.prefetch = None;
        self.end_memory(end);
        // Which may wait for a disk.
        self.save_recording();
        if let Some(mut keeping) = self.keeping.take() {
            keeping.is_handed_over = end == End::HandedOver;
        }
        self.report(&Counters::default());
        self.labelled = None;
        let totals = self.reported;
        let none = Totals {
            vms: 0,
            memory_bytes: 0,
            vms_ended: 1,
            ..totals
        };
        self.common.metrics.add(&totals, &none);
        Ok(totals)
    }
}

/// The notice of a server that ends at `deadline` at the latest.
fn going_away(deadline: Instant) -> Message {
    let left = deadline.saturating_duration_since(Instant::now());
    let within_ms = u32::try_from(left.as_millis()).unwrap_or(u32::MAX);
    Message::GoingAway { within_ms }
}
