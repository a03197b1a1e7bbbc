//! What differs between processor architectures.

#[cfg(target_arch = "x86_64")]
mod imp {
    use crate::error::MachineError;
    use crate::guest;
    use crate::layout::CODE;
    use crate::low_memory::LowMemory;
    use crate::x86_64;

    pub(crate) use pagetide_vmm::x86_64::Platform;
    pub(crate) use x86_64::{enter_at, position, reset, tell_steal_time, tsc_khz};

    pub(crate) fn check() -> Result<(), MachineError> {
        Ok(())
    }

    /// Copies the workload and its descriptor tables into low memory.
    pub(crate) fn write_code(low: &LowMemory) -> Result<(), MachineError> {
        low.write(CODE, guest::code())?;
        for (gpa, words) in x86_64::descriptor_tables() {
            low.write_words(gpa, &words)?;
        }
        Ok(())
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    use pagetide_kvm::{Kvm, Vcpu, Vm};

    use crate::error::MachineError;
    use crate::layout::Layout;
    use crate::low_memory::LowMemory;

    #[derive(Debug)]
    pub(crate) struct Platform;

    impl Platform {
        pub(crate) fn new(_kvm: &Kvm, _vm: &Vm) -> Result<Self, MachineError> {
            Err(MachineError::UnsupportedArchitecture)
        }

        pub(crate) fn gpa_limit(&self) -> u64 {
            0
        }

        pub(crate) fn prepare(&self, _vcpu: &Vcpu) -> Result<(), MachineError> {
            check()
        }
    }

    pub(crate) fn check() -> Result<(), MachineError> {
        Err(MachineError::UnsupportedArchitecture)
    }

    pub(crate) fn write_code(_low: &LowMemory) -> Result<(), MachineError> {
        check()
    }

    pub(crate) fn reset(_vcpu: &Vcpu, _layout: &Layout) -> Result<(), MachineError> {
        check()
    }

    pub(crate) fn tsc_khz(_vcpu: &Vcpu) -> Result<u32, MachineError> {
        Err(MachineError::UnsupportedArchitecture)
    }

    pub(crate) fn enter_at(_vcpu: &Vcpu, _rip: u64) -> Result<(), MachineError> {
        check()
    }

    pub(crate) fn tell_steal_time(_vcpu: &Vcpu, _gpa: u64) -> Result<bool, MachineError> {
        Err(MachineError::UnsupportedArchitecture)
    }

    pub(crate) fn position(_vcpu: &Vcpu) -> Option<(u64, u64)> {
        None
    }
}

pub(crate) use imp::{
    Platform, check, enter_at, position, reset, tell_steal_time, tsc_khz, write_code,
};
