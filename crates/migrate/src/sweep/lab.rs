//! One run: two processes, their connections, the guest, and the cut.

use super::destination::DestinationHost;
use super::guest::{Guest, Page, index};
use super::source::SourceHost;
use super::wire::{Connection, Greeting};
use super::{Cut, Plan};
use crate::destination::Step as DestinationStep;
use crate::event::{DestinationEvent, Outcome, Refused, SourceEvent, Timer};
use crate::guard::Guards;
use crate::handshake::{Hello, Purpose, VERSIONS};
use crate::ids::{MigrationId, Secret, Token, VmId};
use crate::journal::{RecordKind, Side};
use crate::message::{CONTROL, Message, StreamIndex};
use crate::source::Step as SourceStep;

pub(super) const STREAMS: u16 = 3;
pub(super) const VM: VmId = VmId([0x11; 16]);
pub(super) const MIGRATION: MigrationId = MigrationId([0x22; 16]);
pub(super) const SESSION: Secret = Secret([0x33; 32]);

/// The guest's steps while each process acts once, at the source, and in all.
const STEPS_AT_ONCE: usize = 6;
const MOST_STEPS_AT_SOURCE: u64 = 200;
const MOST_STEPS: u64 = 300;

/// So many steps without a control stream are `--reconnect`.
const RECONNECT_STEPS: usize = 40;

pub(super) fn commit_token() -> Token {
    Token::new(Secret([0x44; 32]))
}

pub(super) fn refusal_token() -> Token {
    Token::new(Secret([0x55; 32]))
}

/// Where the VM ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    AtSource,
    AtDestination,
    LostWithDestination,
    LostWithSource,
}

impl Ending {
    pub(super) fn number(self) -> usize {
        match self {
            Self::AtSource => 0,
            Self::AtDestination => 1,
            Self::LostWithDestination => 2,
            Self::LostWithSource => 3,
        }
    }
}

/// A run.
#[derive(Debug)]
pub(super) struct Lab {
    pub(super) plan: Plan,
    /// The length of each frame so far.
    pub(super) frame_bytes: Vec<usize>,
    pub(super) guest: Guest,
    pub(super) connections: Vec<Option<Connection>>,
    pub(super) source: SourceHost,
    pub(super) destination: DestinationHost,
    /// A process that dies at the end of the step.
    pub(super) dying: Option<Side>,
    /// Where the VM must end, by what had happened at the cut.
    expected: Ending,
    /// A message of one honest side that the other refused.
    refused: Option<String>,
    has_begun: bool,
    nonces: u64,
    steps_without_control: usize,
}

impl Lab {
    pub(super) fn new(plan: Plan) -> Self {
        let guest = Guest::new();
        Self {
            plan,
            frame_bytes: Vec::new(),
            connections: (0..STREAMS).map(|_| None).collect(),
            source: SourceHost::new(plan.guards, &guest),
            destination: DestinationHost::new(plan.guards),
            guest,
            dying: None,
            expected: Ending::AtDestination,
            refused: None,
            has_begun: false,
            nonces: 0,
            steps_without_control: 0,
        }
    }

    pub(super) fn run(&mut self) -> Result<Ending, String> {
        for _ in 0..3000 {
            self.open_connections();
            self.source_step()?;
            self.die();
            self.destination_step()?;
            self.die();
            for _ in 0..STEPS_AT_ONCE {
                self.guest_step()?;
            }
            self.time_passes()?;
            if let Some(why) = self.refused.take() {
                return Err(why);
            }
            if self.source.runs && self.destination.runs {
                return Err("two owners".to_owned());
            }
            if let Some(ending) = self.ending()? {
                let expected = self.expected;
                return if ending == expected {
                    Ok(ending)
                } else {
                    Err(format!("ended as {ending:?}, not {expected:?}"))
                };
            }
        }
        let source = self.source.machine.as_ref().map(|machine| *machine.step());
        let destination = self
            .destination
            .machine
            .as_ref()
            .map(|machine| *machine.step());
        Err(format!("no end: {source:?}, {destination:?}"))
    }

    /// Nobody here is hostile, so no message is refused while all guards are there. Any other event may have been overtaken.
    pub(super) fn note_refused(&mut self, by: Side, is_message: bool, error: &Refused) {
        if is_message && self.plan.guards == Guards::default() {
            self.refused = Some(format!("{by:?} refuses: {error}"));
        }
    }

    pub(super) fn nonce(&mut self) -> [u8; 32] {
        self.nonces += 1;
        let mut nonce = [0; 32];
        nonce[..8].copy_from_slice(&self.nonces.to_le_bytes());
        nonce
    }

    fn open_connections(&mut self) {
        if self.source.machine.is_none() || self.destination.machine.is_none() || self.has_settled()
        {
            return;
        }
        for stream in (0..STREAMS).map(StreamIndex) {
            let is_open = self.connections[usize::from(stream.0)]
                .as_ref()
                .is_some_and(|connection| !connection.is_closed());
            let is_control_up = self.connections[0].as_ref().is_some_and(|control| {
                control.at_source == Greeting::Up && control.at_destination == Greeting::Up
            });
            if is_open || stream != CONTROL && !is_control_up {
                continue;
            }
            let purpose = if self.has_begun {
                Purpose::Join
            } else {
                Purpose::Begin
            };
            self.has_begun = true;
            let nonce = self.nonce();
            let hello = Hello {
                versions: VERSIONS,
                features: 0,
                purpose,
                stream,
                migration: MIGRATION,
                nonce,
            };
            self.connections[usize::from(stream.0)] = Some(Connection::new(hello));
            self.send(Side::Source, stream, &Message::Hello(hello), &[]);
        }
    }

    /// Sends a frame from a side, and cuts if the plan says so.
    pub(super) fn send(
        &mut self,
        from: Side,
        stream: StreamIndex,
        message: &Message,
        content: &[u8],
    ) {
        if self.dying == Some(from) {
            return;
        }
        let Some(connection) = &mut self.connections[usize::from(stream.0)] else {
            return;
        };
        let is_cut_here = self.plan.frame == Some(self.frame_bytes.len());
        let limit = if is_cut_here {
            self.plan.bytes
        } else {
            usize::MAX
        };
        let (pipe, back) = match from {
            Side::Source => (&mut connection.to_destination, &mut connection.to_source),
            Side::Destination => (&mut connection.to_source, &mut connection.to_destination),
        };
        let length = pipe.send(message, content, limit);
        self.frame_bytes.push(length);
        if !is_cut_here {
            return;
        }
        // The receiver reads what has arrived; the sender finds out at once.
        let is_accepted = matches!(message, Message::Accepted { .. }) && limit >= length;
        pipe.cut();
        back.lose();
        connection.is_late =
            self.plan.cut == Cut::StreamLate && from == Side::Source && stream != CONTROL;
        match self.plan.cut {
            Cut::Stream | Cut::StreamLate if stream != CONTROL => {}
            Cut::Stream | Cut::StreamLate => self.expect_after_cut(is_accepted),
            Cut::All => {
                self.expect_after_cut(is_accepted);
                self.lose_all_but(stream);
            }
            Cut::Death(side) => self.dying = Some(side),
        }
    }

    /// The contract's table, first row: a lost control stream stops no migration that was agreed.
    fn expect_after_cut(&mut self, is_accepted: bool) {
        let source = self.source.machine.as_ref();
        let is_connecting = source.is_some_and(|machine| *machine.step() == SourceStep::Connecting);
        if is_connecting && !is_accepted {
            self.expected = Ending::AtSource;
        }
    }

    /// The rows of the table on processes that die: the records decide.
    fn expect_after_death(&mut self, side: Side) {
        let (entered, sealed, yielded) = (
            self.destination.had_entered,
            self.source.has_recorded(RecordKind::Sealed),
            self.source.has_recorded(RecordKind::Yielded),
        );
        self.expected = match side {
            Side::Destination if entered => Ending::LostWithDestination,
            Side::Source if !sealed => Ending::LostWithSource,
            Side::Source if yielded => Ending::AtDestination,
            Side::Destination | Side::Source => Ending::AtSource,
        };
    }

    fn lose_all_but(&mut self, stream: StreamIndex) {
        for (index, connection) in self.connections.iter_mut().enumerate() {
            if let Some(connection) = connection
                && index != usize::from(stream.0)
            {
                connection.to_destination.lose();
                connection.to_source.lose();
            }
        }
    }

    /// A process dies. What it had sent still arrives; it is started again by its journal.
    fn die(&mut self) {
        let Some(side) = self.dying.take() else {
            return;
        };
        self.expect_after_death(side);
        for connection in self.connections.iter_mut().flatten() {
            match side {
                Side::Source => {
                    connection.to_destination.cut();
                    connection.to_source.lose();
                    connection.at_source = Greeting::Closed;
                }
                Side::Destination => {
                    connection.to_source.cut();
                    connection.to_destination.lose();
                    connection.at_destination = Greeting::Closed;
                }
            }
        }
        match side {
            Side::Source => self.restart_source(),
            Side::Destination => self.restart_destination(),
        }
    }

    fn guest_step(&mut self) -> Result<(), String> {
        let page = self.guest.next_page();
        let index = index(page.0);
        if self.source.runs && self.guest.state < MOST_STEPS_AT_SOURCE {
            let now = self.source.memory[index];
            self.source.memory[index] = self.guest.step(now)?;
            self.source.state = self.guest.state;
            self.source
                .log
                .insert(pagetide_memory::PageRange::single(page));
        } else if self.destination.runs && self.guest.state < MOST_STEPS {
            match self.destination.memory[index] {
                Page::Absent => {
                    let run = pagetide_memory::PageRange::single(page);
                    self.tell_destination(DestinationEvent::Fault(run));
                }
                now => {
                    self.destination.memory[index] = self.guest.step(now)?;
                    self.destination.state = Some(self.guest.state);
                }
            }
        }
        Ok(())
    }

    fn time_passes(&mut self) -> Result<(), String> {
        let is_up = self.connections[0]
            .as_ref()
            .is_some_and(|control| control.at_source == Greeting::Up);
        self.steps_without_control = if is_up {
            0
        } else {
            self.steps_without_control + 1
        };
        if self.steps_without_control == RECONNECT_STEPS {
            self.steps_without_control = 0;
            self.tell_source(SourceEvent::Timer(Timer::Reconnect));
            self.tell_destination(DestinationEvent::Timer(Timer::Reconnect));
        }
        Ok(())
    }

    fn has_settled(&self) -> bool {
        let source = self.source.machine.as_ref();
        let destination = self.destination.machine.as_ref();
        let source =
            source.is_none_or(|m| matches!(m.step(), SourceStep::Ended(_) | SourceStep::Lost));
        let destination = destination.is_none_or(|m| {
            matches!(
                m.step(),
                DestinationStep::Ended(_) | DestinationStep::Lost | DestinationStep::Connecting
            )
        });
        source && destination
    }

    fn ending(&self) -> Result<Option<Ending>, String> {
        let source = self.source.machine.as_ref().map(|machine| *machine.step());
        let destination = self
            .destination
            .machine
            .as_ref()
            .map(|machine| *machine.step());
        // Its receipt cannot come any more.
        let is_alone =
            source.is_none() && matches!(destination, None | Some(DestinationStep::Refused));
        if !self.has_settled() && !is_alone {
            return Ok(None);
        }
        Ok(Some(match (source, destination) {
            (
                Some(SourceStep::Ended(Outcome::Complete)),
                Some(DestinationStep::Ended(Outcome::Complete)),
            ) => {
                self.check(
                    "the destination",
                    &self.destination.memory,
                    self.destination.runs,
                )?;
                Ending::AtDestination
            }
            (Some(SourceStep::Lost | SourceStep::Ended(Outcome::Complete)), _)
                if self.destination.had_entered =>
            {
                Ending::LostWithDestination
            }
            (None, _) if !self.destination.runs => Ending::LostWithSource,
            (Some(SourceStep::Ended(_)), _) => {
                self.check("the source", &self.source.memory, self.source.runs)?;
                Ending::AtSource
            }
            other => return Err(format!("ended as {other:?}")),
        }))
    }

    fn check(&self, side: &str, memory: &[Page], runs: bool) -> Result<(), String> {
        if !runs {
            return Err(format!("{side} should run the VM"));
        }
        let mut pages = (0..).zip(memory.iter().zip(&self.guest.truth));
        match pages.find(|(_, (have, want))| have != want) {
            Some((page, (have, want))) => {
                Err(format!("{side} has {have:?} at page {page}, not {want:?}"))
            }
            None => Ok(()),
        }
    }
}
