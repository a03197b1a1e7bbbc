//! The cut sweep: two machines carry a small VM over an in-memory transport, which is cut after every frame and within it,
//! on each stream and with a death of each side. At the end the right side runs the VM, and every page is right.

mod destination;
mod guest;
mod lab;
mod source;
mod wire;

use std::time::Instant;

use crate::convergence::Decision;
use crate::guard::{Guard, Guards};
use crate::journal::Side;
use lab::{Ending, Lab};

/// What is cut at a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    /// The stream of the frame.
    Stream,
    /// The stream of the frame; the destination reads what was on the way only after the seal.
    StreamLate,
    /// All streams.
    All,
    /// All streams, by a process's death.
    Death(Side),
}

/// Where and how one run is disturbed.
#[derive(Clone, Copy, Debug)]
struct Plan {
    decision: Decision,
    /// The number of the frame, over all streams and directions; none: undisturbed.
    frame: Option<usize>,
    /// So many bytes of the frame still arrive.
    bytes: usize,
    cut: Cut,
    guards: Guards,
}

const UNDISTURBED: Plan = Plan {
    decision: Decision::Postcopy,
    frame: None,
    bytes: usize::MAX,
    cut: Cut::Stream,
    guards: Guards { off: None },
};

/// A number that looks random, the same in each run.
fn scramble(number: usize) -> usize {
    let mixed = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    usize::try_from(mixed >> 40).unwrap()
}

/// All plans for the frames of an undisturbed run.
fn plans(decision: Decision) -> impl Iterator<Item = Plan> {
    let undisturbed = Plan {
        decision,
        ..UNDISTURBED
    };
    let mut lab = Lab::new(undisturbed);
    assert_eq!(lab.run(), Ok(Ending::AtDestination));
    let cuts = [
        Cut::Stream,
        Cut::StreamLate,
        Cut::All,
        Cut::Death(Side::Source),
        Cut::Death(Side::Destination),
    ];
    let lengths = lab.frame_bytes;
    println!("{} frames", lengths.len());
    lengths
        .into_iter()
        .enumerate()
        .flat_map(move |(frame, length)| {
            let within = [length, scramble(frame) % length.max(1)];
            within.into_iter().flat_map(move |bytes| {
                cuts.into_iter().map(move |cut| Plan {
                    frame: Some(frame),
                    bytes,
                    cut,
                    ..undisturbed
                })
            })
        })
}

#[test]
fn undisturbed_every_page_arrives() {
    for decision in [Decision::Postcopy, Decision::StopAndCopy] {
        let mut lab = Lab::new(Plan {
            decision,
            ..UNDISTURBED
        });
        assert_eq!(lab.run(), Ok(Ending::AtDestination), "{decision:?}");
    }
}

#[test]
fn a_cut_at_every_frame_loses_neither_vm_nor_page() {
    let started = Instant::now();
    let mut count = 0;
    let mut endings = [0; 4];
    for decision in [Decision::Postcopy, Decision::StopAndCopy] {
        for plan in plans(decision) {
            let mut lab = Lab::new(plan);
            let ending = lab.run().unwrap_or_else(|why| panic!("{plan:?}: {why}"));
            endings[ending.number()] += 1;
            count += 1;
        }
    }
    let [source, destination, lost, never] = endings;
    println!(
        "{count} cuts in {:.1} s: the VM ended {source} times at the source, {destination} at the destination, {lost} were \
         lost with the destination, {never} with the source",
        started.elapsed().as_secs_f64()
    );
    assert!(count > 1000 && endings.iter().all(|ending| *ending > 0));
}

/// Whether a cut shows that a machine is wrong.
fn is_caught(guard: Guard) -> bool {
    let plans = [Decision::Postcopy, Decision::StopAndCopy]
        .into_iter()
        .flat_map(plans);
    let wrong = plans.map(|plan| Plan {
        guards: Guards::without(guard),
        ..plan
    });
    let mut runs = wrong.map(|plan| Lab::new(plan).run());
    runs.any(|ending| ending.is_err())
}

#[test]
fn a_destination_that_acknowledges_before_it_stores_is_caught() {
    assert!(is_caught(Guard::StoredFirst));
}

#[test]
fn sides_without_an_end_of_precopy_are_caught() {
    assert!(is_caught(Guard::PrecopyEnds));
    assert!(is_caught(Guard::EndMarksAcknowledged));
}
