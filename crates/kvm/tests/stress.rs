//! vCPUs that walk their memory while its slots change. By list and by quiescing they observe nothing;
//! delete-create exposes the hole, which shows that this test can fail.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod guest;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use guest::{
    DATA_PAGES, DATA_SLOT, LIMIT, LOW_SLOT, Limited, Machine, PAGE, Word, is_round, is_wrong,
    whole_methods,
};
use pagetide_kvm::{Exit, Method, SlotFlags, SlotTransaction, Vcpu};

const VCPUS: u32 = 2;

/// The number of changes: a few hundred, or PAGETIDE_COMMITS for a long run.
fn commits() -> u64 {
    match std::env::var("PAGETIDE_COMMITS") {
        Ok(text) => text.parse().expect("PAGETIDE_COMMITS is a number"),
        Err(_) => 200,
    }
}

/// Anomalies that a vCPU observed.
#[derive(Debug, Default)]
struct Anomalies {
    /// Memory accesses that became MMIO, and pages with a wrong number (which follow from them).
    holes: u64,
    /// Unexpected exits.
    others: Vec<String>,
}

fn walk(machine: &Machine, mut vcpu: Vcpu, over: &AtomicBool, reported: bool) -> Anomalies {
    let mut found = Anomalies::default();
    let mut reports = 0;
    let id = vcpu.id();
    let mut here = vcpu.bind().expect("signals work");
    loop {
        match here.run() {
            Ok(exit) if is_round(&exit) => {
                reports += 1;
                if over.load(Ordering::SeqCst) {
                    break;
                }
            }
            Ok(exit) if is_wrong(&exit) || matches!(exit, Exit::Mmio { .. }) => found.holes += 1,
            other => {
                found.others.push(format!("{other:?}"));
                // A guest that has lost its code cannot continue.
                if found.others.len() > 10 {
                    break;
                }
            }
        }
    }
    let rounds = machine.get(id, Word::Rounds);
    if reported && found.others.is_empty() && reports != rounds {
        let text = format!("{reports} reports of {rounds} rounds: one was lost or doubled");
        found.others.push(text);
    }
    found
}

/// Change `number`; each leads to a layout from which the next can start.
fn change(transaction: &mut SlotTransaction<'_>, machine: &Machine, number: u64, low_too: bool) {
    let layout = machine.vm.layout();
    let data: Vec<_> = layout
        .iter()
        .filter(|(_, slot)| Arc::ptr_eq(&slot.region, &machine.data))
        .map(|(number, slot)| (slot.range.start(), *number))
        .collect();
    let low: Vec<_> = layout
        .iter()
        .filter(|(_, slot)| Arc::ptr_eq(&slot.region, &machine.low))
        .map(|(number, _)| *number)
        .collect();
    let flags = SlotFlags {
        log_dirty: number % 4 < 2,
        ..SlotFlags::default()
    };
    match data.as_slice() {
        [(_, whole)] => {
            let at = (1 + number % (DATA_PAGES - 1)) * PAGE;
            let [one, other] = transaction.split(*whole, at);
            if number.is_multiple_of(3) {
                transaction.set_flags(one, flags);
                transaction.set_flags(other, flags);
            }
        }
        [(_, one), (_, other)] => {
            transaction.merge(*one, *other);
        }
        parts => panic!("{} parts", parts.len()),
    }
    if low_too {
        match low.as_slice() {
            [whole] => {
                transaction.split(*whole, 2 * PAGE);
            }
            [one, other] => {
                transaction.merge(*one, *other);
            }
            parts => panic!("{} parts", parts.len()),
        }
    }
}

/// The longest stop of vCPUs, with its change and its cause.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Stop {
    quiesced: Duration,
    waited: Duration,
    updating: Duration,
    number: u64,
}

/// Changes the layout under walking vCPUs; returns their anomalies, and the longest time that they were
/// stopped. `reported` makes the guest report each round, so that vCPUs are also stopped in the middle
/// of an OUT.
fn run(method: Method, commits: u64, reported: bool) -> Option<(Vec<Anomalies>, Stop)> {
    let machine = Machine::new()?;
    assert_eq!((LOW_SLOT, DATA_SLOT), (0, 1));
    let over = Arc::new(AtomicBool::new(false));
    let vcpus: Vec<_> = (0..VCPUS)
        .map(|id| {
            let vcpu = machine.vcpu(id, 0, DATA_PAGES);
            machine.set(id, Word::Report, u64::from(reported));
            let (machine, over) = (Arc::clone(&machine), Arc::clone(&over));
            Limited::spawn("a vCPU", move || walk(&machine, vcpu, &over, reported))
        })
        .collect();
    let committing = Arc::clone(&machine);
    let longest = Limited::spawn("committing", move || {
        let start = Instant::now();
        // All vCPUs walk before the first change.
        for id in 0..VCPUS {
            while committing.get(id, Word::Rounds) == 0 {
                assert!(start.elapsed() < LIMIT, "vCPU {id} does not walk");
                std::thread::yield_now();
            }
        }
        let mut longest = Stop::default();
        for number in 0..commits {
            let mut transaction = committing.vm.transaction();
            change(
                &mut transaction,
                &committing,
                number,
                method != Method::DeleteCreate,
            );
            let done = transaction
                .commit_with(method)
                .unwrap_or_else(|error| panic!("{method:?}, commit {number}: {error}"));
            longest = longest.max(Stop {
                quiesced: done.quiesced,
                waited: done.waited,
                updating: done.updating,
                number,
            });
            assert!(done.quiesced >= done.waited + done.updating || method != Method::Quiesce);
        }
        longest
    })
    .join_within(LIMIT + Duration::from_millis(100 * commits));
    over.store(true, Ordering::SeqCst);
    if !reported {
        for id in 0..VCPUS {
            machine.set(id, Word::Report, 1);
        }
    }
    Some((vcpus.into_iter().map(Limited::join).collect(), longest))
}

#[test]
fn atomic_changes_are_invisible() {
    let Some(machine) = Machine::new() else {
        return;
    };
    for method in whole_methods(&machine.vm) {
        for reported in [false, true] {
            let Some((found, longest)) = run(method, commits(), reported) else {
                return;
            };
            println!(
                "{method:?}: {} commits, longest stop {longest:?}",
                commits()
            );
            for (vcpu, found) in found.iter().enumerate() {
                let clean = found.holes == 0 && found.others.is_empty();
                assert!(clean, "{method:?}, vCPU {vcpu}: {found:?}");
            }
        }
    }
}

#[test]
fn the_hole_of_delete_create_is_visible() {
    // Where vCPUs and the committer share a processor, this takes many attempts.
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        let Some((found, _)) = run(Method::DeleteCreate, commits() / 4, false) else {
            return;
        };
        let holes: u64 = found.iter().map(|found| found.holes).sum();
        if holes > 0 {
            println!(
                "{holes} accesses fell into a hole in {} changes",
                commits() / 4
            );
            return;
        }
    }
    panic!("no vCPU saw a hole");
}
