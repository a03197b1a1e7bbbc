//! `pagetide working-set`: exit status, and what goes to which stream and file.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

struct Place(tempfile::TempDir);

impl Place {
    /// A directory with a memory file of 64 pages.
    fn new() -> Self {
        let place = Self(tempfile::tempdir().expect("a temporary directory"));
        let content: Vec<u8> = (1..=64_u8).flat_map(|page| [page; 4096]).collect();
        fs::write(place.path("guest.mem"), content).expect("it is written");
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn pagetide(&self, words: &[impl AsRef<OsStr>]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagetide"));
        let command = command.args(words).current_dir(&self.0);
        command.output().expect("it starts")
    }

    fn json(&self, words: &[&str]) -> Value {
        let output = self.pagetide(words);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{words:?}: {message}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// The one line of a run that ends with this status.
    fn refused(&self, words: &[&str], status: i32) -> String {
        let output = self.pagetide(words);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{words:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{words:?}: {message:?}");
        message
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The file was just written: all of it is in the page cache.
#[test]
fn what_is_captured_is_described() {
    let place = Place::new();
    let capture = [
        "working-set",
        "capture",
        "guest.mem",
        "--page-cache",
        "--json",
    ];
    let captured = place.json(&capture);
    assert_eq!(
        (&captured["pages"], &captured["found_pages"]),
        (&64.into(), &64.into())
    );
    assert_eq!(captured["file"], "guest.mem.working-set");
    assert_eq!(place.json(&capture)["recordings"], 2);
    let info = ["working-set", "info", "guest.mem.working-set"];
    let described = place.json(&[&info[..], &["--json"]].concat());
    assert_eq!(
        (&described["pages"], &described["ranges"]),
        (&64.into(), &1.into())
    );
    assert_eq!(described["image_digest"], captured["image_digest"]);
    let table = text(&place.pagetide(&info).stdout);
    assert!(table.contains("64 of 4K"), "{table}");
}

/// A set of an image names the image's digest, not that of the memory file.
#[test]
fn an_image_of_the_memory_file_gets_a_set() {
    let place = Place::new();
    let create = ["image", "create", "guest.mem", "-o", "base.img", "--json"];
    let digest = place.json(&create)["digest"].clone();
    let capture = ["working-set", "capture", "guest.mem", "--page-cache"];
    let captured = place.json(&[&capture[..], &["--image", "base.img", "--json"]].concat());
    assert_eq!(captured["image_digest"], digest);
    assert_eq!(captured["file"], "base.img.working-set");
}

/// A name is bytes, and JSON is UTF-8.
#[test]
fn a_set_is_described_whatever_its_name() {
    let place = Place::new();
    let name = OsString::from_vec(b"guest-\xff.mem".to_vec());
    fs::rename(place.path("guest.mem"), place.0.path().join(&name)).expect("the same directory");
    let [working_set, capture, image, cached, json] = [
        "working-set",
        "capture",
        "--image",
        "--page-cache",
        "--json",
    ]
    .map(OsStr::new);
    let output = place.pagetide(&[working_set, capture, &name, image, &name, cached, json]);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{message}");
    let captured: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(captured["file"], "guest-\u{fffd}.mem.working-set");
    let set = OsString::from_vec(b"guest-\xff.mem.working-set".to_vec());
    let output = place.pagetide(&[working_set, OsStr::new("info"), &set, json]);
    let described: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(described["pages"], 64);
}

#[test]
fn requests_without_sense_are_refused() {
    let place = Place::new();
    let capture = |more: &[&str], status| {
        let words = [&["working-set", "capture", "guest.mem"], more].concat();
        place.refused(&words, status)
    };
    let message = capture(&[], 2);
    assert!(
        message.contains("--pid") && message.contains("--page-cache"),
        "{message}"
    );
    let pid = std::process::id().to_string();
    let message = capture(&["--pid", &pid], 2);
    assert!(message.contains("does not map guest.mem"), "{message}");
    let message = capture(&["--pid", &i32::MAX.to_string()], 1);
    assert!(message.contains("page tables of process"), "{message}");
    let message = capture(&["--pid", "0"], 2);
    assert!(message.contains("--pid"), "{message}");
    fs::write(place.path("short.mem"), [1; 4096]).expect("it is written");
    let message = capture(&["--page-cache", "--image", "short.mem"], 2);
    assert!(message.contains("differ in length"), "{message}");
    let message = place.refused(&["working-set", "info", "none"], 2);
    assert!(message.contains("no such file"), "{message}");
    let message = place.refused(&["working-set", "info", "guest.mem"], 2);
    assert!(message.contains("PTWORKST"), "{message}");
    assert!(!place.path("guest.mem.working-set").exists());
}
