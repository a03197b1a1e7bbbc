//! What a reader must know to read the figures right.

use pagetide_memory::Backing;

use super::plan::Method;
use super::report::PopulateReport;
use crate::rounds::notes::{doubts, lost};

/// The notes for a result.
pub(super) fn notes(report: &PopulateReport) -> Vec<String> {
    let plan = &report.plan;
    let mut notes = vec![
        report.origin.timing.explanation().to_owned(),
        lost(&report.origin),
        "After every run memory was compared with what it should hold; a difference would have \
         ended the benchmark."
            .to_owned(),
        "The host has all of memory in its page tables before anything is measured: only \
         second-stage tables are filled. The guest writes one word to every 4 KiB, whatever the \
         backing."
            .to_owned(),
        "exits: second-stage faults by KVM's own count (pf_taken), from the vCPUs' first entry to \
         the end. They include those of the guest's code, tables and logs, a few dozen to a few \
         hundred, unless these were populated as well."
            .to_owned(),
    ];
    let counted =
        |point: &super::report::Point| point.runs.iter().any(|run| run.mappings_after > 0);
    if !report.points.iter().any(counted) {
        notes.push(
            "This KVM does not count second-stage mappings: it has no two-dimensional paging, or is \
             none that runs on a processor's own. Its exits mean something else then."
                .to_owned(),
        );
    }
    if report.origin.timing.is_lab() {
        notes.push(
            "Exits are slow in a software CPU, which flatters population: on hardware expect the \
             order of the series, not the ratios."
                .to_owned(),
        );
    }
    if plan
        .backings
        .iter()
        .any(|&backing| backing != Backing::Shmem)
    {
        notes.push(
            "With huge pages most of the guest's time is its own walk, so that \"over faults\" says \
             little: compare the guest's times."
                .to_owned(),
        );
    }
    if plan.methods.contains(&Method::OneReader) {
        notes.push(
            "one-reader: vCPU 0 reads one word of every 4 KiB first, which counts as the \
             population; its faults are not among the exits."
                .to_owned(),
        );
    }
    if plan.methods.iter().any(|method| method.is_paged()) {
        notes.push(
            "prefetch: memory is in the page cache only, behind a userfaultfd (minor faults), and one \
             thread brings it in while the vCPUs write; what they reach first comes by their own \
             faults, which leave the guest where the kernel has KVM_CAP_ABSENT_MAPPING_FAULT. \
             prefetch-populate: that thread also has each batch mapped. Their exits include those \
             that the pager served."
                .to_owned(),
        );
    }
    let most = plan.threads.iter().copied().max().unwrap_or(0);
    if plan.methods.contains(&Method::PreFault) && plan.vcpus.iter().any(|&vcpus| vcpus < most) {
        notes.push(
            "pre-fault: each thread needs an idle vCPU, so there are no more threads than vCPUs."
                .to_owned(),
        );
    }
    let busiest = plan.vcpus.iter().copied().max().unwrap_or(0).max(most);
    if busiest > report.origin.facts.host_cpus {
        notes.push(format!(
            "Up to {busiest} vCPUs or threads share {} host CPUs: more of them than that cannot be \
             faster.",
            report.origin.facts.host_cpus
        ));
    }
    notes.extend(doubts(&report.origin, plan.runs));
    notes
}
