//! What the guest does in a run.

use pagetide_memory::GuestAddress;

use crate::order::Order;
use crate::pattern::Seed;

/// What the guest does with each page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// Reads the page's first 8 bytes and compares them with [`pattern::word`](crate::pattern::word).
    ReadPattern(Seed),
    /// Reads the page's first 8 bytes, which must be zero.
    ReadZero,
    /// Writes [`pattern::word`](crate::pattern::word) to the page's first 8 bytes.
    Write(Seed),
    /// Touches nothing and never ends, until it is kicked: for tests of kicks and watch-dogs.
    Spin,
}

/// A walk of every vCPU over its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// What happens to each page.
    pub touch: Touch,
    /// In which order.
    pub order: Order,
    /// Where all vCPUs walk instead of in the data region, for tests of what happens where there
    /// is no memory (MMIO) or no page table entry (an exception).
    pub elsewhere: Option<GuestAddress>,
}

impl Workload {
    /// A walk over the data region.
    #[must_use]
    pub const fn new(touch: Touch, order: Order) -> Self {
        Self {
            touch,
            order,
            elsewhere: None,
        }
    }
}
