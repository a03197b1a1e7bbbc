//! One run's pager: who resolves the faults, and what they counted.

use std::sync::Arc;

use pagetide_kvm::FaultExit;
use pagetide_memory::{GuestAddress, GuestRange, RangeError, Region};
use pagetide_pager::{
    Counters, ExitResolvers, PageCacheSource, Pager, PagerBuilder, PatternSource, ReaderConfig,
    Readers, Resolution, UffdLayout,
};
use pagetide_testbed::{FaultHandler, Handled, HandlerError, Machine, NoFaults, Seed, pattern};
use pagetide_uapi::userfaultfd;

use super::machines::own_pages;
use super::plan::{Delivery, Mode, Plan, Uffds};
use crate::benchmark::Job;
use crate::rounds::RunFailure;

/// A pager at work.
pub(super) struct Paging {
    pager: Arc<Pager>,
    readers: Readers,
    exits: Option<Arc<ExitHandler>>,
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

/// A page's content is lost: there is nothing to show the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the page at gpa {gpa} has an uncorrected memory error")]
struct Poisoned {
    gpa: GuestAddress,
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
        let stopper = machine.stopper();
        pager.on_failure(move |failure| stopper.stop(failure.clone()));
        let threads = usize::try_from(plan.readers_for(vcpus)).unwrap_or(usize::MAX);
        let readers =
            Readers::spawn(&pager, ReaderConfig::new(threads)).map_err(RunFailure::failed)?;
        let exits = (series.delivery == Delivery::Exit).then(|| {
            let resolvers = ExitResolvers::new(&pager, vcpus);
            Arc::new(ExitHandler {
                resolvers,
                pre_fault: plan.pre_fault,
            })
        });
        Ok(Self {
            pager,
            readers,
            exits,
        })
    }

    /// Who gets the exits of this run. Without exits as the delivery, none may come.
    pub(super) fn handler(&self) -> Arc<dyn FaultHandler> {
        match &self.exits {
            Some(exits) => Arc::clone(exits) as Arc<dyn FaultHandler>,
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
            .map_or(Counters::default(), |exits| exits.resolvers.counters());
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

/// Hands each exit to its vCPU's resolver, on the vCPU's own thread. This is in the measured path:
/// it allocates nothing and takes no lock that another thread takes.
struct ExitHandler {
    resolvers: ExitResolvers,
    pre_fault: bool,
}

impl FaultHandler for ExitHandler {
    #[inline]
    fn handle(&self, vcpu: u32, fault: FaultExit) -> Result<Handled, HandlerError> {
        match self.resolvers.resolve(vcpu, &fault)? {
            Resolution::Installed { gpa, bytes } if self.pre_fault => {
                Ok(Handled::PreFaultThenRetry(GuestRange::new(gpa, bytes)?))
            }
            Resolution::Poisoned => Err(Poisoned { gpa: fault.gpa }.into()),
            _ => Ok(Handled::Retry),
        }
    }

    fn stop(&self) {
        self.resolvers.pager().stop();
    }
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
