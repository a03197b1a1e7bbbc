//! Pages that a thread is about to access which must not sleep: device models, and the thread that serves faults.

use std::ops::ControlFlow;
use std::sync::Arc;

use pagetide_memory::{Access, GuestAddress, PageRange, PageState};
use pagetide_uapi::userfaultfd::{InstallError, Wake};

use crate::again::Again;
use crate::error::{PresenceError, ResolveError};
use crate::fault::{Delivery, Fault, Resolution};
use crate::resolver::Resolver;

impl Resolver {
    /// Makes every page present of which these `bytes` bytes from the home gpa `gpa` on are a part, so that an access
    /// by this process's own mapping sleeps in no userfaultfd: a thread that serves the pager would sleep for ever.
    /// Waits until the content arrives, or until [`Pager::stop`](crate::Pager::stop). A discarded page reads as zeroes.
    ///
    /// The pages must not be discarded between this call and the access. (Memory that the host takes away in between,
    /// to reclaim it, faults again where it is registered in MINOR mode: lock what must not.)
    ///
    /// # Errors
    /// [`PresenceError`]; an access to the page that it names would raise SIGBUS, or sleep. Pages before it are
    /// present.
    pub fn ensure_present(
        &mut self,
        gpa: GuestAddress,
        bytes: u64,
        access: Access,
    ) -> Result<(), PresenceError> {
        let outside = ResolveError::Outside { gpa };
        let end = gpa.0.checked_add(bytes).ok_or(outside)?;
        let mut next = gpa;
        while next.0 < end {
            next = self.ensure_page(next, access)?;
        }
        Ok(())
    }

    /// Makes the page at `gpa` present, and returns the gpa behind it.
    fn ensure_page(
        &mut self,
        gpa: GuestAddress,
        access: Access,
    ) -> Result<GuestAddress, PresenceError> {
        let mut again = Again::with_patience();
        loop {
            if let ControlFlow::Break(behind) = self.look(gpa, access)? {
                return Ok(behind);
            }
            match self.resolve_exit(gpa, access)? {
                Resolution::Poisoned => return Err(PresenceError::Poisoned { gpa }),
                Resolution::Unmapped => return Err(PresenceError::Unmapped { gpa }),
                _ => {}
            }
            // It may be given back again and again meanwhile.
            again.pause().map_err(PresenceError::Busy)?;
        }
    }

    /// Maps the page at `gpa` if its content is there.
    fn look(
        &mut self,
        gpa: GuestAddress,
        access: Access,
    ) -> Result<ControlFlow<GuestAddress>, PresenceError> {
        let pager = Arc::clone(self.pager());
        let table = pager.table();
        let (region, page) = table.locate(gpa).ok_or(ResolveError::Outside { gpa })?;
        let single = PageRange::single(page);
        let state = region.map.state(page);
        match state {
            Some(PageState::Present | PageState::Zero | PageState::Removed) => {}
            Some(PageState::Poisoned) => return Err(PresenceError::Poisoned { gpa }),
            _ => return Ok(ControlFlow::Continue(())),
        }
        let served = region.served(page).ok_or(PresenceError::Unmapped { gpa })?;
        let lock = served.channel.lock_installs();
        let place = region.place(served, &lock, single);
        let place = place.ok_or(PresenceError::Unmapped { gpa })?;
        let mapped = match state {
            Some(PageState::Removed) => region.memory.zero(&place, Wake::DontWake),
            _ => region.memory.take(&place, Wake::DontWake),
        };
        drop(lock);
        match mapped {
            Ok(()) | Err(InstallError::Exists { .. }) => {
                Ok(ControlFlow::Break(region.gpa_of(single.end())))
            }
            Err(InstallError::NoContent) => {
                // Other code than the pager has discarded it.
                let _ = region.remove(page);
                Ok(ControlFlow::Continue(()))
            }
            Err(InstallError::Again { .. }) => {
                pager.read_events(&served.channel);
                Ok(ControlFlow::Continue(()))
            }
            Err(InstallError::NoMapping | InstallError::Gone) => {
                Err(PresenceError::Unmapped { gpa })
            }
            Err(InstallError::Poisoned) => {
                let _ = region.poison(page);
                Err(PresenceError::Poisoned { gpa })
            }
            Err(source) => {
                let fault = Fault {
                    region: region.id,
                    page,
                    gpa,
                    access,
                    vcpu: None,
                    delivery: Delivery::Exit,
                };
                Err(ResolveError::Remap { fault, source }.into())
            }
        }
    }
}
