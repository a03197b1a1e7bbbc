//! Random executions of models that are too large to be visited: they come to the end, where a visit of the nearest states
//! does not.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use stateright::Model;

use super::Bounds;
use super::diagram::diagram;

/// The longest execution.
const MOST_STEPS: u64 = 400;

/// A number that looks random, the same in each run.
fn scramble(walk: u64, step: u64) -> u64 {
    let mut hasher = DefaultHasher::new();
    (walk, step).hash(&mut hasher);
    hasher.finish()
}

/// One execution. Every property holds in each of its states. Returns its steps, and whether it came to the end.
fn walk(bounds: &Bounds, number: u64) -> (u64, bool) {
    let properties = bounds.properties();
    let (mut acts, mut done) = (Vec::new(), Vec::new());
    let mut world = bounds.init_states().remove(0);
    for step in 0..MOST_STEPS {
        if world.is_settled() {
            return (step, true);
        }
        acts.clear();
        bounds.actions(&world, &mut acts);
        // Most steps happen by themselves, so that disturbances fall into every phase.
        let is_fair = !scramble(number, step).is_multiple_of(8);
        let some: Vec<_> = acts.iter().filter(|act| act.is_fair() == is_fair).collect();
        let Some(count) = u64::try_from(some.len()).ok().filter(|count| *count > 0) else {
            continue;
        };
        let chosen = scramble(step, number) % count;
        let act = *some[usize::try_from(chosen).unwrap()];
        let Some(next) = bounds.next_state(&world, act) else {
            continue;
        };
        world = next;
        done.push(act);
        for property in &properties {
            let holds = (property.condition)(bounds, &world);
            assert!(
                holds,
                "walk {number}: not \"{}\":\n{}",
                property.name,
                diagram(bounds, &done)
            );
        }
    }
    (MOST_STEPS, false)
}

/// Three of everything, six writes and three disturbances. `PAGETIDE_WALKS` says how many executions.
#[test]
fn random_executions_of_three_pages_rounds_and_streams_go_right() {
    let walks = std::env::var("PAGETIDE_WALKS").ok();
    let walks = walks.map_or(1000, |walks| walks.parse().unwrap());
    let bounds = Bounds {
        pages: 3,
        streams: 3,
        rounds: 3,
        written_pages: 3,
        ..Bounds::two(6, 3)
    };
    let (mut steps, mut longest, mut ended) = (0, 0, 0);
    for number in 0..walks {
        let (taken, has_ended) = walk(&bounds, number);
        steps += taken;
        longest = longest.max(taken);
        ended += u64::from(has_ended);
    }
    println!("{walks} executions, {steps} steps, the longest {longest}; {ended} came to the end");
    assert!(ended > walks / 4, "{ended} of {walks} came to the end");
}
