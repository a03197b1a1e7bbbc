//! Creating an image from another one, without the images below it, or above another base.

use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use pagetide_memory::Urgency;
use pagetide_pager::Filled;

use super::create::{CreateError, CreateOptions, Created, Holes, open_base, refuse_same_file};
use super::format::{check_chunk_bytes, check_memory_bytes};
use super::reader::PagetideImage;
use super::target::Target;
use super::writer::{Memory, Plan, write_image};
use crate::guest_image::{GuestImage, check_inside};
use crate::open::Location;

/// The memory of an image, with its layers.
struct Whole<'a>(&'a dyn GuestImage);

impl Memory for Whole<'_> {
    /// No part of it is a hole: the image says what each byte is.
    fn read(
        &mut self,
        offset: u64,
        content: &mut [u8],
        data: &mut Vec<Range<usize>>,
    ) -> Result<(), CreateError> {
        check_inside(offset, content.len(), self.0.bytes()).map_err(CreateError::ReadImage)?;
        let read = self.0.read(offset, content, Urgency::Bulk);
        if read.map_err(CreateError::ReadImage)? == Filled::Zero {
            content.fill(0);
        }
        data.clear();
        data.extend(std::iter::once(0..content.len()));
        Ok(())
    }
}

/// Creates the image `new` with the guest memory of `image`: in one layer, or above the base that the options name.
/// `progress` is told how many bytes of guest memory are done, of how many.
///
/// # Errors
/// [`CreateError`]; what was at `new` before is then still there.
pub fn merge(
    image: &PagetideImage,
    new: &Location,
    options: &CreateOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Created, CreateError> {
    for layer in &image.layers {
        refuse_same_file(Path::new(layer.blob.name()), new)?;
    }
    write_whole(image, image.mode(), new, options, progress)
}

/// Creates the image `new` with all guest memory of `image`, for those whom these permissions of a file permit.
///
/// # Errors
/// As [`merge`].
pub(super) fn write_whole(
    image: &dyn GuestImage,
    mut mode: u32,
    new: &Location,
    options: &CreateOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Created, CreateError> {
    let begun = Instant::now();
    check_chunk_bytes(options.chunk_bytes)?;
    check_memory_bytes(image.bytes(), options.chunk_bytes)?;
    let base = options.base.as_ref();
    let base = base.map(|base| open_base(base, new, options)).transpose()?;
    let (base, reference) = base.unzip();
    if let Some(base) = &base {
        if base.bytes() != image.bytes() && !options.any_length {
            return Err(CreateError::OtherLength {
                path: image.name().into(),
                bytes: image.bytes(),
                base: base.name().to_owned(),
                base_bytes: base.bytes(),
            });
        }
        mode &= base.mode();
    }
    let object = &options.open.object;
    let target = Target::begin(new, mode, options.may_replace, object)?;
    let plan = Plan {
        memory_bytes: image.bytes(),
        chunk_bytes: options.chunk_bytes,
        base: base.as_ref(),
        reference,
        holes: Holes::Zero,
        threads: options.threads,
    };
    let (info, hole_bytes) = write_image(&target, new, plan, || Ok(Whole(image)), progress)?;
    target.finish(progress)?;
    Ok(Created {
        info,
        hole_bytes,
        holes: Holes::Zero,
        elapsed: begun.elapsed(),
    })
}
