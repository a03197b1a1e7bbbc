//! The signals that a VM's vCPUs use, and their handlers.
//!
//! A signal's handler belongs to the process, so this module installs a handler only if the program
//! requests it with [`Signals`].

use std::ffi::c_void;
use std::io;
use std::mem::{MaybeUninit, transmute};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use libc::{c_int, siginfo_t};
use rustix::thread::Pid;
use vmm_sys_util::signal::SIGRTMIN;

use crate::poison::{SigbusError, install_sigbus_handler};

/// The default signal for kicks: the second real-time signal.
#[must_use]
pub fn kick_signal() -> c_int {
    SIGRTMIN() + 1
}

/// Why a VM cannot use the requested signals.
#[derive(Debug, thiserror::Error)]
pub enum SignalsError {
    /// The kick handler cannot be installed.
    #[error("cannot install the handler of signal {signal}, which kicks vCPUs")]
    Kick {
        /// The signal.
        signal: c_int,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The program chose a kick signal without a handler: the signal would end the process, or be
    /// ignored and interrupt nothing.
    #[error("signal {signal}, chosen to kick vCPUs, has no handler")]
    NoHandler {
        /// The signal.
        signal: c_int,
    },
    /// The SIGBUS handler cannot be installed.
    #[error(transparent)]
    Sigbus(#[from] SigbusError),
}

/// The signals that a VM may use. There are two, and the program chooses for each.
///
/// - *Kicks.* A signal to a vCPU's thread makes KVM_RUN return. Its handler need not do anything.
///   Without the signal, a kick only sets `immediate_exit`, which KVM_RUN reads when it begins: the
///   program kicks, and then interrupts the thread by other means.
/// - *SIGBUS.* It reports uncorrected memory errors ([`poison`](crate::poison)). Without this crate's
///   support, an access to lost memory ends the process or runs the program's own handler.
///
/// Handlers that this crate installs pass signals that they do not handle to the previous handler. They
/// stay for the life of the process.
///
/// ```no_run
/// use pagetide_kvm::{Kvm, Signals};
///
/// let kvm = Kvm::open()?;
/// // Both handled by this crate.
/// let vm = kvm.create_vm(Signals::install()?)?;
/// // A kick signal that the program handles; the program also handles SIGBUS.
/// let vm = kvm.create_vm(Signals::none().use_kick(libc::SIGUSR1)?)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signals {
    kick: Option<c_int>,
    sigbus: bool,
}

impl Signals {
    /// No signal at all.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            kick: None,
            sigbus: false,
        }
    }

    /// Both signals, with this crate's handlers: [`Signals::install_kick`] and
    /// [`Signals::install_sigbus`].
    ///
    /// # Errors
    /// [`SignalsError`].
    pub fn install() -> Result<Self, SignalsError> {
        Self::none().install_kick()?.install_sigbus()
    }

    /// Kicks by [`kick_signal`]. Its handler is installed once per process.
    ///
    /// # Errors
    /// [`SignalsError::Kick`].
    pub fn install_kick(self) -> Result<Self, SignalsError> {
        static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
        let signal = kick_signal();
        INSTALLED
            .get_or_init(|| {
                install_kick_handler().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
            })
            .map_err(|errno| SignalsError::Kick {
                signal,
                source: io::Error::from_raw_os_error(errno),
            })?;
        let kick = Some(signal);
        Ok(Self { kick, ..self })
    }

    /// Kicks by a signal for which the program already has a handler. The handler should have
    /// SA_RESTART set, so that other system calls of a vCPU's thread resume. The thread may block the
    /// signal, if KVM_SET_SIGNAL_MASK does not.
    ///
    /// # Errors
    /// [`SignalsError::NoHandler`].
    pub fn use_kick(self, signal: c_int) -> Result<Self, SignalsError> {
        let failed = |source| SignalsError::Kick { signal, source };
        match exchange(signal, None).map_err(failed)?.sa_sigaction {
            libc::SIG_DFL | libc::SIG_IGN => Err(SignalsError::NoHandler { signal }),
            _ => Ok(Self {
                kick: Some(signal),
                ..self
            }),
        }
    }

    /// SIGBUS with this crate's handler ([`install_sigbus_handler`]).
    ///
    /// # Errors
    /// [`SignalsError::Sigbus`].
    pub fn install_sigbus(self) -> Result<Self, SignalsError> {
        install_sigbus_handler()?;
        Ok(self.use_sigbus())
    }

    /// SIGBUS with a handler of the program that passes signals to
    /// [`handle_sigbus`](crate::poison::handle_sigbus).
    #[must_use]
    pub const fn use_sigbus(self) -> Self {
        let sigbus = true;
        Self { sigbus, ..self }
    }

    /// The kick signal, if any.
    #[must_use]
    pub const fn kick(&self) -> Option<c_int> {
        self.kick
    }

    /// Whether SIGBUS reports memory errors.
    #[must_use]
    pub const fn sigbus(&self) -> bool {
        self.sigbus
    }

    /// Whether the kick handler is this crate's.
    fn has_own_kick(&self) -> bool {
        self.kick == Some(kick_signal())
    }

    /// Whether the calling thread blocks this crate's kick signal, so that kicks do not reach it. For a
    /// signal of the program see [`Signals::use_kick`].
    pub(crate) fn is_blocked(&self) -> io::Result<bool> {
        if !self.has_own_kick() {
            return Ok(false);
        }
        let mut blocked = MaybeUninit::<libc::sigset_t>::zeroed();
        let how = libc::SIG_BLOCK;
        // SAFETY: without a new set, it only writes the thread's mask to `blocked`.
        match unsafe { libc::pthread_sigmask(how, ptr::null(), blocked.as_mut_ptr()) } {
            // SAFETY: the set was written, and is only read.
            0 => Ok(unsafe { libc::sigismember(blocked.as_ptr(), kick_signal()) } == 1),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

/// The target of `si_value` in a kick, by which the handler recognises it. Its value does not matter.
static MARK: AtomicUsize = AtomicUsize::new(0);

/// The previous handler of [`kick_signal`]: 0, or a function; and its flags.
static PREVIOUS: AtomicUsize = AtomicUsize::new(0);
static PREVIOUS_FLAGS: AtomicI32 = AtomicI32::new(0);

/// The part of `siginfo_t` that rt_tgsigqueueinfo(2) carries.
#[repr(C)]
struct Queued {
    signo: c_int,
    errno: c_int,
    code: c_int,
    _pad: c_int,
    pid: c_int,
    uid: u32,
    value: usize,
    _rest: [usize; 12],
}

const _: () = assert!(size_of::<Queued>() == size_of::<siginfo_t>());

/// Sends the kick signal to a thread of this process. A failure means that the thread is ending, or
/// that too many signals are already pending for it; either is harmless.
pub(crate) fn send(thread: Pid, signal: c_int) {
    let process = rustix::process::getpid().as_raw_nonzero().get();
    let has_previous = signal == kick_signal() && PREVIOUS.load(Ordering::Relaxed) != 0;
    if !has_previous {
        // SAFETY: tgkill takes three numbers and touches no memory of this process; the creator of the
        // `Signals` has ensured that the signal has a handler.
        unsafe {
            let thread = thread.as_raw_nonzero().get();
            libc::syscall(libc::SYS_tgkill, process, thread, signal);
        }
        return;
    }
    // The previous handler must not receive it.
    let info = Queued {
        signo: signal,
        errno: 0,
        code: libc::SI_QUEUE,
        _pad: 0,
        pid: process,
        uid: rustix::process::getuid().as_raw(),
        value: (&raw const MARK).addr(),
        _rest: [0; 12],
    };
    // SAFETY: the structure is a siginfo_t and is only read; the signal has this crate's handler.
    unsafe {
        libc::syscall(
            libc::SYS_rt_tgsigqueueinfo,
            process,
            thread.as_raw_nonzero().get(),
            signal,
            &raw const info,
        );
    }
}

/// With SA_RESTART: KVM_RUN, KVM_PRE_FAULT_MEMORY and KVM_POPULATE_MEMORY return EINTR nevertheless,
/// while a read() of a page source on the same thread resumes. poll(), nanosleep() and some others
/// return EINTR whatever the flags (signal(7)).
fn install_kick_handler() -> io::Result<()> {
    // Read first, so that a signal that arrives as soon as the handler is installed finds it.
    remember(&exchange(kick_signal(), None)?);
    // SAFETY: a sigaction is plain data, for which zeroes are valid.
    let mut ours: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    ours.sa_sigaction = on_kick as *const () as usize;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
    remember(&exchange(kick_signal(), Some(&ours))?);
    Ok(())
}

fn remember(before: &libc::sigaction) {
    let function = match before.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => 0,
        function => function,
    };
    PREVIOUS_FLAGS.store(before.sa_flags, Ordering::Relaxed);
    PREVIOUS.store(function, Ordering::Release);
}

/// sigaction(): returns a signal's action, and replaces it if `new` is given. Async-signal-safe.
pub(crate) fn exchange(
    signal: c_int,
    new: Option<&libc::sigaction>,
) -> io::Result<libc::sigaction> {
    let new = new.map_or(ptr::null(), ptr::from_ref);
    let mut old = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: sigaction reads a structure or nothing through the first pointer and writes one through
    // the second. The handlers that it may install are on_kick, the SIGBUS handler of poison::sigbus, for
    // which previous::replace's caller is responsible, and SIG_DFL.
    if unsafe { libc::sigaction(signal, new, old.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed, which is valid for plain data, and then written by the kernel.
    Ok(unsafe { old.assume_init() })
}

/// A kick needs no action beyond the interruption. Any other signal goes to the previous handler;
/// without one it is ignored.
extern "C" fn on_kick(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: installed with SA_SIGINFO, so that `info` is valid; integers, of which `value` is
    // meaningful only for the right `code`.
    let Queued { code, value, .. } = unsafe { info.cast::<Queued>().read() };
    if code == libc::SI_QUEUE && value == (&raw const MARK).addr() {
        return;
    }
    let function = PREVIOUS.load(Ordering::Acquire);
    if function == 0 {
        return;
    }
    if PREVIOUS_FLAGS.load(Ordering::Relaxed) & libc::SA_SIGINFO != 0 {
        type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
        // SAFETY: the kernel has this address as a function of this type.
        let function = unsafe { transmute::<usize, Handler>(function) };
        function(signal, info, context);
    } else {
        // SAFETY: as above.
        let function = unsafe { transmute::<usize, extern "C" fn(c_int)>(function) };
        function(signal);
    }
}
