//! The pool on a real KVM: every failure and every stop ends all vCPUs, and is reported.

#![cfg(target_arch = "x86_64")]
#![allow(clippy::panic, reason = "a failed helper fails its test")]

use std::error::Error;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvm_bindings::kvm_regs;
use pagetide_kvm::{Exit, Kvm, OpenError, Signals, SlotFlags, Vcpu, Vm};
use pagetide_memory::{Backing, GuestAddress, PageIndex, Region};
use pagetide_test_support::eventually;
use pagetide_vmm::x86_64::{LongMode, Platform};
use pagetide_vmm::{
    HookError, Next, NoFaults, PoolConfig, PoolEnd, PoolFailure, PoolVcpu, Stopper, VcpuHooks,
    VcpuPool,
};

const TABLES: u64 = 0x2000;
/// How long threads may take to end: a loaded host is slow.
const GRACE: Duration = Duration::from_secs(60);
/// The port that [`Code::Report`] writes to.
const PORT: u16 = 0x10;

/// The code of a vCPU, by its address.
#[derive(Clone, Copy)]
enum Code {
    /// `jmp .`
    Spin = 0x1000,
    /// `out 0x10, eax` again and again.
    Report = 0x1100,
}

/// A VM whose vCPUs run these; None, with the reason printed, where there is no KVM.
fn vcpus(codes: &[Code]) -> Option<(Vm, Vec<Vcpu>)> {
    let kvm = match Kvm::open() {
        Ok(kvm) => kvm,
        Err(error @ (OpenError::Missing(_) | OpenError::Permission(_))) => {
            println!("SKIP: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let vm = kvm
        .create_vm(Signals::install().expect("handlers"))
        .expect("a VM");
    let platform = Platform::new(&kvm, &vm).expect("a PC's chips");
    let memory = Region::new(GuestAddress(0), 2 << 20, Backing::Shmem).expect("2 MiB");
    let write = |gpa: u64, bytes: &[u8]| {
        let written = memory.write_service(PageIndex(gpa / 4096), gpa % 4096, bytes);
        written.expect("memory");
    };
    write(Code::Spin as u64, &[0xeb, 0xfe]);
    write(Code::Report as u64, &[0xe7, 0x10, 0xeb, 0xfc]);
    // One gigabyte, one directory, its first 2 MiB page: identity, accessed and dirty.
    for (table, entry) in [(0, 0x3023_u64), (1, 0x4023), (2, 0xe3)] {
        write(TABLES + table * 4096, &entry.to_le_bytes());
    }
    vm.add_region(0, Arc::new(memory), SlotFlags::default())
        .expect("an empty slot");
    let made = (0..).zip(codes).map(|(id, code)| {
        let vcpu = vm.create_vcpu(id).expect("a vCPU");
        platform.prepare(&vcpu).expect("CPUID");
        start_at(&vcpu, *code);
        vcpu
    });
    let made = made.collect();
    Some((vm, made))
}

fn start_at(vcpu: &Vcpu, code: Code) {
    let mode = LongMode {
        code: 8,
        data: 16,
        gdt_entries: 1,
        tables: TABLES,
        ..LongMode::default()
    };
    let regs = kvm_regs {
        rip: code as u64,
        ..kvm_regs::default()
    };
    mode.enter(vcpu, regs).expect("registers");
    let running = kvm_bindings::kvm_mp_state { mp_state: 0 };
    vcpu.fd().set_mp_state(running).expect("the state");
}

/// Hooks that count, and call `at_report` at a report.
struct Counting {
    at_report: fn(&mut PoolVcpu<'_>) -> Result<Next, HookError>,
    at_start: fn(u32) -> Result<(), HookError>,
    started: AtomicU32,
    interrupted: AtomicU32,
    stops: AtomicU32,
}

impl Counting {
    fn new(at_report: fn(&mut PoolVcpu<'_>) -> Result<Next, HookError>) -> Arc<Self> {
        Arc::new(Self {
            at_report,
            at_start: |_| Ok(()),
            started: AtomicU32::new(0),
            interrupted: AtomicU32::new(0),
            stops: AtomicU32::new(0),
        })
    }
}

impl VcpuHooks for Counting {
    fn on_thread_start(&self, vcpu: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        self.started.fetch_add(1, Ordering::SeqCst);
        (self.at_start)(vcpu.id())
    }

    fn on_interrupted(&self, _: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        self.interrupted.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn on_exit(&self, vcpu: &mut PoolVcpu<'_>, exit: Exit) -> Result<Next, HookError> {
        assert!(matches!(exit, Exit::IoOut { port: PORT, .. }), "{exit}");
        (self.at_report)(vcpu)
    }

    fn on_stop(&self) {
        self.stops.fetch_add(1, Ordering::SeqCst);
    }
}

fn start(vcpus: Vec<Vcpu>, hooks: &Arc<Counting>, stopper: &Stopper) -> VcpuPool {
    let hooks: Arc<dyn VcpuHooks> = Arc::<Counting>::clone(hooks);
    VcpuPool::start(vcpus, hooks, stopper, &PoolConfig::default()).expect("there are vCPUs")
}

/// Ends a pool, none of whose vCPUs may be lost.
fn join(pool: VcpuPool, vcpus: usize) -> PoolEnd {
    let end = pool.join(GRACE);
    assert!(end.lost.is_empty(), "{end:?}");
    let ids: Vec<_> = (0..)
        .zip(&end.vcpus)
        .map(|(id, vcpu)| (id, vcpu.id()))
        .collect();
    assert!(
        ids.iter().all(|(id, found)| id == found) && ids.len() == vcpus,
        "{ids:?}"
    );
    end
}

fn cause(failure: &PoolFailure) -> String {
    failure
        .source()
        .map_or_else(String::new, ToString::to_string)
}

#[test]
fn a_stop_ends_vcpus_that_run() {
    let Some((_vm, mut vcpus)) = vcpus(&[Code::Spin, Code::Report]) else {
        return;
    };
    let hooks = Counting::new(|_| Ok(Next::Enter));
    let stopper = Stopper::default();
    for round in 1..=10 {
        let pool = start(vcpus, &hooks, &stopper);
        // Before, at and after the guests' start.
        if round > 3 {
            eventually("exits", || pool.exits() > u64::from(round));
        }
        stopper.stop("the page reader died");
        stopper.stop("a consequence");
        assert!(pool.wait(GRACE));
        let end = join(pool, 2);
        let failure = end.failure.expect("a stop with a cause is a failure");
        assert!(matches!(failure, PoolFailure::Stopped(_)), "{failure}");
        assert_eq!(cause(&failure), "the page reader died");
        assert_eq!(hooks.stops.load(Ordering::SeqCst), round);
        vcpus = end.vcpus;
    }
}

#[test]
fn an_end_from_outside_is_no_failure() {
    let Some((_vm, vcpus)) = vcpus(&[Code::Spin, Code::Spin]) else {
        return;
    };
    let (hooks, stopper) = (Counting::new(|_| Ok(Next::Enter)), Stopper::default());
    let pool = start(vcpus, &hooks, &stopper);
    assert!(!pool.wait(Duration::ZERO));
    stopper.end();
    assert!(join(pool, 2).failure.is_none());
    assert_eq!(hooks.stops.load(Ordering::SeqCst), 1);
}

#[test]
fn a_stop_before_the_start_enters_no_guest() {
    let Some((_vm, vcpus)) = vcpus(&[Code::Report, Code::Spin]) else {
        return;
    };
    let (hooks, stopper) = (Counting::new(|_| Ok(Next::Enter)), Stopper::default());
    stopper.stop("too early");
    let pool = start(vcpus, &hooks, &stopper);
    assert!(pool.wait(Duration::ZERO));
    assert_eq!(pool.exits(), 0);
    let end = join(pool, 2);
    assert_eq!(cause(&end.failure.expect("a failure")), "too early");
    assert_eq!(hooks.started.load(Ordering::SeqCst), 0);
    // The stop is used up.
    let pool = start(end.vcpus, &hooks, &stopper);
    eventually("exits", || pool.exits() > 0);
    stopper.end();
    assert!(join(pool, 2).failure.is_none());
}

#[test]
fn a_hooks_error_stops_all() {
    let Some((_vm, vcpus)) = vcpus(&[Code::Spin, Code::Report, Code::Spin]) else {
        return;
    };
    let hooks = Counting::new(|_| Err("no such page".into()));
    let pool = start(vcpus, &hooks, &Stopper::default());
    assert!(pool.wait(GRACE));
    let failure = join(pool, 3).failure.expect("a failure");
    let PoolFailure::Hook {
        vcpu: 1,
        exit: Some(Exit::IoOut { port: PORT, .. }),
        rip: Some(_),
        ..
    } = &failure
    else {
        panic!("{failure}")
    };
    assert_eq!(cause(&failure), "no such page");
    assert_eq!(hooks.stops.load(Ordering::SeqCst), 1);
}

#[test]
fn an_error_before_the_first_entry_stops_all() {
    let Some((_vm, vcpus)) = vcpus(&[Code::Spin, Code::Spin]) else {
        return;
    };
    let mut hooks = Counting::new(|_| Ok(Next::Enter));
    let only = Arc::get_mut(&mut hooks).expect("there is no other handle");
    only.at_start = |vcpu| {
        if vcpu == 1 {
            Err("not ready".into())
        } else {
            Ok(())
        }
    };
    let pool = start(vcpus, &hooks, &Stopper::default());
    assert!(pool.wait(GRACE));
    let failure = join(pool, 2).failure.expect("a failure");
    assert!(
        matches!(
            failure,
            PoolFailure::Hook {
                vcpu: 1,
                exit: None,
                ..
            }
        ),
        "{failure}"
    );
}

#[test]
fn a_panicking_hook_stops_all_and_is_reported() {
    let Some((_vm, vcpus)) = vcpus(&[Code::Report, Code::Spin]) else {
        return;
    };
    let hooks = Counting::new(|vcpu| panic!("out of ideas on {}", vcpu.id()));
    let pool = start(vcpus, &hooks, &Stopper::default());
    assert!(pool.wait(GRACE));
    let end = join(pool, 2);
    let Some(PoolFailure::Panicked { vcpu: 0, message }) = &end.failure else {
        panic!("{:?}", end.failure)
    };
    assert_eq!(message, "out of ideas on 0");
    // The vCPU can still be used.
    let (hooks, stopper) = (Counting::new(|_| Ok(Next::End)), Stopper::default());
    let pool = start(end.vcpus, &hooks, &stopper);
    assert!(pool.wait(GRACE));
    assert!(join(pool, 2).failure.is_none());
}

#[test]
fn no_vcpus_are_refused() {
    let started = VcpuPool::start(
        Vec::new(),
        Arc::new(NoFaults),
        &Stopper::default(),
        &PoolConfig::default(),
    );
    assert!(matches!(started, Err(PoolFailure::NoVcpus)), "{started:?}");
}

#[test]
fn an_exit_that_no_hook_handles_is_named() {
    let Some((_vm, vcpus)) = vcpus(&[Code::Spin, Code::Report]) else {
        return;
    };
    let stopper = Stopper::default();
    let pool = VcpuPool::start(vcpus, Arc::new(NoFaults), &stopper, &PoolConfig::default());
    let pool = pool.expect("there are vCPUs");
    assert!(pool.wait(GRACE));
    // The pool's end does not report a failure that was taken.
    let failure = stopper.take_failure().expect("a failure");
    assert!(
        matches!(
            failure,
            PoolFailure::UnexpectedExit {
                vcpu: 1,
                exit: Exit::IoOut { port: PORT, .. },
                ..
            }
        ),
        "{failure}"
    );
    assert!(join(pool, 2).failure.is_none());
}

#[test]
fn vcpus_leave_one_by_one_or_all_at_once() {
    let Some((_vm, vcpus)) = vcpus(&[Code::Report, Code::Report]) else {
        return;
    };
    let leave = |vcpu: &mut PoolVcpu<'_>| {
        assert!(vcpu.counts().exits <= 3);
        Ok(if vcpu.counts().exits == 3 {
            Next::Leave
        } else {
            Next::Enter
        })
    };
    let (hooks, stopper) = (Counting::new(leave), Stopper::default());
    let pool = start(vcpus, &hooks, &stopper);
    assert!(pool.wait(GRACE));
    assert_eq!(pool.exits(), 6);
    let end = join(pool, 2);
    assert!(end.failure.is_none());
    assert_eq!(hooks.stops.load(Ordering::SeqCst), 0, "no vCPU was stopped");

    start_at(&end.vcpus[0], Code::Spin);
    let hooks = Counting::new(|_| Ok(Next::End));
    let pool = start(end.vcpus, &hooks, &stopper);
    assert!(pool.wait(GRACE));
    assert!(join(pool, 2).failure.is_none());
    assert_eq!(hooks.stops.load(Ordering::SeqCst), 1);
}

#[test]
fn kicks_interrupt_every_vcpu_and_stop_none() {
    let Some((_vm, vcpus)) = vcpus(&[Code::Spin, Code::Spin]) else {
        return;
    };
    let (hooks, stopper) = (Counting::new(|_| Ok(Next::Enter)), Stopper::default());
    let pool = start(vcpus, &hooks, &stopper);
    for round in 1..=3 {
        pool.kick_all();
        eventually("interruptions", || {
            hooks.interrupted.load(Ordering::SeqCst) >= 2 * round
        });
    }
    assert!(!pool.wait(Duration::ZERO));
    stopper.end();
    assert!(join(pool, 2).failure.is_none());
}

#[test]
fn a_dropped_pool_stops() {
    let Some((_vm, vcpus)) = vcpus(&[Code::Spin, Code::Report]) else {
        return;
    };
    let hooks = Counting::new(|_| Ok(Next::Enter));
    let pool = start(vcpus, &hooks, &Stopper::default());
    eventually("exits", || pool.exits() > 0);
    drop(pool);
    // The threads drop the hooks.
    eventually("its end", || Arc::strong_count(&hooks) == 1);
}

/// A hook that waits for a message, and ignores a stop.
struct Stuck {
    entered: AtomicBool,
    wake: Mutex<Receiver<()>>,
}

impl VcpuHooks for Stuck {
    fn on_exit(&self, _: &mut PoolVcpu<'_>, _: Exit) -> Result<Next, HookError> {
        self.entered.store(true, Ordering::SeqCst);
        let _ = self.wake.lock().expect("one vCPU").recv();
        Ok(Next::Enter)
    }
}

#[test]
fn a_vcpu_that_does_not_come_back_is_lost_and_named() {
    let Some((_vm, vcpus)) = vcpus(&[Code::Report]) else {
        return;
    };
    let (let_go, wake): (Sender<()>, _) = mpsc::channel();
    let stuck = Arc::new(Stuck {
        entered: AtomicBool::new(false),
        wake: Mutex::new(wake),
    });
    let (hooks, stopper) = (Arc::<Stuck>::clone(&stuck), Stopper::default());
    let pool = VcpuPool::start(vcpus, hooks, &stopper, &PoolConfig::default()).expect("vCPUs");
    eventually("the stuck vCPU", || stuck.entered.load(Ordering::SeqCst));
    stopper.end();
    // However long: it does not come back before it is let go.
    let end = pool.join(Duration::from_millis(100));
    assert_eq!(end.lost, [0], "{end:?}");
    assert!(
        matches!(end.failure, Some(PoolFailure::Lost { vcpu: 0 })),
        "{end:?}"
    );
    drop(let_go);
    eventually("its end", || Arc::strong_count(&stuck) == 1);
}

/// The error type of the pool's user.
#[derive(Debug, thiserror::Error)]
enum Own {
    #[error("the guest said {0}")]
    Said(u32),
    #[error(transparent)]
    Pool(#[from] PoolFailure),
}

#[test]
fn a_hooks_own_error_is_returned_as_it_was() {
    let Some((_vm, mut vcpus)) = vcpus(&[Code::Report]) else {
        return;
    };
    let stopper = Stopper::default();
    let own = Counting::new(|_| Err(Own::Said(7).into()));
    let other = Counting::new(|_| Err("something else".into()));
    for hooks in [own, other] {
        let pool = start(vcpus, &hooks, &stopper);
        assert!(pool.wait(GRACE));
        let end = join(pool, 1);
        match end.failure.expect("a failure").into_own() {
            Own::Said(7) => {}
            Own::Pool(failure) => assert_eq!(cause(&failure), "something else"),
            Own::Said(_) => panic!("never said"),
        }
        vcpus = end.vcpus;
    }
    stopper.stop(Own::Said(8));
    let hooks = Counting::new(|_| Ok(Next::Enter));
    let failure = join(start(vcpus, &hooks, &stopper), 1).failure;
    assert!(matches!(
        failure.expect("a failure").into_own(),
        Own::Said(8)
    ));
}
