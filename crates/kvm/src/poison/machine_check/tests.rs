use super::*;

use MachineCheckForm::{Amd, Intel};
use Severity::{ActionOptional, ActionRequired};

const GPA: GuestAddress = GuestAddress(0x1_2345_6789);

fn has(value: u64, bit: u32) -> bool {
    value >> bit & 1 == 1
}

/// The rules by which Linux decides for errors with an exception in user mode (Intel's form): the first
/// rows of its table that can match a machine check of this crate.
fn linux_on_intel(check: &MachineCheck, in_user_mode: bool) -> &'static str {
    let status = |bit| has(check.status, bit);
    let (valid, over, uc, enabled, pcc) =
        (status(63), status(62), status(61), status(60), status(57));
    let (signalled, required) = (status(56), status(55));
    let address = status(59) && status(58);
    let code = check.status & 0xefff;
    let (ripv, eipv, mcip) = (
        has(check.mcg_status, 0),
        has(check.mcg_status, 1),
        has(check.mcg_status, 2),
    );
    match () {
        () if !valid || !enabled => "ignored",
        () if pcc || !mcip || !(ripv || eipv) => "panic",
        () if !in_user_mode && !ripv => "panic",
        () if uc && !required && code & 0xeff0 == 0xc0 => "action optional",
        () if uc && !signalled => "no action",
        () if over => "panic",
        () if uc && signalled && required && address && ripv && !eipv => "unaffected",
        () if uc && signalled && required && address && code == 0x134 && in_user_mode => {
            "kill the process"
        }
        () => "panic",
    }
}

/// The same for AMD's form.
fn linux_on_amd(check: &MachineCheck, in_user_mode: bool) -> &'static str {
    let status = |bit| has(check.status, bit);
    match () {
        () if !status(63) => "ignored",
        () if status(57) => "panic",
        () if status(44) => "deferred",
        () if !status(61) => "no action",
        () if status(62) || !in_user_mode => "panic",
        () => "kill the process",
    }
}

/// Whether Linux accepts the address as that of a page to take out of use.
fn address_is_usable(form: MachineCheckForm, check: &MachineCheck) -> bool {
    let status = |bit| has(check.status, bit);
    status(58)
        && match form {
            Intel => status(59) && check.misc & 0x3f <= 12 && check.misc >> 6 & 7 == 2,
            Amd => status(43),
        }
}

#[test]
fn linux_kills_only_the_process_that_touched_the_memory() {
    let check = |form| MachineCheck::new(form, ActionRequired, GPA);
    assert_eq!(linux_on_intel(&check(Intel), true), "kill the process");
    assert_eq!(linux_on_intel(&check(Intel), false), "panic");
    assert_eq!(linux_on_amd(&check(Amd), true), "kill the process");
    assert_eq!(linux_on_amd(&check(Amd), false), "panic");
    for form in [Intel, Amd] {
        assert!(check(form).is_exception());
        // The machine check belongs to this vCPU's instruction, and execution can return to it.
        assert_eq!(check(form).mcg_status, 0b111);
    }
}

#[test]
fn an_error_without_access_kills_no_process() {
    let check = |form| MachineCheck::new(form, ActionOptional, GPA);
    for in_user_mode in [false, true] {
        assert_eq!(
            linux_on_intel(&check(Intel), in_user_mode),
            "action optional"
        );
        assert_eq!(linux_on_amd(&check(Amd), in_user_mode), "deferred");
    }
    assert!(check(Intel).is_exception());
    assert!(!check(Amd).is_exception());
    assert_eq!(linux_on_intel(&MachineCheck::bystander(), false), "ignored");
    assert!(MachineCheck::bystander().is_exception());
}

#[test]
fn the_address_is_that_of_the_page() {
    for form in [Intel, Amd] {
        for severity in [ActionRequired, ActionOptional] {
            let check = MachineCheck::new(form, severity, GPA);
            assert!(address_is_usable(form, &check), "{check:x?}");
            assert_eq!(check.addr, 0x1_2345_6000);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod cpuid {
    use kvm_bindings::{CpuId, kvm_cpuid_entry2};

    use super::*;

    fn cpuid(vendor: &[u8; 12], has_ras_leaf: bool) -> CpuId {
        let word =
            |index: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| vendor[4 * index + byte]));
        let leaf = |function| kvm_cpuid_entry2 {
            function,
            ..kvm_cpuid_entry2::default()
        };
        let mut leaves = vec![
            kvm_cpuid_entry2 {
                ebx: word(0),
                edx: word(1),
                ecx: word(2),
                ..leaf(0)
            },
            leaf(1),
        ];
        if has_ras_leaf {
            leaves.push(kvm_cpuid_entry2 {
                edx: 0x100,
                ..leaf(0x8000_0007)
            });
        }
        CpuId::from_entries(&leaves).expect("a few leaves")
    }

    #[test]
    fn the_cpuid_declares_recovery() {
        for (vendor, form, has_ras_leaf) in [
            (b"AuthenticAMD", Amd, true),
            (b"AuthenticAMD", Amd, false),
            (b"HygonGenuine", Amd, true),
            (b"GenuineIntel", Intel, true),
            (b"            ", Intel, false),
        ] {
            let mut cpuid = cpuid(vendor, has_ras_leaf);
            assert_eq!(prepare_cpuid(&mut cpuid), Ok(form));
            let leaf = |function| {
                let mut leaves = cpuid.as_slice().iter();
                leaves.find(|leaf| leaf.function == function)
            };
            assert_eq!(leaf(1).expect("it was there").edx, 1 << 7 | 1 << 14);
            let ras = leaf(0x8000_0007).map(|leaf| leaf.ebx);
            let expected = match form {
                Amd => Some(3),
                Intel => has_ras_leaf.then_some(0),
            };
            assert_eq!(ras, expected);
        }
    }
}
