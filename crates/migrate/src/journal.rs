//! The journal of one side: what it must still know after its process has died. A file of one page: a head, and a slot
//! for each record. The file is written whole before the first page is sent, so that no record needs new space.
//!
//! A slot lies within one sector, which a disk writes as a whole or not at all. So a slot that is neither empty nor
//! right was changed, and the journal is refused: to ignore it could mean to forget a *yielded*.

use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

use crate::ids::{MigrationId, Secret, TokenHash, VmId};
use crate::wire::{DecodeError, Reader, Writer};

/// The bytes of a journal.
pub const JOURNAL_BYTES: usize = 4096;

/// The first bytes of a journal.
pub const JOURNAL_MAGIC: [u8; 8] = *b"PTMIGJRN";

/// The version of the format.
pub const JOURNAL_VERSION: u16 = 1;

/// The bytes of the head.
pub const HEAD_BYTES: usize = 256;

/// The bytes of a slot.
pub const SLOT_BYTES: usize = 64;

/// The records that fit.
pub const SLOTS: usize = (JOURNAL_BYTES - HEAD_BYTES) / SLOT_BYTES;

/// Whose journal it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The source's.
    Source,
    /// The destination's.
    Destination,
}

/// The five records, and the mark that nothing is left to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RecordKind {
    /// The source's vCPUs have left the guest, and their state is kept.
    Sealed,
    /// The source will not run the VM again, except against *r*.
    Yielded,
    /// The destination runs the VM. In the source's journal: it has heard so.
    Entered,
    /// The destination will never run this migration's VM.
    Refused,
    /// The source runs the VM after a seal.
    RunningAgain,
    /// The migration has ended on this side.
    Finished,
}

/// What *sealed* says of the state that is kept beside the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct KeptState {
    /// Its length.
    pub bytes: u64,
    /// Its BLAKE3 digest.
    pub digest: [u8; 32],
}

/// A record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// What it says.
    pub kind: RecordKind,
    /// The state, for [`RecordKind::Sealed`]; else zeroes.
    pub state: KeptState,
}

/// What a journal begins with.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct JournalHead {
    /// Whose it is.
    pub side: Side,
    /// The migration.
    pub migration: MigrationId,
    /// The VM.
    pub vm: VmId,
    /// The session's secret.
    pub session: Secret,
    /// This side's own token: *c* or *r*.
    pub token: Secret,
    /// The hash of the peer's.
    pub peer_hash: TokenHash,
}

/// Why bytes are no journal of this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum JournalError {
    /// Too short or too long.
    #[error("a journal of {bytes} bytes: it has {JOURNAL_BYTES}")]
    Length {
        /// The bytes that were found.
        bytes: usize,
    },
    /// The file is something else.
    #[error("it does not begin with PTMIGJRN: it is no journal of a migration")]
    Magic,
    /// Another version of the format.
    #[error("a journal of version {version}: this program reads version {JOURNAL_VERSION}")]
    Version {
        /// The version that was found.
        version: u16,
    },
    /// The head's bytes were changed.
    #[error("the head of the journal was changed")]
    Head,
    /// A slot's bytes were changed, or those before it are missing.
    #[error("record {slot} of the journal was changed")]
    Slot {
        /// The slot.
        slot: usize,
    },
    /// A record that this side does not write there.
    #[error("record {slot} of the journal, {kind:?}, does not belong there")]
    Order {
        /// The slot.
        slot: usize,
        /// The record.
        kind: RecordKind,
    },
    /// The other side's journal.
    #[error("it is the journal of the migration's other side")]
    Side,
    /// The journal of another migration.
    #[error("it is the journal of migration {found}, and not of {wanted}")]
    Foreign {
        /// The migration that was found.
        found: MigrationId,
        /// The migration that was wanted.
        wanted: MigrationId,
    },
    /// All slots are used.
    #[error("all {SLOTS} records of the journal are used")]
    Full,
}

/// A journal that was read.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Replay {
    /// Its head.
    pub head: JournalHead,
    /// Its records, the oldest first.
    pub records: Vec<Record>,
}

/// A journal that is being written. The caller writes and syncs the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalWriter {
    migration: MigrationId,
    /// The slot of the next record. A record that failed to sync leaves it in place: the next record replaces what may
    /// have come to the disk.
    slot: usize,
}

impl RecordKind {
    const ALL: [(Self, u16); 6] = [
        (Self::Sealed, 1),
        (Self::Yielded, 2),
        (Self::Entered, 3),
        (Self::Refused, 4),
        (Self::RunningAgain, 5),
        (Self::Finished, 6),
    ];

    fn number(self) -> u16 {
        let found = Self::ALL.iter().find(|(kind, _)| *kind == self);
        found.map_or(0, |(_, number)| *number)
    }

    fn of(number: u16) -> Option<Self> {
        let found = Self::ALL.iter().find(|(_, known)| *known == number);
        found.map(|(kind, _)| *kind)
    }

    /// Whether a side may write this record after `last`. The same record may stand there twice.
    pub fn may_follow(self, last: Option<Self>, side: Side) -> bool {
        use RecordKind::{Entered, Finished, Refused, RunningAgain, Sealed, Yielded};
        let order: &[(Option<Self>, Self)] = match side {
            Side::Source => &[
                (None, Sealed),
                // In the place of a *sealed* that failed to sync.
                (None, RunningAgain),
                (Some(Sealed), Yielded),
                (Some(Sealed), RunningAgain),
                (Some(Yielded), RunningAgain),
                (Some(Yielded), Entered),
                (None, Finished),
                // The VM ran on without a record, when its holder had ended.
                (Some(Sealed), Finished),
                (Some(RunningAgain), Finished),
                (Some(Yielded), Finished),
                (Some(Entered), Finished),
            ],
            Side::Destination => &[
                (None, Entered),
                (None, Refused),
                (None, Finished),
                (Some(Entered), Finished),
                (Some(Refused), Finished),
            ],
        };
        last == Some(self) || order.contains(&(last, self))
    }
}

/// A journal without records.
pub fn new_journal(head: &JournalHead) -> ([u8; JOURNAL_BYTES], JournalWriter) {
    let mut out = Writer::default();
    out.bytes(&JOURNAL_MAGIC);
    out.short(JOURNAL_VERSION);
    out.byte(match head.side {
        Side::Source => 1,
        Side::Destination => 2,
    });
    out.byte(0);
    out.bytes(&head.migration.0);
    out.bytes(&head.vm.0);
    out.bytes(&head.session.0);
    out.bytes(&head.token.0);
    out.bytes(&head.peer_hash.0);
    out.0.resize(HEAD_BYTES - 8, 0);
    out.long(xxh3_64(&out.0));
    let mut bytes = [0; JOURNAL_BYTES];
    for (byte, from) in bytes.iter_mut().zip(&out.0) {
        *byte = *from;
    }
    (
        bytes,
        JournalWriter {
            migration: head.migration,
            slot: 0,
        },
    )
}

impl JournalWriter {
    /// The writer that goes on with a journal that was read.
    pub fn after(replay: &Replay) -> Self {
        Self {
            migration: replay.head.migration,
            slot: replay.records.len(),
        }
    }

    /// The place of the next record in the file, and its bytes.
    ///
    /// # Errors
    /// [`JournalError::Full`].
    pub fn encode(&self, record: &Record) -> Result<(u64, [u8; SLOT_BYTES]), JournalError> {
        if self.slot >= SLOTS {
            return Err(JournalError::Full);
        }
        let mut out = Writer::default();
        out.short(record.kind.number());
        out.short(0);
        out.word(u32::try_from(self.slot).unwrap_or(u32::MAX));
        out.long(record.state.bytes);
        out.bytes(&record.state.digest);
        out.long(0);
        out.long(slot_checksum(self.migration, &out.0));
        let mut bytes = [0; SLOT_BYTES];
        for (byte, from) in bytes.iter_mut().zip(&out.0) {
            *byte = *from;
        }
        let at = HEAD_BYTES + self.slot * SLOT_BYTES;
        Ok((u64::try_from(at).unwrap_or(u64::MAX), bytes))
    }

    /// The record that was encoded last is synced.
    pub fn synced(&mut self) {
        self.slot += 1;
    }
}

/// A slot belongs to its migration.
fn slot_checksum(migration: MigrationId, fields: &[u8]) -> u64 {
    xxh3_64(&[&migration.0[..], fields].concat())
}

impl Replay {
    /// Reads a journal of this side; with `wanted`, of this migration. Whoever acts by it writes the same bytes again, and syncs
    /// them, before: a process that died may have left a record that can be read and is not on the disk.
    ///
    /// # Errors
    /// [`JournalError`]: the journal must not be used, nor the VM started anew from it.
    pub fn read(
        bytes: &[u8],
        side: Side,
        wanted: Option<MigrationId>,
    ) -> Result<Self, JournalError> {
        if bytes.len() != JOURNAL_BYTES {
            return Err(JournalError::Length { bytes: bytes.len() });
        }
        let (head, slots) = bytes.split_at(HEAD_BYTES);
        let head = read_head(head)?;
        if head.side != side {
            return Err(JournalError::Side);
        }
        if let Some(wanted) = wanted
            && wanted != head.migration
        {
            return Err(JournalError::Foreign {
                found: head.migration,
                wanted,
            });
        }
        let mut records: Vec<Record> = Vec::new();
        for (slot, bytes) in slots.chunks(SLOT_BYTES).enumerate() {
            if bytes.iter().all(|byte| *byte == 0) {
                continue;
            }
            if slot != records.len() {
                return Err(JournalError::Slot {
                    slot: records.len(),
                });
            }
            let record =
                read_slot(bytes, slot, head.migration).ok_or(JournalError::Slot { slot })?;
            let kind = record.kind;
            if !kind.may_follow(records.last().map(|last| last.kind), side) {
                return Err(JournalError::Order { slot, kind });
            }
            records.push(record);
        }
        Ok(Self { head, records })
    }

    /// The last record.
    pub fn last(&self) -> Option<RecordKind> {
        self.records.last().map(|record| record.kind)
    }

    /// All records, the oldest first.
    pub fn kinds(&self) -> Vec<RecordKind> {
        self.records.iter().map(|record| record.kind).collect()
    }

    /// The newest state that was sealed.
    pub fn sealed_state(&self) -> Option<KeptState> {
        let mut sealed = self
            .records
            .iter()
            .filter(|record| record.kind == RecordKind::Sealed);
        sealed.next_back().map(|record| record.state)
    }
}

fn read_head(bytes: &[u8]) -> Result<JournalHead, JournalError> {
    let mut from = Reader(bytes);
    let changed = |_: DecodeError| JournalError::Head;
    if from.array() != Ok(JOURNAL_MAGIC) {
        return Err(JournalError::Magic);
    }
    let version = from.short().map_err(changed)?;
    if version != JOURNAL_VERSION {
        return Err(JournalError::Version { version });
    }
    let (said, checksum) = bytes.split_at(HEAD_BYTES - 8);
    if Reader(checksum).long() != Ok(xxh3_64(said)) {
        return Err(JournalError::Head);
    }
    let side = match from.byte().map_err(changed)? {
        1 => Side::Source,
        2 => Side::Destination,
        _ => return Err(JournalError::Head),
    };
    from.zeros::<1>().map_err(changed)?;
    let head = JournalHead {
        side,
        migration: MigrationId(from.array().map_err(changed)?),
        vm: VmId(from.array().map_err(changed)?),
        session: Secret(from.array().map_err(changed)?),
        token: Secret(from.array().map_err(changed)?),
        peer_hash: TokenHash(from.array().map_err(changed)?),
    };
    let spare = from.rest();
    let is_spare_empty = spare
        .get(..spare.len().saturating_sub(8))
        .unwrap_or_default();
    match is_spare_empty.iter().all(|byte| *byte == 0) {
        true => Ok(head),
        false => Err(JournalError::Head),
    }
}

fn read_slot(bytes: &[u8], slot: usize, migration: MigrationId) -> Option<Record> {
    let (fields, checksum) = bytes.split_at(SLOT_BYTES - 8);
    let mut from = Reader(fields);
    let kind = RecordKind::of(from.short().ok()?)?;
    from.zeros::<2>().ok()?;
    let number = from.word().ok()?;
    let state = KeptState {
        bytes: from.long().ok()?,
        digest: from.array().ok()?,
    };
    from.zeros::<8>().ok()?;
    let is_right = Reader(checksum).long() == Ok(slot_checksum(migration, fields))
        && usize::try_from(number) == Ok(slot)
        && (kind == RecordKind::Sealed || state == KeptState::default());
    is_right.then_some(Record { kind, state })
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;
