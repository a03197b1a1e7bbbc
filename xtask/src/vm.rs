//! `cargo xtask vm`: a command in a VM that runs our kernel, with this machine's file system.

mod agent;
mod console;
mod host_load;
mod qemu;
mod tsc;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};

use crate::command::Run;
use crate::kernel::{Arch, Variant, build, selftests};
use crate::paths::Paths;
use crate::progress::Progress;
use crate::qemu::Qemu;
use crate::{cross, files, setup};

pub(crate) use agent::{Ended, Finished, Job, build_early};
pub(crate) use qemu::{JobOutcome, Outcome, Output};

/// The exit status that says that the VM was lost, and nothing of the command.
pub(crate) const LOST: u8 = 125;

/// How a VM is run.
#[derive(Debug, Clone, Args)]
pub(crate) struct VmArgs {
    #[command(flatten)]
    pub(crate) variant: Variant,
    /// Virtual CPUs [default: 2; with --timing parallel: this machine's CPUs]
    #[arg(long, value_name = "N")]
    pub(crate) cpus: Option<u32>,
    /// Memory, as QEMU understands it
    #[arg(long, value_name = "M", default_value = "2G")]
    pub(crate) memory: String,
    /// More kernel parameters (may be given several times)
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true)]
    pub(crate) append: Vec<String>,
    /// How QEMU's software CPU runs, and so what times in the VM mean
    #[arg(long, value_enum, default_value_t = Timing::Function)]
    pub(crate) timing: Timing,
    /// End the VM, as lost, after so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    pub(crate) timeout: u64,
    /// End the VM, as lost, if a command has not ended so long after its own time
    #[arg(skip)]
    pub(crate) stall: Option<Duration>,
    /// Use the kernel and the `pagetide` command as they were built last
    #[arg(long)]
    pub(crate) no_build: bool,
    /// Another kernel image than the variant's; nothing of the kernel is built
    #[arg(skip)]
    pub(crate) image: Option<PathBuf>,
    /// For such an image that has the lab's drivers as modules: the initramfs that loads them (x86_64 only)
    #[arg(skip)]
    pub(crate) initramfs: Option<PathBuf>,
    /// Which `pagetide` is on the PATH
    #[arg(skip)]
    pub(crate) pagetide: Pagetide,
    /// Programs for /bin of an arm64 VM, which has no other way to get at them
    #[arg(skip)]
    pub(crate) programs: Vec<PathBuf>,
    /// What the commands' environment has in addition
    #[arg(skip)]
    pub(crate) environment: Vec<(&'static str, OsString)>,
    /// A plugin of the software CPU with its options, as QEMU's `-plugin` takes them
    #[arg(long, value_name = "PLUGIN", hide = true)]
    pub(crate) plugin: Option<OsString>,
    /// Whether to build the lab's own QEMU if it is not in the cache. Guests that take no interrupts do
    /// without it.
    #[arg(skip = true)]
    pub(crate) builds_qemu: bool,
}

/// A `pagetide` command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Pagetide {
    /// Optimised, for measurements; built if it is not there. On arm64 there is nothing to measure
    /// yet, and it is that of the tests.
    #[default]
    Release,
    /// With the tests' checks. Who asks for it has had the tests compiled, and this with them.
    Tested,
    /// For jobs that do not call it: nothing is built.
    None,
}

impl Pagetide {
    /// Where it is.
    fn directory(self, paths: &Paths) -> Option<PathBuf> {
        let name = match self {
            Self::Release => "release",
            Self::Tested => "debug",
            Self::None => return None,
        };
        Some(paths.target().join(name))
    }
}

/// The verb's arguments.
#[derive(Debug, Args)]
pub(crate) struct VerbArgs {
    #[command(flatten)]
    vm: VmArgs,
    /// What to run, as root, in the current directory; `pagetide` is on the PATH
    ///
    /// The name of a selftest runs the one that was built with the kernel.
    /// Only target/ of this checkout keeps what is written to it; /tmp can be written too. On arm64
    /// there is no shared file system: the directory is /, and there are only `pagetide`, without
    /// optimisation, and the selftests.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl VerbArgs {
    /// What runs in the VM.
    #[cfg(test)]
    pub(crate) fn command(&self) -> &[OsString] {
        &self.command
    }

    /// The kernel that the VM runs.
    #[cfg(test)]
    pub(crate) fn variant(&self) -> Variant {
        self.vm.variant
    }

    /// The command, with the path of a selftest in place of its name: a selftest opens itself by what it was called.
    fn resolved(&self, paths: &Paths) -> Result<Vec<OsString>> {
        let variant = self.vm.variant;
        let mut command = self.command.clone();
        if let Some(program) = command.first_mut()
            && selftests::built(variant, paths)?
                .iter()
                .any(|test| *program == *test.name())
        {
            *program = selftests::directory_in_vm(variant, paths)
                .join(&*program)
                .into();
        }
        Ok(match variant.has_modules() {
            true => after_modules(variant, command, paths),
            false => command,
        })
    }
}

/// Loads KVM's modules, and the one by which tests make memory fail.
pub(crate) fn load_modules(variant: Variant, paths: &Paths) -> Vec<OsString> {
    let directory = variant.module_directory(paths).into_os_string();
    let mut command: Vec<OsString> = ["modprobe", "--all", "--dirname"].map(Into::into).into();
    command.push(directory);
    command.extend(["kvm-amd", "hwpoison-inject"].map(OsString::from));
    command
}

/// A command that begins once KVM's modules are loaded.
fn after_modules(variant: Variant, command: Vec<OsString>, paths: &Paths) -> Vec<OsString> {
    let load = load_modules(variant, paths);
    // The shell's own arguments are those of modprobe, which it drops, and the command.
    let words: Vec<String> = (0..load.len()).map(|word| format!("\"${word}\"")).collect();
    let script = format!(
        "{} && shift {} && exec \"$@\"",
        words.join(" "),
        load.len() - 1
    );
    let mut all: Vec<OsString> = ["sh", "-c"].map(Into::into).into();
    all.push(script.into());
    all.extend(load);
    all.extend(command);
    all
}

/// How QEMU's software CPU runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Timing {
    /// All CPUs on one thread: correct with any number of CPUs; times mean little
    Function,
    /// One thread, and a nanosecond is an instruction: for cost, blind to caches and parallel waits
    Instructions,
    /// A thread for each CPU: for wake-ups and contention, as ratios; now and then a VM is lost
    Parallel,
}

impl Timing {
    /// The name that options and `PAGETIDE_TIMING` use.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Function => "function",
            Self::Instructions => "instructions",
            Self::Parallel => "parallel",
        }
    }
}

impl VmArgs {
    /// The defaults, for one kernel.
    pub(crate) fn new(variant: Variant) -> Self {
        Self {
            variant,
            cpus: None,
            memory: "2G".into(),
            append: Vec::new(),
            timing: Timing::Function,
            timeout: 900,
            stall: None,
            no_build: false,
            image: None,
            initramfs: None,
            pagetide: Pagetide::Release,
            programs: Vec::new(),
            environment: Vec::new(),
            plugin: None,
            builds_qemu: true,
        }
    }

    fn cpu_count(&self) -> u32 {
        let host = || {
            let host = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
            u32::try_from(host).unwrap_or(1)
        };
        let is_parallel = self.timing == Timing::Parallel;
        self.cpus
            .unwrap_or_else(|| if is_parallel { host() } else { 2 })
    }
}

/// Runs the verb.
pub(crate) fn run(args: &VerbArgs, paths: &Paths) -> Result<ExitCode> {
    let directory = std::env::current_dir().context("the current directory")?;
    let job = Job {
        timeout: None,
        ..Job::new(args.resolved(paths)?, &directory)
    };
    let outcome = boot(&args.vm, &[job], Output::Pass, paths)?;
    Ok(ExitCode::from(show(&outcome)))
}

/// Tells what a person should know of a VM with one command, whose output was passed on; returns the
/// exit status for it.
pub(crate) fn show(outcome: &Outcome) -> u8 {
    for line in &outcome.complaints {
        eprintln!("the VM's kernel complained: {line}");
    }
    if !outcome.complaints.is_empty() {
        eprintln!("the VM's console: {}", outcome.console.display());
    }
    match (&outcome.lost, outcome.finished.first()) {
        (None, Some(Finished { ended, .. })) => {
            if !matches!(ended, Ended::Exit(_)) {
                eprintln!("the command was {ended}");
            }
            ended.code()
        }
        (lost, _) => {
            let reason = lost.as_deref().unwrap_or("it told no exit status");
            let (console, end) = (outcome.console.display(), outcome.console_tail());
            eprint!("the VM was lost: {reason}; last lines of {console}:\n{end}");
            LOST
        }
    }
}

/// Builds what is needed, boots a VM, runs the jobs in it one after the other, and ends it.
pub(crate) fn boot(
    args: &VmArgs,
    jobs: &[Job],
    output: Output<'_>,
    paths: &Paths,
) -> Result<Outcome> {
    let variant = args.variant;
    if args.cpu_count() == 0 {
        bail!("--cpus must be at least 1");
    }
    setup::require(&setup::vm_tools(variant.arch))?;
    if !args.no_build {
        if args.image.is_none() {
            build::ensure_any(variant, paths)?;
        }
        match (variant.arch, args.pagetide) {
            (Arch::X86_64, Pagetide::Release) => build_pagetide(paths)?,
            (Arch::Arm64, Pagetide::Release) => {
                setup::require(&setup::cross_tools())?;
                cross::build_pagetide(&paths.target().join("vm/build-arm64.log"), paths)?;
            }
            (_, Pagetide::Tested | Pagetide::None) => {}
        }
    }
    let image = args.image.clone().unwrap_or_else(|| variant.image(paths));
    if !image.exists() {
        bail!("{} is missing: leave out --no-build", image.display());
    }
    let run_dir = new_run_dir(paths)?;
    let software_cpu = Qemu::find(variant.arch, args.builds_qemu, paths);
    let mut args = args.clone();
    args.environment
        .push(("PAGETIDE_QEMU", software_cpu.name.into()));
    let args = &args;
    let machine = qemu::Machine {
        args,
        qemu: software_cpu,
        image,
        agent: agent::build(variant.arch, paths)?,
        spec: agent::spec(args, jobs, &run_dir, paths)?,
        limits: jobs.iter().map(|job| job.timeout).collect(),
        run_dir,
        timeout: Duration::from_secs(args.timeout),
    };
    qemu::run(&machine, output, paths)
}

/// The optimised `pagetide`, once built.
pub(crate) fn pagetide(paths: &Paths) -> PathBuf {
    paths.target().join("release/pagetide")
}

/// Builds the optimised `pagetide`.
pub(crate) fn build_pagetide(paths: &Paths) -> Result<()> {
    let log = paths.target().join("vm/build.log");
    files::remove(&log)?;
    let compiles = |line: &str| line.trim_start().starts_with("Compiling ");
    let progress = Progress::start("building pagetide", None, compiles);
    Run::new("cargo")
        .words("build --release --package pagetide-cli --target-dir")
        .arg(paths.target())
        .dir(paths.root())
        .logged(&log, &progress)?;
    progress.done();
    Ok(())
}

/// A directory for a VM's files. Those of the last few VMs are kept.
fn new_run_dir(paths: &Paths) -> Result<PathBuf> {
    const KEPT: usize = 20;
    let all = paths.target().join("vm");
    Ok(files::one_of_many(&all, "run-", KEPT)?)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: VerbArgs,
    }

    #[test]
    fn the_name_of_a_selftest_stands_for_its_path() {
        let paths = Paths::find().unwrap();
        let resolved = |line: &str| {
            let line = Line::parse_from(line.split(' '));
            line.args.resolved(&paths).unwrap()
        };
        let built =
            selftests::directory(Variant::patched(Arch::X86_64), &paths).join("kick_vcpus_test");
        assert_eq!(
            resolved("vm -- kick_vcpus_test -h")[..],
            [built.as_os_str(), "-h".as_ref()]
        );
        let arm64 = resolved("vm --arch arm64 -- kick_vcpus_test");
        assert_eq!(arm64, ["/selftests/kick_vcpus_test"]);
        assert_eq!(resolved("vm -- echo kick_vcpus_test")[0], "echo");
        // Only the series has it.
        let stock = resolved("vm --stock -- kick_vcpus_test");
        assert_eq!(stock, ["kick_vcpus_test"]);
    }

    #[test]
    fn with_modules_a_command_begins_once_they_are_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let modprobe = dir.path().join("modprobe");
        let text = "#!/bin/sh\necho loads \"$4\" \"$5\"\nexit $STATUS\n";
        // By a shell: had this process written the file, a child of another thread might still have it open, and it
        // could not be executed.
        let write = "printf %s \"$1\" >\"$0\" && chmod +x \"$0\"";
        let write = Run::new("sh").args(["-c", write]).arg(&modprobe).arg(text);
        write.output().unwrap();
        let variant = Variant {
            modules: true,
            ..Variant::patched(Arch::X86_64)
        };
        let command = ["echo", "a b", "c"].map(OsString::from).to_vec();
        let command = after_modules(variant, command, &Paths::at(dir.path()));
        let run = |status: &str| {
            let path = format!("{}:/usr/bin:/bin", dir.path().display());
            let run = Run::new("env").arg(format!("PATH={path}"));
            run.arg(format!("STATUS={status}"))
                .args(&command)
                .result()
                .unwrap()
        };
        assert_eq!(run("0").stdout, b"loads kvm-amd hwpoison-inject\na b c\n");
        assert_eq!(run("1").stdout, b"loads kvm-amd hwpoison-inject\n");
        assert!(!run("1").status.success());
    }
}
