//! The Linux machine with a kernel of a few instructions, which also runs where no Linux does.

#![cfg(target_arch = "x86_64")]
#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod support;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pagetide_kvm::{OpenError, SlotFlags};
use pagetide_pager::{ReaderConfig, Readers};
use pagetide_vmm::linux::{
    LinuxConfig, LinuxConfigError, LinuxConsole, LinuxEnd, LinuxError, LinuxMachine, LinuxOutcome,
    LinuxRunError, MachineChecks,
};
use pagetide_vmm::{NoFaults, Paging, PoolFailure, VcpuHooks, stop_when_in_trouble};
use support::{chain, pager};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// Where the kernel lies and is entered.
const KERNEL: u64 = 16 * MIB;

/// Makes itself a stack where nothing was loaded, writes the first three bytes of the initrd, whose
/// address is in the boot parameters (rsi), to ttyS1, and halts.
const SAY_INITRD: &[u8] = &[
    0xbc, 0x00, 0x00, 0x00, 0x02, 0x50, // mov esp, 32 MiB; push rax
    0x8b, 0xb6, 0x18, 0x02, 0x00, 0x00, // mov esi, [rsi + 0x218]
    0xba, 0xf8, 0x02, 0x00, 0x00, // mov edx, 0x2f8
    0xb9, 0x03, 0x00, 0x00, 0x00, // mov ecx, 3
    0xac, 0xee, 0xe2, 0xfc, // 1: lodsb; out dx, al; loop 1b
    0xf4, // hlt
];
const SPIN: &[u8] = &[0xeb, 0xfe];
/// With interrupts off.
const HALT: &[u8] = &[0xf4];
/// To the keyboard controller.
const RESET: &[u8] = &[0xb0, 0xfe, 0xe6, 0x64];
/// An invalid instruction, and no table that says what to do about it.
const TRIPLE_FAULT: &[u8] = &[0x0f, 0x0b];

/// A machine's configuration, and its files.
struct Tiny {
    config: LinuxConfig,
    _files: TempDir,
}

/// An ELF file with one segment.
fn elf(code: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    file.extend_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    // An executable for x86-64, version 1.
    file.extend_from_slice(&[0x02, 0, 0x3e, 0, 1, 0, 0, 0]);
    for word in [KERNEL, 64, 0] {
        file.extend_from_slice(&u64::to_le_bytes(word));
    }
    file.extend_from_slice(&[0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    // To be loaded, readable and executable.
    file.extend_from_slice(&[1, 0, 0, 0, 5, 0, 0, 0]);
    let bytes = code.len() as u64;
    for word in [64 + 56, KERNEL, KERNEL, bytes, bytes, 0x1000] {
        file.extend_from_slice(&u64::to_le_bytes(word));
    }
    file.extend_from_slice(code);
    file
}

fn tiny(code: &[u8]) -> Tiny {
    let files = tempfile::tempdir().expect("a temporary directory");
    let write = |name: &str, content: &[u8]| -> PathBuf {
        let path = files.path().join(name);
        std::fs::write(&path, content).expect("room for it");
        path
    };
    let config = LinuxConfig {
        initrd: Some(write("initrd", b"42\n")),
        memory_bytes: 64 * MIB,
        time_limit: Some(Duration::from_secs(120)),
        ..LinuxConfig::new(write("vmlinux", &elf(code)))
    };
    Tiny {
        config,
        _files: files,
    }
}

/// None, with the reason printed, where there is no KVM.
fn made(result: Result<LinuxMachine, LinuxError>) -> Option<LinuxMachine> {
    match result {
        Ok(machine) => Some(machine),
        Err(LinuxError::Kvm(error @ (OpenError::Missing(_) | OpenError::Permission(_)))) => {
            println!("SKIP: {error}");
            None
        }
        Err(error) => panic!("{}", chain(&error)),
    }
}

fn run(machine: LinuxMachine, hooks: Arc<dyn VcpuHooks>) -> Result<LinuxOutcome, LinuxRunError> {
    machine.run(LinuxConsole::output(io::sink()), hooks)
}

#[test]
fn every_end_has_a_name() {
    for (code, wanted) in [
        (SAY_INITRD, LinuxEnd::Status(42)),
        (HALT, LinuxEnd::Halted),
        (RESET, LinuxEnd::Reset),
        (TRIPLE_FAULT, LinuxEnd::TripleFault),
    ] {
        let tiny = tiny(code);
        let Some(machine) = made(LinuxMachine::new(&tiny.config)) else {
            return;
        };
        let outcome = run(machine, Arc::new(NoFaults));
        let outcome = outcome.unwrap_or_else(|error| panic!("{wanted}: {}", chain(&error)));
        assert_eq!(outcome.end, wanted);
    }
}

#[test]
fn a_stop_with_a_cause_is_a_failure_and_one_without_an_end() {
    let mut tiny = tiny(SPIN);
    tiny.config.vcpus = 2;
    for cause in [None, Some("the page reader died")] {
        let Some(machine) = made(LinuxMachine::new(&tiny.config)) else {
            return;
        };
        let stopper = machine.stopper();
        let runner = thread::spawn(move || run(machine, Arc::new(NoFaults)));
        match cause {
            None => stopper.end(),
            Some(cause) => stopper.stop(cause),
        }
        match (runner.join().expect("no panic"), cause) {
            (Ok(outcome), None) => assert_eq!(outcome.end, LinuxEnd::Stopped),
            (Err(error @ LinuxRunError::Vcpus(PoolFailure::Stopped(_))), Some(cause)) => {
                assert!(chain(&error).ends_with(cause), "{}", chain(&error));
            }
            (other, _) => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_guest_without_end_is_ended_when_its_time_is_up() {
    let mut tiny = tiny(SPIN);
    tiny.config.time_limit = Some(Duration::from_millis(200));
    let Some(machine) = made(LinuxMachine::new(&tiny.config)) else {
        return;
    };
    match run(machine, Arc::new(NoFaults)) {
        Err(LinuxRunError::TimeLimit { rips, .. }) => assert_eq!(rips, [KERNEL]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_callers_pager_brings_in_what_was_loaded() {
    for exits in [false, true] {
        let tiny = tiny(SAY_INITRD);
        let regions = tiny.config.regions().expect("64 MiB");
        let Some(machine) = made(LinuxMachine::with_regions(&tiny.config, regions.clone())) else {
            return;
        };
        if exits && !machine.vm().capabilities().absent_mapping_fault {
            println!("SKIP: this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT");
            return;
        }
        let Some(pager) = pager(&regions) else { return };
        let flags = SlotFlags {
            absent_mapping_fault: exits,
            ..SlotFlags::default()
        };
        machine
            .set_slot_flags(flags)
            .expect("the capability is there");
        stop_when_in_trouble(&pager, &machine.stopper());
        let readers = Readers::spawn(&pager, ReaderConfig::new(1)).expect("threads");
        let paging = Arc::new(Paging::new(&pager, 1));
        let checks = MachineChecks::new(&machine).expect("errors are told of");
        let faults: Arc<dyn VcpuHooks> = Arc::<Paging>::clone(&paging);
        let outcome = run(machine, Arc::new(checks.other_faults_to(faults)));
        let outcome = outcome.unwrap_or_else(|error| panic!("{}", chain(&error)));
        assert_eq!(outcome.end, LinuxEnd::Status(42));
        let read = readers.stop();
        assert!(pager.trouble().is_none(), "{:?}", pager.trouble());
        // At least the kernel, the boot parameters, the page tables, the initrd and the stack.
        let by_exit = paging.counters().pages;
        assert!(
            (5..64).contains(&(by_exit + read.pages)),
            "{by_exit} {read:?}"
        );
        assert_eq!(by_exit > 0, exits, "{by_exit} {read:?}");
    }
}

#[test]
fn regions_elsewhere_are_refused() {
    let tiny = tiny(SPIN);
    let larger = LinuxConfig {
        memory_bytes: 65 * MIB,
        ..tiny.config.clone()
    };
    let regions = larger.regions().expect("65 MiB");
    match LinuxMachine::with_regions(&tiny.config, regions) {
        Err(LinuxError::Config(LinuxConfigError::WrongRegions { .. })) => {}
        Err(LinuxError::Kvm(error)) => println!("SKIP: {error}"),
        other => panic!("{other:?}"),
    }
}
