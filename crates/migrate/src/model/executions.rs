//! Executions that went wrong in earlier designs of the hand-over, step by step.

use super::Bounds;
use super::acts::Act;
use super::world::{
    Fate, Holder, LinkState, Packet, Store, World, commit_token, old_token, refusal_token,
};
use crate::convergence::Decision;
use crate::destination::Step as DestinationStep;
use crate::event::{DestinationEvent, Outcome, Phase, Refused, SourceEvent, Timer, Word};
use crate::guard::{Guard, Guards};
use crate::journal::{RecordKind, Side};
use crate::message::{CONTROL, StreamIndex};
use crate::source::Step;
use crate::{Former, TakeOver, TakeOverError};

struct Play {
    bounds: Bounds,
    world: World,
}

impl Play {
    fn new(guards: Guards) -> Self {
        let bounds = Bounds {
            streams: 1,
            guards,
            ..Bounds::two(9, 9)
        };
        Self {
            bounds,
            world: World::new(&bounds),
        }
    }

    /// One act, which must be possible.
    fn act(&mut self, act: Act) {
        let mut acts = Vec::new();
        self.world.acts(&self.bounds, &mut acts);
        assert!(acts.contains(&act), "{act:?} is not possible: {acts:?}");
        self.world.apply(&self.bounds, &act);
    }

    /// What happens by itself, but for links, until `is_there`. Precopy has one round.
    fn until(&mut self, is_there: impl Fn(&World) -> bool) {
        for _ in 0..300 {
            if is_there(&self.world) {
                return;
            }
            let mut acts = Vec::new();
            self.world.acts(&self.bounds, &mut acts);
            let next = acts.iter().find(|act| {
                let is_other = matches!(
                    act,
                    Act::Decide(Decision::StopAndCopy)
                        | Act::Reconnect(_)
                        | Act::Restart(..)
                        | Act::NoticeLoss(_)
                );
                act.is_fair() && !is_other
            });
            let Some(act) = next else { break };
            self.world.apply(&self.bounds, act);
        }
        panic!(
            "{:?}, {:?}",
            self.world.source.step(),
            self.world.destination.step()
        );
    }

    /// The control stream is lost, and both sides know.
    fn cut(&mut self) {
        self.world
            .apply(&self.bounds, &Act::Cut(CONTROL, LinkState::Half));
        self.notice_loss();
    }

    fn notice_loss(&mut self) {
        if self.world.links[0].state == LinkState::Half {
            self.act(Act::NoticeLoss(CONTROL));
        }
    }

    fn until_source(&mut self, step: Step) {
        self.until(|world| *world.source.step() == step);
    }

    fn until_destination(&mut self, step: DestinationStep) {
        self.until(|world| *world.destination.step() == step);
    }

    /// To the end, with new links and processes.
    fn settle(&mut self) {
        for _ in 0..300 {
            if self.world.is_settled() {
                return;
            }
            let mut acts = Vec::new();
            self.world.acts(&self.bounds, &mut acts);
            let next = acts
                .iter()
                .find(|act| act.is_fair() && **act != Act::Decide(Decision::StopAndCopy));
            let Some(act) = next else { break };
            self.world.apply(&self.bounds, act);
        }
        panic!(
            "{:?}, {:?}",
            self.world.source.step(),
            self.world.destination.step()
        );
    }

    fn is_right(&self) -> bool {
        let world = &self.world;
        !world.has_two_owners() && !world.is_stale() && !world.is_page_lost()
    }
}

/// The same execution with all guards, and without one: it goes wrong only then.
fn goes_wrong_only_without(guard: Guard, play: impl Fn(&mut Play)) {
    let mut right = Play::new(Guards::default());
    play(&mut right);
    assert!(right.is_right(), "with all guards");
    let mut wrong = Play::new(Guards::without(guard));
    play(&mut wrong);
    assert!(!wrong.is_right(), "without {guard:?}");
}

#[test]
fn undisturbed_the_vm_moves_with_all_pages() {
    let mut play = Play::new(Guards::default());
    play.act(Act::Write(0));
    play.settle();
    assert!(play.world.is_complete() && play.world.destination_runs && play.is_right());
    // Nothing waits for the source's *entered*.
    let records = [RecordKind::Sealed, RecordKind::Yielded];
    assert!(play.world.source_journal.synced.starts_with(&records));
    // Each has heard from the other that it needs nothing any more.
    let fates = (play.world.source_fate, play.world.destination_fate);
    assert_eq!(fates.1, Fate::Forgotten);
    play.until(|world| world.source_fate == Fate::Forgotten);
    assert_eq!(play.world.destination_journal.synced, [RecordKind::Entered]);
}

#[test]
fn a_restart_from_a_seal_after_the_source_ran_on() {
    goes_wrong_only_without(Guard::RunningAgainSynced, |play| {
        play.until_source(Step::Sealed);
        play.act(Act::BlackoutLimit);
        play.until(|world| world.source_runs);
        play.act(Act::Write(0));
        play.act(Act::Crash(Side::Source));
        play.act(Act::Restart(Side::Source, None));
        if play.world.source_fate == Fate::Alive {
            play.until(|world| world.source_runs);
        }
    });
}

#[test]
fn a_yield_whose_sync_failed_and_was_found_after_all() {
    goes_wrong_only_without(Guard::FailedYieldBinds, |play| {
        play.until_source(Step::Yielding);
        play.act(Act::SyncFails(Side::Source));
        assert_eq!(*play.world.source.step(), Step::YieldFailed);
        assert_eq!(play.world.source.token(), None, "it is not shown");
        play.act(Act::BlackoutLimit);
        play.until(|world| world.source_runs);
        play.act(Act::Write(0));
        play.act(Act::Crash(Side::Source));
        play.notice_loss();
        // The disk has it, unless a later record has taken its place.
        let found = play.world.source_journal.maybe.first().copied();
        play.act(Act::Restart(Side::Source, found));
        if play.world.source_fate == Fate::Alive {
            play.act(Act::Reconnect(CONTROL));
            play.until_destination(DestinationStep::Running);
        }
    });
}

/// The VM does not stay paused, and nobody can go back to the seal.
#[test]
fn a_journal_that_cannot_be_written_from_the_seal_on() {
    goes_wrong_only_without(Guard::HolderEnded, |play| {
        play.until_source(Step::Sealing);
        play.act(Act::SyncFails(Side::Source));
        for _ in 0..2 {
            if *play.world.source.step() == Step::ReturnFailed {
                play.act(Act::Retry(Side::Source));
            }
            if *play.world.source.step() == Step::Returning {
                play.act(Act::SyncFails(Side::Source));
            }
        }
        if play.world.holder == Holder::Ending {
            play.act(Act::HolderEnds);
        }
        assert!(play.world.source_runs);
        play.act(Act::Write(0));
        play.act(Act::Crash(Side::Source));
        play.act(Act::Restart(Side::Source, Some(RecordKind::Sealed)));
        if play.world.source_fate == Fate::Alive {
            play.until(|world| world.source_runs);
        }
    });
}

#[test]
fn a_source_that_failed_to_yield_tries_again() {
    let mut play = Play::new(Guards::default());
    play.until_source(Step::Yielding);
    play.act(Act::SyncFails(Side::Source));
    play.act(Act::Retry(Side::Source));
    play.settle();
    assert!(play.world.is_complete() && play.is_right());
}

/// A source that is stopped, and goes on beside the process that was started after it: the second is not allowed.
#[test]
fn a_stopped_source_beside_its_successor() {
    let former = |journal_locked_by, has_ended| {
        TakeOver::check(Former {
            journal_locked_by,
            has_ended,
        })
        .map(|_| ())
    };
    assert_eq!(
        former(Some(77), false),
        Err(TakeOverError::Locked { pid: 77 })
    );
    assert_eq!(
        former(None, false),
        Err(TakeOverError::Lives),
        "stopped, by a lock that it does not hold"
    );
    assert_eq!(former(None, true), Ok(()));
    // Why: the two machines do not know of each other.
    let mut play = Play::new(Guards::default());
    play.until_destination(DestinationStep::Ready);
    let stopped = play.world.clone();
    play.act(Act::Crash(Side::Source));
    play.act(Act::Restart(Side::Source, None));
    play.until(|world| world.source_runs);
    let mut woken = Play {
        world: stopped,
        ..play
    };
    woken.until_destination(DestinationStep::Running);
    assert!(
        woken.world.destination_runs && play.world.source_runs,
        "two owners"
    );
}

#[test]
fn a_resume_by_the_operator_after_the_yield() {
    let mut play = Play::new(Guards::default());
    play.until_source(Step::Yielded);
    play.cut();
    for event in [
        SourceEvent::Word(Word::Cancel),
        SourceEvent::Timer(Timer::BlackoutLimit),
        SourceEvent::Timer(Timer::Reconnect),
        SourceEvent::Word(Word::Refuse),
    ] {
        let _ = play.world.source(event);
        assert!(!play.world.source_runs);
        assert_eq!(*play.world.source.step(), Step::Yielded);
    }
    play.settle();
    assert!(play.world.is_complete() && play.is_right());
    goes_wrong_only_without(Guard::RefusalNeeded, |play| {
        play.until_destination(DestinationStep::Running);
        // *entered* is on its way.
        play.act(Act::Cancel);
        play.until(|world| world.source_runs || *world.source.step() == Step::Postcopy);
    });
}

#[test]
fn a_cancel_after_the_yield_counts_when_the_refusal_comes() {
    let mut play = Play::new(Guards::default());
    play.until_destination(DestinationStep::Ready);
    play.until_source(Step::Yielded);
    play.act(Act::Cancel);
    play.cut();
    play.act(Act::ReconnectTimer(Side::Destination));
    play.settle();
    assert_eq!(*play.world.source.step(), Step::Ended(Outcome::Cancelled));
    assert!(play.world.source_runs && play.is_right());
}

#[test]
fn a_refusal_after_entering() {
    let mut play = Play::new(Guards::default());
    play.until_destination(DestinationStep::Running);
    let word = play.world.destination(DestinationEvent::Word(Word::Refuse));
    assert_eq!(
        word,
        Err(Refused::Word {
            phase: Phase::Postcopy
        })
    );
    assert_eq!(play.world.destination.token(), None);
    goes_wrong_only_without(Guard::NoRefusalAfterCommit, |play| {
        play.until_destination(DestinationStep::Running);
        play.cut();
        play.act(Act::ReconnectTimer(Side::Destination));
        play.act(Act::Reconnect(CONTROL));
        play.until(|world| world.source_runs || *world.source.step() == Step::Postcopy);
    });
}

#[test]
fn an_old_rounds_record_after_the_end_mark() {
    let play = |guards| {
        let bounds = Bounds {
            guards,
            ..Bounds::two(9, 9)
        };
        let mut play = Play {
            world: World::new(&bounds),
            bounds,
        };
        let old = StreamIndex(1);
        // Page 0 is on its way on a stream that the source loses, and the destination still reads.
        play.act(Act::Room(old));
        play.act(Act::Cut(old, LinkState::Half));
        play.act(Act::Write(0));
        let is_old = |packet: &Packet| matches!(packet, Packet::Pages { .. });
        let late: Vec<_> = play.world.links[1]
            .to_destination
            .drain(..)
            .filter(is_old)
            .collect();
        play.until_destination(DestinationStep::Ready);
        play.world.links[1].to_destination.extend(late);
        play.act(Act::ToDestination(old));
        if !play.world.links[1].storing.is_empty() {
            play.act(Act::FinishStore(old));
        }
        play.until_destination(DestinationStep::Running);
        play.is_right()
    };
    assert!(play(Guards::default()));
    assert!(!play(Guards::without(Guard::PrecopyEnds)));
}

/// What is stored is reported before the loss of its stream. Else the page comes again, over what the guest has written.
#[test]
fn a_store_that_was_not_reported_when_its_stream_was_lost() {
    let play = |is_reported: bool| {
        let mut play = Play::new(Guards::default());
        // A switch: all pages are missing.
        play.act(Act::Switch);
        play.until_destination(DestinationStep::Running);
        play.until(|world| world.links[0].store == Store::Unreported);
        play.act(Act::Write(0));
        if !is_reported {
            play.world.links[0].storing.clear();
            play.world.links[0].store = Store::default();
        }
        play.cut();
        play.settle();
        play.is_right()
    };
    assert!(play(true));
    assert!(!play(false));
}

#[test]
fn a_token_replayed_into_the_next_migration() {
    let mut play = Play::new(Guards::default());
    play.until_destination(DestinationStep::Ready);
    for token in [old_token(), refusal_token()] {
        let word = DestinationEvent::Word(Word::Accept(token));
        let before = play.world.clone();
        assert_eq!(play.world.destination(word), Err(Refused::WrongToken));
        assert_eq!(play.world, before);
    }
    play.until_source(Step::Yielded);
    for token in [old_token(), commit_token()] {
        let before = play.world.clone();
        assert_eq!(
            play.world.source(SourceEvent::Word(Word::Accept(token))),
            Err(Refused::WrongToken)
        );
        assert_eq!(play.world, before);
    }
    play.settle();
    assert!(play.world.is_complete());
    goes_wrong_only_without(Guard::RefusalVerified, |play| {
        play.until_destination(DestinationStep::Running);
        play.act(Act::WrongToken(Side::Source, old_token()));
        play.until(|world| world.source_runs || *world.source.step() == Step::Postcopy);
    });
}

#[test]
fn tokens_by_hand_end_what_is_undecided() {
    let mut play = Play::new(Guards::default());
    play.until_source(Step::Yielded);
    play.cut();
    play.act(Act::Carry(Side::Destination));
    play.until_destination(DestinationStep::Running);
    assert!(play.is_right());
    let mut play = Play::new(Guards::default());
    play.until_source(Step::Yielded);
    play.cut();
    play.act(Act::ReconnectTimer(Side::Destination));
    play.until_destination(DestinationStep::Refused);
    play.act(Act::Carry(Side::Source));
    play.until(|world| world.source_runs);
    let again = SourceEvent::Word(Word::Accept(refusal_token()));
    assert_eq!(play.world.source(again), Ok(()), "the same token again");
    assert!(play.is_right());
}

/// The host was dead when its operator said so. Started again, it has nothing but its journal, and hears how it ended.
#[test]
fn a_fenced_destination_that_comes_back_hears_that_the_vm_runs_at_the_source() {
    let mut play = Play::new(Guards::default());
    play.until_destination(DestinationStep::Running);
    assert_eq!(*play.world.source.step(), Step::Yielded);
    play.act(Act::Crash(Side::Destination));
    play.act(Act::Fenced(Side::Source));
    play.until(|world| world.source_runs);
    play.act(Act::Restart(Side::Destination, None));
    assert_eq!(*play.world.destination.step(), DestinationStep::Lost);
    play.act(Act::Reconnect(CONTROL));
    let ended = DestinationStep::Ended(Outcome::Failed);
    play.until(|world| *world.destination.step() == ended && world.links[0].to_source.is_empty());
    assert!(!play.world.has_refused && play.is_right());
    assert_eq!(play.world.source_fate, Fate::Forgotten);
    assert_eq!(play.world.destination_fate, Fate::Forgotten);
}

/// It had yielded, so it does not run the VM, and has pages that the destination misses.
#[test]
fn a_fenced_source_that_comes_back_serves_the_missing_pages() {
    let mut play = Play::new(Guards::default());
    play.act(Act::Switch);
    play.until_destination(DestinationStep::Ready);
    play.until_source(Step::Yielded);
    play.act(Act::Crash(Side::Source));
    play.notice_loss();
    play.act(Act::Fenced(Side::Destination));
    play.until_destination(DestinationStep::Running);
    // Nothing makes it refuse any more.
    let reconnect = DestinationEvent::Timer(Timer::Reconnect);
    assert_eq!(play.world.destination(reconnect), Ok(()));
    let refuse = DestinationEvent::Word(Word::Refuse);
    assert!(play.world.destination(refuse).is_err());
    assert_eq!(play.world.destination.token(), None);
    play.act(Act::Restart(Side::Source, None));
    play.settle();
    assert!(play.world.is_complete() && play.is_right() && !play.world.has_refused);
}
