//! Decompressed chunks that were used lately.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The most parts with a lock of their own.
const MOST_SHARDS: usize = 16;
/// The least number of chunks that a part holds.
const CHUNKS_PER_SHARD: usize = 8;

/// A stored chunk of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) layer: usize,
    pub(crate) number: u32,
}

/// A cache with a bound in bytes. A chunk that was used since the clock's hand passed stays for
/// another round.
#[derive(Debug)]
pub(crate) struct ChunkCache {
    shards: Box<[Mutex<Shard>]>,
    /// Bytes for each shard.
    bound: usize,
}

#[derive(Debug, Default)]
struct Shard {
    places: HashMap<Key, usize>,
    chunks: Vec<Cached>,
    /// The clock's hand, an index of `chunks`.
    hand: usize,
    bytes: usize,
}

#[derive(Debug)]
struct Cached {
    key: Key,
    content: Vec<u8>,
    was_used: bool,
}

impl ChunkCache {
    /// A cache of `bytes` bytes of chunks that are `chunk_bytes` bytes long at most.
    pub(crate) fn new(bytes: usize, chunk_bytes: usize) -> Self {
        let shards = bytes / (CHUNKS_PER_SHARD * chunk_bytes.max(1));
        let shards = shards.clamp(1, MOST_SHARDS);
        Self {
            shards: (0..shards).map(|_| Mutex::default()).collect(),
            bound: bytes / shards,
        }
    }

    fn shard(&self, key: Key) -> MutexGuard<'_, Shard> {
        // Neighbours go to different shards; layers of one chunk, too.
        let number = usize::try_from(key.number).unwrap_or_default();
        let shard = (number + key.layer) % self.shards.len();
        let locked = self.shards[shard].lock();
        locked.unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies from the chunk, from byte `begin` on, if it is here.
    pub(crate) fn copy(&self, key: Key, begin: usize, buffer: &mut [u8]) -> bool {
        let mut shard = self.shard(key);
        let Some(&place) = shard.places.get(&key) else {
            return false;
        };
        let cached = &mut shard.chunks[place];
        let Some(content) = cached.content.get(begin..begin + buffer.len()) else {
            return false;
        };
        buffer.copy_from_slice(content);
        cached.was_used = true;
        true
    }

    /// Keeps the chunk; returns a buffer for another one, which had the evicted chunk if there was one.
    pub(crate) fn insert(&self, key: Key, mut content: Vec<u8>) -> Vec<u8> {
        if content.len() > self.bound {
            return content;
        }
        // A buffer that had a longer chunk of another layer has more than is counted.
        content.shrink_to_fit();
        let mut shard = self.shard(key);
        let shard = &mut *shard;
        // Two threads that decompressed one chunk at the same time.
        if shard.places.contains_key(&key) {
            return content;
        }
        let mut spare = Vec::new();
        while shard.bytes + content.len() > self.bound {
            match shard.evict() {
                Some(evicted) => spare = evicted,
                None => break,
            }
        }
        shard.bytes += content.len();
        shard.places.insert(key, shard.chunks.len());
        shard.chunks.push(Cached {
            key,
            content,
            was_used: false,
        });
        spare
    }

    /// Bytes of chunks that are here.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        let bytes = |shard: &Mutex<Shard>| shard.lock().map_or(0, |shard| shard.bytes);
        self.shards.iter().map(bytes).sum()
    }
}

impl Shard {
    /// Removes the first chunk at the hand that was not used lately.
    fn evict(&mut self) -> Option<Vec<u8>> {
        loop {
            if self.hand >= self.chunks.len() {
                self.hand = 0;
            }
            let cached = self.chunks.get_mut(self.hand)?;
            if cached.was_used {
                cached.was_used = false;
                self.hand += 1;
                continue;
            }
            let evicted = self.chunks.swap_remove(self.hand);
            self.places.remove(&evicted.key);
            if let Some(moved) = self.chunks.get(self.hand) {
                self.places.insert(moved.key, self.hand);
            }
            // The chunk that has moved here is the newest: the hand does not meet it at once.
            self.hand += 1;
            self.bytes -= evicted.content.len();
            return Some(evicted.content);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u32) -> Key {
        Key { layer: 0, number }
    }

    fn content(number: u32) -> Vec<u8> {
        vec![number.to_le_bytes()[0]; 4096]
    }

    #[test]
    fn its_bytes_are_bounded() {
        let cache = ChunkCache::new(40 * 4096, 4096);
        for number in 0..1000 {
            let spare = cache.insert(key(number), content(number));
            assert!(
                number < 40 || spare.len() == 4096,
                "{number}: no spare buffer"
            );
            assert!(cache.bytes() <= 40 * 4096);
        }
        let mut page = [0; 16];
        assert!(cache.copy(key(999), 4080, &mut page));
        assert_eq!(page, [999_u32.to_le_bytes()[0]; 16]);
        assert!(!cache.copy(key(999), 4081, &mut page));
        assert!(!cache.copy(key(0), 0, &mut page));
    }

    /// A buffer that had a chunk of a layer with longer chunks is bounded, too.
    #[test]
    fn a_chunk_takes_no_more_than_its_length() {
        let cache = ChunkCache::new(40 * 4096, 4096);
        let mut long = Vec::with_capacity(1 << 20);
        long.extend_from_slice(&content(7));
        cache.insert(key(7), long);
        let shard = cache.shard(key(7));
        let kept = shard.chunks.first().map(|cached| cached.content.capacity());
        assert_eq!(kept, Some(4096));
    }

    #[test]
    fn what_is_used_stays() {
        let cache = ChunkCache::new(8 * 4096, 4096);
        let mut byte = [0];
        for number in 0..1000 {
            cache.insert(key(number), content(number));
            assert!(cache.copy(key(0), 0, &mut byte), "after chunk {number}");
        }
    }

    #[test]
    fn layers_and_numbers_differ() {
        let cache = ChunkCache::new(1 << 20, 4096);
        for layer in 0..3 {
            for number in 0..20 {
                let byte = number + 20 * u32::try_from(layer).expect("it is small");
                cache.insert(Key { layer, number }, content(byte));
            }
        }
        let mut byte = [0];
        assert!(cache.copy(
            Key {
                layer: 2,
                number: 7
            },
            5,
            &mut byte
        ));
        assert_eq!(byte, [47]);
    }

    #[test]
    fn without_bytes_it_keeps_nothing() {
        let cache = ChunkCache::new(0, 4096);
        assert_eq!(cache.insert(key(1), content(1)).len(), 4096);
        assert_eq!(cache.bytes(), 0);
    }
}
