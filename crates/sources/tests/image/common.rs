//! Memory files and images for tests.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use pagetide_memory::Urgency;
use pagetide_pager::Filled;
use pagetide_sources::image::{CreateError, CreateOptions, Created, Holes, create};
use pagetide_sources::{GuestImage, ImageError, Location, OpenOptions, PagetideImage};

/// A directory with files of these tests.
pub(crate) struct Place(pub(crate) tempfile::TempDir);

impl Place {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: &[u8]) -> PathBuf {
        std::fs::write(self.path(name), content).expect("it is written");
        self.path(name)
    }

    /// A file of `bytes` bytes with content at these offsets, and holes elsewhere.
    pub(crate) fn write_sparse(&self, name: &str, bytes: u64, parts: &[(u64, &[u8])]) -> PathBuf {
        let file = File::create(self.path(name)).expect("it is made");
        file.set_len(bytes).expect("it has a length");
        for (offset, content) in parts {
            file.write_all_at(content, *offset).expect("it is written");
        }
        self.path(name)
    }

    /// Creates the image `name` from the memory file `raw`, which may have any length, and no hole above a base.
    pub(crate) fn create(&self, raw: &str, name: &str, options: &CreateOptions) -> Created {
        let options = CreateOptions {
            any_length: true,
            holes: options.holes.or(Some(Holes::Base)),
            ..options.clone()
        };
        let created = self.try_create(raw, name, &options);
        created.unwrap_or_else(|error| unreachable!("{name}: {error:?}"))
    }

    pub(crate) fn try_create(
        &self,
        raw: &str,
        name: &str,
        options: &CreateOptions,
    ) -> Result<Created, CreateError> {
        create(
            &self.path(raw),
            &self.path(name).into(),
            options,
            &mut |_, _| {},
        )
    }

    pub(crate) fn open(&self, name: &str) -> PagetideImage {
        open(&self.path(name))
    }

    /// The names in the directory, in order.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).expect("it is there");
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        let mut names: Vec<_> = names
            .map(|name| name.to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

pub(crate) fn open(path: &Path) -> PagetideImage {
    let image = PagetideImage::open(&Location::Path(path.into()), &OpenOptions::default());
    image.unwrap_or_else(|error| unreachable!("{}: {error:?}", path.display()))
}

pub(crate) fn on(base: &Path) -> CreateOptions {
    CreateOptions {
        base: Some(Location::Path(base.into())),
        ..CreateOptions::default()
    }
}

pub(crate) fn chunks_of(chunk_bytes: u32) -> CreateOptions {
    CreateOptions {
        chunk_bytes,
        ..CreateOptions::default()
    }
}

/// Numbers that look random, the same for the same seed (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn bytes(&mut self, bytes: usize) -> Vec<u8> {
        let words = std::iter::repeat_with(|| self.next().to_le_bytes());
        words
            .take(bytes.div_ceil(8))
            .flatten()
            .take(bytes)
            .collect()
    }
}

/// Guest memory of `pages` pages and `rest` bytes: zero, random, compressible and repeated pages, in runs.
pub(crate) fn memory(seed: u64, pages: usize, rest: usize) -> Vec<u8> {
    let mut random = Random(seed);
    let repeated = random.bytes(4096);
    let mut content = Vec::with_capacity(pages * 4096 + rest);
    while content.len() < pages * 4096 + rest {
        let run = 1 + usize::try_from(random.below(24)).expect("few");
        match random.below(4) {
            0 => content.resize(content.len() + run * 4096, 0),
            1 => content.extend(random.bytes(run * 4096)),
            2 => {
                let words = (0..run * 512).map(|_| random.below(64).to_le_bytes());
                content.extend(words.flatten());
            }
            _ => (0..run).for_each(|_| content.extend(&repeated)),
        }
    }
    content.truncate(pages * 4096 + rest);
    content
}

/// Reads a part of the image, waiting.
pub(crate) fn read(
    image: &dyn GuestImage,
    offset: u64,
    bytes: usize,
) -> Result<Vec<u8>, ImageError> {
    let mut buffer = vec![0xaa; bytes];
    match image.read(offset, &mut buffer, Urgency::Bulk)? {
        Filled::Zero => buffer.fill(0),
        Filled::Bytes => {}
        Filled::Poisoned => unreachable!("an image has no poisoned pages"),
    }
    Ok(buffer)
}

/// Reads a part of the image if that needs no waiting.
pub(crate) fn read_now(image: &dyn GuestImage, offset: u64, bytes: usize) -> Option<Vec<u8>> {
    let mut buffer = vec![0xaa; bytes];
    match image.read_now(offset, &mut buffer, Urgency::Urgent)? {
        Filled::Zero => buffer.fill(0),
        Filled::Bytes => {}
        Filled::Poisoned => unreachable!("an image has no poisoned pages"),
    }
    Some(buffer)
}

/// Panics at the first difference, without printing megabytes.
pub(crate) fn assert_same(given: &[u8], wanted: &[u8], what: &str) {
    assert_eq!(given.len(), wanted.len(), "{what}");
    if let Some(at) = given.iter().zip(wanted).position(|(a, b)| a != b) {
        unreachable!(
            "{what}: byte {at} is {} instead of {}",
            given[at], wanted[at]
        );
    }
}

/// Reads all of the image, in parts of many lengths and by both methods.
pub(crate) fn assert_content(image: &dyn GuestImage, wanted: &[u8], what: &str) {
    assert_eq!(image.bytes(), wanted.len() as u64, "{what}");
    let mut random = Random(wanted.len() as u64);
    let all = read(image, 0, wanted.len()).expect("it is readable");
    assert_same(&all, wanted, what);
    for _ in 0..80 {
        let offset = random.below(wanted.len().max(1) as u64);
        let rest = wanted.len() as u64 - offset;
        let most = [100, 5000, 70_000, 400_000][usize::try_from(random.below(4)).expect("few")];
        let bytes = usize::try_from(random.below(most.min(rest + 1))).expect("it fits");
        let begin = usize::try_from(offset).expect("it fits");
        let wanted = &wanted[begin..begin + bytes];
        let what = format!("{what}: {bytes} bytes at {offset}");
        assert_same(
            &read(image, offset, bytes).expect("readable"),
            wanted,
            &what,
        );
        if let Some(given) = read_now(image, offset, bytes) {
            assert_same(&given, wanted, &format!("{what}, at once"));
        }
    }
}
