//! What the tests of all crates share, so that no clock and no luck decides them.
//!
//! - [`eventually`] waits for a state, and says what it saw if the state never comes.
//! - [`Sleeper`] is a thread of which a test can tell that it is asleep, and that nobody has woken it since.
//! - [`seed`] is where all random numbers of a test begin: it is printed, and `PAGETIDE_SEED` gives it back.
//! - [`in_a_process_of_its_own`] runs a test where no other one is; [`NoDescriptor`] and [`NoOtherThread`] take away there
//!   what a process may run out of.
//! - [`huge_memory_file`] is a memory file whose pages come from huge pages, and [`FullMemoryFile`] one that has no room for any.
//! - [`unbounded_log_lines`] finds lines of the log in a crate's sources that an outage can make any number of.
//!
//! Tests depend on this crate, and nothing else does (docs/decisions/0026-test-support.md).
#![allow(
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test helper that fails is a test that fails"
)]

mod full;
mod huge;
mod log_lines;
mod process;
mod random;
mod sleeper;
mod socket;
mod wait;

pub use full::FullMemoryFile;
pub use huge::huge_memory_file;
pub use log_lines::unbounded_log_lines;
pub use process::{NoDescriptor, NoOtherThread, in_a_process_of_its_own};
pub use random::{Rng, mix, seed};
pub use sleeper::{Sleeper, Task};
pub use socket::unread_by_peer;
pub use wait::{Look, PATIENCE, equals, eventually, within_patience};
