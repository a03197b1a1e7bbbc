//! What a machine is to be.

use std::num::NonZeroU64;
use std::time::Duration;

use pagetide_kvm::SlotFlags;
use pagetide_memory::{Backing, GuestAddress, GuestRange, Region, RegionError};

use crate::layout::{DATA_GPA, Layout};

/// What a machine is to be. [`MachineConfig::new`] gives the usual values.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// Number of vCPUs, at least 1.
    pub vcpus: u32,
    /// Bytes of data memory for each vCPU, a multiple of the backing's page size.
    pub per_vcpu_bytes: u64,
    /// What the data memory is made of.
    pub backing: Backing,
    /// Whether every vCPU walks all of the data memory (`vcpus * per_vcpu_bytes`) instead of its
    /// own share, so that vCPUs meet at the same pages.
    pub overlap: bool,
    /// Leaves room for workloads in which the first vCPU walks all of the data region
    /// ([`Workload::alone`](crate::Workload::alone)).
    pub alone: bool,
    /// Bytes from one touched page to the next; None for the backing's page size. A multiple of 8
    /// that divides the walked range.
    pub stride_bytes: Option<u64>,
    /// Whether each vCPU's thread stays on one host CPU, in turn among those that this thread may
    /// use.
    pub pin: bool,
    /// Flags of the data slot.
    pub slot_flags: SlotFlags,
    /// A run in which no vCPU touches a page, exits or finishes for this long is ended as stalled.
    pub stall_timeout: Duration,
    /// How long the threads of a failed run have to come back before they are given up as lost.
    pub stop_grace: Duration,
}

/// Why a configuration cannot be; each message names the limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// No vCPUs.
    #[error("a machine needs at least 1 vCPU")]
    NoVcpus,
    /// More vCPUs than KVM has.
    #[error("{asked} vCPUs: this kernel's KVM has at most {max}")]
    TooManyVcpus {
        /// vCPUs asked for.
        asked: u32,
        /// KVM_CAP_MAX_VCPUS.
        max: u32,
    },
    /// No data memory.
    #[error("a machine needs at least one page of data memory for each vCPU")]
    NoMemory,
    /// The memory of a vCPU is not a number of pages.
    #[error("{bytes} bytes for each vCPU are no multiple of the page size of {backing}, {page}")]
    NotPageMultiple {
        /// Bytes asked for.
        bytes: u64,
        /// What the memory is made of.
        backing: Backing,
        /// Its page size in bytes.
        page: u64,
    },
    /// The stride is 0, unaligned or does not divide the range.
    #[error("a stride of {stride_bytes} bytes does not divide {range_bytes} bytes in 8-byte words")]
    BadStride {
        /// The stride asked for.
        stride_bytes: u64,
        /// The range that a vCPU walks.
        range_bytes: u64,
    },
    /// The data memory ends past what the guest's processor can address.
    #[error("{bytes} bytes of data memory end above the guest's address limit, {limit:#x}")]
    TooMuchMemory {
        /// Bytes of data memory.
        bytes: u64,
        /// First gpa that cannot be addressed.
        limit: u64,
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
    /// A data region from outside is not what the configuration asks for.
    #[error(
        "the data region has {bytes} bytes of {backing} at {gpa}; needed are {needed_bytes} bytes \
         of {needed_backing} at {DATA_GPA:#x}"
    )]
    WrongRegion {
        /// Its gpa.
        gpa: GuestAddress,
        /// Its size.
        bytes: u64,
        /// What it is made of.
        backing: Backing,
        /// The size that the configuration asks for.
        needed_bytes: u64,
        /// The backing that the configuration asks for.
        needed_backing: Backing,
    },
}

impl MachineConfig {
    /// One share of shmem for each of `vcpus` vCPUs, no slot flags, threads not pinned, stalled
    /// after 60 s, lost after 10 s.
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
            slot_flags: SlotFlags::default(),
            stall_timeout: Duration::from_secs(60),
            stop_grace: Duration::from_secs(10),
        }
    }

    /// Bytes of data memory of all vCPUs together; None if that overflows.
    #[must_use]
    pub fn data_bytes(&self) -> Option<u64> {
        self.per_vcpu_bytes.checked_mul(self.vcpus.into())
    }

    /// A data region as this configuration wants it.
    ///
    /// # Errors
    /// [`RegionError`] says what is missing.
    pub fn data_region(&self) -> Result<Region, RegionError> {
        Region::new(
            GuestAddress(DATA_GPA),
            self.data_bytes().unwrap_or(u64::MAX),
            self.backing,
        )
    }

    /// The part of the data region that belongs to a vCPU, for registering each part by itself.
    /// With `overlap`, the others walk it, too. None if there is no such vCPU or part.
    #[must_use]
    pub fn vcpu_range(&self, vcpu: u32) -> Option<GuestRange> {
        let offset = self.per_vcpu_bytes.checked_mul(vcpu.into())?;
        let start = GuestAddress(DATA_GPA)
            .checked_add(offset)
            .filter(|_| vcpu < self.vcpus)?;
        GuestRange::new(start, self.per_vcpu_bytes).ok()
    }

    /// What a vCPU walks.
    pub(crate) fn walk(&self, vcpu: u32) -> Walk {
        if self.overlap {
            return self.walk_alone();
        }
        let offset = self.per_vcpu_bytes * u64::from(vcpu);
        self.walk_over(offset, self.per_vcpu_bytes)
    }

    /// What a vCPU walks that walks everything.
    pub(crate) fn walk_alone(&self) -> Walk {
        self.walk_over(0, self.per_vcpu_bytes * u64::from(self.vcpus))
    }

    fn walk_over(&self, offset: u64, bytes: u64) -> Walk {
        let stride_bytes = self
            .stride_bytes
            .unwrap_or(self.backing.page_size().bytes())
            .max(1);
        let pages = NonZeroU64::new(bytes / stride_bytes).unwrap_or(NonZeroU64::MIN);
        Walk {
            base: DATA_GPA + offset,
            pages,
            stride_bytes,
        }
    }

    /// Checks everything that can be checked before anything is allocated.
    pub(crate) fn layout(&self, max_vcpus: u32, gpa_limit: u64) -> Result<Layout, ConfigError> {
        if self.per_vcpu_bytes == 0 {
            return Err(ConfigError::NoMemory);
        }
        let page = self.backing.page_size();
        if !page.divides(self.per_vcpu_bytes) {
            let (bytes, backing) = (self.per_vcpu_bytes, self.backing);
            return Err(ConfigError::NotPageMultiple {
                bytes,
                backing,
                page: page.bytes(),
            });
        }
        let bytes = self.data_bytes().unwrap_or(u64::MAX);
        check(self.vcpus, max_vcpus, bytes, gpa_limit)?;
        let range_bytes = if self.overlap || self.alone {
            bytes
        } else {
            self.per_vcpu_bytes
        };
        let stride_bytes = self.stride_bytes.unwrap_or(page.bytes());
        if stride_bytes == 0
            || !stride_bytes.is_multiple_of(8)
            || !range_bytes.is_multiple_of(stride_bytes)
        {
            return Err(ConfigError::BadStride {
                stride_bytes,
                range_bytes,
            });
        }
        let touches = range_bytes / stride_bytes;
        Layout::new(self.vcpus, bytes, touches).ok_or(ConfigError::LogTooLarge {
            touches,
            vcpus: self.vcpus,
        })
    }
}

/// Whether there can be so many vCPUs, and so many bytes of data memory.
pub(crate) fn check(vcpus: u32, max: u32, bytes: u64, limit: u64) -> Result<(), ConfigError> {
    if vcpus == 0 {
        return Err(ConfigError::NoVcpus);
    }
    if vcpus > max {
        let asked = vcpus;
        return Err(ConfigError::TooManyVcpus { asked, max });
    }
    let end = DATA_GPA.checked_add(bytes);
    if end.is_none_or(|end| end > limit) {
        return Err(ConfigError::TooMuchMemory { bytes, limit });
    }
    Ok(())
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
        assert_eq!(refusal(|config| config.vcpus = 0), ConfigError::NoVcpus);
        assert_eq!(
            refusal(|config| config.vcpus = 17),
            ConfigError::TooManyVcpus { asked: 17, max: 16 }
        );
        assert_eq!(
            refusal(|config| config.per_vcpu_bytes = 0),
            ConfigError::NoMemory
        );
        assert_eq!(
            refusal(|config| config.per_vcpu_bytes = 5000),
            ConfigError::NotPageMultiple {
                bytes: 5000,
                backing: Backing::Shmem,
                page: 4096
            }
        );
        assert_eq!(
            refusal(|config| config.per_vcpu_bytes = 1 << 40),
            ConfigError::TooMuchMemory {
                bytes: 1 << 41,
                limit: 1 << 40
            }
        );
        assert_eq!(
            refusal(|config| config.per_vcpu_bytes = u64::MAX - 4095),
            ConfigError::TooMuchMemory {
                bytes: u64::MAX,
                limit: 1 << 40
            }
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
