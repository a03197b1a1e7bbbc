//! Kernels before Linux 6.6 have no UFFDIO_POISON: what is missing at the end cannot be marked. A filter of system
//! calls stands in for such a kernel; on Debian 12's own (`cargo xtask test --only old-kernel`), there is none.
//!
//! The kind: a VM's end that costs the server something for good, or shows its guest zeroes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pagetide_pager::kept_open;
use pagetide_serve::Options;
use pagetide_uapi::generated::UFFDIO_POISON;
use pagetide_uapi::userfaultfd::{Features, Userfaultfd};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter,
};
use support::child::{Vmm, run_as_child};
use support::*;

const SIGKILL: i32 = 9;
const PAGES: usize = 64;

/// The VMM's process, when it was started by another test.
#[test]
fn vmm() {
    run_as_child();
}

/// UFFDIO_POISON fails on this thread, and on those that it starts: the kernel does not have it, or a filter has it fail
/// as there. `None` if the kernel has it and takes no filter. What stays open is counted for the whole process: one test
/// at a time.
fn old_kernel() -> Option<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    if !has_userfaultfd() {
        return None;
    }
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let available = Userfaultfd::available().unwrap();
    if !available.contains(Features::POISON) {
        println!("this kernel has no UFFDIO_POISON");
        return Some(alone);
    }
    let is_poison = SeccompCondition::new(
        1,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::Eq,
        u64::from(UFFDIO_POISON),
    );
    let rule = SeccompRule::new(vec![is_poison.unwrap()]).unwrap();
    let filter = SeccompFilter::new(
        [(libc::SYS_ioctl, vec![rule])].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EINVAL.unsigned_abs()),
        std::env::consts::ARCH.try_into().unwrap(),
    );
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    if let Err(error) = apply_filter(&program) {
        println!("SKIP: the kernel takes no filter of system calls: {error}");
        return None;
    }
    Some(alone)
}

/// A VMM that has read page 3, whose word is given, and has closed its connection: its userfaultfd stays open.
fn vmm_that_has_left(place: &Place, running: &Running) -> (Vmm, u64) {
    let mut vmm = Vmm::start("vmm", &place.socket(), PAGES);
    let third = vmm.read(3);
    vmm.leave();
    running.ended(1);
    assert_eq!(kept_open(), 1);
    (vmm, third)
}

/// The userfaultfds that this process has open.
fn userfaultfds() -> usize {
    let names = fs::read_dir("/proc/self/fd").unwrap();
    let targets = names.filter_map(|name| fs::read_link(name.unwrap().path()).ok());
    let is_one = |target: &std::path::PathBuf| target.ends_with("anon_inode:[userfaultfd]");
    targets.filter(is_one).count()
}

/// A VMM reads a missing page, which nobody brings. What is kept open for it is closed when it has gone, at the next VM's end.
fn sleeps_until_it_is_killed(mut vmm: Vmm, place: &Place, running: &Running) {
    let (task, _) = vmm.asleep();
    vmm.begin_to_read(5);
    task.asleep_in_an_access("the VMM");
    assert!(vmm.is_silent() && vmm.is_running());
    vmm.kill();
    let mut next = Vmm::start("vmm", &place.socket(), PAGES);
    next.kill();
    running.ended(2);
    eventually("no userfaultfd", || {
        equals((kept_open(), userfaultfds()), &(0, 0))
    });
}

#[test]
fn vmms_that_have_exited_leave_nothing_open() {
    let Some(_alone) = old_kernel() else {
        return;
    };
    let place = Place::new(PAGES);
    let running = Running::start(place.options());
    for _ in 0..20 {
        let mut vmm = Vmm::start("vmm", &place.socket(), PAGES);
        vmm.read(3);
        vmm.kill();
    }
    eventually("the VMs' end", || {
        equals(running.metrics.totals().vms_ended, &20)
    });
    eventually("no userfaultfd", || {
        equals((kept_open(), userfaultfds()), &(0, 0))
    });
}

/// A VMM that closes its connection and lives on: SIGBUS is not to be had, and zeroes are wrong.
#[test]
fn a_page_that_was_missing_at_the_end_never_reads_as_zeroes() {
    let Some(_alone) = old_kernel() else {
        return;
    };
    let place = Place::new(PAGES);
    let running = Running::start(place.options());
    let (vmm, _) = vmm_that_has_left(&place, &running);
    sleeps_until_it_is_killed(vmm, &place, &running);
}

/// Kind: a userfaultfd that stays open, and whose events nobody reads. A VMM with a balloon would wait for ever.
#[test]
fn a_vmm_whose_userfaultfd_stays_open_may_discard_memory() {
    let Some(_alone) = old_kernel() else {
        return;
    };
    let place = Place::new(PAGES);
    let running = Running::start(place.options());
    let (mut vmm, _) = vmm_that_has_left(&place, &running);
    // Each waits until its event is read.
    for page in [3, 5, 3] {
        vmm.discard(page);
    }
    // A fault is read, too, and its thread sleeps on.
    sleeps_until_it_is_killed(vmm, &place, &running);
}

/// Kind: two readers of one userfaultfd. Each message is read once.
#[test]
fn a_vmm_that_comes_back_with_its_userfaultfd_is_served() {
    let Some(_alone) = old_kernel() else {
        return;
    };
    let place = Place::new(PAGES);
    let running = Running::start(place.options());
    let (mut vmm, third) = vmm_that_has_left(&place, &running);
    vmm.come_back();
    for page in 0..PAGES {
        let word = vmm.read(page);
        assert_eq!(word == third, page == 3, "page {page}");
    }
}

/// This process's end would close the userfaultfd.
#[test]
fn a_server_that_ends_kills_a_vmm_whose_pages_it_cannot_mark() {
    let Some(_alone) = old_kernel() else {
        return;
    };
    let place = Place::new(PAGES);
    let running = Running::start(Options {
        any_length: true,
        stop_limit: Duration::from_millis(100),
        ..place.options()
    });
    // Half of its memory has no content.
    let mut vmm = Vmm::start("vmm", &place.socket(), 2 * PAGES);
    vmm.read(3);
    let metrics = running.metrics.clone();
    running.stop();
    assert_eq!(vmm.signal(), Some(SIGKILL));
    assert_eq!(metrics.totals().vms_killed, 1);
}
