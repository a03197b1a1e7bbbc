//! Faults and their resolutions.

use std::fmt;

use pagetide_memory::{Access, GuestAddress, PageIndex, PageRange};
use pagetide_uapi::userfaultfd::Wake;

/// The number of a region within its pager. Not reused after the region was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub(crate) usize);

/// The way in which a fault was delivered to the pager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Delivery {
    /// As an exit of KVM_RUN: the vCPU's own thread resolves it, and no wake-up is needed.
    Exit,
    /// As a message of a userfaultfd: a thread sleeps in the kernel until it is woken.
    Uffd,
}

impl Delivery {
    /// Whether the call that installs the page is to wake a thread.
    pub(crate) fn wake(self) -> Wake {
        match self {
            Self::Exit => Wake::DontWake,
            Self::Uffd => Wake::Wake,
        }
    }
}

impl fmt::Display for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Exit => "exit",
            Self::Uffd => "uffd",
        })
    }
}

/// A fault on a missing page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The region of the page.
    pub region: RegionId,
    /// The page of that region.
    pub page: PageIndex,
    /// The home gpa of the access, rounded down as the delivery does.
    pub gpa: GuestAddress,
    /// The kind of access.
    pub access: Access,
    /// The vCPU that made the access, if the delivery reports it.
    pub vcpu: Option<u32>,
    /// The delivery.
    pub delivery: Delivery,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of gpa {}", self.access, self.gpa)?;
        if let Some(vcpu) = self.vcpu {
            write!(f, " by vCPU {vcpu}")?;
        }
        write!(f, " (by {})", self.delivery)
    }
}

/// How a fault was resolved. The faulting thread may retry, unless stated otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a thread that faulted on a Poisoned or Unmapped page must not retry"]
pub enum Resolution {
    /// This call installed the page, and with fault-around the other pages of the run.
    Installed {
        /// The pages installed by the same call, including the faulting page.
        pages: PageRange,
    },
    /// The page was already mapped (EEXIST), and the region trusts such pages. For an exit it was also
    /// faulted in for the access.
    Exists,
    /// The page was already present. For an exit nothing was done; a thread in the userfaultfd was
    /// woken.
    AlreadyPresent,
    /// The page was present, but its mapping had been lost (reclaimed, or zapped): it was mapped again.
    Reinstalled,
    /// The same exit recurred although the page is mapped: fast GUP cannot take it as it is (the zero
    /// page, or write-protected), so it was faulted in for the access.
    FaultedIn,
    /// The page was requested, or another thread was installing it; this exit waited until it was
    /// present.
    Waited,
    /// The page is requested, or another thread is installing it: the installing thread wakes the
    /// thread in the userfaultfd.
    LeftToInstaller,
    /// The page was discarded or removed: it reads as zeroes from now on.
    Zeroed,
    /// The page's content is lost. The guest of an exit needs a machine check; a thread in the
    /// userfaultfd gets SIGBUS.
    Poisoned,
    /// The address is not mapped any more, so no thread can wait there.
    Unmapped,
}
