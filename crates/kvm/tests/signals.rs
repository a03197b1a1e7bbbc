//! The program chooses the handlers of signals. Handlers belong to the process, so each test has a
//! separate process.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod fake_sigbus;
mod guest;

use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, mpsc};

use fake_sigbus::send_sigbus;
use guest::{DATA_PAGES, DATA_SLOT, LIMIT, Limited, Machine, PAGE, Word, eventually};
use libc::siginfo_t;
use pagetide_kvm::poison::{ErrorWatch, WatchError, handle_sigbus};
use pagetide_kvm::{BindError, CommitError, Exit, Method, PopulateFlags, Signals, SignalsError};
use pagetide_kvm::{VcpuKick, kick_signal};
use pagetide_memory::{Backing, FileAccessError, FileView, PageSize};
use pagetide_test_support::in_a_process_of_its_own;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// The handler of a signal.
fn handler_of(signal: c_int) -> usize {
    // SAFETY: plain data.
    let mut found: libc::sigaction = unsafe { zeroed() };
    // SAFETY: changes nothing, and writes only to the structure.
    unsafe { libc::sigaction(signal, null(), &raw mut found) };
    found.sa_sigaction
}

fn all_handlers() -> Vec<usize> {
    (1..=64).map(handler_of).collect()
}

fn handle(signal: c_int, handler: usize) {
    // SAFETY: plain data.
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
    // SAFETY: the handlers of this file make only calls that a handler may make.
    let status = unsafe { libc::sigaction(signal, &raw const action, null_mut()) };
    assert_eq!(status, 0);
}

static CALLS: AtomicI32 = AtomicI32::new(0);

extern "C" fn count(_: c_int, _: *mut siginfo_t, _: *mut c_void) {
    CALLS.fetch_add(1, Ordering::SeqCst);
}

fn calls() -> i32 {
    CALLS.load(Ordering::SeqCst)
}

/// A machine whose vCPU walks until it is interrupted.
struct Walk {
    machine: Arc<Machine>,
    kick: VcpuKick,
    thread: libc::pthread_t,
    exit: Limited<Exit>,
}

fn walk(signals: Signals) -> Option<Walk> {
    let machine = Machine::with_signals(Backing::Shmem, signals)?;
    let mut vcpu = machine.vcpu(0, 0, DATA_PAGES);
    let kick = vcpu.kick_handle();
    let (sender, threads) = mpsc::channel();
    let exit = Limited::spawn("a vCPU", move || {
        let mut here = vcpu.bind().expect("a thread like any other");
        // SAFETY: the call has no requirements.
        let _ = sender.send(unsafe { libc::pthread_self() });
        here.run().expect("no failure")
    });
    let thread = threads.recv_timeout(LIMIT).expect("it is bound");
    eventually("a round", || machine.get(0, Word::Rounds) > 0);
    Some(Walk {
        machine,
        kick,
        thread,
        exit,
    })
}

fn send(thread: libc::pthread_t, signal: c_int) {
    // SAFETY: the callers' threads are joined later, so they exist.
    assert_eq!(unsafe { libc::pthread_kill(thread, signal) }, 0);
}

#[test]
fn no_handler_is_installed_without_a_request() {
    in_a_process_of_its_own("no_handler_is_installed_without_a_request", || {
        handle(libc::SIGUSR1, count as *const () as usize);
        let before = all_handlers();
        let Some(walk) = walk(Signals::none()) else {
            return;
        };
        // The kick takes effect when the program interrupts the thread.
        walk.kick.kick();
        send(walk.thread, libc::SIGUSR1);
        assert_eq!(walk.exit.join(), Exit::Interrupted);
        let vm = &walk.machine.vm;
        if vm.capabilities().populate_memory {
            let range = walk.machine.data.range();
            let done = vm.populate(range, PopulateFlags::default());
            assert_eq!(done.expect("memory").mapped_bytes, range.bytes());
        }
        let error = ErrorWatch::start(vm, |_| ()).expect_err("no handler of SIGBUS");
        assert!(matches!(error, WatchError::NoHandler), "{error}");
        assert_eq!(all_handlers(), before);
    });
}

#[test]
fn a_kick_uses_the_programs_own_signal() {
    in_a_process_of_its_own("a_kick_uses_the_programs_own_signal", || {
        handle(libc::SIGUSR1, count as *const () as usize);
        let before = all_handlers();
        let signals = Signals::none().use_kick(libc::SIGUSR1).expect("handled");
        let Some(walk) = walk(signals) else { return };
        let mut transaction = walk.machine.vm.transaction();
        transaction.split(DATA_SLOT, PAGE);
        let done = transaction.commit_with(Method::Quiesce);
        assert_eq!(done.expect("vCPUs can be stopped").kicked, 1);
        // Until the vCPU is in KVM_RUN again, which only the signal ends. Before that, the flag alone could end it.
        let rounds = walk.machine.get(0, Word::Rounds);
        eventually("another round", || {
            walk.machine.get(0, Word::Rounds) > rounds
        });
        walk.kick.kick();
        assert_eq!(walk.exit.join(), Exit::Interrupted);
        assert!(calls() > 0);
        assert_eq!(all_handlers(), before);
    });
}

#[test]
fn a_signal_without_a_handler_is_refused() {
    in_a_process_of_its_own("a_signal_without_a_handler_is_refused", || {
        for handler in [libc::SIG_DFL, libc::SIG_IGN] {
            handle(libc::SIGUSR2, handler);
            let error = Signals::none().use_kick(libc::SIGUSR2);
            let error = error.expect_err("it has none");
            let signal = libc::SIGUSR2;
            assert!(
                matches!(error, SignalsError::NoHandler { signal: told } if told == signal),
                "{error}"
            );
        }
        let error = Signals::none().use_kick(4000).expect_err("none such");
        assert!(matches!(error, SignalsError::Kick { .. }), "{error}");
    });
}

#[test]
fn a_previous_handler_gets_signals_that_are_not_kicks() {
    in_a_process_of_its_own("a_previous_handler_gets_signals_that_are_not_kicks", || {
        handle(kick_signal(), count as *const () as usize);
        let signals = Signals::install().expect("handlers");
        assert_ne!(handler_of(kick_signal()), count as *const () as usize);
        // SAFETY: the call has no requirements.
        send(unsafe { libc::pthread_self() }, kick_signal());
        assert_eq!(calls(), 1);
        let Some(walk) = walk(signals) else { return };
        walk.kick.kick();
        assert_eq!(walk.exit.join(), Exit::Interrupted);
        assert_eq!(calls(), 1, "a kick does not reach it");
    });
}

#[test]
fn a_thread_that_blocks_kicks_is_refused() {
    in_a_process_of_its_own("a_thread_that_blocks_kicks_is_refused", || {
        let Some(machine) = Machine::new() else {
            return;
        };
        let mut vcpu = machine.vcpu(0, 0, DATA_PAGES);
        drop(vcpu.bind().expect("nothing is blocked"));
        // SAFETY: plain data.
        let mut set: libc::sigset_t = unsafe { zeroed() };
        // SAFETY: only writes to the set.
        unsafe { libc::sigaddset(&raw mut set, kick_signal()) };
        // SAFETY: only reads the set.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, null_mut()) };
        let error = vcpu.bind().expect_err("it is blocked");
        let wanted = kick_signal();
        assert!(
            matches!(error, BindError::Blocked { signal } if signal == wanted),
            "{error}"
        );
    });
}

#[test]
fn quiescing_needs_a_way_to_stop_vcpus() {
    in_a_process_of_its_own("quiescing_needs_a_way_to_stop_vcpus", || {
        let Some(machine) = Machine::with_signals(Backing::Shmem, Signals::none()) else {
            return;
        };
        let commit = |at| {
            let mut transaction = machine.vm.transaction();
            let slot = machine.vm.layout().into_keys().next_back().expect("some");
            transaction.split(slot, at);
            transaction.commit_with(Method::Quiesce)
        };
        commit(PAGE).expect("no vCPU to stop");
        let vcpu = machine.vcpu(0, 0, DATA_PAGES);
        let before = machine.vm.layout().len();
        if machine.vm.capabilities().kick_vcpus {
            commit(PAGE).expect("the kernel stops them");
        } else {
            let error = commit(PAGE).expect_err("nothing stops them");
            assert!(matches!(error, CommitError::NoKick), "{error}");
            assert_eq!(machine.vm.layout().len(), before);
        }
        drop(vcpu);
    });
}

extern "C" fn own_sigbus(_: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: this is a SIGBUS handler with SA_SIGINFO, and these are its arguments.
    if !unsafe { handle_sigbus(info, context) } {
        CALLS.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn the_programs_own_handler_passes_errors_on() {
    in_a_process_of_its_own("the_programs_own_handler_passes_errors_on", || {
        handle(libc::SIGBUS, own_sigbus as *const () as usize);
        let before = all_handlers();
        let signals = Signals::none().use_sigbus();
        let Some(machine) = Machine::with_signals(Backing::Shmem, signals) else {
            return;
        };
        let (sender, errors) = mpsc::channel();
        let tell = move |error| {
            let _ = sender.send(error);
        };
        let watch = ErrorWatch::start(&machine.vm, tell).expect("a watch");
        assert!(send_sigbus(
            libc::BUS_MCEERR_AO,
            machine.data.guest().start().0,
            12
        ));
        let error = errors.recv_timeout(LIMIT).expect("a report");
        assert_eq!(error.gpa, machine.data.gpa());
        assert_eq!(calls(), 0);
        assert!(send_sigbus(libc::BUS_MCEERR_AO, 0x1000, 12));
        assert!(send_sigbus(libc::BUS_MCEERR_AR, 0x1000, 12));
        assert_eq!(calls(), 2, "left to the handler");
        drop(watch);
        assert_eq!(all_handlers(), before);
    });
}

/// Another owner of a file may truncate it during a copy: the copy returns an error, and the program
/// continues.
#[test]
fn a_truncated_file_ends_a_copy_and_not_the_program() {
    in_a_process_of_its_own("a_truncated_file_ends_a_copy_and_not_the_program", || {
        let _signals = Signals::none().install_sigbus().expect("a handler");
        let file = memfd_create("truncated", MemfdFlags::CLOEXEC).expect("a file");
        ftruncate(&file, 2 * PAGE).expect("room");
        let theirs = file.try_clone().expect("a descriptor");
        let view = FileView::map(theirs, 0, 2 * PAGE, PageSize::Size4K).expect("a mapping");
        view.write(PAGE, b"there").expect("the file is whole");
        ftruncate(&file, PAGE).expect("shorter");
        let error = view.write(PAGE, b"gone").expect_err("the file ends before");
        assert!(
            matches!(error, FileAccessError::Truncated { .. }),
            "{error}"
        );
        view.write(0, b"here").expect("the rest is there");
    });
}
