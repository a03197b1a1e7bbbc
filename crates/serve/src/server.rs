//! The server: sockets, images, and a thread for each VM.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use pagetide_sources::Location;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use thiserror::Error;

use crate::budgets::{Budgets, Charge, UserLimits};
use crate::listener::{ListenError, Listener};
use crate::log_limit::LogLimit;
use crate::metrics::Metrics;
use crate::named_image::{NamedImage, NoImage, Offer};
use crate::options::{Binding, OnFailure, Options};
use crate::parking::Parking;
use crate::peer::Peer;
use crate::porter::Porter;
use crate::readiness::Readiness;
use crate::state::{DescriptorStore, KeptVm, State, StateError};
use crate::stopper::Stopper;
use crate::turned_away::TurnedAway;
use crate::vm::{Client, Common, run};

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

/// Where VMs are kept, and those that a former server has left there.
fn open_state(
    options: &Options,
    porter: &Option<Arc<Porter>>,
    store: Option<DescriptorStore>,
    metrics: &Metrics,
) -> Result<(Option<Arc<State>>, Vec<KeptVm>), StartError> {
    let on_failure = options.on_failure;
    let (state, kept) = match (&options.state, store) {
        (None, None) => return Ok((None, Vec::new())),
        (Some(keeper), _) => State::open(keeper, porter.clone(), on_failure, metrics)?,
        (None, Some(store)) => State::at_store(store, on_failure).map_err(StartError::Store)?,
    };
    Ok((Some(Arc::new(state)), kept))
}

fn start_porter(options: &Options, stopper: &Stopper) -> Result<Option<Arc<Porter>>, StartError> {
    if options.porter.is_empty() {
        return Ok(None);
    }
    let porter = Porter::start(&options.porter, stopper.clone());
    Ok(Some(Arc::new(porter.map_err(StartError::Porter)?)))
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

/// A socket, and the image of its VMs.
#[derive(Debug)]
struct Bound {
    listener: Listener,
    offer: Arc<Offer>,
}

/// A server whose sockets accept connections.
pub struct Server {
    common: Arc<Common>,
    images: HashMap<Location, Arc<NamedImage>>,
    bound: Vec<Bound>,
    vms: Arc<AtomicUsize>,
    /// Whether one of them has ended that was more than a connection without a byte.
    had_vm: Arc<AtomicBool>,
    /// Notified when a VM has ended.
    ended: Arc<OwnedFd>,
    readiness: Arc<Readiness>,
    /// What each user has taken.
    budgets: Budgets,
    turned_away: TurnedAway,
    /// Connections that were not accepted, or not served.
    limit_logged: LogLimit,
    /// VMs that a former server has left.
    kept: Vec<KeptVm>,
    /// The greatest number of these.
    first_number: u64,
}

impl Server {
    /// Opens the images and binds the sockets.
    ///
    /// # Errors
    /// [`StartError`]; then nothing is left behind.
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
        let porter = start_porter(&options, &stopper)?;
        let metrics = Metrics::default();
        let (state, kept) = open_state(&options, &porter, inherited.store, &metrics)?;
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
            options: Arc::default(),
            metrics,
            stopper,
            state,
            parking,
        };
        let mut server = Self {
            common: Arc::new(common),
            images: HashMap::new(),
            bound: Vec::new(),
            vms,
            readiness,
            had_vm: Arc::default(),
            ended,
            budgets: Budgets::new(limits, porter),
            turned_away: TurnedAway::default(),
            limit_logged: LogLimit::default(),
            first_number: kept.iter().map(|vm| vm.id).max().unwrap_or(0),
            kept,
        };
        let inherited = inherited
            .listeners
            .into_iter()
            .filter_map(Listener::inherited)
            .collect();
        server.apply(options, inherited)?;
        Ok(server)
    }

    /// Opens what `options` have and the server has not, and closes what the options have not. Returns the images that were
    /// opened.
    fn apply(
        &mut self,
        options: Options,
        mut inherited: Vec<Listener>,
    ) -> Result<Vec<Arc<NamedImage>>, StartError> {
        if options.bindings.is_empty() {
            return Err(StartError::NoBindings);
        }
        check_sockets(&options.bindings)?;
        let metrics = &self.common.metrics;
        let mut images: HashMap<Location, Arc<NamedImage>> = HashMap::new();
        let (mut offers, mut new) = (Vec::new(), Vec::new());
        let mut opened = Vec::new();
        for binding in &options.bindings {
            let location = &binding.image;
            if !images.contains_key(location) {
                let image = match self.images.get(location) {
                    Some(image) => {
                        reload(image, &options, metrics);
                        Arc::clone(image)
                    }
                    None => {
                        let image = Arc::new(NamedImage::open(location, &options, metrics)?);
                        new.push(Arc::clone(&image));
                        image
                    }
                };
                images.insert(location.clone(), image);
            }
            if let Some(image) = images.get(location) {
                let offer = Offer::new(Arc::clone(image), binding.clone());
                // Its digest is compared, and its working set looked for, before a VM comes.
                offer.opened(&options)?;
                offers.push(Arc::new(offer));
            }
            let is_open = |bound: &Bound| bound.listener.path() == binding.socket;
            if self.bound.iter().any(is_open) {
                continue;
            }
            let given = inherited
                .iter()
                .position(|given| given.path() == binding.socket);
            opened.push(match given {
                Some(index) => inherited.swap_remove(index),
                None => Listener::bind(&binding.socket, options.socket_mode, options.socket_owner)?,
            });
        }
        for unused in &inherited {
            let socket = unused.path().display().to_string();
            tracing::warn!(socket, "a socket of the service manager has no binding");
        }
        // Nothing fails from here on.
        let mut listeners: Vec<Listener> =
            self.bound.drain(..).map(|bound| bound.listener).collect();
        listeners.append(&mut opened);
        for (binding, offer) in options.bindings.iter().zip(offers) {
            let found = listeners
                .iter()
                .position(|open| open.path() == binding.socket);
            if let Some(index) = found {
                let listener = listeners.swap_remove(index);
                self.bound.push(Bound { listener, offer });
            }
        }
        self.readiness.set_limit(options.max_vms);
        self.images = images;
        let served = self.images.values();
        let served = served.map(|image| Arc::clone(&image.opened().image));
        self.common.metrics.watch(served.collect());
        self.common = Arc::new(Common {
            options: Arc::new(options),
            metrics: self.common.metrics.clone(),
            stopper: self.common.stopper.clone(),
            state: self.common.state.clone(),
            parking: Arc::clone(&self.common.parking),
        });
        Ok(new)
    }

    /// Ends the server.
    pub fn stopper(&self) -> Stopper {
        self.common.stopper.clone()
    }

    /// Whether it reads objects of a store: an image, a layer of one, or the image of a VM that a former
    /// server has left.
    pub fn uses_network(&self) -> bool {
        let is_url = |kept: &KeptVm| {
            let location = kept.description.image.parse();
            matches!(location, Ok(Location::Url(_)))
        };
        let mut images = self.images.values();
        images.any(|image| image.opened().image.counters().is_some())
            || self.kept.iter().any(is_url)
    }

    /// Its counts.
    pub fn metrics(&self) -> Metrics {
        self.common.metrics.clone()
    }

    /// Serves until the server is stopped, or, with [`Options::once`], until its last VM has gone.
    ///
    /// # Errors
    /// The kernel's error, if waiting for connections fails. The VMs that are there have then ended.
    pub fn run(mut self) -> io::Result<()> {
        self.images.values().for_each(|image| image.tell());
        let mut threads = Vec::new();
        self.resume_kept(&mut threads);
        let result = self.accept_all(&mut threads);
        if !self.common.stopper.is_stopping() {
            self.common.stopper.stop();
        }
        // Nobody new connects while the VMs end.
        self.bound.clear();
        for thread in threads {
            let thread: JoinHandle<()> = thread;
            // A panic was logged by the thread.
            let _ = thread.join();
        }
        self.common.parking.end();
        if let Some(state) = &self.common.state {
            state.end();
        }
        result
    }

    /// Goes on with the VMs of a former server.
    fn resume_kept(&mut self, threads: &mut Vec<JoinHandle<()>>) {
        for kept in std::mem::take(&mut self.kept) {
            let image = self.image_of(&kept);
            let (vm, socket) = (kept.id, kept.description.socket.clone());
            match image {
                Ok(image) => {
                    tracing::info!(vm, socket, "going on with a VM of a former server");
                    match self.client_of(kept) {
                        Ok(client) => self.start(image, client, threads),
                        Err(error) => {
                            tracing::error!(vm, %error, "a VM of a former server stays asleep");
                        }
                    }
                }
                Err(error) => tracing::error!(
                    vm,
                    socket,
                    error = &*error,
                    "a VM of a former server stays asleep"
                ),
            }
        }
    }

    /// The client that a former server has left. It was accepted then, whatever the limits are now.
    fn client_of(&self, kept: KeptVm) -> io::Result<Client> {
        let peer = Peer::of(&kept.stream)?;
        Ok(Client {
            number: kept.id,
            socket: kept.description.socket.clone(),
            stream: kept.stream.try_clone()?,
            charge: self.budgets.charge_anyway(peer.uid),
            peer,
            kept: Some(kept),
        })
    }

    fn image_of(&mut self, kept: &KeptVm) -> Result<Arc<Offer>, Box<dyn std::error::Error>> {
        let location: Location = kept.description.image.parse()?;
        let image = match self.images.get(&location) {
            Some(image) => Arc::clone(image),
            None => {
                let (options, metrics) = (&self.common.options, &self.common.metrics);
                Arc::new(NamedImage::open(&location, options, metrics)?)
            }
        };
        self.images.insert(location.clone(), Arc::clone(&image));
        let mut binding = Binding::new(&kept.description.socket, location);
        let bindings = &self.common.options.bindings;
        let is_its = |now: &&Binding| now.socket == binding.socket && now.image == binding.image;
        if let Some(now) = bindings.iter().find(is_its) {
            // What it records goes where its socket's recordings go.
            binding.working_set_file.clone_from(&now.working_set_file);
        }
        Ok(Arc::new(Offer::new(image, binding)))
    }

    fn accept_all(&mut self, threads: &mut Vec<JoinHandle<()>>) -> io::Result<()> {
        let mut accepted = 0;
        while self.accept_until_reload(&mut accepted, threads)? {
            let Some(options) = self.common.stopper.take_options() else {
                continue;
            };
            match self.apply(options, Vec::new()) {
                Ok(new) => {
                    new.iter().for_each(|image| image.tell());
                    tracing::info!(sockets = self.bound.len(), "new options are used");
                }
                Err(error) => tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "the options stay as they are"
                ),
            }
        }
        Ok(())
    }

    /// Accepts VMs until there are new options (true), or the server ends (false).
    fn accept_until_reload(
        &self,
        accepted: &mut u64,
        threads: &mut Vec<JoinHandle<()>>,
    ) -> io::Result<bool> {
        const STOP: u64 = u64::MAX;
        const ENDED: u64 = u64::MAX - 1;
        const RELOAD: u64 = u64::MAX - 2;
        let stopper = &self.common.stopper;
        let poll = epoll::create(CreateFlags::CLOEXEC)?;
        let add = |fd: BorrowedFd<'_>, token| {
            epoll::add(&poll, fd, EventData::new_u64(token), EventFlags::IN)
        };
        add(stopper.as_fd(), STOP)?;
        add(stopper.reloads(), RELOAD)?;
        add(self.ended.as_fd(), ENDED)?;
        for (index, bound) in self.bound.iter().enumerate() {
            let token = EventData::new_u64(index as u64);
            epoll::add(&poll, &bound.listener.socket, token, EventFlags::IN)?;
        }
        let mut events = Vec::with_capacity(64);
        loop {
            match epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            for event in events.drain(..) {
                match event.data.u64() {
                    STOP => return Ok(false),
                    RELOAD => return Ok(true),
                    ENDED => {
                        let _ = rustix::io::read(&self.ended, &mut [0; 8]);
                        threads.retain(|thread| !thread.is_finished());
                    }
                    index => {
                        let bound = usize::try_from(index)
                            .ok()
                            .and_then(|index| self.bound.get(index));
                        if let Some(bound) = bound {
                            self.accept(bound, accepted, threads);
                        }
                    }
                }
            }
            let is_last =
                self.vms.load(Ordering::Acquire) == 0 && self.had_vm.load(Ordering::Acquire);
            if self.common.options.once && is_last && self.common.parking.is_empty() {
                return Ok(false);
            }
        }
    }

    /// Accepts one connection, and starts its thread.
    fn accept(&self, bound: &Bound, accepted: &mut u64, threads: &mut Vec<JoinHandle<()>>) {
        let socket = bound.listener.path().display().to_string();
        let stream: UnixStream = match bound.listener.socket.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => {
                if let Some(dropped) = self.limit_logged.pass() {
                    tracing::error!(socket, dropped, %error, "a connection was not accepted");
                }
                // Out of descriptors: the connection stays, and a wait would return at once.
                std::thread::sleep(Duration::from_millis(50));
                return;
            }
        };
        let Some(peer) = self.peer_of(&stream, &socket) else {
            return;
        };
        let Some(charge) = self.room_for(&peer, &socket) else {
            self.common.metrics.count(|totals| totals.vms_refused = 1);
            if self.common.options.on_failure == OnFailure::Kill {
                let charge = self.budgets.of_nobody();
                self.turned_away
                    .kill_if_vmm(&self.common, peer, stream, charge);
            }
            return;
        };
        *accepted += 1;
        // Not the number of a VM that a former server has left.
        let number = *accepted + self.first_number;
        self.common.metrics.count(|totals| totals.vms_accepted = 1);
        let client = Client {
            number,
            socket,
            stream,
            peer,
            charge,
            kept: None,
        };
        self.start(Arc::clone(&bound.offer), client, threads);
    }

    fn peer_of(&self, stream: &UnixStream, socket: &str) -> Option<Peer> {
        let error = match Peer::of(stream) {
            Ok(peer) => return Some(peer),
            Err(error) => error,
        };
        if let Some(dropped) = self.limit_logged.pass() {
            tracing::error!(socket, dropped, %error, "VM refused: its process is unknown");
        }
        None
    }

    /// Room for another VM, if neither the server nor the user is at its limit.
    fn room_for(&self, peer: &Peer, socket: &str) -> Option<Charge> {
        let options = &self.common.options;
        let (limit, uid) = (options.max_vms, peer.uid);
        if self.vms.load(Ordering::Acquire) >= limit {
            if let Some(dropped) = self.limit_logged.pass() {
                tracing::error!(socket, uid, limit, dropped, "VM refused: too many VMs");
            }
            return None;
        }
        let charge = self.budgets.charge(uid, options.max_vms_per_user);
        if let Err(error) = &charge
            && let Some(dropped) = self.limit_logged.pass()
        {
            tracing::error!(socket, uid, dropped, %error, "VM refused: too many VMs of this user");
        }
        charge.ok()
    }

    /// Starts a VM's thread.
    fn start(&self, offer: Arc<Offer>, client: Client, threads: &mut Vec<JoinHandle<()>>) {
        self.vms.fetch_add(1, Ordering::AcqRel);
        let common = Arc::clone(&self.common);
        let ending = Ending {
            vms: Arc::clone(&self.vms),
            had_vm: Arc::clone(&self.had_vm),
            is_vm: true,
            ended: Arc::clone(&self.ended),
        };
        let thread = Builder::new()
            .name(format!("pt-vm-{}", client.number))
            .spawn(move || {
                let mut ending = ending;
                ending.is_vm = run(&common, &offer, client);
            });
        match thread {
            Ok(thread) => threads.push(thread),
            Err(error) => tracing::error!(%error, "VM refused: its thread was not started"),
        }
    }
}

/// Opens an image anew if its name leads elsewhere. If that is not possible, the VMs that have it go on, and new ones
/// are refused by the same look.
fn reload(image: &NamedImage, options: &Options, metrics: &Metrics) {
    if let Err(error) = image.reload(options, metrics) {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "new VMs are refused as long as that is so"
        );
    }
}

/// Counts a VM's end, however its thread ends.
struct Ending {
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
        let _ = rustix::io::write(&*self.ended, &1_u64.to_ne_bytes());
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("bound", &self.bound)
            .finish_non_exhaustive()
    }
}
