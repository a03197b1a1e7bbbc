//! Four programs that use the pager, in this package's directory: `rust_vmm`, a small VMM on
//! kvm-ioctls and vm-memory that adopts the pager; `epoll_handler`, an event loop that serves another
//! process's userfaultfd; `vhost_back_end`, one memory in two processes; `custom_source`, a source that is slow and fails, with retry.
//!
//! `cargo run --example NAME -p pagetide-examples` runs one; `make test` runs all.
