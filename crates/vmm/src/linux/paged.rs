//! A Linux guest whose memory a pager installs while it runs, its kernel, initrd and boot data included.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

use pagetide_kvm::SlotFlags;
use pagetide_memory::GuestRange;
use pagetide_pager::{
    Contents, Delivery, Mode, Notice, Pager, Pool, PoolConfig, Prefetch, PrefetchConfig,
    ReaderConfig, Readers, RegionConfig,
};

use crate::control::Stopper;
use crate::hooks::{HookError, VcpuHooks};
use crate::paging::Paging;
use crate::setup::SetupError;

use super::config::LinuxConfig;
use super::content::ContentFile;
use super::discard::whole_pages;
use super::error::LinuxError;
use super::machine::LinuxMachine;

/// The paging of a Linux guest, from a [`ContentFile`]. None of the guest's pages is present when the guest
/// starts.
#[derive(Debug)]
pub struct LinuxPaging {
    pager: Arc<Pager>,
    paging: Arc<Paging>,
    readers: Readers,
    prefetch: Option<Prefetch>,
    discarded: Arc<AtomicU64>,
}

/// Counts of a guest's pages, which have the backing's size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagedIn {
    /// All pages.
    pub total: u64,
    /// Pages that a fault of a vCPU, or of the kernel for it, installed.
    pub by_fault: u64,
    /// Pages that prefetch installed.
    pub by_prefetch: u64,
    /// Requests to the threads that read the content file: faults on what the page cache did not have.
    pub requests: u64,
    /// Pages of either kind that were holes of the content file.
    pub zero: u64,
    /// Pages that the guest gave up, and the host discarded.
    pub discarded: u64,
    /// Faults delivered as exits of KVM_RUN.
    pub exits: u64,
    /// Faults delivered as messages of a userfaultfd.
    pub messages: u64,
}

impl fmt::Display for PagedIn {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (by_fault, by_prefetch) = (self.by_fault, self.by_prefetch);
        let (present, total) = (by_fault + by_prefetch, self.total);
        write!(
            formatter,
            "{present} of {total} pages were paged in: {by_fault} by fault, {by_prefetch} by prefetch \
             ({} of them zero); the host discarded {}",
            self.zero, self.discarded
        )
    }
}

impl LinuxPaging {
    /// Makes a machine as [`LinuxMachine::new`] does, and pages its memory in from `content`, from its first
    /// instruction on. With [`Delivery::Exit`] each vCPU's thread resolves the vCPU's faults, which
    /// KVM_CAP_ABSENT_MAPPING_FAULT gates, and a userfaultfd delivers those of the kernel; with
    /// [`Delivery::Uffd`] it delivers all faults. With `prefetch` the other pages are fetched meanwhile.
    ///
    /// The run fails if the content file cannot be read any more.
    ///
    /// # Errors
    /// [`LinuxError`]. A new content file is complete if it exists then, and can be used the next time.
    pub fn start(
        config: &LinuxConfig,
        delivery: Delivery,
        prefetch: bool,
        content: ContentFile,
    ) -> Result<(LinuxMachine, Self), LinuxError> {
        let mut machine = LinuxMachine::build(config, None, Some(&content))?;
        let has_exits = machine.vm().capabilities().absent_mapping_fault;
        if delivery == Delivery::Exit && !has_exits {
            return Err(LinuxError::NoExits);
        }
        let pager = Pager::new()?;
        let content = content.finish(config.layout()?)?;
        let source = Pool::new(content, PoolConfig::default())?;
        for region in machine.regions() {
            let contents = Contents::Source(Arc::<Pool>::clone(&source));
            let region = Arc::clone(region);
            pager.add(RegionConfig::local(region, Mode::Minor, contents))?;
        }
        if delivery == Delivery::Exit {
            let flags = SlotFlags {
                absent_mapping_fault: true,
                ..SlotFlags::default()
            };
            machine.set_slot_flags(flags).map_err(SetupError::from)?;
        }
        abandon_when_in_trouble(&pager, &machine.stopper());
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

    /// The hooks to run the machine with, perhaps through
    /// [`MachineChecks::other_faults_to`](super::MachineChecks::other_faults_to).
    #[must_use]
    pub fn hooks(&self) -> Arc<dyn VcpuHooks> {
        Arc::<Paging>::clone(&self.paging)
    }

    /// The pager.
    #[must_use]
    pub fn pager(&self) -> &Arc<Pager> {
        &self.pager
    }

    /// Ends the paging's threads after the run, and returns the counts.
    #[must_use]
    pub fn end(self) -> PagedIn {
        // A failure of prefetch has stopped the run, which reports it.
        let _ = self.prefetch.map(Prefetch::stop);
        self.readers.stop();
        let mut counted = self.pager.counted();
        let by_exits = self.paging.counters();
        counted.add(&by_exits);
        PagedIn {
            total: self.pager.progress().total,
            by_fault: counted.pages - counted.ahead_pages,
            by_prefetch: counted.ahead_pages,
            requests: counted.requests,
            zero: counted.zero_pages,
            discarded: self.discarded.load(Ordering::Relaxed),
            exits: by_exits.faults,
            messages: counted.messages,
        }
    }
}

/// Stops the run when the pager reports trouble, and abandons the regions: vCPUs that sleep in a userfaultfd
/// return only when their pages are poisoned.
fn abandon_when_in_trouble(pager: &Arc<Pager>, stopper: &Stopper) {
    let (stopper, weak) = (stopper.clone(), Arc::downgrade(pager));
    pager.on_notice(move |notice: &Notice| {
        if !notice.needs_action() {
            return;
        }
        stopper.stop(notice.clone());
        let pager = Weak::clone(&weak);
        // Not on the thread of the notice, which may hold locks that this needs. Without a thread, the run
        // ends with lost vCPUs.
        let _ = thread::Builder::new()
            .name("pt-abandon".into())
            .spawn(move || {
                let Some(pager) = pager.upgrade() else { return };
                for region in pager.region_ids() {
                    // Fails only if the region has gone.
                    let _ = pager.abandon(region);
                }
            });
    });
}

/// Discards the whole pages of `range`, and returns how many. A range that is not the guest's memory has none.
fn discard(pager: &Pager, range: GuestRange) -> Result<u64, HookError> {
    let Some((id, _)) = pager.locate(range.start()) else {
        return Ok(0);
    };
    let region = pager.local_region(id);
    let pages = region.and_then(|region| whole_pages(&region, range));
    Ok(pages.map_or(Ok(0), |pages| pager.discard(id, pages))?)
}
