//! CPUID of the guest's processors: the entries that KVM supports, with each processor's number and a topology
//! of single processors.

use std::arch::x86_64::__cpuid;

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

const HYPERVISOR: u32 = 0x4000_0000;
const KVM_FEATURES: u32 = 0x4000_0001;
const EAX_PV_EOI: u32 = 1 << 6;
const ECX_TSC_DEADLINE: u32 = 1 << 24;
const ECX_HYPERVISOR: u32 = 1 << 31;
const EDX_HYPER_THREADS: u32 = 1 << 28;

/// Properties of the host that KVM_GET_SUPPORTED_CPUID does not report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Host {
    /// KVM_CAP_TSC_DEADLINE_TIMER, with the in-kernel interrupt controller.
    pub(super) tsc_deadline: bool,
    /// The processor may deliver an injected interrupt a second time, until the guest exits.
    pub(super) repeats_interrupts: bool,
}

/// Whether the processor is QEMU's software CPU, which repeats interrupts (docs/design/linux-guest.md).
pub(super) fn is_software_cpu() -> bool {
    let leaf = __cpuid(HYPERVISOR);
    let signature = [leaf.ebx, leaf.ecx, leaf.edx].map(u32::to_le_bytes);
    signature.as_flattened() == b"TCGTCGTCGTCG"
}

/// The entries for the processor `id`. Each processor is a package of its own.
pub(super) fn of(supported: &CpuId, id: u8, host: Host) -> CpuId {
    let mut cpuid = supported.clone();
    for entry in cpuid.as_mut_slice() {
        adapt(entry, u32::from(id), host);
    }
    cpuid
}

fn adapt(entry: &mut kvm_cpuid_entry2, id: u32, host: Host) {
    match entry.function {
        // Bits 31-24: the APIC ID; 23-16: logical processors in the package.
        1 => {
            entry.ebx = (entry.ebx & 0xffff) | (1 << 16) | (id << 24);
            entry.ecx |= ECX_HYPERVISOR;
            if host.tsc_deadline {
                entry.ecx |= ECX_TSC_DEADLINE;
            }
            entry.edx &= !EDX_HYPER_THREADS;
        }
        // Without it, interrupt handlers of the guest exit at their start, before they take a lock.
        KVM_FEATURES if host.repeats_interrupts => entry.eax &= !EAX_PV_EOI,
        // Caches: not shared; one core in the package.
        4 => entry.eax &= 0x3fff,
        // Extended topology: no valid level, and the x2APIC ID.
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

    const HOST: Host = Host {
        tsc_deadline: false,
        repeats_interrupts: false,
    };

    fn adapted(function: u32, id: u32) -> kvm_cpuid_entry2 {
        let mut adapted = entry(function);
        adapt(&mut adapted, id, HOST);
        adapted
    }

    #[test]
    fn each_processor_has_its_number_and_a_package_of_its_own() {
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
    fn the_hypervisor_and_kvms_timer_are_reported() {
        for tsc_deadline in [false, true] {
            let mut leaf = kvm_cpuid_entry2 {
                function: 1,
                ..kvm_cpuid_entry2::default()
            };
            let host = Host {
                tsc_deadline,
                ..HOST
            };
            adapt(&mut leaf, 0, host);
            assert_ne!(leaf.ecx & ECX_HYPERVISOR, 0);
            assert_eq!(leaf.ecx & ECX_TSC_DEADLINE != 0, tsc_deadline);
        }
    }

    #[test]
    fn ends_of_interrupts_exit_if_interrupts_may_come_twice() {
        let mut leaf = entry(KVM_FEATURES);
        let host = Host {
            repeats_interrupts: true,
            ..HOST
        };
        adapt(&mut leaf, 0, host);
        assert_eq!(leaf.eax, !EAX_PV_EOI);
    }

    #[test]
    fn other_leaves_are_unchanged() {
        assert_eq!(adapted(7, 5), entry(7));
        assert_eq!(adapted(0x4000_0001, 5), entry(0x4000_0001));
    }
}
