//! How a VM's memory is divided among threads.

use pagetide_memory::{GuestAddress, GuestRange};

use crate::slot::{Slot, SlotLayout};

/// The largest piece: what one entry of the third-level table spans, so that threads do not meet in
/// the tables below it.
const LARGEST: u64 = 1 << 30;
/// The smallest one: what a huge mapping spans, and one table of 4K pages.
const SMALLEST: u64 = 2 << 20;
/// How many pieces a thread should get at least. Threads are never equally fast, and what the slowest has
/// left at the end is waited for: at most one piece, i.e. a sixteenth of a thread's share.
const PER_THREAD: u64 = 16;

/// A part of a slot for one thread to do.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) slot: Slot,
    pub(super) range: GuestRange,
}

/// The parts of all slots, by address, for `threads` threads.
pub(super) fn pieces(layout: &SlotLayout, threads: usize) -> Vec<Piece> {
    let mut slots: Vec<&Slot> = layout.values().collect();
    slots.sort_by_key(|slot| slot.range.start());
    let total = slots.iter().map(|slot| slot.range.bytes()).sum();
    let bytes = piece_bytes(total, threads);
    slots
        .into_iter()
        .flat_map(|slot| {
            // Threads that share a huge page would only wait for each other.
            let bytes = bytes.max(slot.region.page_size().bytes());
            cut(slot.range, bytes).map(|range| Piece {
                slot: slot.clone(),
                range,
            })
        })
        .collect()
}

/// The size of pieces, a power of two: 1 GiB, or what it takes for every thread to get some.
fn piece_bytes(total: u64, threads: usize) -> u64 {
    let threads = u64::try_from(threads).unwrap_or(u64::MAX).max(1);
    let mut bytes = LARGEST;
    while bytes > SMALLEST && total / bytes < threads.saturating_mul(PER_THREAD) {
        bytes /= 2;
    }
    bytes
}

/// Cuts a range at multiples of `bytes`, a power of two.
pub(super) fn cut(range: GuestRange, bytes: u64) -> impl Iterator<Item = GuestRange> {
    let mut start = range.start();
    std::iter::from_fn(move || {
        let left = range.end().offset_from(start).filter(|left| *left > 0)?;
        let step = (bytes - start.0 % bytes).min(left);
        let piece = GuestRange::new(start, step).ok()?;
        start = GuestAddress(start.0 + step);
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pagetide_memory::{Backing, Region};

    use super::*;
    use crate::slot::SlotFlags;

    fn range(start: u64, bytes: u64) -> GuestRange {
        GuestRange::new(GuestAddress(start), bytes).unwrap()
    }

    #[test]
    fn every_thread_gets_several_pieces() {
        let cases = [
            (64 << 30, 4, 1 << 30),
            (64 << 30, 32, 128 << 20),
            (1 << 30, 2, 32 << 20),
            (256 << 20, 8, 2 << 20),
            (4 << 20, 8, 2 << 20),
            (0, 1, 2 << 20),
            (1 << 40, 0, 1 << 30),
        ];
        for (total, threads, bytes) in cases {
            assert_eq!(piece_bytes(total, threads), bytes, "{total} {threads}");
        }
    }

    #[test]
    fn pieces_are_cut_at_multiples_and_cover_all() {
        let whole = range((1 << 30) - 0x3000, (2 << 30) + 0x5000);
        let parts: Vec<_> = cut(whole, 1 << 30).collect();
        let wanted = [
            range((1 << 30) - 0x3000, 0x3000),
            range(1 << 30, 1 << 30),
            range(2 << 30, 1 << 30),
            range(3 << 30, 0x2000),
        ];
        assert_eq!(parts, wanted);
        assert_eq!(cut(range(0x1000, 0x1000), 2 << 20).count(), 1);
    }

    #[test]
    fn the_end_of_the_address_space_is_no_trap() {
        let last = range(u64::MAX - 0x1fff, 0x1000);
        assert_eq!(cut(last, 2 << 20).collect::<Vec<_>>(), [last]);
    }

    #[test]
    fn slots_are_cut_one_by_one_in_the_order_of_addresses() {
        let mut layout = SlotLayout::new();
        for (number, gpa) in [(0, 8 << 20), (1, 0)] {
            let region = Region::new(GuestAddress(gpa), 3 << 20, Backing::Shmem).unwrap();
            layout.insert(number, Slot::whole(Arc::new(region), SlotFlags::default()));
        }
        let found: Vec<_> = pieces(&layout, 4)
            .iter()
            .map(|piece| (piece.range.start().0 >> 20, piece.range.bytes() >> 20))
            .collect();
        assert_eq!(found, [(0, 2), (2, 1), (8, 2), (10, 1)]);
    }
}
