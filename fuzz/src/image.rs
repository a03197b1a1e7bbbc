//! Pagetide images (`pagetide_sources::image`): header, index, chunks and layers, by
//! docs/design/image-format.md.
//!
//! The input is an image without what no mutation would get right: magic, padding, checksums, and the
//! place of the index. Flags in the first byte leave one of them as it is in the input.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use pagetide_memory::Urgency;
use pagetide_pager::Filled;
use pagetide_sources::image::{CreateOptions, Holes, ImageInfo, MOST_MEMORY_BYTES, create};
use pagetide_sources::{Bases, Digest, GuestImage, Location, OpenOptions, PagetideImage};
use tempfile::TempDir;

use crate::memory::bounded;
use crate::take;

const MAGIC: &[u8; 16] = b"\x89pagetide image\n";
const HEADER_BYTES: usize = 4096;
const AT_CHUNK_BYTES: usize = 20;
const AT_MEMORY_BYTES: usize = 24;
const AT_INDEX_OFFSET: usize = 32;
const AT_INDEX_BYTES: usize = 40;
const AT_STORED_CHUNKS: usize = 48;
const AT_DIGEST: usize = 64;
const AT_BASE_DIGEST: usize = 96;
const AT_BASE_KIND: usize = 128;
const AT_BASE_BYTES: usize = 132;
const AT_BASE: usize = 136;
const AT_CHECKSUM: usize = 4064;
const RECORD_BYTES: usize = 48;

/// The checksums of stored chunks are those of the input.
const KEEP_CHUNK_CHECKSUMS: u8 = 1;
/// The place of the index is that of the input.
const KEEP_INDEX_PLACE: u8 = 2;
/// The digest is that of the input.
const KEEP_DIGEST: u8 = 4;
/// The header's checksum is wrong.
const NO_CHECKSUM: u8 = 8;
/// The base is where the input says: it is not opened.
const KEEP_BASE: u8 = 16;
/// The places of stored chunks are those of the input.
const KEEP_CHUNK_PLACES: u8 = 32;

/// Guest memory that one input checks.
const MOST_CHECKED: u64 = 64 << 10;

/// A directory with a base for images with a base.
struct Place {
    directory: TempDir,
    base: Vec<u8>,
    base_digest: Digest,
}

thread_local! {
    static PLACE: Place = Place::new();
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let mut base: Vec<u8> = (0..=250).cycle().take(3 * 4096).collect();
        base[4096..8192].fill(0);
        base.extend([9; 100]);
        let raw = directory.path().join("base.raw");
        std::fs::write(&raw, &base).expect("a file");
        let options = CreateOptions {
            chunk_bytes: 4096,
            any_length: true,
            holes: Some(Holes::Base),
            ..CreateOptions::default()
        };
        let image = directory.path().join("base");
        create(&raw, &image.clone().into(), &options, &mut |_, _| {}).expect("an image");
        let location = Location::Path(image);
        let info = ImageInfo::read(&location, &OpenOptions::default()).expect("an image");
        Self {
            directory,
            base,
            base_digest: info.digest,
        }
    }

    fn image(&self) -> PathBuf {
        self.directory.path().join("image")
    }

    /// What the base has from `offset` on.
    fn base_at(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let begin = usize::try_from(offset).unwrap_or(usize::MAX);
        let mut content = self.base.get(begin..).unwrap_or_default().to_vec();
        content.resize(bytes, 0);
        content
    }
}

pub(crate) fn run(input: &[u8]) -> bool {
    PLACE.with(|place| check(place, input))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(take(&mut bytes.get(at..).unwrap_or_default()))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(take(&mut bytes.get(at..).unwrap_or_default()))
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(there) = bytes.get_mut(at..at + value.len()) {
        there.copy_from_slice(value);
    }
}

fn size(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// The image that the input describes, and whether its base may be opened.
fn build(place: &Place, mut input: &[u8]) -> (Vec<u8>, bool) {
    let [flags] = take(&mut input);
    let fields: [u8; AT_BASE - MAGIC.len()] = take(&mut input);
    let [base_bytes] = take(&mut input);
    let (base, body) = input.split_at(input.len().min(base_bytes.into()));
    let mut file = [&MAGIC[..], &fields, base].concat();
    let has_base = u32_at(&file, AT_BASE_KIND) != 0;
    if has_base && flags & KEEP_BASE == 0 {
        file.truncate(AT_BASE);
        file.extend(b"base");
        put(&mut file, AT_BASE_KIND, &1_u32.to_le_bytes());
        put(&mut file, AT_BASE_BYTES, &4_u32.to_le_bytes());
        put(&mut file, AT_BASE_DIGEST, &place.base_digest.0);
    }
    file.resize(HEADER_BYTES, 0);
    file.extend(body);
    if flags & KEEP_INDEX_PLACE == 0 {
        let chunk_bytes = u64::from(u32_at(&file, AT_CHUNK_BYTES)).max(1);
        let entries = u64_at(&file, AT_MEMORY_BYTES).div_ceil(chunk_bytes);
        let stored = u64::from(u32_at(&file, AT_STORED_CHUNKS));
        let bytes = entries.saturating_mul(4).saturating_add(stored * 48);
        if bytes <= body.len() as u64 {
            let offset = file.len() as u64 - bytes;
            put(&mut file, AT_INDEX_OFFSET, &offset.to_le_bytes());
            put(&mut file, AT_INDEX_BYTES, &bytes.to_le_bytes());
        }
    }
    seal(&mut file, flags);
    (file, !has_base || flags & KEEP_BASE == 0)
}

fn seal(file: &mut [u8], flags: u8) {
    let index = size(u64_at(file, AT_INDEX_OFFSET)).min(file.len());
    let stored = size(u32_at(file, AT_STORED_CHUNKS).into());
    let records = file.len().checked_sub(stored.saturating_mul(RECORD_BYTES));
    let mut end = HEADER_BYTES as u64;
    let first = records
        .filter(|&records| records >= index)
        .unwrap_or(file.len());
    for at in (first..file.len()).step_by(RECORD_BYTES) {
        if flags & KEEP_CHUNK_PLACES == 0 {
            put(file, at, &end.to_le_bytes());
        }
        let (offset, bytes) = (size(u64_at(file, at)), size(u32_at(file, at + 8).into()));
        end = (offset as u64).saturating_add(bytes as u64);
        let content = file.get(offset..offset.saturating_add(bytes));
        if let (Some(content), 0) = (content, flags & KEEP_CHUNK_CHECKSUMS) {
            let checksum = *blake3::hash(content).as_bytes();
            put(file, at + 16, &checksum);
        }
    }
    if flags & KEEP_DIGEST == 0 {
        let digest = digest(file, index);
        put(file, AT_DIGEST, &digest);
    }
    let (checked, _) = file.split_at(AT_CHECKSUM);
    let mut checksum = *blake3::hash(checked).as_bytes();
    checksum[0] ^= u8::from(flags & NO_CHECKSUM != 0);
    put(file, AT_CHECKSUM, &checksum);
}

/// The digest that the document defines.
fn digest(file: &[u8], index: usize) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&file[..AT_CHUNK_BYTES]);
    hasher.update(&file[AT_MEMORY_BYTES..AT_INDEX_OFFSET]);
    hasher.update(&file[AT_CHUNK_BYTES..AT_MEMORY_BYTES]);
    hasher.update(&file[AT_BASE_DIGEST..AT_BASE_KIND]);
    hasher.update(&file[index..]);
    *hasher.finalize().as_bytes()
}

fn check(place: &Place, input: &[u8]) -> bool {
    let (file, may_open) = build(place, input);
    let path = place.image();
    write(&path, &file).expect("a file");
    let location = Location::Path(path);
    let options = OpenOptions {
        cache_bytes: 64 << 10,
        bases: Bases::Anywhere,
        ..OpenOptions::default()
    };
    // Header and index as they are in the file, and as they are in memory; the path, and the messages.
    let limit = 4 * file.len() + (64 << 10);
    let Ok(info) = bounded(limit, || ImageInfo::read(&location, &options)) else {
        return false;
    };
    check_info(&file, &info);
    if let Some(base) = &info.base {
        let beside = base.place.resolve(&location);
        let is_in_directory = |location: &Location| {
            location.path().and_then(|path| path.parent()) == Some(place.directory.path())
        };
        if u32_at(&file, AT_BASE_KIND) == 1 {
            assert!(is_in_directory(&beside), "{beside:?}");
        }
        let url = Location::Url("https://host/images/top?token=1".into());
        let _ = base.place.resolve(&url).to_string();
    }
    if !may_open {
        return true;
    }
    let opened = bounded(4 * limit, || PagetideImage::open(&location, &options));
    let image = opened.expect("header and index are accepted, and the base is there");
    check_content(place, &file, &image);
    true
}

/// Writes a file without emptying it before: some file systems wait for the disk after that.
fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    let options = options.write(true).create(true).truncate(false);
    let file = options.open(path)?;
    file.write_all_at(bytes, 0)?;
    file.set_len(bytes.len() as u64)
}

/// The description is that of the file's bytes.
fn check_info(file: &[u8], info: &ImageInfo) {
    let index = size(u64_at(file, AT_INDEX_OFFSET));
    assert_eq!(info.digest.0, digest(file, index));
    assert_eq!(
        *blake3::hash(&file[..AT_CHECKSUM]).as_bytes(),
        file[AT_CHECKSUM..HEADER_BYTES]
    );
    assert_eq!(info.memory_bytes, u64_at(file, AT_MEMORY_BYTES));
    assert_eq!(info.chunk_bytes, u32_at(file, AT_CHUNK_BYTES));
    assert!(info.memory_bytes <= MOST_MEMORY_BYTES && info.chunk_bytes.is_power_of_two());
    assert!((4096..=4 << 20).contains(&info.chunk_bytes));
    assert_eq!(info.file_bytes, file.len() as u64);
    assert_eq!(info.stored_bytes, (index - HEADER_BYTES) as u64);
    let named = info.zero_chunks + info.base_chunks + info.duplicate_chunks + info.stored_chunks;
    assert_eq!(named, info.chunks);
    assert_eq!(
        info.chunks,
        info.memory_bytes.div_ceil(info.chunk_bytes.into())
    );
}

/// What the document says that a chunk of guest memory has; `None` if its stored bytes cannot be decoded.
fn wanted(place: &Place, file: &[u8], chunk: u64, bytes: usize) -> Option<Vec<u8>> {
    let index = size(u64_at(file, AT_INDEX_OFFSET));
    match u32_at(file, index + size(chunk) * 4) {
        u32::MAX => Some(vec![0; bytes]),
        0xffff_fffe => {
            let chunk_bytes = u64::from(u32_at(file, AT_CHUNK_BYTES));
            Some(place.base_at(chunk * chunk_bytes, bytes))
        }
        number => {
            let stored = size(u32_at(file, AT_STORED_CHUNKS).into());
            let record = file.len() - (stored - size(number.into())) * RECORD_BYTES;
            let offset = size(u64_at(file, record));
            let stored = &file[offset..offset + size(u32_at(file, record + 8).into())];
            let checksum = &file[record + 16..record + RECORD_BYTES];
            if blake3::hash(stored).as_bytes() != checksum {
                return None;
            }
            let content = match u32_at(file, record + 12) {
                0 => stored.to_vec(),
                _ => zstd::bulk::decompress(stored, bytes).ok()?,
            };
            (content.len() == bytes).then_some(content)
        }
    }
}

/// Each chunk reads as the document says, or not at all.
fn check_content(place: &Place, file: &[u8], image: &PagetideImage) {
    let chunk_bytes = u64::from(image.chunk_bytes());
    let memory = image.bytes();
    let mut content = vec![0xaa; size(chunk_bytes)];
    for chunk in 0..memory.div_ceil(chunk_bytes) {
        let offset = chunk * chunk_bytes;
        if offset > MOST_CHECKED {
            break;
        }
        let bytes = size(chunk_bytes.min(memory - offset));
        let wanted = wanted(place, file, chunk, bytes);
        let content = &mut content[..bytes];
        content.fill(0xaa);
        let found = image.read(offset, content, Urgency::Urgent);
        match (&found, &wanted) {
            (Ok(Filled::Bytes), Some(wanted)) => assert!(content == wanted, "chunk {chunk}"),
            (Ok(Filled::Zero), Some(wanted)) => assert!(wanted.iter().all(|&byte| byte == 0)),
            (Err(_), None) => {}
            _ => panic!("chunk {chunk}: {found:?}, and not {:?}", wanted.is_some()),
        }
        // A part, now: from the cache, or without waiting.
        let (from, to) = (bytes / 3, bytes - bytes / 3);
        let part = &mut content[from..to];
        match image.read_now(offset + from as u64, part, Urgency::Urgent) {
            None => {}
            Some(filled) => {
                let wanted = &wanted.expect("what can be decoded")[from..to];
                match filled {
                    Filled::Bytes => assert!(part == wanted, "a part of chunk {chunk}"),
                    _ => assert!(wanted.iter().all(|&byte| byte == 0)),
                }
            }
        }
    }
    let beyond = image.read(memory, &mut [0], Urgency::Bulk);
    assert!(beyond.is_err(), "a read beyond the end");
}

/// An image file as an input.
fn input_of(file: &[u8]) -> Vec<u8> {
    let base = size(u32_at(file, AT_BASE_BYTES).into());
    let length = u8::try_from(base).unwrap_or(u8::MAX);
    let (fields, base) = (&file[MAGIC.len()..AT_BASE], &file[AT_BASE..AT_BASE + base]);
    [&[0], fields, &[length], base, &file[HEADER_BYTES..]].concat()
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    PLACE.with(|place| {
        let path = |name: &str| place.directory.path().join(name);
        let make = |raw: &[u8], base: Option<Location>| {
            std::fs::write(path("raw"), raw).expect("a file");
            let options = CreateOptions {
                base,
                chunk_bytes: 4096,
                any_length: true,
                holes: Some(Holes::Base),
                ..CreateOptions::default()
            };
            let _ = std::fs::remove_file(path("image"));
            create(
                &path("raw"),
                &path("image").into(),
                &options,
                &mut |_, _| {},
            )
            .expect("an image");
            input_of(&std::fs::read(path("image")).expect("a file"))
        };
        let text: Vec<u8> = (0..64_u8).flat_map(|at| [at % 7; 64]).collect();
        let zero = vec![0; 4096];
        let noise: Vec<u8> = (0..100_u8).map(|at| at.wrapping_mul(at) ^ 0x5a).collect();
        let base = || Some(Location::Path(path("base")));
        vec![
            make(&noise, None),
            make(&[&text[..], &zero, &text, &noise].concat(), None),
            make(
                &[&place.base[..8192], &text, &zero, &zero, &noise].concat(),
                base(),
            ),
        ]
    })
}
