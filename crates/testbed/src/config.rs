//! The configuration of a bare machine.

use std::num::NonZeroU64;
use std::time::Duration;

use pagetide_memory::{Backing, GuestAddress, GuestRange, Region, RegionError};
use pagetide_vmm::SizeError;

use crate::layout::{DATA_GPA, Layout};

/// The configuration of a bare machine. [`MachineConfig::new`] gives the usual values.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// Number of vCPUs, at least 1.
    pub vcpus: u32,
    /// Bytes of data memory for each vCPU, a multiple of the backing's page size.
    pub per_vcpu_bytes: u64,
    /// The backing of the data memory.
    pub backing: Backing,
    /// Whether every vCPU walks all of the data memory (`vcpus * per_vcpu_bytes`) instead of its own
    /// share, so that vCPUs touch the same pages.
    pub overlap: bool,
    /// Makes room for workloads in which the first vCPU walks all of the data region
    /// ([`Workload::alone`](crate::Workload::alone)).
    pub alone: bool,
    /// Bytes from one touched page to the next; None for the backing's page size. A multiple of 8 that
    /// divides the walked range.
    pub stride_bytes: Option<u64>,
    /// Whether each vCPU's thread is pinned to one host CPU, in turn among those that this thread may use.
    pub pin: bool,
    /// A run fails as stalled if no vCPU touches a page, exits or ends for this long.
    pub stall_timeout: Duration,
    /// How long the threads of a failed run have to end before they count as lost.
    pub stop_grace: Duration,
}

/// Why a configuration is impossible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The number of vCPUs or the size of memory.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// No data memory.
    #[error("a machine needs at least one page of data memory for each vCPU")]
    NoMemory,
    /// The stride is 0, unaligned or does not divide the range.
    #[error("a stride of {stride_bytes} bytes does not divide {range_bytes} bytes in 8-byte words")]
    BadStride {
        /// The stride asked for.
        stride_bytes: u64,
        /// The range that a vCPU walks.
        range_bytes: u64,
    },
    /// The latency logs and page tables would take more than 1 GiB.
    #[error(
        "the latency logs of {touches} touches by each of {vcpus} vCPUs do not fit below 1 GiB: \
         use fewer vCPUs or less memory for each"
    )]
    LogTooLarge {
        /// Touches of each vCPU.
        touches: u64,
        /// vCPUs.
        vcpus: u32,
    },
    /// The caller's data region is not the one that the configuration needs.
    #[error(
        "the data region has {bytes} bytes of {backing} at {gpa}; needed are {needed_bytes} bytes \
         of {needed_backing} at {DATA_GPA:#x}"
    )]
    WrongRegion {
        /// Its gpa.
        gpa: GuestAddress,
        /// Its size.
        bytes: u64,
        /// Its backing.
        backing: Backing,
        /// The size that the configuration needs.
        needed_bytes: u64,
        /// The backing that the configuration needs.
        needed_backing: Backing,
    },
}

impl ConfigError {
    pub(crate) fn wrong_region(found: &Region, needed_bytes: u64, needed_backing: Backing) -> Self {
        Self::WrongRegion {
            gpa: found.gpa(),
            bytes: found.bytes(),
            backing: found.backing(),
            needed_bytes,
            needed_backing,
        }
    }
}

impl MachineConfig {
    /// One share of shmem for each of `vcpus` vCPUs, no slot flags, threads not pinned, stalled after
    /// 60 s, lost after 10 s.
    #[must_use]
    pub fn new(vcpus: u32, per_vcpu_bytes: u64) -> Self {
        Self {
            vcpus,
            per_vcpu_bytes,
            backing: Backing::Shmem,
            overlap: false,
            alone: false,
            stride_bytes: None,
            pin: false,
            stall_timeout: Duration::from_secs(60),
            stop_grace: Duration::from_secs(10),
        }
    }

    /// Bytes of data memory of all vCPUs together; None if that overflows.
    #[must_use]
    pub fn data_bytes(&self) -> Option<u64> {
        self.per_vcpu_bytes.checked_mul(self.vcpus.into())
    }

    /// A data region for this configuration.
    ///
    /// # Errors
    /// See [`RegionError`].
    pub fn data_region(&self) -> Result<Region, RegionError> {
        let bytes = self.data_bytes().unwrap_or(u64::MAX);
        Region::new(GuestAddress(DATA_GPA), bytes, self.backing)
    }

    /// The part of the data region that belongs to a vCPU, to register each part by itself. With
    /// `overlap`, other vCPUs walk it, too. None if there is no such vCPU or part.
    #[must_use]
    pub fn vcpu_range(&self, vcpu: u32) -> Option<GuestRange> {
        let offset = self.per_vcpu_bytes.checked_mul(vcpu.into())?;
        let start = GuestAddress(DATA_GPA)
            .checked_add(offset)
            .filter(|_| vcpu < self.vcpus)?;
        GuestRange::new(start, self.per_vcpu_bytes).ok()
    }

    /// The walk of a vCPU.
    pub(crate) fn walk(&self, vcpu: u32) -> Walk {
        if self.overlap {
            return self.walk_alone();
        }
        let offset = self.per_vcpu_bytes * u64::from(vcpu);
        self.walk_over(offset, self.per_vcpu_bytes)
    }

    /// The walk of a vCPU over all of the data region.
    pub(crate) fn walk_alone(&self) -> Walk {
        self.walk_over(0, self.per_vcpu_bytes * u64::from(self.vcpus))
    }

    fn walk_over(&self, offset: u64, bytes: u64) -> Walk {
        let stride_bytes = self.stride_bytes().max(1);
        let pages = NonZeroU64::new(bytes / stride_bytes).unwrap_or(NonZeroU64::MIN);
        Walk {
            base: DATA_GPA + offset,
            pages,
            stride_bytes,
        }
    }

    fn stride_bytes(&self) -> u64 {
        self.stride_bytes
            .unwrap_or(self.backing.page_size().bytes())
    }

    /// Checks everything that can be checked before memory is allocated.
    pub(crate) fn layout(&self, max_vcpus: u32, gpa_limit: u64) -> Result<Layout, ConfigError> {
        if self.per_vcpu_bytes == 0 {
            return Err(ConfigError::NoMemory);
        }
        SizeError::check_pages(self.per_vcpu_bytes, self.backing)?;
        let bytes = self.data_bytes().unwrap_or(u64::MAX);
        SizeError::check_end(bytes, DATA_GPA.checked_add(bytes), gpa_limit)?;
        let range_bytes = match self.overlap || self.alone {
            true => bytes,
            false => self.per_vcpu_bytes,
        };
        let stride_bytes = self.stride_bytes();
        let is_words = stride_bytes != 0 && stride_bytes.is_multiple_of(8);
        if !is_words || !range_bytes.is_multiple_of(stride_bytes) {
            return Err(ConfigError::BadStride {
                stride_bytes,
                range_bytes,
            });
        }
        let touches = range_bytes / stride_bytes;
        layout(self.vcpus, bytes, touches, max_vcpus, gpa_limit)
    }
}

/// The layout for vCPUs with tables of so many entries, and so many bytes of data memory, on a KVM with these
/// limits.
pub(crate) fn layout(
    vcpus: u32,
    bytes: u64,
    touches: u64,
    max_vcpus: u32,
    gpa_limit: u64,
) -> Result<Layout, ConfigError> {
    SizeError::check_vcpus(vcpus, max_vcpus)?;
    SizeError::check_end(bytes, DATA_GPA.checked_add(bytes), gpa_limit)?;
    Layout::new(vcpus, bytes, touches).ok_or(ConfigError::LogTooLarge { touches, vcpus })
}

/// The pages that a vCPU touches: every `stride_bytes` from `base` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    pub(crate) base: u64,
    pub(crate) pages: NonZeroU64,
    pub(crate) stride_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn refusal(change: impl FnOnce(&mut MachineConfig)) -> ConfigError {
        let mut config = MachineConfig::new(2, 4 * MIB);
        change(&mut config);
        config
            .layout(16, 1 << 40)
            .expect_err("the change makes it invalid")
    }

    #[test]
    fn each_bad_value_has_its_error() {
        assert!(MachineConfig::new(2, 4 * MIB).layout(16, 1 << 40).is_ok());
        assert_eq!(
            refusal(|config| config.vcpus = 0),
            SizeError::NoVcpus.into()
        );
        assert_eq!(
            refusal(|config| config.vcpus = 17),
            SizeError::TooManyVcpus { asked: 17, max: 16 }.into()
        );
        assert_eq!(
            refusal(|config| config.per_vcpu_bytes = 0),
            ConfigError::NoMemory
        );
        assert_eq!(
            refusal(|config| config.per_vcpu_bytes = 5000),
            SizeError::NotPageMultiple {
                bytes: 5000,
                backing: Backing::Shmem,
                page: 4096
            }
            .into()
        );
        assert_eq!(
            refusal(|config| config.per_vcpu_bytes = 1 << 40),
            SizeError::TooMuchMemory {
                bytes: 1 << 41,
                limit: 1 << 40
            }
            .into()
        );
        assert_eq!(
            refusal(|config| config.per_vcpu_bytes = u64::MAX - 4095),
            SizeError::TooMuchMemory {
                bytes: u64::MAX,
                limit: 1 << 40
            }
            .into()
        );
        for stride_bytes in [0, 4, 3 * 4096] {
            assert_eq!(
                refusal(|config| config.stride_bytes = Some(stride_bytes)),
                ConfigError::BadStride {
                    stride_bytes,
                    range_bytes: 4 * MIB
                }
            );
        }
        assert_eq!(
            refusal(|config| {
                config.per_vcpu_bytes = 1 << 38;
                config.stride_bytes = Some(8);
            }),
            ConfigError::LogTooLarge {
                touches: 1 << 35,
                vcpus: 2
            }
        );
    }

    #[test]
    fn walks_partition_or_overlap() {
        let mut config = MachineConfig::new(3, MIB);
        let bases: Vec<_> = (0..3)
            .map(|vcpu| config.walk(vcpu).base - DATA_GPA)
            .collect();
        assert_eq!(bases, [0, MIB, 2 * MIB]);
        assert_eq!(config.walk(2).pages.get(), 256);
        for vcpu in 0..3 {
            let range = config.vcpu_range(vcpu).expect("one for each vCPU");
            assert_eq!(
                (range.start().0, range.bytes()),
                (config.walk(vcpu).base, MIB)
            );
        }
        assert_eq!(config.vcpu_range(3), None);
        config.overlap = true;
        for vcpu in 0..3 {
            assert_eq!(config.walk(vcpu).base, DATA_GPA);
            assert_eq!(config.walk(vcpu).pages.get(), 768);
        }
    }
}
