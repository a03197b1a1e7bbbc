//! The kernel's interfaces as Pagetide uses them, and nothing above them.
//!
//! - [`generated`]: constants and structures, generated from the patched kernel's headers by
//!   `cargo xtask uapi`. Nothing of the kernel's is typed by hand anywhere else.
//! - [`userfaultfd`]: a userfaultfd, its registrations, its events and its ways to install pages.
//! - [`probe`]: what this kernel and this machine have, and what is used instead of what they lack.
//! - [`host`]: how much memory this machine has to give.
//! - [`memory_failure`]: what the kernel has for memory with uncorrected errors.

pub mod host;
pub mod memory_failure;
pub mod probe;
pub mod userfaultfd;

/// Constants and structures of `linux/kvm.h`, `linux/memfd.h` and `linux/userfaultfd.h`, with the
/// kernel's own names. Documented there, and in the kernel's `Documentation/virt/kvm/api.rst` and
/// `Documentation/admin-guide/mm/userfaultfd.rst`.
#[allow(
    missing_docs,
    non_camel_case_types,
    clippy::missing_safety_doc,
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block,
    unsafe_op_in_unsafe_fn,
    unreachable_pub,
    unused_qualifications,
    reason = "generated code"
)]
#[rustfmt::skip]
pub mod generated;
