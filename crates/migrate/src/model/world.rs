//! A state of the model: two machines, the guest's memory on both sides, streams, journals.

use std::collections::VecDeque;

use super::Bounds;
use super::cells::Cell;
use crate::destination::{Destination, Step as DestinationStep};
use crate::event::{Outcome, Owner, Phase};
use crate::ids::{Secret, Token};
use crate::journal::RecordKind;
use crate::message::{Message, PageRecord};
use crate::source::{Source, Step as SourceStep};

/// The version of a page's content, or of the vCPUs' state: how often it was written.
pub(crate) type Version = u8;

/// What travels to the destination.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Packet {
    Message(Message),
    State(Version),
    Pages {
        record: PageRecord,
        versions: Vec<Version>,
        is_intact: bool,
    },
}

/// How a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LinkState {
    Up,
    /// The source has lost it; the destination still reads what was on the way.
    Half,
    Down,
}

/// One stream.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Link {
    pub(crate) state: LinkState,
    pub(crate) to_destination: VecDeque<Packet>,
    pub(crate) to_source: VecDeque<Message>,
    /// The pages that are being stored, with their content.
    pub(crate) storing: Vec<(u64, Version)>,
    pub(crate) store: Store,
}

/// How far a store is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) enum Store {
    /// There is none, or it is one of precopy. Nothing reads the memory then; so that it is reported is one step with it.
    #[default]
    Precopy,
    /// One of postcopy is under way: the VM, or the loading of state, waits for it.
    Postcopy,
    /// The page is there, and the machine has not been told.
    Unreported,
}

/// A journal and its disk.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct Journal {
    pub(crate) synced: Vec<RecordKind>,
    /// What the next slot may have on the disk: records that failed, or were being synced in a crash.
    pub(crate) maybe: Vec<RecordKind>,
    /// The record that is being synced.
    pub(crate) pending: Option<RecordKind>,
}

/// The process that keeps the VM's memory while the source's is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Holder {
    Lives,
    /// The source wants it to end.
    Ending,
    Ended,
}

/// What has become of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Fate {
    Alive,
    /// It can be started again, by its journal.
    Dead,
    /// Its journal and its host are gone.
    Gone,
    /// It has forgotten the migration.
    Forgotten,
}

/// A state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) source: Source,
    pub(crate) source_fate: Fate,
    pub(crate) source_runs: bool,
    pub(crate) source_memory: Vec<Version>,
    pub(crate) source_state: Version,
    /// The state that was recorded with the seal.
    pub(crate) sealed_state: Version,
    /// Pages that were written since the last harvest, one bit each.
    pub(crate) log: u8,
    /// The source has freed the VM's memory.
    pub(crate) is_freed: bool,
    pub(crate) holder: Holder,
    pub(crate) source_journal: Journal,
    pub(crate) destination: Destination,
    pub(crate) destination_fate: Fate,
    pub(crate) destination_runs: bool,
    /// `None`: nothing is there, and an access faults.
    pub(crate) destination_memory: Vec<Option<Version>>,
    /// The state that has come, and the state that was loaded.
    pub(crate) received_state: Option<Version>,
    pub(crate) destination_state: Option<Version>,
    pub(crate) is_loading: bool,
    pub(crate) poisoned: u8,
    pub(crate) destination_journal: Journal,
    /// What the guest has written last, whoever ran it.
    pub(crate) truth: Vec<Version>,
    pub(crate) truth_state: Version,
    pub(crate) links: Vec<Link>,
    pub(crate) writes_left: u8,
    pub(crate) disturbances_left: u8,
    /// An operator's *fenced* was taken although the side knew that the VM had run at the other.
    pub(crate) is_fenced_wrongly: bool,
    /// The source waits no longer to hear that the destination has ended.
    pub(crate) has_given_up: bool,
    /// The source's operator has released memory that the destination may need.
    pub(crate) is_released: bool,
    /// A map was changed on its way.
    pub(crate) is_map_damaged: bool,
    /// A journal has a record that no reader takes there.
    pub(crate) has_wrong_journal: bool,
    /// A side refused a message.
    pub(crate) has_refused: bool,
    pub(crate) cell: Option<Cell>,
}

pub(crate) fn commit_token() -> Token {
    Token::new(Secret([0xc0; 32]))
}

pub(crate) fn refusal_token() -> Token {
    Token::new(Secret([0xf0; 32]))
}

/// A token of the migration before this one.
pub(crate) fn old_token() -> Token {
    Token::new(Secret([0x01; 32]))
}

impl World {
    /// Both sides have agreed, all streams are up, and the VM runs at the source.
    pub(crate) fn new(bounds: &Bounds) -> Self {
        let pages = usize::try_from(bounds.pages).unwrap();
        let link = Link {
            state: LinkState::Down,
            to_destination: VecDeque::new(),
            to_source: VecDeque::new(),
            storing: Vec::new(),
            store: Store::default(),
        };
        let (commit, refusal) = (commit_token(), refusal_token());
        let mut world = Self {
            source: Source::with_guards(commit, bounds.pages, bounds.streams, bounds.guards),
            source_fate: Fate::Alive,
            source_runs: true,
            source_memory: vec![1; pages],
            source_state: 1,
            sealed_state: 0,
            log: 0,
            is_freed: false,
            holder: Holder::Lives,
            source_journal: Journal::default(),
            destination: Destination::with_guards(
                refusal,
                bounds.pages,
                bounds.streams,
                bounds.guards,
            ),
            destination_fate: Fate::Alive,
            destination_runs: false,
            destination_memory: vec![None; pages],
            received_state: None,
            destination_state: None,
            is_loading: false,
            poisoned: 0,
            destination_journal: Journal::default(),
            truth: vec![1; pages],
            truth_state: 1,
            links: vec![link; usize::from(bounds.streams)],
            writes_left: bounds.writes,
            disturbances_left: bounds.disturbances,
            is_fenced_wrongly: false,
            has_given_up: false,
            is_released: false,
            is_map_damaged: false,
            has_wrong_journal: false,
            has_refused: false,
            cell: None,
        };
        world.agree(bounds);
        world
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.source_fate == Fate::Alive && self.destination_fate == Fate::Alive
    }

    pub(crate) fn has_two_owners(&self) -> bool {
        self.source_runs && self.destination_runs
    }

    /// A vCPU runs with old registers, or can read a page that is older than the guest's last write.
    pub(crate) fn is_stale(&self) -> bool {
        let is_source_old = self.source_runs
            && (self.source_memory != self.truth || self.source_state != self.truth_state);
        let pages = self.destination_memory.iter().zip(&self.truth).zip(0_u8..);
        let mut pages = pages.filter(|(_, page)| self.poisoned >> page & 1 == 0);
        let is_destination_old = self.destination_runs
            && (self.destination_state != Some(self.truth_state)
                || pages.any(|((have, want), _)| have.is_some_and(|have| have != *want)));
        is_source_old || is_destination_old || self.is_fenced_wrongly
    }

    /// A page of the VM at the destination is neither there, nor missing and kept by the source.
    pub(crate) fn is_page_lost(&self) -> bool {
        let pages = (0..)
            .map(pagetide_memory::PageIndex)
            .zip(&self.destination_memory);
        let mut absent =
            pages.filter(|(page, have)| have.is_none() && self.poisoned >> page.0 & 1 == 0);
        self.destination_runs
            && !self.is_released
            && absent.any(|(page, _)| !self.destination.missing().contains(page) || self.is_freed)
    }

    /// All is over, the VM did not die with a process, and not exactly one side runs it.
    pub(crate) fn is_nobodys(&self) -> bool {
        let is_lost = self.source.phase() == Phase::Lost || self.destination.phase() == Phase::Lost;
        self.is_settled() && !is_lost && self.source_runs == self.destination_runs
    }

    pub(crate) fn is_undecided_before_yield(&self) -> bool {
        let journal = &self.source_journal;
        let has_yielded = journal.synced.contains(&RecordKind::Yielded)
            || journal.maybe.contains(&RecordKind::Yielded)
            || journal.pending == Some(RecordKind::Yielded);
        self.source_fate == Fate::Alive && self.source.owner() == Owner::Undecided && !has_yielded
    }

    /// Both sides have ended, or both know that the VM is lost.
    pub(crate) fn is_settled(&self) -> bool {
        let source = matches!(self.source.step(), SourceStep::Ended(_) | SourceStep::Lost);
        let destination = matches!(
            self.destination.step(),
            DestinationStep::Ended(_) | DestinationStep::Lost
        );
        let is_there = |fate| matches!(fate, Fate::Alive | Fate::Forgotten);
        let are_there = is_there(self.source_fate) && is_there(self.destination_fate);
        // By an operator's word the VM runs at the source, and the host of the destination has come back.
        let has_come_back = *self.destination.step() == DestinationStep::Lost
            && matches!(
                self.source.step(),
                SourceStep::Ended(Outcome::Cancelled | Outcome::Failed | Outcome::Refused)
            );
        are_there && source && destination && !has_come_back
    }

    /// A side has forgotten the migration, and the other one needs it.
    pub(crate) fn is_forgotten_too_early(&self) -> bool {
        let source_has_ended = match self.source_fate {
            Fate::Alive => matches!(self.source.step(), SourceStep::Ended(_)),
            // Started again, it would go on.
            Fate::Dead => self.holder == Holder::Ended || !self.may_restart(),
            Fate::Gone | Fate::Forgotten => true,
        };
        let destination_has_ended = match self.destination_fate {
            Fate::Alive => matches!(self.destination.step(), DestinationStep::Ended(_)),
            Fate::Dead => false,
            Fate::Gone | Fate::Forgotten => true,
        };
        let has_source_left = self.source_fate == Fate::Forgotten && !self.has_given_up;
        self.destination_fate == Fate::Forgotten && !source_has_ended
            || has_source_left && !destination_has_ended
    }

    /// Whether the source's journal may say that there is something to go on with.
    fn may_restart(&self) -> bool {
        let journal = &self.source_journal;
        let is_open = |kind: &RecordKind| *kind != RecordKind::RunningAgain;
        journal.synced.last().is_some_and(is_open) && journal.maybe.is_empty()
            || journal.maybe.iter().any(is_open)
    }

    /// The VM has moved, and both sides know.
    pub(crate) fn is_complete(&self) -> bool {
        *self.source.step() == SourceStep::Ended(Outcome::Complete)
            && *self.destination.step() == DestinationStep::Ended(Outcome::Complete)
    }
}
