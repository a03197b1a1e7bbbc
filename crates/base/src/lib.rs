//! What the command and the benchmarks share, and neither the server nor the library needs.
//!
//! - [`units`]: sizes as people write them, and numbers as people read them.
//! - [`one_line`]: an error with its causes.
//! - [`terminal_width`]: how wide a terminal is.
//! - [`raise_descriptors`]: as many open files as this process may have.
//!
//! It is a crate of its own so that a command without benchmarks compiles none of what measures and draws.

pub mod units;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// An error and everything that caused it, in one line.
#[must_use]
pub fn one_line(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    // A message of somebody else's may have lines.
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// How wide the terminal is that standard output is, in characters; `None` if it is none.
#[must_use]
pub fn terminal_width() -> Option<u16> {
    let out = rustix::stdio::stdout();
    if !rustix::termios::isatty(out) {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(out).ok()?;
    (size.ws_col > 0).then_some(size.ws_col)
}

/// Raises the limit of open files as far as this process may, and returns what it is then; `None`
/// if there is none.
pub fn raise_descriptors() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        // What is too little is told by whoever compares.
        Err(_) => limit.current,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_descriptors_is_the_hard_one() {
        let most = raise_descriptors();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!((most, limit.current), (limit.maximum, limit.maximum));
    }
}
