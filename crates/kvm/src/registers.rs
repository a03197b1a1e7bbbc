//! A vCPU's registers. The ioctls do not overlap the update of a slot transaction, because some of them
//! read guest memory (page-directory pointers, steal time, the guest's clock).

#[cfg(target_arch = "x86_64")]
use std::io;

use crate::vcpu::Vcpu;

impl Vcpu {
    /// The address of the guest's next instruction (x86-64: RIP; arm64: PC); None if it cannot be
    /// read.
    #[must_use]
    pub fn rip(&self) -> Option<u64> {
        #[cfg(target_arch = "x86_64")]
        let next = self.regs().ok().map(|regs| regs.rip);
        #[cfg(target_arch = "aarch64")]
        let next = self.program_counter();
        next
    }
}

#[cfg(target_arch = "aarch64")]
impl Vcpu {
    fn program_counter(&self) -> Option<u64> {
        use kvm_bindings::{
            KVM_REG_ARM_CORE, KVM_REG_ARM64, KVM_REG_SIZE_U64, kvm_regs, user_pt_regs,
        };
        use std::mem::offset_of;

        // KVM names a core register by its place in kvm_regs, in words of 32 bits.
        const WORDS: usize = (offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, pc)) / 4;
        const PC: u64 = KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE as u64 | WORDS as u64;

        let mut bytes = [0; 8];
        self.held(|fd| fd.get_one_reg(PC, &mut bytes)).ok()?;
        Some(u64::from_le_bytes(bytes))
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
