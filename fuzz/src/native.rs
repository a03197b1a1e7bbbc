//! The native protocol (`pagetide_serve::native`), in both directions: requests, answers and notices have
//! one codec.

use pagetide_memory::PageSize;
use pagetide_serve::native::frame::{Decoder, Frame, FrameError, MAGIC, MAX_PAYLOAD_BYTES};
use pagetide_serve::native::label::{MAX_ID_BYTES, VmLabel};
use pagetide_serve::native::message::{
    Attach, Drained, Health, MAX_REGIONS, MAX_TEXT_BYTES, Message, PageMapPart, RefusedCode,
    Region, RegionMode, VmState, Welcome, WorkingSetAction, WorkingSetState,
};
use pagetide_sources::Digest;

use crate::frames::{self, Decode};
use crate::memory::bounded;
use crate::take;

/// The first byte divides the rest, which is the stream of one direction.
pub(crate) fn stream(input: &[u8]) -> bool {
    frames::stream::<Decoder>(input, |frame| {
        assert!(frame.payload.len() <= MAX_PAYLOAD_BYTES);
        check_message(frame)
    })
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

    fn announces(&self) -> Option<bool> {
        Some(self.has_frame())
    }
}

/// The first two bytes are the type; the rest is the payload.
pub(crate) fn message(mut input: &[u8]) -> bool {
    let kind = u16::from_le_bytes(take(&mut input));
    check_message(&Frame {
        kind,
        flags: 0,
        id: 7,
        payload: input.to_vec(),
    })
}

/// Whether the frame is a message, whose bounds are checked then.
fn check_message(frame: &Frame) -> bool {
    let limit = 4 * frame.payload.len() + 1024;
    let Ok(message) = bounded(limit, || Message::of(frame)) else {
        return false;
    };
    assert_eq!(message.kind(), frame.kind);
    let again = message.frame(frame.id, frame.has_more());
    assert_eq!(
        again.payload, frame.payload,
        "no byte is ignored: {message:?}"
    );
    assert_eq!(Message::of(&again), Ok(message.clone()));
    let text = match &message {
        Message::Hello { name, .. } => name,
        Message::Health(health) => &health.last_error,
        Message::Refused { text, .. }
        | Message::Stalled { text, .. }
        | Message::Killed { text } => text,
        Message::Attach(attach) => {
            assert!(!attach.regions.is_empty() && attach.regions.len() <= MAX_REGIONS);
            for region in &attach.regions {
                assert_eq!(region.file.is_some(), region.mode == RegionMode::Minor);
            }
            return true;
        }
        Message::Label(label) => {
            assert!(label.id().len() <= MAX_ID_BYTES);
            // Both are written to a log.
            let texts = [label.id(), label.traceparent()].concat();
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-:".contains(&byte);
            assert!(texts.bytes().all(is_plain), "{texts:?}");
            return true;
        }
        _ => return true,
    };
    assert!(text.len() <= MAX_TEXT_BYTES);
    true
}

/// One of each.
fn examples() -> Vec<Message> {
    let digest = Digest([7; 32]);
    let part = PageMapPart {
        region: 1,
        first_page: 2,
        bytes: vec![3; 5],
    };
    let region = Region::missing(1 << 21, 1 << 21, 4096);
    let huge = Region {
        page_size: PageSize::Size2M,
        ..region
    };
    let text = || "a text: ä".to_owned();
    vec![
        Message::Hello {
            lowest: 1,
            highest: 1,
            features: 7,
            name: text(),
        },
        Message::Attach(Attach {
            uffd_features: 8,
            regions: vec![region, huge, region.minor(1, 4096), region.cloned_image()],
        }),
        Message::Share,
        Message::HealthRequest,
        Message::Drain,
        Message::WorkingSet(WorkingSetAction::Replay),
        Message::Poison {
            offset: 4096,
            bytes: 8192,
        },
        Message::Resume,
        Message::HandOver,
        Message::ResumeMap(part.clone()),
        Message::Goodbye,
        Message::Label(
            VmLabel::new(
                "web-7",
                "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            )
            .expect("it is one"),
        ),
        Message::Welcome(Welcome {
            version: 1,
            max_payload_bytes: 1 << 20,
            max_regions: 16_384,
            max_descriptors: 16,
            max_memory_bytes: 4 << 40,
            max_map_bytes: 16 << 20,
            features: 7,
            image_bytes: 1 << 30,
            image: digest,
        }),
        Message::Attached {
            regions: 1,
            working_set: WorkingSetState::Recording,
            bytes: 4096,
            image: digest,
        },
        Message::Shared {
            bytes: 4096,
            page_bytes: 4096,
        },
        Message::Health(Health {
            state: VmState::Stalled,
            present: 1,
            lost: 2,
            pages: 3,
            faults: 4,
            stalls: 5,
            last_error: text(),
        }),
        Message::Progress {
            present: 1,
            pages: 2,
        },
        Message::Drained(Drained {
            present: 1,
            lost: 0,
        }),
        Message::WorkingSetState {
            state: WorkingSetState::Off,
            pages: 9,
        },
        Message::Poisoned { pages: 1 },
        Message::Done { count: 1 },
        Message::PageMap(part),
        Message::HandedOver { parts: 1 },
        Message::Left,
        Message::Refused {
            code: RefusedCode::Order,
            text: text(),
        },
        Message::Stalled {
            regions: 1,
            text: text(),
        },
        Message::Resumed { regions: 1 },
        Message::GoingAway { within_ms: 3500 },
        Message::Killed { text: text() },
    ]
}

pub(crate) fn message_seeds() -> Vec<Vec<u8>> {
    let seed = |message: &Message| {
        let frame = message.frame(1, false);
        [&frame.kind.to_le_bytes()[..], &frame.payload].concat()
    };
    examples().iter().map(seed).collect()
}

pub(crate) fn stream_seeds() -> Vec<Vec<u8>> {
    let seed = |messages: &[Message]| {
        let mut bytes = vec![5];
        bytes.extend(MAGIC);
        for message in messages {
            let frame = message.frame(3, false);
            frame.encode(&mut bytes).expect("it is short");
        }
        bytes
    };
    let examples = examples();
    examples.chunks(4).map(seed).collect()
}
