use super::*;

fn head(side: Side) -> JournalHead {
    JournalHead {
        side,
        migration: MigrationId([1; 16]),
        vm: VmId([2; 16]),
        session: Secret([3; 32]),
        token: Secret([4; 32]),
        peer_hash: TokenHash([5; 32]),
    }
}

fn record(kind: RecordKind) -> Record {
    let state = match kind {
        RecordKind::Sealed => KeptState {
            bytes: 77,
            digest: [6; 32],
        },
        _ => KeptState::default(),
    };
    Record { kind, state }
}

fn put(journal: &mut [u8], at: u64, slot: &[u8]) {
    journal[usize::try_from(at).unwrap()..][..SLOT_BYTES].copy_from_slice(slot);
}

fn journal(side: Side, kinds: &[RecordKind]) -> Vec<u8> {
    let (bytes, mut writer) = new_journal(&head(side));
    let mut bytes = bytes.to_vec();
    for kind in kinds {
        let (at, slot) = writer.encode(&record(*kind)).unwrap();
        put(&mut bytes, at, &slot);
        writer.synced();
    }
    bytes
}

const RUN: [RecordKind; 3] = [
    RecordKind::Sealed,
    RecordKind::Yielded,
    RecordKind::RunningAgain,
];

#[test]
fn a_journal_reads_back() {
    for count in 0..=RUN.len() {
        let bytes = journal(Side::Source, &RUN[..count]);
        let replay = Replay::read(&bytes, Side::Source, Some(MigrationId([1; 16]))).unwrap();
        assert_eq!(replay.head, head(Side::Source));
        assert_eq!(replay.last(), RUN[..count].last().copied());
        assert_eq!(
            replay.sealed_state().map(|state| state.bytes),
            (count > 0).then_some(77)
        );
        assert_eq!(JournalWriter::after(&replay).slot, count);
    }
}

#[test]
fn every_cut_is_refused() {
    let bytes = journal(Side::Source, &RUN);
    for length in 0..bytes.len() {
        let error = Replay::read(&bytes[..length], Side::Source, None).unwrap_err();
        assert_eq!(error, JournalError::Length { bytes: length });
    }
    assert!(Replay::read(&[&bytes[..], &[0]].concat(), Side::Source, None).is_err());
}

#[test]
fn every_changed_bit_is_refused() {
    let bytes = journal(Side::Source, &RUN);
    for at in 0..HEAD_BYTES + RUN.len() * SLOT_BYTES {
        for bit in 0..8 {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << bit;
            assert!(
                Replay::read(&changed, Side::Source, None).is_err(),
                "byte {at}, bit {bit}"
            );
        }
    }
}

#[test]
fn a_record_that_vanished_is_missed() {
    let mut bytes = journal(Side::Source, &RUN);
    bytes[HEAD_BYTES + SLOT_BYTES..][..SLOT_BYTES].fill(0);
    assert_eq!(
        Replay::read(&bytes, Side::Source, None),
        Err(JournalError::Slot { slot: 1 })
    );
}

#[test]
fn foreign_journals_are_refused_by_name() {
    let bytes = journal(Side::Source, &RUN);
    assert_eq!(
        Replay::read(&bytes, Side::Destination, None),
        Err(JournalError::Side)
    );
    let wanted = MigrationId([9; 16]);
    let error = JournalError::Foreign {
        found: MigrationId([1; 16]),
        wanted,
    };
    assert_eq!(Replay::read(&bytes, Side::Source, Some(wanted)), Err(error));
    assert_eq!(
        Replay::read(&[0; JOURNAL_BYTES], Side::Source, None),
        Err(JournalError::Magic)
    );
    let mut newer = bytes.clone();
    newer[8] = 2;
    assert_eq!(
        Replay::read(&newer, Side::Source, None),
        Err(JournalError::Version { version: 2 })
    );
    // The slot of another migration's journal.
    let (_, other) = new_journal(&JournalHead {
        migration: wanted,
        ..head(Side::Source)
    });
    let (at, slot) = other.encode(&record(RecordKind::Sealed)).unwrap();
    let mut mixed = bytes;
    put(&mut mixed, at, &slot);
    assert_eq!(
        Replay::read(&mixed, Side::Source, None),
        Err(JournalError::Slot { slot: 0 })
    );
}

#[test]
fn records_out_of_order_are_refused() {
    use RecordKind::{Entered, Finished, Refused, RunningAgain, Sealed, Yielded};
    let read = |side, kinds: &[RecordKind]| Replay::read(&journal(side, kinds), side, None);
    for kinds in [
        &[Yielded][..],
        &[Sealed, RunningAgain, Yielded],
        &[Sealed, Entered],
        &[Finished, Sealed],
        &[Refused],
    ] {
        assert!(
            matches!(read(Side::Source, kinds), Err(JournalError::Order { .. })),
            "{kinds:?}"
        );
    }
    for kinds in [&[Refused, Entered][..], &[Entered, Refused], &[Sealed]] {
        assert!(
            matches!(
                read(Side::Destination, kinds),
                Err(JournalError::Order { .. })
            ),
            "{kinds:?}"
        );
    }
    assert!(read(Side::Source, &[Sealed, Yielded, Yielded, Entered, Finished]).is_ok());
    // The VM ran on when its holder had ended.
    assert!(read(Side::Source, &[Sealed, Finished]).is_ok());
    // The seal failed to sync, and what followed took its place.
    assert!(read(Side::Source, &[RunningAgain, Finished]).is_ok());
}

#[test]
fn a_record_after_one_that_failed_takes_its_place() {
    let (bytes, mut writer) = new_journal(&head(Side::Source));
    let mut bytes = bytes.to_vec();
    let mut write = |writer: &JournalWriter, kind| {
        let (at, slot) = writer.encode(&record(kind)).unwrap();
        put(&mut bytes, at, &slot);
    };
    write(&writer, RecordKind::Sealed);
    writer.synced();
    // It is in the file, and nobody knows whether it is on the disk.
    write(&writer, RecordKind::Yielded);
    write(&writer, RecordKind::RunningAgain);
    let replay = Replay::read(&bytes, Side::Source, None).unwrap();
    assert_eq!(replay.records.len(), 2);
    assert_eq!(replay.last(), Some(RecordKind::RunningAgain));
}

#[test]
fn a_full_journal_says_so() {
    let (_, mut writer) = new_journal(&head(Side::Source));
    for _ in 0..SLOTS {
        assert!(writer.encode(&record(RecordKind::Yielded)).is_ok());
        writer.synced();
    }
    assert_eq!(
        writer.encode(&record(RecordKind::Yielded)),
        Err(JournalError::Full)
    );
}
