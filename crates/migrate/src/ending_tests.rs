//! How a side ends, what it still answers then, and how it starts again.

use crate::destination::Destination;
use crate::event::{DestinationAction, DestinationEvent, Phase, SourceEvent, Timer};
use crate::hostile_tests::{PAGES, commit, refusal};
use crate::journal::RecordKind;
use crate::message::{CONTROL, Message};
use crate::source::{Memory, RestartError, Source};
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
