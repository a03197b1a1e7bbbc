//! A queue of messages to a thread that waits by epoll.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

/// The end of the thread that waits.
#[derive(Debug)]
pub(crate) struct Inbox<T> {
    messages: Receiver<T>,
    event: Arc<OwnedFd>,
}

/// The other end, of which there may be any number. What is sent to an inbox that is not there any more is dropped.
#[derive(Debug)]
pub(crate) struct Outbox<T> {
    send: Sender<T>,
    event: Arc<OwnedFd>,
}

impl<T> Clone for Outbox<T> {
    fn clone(&self) -> Self {
        Self {
            send: self.send.clone(),
            event: Arc::clone(&self.event),
        }
    }
}

impl<T> Inbox<T> {
    pub(crate) fn new() -> Result<(Self, Outbox<T>), Errno> {
        let event = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (send, messages) = channel();
        let outbox = Outbox {
            send,
            event: Arc::clone(&event),
        };
        Ok((Self { messages, event }, outbox))
    }

    /// All messages that have come.
    pub(crate) fn take(&self) -> Vec<T> {
        // First: a message that comes after the look makes it readable again.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        self.messages.try_iter().collect()
    }
}

impl<T> AsFd for Inbox<T> {
    /// Readable once there are messages.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl<T> Outbox<T> {
    pub(crate) fn send(&self, message: T) {
        let _ = self.send.send(message);
        // It fails only if the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}
