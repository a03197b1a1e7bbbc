//! What the kernel does with the healthy rest of a huge page that has an uncorrected error.

use std::fmt;
use std::str::FromStr;

use pagetide_uapi::memory_failure::has_keep_ue_mapped;
use thiserror::Error;

use crate::backing::Backing;
use crate::page::PageSize;

/// What happens to memory when a part of it has an uncorrected error (UE).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FailurePolicy {
    /// What Linux does: of hugetlb memory the whole huge page is lost, 2 MiB or 1 GiB for one error;
    /// a transparent huge page is split, and 4 KiB are lost.
    #[default]
    KernelDefault,
    /// Only the 4 KiB with the error are lost: the rest stays mapped, as huge pages
    /// (`MFD_MF_KEEP_UE_MAPPED`).
    Keep,
}

impl FailurePolicy {
    /// Both.
    pub const ALL: [Self; 2] = [Self::KernelDefault, Self::Keep];

    /// [`FailurePolicy::Keep`] if the running kernel has it for this backing. Asks the kernel.
    pub fn best_for(backing: Backing) -> Self {
        if Self::Keep.is_available(backing) {
            Self::Keep
        } else {
            Self::KernelDefault
        }
    }

    /// Whether the running kernel has this policy for memory of that backing. Asks the kernel.
    pub fn is_available(self, backing: Backing) -> bool {
        match self {
            Self::KernelDefault => true,
            Self::Keep => {
                backing.has_file()
                    && has_keep_ue_mapped(
                        backing.is_hugetlb().then_some(backing.page_size().bytes()),
                    )
            }
        }
    }

    /// How much of memory of this backing one error takes, if the kernel says nothing else.
    pub const fn lost_per_error(self, backing: Backing) -> PageSize {
        match self {
            Self::KernelDefault => backing.page_size(),
            Self::Keep => PageSize::Size4K,
        }
    }

    /// The name that the command line and the reports use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::KernelDefault => "default",
            Self::Keep => "keep",
        }
    }
}

impl fmt::Display for FailurePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text names no [`FailurePolicy`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{given:?} is no policy for memory failures: default or keep")]
pub struct ParsePolicyError {
    /// The text that was given.
    pub given: String,
}

impl FromStr for FailurePolicy {
    type Err = ParsePolicyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.name() == text)
            .ok_or_else(|| ParsePolicyError {
                given: text.to_owned(),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for policy in FailurePolicy::ALL {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        "kep".parse::<FailurePolicy>().unwrap_err();
    }

    #[test]
    fn only_hugetlb_memory_loses_more_than_the_error() {
        for backing in Backing::ALL {
            let lost = |policy: FailurePolicy| policy.lost_per_error(backing);
            assert_eq!(lost(FailurePolicy::Keep), PageSize::Size4K);
            assert_eq!(lost(FailurePolicy::KernelDefault), backing.page_size());
        }
        assert!(!FailurePolicy::Keep.is_available(Backing::Anonymous));
        assert!(FailurePolicy::KernelDefault.is_available(Backing::Anonymous));
    }
}
