//! How a side ends, what it still answers then, and how it starts again.

use crate::destination::{Destination, Step as DestinationStep};
use crate::event::{
    DestinationAction, DestinationEvent, Outcome, Phase, SourceAction, SourceEvent, Timer, Word,
};
use crate::hostile_tests::{PAGES, commit, destinations, record, refusal, sources};
use crate::journal::RecordKind;
use crate::message::{CONTROL, CancelCode, DeclineCode, Message, Offer};
use crate::model::offer;
use crate::source::{Memory, RestartError, Source, Step as SourceStep};
use crate::{Former, TakeOver};

#[test]
fn a_source_that_was_sealed_and_ran_on_is_not_started_again() {
    let former = TakeOver::check(Former {
        journal_locked_by: None,
        has_ended: true,
    })
    .unwrap();
    let restart = |last| {
        Source::restart(
            &former,
            commit(),
            refusal().hash(),
            PAGES,
            1,
            last,
            Memory::Held,
        )
        .map(|(source, _)| source)
    };
    assert_eq!(restart(None), Err(RestartError::NotSealed));
    assert_eq!(
        restart(Some(RecordKind::RunningAgain)),
        Err(RestartError::RanAfterSeal)
    );
    assert_eq!(
        restart(Some(RecordKind::Finished)),
        Err(RestartError::Finished)
    );
    for last in [RecordKind::Sealed, RecordKind::Yielded, RecordKind::Entered] {
        let gone = Memory::Gone;
        let hash = refusal().hash();
        let source = Source::restart(&former, commit(), hash, PAGES, 1, Some(last), gone);
        assert_eq!(source.unwrap_err(), RestartError::NoMemory);
    }
    let mut yielded = restart(Some(RecordKind::Yielded)).unwrap();
    assert_eq!(yielded.token(), Some(commit()));
    assert_eq!(
        yielded.handle(SourceEvent::Timer(Timer::Reconnect)),
        Ok(vec![])
    );
    let (lost, _) = Destination::restart(
        &former,
        refusal(),
        commit().hash(),
        PAGES,
        1,
        &[RecordKind::Entered],
    );
    assert_eq!((lost.phase(), lost.token()), (Phase::Lost, None));
}

/// Else the source would take a *complete* for a VM that never ran, and free the only copy.
#[test]
fn a_destination_that_has_finished_is_what_it_was_before() {
    use RecordKind::{Entered, Finished, Refused as RefusedRecord};
    let former = TakeOver::check(Former {
        journal_locked_by: None,
        has_ended: true,
    })
    .unwrap();
    let answers = |records: &[RecordKind]| {
        let (mut destination, actions) =
            Destination::restart(&former, refusal(), commit().hash(), PAGES, 1, records);
        assert_eq!(actions, [], "{records:?}");
        destination
            .handle(DestinationEvent::StreamUp(CONTROL))
            .unwrap();
        let event = DestinationEvent::Received(CONTROL, Message::Commit(commit()));
        let said = destination.handle(event).map(|actions| {
            let complete = DestinationAction::Send(Message::Complete);
            let refuses = DestinationAction::Send(Message::Refusal(refusal()));
            (actions.contains(&complete), actions.contains(&refuses))
        });
        (destination.phase(), said)
    };
    let refused = (Phase::Refused, Ok((false, true)));
    assert_eq!(answers(&[RefusedRecord, Finished]), refused);
    assert_eq!(answers(&[RefusedRecord, Finished, Finished]), refused);
    let complete = (Phase::Complete, Ok((true, false)));
    assert_eq!(answers(&[Entered, Finished]), complete);
    for never_entered in [&[Finished][..], &[Finished, Finished]] {
        let (phase, said) = answers(never_entered);
        assert_eq!(phase, Phase::Failed);
        assert!(said.is_err(), "{said:?}");
    }
}

/// No message of this version compares pages.
#[test]
fn an_offer_that_wants_pages_compared_is_declined() {
    let mut side = Destination::new(refusal(), PAGES, 1);
    side.handle(DestinationEvent::StreamUp(CONTROL)).unwrap();
    let offer = Offer {
        verifies: true,
        ..offer(PAGES)
    };
    let event = DestinationEvent::Received(CONTROL, Message::Offer(Box::new(offer)));
    let actions = side.handle(event).unwrap();
    let code = DeclineCode::Host;
    assert!(matches!(
        actions.first(),
        Some(DestinationAction::Send(Message::Declined { code: said, .. })) if *said == code
    ));
    assert_eq!(actions.last(), Some(&DestinationAction::Forget));
}

fn received(message: Message) -> DestinationEvent {
    DestinationEvent::Received(CONTROL, message)
}

fn side_in(step: DestinationStep) -> Destination {
    let mut all = destinations().into_iter();
    all.find(|side| *side.step() == step).unwrap()
}

/// What the source says last is answered, also by a side that has ended, and forgotten once.
#[test]
fn a_destination_forgets_when_the_source_has_ended() {
    let cancel = Message::Cancel {
        code: CancelCode::Failed,
    };
    let ended = DestinationAction::Send(Message::Ended);
    for (step, message) in [
        (DestinationStep::Receiving, cancel.clone()),
        (DestinationStep::Ready, cancel),
        (DestinationStep::Running, Message::Released),
    ] {
        let mut side = side_in(step);
        let actions = side.handle(received(message.clone())).unwrap();
        assert!(actions.ends_with(&[ended.clone(), DestinationAction::Forget]));
        assert_eq!(side.handle(received(message)), Ok(vec![ended.clone()]));
    }
    let mut side = side_in(DestinationStep::Ready);
    side.handle(DestinationEvent::Word(Word::Refuse)).unwrap();
    let refused = DestinationEvent::Recorded(RecordKind::Refused);
    side.handle(refused).unwrap();
    side.handle(DestinationEvent::StreamDown(CONTROL)).unwrap();
    // A second `--reconnect` has passed: it waits no longer, and keeps *r*.
    let actions = side.handle(DestinationEvent::Timer(Timer::Reconnect));
    let done = DestinationAction::Done(Outcome::Refused);
    assert_eq!(actions, Ok(vec![DestinationAction::Free, done]));
    assert_eq!(side.token(), Some(refusal()));
    let said = side.handle(DestinationEvent::StreamUp(CONTROL));
    let refusal = DestinationAction::Send(Message::Refusal(refusal()));
    assert_eq!(said, Ok(vec![refusal]));
    let actions = side.handle(received(Message::RefusalSeen));
    assert_eq!(actions, Ok(vec![ended, DestinationAction::Forget]));
}

#[test]
fn a_source_forgets_when_it_has_heard_waited_or_was_told() {
    let complete = sources().pop().unwrap();
    let ended = SourceEvent::Received(CONTROL, Message::Ended);
    let word = SourceEvent::Word(Word::Release);
    for event in [ended.clone(), word.clone()] {
        let mut source = complete.clone();
        assert_eq!(source.handle(event), Ok(vec![SourceAction::Forget]));
        assert_eq!(source.handle(ended.clone()), Ok(vec![]), "once");
        assert!(source.handle(word.clone()).is_err(), "it means nothing");
    }
    let mut source = complete.clone();
    let timer = SourceEvent::Timer(Timer::Reconnect);
    assert_eq!(source.handle(timer.clone()), Ok(vec![]), "the link is up");
    source.handle(SourceEvent::StreamDown(CONTROL)).unwrap();
    assert_eq!(source.handle(timer), Ok(vec![SourceAction::Forget]));
    for mut before in sources() {
        let has_ended = before == complete;
        assert_eq!(before.handle(ended.clone()).is_ok(), has_ended);
    }
}

/// The memory is gone by the word of the source's operator.
#[test]
fn a_destination_that_has_not_entered_refuses_when_the_source_was_released() {
    let mut side = side_in(DestinationStep::Ready);
    let record = DestinationAction::Record(RecordKind::Refused);
    let released = received(Message::Released);
    assert_eq!(side.handle(released.clone()), Ok(vec![record]));
    assert_eq!(side.handle(received(Message::Commit(commit()))), Ok(vec![]));
    let mut yielded = sources()
        .into_iter()
        .find(|source| *source.step() == SourceStep::Yielded)
        .unwrap();
    let actions = yielded.handle(SourceEvent::Word(Word::Release)).unwrap();
    let said = SourceAction::Send(Message::Released);
    let done = SourceAction::Done(Outcome::Lost);
    assert_eq!(actions, [SourceAction::Free, said.clone(), done]);
    // A refusal that was on its way.
    let refusal = SourceEvent::Received(CONTROL, Message::Refusal(refusal()));
    assert_eq!(yielded.handle(refusal), Ok(vec![said]));
}

/// Its journal does not say how many pages the VM has. It stores none of them.
#[test]
fn a_destination_started_again_refuses_no_record_for_its_pages() {
    let former = TakeOver::check(Former {
        journal_locked_by: None,
        has_ended: true,
    })
    .unwrap();
    for records in [&[][..], &[RecordKind::Refused], &[RecordKind::Entered]] {
        let hash = commit().hash();
        let (mut side, _) = Destination::restart(&former, refusal(), hash, 0, 1, records);
        side.handle(DestinationEvent::StreamUp(CONTROL)).unwrap();
        for round in [1, 255] {
            let stored = Message::Stored { pages: 3 };
            let acknowledged = DestinationAction::Acknowledge(CONTROL, stored);
            let said = side.handle(record(9, 3, round));
            assert_eq!(said, Ok(vec![acknowledged]), "{records:?}, round {round}");
        }
    }
}

/// Nothing was agreed: the source gives up, and never comes back.
#[test]
fn a_first_connection_that_is_lost_before_accepted_ends_both_sides() {
    for step in [DestinationStep::Connecting, DestinationStep::Admitting] {
        let mut side = side_in(step);
        side.handle(DestinationEvent::StreamUp(CONTROL)).unwrap();
        let actions = side.handle(DestinationEvent::StreamDown(CONTROL));
        let ended = [
            DestinationAction::Free,
            DestinationAction::Done(Outcome::Failed),
            DestinationAction::Forget,
        ];
        assert_eq!(actions, Ok(ended.to_vec()), "{step:?}");
        // The host's answer comes too late.
        assert!(side.handle(DestinationEvent::Admitted).is_err());
    }
    let mut source = sources().swap_remove(1);
    let actions = source.handle(SourceEvent::StreamDown(CONTROL)).unwrap();
    assert_eq!(actions.last(), Some(&SourceAction::Forget));
}

/// The journal has no YIELDED that a restart could find, and the VM runs or has ended at the source.
#[test]
fn a_lost_destination_ends_when_the_vm_runs_at_the_source() {
    let former = TakeOver::check(Former {
        journal_locked_by: None,
        has_ended: true,
    })
    .unwrap();
    let records = [RecordKind::Entered];
    let (mut side, _) =
        Destination::restart(&former, refusal(), commit().hash(), PAGES, 1, &records);
    side.handle(DestinationEvent::StreamUp(CONTROL)).unwrap();
    let code = CancelCode::Failed;
    let actions = side.handle(received(Message::Cancel { code }));
    let ended = [
        DestinationAction::Free,
        DestinationAction::Done(Outcome::Failed),
        DestinationAction::Send(Message::Ended),
        DestinationAction::Forget,
    ];
    assert_eq!(actions, Ok(ended.to_vec()));
}
