//! What comes in, and what became of it.

use std::fmt;

use pagetide_memory::{Access, GuestAddress, PageIndex, PageRange};

/// The number of a region within its pager. Never used again after the region was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub(crate) usize);

/// How a fault came to the pager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Delivery {
    /// As an exit of KVM_RUN: the vCPU's thread resolves it itself, and nobody has to be woken.
    Exit,
    /// As a message of a userfaultfd: a thread sleeps in the kernel until it is woken.
    Uffd,
}

impl fmt::Display for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Exit => "exit",
            Self::Uffd => "uffd",
        })
    }
}

/// Somebody needs a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The region that it is in.
    pub region: RegionId,
    /// The page of that region.
    pub page: PageIndex,
    /// The home gpa that was touched, rounded down as the delivery does.
    pub gpa: GuestAddress,
    /// What it was touched for.
    pub access: Access,
    /// Whose access it was, if the delivery says so.
    pub vcpu: Option<u32>,
    /// How it came.
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

/// How a fault was resolved: whoever faulted may try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "whoever faulted on a page that is Poisoned or Unmapped must not try again"]
pub enum Resolution {
    /// This call installed the page, and with fault-around the pages connected to it.
    Installed {
        /// What was installed in one piece, the faulting page included.
        pages: PageRange,
    },
    /// The page was to be installed and was mapped already (EEXIST), and the region trusts such pages.
    /// For an exit it was also made present for that access.
    Exists,
    /// The page had been installed before this fault was looked at. Nothing was done for an exit; a
    /// thread in the userfaultfd was woken.
    AlreadyPresent,
    /// The page had been installed before, and its mapping was lost since (reclaimed, or zapped): it
    /// was mapped again.
    Reinstalled,
    /// The same exit came again although the page is mapped: fast GUP cannot take it as it is (the
    /// zero page, or write-protected), so it was made present for that access.
    FaultedIn,
    /// The page was requested, or another thread was installing it; this exit waited until it was
    /// there.
    Waited,
    /// The page is requested, or another thread is installing it: whoever installs it wakes the
    /// thread in the userfaultfd.
    LeftToInstaller,
    /// The page was given up (discarded, removed): it reads as zeroes from now on.
    Zeroed,
    /// The page's content is lost. An exit's guest needs a machine check; a thread in the
    /// userfaultfd gets SIGBUS.
    Poisoned,
    /// The address is not mapped any more, so nobody can be waiting there.
    Unmapped,
}
