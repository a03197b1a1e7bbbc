//! A SIGBUS that arrives while KVM_RUN returns with an exit: both are reported.
//!
//! A thread can send such a SIGBUS only to itself. So the test sends another signal to the vCPU's
//! thread, whose handler sends the SIGBUS. KVM_SET_SIGNAL_MASK keeps the first signal from interrupting
//! KVM_RUN: it is delivered as KVM_RUN returns, with whatever result.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod fake_sigbus;
mod guest;

use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fake_sigbus::send_sigbus;
use guest::{DATA, DATA_PAGES, Limited, Machine, PAGE, Word, eventually, is_round};
use kvm_bindings::KVMIO;
use pagetide_kvm::{BoundVcpu, Exit, Vcpu};
use pagetide_memory::GuestAddress;
use vmm_sys_util::ioctl::{_IOC_WRITE, ioctl_expr, ioctl_with_ref};

/// The kernel's size of the structure excludes the mask, which follows it.
const KVM_SET_SIGNAL_MASK: libc::c_ulong = ioctl_expr(_IOC_WRITE, KVMIO, 0x8b, 4);

#[repr(C)]
struct SignalMask {
    bytes: u32,
    mask: [u32; 2],
}

/// The signal that makes the vCPU's thread send itself a SIGBUS.
const PROMPT: c_int = libc::SIGUSR1;
/// The address in the SIGBUS.
static AT: AtomicUsize = AtomicUsize::new(0);

/// Blocks only [`PROMPT`] for the vCPU's thread while it is in KVM_RUN.
fn mask_prompt_in_kvm_run(vcpu: &Vcpu) {
    let mask = SignalMask {
        bytes: 8,
        mask: [1 << (PROMPT - 1), 0],
    };
    // SAFETY: the structure has the length that it declares, and is only read.
    let status = unsafe { ioctl_with_ref(vcpu.fd(), KVM_SET_SIGNAL_MASK, &mask) };
    assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
}

/// Sends this thread the SIGBUS that the kernel sends for an access to an error at [`AT`].
extern "C" fn report(_: c_int) {
    if !send_sigbus(libc::BUS_MCEERR_AR, AT.load(Ordering::Relaxed), 12) {
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

/// Makes a guest leave KVM_RUN by an OUT with a report for `page` of the data pending, and passes the
/// vCPU and the OUT's exit to `test`.
fn with_a_late_report(page: u64, test: impl FnOnce(&Machine, BoundVcpu<'_>, Exit)) {
    // The handler and its address are shared by the whole process.
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
    // SAFETY: the call has no requirements.
    let this_thread = unsafe { libc::pthread_self() };
    let reporting = Arc::clone(&machine);
    let mut here = vcpu.bind().expect("signals work");
    let reporter = Limited::spawn("a report", move || {
        eventually("a round", || reporting.get(0, Word::Rounds) > 1);
        // SAFETY: the thread exists, because it waits for this one.
        let status = unsafe { libc::pthread_kill(this_thread, PROMPT) };
        // In any case, so that the vCPU does not run forever.
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
fn a_report_that_coincides_with_an_exit_is_the_next_exit() {
    with_a_late_report(5, |machine, mut here, exit| {
        assert!(is_round(&exit), "{exit}");
        let rounds = machine.get(0, Word::Rounds);
        let exit = here.run().expect("no failure");
        assert!(is_poisoned(&exit, 5), "{exit}");
        assert_eq!(
            machine.get(0, Word::Rounds),
            rounds,
            "the guest was not entered"
        );
        // Only once.
        let exit = here.run().expect("no failure");
        assert!(is_round(&exit), "{exit}");
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
