//! `pagetide run`: a real Linux guest, its console here.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::num::NonZero;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use pagetide_base::units::ByteSize;
use pagetide_memory::{Backing, FailurePolicy, LoadError, PoisonMap};
use pagetide_pager::Delivery;
use pagetide_vmm::linux::{
    ContentFile, LinuxConfig, LinuxConsole, LinuxEnd, LinuxMachine, LinuxPaging, MachineChecks,
};
use pagetide_vmm::{Stopper, VcpuHooks};

use crate::args::{BACKINGS, POLICIES, one_of};
use crate::failure::Failure;
use crate::terminal::RawTerminal;

pub(crate) const EXAMPLES: &str = "\
Examples, after `cargo xtask guest`, which makes the initrd:
  A shell in a guest with two processors:
    pagetide run --kernel vmlinux --initrd target/guest/initramfs.cpio --vcpus 2

  One command, and its exit status:
    pagetide run --kernel vmlinux --initrd target/guest/initramfs.cpio --cmdline 'quiet -- nproc'

  The same, its memory paged in from a file while it runs, and what is not touched too:
    pagetide run --kernel vmlinux --initrd target/guest/initramfs.cpio --paging uffd --prefetch

  In the lab, on a machine without hardware virtualisation:
    cargo xtask vm --cpus 1 -- pagetide run --kernel target/kernel/x86_64/vmlinux \\
        --initrd target/guest/initramfs.cpio --cmdline '-- uname -a'

Ends when the guest writes a line with a number from 0 to 255 to ttyS1, when it reboots or halts, or, \
on a terminal, with Ctrl-A X.

Exit status: that number; 0 after a reboot or a halt; 1 if the guest panicked or its run failed; 2 if \
the command line makes no sense or this machine lacks something. The last line on standard error says \
which it was.";

/// All but the kernel has a default.
#[derive(Debug, Args)]
pub(crate) struct RunArguments {
    /// The guest's kernel for x86-64: a vmlinux (the ELF file of a kernel build) or a bzImage
    #[arg(long, value_name = "FILE")]
    kernel: PathBuf,

    /// Its initrd or initramfs; there is no disk, so a kernel without its own needs one
    #[arg(long, value_name = "FILE")]
    initrd: Option<PathBuf>,

    /// The guest's memory: bytes, or a number with K, M, G or T (powers of 1024); a multiple of
    /// the backing's page size
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    memory: ByteSize,

    /// Number of vCPUs
    #[arg(long, value_name = "N", default_value_t = 1)]
    vcpus: u32,

    /// Kernel parameters, which follow `console=ttyS0 reboot=k panic=-1`; what comes after `--` is
    /// for the guest's first process
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        allow_hyphen_values = true
    )]
    cmdline: String,

    /// What guest memory is made of
    ///
    /// shmem: a memfd of 4K pages. thp: the same with transparent huge pages, where
    /// /sys/kernel/mm/transparent_hugepage/shmem_enabled allows them. hugetlb-2m, hugetlb-1g:
    /// reserved huge pages. anonymous: private memory.
    #[arg(
        long, value_name = "KIND", default_value = "shmem",
        value_parser = one_of::<Backing>(&BACKINGS),
    )]
    backing: Backing,

    /// What an uncorrected memory error takes from the guest: 4 KiB (keep), or the whole page of the
    /// backing (default). keep needs a kernel with the Pagetide series, and shmem, thp or hugetlb memory
    /// [default: keep where it can be had]
    #[arg(long, value_name = "POLICY", value_parser = one_of::<FailurePolicy>(POLICIES))]
    policy: Option<FailurePolicy>,

    /// Add the guest memory that is lost to errors to this file, a poison map, which is made if it is
    /// missing: who restores the guest elsewhere has to poison the same memory
    #[arg(long, value_name = "FILE")]
    poison_map: Option<PathBuf>,

    /// How the guest's memory is paged in: all of it, kernel and initrd included, as the guest touches it
    ///
    /// uffd: by a userfaultfd. exit: vCPUs exit for absent pages, and their threads install them;
    /// needs a kernel with the Pagetide series (KVM_CAP_ABSENT_MAPPING_FAULT). off: all memory is present
    /// from the start. At the end standard error says how many pages came in which way. Needs shmem, thp or
    /// hugetlb memory.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = PagingChoice::Off)]
    paging: PagingChoice,

    /// With --paging: also fetch pages before the guest touches them
    #[arg(long)]
    prefetch: bool,

    /// With --paging: the file that has the content of the memory. A missing file is made and kept; an
    /// existing one is used, and must be of a guest with the same kernel, initrd, command line, memory and vCPUs
    /// [default: a temporary file]
    #[arg(long, value_name = "FILE")]
    content: Option<PathBuf>,

    /// Where the guest's console (ttyS0) goes: `stdio` is standard output and input, `none` is
    /// nowhere, anything else is a file
    #[arg(long, value_name = "WHERE", default_value = "stdio")]
    console: PathBuf,

    /// End the guest, as a failure, if it has not ended after so many seconds [default: never]
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<NonZero<u32>>,
}

/// How memory comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum PagingChoice {
    Uffd,
    Exit,
    Off,
}

impl PagingChoice {
    fn delivery(self) -> Option<Delivery> {
        match self {
            Self::Uffd => Some(Delivery::Uffd),
            Self::Exit => Some(Delivery::Exit),
            Self::Off => None,
        }
    }
}

/// An option that means nothing for memory that is there from the start.
#[derive(Debug, thiserror::Error)]
#[error("{option} needs --paging uffd or --paging exit")]
struct NotPaged {
    option: &'static str,
}

/// The console's file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("--console {}", path.display())]
struct ConsoleError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Runs the guest to its end, and ends as it did.
pub(crate) fn run(arguments: &RunArguments) -> Result<ExitCode, Failure> {
    let config = LinuxConfig {
        initrd: arguments.initrd.clone(),
        memory_bytes: arguments.memory.0,
        vcpus: arguments.vcpus,
        cmdline: arguments.cmdline.clone(),
        backing: arguments.backing,
        policy: arguments.policy,
        time_limit: arguments
            .timeout
            .map(|seconds| Duration::from_secs(seconds.get().into())),
        ..LinuxConfig::new(&arguments.kernel)
    };
    if arguments.paging == PagingChoice::Off {
        let options = [
            ("--prefetch", arguments.prefetch),
            ("--content", arguments.content.is_some()),
        ];
        if let Some((option, _)) = options.into_iter().find(|(_, is_given)| *is_given) {
            return Err(Failure::bad_input(NotPaged { option }));
        }
    }
    let lost_before = match &arguments.poison_map {
        Some(file) => known_poison(file)?,
        None => PoisonMap::default(),
    };
    let known_bytes = lost_before.bytes();
    let place = Console::open(&arguments.console)?;
    let (machine, paging) = make(arguments, &config)?;
    let (console, terminal) = place
        .connect(&machine.stopper())
        .map_err(|source| refused(&arguments.console, source))?;
    let checks = MachineChecks::with_map(&machine, lost_before, arguments.poison_map.clone())
        .map_err(Failure::failed)?;
    let checks = match &paging {
        Some(paging) => checks.other_faults_to(paging.hooks()),
        None => checks,
    };
    let checks = Arc::new(checks);
    let result = machine.run(console, Arc::clone(&checks) as Arc<dyn VcpuHooks>);
    // Before anything is told: in raw mode a new line does not begin at the left.
    drop(terminal);
    let lost = checks.lost_bytes() - known_bytes;
    if lost > 0 {
        let policy = config.policy();
        eprintln!(
            "pagetide: {lost} bytes of the guest's memory were lost to uncorrected errors (policy {policy})"
        );
    }
    if let Some(paging) = paging {
        eprintln!("pagetide: {}", paging.end());
    }
    let outcome = result.map_err(Failure::failed)?;
    let seconds = outcome.elapsed.as_secs_f64();
    eprintln!("pagetide: {} after {seconds:.2} s", outcome.end);
    Ok(match outcome.end {
        LinuxEnd::Status(status) => ExitCode::from(status),
        LinuxEnd::Reset | LinuxEnd::Halted | LinuxEnd::Stopped => ExitCode::SUCCESS,
        LinuxEnd::TripleFault | LinuxEnd::Panicked { .. } => ExitCode::FAILURE,
    })
}

/// The machine, and what pages its memory in if that is wanted.
fn make(
    arguments: &RunArguments,
    config: &LinuxConfig,
) -> Result<(LinuxMachine, Option<LinuxPaging>), Failure> {
    let Some(delivery) = arguments.paging.delivery() else {
        let machine = LinuxMachine::new(config).map_err(Failure::bad_input)?;
        return Ok((machine, None));
    };
    let content = match &arguments.content {
        Some(file) => ContentFile::kept(file, config.memory_bytes),
        None => ContentFile::temporary(),
    };
    let content = content.map_err(Failure::bad_input)?;
    let started = LinuxPaging::start(config, delivery, arguments.prefetch, content);
    let (machine, paging) = started.map_err(Failure::bad_input)?;
    Ok((machine, Some(paging)))
}

/// What a poison map has already.
fn known_poison(file: &Path) -> Result<PoisonMap, Failure> {
    match PoisonMap::load(file) {
        Err(LoadError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Ok(PoisonMap::default())
        }
        known => known.map_err(Failure::bad_input),
    }
}

/// Where the console goes.
enum Console {
    Stdio,
    Nowhere,
    File(File),
}

impl Console {
    fn open(path: &Path) -> Result<Self, Failure> {
        match path.to_str() {
            Some("none") => Ok(Self::Nowhere),
            Some("stdio") => Ok(Self::Stdio),
            // What is in it stays until there is something to write.
            _ => File::options()
                .write(true)
                .create(true)
                .truncate(false)
                .open(path)
                .map(Self::File)
                .map_err(|source| refused(path, source)),
        }
    }

    /// The guest's ends, and the terminal if it is one, to be dropped after the run.
    fn connect(self, stopper: &Stopper) -> io::Result<(LinuxConsole, Option<RawTerminal>)> {
        let (console, input, terminal) = match self {
            Self::Nowhere => return Ok((LinuxConsole::output(io::sink()), None)),
            Self::File(file) => {
                if file.metadata()?.is_file() {
                    file.set_len(0)?;
                }
                return Ok((LinuxConsole::output(file), None));
            }
            Self::Stdio if io::stdin().is_terminal() => {
                let (terminal, input) = RawTerminal::open(stopper.clone())?;
                (LinuxConsole::output(io::stdout()), input, Some(terminal))
            }
            Self::Stdio => {
                let input = io::stdin().as_fd().try_clone_to_owned()?;
                (LinuxConsole::output(io::stdout()), input, None)
            }
        };
        Ok((console.input(input), terminal))
    }
}

fn refused(path: &Path, source: io::Error) -> Failure {
    let path = path.to_owned();
    Failure::bad_input(ConsoleError { path, source })
}
