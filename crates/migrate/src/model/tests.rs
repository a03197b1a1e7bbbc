use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model};

use super::acts::Act;
use super::diagram::diagram;
use super::{Bounds, graph};
use crate::guard::{Guard, Guards};

/// What makes a guard's absence visible: the guest's writes and the disturbances. The fewest that do.
fn bounds_without(guard: Guard) -> Bounds {
    let (writes, disturbances) = match guard {
        Guard::LastHarvest
        | Guard::NewestRoundWins
        | Guard::OneStoreAtATime
        | Guard::MissingPunched => (1, 0),
        Guard::InstalledOnce => (2, 0),
        Guard::KeptUntilComplete | Guard::NothingMissing => (1, 0),
        Guard::Unacknowledged
        | Guard::OncePerRound
        | Guard::EndMarksAcknowledged
        | Guard::StoredFirst => (0, 1),
        Guard::SameMap | Guard::DamagedDropped => (1, 1),
        Guard::SameState => (0, 1),
        Guard::YieldSynced
        | Guard::RefusalNeeded
        | Guard::RefusalVerified
        | Guard::CommitNeeded => (0, 1),
        Guard::RefusedForGood | Guard::NoRefusalAfterCommit | Guard::NoFenceAfterEntered => (0, 1),
        Guard::RestartRefuses | Guard::MapDecides => (0, 1),
        Guard::FreedFirst | Guard::RefusalKept | Guard::ResumedMap => (0, 1),
        Guard::KeptUntilHeard => (0, 0),
        Guard::PrecopyEnds | Guard::EnteredSynced => (1, 1),
        Guard::CommitVerified | Guard::FailedYieldHidden | Guard::PagesConfirmed => (0, 2),
        Guard::RunningAgainSynced | Guard::FailedEnteredHidden => (1, 2),
        Guard::FailedYieldBinds | Guard::HolderEnded => (1, 3),
    };
    let streams = match guard {
        Guard::NewestRoundWins
        | Guard::OneStoreAtATime
        | Guard::PrecopyEnds
        | Guard::EndMarksAcknowledged => 2,
        _ => 1,
    };
    let guards = Guards::without(guard);
    if matches!(guard, Guard::FailedYieldBinds | Guard::HolderEnded) {
        return Bounds {
            guards,
            ..Bounds::one(writes, disturbances)
        };
    }
    Bounds {
        streams,
        guards,
        ..Bounds::two(writes, disturbances)
    }
}

/// What goes wrong in a model, and how.
fn failure(bounds: Bounds) -> Option<(String, Vec<Act>)> {
    let checker = bounds
        .checker()
        .threads(2)
        .finish_when(HasDiscoveries::AnyFailures);
    let checker = checker.spawn_bfs().join();
    let found = checker.discoveries().into_iter().next();
    if let Some((name, path)) = found {
        return Some((name.to_owned(), path.into_actions()));
    }
    let acts = graph::explore(&bounds, |_| {}).stuck()?;
    Some(("the end can be reached from every state".to_owned(), acts))
}

/// What `make test` visits: pages, rounds and streams with one disturbance, the hand-over alone with two, two writes without
/// any, and one stream, whose rounds may be ended by a switch.
const MODELS: [fn() -> Bounds; 4] = [
    || Bounds::two(1, 1),
    || Bounds::one(1, 2),
    || Bounds::two(2, 0),
    || Bounds {
        streams: 1,
        ..Bounds::two(1, 1)
    },
];

#[test]
fn every_property_holds() {
    for bounds in MODELS {
        check(bounds(), None);
    }
}

/// Visits every state; with `limit`, until so many steps were taken.
fn check(bounds: Bounds, limit: Option<usize>) {
    let started = Instant::now();
    let builder = bounds.checker().threads(2);
    let builder = match limit {
        Some(limit) => builder.target_state_count(limit),
        None => builder,
    };
    let checker = builder.spawn_bfs().join();
    let steps = checker.state_count();
    let (states, depth) = (checker.unique_state_count(), checker.max_depth());
    println!(
        "{states} states, {steps} steps, depth {depth}, {:.1} s",
        started.elapsed().as_secs_f64()
    );
    if let Some((name, path)) = checker.discoveries().into_iter().next() {
        let acts = path.into_actions();
        panic!("{name}:\n{}", diagram(checker.model(), &acts));
    }
}

#[test]
fn the_end_can_be_reached_from_every_state() {
    for bounds in MODELS {
        let (started, bounds) = (Instant::now(), bounds());
        let mut complete = 0;
        let graph = graph::explore(&bounds, |world| {
            complete += usize::from(world.is_complete());
        });
        println!(
            "{} states, {:.1} s",
            graph.states(),
            started.elapsed().as_secs_f64()
        );
        assert!(complete > 0);
        if let Some(acts) = graph.stuck() {
            panic!("no way on from here:\n{}", diagram(&bounds, &acts));
        }
    }
}

#[test]
fn the_model_finds_the_absence_of_every_guard() {
    for guard in Guard::ALL {
        let started = Instant::now();
        let bounds = bounds_without(*guard);
        let Some((property, acts)) = failure(bounds) else {
            panic!(
                "nothing goes wrong without guard {}, {guard:?}",
                *guard as u8
            );
        };
        let seconds = started.elapsed().as_secs_f64();
        println!(
            "without guard {}, {guard:?}: not \"{property}\" ({seconds:.1} s)",
            *guard as u8
        );
        println!("{}", diagram(&bounds, &acts));
    }
}

/// The guards of the document are those of the code, by number.
#[test]
fn the_document_lists_every_guard() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/design/migration-protocol.md"
    );
    let text = std::fs::read_to_string(path).unwrap();
    let (_, section) = text.split_once("\n## Guards\n").unwrap();
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| ")?.split(" | ");
        let number: u8 = cells.next()?.parse().ok()?;
        Some((number, cells.next()?.to_owned()))
    });
    let code = Guard::ALL
        .iter()
        .map(|guard| (*guard as u8, format!("`{guard:?}`")));
    assert_eq!(rows.collect::<Vec<_>>(), code.collect::<Vec<_>>());
}

/// The largest models in which the absence of a guard is found: with all guards, nothing goes wrong there. By hand, since
/// they take twenty seconds.
#[test]
#[ignore = "twenty seconds: cargo test -p pagetide-migrate mutants -- --ignored --nocapture"]
fn every_property_holds_where_mutants_are_found() {
    let one_stream = Bounds {
        streams: 1,
        ..Bounds::two(1, 2)
    };
    for bounds in [one_stream, Bounds::one(1, 3)] {
        check(bounds, None);
    }
}

/// How many steps of a large model are taken.
fn steps() -> usize {
    let steps = std::env::var("PAGETIDE_STATES").ok();
    steps.map_or(20_000_000, |steps| steps.parse().unwrap())
}

/// Visits a large model nearest first, as far as [`steps`] says, and prints the most memory that the process had.
fn check_large(bounds: Bounds) {
    check(bounds, Some(steps()));
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let memory = status.lines().find(|line| line.starts_with("VmHWM"));
    println!("{}", memory.unwrap_or_default());
}

/// By hand: a quarter of an hour or more, and gigabytes.
#[test]
#[ignore = "many minutes and gigabytes: cargo test -p pagetide-migrate three_of_each -- --ignored --nocapture"]
fn every_property_holds_with_three_of_each() {
    check_large(Bounds {
        pages: 3,
        streams: 3,
        rounds: 3,
        written_pages: 3,
        ..Bounds::two(1, 1)
    });
}

/// The same.
#[test]
#[ignore = "many minutes and gigabytes: cargo test -p pagetide-migrate large -- --ignored --nocapture"]
fn every_property_holds_in_large_models() {
    for bounds in [Bounds::one(2, 3), Bounds::two(1, 2)] {
        check_large(bounds);
    }
}
