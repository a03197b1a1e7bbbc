//! Working sets: the pages that a guest touched after its start, in order, with times.
//!
//! # The file
//!
//! All numbers are little-endian. `docs/design/working-sets.md` describes its use.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | `PTWORKST` |
//! | 8 | 4 | version, 1 |
//! | 12 | 4 | log2 of the page size in bytes, 12 to 30 |
//! | 16 | 32 | digest of the image |
//! | 48 | 8 | bytes of the image |
//! | 56 | 8 | number of entries, at most one for each page of the image |
//! | 64 | 4 | number of recordings that were merged |
//! | 68 | 4 | 0 |
//! | 72 | | entries, in the order of first touch |
//! | end - 32 | 32 | BLAKE3 digest of everything before |
//!
//! An entry has two LEB128 numbers: the difference of its page's number to that of the entry before
//! (from 0), zigzag-encoded; and the microseconds since the entry before (from the start).

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::Metadata;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use pagetide_memory::{PageIndex, PageRange, PageSize};
use pagetide_sources::Digest;
use thiserror::Error;

const MAGIC: [u8; 8] = *b"PTWORKST";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 72;
const DIGEST_BYTES: usize = 32;

/// The longest file that is read: one of the longest recording, of which each entry takes all of its bytes, is shorter.
const MOST_BYTES: u64 = 128 << 20;

/// Pages that lie at most this far apart, and were touched within [`NEAR_MICROSECONDS`], are replayed by
/// one range.
const NEAR_MICROSECONDS: u64 = 10_000;

/// Of a block of so many bytes, whose half or more is in the set, all pages of the set are replayed with the one that was
/// touched first: to read them one by one, in the order of a guest that touches its memory at random, takes many times as
/// long as to read the block, as the kernel does for a mapped file.
const BLOCK_BYTES: u64 = 128 << 10;

/// A touched page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// The page's number in the image.
    pub page: PageIndex,
    /// Microseconds from the start to its first touch.
    pub at_us: u64,
}

/// The working set of the guests of one image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkingSet {
    /// The image's digest.
    pub image: Digest,
    /// The image's length.
    pub image_bytes: u64,
    /// The page size of the entries.
    pub page_size: PageSize,
    /// How many recordings it was merged from.
    pub recordings: u32,
    /// In the order of first touch, each page once.
    pub touches: Vec<Touch>,
}

/// Why bytes are no working set.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FormatError {
    /// Another kind of file.
    #[error("it is no working set: it does not begin with PTWORKST")]
    Magic,
    /// A version that this program does not know.
    #[error("it has version {found} of the format, and this program knows version {VERSION}")]
    Version {
        /// The file's version.
        found: u32,
    },
    /// It ends early, or has more than its header says.
    #[error("it is cut or has more than its header says")]
    Length,
    /// The checksum differs.
    #[error("it differs from its checksum")]
    Checksum,
    /// A field has no valid value.
    #[error("{field} has no valid value")]
    Field {
        /// The field.
        field: &'static str,
    },
}

/// Why a working set was not read or written.
#[derive(Debug, Error)]
pub enum WorkingSetError {
    /// The file could not be read or written.
    #[error("the working set {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The file is longer than any working set.
    #[error("the working set {} has {bytes} bytes, and the longest has {MOST_BYTES}", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
    },
    /// The file was recorded from another image.
    #[error("the working set {} is of another image", path.display())]
    OtherImage {
        /// The file.
        path: PathBuf,
    },
    /// The file is no working set.
    #[error("the working set {} cannot be used", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: FormatError,
    },
}

impl WorkingSet {
    /// The set as a file's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + DIGEST_BYTES + self.touches.len() * 4);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.page_size.shift().to_le_bytes());
        bytes.extend(self.image.0);
        bytes.extend(self.image_bytes.to_le_bytes());
        bytes.extend((self.touches.len() as u64).to_le_bytes());
        bytes.extend(self.recordings.to_le_bytes());
        bytes.extend(0_u32.to_le_bytes());
        let (mut page, mut time) = (0, 0);
        for touch in &self.touches {
            put_number(&mut bytes, zigzag(touch.page.0.wrapping_sub(page)));
            put_number(&mut bytes, touch.at_us.saturating_sub(time));
            (page, time) = (touch.page.0, touch.at_us.max(time));
        }
        let digest = Digest::of(&bytes);
        bytes.extend(digest.0);
        bytes
    }

    /// Reads a file's bytes.
    ///
    /// # Errors
    /// [`FormatError`]. Nothing is allocated beyond a small multiple of the bytes' length.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        if !bytes.starts_with(&MAGIC) {
            return Err(FormatError::Magic);
        }
        let found = number_at(bytes, 8).ok_or(FormatError::Length)?;
        if found != VERSION {
            return Err(FormatError::Version { found });
        }
        let body_end = bytes
            .len()
            .checked_sub(DIGEST_BYTES)
            .filter(|&end| end >= HEADER_BYTES)
            .ok_or(FormatError::Length)?;
        let (body, digest) = bytes.split_at(body_end);
        if Digest::of(body).0 != *digest {
            return Err(FormatError::Checksum);
        }
        let (header, mut entries) = body.split_at(HEADER_BYTES);
        let field = |field| FormatError::Field { field };
        let shift = number_at(header, 12).ok_or(FormatError::Length)?;
        let sizes = [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G];
        let page_size = sizes.into_iter().find(|size| size.shift() == shift);
        let page_size = page_size.ok_or(field("the page size"))?;
        let image = header.get(16..48).and_then(|part| part.try_into().ok());
        let image = Digest(image.ok_or(FormatError::Length)?);
        let image_bytes = long_at(header, 48).ok_or(FormatError::Length)?;
        let count = long_at(header, 56).ok_or(FormatError::Length)?;
        let recordings = number_at(header, 64).ok_or(FormatError::Length)?;
        if number_at(header, 68) != Some(0) {
            return Err(field("a reserved word"));
        }
        let pages = image_bytes >> shift;
        // An entry has at least two bytes.
        if count > pages || count > entries.len() as u64 / 2 {
            return Err(field("the number of entries"));
        }
        let mut touches = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
        let (mut page, mut at_us) = (0_u64, 0_u64);
        for _ in 0..count {
            let step = take_number(&mut entries).ok_or(FormatError::Length)?;
            let later = take_number(&mut entries).ok_or(FormatError::Length)?;
            page = page.wrapping_add(unzigzag(step));
            if page >= pages {
                return Err(field("an entry's page"));
            }
            at_us = at_us.checked_add(later).ok_or(field("an entry's time"))?;
            touches.push(Touch {
                page: PageIndex(page),
                at_us,
            });
        }
        if !entries.is_empty() {
            return Err(FormatError::Length);
        }
        let mut touched: Vec<u64> = touches.iter().map(|touch| touch.page.0).collect();
        touched.sort_unstable();
        if touched.windows(2).any(|pair| pair.first() == pair.last()) {
            return Err(field("an entry's page, which another entry has"));
        }
        Ok(Self {
            image,
            image_bytes,
            page_size,
            recordings,
            touches,
        })
    }

    /// Reads a file; `None` if there is none.
    ///
    /// # Errors
    /// [`WorkingSetError`].
    pub fn load(path: &Path) -> Result<Option<Self>, WorkingSetError> {
        match open(path)? {
            Some(file) => Self::read(path, file, Vec::new()).map(Some),
            None => Ok(None),
        }
    }

    /// The same for a file that should be of this image. Of one that is not, no more is read than tells.
    ///
    /// # Errors
    /// [`WorkingSetError`].
    pub(crate) fn load_of(
        path: &Path,
        image: Digest,
        image_bytes: u64,
    ) -> Result<Option<Self>, WorkingSetError> {
        let Some(mut file) = open(path)? else {
            return Ok(None);
        };
        let mut header = Vec::new();
        let read = Read::by_ref(&mut file)
            .take(HEADER_BYTES as u64)
            .read_to_end(&mut header);
        read.map_err(|source| WorkingSetError::Io {
            path: path.into(),
            source,
        })?;
        let is_known = header.len() == HEADER_BYTES
            && header.starts_with(&MAGIC)
            && number_at(&header, 8) == Some(VERSION);
        let is_of_it = header.get(16..48) == Some(image.0.as_slice())
            && long_at(&header, 48) == Some(image_bytes);
        if is_known && !is_of_it {
            return Err(WorkingSetError::OtherImage { path: path.into() });
        }
        Self::read(path, file, header).map(Some)
    }

    /// Reads what follows `bytes` in a file.
    fn read(path: &Path, file: fs_err::File, mut bytes: Vec<u8>) -> Result<Self, WorkingSetError> {
        // It may have grown meanwhile.
        let read = file.take(MOST_BYTES).read_to_end(&mut bytes);
        read.map_err(|source| WorkingSetError::Io {
            path: path.into(),
            source,
        })?;
        Self::decode(&bytes).map_err(|source| WorkingSetError::Format {
            path: path.into(),
            source,
        })
    }

    /// Finds out whether a file can be written at `path`. Leaves nothing there.
    ///
    /// # Errors
    /// [`WorkingSetError::Io`].
    pub(crate) fn try_directory(path: &Path) -> Result<(), WorkingSetError> {
        new_beside(path).map(drop)
    }

    /// Writes a file. The file is complete or, after a crash, as before.
    ///
    /// # Errors
    /// [`WorkingSetError::Io`].
    pub fn save(&self, path: &Path) -> Result<(), WorkingSetError> {
        let failed = |source| WorkingSetError::Io {
            path: path.into(),
            source,
        };
        let mut file = new_beside(path)?;
        file.write_all(&self.encode()).map_err(failed)?;
        file.as_file().sync_data().map_err(failed)?;
        let written = file.persist(path);
        written.map_err(|error| failed(error.error))?;
        Ok(())
    }

    /// Whether the set was recorded from this image.
    pub fn is_of(&self, image: Digest, image_bytes: u64) -> bool {
        self.image == image && self.image_bytes == image_bytes
    }

    /// Adds another recording of the same image: all pages of both, each at its earlier time.
    pub fn merge(&mut self, other: &Self) {
        let shift = self.page_size.shift();
        let other_shift = other.page_size.shift();
        let in_own_pages = |touch: &Touch| Touch {
            page: PageIndex((touch.page.0 << other_shift) >> shift),
            ..*touch
        };
        self.touches.extend(other.touches.iter().map(in_own_pages));
        self.recordings = self.recordings.saturating_add(other.recordings);
        // Of one page's touches the earliest comes first, and stays.
        self.touches.sort_by_key(|touch| (touch.page, touch.at_us));
        self.touches.dedup_by_key(|touch| touch.page);
        self.touches.sort_by_key(|touch| touch.at_us);
    }

    /// The touches in the order of replay: those of a block that is mostly in the set have the time of its first.
    fn by_blocks(&self) -> Cow<'_, [Touch]> {
        let pages = (BLOCK_BYTES >> self.page_size.shift()).max(1);
        let block_of = |touch: &Touch| touch.page.0 / pages;
        // How many pages of each are in the set, and when the first was touched. Not a list of all blocks: the file says how
        // long the image is, and anybody may have written it.
        let mut blocks = HashMap::new();
        for touch in &self.touches {
            let (count, _) = blocks.entry(block_of(touch)).or_insert((0, touch.at_us));
            *count += 1;
        }
        let is_dense = |count: u64| 2 * count >= pages && count > 1;
        if !blocks.values().any(|(count, _)| is_dense(*count)) {
            return Cow::Borrowed(&self.touches);
        }
        let replayed = |touch: &Touch| match blocks.get(&block_of(touch)) {
            Some(&(count, at_us)) if is_dense(count) => Touch { at_us, ..*touch },
            _ => *touch,
        };
        let mut touches: Vec<Touch> = self.touches.iter().map(replayed).collect();
        touches.sort_by_key(|touch| touch.at_us);
        Cow::Owned(touches)
    }

    /// The runs of pages to fetch, earliest first: pages that were touched at about the same time are
    /// fetched in the order of their addresses, and neighbours together.
    pub fn runs(&self) -> Vec<PageRange> {
        let mut runs: Vec<PageRange> = Vec::new();
        let touches = self.by_blocks();
        let mut rest = &touches[..];
        while let Some(first) = rest.first() {
            let end = first.at_us.saturating_add(NEAR_MICROSECONDS);
            let count = rest.partition_point(|touch| touch.at_us < end).max(1);
            let (group, later) = rest.split_at(count);
            rest = later;
            let mut pages: Vec<u64> = group.iter().map(|touch| touch.page.0).collect();
            pages.sort_unstable();
            for page in pages {
                match runs.last_mut() {
                    Some(run) if run.end().0 == page => {
                        *run = PageRange::new(run.first(), run.count() + 1);
                    }
                    _ => runs.push(PageRange::single(PageIndex(page))),
                }
            }
        }
        runs
    }
}

/// Which file is at a path, and what was written to it last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileVersion(Option<(u64, u64, u64, i64, i64)>);

impl FileVersion {
    pub(crate) fn of(path: &Path) -> Self {
        let of = |status: Metadata| {
            let (changed, part) = (status.ctime(), status.ctime_nsec());
            (status.dev(), status.ino(), status.len(), changed, part)
        };
        Self(std::fs::metadata(path).ok().map(of))
    }
}

/// Opens a file that may be a working set; `None` if there is none.
fn open(path: &Path) -> Result<Option<fs_err::File>, WorkingSetError> {
    let failed = |source| WorkingSetError::Io {
        path: path.into(),
        source,
    };
    let status = match fs_err::metadata(path) {
        Ok(status) => status,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(failed(source)),
    };
    // To open a pipe would wait.
    if !status.is_file() {
        return Err(failed(io::Error::other("it is not a regular file")));
    }
    if status.len() > MOST_BYTES {
        let (path, bytes) = (path.into(), status.len());
        return Err(WorkingSetError::TooLong { path, bytes });
    }
    fs_err::File::open(path).map(Some).map_err(failed)
}

/// A new file in the directory of `path`, which goes when it is dropped.
fn new_beside(path: &Path) -> Result<tempfile::NamedTempFile, WorkingSetError> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    tempfile::NamedTempFile::new_in(directory).map_err(|source| WorkingSetError::Io {
        path: path.into(),
        source,
    })
}

fn zigzag(difference: u64) -> u64 {
    let signed = difference.cast_signed();
    ((signed << 1) ^ (signed >> 63)).cast_unsigned()
}

fn unzigzag(number: u64) -> u64 {
    (number >> 1) ^ (number & 1).wrapping_neg()
}

fn put_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    bytes.push((number & 0x7f) as u8);
}

/// The number at the start of `bytes`, which is removed; `None` if it is cut or longer than 64 bits.
fn take_number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let part = u64::from(byte & 0x7f);
        if part << shift >> shift != part {
            return None;
        }
        number |= part << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

fn number_at(bytes: &[u8], offset: usize) -> Option<u32> {
    let part = bytes.get(offset..offset + 4)?;
    Some(u32::from_le_bytes(part.try_into().ok()?))
}

fn long_at(bytes: &[u8], offset: usize) -> Option<u64> {
    let part = bytes.get(offset..offset + 8)?;
    Some(u64::from_le_bytes(part.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn set(touches: &[(u64, u64)]) -> WorkingSet {
        let touch = |&(page, at_us): &(u64, u64)| Touch {
            page: PageIndex(page),
            at_us,
        };
        WorkingSet {
            image: Digest::of(b"image"),
            image_bytes: 1 << 30,
            page_size: PageSize::Size4K,
            recordings: 1,
            touches: touches.iter().map(touch).collect(),
        }
    }

    #[test]
    fn a_set_survives_its_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("set");
        assert_eq!(WorkingSet::load(&path).unwrap(), None);
        let set = set(&[(7, 0), (3, 1), (262_143, 1), (0, 900_000)]);
        set.save(&path).unwrap();
        assert_eq!(WorkingSet::load(&path).unwrap(), Some(set));
    }

    #[test]
    fn a_changed_byte_or_a_cut_is_found() {
        let bytes = set(&[(7, 0), (3, 1), (100_000, 70_000)]).encode();
        for index in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[index] ^= 0x41;
            assert!(WorkingSet::decode(&changed).is_err(), "{index}");
            assert!(WorkingSet::decode(&bytes[..index]).is_err(), "{index}");
        }
    }

    /// A file with a right checksum, written by another program.
    #[test]
    fn fields_without_a_valid_value_are_refused() {
        let good = set(&[(7, 0), (3, 1)]);
        let mut many = good.encode();
        many[56] = 200;
        let mut size = good.encode();
        size[12] = 13;
        let mut outside = good.clone();
        outside.image_bytes = 7 << 12;
        let mut reserved = good.encode();
        reserved[71] = 1;
        let twice = set(&[(7, 0), (3, 1), (7, 2)]);
        for bytes in [many, size, outside.encode(), reserved, twice.encode()] {
            let body = bytes.len() - DIGEST_BYTES;
            let mut sealed = bytes[..body].to_vec();
            sealed.extend(Digest::of(&bytes[..body]).0);
            assert!(matches!(
                WorkingSet::decode(&sealed),
                Err(FormatError::Field { .. })
            ));
        }
    }

    #[test]
    fn merging_keeps_each_page_at_its_earlier_time() {
        let mut first = set(&[(1, 0), (2, 10), (3, 20)]);
        first.merge(&set(&[(3, 5), (4, 6), (1, 7)]));
        let merged: Vec<_> = first.touches.iter().map(|t| (t.page.0, t.at_us)).collect();
        assert_eq!(merged, [(1, 0), (3, 5), (4, 6), (2, 10)]);
        assert_eq!(first.recordings, 2);
    }

    #[test]
    fn neighbours_of_one_moment_are_one_run_and_earlier_runs_come_first() {
        let runs = set(&[(9, 0), (8, 1), (20, 2), (7, 3), (6, 500_000)]).runs();
        let run = |first, count| PageRange::new(PageIndex(first), count);
        assert_eq!(runs, [run(7, 3), run(20, 1), run(6, 1)]);
    }

    /// A guest that has touched most of a block, at random and over a second, and little of another.
    #[test]
    fn a_block_that_is_mostly_in_the_set_is_replayed_with_its_first_page() {
        let dense = (0..20).map(|index| (32 + index * 7 % 32, 100_000 + index * 50_000));
        let sparse = (0..3).map(|index| (64 + index * 7, index * 500_000));
        let mut touches: Vec<_> = dense.chain(sparse).collect();
        touches.sort_by_key(|&(_, at_us)| at_us);
        let runs = set(&touches).runs();
        let mut pages: Vec<u64> = (0..20).map(|index| 32 + index * 7 % 32).collect();
        pages.sort_unstable();
        let replayed: Vec<u64> = runs
            .iter()
            .flat_map(|run| run.iter())
            .map(|p| p.0)
            .collect();
        let wanted: Vec<u64> = [64].into_iter().chain(pages).chain([71, 78]).collect();
        assert_eq!(replayed, wanted);
        assert!(
            runs.len() < wanted.len(),
            "neighbours come together: {runs:?}"
        );
    }

    proptest! {
        #[test]
        fn each_page_is_in_one_run(touches in proptest::collection::vec((0_u64..400, 0_u64..1 << 20), 0..400)) {
            let mut all = set(&touches);
            all.merge(&all.clone());
            let runs = all.runs();
            let mut replayed: Vec<PageIndex> = runs.into_iter().flat_map(PageRange::iter).collect();
            replayed.sort_unstable();
            let mut pages: Vec<PageIndex> = all.touches.iter().map(|touch| touch.page).collect();
            pages.sort_unstable();
            prop_assert_eq!(replayed, pages);
        }

        #[test]
        fn any_touches_survive(touches in proptest::collection::vec((0_u64..1 << 18, 0_u64..1 << 40), 0..200)) {
            let mut all = set(&touches);
            all.touches.sort_by_key(|touch| touch.page);
            all.touches.dedup_by_key(|touch| touch.page);
            all.touches.sort_by_key(|touch| touch.at_us);
            prop_assert_eq!(WorkingSet::decode(&all.encode()), Ok(all));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = WorkingSet::decode(&bytes);
            let mut sealed = MAGIC.to_vec();
            sealed.extend(VERSION.to_le_bytes());
            sealed.extend(&bytes);
            sealed.extend(Digest::of(&sealed).0);
            let _ = WorkingSet::decode(&sealed);
        }
    }
}
