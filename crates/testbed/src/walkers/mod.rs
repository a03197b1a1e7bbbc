//! A machine whose vCPUs walk their memory for ever, check it, and measure how long each of them
//! was kept from going on: for what changes a VM's memory slots meanwhile.
//!
//! *Kept* is what a guest sees: the longest stretch between two readings of the clock, less the time
//! that was stolen in it, which is the time that the vCPU's thread could have run and had no
//! processor (KVM's steal time). A vCPU that sleeps, because somebody stops it, is kept; one that
//! waits for its turn on a busy host is not. So the figure means the same for all ways of changing
//! slots, and with more vCPUs than processors. `docs/design/kept.md` has the reasoning.

mod code;
mod error;
mod threads;

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_kvm::{Kvm, SlotFlags, Vcpu, VcpuKick, Vm};
use pagetide_memory::{Backing, GuestAddress, PageIndex, PopulateAccess, Region};

use crate::arch;
use crate::config::MachineConfig;
use crate::error::MachineError;
use crate::layout::{DATA_GPA, DATA_SLOT, LOW_SLOT, PAGE};
use crate::low_memory::LowMemory;
use code::{CODE, CONTROL, Control, Word};

pub use error::WalkError;
pub use threads::{Hole, Walking};

/// Largest number of vCPUs: each has a word of its own in every page.
pub const MAX_WALKERS: u32 = 511;
/// Most pages of a walk: a page of addresses.
pub const MAX_WALK: usize = 512;

/// What the walkers' machine is to be.
#[derive(Clone, Debug)]
pub struct WalkersConfig {
    /// Number of vCPUs, from 1 to [`MAX_WALKERS`].
    pub vcpus: u32,
    /// Bytes of data memory, from [`DATA_GPA`] on; shmem, one slot ([`DATA_SLOT`]).
    pub data_bytes: u64,
    /// The pages of data memory that each vCPU walks, from 1 to [`MAX_WALK`]; each vCPU begins at
    /// another one. These stay writable whatever happens to the slots.
    pub walk: Vec<PageIndex>,
    /// Whether the vCPUs touch those pages; else they only read the clock.
    pub touch: bool,
    /// How long a vCPU may make no step before that is a failure.
    pub stall_timeout: Duration,
}

/// The machine. Its vCPUs walk from [`Walkers::start`] on.
#[derive(Debug)]
pub struct Walkers {
    config: WalkersConfig,
    vm: Vm,
    low: LowMemory,
    data: Arc<Region>,
    steal: bool,
    /// None once they walk.
    vcpus: Mutex<Vec<Vcpu>>,
    kicks: Vec<VcpuKick>,
    stopped: AtomicBool,
    windows: AtomicU64,
    seen: threads::Seen,
}

impl Walkers {
    /// Builds it; memory is present and holds its own addresses.
    ///
    /// # Errors
    /// [`MachineError`] says what is missing or cannot be.
    pub fn new(config: WalkersConfig) -> Result<Self, MachineError> {
        arch::check()?;
        let kvm = Kvm::open()?;
        let vm = kvm.create_vm()?;
        let platform = arch::Platform::new(&kvm, &vm)?;
        let max_vcpus = u32::try_from(kvm.max_vcpus()).unwrap_or(u32::MAX);
        // The table of pages takes the place of a log of as many 4-byte entries as a page has.
        let layout = MachineConfig {
            stride_bytes: Some(config.data_bytes / (PAGE / 4)),
            ..MachineConfig::new(1, config.data_bytes)
        }
        .layout(max_vcpus, platform.gpa_limit())?;
        let log_entries = layout.log_bytes() / 4;
        let layout = crate::layout::Layout::new(config.vcpus, config.data_bytes, log_entries)
            .ok_or(crate::config::ConfigError::LogTooLarge {
                touches: log_entries,
                vcpus: config.vcpus,
            })?;
        let low = LowMemory::new(layout)?;
        arch::write_code(&low)?;
        low.write(CODE, code::code())?;
        let data = Region::new(GuestAddress(DATA_GPA), config.data_bytes, Backing::Shmem)
            .map_err(MachineError::Data)?;
        fill(&data)?;
        let data = Arc::new(data);
        vm.add_region(LOW_SLOT, Arc::clone(low.region()), SlotFlags::default())?;
        vm.add_region(DATA_SLOT, Arc::clone(&data), SlotFlags::default())?;
        let mut vcpus = Vec::new();
        for id in 0..config.vcpus {
            let vcpu = vm.create_vcpu(id)?;
            platform.prepare(&vcpu)?;
            arch::reset(&vcpu, low.layout())?;
            vcpus.push(vcpu);
        }
        let mut walkers = Self {
            seen: threads::Seen::default(),
            kicks: vcpus.iter().map(Vcpu::kick_handle).collect(),
            stopped: AtomicBool::new(false),
            windows: AtomicU64::new(0),
            steal: true,
            config,
            vm,
            low,
            data,
            vcpus: Mutex::default(),
        };
        for vcpu in &vcpus {
            walkers.steal &= walkers.prepare(vcpu)?;
        }
        walkers.vcpus = Mutex::new(vcpus);
        Ok(walkers)
    }

    /// Puts a vCPU at the start of its walk; whether its guest is told how much time is stolen.
    fn prepare(&self, vcpu: &Vcpu) -> Result<bool, MachineError> {
        let id = vcpu.id();
        let table = self.low.layout().log(id.into());
        let walk = &self.config.walk;
        let first = usize::try_from(id).unwrap_or(0) * walk.len()
            / usize::try_from(self.config.vcpus).unwrap_or(1).max(1);
        let pages = walk.iter().cycle().skip(first).take(walk.len());
        let pages: Vec<u64> = pages.map(|page| DATA_GPA + page.0 * PAGE).collect();
        self.low.write_words(table, &pages)?;
        let tsc_khz = u64::from(arch::tsc_khz(vcpu)?).max(1);
        let words = [
            (Word::Table, table),
            (Word::Count, pages.len() as u64),
            (Word::Column, column(id)),
            (Word::Scale, (1_000_000 << 32) / tsc_khz),
            (Word::Touch, u64::from(self.config.touch)),
        ];
        for (word, value) in words {
            self.low.write_words(self.gpa(id, word), &[value])?;
        }
        arch::enter_at(vcpu, CODE)?;
        arch::tell_steal_time(vcpu, self.gpa(id, Word::Steal))
    }

    /// The VM, whose slots may be changed as long as the walked pages stay where they are.
    #[must_use]
    pub fn vm(&self) -> &Vm {
        &self.vm
    }

    /// The data memory.
    #[must_use]
    pub fn data(&self) -> &Arc<Region> {
        &self.data
    }

    /// Whether stolen time is known and taken off. If not, time that a vCPU waits for a processor
    /// counts as time that it was kept.
    #[must_use]
    pub fn knows_stolen_time(&self) -> bool {
        self.steal
    }

    fn gpa(&self, vcpu: u32, word: Word) -> u64 {
        self.low.layout().params(vcpu.into()) + word as u64
    }

    fn word(&self, vcpu: u32, word: Word) -> Result<u64, WalkError> {
        let gpa = self.gpa(vcpu, word);
        let mut bytes = [0; 8];
        self.low
            .region()
            .read_service(PageIndex(gpa / PAGE), gpa % PAGE, &mut bytes)
            .map_err(|source| MachineError::AccessLowMemory {
                gpa: GuestAddress(gpa),
                source,
            })?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn control(&self, word: Control, value: u64) -> Result<(), WalkError> {
        Ok(self.low.write_words(CONTROL + word as u64, &[value])?)
    }

    /// Begins a window: vCPUs forget how long they were kept before.
    ///
    /// # Errors
    /// A vCPU's thread has failed.
    pub fn open_window(&self) -> Result<(), WalkError> {
        self.seen.check()?;
        let number = self.windows.fetch_add(1, Ordering::Relaxed) + 1;
        self.control(Control::Window, number)
    }

    /// Waits until each vCPU has noted how long it was kept up to now, and returns the longest time
    /// of the window.
    ///
    /// # Errors
    /// A vCPU makes no step, or its thread has failed.
    pub fn close_window(&self) -> Result<Duration, WalkError> {
        // The step that is under way may have read its clock before this moment; the next has not.
        self.await_each(Word::Steps, 2)?;
        let mut longest = 0;
        for vcpu in 0..self.config.vcpus {
            longest = longest.max(self.word(vcpu, Word::Longest)?);
        }
        Ok(Duration::from_nanos(longest))
    }

    /// Clock readings of all vCPUs so far: the work that the guest gets done.
    ///
    /// # Errors
    /// Low memory cannot be read.
    pub fn steps(&self) -> Result<u64, WalkError> {
        (0..self.config.vcpus).try_fold(0, |sum, vcpu| Ok(sum + self.word(vcpu, Word::Steps)?))
    }

    /// Accesses to memory so far that left the guest because no slot was there.
    #[must_use]
    pub fn holes(&self) -> u64 {
        self.seen.holes()
    }

    /// Waits until each vCPU has walked all of its pages at least once from now on.
    ///
    /// # Errors
    /// A vCPU makes no step, or its thread has failed.
    pub fn await_round(&self) -> Result<(), WalkError> {
        self.await_each(Word::Rounds, 2)
    }

    fn await_each(&self, word: Word, more: u64) -> Result<(), WalkError> {
        let vcpus = 0..self.config.vcpus;
        let wanted: Vec<u64> = vcpus
            .map(|vcpu| Ok(self.word(vcpu, word)? + more))
            .collect::<Result<_, WalkError>>()?;
        let mut moved = Instant::now();
        let mut last_steps = 0;
        let mut pause = Duration::from_micros(20);
        for (vcpu, wanted) in (0..).zip(wanted) {
            while self.word(vcpu, word)? < wanted {
                self.seen.check()?;
                let steps = self.word(vcpu, Word::Steps)?;
                if steps != last_steps {
                    (last_steps, moved) = (steps, Instant::now());
                }
                if moved.elapsed() > self.config.stall_timeout {
                    let limit = self.config.stall_timeout;
                    return Err(WalkError::Stalled {
                        vcpu,
                        limit,
                        rip: None,
                    });
                }
                thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(1));
            }
            moved = Instant::now();
        }
        Ok(())
    }

    /// Compares all of memory with what it should hold when the vCPUs have ended: each page's
    /// address, and in the walked pages each vCPU's last round.
    fn verify(&self) -> Result<(), WalkError> {
        let mut expected = vec![0; usize::try_from(PAGE).unwrap_or(0)];
        let mut found = expected.clone();
        let mut rounds = Vec::new();
        for vcpu in 0..self.config.vcpus {
            rounds.push(self.word(vcpu, Word::Rounds)? * u64::from(self.config.touch));
        }
        let walked: std::collections::HashSet<u64> =
            self.config.walk.iter().map(|page| page.0).collect();
        for page in self.data.all_pages().iter() {
            expected.fill(0);
            let gpa = DATA_GPA + page.0 * PAGE;
            let words = expected.as_chunks_mut::<8>().0;
            words[0] = gpa.to_le_bytes();
            if walked.contains(&page.0) {
                for (word, rounds) in words[1..].iter_mut().zip(&rounds) {
                    *word = rounds.to_le_bytes();
                }
            }
            self.data.read_service(page, 0, &mut found)?;
            let pairs = expected
                .as_chunks::<8>()
                .0
                .iter()
                .zip(found.as_chunks::<8>().0);
            for (offset, (expected, found)) in (0..).step_by(8).zip(pairs) {
                if expected != found {
                    return Err(WalkError::WrongEnd {
                        gpa: GuestAddress(gpa + offset),
                        found: u64::from_le_bytes(*found),
                        expected: u64::from_le_bytes(*expected),
                    });
                }
            }
        }
        Ok(())
    }
}

/// The offset of a vCPU's own word in each page.
fn column(vcpu: u32) -> u64 {
    8 * (1 + u64::from(vcpu))
}

/// Makes all pages present and writes each one's address to its start.
fn fill(data: &Region) -> Result<(), MachineError> {
    data.populate(data.all_pages(), PopulateAccess::Write)
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
