//! The series' selftests, in VMs.

use std::ffi::OsString;
use std::time::Duration;

use anyhow::Result;
use fs_err as fs;

use super::jobs::{Kind, run};
use super::kunit;
use super::lab::{command, kernel, machine};
use super::tally::Tally;
use crate::kernel::selftests::{self, Runs, Selftest};
use crate::kernel::{Arch, Variant, package};
use crate::paths::Paths;
use crate::vm::{Job, Pagetide, Timing, VmArgs, load_modules};

/// The longest time of one job on a kernel that checks everything.
const DEBUG_JOB_TIMEOUT: Duration = Duration::from_secs(3600);

/// The longest time of a whole VM on such a kernel.
const DEBUG_VM_TIMEOUT: u64 = 14_400;

/// A huge page of 1G, set aside at boot: whether one can be had later is a matter of luck.
const GIGANTIC_PAGE: [&str; 2] = ["hugepagesz=1G", "hugepages=1"];

/// Memory that may hold no page for good: the kernel prefers it for memfds, also for hugetlb.
const MOVABLE: &str = "movablecore=1G";

/// What the VMs with selftests have: with less, there is no room for a page of 1G.
const GIGANTIC_MEMORY: &str = "6G";

/// A second node, for tests of migration, on a kernel with upstream.config.
pub(super) const NODES: &str = "numa=fake=2";

/// Something to swap to, on the same kernel.
pub(super) const SWAP: &str = "mkswap /dev/ram0 && swapon /dev/ram0";

/// The unit tests that the series adds to the kernel.
const KUNIT_SUITE: &str = "memory-failure";

/// The patched kernel: selftests.
pub(super) fn usual(paths: &Paths, tally: &mut Tally) -> Result<()> {
    let variant = Variant::patched(Arch::X86_64);
    let jobs = usual_jobs(variant, paths)?;
    let args = machine(variant, Pagetide::None, GIGANTIC_MEMORY);
    run("selftests", &args, &jobs, paths, tally)?;
    let jobs = jobs_that(variant, paths, |runs| runs == Runs::Parallel)?;
    let mut args = machine(variant, Pagetide::None, "2G");
    args.timing = Timing::Parallel;
    args.cpus = Some(2);
    run("selftests-parallel", &args, &jobs, paths, tally)?;
    let jobs = jobs_that(variant, paths, |runs| runs == Runs::Movable)?;
    let mut args = machine(variant, Pagetide::None, "2G");
    args.append.push(MOVABLE.into());
    run("selftests-movable", &args, &jobs, paths, tally).map(drop)
}

/// The patched kernel: the selftests that fill huge pages of 1G again and again.
pub(super) fn gigantic(paths: &Paths, tally: &mut Tally) -> Result<()> {
    let variant = Variant::patched(Arch::X86_64);
    let jobs = jobs_that(variant, paths, |runs| runs == Runs::Gigantic)?;
    let mut args = machine(variant, Pagetide::None, GIGANTIC_MEMORY);
    args.append.extend(GIGANTIC_PAGE.map(String::from));
    run("gigantic", &args, &jobs, paths, tally).map(drop)
}

/// The patched kernel with shadow paging: selftests of what is different there.
pub(super) fn shadow(paths: &Paths, tally: &mut Tally) -> Result<()> {
    run_shadow("shadow", Variant::patched(Arch::X86_64), paths, tally)
}

/// Runs on a CPU that has no nested page tables, as far as KVM is concerned.
fn run_shadow(lane: &str, variant: Variant, paths: &Paths, tally: &mut Tally) -> Result<()> {
    let mut jobs = usual_jobs(variant, paths)?;
    jobs.retain(|(kind, _)| matches!(kind, Kind::Selftest(test) if test.shadow));
    let mut args = machine(variant, Pagetide::None, "2G");
    args.append.push("kvm_amd.npt=0".into());
    if variant.upstream {
        args.append.push(NODES.into());
        jobs.insert(0, swap(paths));
    }
    run(lane, &args, &jobs, paths, tally).map(drop)
}

/// The patched kernel with lockdep, PROVE_RCU and KASAN: selftests, which take several times as long, and the
/// series' KUnit suite. With two nodes and swap, so that no selftest has to leave a part out for lack of them.
pub(super) fn debug(paths: &Paths, tally: &mut Tally) -> Result<()> {
    let variant = Variant {
        debug: true,
        upstream: true,
        ..Variant::patched(Arch::X86_64)
    };
    let (mut args, mut jobs) = with_nodes_and_swap(variant, paths)?;
    for (_, job) in &mut jobs {
        job.timeout = Some(DEBUG_JOB_TIMEOUT);
    }
    args.timeout = DEBUG_VM_TIMEOUT;
    args.append.extend(kunit::append(KUNIT_SUITE));
    let said = fs::read(run("debug", &args, &jobs, paths, tally)?)?;
    let verdict = kunit::verdict(&String::from_utf8_lossy(&said), KUNIT_SUITE);
    tally.add("debug", &format!("KUnit {KUNIT_SUITE}"), verdict);
    run_shadow("debug-shadow", variant, paths, tally)
}

/// The series' selftests on a kernel with upstream.config, which the step `upstream` builds.
pub(super) fn nodes(paths: &Paths, tally: &mut Tally) -> Result<()> {
    let variant = Variant {
        upstream: true,
        ..Variant::patched(Arch::X86_64)
    };
    let (args, jobs) = with_nodes_and_swap(variant, paths)?;
    run("nodes", &args, &jobs, paths, tally).map(drop)
}

/// The patched kernel with KVM as modules, as distributions have it: selftests.
pub(super) fn modules(paths: &Paths, tally: &mut Tally) -> Result<()> {
    let variant = Variant {
        modules: true,
        ..Variant::patched(Arch::X86_64)
    };
    with_modules("modules", variant, paths, tally)
}

/// The kernel of the Debian packages, as they have it: selftests.
pub(super) fn packaged(paths: &Paths, tally: &mut Tally) -> Result<()> {
    with_modules("kernel-package", package::variant(), paths, tally)
}

fn with_modules(lane: &str, variant: Variant, paths: &Paths, tally: &mut Tally) -> Result<()> {
    kernel(variant, paths, tally);
    let load = Job::new(load_modules(variant, paths), paths.root());
    let mut jobs = vec![(Kind::Command("KVM's modules are loaded"), load)];
    jobs.extend(usual_jobs(variant, paths)?);
    let args = machine(variant, Pagetide::None, GIGANTIC_MEMORY);
    run(lane, &args, &jobs, paths, tally).map(drop)
}

/// Turns swap on.
fn swap(paths: &Paths) -> (Kind, Job) {
    command(paths, "swap", "sh -c", Some(SWAP))
}

/// A VM with two nodes and swap, and the selftests in it.
fn with_nodes_and_swap(variant: Variant, paths: &Paths) -> Result<(VmArgs, Vec<(Kind, Job)>)> {
    let mut jobs = vec![swap(paths)];
    jobs.extend(usual_jobs(variant, paths)?);
    let mut args = machine(variant, Pagetide::None, GIGANTIC_MEMORY);
    args.append.push(NODES.into());
    Ok((args, jobs))
}

/// The selftests that each step runs which runs any.
pub(super) fn usual_jobs(variant: Variant, paths: &Paths) -> Result<Vec<(Kind, Job)>> {
    let debug = variant.debug;
    jobs_that(variant, paths, |runs| match runs {
        Runs::Always => true,
        Runs::Debug => debug,
        Runs::Parallel | Runs::Movable | Runs::Gigantic | Runs::Never => false,
    })
}

/// The selftests of which `is_run` holds.
fn jobs_that(
    variant: Variant,
    paths: &Paths,
    is_run: impl Fn(Runs) -> bool,
) -> Result<Vec<(Kind, Job)>> {
    let directory = selftests::directory_in_vm(variant, paths);
    let mut tests = selftests::list(variant.arch, paths)?;
    tests.retain(|test| is_run(test.runs));
    let job = |test: Selftest| {
        let mut command: Vec<OsString> = vec![directory.join(test.name()).into()];
        command.extend(test.arguments.iter().map(OsString::from));
        (Kind::Selftest(test), Job::new(command, &directory))
    };
    Ok(tests.into_iter().map(job).collect())
}
