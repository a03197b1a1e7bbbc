//! One run's pager: who resolves the faults, and what they counted.

use std::sync::Arc;

use pagetide_memory::{GuestAddress, GuestRange, RangeError, Region};
use pagetide_pager::{
    Counters, PageCacheSource, Pager, PagerBuilder, PatternSource, ReaderConfig, Readers,
    UffdLayout,
};
use pagetide_testbed::{Machine, Seed, pattern};
use pagetide_uapi::userfaultfd;
use pagetide_vmm::{self as vmm, NoFaults, VcpuHooks, stop_when_paging_fails};

use super::machines::own_pages;
use super::plan::{Delivery, Mode, Plan, Uffds};
use crate::benchmark::Job;
use crate::rounds::RunFailure;

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
        Self::begin_with(builder(job.plan, content), job, region, machine)
    }

    fn begin_with(
        builder: PagerBuilder,
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
        let pager = builder
            .region(Arc::clone(region))
            .uffds(layout(plan, region, vcpus).map_err(RunFailure::failed)?)
            .fault_around(series.fault_around.into())
            .build()
            .map_err(RunFailure::failed)?;
        stop_when_paging_fails(&pager, &machine.stopper());
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
        let read = self.readers.stop().map_err(RunFailure::failed)?;
        self.pager.clear_on_failure();
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

fn builder(plan: &Plan, content: Seed) -> PagerBuilder {
    match plan.mode {
        Mode::Minor => Pager::builder(userfaultfd::Mode::Minor, PageCacheSource),
        Mode::Missing => {
            let source =
                PatternSource::new(move |gpa, piece: &mut [u8]| pattern::fill(gpa, content, piece));
            Pager::builder(userfaultfd::Mode::Missing, source)
        }
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
