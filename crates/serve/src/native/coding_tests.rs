use proptest::prelude::*;

use super::*;
use crate::native::frame::MAX_PAYLOAD_BYTES;
use crate::native::label::LabelError;
use crate::native::message::MAX_TEXT_BYTES;

fn any_of<T: Copy + std::fmt::Debug>(all: &'static [T]) -> impl Strategy<Value = T> {
    (0..all.len()).prop_map(|index| all[index])
}

fn text() -> impl Strategy<Value = String> {
    ".{0,60}"
}

fn digest() -> impl Strategy<Value = Digest> {
    any::<[u8; 32]>().prop_map(Digest)
}

prop_compose! {
    fn region()(
        places in any::<[u64; 4]>(),
        page_size in any_of(&[PageSize::Size4K, PageSize::Size2M, PageSize::Size1G]),
        mode in any_of(RegionMode::ALL),
        uffd in any::<u8>(),
        file in 0..u8::MAX,
    ) -> Region {
        let [address, bytes, image_offset, file_offset] = places;
        let file = (mode == RegionMode::Minor).then_some(file);
        Region { address, bytes, image_offset, file_offset, page_size, mode, uffd, file }
    }
}

prop_compose! {
    fn part()(region in any::<u32>(), first_page in any::<u64>(), bytes in proptest::collection::vec(any::<u8>(), 0..99)) -> PageMapPart {
        PageMapPart { region, first_page, bytes }
    }
}

prop_compose! {
    fn welcome()(version in any::<u16>(), words in any::<[u32; 3]>(), longs in any::<[u64; 4]>(), image in digest()) -> Welcome {
        let [max_payload_bytes, max_regions, max_descriptors] = words;
        let [max_memory_bytes, max_map_bytes, features, image_bytes] = longs;
        Welcome {
            version, max_payload_bytes, max_regions, max_descriptors,
            max_memory_bytes, max_map_bytes, features, image_bytes, image,
        }
    }
}

fn message() -> impl Strategy<Value = Message> {
    let requests = prop_oneof![
        (any::<u16>(), any::<u16>(), any::<u64>(), text()).prop_map(
            |(lowest, highest, features, name)| Message::Hello {
                lowest,
                highest,
                features,
                name
            }
        ),
        (any::<u64>(), proptest::collection::vec(region(), 1..9)).prop_map(
            |(uffd_features, regions)| Message::Attach(Attach {
                uffd_features,
                regions
            })
        ),
        (
            any::<u64>(),
            proptest::collection::vec(any::<(u32, u64)>(), 1..9)
        )
            .prop_map(|(uffd_features, regions)| {
                let regions = regions.into_iter();
                let regions = regions.map(|(region, address)| SpaceRegion { region, address });
                Message::AttachSpace(AttachSpace {
                    uffd_features,
                    regions: regions.collect(),
                })
            }),
        any::<u32>().prop_map(|space| Message::DetachSpace { space }),
        (
            "[A-Za-z0-9._:-]{1,64}",
            "(00-[1-9a-f]{32}-[1-9a-f]{16}-[0-9a-f]{2})?"
        )
            .prop_map(|(id, trace)| Message::Label(VmLabel::new(id, trace).unwrap())),
        any_of(WorkingSetAction::ALL).prop_map(Message::WorkingSet),
        any::<(u64, u64)>().prop_map(|(offset, bytes)| Message::Poison { offset, bytes }),
        part().prop_map(Message::ResumeMap),
    ];
    let empty = proptest::sample::select(vec![
        Message::Share,
        Message::HealthRequest,
        Message::Drain,
        Message::Resume,
        Message::HandOver,
        Message::Goodbye,
        Message::Left,
    ]);
    let answers = prop_oneof![
        welcome().prop_map(Message::Welcome),
        (
            any::<u32>(),
            any_of(WorkingSetState::ALL),
            any::<u64>(),
            digest()
        )
            .prop_map(|(regions, working_set, bytes, image)| Message::Attached {
                regions,
                working_set,
                bytes,
                image
            }),
        any::<(u64, u64)>().prop_map(|(bytes, page_bytes)| Message::Shared { bytes, page_bytes }),
        (any_of(VmState::ALL), any::<[u64; 5]>(), text()).prop_map(
            |(state, counts, last_error)| {
                let [present, lost, pages, faults, stalls] = counts;
                Message::Health(Health {
                    state,
                    present,
                    lost,
                    pages,
                    faults,
                    stalls,
                    last_error,
                })
            }
        ),
        any::<(u64, u64)>().prop_map(|(present, pages)| Message::Progress { present, pages }),
        any::<(u64, u64)>().prop_map(|(present, lost)| Message::Drained(Drained { present, lost })),
        (any_of(WorkingSetState::ALL), any::<u64>())
            .prop_map(|(state, pages)| Message::WorkingSetState { state, pages }),
        any::<u64>().prop_map(|pages| Message::Poisoned { pages }),
        any::<u64>().prop_map(|count| Message::Done { count }),
        part().prop_map(Message::PageMap),
        any::<u32>().prop_map(|parts| Message::HandedOver { parts }),
        any::<u32>().prop_map(|space| Message::SpaceAttached { space }),
    ];
    let others = prop_oneof![
        (any_of(RefusedCode::ALL), text()).prop_map(|(code, text)| Message::Refused { code, text }),
        (any::<u32>(), text()).prop_map(|(regions, text)| Message::Stalled { regions, text }),
        any::<u32>().prop_map(|regions| Message::Resumed { regions }),
        any::<u32>().prop_map(|within_ms| Message::GoingAway { within_ms }),
        text().prop_map(|text| Message::Killed { text }),
    ];
    prop_oneof![requests, empty, answers, others]
}

fn of(kind: u16, payload: Vec<u8>) -> Result<Message, DecodeError> {
    Message::of(&Frame {
        kind,
        flags: 0,
        id: 1,
        payload,
    })
}

proptest! {
    #[test]
    fn every_message_survives(message in message(), id in any::<u32>()) {
        let frame = message.frame(id, false);
        prop_assert_eq!(frame.id, id);
        prop_assert_eq!(frame.is_optional(), message.is_optional());
        prop_assert_eq!(Message::of(&frame), Ok(message));
    }

    #[test]
    fn a_cut_or_longer_payload_is_refused(message in message(), cut in any::<prop::sample::Index>()) {
        let whole = message.frame(1, false);
        // The bytes of a page map have no end of their own.
        prop_assume!(!matches!(message, Message::PageMap(_) | Message::ResumeMap(_)));
        let mut longer = whole.clone();
        longer.payload.push(0);
        prop_assert_eq!(Message::of(&longer), Err(DecodeError::Long { bytes: 1 }));
        prop_assume!(!whole.payload.is_empty());
        let mut shorter = whole.clone();
        shorter.payload.truncate(cut.index(whole.payload.len()));
        prop_assert!(Message::of(&shorter).is_err());
    }

    /// What is decoded from changed bytes is what those bytes say: nothing is ignored.
    #[test]
    fn a_changed_byte_is_refused_or_seen(message in message(), at in any::<prop::sample::Index>(), value in any::<u8>()) {
        let mut frame = message.frame(1, false);
        prop_assume!(!frame.payload.is_empty());
        let at = at.index(frame.payload.len());
        frame.payload[at] = value;
        if let Ok(found) = Message::of(&frame) {
            prop_assert_eq!(found.frame(1, false).payload, frame.payload);
        }
    }

    #[test]
    fn no_payload_makes_it_panic(kind in prop_oneof![0_u16..20, 0x8000_u16..0x8010, 0x9000_u16..0x9006, any::<u16>()], payload in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = of(kind, payload);
    }
}

#[test]
fn the_most_regions_fit_a_frame_and_one_more_is_refused() {
    let region = Region::missing(1 << 20, 4096, 0);
    let mut attach = Attach {
        uffd_features: 8,
        regions: vec![region; MAX_REGIONS],
    };
    let frame = Message::Attach(attach.clone()).frame(1, false);
    assert!(frame.payload.len() <= MAX_PAYLOAD_BYTES);
    assert_eq!(Message::of(&frame), Ok(Message::Attach(attach.clone())));
    attach.regions.push(region);
    let field = "the number of regions";
    let frame = Message::Attach(attach).frame(1, false);
    assert_eq!(Message::of(&frame), Err(DecodeError::Field { field }));
    let none = Message::Attach(Attach::default()).frame(1, false);
    assert_eq!(Message::of(&none), Err(DecodeError::Field { field }));
}

/// A peer's number of regions allocates nothing.
#[test]
fn a_number_of_regions_without_regions_is_refused() {
    let mut payload = vec![0; 16];
    payload[8..12].copy_from_slice(&16_000_u32.to_le_bytes());
    assert_eq!(of(2, payload), Err(DecodeError::Short));
}

#[test]
fn fields_without_a_valid_value_are_refused() {
    let good = Message::Attach(Attach {
        uffd_features: 0,
        regions: vec![Region::missing(0, 4096, 0)],
    });
    // The offset of a byte in the payload, and a bad value: page size, mode, file, both reserved words.
    for (at, bad) in [(48, 13), (49, 3), (51, 0), (12, 1), (52, 1)] {
        let mut frame = good.frame(1, false);
        frame.payload[at] = bad;
        let found = Message::of(&frame);
        assert!(
            matches!(found, Err(DecodeError::Field { .. })),
            "{at}: {found:?}"
        );
    }
    for (kind, payload) in [(6, 5_u32), (0x80ff, 0), (0x80ff, 15)] {
        let found = of(kind, payload.to_le_bytes().to_vec());
        assert!(matches!(found, Err(DecodeError::Field { .. })), "{kind}");
    }
    assert_eq!(of(15, Vec::new()), Err(DecodeError::Unknown { kind: 15 }));
}

/// A label of another kind is no label: who reads the log relies on what it has.
#[test]
fn a_label_that_could_forge_a_line_is_refused_by_name() {
    let of_texts = |id: &str, traceparent: &str| {
        let mut out = Writer::default();
        out.text(id);
        out.text(traceparent);
        of(14, out.0)
    };
    let longest = "a".repeat(64);
    assert!(of_texts(&longest, "").is_ok());
    let longer = "a".repeat(65);
    for (id, traceparent, wanted) in [
        ("a\nb", "", LabelError::IdCharacter { at: 1 }),
        ("\"", "", LabelError::IdCharacter { at: 0 }),
        ("ä", "", LabelError::IdCharacter { at: 0 }),
        ("", "", LabelError::IdBytes { bytes: 0 }),
        (&longer, "", LabelError::IdBytes { bytes: 65 }),
        ("a", "00-1-2-3", LabelError::Traceparent),
    ] {
        let found = of_texts(id, traceparent);
        assert_eq!(found, Err(DecodeError::Label(wanted)), "{id:?}");
    }
}

#[test]
fn a_long_text_is_cut_when_it_is_sent_and_refused_when_it_arrives() {
    let text = "ä".repeat(MAX_TEXT_BYTES);
    let frame = Message::Killed { text: text.clone() }.frame(0, false);
    let cut = "ä".repeat(MAX_TEXT_BYTES / 2);
    assert_eq!(Message::of(&frame), Ok(Message::Killed { text: cut }));
    let mut payload = u16::try_from(MAX_TEXT_BYTES + 1)
        .unwrap()
        .to_le_bytes()
        .to_vec();
    payload.resize(MAX_TEXT_BYTES + 3, b'a');
    assert_eq!(
        of(0x9004, payload),
        Err(DecodeError::Field { field: "text" })
    );
    assert_eq!(
        of(0x9004, vec![1, 0, 0xff]),
        Err(DecodeError::Field { field: "text" })
    );
}
