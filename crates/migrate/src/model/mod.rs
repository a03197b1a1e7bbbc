//! The model: these machines, in an environment that loses, crashes, repeats and confuses. stateright visits every state
//! within the bounds; docs/design/migration-protocol.md says what the environment does and what must hold.

mod acts;
mod apply;
mod cells;
mod diagram;
mod drive;
mod executions;
mod graph;
mod tests;
mod walks;
mod world;

use stateright::{Model, Property};

use crate::guard::Guards;
use acts::Act;
pub(crate) use drive::{map_parts, offer};
use world::World;

/// The bounds of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) pages: u64,
    pub(crate) streams: u16,
    /// The rounds of precopy while the VM runs.
    pub(crate) rounds: u8,
    /// The pages that the guest writes: the first ones.
    pub(crate) written_pages: u64,
    /// The guest's writes, at either side.
    pub(crate) writes: u8,
    /// Disturbances of any kind.
    pub(crate) disturbances: u8,
    pub(crate) guards: Guards,
    /// Whether a state has the cell of the failure table in which its first disturbance fell.
    pub(crate) has_cells: bool,
}

impl Bounds {
    /// One of each: for what has nothing to do with pages.
    pub(crate) fn one(writes: u8, disturbances: u8) -> Self {
        Self {
            pages: 1,
            streams: 1,
            rounds: 1,
            ..Self::two(writes, disturbances)
        }
    }

    /// Two pages, two rounds, two streams.
    pub(crate) fn two(writes: u8, disturbances: u8) -> Self {
        Self {
            pages: 2,
            streams: 2,
            rounds: 2,
            written_pages: 1,
            writes,
            disturbances,
            guards: Guards::default(),
            has_cells: false,
        }
    }
}

/// Whether a property holds in a state.
type Holds = fn(&Bounds, &World) -> bool;

impl Model for Bounds {
    type State = World;
    type Action = Act;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self)]
    }

    fn actions(&self, state: &World, actions: &mut Vec<Act>) {
        state.acts(self, actions);
    }

    fn next_state(&self, last: &World, act: Act) -> Option<World> {
        let mut next = last.clone();
        let column = last.column();
        next.apply(self, &act);
        if self.has_cells && next.cell.is_none() {
            next.cell = cells::row(&act).map(|row| (row, column));
        }
        if next == *last {
            return None;
        }
        next.disturbances_left -= u8::from(act.is_disturbance());
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let always: [(&'static str, Holds); 6] = [
            (
                "a side forgets when the other needs it no more",
                |_, world| !world.is_forgotten_too_early(),
            ),
            ("somebody owns the VM at the end", |_, world| {
                !world.is_nobodys()
            }),
            ("at most one owner", |_, world| !world.has_two_owners()),
            ("no page or state of the owner is stale", |_, world| {
                !world.is_stale()
            }),
            ("no page of the owner is lost", |_, world| {
                !world.is_page_lost()
            }),
            ("undecided only after the yield", |_, world| {
                !world.is_undecided_before_yield()
            }),
        ];
        let mut all = always
            .map(|(name, holds)| Property::always(name, holds))
            .to_vec();
        // Without a guard, the sides contradict each other before anything is lost.
        if self.guards == Guards::default() {
            let name = "no message of an honest side is refused";
            all.push(Property::always(name, |_, world: &World| {
                !world.has_refused
            }));
            let name = "every journal can be read";
            all.push(Property::always(name, |_, world: &World| {
                !world.has_wrong_journal
            }));
        }
        all
    }
}
