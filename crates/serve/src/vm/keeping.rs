//! A VM that is kept for a successor of this server.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use pagetide_memory::PageSize;

use super::{Client, VmError};
use crate::handshake::VmRegion;
use crate::image::ServedImage;
use crate::state::{Description, KeptRegion, State, map_file};

/// A VM at the keeper, and its page maps. The keeper forgets the VM when this is dropped, unless a successor
/// is to go on with it.
pub(super) struct Keeping {
    pub(super) state: Arc<State>,
    pub(super) id: u64,
    pub(super) maps: Arc<OwnedFd>,
    pub(super) is_handed_over: bool,
}

impl Drop for Keeping {
    fn drop(&mut self) {
        if !self.is_handed_over {
            self.state.forget(self.id);
        }
    }
}

impl Keeping {
    pub(super) fn begin(
        state: &Arc<State>,
        image: &ServedImage,
        client: &Client,
        uffd: &OwnedFd,
        described: &[VmRegion],
    ) -> Result<Self, VmError> {
        let bytes = PageSize::Size4K.bytes() + described.iter().map(map_bytes).sum::<u64>();
        let maps = map_file(bytes).map_err(VmError::Keep)?;
        let description = Description {
            socket: client.socket.clone(),
            image: image.location.to_string(),
            digest: image.image.digest().to_string(),
            regions: described.iter().map(KeptRegion::from).collect(),
        };
        let id = state.keep(uffd, &client.stream, &maps, &description);
        Ok(Self {
            state: Arc::clone(state),
            id: id.map_err(VmError::Keep)?,
            maps,
            is_handed_over: false,
        })
    }
}

/// The bytes of the page maps of a region, of which a part may lie beyond the end of the image: each map
/// begins at a multiple of a page.
pub(super) fn map_bytes(region: &VmRegion) -> u64 {
    let pages = region.bytes() >> region.page_size.shift();
    let page = PageSize::Size4K.bytes();
    (pages.div_ceil(page) + 1) * page
}
