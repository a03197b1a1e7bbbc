//! The filter of system calls: what is refused, and what ends the process. That a server works below it is shown
//! by all other tests, whose servers have it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Output};
use std::sync::mpsc;
use std::thread;

use pagetide_serve::{Seccomp, SeccompMode};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::net::{AddressFamily, SocketType, socket};

const ACT: &str = "PAGETIDE_TEST_ACT";
const SIGSYS: i32 = 31;

/// Runs the test `child` in a process of its own.
fn act(what: &str) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(ACT, what)
        .output()
        .unwrap()
}

fn assert_passed(output: &Output) {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{}\n{text}\n{errors}",
        output.status
    );
}

/// Whether this kernel filters system calls; prints the reason if not.
fn has_seccomp() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let has = status.contains("Seccomp:");
    if !has {
        println!("SKIP: the kernel has no seccomp");
    }
    has
}

fn confine(mode: SeccompMode, network: bool) {
    Seccomp::new(mode, network).confine_process().unwrap();
}

fn inet() -> Result<(), Errno> {
    socket(AddressFamily::INET, SocketType::STREAM, None).map(drop)
}

#[test]
fn child() {
    let Ok(act) = std::env::var(ACT) else {
        return;
    };
    match act.as_str() {
        "refused" => refused(),
        "works" => works(),
        "network" => {
            confine(SeccompMode::On, true);
            inet().unwrap();
            let inet6 = socket(AddressFamily::INET6, SocketType::DGRAM, None);
            assert_ne!(inet6.err(), Some(Errno::NOSYS));
            let netlink = socket(AddressFamily::NETLINK, SocketType::RAW, None);
            netlink.unwrap();
            let packet = socket(AddressFamily::PACKET, SocketType::RAW, None);
            assert_eq!(packet.err(), Some(Errno::NOSYS));
        }
        "log" => {
            confine(SeccompMode::Log, false);
            inet().unwrap();
            assert!(Command::new("true").status().unwrap().success());
        }
        "off" => {
            confine(SeccompMode::Off, false);
            assert!(Command::new("true").status().unwrap().success());
        }
        "exec" => {
            confine(SeccompMode::On, true);
            panic!("{}", Command::new("true").exec());
        }
        "ptrace" => {
            confine(SeccompMode::On, false);
            // SAFETY: PTRACE_TRACEME takes no pointer.
            let result = unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) };
            panic!("{result}");
        }
        other => panic!("{other}"),
    }
}

fn refused() {
    // A thread that was there before is filtered, too.
    let (send, begin) = mpsc::channel();
    let before = thread::spawn(move || {
        begin.recv().unwrap();
        inet()
    });
    confine(SeccompMode::On, false);
    send.send(()).unwrap();
    assert_eq!(before.join().unwrap(), Err(Errno::NOSYS));
    assert_eq!(inet(), Err(Errno::NOSYS));
    let later = thread::spawn(inet);
    assert_eq!(later.join().unwrap(), Err(Errno::NOSYS));

    let started = Command::new("true").spawn();
    assert_eq!(started.err().unwrap().raw_os_error(), Some(libc::ENOSYS));
    let (access, flags) = (ProtFlags::READ | ProtFlags::EXEC, MapFlags::PRIVATE);
    // SAFETY: mmap without MAP_FIXED replaces no other mapping.
    let code = unsafe { mmap_anonymous(std::ptr::null_mut(), 4096, access, flags) };
    assert_eq!(code.err(), Some(Errno::NOSYS));
    // SAFETY: TIOCSTI reads one byte, and `byte` is one.
    let typed = unsafe {
        let byte = b'x';
        libc::ioctl(std::io::stdin().as_raw_fd(), libc::TIOCSTI, &raw const byte)
    };
    assert_eq!(typed, -1);
    assert_eq!(
        std::io::Error::last_os_error().raw_os_error(),
        Some(libc::ENOSYS)
    );
    let parent = rustix::process::getppid().unwrap();
    let killed = rustix::process::test_kill_process(parent);
    assert_eq!(killed, Err(Errno::NOSYS));
}

fn works() {
    confine(SeccompMode::On, false);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    assert_eq!(std::fs::read(&path).unwrap().len(), 1 << 20);
    let threads: Vec<_> = (0..8)
        .map(|index| {
            thread::Builder::new()
                .name(format!("pt-{index}"))
                .spawn(move || vec![index; 1 << 22].len())
                .unwrap()
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), 1 << 22);
    }
    let listener = std::os::unix::net::UnixListener::bind(directory.path().join("socket"));
    listener.unwrap();
    assert!(
        thread::spawn(|| panic!("a panic is caught"))
            .join()
            .is_err()
    );
}

#[test]
fn calls_that_a_server_does_not_need_fail_on_all_threads() {
    if has_seccomp() {
        assert_passed(&act("refused"));
        assert_passed(&act("works"));
    }
}

#[test]
fn sockets_of_the_network_are_for_servers_of_object_stores() {
    if has_seccomp() {
        assert_passed(&act("network"));
    }
}

#[test]
fn a_server_that_was_taken_over_is_ended() {
    if !has_seccomp() {
        return;
    }
    for fatal in ["exec", "ptrace"] {
        let output = act(fatal);
        assert_eq!(output.status.signal(), Some(SIGSYS), "{fatal}: {output:?}");
    }
}

#[test]
fn a_filter_that_logs_permits_everything() {
    if has_seccomp() {
        assert_passed(&act("log"));
    }
    assert_passed(&act("off"));
}

/// Nanoseconds of a system call that resolves a fault, without the fault.
fn ioctl_nanoseconds() -> u128 {
    const CALLS: u32 = 200_000;
    let begun = std::time::Instant::now();
    for _ in 0..CALLS {
        // SAFETY: no descriptor is -1: the call fails before it looks at its argument.
        unsafe { libc::ioctl(-1, u64::from(pagetide_uapi::generated::UFFDIO_COPY), 0) };
    }
    begun.elapsed().as_nanos() / u128::from(CALLS)
}

/// What the filter costs a fault: medians of interleaved rounds.
#[test]
#[ignore = "a measurement: cargo test -p pagetide-serve --test seccomp -- --ignored --nocapture"]
fn cost() {
    let (begin, begun) = mpsc::channel::<()>();
    let (send, measured) = mpsc::channel();
    let filtered = thread::spawn(move || {
        let seccomp = Seccomp::new(SeccompMode::On, true);
        seccomp.confine_thread().unwrap();
        for () in begun {
            send.send(ioctl_nanoseconds()).unwrap();
        }
    });
    let mut rounds: Vec<(u128, u128)> = Vec::new();
    for _ in 0..15 {
        let without = ioctl_nanoseconds();
        begin.send(()).unwrap();
        rounds.push((without, measured.recv().unwrap()));
    }
    drop(begin);
    filtered.join().unwrap();
    let median = |mut values: Vec<u128>| {
        values.sort_unstable();
        values[values.len() / 2]
    };
    let (without, with): (Vec<_>, Vec<_>) = rounds.into_iter().unzip();
    println!(
        "an ioctl of a userfaultfd: {} ns without the filter, {} ns with it",
        median(without),
        median(with)
    );
}
