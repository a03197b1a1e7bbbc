//! What is to be served, at which sockets, and what has become of it.
//!
//! Each binding is served on its own: one whose image or socket cannot be opened fails alone, and is tried again. The thread
//! that accepts VMs has this table, and opens nothing itself ([`crate::opening`]).

mod commanded;
mod entry;
mod former;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagetide_sources::Location;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

use crate::inbox::{Inbox, Outbox};
use crate::listener::Listener;
use crate::metrics::SocketVms;
use crate::named_image::{NamedImage, Offer};
use crate::opening::{Done, Job, OpenFailure, Opened, Task};
use crate::options::{Binding, Options};
use crate::readiness::Readiness;
use crate::usage::Usage;
use crate::vm::{Common, chain};
use commanded::{Closed, Drain};
use entry::{Attempt, Entry, Origin, tell_of, tell_of_failure};
pub(crate) use former::Resumed;

/// The pause before a binding is tried again, which doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Images that are opened at one time. A silent store holds up the images of as many others at most.
const MOST_JOBS: usize = 64;

/// After this time a start or a reload counts as done, although an image is still being opened.
const SETTLED_AFTER: Duration = Duration::from_secs(10);

/// What is served at a socket.
#[derive(Clone, Copy)]
pub(crate) struct Served<'a> {
    pub(crate) listener: &'a Listener,
    pub(crate) offer: &'a Arc<Offer>,
    pub(crate) common: &'a Arc<Common>,
}

/// The bindings of a server.
pub(crate) struct Sockets {
    pub(crate) common: Arc<Common>,
    poll: Arc<OwnedFd>,
    readiness: Arc<Readiness>,
    entries: BTreeMap<u64, Entry>,
    last_key: u64,
    images: HashMap<Location, Arc<NamedImage>>,
    /// The images that are being opened.
    running: HashSet<Location>,
    done: Option<Inbox<Done>>,
    outbox: Outbox<Done>,
    /// Sockets that a service manager has opened, and that no binding has claimed.
    inherited: Vec<Listener>,
    /// Sockets that are closed, and whose VMs may run.
    closed: Vec<Closed>,
    drains: Vec<Drain>,
    /// Whether nothing is served any more, at the word of a client of the control socket.
    pub(crate) is_drained: bool,
    /// When the start or the last reload counts as done, until it does.
    settles: Option<Instant>,
}

impl Sockets {
    /// No sockets yet. Those that are served are watched by `poll`, each with its key.
    pub(crate) fn new(
        common: Arc<Common>,
        poll: Arc<OwnedFd>,
        readiness: Arc<Readiness>,
        inherited: Vec<Listener>,
    ) -> Result<Self, Errno> {
        let (done, outbox) = Inbox::new()?;
        Ok(Self {
            common,
            poll,
            readiness,
            entries: BTreeMap::new(),
            last_key: 0,
            images: HashMap::new(),
            running: HashSet::new(),
            done: Some(done),
            outbox,
            inherited,
            closed: Vec::new(),
            drains: Vec::new(),
            is_drained: false,
            settles: None,
        })
    }

    /// Where the results of openings come.
    pub(crate) fn done(&self) -> Option<&Inbox<Done>> {
        self.done.as_ref()
    }

    /// Has these options and their bindings in place of the former ones.
    pub(crate) fn apply(&mut self, mut options: Options) {
        let bindings = std::mem::take(&mut options.bindings);
        self.readiness.set_limit(options.max_vms);
        self.common = Arc::new(self.common.with(options, Arc::default()));
        let mut former = std::mem::take(&mut self.entries);
        for binding in bindings {
            let is_its = |(_, entry): &(&u64, &Entry)| {
                entry.kept.is_none() && entry.binding.socket == binding.socket
            };
            let found = former.iter().find(is_its).map(|(key, _)| *key);
            match found.and_then(|key| Some((key, former.remove(&key)?))) {
                Some((key, mut entry)) if entry.binding == binding => {
                    entry.origin = Origin::Options;
                    entry.reload(&self.common);
                    self.entries.insert(key, entry);
                }
                Some((_, entry)) => {
                    let usage = Arc::clone(&entry.common.usage);
                    let listener = self.listener_for(&binding, entry);
                    self.add(binding, listener, usage);
                }
                None => {
                    self.add(binding, None, Arc::default());
                }
            }
        }
        for (key, mut entry) in former {
            match (entry.kept.is_some(), entry.origin) {
                (false, Origin::Options) => self.retire(entry),
                (false, Origin::Command) => {
                    entry.reload(&self.common);
                    self.entries.insert(key, entry);
                }
                (true, _) => {
                    self.entries.insert(key, entry);
                }
            }
        }
        self.settles = Some(Instant::now() + SETTLED_AFTER);
        self.update();
    }

    /// The socket of a binding whose place another one takes, if it can stay as it is.
    fn listener_for(&self, binding: &Binding, former: Entry) -> Option<Listener> {
        for reply in former.waiting {
            reply.send(Err("a reload has given the socket another image".to_owned()));
        }
        let listener = former.listener?;
        if former.offer.is_some() {
            // VMs that connect now wait for what the new binding says.
            let _ = epoll::delete(&self.poll, &*listener.socket);
        }
        let access = |binding: &Binding| (binding.socket_mode, binding.socket_owner);
        let stays = listener.is_inherited() || access(binding) == access(&former.binding);
        stays.then_some(listener)
    }

    /// Adds a binding, which is due. Returns its key.
    fn add(&mut self, binding: Binding, listener: Option<Listener>, usage: Arc<Usage>) -> u64 {
        let listener = listener.or_else(|| self.inherit(&binding.socket));
        let mut entry = Entry::new(binding, &self.common, usage);
        entry.listener = listener;
        self.last_key += 1;
        self.entries.insert(self.last_key, entry);
        self.last_key
    }

    /// The socket of the service manager for this path, if there is one.
    fn inherit(&mut self, path: &Path) -> Option<Listener> {
        let mut given = self.inherited.iter();
        let index = given.position(|given| given.path() == path)?;
        Some(self.inherited.swap_remove(index))
    }

    /// Warns of sockets that the service manager has opened for nothing.
    pub(crate) fn warn_of_unused(&self) {
        for unused in &self.inherited {
            let socket = unused.path().display().to_string();
            tracing::warn!(socket, "a socket of the service manager has no binding");
        }
    }

    /// Opens the bindings without which the server does not start, on this thread. If the server `goes_on_anyway`, for VMs of a
    /// former one, which need no socket and perhaps another image, a binding that fails is tried again later.
    pub(crate) fn open_required(&mut self, goes_on_anyway: bool) -> Result<(), OpenFailure> {
        let is_required = |(_, entry): &(&u64, &Entry)| entry.binding.is_required;
        let keys: Vec<u64> = self
            .entries
            .iter()
            .filter(is_required)
            .map(|(key, _)| *key)
            .collect();
        for key in keys {
            match self.open_now(key) {
                Err(error) if goes_on_anyway => self.fail(key, chain(&error)),
                opened => opened?,
            }
        }
        self.update();
        Ok(())
    }

    fn open_now(&mut self, key: u64) -> Result<(), OpenFailure> {
        let Some(entry) = self.entries.get(&key) else {
            return Ok(());
        };
        let location = entry.binding.image.clone();
        let job = self.job(location.clone(), vec![entry.task(key)]);
        let image = job.image()?;
        self.images.insert(location, Arc::clone(&image));
        for task in &job.tasks {
            let opened = task.open(&image, true)?;
            self.serve(key, opened);
        }
        Ok(())
    }

    /// Tells what is open already.
    pub(crate) fn tell(&self) {
        self.images.values().for_each(|image| image.tell());
        for entry in self.entries.values().filter(|entry| entry.is_served()) {
            tell_of(entry);
        }
    }

    fn job(&self, location: Location, tasks: Vec<Task>) -> Job {
        let is_reload = |task: &Task| {
            self.entries
                .get(&task.key)
                .is_some_and(|entry| entry.is_reload)
        };
        Job {
            known: self.images.get(&location).cloned(),
            is_reload: tasks.iter().any(is_reload),
            common: Arc::clone(&self.common),
            location,
            tasks,
        }
    }

    /// Begins to open what is due.
    pub(crate) fn start_due(&mut self, now: Instant) {
        let mut due: HashMap<Location, Vec<u64>> = HashMap::new();
        for (key, entry) in &self.entries {
            let location = &entry.binding.image;
            if entry.due().is_some_and(|at| at <= now) && !self.running.contains(location) {
                due.entry(location.clone()).or_default().push(*key);
            }
        }
        for (location, keys) in due {
            if self.running.len() >= MOST_JOBS {
                // The end of one of them brings this thread back.
                return;
            }
            let mut tasks = Vec::with_capacity(keys.len());
            for key in keys {
                if let Some(entry) = self.entries.get_mut(&key) {
                    entry.attempt = Attempt::Running { again: false };
                    tasks.push(entry.task(key));
                }
            }
            let job = self.job(location.clone(), tasks);
            self.running.insert(location);
            job.start(self.outbox.clone());
        }
    }

    /// Takes the results that have come. Returns the VMs of a former server that go on now, or are given back before
    /// [`Self::update`], which closes images that nobody has.
    pub(crate) fn take(&mut self) -> Vec<Resumed> {
        let done = self.done.as_ref().map_or_else(Vec::new, Inbox::take);
        let mut resumed = Vec::new();
        for Done {
            location,
            image,
            results,
        } in done
        {
            self.running.remove(&location);
            if let Some(image) = image {
                self.images.insert(location, image);
            }
            for (key, result) in results {
                match result {
                    Ok(opened) => {
                        let was_served = self.get(key).is_some();
                        resumed.extend(self.serve(key, opened));
                        self.tell_if_new(key, was_served);
                    }
                    Err(error) => self.fail(key, error),
                }
            }
        }
        resumed
    }

    /// Serves what was opened, unless it is not wanted any more.
    fn serve(&mut self, key: u64, opened: Opened) -> Option<Resumed> {
        let entry = self.entries.get_mut(&key)?;
        if let Some(kept) = entry.kept.take() {
            let _ = epoll::delete(&self.poll, &kept.stream);
            let entry = self.entries.remove(&key)?;
            let offer = opened.offer;
            return Some(Resumed { kept, offer, entry });
        }
        let was_served = entry.is_served();
        // A reload that came meanwhile wants another look.
        let is_stale = entry.is_stale();
        entry.attempt = match is_stale {
            true => Attempt::Due(Instant::now()),
            false => Attempt::Done,
        };
        entry.is_reload = is_stale;
        entry.was_tried = !is_stale;
        entry.failures = 0;
        entry.error.clear();
        entry.offer = Some(opened.offer);
        entry.listener = opened.listener.or(entry.listener.take());
        if let Some(listener) = entry.listener.as_ref().filter(|_| !was_served) {
            let token = EventData::new_u64(key);
            if let Err(errno) = epoll::add(&self.poll, &*listener.socket, token, EventFlags::IN) {
                entry.offer = None;
                self.fail(key, errno.to_string());
            }
        }
        None
    }

    /// Tells that a socket is served now, and those who wait for that.
    fn tell_if_new(&mut self, key: u64, was_served: bool) {
        let Some(entry) = self.entries.get_mut(&key).filter(|entry| entry.is_served()) else {
            return;
        };
        let waiting = std::mem::take(&mut entry.waiting);
        if !was_served {
            tell_of(entry);
        }
        for reply in waiting {
            reply.send(Ok(self.added(key)));
        }
    }

    /// A binding that could not be opened is tried again later.
    fn fail(&mut self, key: u64, error: String) {
        let Some(entry) = self.entries.get_mut(&key) else {
            return;
        };
        let pause = FIRST_PAUSE.saturating_mul(1 << entry.failures.min(10));
        let now = Instant::now();
        entry.attempt = match entry.is_stale() {
            true => Attempt::Due(now),
            false => Attempt::Due(now + pause.min(LONGEST_PAUSE)),
        };
        entry.failures = entry.failures.saturating_add(1);
        entry.was_tried = true;
        if entry.offer.is_none()
            && let Some(listener) = entry.listener.take()
            && listener.is_inherited()
        {
            // Whoever connects waits there, as before the service ran.
            entry.listener = Some(listener);
        }
        let waiting = std::mem::take(&mut entry.waiting);
        let is_refused = entry.origin == Origin::Command && !waiting.is_empty();
        for reply in waiting {
            reply.send(Err(error.clone()));
        }
        if is_refused {
            // Whoever has asked for it knows.
            if let Some(entry) = self.entries.remove(&key) {
                self.retire(entry);
            }
        } else if entry.error != error {
            tell_of_failure(entry, &error);
            entry.error = error;
        }
    }

    /// After a change: what is not needed any more is closed, and the counts are right.
    pub(crate) fn update(&mut self) {
        let used: HashSet<&Location> = self
            .entries
            .values()
            .map(|entry| &entry.binding.image)
            .collect();
        self.images.retain(|location, _| used.contains(location));
        let opened = self
            .images
            .values()
            .map(|image| Arc::clone(&image.opened().image));
        self.common.metrics.watch(opened.collect());
        self.readiness.set_waiting(self.waiting());
        self.forget_unused();
        let of = |entry: &Entry| SocketVms {
            socket: entry.binding.socket.display().to_string(),
            image: entry.binding.image.to_string(),
            usage: Arc::clone(&entry.common.usage),
        };
        let listed = self.entries.values().filter(|entry| entry.kept.is_none());
        let closed = self.closed.iter().map(Closed::vms);
        let all = listed.map(of).chain(closed).collect();
        self.common.metrics.watch_sockets(all);
    }

    /// Whether the start or the last reload is done since the last call: each binding was tried, or it takes too long.
    pub(crate) fn has_settled(&mut self, now: Instant) -> bool {
        let Some(settles) = self.settles else {
            return false;
        };
        let has = now >= settles || self.entries.values().all(|entry| entry.was_tried);
        if has {
            self.settles = None;
        }
        has
    }

    /// When something is due, if nothing happens before.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        // What waits for the end of a job is not waited for by the clock.
        let is_free = |entry: &&Entry| {
            self.running.len() < MOST_JOBS && !self.running.contains(&entry.binding.image)
        };
        let due = self.entries.values().filter(is_free).filter_map(Entry::due);
        due.chain(self.settles).min()
    }

    /// The socket with this key, if it is served.
    pub(crate) fn get(&self, key: u64) -> Option<Served<'_>> {
        let entry = self.entries.get(&key)?;
        Some(Served {
            listener: entry.listener.as_ref()?,
            offer: entry.offer.as_ref()?,
            common: &entry.common,
        })
    }

    /// Whether objects of a store are read, or may be.
    pub(crate) fn uses_network(&self) -> bool {
        let is_url = |entry: &Entry| matches!(entry.binding.image, Location::Url(_));
        let mut images = self.images.values();
        self.entries.values().any(is_url)
            || images.any(|image| image.opened().image.counters().is_some())
            || self.may_meet_url()
    }

    /// Whether a layer of an image that is not open yet may be an object.
    fn may_meet_url(&self) -> bool {
        let is_open = |entry: &Entry| self.images.contains_key(&entry.binding.image);
        let bases = self.common.options.images.bases;
        bases == pagetide_sources::Bases::Anywhere && !self.entries.values().all(is_open)
    }

    /// Closes all sockets. What is still being opened is closed when it is open.
    pub(crate) fn close(&mut self) {
        self.entries.clear();
        self.inherited.clear();
        self.drains.clear();
        self.done = None;
    }
}

impl std::fmt::Debug for Sockets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sockets = self.entries.values().map(|entry| &entry.binding.socket);
        f.debug_list().entries(sockets).finish()
    }
}
