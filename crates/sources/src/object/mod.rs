//! An object of a store, read in blocks.

mod client;
mod counters;
mod failure;
mod fetch;
mod flight;
mod gate;
mod latency;
mod memory;
mod options;
mod parts;
mod runtime;
mod secrets;
mod store;
mod upload;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagetide_memory::Urgency;
use pagetide_pager::log_limit::log_limited;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::blob::{AskedStanding, Blob, BlobError};
use crate::cache::{CacheError, CacheOptions, DiskCache, Found, ObjectKey};
use crate::standing::Standing;
use counters::Counting;
pub use counters::ObjectCounters;
use failure::{Failure, Report};
use fetch::Remote;
use flight::{Flight, Landing, ended, missing_part};
pub(crate) use memory::Block;
use memory::Memory;
pub use options::{ObjectOptions, ObjectOptionsError, OpenObjectError};
use parts::Parts;
pub(crate) use parts::{decoded, shown};
use store::Requests;
pub(crate) use upload::Upload;

/// A read requests at most as much as this many GETs at once, so that memory is bounded whatever its
/// length.
const GETS_OF_A_READ: usize = 4;

/// An object of a store: `s3://BUCKET/KEY`, `gs://BUCKET/KEY`, `az://CONTAINER/KEY`,
/// `http(s)://HOST/PATH`. Credentials and endpoints come from the environment.
///
/// The object is read in aligned blocks. Readers of one block share one request, and adjacent missing
/// blocks are requested together. Every answer is checked against the length and the ETag that the
/// object had when it was opened. Dropping the blob ends its requests.
///
/// [`Blob::read_at`] waits for requests on a runtime of its own: it panics if it is called by a task of
/// an asynchronous runtime.
pub struct ObjectBlob {
    name: String,
    handle: Handle,
    shared: Arc<Shared>,
}

/// What the blob and its requests share.
struct Shared {
    remote: Remote,
    block_bytes: u64,
    get_blocks: u64,
    disk: Option<DiskCache>,
    blocks: Mutex<Blocks>,
    /// True when the blob has been dropped.
    closed: watch::Sender<bool>,
}

/// Blocks that are in memory, and blocks that are on their way.
#[derive(Debug)]
struct Blocks {
    memory: Memory,
    flights: HashMap<u64, Arc<Flight>>,
}

/// Where a block comes from.
enum Origin {
    Here(Block),
    Flight(Arc<Flight>),
}

impl ObjectBlob {
    /// Opens the object at `url`: one HEAD.
    ///
    /// # Errors
    /// [`OpenObjectError`]; [`BlobError::Failed`] also for a URL that names no object.
    pub fn open(
        url: &str,
        options: &ObjectOptions,
        cache: Option<&CacheOptions>,
    ) -> Result<Self, OpenObjectError> {
        options.check()?;
        let failed = |report| Failure::Permanent(report).into_error(&shown(url));
        let parts = Parts::of(url)
            .ok_or_else(|| failed(Report::new("the URL has no host, or no path or key")))?;
        let name = parts.name();
        let place = parts.place(Requests::of_reads(options)).map_err(failed)?;
        let identity = place.identity.clone();
        let handle = runtime::handle().map_err(|error| BlobError::io(name.clone(), error))?;
        let remote = Remote::open(place, parts.secrets(), options.clone());
        let remote = wait(&handle, remote).map_err(|failure| failure.into_error(&name))?;
        let disk = match (cache, remote.version()) {
            (Some(cache), Some(version)) => {
                let key = ObjectKey::of(&identity, version, remote.bytes(), options.block_bytes);
                match DiskCache::open(cache, key) {
                    // The store has the content: nobody waits for a disk that is full or gone. A directory that
                    // others can write to is another matter.
                    Err(error @ CacheError::Directory { .. }) => {
                        log_limited!(
                            warn,
                            name,
                            error = &error as &dyn std::error::Error,
                            "no disk cache is used"
                        );
                        None
                    }
                    opened => Some(opened?),
                }
            }
            // Nothing tells a replaced object without an ETag from the one whose blocks were kept: the
            // cache would deliver old content, or a mixture, as long as the length is the same.
            (Some(_), None) => {
                log_limited!(
                    warn,
                    name,
                    "the store gives no strong ETag: no disk cache is used"
                );
                None
            }
            (None, _) => None,
        };
        let block_bytes = options.block_bytes as u64;
        let shared = Shared {
            remote,
            block_bytes,
            get_blocks: (options.get_bytes as u64 / block_bytes).max(1),
            disk,
            blocks: Mutex::new(Blocks {
                memory: Memory::new(options.memory_bytes),
                flights: HashMap::new(),
            }),
            closed: watch::Sender::new(false),
        };
        Ok(Self {
            name,
            handle,
            shared: Arc::new(shared),
        })
    }

    /// What reading has cost so far.
    pub fn counters(&self) -> ObjectCounters {
        self.shared.remote.counting.totals()
    }

    /// Starts what is missing of `indices`, and says where each block comes from.
    fn plan(&self, indices: Range<u64>, urgency: Urgency) -> Vec<Origin> {
        let shared = &self.shared;
        let counting = &shared.remote.counting;
        let mut origins: Vec<Option<Origin>> = Vec::new();
        {
            let mut blocks = shared.lock();
            origins.extend(
                indices
                    .clone()
                    .map(|index| blocks.memory.get(index).map(Origin::Here)),
            );
        }
        let found = origins.iter().flatten().count();
        Counting::add(&counting.memory_hits, found as u64);
        let left: Vec<u64> = indices
            .clone()
            .zip(&origins)
            .filter(|(_, origin)| origin.is_none())
            .map(|(index, _)| index)
            .collect();
        let places = origins.iter_mut().filter(|origin| origin.is_none());
        for (origin, block) in places.zip(shared.cached(&left)) {
            *origin = block.map(Origin::Here);
        }
        let mut starts: Vec<Arc<Flight>> = Vec::new();
        let mut lengths: Vec<u64> = Vec::new();
        let mut blocks = shared.lock();
        let mut planned = Vec::with_capacity(origins.len());
        for (index, origin) in indices.zip(origins) {
            // It may have arrived in the meantime.
            let here = origin.or_else(|| blocks.memory.get(index).map(Origin::Here));
            let joined = here.or_else(|| blocks.joined(index, urgency).map(Origin::Flight));
            planned.push(joined.unwrap_or_else(|| {
                Counting::add(&counting.misses, 1);
                let open = starts
                    .last()
                    .zip(lengths.last_mut())
                    .filter(|(flight, length)| {
                        flight.first + **length == index && **length < shared.get_blocks
                    });
                let flight = if let Some((flight, length)) = open {
                    *length += 1;
                    Arc::clone(flight)
                } else {
                    let flight = Arc::new(Flight::new(index, urgency));
                    starts.push(Arc::clone(&flight));
                    lengths.push(1);
                    flight
                };
                blocks.flights.insert(index, Arc::clone(&flight));
                Origin::Flight(flight)
            }));
        }
        drop(blocks);
        for (flight, length) in starts.into_iter().zip(lengths) {
            shared.start(&self.handle, flight, length);
        }
        planned
    }

    /// Waits for a block of a flight.
    fn await_block(
        &self,
        flight: &Arc<Flight>,
        index: u64,
        urgency: Urgency,
    ) -> Result<Block, Failure> {
        let shared = &self.shared;
        if urgency == Urgency::Bulk || flight.urgency == Urgency::Urgent {
            return self.handle.block_on(flight.block(index));
        }
        // A bulk request that has begun: usually it is soon done. If not, one block is requested on its own.
        self.handle.block_on(async {
            tokio::select! {
                biased;
                block = flight.block(index) => return block,
                () = sleep(shared.remote.hedge_after()) => {}
            }
            let (own, is_new) = shared.urgent_flight(index);
            if is_new {
                Counting::add(&shared.remote.counting.hedges, 1);
                shared.start(&self.handle, Arc::clone(&own), 1);
            }
            tokio::select! {
                biased;
                block = flight.block(index) => match block {
                    Ok(block) => Ok(block),
                    Err(_) => own.block(index).await,
                },
                block = own.block(index) => match block {
                    Ok(block) => {
                        Counting::add(&shared.remote.counting.hedges_won, u64::from(is_new));
                        Ok(block)
                    }
                    Err(_) => flight.block(index).await,
                },
            }
        })
    }

    /// The blocks that contain bytes of this read, which is not empty.
    fn indices(&self, offset: u64, end: u64) -> Range<u64> {
        let block_bytes = self.shared.block_bytes;
        offset / block_bytes..end.div_ceil(block_bytes)
    }

    /// The end of a read; `None` if it is outside.
    fn end(&self, offset: u64, bytes: usize) -> Option<u64> {
        let end = offset.checked_add(bytes as u64);
        end.filter(|end| *end <= self.shared.remote.bytes())
    }
}

impl Blob for ObjectBlob {
    fn name(&self) -> &str {
        &self.name
    }

    fn bytes(&self) -> u64 {
        self.shared.remote.bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8], urgency: Urgency) -> Result<(), BlobError> {
        let end = self
            .end(offset, buffer.len())
            .ok_or_else(|| BlobError::Outside {
                name: self.name.clone(),
                bytes: self.bytes(),
                range: offset..offset.saturating_add(buffer.len() as u64),
            })?;
        if buffer.is_empty() {
            return Ok(());
        }
        let shared = &self.shared;
        let indices = self.indices(offset, end);
        let step = shared.get_blocks.saturating_mul(GETS_OF_A_READ as u64);
        let mut at = indices.start;
        while at < indices.end {
            let window = at..indices.end.min(at.saturating_add(step));
            for (index, origin) in window.clone().zip(self.plan(window.clone(), urgency)) {
                let block = match origin {
                    Origin::Here(block) => Ok(block),
                    Origin::Flight(flight) => self.await_block(&flight, index, urgency),
                };
                let block = block.map_err(|failure| failure.into_error(&self.name))?;
                copy(&block, index * shared.block_bytes, offset, buffer)
                    .ok_or_else(|| missing_part().into_error(&self.name))?;
            }
            at = window.end;
        }
        Ok(())
    }

    /// Blocks in memory, and blocks of the disk cache that are in the page cache.
    fn read_now(&self, offset: u64, buffer: &mut [u8]) -> bool {
        let Some(end) = self.end(offset, buffer.len()) else {
            return false;
        };
        if buffer.is_empty() {
            return true;
        }
        let shared = &self.shared;
        self.indices(offset, end).all(|index| {
            let block = shared.lock().memory.get(index);
            match &block {
                Some(_) => Counting::add(&shared.remote.counting.memory_hits, 1),
                None if shared.disk.is_none() => return false,
                None => {}
            }
            let block = block.or_else(|| shared.cached_now(index));
            block.is_some_and(|block| {
                copy(&block, index * shared.block_bytes, offset, buffer).is_some()
            })
        })
    }

    fn standing(&self) -> Result<Standing, BlobError> {
        self.ask_standing()()
    }

    /// One HEAD, without another attempt. A store that does not answer says nothing against the object: what was
    /// opened is read as long as the store has it, since each answer has its version.
    fn ask_standing(&self) -> AskedStanding<'_> {
        let shared = Arc::clone(&self.shared);
        let looking = self.handle.spawn(async move { shared.remote.look().await });
        Box::new(move || {
            match self
                .handle
                .block_on(looking)
                .unwrap_or_else(|_| Err(ended()))
            {
                Ok(true) => Ok(Standing::Same),
                Ok(false) => Ok(Standing::Replaced),
                Err(failure) if failure.is_transient() => {
                    log_limited!(
                        warn,
                        name = self.name,
                        error = &failure.into_error(&self.name) as &dyn std::error::Error,
                        "the store does not say whether the object was replaced: the one that was opened is used"
                    );
                    Ok(Standing::Same)
                }
                Err(failure) => Err(failure.into_error(&self.name)),
            }
        })
    }

    /// Each answer is compared with the version that was opened.
    fn check_unchanged_now(&self) -> Result<(), BlobError> {
        Ok(())
    }

    fn check_unchanged_lately(&self) -> Result<(), BlobError> {
        Ok(())
    }

    /// The ETag, unless it is weak.
    fn version(&self) -> Option<&str> {
        self.shared.remote.version()
    }

    fn weak_version(&self) -> Option<String> {
        Some(self.shared.remote.weak_version())
    }

    fn counters(&self) -> Option<ObjectCounters> {
        Some(self.counters())
    }
}

/// Without the store's client, which would show a URL with its credentials.
impl fmt::Debug for ObjectBlob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("ObjectBlob");
        fields.field("name", &self.name);
        fields.field("bytes", &self.bytes());
        fields.field("version", &self.version());
        fields.finish_non_exhaustive()
    }
}

impl Drop for ObjectBlob {
    fn drop(&mut self) {
        self.shared.closed.send_replace(true);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Blocks> {
        // Nothing panics between two changes that belong together.
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bytes of blocks, as offsets in the object.
    fn range(&self, first: u64, blocks: u64) -> Range<u64> {
        let start = first * self.block_bytes;
        let end = start.saturating_add(blocks.saturating_mul(self.block_bytes));
        start..end.min(self.remote.bytes())
    }

    /// The length of a block, which is shorter at the object's end.
    fn block_len(&self, index: u64) -> u64 {
        let range = self.range(index, 1);
        range.end - range.start
    }

    /// Blocks of the disk cache, in the order of `indices`.
    fn cached(&self, indices: &[u64]) -> Vec<Option<Block>> {
        let Some(disk) = &self.disk else {
            return indices.iter().map(|_| None).collect();
        };
        let wanted: Vec<(u64, u64)> = indices
            .iter()
            .map(|&index| (index, self.block_len(index)))
            .collect();
        let found = indices.iter().zip(disk.read(&wanted));
        found
            .map(|(&index, found)| match found {
                Found::Block(block) => {
                    Counting::add(&self.remote.counting.disk_hits, 1);
                    Some(self.keep(index, block))
                }
                Found::Absent => None,
                Found::Damaged => {
                    Counting::add(&self.remote.counting.disk_damaged, 1);
                    None
                }
            })
            .collect()
    }

    fn cached_now(&self, index: u64) -> Option<Block> {
        let block = self.disk.as_ref()?.read_now(index, self.block_len(index))?;
        Counting::add(&self.remote.counting.disk_hits, 1);
        Some(self.keep(index, block))
    }

    fn keep(&self, index: u64, block: Vec<u8>) -> Block {
        let block = Arc::new(block);
        self.lock().memory.insert(index, Arc::clone(&block));
        block
    }

    /// The urgent flight of this block, and whether it is new and has yet to be started.
    fn urgent_flight(&self, index: u64) -> (Arc<Flight>, bool) {
        let mut blocks = self.lock();
        let flying = blocks.flights.get(&index);
        if let Some(flight) = flying.filter(|flight| flight.urgency == Urgency::Urgent) {
            return (Arc::clone(flight), false);
        }
        let flight = Arc::new(Flight::new(index, Urgency::Urgent));
        blocks.flights.insert(index, Arc::clone(&flight));
        (flight, true)
    }

    /// Requests the flight's blocks. The flight ends in any case: with content, a failure, a panic or
    /// the blob's end.
    fn start(self: &Arc<Self>, handle: &Handle, flight: Arc<Flight>, blocks: u64) {
        let range = self.range(flight.first, blocks);
        let landing = Landing {
            shared: Arc::clone(self),
            flight,
            blocks,
        };
        handle.spawn(async move {
            let Landing { shared, flight, .. } = &landing;
            let mut closed = shared.closed.subscribe();
            let fetched = tokio::select! {
                biased;
                _ = closed.wait_for(|closed| *closed) => Err(ended()),
                fetched = shared.remote.fetch(&range, flight.urgency, &flight.started) => fetched,
            };
            landing.settle(fetched);
        });
    }
}

impl Blocks {
    /// The flight that a read of this block joins. An urgent read passes bulk flights that wait.
    fn joined(&self, index: u64, urgency: Urgency) -> Option<Arc<Flight>> {
        let flight = self.flights.get(&index)?;
        let is_behind = urgency == Urgency::Urgent
            && flight.urgency == Urgency::Bulk
            && !flight.started.load(Relaxed);
        (!is_behind).then(|| Arc::clone(flight))
    }
}

/// Copies the part of a block that belongs to a read at `offset`. `None` if the block lacks it.
fn copy(block: &[u8], block_start: u64, offset: u64, buffer: &mut [u8]) -> Option<()> {
    let from = usize::try_from(offset.saturating_sub(block_start)).ok()?;
    let to = usize::try_from(block_start.saturating_sub(offset)).ok()?;
    let bytes = block
        .len()
        .checked_sub(from)?
        .min(buffer.len().checked_sub(to)?);
    let target = buffer.get_mut(to..to + bytes)?;
    target.copy_from_slice(block.get(from..from + bytes)?);
    Some(())
}

/// Runs a future on the runtime's threads, and waits for it. A panic in it is a failure.
fn wait<T: Send + 'static>(
    handle: &Handle,
    future: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> Result<T, Failure> {
    let task = handle.spawn(future);
    handle.block_on(task).unwrap_or_else(|_| Err(ended()))
}
