//! Whether a process may go on with a migration that another process began.

use thiserror::Error;

/// What the caller found out of the former process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Former {
    /// Another living process has the journal locked: its id.
    pub journal_locked_by: Option<u32>,
    /// The former process's pidfd reports its end. A process that is stopped has not ended: it would go on with what it
    /// last knew, beside its successor.
    pub has_ended: bool,
}

/// Why a process must not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum TakeOverError {
    /// The journal is in use.
    #[error("process {pid} has the journal locked")]
    Locked {
        /// The process.
        pid: u32,
    },
    /// The former process still exists.
    #[error("the former process has not ended; it may be stopped, and would go on")]
    Lives,
}

/// Whoever holds this has the journal locked, and knows that the former process has ended: no second machine of the same
/// side exists.
#[derive(Debug)]
pub struct TakeOver(());

impl TakeOver {
    /// Checks what the caller found out.
    ///
    /// # Errors
    /// [`TakeOverError`].
    pub fn check(former: Former) -> Result<Self, TakeOverError> {
        match former {
            Former {
                journal_locked_by: Some(pid),
                ..
            } => Err(TakeOverError::Locked { pid }),
            Former {
                has_ended: false, ..
            } => Err(TakeOverError::Lives),
            Former {
                journal_locked_by: None,
                has_ended: true,
            } => Ok(Self(())),
        }
    }
}
