//! Divides a VM's memory among threads.

use pagetide_memory::{GuestAddress, GuestRange};

use crate::slot::{Slot, SlotLayout};

/// The largest piece: the span of one entry of a third-level table, so that threads do not share the
/// tables below.
const LARGEST: u64 = 1 << 30;
/// The smallest piece: the span of one huge mapping, and of one table of 4K pages.
const SMALLEST: u64 = 2 << 20;
/// The minimal number of pieces per thread. Threads differ in speed, and the population waits for the
/// slowest thread's last piece: at most a sixteenth of a thread's share.
const PER_THREAD: u64 = 16;

/// A part of a slot, processed by one thread.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) slot: Slot,
    pub(super) range: GuestRange,
}

/// Divides all slots into pieces for `threads` threads, in ascending order.
pub(super) fn pieces(layout: &SlotLayout, threads: usize) -> Vec<Piece> {
    let mut slots: Vec<&Slot> = layout.values().collect();
    slots.sort_by_key(|slot| slot.range.start());
    let total = slots.iter().map(|slot| slot.range.bytes()).sum();
    let bytes = piece_bytes(total, threads);
    slots
        .into_iter()
        .flat_map(|slot| {
            // Threads that share a huge page would wait for each other.
            let bytes = bytes.max(slot.region.page_size().bytes());
            cut(slot.range, bytes).map(|range| Piece {
                slot: slot.clone(),
                range,
            })
        })
        .collect()
}

/// The size of the pieces, a power of two: 1 GiB, or less so that every thread gets several.
fn piece_bytes(total: u64, threads: usize) -> u64 {
    let threads = u64::try_from(threads).unwrap_or(u64::MAX).max(1);
    let mut bytes = LARGEST;
    while bytes > SMALLEST && total / bytes < threads.saturating_mul(PER_THREAD) {
        bytes /= 2;
    }
    bytes
}

/// Splits a range at multiples of `bytes`, a power of two.
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
    fn pieces_are_split_at_multiples_and_cover_the_range() {
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
    fn a_range_at_the_end_of_the_address_space_is_split() {
        let last = range(u64::MAX - 0x1fff, 0x1000);
        assert_eq!(cut(last, 2 << 20).collect::<Vec<_>>(), [last]);
    }

    #[test]
    fn slots_are_split_separately_in_ascending_order() {
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
