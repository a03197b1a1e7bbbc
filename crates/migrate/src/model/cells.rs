//! The contract's table of failures: which event falls into which phase, and what may become of the VM.

use std::collections::{BTreeMap, BTreeSet};

use super::acts::Act;
use super::world::{Fate, LinkState, World};
use super::{Bounds, graph};
use crate::event::{Outcome, Phase};
use crate::journal::{RecordKind, Side};
use crate::source::Step;

/// A row: what happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Row {
    Connection,
    SourceDies,
    DestinationDies,
    JournalFails,
    Cancel,
    Limit,
}

/// A column: when it happens, by the source's step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Column {
    Precopy,
    Paused,
    Yielded,
    Postcopy,
}

pub(crate) type Cell = (Row, Column);

pub(crate) fn row(act: &Act) -> Option<Row> {
    Some(match act {
        Act::Cut(..) => Row::Connection,
        Act::Crash(Side::Source) => Row::SourceDies,
        Act::Crash(Side::Destination) => Row::DestinationDies,
        Act::SyncFails(_) => Row::JournalFails,
        Act::Cancel => Row::Cancel,
        Act::BlackoutLimit => Row::Limit,
        _ => return None,
    })
}

impl World {
    pub(crate) fn column(&self) -> Column {
        match self.source.step() {
            Step::Connecting
            | Step::Opening
            | Step::Precopy
            | Step::Deciding
            | Step::Harvesting
            | Step::Pausing(_) => Column::Precopy,
            // The record that fails is *yielded*.
            Step::Yielding if self.source_journal.pending == Some(RecordKind::Yielded) => {
                Column::Yielded
            }
            Step::Yielded => Column::Yielded,
            Step::Postcopy | Step::Lost | Step::Ended(Outcome::Complete | Outcome::Lost) => {
                Column::Postcopy
            }
            _ => Column::Paused,
        }
    }

    /// What became of the VM, as the table has it.
    fn became(&self) -> Option<Became> {
        let has_ended = matches!(self.source.step(), Step::Ended(_));
        let missing = self.destination.missing();
        let has_source = matches!(self.source_fate, Fate::Alive | Fate::Forgotten);
        Some(if self.is_complete() && self.destination_runs {
            Became::Complete
        } else if self.poisoned != 0 {
            Became::Abandoned
        } else if self.source_runs && has_ended && has_source {
            Became::RunsAtSource
        } else if self.is_released {
            Became::LostByWord
        } else if self.source_fate == Fate::Alive
            && self.source.phase() == Phase::Lost
            && !self.is_freed
        {
            Became::LostAndKept
        } else if !has_source && !self.destination_runs && self.destination.token().is_some() {
            Became::Refused
        } else if self.source_fate == Fate::Alive && self.source.phase() == Phase::Undecided {
            Became::Undecided
        } else if self.destination_runs
            && !missing.is_empty()
            && self.links[0].state == LinkState::Down
        {
            Became::Waits
        } else if self.source.phase() == Phase::Complete && self.destination.phase() == Phase::Lost
        {
            Became::DiedLater
        } else {
            return None;
        })
    }
}

/// What became of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Became {
    /// It runs at the destination, with all pages.
    Complete,
    /// It runs at the source, and the migration has ended.
    RunsAtSource,
    /// Nobody runs it, until a token comes.
    Undecided,
    /// It runs at the destination, and missing pages wait.
    Waits,
    /// It runs at the destination, without the pages that were missing.
    Abandoned,
    /// It is lost with its source; the destination has refused.
    Refused,
    /// It is lost with its destination; the source keeps its memory.
    LostAndKept,
    /// The operator released the source's memory while the VM needed it.
    LostByWord,
    /// It had moved with all its pages, and died later, as in any crash.
    DiedLater,
}

/// Each cell with what is possible there. Nothing else is. Three cells are no part of the model: a journal that cannot be
/// opened, a host that lacks something (both in `hostile_tests`), and a deadline in precopy (`convergence`).
const TABLE: &[(Cell, &[Became])] = {
    use Became::{
        Abandoned, Complete, DiedLater, LostAndKept, Refused, RunsAtSource, Undecided, Waits,
    };
    &[
        (
            (Row::Connection, Column::Precopy),
            &[Complete, RunsAtSource],
        ),
        ((Row::Connection, Column::Paused), &[Complete, RunsAtSource]),
        (
            (Row::Connection, Column::Yielded),
            &[Complete, RunsAtSource, Undecided],
        ),
        ((Row::Connection, Column::Postcopy), &[Complete, Waits]),
        ((Row::SourceDies, Column::Precopy), &[Refused]),
        (
            (Row::SourceDies, Column::Paused),
            &[RunsAtSource, Waits, Abandoned, Refused],
        ),
        (
            (Row::SourceDies, Column::Yielded),
            &[Complete, RunsAtSource, Undecided, Waits, Abandoned, Refused],
        ),
        (
            (Row::SourceDies, Column::Postcopy),
            // Undecided: its *entered* was not synced yet, so it repeats *c*.
            &[Complete, Undecided, Waits, Abandoned],
        ),
        ((Row::DestinationDies, Column::Precopy), &[RunsAtSource]),
        ((Row::DestinationDies, Column::Paused), &[RunsAtSource]),
        (
            (Row::DestinationDies, Column::Yielded),
            &[RunsAtSource, Undecided, LostAndKept],
        ),
        (
            (Row::DestinationDies, Column::Postcopy),
            &[LostAndKept, DiedLater],
        ),
        ((Row::JournalFails, Column::Paused), &[RunsAtSource]),
        ((Row::JournalFails, Column::Yielded), &[Complete]),
        // The source's *entered*, for which nothing waits.
        ((Row::JournalFails, Column::Postcopy), &[Complete]),
        ((Row::Cancel, Column::Precopy), &[RunsAtSource]),
        ((Row::Cancel, Column::Paused), &[RunsAtSource]),
        ((Row::Cancel, Column::Yielded), &[Complete]),
        ((Row::Cancel, Column::Postcopy), &[Complete]),
        ((Row::Limit, Column::Paused), &[RunsAtSource]),
        ((Row::Limit, Column::Yielded), &[Complete]),
        ((Row::Limit, Column::Postcopy), &[Complete]),
    ]
};

#[test]
fn every_cell_of_the_failure_table_is_reached() {
    let bounds = Bounds {
        has_cells: true,
        ..Bounds::two(1, 1)
    };
    let mut found: BTreeMap<Cell, BTreeSet<Became>> = BTreeMap::new();
    graph::explore(&bounds, |world| {
        let became = world.became();
        assert!(
            became.is_some() || !world.is_settled(),
            "what became of the VM? {world:?}"
        );
        if let (Some(cell), Some(became)) = (world.cell, became) {
            found.entry(cell).or_default().insert(became);
        }
    });
    for (cell, possible) in &found {
        println!("{cell:?}: {possible:?}");
    }
    let table: BTreeMap<_, BTreeSet<_>> = TABLE
        .iter()
        .map(|(cell, possible)| (*cell, possible.iter().copied().collect()))
        .collect();
    assert_eq!(found, table);
}
