//! The configuration of a Linux guest.

use std::ffi::CString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use linux_loader::cmdline::{self, Cmdline};
use pagetide_memory::{Backing, FailurePolicy, GuestRange, Region};

use crate::setup::SizeError;

use super::error::LinuxError;
use super::layout::RamLayout;
use super::memory;
use super::mp_table::MAX_PROCESSORS;

/// Parameters that each kernel gets: the console's device, and that a panic and a reboot go through the
/// keyboard controller, which ends the run. The caller's parameters follow, and take precedence.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0 reboot=k panic=-1";

/// The least memory in bytes; no Linux boots with less.
pub const MIN_MEMORY_BYTES: u64 = 32 << 20;

/// COMMAND_LINE_SIZE of Linux on x86, the NUL included.
const CMDLINE_CAPACITY: usize = 2048;

/// The configuration of a Linux guest. [`LinuxConfig::new`] gives the usual values.
#[derive(Clone, Debug)]
pub struct LinuxConfig {
    /// The kernel: an x86-64 vmlinux (ELF) or a bzImage.
    pub kernel: PathBuf,
    /// Its initrd.
    pub initrd: Option<PathBuf>,
    /// Kernel parameters that follow [`DEFAULT_CMDLINE`].
    pub cmdline: String,
    /// Bytes of memory, a multiple of the backing's page size.
    pub memory_bytes: u64,
    /// Number of vCPUs, at least 1.
    pub vcpus: u32,
    /// The backing of the memory.
    pub backing: Backing,
    /// What an uncorrected error takes from the guest; None: as little as this kernel supports
    /// ([`FailurePolicy::best_for`]).
    pub policy: Option<FailurePolicy>,
    /// The run fails if the guest has not ended after this long; None: no limit.
    pub time_limit: Option<Duration>,
    /// How long the vCPUs' threads have to end before they count as lost.
    pub stop_grace: Duration,
}

impl LinuxConfig {
    /// One vCPU, 256 MiB of 4K pages, no time limit.
    #[must_use]
    pub fn new(kernel: impl Into<PathBuf>) -> Self {
        Self {
            kernel: kernel.into(),
            initrd: None,
            cmdline: String::new(),
            memory_bytes: 256 << 20,
            vcpus: 1,
            backing: Backing::Shmem,
            policy: None,
            time_limit: None,
            stop_grace: Duration::from_secs(10),
        }
    }

    /// The policy: the configured one, or the best.
    #[must_use]
    pub fn policy(&self) -> FailurePolicy {
        self.policy
            .unwrap_or_else(|| FailurePolicy::best_for(self.backing))
    }

    /// Allocates memory for this configuration: one region, or two, the second at 4 GiB. Nothing of it
    /// is present.
    ///
    /// # Errors
    /// The configuration is impossible, or the memory cannot be allocated.
    pub fn regions(&self) -> Result<Vec<Arc<Region>>, LinuxError> {
        memory::allocate(self.layout()?, self.backing, self.policy()).map_err(LinuxError::Memory)
    }

    /// Checks what can be checked without KVM and files.
    pub(super) fn layout(&self) -> Result<RamLayout, LinuxConfigError> {
        SizeError::check_vcpus(self.vcpus, MAX_PROCESSORS.into())?;
        let bytes = self.memory_bytes;
        if bytes < MIN_MEMORY_BYTES {
            return Err(LinuxConfigError::TooLittleMemory { bytes });
        }
        SizeError::check_pages(bytes, self.backing)?;
        Ok(RamLayout::new(bytes))
    }

    /// Checks the limits of KVM.
    pub(super) fn check_limits(
        &self,
        max_vcpus: usize,
        gpa_limit: u64,
    ) -> Result<(), LinuxConfigError> {
        let max_vcpus = u32::try_from(max_vcpus).unwrap_or(u32::MAX);
        SizeError::check_vcpus(self.vcpus, max_vcpus)?;
        let end = self.layout()?.end();
        Ok(SizeError::check_end(self.memory_bytes, end, gpa_limit)?)
    }

    /// The whole command line.
    pub(super) fn command_line(&self) -> Result<CString, LinuxConfigError> {
        let refused = |source| LinuxConfigError::Cmdline { source };
        let mut line = Cmdline::new(CMDLINE_CAPACITY).map_err(refused)?;
        line.insert_str(DEFAULT_CMDLINE).map_err(refused)?;
        if !self.cmdline.trim().is_empty() {
            line.insert_str(&self.cmdline).map_err(refused)?;
        }
        line.as_cstring().map_err(refused)
    }
}

/// Why a configuration is impossible.
#[derive(Debug, thiserror::Error)]
pub enum LinuxConfigError {
    /// The number of vCPUs or the size of memory.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// Too little memory for any Linux.
    #[error("{bytes} bytes of memory: Linux needs at least {MIN_MEMORY_BYTES}")]
    TooLittleMemory {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The caller's regions are not where the guest's memory is.
    #[error("the guest's memory is at {needed:?}, and the regions are at {found:?}")]
    WrongRegions {
        /// Where the regions are.
        found: Vec<GuestRange>,
        /// Where they should be.
        needed: Vec<GuestRange>,
    },
    /// The command line is too long, or has characters that a kernel's must not have.
    #[error("the kernel's command line (at most {} bytes)", CMDLINE_CAPACITY - 1)]
    Cmdline {
        /// The reason.
        #[source]
        source: cmdline::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> LinuxConfig {
        LinuxConfig::new("vmlinux")
    }

    #[test]
    fn the_usual_values_are_valid() {
        assert!(config().layout().is_ok());
        let line = config().command_line().unwrap();
        assert_eq!(line.to_str(), Ok(DEFAULT_CMDLINE));
    }

    #[test]
    fn impossible_values_are_refused_with_the_limit() {
        let refused = |change: fn(&mut LinuxConfig)| {
            let mut config = config();
            change(&mut config);
            config.layout().unwrap_err().to_string()
        };
        for (message, expected) in [
            (refused(|c| c.vcpus = 0), "at least 1"),
            (refused(|c| c.vcpus = 255), "at most 254"),
            (refused(|c| c.memory_bytes = 4096), "at least 33554432"),
            (refused(|c| c.memory_bytes += 1), "page size of shmem, 4096"),
            (
                refused(|c| (c.backing, c.memory_bytes) = (Backing::Hugetlb1G, 3 << 29)),
                "page size of hugetlb-1g",
            ),
        ] {
            assert!(message.contains(expected), "{message}");
        }
        let mut config = config();
        config.memory_bytes = 1 << 40;
        assert!(config.check_limits(1, 1 << 40).is_err());
        assert!(config.check_limits(1, 1 << 41).is_ok());
        config.memory_bytes = u64::MAX - 4095;
        assert!(config.check_limits(1, 1 << 48).is_err());
    }

    #[test]
    fn the_command_line_is_limited() {
        let mut config = config();
        config.cmdline = "quiet -- memcycler 2".into();
        let line = config.command_line().unwrap();
        assert_eq!(
            line.to_str().unwrap(),
            format!("{DEFAULT_CMDLINE} quiet -- memcycler 2")
        );
        config.cmdline = "x".repeat(CMDLINE_CAPACITY - 1 - DEFAULT_CMDLINE.len() - 1);
        let line = config.command_line().unwrap();
        assert_eq!(line.as_bytes_with_nul().len(), CMDLINE_CAPACITY);
        config.cmdline.push('x');
        assert!(config.command_line().is_err());
        for bad in ["a\nb", "a\0b", "grüße"] {
            config.cmdline = bad.into();
            assert!(config.command_line().is_err(), "{bad:?}");
        }
    }
}
