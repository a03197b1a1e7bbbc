//! How much memory a parser takes: nothing is allocated on a peer's word.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, which counts the bytes that each thread holds.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static MOST: Cell<usize> = const { Cell::new(0) };
}

fn count(added: usize, removed: usize) {
    // Fails while the thread ends.
    let _ = HELD.try_with(|held| {
        // What another thread has allocated may be freed here.
        let now = held.get().saturating_add(added).saturating_sub(removed);
        held.set(now);
        let _ = MOST.try_with(|most| most.set(most.get().max(now)));
    });
}

// SAFETY: every method passes its arguments on to System, which fulfils the trait's contract; counting
// neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller's contract is System's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: as above; the pointer came from System.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size, layout.size());
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

/// Runs a parser, which must hold at most `limit` bytes of memory more than before at any time.
///
/// # Panics
/// It held more.
pub(crate) fn bounded<T>(limit: usize, parser: impl FnOnce() -> T) -> T {
    let before = HELD.get();
    MOST.set(before);
    let result = parser();
    let held = MOST.get().saturating_sub(before);
    assert!(
        held <= limit,
        "{held} bytes of memory, and {limit} is the limit"
    );
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_counted_while_it_is_held() {
        let kept = bounded(5000, || {
            drop(vec![0_u8; 4000]);
            vec![1_u8; 4500]
        });
        assert_eq!(kept.len(), 4500);
        let more = std::panic::catch_unwind(|| bounded(5000, || vec![0_u8; 5001]));
        assert!(more.is_err());
    }
}
