//! Sources of guest memory: where the content of a snapshot's pages is read from.
//!
//! ```text
//!   serve, migrate: one VM, its regions and faults
//!         │  pagetide_pager::Source
//!   ImageSource        a pool of threads; content that needs no waiting is delivered by the fault's thread
//!         │  GuestImage: guest memory by offset, zero runs named as such
//!   RawImage           a memory file as Firecracker writes it; holes are zeroes
//!   MappedRam          a RAM block of a file of QEMU, whose bitmap says which pages are zeroes
//!   PagetideImage      compressed chunks with checksums, in layers (module image)
//!         │  Blob: bytes by offset
//!   FileBlob           a local file: pread; a mapping, or RWF_NOWAIT, for content in the page cache
//!   ObjectBlob         an object of a store: GETs of ranges, blocks in memory and in a disk cache
//! ```
//!
//! An image never delivers zeroes for bytes that it does not have: a read beyond the end, a file that
//! was truncated or written to since, or a damaged part is an error. An image is an object and not a name
//! ([`Standing`]): what was opened never becomes what has its name later.
//!
//! Without the feature `objects`, which is on by default, no object is read: each is refused.

mod blob;
#[cfg(feature = "objects")]
mod cache;
#[cfg(not(feature = "objects"))]
#[path = "cache/options.rs"]
mod cache;
mod digest;
mod file;
mod foreign;
mod guest_image;
pub mod image;
mod mapped_file;
mod mapped_ram;
#[cfg(feature = "objects")]
mod object;
#[cfg(not(feature = "objects"))]
#[path = "object_left_out.rs"]
mod object;
mod open;
mod raw;
mod source;
mod standing;
mod state_file;
mod upload;

pub use blob::{AskedStanding, Blob, BlobError};
pub use cache::{CacheError, CacheOptions};
pub use digest::{Digest, ParseDigestError};
pub use file::{FileBlob, FileIdentity};
pub use foreign::NotMemory;
pub use guest_image::{GuestImage, ImageError};
pub use image::PagetideImage;
pub use mapped_file::cached_pages;
pub use mapped_ram::{MappedRam, MappedRamError};
pub use object::{ObjectBlob, ObjectCounters, ObjectOptions, ObjectOptionsError, OpenObjectError};
pub use open::{
    Bases, DEFAULT_CACHE_BYTES, DEFAULT_INDEX_BYTES, Location, OpenError, OpenOptions,
    ParseLocationError, open,
};
pub use raw::RawImage;
pub use source::ImageSource;
pub use standing::Standing;
pub use state_file::StateFile;
pub use upload::UploadError;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use pagetide_test_support::unbounded_log_lines;

    /// Kind: a line of the log for each block, opening or look, of which a store or a disk can make any number.
    #[test]
    fn no_line_of_the_log_is_without_a_bound() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        for (path, unbounded) in unbounded_log_lines(&sources).into_iter().flatten() {
            assert_eq!(unbounded, 0, "{}: use log_limited!", path.display());
        }
    }
}
