//! What a reader must know to read the figures right.

use super::plan::{Guest, Method, Op};
use super::report::MemslotsReport;
use crate::rounds::notes::{doubts, lost};
use crate::timing::Timing;

/// The notes for a result.
pub(super) fn notes(report: &MemslotsReport) -> Vec<String> {
    let plan = &report.plan;
    let mut notes = vec![report.origin.timing.explanation().to_owned()];
    if report.origin.timing == Timing::Instructions {
        notes.push(
            "This emulator hands a single thread round its CPUs when an interrupt comes: so that a \
             CPU need not wait for milliseconds, interrupts come 61 to 83 thousand times a second. \
             That is the grain of kept with several CPUs; the rows without commits show it, and a \
             VM with one CPU has a finer one (docs/design/vcpu-stalls.md). An idle CPU would give its turn \
             away: where there are fewer vCPUs than CPUs, another VM's walk on the others."
                .to_owned(),
        );
    }
    notes.push(lost(&report.origin));
    notes.push(
        "After every run memory was compared with what it should hold, and so was every word that a \
         guest read; a difference, or a hole that list or quiesce let a guest see, would have ended \
         the benchmark."
            .to_owned(),
    );
    notes.push(if report.knows_stolen_time {
        "kept: time that a vCPU's thread waited for a processor is taken off (KVM's steal time)."
            .to_owned()
    } else {
        "kept: this KVM tells no steal time, so time that a vCPU's thread waited for a processor \
         counts as kept; with more vCPUs than processors that is most of it."
            .to_owned()
    });
    if plan
        .ops
        .iter()
        .any(|op| matches!(op, Op::Split | Op::Merge))
    {
        notes.push(
            "Each split is followed by a merge and each merge comes after a split, by the same \
             method: their time is not counted, and the work that they cost the guest is."
                .to_owned(),
        );
    }
    if plan.ops.contains(&Op::Flags) && plan.methods.contains(&Method::Plain) {
        notes.push(
            "Flags of one slot are one ioctl by any method: there is no hole to see.".to_owned(),
        );
    }
    if plan.guest == Guest::Spin {
        notes.push("The guest does not touch the memory whose slots change.".to_owned());
    }
    let busiest = plan.vcpus.iter().copied().max().unwrap_or(0);
    if busiest > report.origin.facts.host_cpus {
        notes.push(format!(
            "Up to {busiest} vCPUs share {} host CPUs: whoever stops them waits until each has had \
             its turn to leave, and a commit's time has the waits of the committing thread for its \
             own turn, also when vCPUs run already: kept does not.",
            report.origin.facts.host_cpus
        ));
    }
    notes.extend(doubts(&report.origin, plan.runs));
    notes
}
