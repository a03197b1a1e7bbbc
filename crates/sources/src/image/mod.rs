//! The Pagetide image: guest memory in compressed chunks with checksums, in layers.
//! docs/design/image-format.md describes the format.

mod base;
mod cache;
mod codec;
mod create;
mod extract;
mod format;
mod incoming;
mod index;
mod info;
mod layers;
mod memory_file;
mod merge;
mod parallel;
mod reader;
mod target;
mod verify;
mod writer;

#[cfg(test)]
mod tests;

pub use base::{BasePlace, BaseReference};
pub use create::{CreateError, CreateOptions, Created, Holes, create};
pub use extract::{ExtractError, ExtractOptions, extract, extract_to_stream};
pub use format::{
    DEFAULT_CHUNK_BYTES, FormatError, LEAST_CHUNK_BYTES, MOST_BASE_BYTES, MOST_CHUNK_BYTES,
    MOST_MEMORY_BYTES, VERSION,
};
pub use incoming::{create_from_mapped_ram, create_from_stream, create_from_url};
pub use info::ImageInfo;
pub(crate) use layers::Head;
pub use layers::MOST_LAYERS;
pub use merge::merge;
pub use reader::PagetideImage;
pub use target::TargetError;
pub use verify::{MOST_NAMED, Verified, VerifyOptions, verify};
