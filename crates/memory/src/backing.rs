//! The kind of memory behind a region.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::page::PageSize;

/// The kind of memory behind a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backing {
    /// A memfd of 4 KiB pages. Both mappings are marked `MADV_NOHUGEPAGE`, so that the host's setting
    /// for transparent huge pages does not affect measurements.
    Shmem,
    /// A memfd whose mappings are marked `MADV_HUGEPAGE`. The kernel uses huge pages only if
    /// `/sys/kernel/mm/transparent_hugepage/shmem_enabled` is `advise` (or `always`); with `never`,
    /// this backing equals [`Backing::Shmem`].
    Thp,
    /// A memfd of 2 MiB pages from the hugetlb pool, where they must be reserved.
    Hugetlb2M,
    /// A memfd of 1 GiB pages from the hugetlb pool, where they must be reserved.
    Hugetlb1G,
    /// Private anonymous memory with 4 KiB pages (`MADV_NOHUGEPAGE`). It has no second mapping, so
    /// pages can only be installed by copying.
    Anonymous,
}

impl Backing {
    /// Every backing, in the order of the help texts.
    pub const ALL: [Self; 5] = [
        Self::Shmem,
        Self::Thp,
        Self::Hugetlb2M,
        Self::Hugetlb1G,
        Self::Anonymous,
    ];

    /// The install granularity: the size of the pages in which memory is installed. 4 KiB also for
    /// [`Backing::Thp`], because userfaultfd maps its huge pages in parts of 4 KiB.
    pub const fn page_size(self) -> PageSize {
        match self {
            Self::Shmem | Self::Thp | Self::Anonymous => PageSize::Size4K,
            Self::Hugetlb2M => PageSize::Size2M,
            Self::Hugetlb1G => PageSize::Size1G,
        }
    }

    /// Whether the memory comes from the hugetlb pool.
    pub const fn is_hugetlb(self) -> bool {
        matches!(self, Self::Hugetlb2M | Self::Hugetlb1G)
    }

    /// Whether the memory has a file, and with it a page cache and a service mapping.
    pub const fn has_file(self) -> bool {
        !matches!(self, Self::Anonymous)
    }

    /// The name that the command line and the reports use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shmem => "shmem",
            Self::Thp => "thp",
            Self::Hugetlb2M => "hugetlb-2m",
            Self::Hugetlb1G => "hugetlb-1g",
            Self::Anonymous => "anonymous",
        }
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The text is not the name of a [`Backing`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{given:?} is not a backing: shmem, thp, hugetlb-2m, hugetlb-1g or anonymous")]
pub struct ParseBackingError {
    /// The given text.
    pub given: String,
}

impl FromStr for Backing {
    type Err = ParseBackingError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|backing| backing.name() == text)
            .ok_or_else(|| ParseBackingError {
                given: text.to_owned(),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for backing in Backing::ALL {
            assert_eq!(backing.to_string().parse(), Ok(backing));
        }
        let error = "hugetlb".parse::<Backing>().unwrap_err();
        assert!(error.to_string().contains("hugetlb-2m"), "{error}");
    }
}
