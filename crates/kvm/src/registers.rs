//! A vCPU's registers. The ioctls do not overlap the update of a slot transaction, because some of them
//! read guest memory (page-directory pointers, steal time, the guest's clock).

use std::io;

use crate::vcpu::Vcpu;

impl Vcpu {
    /// The guest's instruction pointer; None if it cannot be read.
    #[must_use]
    pub fn rip(&self) -> Option<u64> {
        #[cfg(target_arch = "x86_64")]
        let rip = self.regs().ok().map(|regs| regs.rip);
        #[cfg(not(target_arch = "x86_64"))]
        let rip = None;
        rip
    }
}

#[cfg(target_arch = "x86_64")]
impl Vcpu {
    /// KVM_GET_REGS.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn regs(&self) -> io::Result<kvm_bindings::kvm_regs> {
        Ok(self.held(kvm_ioctls::VcpuFd::get_regs)?)
    }

    /// KVM_SET_REGS.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_regs(&self, regs: &kvm_bindings::kvm_regs) -> io::Result<()> {
        Ok(self.held(|fd| fd.set_regs(regs))?)
    }

    /// KVM_GET_SREGS.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn sregs(&self) -> io::Result<kvm_bindings::kvm_sregs> {
        Ok(self.held(kvm_ioctls::VcpuFd::get_sregs)?)
    }

    /// KVM_SET_SREGS.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_sregs(&self, sregs: &kvm_bindings::kvm_sregs) -> io::Result<()> {
        Ok(self.held(|fd| fd.set_sregs(sregs))?)
    }

    /// KVM_SET_MSRS; returns how many of them, from the first on, were set.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_msrs(&self, msrs: &kvm_bindings::Msrs) -> io::Result<usize> {
        Ok(self.held(|fd| fd.set_msrs(msrs))?)
    }
}
