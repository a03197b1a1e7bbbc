//! What benchmarks that run the testbed's machines share: the content of memory, and what a failed run
//! means.

use std::time::Duration;

use pagetide_kvm::Exit;
use pagetide_memory::{AccessError, Backing, GuestAddress, PageIndex, Region};
use pagetide_testbed::{self as testbed, GuestError, Seed, pattern};
use pagetide_vmm::PoolFailure;

use crate::benchmark::RunFailure;
use crate::timing::Timing;

/// How long nothing may move. In parallel mode a run that stands still for this long is lost for good;
/// elsewhere a host under load must not be taken for a hang.
pub(crate) fn stall_timeout(timing: Timing) -> Duration {
    Duration::from_secs(if timing.may_lose_runs() { 20 } else { 60 })
}

/// What memory is paged in with, and what the guest writes over it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seeds {
    pub(crate) paged: Seed,
    pub(crate) written: Seed,
}

impl Seeds {
    /// Those of the run with this number; no two runs share one, nor does a run's own pair.
    pub(crate) fn of(seed: u64) -> Self {
        // Seeds are made odd, so the lowest bit tells nothing apart.
        let base = seed << 2;
        Self {
            paged: Seed::new(base),
            written: Seed::new(base | 2),
        }
    }
}

/// Tells runs that the parallel software CPU loses from those that fail. If a vCPU's thread did not
/// come back, the run is not repeated: the lost thread would go on beside the next ones.
pub(crate) fn run_failure(failure: testbed::RunFailure) -> RunFailure {
    match *failure.cause {
        _ if !failure.lost.is_empty() => RunFailure::failed(failure),
        GuestError::Stalled { .. }
        | GuestError::Vcpus(PoolFailure::UnexpectedExit {
            exit: Exit::Shutdown,
            ..
        }) => RunFailure::Lost(Box::new(failure)),
        _ => RunFailure::failed(failure),
    }
}

/// The same of vCPUs that run until they are told to end, of which no thread is left behind.
pub(crate) fn is_loss(error: &GuestError) -> bool {
    matches!(
        error,
        GuestError::Stalled { .. }
            | GuestError::Vcpus(
                PoolFailure::Lost { .. }
                    | PoolFailure::UnexpectedExit {
                        exit: Exit::Shutdown,
                        ..
                    }
            )
    )
}

/// Puts the content of all pages there: into the page cache, where there is one.
pub(crate) fn fill(region: &Region, seed: Seed) -> Result<(), AccessError> {
    let page_bytes = region.page_size().bytes();
    let mut piece = [0; 64 << 10];
    let mut offset = 0;
    while offset < region.bytes() {
        let rest = usize::try_from(region.bytes() - offset).unwrap_or(piece.len());
        let length = rest.min(piece.len());
        let piece = &mut piece[..length];
        pattern::fill(GuestAddress(region.gpa().0 + offset), seed, piece);
        let (page, within) = (PageIndex(offset / page_bytes), offset % page_bytes);
        if region.backing() == Backing::Anonymous {
            region.write_guest(page, within, piece)?;
        } else {
            region.write_service(page, within, piece)?;
        }
        offset += length as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_left_a_thread_behind_is_not_repeated() {
        let stalled = |lost| testbed::RunFailure {
            cause: Box::new(GuestError::Stalled {
                vcpu: None,
                timeout: Duration::from_secs(20),
            }),
            vcpus: Vec::new(),
            lost,
        };
        assert!(matches!(
            run_failure(stalled(Vec::new())),
            RunFailure::Lost(_)
        ));
        assert!(matches!(
            run_failure(stalled(vec![1])),
            RunFailure::Failed(_)
        ));
    }

    #[test]
    fn no_two_runs_share_content() {
        let mut seen = std::collections::HashSet::new();
        for seed in 0..100 {
            let seeds = Seeds::of(seed);
            assert!(
                seen.insert(seeds.paged) && seen.insert(seeds.written),
                "{seed}"
            );
        }
    }

    #[test]
    fn filling_writes_every_word() {
        let region = Region::new(GuestAddress(1 << 32), 3 << 16, Backing::Shmem).unwrap();
        let seed = Seed::new(77);
        fill(&region, seed).unwrap();
        let mut read = vec![0; 3 << 16];
        region.read_service(PageIndex(0), 0, &mut read).unwrap();
        for (index, word) in read.as_chunks::<8>().0.iter().enumerate() {
            let gpa = (1 << 32) + 8 * index as u64;
            assert_eq!(u64::from_le_bytes(*word), pattern::word(gpa, seed));
        }
    }
}
