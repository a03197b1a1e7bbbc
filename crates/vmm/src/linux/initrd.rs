//! The initrd: a file that is copied to the end of low memory.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::image::open;
use super::layout::RamLayout;
use super::memory::{Ram, RamError};

const PAGE: u64 = 4096;
const CHUNK: usize = 1 << 20;
/// The boot protocol's limit, unless a bzImage says otherwise.
const LAST_ADDRESS: u32 = 0x7fff_ffff;

/// Why an initrd was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum InitrdError {
    /// The file cannot be read.
    #[error("initrd {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// A directory, a pipe, or nothing in it.
    #[error("initrd {} is not a file with something in it", path.display())]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// Kernel and initrd need more memory than there is.
    #[error(
        "initrd {} has {bytes} bytes, and {room_bytes} are left beside the kernel: more memory \
         is needed",
        path.display()
    )]
    DoesNotFit {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// What there is.
        room_bytes: u64,
    },
    /// Guest memory cannot be written.
    #[error(transparent)]
    Ram(#[from] RamError),
}

/// An initrd that has its place.
#[derive(Debug)]
pub(super) struct Initrd {
    path: PathBuf,
    file: File,
    gpa: u32,
    bytes: u32,
}

impl Initrd {
    /// Opens a file and finds its place: as high as may be, so that the kernel has room to grow.
    /// `last_address` is a bzImage's.
    pub(super) fn open(
        path: &Path,
        kernel_end: u64,
        last_address: Option<u32>,
        layout: RamLayout,
    ) -> Result<Self, InitrdError> {
        let failed = |source| InitrdError::Read {
            path: path.to_owned(),
            source,
        };
        let file = open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        let bytes = metadata.len();
        if !metadata.is_file() || bytes == 0 {
            return Err(InitrdError::NotAFile {
                path: path.to_owned(),
            });
        }
        let last = last_address
            .filter(|last| *last > 0)
            .unwrap_or(LAST_ADDRESS);
        let end = layout.low_end().min(u64::from(last) + 1);
        let start = kernel_end.next_multiple_of(PAGE);
        let room_bytes = end.saturating_sub(start);
        let place = end
            .checked_sub(bytes)
            .map(|gpa| gpa / PAGE * PAGE)
            .filter(|gpa| *gpa >= start);
        let numbers = place.and_then(|gpa| Some((gpa.try_into().ok()?, bytes.try_into().ok()?)));
        let Some((gpa, bytes)) = numbers else {
            return Err(InitrdError::DoesNotFit {
                path: path.to_owned(),
                bytes,
                room_bytes,
            });
        };
        Ok(Self {
            path: path.to_owned(),
            file,
            gpa,
            bytes,
        })
    }

    /// Address and length.
    pub(super) fn place(&self) -> (u32, u32) {
        (self.gpa, self.bytes)
    }

    /// Copies the file.
    pub(super) fn copy_to(mut self, ram: &Ram) -> Result<(), InitrdError> {
        let mut chunk = vec![0; CHUNK];
        let (mut gpa, mut left) = (u64::from(self.gpa), self.bytes as usize);
        while left > 0 {
            let part = &mut chunk[..left.min(CHUNK)];
            // A file that has become shorter ends this, too.
            self.file
                .read_exact(part)
                .map_err(|source| InitrdError::Read {
                    path: self.path.clone(),
                    source,
                })?;
            ram.write(gpa, part)?;
            gpa += part.len() as u64;
            left -= part.len();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_memory::{Backing, FailurePolicy};

    const KERNEL_END: u64 = (20 << 20) + 1;

    fn open(bytes: u64, memory_bytes: u64, last: Option<u32>) -> Result<Initrd, InitrdError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(bytes).unwrap();
        Initrd::open(file.path(), KERNEL_END, last, RamLayout::new(memory_bytes))
    }

    #[test]
    fn it_lies_at_the_end_of_low_memory() {
        let initrd = open(5000, 64 << 20, None).unwrap();
        assert_eq!(initrd.place(), ((64 << 20) - 8192, 5000));
        let initrd = open(4096, 8 << 30, None).unwrap();
        assert_eq!(initrd.place().0, 0x7fff_f000);
        let initrd = open(4096, 8 << 30, Some(0x37ff_ffff)).unwrap();
        assert_eq!(initrd.place().0, 0x37ff_f000);
    }

    #[test]
    fn it_never_covers_the_kernel() {
        let room = (64 << 20) - (KERNEL_END + 4095);
        assert!(open(room, 64 << 20, None).is_ok());
        for bytes in [room + 1, 64 << 20, 5 << 30, u64::from(u32::MAX) + 1] {
            let error = open(bytes, 64 << 20, None).err();
            assert!(
                matches!(error, Some(InitrdError::DoesNotFit { room_bytes, .. }) if room_bytes == room),
                "{error:?}"
            );
        }
    }

    #[test]
    fn nothing_is_no_initrd() {
        assert!(matches!(
            open(0, 64 << 20, None).err(),
            Some(InitrdError::NotAFile { .. })
        ));
        let dir = std::env::temp_dir();
        let error = Initrd::open(&dir, KERNEL_END, None, RamLayout::new(1 << 30)).err();
        assert!(matches!(error, Some(InitrdError::NotAFile { .. })));
    }

    #[test]
    fn a_file_that_shrinks_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let shrunk = Initrd::open(file.path(), KERNEL_END, None, RamLayout::new(64 << 20)).unwrap();
        file.as_file().set_len(4096).unwrap();
        let (shmem, policy) = (Backing::Shmem, FailurePolicy::KernelDefault);
        let layout = RamLayout::new(64 << 20);
        let ram = Ram::new(layout, Ram::set_aside(layout, shmem, policy).unwrap()).unwrap();
        assert!(matches!(
            shrunk.copy_to(&ram),
            Err(InitrdError::Read { .. })
        ));
    }
}
