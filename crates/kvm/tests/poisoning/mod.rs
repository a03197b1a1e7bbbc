//! Simulates memory errors where they do no harm.

#![allow(dead_code, reason = "each test file uses a part of it")]

#[cfg(target_arch = "x86_64")]
pub(crate) mod checks;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::ptr::null_mut;

use pagetide_kvm::poison::{Simulated, simulate_error};
use pagetide_memory::{GuestAddress, Region};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};

/// Whether errors may be simulated here; prints the reason if not. On a physical machine they would
/// cost pages until the next reboot, so only the lab's VMs qualify.
pub(crate) fn may_poison() -> bool {
    let in_lab = std::env::var_os("PAGETIDE_TIMING").is_some();
    if !in_lab {
        println!("SKIP: memory is poisoned in the lab's VMs only: cargo xtask vm");
    }
    in_lab
}

/// Simulates an uncorrected error in the 4 KiB at `gpa`, which become present if they are absent.
pub(crate) fn poison(region: &Region, gpa: GuestAddress) {
    let simulated = simulate_error(region, gpa).expect("root in the lab");
    assert_eq!(simulated, Simulated::Handled, "at {gpa}");
}

/// The same by another process, so that no access by this process reports the error.
pub(crate) fn poison_from_outside(region: &Region, gpa: GuestAddress) {
    let file = region.file().expect("not anonymous").as_raw_fd();
    let path = format!("/proc/{}/fd/{file}", std::process::id());
    let offset = gpa.0 - region.gpa().0;
    let status = Command::new(std::env::current_exe().expect("a program"))
        .args(["--exact", "poisoning::the_other_process", "--nocapture"])
        .env(OTHER, format!("{offset} {path}"))
        .stdout(Stdio::null())
        .status()
        .expect("another process");
    // Rust's own handler lets it continue.
    let is_told = status.success() || status.signal() == Some(libc::SIGBUS);
    assert!(is_told, "{status}");
}

const OTHER: &str = "PAGETIDE_TEST_POISON";

/// The program that [`poison_from_outside`] starts; as a test it does nothing.
#[test]
fn the_other_process() {
    let Ok(what) = std::env::var(OTHER) else {
        return;
    };
    let (offset, path) = what.split_once(' ').expect("an offset and a file");
    let file = File::options()
        .read(true)
        .write(true)
        .open(path)
        .expect("its file");
    let offset = offset.parse().expect("a number");
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let at = unsafe { mmap(null_mut(), 4096, access, MapFlags::SHARED, &file, offset) };
    let at = at.expect("a page of it");
    // SAFETY: the page that was just mapped.
    let poisoned = unsafe { madvise(at, 4096, Advice::LinuxHwPoison) };
    poisoned.expect("root in the lab");
}
