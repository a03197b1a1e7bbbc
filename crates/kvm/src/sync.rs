//! The primitives that the gate is made of: the standard library's, or loom's in this crate's tests when
//! they are compiled with `--cfg loom`. Then loom runs a test once for each order in which threads may
//! take their steps.

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
