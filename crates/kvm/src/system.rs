//! /dev/kvm.

use std::io;

use kvm_bindings::KVM_API_VERSION;

use crate::os_error;
use crate::signals::Signals;
use crate::vm::{CreateVmError, Vm};

/// Why /dev/kvm cannot be used; each message names the remedy.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The device does not exist.
    #[error("no /dev/kvm: {}", how_to_get_kvm())]
    Missing(#[source] io::Error),
    /// The device exists, but this user may not open it.
    #[error("/dev/kvm: permission denied: add this user to the group kvm, or run as root")]
    Permission(#[source] io::Error),
    /// Any other error of open(2).
    #[error("cannot open /dev/kvm")]
    Open(#[source] io::Error),
    /// The device has another API version than 12, the only one since Linux 2.6.22.
    #[error("/dev/kvm has KVM API version {found}, not {KVM_API_VERSION}")]
    Version {
        /// What KVM_GET_API_VERSION returned.
        found: i32,
    },
}

const fn how_to_get_kvm() -> &'static str {
    if cfg!(target_arch = "x86_64") {
        "load the kvm_intel or kvm_amd module, or switch on virtualisation in the firmware or for \
         this virtual machine"
    } else {
        "the kernel needs CONFIG_KVM, and a machine that starts it at EL2"
    }
}

/// An open /dev/kvm.
#[derive(Debug)]
pub struct Kvm {
    fd: kvm_ioctls::Kvm,
}

impl Kvm {
    pub(crate) fn over(fd: kvm_ioctls::Kvm) -> Self {
        Self { fd }
    }

    /// Opens /dev/kvm and checks the API version.
    ///
    /// # Errors
    /// [`OpenError`], with the remedy.
    pub fn open() -> Result<Self, OpenError> {
        let fd = kvm_ioctls::Kvm::new_with_path(c"/dev/kvm").map_err(|errno| {
            let error = os_error(errno);
            match errno.errno() {
                libc::ENOENT | libc::ENODEV | libc::ENXIO => OpenError::Missing(error),
                libc::EACCES | libc::EPERM => OpenError::Permission(error),
                _ => OpenError::Open(error),
            }
        })?;
        let found = fd.get_api_version();
        if i64::from(found) != i64::from(KVM_API_VERSION) {
            return Err(OpenError::Version { found });
        }
        Ok(Self { fd })
    }

    /// Creates a VM without memory or vCPUs, whose vCPUs may use these signals.
    ///
    /// # Errors
    /// See [`CreateVmError`].
    pub fn create_vm(&self, signals: Signals) -> Result<Vm, CreateVmError> {
        Vm::new(self, signals)
    }

    /// As [`Kvm::create_vm`] with [`Signals::install`]: for programs that leave both signals to this
    /// crate.
    ///
    /// # Errors
    /// See [`CreateVmError`].
    pub fn create_vm_with_signals(&self) -> Result<Vm, CreateVmError> {
        self.create_vm(Signals::install()?)
    }

    /// The maximal number of vCPUs of a VM (KVM_CAP_MAX_VCPUS).
    #[must_use]
    pub fn max_vcpus(&self) -> usize {
        self.fd.get_max_vcpus()
    }

    /// The `kvm-ioctls` handle, for everything that this crate does not wrap.
    #[must_use]
    pub fn fd(&self) -> &kvm_ioctls::Kvm {
        &self.fd
    }
}
