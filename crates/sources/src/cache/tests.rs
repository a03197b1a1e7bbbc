use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

use pagetide_test_support::eventually;

use super::directory::Directory;
use super::*;

const BLOCK: usize = 16 << 10;
/// The directory of a child process, which is this test binary.
const CHILD: &str = "PAGETIDE_TEST_CACHE";

fn key(number: u64) -> ObjectKey {
    ObjectKey::of(&format!("s3://bucket/{number}"), "\"etag\"", 1 << 30, BLOCK)
}

fn content(object: u64, index: u64) -> Vec<u8> {
    let seed = object.wrapping_mul(0x9e37_79b9).wrapping_add(index);
    let words = (0..BLOCK as u64 / 8).map(|word| seed.wrapping_mul(word | 1).to_le_bytes());
    words.flatten().collect()
}

fn opened(directory: &Path, object: u64, bytes: u64) -> DiskCache {
    let options = CacheOptions {
        directory: directory.into(),
        bytes,
    };
    DiskCache::open(&options, key(object)).unwrap()
}

fn writer(directory: &Path, object: u64, bytes: u64) -> Writer {
    let directory = Arc::new(Directory::open(directory).unwrap());
    Writer::new(directory, key(object), key(object).to_string(), bytes)
}

/// A directory that only its owner can write to, whatever the umask.
fn temporary() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn read(cache: &DiskCache, index: u64) -> Found {
    cache.read(&[(index, BLOCK as u64)]).pop().unwrap()
}

fn used(directory: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(directory) else {
        return 0;
    };
    let sizes = entries.flatten().map(|entry| match entry.metadata() {
        Ok(status) if status.is_dir() => used(&entry.path()),
        Ok(status) => status.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

fn file_of(directory: &Path, object: u64, index: u64) -> PathBuf {
    directory.join(block_name(&key(object).to_string(), index))
}

#[test]
fn a_block_is_found_by_another_handle() {
    let directory = temporary();
    let path = directory.path().join("cache");
    let first = opened(&path, 1, 1 << 20);
    assert_eq!(read(&first, 3), Found::Absent);
    assert!(first.offer(3, Arc::new(content(1, 3))));
    let second = opened(&path, 1, 1 << 20);
    eventually("the block", || {
        read(&second, 3) == Found::Block(content(1, 3))
    });
    eventually("the block in the page cache", || {
        second.read_now(3, BLOCK as u64) == Some(content(1, 3))
    });
    // Other blocks, objects and versions have files of their own.
    assert_eq!(read(&second, 4), Found::Absent);
    assert_eq!(second.read_now(4, BLOCK as u64), None);
    assert_eq!(read(&opened(&path, 2, 1 << 20), 3), Found::Absent);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o700);
    assert_eq!(mode(&path.join(key(1).to_string())), 0o700);
    assert_eq!(mode(&file_of(&path, 1, 3)), 0o600);
}

#[test]
fn damaged_files_are_removed_and_never_used() {
    let directory = temporary();
    let path = directory.path();
    let cache = opened(path, 1, 1 << 20);
    let file = file_of(path, 1, 0);
    let whole = || {
        writer(path, 1, 1 << 20).write(0, &content(1, 0));
        assert_eq!(read(&cache, 0), Found::Block(content(1, 0)));
        fs::read(&file).unwrap()
    };
    for damage in 0..7 {
        let mut bytes = whole();
        match damage {
            0 => bytes[100] ^= 1,
            1 => bytes[BLOCK + 5] ^= 0x80,
            2 => bytes.truncate(bytes.len() - 1),
            3 => bytes.clear(),
            4 => bytes.push(0),
            5 => bytes.fill(0),
            // A whole block, under the number of another one.
            _ => {
                writer(path, 1, 1 << 20).write(9, &content(1, 9));
                bytes = fs::read(file_of(path, 1, 9)).unwrap();
            }
        }
        fs::write(&file, &bytes).unwrap();
        assert_eq!(cache.read_now(0, BLOCK as u64), None, "damage {damage}");
        assert_eq!(read(&cache, 0), Found::Damaged, "damage {damage}");
        assert!(!file.exists());
        assert_eq!(read(&cache, 0), Found::Absent);
    }
    // A symbolic link is not followed.
    let bytes = whole();
    let elsewhere = path.join("elsewhere");
    fs::write(&elsewhere, bytes).unwrap();
    fs::remove_file(&file).unwrap();
    symlink(&elsewhere, &file).unwrap();
    assert_eq!(cache.read_now(0, BLOCK as u64), None);
    assert_eq!(read(&cache, 0), Found::Damaged);
    assert!(elsewhere.exists());
}

#[test]
fn the_bound_is_kept_and_the_least_recently_used_go_first() {
    let directory = temporary();
    let path = directory.path();
    let bound = 20 * (BLOCK as u64 + UNIT_OF_TEST);
    let writes = [writer(path, 1, bound), writer(path, 2, bound)];
    let old = SystemTime::now() - Duration::from_secs(3600);
    for index in 0..60 {
        for (object, writer) in [1, 2].into_iter().zip(&writes) {
            writer.write(index, &content(object, index));
            assert!(used(path) <= bound + 16, "{} of {bound}", used(path));
            let file = fs::File::open(file_of(path, object, index)).unwrap();
            file.set_modified(old + Duration::from_secs(index)).unwrap();
        }
        // This one is used all the time.
        assert_eq!(
            read(&opened(path, 1, bound), 0),
            Found::Block(content(1, 0))
        );
    }
    assert_eq!(
        read(&opened(path, 1, bound), 59),
        Found::Block(content(1, 59))
    );
    assert_eq!(read(&opened(path, 1, bound), 20), Found::Absent);
    // A block that is larger than the bound is not written.
    writer(path, 3, 100).write(0, &content(3, 0));
    assert_eq!(read(&opened(path, 3, 100), 0), Found::Absent);
    // Nor does a lost or damaged note of the usage raise the bound.
    for note in [&b""[..], b"xx", &[0; 16], &[7; 40]] {
        fs::write(path.join("lock"), note).unwrap();
        for index in 100..130 {
            writes[0].write(index, &content(1, index));
            assert!(used(path) <= bound + 40);
        }
    }
}

const UNIT_OF_TEST: u64 = 4096;

#[test]
fn directories_that_others_own_or_write_to_are_refused() {
    let directory = temporary();
    let path = directory.path();
    let open = || Directory::open(path).map(drop);
    for mode in [0o777, 0o770, 0o1777, 0o702] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        assert!(
            matches!(open(), Err(CacheError::Writable { .. })),
            "{mode:o}"
        );
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    open().unwrap();
    if std::os::unix::fs::chown(path, Some(12345), None).is_ok() {
        let refused = open();
        assert!(matches!(
            refused,
            Err(CacheError::Owner { owner: 12345, .. })
        ));
    } else {
        println!("SKIP: only root can give a directory to another user");
    }
    let missing = Directory::open(&path.join("a/b"));
    assert!(matches!(missing, Err(CacheError::Directory { .. })));
}

/// A small file system, removed with its directory.
struct Small(tempfile::TempDir);

impl Small {
    fn mount(options: &str) -> Option<Self> {
        let directory = temporary();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]);
        let output = mount.arg(directory.path()).output();
        match output {
            Ok(output) if output.status.success() => Some(Self(directory)),
            other => {
                println!("SKIP: a tmpfs cannot be mounted: {other:?}");
                None
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Lazily: the thread of a dropped cache may still have the directory open.
        let unmount = Command::new("umount").arg("-l").arg(self.0.path()).status();
        assert!(unmount.is_ok_and(|status| status.success()));
    }
}

#[test]
fn a_full_disk_loses_nothing_but_the_cache() {
    let Some(small) = Small::mount("size=128k,mode=700") else {
        return;
    };
    let path = small.0.path();
    let writes = writer(path, 1, 1 << 30);
    (0..30).for_each(|index| writes.write(index, &content(1, index)));
    let cache = opened(path, 1, 1 << 30);
    let found = (0..30).filter(|&index| match read(&cache, index) {
        Found::Block(block) => {
            assert_eq!(block, content(1, index));
            assert_eq!(cache.read_now(index, BLOCK as u64), Some(block));
            true
        }
        Found::Absent => false,
        Found::Damaged => panic!("block {index} is damaged"),
    });
    assert!((1..=8).contains(&found.count()));
    let names = fs::read_dir(path.join(key(1).to_string()))
        .unwrap()
        .flatten();
    let mut names = names.map(|entry| entry.file_name().into_string().unwrap());
    assert!(names.all(|name| !name.starts_with("new-")));
}

#[test]
fn a_read_only_directory_is_read() {
    let Some(small) = Small::mount("size=1m,mode=700") else {
        return;
    };
    let path = small.0.path();
    writer(path, 1, 1 << 30).write(0, &content(1, 0));
    let mut remount = Command::new("mount");
    remount.args(["-o", "remount,ro"]).arg(path);
    assert!(remount.status().unwrap().success());
    let writes = writer(path, 1, 1 << 30);
    writes.write(1, &content(1, 1));
    let cache = opened(path, 1, 1 << 30);
    assert_eq!(read(&cache, 0), Found::Block(content(1, 0)));
    assert_eq!(read(&cache, 1), Found::Absent);
}

/// A child process: writes and reads blocks for as long as it lives, or for the given number of rounds.
#[test]
fn child() {
    let Ok(what) = std::env::var(CHILD) else {
        return;
    };
    let (rounds, path) = what.split_once(':').unwrap();
    let rounds: u64 = rounds.parse().unwrap();
    let bound = 30 * BLOCK as u64;
    let writes = writer(Path::new(path), 1, bound);
    let cache = opened(Path::new(path), 1, bound);
    println!("\nready");
    for round in 0..rounds {
        let index = round * 7 % 64;
        match read(&cache, index) {
            Found::Block(block) => assert_eq!(block, content(1, index)),
            Found::Absent => writes.write(index, &content(1, index)),
            Found::Damaged => panic!("block {index} is damaged"),
        }
    }
}

fn start_child(path: &Path, rounds: u64) -> std::process::Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "cache::tests::child", "--nocapture"]);
    command.env(CHILD, format!("{rounds}:{}", path.display()));
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "ready"));
    // The pipe stays open: the child prints its result.
    thread::spawn(move || lines.for_each(drop));
    child
}

#[test]
fn processes_share_a_directory() {
    let directory = temporary();
    let path = directory.path();
    let mut children: Vec<_> = (0..3).map(|_| start_child(path, 400)).collect();
    while children
        .iter_mut()
        .any(|child| child.try_wait().unwrap().is_none())
    {
        assert!(used(path) <= 30 * BLOCK as u64 + 16);
    }
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let cache = opened(path, 1, 30 * BLOCK as u64);
    let found = (0..64).filter(|&index| matches!(read(&cache, index), Found::Block(_)));
    assert!(found.count() > 10);
}

#[test]
fn killed_writers_leave_no_damage() {
    let directory = temporary();
    let path = directory.path();
    for round in 0..12 {
        let mut child = start_child(path, u64::MAX);
        // At another point of its work each time; what is expected is the same at each.
        thread::sleep(Duration::from_millis(round * 3));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    // What a writer leaves behind is removed by the next eviction.
    fs::write(path.join(key(1).to_string()).join("new-1-1"), b"half").unwrap();
    let bound = 30 * BLOCK as u64;
    let cache = opened(path, 1, bound);
    let writes = writer(path, 1, bound);
    for index in 0..128 {
        assert_ne!(read(&cache, index), Found::Damaged);
        writes.write(index, &content(1, index));
        assert_eq!(read(&cache, index), Found::Block(content(1, index)));
        assert!(used(path) <= bound + 16);
    }
    assert!(!path.join(key(1).to_string()).join("new-1-1").exists());
}
