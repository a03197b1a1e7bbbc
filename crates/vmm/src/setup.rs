//! Why a guest cannot be set up.

use std::io;

use pagetide_kvm::{CreateVcpuError, CreateVmError, OpenError, SlotError};
use pagetide_memory::Backing;

/// KVM cannot be used, or refused a part of a guest's set-up.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// /dev/kvm cannot be used.
    #[error(transparent)]
    Kvm(#[from] OpenError),
    /// The VM cannot be created.
    #[error(transparent)]
    CreateVm(#[from] CreateVmError),
    /// A vCPU cannot be created.
    #[error(transparent)]
    CreateVcpu(#[from] CreateVcpuError),
    /// KVM refused a memory slot.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// Another ioctl failed.
    #[error("{}{operation} failed", vcpu.map_or_else(String::new, |vcpu| format!("vCPU {vcpu}: ")))]
    Ioctl {
        /// The vCPU, if the ioctl was on one.
        vcpu: Option<u32>,
        /// The ioctl.
        operation: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

impl SetupError {
    /// For `map_err`, of an ioctl on a VM.
    pub fn on_vm<E: Into<io::Error>>(operation: &'static str) -> impl FnOnce(E) -> Self {
        Self::on(None, operation)
    }

    /// For `map_err`, of an ioctl on a vCPU.
    pub fn on_vcpu<E: Into<io::Error>>(id: u32, operation: &'static str) -> impl FnOnce(E) -> Self {
        Self::on(Some(id), operation)
    }

    fn on<E: Into<io::Error>>(
        vcpu: Option<u32>,
        operation: &'static str,
    ) -> impl FnOnce(E) -> Self {
        move |source| Self::Ioctl {
            vcpu,
            operation,
            source: source.into(),
        }
    }
}

/// Why a guest cannot have this size. Each message names the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// No vCPUs.
    #[error("a guest needs at least 1 vCPU")]
    NoVcpus,
    /// Too many vCPUs.
    #[error("{asked} vCPUs: there can be at most {max}")]
    TooManyVcpus {
        /// vCPUs asked for.
        asked: u32,
        /// The limit.
        max: u32,
    },
    /// The memory is not a whole number of pages.
    #[error("{bytes} bytes of memory are no multiple of the page size of {backing}, {page}")]
    NotPageMultiple {
        /// Bytes asked for.
        bytes: u64,
        /// The backing of the memory.
        backing: Backing,
        /// Its page size in bytes.
        page: u64,
    },
    /// The memory ends above what the guest's processor can address.
    #[error("{bytes} bytes of memory end above the guest's address limit, {limit:#x}")]
    TooMuchMemory {
        /// Bytes asked for.
        bytes: u64,
        /// The first gpa that cannot be addressed.
        limit: u64,
    },
}

impl SizeError {
    /// Checks a number of vCPUs.
    ///
    /// # Errors
    /// There are none, or more than `max`.
    pub fn check_vcpus(asked: u32, max: u32) -> Result<(), Self> {
        match asked {
            0 => Err(Self::NoVcpus),
            _ if asked > max => Err(Self::TooManyVcpus { asked, max }),
            _ => Ok(()),
        }
    }

    /// Checks that `bytes` bytes are whole pages of a backing.
    ///
    /// # Errors
    /// They are not.
    pub fn check_pages(bytes: u64, backing: Backing) -> Result<(), Self> {
        let page = backing.page_size().bytes();
        if bytes.is_multiple_of(page) {
            return Ok(());
        }
        Err(Self::NotPageMultiple {
            bytes,
            backing,
            page,
        })
    }

    /// Checks that memory of `bytes` bytes, which ends at the gpa `end`, or past 2^64, ends below the
    /// limit.
    ///
    /// # Errors
    /// It does not.
    pub fn check_end(bytes: u64, end: Option<u64>, limit: u64) -> Result<(), Self> {
        if end.is_none_or(|end| end > limit) {
            return Err(Self::TooMuchMemory { bytes, limit });
        }
        Ok(())
    }
}
