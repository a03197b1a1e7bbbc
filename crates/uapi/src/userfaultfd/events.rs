//! The messages of a userfaultfd.

use std::io::IoSliceMut;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::io::{Errno, ReadWriteFlags};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use thiserror::Error;

use super::Userfaultfd;
use crate::generated as abi;

/// A thread, or KVM on behalf of a guest, waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFault {
    /// The address of the access; the page's first byte unless the userfaultfd has
    /// [`super::Features::EXACT_ADDRESS`].
    pub address: u64,
    /// Whether the access was a write.
    pub write: bool,
    /// Whether the page cache has the page, and only the mapping is missing.
    pub minor: bool,
    /// Whether the page is there, and protected against writing (`UFFD_PAGEFAULT_FLAG_WP`).
    pub write_protected: bool,
    /// The thread that waits; 0 unless the userfaultfd has [`super::Features::THREAD_ID`].
    pub thread: u32,
}

/// One message of a userfaultfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A thread waits for a page.
    PageFault(PageFault),
    /// The content of these addresses was discarded.
    Remove {
        /// The first address.
        start: u64,
        /// The address after the last.
        end: u64,
    },
    /// These addresses were unmapped.
    Unmap {
        /// The first address.
        start: u64,
        /// The address after the last.
        end: u64,
    },
    /// A mapping was moved.
    Remap {
        /// Its previous address.
        from: u64,
        /// Its new address.
        to: u64,
        /// Its length in bytes.
        bytes: u64,
    },
    /// The process forked. The new descriptor serves the child's memory; the reader now owns the
    /// descriptor.
    Fork {
        /// The child's userfaultfd.
        descriptor: u32,
    },
    /// An event that this version does not decode.
    Unknown(u8),
}

impl Event {
    #[inline]
    fn decode(message: &abi::uffd_msg) -> Self {
        // The structure is packed: copy the union out before reading its fields.
        let argument = message.arg;
        match u32::from(message.event) {
            abi::UFFD_EVENT_PAGEFAULT => {
                // SAFETY: reading a union field requires that its bytes are initialised and valid
                // for its type: the kernel filled in the whole message, and every field of every
                // arm is an integer.
                let fault = unsafe { argument.pagefault };
                // SAFETY: as above.
                let thread = unsafe { fault.feat.ptid };
                let has = |flag: u32| fault.flags & u64::from(flag) != 0;
                Self::PageFault(PageFault {
                    address: fault.address,
                    write: has(abi::UFFD_PAGEFAULT_FLAG_WRITE),
                    minor: has(abi::UFFD_PAGEFAULT_FLAG_MINOR),
                    write_protected: has(abi::UFFD_PAGEFAULT_FLAG_WP),
                    thread,
                })
            }
            event @ (abi::UFFD_EVENT_REMOVE | abi::UFFD_EVENT_UNMAP) => {
                // SAFETY: as above.
                let abi::uffd_msg__bindgen_ty_1__bindgen_ty_4 { start, end } =
                    unsafe { argument.remove };
                if event == abi::UFFD_EVENT_REMOVE {
                    Self::Remove { start, end }
                } else {
                    Self::Unmap { start, end }
                }
            }
            abi::UFFD_EVENT_REMAP => {
                // SAFETY: as above.
                let remap = unsafe { argument.remap };
                Self::Remap {
                    from: remap.from,
                    to: remap.to,
                    bytes: remap.len,
                }
            }
            abi::UFFD_EVENT_FORK => {
                // SAFETY: as above.
                let fork = unsafe { argument.fork };
                Self::Fork {
                    descriptor: fork.ufd,
                }
            }
            _ => Self::Unknown(message.event),
        }
    }
}

/// Why a userfaultfd could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ReadError {
    /// The kernel returned part of a message, contrary to its documentation.
    #[error("a userfaultfd returned {bytes} bytes, which is not a whole number of messages")]
    Partial {
        /// The number of bytes returned.
        bytes: usize,
    },
    /// Any other error of the kernel.
    #[error("reading a userfaultfd")]
    Read(#[source] Errno),
}

/// What a buffer has where no message was written.
const NO_MESSAGE: abi::uffd_msg = abi::uffd_msg {
    event: 0,
    reserved1: 0,
    reserved2: 0,
    reserved3: 0,
    arg: abi::uffd_msg__bindgen_ty_1 {
        reserved: abi::uffd_msg__bindgen_ty_1__bindgen_ty_5 {
            reserved1: 0,
            reserved2: 0,
            reserved3: 0,
        },
    },
};

/// A buffer for the messages of one read.
#[derive(Debug)]
pub struct EventBuffer {
    start: NonNull<abi::uffd_msg>,
    messages: usize,
    is_in_file: bool,
}

// SAFETY: the messages are integers, and belong to this value alone until it is dropped. What a buffer in a
// file shares with another process is written by one of them at a time (EventBuffer::in_file).
unsafe impl Send for EventBuffer {}

impl EventBuffer {
    /// The bytes of a buffer in a file.
    pub const FILE_BYTES: usize = 4096;

    /// A buffer for `messages` messages (at least one).
    pub fn new(messages: usize) -> Self {
        let messages = vec![NO_MESSAGE; messages.max(1)].into_boxed_slice();
        let count = messages.len();
        Self {
            start: NonNull::from(Box::leak(messages)).cast(),
            messages: count,
            is_in_file: false,
        }
    }

    /// A buffer in a memfd, [`Self::FILE_BYTES`] bytes from `offset` on (a multiple of 4096). The kernel
    /// writes messages there directly, so that they outlive a process that dies before it has handled
    /// them: its successor finds them by [`Self::unhandled`].
    ///
    /// # Safety
    ///
    /// As long as the buffer exists, nothing else reads or writes these bytes: no other buffer, in this process or
    /// another, and no other code.
    ///
    /// # Errors
    /// `EINVAL` if the file is not sealed against shrinking (`F_SEAL_SHRINK`) or is too short; the kernel's
    /// error if it cannot be mapped.
    pub unsafe fn in_file(file: BorrowedFd<'_>, offset: u64) -> Result<Self, Errno> {
        let seals = fcntl_get_seals(file)?;
        let bytes = u64::try_from(fstat(file)?.st_size).unwrap_or(0);
        let end = offset.checked_add(Self::FILE_BYTES as u64);
        if !seals.contains(SealFlags::SHRINK) || end.is_none_or(|end| end > bytes) {
            return Err(Errno::INVAL);
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let hint = std::ptr::null_mut();
        // SAFETY: mmap without MAP_FIXED replaces no memory in use.
        let start = unsafe {
            mmap(
                hint,
                Self::FILE_BYTES,
                access,
                MapFlags::SHARED,
                file,
                offset,
            )
        }?;
        Ok(Self {
            start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)?,
            messages: Self::FILE_BYTES / size_of::<abi::uffd_msg>(),
            is_in_file: true,
        })
    }

    /// The number of messages that fit.
    pub fn capacity(&self) -> usize {
        self.messages
    }

    /// The messages that were read into a cleared buffer, and not cleared since.
    pub fn unhandled(&self) -> Events<'_> {
        let messages = self.messages();
        let count = messages.iter().take_while(|message| message.event != 0);
        let count = count.count();
        Events {
            messages: messages.get(..count).unwrap_or_default().iter(),
        }
    }

    /// Records that all messages were handled.
    pub fn clear(&mut self) {
        // What handles a message must come first, also for a process that looks after a kill.
        fence(Ordering::SeqCst);
        let used = self.unhandled().len();
        let used = used * size_of::<abi::uffd_msg>();
        if let Some(used) = self.bytes().get_mut(..used) {
            used.fill(0);
        }
        fence(Ordering::SeqCst);
    }

    fn messages(&self) -> &[abi::uffd_msg] {
        // SAFETY: from_raw_parts requires that many initialised messages, valid for the lifetime of the
        // result: `new` made them and `in_file` mapped them, whose bytes are always initialised; every
        // combination of bytes is a valid message. The file cannot shrink, as its seal says.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.messages) }
    }

    /// The buffer as bytes.
    fn bytes(&mut self) -> &mut [u8] {
        let bytes = self.messages * size_of::<abi::uffd_msg>();
        // SAFETY: from_raw_parts_mut requires that many initialised bytes of memory that is borrowed
        // mutably: as in `messages`, and self is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), bytes) }
    }
}

impl Drop for EventBuffer {
    fn drop(&mut self) {
        if self.is_in_file {
            // SAFETY: munmap requires that nobody uses the mapping any more: no reference into it outlives
            // self. Fails only for an invalid range.
            let _ = unsafe { munmap(self.start.as_ptr().cast(), Self::FILE_BYTES) };
            return;
        }
        let messages = NonNull::slice_from_raw_parts(self.start, self.messages);
        // SAFETY: from_raw requires a pointer that leak returned, once: `new` leaked a boxed slice of this
        // length.
        drop(unsafe { Box::from_raw(messages.as_ptr()) });
    }
}

/// The messages of one read, oldest first.
#[derive(Clone)]
pub struct Events<'buffer> {
    messages: std::slice::Iter<'buffer, abi::uffd_msg>,
}

impl Iterator for Events<'_> {
    type Item = Event;

    #[inline]
    fn next(&mut self) -> Option<Event> {
        Some(Event::decode(self.messages.next()?))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.messages.size_hint()
    }
}

impl ExactSizeIterator for Events<'_> {}

impl Userfaultfd {
    /// Reads the pending messages, at most as many as fit into `buffer`. Never blocks; without a
    /// pending message the result is empty.
    #[inline]
    pub fn read_events<'buffer>(
        &self,
        buffer: &'buffer mut EventBuffer,
    ) -> Result<Events<'buffer>, ReadError> {
        let bytes = loop {
            match self.read_now(buffer.bytes()) {
                Ok(read) => break read,
                Err(Errno::AGAIN) => break 0,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(ReadError::Read(errno)),
            }
        };
        if !bytes.is_multiple_of(size_of::<abi::uffd_msg>()) {
            return Err(ReadError::Partial { bytes });
        }
        let messages = bytes / size_of::<abi::uffd_msg>();
        let read = buffer
            .messages()
            .get(..messages)
            .ok_or(ReadError::Partial { bytes })?;
        Ok(Events {
            messages: read.iter(),
        })
    }

    /// Reads without blocking, even if a process that shares the descriptor has cleared `O_NONBLOCK`.
    /// (Kernels before 6.10 do not support `RWF_NOWAIT` here; on those the read may block.)
    #[inline]
    fn read_now(&self, bytes: &mut [u8]) -> Result<usize, Errno> {
        if self.is_shared {
            /// The current position, as in read().
            const NOWHERE: u64 = u64::MAX;
            let mut bytes = [IoSliceMut::new(bytes)];
            match rustix::io::preadv2(self, &mut bytes, NOWHERE, ReadWriteFlags::NOWAIT) {
                Err(Errno::OPNOTSUPP) => {}
                read => return read,
            }
        }
        rustix::io::read(self, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(event: u32, argument: [u64; 3]) -> abi::uffd_msg {
        let reserved = abi::uffd_msg__bindgen_ty_1__bindgen_ty_5 {
            reserved1: argument[0],
            reserved2: argument[1],
            reserved3: argument[2],
        };
        abi::uffd_msg {
            event: u8::try_from(event).unwrap(),
            reserved1: 0,
            reserved2: 0,
            reserved3: 0,
            arg: abi::uffd_msg__bindgen_ty_1 { reserved },
        }
    }

    #[test]
    fn messages_decode() {
        let minor_write =
            u64::from(abi::UFFD_PAGEFAULT_FLAG_WRITE | abi::UFFD_PAGEFAULT_FLAG_MINOR);
        let fault = PageFault {
            address: 0x7000,
            write: true,
            minor: true,
            write_protected: false,
            thread: 42,
        };
        let cases = [
            (
                abi::UFFD_EVENT_PAGEFAULT,
                [minor_write, 0x7000, 42],
                Event::PageFault(fault),
            ),
            (
                abi::UFFD_EVENT_PAGEFAULT,
                [0, 0x7000, 0],
                Event::PageFault(PageFault {
                    write: false,
                    minor: false,
                    write_protected: false,
                    thread: 0,
                    ..fault
                }),
            ),
            (
                abi::UFFD_EVENT_REMOVE,
                [1, 2, 0],
                Event::Remove { start: 1, end: 2 },
            ),
            (
                abi::UFFD_EVENT_UNMAP,
                [1, 2, 0],
                Event::Unmap { start: 1, end: 2 },
            ),
            (
                abi::UFFD_EVENT_REMAP,
                [1, 2, 3],
                Event::Remap {
                    from: 1,
                    to: 2,
                    bytes: 3,
                },
            ),
            (
                abi::UFFD_EVENT_FORK,
                [9, 0, 0],
                Event::Fork { descriptor: 9 },
            ),
            (0xff, [0; 3], Event::Unknown(0xff)),
        ];
        for (event, argument, expected) in cases {
            assert_eq!(Event::decode(&message(event, argument)), expected);
        }
    }

    #[test]
    fn messages_in_a_file_outlive_their_reader_until_they_are_cleared() {
        use std::os::fd::AsFd;

        use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};
        let file = memfd_create("events", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, 8192).unwrap();
        // SAFETY: here and below, nothing else uses the file meanwhile.
        let unsealed = unsafe { EventBuffer::in_file(file.as_fd(), 4096) };
        assert_eq!(unsealed.err(), Some(Errno::INVAL));
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        for offset in [8192, 1, u64::MAX] {
            assert_eq!(
                // SAFETY: as above.
                unsafe { EventBuffer::in_file(file.as_fd(), offset) }.err(),
                Some(Errno::INVAL)
            );
        }
        // SAFETY: as above.
        let mut buffer = unsafe { EventBuffer::in_file(file.as_fd(), 4096) }.unwrap();
        assert_eq!((buffer.capacity(), buffer.unhandled().len()), (128, 0));
        for (index, start) in [7_u8, 9].into_iter().enumerate() {
            let at = index * 32;
            buffer.bytes()[at] = u8::try_from(abi::UFFD_EVENT_REMOVE).unwrap();
            buffer.bytes()[at + 8] = start;
        }
        drop(buffer);
        // SAFETY: as above.
        let mut buffer = unsafe { EventBuffer::in_file(file.as_fd(), 4096) }.unwrap();
        let left: Vec<_> = buffer.unhandled().collect();
        let remove = |start| Event::Remove { start, end: 0 };
        assert_eq!(left, [remove(7), remove(9)]);
        buffer.clear();
        assert_eq!(buffer.unhandled().len(), 0);
        assert!(buffer.bytes().iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_buffer_has_room_for_at_least_one_message() {
        assert_eq!(EventBuffer::new(0).capacity(), 1);
        assert_eq!(EventBuffer::new(64).bytes().len(), 64 * 32);
    }
}
