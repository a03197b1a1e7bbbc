//! A machine whose vCPUs cycle through their memory until they are stopped: each reads a word, compares it and
//! writes the next number, in an equal part of memory. For memory that changes under a guest, errors above all.
//!
//! A vCPU skips memory that it has lost (an exit for poisoned memory). The host finds out by trial how much is
//! lost: it reads around the address, in steps of 4 KiB within the same 2 MiB, and of 2 MiB beyond.

use std::sync::Arc;
use std::time::Duration;

use pagetide_kvm::{Exit, FaultExit, StatsError};
use pagetide_memory::{FaultInAccess, GuestAddress, PageSize, Region};
use pagetide_vmm::{Handled, HookError, Next, PoolVcpu, UnexpectedFault, VcpuHooks, VcpuPool};

use crate::arch;
use crate::config::ConfigError;
use crate::endless::Endless;
use crate::error::{GuestError, MachineError};
use crate::layout::{DATA_GPA, PAGE, PAYLOAD};
use crate::payload::{Word, cycle, cycler_touches};
use crate::stage_two::StageTwo;
use crate::verify::{place, verify};

/// The number of the round is above these bits of a word, which hold its address.
const ROUND_SHIFT: u32 = 48;
const TWO_MIB: u64 = PageSize::Size2M.bytes();

/// The configuration of a machine of cyclers.
#[derive(Clone, Copy, Debug)]
pub struct CyclerConfig {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// How long a vCPU may take for a step before the run fails.
    pub stall_timeout: Duration,
}

/// The machine. Its vCPUs cycle from [`Cycler::start`] on.
#[derive(Debug)]
pub struct Cycler {
    endless: Endless,
    /// 4 KiB pages of each vCPU, whatever the backing's pages.
    pages: u64,
}

/// vCPUs that cycle. Dropping it stops them.
#[derive(Debug)]
pub struct Cycling {
    cycler: Arc<Cycler>,
    pool: VcpuPool,
}

impl Cycler {
    /// Makes the machine over `data`, which is at [`DATA_GPA`], has a multiple of 4 KiB for each vCPU, and
    /// gets its content here.
    ///
    /// # Errors
    /// See [`MachineError`].
    pub fn new(config: CyclerConfig, data: Arc<Region>) -> Result<Self, MachineError> {
        let vcpus = u64::from(config.vcpus.max(1));
        let per_vcpu = data.bytes() / vcpus;
        if data.gpa() != GuestAddress(DATA_GPA) || !per_vcpu.is_multiple_of(PAGE) {
            let needed_bytes = per_vcpu.next_multiple_of(PAGE) * vcpus;
            return Err(ConfigError::wrong_region(&data, needed_bytes, data.backing()).into());
        }
        fill(&data)?;
        let (pages, timeout) = (per_vcpu / PAGE, config.stall_timeout);
        let endless = Endless::new(
            config.vcpus,
            data,
            cycle::code(),
            pages,
            timeout,
            |bare, vcpu| {
                let id = vcpu.id();
                let words = [
                    (Word::Table, bare.low.layout.table(id.into())),
                    (Word::Count, pages),
                    (Word::First, DATA_GPA + u64::from(id) * per_vcpu),
                ];
                bare.low.set(id, &words)
            },
        )?;
        Ok(Self { endless, pages })
    }

    /// Starts a thread for each vCPU, and waits until each has completed a round.
    ///
    /// # Errors
    /// A thread cannot be started, or a vCPU makes no progress.
    pub fn start(self: &Arc<Self>) -> Result<Cycling, GuestError> {
        let cycler = Arc::clone(self);
        let pool = self.endless.start(cycler.clone())?;
        Ok(Cycling { cycler, pool })
    }

    /// Words of 64 bits that all vCPUs have read, compared and written so far.
    ///
    /// # Errors
    /// A vCPU has failed.
    pub fn words(&self) -> Result<u64, GuestError> {
        self.endless.check()?;
        Ok(self.endless.bare.sum(Word::Words)?)
    }

    /// Waits until each vCPU has touched all of its pages from now on.
    ///
    /// # Errors
    /// A vCPU makes no progress, or has failed.
    pub fn await_round(&self) -> Result<(), GuestError> {
        self.endless.await_each(Word::Rounds, 2)
    }

    /// KVM's counts of stage-2 mappings, without those of vCPUs.
    ///
    /// # Errors
    /// KVM's statistics cannot be read.
    pub fn stage_two(&self) -> Result<StageTwo, StatsError> {
        StageTwo::read(&self.endless.bare.vm, [].into_iter())
    }

    /// Bytes of data memory that vCPUs have lost so far.
    ///
    /// # Errors
    /// The host cannot read the guest's memory.
    pub fn lost_bytes(&self) -> Result<u64, MachineError> {
        let marks = self.marks()?;
        Ok(marks.iter().filter(|mark| **mark != 0).count() as u64 * PAGE)
    }

    /// The tables of all vCPUs: a byte for each page, not 0 if it is lost.
    fn marks(&self) -> Result<Vec<u8>, MachineError> {
        let bare = &self.endless.bare;
        let mut marks = Vec::new();
        for vcpu in 0..bare.count {
            let mut table = vec![0; usize::try_from(self.pages).unwrap_or(0)];
            bare.low
                .read(bare.low.layout.table(vcpu.into()), &mut table)?;
            marks.append(&mut table);
        }
        Ok(marks)
    }

    /// Marks the page at a gpa as lost.
    fn mark(&self, gpa: u64) -> Result<(), MachineError> {
        let (vcpu, page) = self.part(gpa);
        let low = &self.endless.bare.low;
        low.write(low.layout.table(vcpu) + page, &[1])
    }

    /// The vCPU that has the page at a gpa, and the number of the page in its part.
    fn part(&self, gpa: u64) -> (u64, u64) {
        let page = (gpa - DATA_GPA) / PAGE;
        (page / self.pages, page % self.pages)
    }

    /// Marks the page at a gpa as lost, and all pages that were lost with it.
    fn lose(&self, gpa: u64) -> Result<(), MachineError> {
        let gpa = gpa - gpa % PAGE;
        self.mark(gpa)?;
        let data = &self.endless.bare.data;
        let backing = data.page_size().bytes();
        if backing == PAGE {
            return Ok(());
        }
        let can_read = |gpa| {
            let (page, offset) = place(data, gpa);
            data.read_guest(page, offset, &mut [0; 8]).is_ok()
        };
        let (first, near) = (gpa - (gpa - DATA_GPA) % backing, gpa - gpa % TWO_MIB);
        for start in (first..first + backing).step_by(usize::try_from(TWO_MIB).unwrap_or(1)) {
            let mut pages = (start..start + TWO_MIB).step_by(usize::try_from(PAGE).unwrap_or(1));
            if start == near {
                pages
                    .filter(|&gpa| !can_read(gpa))
                    .try_for_each(|gpa| self.mark(gpa))?;
            } else if !can_read(start) {
                pages.try_for_each(|gpa| self.mark(gpa))?;
            }
        }
        Ok(())
    }

    /// Compares all memory with what the vCPUs wrote, but for lost pages and those that `skip` selects.
    fn verify(&self, skip: &dyn Fn(GuestAddress) -> bool) -> Result<(), GuestError> {
        let low = &self.endless.bare.low;
        let marks = self.marks()?;
        let rounds: Vec<(u64, u64)> = (0..self.endless.bare.count)
            .map(|vcpu| Ok((low.word(vcpu, Word::Rounds)?, low.word(vcpu, Word::Page)?)))
            .collect::<Result<_, MachineError>>()?;
        let is_lost = |gpa| {
            let page = usize::try_from((gpa - DATA_GPA) / PAGE).unwrap_or(usize::MAX);
            marks.get(page).is_none_or(|mark| *mark != 0)
        };
        let word = |gpa| {
            let (vcpu, page) = self.part(gpa);
            let vcpu = usize::try_from(vcpu).unwrap_or(usize::MAX);
            let (rounds, next) = rounds.get(vcpu).copied().unwrap_or_default();
            gpa | ((rounds + u64::from(page < next)) << ROUND_SHIFT)
        };
        let skip = |gpa| is_lost(gpa) || skip(GuestAddress(gpa));
        verify(&self.endless.bare.data, skip, word)?;
        Ok(())
    }
}

impl VcpuHooks for Cycler {
    /// A vCPU that has lost the memory under its access continues with the next page.
    fn on_fault(&self, vcpu: &mut PoolVcpu<'_>, fault: FaultExit) -> Result<Handled, HookError> {
        if !fault.poisoned {
            return Err(UnexpectedFault(fault).into());
        }
        let (gpa, rip) = (fault.gpa, vcpu.rip());
        let in_data = self.endless.bare.data.page_of_gpa(gpa).is_some();
        let offset = rip.and_then(|rip| rip.checked_sub(PAYLOAD));
        if !in_data || !offset.is_some_and(|offset| cycler_touches().contains(&offset)) {
            let vcpu = vcpu.id();
            return Err(GuestError::UnexpectedLoss { vcpu, gpa, rip }.into());
        }
        let lost = self.lose(gpa.0);
        lost.and_then(|()| arch::enter_at(vcpu, PAYLOAD + cycle::after_loss()))
            .map_err(GuestError::from)?;
        Ok(Handled::Retry)
    }

    fn on_exit(&self, vcpu: &mut PoolVcpu<'_>, exit: Exit) -> Result<Next, HookError> {
        self.endless.report(vcpu, exit)
    }
}

impl Cycling {
    /// Stops the vCPUs and compares memory with what they wrote, but for lost pages and those that `skip`
    /// selects by their gpas.
    ///
    /// # Errors
    /// A vCPU failed or found wrong words, or memory does not hold what it should.
    pub fn end(self, skip: &dyn Fn(GuestAddress) -> bool) -> Result<(), GuestError> {
        let Self { cycler, pool } = self;
        cycler.endless.stop(pool)?;
        let bare = &cycler.endless.bare;
        (0..bare.count).try_for_each(|vcpu| bare.check_words(vcpu))?;
        cycler.verify(skip)
    }
}

/// Makes all pages present and writes its own address to each word.
fn fill(data: &Region) -> Result<(), MachineError> {
    let range = data.range();
    for gpa in (range.start().0..range.end().0).step_by(usize::try_from(PAGE).unwrap_or(1)) {
        let words = (gpa..gpa + PAGE).step_by(8).flat_map(u64::to_le_bytes);
        let (page, offset) = place(data, gpa);
        data.write_service(page, offset, &words.collect::<Vec<_>>())
            .map_err(MachineError::access(gpa))?;
    }
    data.fault_in(data.all_pages(), FaultInAccess::Write)
        .map_err(MachineError::Populate)
}
