//! A bounded set of ranges that grow together.

use std::collections::BTreeMap;

use pagetide_memory::{GuestAddress, GuestRange};

/// What became of a range that was to be inserted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inserted {
    /// It stands alone.
    New,
    /// It has become part of another.
    Merged,
    /// There is no room.
    Full,
}

/// Disjoint ranges of guest memory. Ranges that touch are merged up to a batch's size; ranges that
/// overlap always are.
#[derive(Debug)]
pub(crate) struct Ranges {
    /// From a range's first byte to the one after its last.
    ends: BTreeMap<GuestAddress, GuestAddress>,
    most: usize,
    batch_bytes: u64,
    /// Where the range ended that was taken last.
    taken_to: GuestAddress,
}

impl Ranges {
    /// Room for `most` ranges, which grow together up to `batch_bytes` bytes each.
    pub(crate) fn new(most: usize, batch_bytes: u64) -> Self {
        Self {
            ends: BTreeMap::new(),
            most,
            batch_bytes,
            taken_to: GuestAddress(0),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.ends.clear();
    }

    pub(crate) fn insert(&mut self, range: GuestRange) -> Inserted {
        let (mut start, mut end) = (range.start(), range.end());
        let before = self.ends.len();
        if let Some((&left, &left_end)) = self.ends.range(..=start).next_back()
            && self.belong_together(left, left_end, start, end)
        {
            self.ends.remove(&left);
            (start, end) = (left, end.max(left_end));
        }
        while let Some((&right, &right_end)) = self.ends.range(start..).next()
            && self.belong_together(start, end, right, right_end)
        {
            self.ends.remove(&right);
            end = end.max(right_end);
        }
        let merged = self.ends.len() < before;
        if !merged && before >= self.most {
            return Inserted::Full;
        }
        self.ends.insert(start, end);
        if merged {
            Inserted::Merged
        } else {
            Inserted::New
        }
    }

    /// Whether two ranges, the lower one first, are to be one.
    fn belong_together(
        &self,
        left: GuestAddress,
        left_end: GuestAddress,
        right: GuestAddress,
        right_end: GuestAddress,
    ) -> bool {
        left_end > right || (left_end == right && right_end.0 - left.0 <= self.batch_bytes)
    }

    /// Takes the next range upwards of the last one, and starts again at the lowest: so none waits
    /// longer than one sweep, whatever comes in meanwhile.
    pub(crate) fn take(&mut self) -> Option<GuestRange> {
        let (&start, &end) = self
            .ends
            .range(self.taken_to..)
            .next()
            .or_else(|| self.ends.first_key_value())?;
        self.ends.remove(&start);
        self.taken_to = end;
        // Made of ranges that were whole pages, it is a range.
        GuestRange::new(start, end.0 - start.0).ok()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = 4096;

    fn range(first: u64, pages: u64) -> GuestRange {
        GuestRange::new(GuestAddress(first * PAGE), pages * PAGE).unwrap()
    }

    #[test]
    fn neighbours_grow_together_up_to_a_batch() {
        let mut ranges = Ranges::new(8, 4 * PAGE);
        assert_eq!(ranges.insert(range(1, 1)), Inserted::New);
        assert_eq!(ranges.insert(range(3, 1)), Inserted::New);
        assert_eq!(ranges.insert(range(2, 1)), Inserted::Merged);
        assert_eq!(ranges.insert(range(4, 2)), Inserted::New);
        assert_eq!(ranges.take(), Some(range(1, 3)));
        assert_eq!(ranges.take(), Some(range(4, 2)));
        assert_eq!(ranges.take(), None);
    }

    #[test]
    fn what_is_larger_than_a_batch_is_kept_in_one_piece() {
        let mut ranges = Ranges::new(8, PAGE);
        assert_eq!(ranges.insert(range(512, 512)), Inserted::New);
        assert_eq!(ranges.insert(range(1024, 512)), Inserted::New);
        assert_eq!(ranges.take(), Some(range(512, 512)));
    }

    #[test]
    fn a_full_set_still_takes_what_touches() {
        let mut ranges = Ranges::new(1, 4 * PAGE);
        assert_eq!(ranges.insert(range(1, 1)), Inserted::New);
        assert_eq!(ranges.insert(range(9, 1)), Inserted::Full);
        assert_eq!(ranges.insert(range(2, 1)), Inserted::Merged);
        assert_eq!(ranges.take(), Some(range(1, 2)));
    }

    #[test]
    fn taking_sweeps_upwards_and_starts_again() {
        let mut ranges = Ranges::new(8, PAGE);
        ranges.insert(range(5, 1));
        ranges.insert(range(9, 1));
        assert_eq!(ranges.take(), Some(range(5, 1)));
        ranges.insert(range(1, 1));
        assert_eq!(ranges.take(), Some(range(9, 1)));
        assert_eq!(ranges.take(), Some(range(1, 1)));
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Insert(u64, u64),
        Take,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => (0u64..64, 1u64..6).prop_map(|(first, pages)| Step::Insert(first, pages)),
            1 => Just(Step::Take),
        ];
        prop::collection::vec(step, 0..200)
    }

    fn pages(range: GuestRange) -> impl Iterator<Item = u64> {
        range.start().0 / PAGE..range.end().0 / PAGE
    }

    proptest! {
        /// Against a plain set of pages: what was taken in comes out once, and nothing else does.
        #[test]
        fn no_page_is_lost_or_made_up(steps in steps(), most in 1usize..8) {
            let mut ranges = Ranges::new(most, 4 * PAGE);
            let mut model = BTreeSet::new();
            for step in steps {
                match step {
                    Step::Insert(first, count) => {
                        let range = range(first, count);
                        if ranges.insert(range) != Inserted::Full {
                            model.extend(pages(range));
                        }
                    }
                    Step::Take => {
                        let taken = ranges.take();
                        prop_assert_eq!(taken.is_none(), model.is_empty());
                        for page in taken.into_iter().flat_map(pages) {
                            prop_assert!(model.remove(&page), "{} was not in", page);
                        }
                    }
                }
                prop_assert!(ranges.ends.len() <= most);
                let queued: Vec<_> = ranges.ends.iter().collect();
                for pair in queued.windows(2) {
                    prop_assert!(pair[0].1 <= pair[1].0, "overlap");
                }
            }
            while let Some(taken) = ranges.take() {
                for page in pages(taken) {
                    prop_assert!(model.remove(&page));
                }
            }
            prop_assert!(model.is_empty());
        }
    }
}
