//! What the VMs of one socket and the server know of each other.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The VMs of one socket.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    /// Those that have connected and not gone, with connections that are none yet.
    vms: AtomicUsize,
    is_draining: AtomicBool,
}

impl Usage {
    pub(crate) fn vms(&self) -> usize {
        self.vms.load(Ordering::Acquire)
    }

    pub(crate) fn begin(&self) {
        self.vms.fetch_add(1, Ordering::AcqRel);
    }

    /// The end of one of them.
    pub(crate) fn end(&self) {
        self.vms.fetch_sub(1, Ordering::AcqRel);
    }

    /// Has these VMs given all that they lack, so that none needs the server any more.
    pub(crate) fn drain(&self) {
        self.is_draining.store(true, Ordering::Release);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Acquire)
    }
}
