//! What the guest's processors say of themselves: KVM's answer, with each one's own number and a
//! topology of single processors.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

const ECX_TSC_DEADLINE: u32 = 1 << 24;
const ECX_HYPERVISOR: u32 = 1 << 31;
const EDX_HYPER_THREADS: u32 = 1 << 28;

/// What a KVM can do, beside what it says in KVM_GET_SUPPORTED_CPUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Timer {
    /// KVM_CAP_TSC_DEADLINE_TIMER, with the in-kernel interrupt controller.
    pub(super) tsc_deadline: bool,
}

/// The entries for the processor `id`. Each processor is a package of its own.
pub(super) fn of(supported: &CpuId, id: u8, timer: Timer) -> CpuId {
    let mut cpuid = supported.clone();
    for entry in cpuid.as_mut_slice() {
        adapt(entry, u32::from(id), timer);
    }
    cpuid
}

fn adapt(entry: &mut kvm_cpuid_entry2, id: u32, timer: Timer) {
    match entry.function {
        // Bits 31-24: the APIC ID; 23-16: logical processors in the package.
        1 => {
            entry.ebx = (entry.ebx & 0xffff) | (1 << 16) | (id << 24);
            entry.ecx |= ECX_HYPERVISOR;
            if timer.tsc_deadline {
                entry.ecx |= ECX_TSC_DEADLINE;
            }
            entry.edx &= !EDX_HYPER_THREADS;
        }
        // Caches: shared by nobody; one core in the package.
        4 => entry.eax &= 0x3fff,
        // Extended topology: no level is valid, only the x2APIC ID.
        0xb | 0x1f => {
            (entry.eax, entry.ebx) = (0, 0);
            entry.ecx = entry.index;
            entry.edx = id;
        }
        // One core.
        0x8000_0008 => entry.ecx = 0,
        // APIC ID, its own compute unit, node 0 of 1.
        0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (id, 0, 0),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            eax: 0xffff_ffff,
            ebx: 0xffff_ffff,
            ecx: 0xffff_ffff,
            edx: 0xffff_ffff,
            ..kvm_cpuid_entry2::default()
        }
    }

    fn adapted(function: u32, id: u32) -> kvm_cpuid_entry2 {
        let mut adapted = entry(function);
        let timer = Timer {
            tsc_deadline: false,
        };
        adapt(&mut adapted, id, timer);
        adapted
    }

    #[test]
    fn a_processor_knows_its_number_and_is_alone_in_its_package() {
        let leaf = adapted(1, 5);
        assert_eq!((leaf.ebx >> 24, (leaf.ebx >> 16) & 0xff), (5, 1));
        assert_eq!(leaf.edx & EDX_HYPER_THREADS, 0);
        let leaf = adapted(0xb, 5);
        assert_eq!((leaf.eax, leaf.ebx, leaf.edx), (0, 0, 5));
        let leaf = adapted(0x8000_001e, 5);
        assert_eq!((leaf.eax, leaf.ecx), (5, 0));
        assert_eq!(adapted(0x8000_0008, 5).ecx, 0);
    }

    #[test]
    fn there_is_a_hypervisor_and_the_timer_that_kvm_has() {
        for tsc_deadline in [false, true] {
            let mut leaf = kvm_cpuid_entry2 {
                function: 1,
                ..kvm_cpuid_entry2::default()
            };
            adapt(&mut leaf, 0, Timer { tsc_deadline });
            assert_ne!(leaf.ecx & ECX_HYPERVISOR, 0);
            assert_eq!(leaf.ecx & ECX_TSC_DEADLINE != 0, tsc_deadline);
        }
    }

    #[test]
    fn other_leaves_stay() {
        assert_eq!(adapted(7, 5), entry(7));
        assert_eq!(adapted(0x4000_0001, 5), entry(0x4000_0001));
    }
}
