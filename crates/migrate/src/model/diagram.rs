//! A counterexample as a sequence diagram.

use std::fmt::Write;

use stateright::Model;

use super::Bounds;
use super::acts::Act;
use super::world::{Packet, Store, World};
use crate::journal::Side;
use crate::message::StreamIndex;

fn packet(packet: &Packet) -> String {
    match packet {
        Packet::Message(message) => message.name().to_owned(),
        Packet::State(version) => format!("state, version {version}"),
        Packet::Pages {
            record,
            versions,
            is_intact,
        } => {
            let damage = if *is_intact { "" } else { ", damaged" };
            format!(
                "pages {} of round {}, versions {versions:?}{damage}",
                record.run, record.round
            )
        }
    }
}

/// What an act does in a state, as text between the two sides.
fn line(world: &World, act: &Act) -> (String, String, String) {
    let link = |stream: StreamIndex| &world.links[usize::from(stream.0)];
    let (mut left, mut middle, mut right) = (String::new(), String::new(), String::new());
    match *act {
        Act::ToDestination(stream) => {
            let what = link(stream)
                .to_destination
                .front()
                .map(packet)
                .unwrap_or_default();
            middle = format!("{} ──{}─►", what, stream.0);
        }
        Act::ToSource(stream) => {
            let what = link(stream)
                .to_source
                .front()
                .map(super::super::message::Message::name)
                .unwrap_or_default();
            middle = format!("◄─{}── {what}", stream.0);
        }
        Act::Cut(stream, state) => middle = format!("╳ stream {} is cut ({state:?})", stream.0),
        Act::Damage(stream) => middle = format!("╳ a bit changes on stream {}", stream.0),
        Act::Reconnect(stream) => middle = format!("stream {} is up again", stream.0),
        Act::DamagePages(stream) => {
            middle = format!("╳ a record has more pages on stream {}", stream.0);
        }
        Act::DamageMap => middle = "╳ a bit of the destination's map changes".to_owned(),
        Act::Room(stream) => left = format!("sends pages on stream {}", stream.0),
        Act::Decide(decision) => left = format!("decides: {decision:?}"),
        Act::Cancel => left = "its operator cancels".to_owned(),
        Act::BlackoutLimit => left = "the blackout's limit has passed".to_owned(),
        Act::FinishStore(stream) => {
            let what = match link(stream).store {
                Store::Unreported => "reports",
                Store::Precopy | Store::Postcopy => "has stored",
            };
            right = format!("{what} what came on stream {}", stream.0);
        }
        Act::NoticeLoss(stream) => right = format!("notices that stream {} is lost", stream.0),
        Act::Loaded => right = "has loaded the state".to_owned(),
        Act::Switch => left = "an operator switches to postcopy".to_owned(),
        Act::Touch(page, _) => right = format!("the guest reads page {page}"),
        Act::Refuse => right = "its operator refuses".to_owned(),
        Act::Abandon => right = "its operator abandons missing pages".to_owned(),
        Act::HolderEnds => left = "the holder of its memory has ended".to_owned(),
        Act::Write(page) => {
            let side = if world.source_runs {
                &mut left
            } else {
                &mut right
            };
            *side = format!("the guest writes page {page}");
        }
        Act::Synced(side) => {
            *of(side, &mut left, &mut right) = format!("synced: {:?}", pending(world, side));
        }
        Act::SyncFails(side) => {
            *of(side, &mut left, &mut right) = format!("╳ not synced: {:?}", pending(world, side));
        }
        Act::Crash(side) => *of(side, &mut left, &mut right) = "╳ the process dies".to_owned(),
        Act::Restart(side, found) => {
            let found = found
                .map(|kind| format!(", finds {kind:?} after all"))
                .unwrap_or_default();
            *of(side, &mut left, &mut right) = format!("starts again{found}");
        }
        Act::Retry(side) => *of(side, &mut left, &mut right) = "tries the record again".to_owned(),
        Act::ReconnectTimer(side) => {
            *of(side, &mut left, &mut right) = "gives up waiting for the link".to_owned();
        }
        Act::Release(side) => {
            *of(side, &mut left, &mut right) = "its operator releases what is kept".to_owned();
        }
        Act::Carry(side) => {
            *of(side, &mut left, &mut right) = "is given the other side's token by hand".to_owned();
        }
        Act::WrongToken(side, _) => {
            *of(side, &mut left, &mut right) = "is given a wrong token by hand".to_owned();
        }
        Act::Fenced(side) => {
            *of(side, &mut left, &mut right) = "is told that the other host is dead".to_owned();
        }
    }
    (left, middle, right)
}

fn of<'a>(side: Side, left: &'a mut String, right: &'a mut String) -> &'a mut String {
    match side {
        Side::Source => left,
        Side::Destination => right,
    }
}

fn pending(world: &World, side: Side) -> Option<crate::journal::RecordKind> {
    match side {
        Side::Source => world.source_journal.pending,
        Side::Destination => world.destination_journal.pending,
    }
}

/// The acts from the beginning on, one a line, with the phases of both sides after each.
pub(crate) fn diagram(bounds: &Bounds, acts: &[Act]) -> String {
    let mut world = World::new(bounds);
    let mut text = format!("{:^34} {:^46} {:^34}\n", "source", "", "destination");
    for act in acts {
        let (left, middle, right) = line(&world, act);
        let Some(next) = bounds.next_state(&world, *act) else {
            break;
        };
        world = next;
        let runs = |runs: bool| if runs { "runs" } else { "-" };
        let _ = writeln!(
            text,
            "{left:<34} {middle:<46} {right:<34} | {:?} {} / {:?} {}",
            world.source.step(),
            runs(world.source_runs),
            world.destination.step(),
            runs(world.destination_runs),
        );
    }
    text
}
