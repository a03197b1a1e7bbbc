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
    run_with(name, &[], lacks)
}

/// The same with arguments.
fn run_with(name: &str, arguments: &[&str], lacks: &[&str]) -> Option<String> {
    let output = Command::new(example(name)).args(arguments).output();
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
fn a_tokio_runtime_serves_its_own_memory() {
    if let Some(said) = run("tokio_vmm", &[NO_UFFD]) {
        assert!(said.contains("256 pages installed by one"), "{said}");
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

/// A server that ends with the test.
struct Serving(std::process::Child);

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a VMM that is restored reads is the snapshot, by a real `pagetide serve`.
#[test]
fn a_vmm_is_restored_by_the_server() {
    const MIB: usize = 4;
    let server = example("../pagetide");
    if !server.exists() {
        println!("SKIP: {} was not built", server.display());
        return;
    }
    let place = tempfile::tempdir().expect("a directory");
    let (image, socket) = (place.path().join("mem"), place.path().join("vm.sock"));
    let words = 0_u64..(MIB << 20) as u64 / 8;
    let content: Vec<u8> = words.flat_map(|word| (word * word).to_ne_bytes()).collect();
    std::fs::write(&image, &content).expect("written");
    let serving = Command::new(server)
        .args(["serve", "--once", "--working-set", "off"])
        .arg(format!("{}={}", socket.display(), image.display()))
        .spawn()
        .expect("it starts");
    let mut serving = Serving(serving);
    pagetide_test_support::eventually("the server's socket", || socket.exists());
    let socket = socket.to_str().expect("a name in UTF-8");
    let said = run_with("restored", &[socket, &MIB.to_string()], &[NO_UFFD]);
    let Some(said) = said else { return };
    let status = serving.0.wait().expect("a status");
    assert!(status.success(), "{status}");
    let first_words = (0_u64..).step_by(512).take((MIB << 20) / 4096);
    let sum = first_words.fold(0_u64, |sum, word| sum.wrapping_add(word * word));
    assert!(said.contains(&format!("sum {sum:016x}")), "{said}");
}
