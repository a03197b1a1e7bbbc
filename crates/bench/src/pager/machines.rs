//! Runs: memory, what pages it in, and threads that touch it.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use pagetide_memory::{Backing, FaultInAccess, GuestAddress, PageIndex, Region};
use pagetide_serve::WorkingSetMode;
use pagetide_uapi::userfaultfd::{Features, Userfaultfd};

use super::guest::Ready;
use super::image::{CHUNK_BYTES, COMPRESSED, Image, is_data};
use super::one_cpu::OneCpu;
use super::paging::{Opened, Paging, fetches, working_set};
use super::plan::{Cache, Order, PAGE, Part, Plan, Series, Via, Way};
use super::view;
use crate::benchmark::{Job, Rig, RunFailure};
use crate::latency::{LatencyLog, LatencyLogError};
use crate::model::Sample;
use crate::prepare::{Gate, PrepareError, check_room, leave_out};
use crate::progress::Progress;
use crate::units::ByteSize;

/// Most memory whose faults are measured one page at a time.
const AREA_BYTES: u64 = 64 << 20;
/// Touches of the recorded workload.
const WORKLOAD_PAGES: usize = 10_000;
/// How often the workload goes through each page that it touches: about 5 microseconds of work.
const PASSES: u32 = 6;

/// Files to page from.
pub struct Machines {
    /// One that stays in the page cache.
    warm: Arc<Image>,
    opened: Option<Opened>,
    /// One that is taken out of the page cache before each run.
    cold: Option<Image>,
    /// One that is beside a compressed image of it.
    compressed: Option<Image>,
}

impl std::fmt::Debug for Machines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Machines").finish_non_exhaustive()
    }
}

/// Memory holds something else than the file.
#[derive(Debug, thiserror::Error)]
#[error("page {page} differs from the file")]
struct Differs {
    page: usize,
}

/// The file could not be taken out of the page cache: something else uses it.
#[derive(Debug, thiserror::Error)]
#[error("the file stays in the page cache")]
struct StaysCached;

impl Machines {
    /// See [`crate::benchmark::Benchmark::prepare`].
    pub(super) fn prepare(
        plan: &mut Plan,
        caches_asked: bool,
    ) -> Result<(Self, Vec<String>), PrepareError> {
        let features = Userfaultfd::available()?;
        let needs_minor = |part: &&Part| matches!(part, Part::Around | Part::Replay);
        let part = plan.parts.iter().find(needs_minor);
        if let Some(part) = part.filter(|_| !features.contains(Features::MINOR_SHMEM)) {
            return Err(PrepareError::Lacks {
                option: format!("--part {part}"),
                needs: "userfaultfd's minor faults for shmem",
                advice: "they are in Linux 5.14 and later",
            });
        }
        // The files in the page cache, and the memory.
        let replays = plan.parts.contains(&Part::Replay);
        let is_compressed = |part: &Part| matches!(part, Part::Image | Part::Unpack);
        let has_compressed = plan.parts.iter().any(is_compressed);
        let files = 1 + u64::from(replays) + u64::from(has_compressed);
        check_room(
            Backing::Shmem,
            ByteSize(plan.memory.0.saturating_mul(1 + files)),
        )?;
        let scratch = |source| PrepareError::Scratch {
            directory: std::env::temp_dir(),
            source,
        };
        let mut cold = None;
        let mut warnings = Vec::new();
        if replays && plan.caches.contains(&Cache::Cold) {
            let image = Image::write(plan.memory.0).map_err(scratch)?;
            let gate = Gate {
                method: Cache::Cold,
                present: image.drop_cache().map_err(scratch)?,
                needs: "a way to take the file of --memory out of the page cache",
                advice: "name a directory of a disk's file system in TMPDIR",
            };
            let caches = &mut plan.caches;
            warnings = leave_out("--cache", caches, caches_asked, [gate])?;
            cold = Some(image);
        }
        let warm = Image::write(plan.memory.0).map_err(scratch)?;
        let compressed = has_compressed.then(|| Image::write_compressed(plan.memory.0));
        let machines = Self {
            warm: Arc::new(warm),
            opened: None,
            cold,
            compressed: compressed.transpose().map_err(scratch)?,
        };
        Ok((machines, warnings))
    }

    /// Bytes of memory that a series touches.
    fn bytes(&self, series: Series) -> u64 {
        let all = self.warm.bytes() as u64;
        match series.part {
            Part::Random => all.min(AREA_BYTES),
            Part::Around if series.around == Some(1) => all.min(AREA_BYTES),
            _ => all,
        }
    }

    /// Memory for a series, nothing of which is there.
    fn region(&self, series: Series) -> Result<Arc<Region>, RunFailure> {
        let bytes = self.bytes(series);
        let backing = match series.via {
            Some(Via::Continue) => Backing::Shmem,
            _ => Backing::Anonymous,
        };
        let region = Region::new(GuestAddress(0), bytes, backing).map_err(RunFailure::failed)?;
        if backing == Backing::Shmem {
            let content = self.warm.map(false).map_err(RunFailure::failed)?;
            let content = content
                .content()
                .get(..self.warm.bytes().min(to_usize(bytes)));
            region
                .write_service(PageIndex(0), 0, content.unwrap_or_default())
                .map_err(RunFailure::failed)?;
        }
        Ok(Arc::new(region))
    }

    /// The pages that the threads of a series touch, each thread's own.
    fn touches(&self, series: Series, threads: u32) -> Vec<Vec<u64>> {
        let pages = self.bytes(series) / PAGE;
        let is_random = match series.part {
            Part::Random => series.order == Some(Order::Random),
            Part::Around | Part::Fill | Part::Unpack => false,
            Part::Reader | Part::Replay | Part::Image => true,
        };
        let mut order: Vec<u64> = (0..pages).collect();
        if series.part == Part::Image {
            // The last page of each chunk that is not zeroes.
            let of_chunk = CHUNK_BYTES / PAGE;
            order.retain(|page| (page + 1).is_multiple_of(of_chunk) && is_data(page / of_chunk));
        }
        if is_random {
            shuffle(&mut order);
        }
        match series.part {
            Part::Fill | Part::Unpack => order.clear(),
            Part::Replay => order.truncate(WORKLOAD_PAGES),
            _ => {}
        }
        let mut each = vec![Vec::new(); to_usize(threads.max(1).into())];
        for (index, page) in order.into_iter().enumerate() {
            let thread = index % each.len();
            each[thread].push(page);
        }
        each
    }

    /// Lets a server record the workload, if that has not been done yet.
    fn record(&self, image: &Image, series: Series) -> Result<(), RunFailure> {
        if image.path("memory.working-set").exists() {
            return Ok(());
        }
        let region = self.region(series)?;
        let server = Ready::start(image, "memory", WorkingSetMode::Record, false)?;
        let guest = server.connect(&region)?;
        walk(
            region.guest().start().as_u64(),
            &self.touches(series, 1),
            series,
        )?;
        guest.end().map(drop)
    }

    /// Compares pages with the file; all of `bytes` if none are named.
    fn verify(image: &Image, start: u64, bytes: u64, pages: &[Vec<u64>]) -> Result<(), RunFailure> {
        let file = image.map(false).map_err(RunFailure::failed)?;
        let start = std::ptr::with_exposed_provenance::<u8>(to_usize(start));
        let is_same = |page: usize| {
            let at = page * to_usize(PAGE);
            let wanted = file.content().get(at..at + to_usize(PAGE));
            // SAFETY: from_raw_parts requires a readable page that nobody changes meanwhile: it is one of
            // the memory that the caller holds, its content is there, and no thread writes to it.
            let found =
                unsafe { std::slice::from_raw_parts(start.wrapping_add(at), to_usize(PAGE)) };
            wanted == Some(found)
        };
        let touched = pages.iter().flatten().map(|&page| to_usize(page));
        let all = 0..to_usize(bytes / PAGE);
        let differs = match pages.iter().all(Vec::is_empty) {
            true => all.into_iter().find(|&page| !is_same(page)),
            false => touched.into_iter().find(|&page| !is_same(page)),
        };
        match differs {
            None => Ok(()),
            Some(page) => Err(RunFailure::failed(Differs { page })),
        }
    }
}

impl Rig<Plan> for Machines {
    fn run(&mut self, job: &Job<'_, Plan>, _: &mut dyn Progress) -> Result<Sample, RunFailure> {
        let series = job.series;
        let touches = self.touches(series, job.vcpus);
        let image = match series.cache {
            Some(Cache::Cold) => self.cold.as_ref().unwrap_or(&self.warm),
            _ => match series.part {
                Part::Image | Part::Unpack => self.compressed.as_ref().unwrap_or(&self.warm),
                _ => &self.warm,
            },
        };
        if series.part == Part::Replay {
            self.record(image, series)?;
        }
        if series.way == Way::Map {
            return self.run_mapped(image, series, &touches);
        }
        let content = match series.part {
            Part::Image | Part::Unpack => image,
            _ => &self.warm,
        };
        let (region, bytes) = (self.region(series)?, self.bytes(series));
        warm_memory(bytes)?;
        let is_pinned =
            matches!(series.part, Part::Random | Part::Around | Part::Image) && touches.len() == 1;
        let _one_cpu = match is_pinned {
            true => Some(OneCpu::begin().map_err(RunFailure::failed)?),
            false => None,
        };
        // A server that has no page, and no chunk, of the image yet.
        let new_server = match (series.cache, series.part) {
            (Some(Cache::Cold), _) => {
                let server = Ready::start(image, "memory", working_set(series), false)?;
                drop_cache(image)?;
                Some(server)
            }
            (_, Part::Image | Part::Unpack) => {
                let fetches = fetches(series);
                Some(Ready::start(
                    image,
                    COMPRESSED,
                    working_set(series),
                    fetches,
                )?)
            }
            _ => None,
        };
        let mut begun = Instant::now();
        let mut paging = match &new_server {
            Some(server) if series.way == Way::Clone => {
                Paging::Server(Box::new(server.connect_clone(bytes)?))
            }
            Some(server) => Paging::Server(Box::new(server.connect(&region)?)),
            None => opened(&mut self.opened, &self.warm)?.begin(&region, series)?,
        };
        if matches!(series.part, Part::Random | Part::Around | Part::Image) {
            begun = Instant::now();
        }
        let own = region.guest().start().as_u64();
        let start = paging.start().unwrap_or(own);
        let log = if matches!(series.part, Part::Fill | Part::Unpack) {
            paging.fill(bytes, || is_there(start, bytes))?;
            LatencyLog::new().map_err(RunFailure::failed)?
        } else {
            walk(start, &touches, series)?
        };
        let elapsed = begun.elapsed();
        Self::verify(content, start, bytes, &touches)?;
        let faults = paging.end()?;
        Ok(sample(series, elapsed, bytes, &touches, log).count(view::FAULTS, faults))
    }
}

impl Machines {
    /// The workload on a private mapping of the file, which the kernel pages in.
    fn run_mapped(
        &self,
        image: &Image,
        series: Series,
        touches: &[Vec<u64>],
    ) -> Result<Sample, RunFailure> {
        if series.cache == Some(Cache::Cold) {
            drop_cache(image)?;
        }
        let begun = Instant::now();
        let mapping = image.map(true).map_err(RunFailure::failed)?;
        let start = mapping.content().as_ptr().expose_provenance() as u64;
        let log = walk(start, touches, series)?;
        let elapsed = begun.elapsed();
        let bytes = self.bytes(series);
        Self::verify(&self.warm, start, bytes, touches)?;
        Ok(sample(series, elapsed, bytes, touches, log))
    }
}

/// What has the file open that stays in the page cache.
fn opened<'o>(
    opened: &'o mut Option<Opened>,
    image: &Arc<Image>,
) -> Result<&'o mut Opened, RunFailure> {
    match opened {
        Some(opened) => Ok(opened),
        none => Ok(none.insert(Opened::open(image)?)),
    }
}

/// Takes the file out of the page cache.
fn drop_cache(image: &Image) -> Result<(), RunFailure> {
    match image.drop_cache().map_err(RunFailure::failed)? {
        true => Ok(()),
        false => Err(RunFailure::failed(StaysCached)),
    }
}

/// Touches as much new memory as the run will, and frees it. A hypervisor below takes memory back that its
/// guest does not use for a while; the first touch after that costs what no pager has a part in.
fn warm_memory(bytes: u64) -> Result<(), RunFailure> {
    let region = Region::new(GuestAddress(0), bytes, Backing::Anonymous);
    let region = region.map_err(RunFailure::failed)?;
    region
        .fault_in(region.all_pages(), FaultInAccess::Write)
        .map_err(RunFailure::failed)
}

fn sample(
    series: Series,
    elapsed: Duration,
    bytes: u64,
    touches: &[Vec<u64>],
    log: LatencyLog,
) -> Sample {
    let touched: usize = touches.iter().map(Vec::len).sum();
    let pages = match series.part {
        Part::Fill | Part::Unpack => bytes / PAGE,
        _ => touched as u64,
    };
    let mut sample = Sample::default()
        .time(view::ELAPSED, elapsed)
        .count(view::PAGES, pages);
    if let Some(latency) = log.summary() {
        sample = sample
            .count(view::P50, latency.p50_ns)
            .count(view::P99, latency.p99_ns)
            .count(view::P999, latency.p999_ns);
    }
    sample.log(view::LATENCY, log)
}

/// Touches the pages of each list on a thread of its own. Where faults are measured one by one, the log
/// has the time of each touch.
fn walk(start: u64, lists: &[Vec<u64>], series: Series) -> Result<LatencyLog, RunFailure> {
    let passes = match series.part {
        Part::Replay => PASSES,
        _ => 0,
    };
    let is_timed = matches!(series.part, Part::Random | Part::Image);
    let walk_one = |pages: &[u64]| -> Result<LatencyLog, LatencyLogError> {
        let mut log = LatencyLog::new()?;
        let mut sum = 0;
        for &page in pages {
            let begun = is_timed.then(Instant::now);
            sum ^= word(start, page, 0);
            if let Some(begun) = begun {
                log.record(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX));
            }
            for _ in 0..passes {
                // Each step needs the one before: some work, which is the same everywhere.
                for index in 0..PAGE / 8 {
                    sum = (sum ^ word(start, page, index)).wrapping_mul(0x100_0000_01b3);
                }
            }
        }
        std::hint::black_box(sum);
        Ok(log)
    };
    let mut all = LatencyLog::new().map_err(RunFailure::failed)?;
    thread::scope(|scope| {
        let threads: Vec<_> = lists
            .iter()
            .map(|pages| scope.spawn(|| walk_one(pages)))
            .collect();
        for thread in threads {
            let log = thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            all.merge(&log);
        }
        Ok(())
    })
    .map_err(|error: LatencyLogError| RunFailure::failed(error))?;
    Ok(all)
}

/// Reads a word of a page. Waits as long as the page is missing.
fn word(start: u64, page: u64, index: u64) -> u64 {
    let at = std::ptr::with_exposed_provenance::<u64>(to_usize(start + page * PAGE + index * 8));
    // SAFETY: read_volatile requires a mapped, aligned word: the pages lie in memory that the run holds,
    // at a multiple of the page size, and the index is less than the words of a page.
    unsafe { at.read_volatile() }
}

/// Whether all of this process's memory there is mapped.
fn is_there(start: u64, bytes: u64) -> Result<bool, RunFailure> {
    let map = std::fs::File::open("/proc/self/pagemap").map_err(RunFailure::failed)?;
    let are_present = |first: u64, pages: u64| {
        let mut entries = vec![0; to_usize(pages * 8)];
        map.read_exact_at(&mut entries, (start / PAGE + first) * 8)?;
        Ok::<_, std::io::Error>(entries.chunks(8).all(|entry| entry[7] & 0x80 != 0))
    };
    let pages = bytes / PAGE;
    // The last one first: to look at all of them takes time.
    let is_last = are_present(pages - 1, 1).map_err(RunFailure::failed)?;
    Ok(is_last && are_present(0, pages).map_err(RunFailure::failed)?)
}

/// The same permutation each time.
fn shuffle(pages: &mut [u64]) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for last in (1..pages.len()).rev() {
        // xorshift64*, whose upper half is even enough for this.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let random = state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        pages.swap(last, to_usize(random) % (last + 1));
    }
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
