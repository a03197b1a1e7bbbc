//! How a Linux guest ended.

use std::fmt;
use std::time::Duration;

/// How a Linux guest ended by itself, or by a [`Stopper`](crate::Stopper).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinuxEnd {
    /// It wrote this status to `ttyS1`.
    Status(u8),
    /// It reset the machine, by the keyboard controller or port 0xcf9: `reboot`.
    Reset,
    /// No vCPU will run again: each is halted with interrupts off, or was never started. Without ACPI,
    /// `poweroff` and `halt` end like this.
    Halted,
    /// A vCPU met a triple fault.
    TripleFault,
    /// The kernel panicked, and then reset, halted or met a triple fault.
    Panicked {
        /// The first line of its message.
        message: String,
    },
    /// A stopper ended it from outside.
    Stopped,
}

impl fmt::Display for LinuxEnd {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(formatter, "the guest ended with status {status}"),
            Self::Reset => formatter.write_str("the guest reset its machine"),
            Self::Halted => formatter.write_str("the guest halted"),
            Self::TripleFault => formatter.write_str("the guest met a triple fault"),
            Self::Panicked { message } => write!(formatter, "the guest panicked: {message}"),
            Self::Stopped => formatter.write_str("the guest was stopped"),
        }
    }
}

/// A run that did not fail on the host's side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinuxOutcome {
    /// How it ended.
    pub end: LinuxEnd,
    /// From the start of the first vCPU to that end.
    pub elapsed: Duration,
}
