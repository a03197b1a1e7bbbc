//! Creating an image from guest memory that is no file: what a pipe brings, and an object of a store.

use std::io::{self, Read};
use std::path::Path;

use super::codec::is_zero;
use super::create::{
    CreateError, CreateOptions, Created, Holes, create_named, open_base, refuse_same_file,
};
use super::format::{check_chunk_bytes, check_memory_bytes};
use super::layers::Head;
use super::merge::write_whole;
use super::target::Target;
use crate::blob::BlobError;
use crate::mapped_ram::MappedRam;
use crate::open::{Location, OpenError, OpenOptions, open_blob};
use crate::raw::RawImage;

/// What is read of a stream at once.
const BLOCK_BYTES: usize = 1 << 20;

/// The unit of holes.
const PAGE_BYTES: usize = 4096;

/// Who may read what came through a pipe, or from a store.
const MODE: u32 = 0o600;

/// Creates the image `image` from the raw memory that `stream` brings until its end; `name` is for messages. It is copied to a
/// file without a name in the folder of `image` (for a URL, of temporary files) first, which takes room for all pages that are not zero. No part of it is a
/// hole: [`Holes::Zero`] is used. `progress` is told how many bytes have come, twice, and then as by [`create`].
///
/// [`create`]: super::create()
///
/// # Errors
/// [`CreateError`]; what was at `image` before is then still there.
pub fn create_from_stream(
    stream: &mut dyn Read,
    name: &str,
    image: &Location,
    options: &CreateOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Created, CreateError> {
    // Before anything is read, which cannot be read again.
    check_chunk_bytes(options.chunk_bytes)?;
    if let Some(base) = &options.base {
        open_base(base, image, options)?;
    }
    let object = &options.open.object;
    let copy = Target::begin(image, MODE, options.may_replace, object)?;
    let failed = |source: io::Error| CreateError::Raw(BlobError::io(name.to_owned(), source));
    let mut block = vec![0; BLOCK_BYTES];
    let mut bytes = 0;
    loop {
        let got = fill(stream, &mut block).map_err(failed)?;
        let content = block.get(..got).unwrap_or_default();
        for (page, content) in content.chunks(PAGE_BYTES).enumerate() {
            if !is_zero(content) {
                copy.write_at(bytes + (page * PAGE_BYTES) as u64, content)?;
            }
        }
        bytes += got as u64;
        progress(bytes, bytes);
        if got < BLOCK_BYTES {
            break;
        }
        check_memory_bytes(bytes, options.chunk_bytes)?;
    }
    copy.set_bytes(bytes)?;
    let options = CreateOptions {
        holes: Some(Holes::Zero),
        ..options.clone()
    };
    let name = Path::new(name);
    create_named(&copy.opened_path(), name, image, &options, progress)
}

/// Fills the buffer, unless the stream ends before. Returns how many bytes have come.
fn fill(stream: &mut dyn Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while let Some(room) = buffer.get_mut(got..).filter(|room| !room.is_empty()) {
        match stream.read(room) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

/// Creates the image `image` from the raw memory at a URL. No part of it is a hole. `progress` is told as by [`create`].
///
/// [`create`]: super::create()
///
/// # Errors
/// [`CreateError`]; what was at `image` before is then still there.
pub fn create_from_url(
    url: &str,
    image: &Location,
    options: &CreateOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Created, CreateError> {
    let name = Location::Url(url.to_owned()).to_string();
    refuse_same_file(Path::new(&name), image)?;
    let raw = open_raw(url, &options.open)?;
    write_whole(&raw, MODE, image, options, progress)
}

/// Creates the image `image` from the guest memory in QEMU's file at `location`, written with the capability mapped-ram: from
/// its RAM block of this name, or from its largest, at which `look` may look first. No part of it is a hole. `progress` is told as by
/// [`create`].
///
/// [`create`]: super::create()
///
/// # Errors
/// [`CreateError`]; what was at `image` before is then still there.
pub fn create_from_mapped_ram(
    location: &Location,
    block: Option<&str>,
    image: &Location,
    options: &CreateOptions,
    look: &mut dyn FnMut(&MappedRam),
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Created, CreateError> {
    let name = location.to_string();
    refuse_same_file(location.path().unwrap_or(Path::new(&name)), image)?;
    let blob = open_blob(location, &options.open).map_err(CreateError::OpenRaw)?;
    let name = blob.name().to_owned();
    let memory = MappedRam::open(blob, block).map_err(|source| {
        let source = OpenError::MappedRam { name, source };
        CreateError::OpenRaw(source)
    })?;
    look(&memory);
    let mode = memory.mode().unwrap_or(MODE);
    write_whole(&memory, mode, image, options, progress)
}

fn open_raw(url: &str, options: &OpenOptions) -> Result<RawImage, CreateError> {
    let failed = CreateError::OpenRaw;
    let blob = open_blob(&Location::Url(url.to_owned()), options).map_err(failed)?;
    let head = Head::read(&*blob).map_err(failed)?;
    if head.is_image() {
        let path = blob.name().into();
        return Err(CreateError::IsImage { path });
    }
    RawImage::with_head(blob, &head).map_err(failed)
}
