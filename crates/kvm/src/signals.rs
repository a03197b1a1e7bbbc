//! The signals that a VM's vCPUs need, and who handles them.
//!
//! A signal's handler belongs to the process, so nothing here is installed unless the program asks
//! for it by a [`Signals`].

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

/// The signal that kicks use unless the program has one of its own: the second real-time signal.
#[must_use]
pub fn kick_signal() -> c_int {
    SIGRTMIN() + 1
}

/// Why a VM cannot have the signals that were asked for.
#[derive(Debug, thiserror::Error)]
pub enum SignalsError {
    /// The handler of kicks cannot be installed.
    #[error("cannot install the handler of signal {signal}, which kicks vCPUs")]
    Kick {
        /// The signal.
        signal: c_int,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Kicks are to use a signal that has no handler: it would end the process, or be ignored and
    /// interrupt nothing.
    #[error("signal {signal} is to kick vCPUs and has no handler")]
    NoHandler {
        /// The signal.
        signal: c_int,
    },
    /// The handler of SIGBUS cannot be installed.
    #[error(transparent)]
    Sigbus(#[from] SigbusError),
}

/// Which signals a VM may count on. There are two, and for each the program chooses.
///
/// - *Kicks.* A signal to a vCPU's thread makes KVM_RUN return. Its handler need not do anything.
///   Without it a kick is `immediate_exit` alone, which KVM_RUN looks at when it begins: the program
///   kicks, and then interrupts the thread by its own means.
/// - *SIGBUS.* It tells of uncorrected memory errors ([`poison`](crate::poison)). Without it the
///   process ends, or does what the program's own handler does, when it touches one.
///
/// Handlers that this crate installs leave signals that are none of theirs to the handler that was
/// there before. They stay for the life of the process.
///
/// ```no_run
/// use pagetide_kvm::{Kvm, Signals};
///
/// let kvm = Kvm::open()?;
/// // Both by this crate.
/// let vm = kvm.create_vm(Signals::install()?)?;
/// // A signal that the program handles; SIGBUS is its own affair.
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

    /// Both signals, by handlers of this crate: [`Signals::install_kick`] and
    /// [`Signals::install_sigbus`].
    ///
    /// # Errors
    /// [`SignalsError`].
    pub fn install() -> Result<Self, SignalsError> {
        Self::none().install_kick()?.install_sigbus()
    }

    /// Kicks by [`kick_signal`]. Its handler is installed once a process.
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

    /// Kicks by a signal that the program handles already. The handler should have SA_RESTART set,
    /// so that other system calls of a vCPU's thread go on. The thread may block the signal, if
    /// KVM_SET_SIGNAL_MASK does not.
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

    /// SIGBUS by this crate's handler ([`install_sigbus_handler`]).
    ///
    /// # Errors
    /// [`SignalsError::Sigbus`].
    pub fn install_sigbus(self) -> Result<Self, SignalsError> {
        install_sigbus_handler()?;
        Ok(self.use_sigbus())
    }

    /// SIGBUS by a handler of the program's, which passes signals on to
    /// [`handle_sigbus`](crate::poison::handle_sigbus).
    #[must_use]
    pub const fn use_sigbus(self) -> Self {
        let sigbus = true;
        Self { sigbus, ..self }
    }

    /// The signal that kicks, if there is one.
    #[must_use]
    pub const fn kick(&self) -> Option<c_int> {
        self.kick
    }

    /// Whether SIGBUS tells of memory errors.
    #[must_use]
    pub const fn sigbus(&self) -> bool {
        self.sigbus
    }

    /// Whether the kick's handler is this crate's.
    fn has_own_kick(&self) -> bool {
        self.kick == Some(kick_signal())
    }

    /// Whether the calling thread can be kicked; [`Signals::use_kick`] says what a program with a
    /// signal of its own may do.
    pub(crate) fn is_blocked(&self) -> io::Result<bool> {
        if !self.has_own_kick() {
            return Ok(false);
        }
        let mut blocked = MaybeUninit::<libc::sigset_t>::zeroed();
        let how = libc::SIG_BLOCK;
        // SAFETY: with no set to change, it writes the thread's to `blocked`.
        match unsafe { libc::pthread_sigmask(how, ptr::null(), blocked.as_mut_ptr()) } {
            // SAFETY: the set was written, and is read only.
            0 => Ok(unsafe { libc::sigismember(blocked.as_ptr(), kick_signal()) } == 1),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

/// What `si_value` of a kick points at, so that the handler knows it. What is there does not matter.
static MARK: AtomicUsize = AtomicUsize::new(0);

/// The handler of [`kick_signal`] that was there before ours: 0, or a function; and its flags.
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

/// Sends the kick's signal to a thread of this process. A failure means that the thread is ending,
/// or that so many signals are pending for it that one more makes no difference.
pub(crate) fn send(thread: Pid, signal: c_int) {
    let process = rustix::process::getpid().as_raw_nonzero().get();
    let has_previous = signal == kick_signal() && PREVIOUS.load(Ordering::Relaxed) != 0;
    if !has_previous {
        // SAFETY: tgkill takes three numbers and touches no memory of ours; the signal has a handler,
        // as whoever made the `Signals` saw to.
        unsafe {
            let thread = thread.as_raw_nonzero().get();
            libc::syscall(libc::SYS_tgkill, process, thread, signal);
        }
        return;
    }
    // The previous handler is not to see it.
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
    // SAFETY: the structure is a siginfo_t and is read only; the signal has our handler.
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

/// With SA_RESTART: KVM_RUN, KVM_PRE_FAULT_MEMORY and KVM_POPULATE_MEMORY return EINTR all the same,
/// while a read() of a page source's, on the same thread, goes on. poll(), nanosleep() and some
/// others return EINTR whatever the flags (signal(7)).
fn install_kick_handler() -> io::Result<()> {
    // Asked for first, so that a signal that comes as soon as the handler is there finds it.
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

fn exchange(signal: c_int, new: Option<&libc::sigaction>) -> io::Result<libc::sigaction> {
    let new = new.map_or(ptr::null(), ptr::from_ref);
    let mut old = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: sigaction reads a structure or nothing through the first pointer and writes one
    // through the second. The handler that it may install is on_kick.
    if unsafe { libc::sigaction(signal, new, old.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed, for which plain data is valid, and then written to by the kernel.
    Ok(unsafe { old.assume_init() })
}

/// A kick's work is done when it has interrupted something. Any other signal is the previous
/// handler's; if there was none, it is ignored.
extern "C" fn on_kick(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: installed with SA_SIGINFO, so that `info` is valid; plain numbers, of which `value` means
    // something only if `code` says so.
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
        // SAFETY: the kernel was told that this is a function of this type.
        let function = unsafe { transmute::<usize, Handler>(function) };
        function(signal, info, context);
    } else {
        // SAFETY: as above.
        let function = unsafe { transmute::<usize, extern "C" fn(c_int)>(function) };
        function(signal);
    }
}
