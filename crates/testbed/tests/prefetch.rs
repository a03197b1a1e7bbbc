//! Guests run while prefetch fetches their memory and population maps it in stage 2.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod support;

use std::ops::{AddAssign, ControlFlow};
use std::sync::{Arc, Mutex};

use pagetide_kvm::{Exit, FaultExit, PopulateFlags, SlotFlags, Stats};
use pagetide_memory::{Backing, Exclusive, PageState};
use pagetide_pager::{
    AddError, Contents, Delivery, Mode, Pager, PatternSource, Prefetch, PrefetchConfig,
    ReaderConfig, Readers, RegionConfig, RegionId,
};
use pagetide_testbed::{
    Content, Expected, Machine, MachineConfig, Order, Touch, Workload, next_touch, pattern,
};
use pagetide_vmm::{
    Handled, HookError, Next, Paging, PoolVcpu, StageTwo, VcpuHooks, stop_when_in_trouble,
};
use support::{SEED, chain, is_lack, machine};

const MIB: u64 = 1 << 20;

/// A pager over the machine's data memory, whose content is the pattern, and which populates stage 2
/// or does not; None, with the reason printed, where this host gives no userfaultfd.
fn pager(machine: &Machine, mode: Mode, populates: bool) -> Option<Arc<Pager>> {
    let source = PatternSource::new(|gpa, bytes: &mut [u8]| pattern::fill(gpa, SEED, bytes));
    let contents = Contents::Local(Arc::new(source));
    let mut config = RegionConfig::local(Arc::clone(machine.data()), mode, contents);
    if populates {
        config = config.populate(Arc::new(StageTwo(Arc::clone(machine.vm()))), 2);
    }
    let pager = Pager::new().expect("descriptors can be had");
    match pager.add(config) {
        Ok(_) => {
            stop_when_in_trouble(&pager, &machine.stopper());
            Some(pager)
        }
        Err(AddError::Open(error)) if is_lack(&error) => {
            println!("SKIP: {}", chain(&error));
            None
        }
        Err(error) => panic!("{}", chain(&error)),
    }
}

fn prefetch(pager: &Arc<Pager>) -> Prefetch {
    Prefetch::spawn(pager, PrefetchConfig::default()).expect("threads can be had")
}

const READ: Touch = Touch::ReadPattern(SEED);
const AT_RANDOM: Order = Order::Random { seed: 7 };

/// The guest reads all of its memory; how many of its faults were exits of KVM_RUN.
fn walk(machine: &mut Machine, touch: Touch, order: Order, hooks: Arc<dyn VcpuHooks>) -> u64 {
    let outcome = machine.run(&Workload::new(touch, order), hooks);
    let outcome = outcome.unwrap_or_else(|failure| panic!("{}", chain(&failure)));
    outcome.vcpus.iter().map(|vcpu| vcpu.counts.faults).sum()
}

#[test]
fn guests_run_while_prefetch_fetches_their_memory() {
    for exits in [false, true] {
        for (mode, backing) in [
            (Mode::Minor, Backing::Shmem),
            (Mode::Missing, Backing::Shmem),
            (Mode::Minor, Backing::Thp),
            (Mode::Missing, Backing::Anonymous),
            (Mode::Minor, Backing::Hugetlb2M),
        ] {
            let config = MachineConfig {
                backing,
                overlap: true,
                ..MachineConfig::new(2, 2 * MIB)
            };
            let Some(mut machine) = machine(config).filter(|machine| can_exit(machine, exits))
            else {
                continue;
            };
            let has_populate = machine.capabilities().populate_memory;
            let Some(pager) = pager(&machine, mode, has_populate) else {
                return;
            };
            set_exits(&machine, exits);
            let what = format!("{mode:?} {backing}, exits {exits}");
            let readers = Readers::spawn(&pager, ReaderConfig::new(1)).expect("threads");
            let prefetch = prefetch(&pager);
            let paging = Arc::new(Paging::new(&pager, machine.config().vcpus));
            let faults = walk(&mut machine, READ, AT_RANDOM, paging);
            assert!(exits || faults == 0, "{what}");
            let ended = prefetch
                .finish()
                .unwrap_or_else(|failure| panic!("{}", chain(&failure)));
            assert!(ended.is_complete, "{what}");
            readers.stop();
            assert!(pager.trouble().is_none(), "{what}: {:?}", pager.trouble());
            let counted = pager.counted();
            let pages = machine.data().pages();
            assert_eq!(counted.pages, pages, "{what}: each page once, {counted:?}");
            // The service mapping of a MISSING region is closed while it is paged.
            drop(pager);
            let verified = machine.verify(Expected::all(Content::Pattern(SEED)));
            verified.unwrap_or_else(|error| panic!("{what}: {}", chain(&error)));
        }
    }
}

/// Whether this kernel has exits, where they are asked for. The reason why not is printed.
fn can_exit(machine: &Machine, exits: bool) -> bool {
    let can = !exits || machine.capabilities().absent_mapping_fault;
    if !can {
        println!("SKIP: this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT");
    }
    can
}

/// Switches exits of memory that a pager has.
fn set_exits(machine: &Machine, exits: bool) {
    let flags = SlotFlags {
        absent_mapping_fault: exits,
        ..SlotFlags::default()
    };
    machine
        .set_slot_flags(flags)
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
}

/// What accesses to data memory cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Accesses {
    /// Accesses to pages that were Present in the page map when the vCPU entered the guest for them.
    to_present: u64,
    /// Stage-2 faults of these accesses.
    faults_on_present: u64,
    /// Accesses to other pages.
    to_others: u64,
    /// Stage-2 faults of these accesses.
    faults_on_others: u64,
}

impl AddAssign for Accesses {
    fn add_assign(&mut self, other: Self) {
        self.to_present += other.to_present;
        self.faults_on_present += other.faults_on_present;
        self.to_others += other.to_others;
        self.faults_on_others += other.faults_on_others;
    }
}

/// Paging that counts each access's stage-2 faults. The guest exits before each access ([`Touch::Step`]),
/// and the vCPU's thread then reads the page's state in the page map and KVM's count of that vCPU's
/// stage-2 faults (`pf_taken`). The access is the only thing that the vCPU does until it exits again, and
/// low memory is populated: so the count's growth is the access's, exactly.
struct CountingPaging {
    paging: Paging,
    pager: Arc<Pager>,
    vcpus: Vec<Exclusive<Option<Counting>>>,
    total: Mutex<Accesses>,
}

/// One vCPU's part.
struct Counting {
    stats: Stats,
    /// `pf_taken` when the access under way began, and whether its page was Present.
    access: Option<(u64, bool)>,
    accesses: Accesses,
}

impl Counting {
    /// An access has ended, and the next one begins, to a page with this state.
    fn step(&mut self, state: Option<PageState>) -> Result<(), HookError> {
        let taken = self.stats.value("pf_taken")?.ok_or("no pf_taken")?;
        if let Some((before, present)) = self.access.take() {
            let faults = taken - before;
            self.accesses += if present {
                Accesses {
                    to_present: 1,
                    faults_on_present: faults,
                    ..Accesses::default()
                }
            } else {
                Accesses {
                    to_others: 1,
                    faults_on_others: faults,
                    ..Accesses::default()
                }
            };
        }
        self.access = state.map(|state| (taken, state == PageState::Present));
        Ok(())
    }
}

impl CountingPaging {
    fn new(pager: &Arc<Pager>, vcpus: u32) -> Self {
        Self {
            paging: Paging::new(pager, vcpus),
            pager: Arc::clone(pager),
            vcpus: (0..vcpus).map(|_| Exclusive::default()).collect(),
            total: Mutex::default(),
        }
    }

    fn of(&self, vcpu: &PoolVcpu<'_>) -> &Exclusive<Option<Counting>> {
        &self.vcpus[vcpu.id() as usize]
    }

    /// What all vCPUs did. The run is over, so the last accesses have ended.
    fn accesses(&self) -> Accesses {
        for counting in &self.vcpus {
            counting.with(|counting| {
                if let Some(counting) = counting {
                    counting.step(None).expect("binary statistics");
                    *self.total.lock().expect("no panic") += counting.accesses;
                }
            });
        }
        *self.total.lock().expect("no panic")
    }
}

impl VcpuHooks for CountingPaging {
    fn on_thread_start(&self, vcpu: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        let counting = Counting {
            stats: Stats::of_vcpu(vcpu)?,
            access: None,
            accesses: Accesses::default(),
        };
        self.of(vcpu).with(|place| *place = Some(counting));
        self.paging.on_thread_start(vcpu)
    }

    fn on_fault(&self, vcpu: &mut PoolVcpu<'_>, fault: FaultExit) -> Result<Handled, HookError> {
        self.paging.on_fault(vcpu, fault)
    }

    fn on_exit(&self, vcpu: &mut PoolVcpu<'_>, exit: Exit) -> Result<Next, HookError> {
        let Exit::IoOut { .. } = exit else {
            return Ok(Next::Unexpected);
        };
        let gpa = next_touch(vcpu).ok_or("no registers")?;
        let (region, page) = self.pager.locate(gpa).ok_or("no page")?;
        let counting = self.of(vcpu);
        // The state first: what becomes Present meanwhile counts as not Present.
        let state = self.pager.page_state(region, page);
        counting.with(|counting| match counting {
            Some(counting) => counting.step(state),
            None => Err("no statistics".into()),
        })?;
        Ok(Next::Enter)
    }

    fn on_stop(&self) {
        self.paging.on_stop();
    }
}

/// Walks, and counts the stage-2 faults of each access.
fn counted_walk(machine: &mut Machine, pager: &Arc<Pager>, order: Order) -> (u64, Accesses) {
    let hooks = Arc::new(CountingPaging::new(pager, machine.config().vcpus));
    let step = Touch::Step(SEED);
    let exits = walk(machine, step, order, Arc::<CountingPaging>::clone(&hooks));
    (exits, hooks.accesses())
}

/// A machine with so much data memory, and a pager over it that populates stage 2 or does not. Low
/// memory is populated. None, with the reason printed, where this host cannot.
fn paged(
    bytes: u64,
    vcpus: u32,
    (mode, backing): (Mode, Backing),
    delivery: Delivery,
    populates: bool,
) -> Option<(Machine, Arc<Pager>, RegionId)> {
    let config = MachineConfig {
        backing,
        ..MachineConfig::new(vcpus, bytes / u64::from(vcpus))
    };
    let exits = delivery == Delivery::Exit;
    let mut machine = machine(config).filter(|machine| can_exit(machine, exits))?;
    if !machine.capabilities().populate_memory {
        println!("SKIP: this kernel lacks KVM_CAP_POPULATE_MEMORY");
        return None;
    }
    let pager = pager(&machine, mode, populates)?;
    set_exits(&machine, exits);
    // Data memory is absent, and skipped.
    let flags = PopulateFlags {
        write: false,
        present_only: true,
    };
    let populator = machine.populator().flags(flags);
    let population = populator.run(|_| ControlFlow::Continue(()));
    let population = population.unwrap_or_else(|error| panic!("{}", chain(&error)));
    assert!(population.populated.absent_bytes >= machine.data().bytes());
    let (region, _) = pager.locate(machine.data().gpa()).expect("its region");
    Some((machine, pager, region))
}

const DELIVERIES: [Delivery; 2] = [Delivery::Exit, Delivery::Uffd];

/// How many pages a stage-2 fault maps, its own included: KVM may map those around it that are present.
fn pages_of_a_fault() -> u64 {
    let parameter = "/sys/module/kvm/parameters/fault_around_pages";
    let text = std::fs::read_to_string(parameter).unwrap_or_else(|_| "1".into());
    let pages: u64 = text.trim().parse().expect("a number of pages");
    pages.max(1)
}

/// Without population each block of pages costs one fault, which shows that the count is exact.
#[test]
fn a_present_page_costs_one_stage_2_fault_and_a_populated_one_none() {
    for delivery in DELIVERIES {
        for kind in [
            (Mode::Minor, Backing::Shmem),
            (Mode::Missing, Backing::Anonymous),
        ] {
            for (populates, vcpus) in [(false, 1), (true, 2)] {
                let Some((mut machine, pager, region)) =
                    paged(16 * MIB, vcpus, kind, delivery, populates)
                else {
                    return;
                };
                let ended = prefetch(&pager).finish();
                let ended = ended.unwrap_or_else(|failure| panic!("{}", chain(&failure)));
                assert!(ended.is_complete);
                let pages = machine.data().pages();
                assert_eq!(pager.counts(region).expect("its map").present, pages);
                let populated = if populates { machine.data().bytes() } else { 0 };
                assert_eq!(ended.counters.populated_bytes, populated);
                let before = machine.stage_two().expect("binary statistics");
                let (exits, accesses) = counted_walk(&mut machine, &pager, AT_RANDOM);
                let after = machine.stage_two().expect("binary statistics");
                println!(
                    "{delivery:?}, {kind:?}, {vcpus} vCPUs, populates {populates}: {accesses:?}"
                );
                let faults = if populates {
                    0
                } else {
                    pages / pages_of_a_fault()
                };
                let expected = Accesses {
                    to_present: pages,
                    faults_on_present: faults,
                    ..Accesses::default()
                };
                assert_eq!((exits, accesses), (0, expected));
                assert_eq!(
                    after.faults_taken - before.faults_taken,
                    faults,
                    "no others"
                );
            }
        }
    }
}

/// Prefetch works while the guest runs: in ascending order, in which vCPUs follow prefetch closely, and
/// in random order.
#[test]
fn pages_that_become_present_while_the_guest_runs_cost_no_stage_2_fault() {
    for delivery in DELIVERIES {
        for order in [Order::Sequential, AT_RANDOM] {
            let kind = (Mode::Minor, Backing::Shmem);
            let Some((mut machine, pager, _)) = paged(16 * MIB, 2, kind, delivery, true) else {
                return;
            };
            let readers = Readers::spawn(&pager, ReaderConfig::new(1)).expect("threads");
            let prefetch = prefetch(&pager);
            let (exits, accesses) = counted_walk(&mut machine, &pager, order);
            let ended = prefetch.finish();
            let ended = ended.unwrap_or_else(|failure| panic!("{}", chain(&failure)));
            readers.stop();
            assert!(pager.trouble().is_none(), "{:?}", pager.trouble());
            let delivered = ended.counters.pages;
            println!(
                "{delivery:?}, {order:?}: {delivered} pages delivered, {exits} exits, {accesses:?}"
            );
            assert_eq!(
                accesses.to_present + accesses.to_others,
                machine.data().pages()
            );
            assert!(accesses.to_present >= 100, "prefetch did little");
            assert_eq!(accesses.faults_on_present, 0);
        }
    }
}

/// Faults on pages between their installation and their population, before they are Present, while the
/// guest runs at full speed; None, with the reason printed, where this host cannot. vCPUs exit for pages
/// that are not installed: all other faults are on such pages.
fn faults_before_population(order: Order) -> Option<(u64, u64)> {
    let kind = (Mode::Minor, Backing::Shmem);
    let (mut machine, pager, _) = paged(64 * MIB, 2, kind, Delivery::Exit, true)?;
    let before = machine.stage_two().expect("binary statistics");
    let prefetch = prefetch(&pager);
    let paging = Arc::new(Paging::new(&pager, 2));
    let exits = walk(&mut machine, READ, order, paging);
    let after = machine.stage_two().expect("binary statistics");
    let ended = prefetch.finish();
    let ended = ended.unwrap_or_else(|failure| panic!("{}", chain(&failure)));
    assert!(pager.trouble().is_none(), "{:?}", pager.trouble());
    let delivered = ended.counters.pages;
    let faults = after.faults_taken - before.faults_taken - exits;
    println!(
        "{order:?}: {delivered} pages delivered, {exits} exits, \
         {faults} stage-2 faults on installed pages that were not populated yet"
    );
    assert!(delivered >= 100, "prefetch did little: {delivered}");
    Some((faults, delivered))
}

/// The host may suspend prefetch between the two, and the guest then reads up to a batch of pages. How often
/// that happens is chance: the least of five runs counts. Without population there is a fault on each page.
#[test]
fn few_accesses_come_between_installation_and_population() {
    for order in [Order::Sequential, AT_RANDOM] {
        let is_few = (0..5).any(|_| match faults_before_population(order) {
            Some((faults, delivered)) => faults * 20 < delivered,
            None => true,
        });
        assert!(is_few, "{order:?}: never under 5 %");
    }
}
