//! The server's side until a VM is attached: hello, share, page maps of a predecessor, attach.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagetide_memory::{PageMapImage, PageSize};
use pagetide_uapi::userfaultfd::{Features, Userfaultfd};
use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{SealFlags, fcntl_get_seals};
use rustix::io::Errno;

pub(crate) use super::attach_error::AttachError;
use super::message::{
    Attach, MAX_DESCRIPTORS, MAX_REGIONS, Message, PageMapPart, RegionMode, Welcome,
};
use super::session::{Session, SessionError};
use super::share::{ShareError, SharedImage};
use super::{LOWEST_VERSION, MAX_MAP_BYTES, VERSION, features_of, frame};
use crate::budgets::HeldBytes;
use crate::handshake::{MAX_MEMORY_BYTES, VmRegion, check_together, checked_region};
use crate::image::ServedImage;
use crate::metrics::Metrics;

/// The longest wait without a look at the end of the server.
const SLICE: Duration = Duration::from_millis(200);

/// The memory of a region, and where its content goes.
#[derive(Debug)]
pub(crate) enum Memory {
    /// Content is copied into it.
    Missing,
    /// Content is written to this file, from this offset on.
    Minor(OwnedFd, u64),
    /// It is a private mapping of the shared image.
    Clone(Arc<SharedImage>),
}

/// A region that a VMM has attached, by either protocol.
#[derive(Debug)]
pub(crate) struct AttachedRegion {
    pub(crate) region: VmRegion,
    pub(crate) memory: Memory,
    pub(crate) uffd: Arc<Userfaultfd>,
    /// The page maps of a predecessor: the first page of each, and the map.
    pub(crate) maps: Vec<(u64, PageMapImage)>,
}

/// A client that asks to be attached, before it has its answer.
#[derive(Debug)]
pub(crate) struct Attachment<'a> {
    /// The id of the request.
    pub(crate) id: u32,
    pub(crate) regions: Vec<AttachedRegion>,
    /// The image's memfd, if the client has asked for it.
    pub(crate) shared: Option<Arc<SharedImage>>,
    /// The features that were agreed.
    pub(crate) features: u64,
    /// Held until the page maps of the regions are not needed any more.
    pub(crate) map_bytes: HeldBytes<'a>,
}

/// The state of a connection before attach.
pub(crate) struct Beginning<'s, 'a> {
    pub(crate) session: &'s mut Session<'a>,
    pub(crate) image: &'s ServedImage,
    pub(crate) metrics: &'s Metrics,
    /// Whether memory may reach beyond the end of the image.
    any_length: bool,
    /// The descriptors that came with attach. They outlive an error.
    pub(crate) kept: &'s mut Vec<OwnedFd>,
    shared: Option<Arc<SharedImage>>,
    maps: Vec<(PageMapPart, bool)>,
    map_bytes: usize,
    /// Of the maps, and of what they are decoded to.
    held: HeldBytes<'a>,
    has_greeted: bool,
    /// The features that were agreed.
    features: u64,
}

impl<'s, 'a> Beginning<'s, 'a> {
    pub(crate) fn new(
        session: &'s mut Session<'a>,
        image: &'s ServedImage,
        metrics: &'s Metrics,
        any_length: bool,
        kept: &'s mut Vec<OwnedFd>,
    ) -> Self {
        Self {
            held: HeldBytes::new(session.charge()),
            session,
            image,
            metrics,
            any_length,
            kept,
            shared: None,
            maps: Vec::new(),
            map_bytes: 0,
            has_greeted: false,
            features: 0,
        }
    }

    /// Serves the connection until it attaches, for at most `limit` since `begun`. An error was answered.
    ///
    /// # Errors
    /// [`AttachError`].
    pub(crate) fn attach(
        mut self,
        begun: Instant,
        limit: Duration,
        stopping: impl Fn() -> bool,
    ) -> Result<Attachment<'a>, AttachError> {
        let mut id = 0;
        let attached = self.run(begun, limit, stopping, &mut id);
        if let Err(error) = &attached {
            // The userfaultfds that have arrived stay open until the client has gone.
            let arrived = self.session.take_descriptors();
            self.kept.extend(arrived);
            if let Some(code) = error.code() {
                let text = crate::vm::chain(error);
                self.session.answer(id, &Message::Refused { code, text });
                self.session.flush();
            }
        }
        attached
    }

    /// Refuses the connection.
    ///
    /// # Errors
    /// Always.
    pub(crate) fn refuse(self, error: SessionError) -> Result<Attachment<'a>, AttachError> {
        let (code, text) = (error.code(), crate::vm::chain(&error));
        let arrived = self.session.take_descriptors();
        self.kept.extend(arrived);
        self.session.answer(0, &Message::Refused { code, text });
        self.session.flush();
        Err(error.into())
    }

    fn run(
        &mut self,
        begun: Instant,
        limit: Duration,
        stopping: impl Fn() -> bool,
        id: &mut u32,
    ) -> Result<Attachment<'a>, AttachError> {
        let end = begun + limit;
        loop {
            while let Some(arrived) = self.session.next()? {
                *id = arrived.id;
                let message = arrived.message.map_err(AttachError::Unknown)?;
                if let Some(attachment) = self.act(arrived.id, arrived.more, message)? {
                    return Ok(attachment);
                }
            }
            if !self.session.flush() {
                return Err(AttachError::Left);
            }
            if stopping() {
                return Err(AttachError::Stopping);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(AttachError::Late { limit });
            }
            self.wait(left.min(SLICE))?;
            if !self.session.read()? {
                return Err(AttachError::Left);
            }
        }
    }

    fn wait(&self, timeout: Duration) -> Result<(), AttachError> {
        let interest = self.session.interest();
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, interest.contains(EventFlags::IN));
        flags.set(PollFlags::OUT, interest.contains(EventFlags::OUT));
        let timeout = Timespec::try_from(timeout).ok();
        match poll(
            &mut [PollFd::new(self.session.stream(), flags)],
            timeout.as_ref(),
        ) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(AttachError::Wait(errno)),
        }
    }

    fn act(
        &mut self,
        id: u32,
        more: bool,
        message: Message,
    ) -> Result<Option<Attachment<'a>>, AttachError> {
        let kind = message.kind();
        match message {
            Message::Hello {
                lowest,
                highest,
                features,
                name,
            } if !self.has_greeted => {
                tracing::debug!(client = name, lowest, highest, "hello");
                self.has_greeted = true;
                let version = highest.min(VERSION);
                if version < lowest.max(LOWEST_VERSION) {
                    return Err(AttachError::Version { lowest, highest });
                }
                self.features = features_of(version, features);
                self.session.answer(id, &self.welcome(version));
            }
            Message::Share if self.has_greeted => {
                self.shared = Some(share(self.session, id, self.image, self.metrics)?);
            }
            Message::ResumeMap(part) if self.has_greeted => self.take_map(part, more)?,
            Message::Label(label) if self.has_greeted => {
                let set = self.session.charge().set_label(label);
                // A second one.
                set.map_err(|_| AttachError::Order { kind })?;
            }
            Message::Attach(attach) if self.has_greeted => {
                let regions = self.regions(&attach)?;
                let none = HeldBytes::new(self.session.charge());
                return Ok(Some(Attachment {
                    id,
                    regions,
                    shared: self.shared.take(),
                    features: self.features,
                    map_bytes: std::mem::replace(&mut self.held, none),
                }));
            }
            Message::Goodbye => {
                self.session.answer(id, &Message::Left);
                self.session.flush();
                return Err(AttachError::Left);
            }
            _ => return Err(AttachError::Order { kind }),
        }
        Ok(None)
    }

    fn welcome(&self, version: u16) -> Message {
        let small = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        Message::Welcome(Welcome {
            version,
            max_payload_bytes: small(frame::MAX_PAYLOAD_BYTES),
            max_regions: small(MAX_REGIONS),
            max_descriptors: small(MAX_DESCRIPTORS),
            max_memory_bytes: MAX_MEMORY_BYTES,
            max_map_bytes: MAX_MAP_BYTES as u64,
            features: self.features,
            image_bytes: self.image.image.bytes(),
            image: self.image.image.digest(),
        })
    }

    /// Takes a part of a page map. `more`: the next message continues it.
    fn take_map(&mut self, part: PageMapPart, more: bool) -> Result<(), AttachError> {
        // A map without bytes takes memory, too.
        self.map_bytes += part.bytes.len().max(64);
        if self.map_bytes > MAX_MAP_BYTES {
            return Err(AttachError::MapsTooLong);
        }
        self.held.set(self.map_bytes)?;
        match self.maps.last_mut() {
            Some((last, true))
                if (last.region, last.first_page) == (part.region, part.first_page) =>
            {
                last.bytes.extend(part.bytes);
            }
            _ => self.maps.push((part, true)),
        }
        if let Some((_, continues)) = self.maps.last_mut() {
            *continues = more;
        }
        Ok(())
    }

    fn regions(&mut self, attach: &Attach) -> Result<Vec<AttachedRegion>, AttachError> {
        let mut checked = Vec::with_capacity(attach.regions.len());
        for (index, region) in attach.regions.iter().enumerate() {
            let (bytes, offset) = (region.bytes, region.image_offset);
            let page_size = region.page_size;
            checked.push(checked_region(
                index,
                region.address,
                bytes,
                offset,
                page_size,
            )?);
        }
        check_together(&checked)?;
        if !self.any_length {
            // A client pays nothing for addresses, and the server for each page that it keeps a map of.
            for (index, region) in checked.iter().enumerate() {
                self.check_length(index, region)?;
            }
        }
        let files = attach.regions.iter().filter(|region| region.file.is_some());
        self.session.charge_vm(&checked, files.count())?;
        let arrived = self.session.take_descriptors();
        self.kept.extend(arrived);
        let uffds = self.userfaultfds(attach)?;
        let features = Features::from_bits(attach.uffd_features);
        let mut regions = Vec::with_capacity(checked.len());
        for (index, (wanted, region)) in attach.regions.iter().zip(checked).enumerate() {
            let memory = match wanted.mode {
                RegionMode::Missing => Memory::Missing,
                mode => {
                    let mut needed = Features::MINOR_SHMEM | Features::MISSING_SHMEM;
                    if mode == RegionMode::Clone {
                        // A discarded page that is not reported would read as the image again.
                        needed = needed | Features::EVENT_REMOVE;
                    }
                    let missing = needed.without(features);
                    if missing != Features::NONE {
                        let region = index;
                        return Err(AttachError::Features {
                            region,
                            mode,
                            missing,
                        });
                    }
                    if wanted.page_size != PageSize::Size4K {
                        return Err(AttachError::HugePages {
                            region: index,
                            page_size: wanted.page_size,
                            mode,
                        });
                    }
                    match mode {
                        RegionMode::Clone => self.cloned(index, &region)?,
                        _ => self.file(index, wanted.file, wanted.file_offset)?,
                    }
                }
            };
            let uffd = uffds
                .get(usize::from(wanted.uffd))
                .and_then(Option::as_ref)
                .map(Arc::clone);
            regions.push(AttachedRegion {
                region,
                memory,
                uffd: uffd.ok_or(AttachError::NoDescriptor {
                    region: index,
                    number: wanted.uffd,
                    count: self.kept.len(),
                })?,
                maps: Vec::new(),
            });
        }
        self.add_maps(&mut regions)?;
        Ok(regions)
    }

    /// Adopts the descriptors that regions name as userfaultfds. The others are files.
    fn userfaultfds(&self, attach: &Attach) -> Result<Vec<Option<Arc<Userfaultfd>>>, AttachError> {
        let features = served_features(attach.uffd_features)?;
        let count = self.kept.len();
        for (region, wanted) in attach.regions.iter().enumerate() {
            let missing = [Some(wanted.uffd), wanted.file]
                .into_iter()
                .flatten()
                .find(|&number| usize::from(number) >= count);
            if let Some(number) = missing {
                return Err(AttachError::NoDescriptor {
                    region,
                    number,
                    count,
                });
            }
        }
        let mut uffds = Vec::with_capacity(count);
        for (number, descriptor) in self.kept.iter().enumerate() {
            let is = |named: Option<u8>| named.map(usize::from) == Some(number);
            let is_uffd = attach.regions.iter().any(|region| is(Some(region.uffd)));
            let is_file = attach.regions.iter().any(|region| is(region.file));
            if is_uffd == is_file {
                return Err(AttachError::UnusedDescriptor { number });
            }
            uffds.push(match is_uffd {
                true => {
                    let own = descriptor.try_clone().map_err(AttachError::Duplicate)?;
                    let adopted = Userfaultfd::adopt(own, features);
                    let adopted =
                        adopted.map_err(|source| AttachError::NotUserfaultfd { number, source });
                    Some(Arc::new(adopted?))
                }
                false => None,
            });
        }
        Ok(uffds)
    }

    fn cloned(&self, index: usize, region: &VmRegion) -> Result<Memory, AttachError> {
        let shared = self
            .shared
            .as_ref()
            .ok_or(AttachError::NotShared { region: index })?;
        self.check_length(index, region)?;
        Ok(Memory::Clone(Arc::clone(shared)))
    }

    fn check_length(&self, index: usize, region: &VmRegion) -> Result<(), AttachError> {
        let end = region.offset.saturating_add(region.bytes());
        let image_bytes = self.image.image.bytes();
        match end <= image_bytes {
            true => Ok(()),
            false => Err(AttachError::BeyondImage {
                region: index,
                end,
                image_bytes,
            }),
        }
    }

    /// The file of a region in MINOR mode.
    fn file(&self, region: usize, file: Option<u8>, offset: u64) -> Result<Memory, AttachError> {
        let number = file.unwrap_or(u8::MAX);
        let count = self.kept.len();
        let descriptor = self.kept.get(usize::from(number));
        let descriptor = descriptor.ok_or(AttachError::NoDescriptor {
            region,
            number,
            count,
        })?;
        let seals = fcntl_get_seals(descriptor.as_fd())
            .map_err(|errno| AttachError::NotMemfd { region, errno })?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(AttachError::NotSealed { region });
        }
        let own = descriptor.try_clone().map_err(AttachError::Duplicate)?;
        Ok(Memory::Minor(own, offset))
    }

    fn add_maps(&mut self, regions: &mut [AttachedRegion]) -> Result<(), AttachError> {
        let count = regions.len();
        // Of one user, the maps of one VM are decoded at a time.
        let _turn = self.session.charge().turn();
        // Both are there for a moment.
        let most = PageMapImage::most_memory_bytes(self.map_bytes);
        self.held.set(self.map_bytes.saturating_add(most))?;
        let mut decoded_bytes = 0_usize;
        for (part, _) in std::mem::take(&mut self.maps) {
            let PageMapPart {
                region, first_page, ..
            } = part;
            let image = PageMapImage::decode(&part.bytes).map_err(|source| AttachError::Map {
                region,
                first_page,
                source,
            })?;
            let target = usize::try_from(region)
                .ok()
                .and_then(|index| regions.get_mut(index))
                .ok_or(AttachError::MapOfNoRegion {
                    region,
                    regions: count,
                })?;
            decoded_bytes = decoded_bytes.saturating_add(image.memory_bytes());
            target.maps.push((first_page, image));
        }
        // Less than the most, which the next one of the user may need.
        Ok(self.held.set(decoded_bytes)?)
    }
}

/// The features with which a client's userfaultfd is served.
pub(crate) fn served_features(bits: u64) -> Result<Features, AttachError> {
    let features = Features::from_bits(bits);
    if features.contains(Features::SIGBUS) {
        return Err(AttachError::SigbusFeature);
    }
    // Events that the client has not asked for never come, and being ready for them costs a lock: a
    // client that is wrong about its features does no harm.
    Ok(features
        | Features::EVENT_REMOVE
        | Features::EVENT_UNMAP
        | Features::EVENT_REMAP
        | Features::EVENT_FORK
        | Features::POISON)
}

/// Answers *share*.
pub(crate) fn share(
    session: &mut Session<'_>,
    id: u32,
    image: &ServedImage,
    metrics: &Metrics,
) -> Result<Arc<SharedImage>, ShareError> {
    session.charge_answer()?;
    let shared = image.share(metrics)?;
    let descriptor = shared.descriptor()?;
    let answer = Message::Shared {
        bytes: shared.bytes(),
        page_bytes: PageSize::Size4K.bytes(),
    };
    session.answer_with(id, &answer, Some(descriptor));
    Ok(shared)
}
