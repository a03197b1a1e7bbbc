//! What a reader must know to read the figures right.

use pagetide_memory::{Backing, FailurePolicy};

use super::report::MemcyclerReport;
use crate::rounds::notes::{doubts, lost};

/// The notes for a result.
pub(super) fn notes(report: &MemcyclerReport) -> Vec<String> {
    let plan = &report.plan;
    let mut notes = vec![
        report.origin.timing.explanation().to_owned(),
        lost(&report.origin),
        "Every word that a vCPU read was compared with what it had written there, and after every run \
         all of memory but what was lost; a difference would have ended the benchmark."
            .to_owned(),
        "Errors are simulated (MADV_HWPOISON) while the guest runs: the page's data can still be read \
         where the kernel leaves it mapped. A real error would be a machine check at each touch."
            .to_owned(),
        "survived: all vCPUs went on in the memory that was left. This guest has nothing but test data \
         in the memory that is hit; an operating system may not be so lucky."
            .to_owned(),
    ];
    let takes_huge_pages = plan.policies.contains(&FailurePolicy::KernelDefault)
        && plan.backings.iter().any(|backing| backing.is_hugetlb());
    if takes_huge_pages {
        notes.push(
            "hugetlb by default: vCPUs do not cycle through what they have lost, so that their rate \
             says nothing of it; the bytes do."
                .to_owned(),
        );
    }
    let mut runs = report.points.iter().flat_map(|point| &point.runs);
    let unhandled: u64 = runs.clone().map(|run| run.errors_unhandled).sum();
    if unhandled > 0 {
        notes.push(format!(
            "{unhandled} of the errors the kernel could not handle when they were made: a huge page in use \
             could not be split, or the page had further users. It counts as corrupted, and whoever has \
             it mapped may go on using it."
        ));
    }
    if runs.any(|run| run.errors_in_lost_memory > 0) {
        notes.push(
            "Where an earlier error had taken the whole huge page, further errors in it could not be \
             made: errors counts those that were."
                .to_owned(),
        );
    }
    if plan.backings.contains(&Backing::Thp) {
        notes.push(
            "thp by default: the kernel splits the huge page and takes 4 KiB; what is left is mapped \
             in pieces of 4 KiB, as in the published experiment."
                .to_owned(),
        );
    }
    if report.origin.timing.is_lab() {
        notes.push(
            "What second-stage mappings of 4 KiB cost on hardware is misses of the TLB and longer page \
             walks. A software CPU has a TLB of 4 KiB entries whatever the mapping, and its walks are no \
             instructions: here the loss of speed does not show, only the mappings that cause it."
                .to_owned(),
        );
    }
    let busiest = plan.vcpus.iter().copied().max().unwrap_or(0);
    if busiest > report.origin.facts.host_cpus {
        notes.push(format!(
            "Up to {busiest} vCPUs share {} host CPUs.",
            report.origin.facts.host_cpus
        ));
    }
    notes.extend(doubts(&report.origin, plan.runs));
    notes
}
