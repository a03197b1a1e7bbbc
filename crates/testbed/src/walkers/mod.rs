//! A machine whose vCPUs walk their memory for ever, check it, and measure how long each of them
//! was kept from going on: for what changes a VM's memory slots meanwhile.
//!
//! *Kept* is what a guest sees: the longest stretch between two readings of the clock, less the time
//! that was stolen in it, which is the time that the vCPU's thread could have run and had no
//! processor (KVM's steal time). A vCPU that sleeps, because somebody stops it, is kept; one that
//! waits for its turn on a busy host is not. So the figure means the same for all ways of changing
//! slots, and with more vCPUs than processors. `docs/design/vcpu-stalls.md` has the reasoning.

mod code;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pagetide_kvm::{Exit, Vcpu, Vm};
use pagetide_memory::{Backing, FaultInAccess, GuestAddress, PageIndex, Region};
use pagetide_vmm::{HookError, Next, PoolVcpu, VcpuHooks};

use crate::arch;
use crate::endless::{self, Endless, EndlessError, Payload, Running, compare_words};
use crate::error::MachineError;
use crate::layout::{DATA_GPA, PAGE};
use crate::walk::lock;
use code::{Control, Word};

/// Largest number of vCPUs: each has a word of its own in every page.
pub const MAX_WALKERS: u32 = 511;
/// Most pages of a walk: a page of addresses.
pub const MAX_WALK: usize = 512;

/// What the walkers' machine is to be.
#[derive(Clone, Debug)]
pub struct WalkersConfig {
    /// Number of vCPUs, from 1 to [`MAX_WALKERS`].
    pub vcpus: u32,
    /// Bytes of data memory, from [`DATA_GPA`] on; shmem, one slot ([`DATA_SLOT`](crate::DATA_SLOT)).
    pub data_bytes: u64,
    /// The pages of data memory that each vCPU walks, from 1 to [`MAX_WALK`]; each vCPU begins at
    /// another one. These stay writable whatever happens to the slots.
    pub walk: Vec<PageIndex>,
    /// Whether the vCPUs touch those pages; else they only read the clock.
    pub touch: bool,
    /// How long a vCPU may make no step before that is a failure.
    pub stall_timeout: Duration,
}

/// An access to memory that left the guest, because no slot was there in that moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hole {
    /// The vCPU.
    pub vcpu: u32,
    /// Where.
    pub gpa: GuestAddress,
    /// Whether it was a write.
    pub write: bool,
}

/// The machine. Its vCPUs walk from [`Walkers::start`] on.
#[derive(Debug)]
pub struct Walkers {
    config: WalkersConfig,
    endless: Endless,
    steal: bool,
    windows: AtomicU64,
    holes: AtomicU64,
    first_hole: Mutex<Option<Hole>>,
}

/// vCPUs that walk. Dropping it stops them.
#[derive(Debug)]
pub struct Walking(Running<Walkers>);

impl Walkers {
    /// Builds it; memory is present and holds its own addresses.
    ///
    /// # Errors
    /// [`MachineError`] says what is missing or cannot be.
    pub fn new(config: WalkersConfig) -> Result<Self, MachineError> {
        let data = Region::new(GuestAddress(DATA_GPA), config.data_bytes, Backing::Shmem)
            .map_err(MachineError::Data)?;
        fill(&data)?;
        let (vcpus, stall_timeout) = (config.vcpus, config.stall_timeout);
        let endless = Endless::new(vcpus, Arc::new(data), code::code(), PAGE, stall_timeout)?;
        let mut walkers = Self {
            config,
            endless,
            steal: true,
            windows: AtomicU64::new(0),
            holes: AtomicU64::new(0),
            first_hole: Mutex::default(),
        };
        let mut steal = true;
        walkers.endless.each(|vcpu| {
            steal &= walkers.prepare(vcpu)?;
            Ok(())
        })?;
        walkers.steal = steal;
        Ok(walkers)
    }

    /// Gives a vCPU its walk; whether its guest is told how much time is stolen.
    fn prepare(&self, vcpu: &Vcpu) -> Result<bool, MachineError> {
        let id = vcpu.id();
        let table = self.endless.table(id);
        let walk = &self.config.walk;
        let first = usize::try_from(id).unwrap_or(0) * walk.len()
            / usize::try_from(self.config.vcpus).unwrap_or(1).max(1);
        let pages = walk.iter().cycle().skip(first).take(walk.len());
        let pages: Vec<u64> = pages.map(|page| DATA_GPA + page.0 * PAGE).collect();
        self.endless.low().write_words(table, &pages)?;
        let tsc_khz = u64::from(arch::tsc_khz(vcpu)?).max(1);
        let words = [
            (endless::Word::Table as u64, table),
            (endless::Word::Count as u64, pages.len() as u64),
            (Word::Column as u64, column(id)),
            (Word::Scale as u64, (1_000_000 << 32) / tsc_khz),
            (Word::Touch as u64, u64::from(self.config.touch)),
        ];
        for (word, value) in words {
            self.endless.set_word(id, word, value)?;
        }
        arch::tell_steal_time(vcpu, self.endless.gpa(id, Word::Steal as u64))
    }

    /// Starts a thread for each vCPU, and waits until all walk.
    ///
    /// # Errors
    /// A thread cannot be started, or a vCPU does not walk.
    pub fn start(self: &Arc<Self>) -> Result<Walking, EndlessError> {
        Running::start(self).map(Walking)
    }

    /// The VM, whose slots may be changed as long as the walked pages stay where they are.
    #[must_use]
    pub fn vm(&self) -> &Vm {
        self.endless.vm()
    }

    /// The data memory.
    #[must_use]
    pub fn data(&self) -> &Arc<Region> {
        self.endless.data()
    }

    /// Whether stolen time is known and taken off. If not, time that a vCPU waits for a processor
    /// counts as time that it was kept.
    #[must_use]
    pub fn knows_stolen_time(&self) -> bool {
        self.steal
    }

    /// Begins a window: vCPUs forget how long they were kept before.
    ///
    /// # Errors
    /// A vCPU's thread has failed.
    pub fn open_window(&self) -> Result<(), EndlessError> {
        self.endless.check()?;
        let number = self.windows.fetch_add(1, Ordering::Relaxed) + 1;
        self.endless.control(Control::Window as u64, number)
    }

    /// Waits until each vCPU has noted how long it was kept up to now, and returns the longest time
    /// of the window of each, by their ids.
    ///
    /// # Errors
    /// A vCPU makes no step, or its thread has failed.
    pub fn close_window(&self) -> Result<Vec<Duration>, EndlessError> {
        // The step that is under way may have read its clock before this moment; the next has not.
        self.endless.await_each(endless::Word::Steps as u64, 2)?;
        let longest = |vcpu| self.endless.word(vcpu, Word::Longest as u64);
        (0..self.config.vcpus)
            .map(|vcpu| longest(vcpu).map(Duration::from_nanos))
            .collect()
    }

    /// Clock readings of all vCPUs so far: the work that the guest gets done.
    ///
    /// # Errors
    /// Low memory cannot be read.
    pub fn steps(&self) -> Result<u64, EndlessError> {
        self.endless.sum(endless::Word::Steps as u64)
    }

    /// Accesses to memory so far that left the guest because no slot was there.
    #[must_use]
    pub fn holes(&self) -> u64 {
        self.holes.load(Ordering::Relaxed)
    }

    /// Waits until each vCPU has walked all of its pages at least once from now on.
    ///
    /// # Errors
    /// A vCPU makes no step, or its thread has failed.
    pub fn await_round(&self) -> Result<(), EndlessError> {
        self.endless.await_each(endless::Word::Rounds as u64, 2)
    }

    /// Compares all of memory with what it should hold when the vCPUs have ended: each page's
    /// address, and in the walked pages each vCPU's last round.
    fn verify(&self) -> Result<(), EndlessError> {
        let mut rounds = Vec::new();
        for vcpu in 0..self.config.vcpus {
            let word = self.endless.word(vcpu, endless::Word::Rounds as u64)?;
            rounds.push(word * u64::from(self.config.touch));
        }
        let walked: std::collections::HashSet<u64> =
            self.config.walk.iter().map(|page| page.0).collect();
        let mut found = vec![0; usize::try_from(PAGE).unwrap_or(0)];
        for page in self.data().all_pages().iter() {
            let start = DATA_GPA + page.0 * PAGE;
            let own = |column: u64| {
                let vcpu = usize::try_from(column.checked_sub(1)?).ok()?;
                rounds.get(vcpu).filter(|_| walked.contains(&page.0))
            };
            self.data().read_service(page, 0, &mut found)?;
            compare_words(start, &found, |gpa| match gpa - start {
                0 => start,
                offset => own(offset / 8).copied().unwrap_or(0),
            })?;
        }
        Ok(())
    }
}

impl Payload for Walkers {
    fn endless(&self) -> &Endless {
        &self.endless
    }
}

impl VcpuHooks for Walkers {
    fn on_exit(&self, vcpu: &mut PoolVcpu<'_>, exit: Exit) -> Result<Next, HookError> {
        let Exit::Mmio { gpa, write, .. } = exit else {
            return self.endless.report(vcpu, exit);
        };
        if self.holes.fetch_add(1, Ordering::Relaxed) == 0 {
            let vcpu = vcpu.id();
            *lock(&self.first_hole) = Some(Hole { vcpu, gpa, write });
        }
        Ok(Next::Enter)
    }
}

impl Walking {
    /// Lets every vCPU walk another round without disturbance, ends them and verifies memory.
    /// Returns the first hole that was seen, if there was one: an access in a hole reads anything
    /// and writes nothing, so with holes a guest may have found as many wrong words.
    ///
    /// # Errors
    /// A vCPU failed or found wrong words, or memory does not hold what it should.
    pub fn end(self) -> Result<Option<Hole>, EndlessError> {
        self.0.payload().await_round()?;
        let walkers = self.0.stop()?;
        let (count, wrong) = walkers.endless.wrong_words()?;
        if let Some(error) = wrong.filter(|_| count > walkers.holes()) {
            return Err(error);
        }
        walkers.verify()?;
        Ok(*lock(&walkers.first_hole))
    }
}

/// The offset of a vCPU's own word in each page.
fn column(vcpu: u32) -> u64 {
    8 * (1 + u64::from(vcpu))
}

/// Makes all pages present and writes each one's address to its start.
fn fill(data: &Region) -> Result<(), MachineError> {
    data.fault_in(data.all_pages(), FaultInAccess::Write)
        .map_err(MachineError::PopulateLowMemory)?;
    for page in data.all_pages().iter() {
        let gpa = DATA_GPA + page.0 * PAGE;
        data.write_service(page, 0, &gpa.to_le_bytes())
            .map_err(|source| MachineError::AccessLowMemory {
                gpa: GuestAddress(gpa),
                source,
            })?;
    }
    Ok(())
}
