//! One run's pager: who resolves the faults, and what they counted.

use std::sync::Arc;

use pagetide_kvm::SlotFlags;
use pagetide_memory::{GuestAddress, GuestRange, RangeError, Region};
use pagetide_pager::{
    Contents, Counters, Holes, Pager, PatternSource, ReaderConfig, Readers, RegionConfig,
    UffdLayout,
};
use pagetide_testbed::{Machine, Seed, pattern};
use pagetide_uapi::userfaultfd;
use pagetide_vmm::{self as vmm, NoFaults, StageTwo, VcpuHooks, stop_when_in_trouble};

use super::machines::own_pages;
use super::plan::{Delivery, Mode, Plan, Uffds};
use crate::benchmark::{Job, RunFailure};

/// From how many pages on a vCPU's thread maps what it installed: a page alone is mapped cheaper by
/// the touch that waits for it.
const LEAST_EXIT_PAGES: u64 = 2;

/// A pager at work.
pub(super) struct Paging {
    pager: Arc<Pager>,
    readers: Readers,
    exits: Option<Arc<vmm::Paging>>,
}

/// What a run's pager counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counted {
    /// Faults that vCPUs' own threads resolved.
    pub(super) exits: u64,
    /// Faults that reader threads resolved.
    pub(super) messages: u64,
    /// Pages installed.
    pages: u64,
}

/// The pager did not install each page exactly once, so the run did not measure what it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{installed} pages were installed, and memory has {pages}: not every page came in once")]
pub(super) struct NotOnce {
    installed: u64,
    pages: u64,
}

impl Paging {
    /// Makes the pages of `region` absent and has them brought in as they are touched. A failure
    /// stops the machine's run.
    pub(super) fn begin(
        job: &Job<'_, Plan>,
        region: &Arc<Region>,
        content: Seed,
        machine: &Machine,
    ) -> Result<Self, RunFailure> {
        Self::begin_with(contents(job.plan, content), job, region, machine)
    }

    fn begin_with(
        contents: Contents,
        job: &Job<'_, Plan>,
        region: &Arc<Region>,
        machine: &Machine,
    ) -> Result<Self, RunFailure> {
        let Job {
            plan,
            vcpus,
            series,
            ..
        } = *job;
        let mode = match plan.mode {
            Mode::Minor => userfaultfd::Mode::Minor,
            Mode::Missing => userfaultfd::Mode::Missing,
        };
        let mut config = RegionConfig::local(Arc::clone(region), mode, contents)
            .userfaultfds(layout(plan, region, vcpus).map_err(RunFailure::failed)?)
            .fault_around(series.fault_around.into());
        if series.populate {
            let sink = StageTwo(Arc::clone(machine.vm()));
            config = config.populate(Arc::new(sink), LEAST_EXIT_PAGES);
        }
        let pager = Pager::new().map_err(RunFailure::failed)?;
        pager.add(config).map_err(RunFailure::failed)?;
        if series.delivery == Delivery::Exit {
            let exits = SlotFlags {
                absent_mapping_fault: true,
                ..SlotFlags::default()
            };
            machine.set_slot_flags(exits).map_err(RunFailure::failed)?;
        }
        stop_when_in_trouble(&pager, &machine.stopper());
        let threads = usize::try_from(plan.readers_for(vcpus)).unwrap_or(usize::MAX);
        let readers =
            Readers::spawn(&pager, ReaderConfig::new(threads)).map_err(RunFailure::failed)?;
        let exits = (series.delivery == Delivery::Exit)
            .then(|| Arc::new(vmm::Paging::new(&pager, vcpus).pre_fault(plan.pre_fault)));
        Ok(Self {
            pager,
            readers,
            exits,
        })
    }

    /// Who gets the exits of this run. Without exits as the delivery, none may come.
    pub(super) fn hooks(&self) -> Arc<dyn VcpuHooks> {
        match &self.exits {
            Some(exits) => Arc::clone(exits) as Arc<dyn VcpuHooks>,
            None => Arc::new(NoFaults),
        }
    }

    /// Stops the readers and sums up. No vCPU may be running any more.
    pub(super) fn end(self) -> Result<Counted, RunFailure> {
        let read = self.readers.stop();
        self.pager.clear_on_notice();
        if let Some(trouble) = self.pager.trouble() {
            return Err(RunFailure::failed(trouble));
        }
        let exits = self
            .exits
            .as_ref()
            .map_or(Counters::default(), |exits| exits.counters());
        Ok(Counted {
            exits: exits.faults,
            messages: read.messages,
            pages: exits.pages + read.pages,
        })
    }
}

impl Counted {
    /// Whether each of `pages` pages was installed exactly once.
    pub(super) fn check(self, pages: u64) -> Result<(), NotOnce> {
        if self.pages == pages {
            Ok(())
        } else {
            Err(NotOnce {
                installed: self.pages,
                pages,
            })
        }
    }
}

fn contents(plan: &Plan, content: Seed) -> Contents {
    match plan.mode {
        Mode::Minor => Contents::PageCache(Holes::AreMissing),
        Mode::Missing => Contents::Local(Arc::new(PatternSource::new(
            move |gpa, piece: &mut [u8]| pattern::fill(gpa, content, piece),
        ))),
    }
}

fn layout(plan: &Plan, region: &Region, vcpus: u32) -> Result<UffdLayout, RangeError> {
    if plan.uffds == Uffds::Single {
        return Ok(UffdLayout::Single);
    }
    let shift = region.page_size().shift();
    let range = |vcpu| {
        let pages = own_pages(region, vcpus, vcpu);
        let start = GuestAddress(region.gpa().0 + (pages.first().0 << shift));
        GuestRange::new(start, pages.count() << shift)
    };
    (0..vcpus)
        .map(range)
        .collect::<Result<_, _>>()
        .map(UffdLayout::PerRange)
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
