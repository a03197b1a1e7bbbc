//! Tests in VMs.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::host::{self, TestProgram};
use super::jobs::{Kind, run};
use super::tally::{Tally, Verdict};
use crate::guest;
use crate::kernel::distribution::{self, Distribution, Release};
use crate::kernel::{Arch, Variant, build};
use crate::paths::Paths;
use crate::qemu::Qemu;
use crate::vm::{Job, Pagetide, Timing, VmArgs};

/// For the tests that boot a dozen guests, or start 900 VMMs.
const LINUX_JOB_TIMEOUT: Duration = Duration::from_secs(2700);

/// For a whole VM, also beside four busy loops.
const VM_TIMEOUT: u64 = 7200;

/// Huge pages for the tests that need them.
const HUGE_PAGES: &str = "hugepages=256";

/// A benchmark of paging that is only long enough to take every path, on any kernel.
const PAGING: &str = "pagetide bench paging --vcpus 1,2 --per-vcpu 1M --runs 1 --delivery uffd \
                      --out target/pagetide/smoke-stock";

/// The same of population.
const POPULATE: &str = "pagetide bench populate --vcpus 1,2 --memory 4M --runs 1 \
                        --out target/pagetide/smoke-stock";

/// The package whose integration tests run on Debian 12's own kernel, and test programs of others. Those of the library are
/// about what UFFDIO_POISON does.
const OLD_KERNEL_PACKAGE: &str = "serve";
const OLD_KERNEL: [&str; 3] = ["cli/pager", "cli/serve", "cli/try"];

/// Of the package, what is left out there. serve/capture needs files in the page cache, and files on 9p are not there. In
/// serve/control, drains and firecracker the VMM is the test's own process, which a server that ends has to kill. serve/s3
/// has a server in Python, and serve/tenants a crowd of clients, for which a software CPU takes minutes. The others need
/// another system.
const NOT_ON_OLD_KERNEL: [&str; 8] = [
    "serve/capture",
    "serve/control",
    "serve/drains",
    "serve/firecracker",
    "serve/s3",
    "serve/tenants",
    FIRECRACKER,
    SYSTEMD,
];

/// Integration tests that no kernel of the lab makes a difference to: what opens reports, what is generated
/// from the command line, what reads images, what serves any kernel's userfaultfds, and what starts a
/// server in Python, for which a software CPU takes minutes. What this machine ran need not run twice.
const KERNEL_BLIND: [&str; 37] = [
    "cli/generated",
    "cli/image",
    "cli/optional",
    "cli/pager",
    "cli/serve",
    "cli/show",
    "cli/try",
    "cli/working_set",
    "serve/bindings",
    "serve/budgets",
    "serve/capture",
    "serve/control",
    "serve/dashboard",
    "serve/drains",
    "serve/ends",
    "serve/exporter",
    "serve/firecracker",
    "serve/full",
    "serve/hangs",
    "serve/hostile",
    "serve/identity",
    "serve/isolation",
    "serve/native",
    "serve/s3",
    "serve/state",
    "serve/store",
    "serve/stress",
    "serve/tenants",
    "serve/truncated",
    "serve/waits",
    "sources/cache",
    "sources/certificates",
    "sources/image",
    "sources/object",
    "sources/s3",
    "sources/stores",
    "sources/upload",
];

/// What the lab runs wholly only in the step `thorough`: the command lines of what other tests call. Of what
/// this machine ran on its own kernel, the step `lab` repeats nothing.
const THOROUGH: [&str; 7] = [
    "bench/memcycler",
    "bench/memslots",
    "cli/all",
    "cli/command",
    "cli/memcycler",
    "cli/memslots",
    "cli/run",
];

/// Of these, what a machine without KVM leaves to the lab, and still only the step `thorough` runs: the longest
/// measurements, whose short ones the step `lab` runs.
const THOROUGH_TESTS: [&str; 3] = [
    "a_boot_and_a_guest_that_spins",
    "a_page_of_a_pool_is_lost_as_a_whole_by_default",
    "a_transparent_huge_page_loses_a_page_and_its_mapping",
];

/// The same, of the tests with Linux guests: others boot the same machine.
const THOROUGH_LINUX: [&str; 9] = [
    "a_bzimage_boots_and_ends_with_its_status",
    "a_guest_boots_while_its_memory_is_installed",
    "a_guest_runs_from_a_file_by_exits_with_prefetch",
    "a_guest_runs_from_a_file_by_userfaultfd",
    "a_panics_message_is_reported",
    "a_stopper_and_the_time_limit_end_a_guest",
    "every_end_has_a_name_with_any_backing",
    "input_reaches_the_guest",
    "the_kernel_finds_the_machines_devices",
];

/// The tests with Linux guests, which have a VM of their own.
const LINUX: &str = "vmm/linux";

/// Small guests on the same machine, one of which shows there that no interrupt comes twice.
const TINY: &str = "vmm/tiny_kernel";

/// The tests with a real Firecracker, which run beside the Linux guests of the step `thorough`.
const FIRECRACKER: &str = "serve/real_firecracker";

/// The tests that boot a Debian with the package's service.
pub(super) const SYSTEMD: &str = "serve/systemd";

/// Prefetch, of a VMM whose control group has a limit of memory.
const LIMITED: &str = "serve/aids";

/// Mounts control groups, and has each group below the root have all controllers.
const CONTROL_GROUPS: &str = r#"
mount -t cgroup2 cgroup2 /sys/fs/cgroup && cd /sys/fs/cgroup || exit 1
for controller in $(cat cgroup.controllers); do
    echo "+$controller" > cgroup.subtree_control || exit 1
done
"#;

/// Unpacks a system into the VM's memory, and runs a test program for it: systemd maps files to write to them, which 9p
/// does not permit.
const UNPACKED: &str = r#"
export PAGETIDE_SYSTEMD_ROOT=/run/system
mkdir $PAGETIDE_SYSTEMD_ROOT && mount -t tmpfs -o size=75% system $PAGETIDE_SYSTEMD_ROOT &&
tar -C $PAGETIDE_SYSTEMD_ROOT -xf "$1" && shift || exit 1
"$@"
status=$?
test $status = 0 || cat $PAGETIDE_SYSTEMD_ROOT.console
exit $status
"#;

/// A guest with two processors. The last argument says what it does before it ends by itself.
const RUN: &str = "pagetide run --kernel target/kernel/x86_64/vmlinux \
                   --initrd target/guest/initramfs.cpio --vcpus 2 --timeout 120 --cmdline";

/// The same, its memory paged in while it runs.
const RUN_PAGED: &str = "pagetide run --kernel target/kernel/x86_64/vmlinux \
                         --initrd target/guest/initramfs.cpio --vcpus 2 --timeout 120 \
                         --paging exit --prefetch --cmdline";

/// Test programs with tests that only a kernel without our series can run: what it refuses.
const REFUSALS: [&str; 5] = [
    "cli/command",
    "kvm/populate",
    "kvm/populator",
    "kvm/slots",
    "testbed/exits",
];

/// Builds what the lab boots without being asked for more: the kernels, and its QEMU.
pub(super) fn build(paths: &Paths, tally: &mut Tally) {
    let patched = Variant::patched(Arch::X86_64);
    let stock = Variant {
        stock: true,
        ..patched
    };
    for variant in [patched, stock, Variant::patched(Arch::Arm64)] {
        kernel(variant, paths, tally);
    }
    Qemu::find(Arch::X86_64, true, paths);
}

/// Builds a kernel and counts that; a warning in ours is a failure. A step that needs the kernel and cannot
/// have it fails by itself.
pub(super) fn kernel(variant: Variant, paths: &Paths, tally: &mut Tally) {
    let built = build::ensure(variant, paths).and_then(|()| match variant.stock {
        true => Ok(()),
        false => build::no_warnings(variant, paths),
    });
    let verdict = match built {
        Ok(()) => Verdict::Passed,
        Err(error) => Verdict::Failed(format!("{error:#}")),
    };
    tally.add("kernel", &variant.name(), verdict);
}

/// The patched kernel: the crates' tests, among them each benchmark as a command. `tally` has what this machine ran, if
/// `host_ran`.
pub(super) fn patched(paths: &Paths, host_ran: bool, tally: &mut Tally) -> Result<()> {
    let mut jobs = Vec::new();
    for program in host::programs(paths)? {
        let is_elsewhere = [LINUX, TINY, FIRECRACKER].contains(&program.group.as_str());
        if program.package == "xtask" || is_elsewhere {
            continue;
        }
        let left = left_for_lab(&program, host_ran, tally);
        match left.as_deref() {
            Some([]) => {}
            Some(names) => {
                let (kind, mut job) = test_program(program);
                job.command.push("--exact".into());
                job.command.extend(names.iter().map(OsString::from));
                jobs.push((kind, job));
            }
            None => jobs.push(test_program(program)),
        }
    }
    jobs.push(command(paths, "pagetide probe", "pagetide probe", None));
    let args = machine(Variant::patched(Arch::X86_64), Pagetide::Tested, "4G");
    run("lab", &args, &jobs, paths, tally).map(drop)
}

/// The patched kernel: Linux as the guest.
///
/// In a VM with one CPU: with more, QEMU's software CPU delivers an interrupt that KVM injected a
/// second time, to a guest that has interrupts off (docs/design/linux-guest.md). By instructions,
/// since a guest's timers would take all of a slow machine's time.
pub(super) fn linux(paths: &Paths, tally: &mut Tally) -> Result<()> {
    guest::build(paths)?;
    let mut jobs = programs_named(&[LINUX, TINY], paths)?;
    if let [(_, linux), ..] = &mut jobs[..] {
        linux.command.push("--exact".into());
        let skipped = THOROUGH_LINUX.iter().flat_map(|test| ["--skip", test]);
        linux.command.extend(skipped.map(OsString::from));
    }
    run_linux("linux", jobs, paths, tally)
}

/// Jobs with Linux guests, in a VM for them.
fn run_linux(
    lane: &str,
    mut jobs: Vec<(Kind, Job)>,
    paths: &Paths,
    tally: &mut Tally,
) -> Result<()> {
    for (_, job) in &mut jobs {
        job.timeout = Some(LINUX_JOB_TIMEOUT);
    }
    let args = VmArgs {
        cpus: Some(1),
        timing: Timing::Instructions,
        ..machine(Variant::patched(Arch::X86_64), Pagetide::Tested, "3G")
    };
    run(lane, &args, &jobs, paths, tally).map(drop)
}

/// The patched kernel: what the steps `lab` and `linux` leave out.
pub(super) fn thorough(paths: &Paths, tally: &mut Tally) -> Result<()> {
    let jobs = programs_named(&THOROUGH, paths)?;
    let args = machine(Variant::patched(Arch::X86_64), Pagetide::Tested, "4G");
    run("thorough", &args, &jobs, paths, tally)?;
    guest::build(paths)?;
    let mut jobs = programs_named(&[LINUX, FIRECRACKER], paths)?;
    if let [(_, linux), (_, firecracker)] = &mut jobs[..] {
        linux.command.push("--exact".into());
        linux.command.extend(THOROUGH_LINUX.map(OsString::from));
        firecracker.command = firecracker_environment(paths)
            .into_iter()
            .chain(firecracker.command.drain(..))
            .collect();
    }
    jobs.push(command(paths, "pagetide run", RUN, Some("-- nproc")));
    let paged = r#"-- sh -c "memcycler 2 4M 1 && balloon 1M""#;
    let (name, paged) = ("pagetide run --paging", Some(paged));
    jobs.push(command(paths, name, RUN_PAGED, paged));
    run_linux("thorough-linux", jobs, paths, tally)
}

/// The test programs with these names.
fn programs_named(groups: &[&str], paths: &Paths) -> Result<Vec<(Kind, Job)>> {
    let programs = host::programs(paths)?;
    let find = |group: &&str| {
        let program = programs.iter().find(|program| program.group == *group);
        let program = program.with_context(|| format!("there are no tests {group}"))?;
        Ok(test_program(program.clone()))
    };
    groups.iter().map(find).collect()
}

/// The start of a command that has what the tests with a real Firecracker need. Without PAGETIDE_FIRECRACKER
/// they look for one on PATH, and otherwise print SKIP.
fn firecracker_environment(paths: &Paths) -> Vec<OsString> {
    let mut words: Vec<OsString> = vec!["env".into()];
    let mut set = |name: &str, value: &std::ffi::OsStr| {
        let mut word = OsString::from(format!("{name}="));
        word.push(value);
        words.push(word);
    };
    if let Some(program) = std::env::var_os("PAGETIDE_FIRECRACKER") {
        set("PAGETIDE_FIRECRACKER", &program);
    }
    let kernel = paths.target().join("kernel/x86_64/vmlinux");
    set("PAGETIDE_GUEST_KERNEL", kernel.as_os_str());
    let initrd = paths.target().join("guest/initramfs.cpio");
    set("PAGETIDE_GUEST_INITRD", initrd.as_os_str());
    words
}

/// The tests of a program that the lab is to run; `None` for all of them. What a machine without our kernel
/// can run as well, and has run, need not run twice.
fn left_for_lab<'a>(
    program: &TestProgram,
    host_ran: bool,
    tally: &'a Tally,
) -> Option<Vec<&'a str>> {
    let group = program.group.as_str();
    let is_left = KERNEL_BLIND.contains(&group) || THOROUGH.contains(&group);
    (host_ran && (is_left || !program.integration)).then(|| {
        let mut left = tally.skipped(&program.group);
        left.retain(|test| !THOROUGH_TESTS.contains(test));
        left
    })
}

fn test_program(program: TestProgram) -> (Kind, Job) {
    let command = vec![program.executable.clone().into(), "--show-output".into()];
    let job = Job::new(command, &program.directory);
    (Kind::Program(program), job)
}

/// The stock kernel: what it refuses, and what is left of the benchmark there.
pub(super) fn stock(paths: &Paths, tally: &mut Tally) -> Result<()> {
    let variant = Variant {
        stock: true,
        ..Variant::patched(Arch::X86_64)
    };
    kernel(variant, paths, tally);
    let mut jobs = vec![command(paths, "pagetide probe", "pagetide probe", None)];
    jobs.extend(programs_named(&REFUSALS, paths)?);
    jobs.push(command(paths, "pagetide bench paging", PAGING, None));
    jobs.push(command(paths, "pagetide bench populate", POPULATE, None));
    let args = VmArgs {
        pagetide: Pagetide::Tested,
        timeout: VM_TIMEOUT,
        ..VmArgs::new(variant)
    };
    run("stock", &args, &jobs, paths, tally).map(drop)
}

/// Debian 12's own kernel, which has no UFFDIO_POISON: what serves memory there.
pub(super) fn old_kernel(program: Option<&str>, paths: &Paths, tally: &mut Tally) -> Result<()> {
    let kernel = distribution::newest(Release::Bookworm, paths)?;
    println!("Debian 12's kernel is {}", kernel.version);
    let mut programs = host::programs(paths)?;
    programs.retain(|program| {
        let group = program.group.as_str();
        let serves = program.package == OLD_KERNEL_PACKAGE && program.integration;
        (serves && !NOT_ON_OLD_KERNEL.contains(&group)) || OLD_KERNEL.contains(&group)
    });
    let programs = host::chosen(program, programs)?;
    let jobs: Vec<_> = programs.into_iter().map(test_program).collect();
    run("old-kernel", &distributed(kernel), &jobs, paths, tally).map(drop)
}

/// What meets control groups, on Debian 13's own kernel, which has those of version 2 alone here: prefetch below a limit of
/// memory, and the package's service under a real systemd. `system` is an archive of that Debian.
pub(super) fn systemd(system: &Path, paths: &Paths, tally: &mut Tally) -> Result<()> {
    let kernel = distribution::newest(Release::Trixie, paths)?;
    println!("Debian 13's kernel is {}", kernel.version);
    let mut jobs = programs_named(&[LIMITED, SYSTEMD], paths)?;
    if let [_, (_, job)] = &mut jobs[..] {
        let words = ["sh", "-c", UNPACKED, "sh"].map(OsString::from);
        let words = words.into_iter().chain([system.into()]);
        job.command = words.chain(job.command.drain(..)).collect();
        job.timeout = Some(LINUX_JOB_TIMEOUT);
    }
    let groups = command(paths, "control groups", "sh -c", Some(CONTROL_GROUPS));
    jobs.insert(0, groups);
    run("systemd-vm", &distributed(kernel), &jobs, paths, tally).map(drop)
}

/// A VM on a kernel of Debian's.
fn distributed(kernel: Distribution) -> VmArgs {
    VmArgs {
        image: Some(kernel.image),
        initramfs: Some(kernel.initramfs),
        ..machine(Variant::patched(Arch::X86_64), Pagetide::Tested, "4G")
    }
}

/// A VM for tests: with huge pages, and time for many jobs.
pub(super) fn machine(variant: Variant, pagetide: Pagetide, memory: &str) -> VmArgs {
    VmArgs {
        pagetide,
        timeout: VM_TIMEOUT,
        memory: memory.into(),
        append: vec![HUGE_PAGES.into()],
        ..VmArgs::new(variant)
    }
}

/// A command of several words, and an argument with spaces in it.
pub(super) fn command(
    paths: &Paths,
    name: &'static str,
    words: &str,
    last: Option<&str>,
) -> (Kind, Job) {
    let command = words.split(' ').chain(last).map(OsString::from).collect();
    (Kind::Command(name), Job::new(command, paths.root()))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn unit_tests_run_in_the_lab_unless_this_machine_ran_them() {
        let program = TestProgram {
            group: "memory (lib)".into(),
            package: "memory".into(),
            executable: PathBuf::from("/a"),
            directory: PathBuf::from("/"),
            integration: false,
        };
        let mut tally = Tally::default();
        tally.add(&program.group, "b", Verdict::Passed);
        assert_eq!(left_for_lab(&program, false, &tally), None);
        assert_eq!(left_for_lab(&program, true, &tally), Some(vec![]));
        let skipped = Verdict::Skipped("no huge pages".into());
        tally.add(&program.group, "a", skipped);
        assert_eq!(left_for_lab(&program, true, &tally), Some(vec!["a"]));
        let program = TestProgram {
            integration: true,
            ..program
        };
        assert_eq!(left_for_lab(&program, true, &tally), None);
        let blind = TestProgram {
            group: KERNEL_BLIND[0].into(),
            ..program
        };
        assert_eq!(left_for_lab(&blind, true, &tally), Some(vec![]));
        let long = Verdict::Skipped("no KVM".into());
        tally.add(&blind.group, THOROUGH_TESTS[0], long.clone());
        assert_eq!(left_for_lab(&blind, true, &tally), Some(vec![]));
        tally.add(&blind.group, "short", long);
        assert_eq!(left_for_lab(&blind, true, &tally), Some(vec!["short"]));
        assert_eq!(left_for_lab(&blind, false, &tally), None);
    }

    #[test]
    fn the_thorough_tests_exist() {
        let paths = Paths::find().unwrap();
        let linux = std::fs::read_to_string(paths.in_root("crates/vmm/tests/linux.rs")).unwrap();
        for test in THOROUGH_LINUX {
            assert!(linux.contains(&format!("fn {test}(")), "{test}");
        }
        let benches = ["memcycler", "memslots"].map(|name| {
            let path = paths.in_root(&format!("crates/bench/tests/{name}.rs"));
            std::fs::read_to_string(path).unwrap()
        });
        for test in THOROUGH_TESTS {
            let is_there = |text: &String| text.contains(&format!("fn {test}("));
            assert!(benches.iter().any(is_there), "{test}");
        }
    }
}
