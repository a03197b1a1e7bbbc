//! All states of a model with the steps between them, to be searched backwards: from which states can the end be reached?
//! stateright has no such property.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use ahash::RandomState;
use stateright::Model;

use super::Bounds;
use super::acts::Act;
use super::world::World;

/// The graph, without the states themselves.
pub(crate) struct Graph {
    /// By which act a state was found, and from which.
    parents: Vec<Option<(u32, Act)>>,
    /// Steps that happen by themselves.
    fair: Vec<(u32, u32)>,
    is_settled: Vec<bool>,
    /// From here the end must be reachable.
    must_end: Vec<bool>,
}

/// Visits every state, nearest first.
pub(crate) fn explore(bounds: &Bounds, mut visit: impl FnMut(&World)) -> Graph {
    let mut graph = Graph {
        parents: vec![],
        fair: vec![],
        is_settled: vec![],
        must_end: vec![],
    };
    // They have 64 bits, as stateright's have. The standard library's hasher would take most of the time.
    let fingerprints = RandomState::with_seeds(1, 2, 3, 4);
    let mut numbers = HashMap::with_hasher(fingerprints.clone());
    let mut queue = VecDeque::new();
    let mut enter =
        |graph: &mut Graph, world: World, parent, queue: &mut VecDeque<(u32, World)>| match numbers
            .entry(fingerprints.hash_one(&world))
        {
            Entry::Occupied(entry) => *entry.get(),
            Entry::Vacant(entry) => {
                let number = u32::try_from(graph.parents.len()).unwrap();
                graph.parents.push(parent);
                graph.is_settled.push(world.is_settled());
                graph.must_end.push(world.is_alive());
                visit(&world);
                queue.push_back((number, world));
                *entry.insert(number)
            }
        };
    for world in bounds.init_states() {
        enter(&mut graph, world, None, &mut queue);
    }
    let mut acts = Vec::new();
    while let Some((number, world)) = queue.pop_front() {
        bounds.actions(&world, &mut acts);
        for act in acts.drain(..) {
            let Some(next) = bounds.next_state(&world, act) else {
                continue;
            };
            let next = enter(&mut graph, next, Some((number, act)), &mut queue);
            if act.is_fair() || world.is_for_operator(&act) {
                graph.fair.push((number, next));
            }
        }
    }
    graph
}

impl Graph {
    pub(crate) fn states(&self) -> usize {
        self.parents.len()
    }

    /// The acts that lead to the first state from which the end cannot be reached.
    pub(crate) fn stuck(&self) -> Option<Vec<Act>> {
        let mut back: Vec<Vec<u32>> = vec![Vec::new(); self.states()];
        for (from, to) in &self.fair {
            back[*to as usize].push(*from);
        }
        let mut leads_to_end = self.is_settled.clone();
        let ends = (0..)
            .zip(&self.is_settled)
            .filter(|(_, is_settled)| **is_settled);
        let mut open: Vec<u32> = ends.map(|(number, _)| number).collect();
        while let Some(number) = open.pop() {
            for from in &back[number as usize] {
                if !std::mem::replace(&mut leads_to_end[*from as usize], true) {
                    open.push(*from);
                }
            }
        }
        let stuck = (0..self.states()).find(|n| self.must_end[*n] && !leads_to_end[*n])?;
        let mut acts = Vec::new();
        let mut at = stuck;
        while let Some((parent, act)) = self.parents[at] {
            acts.push(act);
            at = parent as usize;
        }
        acts.reverse();
        Some(acts)
    }
}
