//! A filter of the system calls that the server's threads may make once it listens.
//!
//! What a server needs is listed below, by purpose. Any other call fails with ENOSYS, as on a kernel that
//! does not have it: libraries then use an older call, or report an error, and the VMs are served. Calls that
//! only foreign code would make ([`FATAL`]) end the process: whoever makes them has taken the server over.
//! `docs/design/serve.md` says more.

use std::collections::BTreeMap;

use libc::c_long;
use pagetide_uapi::generated as uapi;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter, apply_filter_all_threads,
};
use thiserror::Error;

/// Whether system calls are filtered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SeccompMode {
    /// Calls that the server does not need fail, or end it.
    #[default]
    On,
    /// The kernel logs such calls, and makes them.
    Log,
    /// No filter.
    Off,
}

/// Why there is no filter.
#[derive(Debug, Error)]
pub enum SeccompError {
    /// This program has no list for the processor.
    #[error("there is no list of system calls for this processor; --seccomp off does without")]
    Architecture,
    /// The filter could not be compiled.
    #[error("compiling the filter of system calls")]
    Compile(#[source] seccompiler::BackendError),
    /// The kernel does not take it, for example because it has no seccomp.
    #[error("the kernel does not take the filter of system calls; --seccomp off does without")]
    Install(#[source] seccompiler::Error),
}

impl SeccompError {
    /// Whether the kernel was built without seccomp, or takes no filters.
    #[must_use]
    pub fn is_lack_of_support(&self) -> bool {
        let Self::Install(seccompiler::Error::Seccomp(error)) = self else {
            return false;
        };
        matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL))
    }
}

/// A filter for a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seccomp {
    mode: SeccompMode,
    network: bool,
}

impl Seccomp {
    /// A filter; with `network` for a server that reads objects of a store.
    #[must_use]
    pub fn new(mode: SeccompMode, network: bool) -> Self {
        Self { mode, network }
    }

    /// Whether the server may connect to object stores.
    #[must_use]
    pub fn allows_network(&self) -> bool {
        self.network || self.mode != SeccompMode::On
    }

    /// Installs the filter on all threads of this process, for good.
    ///
    /// # Errors
    /// [`SeccompError`].
    pub fn confine_process(&self) -> Result<(), SeccompError> {
        self.install(|program| apply_filter_all_threads(program))
    }

    /// Installs the filter on this thread, and on those that it starts later, for good.
    ///
    /// # Errors
    /// [`SeccompError`].
    pub fn confine_thread(&self) -> Result<(), SeccompError> {
        self.install(|program| apply_filter(program))
    }

    fn install(
        &self,
        apply: impl Fn(&BpfProgram) -> Result<(), seccompiler::Error>,
    ) -> Result<(), SeccompError> {
        for program in self.programs()? {
            apply(&program).map_err(SeccompError::Install)?;
        }
        Ok(())
    }

    /// The programs in the order of their installation: each must permit the next one's.
    fn programs(&self) -> Result<Vec<BpfProgram>, SeccompError> {
        let otherwise = match self.mode {
            SeccompMode::Off => return Ok(Vec::new()),
            SeccompMode::Log => SeccompAction::Log,
            SeccompMode::On => SeccompAction::Errno(libc::ENOSYS.unsigned_abs()),
        };
        let mut programs = Vec::new();
        if self.mode == SeccompMode::On {
            let fatal = FATAL.iter().map(|&call| (call, Vec::new())).collect();
            let (others, these) = (SeccompAction::Allow, SeccompAction::KillProcess);
            programs.push(compile(fatal, others, these)?);
        }
        let allowed = allowed(self.network).map_err(SeccompError::Compile)?;
        programs.push(compile(allowed, otherwise, SeccompAction::Allow)?);
        Ok(programs)
    }
}

/// For each call the rules of which one must hold; none if any arguments will do.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn compile(
    rules: Rules,
    otherwise: SeccompAction,
    matching: SeccompAction,
) -> Result<BpfProgram, SeccompError> {
    let here =
        TargetArch::try_from(std::env::consts::ARCH).map_err(|_| SeccompError::Architecture)?;
    SeccompFilter::new(rules, otherwise, matching, here)
        .and_then(BpfProgram::try_from)
        .map_err(SeccompError::Compile)
}

/// Calls that a server never makes, and that code of an attacker would begin with.
const FATAL: &[c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_bpf,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_kexec_load,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_capset,
    libc::SYS_add_key,
    libc::SYS_keyctl,
    libc::SYS_open_by_handle_at,
];

/// Calls with whatever arguments.
const ALLOWED: &[c_long] = &[
    // Threads, and what they wait for. clone3 is left out: its flags are in memory, which a filter does not
    // see, and without it the C library uses clone.
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_membarrier,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_getcpu,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_restart_syscall,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    // Signals: the handlers were installed before. abort changes one.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    // Memory; mmap and mprotect have rules.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mincore,
    // Descriptors.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_eventfd2,
    // Whether a userfaultfd that stays open serves memory again.
    libc::SYS_kcmp,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_pipe2,
    // Files: images, sockets, working sets, the disk cache, the file that SIGHUP has read again.
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_fadvise64,
    libc::SYS_readahead,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_utimensat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_mkdirat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    FCHMODAT2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_umask,
    libc::SYS_memfd_create,
    // Who may do what with a file.
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    // Sockets; socket and socketpair have rules.
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    // The VMMs' processes, and the keeper's, which is a child; pidfd_send_signal has a rule.
    libc::SYS_pidfd_open,
    libc::SYS_wait4,
    libc::SYS_waitid,
];

/// Linux 6.6; not in the crate libc for each processor.
const FCHMODAT2: c_long = 452;

/// Calls of this processor: those that newer processors have under another name only.
#[cfg(target_arch = "x86_64")]
const ALLOWED_HERE: &[c_long] = &[
    libc::SYS_renameat,
    libc::SYS_time,
    libc::SYS_epoll_wait,
    libc::SYS_poll,
    libc::SYS_pipe,
    libc::SYS_dup2,
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_link,
    libc::SYS_mkdir,
    libc::SYS_chmod,
    libc::SYS_chown,
];
/// Calls of this processor: renameat, which the crate libc does not name.
#[cfg(target_arch = "aarch64")]
const ALLOWED_HERE: &[c_long] = &[38];

/// What descriptors are asked for by ioctl: the faults first, since each costs one.
const IOCTLS: [u64; 12] = [
    uapi::UFFDIO_COPY as u64,
    uapi::UFFDIO_CONTINUE as u64,
    uapi::UFFDIO_ZEROPAGE as u64,
    uapi::UFFDIO_WAKE as u64,
    uapi::UFFDIO_POISON as u64,
    uapi::UFFDIO_WRITEPROTECT as u64,
    uapi::UFFDIO_REGISTER as u64,
    uapi::UFFDIO_UNREGISTER as u64,
    libc::FIONBIO,
    libc::FIONREAD,
    // The progress line.
    libc::TCGETS,
    libc::TIOCGWINSZ,
];

const FCNTLS: [i32; 8] = [
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GET_SEALS,
    libc::F_ADD_SEALS,
];

/// `PR_GET_AUXV`, of Linux 6.4: what the kernel has told this process at its start.
const PR_GET_AUXV: i32 = 0x4155_5856;

/// Names of threads, and of memory, which some allocators give.
const PRCTLS: [i32; 4] = [
    libc::PR_SET_NAME,
    libc::PR_GET_NAME,
    libc::PR_SET_VMA,
    PR_GET_AUXV,
];

/// The calls that are allowed. `network`: also sockets of object stores, and those that find their addresses.
fn allowed(network: bool) -> Result<Rules, seccompiler::BackendError> {
    let anything = ALLOWED.iter().chain(ALLOWED_HERE);
    let mut rules: Rules = anything.map(|&call| (call, Vec::new())).collect();
    let is = |argument, value| {
        let (length, equal) = (SeccompCmpArgLen::Dword, SeccompCmpOp::Eq);
        SeccompCondition::new(argument, length, equal, value)
    };
    let of = |value: i32| u64::from(value.cast_unsigned());
    let masked = |argument, mask: i32, value: i32| {
        let (length, equal) = (SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(of(mask)));
        SeccompCondition::new(argument, length, equal, of(value))
    };
    let mut add = |call: c_long, conditions: Vec<SeccompCondition>| {
        let rule = SeccompRule::new(conditions)?;
        rules.entry(call).or_default().push(rule);
        Ok(())
    };
    // Threads, and no processes.
    let thread = libc::CLONE_VM | libc::CLONE_THREAD;
    add(libc::SYS_clone, vec![masked(0, thread, thread)?])?;
    // No new code. A library that is loaded for a host's name is refused.
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        add(call, vec![masked(2, libc::PROT_EXEC, 0)?])?;
    }
    for request in IOCTLS {
        add(libc::SYS_ioctl, vec![is(1, request)?])?;
    }
    for command in FCNTLS {
        add(libc::SYS_fcntl, vec![is(1, of(command))?])?;
    }
    for option in PRCTLS {
        add(libc::SYS_prctl, vec![is(0, of(option))?])?;
    }
    // The limits of this process, to be read.
    let pointer = SeccompCmpArgLen::Qword;
    let unchanged = SeccompCondition::new(2, pointer, SeccompCmpOp::Eq, 0)?;
    add(libc::SYS_prlimit64, vec![is(0, 0)?, unchanged])?;
    // abort.
    let process = u64::from(std::process::id());
    add(libc::SYS_tgkill, vec![is(0, process)?])?;
    // --on-failure kill.
    add(libc::SYS_pidfd_send_signal, vec![is(1, of(libc::SIGKILL))?])?;
    add(libc::SYS_socketpair, vec![is(0, of(libc::AF_UNIX))?])?;
    add(libc::SYS_socket, vec![is(0, of(libc::AF_UNIX))?])?;
    if network {
        add(libc::SYS_socket, vec![is(0, of(libc::AF_INET))?])?;
        add(libc::SYS_socket, vec![is(0, of(libc::AF_INET6))?])?;
        // Which addresses of a host can be reached.
        let routes = is(2, of(libc::NETLINK_ROUTE))?;
        add(libc::SYS_socket, vec![is(0, of(libc::AF_NETLINK))?, routes])?;
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_kernel_without_seccomp_is_told_from_a_refusal() {
        let refused = |errno: Errno| {
            let error = std::io::Error::from_raw_os_error(errno.raw_os_error());
            SeccompError::Install(seccompiler::Error::Seccomp(error)).is_lack_of_support()
        };
        assert!(refused(Errno::NOSYS) && refused(Errno::INVAL));
        assert!(!refused(Errno::ACCESS));
        assert!(!SeccompError::Architecture.is_lack_of_support());
    }

    #[test]
    fn a_filter_is_compiled_and_nothing_is_allowed_and_fatal() {
        for network in [false, true] {
            let on = Seccomp::new(SeccompMode::On, network);
            assert_eq!(on.programs().unwrap().len(), 2);
            let log = Seccomp::new(SeccompMode::Log, network);
            assert_eq!(log.programs().unwrap().len(), 1);
            let rules = allowed(network).unwrap();
            assert!(FATAL.iter().all(|call| !rules.contains_key(call)));
        }
        let off = Seccomp::new(SeccompMode::Off, false);
        assert!(off.programs().unwrap().is_empty() && off.allows_network());
    }

    /// A call that is listed twice would lose its rules.
    #[test]
    fn no_call_has_both_rules_and_none() {
        let rules = allowed(true).unwrap();
        let anything = ALLOWED.iter().chain(ALLOWED_HERE);
        for call in anything {
            assert!(rules[call].is_empty(), "{call}");
        }
    }
}
