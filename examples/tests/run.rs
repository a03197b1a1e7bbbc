//! The examples run, and print what they have shown.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

use std::path::PathBuf;
use std::process::Command;

/// Where cargo puts the examples: beside the folder of this test's own file.
fn example(name: &str) -> PathBuf {
    let mut path = std::env::current_exe().expect("this is a program");
    path.pop();
    path.pop();
    path.join("examples").join(name)
}

/// Runs an example and returns its output, or None with the reason printed if this host lacks what it needs.
fn run(name: &str, lacks: &[&str]) -> Option<String> {
    let output = Command::new(example(name)).output();
    let output = output.unwrap_or_else(|error| panic!("{name} was not built: {error}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    print!("{said}");
    if output.status.success() {
        return Some(said);
    }
    if let Some(lack) = lacks.iter().find(|lack| complaint.contains(**lack)) {
        println!("SKIP: {name}: {lack}");
        return None;
    }
    panic!("{name}: {}: {complaint}", output.status);
}

const NO_UFFD: &str = "no permission for a userfaultfd";

#[test]
fn a_vmm_adopts_the_pager() {
    let lacks = ["opening /dev/kvm", NO_UFFD, "guest is not available on"];
    if let Some(said) = run("rust_vmm", &lacks) {
        assert!(said.contains("the guest read 8 pages by "), "{said}");
    }
}

#[test]
fn an_event_loop_serves_another_process() {
    if let Some(said) = run("epoll_handler", &[NO_UFFD]) {
        assert!(said.contains(", 256 pages installed"), "{said}");
    }
}

#[test]
fn two_processes_share_a_memory_that_is_not_there() {
    let lacks = [NO_UFFD, "this kernel's userfaultfd lacks"];
    if let Some(said) = run("vhost_back_end", &lacks) {
        assert!(said.contains("2 pages were needed"), "{said}");
    }
}

#[test]
fn a_source_fails_and_comes_back() {
    if let Some(said) = run("custom_source", &[NO_UFFD]) {
        assert!(said.contains("is stalled"), "{said}");
        assert!(said.contains("all 512 pages are there and right"), "{said}");
    }
}
