//! The kernel's treatment of the healthy rest of a huge page that has an uncorrected error.

use std::fmt;
use std::str::FromStr;

use pagetide_uapi::memory_failure::has_keep_ue_mapped;
use thiserror::Error;

use crate::backing::Backing;
use crate::page::PageSize;

/// The amount of memory that is lost to an uncorrected error (UE).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FailurePolicy {
    /// Linux's default: hugetlb memory loses the whole huge page, 2 MiB or 1 GiB per error; a
    /// transparent huge page is split, and 4 KiB are lost.
    #[default]
    KernelDefault,
    /// Only the 4 KiB with the error are lost; the rest stays mapped, as huge pages
    /// (`MFD_MF_KEEP_UE_MAPPED`).
    Keep,
}

impl FailurePolicy {
    /// Both policies.
    pub const ALL: [Self; 2] = [Self::KernelDefault, Self::Keep];

    /// [`FailurePolicy::Keep`] if the running kernel supports it for this backing. Queries the kernel.
    pub fn best_for(backing: Backing) -> Self {
        if Self::Keep.is_available(backing) {
            Self::Keep
        } else {
            Self::KernelDefault
        }
    }

    /// Whether the running kernel supports this policy for memory of this backing. Queries the kernel.
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

    /// The memory of this backing that one error costs, unless the kernel reports more.
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

/// The text is not the name of a [`FailurePolicy`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{given:?} is not a policy for memory failures: default or keep")]
pub struct ParsePolicyError {
    /// The given text.
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
