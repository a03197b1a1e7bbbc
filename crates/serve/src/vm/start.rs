//! The beginning of a VM: its regions, and what is fetched first.

use std::sync::Arc;
use std::sync::mpsc;

use pagetide_memory::{GuestAddress, HostAddress, HostRange, PageIndex, PageRange, PageSize};
use pagetide_pager::{
    AddError, Contents, Counters, InstalledBy, Memfd, Mode, Observer, Pager, Prefetch,
    PrefetchConfig, PrefetchPlan, RegionConfig, RegionId, Request, RetryPolicy, ServeError, Source,
    SourceError,
};
use pagetide_sources::ImageError;
use pagetide_uapi::userfaultfd::UserRange;

use super::keeping::{Keeping, map_bytes};
use super::recording::Checkpoint;
use super::spaces::Spaces;
use super::{Client, Common, End, PagedRange, Part, Vm, VmError};
use crate::handshake::VmRegion;
use crate::image::{BATCH_BYTES, ServedImage, in_flight_limits};
use crate::log_limit::{LogLimit, log_vm};
use crate::memory_limit::MemoryLimit;
use crate::metrics::Totals;
use crate::native::attach::{AttachedRegion, Memory};
use crate::options::WorkingSetMode;
use crate::recorder::{RECORDED, Recorder};
use crate::sample::Sample;
use crate::working_set_file::{LoadedSet, WorkingSetPlan};

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

/// The part of a region from `skip` on, `bytes` bytes long.
fn part_of(
    attached: &AttachedRegion,
    skip: u64,
    bytes: u64,
    mode: Mode,
    contents: Contents,
) -> Result<RegionConfig, AddError> {
    let region: &VmRegion = &attached.region;
    let bad = |_| AddError::BadRange {
        gpa: GuestAddress(region.offset),
        bytes,
    };
    let to_usize = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
    let start = region.range.start().as_u64();
    let range = HostRange::new(HostAddress(to_usize(start + skip)), to_usize(bytes));
    let range = range.map_err(bad)?;
    let config = RegionConfig::foreign(&attached.uffd, range, region.page_size, mode, contents);
    // EEXIST is normal: the VMM may have written pages itself, and a second message of one fault may
    // follow the first. The threads that read the image serve all its VMs: what they read is installed by the VM's own
    // thread, since the VM can hold up whoever installs.
    Ok(config
        .gpa(GuestAddress(region.offset + skip))
        .trust_existing_pages()
        .installed_by(InstalledBy::Serving))
}

/// What a VM does with its working set.
#[derive(Debug, Default)]
pub(super) enum Plan {
    #[default]
    Nothing,
    Record(Arc<Recorder>),
    Replay(Arc<LoadedSet>),
}

impl Plan {
    /// The plan of a VM that starts now.
    pub(super) fn new(common: &Common, image: &ServedImage) -> Self {
        match image.working_set_plan(common.options.working_set) {
            WorkingSetPlan::Nothing => Self::Nothing,
            WorkingSetPlan::Record => Self::Record(Arc::new(Recorder::new())),
            WorkingSetPlan::Replay(set) => Self::Replay(set),
        }
    }

    /// The plan of a VM that a former server has recorded since then, if it did. The guest has touched what a
    /// replay would fetch.
    pub(super) fn go_on(common: &Common, image: &ServedImage, since_us: Option<u64>) -> Self {
        let mode = common.options.working_set;
        let records = matches!(mode, WorkingSetMode::Auto | WorkingSetMode::Record);
        match since_us.filter(|_| records && image.keeps_recordings()) {
            Some(since_us) => Self::Record(Arc::new(Recorder::continued(since_us))),
            None => Self::Nothing,
        }
    }

    /// When its recording has begun, if it records.
    pub(super) fn recording_since_us(&self) -> Option<u64> {
        match self {
            Self::Record(recorder) => Some(recorder.since_us()),
            Self::Nothing | Self::Replay(_) => None,
        }
    }
}

/// How a VM begins.
#[derive(Default)]
pub(super) struct Start {
    /// Its working set can be controlled later.
    pub(super) is_native: bool,
    /// It runs already: another server has served it.
    pub(super) is_running: bool,
    /// What it does with its working set.
    pub(super) plan: Plan,
    /// It is kept for a successor.
    pub(super) keeping: Option<Keeping>,
}

impl<'a> Vm<'a> {
    /// Adds the regions of a VM.
    pub(super) fn new(
        common: &'a Common,
        image: &'a Arc<ServedImage>,
        client: &'a Client,
        attached: Vec<AttachedRegion>,
        start: Start,
    ) -> Result<Self, VmError> {
        // Before anything is changed: a VM whose image nobody can read is refused, or goes on later.
        let _readers = image.source()?;
        let pager = Pager::new()?;
        let (send, notices) = mpsc::channel();
        pager.on_notice(move |notice| {
            let _ = send.send(notice.clone());
        });
        let plan = start.plan;
        let recorder = match &plan {
            Plan::Record(recorder) => Some(Arc::clone(recorder)),
            Plan::Nothing | Plan::Replay(_) => None,
        };
        let idle = || {
            let recorder = Recorder::new();
            recorder.stop();
            Arc::new(recorder)
        };
        let observer = match (&recorder, start.is_native) {
            (Some(recorder), _) => Some(Arc::clone(recorder)),
            (None, true) => Some(idle()),
            (None, false) => None,
        };
        let regions = attached.iter().map(|attached| &attached.region);
        let memory_bytes = regions.clone().map(VmRegion::bytes).sum();
        // With prefetch the pages of the sample would come, too; a huge page has no part that is left out.
        let is_sampled = !common.options.prefetch && observer.is_none() && { regions }
            .all(|region| region.page_size == RECORDED);
        let sample = match &plan {
            Plan::Replay(set) if is_sampled => {
                Sample::choose(set.runs(), common.metrics.totals().vms_accepted)
            }
            _ => None,
        };
        let peer = &client.peer;
        let mut vm = Self {
            common,
            image,
            peer,
            charge: &client.charge,
            pager,
            addresses: attached
                .iter()
                .map(|attached| (Arc::clone(&attached.uffd), attached.region.range))
                .collect(),
            regions: Vec::new(),
            parts: Vec::new(),
            memory_bytes,
            notices,
            notices_logged: LogLimit::default(),
            recorder,
            checkpoint: Checkpoint::new(),
            observer,
            sample: sample.map(Arc::new),
            prefetch: None,
            limit: peer.pid.map(MemoryLimit::of).unwrap_or_default(),
            spaces: Spaces::default(),
            without_content: Vec::new(),
            stalled: Vec::new(),
            replayed_pages: 0,
            reported: Totals::default(),
            last_error: String::new(),
            keeping: start.keeping,
            labelled: None,
        };
        // The first page has the messages that were read.
        let mut map_offset = PageSize::Size4K.bytes();
        for (index, attached) in attached.into_iter().enumerate() {
            let bytes = map_bytes(&attached.region);
            if let Err(error) = vm.add(index, attached, map_offset) {
                // At its user's pace, as that of a VM that was served.
                vm.end_memory(End::Gone);
                return Err(error);
            }
            map_offset += bytes;
        }
        if start.is_running {
            // Before anything is fetched: pages that the guest has discarded would get the image's content.
            vm.pager.recover();
            // The former server may have read the messages of threads that sleep: they fault again.
            for (uffd, range) in &vm.addresses {
                let _ = uffd.wake(UserRange::from(*range));
            }
        }
        vm.start_prefetch(&plan);
        let labelled = common.metrics.labelled();
        let begin = |label| labelled.begin(client.number, &client.socket, label);
        vm.labelled = client.charge.label().map(begin);
        vm.report(&Counters::default());
        Ok(vm)
    }

    /// Adds a region: the part whose content the image has, and the part beyond its end.
    fn add(
        &mut self,
        index: usize,
        mut attached: AttachedRegion,
        map_offset: u64,
    ) -> Result<(), VmError> {
        let add_error = |source| VmError::Add { index, source };
        let region = attached.region;
        let image_bytes = self.image.image.bytes();
        let page_bytes = region.page_size.bytes();
        let here = image_bytes
            .saturating_sub(region.offset)
            .min(region.bytes());
        // A page of which the image has a part is missing as a whole.
        let here = here / page_bytes * page_bytes;
        if here > 0 {
            let source = match &attached.memory {
                Memory::Clone(shared) => Arc::clone(&shared.source),
                Memory::Missing | Memory::Minor(..) => self.image.source()?,
            };
            let around = match region.page_size {
                PageSize::Size4K if self.recorder.is_none() => {
                    self.common.options.fault_around_pages
                }
                _ => 1,
            };
            let mode = match attached.memory {
                Memory::Missing => Mode::Missing,
                Memory::Minor(..) | Memory::Clone(_) => Mode::Minor,
            };
            let contents = Contents::Source(source);
            let config = part_of(&attached, 0, here, mode, contents).map_err(add_error)?;
            let mut config = config.fault_around(around);
            if let Some(observer) = &self.observer {
                let observer: Arc<dyn Observer> = Arc::<Recorder>::clone(observer);
                config = config.observe(observer);
            } else if let Some(sample) = &self.sample {
                let observer: Arc<dyn Observer> = Arc::<Sample>::clone(sample);
                config = config.observe(observer);
            }
            config = match std::mem::replace(&mut attached.memory, Memory::Missing) {
                Memory::Missing => config,
                Memory::Minor(file, offset_bytes) => config.memfd(Memfd { file, offset_bytes }),
                Memory::Clone(_) => config.filled_by_source(),
            };
            let limits = in_flight_limits(&*self.image.image, region.page_size);
            let config = self.keep_map(config.in_flight_limits(limits), map_offset);
            let id = self.add_part(index, &mut attached, 0, config)?;
            self.regions.push(PagedRange {
                id,
                offset: region.offset,
                bytes: here,
                page_size: region.page_size,
            });
        }
        if here < region.bytes() {
            let missing = region.bytes() - here;
            log_vm!(
                error,
                self.charge,
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
            let config = part_of(&attached, here, missing, Mode::Missing, contents);
            let config = config.map_err(add_error)?.retry_policy(once);
            let first_page = here / page_bytes;
            // The second part's map begins at the page after that of the first.
            let page = PageSize::Size4K.bytes();
            let config = self.keep_map(config, map_offset + first_page.div_ceil(page) * page);
            let id = self.add_part(index, &mut attached, first_page, config)?;
            self.without_content.push(id);
        }
        match attached.maps.first() {
            None => Ok(()),
            Some(&(first_page, _)) => Err(VmError::Map { index, first_page }),
        }
    }

    /// Keeps the page map of a region for a successor of this server.
    fn keep_map(&self, config: RegionConfig, offset: u64) -> RegionConfig {
        match &self.keeping {
            None => config,
            // SAFETY: kept_in requires that no other userfaultfd and no other pager uses the file's first page. The
            // file was made for this VM, which has one userfaultfd (`Keeping`), and a successor gets it from the
            // keeper when the server that used it has gone.
            Some(keeping) => unsafe { config.kept_in(Arc::clone(&keeping.maps), offset) },
        }
    }

    /// Adds a part of a region, which continues from the predecessor's page map if there is one.
    fn add_part(
        &mut self,
        index: usize,
        attached: &mut AttachedRegion,
        first_page: u64,
        mut config: RegionConfig,
    ) -> Result<RegionId, VmError> {
        let found = attached.maps.iter().position(|(at, _)| *at == first_page);
        if let Some(found) = found {
            let (_, map) = attached.maps.swap_remove(found);
            config = config.resume_from(map);
        }
        let added = self.pager.add(config);
        let id = added.map_err(|source| VmError::Add { index, source })?;
        self.parts.push(Part {
            id,
            region: u32::try_from(index).unwrap_or(u32::MAX),
            first_page,
        });
        Ok(id)
    }

    /// Prefetch is an aid: the VM is served without it, page by page.
    fn start_prefetch(&mut self, plan: &Plan) {
        let first = match plan {
            Plan::Replay(set) => self.plan_replay(set),
            Plan::Nothing | Plan::Record(_) => Vec::new(),
        };
        if let Err(error) = self.start_plan(first) {
            log_vm!(
                warn,
                self.charge,
                pid = self.peer.pid,
                error = &error as &dyn std::error::Error,
                "no prefetch: its thread was not started"
            );
        }
    }

    /// The pages of a working set, in its order.
    fn plan_replay(&mut self, set: &LoadedSet) -> Vec<(RegionId, PageRange)> {
        let mut first = Vec::new();
        let shift = set.page_size.shift();
        let mut fetch =
            |run: PageRange| self.locate(run.first().0 << shift, run.count() << shift, &mut first);
        for &run in set.runs() {
            match &self.sample {
                Some(sample) => sample.rest_of(run, &mut fetch),
                None => fetch(run),
            }
        }
        self.replayed_pages = first.iter().map(|(_, pages)| pages.count()).sum();
        let pages = self.replayed_pages;
        self.common
            .metrics
            .count(|totals| totals.replayed_pages = pages);
        first
    }

    /// Fetches the pages of a working set now, in its order, and then what is prefetched anyway. Returns
    /// the number of its pages.
    pub(super) fn replay(&mut self, set: &LoadedSet) -> Result<u64, ServeError> {
        self.prefetch = None;
        let first = self.plan_replay(set);
        let started = self.start_plan(first);
        if started.is_err() {
            self.replayed_pages = 0;
        }
        started.map(|()| self.replayed_pages)
    }

    pub(super) fn start_plan(
        &mut self,
        first: Vec<(RegionId, PageRange)>,
    ) -> Result<(), ServeError> {
        // A page that comes ahead is not recorded.
        let then = match self.common.options.prefetch && self.recorder.is_none() {
            true => self.ids(),
            false => Vec::new(),
        };
        let (first, then) = self.fit(first, then);
        if !first.is_empty() || !then.is_empty() {
            self.fetch(PrefetchPlan { first, then })?;
        }
        Ok(())
    }

    pub(super) fn fetch(&mut self, plan: PrefetchPlan) -> Result<(), ServeError> {
        let config = PrefetchConfig {
            batch_bytes: BATCH_BYTES,
        };
        self.prefetch = Some(Prefetch::spawn_plan(&self.pager, config, plan)?);
        Ok(())
    }

    pub(super) fn ids(&self) -> Vec<RegionId> {
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
}

#[cfg(test)]
#[path = "start_tests.rs"]
mod tests;
