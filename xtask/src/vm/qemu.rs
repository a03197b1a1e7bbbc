//! QEMU: its command line, its pipes, its end.
//!
//! virtme-ng showed the way (this machine's file system over 9p, read-only) and is not used: its guest
//! init starts udev and systemd-tmpfiles wherever it finds them, which makes a boot in a software CPU
//! three to four times as long and different on each machine; without udev it finds none of its own
//! ports, so that `vng` mixes a command's output with the kernel's messages or drops it, and exits with
//! 255 whatever the command did.

use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use fs_err as fs;
use rustix::io::{FdFlags, fcntl_setfd};

use super::agent::{Finished, TARGET_TAG, parse_status};
use super::host_load::HostLoad;
use super::{Pagetide, Timing, VmArgs, console, tsc};
use crate::command::{Run, tail};
use crate::cross;
use crate::guest_memory;
use crate::initramfs::Initramfs;
use crate::kernel::{Arch, selftests};
use crate::paths::Paths;
use crate::qemu::Qemu;

/// How long QEMU may take to end after the agent's last word.
const POWER_OFF: Duration = Duration::from_secs(20);

/// Lines of the console that the report of a lost VM shows.
const CONSOLE_LINES: usize = 30;

/// How the root is mounted. guest/share.h has the same for guest/early.c, which mounts it from an initramfs, and for the
/// agent, which mounts target/.
const P9_OPTIONS: &str = "version=9p2000.L,trans=virtio,access=any,msize=512000";

/// A VM to be run.
#[derive(Debug)]
pub(super) struct Machine<'a> {
    pub(super) args: &'a VmArgs,
    pub(super) qemu: Qemu,
    pub(super) image: PathBuf,
    pub(super) agent: PathBuf,
    pub(super) spec: Vec<u8>,
    /// Of each job: after what time it is killed.
    pub(super) limits: Vec<Option<Duration>>,
    pub(super) run_dir: PathBuf,
    pub(super) timeout: Duration,
}

/// Where the commands' output goes.
pub(crate) enum Output<'a> {
    /// To our own standard output and error, as it comes.
    Pass,
    /// Into the [`Outcome`]. How each command ended is told, by its number, as soon as it has.
    Keep(&'a mut dyn FnMut(usize, Finished)),
}

/// What became of a VM.
#[derive(Debug)]
pub(crate) struct Outcome {
    job_count: usize,
    /// How each command ended, as far as the VM came.
    pub(crate) finished: Vec<Finished>,
    /// Why the VM was lost, if it was.
    pub(crate) lost: Option<String>,
    /// The commands' kept output.
    pub(crate) stdout: Vec<u8>,
    /// The same of standard error.
    pub(crate) stderr: Vec<u8>,
    /// The console's log.
    pub(crate) console: PathBuf,
    /// Warnings and worse on the console.
    pub(crate) complaints: Vec<String>,
}

/// What became of one command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JobOutcome {
    /// How it ended, and when; `None` if the VM was lost before.
    pub(crate) finished: Option<Finished>,
    /// What it wrote.
    pub(crate) stdout: Vec<u8>,
    /// The same of standard error.
    pub(crate) stderr: Vec<u8>,
}

impl Outcome {
    /// What became of each of the VM's commands, if output was kept.
    pub(crate) fn jobs(&self) -> Vec<JobOutcome> {
        let count = self.job_count;
        let (out, err) = (split(&self.stdout, count), split(&self.stderr, count));
        let results = out.into_iter().zip(err).enumerate();
        results
            .map(|(index, (stdout, stderr))| JobOutcome {
                finished: self.finished.get(index).copied(),
                stdout,
                stderr,
            })
            .collect()
    }

    /// The console's last lines.
    pub(crate) fn console_tail(&self) -> String {
        tail(&self.console, CONSOLE_LINES)
    }
}

/// Runs a VM to its end. An error is one of setting it up; a VM that is lost is an outcome.
pub(super) fn run(machine: &Machine<'_>, output: Output<'_>, paths: &Paths) -> Result<Outcome> {
    let console = machine.run_dir.join("console.log");
    let qemu_log = machine.run_dir.join("qemu.log");
    let spec = machine.run_dir.join("spec");
    fs::write(&spec, &machine.spec)?;

    let pass = matches!(output, Output::Pass);
    let mut run = common(machine, &console);
    let (mut writers, mut relays) = (Vec::new(), Vec::new());
    let ports = [("stdout", pass), ("stderr", pass), ("status", false)];
    let [stdout, stderr, status] = [(); 3].map(|()| Shared::default());
    for ((name, pass), kept) in ports.into_iter().zip([&stdout, &stderr, &status]) {
        let (reader, writer) = std::io::pipe().context("make a pipe")?;
        // QEMU must inherit it; it opens it anew through /proc/self/fd.
        fcntl_setfd(&writer, FdFlags::empty()).context("let QEMU inherit a pipe")?;
        let number = writer.as_raw_fd();
        run = run
            .words(&format!(
                "-chardev file,id={name},path=/proc/self/fd/{number}"
            ))
            .words(&format!(
                "-device virtserialport,chardev={name},name=pagetide.{name}"
            ));
        relays.push(relay(reader, Arc::clone(kept), pass.then_some(name)));
        writers.push(writer);
    }
    let run = match machine.args.variant.arch {
        Arch::X86_64 => x86_64(run, machine, &spec, paths)?,
        Arch::Arm64 => arm64(run, machine, paths)?,
    };

    let log = fs::File::create(&qemu_log)?.into_file();
    let mut child = run
        .command()
        .stdout(log.try_clone().context("copy a file descriptor")?)
        .stderr(log)
        .spawn()
        .context("start QEMU")?;
    drop(writers); // the pipes end when QEMU does
    let mut ignored = |_, _| {};
    let mut told = Told {
        status: &status,
        finished: Vec::new(),
        tell: match output {
            Output::Pass => &mut ignored,
            Output::Keep(tell) => tell,
        },
    };
    let load = HostLoad::new(child.id(), &machine.run_dir);
    let ending = watch(&mut child, machine, &mut told, &load)?;
    for relay in relays {
        let read = relay.join().ok();
        let read = read.context("the thread that passes a VM's output on panicked")?;
        read.context("pass a VM's output on")?;
    }
    let complete = told.update();
    let lost = match ending {
        _ if complete => None,
        Ending::TimedOut => {
            let seconds = machine.timeout.as_secs();
            Some(format!("it had not ended after {seconds} s"))
        }
        Ending::Stalled => {
            Some("its command did not end, and was not killed after its time".into())
        }
        Ending::Ended => match tail(&qemu_log, 5) {
            said if said.is_empty() => Some("it ended before its commands had".to_owned()),
            said => Some(format!("QEMU said:\n{said}")),
        },
    };
    let text = fs::read(&console).unwrap_or_default();
    let [stdout, stderr] = [stdout, stderr].map(|kept| std::mem::take(&mut *lock(&kept)));
    Ok(Outcome {
        job_count: machine.limits.len(),
        finished: told.finished,
        lost,
        stdout,
        stderr,
        console,
        complaints: console::complaints(&String::from_utf8_lossy(&text)),
    })
}

/// What every VM has.
fn common(machine: &Machine<'_>, console: &Path) -> Run {
    let args = machine.args;
    let mut program = machine.qemu.command.iter();
    let accel = match args.timing {
        Timing::Function | Timing::Instructions => "tcg,thread=single",
        Timing::Parallel => "tcg,thread=multi",
    };
    let mut run = Run::new(program.next().map_or("".as_ref(), OsString::as_os_str))
        .args(program)
        .words("-nodefaults -no-user-config -display none -no-reboot")
        .args(["-cpu", "max", "-accel", accel])
        .args(["-smp", &args.cpu_count().to_string(), "-m", &args.memory])
        .arg("-kernel")
        .arg(&machine.image)
        .arg("-serial")
        .arg(with_path("file:", console))
        .args(["-device", "virtio-serial-pci"]);
    if args.timing == Timing::Instructions {
        run = run.args(["-icount", "shift=0,sleep=off"]);
    }
    if let Some(plugin) = &args.plugin {
        run = run.arg("-plugin").arg(plugin);
    }
    run
}

/// Kernel parameters of every VM: a panic, and an oops too, ends it at once.
fn parameters(machine: &Machine<'_>, tty: &str) -> Vec<String> {
    let mut list = vec![format!("console={tty} panic=-1 oops=panic")];
    list.extend_from_slice(&machine.args.append);
    list
}

/// KVM/arm64 unmaps up to 1 GiB page by page before it reschedules, and each page's invalidation interrupts all CPUs. That
/// takes milliseconds for 8192 pages here; once it took 25 s, of which RCU complains after 21.
const ARM64_STALLS: &str = "rcupdate.rcu_cpu_stall_timeout=120";

/// What `pagetide try` restores on arm64: /guest.mem.
const GUEST_MEMORY_BYTES: usize = 1 << 20;

/// This machine's file system over 9p, read-only but for target/ and what lies over /tmp.
fn x86_64(run: Run, machine: &Machine<'_>, spec: &Path, paths: &Paths) -> Result<Run> {
    let mut parameters = parameters(machine, "ttyS0");
    parameters.extend(tsc::parameter(machine.args.timing));
    // What follows `--` is for the init.
    let (agent, spec) = (utf8(&machine.agent)?, utf8(spec)?);
    parameters.push(match machine.args.initramfs {
        Some(_) => format!("-- {agent} {spec}"),
        None => format!("rootfstype=9p rootflags={P9_OPTIONS} ro init={agent} -- {spec}"),
    });
    let initramfs = machine.args.initramfs.iter();
    let initramfs = initramfs.flat_map(|file| [OsStr::new("-initrd"), file.as_os_str()]);
    let target = "local,id=target,security_model=none,multidevs=remap,path=";
    Ok(run
        .words("-machine q35 -fsdev")
        .arg("local,id=root,path=/,security_model=none,readonly=on,multidevs=remap")
        .words("-device virtio-9p-pci,fsdev=root,mount_tag=/dev/root -fsdev")
        .arg(with_path(target, &paths.target()))
        .arg("-device")
        .arg(format!("virtio-9p-pci,fsdev=target,mount_tag={TARGET_TAG}"))
        .args(initramfs)
        .args(["-append", &parameters.join(" ")]))
}

/// An initramfs with the agent, the selftests and programs of ours, and nothing shared.
fn arm64(run: Run, machine: &Machine<'_>, paths: &Paths) -> Result<Run> {
    let read =
        |file: &Path| std::fs::read(file).with_context(|| format!("read {}", file.display()));
    let mut archive = Initramfs::default();
    for directory in ["bin", "dev", "proc", "sys", "tmp", "selftests"] {
        archive.directory(directory)?;
    }
    archive.device("dev/console", 5, 1)?;
    archive.file("init", &read(&machine.agent)?)?;
    archive.file("spec", &machine.spec)?;
    for test in selftests::list(Arch::Arm64, paths)? {
        let file = selftests::directory(machine.args.variant, paths).join(test.name());
        if file.exists() {
            archive.file(&format!("selftests/{}", test.name()), &read(&file)?)?;
        }
    }
    let pagetide = cross::pagetide(paths);
    let has_pagetide = machine.args.pagetide != Pagetide::None && pagetide.exists();
    let programs = machine.args.programs.iter();
    for file in programs.chain(has_pagetide.then_some(&pagetide)) {
        let name = file.file_name().context("a program without a name")?;
        archive.file(&format!("bin/{}", name.to_string_lossy()), &read(file)?)?;
    }
    if has_pagetide {
        let mut memory = Vec::new();
        guest_memory::write_to(&mut memory, GUEST_MEMORY_BYTES)?;
        archive.file("guest.mem", &memory)?;
    }
    let mut parameters = parameters(machine, "ttyAMA0");
    parameters.push(ARM64_STALLS.to_owned());
    let file = machine.run_dir.join("initramfs");
    std::fs::write(&file, archive.finish()?)
        .with_context(|| format!("write {}", file.display()))?;
    Ok(run
        .args(["-machine", "virt,virtualization=on,gic-version=3"])
        .arg("-initrd")
        .arg(&file)
        .args(["-append", &format!("{} -- /spec", parameters.join(" "))]))
}

fn utf8(path: &Path) -> Result<&str> {
    let text = path.to_str();
    let text = text.with_context(|| format!("{} is not UTF-8", path.display()))?;
    if text.contains([' ', '"']) {
        bail!("{text:?} has a space or a quote: the kernel's command line cannot carry it");
    }
    Ok(text)
}

/// A QEMU option that ends with a path, in which commas are doubled.
fn with_path(option: &str, path: &Path) -> OsString {
    let mut text = OsString::from(option);
    text.push(path.to_string_lossy().replace(',', ",,"));
    text
}

/// What was read from a pipe.
type Shared = Arc<Mutex<Vec<u8>>>;

fn lock(bytes: &Mutex<Vec<u8>>) -> MutexGuard<'_, Vec<u8>> {
    // Bytes are whole whoever panicked.
    bytes.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread that reads a pipe to its end. What it reads goes to our own stream of the name `pass_to`, or is
/// kept.
fn relay(
    mut reader: std::io::PipeReader,
    kept: Shared,
    pass_to: Option<&'static str>,
) -> JoinHandle<std::io::Result<()>> {
    std::thread::spawn(move || {
        let (mut bytes, mut open) = (vec![0; 65536], true);
        loop {
            let piece = match reader.read(&mut bytes) {
                Ok(0) => return Ok(()),
                Ok(count) => &bytes[..count],
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            match pass_to {
                // Whoever reads us may have gone (`| head`): the VM still runs to its end.
                Some(name) => open = open && pass_on(name, piece).is_ok(),
                None => lock(&kept).extend_from_slice(piece),
            }
        }
    })
}

/// Which commands have ended, and who wants to know.
struct Told<'a> {
    status: &'a Mutex<Vec<u8>>,
    finished: Vec<Finished>,
    tell: &'a mut dyn FnMut(usize, Finished),
}

impl Told<'_> {
    /// Tells of the commands that have ended since; whether the agent has got to its end.
    fn update(&mut self) -> bool {
        let (finished, complete) = parse_status(&String::from_utf8_lossy(&lock(self.status)));
        for (number, &finished) in finished.iter().enumerate().skip(self.finished.len()) {
            (self.tell)(number, finished);
        }
        self.finished = finished;
        complete
    }
}

fn pass_on(name: &str, bytes: &[u8]) -> std::io::Result<()> {
    if name == "stdout" {
        let mut stream = std::io::stdout().lock();
        stream.write_all(bytes)?;
        stream.flush()
    } else {
        std::io::stderr().lock().write_all(bytes)
    }
}

/// The agent's mark between the output of two commands.
const SEPARATOR: u8 = 0x1e;

/// Divides output into that of each command. With one command there are no marks.
fn split(bytes: &[u8], count: usize) -> Vec<Vec<u8>> {
    let mut parts = vec![Vec::new(); count];
    if count == 1 {
        parts[0] = bytes.to_vec();
        return parts;
    }
    let mut current = None;
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        // A command may end without a newline: the mark is then at its line's end.
        let mark = line.iter().rposition(|byte| *byte == SEPARATOR);
        let mark = mark.and_then(|at| {
            let digits = std::str::from_utf8(&line[at + 1..]).ok()?;
            let number = digits.trim_end().parse().ok()?;
            (number < count).then_some((number, &line[..at]))
        });
        let text = mark.map_or(line, |(_, text)| text);
        if let Some(part) = current.and_then(|index: usize| parts.get_mut(index)) {
            part.extend_from_slice(text);
        }
        current = mark.map(|(number, _)| number).or(current);
    }
    parts
}

/// How QEMU came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Ended,
    TimedOut,
    /// A command's time was over long ago.
    Stalled,
}

/// Waits for QEMU, and ends it when its time is over.
fn watch(
    child: &mut Child,
    machine: &Machine<'_>,
    told: &mut Told<'_>,
    load: &HostLoad,
) -> Result<Ending> {
    let deadline = Instant::now() + machine.timeout;
    let mut power_off = None;
    // How many commands have ended, and since when.
    let mut progress = (0, Instant::now());
    loop {
        if child.try_wait().context("wait for QEMU")?.is_some() {
            return Ok(Ending::Ended);
        }
        let now = Instant::now();
        load.write();
        if told.update() {
            power_off.get_or_insert(now + POWER_OFF);
        }
        let ended = told.finished.len();
        if ended != progress.0 {
            progress = (ended, now);
        }
        let limit = machine.limits.get(ended).copied().flatten();
        let stall = limit.zip(machine.args.stall);
        let is_stalled = stall.is_some_and(|(limit, more)| now >= progress.1 + limit + more);
        if now >= deadline || is_stalled || power_off.is_some_and(|limit| now >= limit) {
            child.kill().context("end QEMU")?;
            child.wait().context("wait for QEMU")?;
            return Ok(if is_stalled {
                Ending::Stalled
            } else {
                Ending::TimedOut
            });
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_divided_at_the_marks() {
        let parts = split(b"\x1e0\na\nb\x1e1\n\x1e2\nc\x1e\n", 3);
        assert_eq!(parts, [b"a\nb".to_vec(), Vec::new(), b"c\x1e\n".to_vec()]);
        assert_eq!(split(b"x\x1e0\n", 1), [b"x\x1e0\n".to_vec()]);
    }

    #[test]
    fn commands_are_told_of_as_they_end() {
        let status = Mutex::new(b"exit 0 10\nexit 1".to_vec());
        let mut seen = Vec::new();
        let mut tell = |number, finished: Finished| seen.push((number, finished.ended.code()));
        let mut told = Told {
            status: &status,
            finished: Vec::new(),
            tell: &mut tell,
        };
        assert!(!told.update());
        assert!(!told.update());
        lock(&status).extend_from_slice(b" 20\nsignal 9 30\nend\n");
        assert!(told.update());
        assert_eq!(told.finished.len(), 3);
        assert_eq!(seen, [(0, 0), (1, 1), (2, 137)]);
    }

    #[test]
    fn commas_of_a_path_are_doubled() {
        assert_eq!(with_path("path=", Path::new("/a,b")), "path=/a,,b");
    }

    #[test]
    fn the_kernels_command_line_takes_no_spaces() {
        assert!(utf8(Path::new("/a b")).is_err());
        assert_eq!(utf8(Path::new("/a")).unwrap(), "/a");
    }
}
