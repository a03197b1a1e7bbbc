//! Quiescing and vCPUs' threads: waiting and kicks.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod guest;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use guest::{
    DATA, DATA_PAGES, DATA_SLOT, LIMIT, Limited, Machine, PAGE, Word, eventually, is_round, toggle,
    whole_methods,
};
use pagetide_kvm::{CommitError, Exit, Method, PreFaultError, Signals, SlotFlags, Vcpu};
use pagetide_memory::Backing;
use pagetide_uapi::userfaultfd::{
    Event, EventBuffer, Features, Mode, UserRange, Userfaultfd, Wake,
};

/// Each vCPU's own thread changes the slot that its guest walks, in its exit handler.
#[test]
fn vcpus_threads_commit_concurrently() {
    const VCPUS: u32 = 2;
    const COMMITS: u64 = 100;
    let Some(first) = Machine::new() else { return };
    for method in whole_methods(&first.vm) {
        let machine = Machine::new().expect("there was one");
        let pages = DATA_PAGES / u64::from(VCPUS);
        let slots = toggle(&machine, Method::DeleteCreate, &[DATA_SLOT]);
        let threads: Vec<_> = slots
            .into_iter()
            .enumerate()
            .map(|(id, slot)| {
                let id = u32::try_from(id).expect("two");
                let mut vcpu = machine.vcpu(id, u64::from(id) * pages, pages);
                machine.set(id, Word::Report, 1);
                let machine = Arc::clone(&machine);
                Limited::spawn("a vCPU that commits", move || {
                    let mut here = vcpu.bind().expect("signals work");
                    let mut slots = vec![slot];
                    for commit in 0..COMMITS {
                        let exit = here.run().expect("no failure");
                        assert!(is_round(&exit), "commit {commit} of {method:?}: {exit}");
                        slots = toggle(&machine, method, &slots);
                    }
                    // The last report was completed, and none twice.
                    here.complete_io().expect("a report");
                    machine.get(id, Word::Rounds)
                })
            })
            .collect();
        for thread in threads {
            assert_eq!(thread.join(), COMMITS);
        }
        assert_eq!(machine.vm.layout().len(), 3);
    }
}

#[test]
fn a_commit_does_not_wait_for_a_vcpu_outside() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let mut vcpu = machine.vcpu(0, 0, DATA_PAGES);
    machine.set(0, Word::Report, 1);
    let (blocked, blocks) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let thread = Limited::spawn("a vCPU", move || {
        let mut here = vcpu.bind().expect("signals work");
        here.run().expect("no failure");
        blocked.send(()).expect("a receiver");
        // Forever, unless the commit completes.
        let _ = released.recv();
        here.run().expect("no failure")
    });
    blocks.recv_timeout(LIMIT).expect("it gets there");
    let committing = Arc::clone(&machine);
    Limited::spawn("committing", move || {
        let mut transaction = committing.vm.transaction();
        transaction.split(DATA_SLOT, PAGE);
        let done = transaction.commit_with(Method::Quiesce).expect("it works");
        assert_eq!(done.kicked, 0);
    })
    .join();
    drop(release);
    let exit = thread.join();
    assert!(is_round(&exit), "{exit}");
}

/// A userfaultfd for the data memory of a machine, of which nothing is present, and the address of its first page.
fn paged(machine: &Arc<Machine>) -> Option<(Userfaultfd, u64)> {
    let opened = Userfaultfd::open(Features::NONE);
    let uffd = opened.inspect_err(|error| println!("SKIP: {error}")).ok()?;
    let start = machine.data.guest().start().as_u64();
    let range = UserRange {
        start,
        bytes: machine.data.bytes(),
    };
    // SAFETY: the caller's machine keeps the region mapped, and is dropped after the userfaultfd; no code relies on
    // absent pages reading as zeroes.
    unsafe { uffd.register(range, Mode::Missing) }.expect("anonymous memory");
    Some((uffd, start))
}

/// A vCPU waits in KVM_RUN for a page: on x86 the kick's signal ends the wait; otherwise the commit
/// waits until the page is installed. The thread that installs the page must not wait for the commit.
#[test]
fn a_commit_waits_for_a_vcpu_that_waits_for_a_page() {
    let Some(machine) = Machine::with(Backing::Anonymous) else {
        return;
    };
    let Some((uffd, start)) = paged(&machine) else {
        return;
    };
    let mut vcpu = machine.vcpu(0, 0, DATA_PAGES);
    let peeking = Arc::clone(&machine);
    let peek = Limited::spawn("a vCPU that waits for a page", move || {
        let mut here = vcpu.bind().expect("signals work");
        peeking.peek(&mut here, DATA + 3 * PAGE)
    });
    eventually("a message", || {
        let mut buffer = EventBuffer::new(4);
        let mut events = uffd.read_events(&mut buffer).expect("readable");
        events.any(|event| matches!(event, Event::PageFault(_)))
    });
    let committing = Arc::clone(&machine);
    let commit = Limited::spawn("a commit", move || {
        let mut transaction = committing.vm.transaction();
        transaction.split(DATA_SLOT, 2 * PAGE);
        transaction.commit_with(Method::Quiesce).expect("it works")
    });
    if commit.is_done_or_waits_for_vcpus() {
        println!("the kick ended the waiting");
    } else {
        println!("the commit waits for the page");
    }
    let mut page = [0; 4096];
    page[..8].copy_from_slice(&42_u64.to_le_bytes());
    uffd.copy_pages(start + 3 * PAGE, &page, Wake::Wake)
        .expect("an absent page");
    assert_eq!(commit.join().kicked, 1);
    assert_eq!(peek.join(), Ok(42));
    drop(uffd);
}

/// Callers' kicks, and no others, arrive during concurrent transactions.
#[test]
fn kicks_are_neither_lost_nor_spurious() {
    const KICKS: u64 = 200;
    const COMMITS: u64 = 50;
    let Some(machine) = Machine::new() else {
        return;
    };
    let mut vcpu = machine.vcpu(0, 0, DATA_PAGES);
    let kick = vcpu.kick_handle();
    let (noticed, notices) = mpsc::channel();
    let vcpu = Limited::spawn("a vCPU", move || {
        let mut here = vcpu.bind().expect("signals work");
        loop {
            match here.run().expect("no failure") {
                Exit::Interrupted => noticed.send(()).expect("a receiver"),
                exit if is_round(&exit) => return,
                exit => panic!("{exit}"),
            }
        }
    });
    let (over, is_over) = mpsc::channel::<()>();
    let committing = Arc::clone(&machine);
    let commits = Arc::new(AtomicU64::new(0));
    let counting = Arc::clone(&commits);
    let committer = Limited::spawn("committing", move || {
        let mut slots = vec![DATA_SLOT];
        while is_over.try_recv() == Err(mpsc::TryRecvError::Empty) {
            slots = toggle(&committing, Method::Quiesce, &slots);
            counting.fetch_add(1, Ordering::Relaxed);
        }
    });
    // Each commit makes the vCPU leave the guest, and enter again before the next one.
    let committed = |more: u64| {
        let target = commits.load(Ordering::Relaxed) + more;
        eventually("commits", || {
            let done = commits.load(Ordering::Relaxed);
            if done >= target { Ok(()) } else { Err(done) }
        });
    };
    // None without a kick.
    committed(COMMITS);
    assert_eq!(notices.try_recv(), Err(mpsc::TryRecvError::Empty));
    let mut extra = 0;
    for _ in 0..KICKS {
        kick.kick();
        notices.recv_timeout(LIMIT).expect("no kick is lost");
        // A kick may count twice: its flag and its signal may interrupt one KVM_RUN each.
        committed(2);
        extra += notices.try_iter().count();
    }
    // The last signal may have ended a KVM_RUN whose notice is still to come: it is sent before the next one.
    let rounds = machine.get(0, Word::Rounds);
    eventually("another round", || machine.get(0, Word::Rounds) > rounds);
    extra += notices.try_iter().count();
    committed(COMMITS);
    assert_eq!(notices.try_recv(), Err(mpsc::TryRecvError::Empty));
    drop(over);
    committer.join();
    println!("{KICKS} kicks, {extra} counted twice, {commits:?} commits");
    machine.set(0, Word::Report, 1);
    vcpu.join();
}

/// Reads registers and sets them as they are.
#[cfg(target_arch = "x86_64")]
fn same_registers_again(vcpu: &Vcpu) {
    let regs = vcpu.regs().expect("registers");
    vcpu.set_regs(&regs).expect("registers");
    let sregs = vcpu.sregs().expect("registers");
    vcpu.set_sregs(&sregs).expect("registers");
}

/// Reads the register that the library itself reads.
#[cfg(not(target_arch = "x86_64"))]
fn same_registers_again(vcpu: &Vcpu) {
    vcpu.rip().expect("a register");
}

/// Registers are read and set, and memory is pre-faulted, while slots change.
#[test]
fn other_ioctls_wait_at_the_gate() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let mut vcpu = machine.vcpu(0, 0, DATA_PAGES);
    machine.set(0, Word::Report, 1);
    let (over, is_over) = mpsc::channel::<()>();
    let committing = Arc::clone(&machine);
    let commits = Limited::spawn("committing", move || {
        let mut slots = vec![DATA_SLOT];
        while is_over.try_recv() == Err(mpsc::TryRecvError::Empty) {
            slots = toggle(&committing, Method::Quiesce, &slots);
        }
        toggle(&committing, Method::Quiesce, &slots)
    });
    let has_pre_fault = machine.vm.capabilities().pre_fault_memory;
    let data = machine.data.range();
    let committed = Arc::clone(&machine);
    Limited::spawn("ioctls", move || {
        let mut here = vcpu.bind().expect("signals work");
        let mut again = 0;
        for round in 0..100 {
            same_registers_again(&here);
            if has_pre_fault {
                // On a kernel on which this never returns after slots were created again, the next
                // commit's kick ends it.
                match here.pre_fault(data) {
                    Ok(_) => {}
                    Err(PreFaultError::Again { .. }) => again += 1,
                    Err(error) => panic!("round {round}: {error}"),
                }
            }
        }
        drop(over);
        commits.join();
        // The guest continues on one of the layouts; there are no further changes.
        let exit = here.run().expect("no failure");
        assert!(is_round(&exit), "{exit}");
        if has_pre_fault {
            println!("{again} of 100 pre-faults were interrupted");
            let parts = committed.vm.layout().into_values();
            for part in parts.filter(|part| Arc::ptr_eq(&part.region, &committed.data)) {
                let handled = here.pre_fault(part.range).expect("memory");
                assert_eq!(handled, part.range.bytes());
            }
        }
    })
    .join();
    if !has_pre_fault {
        println!("SKIP: this kernel lacks KVM_CAP_PRE_FAULT_MEMORY; registers were tested");
    }
}

/// Single calls change flags and whole regions during transactions.
#[test]
fn single_changes_take_turns_with_transactions() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let committing = Arc::clone(&machine);
    let commits = Limited::spawn("committing", move || {
        let mut slots = vec![DATA_SLOT];
        for _ in 0..100 {
            slots = toggle(&committing, Method::Quiesce, &slots);
        }
    });
    for round in 0..100 {
        let flags = SlotFlags {
            log_dirty: round % 2 == 0,
            ..SlotFlags::default()
        };
        machine.vm.set_slot_flags(0, flags).expect("it is there");
        assert_eq!(machine.vm.slot_flags(0), Some(flags));
    }
    commits.join();
}

/// The source of the page has an outage. Other transactions must not wait for its end.
#[test]
fn a_commit_gives_up_on_a_vcpu_whose_page_does_not_come() {
    // Without signals, the kernel's kick does not reach a vCPU that sleeps in the userfaultfd.
    let Some(machine) = Machine::with_signals(Backing::Anonymous, Signals::none()) else {
        return;
    };
    if !machine.vm.capabilities().kick_vcpus {
        println!("SKIP: this kernel lacks KVM_CAP_KICK_VCPUS");
        return;
    }
    let Some((uffd, start)) = paged(&machine) else {
        return;
    };
    let mut vcpu = machine.vcpu(0, 0, DATA_PAGES);
    let peeking = Arc::clone(&machine);
    let peek = Limited::spawn("a vCPU that waits for a page", move || {
        let mut here = vcpu.bind().expect("signals work");
        [3, 4].map(|page| peeking.peek(&mut here, DATA + page * PAGE))
    });
    let asks_for = |page: u64| {
        eventually("a message", || {
            let mut buffer = EventBuffer::new(4);
            let mut events = uffd.read_events(&mut buffer).expect("readable");
            events.any(|event| {
                matches!(event, Event::PageFault(fault) if fault.address == start + page * PAGE)
            })
        });
    };
    let answer = |page: u64, value: u64| {
        let mut content = [0; 4096];
        content[..8].copy_from_slice(&value.to_le_bytes());
        uffd.copy_pages(start + page * PAGE, &content, Wake::Wake)
            .expect("an absent page");
    };
    asks_for(3);
    machine.vm.set_quiesce_limit(Duration::from_millis(20));
    for at in [2, 5] {
        let mut transaction = machine.vm.transaction();
        transaction.split(DATA_SLOT, at * PAGE);
        let refused = transaction
            .commit_with(Method::Quiesce)
            .expect_err("it stays");
        assert!(
            matches!(&refused, CommitError::VcpusStay { vcpus, .. } if vcpus[..] == [0]),
            "{refused}"
        );
    }
    // The vCPU goes on as if nothing had happened.
    answer(3, 42);
    asks_for(4);
    answer(4, 43);
    assert_eq!(peek.join(), [Ok(42), Ok(43)]);
    let mut transaction = machine.vm.transaction();
    transaction.split(DATA_SLOT, 2 * PAGE);
    let committed = transaction.commit_with(Method::Quiesce).expect("it works");
    assert_eq!(committed.kicked, 0);
    drop(uffd);
}
