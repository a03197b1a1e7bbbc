//! GETs of one object: limited in time, hedged, repeated, and checked.

use std::hash::{BuildHasher as _, RandomState};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use object_store::path::Path;
use object_store::{Extensions, GetOptions, GetRange, GetResult, ObjectMeta, ObjectStore};
use pagetide_memory::Urgency;
use tokio::time::{sleep, timeout};

use super::client::Status;
use super::counters::Counting;
use super::failure::{Failure, Report};
use super::gate::Gate;
use super::latency::Latencies;
use super::memory::Block;
use super::options::ObjectOptions;
use super::secrets::Secrets;
use super::store::Place;

/// The longest time that a VM's start waits to hear whether its object was replaced.
const LOOK_LIMIT: Duration = Duration::from_secs(1);

/// The first pause before another attempt, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// An object, as it was when it was opened.
pub(super) struct Remote {
    store: Arc<dyn ObjectStore>,
    path: Path,
    secrets: Secrets,
    meta: ObjectMeta,
    options: ObjectOptions,
    latencies: Latencies,
    gate: Gate,
    pub(super) counting: Counting,
}

impl Remote {
    /// Asks for length and version.
    pub(super) async fn open(
        place: Place,
        secrets: Secrets,
        options: ObjectOptions,
    ) -> Result<Self, Failure> {
        let latencies = Latencies::default();
        let (meta, took) = look(&*place.store, &place.path, &secrets, &options).await?;
        latencies.add(took);
        Ok(Self {
            store: place.store,
            path: place.path,
            secrets,
            meta,
            latencies,
            gate: Gate::new(options.gets, options.bulk_gets),
            options,
            counting: Counting::default(),
        })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.meta.size
    }

    /// The ETag, if it stands for the bytes. A weak one stands for content that means the same, and no
    /// server compares it for `If-Match`.
    pub(super) fn version(&self) -> Option<&str> {
        let etag = self.meta.e_tag.as_deref();
        etag.filter(|etag| !etag.starts_with("W/"))
    }

    /// What the store says of an object that it gives no strong ETag.
    pub(super) fn weak_version(&self) -> String {
        let etag = self.meta.e_tag.as_deref().unwrap_or_default();
        format!("{} {etag}", self.meta.last_modified)
    }

    /// Whether the store still has the object that was opened under its name.
    pub(super) async fn look(&self) -> Result<bool, Failure> {
        let limit = self.options.limit.min(LOOK_LIMIT);
        let looked = timeout(limit, head(&*self.store, &self.path, &self.secrets)).await;
        let (now, then) = (looked.unwrap_or(Err(Failure::Late(limit)))?, &self.meta);
        let is_dated_alike = self.version().is_some() || now.last_modified == then.last_modified;
        Ok(now.size == then.size && now.e_tag == then.e_tag && is_dated_alike)
    }

    pub(super) fn hedge_after(&self) -> Duration {
        self.latencies.hedge_after(&self.options.hedge_after)
    }

    /// Fetches `range`, which begins at a block's first byte, as blocks. Sets `started` when the first
    /// attempt has its place.
    pub(super) async fn fetch(
        &self,
        range: &Range<u64>,
        urgency: Urgency,
        started: &AtomicBool,
    ) -> Result<Vec<Block>, Failure> {
        let mut attempt = 0;
        loop {
            let place = self.gate.enter(urgency).await;
            started.store(true, Relaxed);
            let limit = self.options.limit;
            let fetched = timeout(limit, self.attempt(range, urgency)).await;
            drop(place);
            match fetched.unwrap_or(Err(Failure::Late(limit))) {
                Ok(blocks) => return Ok(blocks),
                Err(failure) => {
                    attempt += 1;
                    if !failure.is_transient() || attempt >= self.options.attempts {
                        return Err(failure);
                    }
                    Counting::add(&self.counting.retries, 1);
                    tracing::debug!(path = %self.path, ?range, attempt, ?failure, "a GET is repeated");
                }
            }
            sleep(pause(attempt)).await;
        }
    }

    /// One GET, and a second one if the first is silent for too long.
    async fn attempt(&self, range: &Range<u64>, urgency: Urgency) -> Result<Vec<Block>, Failure> {
        let heard = Mutex::new(Instant::now());
        let unheard = Mutex::new(Instant::now());
        let first = self.get(range, &heard);
        tokio::pin!(first);
        let after = self.hedge_after();
        let mut rest = after;
        let place = loop {
            tokio::select! {
                biased;
                fetched = &mut first => return fetched,
                () = sleep(rest) => {}
            }
            let silence = heard
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .elapsed();
            rest = after.saturating_sub(silence);
            if rest.is_zero() {
                // A hedge never takes the place of a request that waits.
                match self.gate.enter_now(urgency) {
                    Some(place) => break place,
                    None => rest = after,
                }
            }
        };
        Counting::add(&self.counting.hedges, 1);
        let second = self.get(range, &unheard);
        tokio::pin!(second);
        let fetched = tokio::select! {
            biased;
            fetched = &mut first => match fetched {
                Err(failure) if failure.is_transient() => second.await,
                settled => settled,
            },
            fetched = &mut second => match fetched {
                Err(failure) if failure.is_transient() => first.await,
                settled => {
                    Counting::add(&self.counting.hedges_won, 1);
                    settled
                }
            },
        };
        drop(place);
        fetched
    }

    /// One GET. Notes in `heard` when something has arrived.
    async fn get(&self, range: &Range<u64>, heard: &Mutex<Instant>) -> Result<Vec<Block>, Failure> {
        let hear = || *heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        Counting::add(&self.counting.gets, 1);
        let sent = Instant::now();
        let (status, extensions) = watched();
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            if_match: self.version().map(str::to_owned),
            extensions,
            ..GetOptions::default()
        };
        let answer = self.store.get_opts(&self.path, options).await;
        let answer = answer.map_err(|error| Failure::sort(&error, status.get(), &self.secrets))?;
        self.latencies.add(sent.elapsed());
        hear();
        self.check(&answer, range)?;

        let wanted = range.end - range.start;
        let block_bytes = self.options.block_bytes;
        let mut given = 0;
        let mut full: Vec<Block> = Vec::new();
        let mut block = Vec::new();
        let short = |given| Failure::Short {
            offset: range.start,
            given,
            wanted,
        };
        let mut parts = answer.into_stream();
        while let Some(part) = parts.next().await {
            // The connection ended before the body did.
            let part = part.map_err(|_| short(given))?;
            hear();
            Counting::add(&self.counting.bytes, part.len() as u64);
            given += part.len() as u64;
            if given > wanted {
                let text = "the store delivered more bytes than were requested";
                return Err(Failure::Transient(Report::new(text)));
            }
            let mut part = part.as_ref();
            while !part.is_empty() {
                if block.is_empty() {
                    block.reserve_exact(block_bytes);
                }
                let (now, later) = part.split_at(part.len().min(block_bytes - block.len()));
                block.extend_from_slice(now);
                part = later;
                if block.len() == block_bytes {
                    full.push(Arc::new(std::mem::take(&mut block)));
                }
            }
        }
        if given < wanted {
            return Err(short(given));
        }
        if !block.is_empty() {
            block.shrink_to_fit();
            full.push(Arc::new(block));
        }
        Ok(full)
    }

    /// Whether the answer is of the object that was opened, and of this range.
    fn check(&self, answer: &GetResult, range: &Range<u64>) -> Result<(), Failure> {
        let (now, then) = (&answer.meta, &self.meta);
        if now.size != then.size {
            return Err(Failure::Changed);
        }
        match (&now.e_tag, &then.e_tag) {
            // A server that ignores If-Match.
            (Some(now), Some(then)) if now != then => return Err(Failure::Changed),
            (None, Some(_)) => {
                let text = "the answer has no ETag: it could be of another object";
                return Err(Failure::Permanent(Report::new(text)));
            }
            _ => {}
        }
        if self.version().is_none() && now.last_modified != then.last_modified {
            return Err(Failure::Changed);
        }
        if answer.range != *range {
            let given = &answer.range;
            let text = format!("the store delivered bytes {given:?} for {range:?}");
            return Err(Failure::Transient(Report::new(&text)));
        }
        Ok(())
    }
}

/// The object's length and version, and the time that the answer took; asked as often as the options say.
pub(super) async fn look(
    store: &dyn ObjectStore,
    path: &Path,
    secrets: &Secrets,
    options: &ObjectOptions,
) -> Result<(ObjectMeta, Duration), Failure> {
    let mut attempt = 0;
    loop {
        let sent = Instant::now();
        let head = timeout(options.limit, head(store, path, secrets)).await;
        match head.unwrap_or(Err(Failure::Late(options.limit))) {
            Ok(meta) => return Ok((meta, sent.elapsed())),
            Err(failure) => {
                attempt += 1;
                if !failure.is_transient() || attempt >= options.attempts {
                    return Err(failure);
                }
                sleep(pause(attempt)).await;
            }
        }
    }
}

/// The object's length and version: by HEAD, and by a GET of one byte from a server that refuses HEAD. The signature of
/// a URL covers the method, a redirect may lead to such a URL, and some servers do not know HEAD.
async fn head(
    store: &dyn ObjectStore,
    path: &Path,
    secrets: &Secrets,
) -> Result<ObjectMeta, Failure> {
    let (status, extensions) = watched();
    let options = GetOptions {
        head: true,
        extensions,
        ..GetOptions::default()
    };
    let error = match store.get_opts(path, options).await {
        Ok(answer) => return Ok(answer.meta),
        Err(error) => error,
    };
    let is_of_method = matches!(status.get(), 400 | 403 | 405 | 406 | 501);
    if !is_of_method {
        return Err(Failure::sort(&error, status.get(), secrets));
    }
    let (status, extensions) = watched();
    let options = GetOptions {
        range: Some(GetRange::Bounded(0..1)),
        extensions,
        ..GetOptions::default()
    };
    let answer = store.get_opts(path, options).await;
    answer
        .map(|answer| answer.meta)
        .map_err(|error| Failure::sort(&error, status.get(), secrets))
}

/// A place for the answer's status, and the request's extensions that lead to it.
pub(super) fn watched() -> (Status, Extensions) {
    let status = Status::default();
    let mut extensions = Extensions::new();
    extensions.insert(status.clone());
    (status, extensions)
}

/// The pause before the attempt after `attempts` failed ones: doubled each time, and half of it random,
/// so that many readers do not return at once.
fn pause(attempts: u32) -> Duration {
    let (first, longest) = PAUSES;
    let doubled = 1 << attempts.saturating_sub(1).min(16);
    let full = first.saturating_mul(doubled).min(longest);
    // Each RandomState has keys of its own, and few bits are enough.
    let random = u32::try_from(RandomState::new().hash_one(attempts) % 1024).unwrap_or_default();
    full / 2 + full / 2 * random / 1024
}
