//! The native protocol (`pagetide_serve::native`), in both directions: requests, answers and notices have
//! one codec.

use pagetide_memory::PageSize;
use pagetide_serve::native::frame::{
    Decoder, Frame, FrameError, HEADER_BYTES, MAGIC, MAX_PAYLOAD_BYTES,
};
use pagetide_serve::native::message::{
    Attach, Drained, Health, MAX_REGIONS, MAX_TEXT_BYTES, Message, PageMapPart, RefusedCode,
    Region, RegionMode, VmState, Welcome, WorkingSetAction, WorkingSetState,
};
use pagetide_sources::Digest;

use crate::memory::bounded;
use crate::take;

/// The first byte divides the rest, which is the stream of one direction.
pub(crate) fn stream(mut input: &[u8]) -> bool {
    let [step] = take(&mut input);
    let whole = frames_of(input, input.len().max(1));
    let parts = frames_of(input, usize::from(step).max(1));
    assert_eq!(whole, parts, "in parts of {step} bytes");
    let (frames, error) = whole;
    let mut bytes = MAGIC.to_vec();
    let mut messages = 0;
    for frame in &frames {
        assert!(frame.payload.len() <= MAX_PAYLOAD_BYTES);
        frame.encode(&mut bytes).expect("it has come as a frame");
        messages += usize::from(check_message(frame));
    }
    if !frames.is_empty() {
        assert!(input.starts_with(&bytes), "frames are what their bytes say");
    }
    messages > 0 && error.is_none()
}

/// All frames of a stream that comes in parts of `step` bytes, and the error after them.
fn frames_of(input: &[u8], step: usize) -> (Vec<Frame>, Option<FrameError>) {
    // The decoder has the bytes, twice while it grows, and a frame has its payload again.
    let limit = 8 * input.len() + 1024;
    bounded(limit, || {
        let mut decoder = Decoder::new();
        let mut frames = Vec::new();
        for part in input.chunks(step) {
            decoder.push(part);
            loop {
                let is_there = decoder.has_frame();
                match decoder.next_frame() {
                    Ok(Some(frame)) => {
                        assert!(is_there, "a frame that was not announced");
                        frames.push(frame);
                    }
                    Ok(None) => {
                        assert!(!is_there, "a frame that was announced");
                        break;
                    }
                    Err(error) => {
                        assert_eq!(decoder.next_frame(), Err(error), "an error stays");
                        return (frames, Some(error));
                    }
                }
            }
        }
        let begun = input.len().min(MAGIC.len());
        let taken: usize = frames.iter().map(|f| HEADER_BYTES + f.payload.len()).sum();
        assert!(decoder.buffered() <= input.len());
        if begun == MAGIC.len() {
            assert_eq!(decoder.buffered() + taken + begun, input.len());
        }
        (frames, None)
    })
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
