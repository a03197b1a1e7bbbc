//! A machine whose vCPUs walk their memory until they are stopped, check it, and measure their stalls: for
//! changes of a VM's memory slots under running vCPUs.
//!
//! A *stall* is what a guest sees: the longest time between two readings of the clock, less the time that was
//! stolen in it, in which the vCPU's thread could have run and had no processor (KVM's steal time). A vCPU
//! that sleeps because its pool is stopped is stalled; one that waits for a processor on a busy host is not. So
//! the figure means the same for all ways to change slots, and with more vCPUs than processors.
//! `docs/design/vcpu-stalls.md` has the reasoning.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use pagetide_kvm::{Exit, Vcpu, Vm};
use pagetide_memory::{Backing, FaultInAccess, GuestAddress, PageIndex, Region};
use pagetide_vmm::{HookError, Next, PoolVcpu, SizeError, VcpuHooks, VcpuPool};

use crate::arch;
use crate::bare::Bare;
use crate::config::ConfigError;
use crate::endless::Endless;
use crate::error::{GuestError, MachineError};
use crate::layout::{DATA_GPA, PAGE};
use crate::payload::{Control, Word, walk};
use crate::verify::verify;

/// The largest number of vCPUs: each has a word of its own in every page.
pub const MAX_WALKERS: u32 = 511;
/// The most pages of a walk: a page of addresses.
pub const MAX_WALK: usize = 512;

/// The configuration of a machine of walkers.
#[derive(Clone, Debug)]
pub struct WalkersConfig {
    /// Number of vCPUs, from 1 to [`MAX_WALKERS`].
    pub vcpus: u32,
    /// Bytes of data memory, from [`DATA_GPA`] on; shmem, one slot ([`DATA_SLOT`](crate::DATA_SLOT)).
    pub data_bytes: u64,
    /// The pages of data memory that each vCPU walks, from 1 to [`MAX_WALK`]; each vCPU begins at another
    /// one. These must stay writable whatever happens to the slots.
    pub walk: Vec<PageIndex>,
    /// Whether the vCPUs touch these pages; otherwise they only read the clock.
    pub touch: bool,
    /// How long a vCPU may take for a step before the run fails.
    pub stall_timeout: Duration,
}

/// A memory access that exited because it was in no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hole {
    /// The vCPU.
    pub vcpu: u32,
    /// The address.
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
    first_hole: OnceLock<Hole>,
}

/// vCPUs that walk. Dropping it stops them.
#[derive(Debug)]
pub struct Walking {
    walkers: Arc<Walkers>,
    pool: VcpuPool,
}

impl Walkers {
    /// Makes the machine; memory is present and holds its own addresses.
    ///
    /// # Errors
    /// See [`MachineError`].
    pub fn new(config: WalkersConfig) -> Result<Self, MachineError> {
        SizeError::check_vcpus(config.vcpus, MAX_WALKERS).map_err(ConfigError::from)?;
        let data = Region::new(GuestAddress(DATA_GPA), config.data_bytes, Backing::Shmem)
            .map_err(MachineError::Data)?;
        fill(&data)?;
        let mut steal = true;
        let prepare = |bare: &Bare, vcpu: &Vcpu| {
            steal &= prepare(bare, vcpu, &config)?;
            Ok(())
        };
        let (vcpus, timeout) = (config.vcpus, config.stall_timeout);
        let endless = Endless::new(vcpus, Arc::new(data), walk::code(), PAGE, timeout, prepare)?;
        Ok(Self {
            config,
            endless,
            steal,
            windows: AtomicU64::new(0),
            holes: AtomicU64::new(0),
            first_hole: OnceLock::new(),
        })
    }

    /// Starts a thread for each vCPU, and waits until all walk.
    ///
    /// # Errors
    /// A thread cannot be started, or a vCPU does not walk.
    pub fn start(self: &Arc<Self>) -> Result<Walking, GuestError> {
        let walkers = Arc::clone(self);
        let pool = self.endless.start(walkers.clone())?;
        Ok(Walking { walkers, pool })
    }

    /// The VM, whose slots may change as long as the walked pages stay where they are.
    #[must_use]
    pub fn vm(&self) -> &Vm {
        &self.endless.bare.vm
    }

    /// The data memory.
    #[must_use]
    pub fn data(&self) -> &Arc<Region> {
        &self.endless.bare.data
    }

    /// Whether stolen time is known and subtracted. If not, the time in which a vCPU waits for a processor
    /// counts as a stall.
    #[must_use]
    pub fn knows_stolen_time(&self) -> bool {
        self.steal
    }

    /// Begins a window: the vCPUs drop the stalls before it.
    ///
    /// # Errors
    /// A vCPU has failed.
    pub fn open_window(&self) -> Result<(), GuestError> {
        self.endless.check()?;
        let number = self.windows.fetch_add(1, Ordering::Relaxed) + 1;
        let low = &self.endless.bare.low;
        Ok(low.set_control(Control::Window, number)?)
    }

    /// Waits until each vCPU has recorded its stalls up to now, and returns the longest of each in the window,
    /// by vCPU number.
    ///
    /// # Errors
    /// A vCPU makes no step, or has failed.
    pub fn close_window(&self) -> Result<Vec<Duration>, GuestError> {
        // The present step may have read its clock before this moment; the next one has not.
        self.endless.await_each(Word::Steps, 2)?;
        let low = &self.endless.bare.low;
        let longest = |vcpu| Ok(Duration::from_nanos(low.word(vcpu, Word::Longest)?));
        (0..self.config.vcpus).map(longest).collect()
    }

    /// Clock readings of all vCPUs so far: the work that the guest does.
    ///
    /// # Errors
    /// The host cannot read the guest's memory.
    pub fn steps(&self) -> Result<u64, GuestError> {
        Ok(self.endless.bare.sum(Word::Steps)?)
    }

    /// Memory accesses so far that exited because they were in no slot.
    #[must_use]
    pub fn holes(&self) -> u64 {
        self.holes.load(Ordering::Relaxed)
    }

    /// Waits until each vCPU has walked all of its pages at least once from now on.
    ///
    /// # Errors
    /// A vCPU makes no step, or has failed.
    pub fn await_round(&self) -> Result<(), GuestError> {
        self.endless.await_each(Word::Rounds, 2)
    }

    /// Compares all memory with what it should hold when the vCPUs have ended: each page's address, and in
    /// the walked pages each vCPU's last round.
    fn verify(&self) -> Result<(), GuestError> {
        let low = &self.endless.bare.low;
        let rounds: Vec<u64> = (0..self.config.vcpus)
            .map(|vcpu| Ok(low.word(vcpu, Word::Rounds)? * u64::from(self.config.touch)))
            .collect::<Result<_, MachineError>>()?;
        // By page: a look at a hash table for each word takes a software CPU seconds.
        let pages = usize::try_from(self.config.data_bytes / PAGE).unwrap_or(0);
        let mut walked = vec![false; pages];
        for page in &self.config.walk {
            let page = usize::try_from(page.0).ok();
            if let Some(is_walked) = page.and_then(|page| walked.get_mut(page)) {
                *is_walked = true;
            }
        }
        let is_walked = |gpa: u64| {
            let page = usize::try_from((gpa - DATA_GPA) / PAGE).ok();
            page.and_then(|page| walked.get(page)).is_some_and(|is| *is)
        };
        let word = |gpa: u64| match gpa % PAGE {
            0 => gpa,
            offset if is_walked(gpa) => {
                let vcpu = usize::try_from(offset / 8 - 1).unwrap_or(usize::MAX);
                rounds.get(vcpu).copied().unwrap_or(0)
            }
            _ => 0,
        };
        verify(self.data(), |_| false, word)?;
        Ok(())
    }
}

/// Sets up a vCPU's walk; whether KVM reports the time that is stolen from it.
fn prepare(bare: &Bare, vcpu: &Vcpu, config: &WalkersConfig) -> Result<bool, MachineError> {
    let (id, walk) = (vcpu.id(), &config.walk);
    let table = bare.low.layout.table(id.into());
    let first = id as usize * walk.len() / config.vcpus.max(1) as usize;
    let pages = walk.iter().copied().cycle().skip(first).take(walk.len());
    let pages: Vec<u64> = pages.map(gpa_of).collect();
    bare.low.write_words(table, &pages)?;
    let tsc_khz = u64::from(arch::tsc_khz(vcpu)?).max(1);
    let words = [
        (Word::Table, table),
        (Word::Count, pages.len() as u64),
        (Word::Column, 8 * (1 + u64::from(id))),
        (Word::Scale, (1_000_000 << 32) / tsc_khz),
        (Word::Touch, u64::from(config.touch)),
    ];
    bare.low.set(id, &words)?;
    arch::enable_steal_time(vcpu, bare.low.gpa(id, Word::Steal))
}

impl VcpuHooks for Walkers {
    fn on_exit(&self, vcpu: &mut PoolVcpu<'_>, exit: Exit) -> Result<Next, HookError> {
        let Exit::Mmio { gpa, write, .. } = exit else {
            return self.endless.report(vcpu, exit);
        };
        self.holes.fetch_add(1, Ordering::Relaxed);
        let vcpu = vcpu.id();
        self.first_hole.get_or_init(|| Hole { vcpu, gpa, write });
        Ok(Next::Enter)
    }
}

impl Walking {
    /// Lets every vCPU walk another round without disturbance, stops them and verifies memory. Returns the
    /// first hole, if there was one: an access in a hole reads anything and writes nothing, so a guest may
    /// find as many wrong words as there were holes.
    ///
    /// # Errors
    /// A vCPU failed or found wrong words, or memory does not hold what it should.
    pub fn end(self) -> Result<Option<Hole>, GuestError> {
        let Self { walkers, pool } = self;
        walkers.await_round()?;
        walkers.endless.stop(pool)?;
        let bare = &walkers.endless.bare;
        if bare.sum(Word::Wrong)? > walkers.holes() {
            (0..bare.count).try_for_each(|vcpu| bare.check_words(vcpu))?;
        }
        walkers.verify()?;
        Ok(walkers.first_hole.get().copied())
    }
}

fn gpa_of(page: PageIndex) -> u64 {
    DATA_GPA + page.0 * PAGE
}

/// Makes all pages present and writes each one's address to its start.
fn fill(data: &Region) -> Result<(), MachineError> {
    data.fault_in(data.all_pages(), FaultInAccess::Write)
        .map_err(MachineError::Populate)?;
    for page in data.all_pages().iter() {
        let gpa = gpa_of(page);
        data.write_service(page, 0, &gpa.to_le_bytes())
            .map_err(MachineError::access(gpa))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_vcpus_than_words_in_a_page_are_refused() {
        let config = WalkersConfig {
            vcpus: MAX_WALKERS + 1,
            data_bytes: PAGE,
            walk: vec![PageIndex(0)],
            touch: true,
            stall_timeout: Duration::from_secs(60),
        };
        let error = Walkers::new(config).expect_err("each vCPU has a word in each page");
        assert_eq!(error.to_string(), "512 vCPUs: there can be at most 511");
    }
}
