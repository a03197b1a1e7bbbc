//! Maps and records that a bit has changed on their way.

use pagetide_memory::{PageIndex, PageRange};

use crate::destination::Step as DestinationStep;
use crate::event::{DestinationAction, DestinationEvent, Refused, SourceEvent};
use crate::hostile_tests::{PAGES, destinations, sources};
use crate::message::{CONTROL, Content, Message, PageRecord};
use crate::pages::PageSet;
use crate::rounds::Round;
use crate::source::Step as SourceStep;

/// Else what it does not say would be taken for pages that are there, and nobody would send them.
#[test]
fn a_map_that_is_not_whole_or_was_changed_is_refused_by_its_digest() {
    let part = |first, count: u32, bits: &[u8]| Message::Map {
        first,
        count,
        bits: bits.to_vec(),
    };
    let mut map = PageSet::empty(PAGES);
    map.insert(PageRange::single(PageIndex(0)));
    map.insert(PageRange::single(PageIndex(9)));
    let resume = Message::Resume {
        digest: map.digest(),
    };
    let (first, second) = (part(0, 8, &[1]), part(8, 8, &[2]));
    let postcopy = sources()
        .into_iter()
        .find(|source| *source.step() == SourceStep::Postcopy);
    let mut source = postcopy.unwrap();
    for (parts, is_taken) in [
        (&[][..], false),
        (std::slice::from_ref(&first), false),
        (&[part(0, 8, &[3]), second.clone()], false),
        (&[first.clone(), second.clone()], true),
    ] {
        for message in parts {
            let event = SourceEvent::Received(CONTROL, message.clone());
            source.handle(event).unwrap();
        }
        let before = source.clone();
        let result = source.handle(SourceEvent::Received(CONTROL, resume.clone()));
        if is_taken {
            assert_eq!(result, Ok(vec![]));
            assert_eq!(source.dirty_pages(), 2, "exactly these are left to be sent");
        } else {
            assert_eq!(result, Err(Refused::OtherMap), "{parts:?}");
            assert_eq!(source, before);
        }
        // The stream was closed, and the destination begins anew.
        source.handle(SourceEvent::StreamDown(CONTROL)).unwrap();
        source.handle(SourceEvent::StreamUp(CONTROL)).unwrap();
    }
}

/// How many pages it has may be what was changed: the answer would count pages of the record behind it as stored.
#[test]
fn a_damaged_record_is_answered_only_if_its_bytes_tell_its_pages() {
    let before = destinations().swap_remove(3);
    assert_eq!(*before.step(), DestinationStep::Receiving);
    let damaged = |content| {
        let record = PageRecord {
            run: PageRange::new(PageIndex(0), 3),
            round: Round(1),
            content,
            checksum: 0,
        };
        let mut side = before.clone();
        let event = DestinationEvent::Pages {
            stream: CONTROL,
            record,
            is_intact: false,
        };
        let result = side.handle(event);
        assert_eq!(side, before, "nothing is stored");
        result
    };
    let answer = DestinationAction::Acknowledge(CONTROL, Message::Damaged { pages: 3 });
    assert_eq!(damaged(Content::Bytes), Ok(vec![answer]));
    for content in [
        Content::Zstd,
        Content::Zero,
        Content::Discarded,
        Content::Poisoned,
    ] {
        assert!(damaged(content).is_err(), "{content:?}");
    }
}
