//! The file that memory comes from, and mappings of it.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use pagetide_sources::image::{CreateOptions, create};
use rustix::fs::{Advice, fadvise};
use rustix::io::{ReadWriteFlags, preadv2};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use tempfile::TempDir;

use super::plan::PAGE;

/// The name of the compressed image, in the file's directory.
pub(super) const COMPRESSED: &str = "memory.image";
/// Words of a page.
const WORDS: u64 = PAGE / 8;
/// How long a file may take to leave the page cache.
const LONGEST_DROP: Duration = Duration::from_secs(2);

/// Bytes of a chunk of a compressed image.
pub(super) const CHUNK_BYTES: u64 = 64 << 10;
/// Random bytes in each run of bytes of a chunk that has any: what zstd cannot compress.
const RANDOM_OF: (usize, usize) = (8, 24);

/// A file in a directory of its own, which goes with it. No two pages of it are alike, but for those of zeroes.
#[derive(Debug)]
pub(super) struct Image {
    directory: TempDir,
    file: File,
    bytes: usize,
}

impl Image {
    /// Writes a file to the directory for temporary files.
    pub(super) fn write(bytes: u64) -> io::Result<Self> {
        Self::write_words(bytes, |out| {
            for word in 0..bytes / 8 {
                // Odd, and different for each page and place.
                let value = (word / WORDS * 1_000_003 + word % WORDS * 7) << 1 | 1;
                out.write_all(&value.to_ne_bytes())?;
            }
            Ok(())
        })
    }

    /// Writes such a file with a compressed image of it beside it: every other chunk is zeroes, and the
    /// others compress 3 to 1.
    pub(super) fn write_compressed(bytes: u64) -> io::Result<Self> {
        let zeroes = vec![0; to_usize(CHUNK_BYTES)];
        let image = Self::write_words(bytes, |out| {
            let mut state = 0x9e37_79b9_7f4a_7c15_u64;
            for chunk in 0..bytes / CHUNK_BYTES {
                if !is_data(chunk) {
                    out.write_all(&zeroes)?;
                    continue;
                }
                let mut data = zeroes.clone();
                for run in data.chunks_mut(RANDOM_OF.1) {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    let random = state.to_ne_bytes();
                    let length = run.len().min(RANDOM_OF.0);
                    run[..length].copy_from_slice(&random[..length]);
                }
                out.write_all(&data)?;
            }
            Ok(())
        })?;
        let options = CreateOptions {
            chunk_bytes: u32::try_from(CHUNK_BYTES).unwrap_or(u32::MAX),
            ..CreateOptions::default()
        };
        let (from, to) = (image.path("memory"), image.path(COMPRESSED));
        create(&from, &to.clone().into(), &options, &mut |_, _| {}).map_err(io::Error::other)?;
        Ok(image)
    }

    fn write_words(
        bytes: u64,
        content: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> io::Result<Self> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("memory");
        let mut out = BufWriter::with_capacity(1 << 20, File::create_new(&path)?);
        content(&mut out)?;
        let file = out.into_inner()?;
        // Only what is on the disk can leave the page cache.
        file.sync_all()?;
        Ok(Self {
            file: File::open(path)?,
            directory,
            bytes: usize::try_from(bytes).map_err(io::Error::other)?,
        })
    }

    /// The path of the file, or of another one beside it.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Its length in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes the file out of the page cache; false if that cannot be done here.
    ///
    /// Mapped pages stay in the page cache, and the threads of a dropped source's pool unmap the file
    /// when they end, which is a moment later. The attempt is therefore repeated for a while.
    pub(super) fn drop_cache(&self) -> io::Result<bool> {
        let begun = Instant::now();
        loop {
            fadvise(&self.file, 0, None, Advice::DontNeed)?;
            let mut page = [0; 4096];
            let mut parts = [io::IoSliceMut::new(&mut page)];
            let read = preadv2(self.file.as_fd(), &mut parts, 0, ReadWriteFlags::NOWAIT);
            if read.is_err() {
                return Ok(true);
            }
            if begun.elapsed() > LONGEST_DROP {
                return Ok(false);
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Maps the file for reading, all of it populated, or private and nothing of it populated.
    pub(super) fn map(&self, is_private: bool) -> io::Result<Mapping> {
        let (flags, prot) = match is_private {
            true => (MapFlags::PRIVATE, ProtFlags::READ | ProtFlags::WRITE),
            false => (MapFlags::SHARED | MapFlags::POPULATE, ProtFlags::READ),
        };
        Mapping::new(self.file.as_fd(), self.bytes, flags, prot)
    }
}

/// Whether a chunk of the compressed image has anything but zeroes.
pub(super) fn is_data(chunk: u64) -> bool {
    chunk.is_multiple_of(2)
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// A mapping of a whole file.
#[derive(Debug)]
pub(super) struct Mapping {
    start: *const u8,
    bytes: usize,
}

// SAFETY: the mapping may be read from any thread: nobody writes to it or to the file.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(
        file: BorrowedFd<'_>,
        bytes: usize,
        flags: MapFlags,
        prot: ProtFlags,
    ) -> io::Result<Self> {
        let none = std::ptr::null_mut();
        // SAFETY: mmap without MAP_FIXED replaces no other mapping.
        let start = unsafe { mmap(none, bytes, prot, flags, file, 0) }?;
        Ok(Self {
            start: start.cast(),
            bytes,
        })
    }

    /// Maps the memfd of an image as the memory of a clone, none of which is there.
    pub(super) fn of_clone(file: BorrowedFd<'_>, bytes: u64) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        Self::new(file, to_usize(bytes), MapFlags::PRIVATE, prot)
    }

    /// Its address.
    pub(super) fn start(&self) -> u64 {
        self.start.expose_provenance() as u64
    }

    /// Its content.
    pub(super) fn content(&self) -> &[u8] {
        // SAFETY: from_raw_parts requires that many readable bytes that nobody changes as long as the
        // slice lives: the mapping lives as long as its borrow, and nobody writes to the file, which has
        // no name outside this process's own directory.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: munmap requires that nothing uses the mapping any more: references to its content
        // borrow it.
        let unmapped = unsafe { munmap(self.start.cast_mut().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compressed_image_is_half_zeroes_and_the_rest_compresses_3_to_1() {
        let bytes = 8 << 20;
        let image = Image::write_compressed(bytes).unwrap();
        let mapping = image.map(false).unwrap();
        for (chunk, content) in mapping.content().chunks(to_usize(CHUNK_BYTES)).enumerate() {
            let has_data = content.iter().any(|&byte| byte != 0);
            assert_eq!(has_data, is_data(chunk as u64), "chunk {chunk}");
        }
        let compressed = std::fs::metadata(image.path(COMPRESSED)).unwrap().len();
        let ratio = (bytes / 2) as f64 / compressed as f64;
        assert!((2.5..3.5).contains(&ratio), "{ratio}");
    }

    #[test]
    fn a_file_leaves_the_page_cache_once_another_thread_has_unmapped_it() {
        let image = Image::write(1 << 20).unwrap();
        if !image.drop_cache().unwrap() {
            println!("SKIP: files of this directory stay in the page cache");
            return;
        }
        let mapping = image.map(false).unwrap();
        let holder = thread::spawn(move || {
            // So that the file is still mapped when it is to leave; if not, the test shows less.
            thread::sleep(Duration::from_millis(100));
            drop(mapping);
        });
        assert!(image.drop_cache().unwrap());
        holder.join().unwrap();
    }
}
