//! Messages as the payloads of frames.

use pagetide_memory::PageSize;
use pagetide_sources::Digest;

use super::frame::{FLAG_MORE, FLAG_OPTIONAL, Frame};
use super::label::VmLabel;
use super::message::{
    Attach, AttachSpace, DecodeError, Drained, Health, MAX_REGIONS, Message, PageMapPart,
    RefusedCode, Region, RegionMode, SpaceRegion, VmState, Welcome, WorkingSetAction,
    WorkingSetState,
};
use super::wire::{Reader, Writer};

/// The bytes of a region in an attach.
const REGION_BYTES: usize = 40;

/// The bytes of a region in an attach-space.
const SPACE_REGION_BYTES: usize = 16;

/// The number of a file that is none.
const NO_FILE: u8 = u8::MAX;

impl Message {
    /// Whether it is a notice: the server sends it by itself.
    pub fn is_notice(&self) -> bool {
        self.kind() & 0xf000 == 0x9000
    }

    /// Whether the receiver may skip it.
    pub fn is_optional(&self) -> bool {
        self.is_notice() || matches!(self, Self::Label(_))
    }

    /// The message as a frame. `more` says that another part of the same page map follows.
    pub fn frame(&self, id: u32, more: bool) -> Frame {
        let mut out = Writer::default();
        self.write(&mut out);
        let optional = if self.is_optional() { FLAG_OPTIONAL } else { 0 };
        let more = if more { FLAG_MORE } else { 0 };
        Frame {
            kind: self.kind(),
            flags: optional | more,
            id,
            payload: out.0,
        }
    }

    fn write(&self, out: &mut Writer) {
        match self {
            Self::Hello {
                lowest,
                highest,
                features,
                name,
            } => {
                out.short(*lowest);
                out.short(*highest);
                out.word(0);
                out.long(*features);
                out.text(name);
            }
            Self::Attach(attach) => {
                out.long(attach.uffd_features);
                out.word(u32::try_from(attach.regions.len()).unwrap_or(u32::MAX));
                out.word(0);
                attach
                    .regions
                    .iter()
                    .for_each(|region| put_region(out, region));
            }
            Self::Share
            | Self::HealthRequest
            | Self::Drain
            | Self::Resume
            | Self::HandOver
            | Self::Goodbye
            | Self::Left => {}
            Self::AttachSpace(space) => {
                out.long(space.uffd_features);
                out.word(u32::try_from(space.regions.len()).unwrap_or(u32::MAX));
                out.word(0);
                for region in &space.regions {
                    out.word(region.region);
                    out.word(0);
                    out.long(region.address);
                }
            }
            Self::DetachSpace { space } | Self::SpaceAttached { space } => {
                out.word(*space);
                out.word(0);
            }
            Self::Label(label) => {
                out.text(label.id());
                out.text(label.traceparent());
            }
            Self::WorkingSet(action) => out.word(action.number()),
            Self::Poison { offset, bytes } => {
                out.long(*offset);
                out.long(*bytes);
            }
            Self::ResumeMap(part) | Self::PageMap(part) => {
                out.word(part.region);
                out.word(0);
                out.long(part.first_page);
                out.0.extend(&part.bytes);
            }
            Self::Welcome(welcome) => {
                out.short(welcome.version);
                out.short(0);
                out.word(welcome.max_payload_bytes);
                out.word(welcome.max_regions);
                out.word(welcome.max_descriptors);
                out.long(welcome.max_memory_bytes);
                out.long(welcome.max_map_bytes);
                out.long(welcome.features);
                out.long(welcome.image_bytes);
                out.0.extend(welcome.image.0);
            }
            Self::Attached {
                regions,
                working_set,
                bytes,
                image,
            } => {
                out.word(*regions);
                out.word(working_set.number());
                out.long(*bytes);
                out.0.extend(image.0);
            }
            Self::Shared { bytes, page_bytes } => {
                out.long(*bytes);
                out.long(*page_bytes);
            }
            Self::Health(health) => {
                out.word(health.state.number());
                out.word(0);
                for count in [health.present, health.lost, health.pages] {
                    out.long(count);
                }
                out.long(health.faults);
                out.long(health.stalls);
                out.text(&health.last_error);
            }
            Self::Progress { present, pages } => {
                out.long(*present);
                out.long(*pages);
            }
            Self::Drained(Drained { present, lost }) => {
                out.long(*present);
                out.long(*lost);
            }
            Self::WorkingSetState { state, pages } => {
                out.word(state.number());
                out.word(0);
                out.long(*pages);
            }
            Self::Poisoned { pages } => out.long(*pages),
            Self::Done { count } => out.long(*count),
            Self::HandedOver { parts } => {
                out.word(*parts);
                out.word(0);
            }
            Self::Refused { code, text } => {
                out.word(code.number());
                out.text(text);
            }
            Self::Stalled { regions, text } => {
                out.word(*regions);
                out.text(text);
            }
            Self::Resumed { regions } => out.word(*regions),
            Self::GoingAway { within_ms } => out.word(*within_ms),
            Self::Killed { text } => out.text(text),
        }
    }

    /// Decodes a frame. Nothing is allocated beyond a small multiple of the payload's length.
    ///
    /// # Errors
    /// [`DecodeError`].
    pub fn of(frame: &Frame) -> Result<Self, DecodeError> {
        let mut from = Reader(&frame.payload);
        let message = Self::read(frame.kind, &mut from)?;
        from.end()?;
        Ok(message)
    }

    fn read(kind: u16, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(match kind {
            1 => {
                let (lowest, highest) = (from.short()?, from.short()?);
                from.zero()?;
                Self::Hello {
                    lowest,
                    highest,
                    features: from.long()?,
                    name: from.text()?,
                }
            }
            2 => Self::Attach(take_attach(from)?),
            3 => Self::Share,
            4 => Self::HealthRequest,
            5 => Self::Drain,
            6 => Self::WorkingSet(WorkingSetAction::of(from.word()?)?),
            7 => Self::Poison {
                offset: from.long()?,
                bytes: from.long()?,
            },
            8 => Self::Resume,
            9 => Self::HandOver,
            10 => Self::ResumeMap(take_part(from)?),
            11 => Self::Goodbye,
            12 => Self::AttachSpace(take_space(from)?),
            13 => {
                let space = from.word()?;
                from.zero()?;
                Self::DetachSpace { space }
            }
            14 => Self::Label(VmLabel::new(from.text()?, from.text()?)?),
            0x8001 => Self::Welcome(take_welcome(from)?),
            0x8002 => Self::Attached {
                regions: from.word()?,
                working_set: WorkingSetState::of(from.word()?)?,
                bytes: from.long()?,
                image: Digest(from.digest()?),
            },
            0x8003 => Self::Shared {
                bytes: from.long()?,
                page_bytes: from.long()?,
            },
            0x8004 => Self::Health(take_health(from)?),
            0x8005 => Self::Progress {
                present: from.long()?,
                pages: from.long()?,
            },
            0x8006 => Self::Drained(Drained {
                present: from.long()?,
                lost: from.long()?,
            }),
            0x8007 => {
                let state = WorkingSetState::of(from.word()?)?;
                from.zero()?;
                let pages = from.long()?;
                Self::WorkingSetState { state, pages }
            }
            0x8008 => Self::Poisoned {
                pages: from.long()?,
            },
            0x8009 => Self::Done {
                count: from.long()?,
            },
            0x800a => Self::PageMap(take_part(from)?),
            0x800b => {
                let parts = from.word()?;
                from.zero()?;
                Self::HandedOver { parts }
            }
            0x800c => Self::Left,
            0x800d => {
                let space = from.word()?;
                from.zero()?;
                Self::SpaceAttached { space }
            }
            0x80ff => Self::Refused {
                code: RefusedCode::of(from.word()?)?,
                text: from.text()?,
            },
            0x9001 => Self::Stalled {
                regions: from.word()?,
                text: from.text()?,
            },
            0x9002 => Self::Resumed {
                regions: from.word()?,
            },
            0x9003 => Self::GoingAway {
                within_ms: from.word()?,
            },
            0x9004 => Self::Killed { text: from.text()? },
            kind => return Err(DecodeError::Unknown { kind }),
        })
    }
}

fn put_region(out: &mut Writer, region: &Region) {
    out.long(region.address);
    out.long(region.bytes);
    out.long(region.image_offset);
    out.long(region.file_offset);
    out.byte(u8::try_from(region.page_size.shift()).unwrap_or(0));
    out.byte(region.mode.number());
    out.byte(region.uffd);
    out.byte(region.file.unwrap_or(NO_FILE));
    out.word(0);
}

fn take_attach(from: &mut Reader<'_>) -> Result<Attach, DecodeError> {
    let uffd_features = from.long()?;
    let count = usize::try_from(from.word()?).unwrap_or(usize::MAX);
    let field = |field| DecodeError::Field { field };
    from.zero()?;
    if count == 0 || count > MAX_REGIONS {
        return Err(field("the number of regions"));
    }
    // The regions are there before anything is allocated for them.
    if from.0.len() < count * REGION_BYTES {
        return Err(DecodeError::Short);
    }
    let mut regions = Vec::with_capacity(count);
    for _ in 0..count {
        let (address, bytes) = (from.long()?, from.long()?);
        let (image_offset, file_offset) = (from.long()?, from.long()?);
        let shift = u32::from(from.byte()?);
        let sizes = [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G];
        let page_size = sizes.into_iter().find(|size| size.shift() == shift);
        let mode = RegionMode::of(from.byte()?)?;
        let uffd = from.byte()?;
        let file = Some(from.byte()?).filter(|&file| file != NO_FILE);
        from.zero()?;
        if file.is_some() != (mode == RegionMode::Minor) {
            return Err(field("a region's file"));
        }
        regions.push(Region {
            address,
            bytes,
            image_offset,
            file_offset,
            page_size: page_size.ok_or(field("a region's page size"))?,
            mode,
            uffd,
            file,
        });
    }
    Ok(Attach {
        uffd_features,
        regions,
    })
}

fn take_space(from: &mut Reader<'_>) -> Result<AttachSpace, DecodeError> {
    let uffd_features = from.long()?;
    let count = usize::try_from(from.word()?).unwrap_or(usize::MAX);
    from.zero()?;
    if count == 0 || count > MAX_REGIONS {
        let field = "the number of regions";
        return Err(DecodeError::Field { field });
    }
    // The regions are there before anything is allocated for them.
    if from.0.len() < count * SPACE_REGION_BYTES {
        return Err(DecodeError::Short);
    }
    let mut regions = Vec::with_capacity(count);
    for _ in 0..count {
        let region = from.word()?;
        from.zero()?;
        let address = from.long()?;
        regions.push(SpaceRegion { region, address });
    }
    Ok(AttachSpace {
        uffd_features,
        regions,
    })
}

fn take_part(from: &mut Reader<'_>) -> Result<PageMapPart, DecodeError> {
    let region = from.word()?;
    from.zero()?;
    Ok(PageMapPart {
        region,
        first_page: from.long()?,
        bytes: from.rest().to_vec(),
    })
}

fn take_welcome(from: &mut Reader<'_>) -> Result<Welcome, DecodeError> {
    let version = from.short()?;
    if from.short()? != 0 {
        return Err(DecodeError::Field { field: "reserved" });
    }
    Ok(Welcome {
        version,
        max_payload_bytes: from.word()?,
        max_regions: from.word()?,
        max_descriptors: from.word()?,
        max_memory_bytes: from.long()?,
        max_map_bytes: from.long()?,
        features: from.long()?,
        image_bytes: from.long()?,
        image: Digest(from.digest()?),
    })
}

fn take_health(from: &mut Reader<'_>) -> Result<Health, DecodeError> {
    let state = VmState::of(from.word()?)?;
    from.zero()?;
    Ok(Health {
        state,
        present: from.long()?,
        lost: from.long()?,
        pages: from.long()?,
        faults: from.long()?,
        stalls: from.long()?,
        last_error: from.text()?,
    })
}

#[cfg(test)]
#[path = "coding_tests.rs"]
mod tests;
