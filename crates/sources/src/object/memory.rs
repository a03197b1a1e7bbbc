//! Blocks in memory: the least recently used ones go first.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The content of one block.
pub(crate) type Block = Arc<Vec<u8>>;

/// Recently used blocks.
#[derive(Debug)]
pub(super) struct Memory {
    bound: usize,
    bytes: usize,
    clock: u64,
    blocks: HashMap<u64, (Block, u64)>,
    /// By the time of the last use.
    order: BTreeMap<u64, u64>,
}

impl Memory {
    /// Keeps at most `bound` bytes.
    pub(super) fn new(bound: usize) -> Self {
        Self {
            bound,
            bytes: 0,
            clock: 0,
            blocks: HashMap::new(),
            order: BTreeMap::new(),
        }
    }

    pub(super) fn get(&mut self, index: u64) -> Option<Block> {
        let (block, used) = self.blocks.get_mut(&index)?;
        self.order.remove(used);
        self.clock += 1;
        *used = self.clock;
        self.order.insert(self.clock, index);
        Some(Arc::clone(block))
    }

    pub(super) fn insert(&mut self, index: u64, block: Block) {
        self.remove(index);
        self.bytes += block.len();
        self.clock += 1;
        self.order.insert(self.clock, index);
        self.blocks.insert(index, (block, self.clock));
        while self.bytes > self.bound
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.remove(oldest);
        }
    }

    fn remove(&mut self, index: u64) {
        if let Some((block, used)) = self.blocks.remove(&index) {
            self.bytes -= block.len();
            self.order.remove(&used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_block_goes_first() {
        let mut memory = Memory::new(30);
        let block = || Arc::new(vec![0; 10]);
        (0..3).for_each(|index| memory.insert(index, block()));
        assert!(memory.get(0).is_some());
        memory.insert(3, block());
        assert!(memory.get(1).is_none());
        assert!([0, 2, 3].iter().all(|&index| memory.get(index).is_some()));
        memory.insert(3, Arc::new(vec![0; 25]));
        assert_eq!(
            (memory.bytes, memory.blocks.len(), memory.order.len()),
            (25, 1, 1)
        );
        memory.insert(4, Arc::new(vec![0; 31]));
        assert_eq!(
            (memory.bytes, memory.blocks.len(), memory.order.len()),
            (0, 0, 0)
        );
    }
}
