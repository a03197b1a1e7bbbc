//! What differs between processor architectures.

#[cfg(target_arch = "x86_64")]
pub(crate) use crate::x86_64::*;
#[cfg(target_arch = "x86_64")]
pub(crate) use pagetide_vmm::x86_64::Platform;

/// No payload exists for other architectures: [`Platform::create_vm`] fails, and nothing else is called.
#[cfg(not(target_arch = "x86_64"))]
mod other {
    use pagetide_kvm::{Kvm, Vcpu, Vm};

    use crate::error::MachineError;
    use crate::layout::Layout;
    use crate::low_memory::LowMemory;

    pub(crate) const WORKLOAD: u64 = 0;

    #[derive(Debug)]
    pub(crate) struct Platform;

    macro_rules! unsupported {
        ($($name:ident($($argument:ty),*) -> $result:ty;)*) => {
            $(pub(crate) fn $name($(_: $argument),*) -> Result<$result, MachineError> {
                Err(MachineError::UnsupportedArchitecture)
            })*
        };
    }

    impl Platform {
        pub(crate) fn gpa_limit(&self) -> u64 {
            0
        }

        pub(crate) fn prepare(&self, _: &Vcpu) -> Result<(), MachineError> {
            Err(MachineError::UnsupportedArchitecture)
        }

        unsupported! { create_vm() -> (Kvm, Vm, Platform); }
    }

    unsupported! {
        write_code(&LowMemory, &[u8]) -> ();
        reset(&Vcpu, &Layout, u64) -> ();
        tsc_khz(&Vcpu) -> u32;
        enter_at(&Vcpu, u64) -> ();
        enable_steal_time(&Vcpu, u64) -> bool;
    }

    pub(crate) fn position(_vcpu: &Vcpu) -> Option<(u64, u64)> {
        None
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) use other::*;
