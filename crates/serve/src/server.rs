//! The server: sockets, images, and a thread for each VM.

mod former;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use pagetide_sources::Location;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use thiserror::Error;

use crate::budgets::{Budgets, Charge, UserLimits};
use crate::connection::Connection;
use crate::control::channel::Reply;
use crate::control::message::{Answer, Request, Status};
use crate::inbox::{Inbox, Outbox};
use crate::listener::{ListenError, Listener};
use crate::log_limit::{LogLimit, log_limited};
use crate::metrics::Metrics;
use crate::named_image::NoImage;
use crate::opening::OpenFailure;
use crate::options::{Binding, OnFailure, Options};
use crate::parking::Parking;
use crate::peer::Peer;
use crate::porter::Porter;
use crate::readiness::Readiness;
use crate::sockets::Sockets;
use crate::state::{self, DescriptorStore, KeptVm, StateError};
use crate::stopper::Stopper;
use crate::turned_away::TurnedAway;
use crate::usage::Usage;
use crate::vm::{Client, Common, chain, run};
use former::open_state;

/// Why a server did not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// No socket was named.
    #[error("no socket to serve")]
    NoBindings,
    /// Two images at one socket.
    #[error("{}: the socket is named twice, for {first} and for {second}", socket.display())]
    TwoImages {
        /// The socket.
        socket: PathBuf,
        /// The image of its first binding.
        first: Location,
        /// The image of its second binding.
        second: Location,
    },
    /// An image cannot be served.
    #[error(transparent)]
    Image(#[from] NoImage),
    /// A socket could not be bound.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The VMs of a former server cannot be taken over.
    #[error(transparent)]
    State(#[from] StateError),
    /// The service manager's store of descriptors cannot be used.
    #[error("the service manager's store of descriptors")]
    Store(#[source] io::Error),
    /// The process that receives descriptors did not start.
    #[error("the porter did not start")]
    Porter(#[source] io::Error),
    /// The kernel refused a descriptor.
    #[error("creating the server's descriptors")]
    Descriptor(#[source] Errno),
}

/// What a service manager has given to this process.
#[derive(Debug, Default)]
pub struct Inherited {
    /// Listening sockets.
    pub listeners: Vec<UnixListener>,
    /// Where VMs are kept, unless [`Options::state`] names a keeper.
    pub store: Option<DescriptorStore>,
}

fn start_porter(options: &Options, stopper: &Stopper) -> Result<Option<Arc<Porter>>, StartError> {
    if options.porter.is_empty() {
        return Ok(None);
    }
    let porter = Porter::start(&options.porter, stopper.clone());
    Ok(Some(Arc::new(porter.map_err(StartError::Porter)?)))
}

/// Checks what makes sense for no server.
pub(crate) fn check_all(options: &Options) -> Result<(), StartError> {
    if options.bindings.is_empty() && !options.may_lack_bindings {
        return Err(StartError::NoBindings);
    }
    check_sockets(&options.bindings)
}

impl From<OpenFailure> for StartError {
    fn from(failure: OpenFailure) -> Self {
        match failure {
            OpenFailure::Image(error) => Self::Image(error),
            OpenFailure::Listen(error) => Self::Listen(error),
        }
    }
}

/// A socket has one image. Paths are compared without what leads nowhere, such as `./`.
fn check_sockets(bindings: &[Binding]) -> Result<(), StartError> {
    let mut first: HashMap<PathBuf, &Location> = HashMap::new();
    for Binding { socket, image, .. } in bindings {
        let absolute = std::path::absolute(socket).unwrap_or_else(|_| socket.clone());
        if let Some(earlier) = first.insert(absolute, image) {
            return Err(StartError::TwoImages {
                socket: socket.clone(),
                first: earlier.clone(),
                second: image.clone(),
            });
        }
    }
    Ok(())
}

/// A request of a client of a control socket.
#[derive(Debug)]
struct Command {
    request: Request,
    reply: Reply<Answer>,
}

/// Hands requests to a server's thread. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Controller(Outbox<Command>);

impl Controller {
    /// Has a request done. Waits for nothing: the answer comes by `reply`.
    pub fn handle(&self, request: Request, reply: Reply<Answer>) {
        self.0.send(Command { request, reply });
    }
}

/// Called by a server when its bindings have been tried.
type OnSettled = Box<dyn FnMut() + Send>;

/// A server whose sockets accept connections.
pub struct Server {
    sockets: Sockets,
    /// The sockets that are served, and what else is waited for.
    poll: Arc<OwnedFd>,
    vms: Arc<AtomicUsize>,
    /// Whether one of them has ended that was more than a connection without a byte.
    had_vm: Arc<AtomicBool>,
    /// Notified when a VM has ended.
    ended: Arc<OwnedFd>,
    /// What each user has taken.
    budgets: Budgets,
    turned_away: TurnedAway,
    /// Connections that were not accepted, or not served.
    logged: LogLimit,
    /// VMs that a former server has left.
    kept: Vec<KeptVm>,
    /// The greatest number of these, and then of all VMs.
    last_number: u64,
    threads: Vec<JoinHandle<()>>,
    on_settled: OnSettled,
    /// What clients of a control socket ask for.
    commands: Inbox<Command>,
    controller: Controller,
    /// Dropped last: fields are dropped in their order.
    _keeper: Option<state::KeeperConnection>,
}

// Keys of what is waited for beside the sockets, whose keys count from 1.
const STOP: u64 = u64::MAX;
const ENDED: u64 = u64::MAX - 1;
const RELOAD: u64 = u64::MAX - 2;
const OPENED: u64 = u64::MAX - 3;
const COMMAND: u64 = u64::MAX - 4;

impl Server {
    /// Opens the images and binds the sockets.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left behind then. A binding that is required and cannot be opened is one, unless a former server
    /// has left VMs and [`Options::once`] is not set. Other bindings are opened while the server runs.
    pub fn bind(options: Options) -> Result<Self, StartError> {
        Self::bind_with(options, Inherited::default())
    }

    /// The same with what a service manager has given to this process: each socket is used for the binding of its path.
    ///
    /// # Errors
    /// As [`Self::bind`].
    pub fn bind_with(options: Options, inherited: Inherited) -> Result<Self, StartError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let ended = Arc::new(eventfd(0, flags).map_err(StartError::Descriptor)?);
        let stopper = Stopper::new(options.stop_limit).map_err(StartError::Descriptor)?;
        check_all(&options)?;
        let porter = start_porter(&options, &stopper)?;
        let metrics = Metrics::default();
        let (state, kept) = open_state(&options, &porter, inherited.store, &metrics)?;
        let keeper = state.as_ref().map(state::KeeperConnection::of);
        let vms: Arc<AtomicUsize> = Arc::default();
        let limit = options.max_vms;
        let helpers = (state.clone(), porter.clone());
        let readiness = Readiness::new(stopper.clone(), Arc::clone(&vms), limit, helpers);
        let readiness = Arc::new(readiness);
        metrics.watch_readiness(Arc::clone(&readiness));
        let parking = Parking::new(stopper.clone(), Arc::clone(&ended));
        let parking = Arc::new(parking.map_err(StartError::Descriptor)?);
        let limits = options.user_limits;
        let limits = limits.unwrap_or_else(UserLimits::of_this_process);
        let common = Common {
            usage: Arc::default(),
            options: Arc::default(),
            metrics,
            stopper,
            state,
            parking,
            porter: porter.clone(),
        };
        let poll = epoll::create(CreateFlags::CLOEXEC).map_err(StartError::Descriptor)?;
        let poll = Arc::new(poll);
        let inherited = inherited
            .listeners
            .into_iter()
            .filter_map(Listener::inherited)
            .collect();
        let (commands, controller) = Inbox::new().map_err(StartError::Descriptor)?;
        let sockets = Sockets::new(Arc::new(common), Arc::clone(&poll), readiness, inherited);
        let mut server = Self {
            sockets: sockets.map_err(StartError::Descriptor)?,
            poll,
            vms,
            had_vm: Arc::default(),
            ended,
            budgets: Budgets::new(limits, porter),
            turned_away: TurnedAway::default(),
            logged: LogLimit::default(),
            last_number: kept.iter().map(|vm| vm.id).max().unwrap_or(0),
            kept,
            threads: Vec::new(),
            on_settled: Box::new(|| {}),
            commands,
            controller: Controller(controller),
            _keeper: keeper,
        };
        server.sockets.apply(options);
        let goes_on_anyway = server.has_vms() && !server.common().options.once;
        server.sockets.open_required(goes_on_anyway)?;
        server.sockets.warn_of_unused();
        Ok(server)
    }

    fn common(&self) -> &Arc<Common> {
        &self.sockets.common
    }

    /// Ends the server.
    pub fn stopper(&self) -> Stopper {
        self.common().stopper.clone()
    }

    /// Whether it reads objects of a store: an image, a layer of one, or the image of a VM that a former
    /// server has left.
    pub fn uses_network(&self) -> bool {
        let is_url = |kept: &KeptVm| {
            let location = kept.description.image.parse();
            matches!(location, Ok(Location::Url(_)))
        };
        self.sockets.uses_network() || self.kept.iter().any(is_url)
    }

    /// Whether a former server has left VMs, which are asleep until this one runs.
    pub fn has_vms(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Its counts.
    pub fn metrics(&self) -> Metrics {
        self.common().metrics.clone()
    }

    /// Does what the clients of a control socket ask for.
    pub fn controller(&self) -> Controller {
        self.controller.clone()
    }

    /// Has `call` called by the server's thread when each binding has been tried, after the start and after each
    /// [`Stopper::reload`]; at the latest after 10 s, as an image may take longer.
    pub fn on_settled(&mut self, call: impl FnMut() + Send + 'static) {
        self.on_settled = Box::new(call);
    }

    /// Serves until the server is stopped, or, with [`Options::once`], until its last VM has gone.
    ///
    /// # Errors
    /// The kernel's error, if waiting for connections fails. The VMs that are there have then ended.
    pub fn run(mut self) -> io::Result<()> {
        self.sockets.tell();
        self.resume_kept();
        let result = self.accept_all();
        if !self.common().stopper.is_stopping() {
            self.common().stopper.stop();
        }
        // Nobody new connects while the VMs end.
        self.sockets.close();
        for thread in self.threads.drain(..) {
            // A panic was logged by the thread.
            let _ = thread.join();
        }
        self.turned_away.end();
        self.common().parking.end();
        result
    }

    /// Accepts VMs until the server ends.
    fn accept_all(&mut self) -> io::Result<()> {
        self.watch()?;
        let mut events = Vec::with_capacity(64);
        loop {
            let now = Instant::now();
            self.sockets.start_due(now);
            if self.sockets.has_settled(now) {
                (self.on_settled)();
            }
            let timeout = self.sockets.next_due().and_then(|due| {
                // A wait that ended a bit early would begin again at once, many times.
                let left = due.saturating_duration_since(now) + Duration::from_millis(1);
                Timespec::try_from(left).ok()
            });
            let spare = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.poll, spare, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            for event in events.drain(..) {
                match event.data.u64() {
                    STOP => return Ok(()),
                    RELOAD => self.reload(),
                    OPENED => self.take_opened(),
                    COMMAND => self.obey(),
                    ENDED => {
                        let _ = rustix::io::read(&self.ended, &mut [0; 8]);
                        self.threads.retain(|thread| !thread.is_finished());
                        self.sockets.forget_unused();
                    }
                    key if self.sockets.end_kept(key) => {
                        self.had_vm.store(true, Ordering::Release);
                    }
                    key => self.accept(key),
                }
            }
            let is_last = self.vms.load(Ordering::Acquire) == 0
                && self.had_vm.load(Ordering::Acquire)
                && !self.sockets.has_kept()
                && self.common().parking.is_empty();
            if self.common().options.once && is_last {
                return Ok(());
            }
        }
    }

    /// Waits for all that is not a socket.
    fn watch(&self) -> io::Result<()> {
        let add = |fd: BorrowedFd<'_>, key| {
            epoll::add(&self.poll, fd, EventData::new_u64(key), EventFlags::IN)
        };
        let stopper = &self.common().stopper;
        add(stopper.as_fd(), STOP)?;
        add(stopper.reloads(), RELOAD)?;
        add(self.ended.as_fd(), ENDED)?;
        add(self.commands.as_fd(), COMMAND)?;
        if let Some(done) = self.sockets.done() {
            add(done.as_fd(), OPENED)?;
        }
        Ok(())
    }

    fn reload(&mut self) {
        let Some(options) = self.common().stopper.take_options() else {
            return;
        };
        let error = match check_all(&options) {
            Ok(()) => self
                .sockets
                .is_drained
                .then(|| "the server is drained".to_owned()),
            Err(error) => Some(chain(&error)),
        };
        if let Some(error) = error {
            tracing::error!(error, "the options stay as they are");
            (self.on_settled)();
            return;
        }
        let sockets = options.bindings.len();
        self.sockets.apply(options);
        tracing::info!(
            sockets,
            "the options are applied, and images and sockets are looked at again"
        );
    }

    /// Does what clients of a control socket have asked for.
    fn obey(&mut self) {
        for Command { request, reply } in self.commands.take() {
            match request {
                Request::Add { socket, binding } => {
                    self.sockets.add_commanded(&socket, &binding, reply);
                }
                Request::Remove { socket } => self.sockets.remove_commanded(&socket, reply),
                Request::Drain { socket } => {
                    self.sockets.drain_commanded(socket.as_deref(), reply);
                }
                Request::List => reply.send(Ok(Answer::Sockets(self.sockets.list()))),
                Request::Status => reply.send(Ok(Answer::Status(self.status()))),
            }
        }
    }

    fn status(&self) -> Status {
        let metrics = &self.common().metrics;
        let (totals, troubles) = (metrics.totals(), metrics.troubles());
        let sockets_waiting = self.sockets.waiting();
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            ready: !troubles.iter().any(|trouble| trouble.refuses_vms()),
            troubles: troubles.iter().map(ToString::to_string).collect(),
            sockets: self.sockets.served(),
            sockets_waiting,
            vms: self.vms.load(Ordering::Acquire),
            vms_accepted: totals.vms_accepted,
            vms_refused: totals.vms_refused,
            memory_bytes: totals.memory_bytes,
            stalled_regions: totals.stalled_regions,
        }
    }

    /// Accepts one connection, and starts its thread.
    fn accept(&mut self, key: u64) {
        // A socket that was closed since it was readable has none.
        let Some(served) = self.sockets.get(key) else {
            return;
        };
        let socket = served.listener.path().display().to_string();
        let stream = match served.listener.socket.accept() {
            Ok((stream, _)) => Connection::new(stream, self.common().porter.clone()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => {
                log_limited!(error, self.logged, socket, %error, "a connection was not accepted");
                // Out of descriptors: the connection stays, and a wait would return at once.
                std::thread::sleep(Duration::from_millis(50));
                return;
            }
        };
        let (common, offer) = (Arc::clone(served.common), Arc::clone(served.offer));
        let Some(peer) = self.peer_of(&stream, &socket) else {
            return stream.end();
        };
        let Some(charge) = self.room_for(&peer, &socket) else {
            common.metrics.count(|totals| totals.vms_refused = 1);
            if common.options.on_failure == OnFailure::Kill {
                let charge = self.budgets.of_turned_away(peer.uid);
                self.turned_away.kill_if_vmm(&common, peer, stream, charge);
            } else {
                stream.end();
            }
            return;
        };
        // Not the number of a VM that a former server has left.
        self.last_number += 1;
        common.metrics.count(|totals| totals.vms_accepted = 1);
        let client = Client {
            number: self.last_number,
            socket,
            stream,
            peer,
            charge,
            kept: None,
        };
        let (vm, socket) = (client.number, client.socket.clone());
        common.usage.begin();
        let its = Arc::clone(&common);
        let started = self.start(&common, vm, move || run(&its, &offer, client));
        if let Err(error) = started {
            common.metrics.count(|totals| totals.vms_refused = 1);
            log_limited!(error, self.logged, vm, socket, %error, "VM refused: its thread was not started");
        }
    }

    fn peer_of(&self, stream: &UnixStream, socket: &str) -> Option<Peer> {
        let error = match Peer::of(stream) {
            Ok(peer) => return Some(peer),
            Err(error) => error,
        };
        log_limited!(error, self.logged, socket, %error, "VM refused: its process is unknown");
        None
    }

    /// Room for another VM, if neither the server nor the user is at its limit.
    fn room_for(&self, peer: &Peer, socket: &str) -> Option<Charge> {
        let options = &self.common().options;
        let (limit, uid) = (options.max_vms, peer.uid);
        if self.vms.load(Ordering::Acquire) >= limit {
            log_limited!(
                error,
                self.logged,
                socket,
                uid,
                limit,
                "VM refused: too many VMs"
            );
            return None;
        }
        let charge = self.budgets.charge(uid, options.max_vms_per_user);
        if let Err(error) = &charge {
            log_limited!(error, self.logged, socket, uid, %error, "VM refused: too many VMs of this user");
        }
        charge.ok()
    }

    /// Starts the thread of a VM, which says at its end whether it was one. If it cannot be started, the VM has ended.
    fn start(
        &mut self,
        common: &Common,
        vm: u64,
        run: impl FnOnce() -> bool + Send + 'static,
    ) -> io::Result<()> {
        tracing::debug!(vm, "starting the thread of a VM");
        self.vms.fetch_add(1, Ordering::AcqRel);
        let ending = Ending {
            usage: Arc::clone(&common.usage),
            vms: Arc::clone(&self.vms),
            had_vm: Arc::clone(&self.had_vm),
            is_vm: true,
            ended: Arc::clone(&self.ended),
        };
        let thread = Builder::new().name(format!("pt-vm-{vm}")).spawn(move || {
            let mut ending = ending;
            ending.is_vm = run();
        })?;
        self.threads.push(thread);
        Ok(())
    }
}

/// Counts a VM's end, however its thread ends.
struct Ending {
    usage: Arc<Usage>,
    vms: Arc<AtomicUsize>,
    had_vm: Arc<AtomicBool>,
    is_vm: bool,
    ended: Arc<OwnedFd>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        if self.is_vm {
            self.had_vm.store(true, Ordering::Release);
        }
        self.vms.fetch_sub(1, Ordering::AcqRel);
        self.usage.end();
        let _ = rustix::io::write(&*self.ended, &1_u64.to_ne_bytes());
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("sockets", &self.sockets)
            .finish_non_exhaustive()
    }
}
