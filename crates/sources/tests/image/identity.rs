//! An image is an object and not a name: what was opened never becomes what has its name later, and what was written to
//! since is not answered from what was known before.

use std::fs::{self, File, FileTimes};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::common::{Place, memory, on, read, read_now};
use pagetide_sources::image::CreateOptions;
use pagetide_sources::{
    GuestImage, ImageError, Location, NotMemory, OpenError, OpenOptions, Standing, open,
};
use pagetide_test_support::{eventually, within_patience};
use rustix::fs::inotify;

const PAGE: usize = 4096;

/// A time long ago: a write of the same tick of the kernel's clock as the write before it moves no time.
fn long_ago() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)
}

fn set_time(path: &Path, time: SystemTime) {
    let file = File::options().write(true).open(path).expect("it is there");
    let times = FileTimes::new().set_modified(time);
    file.set_times(times).expect("it has a time");
}

fn opened(path: &Path) -> Arc<dyn GuestImage> {
    open(&Location::Path(path.into()), &OpenOptions::default()).expect("it opens")
}

fn standing(image: &dyn GuestImage) -> Standing {
    image.standing().expect("it can be looked at")
}

/// Eight pages of content, and eight pages of a hole.
fn sparse(place: &Place, name: &str, value: u8) -> std::path::PathBuf {
    let path = place.write_sparse(name, 16 * PAGE as u64, &[(0, &[value; 8 * PAGE])]);
    set_time(&path, long_ago());
    path
}

#[test]
fn a_file_that_replaces_another_is_seen_and_the_former_one_stays() {
    let place = Place::new();
    let path = sparse(&place, "raw", 1);
    let image = opened(&path);
    assert_eq!(standing(&*image), Standing::Same);
    let new = sparse(&place, "new", 2);
    fs::rename(&new, &path).expect("it is renamed");
    assert_eq!(standing(&*image), Standing::Replaced);
    for page in [0, 7] {
        let offset = (page * PAGE) as u64;
        assert_eq!(read(&*image, offset, PAGE).expect("its own"), [1; PAGE]);
    }
    assert_eq!(standing(&*opened(&path)), Standing::Same);
    assert_eq!(
        read(&*opened(&path), 0, PAGE).expect("the new one"),
        [2; PAGE]
    );

    // A name that is a link, as to the newest of several snapshots.
    let (link, other) = (place.path("link"), sparse(&place, "other", 3));
    std::os::unix::fs::symlink(&path, &link).expect("a link");
    let image = opened(&link);
    assert_eq!(standing(&*image), Standing::Same);
    fs::remove_file(&link).expect("it is there");
    std::os::unix::fs::symlink(other, &link).expect("a link");
    assert_eq!(standing(&*image), Standing::Replaced);
    fs::remove_file(&link).expect("it is there");
    let error = image.standing().expect_err("it leads nowhere");
    assert_eq!(error.kind(), "not_found");
}

/// A file that is completed in place: what was a hole when it was opened is not zero any more.
#[test]
fn a_file_that_is_written_to_is_seen_and_reads_fail() {
    let place = Place::new();
    let path = sparse(&place, "raw", 1);
    let image = opened(&path);
    assert_eq!(image.hole_bytes(), 8 * PAGE as u64);
    let before = image.file_identity();
    let hole = 12 * PAGE as u64;
    assert_eq!(read(&*image, hole, PAGE).expect("a hole"), [0; PAGE]);
    let file = File::options().write(true).open(&path).expect("there");
    file.write_all_at(&[5; PAGE], hole).expect("it is written");
    let Standing::Rewritten { before: was, now } = standing(&*image) else {
        panic!("{:?}", standing(&*image));
    };
    assert_eq!(Some(was), before);
    assert_ne!(Some(now), before);
    // The file is looked at once in a tick of the kernel's clock.
    let error = eventually("the change is noticed", || {
        read(&*image, hole, PAGE).map_or_else(Ok, Err)
    });
    let ImageError::Blob(error) = error else {
        panic!("{error}");
    };
    assert_eq!(error.kind(), "changed");
    for offset in [0, hole] {
        assert_eq!(read_now(&*image, offset, PAGE), None);
        assert!(image.mapped(offset, PAGE as u64).is_none());
        assert!(read(&*image, offset, PAGE).is_err());
    }
    // The content and the time of before, as `cp --preserve` gives them: it is what was opened.
    file.write_all_at(&[0; PAGE], hole).expect("it is written");
    set_time(&path, long_ago());
    assert_eq!(read(&*image, hole, PAGE).expect("as before"), [0; PAGE]);
}

/// The clock that files' times come from stands still between two ticks; a file is looked at after each read, and before
/// each use of its mapped pages, all the same.
#[test]
fn what_was_written_just_now_is_not_given_out() {
    let place = Place::new();
    for round in 0..100 {
        let name = format!("raw-{round}");
        let path = place.write_sparse(&name, 8 * PAGE as u64, &[(0, &[1; 8 * PAGE])]);
        set_time(&path, long_ago());
        let image = opened(&path);
        read(&*image, 0, PAGE).expect("it is as it was");
        assert!(image.mapped(PAGE as u64, PAGE as u64).is_some());
        let file = File::options().write(true).open(&path).expect("it opens");
        file.write_all_at(&[2; PAGE], PAGE as u64)
            .expect("it is written");
        assert!(image.mapped(PAGE as u64, PAGE as u64).is_none());
        assert_eq!(read_now(&*image, PAGE as u64, PAGE), None);
        read(&*image, PAGE as u64, PAGE).expect_err("it was written to");
    }
}

/// What changes neither content nor time keeps those who read, and is opened anew for others: it may be a write whose
/// time was set back.
#[test]
fn a_change_of_a_files_status_alone_stops_nobody() {
    let place = Place::new();
    let path = sparse(&place, "raw", 1);
    let image = opened(&path);
    eventually("a later time of the last change", || {
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("it is ours");
        standing(&*image) == Standing::Replaced
    });
    assert_eq!(read(&*image, 0, PAGE).expect("as before"), [1; PAGE]);
}

#[test]
fn a_layer_that_is_replaced_or_written_to_is_seen() {
    let place = Place::new();
    let content = memory(3, 100, 0);
    place.write("raw", &content);
    place.create("raw", "base", &CreateOptions::default());
    let mut changed = content.clone();
    changed[0] ^= 1;
    place.write("raw-2", &changed);
    place.create("raw-2", "top", &on(&place.path("base")));
    for name in ["base", "top"] {
        set_time(&place.path(name), long_ago());
    }
    let image = opened(&place.path("top"));
    assert_eq!(standing(&*image), Standing::Same);
    fs::copy(place.path("base"), place.path("copy")).expect("a copy");
    fs::rename(place.path("copy"), place.path("base")).expect("a rename");
    assert_eq!(standing(&*image), Standing::Replaced);
    let file = File::options().write(true).open(place.path("top"));
    let last = fs::metadata(place.path("top")).expect("it is there").len() - 1;
    file.expect("it is there")
        .write_all_at(&[0], last)
        .expect("it is written");
    assert!(matches!(standing(&*image), Standing::Rewritten { .. }));
    // Its own chunks have checksums, and those of the former base are still there.
    assert_eq!(read(&*image, 0, PAGE).expect("as before"), changed[..PAGE]);
}

#[test]
fn what_is_no_guest_memory_is_refused_by_name() {
    let place = Place::new();
    let cases: [(&str, Vec<u8>, &str); 5] = [
        ("empty", vec![], "it is empty"),
        (
            "cut",
            vec![7; 3 * PAGE + 17],
            "12305 bytes, which is no whole number of pages",
        ),
        (
            "qemu",
            [b"QEVM\0\0\0\x03", &[0; 8184][..]].concat(),
            "of QEMU",
        ),
        (
            "state",
            [&0x0710_1984_8664_0000_u64.to_le_bytes(), &[1; 4088][..]].concat(),
            "mem_file_path",
        ),
        (
            "zst",
            [b"\x28\xb5\x2f\xfd", &[1; 4092][..]].concat(),
            "unpack it first",
        ),
    ];
    for (name, content, wanted) in cases {
        let path = place.write(name, &content);
        let error = open(&Location::Path(path), &OpenOptions::default()).expect_err(name);
        assert!(error.is_refusal(), "{error}");
        let OpenError::NotMemory { source, .. } = &error else {
            panic!("{name}: {error}");
        };
        assert!(source.to_string().contains(wanted), "{name}: {source}");
        let created = place.try_create(name, "image", &CreateOptions::default());
        let error = created.expect_err(name);
        assert!(error.is_refusal(), "{error}");
        let cause = std::error::Error::source(&error).and_then(std::error::Error::source);
        assert_eq!(cause.expect("a cause").to_string(), source.to_string());
    }
    // Memory of a length that somebody asks for; what it is matters nevertheless.
    let any = CreateOptions {
        any_length: true,
        ..CreateOptions::default()
    };
    place.try_create("cut", "image", &any).expect("any length");
    assert!(place.try_create("qemu", "image-2", &any).is_err());
    let empty = NotMemory::Empty.to_string();
    assert!(empty.contains("no guest memory"), "{empty}");
}

fn make_pipe(path: &Path) {
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let made = rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0);
    made.expect("a pipe");
}

/// To open a pipe waits for somebody who writes.
#[test]
fn a_pipe_is_refused_and_not_waited_for() {
    let place = Place::new();
    let pipe = place.path("pipe");
    make_pipe(&pipe);
    for path in [pipe, "/dev/zero".into()] {
        let location = Location::Path(path);
        let error = within_patience("a refusal", move || {
            open(&location, &OpenOptions::default()).expect_err("no file")
        });
        let cause = std::error::Error::source(&error)
            .expect("a cause")
            .to_string();
        assert_eq!(cause, "it is not a regular file");
        assert!(error.is_refusal(), "{error}");
    }
}

/// Notes when what is at `path` is opened from now on.
fn watched(path: &Path) -> OwnedFd {
    let notes = inotify::init(inotify::CreateFlags::NONBLOCK).expect("inotify");
    inotify::add_watch(&notes, path, inotify::WatchFlags::OPEN).expect("a watch");
    notes
}

/// To open a pipe tells whoever writes to it that there is a reader, and to open a device may do anything.
#[test]
fn a_base_that_is_no_file_is_refused_and_never_opened() {
    type Make = fn(&Path);
    let kinds: [(&str, Make); 3] = [
        ("a pipe", make_pipe),
        ("a directory", |path| {
            fs::create_dir(path).expect("it is made");
        }),
        ("a socket", |path| {
            drop(UnixListener::bind(path).expect("it is made"));
        }),
    ];
    for (kind, make) in kinds {
        let place = Place::new();
        place.write("raw", &memory(1, 20, 0));
        place.create("raw", "base", &CreateOptions::default());
        let base = place.path("base");
        place.create("raw", "top", &on(&base));
        fs::remove_file(&base).expect("it is there");
        make(&base);
        let opens = watched(&base);
        let top = Location::Path(place.path("top"));
        let error = within_patience(kind, move || {
            open(&top, &OpenOptions::default()).expect_err("it has no base")
        });
        let OpenError::Base { source, .. } = &error else {
            panic!("{kind}: {error}");
        };
        let cause = std::error::Error::source(source).expect("a cause");
        assert_eq!(cause.to_string(), "it is not a regular file", "{kind}");
        let noted = rustix::io::read(&opens, &mut [0_u8; 64]);
        assert_eq!(noted, Err(rustix::io::Errno::AGAIN), "{kind} was opened");
    }
}
