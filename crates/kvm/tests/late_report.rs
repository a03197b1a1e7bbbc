//! A SIGBUS that comes while KVM_RUN is on its way out with an exit of its own: both are told.
//!
//! A thread can send such a SIGBUS to itself only. So another signal is sent to the vCPU's thread, and
//! its handler sends the SIGBUS. KVM_SET_SIGNAL_MASK keeps it from interrupting KVM_RUN: it is
//! delivered as KVM_RUN returns, whatever it returns.

#![cfg(target_arch = "x86_64")]
#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod guest;

use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use guest::{DATA, DATA_PAGES, Limited, Machine, PAGE, ROUND, Word, wait_until};
use kvm_bindings::KVMIO;
use pagetide_kvm::{BoundVcpu, Exit, Vcpu};
use pagetide_memory::GuestAddress;
use vmm_sys_util::ioctl::{_IOC_WRITE, ioctl_expr, ioctl_with_ref};

/// The kernel counts the structure without its mask, which follows.
const KVM_SET_SIGNAL_MASK: libc::c_ulong = ioctl_expr(_IOC_WRITE, KVMIO, 0x8b, 4);

#[repr(C)]
struct SignalMask {
    bytes: u32,
    mask: [u32; 2],
}

/// What has the vCPU's thread send itself a SIGBUS.
const PROMPT: c_int = libc::SIGUSR1;
/// The address that the SIGBUS names.
static AT: AtomicUsize = AtomicUsize::new(0);

/// Keeps [`PROMPT`], and nothing else, from the vCPU's thread while it is in KVM_RUN.
fn mask_prompt_in_kvm_run(vcpu: &Vcpu) {
    let mask = SignalMask {
        bytes: 8,
        mask: [1 << (PROMPT - 1), 0],
    };
    // SAFETY: the structure is as long as it says, and is read only.
    let status = unsafe { ioctl_with_ref(vcpu.fd(), KVM_SET_SIGNAL_MASK, &mask) };
    assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
}

/// Sends this thread the SIGBUS that the kernel sends for an error at [`AT`] that was touched.
extern "C" fn report(_: c_int) {
    #[repr(C)]
    struct Info {
        signo: c_int,
        errno: c_int,
        code: c_int,
        pad: c_int,
        at: usize,
        lsb: i16,
        rest: [u8; 102],
    }
    let info = Info {
        signo: libc::SIGBUS,
        errno: 0,
        code: libc::BUS_MCEERR_AR,
        pad: 0,
        at: AT.load(Ordering::Relaxed),
        lsb: 12,
        rest: [0; 102],
    };
    // SAFETY: the structure is one of 128 bytes, as the kernel wants it; it is read only.
    let status = unsafe {
        libc::syscall(
            libc::SYS_rt_tgsigqueueinfo,
            rustix::process::getpid().as_raw_nonzero().get(),
            rustix::thread::gettid().as_raw_nonzero().get(),
            libc::SIGBUS,
            &raw const info,
        )
    };
    if status != 0 {
        // SAFETY: a handler may abort.
        unsafe { libc::abort() };
    }
}

/// Installs [`report`].
fn handle_prompts() {
    // SAFETY: plain data.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = report as *const () as usize;
    // SAFETY: the handler makes three system calls, as a handler may.
    let status = unsafe { libc::sigaction(PROMPT, &raw const action, std::ptr::null_mut()) };
    assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
}

/// Has a guest leave KVM_RUN by an OUT with a report for `page` of the data pending, and gives the
/// vCPU to `test`, with the OUT's exit.
fn with_a_late_report(page: u64, test: impl FnOnce(&Machine, BoundVcpu<'_>, Exit)) {
    // The address is one for the process.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(machine) = Machine::new() else {
        return;
    };
    let mut vcpu = machine.vcpu(0, 0, DATA_PAGES);
    mask_prompt_in_kvm_run(&vcpu);
    let at = machine.data.guest().start().0 + usize::try_from(page * PAGE).expect("64 bits");
    AT.store(at, Ordering::Relaxed);
    handle_prompts();
    // SAFETY: it has no conditions.
    let this_thread = unsafe { libc::pthread_self() };
    let reporting = Arc::clone(&machine);
    let mut here = vcpu.bind().expect("signals work");
    let reporter = Limited::spawn("a report", move || {
        wait_until("a round", || reporting.get(0, Word::Rounds) > 1);
        // SAFETY: the thread waits for this one, so that it is one.
        let status = unsafe { libc::pthread_kill(this_thread, PROMPT) };
        // In any case, lest the vCPU run for ever.
        reporting.set(0, Word::Report, 1);
        assert_eq!(status, 0);
    });
    let exit = here.run().expect("no failure");
    reporter.join();
    test(&machine, here, exit);
}

fn is_poisoned(exit: &Exit, page: u64) -> bool {
    let gpa = GuestAddress(DATA + page * PAGE);
    matches!(exit, Exit::Fault(fault) if fault.poisoned && fault.gpa == gpa)
}

#[test]
fn a_report_beside_an_exit_is_the_next_exit() {
    with_a_late_report(5, |machine, mut here, exit| {
        assert!(matches!(exit, Exit::IoOut { data: ROUND, .. }), "{exit}");
        let rounds = machine.get(0, Word::Rounds);
        let exit = here.run().expect("no failure");
        assert!(is_poisoned(&exit, 5), "{exit}");
        assert_eq!(
            machine.get(0, Word::Rounds),
            rounds,
            "the guest was not entered"
        );
        // Once.
        let exit = here.run().expect("no failure");
        assert!(matches!(exit, Exit::IoOut { data: ROUND, .. }), "{exit}");
    });
}

#[test]
fn completing_io_loses_no_report() {
    with_a_late_report(6, |_, mut here, _| {
        here.complete_io().expect("an OUT");
        let exit = here.run().expect("no failure");
        assert!(is_poisoned(&exit, 6), "{exit}");
    });
}
