//! `cargo xtask demo`: a restore on this machine, paging on its own kernel while the lab's kernel builds, then both
//! deliveries in the lab.

use std::process::ExitCode;
use std::thread;

use anyhow::{Context, Result, anyhow};
use fs_err as fs;
use serde_json::Value;

use crate::bench::{self, Measurement};
use crate::command::Run;
use crate::guest_memory;
use crate::kernel::{Arch, Variant, build};
use crate::paths::Paths;
use crate::progress::{self, Progress};
use crate::setup;
use crate::vm::{self, Timing};

/// The source of the headline: other load on the machine does not change instruction counts.
const INSTRUCTIONS: Measurement = Measurement {
    benchmark: "paging",
    name: "",
    timing: Timing::Instructions,
    arguments: "--vcpus 1,2 --per-vcpu 16M --delivery uffd,exit --fault-around 1,16 \
                --backing shmem --mode minor --uffds single --readers 1 --runs 7",
    seconds: 900,
    huge_pages: None,
};

/// The same with CPUs that run at the same time.
const PARALLEL: Measurement = Measurement {
    name: "demo-parallel",
    timing: Timing::Parallel,
    ..INSTRUCTIONS
};

/// What competes for the processors with what is shown natively.
const MEANWHILE: &str = "The lab's kernel builds meanwhile, unless it is built already.";

/// The time limit of a program on this machine's own kernel, in seconds.
const NATIVE_TIMEOUT: &str = "45";

/// The steps, as they are told of: what is left is what follows.
const STEPS: [&str; 4] = [
    "a small build of the command, and a restore: a server gives a client the memory of a file",
    "Debian's packages that the rest needs, and all of the command",
    "paging on this machine's own kernel, while the lab's kernel builds",
    "the lab: paging by userfaultfd against exits, on the patched kernel",
];

/// A restore after a small build; then, while the kernel builds, paging natively; then measures in the lab.
pub(crate) fn run(paths: &Paths) -> Result<ExitCode> {
    begin(0);
    restore(paths)?;
    let done = in_the_lab(paths);
    if done.is_err() {
        eprintln!(
            "What was shown above needs nothing of what has failed now; what was built for the rest stays:"
        );
    }
    done
}

/// Tells that a step begins, and what is left behind it.
fn begin(step: usize) {
    let all = STEPS.len();
    for (number, what) in STEPS.iter().enumerate().skip(step) {
        let state = if number == step { "now" } else { "then" };
        println!("{state:>5} {} of {all}: {what}", number + 1);
    }
}

/// The memory that is restored.
const RESTORED_BYTES: usize = 256 << 20;

/// Shows what `pagetide try` says of a made-up file. The command is built without what that does not need.
fn restore(paths: &Paths) -> Result<()> {
    let compiles = |line: &str| line.trim_start().starts_with("Compiling ");
    let progress = Progress::start("building pagetide try", None, compiles);
    Run::new("cargo")
        .words("build --profile quick --package pagetide-cli --no-default-features --features serve --target-dir")
        .arg(paths.target())
        .dir(paths.root())
        .logged(&paths.target().join("vm/build-quick.log"), &progress)?;
    progress.done();
    let directory = paths.target().join("demo");
    fs::create_dir_all(&directory)?;
    let image = directory.join("guest.mem");
    guest_memory::write(&image, RESTORED_BYTES)?;
    let table = native(paths.target().join("quick/pagetide"))
        .args(["try", "guest.mem"])
        .dir(&directory)
        .text();
    let table = table.unwrap_or_else(|error| format!("It failed: {error:#}"));
    fs::remove_file(&image)?;
    println!("\n{table}\n");
    Ok(())
}

fn in_the_lab(paths: &Paths) -> Result<ExitCode> {
    begin(1);
    setup::run()?;
    vm::build_pagetide(paths)?;
    let native = Native::of_this_machine(paths)?;
    native.build(paths)?;
    begin(2);
    thread::scope(|scope| {
        let kernel = scope.spawn(|| build::ensure_any(Variant::patched(Arch::X86_64), paths));
        progress::print(&native.show(paths));
        match kernel.join() {
            Ok(built) => built.context("the lab's kernel"),
            Err(_) => Err(anyhow!("the build of the lab's kernel panicked")),
        }
    })?;
    begin(3);
    let meaning = "instructions, which other load on this machine does not change";
    let code = measure(&INSTRUCTIONS, meaning, paths)?;
    if code != ExitCode::SUCCESS {
        return Ok(code);
    }
    let headline = headline(paths)?;
    let meaning = "wall-clock time of a software CPU, which other load on this machine changes";
    let parallel = measure(&PARALLEL, meaning, paths);
    println!("\n{headline}");
    parallel
}

fn measure(measurement: &Measurement, meaning: &str, paths: &Paths) -> Result<ExitCode> {
    println!("\nIn the lab, on the patched kernel, in {meaning}:\n");
    bench::measure(measurement, paths)
}

/// The headline of the measurement by instructions.
fn headline(paths: &Paths) -> Result<String> {
    let report = INSTRUCTIONS.out(paths).join("paging.json");
    let text = fs::read_to_string(&report)?;
    let costs = serde_json::from_str(&text)
        .ok()
        .and_then(|report| Costs::of(&report));
    let costs = costs.with_context(|| format!("no costs of pages in {}", report.display()))?;
    Ok(costs.headline())
}

/// What the demo runs on this machine's own kernel.
#[derive(Debug, PartialEq, Eq)]
enum Native {
    /// The benchmark in a VM, by these deliveries: KVM runs the VM on the processor.
    Vm {
        kernel: String,
        deliveries: &'static str,
    },
    /// The pager, which serves another process: for this reason a VM shows nothing or does not run.
    Process {
        kernel: String,
        reason: &'static str,
    },
    /// Nothing, for this reason.
    Nothing { reason: String },
}

impl Native {
    /// Asks `pagetide probe` and the processor.
    fn of_this_machine(paths: &Paths) -> Result<Self> {
        let probe = Run::new(vm::pagetide(paths))
            .args(["probe", "--json"])
            .output()?;
        let probe = serde_json::from_slice(&probe).context("pagetide probe --json")?;
        let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
        Ok(Self::of(&probe, &cpuinfo))
    }

    fn of(probe: &Value, cpuinfo: &str) -> Self {
        let capability = |name: &str| {
            let all = probe["capabilities"].as_array()?;
            all.iter().find(|capability| capability["name"] == name)
        };
        let has = |name| capability(name).is_some_and(|found| found["present"] == true);
        let kernel = probe["kernel_release"].as_str().unwrap_or("?").to_owned();
        if !has("userfaultfd") {
            let found = capability("userfaultfd").and_then(|found| found["found"].as_str());
            let found = found.unwrap_or("missing");
            return Self::Nothing {
                reason: format!("userfaultfd: {found}"),
            };
        }
        let reason = if !has("/dev/kvm") {
            "KVM cannot be used here."
        } else if !virtualises(cpuinfo) {
            "KVM emulates here: the processor has neither svm nor vmx."
        } else if !has("UFFD_FEATURE_MINOR_SHMEM") {
            "The kernel has no minor faults of shmem."
        } else {
            let exits = has("KVM_CAP_ABSENT_MAPPING_FAULT");
            let deliveries = if exits { "uffd,exit" } else { "uffd" };
            return Self::Vm { kernel, deliveries };
        };
        Self::Process { kernel, reason }
    }

    /// Compiles what `show` runs, beside the command.
    fn build(&self, paths: &Paths) -> Result<()> {
        if !matches!(self, Self::Process { .. }) {
            return Ok(());
        }
        let compiles = |line: &str| line.trim_start().starts_with("Compiling ");
        let progress = Progress::start("building epoll_handler", None, compiles);
        Run::new("cargo")
            .args(["build", "--release", "--package", "pagetide-examples"])
            .args(["--example", "epoll_handler", "--target-dir"])
            .arg(paths.target())
            .dir(paths.root())
            .logged(&paths.target().join("vm/example.log"), &progress)?;
        progress.done();
        Ok(())
    }

    /// Runs it, and returns its output with a label. The demo continues after a failure.
    fn show(&self, paths: &Paths) -> String {
        match self {
            Self::Vm { kernel, deliveries } => {
                let out = paths.target().join("pagetide/native");
                let table = native(vm::pagetide(paths))
                    .args(["bench", "paging", "--vcpus", "1", "--per-vcpu", "16M"])
                    .args(["--readers", "1", "--runs", "3", "--delivery", deliveries])
                    .args(["--quiet", "--out"])
                    .arg(out)
                    .text();
                let table = table.unwrap_or_else(|error| format!("It failed: {error:#}"));
                format!("On this machine's own kernel ({kernel}). {MEANWHILE}\n\n{table}\n")
            }
            Self::Process { kernel, reason } => {
                let served = |around: &str| {
                    let example = paths.target().join("release/examples/epoll_handler");
                    let text = native(example).args([PAGES, around]).text();
                    text.unwrap_or_else(|error| format!("it failed: {error:#}"))
                };
                format!(
                    "On this machine's own kernel ({kernel}). {MEANWHILE}\n\
                     {reason} So the pager serves another process, which reads\n\
                     {PAGES} absent pages, through userfaultfd (examples/epoll_handler.rs).\n\n\
                     1 page installed for each fault:\n{}\n16 pages installed around each fault:\n{}",
                    indented(&served("1")),
                    indented(&served("16"))
                )
            }
            Self::Nothing { reason } => {
                format!("This machine's own kernel cannot page memory in here: {reason}.")
            }
        }
    }
}

/// How many pages the other process reads.
const PAGES: &str = "16384";

/// A program that the time limit kills.
fn native(program: impl AsRef<std::ffi::OsStr>) -> Run {
    Run::new("timeout")
        .args(["--foreground", "--signal=KILL", NATIVE_TIMEOUT])
        .arg(program)
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

/// Whether an x86 processor has virtualisation. Without it KVM is absent or emulates.
fn virtualises(cpuinfo: &str) -> bool {
    let mut lines = cpuinfo.lines();
    let flags = lines.find_map(|line| line.strip_prefix("flags")?.split_once(':'));
    flags.is_some_and(|(_, flags)| {
        let mut flags = flags.split_whitespace();
        flags.any(|flag| matches!(flag, "svm" | "vmx"))
    })
}

/// What one page costs, in instructions, with 1 vCPU: medians.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Costs {
    uffd: f64,
    exit: f64,
    exit_16_around: f64,
}

impl Costs {
    /// Reads a report of `pagetide bench paging` (docs/design/reports.md).
    fn of(report: &Value) -> Option<Self> {
        let records = report["records"].as_array()?;
        let cost = |delivery: &str, around: u32| {
            let wanted = |record: &&Value| {
                let axes = &record["axes"];
                record["quantity"] == "instructions_per_page"
                    && record["over_runs"] == "median"
                    && axes["vcpus"] == 1
                    && axes["delivery"] == delivery
                    && axes["fault_around"] == around
                    && axes["populate"] != true
            };
            records.iter().find(wanted)?["value"].as_f64()
        };
        Some(Self {
            uffd: cost("uffd", 1)?,
            exit: cost("exit", 1)?,
            exit_16_around: cost("exit", 16)?,
        })
    }

    fn headline(self) -> String {
        format!(
            "At 1 vCPU a page brought in costs {:.0} instructions through userfaultfd and {:.0} through an exit:\n\
             {:.1} times fewer. With 16 pages around each exit a page costs {:.0}: {:.1} times fewer.",
            self.uffd,
            self.exit,
            self.uffd / self.exit,
            self.exit_16_around,
            self.uffd / self.exit_16_around
        )
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const HARDWARE: &str = "processor\t: 0\nflags\t\t: fpu svm lm\n";

    fn probe(present: &[&str]) -> Value {
        let all = [
            "/dev/kvm",
            "userfaultfd",
            "UFFD_FEATURE_MINOR_SHMEM",
            "KVM_CAP_ABSENT_MAPPING_FAULT",
        ];
        let capabilities: Vec<_> = all
            .iter()
            .map(|name| json!({"name": name, "present": present.contains(name), "found": "no"}))
            .collect();
        json!({"kernel_release": "6.12", "capabilities": capabilities})
    }

    #[test]
    fn a_vm_runs_where_the_processor_virtualises() {
        let mut present = vec!["/dev/kvm", "userfaultfd", "UFFD_FEATURE_MINOR_SHMEM"];
        let kernel = || "6.12".to_owned();
        let stock = Native::of(&probe(&present), HARDWARE);
        let deliveries = "uffd";
        assert_eq!(
            stock,
            Native::Vm {
                kernel: kernel(),
                deliveries
            }
        );
        present.push("KVM_CAP_ABSENT_MAPPING_FAULT");
        let patched = Native::of(&probe(&present), HARDWARE);
        let deliveries = "uffd,exit";
        assert_eq!(
            patched,
            Native::Vm {
                kernel: kernel(),
                deliveries
            }
        );
        // A KVM that emulates has neither flag; "svmx" is another flag.
        let emulated = Native::of(&probe(&present), "flags : fpu svmx\nbugs : svm\n");
        assert!(
            matches!(emulated, Native::Process { reason, .. } if reason.contains("emulates")),
            "{emulated:?}"
        );
    }

    #[test]
    fn without_kvm_a_process_is_served_and_without_userfaultfd_nothing() {
        let process = Native::of(&probe(&["userfaultfd"]), HARDWARE);
        assert!(matches!(process, Native::Process { .. }), "{process:?}");
        let nothing = Native::of(&probe(&["/dev/kvm"]), HARDWARE);
        let reason = "userfaultfd: no".to_owned();
        assert_eq!(nothing, Native::Nothing { reason });
    }

    /// A record of a cost of a page: over the runs, or of one.
    fn record(over_runs: Option<&str>, axes: &Value, value: f64) -> Value {
        json!({
            "quantity": "instructions_per_page",
            "over_runs": over_runs,
            "axes": axes,
            "value": value,
        })
    }

    fn axes(vcpus: u32, delivery: &str, around: u32) -> Value {
        json!({"vcpus": vcpus, "delivery": delivery, "fault_around": around})
    }

    #[test]
    fn the_headline_is_from_medians_of_instructions_at_one_vcpu() {
        let mut populated = axes(1, "exit", 16);
        populated["populate"] = true.into();
        let median = |axes, value| record(Some("median"), &axes, value);
        let report = json!({"records": [
            {"quantity": "rate_kpages_per_s", "over_runs": "median",
             "axes": axes(1, "uffd", 1), "value": 2.0},
            record(None, &axes(1, "uffd", 1), 3.0),
            record(Some("max"), &axes(1, "uffd", 1), 4.0),
            median(axes(2, "uffd", 1), 5.0),
            median(axes(1, "uffd", 1), 19260.4),
            median(axes(1, "exit", 1), 7122.0),
            median(populated, 1565.0),
            median(axes(1, "exit", 16), 4086.0),
        ]});
        let costs = Costs::of(&report).unwrap();
        assert_eq!(
            costs.headline(),
            "At 1 vCPU a page brought in costs 19260 instructions through userfaultfd and 7122 through \
             an exit:\n2.7 times fewer. With 16 pages around each exit a page costs 4086: 4.7 times \
             fewer."
        );
    }

    #[test]
    fn a_report_without_instructions_has_no_headline() {
        let rate = json!({
            "quantity": "rate_kpages_per_s",
            "over_runs": "median",
            "axes": axes(1, "uffd", 1),
            "value": 2.0,
        });
        assert_eq!(Costs::of(&json!({"records": [rate]})), None);
        assert_eq!(Costs::of(&json!({})), None);
    }
}
