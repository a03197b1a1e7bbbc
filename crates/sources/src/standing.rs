//! What the name of an image leads to now, compared with what was opened there.

use crate::file::FileIdentity;

/// What the name of a file or of an object leads to now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// What was opened.
    Same,
    /// Something else, which can be opened. What was opened stays as it was for those who have it.
    Replaced,
    /// The file that was opened, and that somebody has written to since: nobody knows whether it is complete.
    Rewritten {
        /// The file that was opened.
        before: FileIdentity,
        /// The file that is there now.
        now: FileIdentity,
    },
}

impl Standing {
    /// That of an image whose parts stand like this: the first part that is not as it was decides, and one that was
    /// written to before one that was replaced.
    pub(crate) fn of_all<E>(parts: impl Iterator<Item = Result<Self, E>>) -> Result<Self, E> {
        let mut standing = Self::Same;
        for part in parts {
            match part? {
                Self::Same => {}
                Self::Replaced => standing = Self::Replaced,
                rewritten @ Self::Rewritten { .. } => return Ok(rewritten),
            }
        }
        Ok(standing)
    }
}
