//! The guest's memory as it is filled before the guest starts.

use std::sync::Arc;

use pagetide_memory::{
    AccessError, Backing, FailurePolicy, GuestAddress, GuestRange, PageIndex, Region, RegionError,
};

use super::config::LinuxConfigError;
use super::content::{Content, ContentError, ContentFile};
use super::layout::RamLayout;

/// Why something could not be written to guest memory, which would be an error in the layout.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// Nothing is loaded there.
    #[error("gpa {gpa:#x} is outside the memory that is loaded")]
    Outside {
        /// Where.
        gpa: u64,
    },
    /// The content file.
    #[error(transparent)]
    Content(ContentError),
    /// The region refused.
    #[error("cannot write guest memory at {gpa:#x}")]
    Access {
        /// Where.
        gpa: u64,
        /// What the region says.
        #[source]
        source: AccessError,
    },
}

/// All memory of a guest, as one or two regions.
#[derive(Debug)]
pub(super) struct Ram {
    layout: RamLayout,
    regions: Vec<Arc<Region>>,
    /// Where what is loaded goes instead.
    content: Option<ContentFile>,
}

impl Ram {
    /// Takes regions that somebody else made. Whether anything of them is present is up to him.
    pub(super) fn new(
        layout: RamLayout,
        regions: Vec<Arc<Region>>,
    ) -> Result<Self, LinuxConfigError> {
        let needed = layout.ranges().unwrap_or_default();
        let found: Vec<_> = regions.iter().map(|region| region.range()).collect();
        if found == needed {
            return Ok(Self {
                layout,
                regions,
                content: None,
            });
        }
        Err(LinuxConfigError::WrongRegions { found, needed })
    }

    /// Has what is loaded go to a file: nothing of it is in memory.
    pub(super) fn loaded_into(self, content: Option<ContentFile>) -> Self {
        Self { content, ..self }
    }

    /// Everything is loaded: the file, if that is where it went, to be read by gpa.
    pub(super) fn finish_content(&mut self) -> Result<Option<Content>, ContentError> {
        let content = self.content.take();
        content
            .map(|content| content.finish(self.layout))
            .transpose()
    }

    /// Sets the memory aside. Nothing is populated.
    pub(super) fn set_aside(
        layout: RamLayout,
        backing: Backing,
        policy: FailurePolicy,
    ) -> Result<Vec<Arc<Region>>, RegionError> {
        let ranges = layout.ranges().map_err(|_| RegionError::Empty)?;
        let make = |range: GuestRange| {
            Region::with_policy(range.start(), range.bytes(), backing, policy).map(Arc::new)
        };
        ranges.into_iter().map(make).collect()
    }

    /// By address; each is a memory slot's.
    pub(super) fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// Loads something below the first region's end, through the service mapping where there is one:
    /// what is written does not become present for the guest by that.
    pub(super) fn write(&self, gpa: u64, bytes: &[u8]) -> Result<(), RamError> {
        let region = self.regions.first();
        let page = region.and_then(|region| Some((region, region.page_of_gpa(GuestAddress(gpa))?)));
        let Some((region, page)) = page else {
            return Err(RamError::Outside { gpa });
        };
        let PageIndex(number) = page;
        if let Some(content) = &self.content {
            if bytes.len() as u64 > region.bytes() - gpa {
                return Err(RamError::Outside { gpa });
            }
            return content.load(gpa, bytes).map_err(RamError::Content);
        }
        let offset = gpa - (number << region.page_size().shift());
        let written = if region.service().is_some() {
            region.write_service(page, offset, bytes)
        } else {
            region.write_guest(page, offset, bytes)
        };
        written.map_err(|source| RamError::Access { gpa, source })
    }

    /// Writes 64-bit words.
    pub(super) fn write_words(&self, gpa: u64, words: &[u64]) -> Result<(), RamError> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.write(gpa, &bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ram(bytes: u64, backing: Backing) -> Ram {
        let layout = RamLayout::new(bytes);
        let regions = Ram::set_aside(layout, backing, FailurePolicy::KernelDefault);
        Ram::new(layout, regions.unwrap()).unwrap()
    }

    #[test]
    fn regions_that_do_not_fit_are_refused() {
        let made = ram(4 << 20, Backing::Shmem).regions;
        for bytes in [8 << 20, 5 << 30] {
            let layout = RamLayout::new(bytes);
            let refused = Ram::new(layout, made.clone()).err();
            let Some(LinuxConfigError::WrongRegions { found, needed }) = refused else {
                panic!("{refused:?}")
            };
            assert_eq!(found, [made[0].range()]);
            assert_eq!(needed, layout.ranges().unwrap());
        }
        assert!(Ram::new(RamLayout::new(4 << 20), made).is_ok());
    }

    #[test]
    fn what_is_written_is_there_for_every_backing() {
        for backing in [Backing::Shmem, Backing::Anonymous] {
            let ram = ram(4 << 20, backing);
            ram.write(0x1234, b"across").unwrap();
            ram.write(0x1ffe, b"pages").unwrap();
            let mut found = [0; 5];
            let region = &ram.regions()[0];
            region.read_guest(PageIndex(1), 0xffe, &mut found).unwrap();
            assert_eq!(&found, b"pages");
            let error = ram.write(4 << 20, b"x");
            assert!(matches!(error, Err(RamError::Outside { gpa: 0x40_0000 })));
            let error = ram.write((4 << 20) - 1, b"xy");
            assert!(matches!(error, Err(RamError::Access { .. })));
        }
    }
}
