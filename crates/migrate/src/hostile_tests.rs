//! Every message in every state, as a hostile peer sends it: an error with a name, and the machine as before.

use std::mem::discriminant;

use pagetide_memory::{PageIndex, PageRange};

use crate::Decision;
use crate::coding::tests::examples;
use crate::destination::{Destination, Step as DestinationStep};
use crate::event::{
    DestinationAction, DestinationEvent, Outcome, Phase, Refused, SourceAction, SourceEvent, Timer,
    Word,
};
use crate::ids::{MapDigest, Secret, Token};
use crate::journal::{KeptState, RecordKind};
use crate::message::{
    CONTROL, CancelCode, Content, DeclineCode, MAX_STATE_BYTES, Message, PageRecord, StatePart,
    StreamIndex,
};
use crate::model::offer;
use crate::pages::PageSet;
use crate::rounds::Round;
use crate::source::{Source, Step as SourceStep};

pub(crate) const PAGES: u64 = 16;

pub(crate) fn commit() -> Token {
    Token::new(Secret([0xc0; 32]))
}

pub(crate) fn refusal() -> Token {
    Token::new(Secret([0xf0; 32]))
}

/// The source's states on the way to the end, each with the machine.
pub(crate) fn sources() -> Vec<Source> {
    let mut source = Source::new(commit(), PAGES, 2);
    let mut all = vec![source.clone()];
    let digest = PageSet::empty(PAGES).digest();
    let received = |message| SourceEvent::Received(CONTROL, message);
    let acknowledged =
        |stream, pages| SourceEvent::Received(StreamIndex(stream), Message::Stored { pages });
    for event in [
        SourceEvent::StreamUp(CONTROL),
        SourceEvent::StreamUp(StreamIndex(1)),
        received(Message::Accepted {
            refusal_hash: refusal().hash(),
        }),
        SourceEvent::JournalOpened,
        SourceEvent::Room(CONTROL, 256),
        acknowledged(0, 16),
        SourceEvent::Decided(Decision::Postcopy),
        SourceEvent::Paused,
        SourceEvent::Harvested(PageSet::empty(PAGES)),
        acknowledged(0, 1),
        acknowledged(1, 1),
        SourceEvent::Recorded(RecordKind::Sealed),
        received(Message::Ready { digest }),
        SourceEvent::Recorded(RecordKind::Yielded),
        received(Message::Entered),
        received(Message::Complete),
    ] {
        source.handle(event).unwrap();
        all.push(source.clone());
    }
    assert_eq!(*source.step(), SourceStep::Ended(Outcome::Complete));
    all
}

/// A source that was sealed when these pages were dirty.
fn sealed_source(dirty: &PageSet) -> Source {
    let marking = sources()
        .into_iter()
        .find(|source| matches!(source.step(), SourceStep::LastHarvest(_)));
    let mut source = marking.unwrap();
    let marked = |stream| SourceEvent::Received(StreamIndex(stream), Message::Stored { pages: 1 });
    for event in [
        SourceEvent::Harvested(dirty.clone()),
        marked(0),
        marked(1),
        SourceEvent::Recorded(RecordKind::Sealed),
    ] {
        source.handle(event).unwrap();
    }
    assert_eq!(*source.step(), SourceStep::Sealed);
    source
}

pub(crate) fn record(first: u64, count: u64, round: u8) -> DestinationEvent {
    let run = PageRange::new(PageIndex(first), count);
    let record = PageRecord {
        run,
        round: Round(round),
        content: Content::Zero,
        checksum: 0,
    };
    DestinationEvent::Pages {
        stream: CONTROL,
        record,
        is_intact: true,
    }
}

/// The state that the source has sealed.
pub(crate) fn sealed_state() -> KeptState {
    KeptState {
        bytes: 8,
        digest: [8; 32],
    }
}

/// A part of it, whose digest tells where the part ends.
pub(crate) fn state(offset: u64, bytes: u32, has_more: bool) -> DestinationEvent {
    let end = offset.saturating_add(u64::from(bytes));
    let part = StatePart {
        offset,
        bytes,
        has_more,
    };
    DestinationEvent::State {
        stream: CONTROL,
        part,
        digest: [u8::try_from(end.min(255)).unwrap(); 32],
    }
}

/// The destination's.
pub(crate) fn destinations() -> Vec<Destination> {
    let mut destination = Destination::new(refusal(), PAGES, 2);
    let mut all = vec![destination.clone()];
    let digest = PageSet::empty(PAGES).digest();
    let received = |message| DestinationEvent::Received(CONTROL, message);
    let offered = crate::message::Offer {
        commit_hash: commit().hash(),
        ..offer(PAGES)
    };
    for event in [
        DestinationEvent::StreamUp(CONTROL),
        received(Message::Offer(Box::new(offered))),
        DestinationEvent::Admitted,
        record(0, 16, 1),
        DestinationEvent::Stored(CONTROL),
        received(Message::EndMark),
        state(0, 8, false),
        received(Message::Sealed {
            digest,
            state: sealed_state(),
        }),
        DestinationEvent::Punched,
        DestinationEvent::Loaded,
        received(Message::Commit(commit())),
        DestinationEvent::Recorded(RecordKind::Entered),
        received(Message::Released),
    ] {
        destination.handle(event).unwrap();
        all.push(destination.clone());
    }
    assert_eq!(
        *destination.step(),
        DestinationStep::Ended(Outcome::Complete)
    );
    all
}

/// Every type of message with values that an honest peer would not send, and some that it would.
fn messages() -> Vec<Message> {
    let mut all: Vec<_> = examples().into_iter().map(|(message, _)| message).collect();
    let far = PageRange::new(PageIndex(u64::MAX - 300), 256);
    all.extend([
        Message::Stored { pages: u32::MAX },
        Message::Damaged { pages: u32::MAX },
        Message::Map {
            first: u64::MAX - 7,
            count: 8,
            bits: vec![0xff],
        },
        Message::Map {
            first: 0,
            count: 16,
            bits: vec![0xff, 0xff],
        },
        Message::Ready {
            digest: MapDigest([0; 32]),
        },
        Message::Request { run: far },
        Message::Refusal(commit()),
        Message::Commit(refusal()),
    ]);
    all
}

#[test]
fn the_source_refuses_what_does_not_belong_and_never_runs_after_the_yield() {
    let mut refused = 0;
    for before in sources() {
        for message in messages() {
            for stream in [CONTROL, StreamIndex(1), StreamIndex(9)] {
                let mut source = before.clone();
                match source.handle(SourceEvent::Received(stream, message.clone())) {
                    Err(error) => {
                        assert_eq!(source, before, "{}: {error}", message.name());
                        assert!(!error.to_string().is_empty());
                        refused += 1;
                    }
                    Ok(actions) => {
                        let is_bound =
                            matches!(before.step(), SourceStep::Yielded | SourceStep::Postcopy);
                        let runs = actions.iter().any(|action| {
                            matches!(
                                action,
                                SourceAction::Run | SourceAction::Record(RecordKind::RunningAgain)
                            )
                        });
                        assert!(
                            !(is_bound && runs),
                            "{} in {:?}",
                            message.name(),
                            before.step()
                        );
                    }
                }
            }
        }
    }
    assert!(refused > 1000, "{refused}");
}

#[test]
fn the_destination_refuses_what_does_not_belong_and_never_enters_without_the_token() {
    let mut refused = 0;
    for before in destinations() {
        let mut events: Vec<_> = messages()
            .into_iter()
            .flat_map(|message| {
                [CONTROL, StreamIndex(1), StreamIndex(9)]
                    .map(|stream| DestinationEvent::Received(stream, message.clone()))
            })
            .collect();
        events.extend([
            record(16, 1, 1),
            record(u64::MAX - 1, 1, 255),
            record(0, 0, 1),
            record(3, 256, 2),
        ]);
        events.extend([
            state(8, 1, false),
            state(7, 1, true),
            state(0, 0, false),
            state(MAX_STATE_BYTES, 1, false),
            state(u64::MAX, u32::MAX, false),
        ]);
        events.push(DestinationEvent::Stored(StreamIndex(9)));
        events.push(DestinationEvent::Fault(PageRange::new(PageIndex(15), 2)));
        for event in events {
            let mut destination = before.clone();
            match destination.handle(event.clone()) {
                Err(error) => {
                    assert_eq!(destination, before, "{event:?}: {error}");
                    refused += 1;
                }
                Ok(actions) => {
                    let enters = actions.iter().any(|action| {
                        matches!(
                            action,
                            DestinationAction::Enter
                                | DestinationAction::Record(RecordKind::Entered)
                        )
                    });
                    assert!(!enters, "{event:?} in {:?}", before.step());
                }
            }
        }
    }
    assert!(refused > 800, "{refused}");
}

#[test]
fn an_event_of_the_callers_in_a_wrong_state_changes_nothing() {
    for before in sources() {
        for event in [
            SourceEvent::JournalOpened,
            SourceEvent::JournalFailed,
            SourceEvent::Room(StreamIndex(9), 1),
            SourceEvent::Decided(Decision::NextRound),
            SourceEvent::Paused,
            SourceEvent::Harvested(PageSet::full(PAGES)),
            SourceEvent::Recorded(RecordKind::Refused),
            SourceEvent::RecordFailed(RecordKind::Yielded),
            SourceEvent::HolderEnded,
            SourceEvent::Word(Word::Fenced),
            SourceEvent::Word(Word::Release),
            SourceEvent::StreamUp(StreamIndex(2)),
        ] {
            let mut source = before.clone();
            if source.handle(event).is_err() {
                assert_eq!(source, before);
            }
        }
    }
}

/// Urgent pages have streams of their own.
#[test]
fn a_request_on_another_stream_is_answered_there() {
    let other = StreamIndex(1);
    let run = PageRange::new(PageIndex(3), 2);
    for control_is_up in [true, false] {
        let mut source = sealed_source(&PageSet::full(PAGES));
        if !control_is_up {
            source.handle(SourceEvent::StreamDown(CONTROL)).unwrap();
        }
        let event = SourceEvent::Received(other, Message::Request { run });
        let answer = SourceAction::SendPages(other, run, Round::POSTCOPY);
        assert_eq!(source.handle(event), Ok(vec![answer]));
    }
}

/// Loading the state waits for it.
#[test]
fn a_page_that_is_damaged_or_lost_after_the_seal_is_sent_again_before_the_vm_runs() {
    let run = PageRange::single(PageIndex(3));
    let again = |stream| SourceAction::SendPages(stream, run, Round::POSTCOPY);
    let mut source = sealed_source(&PageSet::full(PAGES));
    let digest = source.missing().digest();
    let received = |message| SourceEvent::Received(CONTROL, message);
    for (event, step) in [
        (None, SourceStep::Sealed),
        (
            Some(received(Message::Ready { digest })),
            SourceStep::Yielding,
        ),
        (
            Some(SourceEvent::RecordFailed(RecordKind::Yielded)),
            SourceStep::YieldFailed,
        ),
        (Some(SourceEvent::Timer(Timer::Retry)), SourceStep::Yielding),
        (
            Some(SourceEvent::Recorded(RecordKind::Yielded)),
            SourceStep::Yielded,
        ),
    ] {
        event.map(|event| source.handle(event).unwrap());
        assert_eq!(*source.step(), step);
        source.handle(received(Message::Request { run })).unwrap();
        assert!(!source.wants_room());
        source
            .handle(received(Message::Damaged { pages: 1 }))
            .unwrap();
        assert!(source.wants_room(), "{step:?}");
        let sent = source.handle(SourceEvent::Room(StreamIndex(1), 8));
        assert_eq!(sent, Ok(vec![again(StreamIndex(1))]), "{step:?}");
        source
            .handle(SourceEvent::StreamDown(StreamIndex(1)))
            .unwrap();
        assert!(source.wants_room(), "{step:?}");
        let sent = source.handle(SourceEvent::Room(CONTROL, 8));
        assert_eq!(sent, Ok(vec![again(CONTROL)]), "{step:?}");
        source
            .handle(received(Message::Stored { pages: 1 }))
            .unwrap();
        source
            .handle(SourceEvent::StreamUp(StreamIndex(1)))
            .unwrap();
    }
}

/// An operator's switch, or a deadline, does not wait for the end of a round.
#[test]
fn a_round_that_is_being_sent_can_be_ended_by_a_switch() {
    let precopy = sources()
        .into_iter()
        .find(|source| *source.step() == SourceStep::Precopy);
    let mut source = precopy.unwrap();
    source.handle(SourceEvent::Room(CONTROL, 4)).unwrap();
    let before = source.clone();
    for decision in [Decision::NextRound, Decision::Cancel] {
        assert!(source.handle(SourceEvent::Decided(decision)).is_err());
        assert_eq!(source, before);
    }
    let switch = SourceEvent::Decided(Decision::Postcopy);
    assert_eq!(source.handle(switch), Ok(vec![SourceAction::Pause]));
    assert!(!source.wants_room());
    let marked =
        |stream, pages| SourceEvent::Received(StreamIndex(stream), Message::Stored { pages });
    for event in [
        SourceEvent::Paused,
        SourceEvent::Harvested(PageSet::empty(PAGES)),
        marked(0, 5),
        marked(1, 1),
    ] {
        source.handle(event).unwrap();
    }
    assert_eq!(*source.step(), SourceStep::Sealing);
    assert_eq!(source.missing().count(), PAGES - 4, "what was not sent");
}

/// Else a stream without pages would be lost after some seconds of silence.
#[test]
fn each_stream_that_is_up_is_kept_alive() {
    for (index, is_up) in [(0, true), (1, true), (9, false)] {
        let stream = StreamIndex(index);
        for before in sources().split_off(3) {
            let mut source = before.clone();
            let result = source.handle(SourceEvent::Received(stream, Message::Alive));
            assert_eq!((result.is_ok(), &source), (is_up, &before));
        }
        for before in destinations().split_off(2) {
            let mut destination = before.clone();
            let _ = destination.handle(DestinationEvent::StreamUp(StreamIndex(1)));
            let up = destination.clone();
            let event = DestinationEvent::Received(stream, Message::Alive);
            assert_eq!(destination.handle(event).is_ok(), is_up);
            assert_eq!(destination, up);
        }
    }
}

#[test]
fn a_token_comes_by_any_stream() {
    let other = StreamIndex(1);
    let yielded = sources()
        .into_iter()
        .find(|source| *source.step() == SourceStep::Yielded);
    let mut source = yielded.unwrap();
    source.handle(SourceEvent::StreamDown(CONTROL)).unwrap();
    let event = SourceEvent::Received(other, Message::Refusal(refusal()));
    let record = SourceAction::Record(RecordKind::RunningAgain);
    assert_eq!(source.handle(event), Ok(vec![record]));
    let ready = destinations()
        .into_iter()
        .find(|side| *side.step() == DestinationStep::Ready);
    let mut destination = ready.unwrap();
    destination
        .handle(DestinationEvent::StreamUp(other))
        .unwrap();
    destination
        .handle(DestinationEvent::StreamDown(CONTROL))
        .unwrap();
    let event = DestinationEvent::Received(other, Message::Commit(commit()));
    let record = DestinationAction::Record(RecordKind::Entered);
    assert_eq!(destination.handle(event), Ok(vec![record]));
}

#[test]
fn a_journal_that_cannot_be_written_is_found_out_before_the_first_page() {
    let opening = sources()
        .into_iter()
        .find(|source| *source.step() == SourceStep::Opening);
    let mut source = opening.unwrap();
    let actions = source.handle(SourceEvent::JournalFailed).unwrap();
    let code = CancelCode::Failed;
    assert_eq!(
        actions,
        [
            SourceAction::Send(Message::Cancel { code }),
            SourceAction::Done(Outcome::Failed)
        ],
        "the VM was never stopped"
    );
}

#[test]
fn a_host_that_lacks_something_refuses_with_all_reasons_at_once() {
    let admitting = destinations()
        .into_iter()
        .find(|side| *side.step() == DestinationStep::Admitting);
    let mut destination = admitting.unwrap();
    let reasons = vec!["no MSR 0x10".to_owned(), "no CPUID 7".to_owned()];
    let event = DestinationEvent::NotAdmitted(DeclineCode::Host, reasons.clone());
    let declined = Message::Declined {
        code: DeclineCode::Host,
        reasons,
    };
    let actions = destination.handle(event).unwrap();
    assert_eq!(
        actions.first(),
        Some(&DestinationAction::Send(declined.clone()))
    );
    let mut source = Source::new(commit(), PAGES, 1);
    source.handle(SourceEvent::StreamUp(CONTROL)).unwrap();
    let actions = source
        .handle(SourceEvent::Received(CONTROL, declined))
        .unwrap();
    assert!(
        actions.contains(&SourceAction::Done(Outcome::Refused)),
        "{actions:?}"
    );
    assert_eq!(source.phase(), Phase::Refused);
}

#[test]
fn a_guest_that_ends_ends_where_it_runs_and_the_other_side_is_told() {
    for before in sources() {
        let mut source = before.clone();
        match source.handle(SourceEvent::GuestEnded) {
            Ok(actions) => {
                assert!(!actions.contains(&SourceAction::Run), "{:?}", before.step());
                let is_over = before.phase() == Phase::Complete;
                let cancel = SourceAction::Send(Message::Cancel {
                    code: CancelCode::GuestEnded,
                });
                let is_up = *before.step() != SourceStep::Connecting || before != sources()[0];
                assert!(
                    is_over || !is_up || actions.contains(&cancel),
                    "{:?}",
                    before.step()
                );
            }
            Err(_) => assert!(before.phase() >= Phase::Paused, "{:?}", before.step()),
        }
    }
    let running = destinations()
        .into_iter()
        .find(|side| *side.step() == DestinationStep::Running);
    let actions = running
        .unwrap()
        .handle(DestinationEvent::GuestEnded(3))
        .unwrap();
    let told = DestinationAction::Send(Message::GuestEnded { status: 3 });
    assert_eq!(actions, [told, DestinationAction::Send(Message::Complete)]);
}

#[test]
fn an_offer_of_other_memory_than_was_admitted_is_refused() {
    let mut destination = Destination::new(refusal(), PAGES, 1);
    destination
        .handle(DestinationEvent::StreamUp(CONTROL))
        .unwrap();
    let before = destination.clone();
    let event = DestinationEvent::Received(CONTROL, Message::Offer(Box::new(offer(PAGES + 1))));
    assert!(destination.handle(event).is_err());
    assert_eq!(destination, before);
}

#[test]
fn fenced_is_taken_only_in_doubt() {
    for before in sources() {
        let mut source = before.clone();
        let result = source.handle(SourceEvent::Word(Word::Fenced));
        match before.step() {
            SourceStep::Yielded => assert_eq!(result, Err(Refused::LinkUp)),
            SourceStep::Postcopy => assert_eq!(result, Err(Refused::HasRun)),
            _ => assert_eq!(
                discriminant(&result.unwrap_err()),
                discriminant(&Refused::Word { phase: Phase::Lost })
            ),
        }
    }
    for before in destinations() {
        let mut destination = before.clone();
        let result = destination.handle(DestinationEvent::Word(Word::Fenced));
        match before.step() {
            DestinationStep::Ready => assert_eq!(result, Err(Refused::LinkUp)),
            _ => assert!(matches!(result, Err(Refused::Word { .. }))),
        }
    }
}
