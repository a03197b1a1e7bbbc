//! Further address spaces of a VM's memory: its vhost-user back ends.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use pagetide_memory::{HostAddress, HostRange};
use pagetide_pager::{AddressSpaceId, AttachError as PagerError, RegionId};
use pagetide_uapi::userfaultfd::{AdoptError, Userfaultfd};
use thiserror::Error;

use super::Vm;
use crate::native::attach::{AttachError, served_features};
use crate::native::message::{AttachSpace, MAX_SPACES, RefusedCode, SpaceRegion};

/// Why an address space was not attached.
#[derive(Debug, Error)]
pub(super) enum SpaceError {
    /// The message came without its userfaultfd.
    #[error("the message has no descriptor")]
    NoDescriptor,
    /// The descriptor cannot be used.
    #[error("the descriptor cannot be used")]
    NotUserfaultfd(#[from] AdoptError),
    /// The userfaultfd's features do not permit it.
    #[error(transparent)]
    Features(#[from] AttachError),
    /// There are too many.
    #[error("a VM has at most {MAX_SPACES} further address spaces")]
    TooMany,
    /// The VM has no such region.
    #[error("there is no region {region}")]
    NoRegion {
        /// The number in the message.
        region: u32,
    },
    /// The image ends inside the region.
    #[error("the image ends inside region {region}")]
    NoContent {
        /// The region's number.
        region: u32,
    },
    /// The region's addresses are invalid.
    #[error("region {region} cannot be at {address:#x}")]
    Address {
        /// The region's number.
        region: u32,
        /// The address in the message.
        address: u64,
    },
    /// The pager has refused it.
    #[error("the memory cannot be served there")]
    Attach(#[from] PagerError),
}

impl SpaceError {
    /// The code for the client.
    pub(super) fn code(&self) -> RefusedCode {
        match self {
            Self::NoDescriptor | Self::NotUserfaultfd(_) | Self::Features(_) => {
                RefusedCode::Descriptors
            }
            Self::NoRegion { .. } | Self::Address { .. } => RefusedCode::Regions,
            Self::NoContent { .. } => RefusedCode::NoContent,
            Self::TooMany | Self::Attach(_) => RefusedCode::Paging,
        }
    }
}

/// The further address spaces of a VM, by number.
#[derive(Debug, Default)]
pub(super) struct Spaces {
    list: BTreeMap<u32, (AddressSpaceId, usize)>,
    next: u32,
    /// Detached ones whose userfaultfds had to stay open.
    kept: usize,
}

impl Vm<'_> {
    /// Serves an address space from now on. Returns its number.
    ///
    /// # Errors
    /// [`SpaceError`]; none of its regions is served then.
    pub(super) fn attach_space(
        &mut self,
        wanted: &AttachSpace,
        descriptor: OwnedFd,
    ) -> Result<u32, SpaceError> {
        if self.open_spaces() >= MAX_SPACES {
            return Err(SpaceError::TooMany);
        }
        let features = served_features(wanted.uffd_features)?;
        let uffd = Arc::new(Userfaultfd::adopt(descriptor, features)?);
        let parts = wanted.regions.iter().map(|region| self.part_of(region));
        let parts: Vec<_> = parts.collect::<Result<_, _>>()?;
        let id = self.pager.attach(&uffd, &parts)?;
        while self.spaces.list.contains_key(&self.spaces.next) {
            self.spaces.next = self.spaces.next.wrapping_add(1);
        }
        let number = self.spaces.next;
        self.spaces.next = number.wrapping_add(1);
        self.spaces.list.insert(number, (id, parts.len()));
        Ok(number)
    }

    /// How many userfaultfds of address spaces are open.
    pub(super) fn open_spaces(&mut self) -> usize {
        // Not those whose process has gone.
        let served = self.pager.spaces();
        self.spaces.list.retain(|_, (id, _)| served.contains(id));
        self.spaces.list.len() + self.spaces.kept
    }

    /// The region of the pager, and its addresses in the other process.
    fn part_of(&self, wanted: &SpaceRegion) -> Result<(RegionId, HostRange), SpaceError> {
        let SpaceRegion { region, address } = *wanted;
        let mut parts = self.parts.iter().filter(|part| part.region == region);
        let part = parts.next().ok_or(SpaceError::NoRegion { region })?;
        let paged = self.regions.iter().find(|paged| paged.id == part.id);
        let paged = paged.ok_or(SpaceError::NoContent { region })?;
        // The part beyond the image's end has no file, and no content.
        if parts.next().is_some() {
            return Err(SpaceError::NoContent { region });
        }
        let start = usize::try_from(address).ok();
        let bytes = usize::try_from(paged.bytes).ok();
        let range = start
            .zip(bytes)
            .filter(|_| paged.page_size.divides(address));
        let range = range.and_then(|(start, bytes)| HostRange::new(HostAddress(start), bytes).ok());
        let range = range.ok_or(SpaceError::Address { region, address })?;
        Ok((part.id, range))
    }

    /// Ends the service of an address space: what is missing is poisoned there. Returns the number of its regions;
    /// `None` if there is no such address space.
    pub(super) fn detach_space(&mut self, number: u32) -> Option<usize> {
        let (id, regions) = self.spaces.list.remove(&number)?;
        // Otherwise the process has gone.
        if let Err(PagerError::NotPoisoned) = self.pager.detach(id) {
            self.spaces.kept += 1;
        }
        Some(regions)
    }
}
