//! arm64: the whole workspace compiled, and what of its tests runs there.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::host::{self, TestProgram};
use super::jobs::{self, Kind};
use super::lab;
use super::selftests;
use super::tally::{Tally, Verdict};
use crate::cross;
use crate::kernel::{Arch, Variant};
use crate::paths::Paths;
use crate::progress::Progress;
use crate::vm::{Job, Pagetide};

/// The step's name in the tally.
pub(super) const LANE: &str = "arm64";

/// The packages whose tests run on arm64.
const TESTED: [&str; 4] = ["uapi", "memory", "pager", "kvm"];

/// Packages that are compiled for arm64 and not run there.
const COMPILED: [(&str, &str); 11] = [
    ("base", "it has nothing of an architecture"),
    ("bench", "it measures testbed's guests"),
    (
        "cli",
        "its benchmarks run testbed's guests; probe and try run",
    ),
    ("examples", "they show the same calls on x86_64"),
    ("fuzz", "its parsers have nothing of an architecture"),
    ("migrate", "it has nothing of an architecture"),
    (
        "serve",
        "it has nothing of an architecture but its pager, whose tests run; `pagetide try` runs the server",
    ),
    (
        "sources",
        "it reads files, and has nothing of an architecture",
    ),
    ("testbed", "its guests are x86-64 code"),
    ("vmm", "its guests and its Linux machine are x86-64's"),
    ("xtask", "the lab runs on x86_64"),
];

/// Test programs that do not run on arm64.
const LEFT_OUT: [(&str, &str); 2] = [
    (
        "kvm/poison",
        "it tests machine checks, which are x86's; kvm/poisoned_exit has the exits",
    ),
    (
        "kvm/soundness",
        "its guest is x86-64 code; what it tests has nothing of an architecture",
    ),
];

/// Tests that take a software CPU a quarter of a minute or more, and that add little on a second
/// architecture.
const LONG: [Long; 3] = [
    Long {
        group: "memory (lib)",
        test: "poison_map::tests::a_full_map_accepts_only_ranges_adjacent_to_its_own",
        #[cfg(test)]
        source: "crates/memory/src/poison_map/tests.rs",
        reason: "takes long, and is arithmetic",
    },
    Long {
        group: "pager/readers",
        test: "exits_and_messages_share_the_same_pages",
        #[cfg(test)]
        source: "crates/pager/tests/readers.rs",
        reason: "takes long; pager/exits_again has exits and messages on one page",
    },
    Long {
        group: "pager/readers",
        test: "touched_pages_have_their_content",
        #[cfg(test)]
        source: "crates/pager/tests/readers.rs",
        reason: "takes long; pager/event_loop serves every way of paging",
    },
];

/// A test that does not run on arm64.
struct Long {
    /// Its program.
    group: &'static str,
    /// Its name there.
    test: &'static str,
    /// The file that it is in.
    #[cfg(test)]
    source: &'static str,
    /// Why it does not run.
    reason: &'static str,
}

/// The sizes of tests on arm64 and on x86_64: cases of a property test, commits of kvm/stress.
const LESS: [(&str, &str, &str); 2] = [
    ("PROPTEST_CASES", "32", "256"),
    ("PAGETIDE_COMMITS", "50", "200"),
];

/// Commands that run there. `try` is the whole server, over its socket, and a client that compares what it reads.
const COMMANDS: [(&str, &str); 2] = [
    ("pagetide probe", "pagetide probe"),
    (
        "pagetide try",
        "pagetide try /guest.mem --warm --touches 256",
    ),
];

/// Commands that are not available on arm64, and end with an error.
const REFUSED: [(&str, &str); 2] = [
    ("pagetide run", "pagetide run --kernel vmlinux"),
    (
        "pagetide bench paging",
        "pagetide bench paging --delivery uffd",
    ),
];

/// Compiles the whole workspace for arm64, tests included, and so what the lab's VM runs. A warning is a failure.
pub(super) fn compile(paths: &Paths, tally: &mut Tally) -> Result<()> {
    programs(paths)?;
    tally.add("cross", "the workspace compiles for arm64", Verdict::Passed);
    let pagetide = cross::pagetide(paths);
    ensure!(
        pagetide.exists(),
        "cargo compiled no {}",
        pagetide.display()
    );
    tally.add("cross", "pagetide for arm64", Verdict::Passed);
    Ok(())
}

/// The test programs that the VM runs. All are compiled, in one go: cargo would select other features of what crates
/// depend on for some of them, and compile that once more.
fn programs(paths: &Paths) -> Result<Vec<TestProgram>> {
    let progress = Progress::spinner("compiling the workspace for arm64");
    let test = cross::cargo("test")?.arg("--workspace");
    let mut programs = host::compile(test, &cross::target(paths), paths)?;
    progress.done();
    programs.retain(|program| TESTED.contains(&program.package.as_str()));
    Ok(programs)
}

/// The patched kernel on arm64: the crates' tests, the command, and selftests.
pub(super) fn run(paths: &Paths, tally: &mut Tally) -> Result<()> {
    let variant = Variant::patched(Arch::Arm64);
    lab::kernel(variant, paths, tally);
    for (package, reason) in COMPILED {
        let reason = format!("compiled for arm64, not run there: {reason}");
        tally.add(&group(package), "all tests", Verdict::Skipped(reason));
    }
    let mut programs = programs(paths)?;
    for (name, reason) in LEFT_OUT {
        let at = programs.iter().position(|program| program.group == name);
        programs.remove(at.with_context(|| format!("there are no tests {name}"))?);
        tally.add(&group(name), "all tests", Verdict::Skipped(reason.into()));
    }
    for long in LONG {
        let reason = Verdict::Skipped(long.reason.into());
        tally.add(&group(long.group), long.test, reason);
    }
    let mut args = lab::machine(variant, Pagetide::Tested, "2G");
    for (variable, here, elsewhere) in LESS {
        println!("{LANE}: {variable}={here} ({elsewhere} on x86_64)");
        args.environment.push((variable, here.into()));
    }
    args.programs = programs
        .iter()
        .map(|program| program.executable.clone())
        .collect();
    let mut jobs: Vec<_> = programs
        .into_iter()
        .map(test_program)
        .collect::<Result<_>>()?;
    for (name, words) in COMMANDS {
        jobs.push(lab::command(paths, name, words, None));
    }
    for (name, words) in REFUSED {
        let (_, job) = lab::command(paths, name, words, None);
        jobs.push((Kind::Refusal(name), job));
    }
    jobs.extend(selftests::usual_jobs(variant, paths)?);
    jobs::run(LANE, &args, &jobs, paths, tally).map(drop)
}

/// A test counts on each architecture by itself.
fn group(name: &str) -> String {
    format!("{LANE} {name}")
}

/// A test program, which is in the VM's /bin.
fn test_program(program: TestProgram) -> Result<(Kind, Job)> {
    let file = Path::new(&program.executable).file_name();
    let file = file.context("a test program without a name")?;
    let program_file = PathBuf::from("/bin").join(file);
    let mut command: Vec<OsString> = vec![program_file.into(), "--show-output".into()];
    let long = LONG.iter().filter(|long| long.group == program.group);
    let skipped: Vec<_> = long.flat_map(|long| ["--skip", long.test]).collect();
    if !skipped.is_empty() {
        command.push("--exact".into());
        command.extend(skipped.into_iter().map(OsString::from));
    }
    let job = Job::new(command, Path::new("/"));
    let program = TestProgram {
        group: group(&program.group),
        ..program
    };
    Ok((Kind::Program(program), job))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tests_that_take_long_exist() {
        let paths = Paths::find().unwrap();
        for Long { test, source, .. } in LONG {
            let text = std::fs::read_to_string(paths.in_root(source)).unwrap();
            let name = test.rsplit("::").next().unwrap();
            assert!(text.contains(&format!("fn {name}(")), "{test}");
        }
    }
}
