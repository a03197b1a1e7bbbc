use proptest::prelude::*;

use super::*;
use crate::frame::{Decoder, MAGIC};
use crate::handshake::{Purpose, VERSIONS};
use crate::ids::MigrationId;
use crate::message::{CONTROL, max_payload_bytes};

/// One message of each type, with its content.
pub(crate) fn examples() -> Vec<(Message, Vec<u8>)> {
    let run = PageRange::new(PageIndex(7), 2);
    let record = |content| PageRecord {
        run,
        round: Round(3),
        content,
        checksum: 9,
    };
    let hello = Hello {
        versions: VERSIONS,
        features: 1,
        purpose: Purpose::Begin,
        stream: CONTROL,
        migration: MigrationId([1; 16]),
        nonce: [2; 32],
    };
    let welcome = Welcome {
        version: 1,
        features: 1,
        nonce: [3; 32],
        proof: Proof([4; 32]),
    };
    let area = |start| Area {
        start: GuestAddress(start),
        bytes: 0x10_0000,
    };
    let offer = Offer {
        vm: VmId([5; 16]),
        session: Secret([6; 32]),
        commit_hash: TokenHash([7; 32]),
        layout: Layout::new(vec![area(0), area(1 << 32)]).unwrap(),
        vcpus: 2,
        is_paused: true,
        verifies: false,
    };
    let reasons = vec!["no MSR 0x10".to_owned(), "é".to_owned()];
    let token = Token::new(Secret([8; 32]));
    let plain = |message| (message, Vec::new());
    vec![
        plain(Message::Hello(hello)),
        plain(Message::Welcome(welcome)),
        plain(Message::Proof(Proof([9; 32]))),
        (Message::Offer(Box::new(offer)), b"cpuid".to_vec()),
        plain(Message::Accepted {
            refusal_hash: TokenHash([1; 32]),
        }),
        plain(Message::Declined {
            code: DeclineCode::Host,
            reasons,
        }),
        (Message::Pages(record(Content::Bytes)), vec![1; 8192]),
        (Message::Pages(record(Content::Zstd)), vec![2; 17]),
        plain(Message::Pages(record(Content::Zero))),
        plain(Message::Pages(record(Content::Discarded))),
        plain(Message::Pages(PageRecord {
            round: Round::POSTCOPY,
            ..record(Content::Poisoned)
        })),
        plain(Message::EndMark),
        plain(Message::Stored { pages: 5 }),
        plain(Message::Damaged { pages: 6 }),
        plain(Message::Map {
            first: 64,
            count: 12,
            bits: vec![0xff, 0x0f],
        }),
        (
            Message::State(StatePart {
                offset: 0x10_0000,
                bytes: 9,
                has_more: true,
            }),
            vec![3; 9],
        ),
        plain(Message::Sealed {
            digest: MapDigest([2; 32]),
            state: KeptState {
                bytes: 0x10_0009,
                digest: [3; 32],
            },
        }),
        plain(Message::Ready {
            digest: MapDigest([2; 32]),
        }),
        plain(Message::Commit(token)),
        plain(Message::Entered),
        plain(Message::Refusal(token)),
        plain(Message::RefusalSeen),
        plain(Message::Cancel {
            code: CancelCode::Failed,
        }),
        plain(Message::Request { run }),
        plain(Message::Resume {
            digest: MapDigest([2; 32]),
        }),
        plain(Message::Complete),
        plain(Message::Released),
        plain(Message::Lost),
        plain(Message::Ended),
        plain(Message::Held {
            stage: Stage::Postcopy(50),
        }),
        plain(Message::Continued),
        plain(Message::Alive),
        plain(Message::GuestEnded { status: 3 }),
    ]
}

fn frame(message: &Message, content: &[u8]) -> Frame {
    let mut bytes = MAGIC.to_vec();
    message.encode(content, &mut bytes).unwrap();
    let mut decoder = Decoder::default();
    decoder.push(&bytes);
    let frame = decoder.next_frame().unwrap().unwrap();
    assert_eq!(decoder.buffered(), 0);
    frame
}

#[test]
fn every_message_reads_back_with_its_content() {
    for (message, content) in examples() {
        let frame = frame(&message, &content);
        assert_eq!(frame.kind, message.kind());
        let received = Message::of(&frame).unwrap();
        assert_eq!(
            (received.message, received.content),
            (message, &content[..])
        );
    }
}

#[test]
fn a_message_that_is_cut_or_longer_is_refused() {
    for (message, content) in examples() {
        let whole = frame(&message, &content);
        // What requirements, state and hello have behind them is open.
        let is_open = matches!(message, Message::Offer(_) | Message::Hello(_));
        let is_compressed = matches!(
            message,
            Message::Pages(PageRecord {
                content: Content::Zstd,
                ..
            })
        );
        for length in 0..whole.payload.len() {
            let payload = whole.payload[..length].to_vec();
            let cut = Frame { payload, ..whole };
            if is_open && length >= whole.payload.len() - content.len()
                || is_compressed && length > 24
            {
                continue;
            }
            assert!(Message::of(&cut).is_err(), "{} at {length}", message.name());
        }
        if !is_open && !is_compressed {
            let payload = [&whole.payload[..], &[0]].concat();
            assert!(
                Message::of(&Frame { payload, ..whole }).is_err(),
                "{}",
                message.name()
            );
        }
    }
}

#[test]
fn lengths_counts_and_values_out_of_bounds_are_refused() {
    let field = |kind, payload: &[u8]| {
        let frame = Frame {
            kind,
            flags: 0,
            payload: payload.to_vec(),
        };
        match Message::of(&frame) {
            Err(DecodeError::Field { field }) => field,
            other => panic!("{other:?}"),
        }
    };
    let record = |first: u64, count: u16, kind: u8, round: u8, spare: u32| {
        let mut bytes = first.to_le_bytes().to_vec();
        bytes.extend(count.to_le_bytes());
        bytes.extend([kind, round]);
        bytes.extend(spare.to_le_bytes());
        bytes.extend([0; 8]);
        bytes
    };
    assert_eq!(field(16, &record(0, 0, 2, 1, 0)), "a run of pages");
    assert_eq!(field(16, &record(0, 257, 2, 1, 0)), "a run of pages");
    assert_eq!(field(16, &record(u64::MAX, 1, 2, 1, 0)), "a run of pages");
    assert_eq!(field(16, &record(0, 1, 5, 1, 0)), "the kind of content");
    assert_eq!(field(16, &record(0, 1, 2, 0, 0)), "a round");
    assert_eq!(field(16, &record(0, 1, 2, 251, 0)), "a round");
    assert_eq!(field(16, &record(0, 1, 2, 1, 1)), "reserved");
    assert_eq!(
        field(16, &record(0, 1, 0, 1, 0)),
        "the length of a record's content"
    );
    let map = |first: u64, count: u32, bits: usize| {
        let mut bytes = first.to_le_bytes().to_vec();
        bytes.extend(count.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.resize(bytes.len() + bits, 0);
        bytes
    };
    assert_eq!(field(32, &map(0, 0, 0)), "the pages of a map");
    assert_eq!(
        field(32, &map(0, MAX_MAP_PAGES + 8, 65537)),
        "the pages of a map"
    );
    assert_eq!(field(32, &map(0, 9, 1)), "the pages of a map");
    let state = |offset: u64, bytes: u32, more: u32, content: usize| {
        let mut all = offset.to_le_bytes().to_vec();
        all.extend(bytes.to_le_bytes());
        all.extend(more.to_le_bytes());
        all.resize(all.len() + content, 0);
        all
    };
    assert_eq!(field(33, &state(0, 1, 2, 1)), "more state");
    for wrong in [
        state(0, 0, 0, 0),
        state(0, 2, 0, 1),
        state(0, 1, 0, 2),
        state(MAX_STATE_BYTES, 1, 0, 1),
        state(u64::MAX, 1, 0, 1),
        state(0, MAX_STATE_PART_BYTES + 1, 0, (1 << 20) + 1),
    ] {
        assert_eq!(field(33, &wrong), "a part of the state");
    }
    assert_eq!(field(40, &[0; 4]), "the code of a cancel");
    assert_eq!(field(6, &[1, 0, 65, 0]), "the number of reasons");
    assert_eq!(field(6, &[9, 0, 0, 0]), "the code of a refusal");
    assert_eq!(field(60, &[7, 101, 0, 0]), "a stage");
    assert_eq!(field(60, &[2, 1, 0, 0]), "a stage");
}

#[test]
fn counts_of_an_offer_allocate_nothing() {
    let (offer, _) = examples().swap_remove(3);
    let mut whole = frame(&offer, &[]);
    // 1024 areas are announced, and two are there.
    whole.payload[86..88].copy_from_slice(&1024_u16.to_le_bytes());
    assert_eq!(Message::of(&whole), Err(DecodeError::Short));
    whole.payload[86..88].copy_from_slice(&1025_u16.to_le_bytes());
    let field = "the number of areas";
    assert_eq!(Message::of(&whole), Err(DecodeError::Field { field }));
    whole.payload[86..88].copy_from_slice(&0_u16.to_le_bytes());
    assert_eq!(
        Message::of(&whole),
        Err(DecodeError::Field {
            field: "the memory"
        })
    );
}

#[test]
fn the_longest_messages_fit_their_limits() {
    let limit = |message: &Message| max_payload_bytes(message.kind()).unwrap();
    for (message, content) in examples() {
        let bytes = frame(&message, &content).payload.len();
        let bytes = u32::try_from(bytes).unwrap();
        assert!(bytes <= limit(&message), "{}", message.name());
    }
    let run = PageRange::new(PageIndex(0), u64::from(MAX_RUN_PAGES));
    let longest = PageRecord {
        run,
        round: Round(1),
        content: Content::Bytes,
        checksum: 0,
    };
    frame(&Message::Pages(longest), &vec![0; 1 << 20]);
    let bits = vec![0; usize::try_from(MAX_MAP_PAGES / 8).unwrap()];
    frame(
        &Message::Map {
            first: 0,
            count: MAX_MAP_PAGES,
            bits,
        },
        &[],
    );
    frame(
        &Message::State(StatePart {
            offset: 0,
            bytes: MAX_STATE_PART_BYTES,
            has_more: false,
        }),
        &vec![0; usize::try_from(MAX_STATE_PART_BYTES).unwrap()],
    );
    let reasons = vec!["x".repeat(2000); 100];
    frame(
        &Message::Declined {
            code: DeclineCode::Host,
            reasons,
        },
        &[],
    );
}

proptest! {
    #[test]
    fn what_is_accepted_encodes_to_the_same_bytes(
        kind in 0_u16..70, payload in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let frame = Frame { kind, flags: 0, payload };
        if let Ok(Received { message, content }) = Message::of(&frame) {
            let mut bytes = Vec::new();
            prop_assert_eq!(message.encode(content, &mut bytes), Ok(()));
            // Only a hello of a later version has bytes that this one does not know.
            if !matches!(message, Message::Hello(_)) {
                prop_assert_eq!(&bytes[HEADER_BYTES..], &frame.payload[..]);
            }
        }
    }
}
