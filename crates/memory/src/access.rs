//! The kind of access that caused a fault.

use std::fmt;

/// The kind of access that the guest attempted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// A data read.
    Read,
    /// A data write.
    Write,
    /// An instruction fetch.
    Exec,
    /// Unknown: upstream kernels annotate accesses to private memory without access flags.
    Unstated,
}

impl fmt::Display for Access {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Exec => "exec",
            Self::Unstated => "access",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_have_names_for_messages() {
        for (access, name) in [
            (Access::Read, "read"),
            (Access::Write, "write"),
            (Access::Exec, "exec"),
            (Access::Unstated, "access"),
        ] {
            assert_eq!(access.to_string(), name);
        }
        assert_eq!(format!("{:>6}", Access::Read), "  read");
    }
}
