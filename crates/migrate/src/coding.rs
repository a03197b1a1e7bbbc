//! Messages as frames.

use pagetide_memory::{GuestAddress, PageIndex, PageRange};

use crate::frame::{FLAG_OPTIONAL, Frame, FrameError, HEADER_BYTES};
use crate::handshake::{Hello, Proof, Welcome};
use crate::ids::{MapDigest, Secret, Token, TokenHash, VmId};
use crate::journal::KeptState;
use crate::layout::{Area, Layout, MAX_AREAS, PAGE_BYTES};
use crate::message::{
    CancelCode, Content, DeclineCode, MAX_MAP_PAGES, MAX_REASONS, MAX_RUN_PAGES, MAX_STATE_BYTES,
    MAX_STATE_PART_BYTES, Message, Offer, PageRecord, Stage, StatePart,
};
use crate::rounds::Round;
use crate::wire::{DecodeError, Reader, Writer};

/// The bytes of an area.
const AREA_BYTES: usize = 16;

/// A message with the content behind it.
#[derive(Debug, PartialEq, Eq)]
pub struct Received<'a> {
    /// The message.
    pub message: Message,
    /// The bytes of pages, state or requirements; empty for any other message.
    pub content: &'a [u8],
}

impl Message {
    /// Appends the message's frame. `content` is what follows page records, state parts and offers.
    ///
    /// # Errors
    /// [`FrameError::TooLong`]: nothing was appended.
    pub fn encode(&self, content: &[u8], out: &mut Vec<u8>) -> Result<(), FrameError> {
        let mut fields = Writer::default();
        fields.0.reserve(content.len() + HEADER_BYTES);
        self.write(&mut fields);
        fields.bytes(content);
        let flags = if self.is_optional() { FLAG_OPTIONAL } else { 0 };
        Frame {
            kind: self.kind(),
            flags,
            payload: fields.0,
        }
        .encode(out)
    }

    fn write(&self, out: &mut Writer) {
        match self {
            Self::Hello(hello) => hello.write(out),
            Self::Welcome(welcome) => welcome.write(out),
            Self::Proof(proof) => out.bytes(&proof.0),
            Self::Offer(offer) => put_offer(out, offer),
            Self::Accepted { refusal_hash } => out.bytes(&refusal_hash.0),
            Self::Declined { code, reasons } => {
                out.short(code.number());
                let count = reasons.len().min(MAX_REASONS);
                out.short(u16::try_from(count).unwrap_or(0));
                reasons
                    .iter()
                    .take(count)
                    .for_each(|reason| out.text(reason));
            }
            Self::Pages(record) => put_record(out, record),
            Self::Stored { pages } | Self::Damaged { pages } => out.word(*pages),
            Self::Map { first, count, bits } => {
                out.long(*first);
                out.word(*count);
                out.word(0);
                out.bytes(bits);
            }
            Self::State(part) => {
                out.long(part.offset);
                out.word(part.bytes);
                out.word(u32::from(part.has_more));
            }
            Self::Sealed { digest, state } => {
                out.bytes(&digest.0);
                out.long(state.bytes);
                out.bytes(&state.digest);
            }
            Self::Ready { digest } | Self::Resume { digest } => out.bytes(&digest.0),
            Self::Commit(token) | Self::Refusal(token) => out.bytes(&token.secret().0),
            Self::Cancel { code } => out.word(code.number()),
            Self::Request { run } => {
                out.long(run.first().0);
                out.word(u32::try_from(run.count()).unwrap_or(0));
            }
            Self::Held { stage } => {
                let (number, argument) = stage.numbers();
                out.byte(number);
                out.byte(argument);
                out.short(0);
            }
            Self::GuestEnded { status } => out.word(*status),
            Self::EndMark
            | Self::Entered
            | Self::RefusalSeen
            | Self::Complete
            | Self::Released
            | Self::Lost
            | Self::Ended
            | Self::Continued
            | Self::Alive => {}
        }
    }

    /// Decodes a frame. Memory is taken only for bytes that are there.
    ///
    /// # Errors
    /// [`DecodeError`].
    pub fn of(frame: &Frame) -> Result<Received<'_>, DecodeError> {
        let mut from = Reader(&frame.payload);
        let message = Self::read(frame.kind, &mut from)?;
        let content = match &message {
            Self::Pages(record) => take_content(&mut from, record)?,
            Self::State(part) => take_state(&mut from, part)?,
            Self::Offer(_) => from.rest(),
            _ => &[],
        };
        from.end()?;
        Ok(Received { message, content })
    }

    fn read(kind: u16, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(match kind {
            1 => Self::Hello(Hello::read(from)?),
            2 => Self::Welcome(Welcome::read(from)?),
            3 => Self::Proof(Proof(from.array()?)),
            4 => Self::Offer(Box::new(take_offer(from)?)),
            5 => Self::Accepted {
                refusal_hash: TokenHash(from.array()?),
            },
            6 => take_declined(from)?,
            16 => Self::Pages(take_record(from)?),
            17 => Self::EndMark,
            18 => Self::Stored {
                pages: from.word()?,
            },
            19 => Self::Damaged {
                pages: from.word()?,
            },
            32 => take_map(from)?,
            33 => Self::State(take_state_part(from)?),
            34 => take_sealed(from)?,
            35 => Self::Ready {
                digest: MapDigest(from.array()?),
            },
            36 => Self::Commit(Token::new(Secret(from.array()?))),
            37 => Self::Entered,
            38 => Self::Refusal(Token::new(Secret(from.array()?))),
            39 => Self::RefusalSeen,
            40 => Self::Cancel {
                code: CancelCode::of(from.word()?)?,
            },
            48 => {
                let first = from.long()?;
                let run = run(first, u64::from(from.word()?))?;
                Self::Request { run }
            }
            49 => Self::Resume {
                digest: MapDigest(from.array()?),
            },
            50 => Self::Complete,
            51 => Self::Released,
            52 => Self::Lost,
            53 => Self::Ended,
            60 => {
                let stage = Stage::of(from.byte()?, from.byte()?)?;
                from.zeros::<2>()?;
                Self::Held { stage }
            }
            61 => Self::Continued,
            62 => Self::Alive,
            63 => Self::GuestEnded {
                status: from.word()?,
            },
            kind => return Err(DecodeError::Unknown { kind }),
        })
    }
}

fn flag(value: u32, field: &'static str) -> Result<bool, DecodeError> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(DecodeError::Field { field }),
    }
}

/// A run within the bounds of a record. Whether the VM has these pages is for the machines to say.
fn run(first: u64, count: u64) -> Result<PageRange, DecodeError> {
    let run = PageRange::new(PageIndex(first), count);
    let is_bounded = (1..=u64::from(MAX_RUN_PAGES)).contains(&count) && run.count() == count;
    is_bounded.then_some(run).ok_or(DecodeError::Field {
        field: "a run of pages",
    })
}

fn put_record(out: &mut Writer, record: &PageRecord) {
    out.long(record.run.first().0);
    out.short(u16::try_from(record.run.count()).unwrap_or(0));
    out.byte(record.content.number());
    out.byte(record.round.0);
    out.word(0);
    out.long(record.checksum);
}

fn take_record(from: &mut Reader<'_>) -> Result<PageRecord, DecodeError> {
    let first = from.long()?;
    let run = run(first, u64::from(from.short()?))?;
    let content = Content::of(from.byte()?)?;
    let round = Round(from.byte()?);
    if !round.is_precopy() && round != Round::POSTCOPY {
        return Err(DecodeError::Field { field: "a round" });
    }
    from.zeros::<4>()?;
    Ok(PageRecord {
        run,
        round,
        content,
        checksum: from.long()?,
    })
}

/// The bytes of a record's pages: exactly as many as they have, fewer if compressed, none without content.
fn take_content<'a>(from: &mut Reader<'a>, record: &PageRecord) -> Result<&'a [u8], DecodeError> {
    let content = from.rest();
    let whole = record.run.count() * PAGE_BYTES;
    let bytes = u64::try_from(content.len()).unwrap_or(u64::MAX);
    let is_right = match record.content {
        Content::Bytes => bytes == whole,
        Content::Zstd => bytes > 0 && bytes < whole,
        Content::Zero | Content::Discarded | Content::Poisoned => bytes == 0,
    };
    is_right.then_some(content).ok_or(DecodeError::Field {
        field: "the length of a record's content",
    })
}

fn take_state_part(from: &mut Reader<'_>) -> Result<StatePart, DecodeError> {
    Ok(StatePart {
        offset: from.long()?,
        bytes: from.word()?,
        has_more: flag(from.word()?, "more state")?,
    })
}

fn take_sealed(from: &mut Reader<'_>) -> Result<Message, DecodeError> {
    let digest = MapDigest(from.array()?);
    let state = KeptState {
        bytes: from.long()?,
        digest: from.array()?,
    };
    Ok(Message::Sealed { digest, state })
}

/// The bytes of a part of the state: as many as it says, and within the bounds.
fn take_state<'a>(from: &mut Reader<'a>, part: &StatePart) -> Result<&'a [u8], DecodeError> {
    let content = from.rest();
    let end = part.offset.checked_add(u64::from(part.bytes));
    let is_right = (1..=MAX_STATE_PART_BYTES).contains(&part.bytes)
        && u32::try_from(content.len()) == Ok(part.bytes)
        && end.is_some_and(|end| end <= MAX_STATE_BYTES);
    is_right.then_some(content).ok_or(DecodeError::Field {
        field: "a part of the state",
    })
}

fn take_map(from: &mut Reader<'_>) -> Result<Message, DecodeError> {
    let (first, count) = (from.long()?, from.word()?);
    from.zeros::<4>()?;
    let bits = from.rest();
    let is_right =
        (1..=MAX_MAP_PAGES).contains(&count) && u32::try_from(bits.len()) == Ok(count.div_ceil(8));
    if !is_right {
        return Err(DecodeError::Field {
            field: "the pages of a map",
        });
    }
    Ok(Message::Map {
        first,
        count,
        bits: bits.to_vec(),
    })
}

fn take_declined(from: &mut Reader<'_>) -> Result<Message, DecodeError> {
    let code = DeclineCode::of(from.short()?)?;
    let count = usize::from(from.short()?);
    if count > MAX_REASONS {
        return Err(DecodeError::Field {
            field: "the number of reasons",
        });
    }
    let mut reasons = Vec::new();
    for _ in 0..count {
        reasons.push(from.text()?);
    }
    Ok(Message::Declined { code, reasons })
}

fn put_offer(out: &mut Writer, offer: &Offer) {
    out.bytes(&offer.vm.0);
    out.bytes(&offer.session.0);
    out.bytes(&offer.commit_hash.0);
    out.word(offer.vcpus);
    out.byte(u8::from(offer.is_paused) | u8::from(offer.verifies) << 1);
    out.byte(0);
    out.short(u16::try_from(offer.layout.areas().len()).unwrap_or(0));
    for area in offer.layout.areas() {
        out.long(area.start.0);
        out.long(area.bytes);
    }
}

fn take_offer(from: &mut Reader<'_>) -> Result<Offer, DecodeError> {
    let (vm, session) = (VmId(from.array()?), Secret(from.array()?));
    let commit_hash = TokenHash(from.array()?);
    let vcpus = from.word()?;
    let flags = from.byte()?;
    from.zeros::<1>()?;
    let count = usize::from(from.short()?);
    if flags & !3 != 0 {
        return Err(DecodeError::Field {
            field: "an offer's flags",
        });
    }
    if count > MAX_AREAS {
        return Err(DecodeError::Field {
            field: "the number of areas",
        });
    }
    // The areas are there before anything is allocated for them.
    if from.0.len() < count * AREA_BYTES {
        return Err(DecodeError::Short);
    }
    let mut areas = Vec::with_capacity(count);
    for _ in 0..count {
        areas.push(Area {
            start: GuestAddress(from.long()?),
            bytes: from.long()?,
        });
    }
    let layout = Layout::new(areas).map_err(|_| DecodeError::Field {
        field: "the memory",
    })?;
    let (is_paused, verifies) = (flags & 1 != 0, flags & 2 != 0);
    Ok(Offer {
        vm,
        session,
        commit_hash,
        layout,
        vcpus,
        is_paused,
        verifies,
    })
}

macro_rules! numbered {
    ($kind:ident: $type:ty, $field:literal; $($name:ident = $number:literal),*) => {
        impl $kind {
            pub(crate) fn number(self) -> $type {
                match self {
                    $(Self::$name => $number,)*
                }
            }

            fn of(number: $type) -> Result<Self, DecodeError> {
                Ok(match number {
                    $($number => Self::$name,)*
                    _ => return Err(DecodeError::Field { field: $field }),
                })
            }
        }
    };
}

numbered!(Content: u8, "the kind of content"; Bytes = 0, Zstd = 1, Zero = 2, Discarded = 3, Poisoned = 4);
numbered!(DeclineCode: u16, "the code of a refusal"; Host = 1, Room = 2, NotTaken = 3, Journal = 4);
numbered!(CancelCode: u32, "the code of a cancel"; Cancelled = 1, Failed = 2, GuestEnded = 3);

impl Stage {
    fn numbers(self) -> (u8, u8) {
        match self {
            Self::Round(round) => (1, round),
            Self::Paused => (2, 0),
            Self::Sealed => (3, 0),
            Self::Yielded => (4, 0),
            Self::Ready => (5, 0),
            Self::Running => (6, 0),
            Self::Postcopy(percent) => (7, percent),
        }
    }

    fn of(number: u8, argument: u8) -> Result<Self, DecodeError> {
        Ok(match (number, argument) {
            (1, round) => Self::Round(round),
            (2, 0) => Self::Paused,
            (3, 0) => Self::Sealed,
            (4, 0) => Self::Yielded,
            (5, 0) => Self::Ready,
            (6, 0) => Self::Running,
            (7, percent @ 0..=100) => Self::Postcopy(percent),
            _ => return Err(DecodeError::Field { field: "a stage" }),
        })
    }
}

#[cfg(test)]
#[path = "coding_tests.rs"]
pub(crate) mod tests;
