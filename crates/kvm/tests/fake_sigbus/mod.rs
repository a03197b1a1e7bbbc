//! SIGBUS as the kernel sends it for memory errors.

use std::ffi::c_int;

/// Sends this thread a SIGBUS like the kernel's own; returns whether that succeeded. Async-signal-safe.
pub(crate) fn send_sigbus(code: c_int, at: usize, lsb: i16) -> bool {
    #[repr(C)]
    struct Info {
        signo: c_int,
        errno: c_int,
        code: c_int,
        pad: c_int,
        at: usize,
        lsb: i16,
        rest: [u8; 102],
    }
    let info = Info {
        signo: libc::SIGBUS,
        errno: 0,
        code,
        pad: 0,
        at,
        lsb,
        rest: [0; 102],
    };
    // SAFETY: the structure has the 128 bytes that the kernel requires; it is only read.
    let status = unsafe {
        libc::syscall(
            libc::SYS_rt_tgsigqueueinfo,
            rustix::process::getpid().as_raw_nonzero().get(),
            rustix::thread::gettid().as_raw_nonzero().get(),
            libc::SIGBUS,
            &raw const info,
        )
    };
    status == 0
}
