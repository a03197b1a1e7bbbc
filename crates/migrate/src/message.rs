//! The messages of the protocol. docs/design/migration-protocol.md says who may send which of them when.

use pagetide_memory::PageRange;

use crate::handshake::{Hello, Proof, Welcome};
use crate::ids::{MapDigest, Secret, Token, TokenHash, VmId};
use crate::journal::KeptState;
use crate::layout::Layout;
use crate::rounds::Round;

/// The most pages of one record or request.
pub const MAX_RUN_PAGES: u16 = 256;

/// The most pages of one part of a map.
pub const MAX_MAP_PAGES: u32 = 1 << 19;

/// The most bytes of one part of the VM's state.
pub const MAX_STATE_PART_BYTES: u32 = 1 << 20;

/// The most bytes of the whole state.
pub const MAX_STATE_BYTES: u64 = 256 << 20;

/// The most bytes of what a VM requires of its host.
pub const MAX_REQUIREMENT_BYTES: u32 = 256 << 10;

/// The most reasons of a refused offer.
pub const MAX_REASONS: usize = 64;

/// One connection of a session; 0 is the control stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamIndex(pub u16);

/// The stream that carries every message. Any other carries page records, their marks, acknowledgements and requests, tokens,
/// and *alive*.
pub const CONTROL: StreamIndex = StreamIndex(0);

/// The most streams of a session.
pub const MAX_STREAMS: u16 = 64;

/// What a page record says of its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Content {
    /// Their bytes follow.
    Bytes,
    /// Their bytes follow, compressed with zstd.
    Zstd,
    /// They are zero.
    Zero,
    /// The guest has discarded them: they read as zero, and need no memory.
    Discarded,
    /// An uncorrected error destroyed them.
    Poisoned,
}

/// The head of a page record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageRecord {
    /// The pages: 1 to [`MAX_RUN_PAGES`].
    pub run: PageRange,
    /// The round of precopy, or [`Round::POSTCOPY`].
    pub round: Round,
    /// What the pages are.
    pub content: Content,
    /// [`page_checksum`](crate::page_checksum) of the first page's address, the rest of the head and the bytes as sent.
    pub checksum: u64,
}

/// The head of a part of the vCPUs' and devices' state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatePart {
    /// The bytes of the state before it. A part at 0 begins the state anew.
    pub offset: u64,
    /// Its bytes: 1 to [`MAX_STATE_PART_BYTES`].
    pub bytes: u32,
    /// Another part follows.
    pub has_more: bool,
}

/// What the source says of the VM first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Offer {
    /// The VM.
    pub vm: VmId,
    /// Later connections of this session prove that they know it.
    pub session: Secret,
    /// The hash of the commit token *c*.
    pub commit_hash: TokenHash,
    /// Its memory.
    pub layout: Layout,
    /// Its vCPUs.
    pub vcpus: u32,
    /// Its operator had paused it: it arrives paused.
    pub is_paused: bool,
    /// Both sides hash all present pages before the yield.
    pub verifies: bool,
}

/// Why an offer is not accepted, as a number; the reasons are texts beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeclineCode {
    /// The host lacks something that the VM requires.
    Host,
    /// The host has no room.
    Room,
    /// The VM, or the session, is not one that this receiver takes.
    NotTaken,
    /// The receiver's journal cannot be written.
    Journal,
}

/// Why the source gave up before it yielded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CancelCode {
    /// Its operator, or a deadline, cancelled the migration.
    Cancelled,
    /// It failed.
    Failed,
    /// Its guest ended.
    GuestEnded,
}

/// Where an operator wanted a side to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// At the end of a round.
    Round(u8),
    /// The VM is paused.
    Paused,
    /// *sealed* is recorded, and the state is not sent.
    Sealed,
    /// *yielded* is recorded, and *c* is not sent.
    Yielded,
    /// The state is loaded, and *ready* is not said.
    Ready,
    /// *c* has come, and *entered* is not recorded.
    Running,
    /// This share of the pages is installed.
    Postcopy(u8),
}

/// A message. The content of page records, state parts and requirements follows it in the frame, and is not part of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Message {
    /// A connection's first message.
    Hello(Hello),
    /// The answer.
    Welcome(Welcome),
    /// The third message of a connection.
    Proof(Proof),
    /// The VM; what it requires follows.
    Offer(Box<Offer>),
    /// The destination takes the VM. Its part: the hash of the refusal token *r*.
    Accepted {
        /// The hash.
        refusal_hash: TokenHash,
    },
    /// The destination does not take the VM.
    Declined {
        /// Why.
        code: DeclineCode,
        /// All reasons at once.
        reasons: Vec<String>,
    },
    /// Pages; their content follows.
    Pages(PageRecord),
    /// No record of precopy follows on this stream.
    EndMark,
    /// So many further pages of this stream's records are stored, or superseded. An end mark counts as one.
    Stored {
        /// Pages since the last such message.
        pages: u32,
    },
    /// The oldest pages of this stream that are not acknowledged came damaged. They count as acknowledged.
    Damaged {
        /// The pages of the record.
        pages: u32,
    },
    /// A part of a map: the missing pages.
    Map {
        /// Its first page.
        first: u64,
        /// Its pages.
        count: u32,
        /// One bit a page.
        bits: Vec<u8>,
    },
    /// A part of the vCPUs' and devices' state; its bytes follow.
    State(StatePart),
    /// The state and the missing map are whole, and the source recorded *sealed*.
    Sealed {
        /// The digest of the missing map as it was sent.
        digest: MapDigest,
        /// The length and the digest of the state, as the record *sealed* has them.
        state: KeptState,
    },
    /// The destination has loaded the state.
    Ready {
        /// The digest of the missing map as it was received.
        digest: MapDigest,
    },
    /// The source has yielded. This is *c*.
    Commit(Token),
    /// The destination has recorded *entered*, and runs the VM.
    Entered,
    /// The destination has recorded *refused*. This is *r*.
    Refusal(Token),
    /// The source has *r*, and runs the VM: the destination may forget the migration.
    RefusalSeen,
    /// The source gave up before it yielded.
    Cancel {
        /// Why.
        code: CancelCode,
    },
    /// The destination needs pages.
    Request {
        /// The pages: 1 to [`MAX_RUN_PAGES`].
        run: PageRange,
    },
    /// The map that was sent has all pages that the destination misses: the source sends these, and no others.
    Resume {
        /// The digest of this map.
        digest: MapDigest,
    },
    /// Nothing is missing at the destination.
    Complete,
    /// The source has freed the memory, and keeps nothing for the destination.
    Released,
    /// The destination had entered, and has lost the VM.
    Lost,
    /// The destination has ended, and forgets the migration.
    Ended,
    /// The sender stops at a stage, at its operator's wish.
    Held {
        /// Where.
        stage: Stage,
    },
    /// The sender goes on.
    Continued,
    /// The sender lives.
    Alive,
    /// The guest has ended, with this status.
    GuestEnded {
        /// The status.
        status: u32,
    },
}

/// The longest payload of a message's type; `None` if this version does not know the type.
pub fn max_payload_bytes(kind: u16) -> Option<u32> {
    let run_bytes = u32::from(MAX_RUN_PAGES) * 4096;
    Some(match kind {
        1..=3 => 256,
        // The head, the areas, and what the VM requires.
        4 => 88 + 1024 * 16 + MAX_REQUIREMENT_BYTES,
        5 => 32,
        6 => 4 + 64 * 1026,
        16 => 24 + run_bytes,
        17..=19 => 4,
        32 => 16 + MAX_MAP_PAGES / 8,
        33 => 16 + MAX_STATE_PART_BYTES,
        34 => 72,
        35..=40 | 49 => 32,
        48 | 50..=53 => 12,
        60..=63 => 8,
        _ => return None,
    })
}

impl Message {
    /// Its type on the wire.
    pub fn kind(&self) -> u16 {
        match self {
            Self::Hello(_) => 1,
            Self::Welcome(_) => 2,
            Self::Proof(_) => 3,
            Self::Offer(_) => 4,
            Self::Accepted { .. } => 5,
            Self::Declined { .. } => 6,
            Self::Pages(_) => 16,
            Self::EndMark => 17,
            Self::Stored { .. } => 18,
            Self::Damaged { .. } => 19,
            Self::Map { .. } => 32,
            Self::State(_) => 33,
            Self::Sealed { .. } => 34,
            Self::Ready { .. } => 35,
            Self::Commit(_) => 36,
            Self::Entered => 37,
            Self::Refusal(_) => 38,
            Self::RefusalSeen => 39,
            Self::Cancel { .. } => 40,
            Self::Request { .. } => 48,
            Self::Resume { .. } => 49,
            Self::Complete => 50,
            Self::Released => 51,
            Self::Lost => 52,
            Self::Ended => 53,
            Self::Held { .. } => 60,
            Self::Continued => 61,
            Self::Alive => 62,
            Self::GuestEnded { .. } => 63,
        }
    }

    /// Its name in documents, errors and diagrams.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "hello",
            Self::Welcome(_) => "welcome",
            Self::Proof(_) => "proof",
            Self::Offer(_) => "offer",
            Self::Accepted { .. } => "accepted",
            Self::Declined { .. } => "declined",
            Self::Pages(_) => "pages",
            Self::EndMark => "end-mark",
            Self::Stored { .. } => "stored",
            Self::Damaged { .. } => "damaged",
            Self::Map { .. } => "map",
            Self::State(_) => "state",
            Self::Sealed { .. } => "sealed",
            Self::Ready { .. } => "ready",
            Self::Commit(_) => "commit",
            Self::Entered => "entered",
            Self::Refusal(_) => "refusal",
            Self::RefusalSeen => "refusal-seen",
            Self::Cancel { .. } => "cancel",
            Self::Request { .. } => "request",
            Self::Resume { .. } => "resume",
            Self::Complete => "complete",
            Self::Released => "released",
            Self::Lost => "lost",
            Self::Ended => "ended",
            Self::Held { .. } => "held",
            Self::Continued => "continued",
            Self::Alive => "alive",
            Self::GuestEnded { .. } => "guest-ended",
        }
    }

    /// Whether a receiver that does not know it may skip it.
    pub fn is_optional(&self) -> bool {
        matches!(self, Self::Held { .. } | Self::Continued | Self::Alive)
    }
}
