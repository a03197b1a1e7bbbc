//! Population at install time: stage-2 tables that are filled as pages arrive.
//!
//! A newly installed page is in the memory that faults, but not yet in stage 2: the guest's first
//! access still causes a fault, although only within KVM. Therefore each thread that installs pages
//! ahead of accesses maps them in stage 2 at once. `docs/design/populate.md` has the costs and the
//! savings.

use std::error::Error;

use pagetide_memory::GuestRange;

/// Maps guest memory in stage 2.
pub trait Mapper: Send + Sync {
    /// Maps the pages of `range`, home gpas, that are present, and faults nothing in: a page may have
    /// been discarded since it arrived. Returns the number of mapped bytes.
    ///
    /// Called by threads that have just installed these pages, several at the same time. The
    /// implementation must not wait for a fault that userspace resolves.
    ///
    /// # Errors
    /// Any error ends the region's population, and becomes a notice to the owner.
    fn populate(&self, range: GuestRange) -> Result<u64, Box<dyn Error + Send + Sync>>;
}
