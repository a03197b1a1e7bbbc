//! The Linux machine with a kernel of a few instructions, which also runs on KVMs that boot no Linux.

#![cfg(target_arch = "x86_64")]
#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod support;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pagetide_kvm::{OpenError, SlotFlags};
use pagetide_pager::{Delivery, ReaderConfig, Readers};
use pagetide_test_support::{equals, eventually};
use pagetide_vmm::linux::{
    ContentFile, LinuxConfig, LinuxConfigError, LinuxConsole, LinuxEnd, LinuxError, LinuxMachine,
    LinuxOutcome, LinuxPaging, LinuxRunError, MachineChecks, PagedIn,
};
use pagetide_vmm::{NoFaults, Paging, PoolFailure, SetupError, VcpuHooks, stop_when_in_trouble};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use support::{chain, pager, skip_or_panic};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// The guests' memory.
const PAGES: u64 = 64 * MIB / 4096;
/// Where the kernel lies and is entered.
const KERNEL: u64 = 16 * MIB;

/// Pushes to a stack where nothing was loaded, writes the first three bytes of the initrd, whose address is in
/// the boot parameters (rsi), to ttyS1, and halts.
const WRITE_INITRD: &[u8] = &[
    0xbc, 0x00, 0x00, 0x00, 0x02, 0x50, // mov esp, 32 MiB; push rax
    0x8b, 0xb6, 0x18, 0x02, 0x00, 0x00, // mov esi, [rsi + 0x218]
    0xba, 0xf8, 0x02, 0x00, 0x00, // mov edx, 0x2f8
    0xb9, 0x03, 0x00, 0x00, 0x00, // mov ecx, 3
    0xac, 0xee, 0xe2, 0xfc, // 1: lodsb; out dx, al; loop 1b
    0xf4, // hlt
];
/// Writes 42 at 32 MiB and the initrd's first 30 bytes, which give that page up, to ttyS1; then a digit,
/// 0 plus what is at 32 MiB now, and the end of a line, and halts.
const GIVE_UP: &[u8] = &[
    0xbf, 0x00, 0x00, 0x00, 0x02, 0xc6, 0x07, 0x2a, // mov edi, 32 MiB; mov byte [rdi], 42
    0x8b, 0xb6, 0x18, 0x02, 0x00, 0x00, // mov esi, [rsi + 0x218]
    0xba, 0xf8, 0x02, 0x00, 0x00, // mov edx, 0x2f8
    0xb9, 0x1e, 0x00, 0x00, 0x00, // mov ecx, 30
    0xac, 0xee, 0xe2, 0xfc, // 1: lodsb; out dx, al; loop 1b
    0x8a, 0x07, 0x04, 0x30, 0xee, // mov al, [rdi]; add al, '0'; out dx, al
    0xb0, 0x0a, 0xee, 0xf4, // mov al, '\n'; out dx, al; hlt
];
/// The line that gives the page up.
const GIVEN_UP: &str = "discard 0x02000000 0x00001000\n";
/// Reads every page from 64 MiB down to 32 MiB, in the opposite order of prefetch, and writes 7 to ttyS1.
const READ_DOWN: &[u8] = &[
    0xbe, 0x00, 0x00, 0x00, 0x04, // mov esi, 64 MiB
    0x81, 0xee, 0x00, 0x10, 0x00, 0x00, // 1: sub esi, 4096
    0x8a, 0x06, // mov al, [rsi]
    0x81, 0xfe, 0x00, 0x00, 0x00, 0x02, // cmp esi, 32 MiB
    0x75, 0xf0, // jne 1b
    0xba, 0xf8, 0x02, 0x00, 0x00, 0xb0, 0x37, 0xee, // mov edx, 0x2f8; mov al, '7'; out dx, al
    0xb0, 0x0a, 0xee, 0xf4, // mov al, '\n'; out dx, al; hlt
];
/// Sends itself 20 interrupts, and writes to ttyS1 whether one came with interrupts off, in the handler of another
/// (1), or none (0). The handler takes 3 million instructions. It ends its interrupt first, with an exit, unless
/// KVM_FEATURE_PV_EOI avoids such exits.
const INTERRUPT_ITSELF: &[u8] = &[
    0xbc, 0x00, 0x00, 0x00, 0x02, // mov esp, 32 MiB
    0xb8, 0x01, 0x00, 0x00, 0x40, 0x0f, 0xa2, // mov eax, 0x40000001; cpuid
    0x83, 0xe0, 0x40, 0x89, 0xc5, // and eax, KVM_FEATURE_PV_EOI; mov ebp, eax
    0x0f, 0x01, 0x1c, 0x25, 0x87, 0x00, 0x00, 0x01, // lidt [idt]
    0x31, 0xf6, 0x31, 0xff, // xor esi, esi; xor edi, edi
    0xbb, 0x00, 0x00, 0xe0, 0xfe, // mov ebx, the local APIC
    0xc7, 0x83, 0xf0, 0x00, 0x00, 0x00, 0xff, 0x01, 0x00, 0x00, // mov [SVR], on
    0xb9, 0x14, 0x00, 0x00, 0x00, // mov ecx, 20
    0xc7, 0x83, 0x00, 0x03, 0x00, 0x00, // 1: mov [ICR], vector 0x40 to itself
    0x40, 0x00, 0x04, 0x00, //
    0xfb, 0x90, 0x90, 0xfa, // sti; nop; nop; cli
    0xff, 0xc9, 0x75, 0xee, // dec ecx; jne 1b
    0x85, 0xff, 0x0f, 0x95, 0xc0, 0x0c, 0x30, // test edi, edi; setne al; or al, '0'
    0xba, 0xf8, 0x02, 0x00, 0x00, 0xee, // mov edx, 0x2f8; out dx, al
    0xb0, 0x0a, 0xee, 0xf4, // mov al, '\n'; out dx, al; hlt
    0x50, 0x01, 0xf7, 0xff, 0xc6, // handler: push rax; add edi, esi; inc esi
    0x85, 0xed, 0x75, 0x06, // test ebp, ebp; jne 2f
    0x89, 0xab, 0xb0, 0x00, 0x00, 0x00, // mov [EOI], ebp
    0xb8, 0x60, 0xe3, 0x16, 0x00, // 2: mov eax, 1500000
    0xff, 0xc8, 0x75, 0xfc, // 3: dec eax; jne 3b
    0xff, 0xce, 0x89, 0x83, 0xb0, 0x00, 0x00, 0x00, // dec esi; mov [EOI], eax
    0x58, 0x48, 0xcf, // pop rax; iretq
    0x54, 0x00, 0x10, 0x00, 0x00, 0x8e, 0x00, 0x01, // its gate
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, //
    0xff, 0x0f, 0x77, 0xfc, 0xff, 0x00, // idt: with that gate as number 0x40
    0x00, 0x00, 0x00, 0x00,
];
const SPIN: &[u8] = &[0xeb, 0xfe];
/// With interrupts off.
const HALT: &[u8] = &[0xf4];
/// To the keyboard controller.
const RESET: &[u8] = &[0xb0, 0xfe, 0xe6, 0x64];
/// An invalid instruction, without a handler for the exception.
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
    tiny_with(code, b"42\n")
}

fn tiny_with(code: &[u8], initrd: &[u8]) -> Tiny {
    let files = tempfile::tempdir().expect("a temporary directory");
    let write = |name: &str, content: &[u8]| -> PathBuf {
        let path = files.path().join(name);
        std::fs::write(&path, content).expect("room for it");
        path
    };
    let config = LinuxConfig {
        initrd: Some(write("initrd", initrd)),
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
        Err(LinuxError::Setup(SetupError::Kvm(
            error @ (OpenError::Missing(_) | OpenError::Permission(_)),
        ))) => {
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
    for (code, expected) in [
        (WRITE_INITRD, LinuxEnd::Status(42)),
        (HALT, LinuxEnd::Halted),
        (RESET, LinuxEnd::Reset),
        (TRIPLE_FAULT, LinuxEnd::TripleFault),
    ] {
        let tiny = tiny(code);
        let Some(machine) = made(LinuxMachine::new(&tiny.config)) else {
            return;
        };
        let outcome = run(machine, Arc::new(NoFaults));
        let outcome = outcome.unwrap_or_else(|error| panic!("{expected}: {}", chain(&error)));
        assert_eq!(outcome.end, expected);
    }
}

/// A kernel that takes a lock with interrupts off relies on this.
#[test]
fn no_interrupt_comes_with_interrupts_off() {
    let tiny = tiny(INTERRUPT_ITSELF);
    let Some(machine) = made(LinuxMachine::new(&tiny.config)) else {
        return;
    };
    let outcome = run(machine, Arc::new(NoFaults));
    let outcome = outcome.unwrap_or_else(|error| panic!("{}", chain(&error)));
    assert_eq!(outcome.end, LinuxEnd::Status(0));
}

/// The same without an exit before the handler's end, as in Linux where KVM offers KVM_FEATURE_PV_EOI. Debian's QEMU
/// fails by instructions.
#[test]
fn no_interrupt_comes_twice_in_a_handler_without_exits() {
    const AND_EAX: [u8; 3] = [0x83, 0xe0, 0x40];
    const OR_EAX: [u8; 3] = [0x83, 0xc8, 0x40];
    if std::env::var("PAGETIDE_QEMU").is_ok_and(|qemu| qemu != "mended") {
        println!("SKIP: this QEMU may deliver an interrupt twice (docs/design/linux-guest.md)");
        return;
    }
    let mut code = INTERRUPT_ITSELF.to_vec();
    let at = code.windows(3).position(|bytes| bytes == AND_EAX);
    let at = at.expect("the test of KVM's features");
    code[at..at + 3].copy_from_slice(&OR_EAX);
    let tiny = tiny(&code);
    let Some(machine) = made(LinuxMachine::new(&tiny.config)) else {
        return;
    };
    let outcome = run(machine, Arc::new(NoFaults));
    let outcome = outcome.unwrap_or_else(|error| panic!("{}", chain(&error)));
    assert_eq!(outcome.end, LinuxEnd::Status(0));
}

#[test]
fn a_stop_with_a_cause_is_a_failure_and_one_without_is_an_end() {
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
fn a_guest_is_ended_at_its_time_limit() {
    let mut tiny = tiny(SPIN);
    // However slow the machine is, the guest does nothing but spin until then.
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
fn the_callers_pager_installs_what_was_loaded() {
    for exits in [false, true] {
        let tiny = tiny(WRITE_INITRD);
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
        let checks = MachineChecks::new(&machine).expect("errors are reported");
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
        Err(LinuxError::Setup(SetupError::Kvm(error))) => println!("SKIP: {error}"),
        other => panic!("{other:?}"),
    }
}

/// None, with the reason printed, where this host cannot page a guest's memory.
fn paged(
    config: &LinuxConfig,
    delivery: Delivery,
    prefetch: bool,
    content: ContentFile,
) -> Option<(LinuxMachine, LinuxPaging)> {
    match LinuxPaging::start(config, delivery, prefetch, content) {
        Ok(paged) => Some(paged),
        Err(error @ LinuxError::Setup(_)) => {
            made(Err(error));
            None
        }
        Err(error) => {
            skip_or_panic(&error);
            None
        }
    }
}

/// Runs the machine; returns how it ended, and the counts of its pages.
fn run_paged((machine, paging): (LinuxMachine, LinuxPaging)) -> (LinuxEnd, PagedIn) {
    let outcome = run(machine, paging.hooks());
    let outcome = outcome.unwrap_or_else(|error| panic!("{}", chain(&error)));
    (outcome.end, paging.end())
}

fn content() -> ContentFile {
    ContentFile::temporary().expect("a temporary file")
}

#[test]
fn all_memory_comes_from_the_file_while_the_guest_runs() {
    let tiny = tiny(WRITE_INITRD);
    for delivery in [Delivery::Uffd, Delivery::Exit] {
        let Some(paged) = paged(&tiny.config, delivery, false, content()) else {
            continue;
        };
        let region = &paged.0.regions()[0];
        let data = rustix::fs::seek(region.file().expect("a memfd"), SeekFrom::Data(0));
        assert_eq!(data, Err(Errno::NXIO), "something is in memory already");
        let (end, seen) = run_paged(paged);
        assert_eq!(end, LinuxEnd::Status(42), "{seen:?}");
        // At least the kernel, the boot parameters, the page tables, the initrd, and a stack of zeroes.
        assert!((5..64).contains(&seen.by_fault), "{seen:?}");
        assert!((1..seen.by_fault).contains(&seen.zero), "{seen:?}");
        assert_eq!((seen.total, seen.by_prefetch), (PAGES, 0));
        assert_eq!(seen.exits > 0, delivery == Delivery::Exit, "{seen:?}");
    }
}

#[test]
fn prefetch_fetches_untouched_pages() {
    let tiny = tiny(WRITE_INITRD);
    for delivery in [Delivery::Uffd, Delivery::Exit] {
        let Some(paged) = paged(&tiny.config, delivery, true, content()) else {
            continue;
        };
        eventually("the end of prefetch", || {
            equals(paged.1.pager().progress().present, &PAGES)
        });
        let (end, seen) = run_paged(paged);
        assert_eq!(end, LinuxEnd::Status(42));
        assert_eq!((seen.by_prefetch, seen.by_fault, seen.exits), (PAGES, 0, 0));
        assert!((PAGES - 1024..PAGES).contains(&seen.zero), "{seen:?}");
    }
}

#[test]
fn the_guest_and_prefetch_touch_the_same_pages() {
    let tiny = tiny(READ_DOWN);
    for delivery in [Delivery::Uffd, Delivery::Exit] {
        let Some(paged) = paged(&tiny.config, delivery, true, content()) else {
            continue;
        };
        let (end, seen) = run_paged(paged);
        assert_eq!(end, LinuxEnd::Status(7), "{seen:?}");
        assert!(seen.by_fault + seen.by_prefetch >= PAGES / 2, "{seen:?}");
        println!("{delivery:?}: {seen}");
    }
}

#[test]
fn what_the_guest_gives_up_reads_as_zeroes() {
    let tiny = tiny_with(GIVE_UP, GIVEN_UP.as_bytes());
    for delivery in [Delivery::Uffd, Delivery::Exit] {
        let Some(paged) = paged(&tiny.config, delivery, false, content()) else {
            continue;
        };
        let (end, seen) = run_paged(paged);
        assert_eq!((end, seen.discarded), (LinuxEnd::Status(0), 1), "{seen:?}");
    }
    let Some(machine) = made(LinuxMachine::new(&tiny.config)) else {
        return;
    };
    let outcome = run(machine, Arc::new(NoFaults)).expect("no failure");
    assert_eq!(outcome.end, LinuxEnd::Status(0));
}

#[test]
fn ranges_that_are_not_memory_cannot_be_given_up() {
    for line in [
        "discard 0xf2000000 0x00001000\n",
        "discard 0x02000000 0xf0000000\n",
    ] {
        let tiny = tiny_with(GIVE_UP, line.as_bytes());
        let Some(paged) = paged(&tiny.config, Delivery::Uffd, false, content()) else {
            return;
        };
        // 42 + '0' is no digit.
        let (end, seen) = run_paged(paged);
        assert_eq!((end, seen.discarded), (LinuxEnd::Halted, 0), "{seen:?}");
    }
}

#[test]
fn a_content_file_that_fails_ends_the_run() {
    let tiny = tiny(WRITE_INITRD);
    let files = tempfile::tempdir().expect("a temporary directory");
    let path = files.path().join("content");
    let kept = ContentFile::kept(&path, tiny.config.memory_bytes).expect("room for it");
    let Some((machine, paging)) = paged(&tiny.config, Delivery::Uffd, false, kept) else {
        return;
    };
    std::fs::File::create(&path).expect("it can be truncated");
    match run(machine, paging.hooks()) {
        Err(error) => assert!(chain(&error).contains("end of file"), "{}", chain(&error)),
        Ok(outcome) => panic!("{}", outcome.end),
    }
    assert_eq!(paging.end().by_fault, 0);
}

#[test]
fn a_content_file_is_for_one_guest() {
    let files = tempfile::tempdir().expect("a temporary directory");
    let path = files.path().join("content");
    let kept = |path: &Path, config: &LinuxConfig| ContentFile::kept(path, config.memory_bytes);
    let first = tiny(WRITE_INITRD);
    for _ in 0..2 {
        let content = kept(&path, &first.config).expect("room for it");
        let Some(paged) = paged(&first.config, Delivery::Uffd, false, content) else {
            return;
        };
        assert_eq!(run_paged(paged).0, LinuxEnd::Status(42));
    }
    let before = std::fs::read(&path).expect("it is kept");
    for other in [tiny(HALT), tiny_with(WRITE_INITRD, b"43\n")] {
        let content = kept(&path, &other.config).expect("it has the size");
        match LinuxPaging::start(&other.config, Delivery::Uffd, false, content) {
            Err(error @ LinuxError::Content(_)) => {
                assert!(
                    chain(&error).contains("made for another guest"),
                    "{}",
                    chain(&error)
                );
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(
        std::fs::read(&path).expect("it is kept") == before,
        "it was changed"
    );
}

#[test]
fn a_kernel_without_exits_is_refused_and_the_error_names_userfaultfd() {
    let tiny = tiny(WRITE_INITRD);
    let files = tempfile::tempdir().expect("a temporary directory");
    let path = files.path().join("content");
    let content = ContentFile::kept(&path, tiny.config.memory_bytes).expect("room for it");
    match LinuxPaging::start(&tiny.config, Delivery::Exit, false, content) {
        Err(error @ LinuxError::NoExits) => {
            let message = error.to_string();
            assert!(
                message.contains("KVM_CAP_ABSENT_MAPPING_FAULT") && message.contains("uffd"),
                "{message}"
            );
            assert!(!path.exists());
        }
        Ok(_) => println!("SKIP: this kernel has KVM_CAP_ABSENT_MAPPING_FAULT"),
        Err(error) => drop(made(Err(error))),
    }
}
