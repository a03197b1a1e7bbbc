//! Memory that is not there yet: prefetch brings it in while the guest runs, and has it mapped or not.

use std::sync::Arc;

use pagetide_kvm::SlotFlags;
use pagetide_memory::Region;
use pagetide_pager::{
    Contents, Holes, Mode, Pager, Prefetch, PrefetchConfig, ReaderConfig, Readers, RegionConfig,
};
use pagetide_testbed::{Machine, RunOutcome, Workload};
use pagetide_vmm::{Paging, StageTwo, VcpuHooks, stop_when_in_trouble};

use crate::benchmark::RunFailure;
use crate::machine::run_failure;

/// A pager at work, with prefetch.
pub(super) struct Ahead {
    pager: Arc<Pager>,
    readers: Readers,
    exits: Arc<Paging>,
    prefetch: Prefetch,
}

/// How memory came in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Arrived {
    /// Pages that prefetch brought in.
    pub(super) prefetched_pages: u64,
    /// Faults that left the guest, or came to a reader.
    pub(super) faults: u64,
    /// Bytes that were mapped as they arrived.
    pub(super) mapped_bytes: u64,
}

/// Pages came in twice, or not at all: the run did not measure what it should.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("{installed} pages were installed, and memory has {pages}")]
struct NotOnce {
    installed: u64,
    pages: u64,
}

impl Ahead {
    /// Makes the pages of `region` absent, whose content is in the page cache, and begins to bring
    /// them in; `populates` says whether what arrived is mapped for the guest.
    pub(super) fn begin(
        machine: &Machine,
        region: &Arc<Region>,
        populates: bool,
    ) -> Result<Self, RunFailure> {
        let contents = Contents::PageCache(Holes::AreMissing);
        let mut config = RegionConfig::local(Arc::clone(region), Mode::Minor, contents);
        if populates {
            let sink = StageTwo(Arc::clone(machine.vm()));
            config = config.populate(Arc::new(sink), 2);
        }
        let pager = Pager::new().map_err(RunFailure::failed)?;
        pager.add(config).map_err(RunFailure::failed)?;
        // A reader serves the guest's faults, too, where the kernel has no exits.
        let exits = SlotFlags {
            absent_mapping_fault: machine.capabilities().absent_mapping_fault,
            ..SlotFlags::default()
        };
        machine.set_slot_flags(exits).map_err(RunFailure::failed)?;
        stop_when_in_trouble(&pager, &machine.stopper());
        let readers = Readers::spawn(&pager, ReaderConfig::new(1)).map_err(RunFailure::failed)?;
        let exits = Paging::new(&pager, machine.config().vcpus);
        let prefetch =
            Prefetch::spawn(&pager, PrefetchConfig::default()).map_err(RunFailure::failed)?;
        Ok(Self {
            pager,
            readers,
            exits: Arc::new(exits),
            prefetch,
        })
    }

    /// Runs a machine whose memory is paged in, and ends the paging.
    pub(super) fn run(
        self,
        machine: &mut Machine,
        workload: &Workload,
    ) -> Result<(RunOutcome, Arrived), RunFailure> {
        let hooks: Arc<dyn VcpuHooks> = Arc::clone(&self.exits) as _;
        let result = match machine.run(workload, hooks) {
            Err(failure) if !failure.lost.is_empty() => {
                // Ending it would close the userfaultfd, and a vCPU that sleeps in it would read
                // zeroes. So it stays until the process ends.
                std::mem::forget(self);
                return Err(run_failure(failure));
            }
            result => result,
        };
        // The pager's failure stopped the run, so it is the better answer of the two.
        let arrived = self.end()?;
        Ok((result.map_err(run_failure)?, arrived))
    }

    /// No vCPU may be running any more.
    fn end(self) -> Result<Arrived, RunFailure> {
        let ahead = self.prefetch.stop().map_err(RunFailure::failed)?.counters;
        let read = self.readers.stop();
        self.pager.clear_on_notice();
        if let Some(trouble) = self.pager.trouble() {
            return Err(RunFailure::failed(trouble));
        }
        let exits = self.exits.counters();
        let mapped_bytes = [ahead, read, exits]
            .iter()
            .map(|counted| counted.populated_bytes)
            .sum();
        let installed = ahead.pages + read.pages + exits.pages;
        let progress = self.pager.progress();
        if installed != progress.total && progress.present == progress.total {
            let pages = progress.total;
            return Err(RunFailure::failed(NotOnce { installed, pages }));
        }
        Ok(Arrived {
            prefetched_pages: ahead.pages,
            faults: exits.faults + read.messages,
            mapped_bytes,
        })
    }
}
