//! The migration protocol (`pagetide_migrate`): its stream, its messages, its journal.

use pagetide_memory::{GuestAddress, PageIndex, PageRange};
use pagetide_migrate::journal::{
    HEAD_BYTES, JOURNAL_BYTES, JournalHead, KeptState, Record, RecordKind, Replay, SLOT_BYTES,
    Side, new_journal,
};
use pagetide_migrate::{
    Area, Content, Decoder, Frame, FrameError, HEADER_BYTES, Layout, MAGIC, MAX_MAP_PAGES,
    MAX_RUN_PAGES, MAX_STATE_BYTES, MAX_STATE_PART_BYTES, MAX_UNKNOWN_BYTES, MapDigest, Message,
    MigrationId, Offer, PageRecord, PageSet, Round, Secret, StatePart, Token, TokenHash, VmId,
    max_payload_bytes,
};
use xxhash_rust::xxh3::xxh3_64;

use crate::frames::{self, Decode};
use crate::memory::bounded;
use crate::take;

/// The first byte divides the rest, which is the stream of one direction.
pub(crate) fn stream(input: &[u8]) -> bool {
    frames::stream::<Decoder>(input, check_message)
}

impl Decode for Decoder {
    type Frame = Frame;
    type Error = FrameError;

    const MAGIC: &'static [u8] = &MAGIC;

    fn push(&mut self, bytes: &[u8]) {
        Self::push(self, bytes);
    }

    fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        Self::next_frame(self)
    }

    fn buffered(&self) -> usize {
        Self::buffered(self)
    }

    fn encode(frame: &Frame, out: &mut Vec<u8>) {
        frame.encode(out).expect("it has come as a frame");
    }
}

/// The first two bytes are the type; the rest is the payload.
pub(crate) fn message(mut input: &[u8]) -> bool {
    let kind = u16::from_le_bytes(take(&mut input));
    let payload = input.to_vec();
    check_message(&Frame {
        kind,
        flags: 0,
        payload,
    })
}

/// Whether the frame is a message, whose bounds are checked then.
fn check_message(frame: &Frame) -> bool {
    let limit = max_payload_bytes(frame.kind).unwrap_or(MAX_UNKNOWN_BYTES);
    // Up to 64 reasons are as many strings, twice while their list grows, however short they are.
    let most = 4 * frame.payload.len() + 4096;
    let Ok(received) = bounded(most, || Message::of(frame)) else {
        return false;
    };
    let message = received.message;
    assert!(received.content.len() <= frame.payload.len());
    let mut again = Vec::new();
    if u64::try_from(frame.payload.len()).is_ok_and(|bytes| bytes <= u64::from(limit)) {
        message
            .encode(received.content, &mut again)
            .expect("it fits its limit");
        // A hello may have more behind it.
        if !matches!(message, Message::Hello(_)) {
            assert_eq!(
                again.get(HEADER_BYTES..),
                Some(&frame.payload[..]),
                "no byte is ignored: {message:?}"
            );
        }
    }
    match &message {
        Message::Pages(PageRecord { run, round, .. }) => {
            assert!((1..=u64::from(MAX_RUN_PAGES)).contains(&run.count()));
            assert!(round.is_precopy() || *round == Round::POSTCOPY);
        }
        Message::Request { run } => assert!((1..=u64::from(MAX_RUN_PAGES)).contains(&run.count())),
        Message::Map { first, count, bits } => {
            assert!((1..=MAX_MAP_PAGES).contains(count));
            check_map(*first, *count, bits);
        }
        Message::State(part) => {
            assert!((1..=MAX_STATE_PART_BYTES).contains(&part.bytes));
            assert!(part.offset + u64::from(part.bytes) <= MAX_STATE_BYTES);
        }
        Message::Offer(offer) => check_layout(&offer.layout),
        _ => {}
    }
    true
}

/// A part of a map is taken whole, or not at all.
fn check_map(first: u64, count: u32, bits: &[u8]) {
    let mut set = PageSet::empty(1000);
    match set.set_part(first, u64::from(count), bits) {
        Ok(()) => assert_eq!(set.part(first, u64::from(count)), bits),
        Err(_) => assert!(set.is_empty()),
    }
}

/// Pages have numbers without holes.
fn check_layout(layout: &Layout) {
    let last = PageIndex(layout.pages() - 1);
    let (address, room) = layout.address(last).expect("it has this page");
    assert_eq!(room, 1);
    assert_eq!(layout.run(address, 1), Some(PageRange::single(last)));
    assert_eq!(layout.address(PageIndex(layout.pages())), None);
}

fn examples() -> Vec<(Message, Vec<u8>)> {
    let run = PageRange::new(PageIndex(7), 1);
    let record = |content| PageRecord {
        run,
        round: Round(3),
        content,
        checksum: 9,
    };
    let area = |start| Area {
        start: GuestAddress(start),
        bytes: 0x10_0000,
    };
    let offer = Offer {
        vm: VmId([5; 16]),
        session: Secret([6; 32]),
        commit_hash: TokenHash([7; 32]),
        layout: Layout::new(vec![area(0), area(1 << 32)]).expect("a layout"),
        vcpus: 2,
        is_paused: true,
        verifies: false,
    };
    let token = Token::new(Secret([8; 32]));
    let plain = |message| (message, Vec::new());
    vec![
        (Message::Offer(Box::new(offer)), b"cpuid".to_vec()),
        plain(Message::Accepted {
            refusal_hash: TokenHash([1; 32]),
        }),
        (Message::Pages(record(Content::Zstd)), vec![2; 17]),
        plain(Message::Pages(record(Content::Zero))),
        plain(Message::EndMark),
        plain(Message::Stored { pages: 5 }),
        plain(Message::Map {
            first: 64,
            count: 12,
            bits: vec![0xff, 0x0f],
        }),
        (
            Message::State(StatePart {
                offset: 9,
                bytes: 9,
                has_more: true,
            }),
            vec![3; 9],
        ),
        plain(Message::Sealed {
            digest: MapDigest([2; 32]),
            state: KeptState::of(&[3; 18]),
        }),
        plain(Message::Ready {
            digest: MapDigest([2; 32]),
        }),
        plain(Message::Commit(token)),
        plain(Message::Entered),
        plain(Message::Refusal(token)),
        plain(Message::Request { run }),
        plain(Message::Resume {
            digest: MapDigest([2; 32]),
        }),
        plain(Message::Complete),
        plain(Message::Alive),
    ]
}

fn encoded(message: &Message, content: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(content, &mut bytes).expect("it is short");
    bytes
}

pub(crate) fn message_seeds() -> Vec<Vec<u8>> {
    let seed = |(message, content): (Message, Vec<u8>)| {
        let frame = encoded(&message, &content);
        [
            &message.kind().to_le_bytes()[..],
            frame.get(HEADER_BYTES..).unwrap_or_default(),
        ]
        .concat()
    };
    examples().into_iter().map(seed).collect()
}

pub(crate) fn stream_seeds() -> Vec<Vec<u8>> {
    let seed = |messages: &[(Message, Vec<u8>)]| {
        let frames = messages
            .iter()
            .map(|(message, content)| encoded(message, content));
        [vec![5], MAGIC.to_vec()]
            .into_iter()
            .chain(frames)
            .collect::<Vec<_>>()
            .concat()
    };
    examples().chunks(4).map(seed).collect()
}

/// The first byte: bit 0 the side, bit 1 leaves the checksums as they are. The rest is the beginning of a journal.
pub(crate) fn journal(mut input: &[u8]) -> bool {
    let [flags] = take(&mut input);
    let side = if flags & 1 == 0 {
        Side::Source
    } else {
        Side::Destination
    };
    let mut bytes = [0; JOURNAL_BYTES];
    let length = input.len().min(JOURNAL_BYTES);
    bytes[..length].copy_from_slice(&input[..length]);
    if flags & 2 == 0 {
        complete(&mut bytes);
    }
    let Ok(replay) = bounded(64 * 1024, || Replay::read(&bytes, side, None)) else {
        return false;
    };
    // There is one form.
    let (mut again, mut writer) = new_journal(&replay.head);
    for record in &replay.records {
        let (at, slot) = writer.encode(record).expect("it has room");
        let at = usize::try_from(at).expect("within the journal");
        again[at..at + SLOT_BYTES].copy_from_slice(&slot);
        writer.synced();
    }
    assert_eq!(again, bytes);
    let mut last = None;
    for record in &replay.records {
        assert!(record.kind.may_follow(last, side));
        last = Some(record.kind);
    }
    true
}

/// Writes the checksums of the head and of all slots that are not empty.
fn complete(bytes: &mut [u8; JOURNAL_BYTES]) {
    let (head, slots) = bytes.split_at_mut(HEAD_BYTES);
    let (said, checksum) = head.split_at_mut(HEAD_BYTES - 8);
    checksum.copy_from_slice(&xxh3_64(said).to_le_bytes());
    for slot in slots.chunks_mut(SLOT_BYTES) {
        if slot.iter().any(|byte| *byte != 0) {
            let (fields, checksum) = slot.split_at_mut(SLOT_BYTES - 8);
            let all = [&said[12..28], &*fields].concat();
            checksum.copy_from_slice(&xxh3_64(&all).to_le_bytes());
        }
    }
}

pub(crate) fn journal_seeds() -> Vec<Vec<u8>> {
    let seed = |flags: u8, side, kinds: &[RecordKind]| {
        let head = JournalHead {
            side,
            migration: MigrationId([1; 16]),
            vm: VmId([2; 16]),
            session: Secret([3; 32]),
            token: Secret([4; 32]),
            peer_hash: TokenHash([5; 32]),
        };
        let (mut bytes, mut writer) = new_journal(&head);
        for kind in kinds {
            let record = Record {
                kind: *kind,
                state: KeptState::default(),
            };
            let (at, slot) = writer.encode(&record).expect("it has room");
            let at = usize::try_from(at).expect("within the journal");
            bytes[at..at + SLOT_BYTES].copy_from_slice(&slot);
            writer.synced();
        }
        let used = HEAD_BYTES + kinds.len() * SLOT_BYTES;
        [&[flags][..], &bytes[..used]].concat()
    };
    use RecordKind::{Entered, Finished, Refused, RunningAgain, Sealed, Yielded};
    vec![
        seed(0, Side::Source, &[]),
        seed(0, Side::Source, &[Sealed, Yielded, RunningAgain, Finished]),
        seed(2, Side::Source, &[Sealed, Yielded, Entered]),
        seed(1, Side::Destination, &[Refused]),
        seed(3, Side::Destination, &[Entered, Finished]),
    ]
}
