//! Synchronisation primitives: the standard library's, or loom's when the crate is compiled with
//! `--cfg loom`. loom then runs each of its tests for every possible order of the threads' steps.

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering, fence},
    },
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering, fence},
};

#[cfg(not(loom))]
pub(crate) use arc_swap::{ArcSwap, Guard};

/// The part of arc-swap that this crate uses; loom has no counterpart.
#[cfg(loom)]
#[derive(Debug, Default)]
pub(crate) struct ArcSwap<T>(Mutex<std::sync::Arc<T>>);

#[cfg(loom)]
pub(crate) type Guard<A> = Box<A>;

#[cfg(loom)]
impl<T> ArcSwap<T> {
    pub(crate) fn load(&self) -> Guard<std::sync::Arc<T>> {
        Box::new(self.load_full())
    }

    pub(crate) fn load_full(&self) -> std::sync::Arc<T> {
        std::sync::Arc::clone(&self.0.lock().expect("no thread panics with the lock"))
    }

    pub(crate) fn store(&self, value: std::sync::Arc<T>) {
        *self.0.lock().expect("no thread panics with the lock") = value;
    }
}

/// Memory that its users access one at a time, with loom's interface.
#[cfg(not(loom))]
#[derive(Debug, Default)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Calls `user` with a pointer to the value.
    #[inline]
    pub(crate) fn with_mut<R>(&self, user: impl FnOnce(*mut T) -> R) -> R {
        user(self.0.get())
    }
}

/// Yields to other threads, in a loop that waits for one of them.
pub(crate) fn yield_now() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    std::thread::yield_now();
}

/// Yields to the CPU's other hardware thread, in a loop that waits briefly.
#[inline]
pub(crate) fn spin() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    std::hint::spin_loop();
}
