//! What can go wrong, one type per operation.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pagetide_kvm::FaultExit;
use pagetide_memory::{GuestAddress, HostAddress, PopulateError};
use pagetide_uapi::userfaultfd::{Event, InstallError, ReadError};
use rustix::io::Errno;
use thiserror::Error;

use crate::fault::Fault;
use crate::source::SourceError;

/// Why a fault could not be resolved. Nothing was installed for it: whoever faulted must stop.
#[derive(Debug, Error)]
pub enum ResolveError {
    /// The address is in none of the pager's regions.
    #[error("gpa {gpa} is in no region of the pager")]
    Outside {
        /// The address.
        gpa: GuestAddress,
    },
    /// KVM does not say that making the page present would help.
    #[error("not a fault on an absent page: {exit}")]
    NotResolvable {
        /// What KVM said.
        exit: FaultExit,
    },
    /// The content could not be had.
    #[error("{fault}: no content")]
    Fetch {
        /// The fault.
        fault: Fault,
        /// What the source said.
        #[source]
        source: SourceError,
    },
    /// The kernel would not install the page.
    #[error("{fault}: the page cannot be installed")]
    Install {
        /// The fault.
        fault: Fault,
        /// What the kernel said.
        #[source]
        source: InstallError,
    },
    /// The kernel said EAGAIN again and again.
    #[error("{fault}: the kernel put the installation off {tries} times")]
    Busy {
        /// The fault.
        fault: Fault,
        /// How often it was tried.
        tries: u32,
    },
    /// The page is mapped, but could not be made present for the access.
    #[error("{fault}: the page cannot be populated")]
    Populate {
        /// The fault.
        fault: Fault,
        /// What the kernel said.
        #[source]
        source: PopulateError,
    },
    /// The page's content is lost, and this kernel cannot tell the thread that waits for it.
    #[error("{fault}: the page is poisoned, and the userfaultfd cannot say so")]
    CannotPoison {
        /// The fault.
        fault: Fault,
    },
    /// The same fault keeps coming although its page is present.
    #[error("{fault}: no progress, the page is present and the fault came {times} times")]
    NoProgress {
        /// The fault.
        fault: Fault,
        /// How often it came.
        times: u32,
    },
    /// Another thread has been bringing the page in for too long.
    #[error("{fault}: another thread has not brought the page in for {waited:?}")]
    OwnerStalled {
        /// The fault.
        fault: Fault,
        /// How long this thread waited.
        waited: Duration,
    },
    /// The pager was stopped, or has failed elsewhere, while this thread waited for a page.
    #[error("{fault}: the pager was stopped")]
    Stopped {
        /// The fault.
        fault: Fault,
    },
}

impl ResolveError {
    /// Whether the kernel says that the page has an uncorrected error.
    pub(crate) fn is_poison(&self) -> bool {
        matches!(
            self,
            Self::Populate {
                source: PopulateError::Poisoned { .. },
                ..
            } | Self::Install {
                source: InstallError::Poisoned,
                ..
            }
        )
    }
}

/// Why a reader thread, or prefetch, ended before it was told to.
#[derive(Debug, Error)]
pub enum ReaderError {
    /// A fault could not be resolved.
    #[error("a reader thread could not resolve a fault")]
    Resolve(#[source] ResolveError),
    /// A message named an address that is not in any guest mapping.
    #[error("a userfaultfd told of a fault at {address}, which is in no region of the pager")]
    Outside {
        /// The address.
        address: HostAddress,
    },
    /// A message that was not asked for.
    #[error("a userfaultfd sent an event that was not asked for: {event:?}")]
    UnexpectedEvent {
        /// The event.
        event: Event,
    },
    /// A userfaultfd could not be read.
    #[error("a reader thread cannot read")]
    Read(#[source] ReadError),
    /// Waiting for messages failed.
    #[error("a reader thread cannot wait for messages")]
    Wait(#[source] Errno),
    /// The thread panicked, most likely in a page source.
    #[error("a reader thread panicked: {message}")]
    Panicked {
        /// What it said.
        message: String,
    },
    /// Prefetch could not bring a page in. Nobody has asked for it yet, but somebody would.
    #[error("prefetch could not bring a page in")]
    Prefetch(#[source] ResolveError),
    /// Prefetch panicked, most likely in a page source.
    #[error("prefetch panicked: {message}")]
    PrefetchPanicked {
        /// What it said.
        message: String,
    },
}

/// What a panic said.
pub(crate) fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
        .to_owned()
}

/// The first failure of a pager's reader threads, or of its prefetch; cheap to clone.
#[derive(Clone, Debug)]
pub struct Failure(pub(crate) Arc<ReaderError>);

impl Failure {
    /// What happened.
    pub fn cause(&self) -> &ReaderError {
        &self.0
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&*self.0)
    }
}

/// Why the reader threads could not be started.
#[derive(Debug, Error)]
pub enum SpawnError {
    /// Nobody would serve the userfaultfds.
    #[error("at least one reader thread is needed")]
    NoReaders,
    /// The operating system has no more threads.
    #[error("starting reader thread {index}")]
    Thread {
        /// The reader's number.
        index: usize,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A descriptor for waiting could not be made.
    #[error("making what reader threads wait on")]
    Descriptor(#[source] Errno),
}

/// Why prefetch or population could not be started.
#[derive(Debug, Error)]
pub enum StartError {
    /// What arrives can be handed on to one populator only.
    #[error("this pager has a populator already")]
    AlreadyPopulating,
    /// The operating system has no more threads.
    #[error("starting the thread for {activity}")]
    Thread {
        /// What it was for.
        activity: &'static str,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use pagetide_memory::PageIndex;

    use super::*;
    use crate::fault::{Delivery, RegionId};

    #[test]
    fn causes_are_chained_to_the_kernels_word() {
        let fault = Fault {
            region: RegionId(0),
            page: PageIndex(1),
            gpa: GuestAddress(0x1000),
            access: pagetide_kvm::Access::Write,
            vcpu: Some(3),
            delivery: Delivery::Exit,
        };
        let resolve = ResolveError::Install {
            fault,
            source: InstallError::Io(Errno::NOMEM),
        };
        assert_eq!(
            resolve.to_string(),
            "write of gpa 0x1000 by vCPU 3 (by exit): the page cannot be installed"
        );
        let failure = Failure(Arc::new(ReaderError::Resolve(resolve)));
        let mut chain = Vec::new();
        let mut next: Option<&dyn std::error::Error> = Some(&failure);
        while let Some(error) = next {
            chain.push(error.to_string());
            next = error.source();
        }
        assert_eq!(chain.len(), 4, "{chain:?}");
        assert_eq!(chain[3], Errno::NOMEM.to_string());
        assert!(failure.source().is_some());
    }
}
