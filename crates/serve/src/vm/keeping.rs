//! A VM that is kept for a successor of this server.

use std::sync::Arc;

use pagetide_memory::{MapFile, PageSize};

use super::{Client, VmError};
use crate::handshake::VmRegion;
use crate::image::ServedImage;
use crate::native::attach::{AttachedRegion, Memory};
use crate::state::{Description, Kept, KeptRegion, State, map_file};

/// A VM at the keeper, and its page maps. The keeper forgets the VM when this is dropped, unless a successor
/// is to go on with it.
pub(super) struct Keeping {
    pub(super) state: Arc<State>,
    pub(super) id: u64,
    pub(super) maps: Arc<MapFile>,
    pub(super) is_handed_over: bool,
}

/// What else a successor has to know.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) is_native: bool,
    /// When the recording of its working set has begun, if a successor goes on with it.
    pub(super) recording_since_us: Option<u64>,
}

impl Drop for Keeping {
    fn drop(&mut self) {
        if !self.is_handed_over {
            self.state.forget(self.id);
        }
    }
}

impl Keeping {
    /// Keeps a VM, if it can be kept ([`can_be_kept`]). A keeper that does not answer refuses no VM: it gets it later.
    pub(super) fn begin(
        state: &Arc<State>,
        image: &ServedImage,
        client: &Client,
        attached: &[AttachedRegion],
        kind: Kind,
    ) -> Result<Option<Self>, VmError> {
        let Some(first) = attached.first().filter(|_| can_be_kept(attached)) else {
            return Ok(None);
        };
        let described = attached.iter().map(|attached| &attached.region);
        let bytes = PageSize::Size4K.bytes() + described.map(map_bytes).sum::<u64>();
        let maps = map_file(bytes).map_err(VmError::Keep)?;
        let mut description = describe(image, &client.socket, attached, kind);
        description.set_label(client.charge.label());
        let kept = Kept {
            stream: &client.stream,
            maps: &maps,
            description: &description,
        };
        let id = state.keep(&first.uffd, kept).map_err(VmError::Keep)?;
        Ok(Some(Self {
            state: Arc::clone(state),
            id,
            maps,
            is_handed_over: false,
        }))
    }

    /// Whether a successor gets the VM: only if the keeper has said that it holds it.
    pub(super) fn is_held(&self) -> bool {
        self.state.is_held(self.id)
    }
}

fn describe(
    image: &ServedImage,
    socket: &str,
    attached: &[AttachedRegion],
    kind: Kind,
) -> Description {
    let regions = attached.iter().map(|attached| &attached.region);
    // With its credentials, which the successor needs as well.
    let location = image.location.as_given().into_owned();
    let digest = image.image.digest().to_string();
    let regions = regions.map(KeptRegion::from).collect();
    let mut description = Description::new(socket.to_owned(), location, digest, regions);
    description.file = image.image.file_identity();
    description.is_native = kind.is_native;
    description.recording_since_us = kind.recording_since_us;
    description
}

/// Whether a successor can go on after `kill -9`.
///
/// Not with several userfaultfds: the messages that were read last are kept for one. And not with memory
/// whose file the server writes: a page may be mapped, and written by the guest, before the page map says so,
/// and a second write of its content would not fail as a second copy does.
fn can_be_kept(attached: &[AttachedRegion]) -> bool {
    let Some(first) = attached.first() else {
        return false;
    };
    attached.iter().all(|region| {
        Arc::ptr_eq(&region.uffd, &first.uffd) && !matches!(region.memory, Memory::Minor(..))
    })
}

/// The bytes of the page maps of a region, of which a part may lie beyond the end of the image: each map
/// begins at a multiple of a page.
pub(super) fn map_bytes(region: &VmRegion) -> u64 {
    let pages = region.bytes() >> region.page_size.shift();
    let page = PageSize::Size4K.bytes();
    (pages.div_ceil(page) + 1) * page
}

#[cfg(test)]
mod tests {
    use pagetide_sources::{Location, OpenOptions, open};

    use super::*;
    use crate::options::Options;

    /// Whoever reads the log has to find out which file is the right one.
    #[test]
    fn the_error_of_a_replaced_image_names_both_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("guest.mem");
        let identity = || {
            let image = open(&Location::Path(path.clone()), &OpenOptions::default());
            image.unwrap().file_identity().unwrap()
        };
        fs_err::write(&path, [1; 4096]).unwrap();
        let before = identity();
        assert_eq!(identity(), before);
        fs_err::write(&path, [1; 8192]).unwrap();
        let now = identity();
        let image = "guest.mem".to_owned();
        let text = VmError::ReplacedImage { image, before, now }.to_string();
        let start = "the image guest.mem was replaced or written to since the VM was restored from it: it had 4096 bytes, modified at ";
        assert!(text.starts_with(start), "{text}");
        assert!(
            text.contains(", and has 8192 bytes, modified at "),
            "{text}"
        );
    }

    /// A successor opens the image by what the keeper has. Messages show the location without credentials.
    #[test]
    fn a_successor_gets_the_credentials_of_the_images_url() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("guest.mem");
        fs_err::write(&path, [1; 4096]).unwrap();
        let image = open(&Location::Path(path), &OpenOptions::default()).unwrap();
        let url = "https://user:secret@store.example/guest.mem?token=1";
        let location: Location = url.parse().unwrap();
        let options = Options::default();
        let image = ServedImage::alone(image, &location, &options);
        let kind = Kind {
            is_native: false,
            recording_since_us: None,
        };
        let description = describe(&image, "a.sock", &[], kind);
        let successors: Location = description.image.parse().unwrap();
        assert_eq!(successors, location);
        assert!(!successors.to_string().contains("secret"));
    }
}
