//! Synchronisation primitives of the gate: the standard library's, or loom's in this crate's tests when
//! they are compiled with `--cfg loom`. loom then runs each test for every possible order of the
//! threads' steps.

#[cfg(all(loom, test))]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicU32, Ordering},
};
#[cfg(not(all(loom, test)))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicU32, Ordering},
};
