//! The threads of a server: those that read an image are there while a VM has the image.

use std::fs;
use std::process::Child;

use pagetide_test_support::{eventually, within_patience};
use rustix::process::Signal;

use super::guest::Guest;
use super::{Place, ended, signal};

const IMAGES: usize = 20;

/// The threads that read images.
fn readers(child: &Child) -> usize {
    let tasks = fs::read_dir(format!("/proc/{}/task", child.id())).expect("it runs");
    let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).ok();
    let names = tasks.filter_map(|task| name(task.ok()?));
    let is_reader = |name: &String| matches!(name.trim(), "pt-urgent" | "pt-shared");
    names.filter(is_reader).count()
}

/// Kind: what is there for each image, whether a VM has it or not.
#[test]
fn an_image_without_vms_has_no_threads() {
    let Some(guest) = Guest::new() else {
        return;
    };
    let place = Place::new();
    let others: Vec<_> = (0..IMAGES)
        .map(|index| format!("s{index}=i{index}"))
        .collect();
    for index in 0..IMAGES {
        fs::write(place.path(&format!("i{index}")), vec![7; 8192]).expect("a temporary file");
    }
    let mut words: Vec<_> = others.iter().map(String::as_str).collect();
    words.extend(["--prefetch", "off", "--working-set", "off"]);
    let mut child = place.start(&words);
    assert_eq!(readers(&child), 0);
    let vm = guest.connect(&place.path("socket"));
    assert_eq!(within_patience("a page", guest.reader(1)), 7);
    // The first thread of each kind. A thread names itself when it runs.
    eventually("two threads", || match readers(&child) {
        2 => Ok(()),
        other => Err(other),
    });
    drop(vm);
    eventually("no thread that reads", || match readers(&child) {
        0 => Ok(()),
        more => Err(more),
    });
    signal(&child, Signal::TERM);
    assert_eq!(ended(&mut child).code(), Some(0));
}
