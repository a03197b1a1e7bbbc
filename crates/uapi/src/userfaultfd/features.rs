//! The features that a userfaultfd may have.

use std::fmt;
use std::ops::BitOr;

use crate::generated as abi;

/// A set of userfaultfd features (`UFFD_FEATURE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Features(u64);

macro_rules! features {
    ($($(#[$doc:meta])* $name:ident = $flag:ident),* $(,)?) => {
        impl Features {
            $($(#[$doc])* pub const $name: Self = Self(abi::$flag as u64);)*

            /// Every feature that this version names, with its name in the kernel's header.
            pub const KNOWN: &[(Self, &'static str)] =
                &[$((Self::$name, stringify!($flag))),*];
        }
    };
}

features! {
    /// MISSING mode on hugetlb memory.
    MISSING_HUGETLBFS = UFFD_FEATURE_MISSING_HUGETLBFS,
    /// MISSING mode on shmem.
    MISSING_SHMEM = UFFD_FEATURE_MISSING_SHMEM,
    /// MINOR mode on hugetlb memory.
    MINOR_HUGETLBFS = UFFD_FEATURE_MINOR_HUGETLBFS,
    /// MINOR mode on shmem.
    MINOR_SHMEM = UFFD_FEATURE_MINOR_SHMEM,
    /// Reports exact fault addresses, not rounded down to the page.
    EXACT_ADDRESS = UFFD_FEATURE_EXACT_ADDRESS,
    /// Reports the thread that waits.
    THREAD_ID = UFFD_FEATURE_THREAD_ID,
    /// Supports marking pages as lost (`UFFDIO_POISON`).
    POISON = UFFD_FEATURE_POISON,
    /// Reports writes to protected pages.
    WRITE_PROTECT = UFFD_FEATURE_PAGEFAULT_FLAG_WP,
    /// The same for shmem and hugetlb memory.
    WRITE_PROTECT_FILES = UFFD_FEATURE_WP_HUGETLBFS_SHMEM,
    /// Protects missing pages without a file, too.
    WRITE_PROTECT_MISSING = UFFD_FEATURE_WP_UNPOPULATED,
    /// Reports pages discarded by `MADV_DONTNEED` or by a hole in the file.
    EVENT_REMOVE = UFFD_FEATURE_EVENT_REMOVE,
    /// Reports memory that is unmapped.
    EVENT_UNMAP = UFFD_FEATURE_EVENT_UNMAP,
    /// Reports memory that is moved.
    EVENT_REMAP = UFFD_FEATURE_EVENT_REMAP,
    /// Reports forks of the process.
    EVENT_FORK = UFFD_FEATURE_EVENT_FORK,
    /// No messages: a fault raises SIGBUS.
    SIGBUS = UFFD_FEATURE_SIGBUS,
}

impl Features {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// The set with exactly these `UFFD_FEATURE_*` bits.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The `UFFD_FEATURE_*` bits.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether this set contains all of `other`.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The features in this set that are not in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl BitOr for Features {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.write_str("no feature");
        }
        let mut left = *self;
        let mut separator = "";
        for (feature, name) in Self::KNOWN {
            if self.contains(*feature) {
                write!(f, "{separator}{name}")?;
                separator = ", ";
                left = left.without(*feature);
            }
        }
        if left.0 != 0 {
            write!(f, "{separator}{:#x}", left.0)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_print_by_name() {
        let set = Features::MINOR_SHMEM | Features::POISON | Features::from_bits(1 << 50);
        assert_eq!(
            set.to_string(),
            "UFFD_FEATURE_MINOR_SHMEM, UFFD_FEATURE_POISON, 0x4000000000000"
        );
        assert_eq!(Features::NONE.to_string(), "no feature");
        assert_eq!(set.without(set), Features::NONE);
    }
}
