//! A Linux guest: it boots, finds all its processors, and ends in every possible way.
//!
//! Needs the lab's kernel (`cargo xtask kernel build`) and the guests' initramfs (`cargo xtask
//! guest`).

#![cfg(target_arch = "x86_64")]
#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod support;

use std::io::{self, PipeWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use pagetide_kvm::SlotFlags;
use pagetide_kvm::poison::{SimulateError, Simulated, simulate_error};
use pagetide_memory::{Backing, FailurePolicy, GuestAddress, PoisonMap, RegionError};
use pagetide_pager::{Delivery, ReaderConfig, Readers};
use pagetide_vmm::linux::{
    ContentFile, LinuxConfig, LinuxConsole, LinuxEnd, LinuxError, LinuxMachine, LinuxPaging,
    LinuxRunError, MachineChecks,
};
use pagetide_vmm::{NoFaults, Paging, VcpuHooks, stop_when_in_trouble};
use support::{chain, pager, skip_or_panic, virtualises};

/// Much longer than a boot takes in a software CPU: a guest that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(120);

/// A guest that runs `command`, or None with the reason printed where this host cannot have one.
fn config(vcpus: u32, command: &str) -> Option<LinuxConfig> {
    if !virtualises() {
        println!("SKIP: this machine's KVM, if any, emulates the processor, and no Linux boots");
        return None;
    }
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    let file = |name: &str, made_by: &str| -> Option<PathBuf> {
        let path = target.join(name);
        if !path.exists() {
            println!("SKIP: no {}: {made_by} makes it", path.display());
            return None;
        }
        Some(path)
    };
    let kernel = file("kernel/x86_64/vmlinux", "cargo xtask kernel build")?;
    Some(LinuxConfig {
        initrd: Some(file("guest/initramfs.cpio", "cargo xtask guest")?),
        vcpus,
        cmdline: command.to_owned(),
        time_limit: Some(LIMIT),
        ..LinuxConfig::new(kernel)
    })
}

/// The console's output so far.
#[derive(Clone, Default)]
struct Screen(Arc<(Mutex<Vec<u8>>, Condvar)>);

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0
            .0
            .lock()
            .expect("no test panics with it")
            .extend_from_slice(bytes);
        self.0.1.notify_all();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Screen {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.0.lock().expect("as above")).into_owned()
    }

    /// Waits for a text and the end of its line; returns what is between them.
    fn wait_for(&self, text: &str) -> String {
        let started = Instant::now();
        loop {
            let output = self.text();
            let rest = output.split_once(text).map(|(_, rest)| rest);
            if let Some((found, _)) = rest.and_then(|rest| rest.split_once('\n')) {
                return found.trim().to_owned();
            }
            assert!(started.elapsed() < LIMIT, "no {text:?} in\n{output}");
            let guard = self.0.0.lock().expect("as above");
            let _ = self.0.1.wait_timeout(guard, Duration::from_millis(100));
        }
    }
}

fn machine(config: &LinuxConfig) -> LinuxMachine {
    LinuxMachine::new(config).unwrap_or_else(|error| panic!("{}", chain(&error)))
}

/// Runs a guest to its end; returns how it ended, and its output.
fn run(config: &LinuxConfig) -> (LinuxEnd, String) {
    let screen = Screen::default();
    let console = LinuxConsole::output(screen.clone());
    let outcome = machine(config)
        .run(console, Arc::new(NoFaults))
        .unwrap_or_else(|error| panic!("{}\n{}", chain(&error), screen.text()));
    (outcome.end, screen.text())
}

// A boot takes ten seconds and more in a software CPU: each test checks several things.

#[test]
fn a_bzimage_boots_and_ends_with_its_status() {
    let Some(mut config) = config(1, r#"quiet -- sh -c "echo hello; exit 37""#) else {
        return;
    };
    config.kernel.set_file_name("bzImage");
    let (end, output) = run(&config);
    assert_eq!(end, LinuxEnd::Status(37), "{output}");
    assert!(
        output.contains("CPUs 0 online") && output.contains("\nhello\r\n"),
        "{output}"
    );
}

#[test]
fn the_kernel_finds_the_machines_devices() {
    let Some(config) = config(2, "-- memcycler 2 4M 1") else {
        return;
    };
    let (end, output) = run(&config);
    assert_eq!(end, LinuxEnd::Status(0), "{output}");
    for expected in [
        "CPUs 0-1 online",
        "found SMP MP-table",
        "Hypervisor detected: KVM",
        "kvm-clock: Using msrs",
        "ttyS1 at I/O 0x2f8 (irq = 3",
        "every word right",
    ] {
        assert!(output.contains(expected), "{expected} in\n{output}");
    }
    for complaint in ["WARNING:", "BUG:", "detected stall"] {
        assert!(!output.contains(complaint), "{complaint} in\n{output}");
    }
}

#[test]
fn every_end_has_a_name_with_any_backing() {
    for (command, expected, backing) in [
        ("quiet -- reboot -f", LinuxEnd::Reset, Backing::Anonymous),
        ("quiet -- poweroff -f", LinuxEnd::Halted, Backing::Thp),
        (
            "quiet reboot=t -- reboot -f",
            LinuxEnd::TripleFault,
            Backing::Hugetlb2M,
        ),
    ] {
        let Some(config) = config(1, command) else {
            return;
        };
        let config = LinuxConfig {
            backing,
            memory_bytes: 128 << 20,
            ..config
        };
        match LinuxMachine::new(&config) {
            Err(LinuxError::Memory(
                lack @ (RegionError::HugepagesNotReserved { .. }
                | RegionError::NoHugepagePool { .. }
                | RegionError::NoTransparentHugepages),
            )) => {
                println!("SKIP: {backing}: {lack}");
                continue;
            }
            Err(error) => panic!("{}", chain(&error)),
            Ok(_) => {}
        }
        let (end, output) = run(&config);
        assert_eq!(end, expected, "{command} in {backing}\n{output}");
    }
}

#[test]
fn a_panics_message_is_reported() {
    let crash = r#"quiet -- sh -c "echo c > /proc/sysrq-trigger""#;
    let Some(config) = config(1, crash) else {
        return;
    };
    let (end, output) = run(&config);
    let LinuxEnd::Panicked { message } = end else {
        panic!("{end}\n{output}");
    };
    assert!(message.contains("sysrq triggered crash"), "{message}");
}

#[test]
fn input_reaches_the_guest() {
    let Some(config) = config(1, "quiet") else {
        return;
    };
    let (screen, (reader, mut keys)) = (Screen::default(), io::pipe().expect("a pipe"));
    let console = LinuxConsole::output(screen.clone()).input(reader.into());
    let machine = machine(&config);
    let runner = std::thread::spawn(move || machine.run(console, Arc::new(NoFaults)));
    screen.wait_for("pagetide guest: Linux");
    // Longer than the serial port's buffer.
    let long = "x".repeat(200);
    type_in(
        &mut keys,
        &format!("echo {long} | wc -c; echo $((6 * 7))seven\n"),
    );
    screen.wait_for("42seven");
    assert!(screen.text().contains("\n201\r\n"), "{}", screen.text());
    type_in(&mut keys, "exit 9\n");
    let outcome = runner.join().expect("no panic");
    let outcome = outcome.unwrap_or_else(|error| panic!("{}", chain(&error)));
    assert_eq!(outcome.end, LinuxEnd::Status(9));
}

fn type_in(keys: &mut PipeWriter, text: &str) {
    keys.write_all(text.as_bytes()).expect("the guest reads");
}

#[test]
fn a_stopper_and_the_time_limit_end_a_guest() {
    let Some(mut config) = config(2, "quiet -- sleep 1000") else {
        return;
    };
    let screen = Screen::default();
    let machine_to_stop = machine(&config);
    let stopper = machine_to_stop.stopper();
    let console = LinuxConsole::output(screen.clone());
    let runner = std::thread::spawn(move || machine_to_stop.run(console, Arc::new(NoFaults)));
    screen.wait_for("pagetide guest: Linux");
    stopper.end();
    let outcome = runner
        .join()
        .expect("no panic")
        .expect("a stop is no failure");
    assert_eq!(outcome.end, LinuxEnd::Stopped);

    config.time_limit = Some(Duration::from_secs(1));
    let result = machine(&config).run(LinuxConsole::output(io::sink()), Arc::new(NoFaults));
    match result {
        Err(LinuxRunError::TimeLimit { rips, .. }) => assert_eq!(rips.len(), 2),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_guest_boots_while_its_memory_is_installed() {
    for exits in [false, true] {
        let Some(config) = config(2, "-- memcycler 2 4M 1") else {
            return;
        };
        let regions = config
            .regions()
            .unwrap_or_else(|error| panic!("{}", chain(&error)));
        let machine = LinuxMachine::with_regions(&config, regions.clone());
        let machine = machine.unwrap_or_else(|error| panic!("{}", chain(&error)));
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
        let paging = Arc::new(Paging::new(&pager, config.vcpus));
        let screen = Screen::default();
        let hooks: Arc<dyn VcpuHooks> = Arc::<Paging>::clone(&paging);
        let outcome = machine.run(LinuxConsole::output(screen.clone()), hooks);
        let output = screen.text();
        let outcome = outcome.unwrap_or_else(|error| panic!("{}\n{output}", chain(&error)));
        assert_eq!(outcome.end, LinuxEnd::Status(0), "{output}");
        assert!(output.contains("every word right"), "{output}");
        let read = readers.stop();
        assert!(pager.trouble().is_none(), "{:?}", pager.trouble());
        let (by_exit, present) = (paging.counters(), pager.progress().present);
        let (exit_pages, read_pages) = (by_exit.pages, read.pages);
        println!("exits {exits}: {exit_pages} pages by exits, {read_pages} by readers");
        assert_eq!(exit_pages + read_pages, present, "each page once");
        assert!(
            present > 1000 && (exit_pages > 0) == exits,
            "{by_exit:?} {read:?}"
        );
    }
}

/// Boots with all memory in a file, cycles through some of it, and gives some up.
fn paged_in_from_a_file(delivery: Delivery, prefetch: bool) {
    let command = r#"-- sh -c "memcycler 2 8M 1 && balloon 2M 2 && memcycler 1 8M 1""#;
    let Some(config) = config(2, command) else {
        return;
    };
    let content = ContentFile::temporary().expect("a temporary file");
    let (machine, paging) = match LinuxPaging::start(&config, delivery, prefetch, content) {
        Ok(paged) => paged,
        Err(error) => return skip_or_panic(&error),
    };
    let screen = Screen::default();
    let checks = MachineChecks::new(&machine).expect("errors are reported");
    let hooks = Arc::new(checks.other_faults_to(paging.hooks()));
    let outcome = machine.run(LinuxConsole::output(screen.clone()), hooks);
    let (output, seen) = (screen.text(), paging.end());
    let outcome = outcome.unwrap_or_else(|error| panic!("{}\n{output}", chain(&error)));
    assert_eq!(outcome.end, LinuxEnd::Status(0), "{output}");
    assert_eq!(output.matches("every word right").count(), 3, "{output}");
    println!(
        "{delivery:?}, prefetch {prefetch}, {:?}: {seen}; {seen:?}",
        outcome.elapsed
    );
    // Two rounds, in each of which every other run of eight pages of 2 MiB is given up.
    assert!(
        output.contains("512 pages given up in 2 rounds"),
        "{output}"
    );
    assert_eq!(seen.discarded, 512);
    assert!(seen.by_fault > 0 && seen.zero > 0, "{seen:?}");
    assert_eq!(seen.by_prefetch > 0, prefetch, "{seen:?}");
    assert!(seen.by_fault + seen.by_prefetch > 1000, "{seen:?}");
    assert_eq!(seen.exits > 0, delivery == Delivery::Exit, "{seen:?}");
    assert!(delivery == Delivery::Exit || seen.messages > 0, "{seen:?}");
    // The file is in the page cache: each page was installed by the thread that met its fault.
    assert_eq!(seen.requests, 0, "{seen:?}");
}

#[test]
fn a_guest_runs_from_a_file_by_userfaultfd() {
    paged_in_from_a_file(Delivery::Uffd, false);
}

#[test]
fn a_guest_runs_from_a_file_by_userfaultfd_with_prefetch() {
    paged_in_from_a_file(Delivery::Uffd, true);
}

#[test]
fn a_guest_runs_from_a_file_by_exits() {
    paged_in_from_a_file(Delivery::Exit, false);
}

#[test]
fn a_guest_runs_from_a_file_by_exits_with_prefetch() {
    paged_in_from_a_file(Delivery::Exit, true);
}

#[test]
fn an_uncorrected_error_kills_only_the_process_that_consumed_it() {
    let command = r#"-- sh -c "consume 2M; echo it ended with $?; memcycler 1 4M 1""#;
    let Some(mut config) = config(1, command) else {
        return;
    };
    // With keep the page stays mapped, and the memory itself fails an access. A simulated error does not.
    config.policy = Some(FailurePolicy::KernelDefault);
    let (screen, (reader, mut keys)) = (Screen::default(), io::pipe().expect("a pipe"));
    let console = LinuxConsole::output(screen.clone()).input(reader.into());
    let machine = machine(&config);
    let region = Arc::clone(&machine.regions()[0]);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("poison");
    let checks = MachineChecks::with_map(&machine, PoisonMap::new(), Some(file.clone()));
    let checks = Arc::new(checks.expect("errors are reported"));
    let hooks: Arc<dyn VcpuHooks> = checks.clone();
    let stopper = machine.stopper();
    let runner = std::thread::spawn(move || machine.run(console, hooks));

    let gpa = screen.wait_for("consume: gpa 0x");
    let gpa = u64::from_str_radix(&gpa, 16).expect("a hexadecimal address");
    match simulate_error(&region, GuestAddress(gpa)) {
        Ok(simulated) => assert_eq!(simulated, Simulated::Handled),
        Err(error @ SimulateError::Refused { .. }) => {
            println!("SKIP: {}", chain(&error));
            stopper.end();
            let _ = runner.join();
            return;
        }
        Err(error) => panic!("{}", chain(&error)),
    }
    type_in(&mut keys, "\n");
    let outcome = runner.join().expect("no panic");
    let output = screen.text();
    let outcome = outcome.unwrap_or_else(|error| panic!("{}\n{output}", chain(&error)));
    assert_eq!(outcome.end, LinuxEnd::Status(0), "{output}");
    // BUS_MCEERR_AR is 4, and 135 is a death of SIGBUS.
    for expected in [
        "consume: SIGBUS code 4",
        "it ended with 135",
        "every word right",
    ] {
        assert!(output.contains(expected), "{expected} in\n{output}");
    }
    assert!(!output.contains("consume: read"), "{output}");
    assert_eq!(checks.lost_bytes(), 4096);
    let kept = PoisonMap::load(&file).expect("it was saved");
    assert!(kept.bytes() == 4096 && kept.contains(GuestAddress(gpa)));
}
