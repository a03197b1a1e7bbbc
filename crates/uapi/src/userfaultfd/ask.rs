//! What a userfaultfd says of its process and of the kernel.
//!
//! The process may be any, and may have mapped and registered anything: what is asked must take little time and change no
//! content, whatever it is asked of.

use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::ioctl::{self, IntegerSetter};

use super::{InstallError, UserRange, Userfaultfd};
use crate::generated as abi;

/// One page, of any size that kernels have, above what any kernel lets a process map lowest (`vm.mmap_min_addr`), and below where
/// programs are mapped.
const LOW: UserRange = UserRange {
    start: 1 << 20,
    bytes: 64 << 10,
};

impl Userfaultfd {
    /// Whether the process has exited, or executes another program.
    ///
    /// An end of write protection is asked for, where nothing is mapped: the kernel looks for the process's memory first
    /// (`userfaultfd_writeprotect()`, fs/userfaultfd.c). A process that has mapped and protected something there loses the
    /// protection of a page, and none of its content.
    pub fn is_gone(&self) -> bool {
        self.set_protection(LOW, abi::UFFDIO_WRITEPROTECT_MODE_DONTWAKE) == Err(InstallError::Gone)
    }

    /// Whether the kernel has `UFFDIO_POISON` (Linux 6.6), if this is the userfaultfd of another process, so that
    /// [`Userfaultfd::available`] says nothing of it.
    ///
    /// The call has an argument that the kernel cannot read. An older kernel does not have the call, and looks at none.
    pub fn can_poison(&self) -> bool {
        // SAFETY: IntegerSetter requires an opcode whose argument is an integer: the kernel takes a null pointer for an address
        // that it cannot read, and does nothing.
        let null = unsafe { IntegerSetter::<{ abi::UFFDIO_POISON }>::new_usize(0) };
        // SAFETY: ioctl requires that the descriptor implements the opcode or refuses it: a userfaultfd does.
        let asked = unsafe { ioctl::ioctl(self.as_fd(), null) };
        asked != Err(Errno::INVAL)
    }
}
