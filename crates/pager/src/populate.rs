//! Population at install time: second-stage tables that grow as pages arrive.
//!
//! A page that was just installed is in the memory that faults, but KVM has not mapped it yet: the
//! guest's first touch is still a fault, if only one inside KVM. So each thread that installs pages
//! which nobody touches at this moment has them mapped at once. `docs/design/populate.md` says what that
//! costs and saves.

use std::error::Error;

use pagetide_memory::GuestRange;

/// Has guest memory mapped in the second-stage tables.
pub trait Mapper: Send + Sync {
    /// Maps what is present of `range`, home gpas, and brings nothing in: a page may have been given
    /// up again since it arrived. Returns how many bytes it mapped.
    ///
    /// Called by threads that have just installed these pages, several at the same time. It must not
    /// wait for a fault to be resolved outside of the kernel.
    ///
    /// # Errors
    /// Any error ends the region's population, and is a notice to its owner.
    fn populate(&self, range: GuestRange) -> Result<u64, Box<dyn Error + Send + Sync>>;
}
