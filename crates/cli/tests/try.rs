//! `pagetide try`: an image is restored without a VMM.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const PAGE: usize = 4096;

/// A raw memory file whose pages differ, every third of zeroes.
fn memory_file(directory: &Path, pages: usize) -> std::path::PathBuf {
    let path = directory.join("guest.mem");
    let page = |number: usize| match number % 3 {
        0 => vec![0; PAGE],
        _ => number.to_le_bytes().repeat(PAGE / 8),
    };
    let content: Vec<u8> = (0..pages).flat_map(page).collect();
    std::fs::write(&path, content).unwrap();
    path
}

fn pagetide(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetide"));
    command.args(words).output().unwrap()
}

fn try_image(words: &[&str]) -> Output {
    pagetide(&[&["try"], words].concat())
}

fn ways(output: &Output) -> (Value, Vec<String>) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    let ways = document["ways"].as_array().unwrap();
    let names = ways.iter().map(|way| way["way"].as_str().unwrap().into());
    let names = names.collect();
    (document, names)
}

#[test]
fn a_memory_file_is_restored_in_three_ways() {
    let directory = tempfile::tempdir().unwrap();
    let path = memory_file(directory.path(), 600);
    let path = path.to_str().unwrap();
    for (words, touches) in [
        (&["--touches", "500"][..], 500),
        (&["--order", "upwards"], 600),
    ] {
        let output = try_image(&[&[path, "--json"], words].concat());
        let (document, names) = ways(&output);
        let [served, mapped, read] = &names[..] else {
            panic!("{names:?}");
        };
        assert!(served.contains("serve") && mapped.contains("mapped") && read.contains("read"));
        assert_eq!(document["touches"], touches);
        assert_eq!(document["memory_bytes"], 600 * PAGE);
        for way in document["ways"].as_array().unwrap() {
            let time = |name: &str| way[name].as_f64().unwrap();
            assert!(time("touch_p50_us") <= time("touch_p99_us"));
            assert!(time("touch_p99_us") <= time("longest_touch_us"));
            assert!(time("first_page_us") <= time("all_touches_us"));
        }
        // All of it is there before the guest runs, if it is read first.
        let arrivals = document["ways"][2]["arrivals"].as_array().unwrap();
        assert_eq!(arrivals.last().unwrap()["bytes"], 600 * PAGE);
        assert_eq!(document["ways"][0]["arrivals"][0]["bytes"], 0);
        let ahead = document["ways"][0]["pages_ahead"].as_u64().unwrap();
        assert!(ahead <= touches);
    }
    // Nothing is left beside it.
    let left = std::fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(left, 1);
}

/// Anybody can try an image that they can read.
#[test]
fn no_privilege_is_needed() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    /// A user whom no machine trusts with anything.
    const NOBODY: u32 = 65534;
    let directory = tempfile::tempdir().unwrap();
    let path = memory_file(directory.path(), 64);
    let all = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(directory.path(), all.clone()).unwrap();
    // A copy, since the directories above the command may be closed to others.
    let copy = directory.path().join("pagetide");
    std::fs::copy(env!("CARGO_BIN_EXE_pagetide"), &copy).unwrap();
    std::fs::set_permissions(&copy, all).unwrap();
    let mut command = Command::new(copy);
    command.args(["try", path.to_str().unwrap(), "--json"]);
    match command.uid(NOBODY).gid(NOBODY).output() {
        Ok(output) => drop(ways(&output)),
        Err(error) => println!("SKIP: no command as another user: {error}"),
    }
}

#[test]
fn an_image_is_restored_and_the_table_says_how_to_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let raw = memory_file(directory.path(), 64);
    let image = directory.path().join("guest.img");
    let (raw, image) = (raw.to_str().unwrap(), image.to_str().unwrap());
    let created = pagetide(&["image", "create", raw, "-o", image, "--quiet"]);
    assert!(created.status.success());
    let (_, names) = ways(&try_image(&[image, "--json"]));
    assert_eq!(names.len(), 2, "it cannot be mapped: {names:?}");
    let output = try_image(&[image, "--warm"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("64 pages touched at random"), "{text}");
    assert!(text.contains(&format!("pagetide serve '/tmp/pagetide.sock={image}'")));
}

#[test]
fn what_cannot_be_restored_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = memory_file(directory.path(), 3);
    let path = path.to_str().unwrap();
    let odd = directory.path().join("odd.mem");
    std::fs::write(&odd, [1; 5000]).unwrap();
    let empty = directory.path().join("empty.mem");
    std::fs::write(&empty, []).unwrap();
    for (words, why) in [
        (&[odd.to_str().unwrap()][..], "no whole number of pages"),
        (&[empty.to_str().unwrap()], "it is empty"),
        (&["/nonexistent.mem"], "nonexistent.mem"),
        (&[path, "--order", "recorded"], "no working set"),
        (&[path, "--touches", "0"], "--touches"),
    ] {
        let output = try_image(words);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {errors}");
        assert!(errors.contains(why), "{words:?}: {errors}");
        assert!(output.stdout.is_empty());
    }
}

/// The guest would wait for ever.
#[test]
fn an_image_that_is_damaged_is_no_success() {
    let directory = tempfile::tempdir().unwrap();
    let raw = memory_file(directory.path(), 64);
    let image = directory.path().join("guest.img");
    let (raw, path) = (raw.to_str().unwrap(), image.to_str().unwrap());
    let created = pagetide(&["image", "create", raw, "-o", path, "--quiet"]);
    assert!(created.status.success());
    let mut bytes = std::fs::read(&image).unwrap();
    // In the first chunk.
    bytes[4096 + 10] ^= 1;
    std::fs::write(&image, bytes).unwrap();
    let output = try_image(&[path]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("differs from its checksum"), "{errors}");
    let last = errors.lines().last().unwrap();
    assert!(
        last.starts_with("pagetide: the content of the image is not available"),
        "{last}"
    );
}
