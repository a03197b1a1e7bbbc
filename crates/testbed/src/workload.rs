//! What the guest does in a run.

use pagetide_memory::GuestAddress;

use crate::order::Order;
use crate::pattern::Seed;

/// What the guest does with each page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// Reads the page's first 8 bytes and compares them with [`pattern::word`](crate::pattern::word).
    ReadPattern(Seed),
    /// As [`Touch::ReadPattern`], with an exit before each access, which goes to
    /// [`VcpuHooks::on_exit`](pagetide_vmm::VcpuHooks::on_exit) of the run's hooks;
    /// [`next_touch`](crate::next_touch) is the page. For tests of what a single access costs.
    Step(Seed),
    /// Reads the page's first 8 bytes, which must be zero.
    ReadZero,
    /// Writes [`pattern::word`](crate::pattern::word) to the page's first 8 bytes.
    Write(Seed),
    /// Touches nothing, and does not end until it is kicked: for tests of kicks and watchdogs.
    Spin,
}

/// A walk of every vCPU over its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// What happens to each page.
    pub touch: Touch,
    /// In which order.
    pub order: Order,
    /// Where all vCPUs walk instead of in the data region: for tests of addresses without memory (MMIO)
    /// or without a page table entry (an exception).
    pub elsewhere: Option<GuestAddress>,
    /// Only the first vCPU walks, and it walks all of the data region; needs a machine with
    /// [`MachineConfig::alone`](crate::MachineConfig::alone).
    pub alone: bool,
}

impl Workload {
    /// A walk over the data region.
    #[must_use]
    pub const fn new(touch: Touch, order: Order) -> Self {
        Self {
            touch,
            order,
            elsewhere: None,
            alone: false,
        }
    }

    /// The same walk by the first vCPU, over all of the data region.
    #[must_use]
    pub const fn alone(self) -> Self {
        Self {
            alone: true,
            ..self
        }
    }
}
