//! Objects with a disk cache.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code")]

mod support;

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use pagetide_memory::Urgency::{Bulk, Urgent};
use pagetide_sources::{
    Blob, CacheError, CacheOptions, Location, ObjectBlob, ObjectOptions, OpenError,
    OpenObjectError, OpenOptions, open,
};
use pagetide_test_support::{equals, eventually, in_a_process_of_its_own, within_patience};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Resource, getrlimit, setrlimit};
use support::{Act, Server, options, pattern};

const BLOCK: usize = 16 << 10;

fn cache(directory: &Path) -> CacheOptions {
    CacheOptions {
        directory: directory.into(),
        bytes: 4 << 20,
    }
}

fn opened(server: &Server, cache: &CacheOptions) -> ObjectBlob {
    ObjectBlob::open(&server.url, &options(), Some(cache)).unwrap()
}

fn read(blob: &ObjectBlob, bytes: usize) -> Vec<u8> {
    let mut buffer = vec![0xee; bytes];
    blob.read_at(0, &mut buffer, Bulk).unwrap();
    buffer
}

/// The files of blocks.
fn files(directory: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(directory).unwrap().flatten();
    let folders = folders.filter(|folder| folder.path().is_dir());
    let files = folders.flat_map(|folder| fs::read_dir(folder.path()).unwrap().flatten());
    let files = files.map(|file| file.path());
    let is_new = |path: &PathBuf| {
        path.file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("new-")
    };
    let mut files: Vec<_> = files.filter(|path| !is_new(path)).collect();
    files.sort();
    files
}

#[test]
fn a_second_reader_needs_no_gets() {
    let directory = tempfile::tempdir().unwrap();
    let cache = cache(directory.path());
    let server = Server::start(8 * BLOCK + 100);
    let content = server.content();
    let first = opened(&server, &cache);
    assert_eq!(read(&first, content.len()), content);
    eventually("the cached blocks", || {
        equals(files(directory.path()).len(), &9)
    });
    let gets = server.gets().len();

    let second = opened(&server, &cache);
    assert_eq!(read(&second, content.len()), content);
    assert_eq!(
        (second.counters().disk_hits, second.counters().gets),
        (9, 0)
    );
    // Without waiting: what was written a moment ago is in the page cache.
    let third = opened(&server, &cache);
    let mut buffer = vec![0; 2 * BLOCK];
    if third.read_now(100, &mut buffer) {
        assert_eq!(buffer, content[100..100 + 2 * BLOCK]);
        assert_eq!(third.counters().disk_hits, 3);
    } else {
        println!("SKIP: the kernel or the file system does not read without waiting");
    }
    assert_eq!(server.gets().len(), gets);
    // A signed URL of the same object has the same blocks.
    let signed = format!("{}?X-Amz-Signature=abcdef&X-Amz-Date=1", server.url);
    let signed = ObjectBlob::open(&signed, &options(), Some(&cache)).unwrap();
    assert_eq!(read(&signed, content.len()), content);
    assert_eq!(signed.counters().gets, 0);
    // Another object, as a query names it, has others.
    let other = format!("{}?version=2", server.url);
    let other = ObjectBlob::open(&other, &options(), Some(&cache)).unwrap();
    assert_eq!(read(&other, content.len()), content);
    assert_eq!(other.counters().disk_hits, 0);
}

#[test]
fn a_replaced_object_has_blocks_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let cache = cache(directory.path());
    let server = Server::start(4 * BLOCK);
    let first = opened(&server, &cache);
    assert_eq!(read(&first, 4 * BLOCK), server.content());
    eventually("the cached blocks", || {
        equals(files(directory.path()).len(), &4)
    });
    server.change(|site| {
        site.content = pattern(4 * BLOCK, 9);
        site.etag = Some("\"second\"".into());
    });
    let second = opened(&server, &cache);
    assert_eq!(read(&second, 4 * BLOCK), server.content());
    assert_eq!(second.counters().disk_hits, 0);
}

#[test]
fn an_object_without_a_strong_etag_is_not_cached() {
    let directory = tempfile::tempdir().unwrap();
    let cache = cache(directory.path());
    for etag in [None, Some("W/\"weak\"")] {
        let server = Server::start(4 * BLOCK);
        server.change(|site| site.etag = etag.map(str::to_owned));
        let blob = opened(&server, &cache);
        assert_eq!(read(&blob, 4 * BLOCK), server.content());
        drop(blob);
    }
    // When all of a later object is cached, there is nothing else.
    let server = Server::start(4 * BLOCK);
    eventually("the later object's blocks", || {
        let blob = opened(&server, &cache);
        assert_eq!(read(&blob, 4 * BLOCK), server.content());
        equals(blob.counters().disk_hits, &4)
    });
    assert_eq!(files(directory.path()).len(), 4);
}

#[test]
fn damaged_files_are_fetched_again() {
    let directory = tempfile::tempdir().unwrap();
    let cache = cache(directory.path());
    let server = Server::start(4 * BLOCK);
    let content = server.content();
    assert_eq!(read(&opened(&server, &cache), 4 * BLOCK), content);
    eventually("the cached blocks", || {
        equals(files(directory.path()).len(), &4)
    });
    let names = files(directory.path());
    let mut bytes = fs::read(&names[0]).unwrap();
    bytes[5] ^= 1;
    fs::write(&names[0], bytes).unwrap();
    fs::write(&names[2], b"").unwrap();

    let blob = opened(&server, &cache);
    assert_eq!(read(&blob, 4 * BLOCK), content);
    let counters = blob.counters();
    assert_eq!(
        (counters.disk_damaged, counters.disk_hits, counters.gets),
        (2, 2, 2)
    );
    eventually("the cached blocks", || {
        equals(files(directory.path()).len(), &4)
    });
    let whole = opened(&server, &cache);
    assert_eq!(read(&whole, 4 * BLOCK), content);
    assert_eq!(whole.counters().gets, 0);
}

#[test]
fn cached_blocks_need_no_server() {
    let directory = tempfile::tempdir().unwrap();
    let cache = cache(directory.path());
    let server = Server::start(4 * BLOCK);
    let content = server.content();
    assert_eq!(read(&opened(&server, &cache), 4 * BLOCK), content);
    eventually("the cached blocks", || {
        equals(files(directory.path()).len(), &4)
    });
    let blob = opened(&server, &cache);
    server.always(Act::Status(500));
    assert_eq!(read(&blob, 4 * BLOCK), content);
}

#[test]
fn two_handles_share_a_directory_that_is_too_small() {
    let directory = tempfile::tempdir().unwrap();
    let cache = CacheOptions {
        directory: directory.path().into(),
        bytes: 10 * (BLOCK as u64 + 4096),
    };
    let server = Server::start(64 * BLOCK);
    let content = server.content();
    let options = ObjectOptions {
        memory_bytes: 0,
        ..options()
    };
    let blobs = [0, 1].map(|_| ObjectBlob::open(&server.url, &options, Some(&cache)).unwrap());
    std::thread::scope(|scope| {
        for blob in &blobs {
            let (content, directory) = (&content, directory.path());
            scope.spawn(move || {
                for round in 0..100usize {
                    let offset = round * 5 % 60 * BLOCK;
                    let mut buffer = vec![0; 2 * BLOCK];
                    blob.read_at(offset as u64, &mut buffer, Urgent).unwrap();
                    assert_eq!(buffer, content[offset..offset + 2 * BLOCK]);
                    assert!(files(directory).len() <= 10);
                }
            });
        }
    });
    assert!(blobs.iter().all(|blob| blob.counters().disk_damaged == 0));
}

/// A FUSE file system that answers nothing, until it is dropped: whoever looks up a name in it sleeps.
struct Hanging {
    device: Option<File>,
    place: PathBuf,
}

impl Hanging {
    /// Mounts it; prints the reason if that is not possible here.
    fn mount(place: &Path) -> Option<Self> {
        let device = match File::options().read(true).write(true).open("/dev/fuse") {
            Ok(device) => device,
            Err(error) => {
                println!("SKIP: /dev/fuse: {error}");
                return None;
            }
        };
        let fd = device.as_raw_fd();
        let options = format!("fd={fd},rootmode=40000,user_id=0,group_id=0");
        let options = std::ffi::CString::new(options).unwrap();
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        if let Err(errno) = mount("test", place, "fuse", flags, Some(options.as_c_str())) {
            println!("SKIP: a FUSE file system cannot be mounted: {errno}");
            return None;
        }
        Some(Self {
            device: Some(device),
            place: place.into(),
        })
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        // Whoever sleeps gets an error.
        drop(self.device.take());
        unmount(&self.place, UnmountFlags::DETACH).unwrap();
    }
}

/// Kind: an optional part fails, and the main part pays. Here the disk does not answer.
#[test]
fn a_cache_that_hangs_keeps_no_reader_waiting() {
    let directory = tempfile::tempdir().unwrap();
    let cache = cache(directory.path());
    let server = Server::start(4 * BLOCK);
    let content = server.content();
    assert_eq!(read(&opened(&server, &cache), 4 * BLOCK), content);
    eventually("the cached blocks", || {
        equals(files(directory.path()).len(), &4)
    });
    let blocks = files(directory.path()).remove(0);
    // First where the blocks are, then the directory itself.
    for place in [blocks.parent().unwrap(), directory.path()] {
        let Some(_hanging) = Hanging::mount(place) else {
            return;
        };
        let (url, cache) = (server.url.clone(), cache.clone());
        let (found, counters) = within_patience("the content", move || {
            let blob = ObjectBlob::open(&url, &options(), Some(&cache)).unwrap();
            let found = read(&blob, 4 * BLOCK);
            (found, blob.counters())
        });
        assert_eq!(found, content);
        assert!(counters.disk_hits == 0 && counters.gets > 0, "{counters:?}");
    }
}

/// Kind: an optional part fails, and the main part pays.
#[test]
fn an_object_is_read_without_a_directory_that_cannot_be_opened() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(2 * BLOCK);
    let cache = cache(&directory.path().join("none").join("none"));
    let blob = ObjectBlob::open(&server.url, &options(), Some(&cache)).unwrap();
    let mut buffer = vec![0; 2 * BLOCK];
    blob.read_at(0, &mut buffer, Urgent).unwrap();
    assert!(buffer == server.content());
    assert!(files(directory.path()).is_empty());
}

#[test]
fn a_directory_that_others_can_write_to_is_refused() {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let server = Server::start(BLOCK);
    let cache = cache(directory.path());
    let refused = ObjectBlob::open(&server.url, &options(), Some(&cache)).unwrap_err();
    assert!(matches!(
        refused,
        OpenObjectError::Cache(CacheError::Writable { .. })
    ));
    let location: Location = server.url.parse().unwrap();
    let refused = open(
        &location,
        &OpenOptions {
            object: options(),
            cache: Some(cache),
            ..OpenOptions::default()
        },
    );
    assert!(matches!(refused, Err(OpenError::Cache(_))));
}

/// A store, or whoever answers in its place, says what it likes of an object's length.
#[test]
fn an_object_of_an_exabyte_takes_no_memory_by_its_length() {
    let this = "an_object_of_an_exabyte_takes_no_memory_by_its_length";
    in_a_process_of_its_own(this, || {
        let mut limits = getrlimit(Resource::As);
        limits.current = Some(4 << 30);
        setrlimit(Resource::As, limits).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let server = Server::start(BLOCK);
        server.change(|site| site.zeroes = (1 << 60) - BLOCK as u64);
        let options = OpenOptions {
            object: options(),
            cache: Some(cache(directory.path())),
            ..OpenOptions::default()
        };
        let image = open(&server.url.parse().unwrap(), &options).unwrap();
        assert_eq!(image.bytes(), 1 << 60);
        let mut page = [0xee; 4096];
        image.read(0, &mut page, Urgent).unwrap();
        assert_eq!(page, server.content()[..4096]);
        image.read((1 << 60) - 4096, &mut page, Urgent).unwrap();
        assert_eq!(page, [0; 4096]);
        // Of the first block, which tells what it is, and of the last.
        assert_eq!(image.counters().unwrap().gets, 2);
    });
}
