//! What happens to the machines, and what they want done.

use pagetide_memory::PageRange;
use thiserror::Error;

use crate::convergence::Decision;
use crate::ids::{MapDigest, Token, TokenHash};
use crate::journal::RecordKind;
use crate::message::{DeclineCode, Message, PageRecord, StatePart, StreamIndex};
use crate::pages::{MapPartError, PageSet};
use crate::rounds::Round;

/// What an operator says (`pagetide migration`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Word {
    /// Give the migration up. At the source.
    Cancel,
    /// This token was carried here: *r* to the source, *c* to the destination.
    Accept(Token),
    /// The other host is dead.
    Fenced,
    /// Never run this migration's VM. At the destination.
    Refuse,
    /// Poison what is missing. At the destination, in postcopy.
    Abandon,
    /// Wait for the other side no longer, and free what is kept for it.
    Release,
}

/// Times that the caller measures. The machines have no clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Timer {
    /// The control stream has been down for `--reconnect`, or for as long again.
    Reconnect,
    /// The VM has been paused for `--blackout-limit`.
    BlackoutLimit,
    /// A record that failed is tried again.
    Retry,
}

/// What happens to the source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceEvent {
    /// A stream has passed its handshake.
    StreamUp(StreamIndex),
    /// A stream is lost, or was closed.
    StreamDown(StreamIndex),
    /// A message has come.
    Received(StreamIndex, Message),
    /// The journal is there, with room for all records. It and its directory's entry are synced.
    JournalOpened,
    /// The journal cannot be written.
    JournalFailed,
    /// A stream can take so many more pages.
    Room(StreamIndex, u16),
    /// The answer to [`SourceAction::RoundEnded`]. For postcopy also while a round is being sent.
    Decided(Decision),
    /// The answer to [`SourceAction::Pause`]: the last vCPU has left the guest.
    Paused,
    /// The answer to [`SourceAction::Harvest`]: pages that were written since the last harvest. The log is armed for the
    /// writes after it, before any of them is read.
    Harvested(PageSet),
    /// The guest has ended, or was reset, and did not run on.
    GuestEnded,
    /// A record is synced.
    Recorded(RecordKind),
    /// Nobody knows whether a record is in the journal: it failed to sync, or is not synced yet after
    /// [`RECORD_WITHIN`](crate::times::RECORD_WITHIN).
    RecordFailed(RecordKind),
    /// The answer to [`SourceAction::EndHolder`]: no process but this one has the VM's memory, so that no other can go on
    /// with the journal. At once if there is no holder.
    HolderEnded,
    /// A time has passed.
    Timer(Timer),
    /// The operator's word.
    Word(Word),
}

/// How a migration ended at a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The VM has moved with all its pages.
    Complete,
    /// The VM runs at the source, as its operator wished.
    Cancelled,
    /// The VM runs at the source.
    Failed,
    /// The destination refused; the VM runs at the source.
    Refused,
    /// The VM is lost.
    Lost,
}

/// What the source wants done, in this order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceAction {
    /// Create the journal, and allocate its space. Answer: [`SourceEvent::JournalOpened`].
    OpenJournal {
        /// The hash of *r*, for its head.
        refusal_hash: TokenHash,
    },
    /// Log writes to guest memory, from now on.
    ArmLog,
    /// Send a message on the control stream.
    Send(Message),
    /// Send an end mark on a stream.
    SendEndMark(StreamIndex),
    /// Read pages and send them, in as many records as their content needs, in order.
    SendPages(StreamIndex, PageRange, Round),
    /// Send the missing map ([`Source::missing`](crate::Source::missing)) in parts.
    SendMap,
    /// Send the vCPUs' and devices' state in parts.
    SendState,
    /// Send *sealed*, with this digest of the map, and the length and digest of the state from the record *sealed*.
    SendSealed(MapDigest),
    /// Collect the written pages, and arm the log again.
    Harvest,
    /// A round has sent its pages. Measure it and decide.
    RoundEnded(Round),
    /// Stop the vCPUs, and all other writers of guest memory.
    Pause,
    /// Write a record and sync it.
    Record(RecordKind),
    /// End the process that keeps the VM's memory for a restart. Answer: [`SourceEvent::HolderEnded`].
    EndHolder,
    /// Stop logging, and let the vCPUs enter the guest.
    Run,
    /// Free the VM's memory, and end its holder.
    Free,
    /// The migration has ended. The machine still answers the destination, until [`Self::Forget`].
    Done(Outcome),
    /// Nobody can ask for anything any more: write *finished*, and forget the machine, its tokens and the session's secret.
    Forget,
}

/// What happens to the destination.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DestinationEvent {
    /// A stream has passed its handshake: the source's proof is right. Of the connection before it, the same holds as of a
    /// stream that is lost.
    StreamUp(StreamIndex),
    /// A stream is lost. Every store of it that has happened was reported before, since the guest may have written the page
    /// since; none happens any more.
    StreamDown(StreamIndex),
    /// A message that is neither a page record nor a part of the state has come.
    Received(StreamIndex, Message),
    /// A page record has come.
    Pages {
        /// On this stream.
        stream: StreamIndex,
        /// Its head.
        record: PageRecord,
        /// Its content has its checksum.
        is_intact: bool,
    },
    /// A part of the vCPUs' and devices' state has come.
    State {
        /// On this stream.
        stream: StreamIndex,
        /// Its head.
        part: StatePart,
        /// The digest of the state up to the end of this part
        /// ([`CollectedState::digest_with`](crate::CollectedState::digest_with)).
        digest: [u8; 32],
    },
    /// The answer to [`DestinationAction::Admit`].
    Admitted,
    /// The other answer.
    NotAdmitted(DeclineCode, Vec<String>),
    /// The answer to [`DestinationAction::Store`].
    Stored(StreamIndex),
    /// The answer to [`DestinationAction::Punch`].
    Punched,
    /// The answer to [`DestinationAction::Load`].
    Loaded,
    /// The other answer.
    LoadFailed,
    /// A vCPU, or the loading of state, waits for these pages. To be repeated for each thread that still waits when a
    /// stream is up again.
    Fault(PageRange),
    /// The guest has ended with this status: what is missing is not needed.
    GuestEnded(u32),
    /// A record is synced.
    Recorded(RecordKind),
    /// Nobody knows whether a record is in the journal.
    RecordFailed(RecordKind),
    /// A time has passed.
    Timer(Timer),
    /// The operator's word.
    Word(Word),
}

/// What the destination wants done, in this order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DestinationAction {
    /// Look whether this host can take the VM; reserve its memory, and open the journal. The journal and its directory's
    /// entry are synced before the answer: it may be the only witness that a source which has yielded can still find.
    Admit,
    /// Send a message on the control stream.
    Send(Message),
    /// Acknowledge records on the stream that they came on.
    Acknowledge(StreamIndex, Message),
    /// Request pages on any stream that is up: the one that answers soonest. With none, the fault is repeated.
    Request(PageRange),
    /// Store these parts of the record that has just come on a stream. Answer: [`DestinationEvent::Stored`].
    Store(StreamIndex, Vec<PageRange>),
    /// Offer the record that has just come again after the next store: one of its pages is being stored.
    Later(StreamIndex),
    /// Close a stream, and drop what has come on it. No event follows. Once this is done, no store of the stream happens any
    /// more.
    Close(StreamIndex),
    /// Destroy the content of all missing pages ([`Destination::missing`](crate::Destination::missing)), and register
    /// memory for faults.
    Punch,
    /// Keep the part of the state that has just come; the first part drops what was kept of a state before.
    TakeState,
    /// Load the vCPUs' and devices' state, which is whole and has its digest.
    Load,
    /// Send the missing map ([`Destination::missing`](crate::Destination::missing)) in parts, as it is now: *resume*, which
    /// follows, has its digest.
    SendMap,
    /// Write a record and sync it.
    Record(RecordKind),
    /// Let the vCPUs enter the guest.
    Enter,
    /// Poison these pages.
    Poison(PageSet),
    /// Free the VM's memory.
    Free,
    /// The migration has ended. The machine still answers the source, until [`Self::Forget`].
    Done(Outcome),
    /// Nobody can ask for anything any more: write *finished*, and forget the machine, its tokens and the session's secret.
    /// After *entered*, *finished* says that the VM ran here to the end of its migration: where it was lost, it is not written.
    Forget,
}

/// Where a migration stands at a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Nothing was agreed.
    Connecting,
    /// Memory is sent while the VM runs.
    Precopy,
    /// The VM is paused.
    Paused,
    /// *sealed* is recorded.
    Sealed,
    /// The destination has loaded the state.
    Ready,
    /// *yielded* is recorded, or may be.
    Yielded,
    /// The source has shown *c*, or the destination has said *ready*, and the link is down.
    Undecided,
    /// The VM runs at the destination, and pages are missing there.
    Postcopy,
    /// Everything has arrived.
    Complete,
    /// The VM runs at the source, as its operator wished.
    Cancelled,
    /// The destination will not run the VM.
    Refused,
    /// The VM runs at the source.
    Failed,
    /// The VM is lost.
    Lost,
}

/// Who owns the VM, as a side knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// This side.
    Own,
    /// The other side.
    Peer,
    /// This side does not know.
    Undecided,
    /// Nobody: the VM is lost.
    Nobody,
}

/// Why an event was refused. The machine is as before.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// A message that nobody sends now.
    #[error("{message} does not belong into the phase {phase:?}")]
    Unexpected {
        /// The message, or the event.
        message: &'static str,
        /// The phase.
        phase: Phase,
    },
    /// A control message on another stream, or a stream that does not exist or is not up.
    #[error("{message} does not belong on stream {}", stream.0)]
    Stream {
        /// The message, or the event.
        message: &'static str,
        /// The stream.
        stream: StreamIndex,
    },
    /// Pages that the VM does not have.
    #[error("the VM does not have the pages {run}")]
    Outside {
        /// The pages.
        run: PageRange,
    },
    /// More was acknowledged than was sent.
    #[error("{pages} pages are acknowledged, and {sent} were sent")]
    Acknowledged {
        /// The pages.
        pages: u32,
        /// What was sent and not acknowledged.
        sent: u64,
    },
    /// A token of another migration, or no token.
    #[error("the token is not this migration's")]
    WrongToken,
    /// A part of the state that is not the first, nor behind the part before it.
    #[error("a part of the state at byte {offset}: {bytes} bytes are there")]
    State {
        /// Where the part begins.
        offset: u64,
        /// The bytes that have come.
        bytes: u64,
    },
    /// A part of a map that does not fit.
    #[error(transparent)]
    Map(#[from] MapPartError),
    /// The map that has come is not the one that was sent.
    #[error("the map of missing pages is not whole, or was changed")]
    OtherMap,
    /// A record whose checksum is wrong, and whose number of pages may be wrong, too.
    #[error("a damaged record, as it says of the pages {run}")]
    Damaged {
        /// The pages, as it says.
        run: PageRange,
    },
    /// The operator's word means nothing now.
    #[error("this cannot be done in the phase {phase:?}")]
    Word {
        /// The phase.
        phase: Phase,
    },
    /// The source has yielded: only the destination's refusal lets the VM run here.
    #[error("the VM may run at the destination: this needs its refusal token")]
    NeedsRefusal,
    /// The other side has run the VM, so it cannot be run from the seal.
    #[error("the destination has run the VM: its state here is old")]
    HasRun,
    /// Another word of the operator's contradicts it.
    #[error("the link is up: ask the other side")]
    LinkUp,
}
