//! The requests of a VMM that speaks the native protocol.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use pagetide_memory::{GuestAddress, GuestRange, PageSize};
use pagetide_pager::{Pager, Prefetch, Progress, Serving};
use rustix::event::epoll::EventFlags;

use super::spaces::SpaceError;
use super::{End, Vm, chain};
use crate::log_limit::log_vm;
use crate::native::attach::share;
use crate::native::message::{
    AttachSpace, Drained, Health, MAX_SPACES, Message, PageMapPart, RefusedCode, VmState,
    WorkingSetAction, WorkingSetState,
};
use crate::native::session::{Arrived, Session, SessionError};
use crate::native::share::SharedImage;
use crate::working_set_file::{LoadedSet, Silent};

/// The requests between two looks at faults.
const REQUESTS_AT_ONCE: usize = 16;

/// The time between two looks at a drain, or at work on another thread.
pub(super) const SOON: Duration = Duration::from_millis(20);

/// The least time between two reports of a drain's progress.
const PROGRESS: Duration = Duration::from_millis(100);

/// Counting pages takes at most this part of a VM's thread, as a divisor.
const COUNTING_SHARE: u32 = 20;

/// What a thread beside the VM's has done.
#[derive(Debug)]
enum Work {
    Saved(Option<usize>),
    Loaded(Result<Option<Arc<LoadedSet>>, Silent>),
}

/// Counts of pages that are not older than their cost permits.
#[derive(Debug, Default)]
struct Counted {
    progress: Progress,
    /// When they may be counted again.
    again: Option<Instant>,
}

impl Counted {
    fn progress(&mut self, pager: &Pager) -> Progress {
        let begun = Instant::now();
        if self.again.is_none_or(|again| begun >= again) {
            self.progress = pager.progress();
            let pause = begun.elapsed() * COUNTING_SHARE;
            self.again = Some(begun + pause.max(Duration::from_millis(10)));
        }
        self.progress
    }
}

/// A drain that was asked for.
#[derive(Debug)]
struct Drain {
    id: u32,
    reported: Instant,
    /// The pages that were there when there were more than before, and that time.
    settled: (u64, Instant),
}

/// The connection of a VMM that speaks the native protocol, after attach.
#[derive(Debug)]
pub(super) struct Control<'a> {
    session: Session<'a>,
    /// Kept for other VMs that ask for it.
    shared: Option<Arc<SharedImage>>,
    counted: Counted,
    drain: Option<Drain>,
    work: Option<(u32, JoinHandle<Work>)>,
    /// Userfaultfds that were refused. While they are open, what is missing there does not read as zeroes.
    refused: Vec<OwnedFd>,
    /// The id of the request to leave.
    goodbye: Option<u32>,
    stalls: u64,
    is_drained: bool,
    is_handed_over: bool,
    /// Requests that have arrived were not all served.
    pub(super) has_more: bool,
}

/// A request that is refused.
type Refusal = (RefusedCode, String);

fn refusal(code: RefusedCode, text: &str) -> Refusal {
    (code, text.to_owned())
}

impl<'a> Control<'a> {
    pub(super) fn new(session: Session<'a>, shared: Option<Arc<SharedImage>>) -> Self {
        Self {
            has_more: session.has_buffered(),
            session,
            shared,
            counted: Counted::default(),
            drain: None,
            work: None,
            refused: Vec::new(),
            goodbye: None,
            stalls: 0,
            is_drained: false,
            is_handed_over: false,
        }
    }

    pub(super) fn interest(&self) -> EventFlags {
        self.session.interest()
    }

    pub(super) fn stream(&self) -> &'a std::os::unix::net::UnixStream {
        self.session.stream()
    }

    /// Whether the memory needs no server any more.
    pub(super) fn is_drained(&self) -> bool {
        self.is_drained && !self.is_handed_over
    }

    /// Sends a notice.
    pub(super) fn notify(&mut self, notice: &Message) {
        if let Message::Stalled { .. } = notice {
            self.stalls += 1;
        }
        self.session.notify(notice);
        self.session.flush();
    }

    /// The last answer, after everything has been let go of.
    pub(super) fn leave(&mut self) {
        self.refused.clear();
        self.session.descriptors.clear();
        if let Some(id) = self.goodbye.take() {
            self.session.answer(id, &Message::Left);
        }
        self.session.flush();
    }

    /// Answers attach.
    pub(super) fn attached(&mut self, id: u32, regions: usize, vm: &Vm<'_>) {
        let answer = Message::Attached {
            regions: u32::try_from(regions).unwrap_or(u32::MAX),
            working_set: state_of(vm),
            bytes: vm.memory_bytes,
            image: vm.image.image.digest(),
        };
        self.session.answer(id, &answer);
        self.session.flush();
    }

    /// Serves what has arrived, without waiting. `flags` are what the connection has reported.
    pub(super) fn serve(
        &mut self,
        vm: &mut Vm<'_>,
        serving: &Serving,
        flags: EventFlags,
    ) -> Option<End> {
        let has_gone = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        if has_gone && !self.interest().contains(EventFlags::IN) {
            return Some(End::Gone);
        }
        if flags.contains(EventFlags::IN) || has_gone {
            match self.session.read() {
                Ok(true) => {}
                Ok(false) => return Some(End::Gone),
                Err(error) => self.end_requests(vm, error),
            }
        }
        for _ in 0..REQUESTS_AT_ONCE {
            match self.session.next() {
                Ok(Some(arrived)) => self.act(vm, serving, arrived),
                Ok(None) => break,
                Err(error) => {
                    self.end_requests(vm, error);
                    break;
                }
            }
            if self.goodbye.is_some() {
                return Some(End::Left);
            }
        }
        let is_there = self.session.flush();
        // After that there may be room for answers to requests that have arrived before.
        self.has_more = self.session.has_buffered();
        (!is_there).then_some(End::Gone)
    }

    /// The stream has no meaning any more. The guest's faults are served as before.
    fn end_requests(&mut self, vm: &Vm<'_>, error: SessionError) {
        log_vm!(
            error,
            vm.charge,
            pid = vm.peer.pid,
            error = &error as &dyn std::error::Error,
            "no further request of this VMM is read"
        );
        let (code, text) = (error.code(), chain(&error));
        self.session.be_deaf();
        self.session.answer(0, &Message::Refused { code, text });
    }

    fn act(&mut self, vm: &mut Vm<'_>, serving: &Serving, arrived: Arrived) {
        let id = arrived.id;
        let answer = match arrived.message {
            Err(unknown) => Err((RefusedCode::Unsupported, unknown.to_string())),
            Ok(message) => {
                let is_of_spaces = matches!(
                    message,
                    Message::AttachSpace(_) | Message::DetachSpace { .. }
                );
                let answer = self.answer(vm, serving, id, message);
                if is_of_spaces {
                    let open = vm.open_spaces() + self.refused.len();
                    self.session.keep_taken(open);
                }
                answer
            }
        };
        match answer {
            Ok(Some(answer)) => self.session.answer(id, &answer),
            // It comes later, or was sent.
            Ok(None) => {}
            Err((code, text)) => self.session.answer(id, &Message::Refused { code, text }),
        }
    }

    fn answer(
        &mut self,
        vm: &mut Vm<'_>,
        serving: &Serving,
        id: u32,
        message: Message,
    ) -> Result<Option<Message>, Refusal> {
        let is_served_after = matches!(message, Message::HealthRequest | Message::Goodbye);
        if self.is_handed_over && !is_served_after {
            let text = "the VM was handed over";
            return Err(refusal(RefusedCode::Order, text));
        }
        match message {
            Message::HealthRequest => Ok(Some(Message::Health(self.health(vm, serving)))),
            Message::Drain => self.start_drain(vm, id),
            Message::WorkingSet(action) => self.working_set(vm, id, action),
            Message::Poison { offset, bytes } => poison(vm, offset, bytes),
            Message::Resume => Ok(Some(Message::Done {
                count: vm.resume(|_| true) as u64,
            })),
            Message::HandOver => self.hand_over(vm, id),
            Message::AttachSpace(space) => self.attach_space(vm, &space),
            Message::DetachSpace { space } => match vm.detach_space(space) {
                Some(regions) => Ok(Some(Message::Done {
                    count: regions as u64,
                })),
                None => {
                    let text = format!("there is no address space {space}");
                    Err((RefusedCode::Regions, text))
                }
            },
            Message::Share => {
                let (image, metrics) = (vm.image, &vm.common.metrics);
                match share(&mut self.session, id, image, metrics) {
                    Ok(shared) => {
                        self.shared = Some(shared);
                        Ok(None)
                    }
                    Err(error) => Err((error.code(), chain(&error))),
                }
            }
            Message::Goodbye => {
                self.goodbye = Some(id);
                Ok(None)
            }
            other => {
                let kind = other.kind();
                let text = format!("a message of type {kind:#06x} does not belong here");
                Err((RefusedCode::Order, text))
            }
        }
    }

    fn attach_space(
        &mut self,
        vm: &mut Vm<'_>,
        space: &AttachSpace,
    ) -> Result<Option<Message>, Refusal> {
        let refuse = |error: SpaceError| (error.code(), chain(&error));
        let descriptor = self.session.take_descriptor();
        let descriptor = descriptor.ok_or_else(|| refuse(SpaceError::NoDescriptor))?;
        let own = descriptor
            .try_clone()
            .map_err(|error| (RefusedCode::Internal, chain(&error)))?;
        match vm.attach_space(space, own) {
            Ok(space) => Ok(Some(Message::SpaceAttached { space })),
            Err(error) => {
                if self.refused.len() < MAX_SPACES {
                    self.refused.push(descriptor);
                }
                Err(refuse(error))
            }
        }
    }

    fn health(&mut self, vm: &Vm<'_>, serving: &Serving) -> Health {
        let progress = self.counted.progress(&vm.pager);
        let mut counted = vm.pager.counted();
        counted.add(serving.counters());
        Health {
            state: match () {
                () if self.is_handed_over => VmState::HandedOver,
                () if self.drain.is_some() => VmState::Draining,
                () if !vm.stalled.is_empty() => VmState::Stalled,
                () => VmState::Serving,
            },
            present: progress.present,
            lost: progress.poisoned,
            pages: progress.total,
            faults: counted.messages,
            stalls: self.stalls,
            last_error: vm.last_error.clone(),
        }
    }

    fn start_drain(&mut self, vm: &mut Vm<'_>, id: u32) -> Result<Option<Message>, Refusal> {
        if self.drain.is_some() {
            let text = "a drain is being answered";
            return Err(refusal(RefusedCode::Busy, text));
        }
        if !vm.without_content.is_empty() {
            let text = "the image ends before the end of the memory";
            return Err(refusal(RefusedCode::NoContent, text));
        }
        vm.drain()
            .map_err(|error| (RefusedCode::Internal, chain(&error)))?;
        let now = Instant::now();
        self.drain = Some(Drain {
            id,
            reported: now,
            settled: (0, now),
        });
        Ok(None)
    }

    fn working_set(
        &mut self,
        vm: &mut Vm<'_>,
        id: u32,
        action: WorkingSetAction,
    ) -> Result<Option<Message>, Refusal> {
        if self.work.is_some() || self.drain.is_some() {
            let text = "a drain or a working set is being answered";
            return Err(refusal(RefusedCode::Busy, text));
        }
        let now = |state| Ok(Some(Message::WorkingSetState { state, pages: 0 }));
        let writes = matches!(action, WorkingSetAction::Record | WorkingSetAction::Save);
        if writes && !vm.common.options.clients_record {
            // Other tenants' VMs would fetch what this one says.
            let text = "this server lets no client write a working set (--clients-record)";
            return Err(refusal(RefusedCode::WorkingSet, text));
        }
        match action {
            WorkingSetAction::Record => {
                vm.record();
                now(state_of(vm))
            }
            WorkingSetAction::Off => {
                vm.stop_recording();
                now(WorkingSetState::Off)
            }
            WorkingSetAction::Save => {
                let text = "nothing is being recorded";
                let recorder = vm.recorder.clone();
                let recorder = recorder.ok_or_else(|| refusal(RefusedCode::WorkingSet, text))?;
                let image = Arc::clone(vm.image);
                let answer = self.start(id, move || {
                    recorder.stop();
                    Work::Saved(image.save(&recorder))
                })?;
                // Not before: without a thread that saves it, the recording goes on.
                vm.stop_recording();
                Ok(answer)
            }
            WorkingSetAction::Replay => {
                let image = Arc::clone(vm.image);
                self.start(id, move || Work::Loaded(image.saved_working_set()))
            }
        }
    }

    /// Does what may wait for a disk on a thread of its own.
    fn start(
        &mut self,
        id: u32,
        work: impl FnOnce() -> Work + Send + 'static,
    ) -> Result<Option<Message>, Refusal> {
        let name = "pt-working-set".to_owned();
        let thread = Builder::new().name(name).spawn(work);
        let thread = thread.map_err(|error| (RefusedCode::Internal, chain(&error)))?;
        self.work = Some((id, thread));
        Ok(None)
    }

    fn hand_over(&mut self, vm: &mut Vm<'_>, id: u32) -> Result<Option<Message>, Refusal> {
        if self.work.is_some() || self.drain.is_some() {
            let text = "a drain or a working set is being answered";
            return Err(refusal(RefusedCode::Busy, text));
        }
        // It holds the regions.
        vm.prefetch = None;
        vm.stalled.clear();
        let mut parts = Vec::with_capacity(vm.parts.len());
        for part in &vm.parts {
            let exported = vm.pager.export(part.id);
            let exported = exported.map_err(|error| (RefusedCode::Internal, chain(&error)))?;
            parts.push(PageMapPart {
                region: part.region,
                first_page: part.first_page,
                bytes: exported.image.encode(),
            });
        }
        self.is_handed_over = true;
        // The VMM has a successor for this server: nobody else goes on with the VM, and the registration of
        // its memory is the successor's.
        vm.keeping = None;
        vm.addresses.clear();
        let count = u32::try_from(parts.len()).unwrap_or(u32::MAX);
        let after = Message::HandedOver { parts: count };
        self.session.send_maps(id, parts, after);
        Ok(None)
    }

    /// Whether something was left to do, at which to look soon.
    pub(super) fn is_busy(&self) -> bool {
        self.work.is_some() || self.drain.is_some()
    }

    /// Looks at what was left to do.
    pub(super) fn tick(&mut self, vm: &mut Vm<'_>) {
        self.end_work(vm);
        if let Some(drain) = &mut self.drain {
            // Before the pages are counted: what it has fetched is then among them.
            let has_ended = vm.prefetch.as_ref().is_none_or(Prefetch::is_finished);
            if has_ended {
                self.counted = Counted::default();
            }
            let patience = vm.common.options.drain_patience;
            if drain.settled.1.elapsed() >= patience {
                // Counts of much memory may be old.
                self.counted = Counted::default();
            }
            let Progress {
                present,
                poisoned,
                total,
            } = self.counted.progress(&vm.pager);
            let settled = present + poisoned;
            if settled > drain.settled.0 {
                drain.settled = (settled, Instant::now());
            }
            let has_waited = drain.settled.1.elapsed() >= patience;
            if settled == total {
                let lost = poisoned;
                let answer = Message::Drained(Drained { present, lost });
                self.session.answer(drain.id, &answer);
                self.is_drained = true;
                self.drain = None;
            } else if has_ended || has_waited {
                let missing = total - settled;
                let text = match has_ended {
                    true => format!("{missing} pages could not be fetched: they stay missing"),
                    false => {
                        format!("no page became present for {patience:?}, {missing} are missing")
                    }
                };
                if !(vm.common.options.prefetch && vm.recorder.is_none()) {
                    vm.prefetch = None;
                }
                let code = RefusedCode::NoContent;
                let refused = Message::Refused { code, text };
                self.session.answer(drain.id, &refused);
                self.drain = None;
            } else if drain.reported.elapsed() >= PROGRESS {
                drain.reported = Instant::now();
                let pages = total;
                let progress = Message::Progress { present, pages };
                self.session.answer_if_room(drain.id, &progress);
            }
        }
        self.session.flush();
    }

    fn end_work(&mut self, vm: &mut Vm<'_>) {
        let finished = self.work.take_if(|(_, thread)| thread.is_finished());
        let Some((id, thread)) = finished else {
            return;
        };
        let state = state_of(vm);
        let answer = match thread.join() {
            Ok(Work::Saved(Some(pages))) => Ok((WorkingSetState::Off, pages as u64)),
            Ok(Work::Saved(None)) => Err(
                "nothing was written: too little was touched, or the file cannot be written"
                    .to_owned(),
            ),
            Ok(Work::Loaded(Ok(Some(_)))) if state == WorkingSetState::Recording => {
                Err("a working set is being recorded".to_owned())
            }
            // Without a thread for it, the VM is served on, without prefetch.
            Ok(Work::Loaded(Ok(Some(set)))) => match vm.replay(&set) {
                Ok(pages) => Ok((WorkingSetState::Replaying, pages)),
                Err(error) => Err(chain(&error)),
            },
            Ok(Work::Loaded(Ok(None))) => Err("there is no working set of this image".to_owned()),
            Ok(Work::Loaded(Err(Silent))) => {
                Err("the working set's disk does not answer".to_owned())
            }
            Err(_) => Err("the thread panicked".to_owned()),
        };
        let answer = match answer {
            Ok((state, pages)) => Message::WorkingSetState { state, pages },
            Err(text) => Message::Refused {
                code: RefusedCode::WorkingSet,
                text,
            },
        };
        self.session.answer(id, &answer);
    }
}

/// Poisons the pages that are lost as a whole.
fn poison(vm: &Vm<'_>, offset: u64, bytes: u64) -> Result<Option<Message>, Refusal> {
    const PAGE: u64 = PageSize::Size4K.bytes();
    let end = offset.checked_add(bytes);
    let text = "the bytes pass the largest offset";
    let end = end.ok_or_else(|| refusal(RefusedCode::Regions, text))? / PAGE * PAGE;
    let start = offset.div_ceil(PAGE).saturating_mul(PAGE);
    let whole = end.checked_sub(start).filter(|&bytes| bytes > 0);
    let Some(whole) = whole else {
        return Ok(Some(Message::Poisoned { pages: 0 }));
    };
    match GuestRange::new(GuestAddress(start), whole) {
        Ok(lost) => Ok(Some(Message::Poisoned {
            pages: vm.pager.record_poison(lost),
        })),
        Err(error) => Err((RefusedCode::Regions, error.to_string())),
    }
}

fn state_of(vm: &Vm<'_>) -> WorkingSetState {
    match &vm.recorder {
        Some(_) => WorkingSetState::Recording,
        None if vm.replayed_pages > 0 => WorkingSetState::Replaying,
        None => WorkingSetState::Off,
    }
}

impl Vm<'_> {
    /// Records touches from now on.
    fn record(&mut self) {
        if self.recorder.is_none()
            && let Some(observer) = &self.observer
        {
            observer.restart();
            self.recorder = Some(Arc::clone(observer));
            // What comes ahead is not recorded. The rest is fetched when the recording has ended.
            self.prefetch = None;
        }
    }

    /// Ends the recording, and fetches what is missing as if there had been none.
    pub(super) fn stop_recording(&mut self) -> Option<Arc<crate::recorder::Recorder>> {
        let recorder = self.recorder.take()?;
        recorder.stop();
        if self.common.options.prefetch
            && self.prefetch.is_none()
            && let Err(error) = self.start_plan(Vec::new())
        {
            log_vm!(
                error,
                self.charge,
                error = &error as &dyn std::error::Error,
                "no prefetch: its thread was not started"
            );
        }
        Some(recorder)
    }
}
