//! A machine whose vCPUs cycle through their memory for ever: read a word, compare it, write the next
//! number, each vCPU in an equal part of memory. For what happens to memory meanwhile, errors above all.
//!
//! Memory that a vCPU has lost (an exit that says that it is poisoned) is left out from then on. How
//! much that is, is tried out and not worked out: the host reads around the place, in steps of 4 KiB
//! within the same 2 MiB, and of 2 MiB beyond.

mod code;

use std::sync::Arc;
use std::time::Duration;

use pagetide_kvm::{Exit, FaultExit, StatsError};
use pagetide_memory::{GuestAddress, PageIndex, PageSize, Region};
use pagetide_vmm::{Handled, HookError, Next, PoolVcpu, UnexpectedFault, VcpuHooks};

use crate::arch;
use crate::config::ConfigError;
use crate::endless::{self, Endless, EndlessError, Payload, Running, compare_words};
use crate::error::MachineError;
use crate::layout::{DATA_GPA, PAGE};
use crate::stage_two::StageTwo;
use code::Word;

/// The number of the round is above these bits of a word, which hold its address.
const ROUND_SHIFT: u32 = 48;
const PAGES_PER_2M: u64 = PageSize::Size2M.bytes() / PAGE;

/// What the cyclers' machine is to be.
#[derive(Clone, Copy, Debug)]
pub struct CyclerConfig {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// How long a vCPU may make no step before that is a failure.
    pub stall_timeout: Duration,
}

/// The machine. Its vCPUs cycle from [`Cycler::start`] on.
#[derive(Debug)]
pub struct Cycler {
    config: CyclerConfig,
    endless: Endless,
    /// Of each vCPU; pages are 4 KiB here whatever the backing.
    pages: u64,
}

/// vCPUs that cycle. Dropping it stops them.
#[derive(Debug)]
pub struct Cycling(Running<Cycler>);

impl Cycler {
    /// Builds it; `data` is at [`DATA_GPA`], a multiple of 4 KiB for each vCPU, and gets its content
    /// here.
    ///
    /// # Errors
    /// [`MachineError`] says what is missing or cannot be.
    pub fn new(config: CyclerConfig, data: Arc<Region>) -> Result<Self, MachineError> {
        let CyclerConfig {
            vcpus,
            stall_timeout,
        } = config;
        let per_vcpu = data.bytes() / u64::from(vcpus.max(1));
        if data.gpa() != GuestAddress(DATA_GPA) || !per_vcpu.is_multiple_of(PAGE) {
            return Err(ConfigError::WrongRegion {
                gpa: data.gpa(),
                bytes: data.bytes(),
                backing: data.backing(),
                needed_bytes: per_vcpu.next_multiple_of(PAGE) * u64::from(vcpus),
                needed_backing: data.backing(),
            }
            .into());
        }
        fill(&data)?;
        let pages = per_vcpu / PAGE;
        let endless = Endless::new(vcpus, data, code::code(), pages, stall_timeout)?;
        for vcpu in 0..vcpus {
            let words = [
                (endless::Word::Table as u64, endless.table(vcpu)),
                (endless::Word::Count as u64, pages),
                (Word::First as u64, DATA_GPA + u64::from(vcpu) * per_vcpu),
            ];
            for (word, value) in words {
                endless.set_word(vcpu, word, value)?;
            }
        }
        Ok(Self {
            config,
            endless,
            pages,
        })
    }

    /// Starts a thread for each vCPU, and waits until each has been round its part.
    ///
    /// # Errors
    /// A thread cannot be started, or a vCPU gets nowhere.
    pub fn start(self: &Arc<Self>) -> Result<Cycling, EndlessError> {
        Running::start(self).map(Cycling)
    }

    /// Words of 64 bits that all vCPUs have read, compared and written so far.
    ///
    /// # Errors
    /// A vCPU's thread has failed.
    pub fn words(&self) -> Result<u64, EndlessError> {
        self.endless.check()?;
        self.endless.sum(Word::Words as u64)
    }

    /// Waits until each vCPU has been at all of its pages from now on.
    ///
    /// # Errors
    /// A vCPU gets nowhere, or its thread has failed.
    pub fn await_round(&self) -> Result<(), EndlessError> {
        self.endless.await_each(endless::Word::Rounds as u64, 2)
    }

    /// What KVM counts of the stage-2 mappings.
    ///
    /// # Errors
    /// KVM does not say.
    pub fn stage_two(&self) -> Result<StageTwo, StatsError> {
        self.endless.stage_two()
    }

    /// Bytes of data memory that vCPUs have lost so far.
    ///
    /// # Errors
    /// Low memory cannot be read.
    pub fn lost_bytes(&self) -> Result<u64, MachineError> {
        let mut lost = 0;
        for vcpu in 0..self.config.vcpus {
            let marks = self.marks(vcpu)?;
            lost += marks.iter().filter(|mark| **mark != 0).count() as u64;
        }
        Ok(lost * PAGE)
    }

    /// A vCPU's table: a byte for each page of its part.
    fn marks(&self, vcpu: u32) -> Result<Vec<u8>, MachineError> {
        let mut marks = vec![0; usize::try_from(self.pages).unwrap_or(0)];
        self.endless
            .low()
            .read(self.endless.table(vcpu), &mut marks)?;
        Ok(marks)
    }

    /// Marks a page, counted from the start of data memory, as lost.
    fn mark(&self, page: u64) -> Result<(), MachineError> {
        let vcpu = u32::try_from(page / self.pages).unwrap_or(u32::MAX);
        let at = self.endless.table(vcpu) + page % self.pages;
        self.endless.low().write(at, &[1])
    }

    /// Whether the host can read a page, counted from the start of data memory.
    fn is_there(&self, page: u64) -> bool {
        let data = self.endless.data();
        let (index, offset) = place(data, page);
        data.read_guest(index, offset, &mut [0; 8]).is_ok()
    }

    /// Marks the page at `gpa` as lost, and what is lost with it.
    fn lose(&self, gpa: GuestAddress) -> Result<(), MachineError> {
        let page = (gpa.0 - DATA_GPA) / PAGE;
        self.mark(page)?;
        let data = self.endless.data();
        let backing_pages = data.page_size().bytes() / PAGE;
        if backing_pages == 1 {
            return Ok(());
        }
        let first = page - page % backing_pages;
        let near = page - page % PAGES_PER_2M;
        for start in
            (first..first + backing_pages).step_by(usize::try_from(PAGES_PER_2M).unwrap_or(1))
        {
            let all = start..start + PAGES_PER_2M;
            if start == near {
                all.filter(|&page| !self.is_there(page))
                    .try_for_each(|page| self.mark(page))?;
            } else if !self.is_there(start) {
                all.into_iter().try_for_each(|page| self.mark(page))?;
            }
        }
        Ok(())
    }

    /// Compares all of memory with what the vCPUs wrote, but for what is lost and for pages that `skip`
    /// names, by their gpas.
    fn verify(&self, skip: &dyn Fn(GuestAddress) -> bool) -> Result<(), EndlessError> {
        let data = self.endless.data();
        let mut found = vec![0; usize::try_from(PAGE).unwrap_or(0)];
        for vcpu in 0..self.config.vcpus {
            let rounds = self.endless.word(vcpu, endless::Word::Rounds as u64)?;
            let next = self.endless.word(vcpu, Word::Page as u64)?;
            let marks = self.marks(vcpu)?;
            for (page, _) in (0..).zip(marks).filter(|(_, mark)| *mark == 0) {
                let global = u64::from(vcpu) * self.pages + page;
                let gpa = DATA_GPA + global * PAGE;
                if skip(GuestAddress(gpa)) {
                    continue;
                }
                let rounds = rounds + u64::from(page < next);
                let (index, offset) = place(data, global);
                data.read_service(index, offset, &mut found)?;
                compare_words(gpa, &found, |gpa| gpa | (rounds << ROUND_SHIFT))?;
            }
        }
        Ok(())
    }
}

impl Payload for Cycler {
    fn endless(&self) -> &Endless {
        &self.endless
    }
}

impl VcpuHooks for Cycler {
    /// A vCPU that has lost the memory under its access goes on with the next page.
    fn on_fault(&self, vcpu: &mut PoolVcpu<'_>, fault: FaultExit) -> Result<Handled, HookError> {
        if !fault.poisoned {
            return Err(UnexpectedFault(fault).into());
        }
        let (gpa, rip) = (fault.gpa, vcpu.rip());
        let in_data = self.endless.data().page_of_gpa(gpa).is_some();
        if !in_data || !rip.is_some_and(|rip| code::touches().contains(&rip)) {
            let vcpu = vcpu.id();
            return Err(EndlessError::UnexpectedLoss { vcpu, gpa, rip }.into());
        }
        let lost = self.lose(gpa);
        lost.and_then(|()| arch::enter_at(vcpu, code::after_loss()))
            .map_err(EndlessError::from)?;
        Ok(Handled::Retry)
    }

    fn on_exit(&self, vcpu: &mut PoolVcpu<'_>, exit: Exit) -> Result<Next, HookError> {
        self.endless.report(vcpu, exit)
    }
}

impl Cycling {
    /// Ends the vCPUs and compares memory with what they wrote, but for what is lost and for pages that
    /// `skip` names, by their gpas.
    ///
    /// # Errors
    /// A vCPU failed or found wrong words, or memory does not hold what it should.
    pub fn end(self, skip: &dyn Fn(GuestAddress) -> bool) -> Result<(), EndlessError> {
        let cycler = self.0.stop()?;
        match cycler.endless.wrong_words()? {
            (_, Some(wrong)) => Err(wrong),
            (_, None) => cycler.verify(skip),
        }
    }
}

/// Where a page of 4 KiB, counted from the start, is in a region: page of the backing, and offset.
fn place(data: &Region, page: u64) -> (PageIndex, u64) {
    let (bytes, backing) = (page * PAGE, data.page_size().bytes());
    (PageIndex(bytes / backing), bytes % backing)
}

/// Makes all pages present and writes its own address to each word.
fn fill(data: &Region) -> Result<(), MachineError> {
    let mut words = Vec::new();
    for page in 0..data.bytes() / PAGE {
        let gpa = DATA_GPA + page * PAGE;
        words.clear();
        words.extend((gpa..gpa + PAGE).step_by(8).flat_map(u64::to_le_bytes));
        let (index, offset) = place(data, page);
        data.write_service(index, offset, &words)
            .map_err(|source| MachineError::AccessLowMemory {
                gpa: GuestAddress(gpa),
                source,
            })?;
    }
    data.fault_in(data.all_pages(), pagetide_memory::FaultInAccess::Write)
        .map_err(MachineError::PopulateLowMemory)
}
