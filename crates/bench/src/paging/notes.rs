//! What a reader must know to read the figures right.

use super::plan::{Delivery, Plan, Series};
use super::report::PagingReport;
use crate::benchmark::Benchmark;
use crate::rounds::notes::{doubts, lost};
use crate::timing::Timing;
use crate::units::ByteSize;

/// The notes for a result.
pub(super) fn notes(plan: &Plan, report: &PagingReport) -> Vec<String> {
    let mut notes = vec![report.origin.timing.explanation().to_owned()];
    notes.push(lost(&report.origin));
    notes.push(
        "After every run each page's content was compared with what it should be; a difference \
         would have ended the benchmark."
            .to_owned(),
    );
    if plan.deliveries.contains(&Delivery::None) {
        notes.push(
            "none: the host's page tables are filled before the run, so a touch costs the \
             second-stage fault alone. Its latencies are those of all touches."
                .to_owned(),
        );
    }
    if plan.fault_around.iter().any(|&pages| pages > 1) {
        notes.push(
            "With fault-around, one exit makes a whole aligned block of pages present. Rates count \
             pages; latencies are those of the touches that left the guest."
                .to_owned(),
        );
    }
    if plan.overlap {
        notes.push(
            "All vCPUs touch all of memory: a page counts once, whoever brought it in.".to_owned(),
        );
    }
    let unknown =
        |series: &Series| series.delivery == Delivery::Uffd && !plan.every_touch_faults(*series);
    if plan.series().iter().any(unknown) {
        notes.push(
            "uffd: no latencies, since where one fault may serve several touches nobody outside \
             the guest knows which ones waited."
                .to_owned(),
        );
    }
    if plan.pre_fault {
        notes.push(
            "exit: after each install the vCPU's thread fills the second-stage tables for it \
             (--pre-fault), so that the pages around a fault cost none of their own."
                .to_owned(),
        );
    }
    if plan.populate {
        notes.push(
            "populated: after each install of more than one page the vCPU's thread has what is present \
             there mapped in the second-stage tables (KVM_POPULATE_MEMORY, PRESENT_ONLY) before it \
             enters the guest again."
                .to_owned(),
        );
    }
    if plan.pin {
        notes.push("Each vCPU's thread is pinned to a host CPU, in turn (--pin).".to_owned());
    }
    let readers = plan.readers.map_or_else(
        || "as many reader threads as vCPUs (as in the published experiment)".to_owned(),
        |readers| {
            format!(
                "{readers} reader thread{}",
                if readers == 1 { "" } else { "s" }
            )
        },
    );
    notes.push(format!(
        "uffd: {} with {readers}.",
        match plan.uffds {
            super::plan::Uffds::Single => "one userfaultfd for all of memory",
            super::plan::Uffds::PerVcpu => "one userfaultfd per vCPU",
        },
    ));
    if let (Some(_), Some(here)) = (&report.published, plan.readers)
        && plan.vcpus.iter().any(|&vcpus| vcpus != here)
    {
        notes.push(format!(
            "published: as many readers as vCPUs; here {here} for any number of vCPUs."
        ));
    }
    let busiest = plan.most_vcpus();
    if busiest > report.origin.facts.host_cpus {
        notes.push(format!(
            "Up to {busiest} vCPUs share {} host CPUs, and reader threads share them as well: \
             totals cannot grow beyond what these do, and the longest latencies are waits for a \
             CPU.",
            report.origin.facts.host_cpus
        ));
    }
    notes.extend(doubts(&report.origin, plan.runs));
    if plan.total_bytes(1) < 16 << 20 && report.origin.timing != Timing::Function {
        notes.push(format!(
            "{} per vCPU is little; 16M or more lets start-up effects vanish.",
            ByteSize(plan.per_vcpu.0)
        ));
    }
    notes
}
