//! A Linux guest whose memory comes in as it runs: kernel, initrd and boot data too.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

use pagetide_kvm::{SlotError, SlotFlags};
use pagetide_memory::GuestRange;
use pagetide_pager::{
    AddError, Contents, Delivery, Mode, Notice, Pager, Pool, PoolConfig, Prefetch, PrefetchConfig,
    ReaderConfig, Readers, RegionConfig, ServeError,
};

use crate::control::Stopper;
use crate::hooks::{HookError, VcpuHooks};
use crate::paging::Paging;

use super::balloon::whole_pages;
use super::config::LinuxConfig;
use super::content::{ContentError, ContentFile};
use super::error::LinuxError;
use super::machine::LinuxMachine;

/// Why a guest's memory cannot be paged in. Nothing ran.
#[derive(Debug, thiserror::Error)]
pub enum LinuxPagingError {
    /// No machine.
    #[error(transparent)]
    Machine(#[from] LinuxError),
    /// This kernel's vCPUs do not exit for absent memory.
    #[error(
        "this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT, with which vCPUs exit for absent memory; \
         userfaultfd works without it (uffd)"
    )]
    NoExits,
    /// The slots' flag was refused all the same.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The content file.
    #[error(transparent)]
    Content(#[from] ContentError),
    /// The pager cannot serve the guest's memory.
    #[error("memory of the guest cannot be paged")]
    Region(#[from] AddError),
    /// The pager cannot run.
    #[error("the pager cannot run")]
    Serve(#[from] ServeError),
}

/// What pages in the memory of a running Linux guest, from a [`ContentFile`]. Nothing of it is in
/// memory when the guest starts.
#[derive(Debug)]
pub struct LinuxPaging {
    pager: Arc<Pager>,
    paging: Arc<Paging>,
    readers: Readers,
    prefetch: Option<Prefetch>,
    discarded: Arc<AtomicU64>,
}

/// What was paged in, in pages of the backing's size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagedIn {
    /// All that there are.
    pub total: u64,
    /// Installed because a vCPU, or the kernel for it, touched them.
    pub by_fault: u64,
    /// Installed before that.
    pub by_prefetch: u64,
    /// How many of both were holes of the content file.
    pub zero: u64,
    /// Given up by the guest and discarded by the host.
    pub discarded: u64,
    /// Faults that came as exits of KVM_RUN.
    pub exits: u64,
    /// Faults that came as messages of a userfaultfd.
    pub messages: u64,
}

impl fmt::Display for PagedIn {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            total,
            by_fault,
            by_prefetch,
            zero,
            discarded,
            ..
        } = self;
        let present = by_fault + by_prefetch;
        write!(
            formatter,
            "{present} of {total} pages were paged in: {by_fault} by fault, {by_prefetch} by prefetch \
             ({zero} of them zero); the host discarded {discarded}"
        )
    }
}

impl LinuxPaging {
    /// Makes a machine as [`LinuxMachine::new`] does, and pages its memory in from `content` from its
    /// first instruction on. With [`Delivery::Exit`] vCPUs' own threads resolve their faults, which
    /// KVM_CAP_ABSENT_MAPPING_FAULT gates, and a userfaultfd only those of the kernel; with
    /// [`Delivery::Uffd`] it has all of them. With `prefetch` the rest comes in meanwhile.
    ///
    /// A content file that cannot be read any more ends the run as a failure.
    ///
    /// # Errors
    /// [`LinuxPagingError`]. A content file that was to be made is whole if it is there then, and can be
    /// used the next time.
    pub fn start(
        config: &LinuxConfig,
        delivery: Delivery,
        prefetch: bool,
        content: ContentFile,
    ) -> Result<(LinuxMachine, Self), LinuxPagingError> {
        let mut machine = LinuxMachine::build(config, None, Some(content))?;
        if delivery == Delivery::Exit {
            if !machine.vm().capabilities().absent_mapping_fault {
                return Err(LinuxPagingError::NoExits);
            }
            machine.set_slot_flags(SlotFlags {
                absent_mapping_fault: true,
                ..SlotFlags::default()
            })?;
        }
        let pager = Pager::new()?;
        if let Some(content) = machine.ram.finish_content()? {
            let source = Pool::new(content, PoolConfig::default())?;
            for region in machine.regions() {
                let contents = Contents::Source(Arc::<Pool>::clone(&source));
                pager.add(RegionConfig::local(
                    Arc::clone(region),
                    Mode::Minor,
                    contents,
                ))?;
            }
        }
        give_up_when_in_trouble(&pager, &machine.stopper());
        let readers = Readers::spawn(&pager, ReaderConfig::new(1))?;
        let prefetch = prefetch.then(|| Prefetch::spawn(&pager, PrefetchConfig::default()));
        let discarded = Arc::new(AtomicU64::new(0));
        machine.on_given_up({
            let (pager, discarded) = (Arc::clone(&pager), Arc::clone(&discarded));
            move |range| {
                discarded.fetch_add(discard(&pager, range)?, Ordering::Relaxed);
                Ok(())
            }
        });
        let paging = Self {
            paging: Arc::new(Paging::new(&pager, config.vcpus)),
            pager,
            readers,
            prefetch: prefetch.transpose()?,
            discarded,
        };
        Ok((machine, paging))
    }

    /// The hooks to run the machine with, or to hand other faults to
    /// ([`MachineChecks::other_faults_to`](super::MachineChecks::other_faults_to)).
    #[must_use]
    pub fn hooks(&self) -> Arc<dyn VcpuHooks> {
        Arc::<Paging>::clone(&self.paging)
    }

    /// The pager, for those who watch or change what it does.
    #[must_use]
    pub fn pager(&self) -> &Arc<Pager> {
        &self.pager
    }

    /// The run is over: ends the threads, and says what was paged in.
    #[must_use]
    pub fn end(self) -> PagedIn {
        // Trouble has stopped the run already, which says so.
        let _ = self.prefetch.map(Prefetch::stop);
        self.readers.stop();
        let mut counted = self.pager.counted();
        let by_exits = self.paging.counters();
        counted.add(&by_exits);
        PagedIn {
            total: self.pager.progress().total,
            by_fault: counted.pages - counted.ahead_pages,
            by_prefetch: counted.ahead_pages,
            zero: counted.zero_pages,
            discarded: self.discarded.load(Ordering::Relaxed),
            exits: by_exits.faults,
            messages: counted.messages,
        }
    }
}

/// Has trouble of the pager stop the run. vCPUs that sleep in a userfaultfd come back once their pages are
/// poisoned, and not before.
fn give_up_when_in_trouble(pager: &Arc<Pager>, stopper: &Stopper) {
    let (stopper, weak) = (stopper.clone(), Arc::downgrade(pager));
    pager.on_notice(move |notice: &Notice| {
        if !notice.needs_action() {
            return;
        }
        stopper.stop(notice.clone());
        let pager = Weak::clone(&weak);
        // Not on the thread of a notice, which may hold what this needs. Without a thread the run ends all the
        // same, and says that vCPUs were lost.
        let _ = thread::Builder::new()
            .name("pt-abandon".into())
            .spawn(move || {
                let Some(pager) = pager.upgrade() else { return };
                for region in pager.region_ids() {
                    // It has a source.
                    let _ = pager.abandon(region);
                }
            });
    });
}

/// Discards the whole pages of `range`, and returns how many. What is no memory of the guest stays as it is.
fn discard(pager: &Pager, range: GuestRange) -> Result<u64, HookError> {
    let Some((id, _)) = pager.locate(range.start()) else {
        return Ok(0);
    };
    let region = pager.local_region(id);
    let pages = region.and_then(|region| whole_pages(&region, range));
    Ok(pages.map_or(Ok(0), |pages| pager.discard(id, pages))?)
}
