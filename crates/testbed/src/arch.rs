//! What differs between processor architectures.

#[cfg(target_arch = "x86_64")]
pub(crate) use crate::x86_64::*;
#[cfg(target_arch = "x86_64")]
pub(crate) use pagetide_vmm::x86_64::Platform;

#[cfg(not(target_arch = "x86_64"))]
mod other {
    use pagetide_kvm::{Kvm, Vcpu, Vm};

    use crate::error::MachineError;
    use crate::layout::Layout;
    use crate::low_memory::LowMemory;

    pub(crate) const WORKLOAD: u64 = 0;

    const UNSUPPORTED: MachineError = MachineError::UnsupportedArchitecture;

    #[derive(Debug)]
    pub(crate) struct Platform;

    impl Platform {
        pub(crate) fn new(_kvm: &Kvm, _vm: &Vm) -> Result<Self, MachineError> {
            Err(UNSUPPORTED)
        }

        pub(crate) fn gpa_limit(&self) -> u64 {
            0
        }

        pub(crate) fn prepare(&self, _vcpu: &Vcpu) -> Result<(), MachineError> {
            Err(UNSUPPORTED)
        }
    }

    pub(crate) fn write_code(_low: &LowMemory, _payload: &[u8]) -> Result<(), MachineError> {
        Err(UNSUPPORTED)
    }

    pub(crate) fn reset(_vcpu: &Vcpu, _layout: &Layout, _rip: u64) -> Result<(), MachineError> {
        Err(UNSUPPORTED)
    }

    pub(crate) fn tsc_khz(_vcpu: &Vcpu) -> Result<u32, MachineError> {
        Err(UNSUPPORTED)
    }

    pub(crate) fn enter_at(_vcpu: &Vcpu, _rip: u64) -> Result<(), MachineError> {
        Err(UNSUPPORTED)
    }

    pub(crate) fn enable_steal_time(_vcpu: &Vcpu, _gpa: u64) -> Result<bool, MachineError> {
        Err(UNSUPPORTED)
    }

    pub(crate) fn position(_vcpu: &Vcpu) -> Option<(u64, u64)> {
        None
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) use other::*;
