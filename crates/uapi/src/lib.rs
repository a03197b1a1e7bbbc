//! The kernel interfaces that Pagetide uses, without any layer on top.
//!
//! - [`generated`]: constants and structures, generated from the patched kernel's headers by `cargo
//!   xtask uapi`. No other code repeats a definition of the kernel.
//! - [`userfaultfd`]: a userfaultfd, its registrations, its events and its ioctls that install pages.
//! - [`probe`]: the capabilities of this kernel and machine, and the fallback for each that is missing.
//! - [`host`]: the memory that this machine can still provide.
//! - [`memory_failure`]: the kernel's support for memory with uncorrected errors.

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
