//! KVM_POPULATE_MEMORY: its counts, its progress, and its independence of commits.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod guest;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use guest::{
    DATA, DATA_PAGES, DATA_SLOT, Limited, Machine, PAGE, Word, eventually, is_round, toggle,
    whole_methods,
};
use pagetide_kvm::{Exit, Method, PopulateError, PopulateFlags, Populated, SlotFlags, Stats};
use pagetide_memory::{
    Backing, FaultInAccess, GuestAddress, GuestRange, PageIndex, PageRange, Region,
};
use pagetide_uapi::userfaultfd::{
    Event, EventBuffer, Features, Mode, UserRange, Userfaultfd, Wake,
};

const WRITE: PopulateFlags = PopulateFlags {
    write: true,
    present_only: false,
};
const PRESENT_ONLY: PopulateFlags = PopulateFlags {
    write: false,
    present_only: true,
};

fn range(gpa: u64, bytes: u64) -> GuestRange {
    GuestRange::new(GuestAddress(gpa), bytes).expect("whole pages")
}

fn data() -> GuestRange {
    range(DATA, DATA_PAGES * PAGE)
}

fn counts(mapped: u64, absent: u64, poisoned: u64) -> Populated {
    Populated {
        mapped_bytes: mapped * PAGE,
        absent_bytes: absent * PAGE,
        poisoned_bytes: poisoned * PAGE,
    }
}

/// A machine whose kernel supports population. Without it, the refusal is checked.
fn machine(backing: Backing) -> Option<Arc<Machine>> {
    let machine = Machine::with(backing)?;
    if machine.vm.capabilities().populate_memory {
        return Some(machine);
    }
    let error = machine
        .vm
        .populate(data(), WRITE)
        .expect_err("the kernel does not have it");
    assert!(
        matches!(
            error,
            PopulateError::MissingCapability { number: 10003, .. }
        ),
        "{error}"
    );
    println!("SKIP: this kernel lacks KVM_CAP_POPULATE_MEMORY; the refusal was checked");
    None
}

/// A userfaultfd on the machine's data, which is empty anonymous memory.
fn trap(machine: &Machine) -> Option<Userfaultfd> {
    let opened = Userfaultfd::open(Features::POISON);
    let uffd = match opened.or_else(|_| Userfaultfd::open(Features::NONE)) {
        Ok(uffd) => uffd,
        Err(error) => {
            println!("SKIP: {error}");
            return None;
        }
    };
    let range = UserRange {
        start: machine.data.guest().start().as_u64(),
        bytes: machine.data.bytes(),
    };
    // SAFETY: the machine outlives the userfaultfd in every test, and no code relies on absent pages
    // reading as zeroes.
    unsafe { uffd.register(range, Mode::Missing) }.expect("anonymous memory");
    Some(uffd)
}

fn wait_for_fault(uffd: &Userfaultfd) {
    eventually("a message", || {
        let mut buffer = EventBuffer::new(4);
        let mut events = uffd.read_events(&mut buffer).expect("readable");
        events.any(|event| matches!(event, Event::PageFault(_)))
    });
}

#[test]
fn vcpus_take_no_exit_where_memory_was_populated() {
    let Some(machine) = machine(Backing::Shmem) else {
        return;
    };
    let vm = Stats::of_vm(&machine.vm).expect("binary statistics");
    let mut vcpu = machine.vcpu(0, 0, DATA_PAGES);
    machine.set(0, Word::Report, 1);
    // arm64 counts neither faults nor mappings, only all exits: a round's own, and those by interrupts of the
    // host, which are few compared with the pages.
    let (stat, most) = if cfg!(target_arch = "x86_64") {
        ("pf_taken", 0)
    } else {
        ("exits", DATA_PAGES / 2)
    };
    let faults = Stats::of_vcpu(&vcpu).expect("binary statistics");
    let taken = || faults.value(stat).expect("readable").expect("counted");
    let mappings = |size| vm.value(size).expect("readable");

    let low = machine.low.range();
    assert_eq!(
        machine.vm.populate(low, WRITE).expect("low"),
        counts(512, 0, 0)
    );
    assert_eq!(
        machine.vm.populate(data(), WRITE).expect("data"),
        counts(DATA_PAGES, 0, 0)
    );
    let small = mappings("pages_4k");
    assert_eq!(small.unwrap_or(512 + DATA_PAGES), 512 + DATA_PAGES);
    assert_eq!(mappings("pages_2m").unwrap_or(0), 0);

    let mut here = vcpu.bind().expect("signals work");
    for _ in 0..3 {
        let exit = here.run().expect("no failure");
        assert!(is_round(&exit), "{exit}");
    }
    let taken = taken();
    assert!(
        taken <= most,
        "the guest read and wrote all of it: {stat} {taken}"
    );
    assert_eq!(mappings("pages_4k"), small);
    // A second population finds all of it mapped.
    assert_eq!(
        machine.vm.populate(data(), WRITE).expect("data"),
        counts(DATA_PAGES, 0, 0)
    );
}

#[test]
fn memory_missing_on_the_host_is_absent() {
    let Some(machine) = machine(Backing::Anonymous) else {
        return;
    };
    let vm = &machine.vm;
    assert_eq!(
        vm.populate(data(), PRESENT_ONLY).expect("all"),
        counts(0, DATA_PAGES, 0)
    );
    let some = PageRange::new(PageIndex(8), 16);
    machine
        .data
        .fault_in(some, FaultInAccess::Write)
        .expect("16 pages");
    assert_eq!(
        vm.populate(data(), PRESENT_ONLY).expect("all"),
        counts(16, DATA_PAGES - 16, 0)
    );
    // With exits enabled, userspace decides which pages become present.
    let exits = SlotFlags {
        absent_mapping_fault: true,
        ..SlotFlags::default()
    };
    machine.data.assume_registered();
    vm.set_slot_flags(DATA_SLOT, exits).expect("a flag");
    assert_eq!(
        vm.populate(data(), WRITE).expect("all"),
        counts(16, DATA_PAGES - 16, 0)
    );
    vm.set_slot_flags(DATA_SLOT, SlotFlags::default())
        .expect("no flag");
    assert_eq!(
        vm.populate(data(), WRITE).expect("all"),
        counts(DATA_PAGES, 0, 0)
    );
}

#[test]
fn poison_is_counted_and_skipped() {
    let Some(machine) = machine(Backing::Anonymous) else {
        return;
    };
    let Some(uffd) = trap(&machine) else { return };
    if !uffd.features().contains(Features::POISON) {
        println!("SKIP: this kernel's userfaultfd has no UFFD_FEATURE_POISON");
        return;
    }
    let start = machine.data.guest().start().as_u64();
    let bad = UserRange {
        start: start + 5 * PAGE,
        bytes: 2 * PAGE,
    };
    uffd.poison_pages(bad, Wake::Wake).expect("absent pages");
    let zeroes = UserRange {
        start,
        bytes: 5 * PAGE,
    };
    uffd.zero_pages(zeroes, Wake::Wake).expect("absent pages");
    let found = machine.vm.populate(data(), PRESENT_ONLY).expect("all");
    assert_eq!(found, counts(5, DATA_PAGES - 7, 2));
}

#[test]
fn the_end_of_slots_is_reported_with_the_progress() {
    let Some(machine) = machine(Backing::Shmem) else {
        return;
    };
    let half = DATA + DATA_PAGES / 2 * PAGE;
    let error = machine
        .vm
        .populate(range(half, DATA_PAGES * PAGE), WRITE)
        .expect_err("a part is outside");
    let end = machine.data.range().end();
    assert!(
        matches!(error, PopulateError::NoSlot { gpa, .. } if gpa == end),
        "{error}"
    );
    let unfinished = error.unfinished().expect("it began");
    assert_eq!(unfinished.done, counts(DATA_PAGES / 2, 0, 0));
    assert_eq!(unfinished.rest, range(end.0, DATA_PAGES / 2 * PAGE));
    // More than one ioctl's size, from a slot to far beyond it.
    let error = machine
        .vm
        .populate(range(0, 1 << 30), WRITE)
        .expect_err("most is outside");
    let unfinished = error.unfinished().expect("it began");
    assert_eq!(unfinished.done, counts(512, 0, 0));
    assert_eq!(unfinished.rest, range(2 << 20, (1 << 30) - (2 << 20)));
    let nowhere = machine.vm.populate(range(1 << 40, PAGE), WRITE);
    let error = nowhere.expect_err("nothing is there");
    assert_eq!(error.unfinished().expect("it began").done, counts(0, 0, 0));
}

/// Sends the kick signal to a thread of this process.
fn signal(thread: libc::pthread_t) {
    // SAFETY: the caller joins the thread later, so it exists; the signal's handler was installed
    // before the population began.
    unsafe { libc::pthread_kill(thread, pagetide_kvm::kick_signal()) };
}

#[test]
fn signals_do_not_end_it_and_a_condition_does() {
    let Some(machine) = machine(Backing::Shmem) else {
        return;
    };
    // Installs the signal's handler.
    machine.vm.populate(data(), WRITE).expect("data");
    let memory = Region::new(GuestAddress(1 << 32), 32 << 20, Backing::Shmem).expect("32 MiB");
    let whole = memory.range();
    let added = machine
        .vm
        .add_region(7, Arc::new(memory), SlotFlags::default());
    added.expect("an empty slot");
    // SAFETY: the call has no requirements.
    let this_thread = unsafe { libc::pthread_self() };
    let over = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&over);
    let signals = Limited::spawn("signals", move || {
        let mut sent = 0_u64;
        while !ended.load(Ordering::Relaxed) {
            signal(this_thread);
            sent += 1;
            // A thread that signals without a break would keep the other from its work.
            std::thread::sleep(Duration::from_micros(200));
        }
        sent
    });
    let mut asked = 0;
    let populated = machine.vm.populate_unless(whole, WRITE, || {
        asked += 1;
        false
    });
    assert_eq!(populated.expect("all of it").mapped_bytes, whole.bytes());
    println!("it was interrupted {} times", asked - 1);
    let stopped = machine.vm.populate_unless(whole, WRITE, || true);
    let error = stopped.expect_err("it was stopped");
    assert!(
        matches!(error, PopulateError::Interrupted { .. }),
        "{error}"
    );
    assert_eq!(error.unfinished().expect("it began").rest, whole);
    over.store(true, Ordering::Relaxed);
    assert!(signals.join() > 0);
}

/// The guest's content is correct and no population fails while slots change.
#[test]
fn slots_change_while_memory_is_populated() {
    const COMMITS: u64 = 100;
    let Some(first) = machine(Backing::Shmem) else {
        return;
    };
    for method in whole_methods(&first.vm) {
        let machine = Machine::new().expect("there was one");
        let mut vcpu = machine.vcpu(0, 0, DATA_PAGES);
        let kick = vcpu.kick_handle();
        let walk = Limited::spawn("a vCPU", move || {
            let mut here = vcpu.bind().expect("signals work");
            here.run().expect("no failure")
        });
        let populations = Arc::new(AtomicU64::new(0));
        let over = Arc::new(AtomicBool::new(false));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (machine, over) = (Arc::clone(&machine), Arc::clone(&over));
                let populations = Arc::clone(&populations);
                Limited::spawn("a population", move || {
                    while !over.load(Ordering::Relaxed) {
                        let done = machine.vm.populate(data(), WRITE);
                        let done = done.unwrap_or_else(|error| panic!("{method:?}: {error}"));
                        assert_eq!(done, counts(DATA_PAGES, 0, 0));
                        populations.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        let mut slots = vec![DATA_SLOT];
        let mut longest = Duration::ZERO;
        for _ in 0..COMMITS {
            let before = std::time::Instant::now();
            slots = toggle(&machine, method, &slots);
            longest = longest.max(before.elapsed());
        }
        eventually("a population", || populations.load(Ordering::Relaxed) > 0);
        over.store(true, Ordering::Relaxed);
        threads.into_iter().for_each(Limited::join);
        kick.kick();
        assert_eq!(walk.join(), Exit::Interrupted, "the guest saw nothing");
        let populations = populations.load(Ordering::Relaxed);
        println!("{method:?}: {populations} populations, longest commit {longest:?}");
    }
}

/// A population that waits for a page does not delay commits.
#[test]
fn a_commit_waits_for_no_page() {
    let Some(machine) = machine(Backing::Anonymous) else {
        return;
    };
    let Some(uffd) = trap(&machine) else { return };
    let populating = Arc::clone(&machine);
    let population = Limited::spawn("a population that waits for a page", move || {
        populating.vm.populate(range(DATA, 3 * PAGE), WRITE)
    });
    wait_for_fault(&uffd);
    for method in whole_methods(&machine.vm) {
        let mut transaction = machine.vm.transaction();
        let slots: Vec<u32> = machine.vm.layout().into_keys().collect();
        let data = *slots.last().expect("there are some");
        let bytes = machine.vm.slot(data).expect("it is there").range.bytes();
        transaction.split(data, bytes / 2);
        let done = transaction.commit_with(method).expect("it works");
        if method == Method::Quiesce {
            assert_eq!(done.kicked, 1);
        }
    }
    let start = machine.data.guest().start().as_u64();
    uffd.copy_pages(start, &[7; 3 * 4096], Wake::Wake)
        .expect("absent pages");
    assert_eq!(population.join().expect("all of it"), counts(3, 0, 0));
}

#[test]
fn a_concurrent_deletion_of_the_slot_is_reported() {
    let Some(machine) = machine(Backing::Anonymous) else {
        return;
    };
    let Some(uffd) = trap(&machine) else { return };
    let start = machine.data.guest().start().as_u64();
    uffd.copy_pages(start, &[7; 2 * 4096], Wake::Wake)
        .expect("absent pages");
    let populating = Arc::clone(&machine);
    let population = Limited::spawn("a population that waits for a page", move || {
        populating.vm.populate(data(), WRITE)
    });
    wait_for_fault(&uffd);
    machine.vm.remove_slot(DATA_SLOT).expect("it is there");
    let zeroes = UserRange {
        start: start + 2 * PAGE,
        bytes: (DATA_PAGES - 2) * PAGE,
    };
    uffd.zero_pages(zeroes, Wake::Wake).expect("absent pages");
    let error = population.join().expect_err("the slot is gone");
    assert!(matches!(error, PopulateError::NoSlot { .. }), "{error}");
    let unfinished = error.unfinished().expect("it began");
    assert_eq!(unfinished.done, counts(2, 0, 0));
    assert_eq!(
        unfinished.rest,
        range(DATA + 2 * PAGE, (DATA_PAGES - 2) * PAGE)
    );
}
