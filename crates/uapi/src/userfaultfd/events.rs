//! The messages of a userfaultfd.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;

use rustix::io::{Errno, ReadWriteFlags};
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

/// A buffer for the messages of one read.
pub struct EventBuffer {
    messages: Box<[MaybeUninit<abi::uffd_msg>]>,
}

impl EventBuffer {
    /// A buffer for `messages` messages (at least one).
    pub fn new(messages: usize) -> Self {
        Self {
            messages: vec![MaybeUninit::zeroed(); messages.max(1)].into_boxed_slice(),
        }
    }

    /// The number of messages that fit.
    pub fn capacity(&self) -> usize {
        self.messages.len()
    }

    /// The buffer as bytes.
    fn bytes(&mut self) -> &mut [u8] {
        let bytes = size_of_val(&*self.messages);
        // SAFETY: from_raw_parts_mut requires that many initialised bytes of memory that is borrowed
        // mutably: the messages' own memory, zeroed at first and then written by the kernel only.
        unsafe { std::slice::from_raw_parts_mut(self.messages.as_mut_ptr().cast(), bytes) }
    }
}

/// The messages of one read, oldest first.
#[derive(Clone)]
pub struct Events<'buffer> {
    messages: std::slice::Iter<'buffer, MaybeUninit<abi::uffd_msg>>,
}

impl Iterator for Events<'_> {
    type Item = Event;

    #[inline]
    fn next(&mut self) -> Option<Event> {
        let message = self.messages.next()?;
        // SAFETY: assume_init_ref requires an initialised value: read_events limits Events to the
        // messages that the kernel has written.
        Some(Event::decode(unsafe { message.assume_init_ref() }))
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
            .messages
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
    fn a_buffer_has_room_for_at_least_one_message() {
        assert_eq!(EventBuffer::new(0).capacity(), 1);
        assert_eq!(EventBuffer::new(64).bytes().len(), 64 * 32);
    }
}
