//! Vectors whose copies share most of their content. The table of regions is replaced whenever a region is added or
//! removed, and a VMM may have tens of thousands of them.

use std::sync::Arc;

/// The most values of a chunk. A copy costs one reference for each chunk, and a change one chunk.
const MOST: usize = 256;

/// Values by their number.
#[derive(Clone, Debug)]
pub(crate) struct Slots<T> {
    /// All are full but the last.
    chunks: Vec<Arc<Vec<T>>>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { chunks: Vec::new() }
    }
}

impl<T: Clone> Slots<T> {
    #[inline]
    pub(crate) fn get(&self, number: usize) -> Option<&T> {
        self.chunks.get(number / MOST)?.get(number % MOST)
    }

    pub(crate) fn get_mut(&mut self, number: usize) -> Option<&mut T> {
        Arc::make_mut(self.chunks.get_mut(number / MOST)?).get_mut(number % MOST)
    }

    pub(crate) fn push(&mut self, value: T) {
        match self.chunks.last_mut().filter(|last| last.len() < MOST) {
            Some(last) => Arc::make_mut(last).push(value),
            None => self.chunks.push(Arc::new(vec![value])),
        }
    }

    pub(crate) fn len(&self) -> usize {
        let last = self.chunks.last().map_or(0, |last| last.len());
        self.chunks.len().saturating_sub(1) * MOST + last
    }
}

/// Numbers by different keys, in the order of these.
#[derive(Clone, Debug, Default)]
pub(crate) struct Order {
    /// Each has a value.
    chunks: Vec<Arc<Vec<(u64, usize)>>>,
}

impl Order {
    /// The chunk and the place in it behind the last key that is not above `key`.
    #[inline]
    fn behind(&self, key: u64) -> (usize, usize) {
        let starts_by =
            |chunk: &Arc<Vec<(u64, usize)>>| chunk.first().is_some_and(|&(first, _)| first <= key);
        let chunk = self.chunks.partition_point(starts_by).saturating_sub(1);
        let values = self.chunks.get(chunk).map_or(&[][..], |chunk| chunk);
        (chunk, values.partition_point(|&(at, _)| at <= key))
    }

    /// The number with the last key that is not above `key`.
    #[inline]
    pub(crate) fn at_or_before(&self, key: u64) -> Option<usize> {
        if let [chunk] = &*self.chunks
            && let [(_, only)] = ***chunk
        {
            return Some(only);
        }
        let (chunk, place) = self.behind(key);
        let (_, number) = self.chunks.get(chunk)?.get(place.checked_sub(1)?)?;
        Some(*number)
    }

    /// The number with the first key above `key`.
    pub(crate) fn after(&self, key: u64) -> Option<usize> {
        let (chunk, place) = self.behind(key);
        let next = || self.chunks.get(chunk + 1)?.first();
        let (_, number) = self.chunks.get(chunk)?.get(place).or_else(next)?;
        Some(*number)
    }

    pub(crate) fn insert(&mut self, key: u64, number: usize) {
        let (chunk, place) = self.behind(key);
        let Some(values) = self.chunks.get_mut(chunk) else {
            self.chunks.push(Arc::new(vec![(key, number)]));
            return;
        };
        let values = Arc::make_mut(values);
        values.insert(place, (key, number));
        if values.len() > MOST {
            let rest = values.split_off(MOST / 2);
            self.chunks.insert(chunk + 1, Arc::new(rest));
        }
    }

    pub(crate) fn remove(&mut self, key: u64) {
        let (chunk, place) = self.behind(key);
        let (Some(values), Some(place)) = (self.chunks.get_mut(chunk), place.checked_sub(1)) else {
            return;
        };
        if values.get(place).is_none_or(|&(at, _)| at != key) {
            return;
        }
        let values = Arc::make_mut(values);
        values.remove(place);
        if values.is_empty() {
            self.chunks.remove(chunk);
        }
    }

    /// All numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> {
        let values = self.chunks.iter().flat_map(|chunk| chunk.iter());
        values.map(|&(_, number)| number)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn slots_keep_their_numbers_and_copies_their_values() {
        let mut slots = Slots::default();
        let mut copies = Vec::new();
        for number in 0..3 * MOST {
            assert_eq!(slots.len(), number);
            copies.push(slots.clone());
            slots.push(number);
        }
        *slots.get_mut(MOST).unwrap() = 7;
        assert_eq!(slots.get(MOST), Some(&7));
        assert_eq!(slots.get(3 * MOST), None);
        for (count, copy) in copies.iter().enumerate() {
            assert_eq!(copy.len(), count);
            assert!((0..count).all(|number| copy.get(number) == Some(&number)));
        }
    }

    proptest! {
        /// As a map, also in its copies.
        #[test]
        fn an_order_is_that_of_a_map(steps in prop::collection::vec((any::<bool>(), 0u64..2000), 0..1500)) {
            let (mut order, mut map) = (Order::default(), BTreeMap::new());
            let mut copies = Vec::new();
            for (number, (is_added, key)) in steps.into_iter().enumerate() {
                // Rather added than removed, so that there are several chunks.
                if is_added || key % 2 == 0 {
                    if map.contains_key(&key) {
                        continue;
                    }
                    order.insert(key, number);
                    map.insert(key, number);
                } else {
                    order.remove(key);
                    map.remove(&key);
                }
                if number % 100 == 0 {
                    copies.push((order.clone(), map.clone()));
                }
            }
            copies.push((order, map));
            for (order, map) in copies {
                prop_assert!(order.iter().eq(map.values().copied()));
                for key in (0..2001).step_by(7) {
                    let after = map.range(key + 1..).next().map(|(_, &number)| number);
                    prop_assert_eq!(order.after(key), after);
                    let before = map.range(..=key).next_back().map(|(_, &number)| number);
                    // A single one is returned for every key.
                    if map.len() != 1 {
                        prop_assert_eq!(order.at_or_before(key), before);
                    }
                }
            }
        }
    }
}
