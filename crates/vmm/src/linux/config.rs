//! What a Linux guest is to be.

use std::ffi::CString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use linux_loader::cmdline::{self, Cmdline};
use pagetide_memory::{Backing, FailurePolicy, GuestRange, Region};

use super::error::LinuxError;
use super::layout::RamLayout;
use super::memory::Ram;
use super::mp_table::MAX_PROCESSORS;

/// What the kernel is always told: where its console is, and that a panic and a reboot go through
/// the keyboard controller, which ends the run. What a caller adds comes later, and wins.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0 reboot=k panic=-1";

/// Less than this starts no Linux.
pub const MIN_MEMORY_BYTES: u64 = 32 << 20;

/// COMMAND_LINE_SIZE of Linux on x86, the NUL included.
const CMDLINE_CAPACITY: usize = 2048;

/// What a Linux guest is to be. [`LinuxConfig::new`] gives the usual values.
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
    /// What the memory is made of.
    pub backing: Backing,
    /// What an uncorrected error takes from the guest; None: as little as this kernel can
    /// ([`FailurePolicy::best_for`]).
    pub policy: Option<FailurePolicy>,
    /// A guest that has not ended after this long is ended; None: it may run for ever.
    pub time_limit: Option<Duration>,
    /// How long vCPUs' threads have to come back at the end before they are given up as lost.
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

    /// The policy, chosen or not.
    #[must_use]
    pub fn policy(&self) -> FailurePolicy {
        self.policy
            .unwrap_or_else(|| FailurePolicy::best_for(self.backing))
    }

    /// Sets aside memory as this configuration wants it: one region, or two, the second from 4 GiB on.
    /// Nothing of it is present.
    ///
    /// # Errors
    /// The configuration cannot be, or the memory cannot be had.
    pub fn regions(&self) -> Result<Vec<Arc<Region>>, LinuxError> {
        Ram::set_aside(self.layout()?, self.backing, self.policy()).map_err(LinuxError::Memory)
    }

    /// Checks what can be checked without KVM and files.
    pub(super) fn layout(&self) -> Result<RamLayout, LinuxConfigError> {
        let page = self.backing.page_size().bytes();
        if self.vcpus == 0 {
            return Err(LinuxConfigError::NoVcpus);
        }
        self.check_vcpus(u32::from(MAX_PROCESSORS))?;
        if self.memory_bytes < MIN_MEMORY_BYTES {
            return Err(LinuxConfigError::TooLittleMemory {
                bytes: self.memory_bytes,
            });
        }
        if !self.memory_bytes.is_multiple_of(page) {
            return Err(LinuxConfigError::NotPageMultiple {
                bytes: self.memory_bytes,
                backing: self.backing,
                page,
            });
        }
        Ok(RamLayout::new(self.memory_bytes))
    }

    pub(super) fn check_vcpus(&self, max: u32) -> Result<(), LinuxConfigError> {
        if self.vcpus > max {
            let asked = self.vcpus;
            return Err(LinuxConfigError::TooManyVcpus { asked, max });
        }
        Ok(())
    }

    pub(super) fn check_end(&self, layout: RamLayout, limit: u64) -> Result<(), LinuxConfigError> {
        if layout.end().is_none_or(|end| end > limit) {
            let bytes = self.memory_bytes;
            return Err(LinuxConfigError::TooMuchMemory { bytes, limit });
        }
        Ok(())
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

/// Why a configuration cannot be; each message names the limit.
#[derive(Debug, thiserror::Error)]
pub enum LinuxConfigError {
    /// No vCPUs.
    #[error("a guest needs at least 1 vCPU")]
    NoVcpus,
    /// More vCPUs than the MP table or KVM has.
    #[error("{asked} vCPUs: there can be at most {max}")]
    TooManyVcpus {
        /// vCPUs asked for.
        asked: u32,
        /// The limit.
        max: u32,
    },
    /// Too little memory for any Linux.
    #[error("{bytes} bytes of memory: Linux needs at least {MIN_MEMORY_BYTES}")]
    TooLittleMemory {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The memory is not a number of pages.
    #[error("{bytes} bytes of memory are no multiple of the page size of {backing}, {page}")]
    NotPageMultiple {
        /// Bytes asked for.
        bytes: u64,
        /// What the memory is made of.
        backing: Backing,
        /// Its page size in bytes.
        page: u64,
    },
    /// The memory ends past what the guest's processor can address.
    #[error("{bytes} bytes of memory end above the guest's address limit, {limit:#x}")]
    TooMuchMemory {
        /// Bytes asked for.
        bytes: u64,
        /// First gpa that cannot be addressed.
        limit: u64,
    },
    /// The regions that the caller made are not the memory that the guest is to have.
    #[error("the guest's memory is to be {needed:?}, and the regions are {found:?}")]
    WrongRegions {
        /// Where the regions are.
        found: Vec<GuestRange>,
        /// Where they should be.
        needed: Vec<GuestRange>,
    },
    /// The command line is too long, or holds characters that a kernel's must not.
    #[error("the kernel's command line (at most {} bytes)", CMDLINE_CAPACITY - 1)]
    Cmdline {
        /// What is wrong with it.
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
    fn the_usual_values_are_good() {
        assert!(config().layout().is_ok());
        let line = config().command_line().unwrap();
        assert_eq!(line.to_str(), Ok(DEFAULT_CMDLINE));
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_limit() {
        let refused = |change: fn(&mut LinuxConfig)| {
            let mut config = config();
            change(&mut config);
            config.layout().unwrap_err().to_string()
        };
        for (told, wanted) in [
            (refused(|c| c.vcpus = 0), "at least 1"),
            (refused(|c| c.vcpus = 255), "at most 254"),
            (refused(|c| c.memory_bytes = 4096), "at least 33554432"),
            (refused(|c| c.memory_bytes += 1), "page size of shmem, 4096"),
            (
                refused(|c| (c.backing, c.memory_bytes) = (Backing::Hugetlb1G, 3 << 29)),
                "page size of hugetlb-1g",
            ),
        ] {
            assert!(told.contains(wanted), "{told}");
        }
        let mut config = config();
        config.memory_bytes = 1 << 40;
        let layout = config.layout().unwrap();
        assert!(config.check_end(layout, 1 << 40).is_err());
        assert!(config.check_end(layout, 1 << 41).is_ok());
        config.memory_bytes = u64::MAX - 4095;
        let layout = config.layout().unwrap();
        assert!(config.check_end(layout, 1 << 48).is_err());
    }

    #[test]
    fn the_command_line_has_an_end() {
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
