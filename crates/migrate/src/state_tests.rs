//! The vCPUs' and devices' state at the destination: parts in order, repeated, missing, too many, and changed.

use crate::destination::{Destination, Step};
use crate::event::{DestinationAction, DestinationEvent, Refused};
use crate::hostile_tests::{commit, destinations, sealed_state, state};
use crate::journal::{KeptState, RecordKind};
use crate::message::{CONTROL, MAX_STATE_BYTES, Message};

fn receiving() -> Destination {
    let mut all = destinations().into_iter();
    all.find(|side| *side.step() == Step::Receiving).unwrap()
}

fn sealed(side: &Destination, state: KeptState) -> DestinationEvent {
    let digest = side.missing().digest();
    DestinationEvent::Received(CONTROL, Message::Sealed { digest, state })
}

const TAKEN: [DestinationAction; 1] = [DestinationAction::TakeState];

#[test]
fn a_part_of_the_state_is_the_first_or_follows_the_one_before() {
    let mut side = receiving();
    for (event, expected) in [
        (state(3, 5, false), Err((3, 0))),
        (state(0, 3, true), Ok(())),
        (state(4, 4, false), Err((4, 3))),
        (state(2, 6, false), Err((2, 3))),
        (state(3, 4, true), Ok(())),
        // It begins anew.
        (state(0, 3, true), Ok(())),
        (state(7, 1, false), Err((7, 3))),
        (state(3, 5, false), Ok(())),
        // It was whole.
        (state(8, 1, false), Err((8, 8))),
        (state(0, 8, false), Ok(())),
    ] {
        let before = side.clone();
        let result = side.handle(event.clone());
        match expected {
            Ok(()) => assert_eq!(result, Ok(TAKEN.to_vec()), "{event:?}"),
            Err((offset, bytes)) => {
                assert_eq!(result, Err(Refused::State { offset, bytes }), "{event:?}");
                assert_eq!(side, before);
            }
        }
    }
    side.handle(sealed(&side, sealed_state())).unwrap();
    assert_eq!(*side.step(), Step::Punching);
}

#[test]
fn the_state_has_a_bound() {
    let mut side = receiving();
    side.handle(state(0, 1 << 20, true)).unwrap();
    let mut offset = 1 << 20;
    while offset < MAX_STATE_BYTES {
        assert!(side.handle(state(offset, 1 << 20, true)).is_ok());
        offset += 1 << 20;
    }
    let before = side.clone();
    let error = Refused::State {
        offset,
        bytes: offset,
    };
    assert_eq!(side.handle(state(offset, 1, false)), Err(error));
    assert_eq!(side, before);
}

#[test]
fn a_state_that_is_cut_changed_or_absent_is_refused_for_good() {
    let whole = sealed_state();
    let shorter = KeptState { bytes: 7, ..whole };
    let changed = KeptState {
        digest: [9; 32],
        ..whole
    };
    for (parts, said) in [
        (vec![], whole),
        (vec![state(0, 8, true)], whole),
        (vec![state(0, 7, false)], whole),
        (vec![state(0, 8, false)], shorter),
        (vec![state(0, 8, false)], changed),
        // The control stream was lost behind a part.
        (
            vec![
                state(0, 8, false),
                DestinationEvent::StreamDown(CONTROL),
                DestinationEvent::StreamUp(CONTROL),
            ],
            whole,
        ),
    ] {
        let mut side = receiving();
        for part in &parts {
            side.handle(part.clone()).unwrap();
        }
        let record = DestinationAction::Record(RecordKind::Refused);
        assert_eq!(
            side.handle(sealed(&side, said)),
            Ok(vec![record]),
            "{parts:?}"
        );
        let token = DestinationEvent::Received(CONTROL, Message::Commit(commit()));
        assert_eq!(side.handle(token), Ok(vec![]), "it never enters");
    }
}

#[test]
fn a_state_that_is_repeated_after_the_seal_is_not_taken() {
    for before in destinations() {
        let mut side = before.clone();
        let result = side.handle(state(0, 8, false));
        match before.step() {
            Step::Receiving => assert_eq!(result, Ok(TAKEN.to_vec())),
            Step::Punching | Step::Loading | Step::Ready | Step::Entering => {
                assert_eq!((result, &side), (Ok(vec![]), &before));
            }
            _ => assert!(result.is_err(), "{:?}", before.step()),
        }
    }
}
