//! The counters show how pages arrived.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

use std::sync::Arc;

use pagetide_memory::{Access, Backing, GuestAddress, Region};
use pagetide_pager::{
    AddError, BlockingSource, Contents, Filled, Mode, Pager, Pool, PoolConfig, Prefetch,
    PrefetchConfig, ReadAt, ReaderConfig, Readers, RegionConfig, SourceError,
};
use pagetide_test_support::eventually;

const GPA: GuestAddress = GuestAddress(1 << 32);
const PAGE: u64 = 4096;

/// Ones in the first eight pages, and holes after them.
struct HalfZero;

impl BlockingSource for HalfZero {
    fn read(&self, at: ReadAt, buffer: &mut [u8]) -> Result<Filled, SourceError> {
        if at.offset_bytes >= 8 * PAGE {
            return Ok(Filled::Zero);
        }
        buffer.fill(1);
        Ok(Filled::Bytes)
    }
}

#[test]
fn pages_by_fault_by_prefetch_and_of_zeroes_are_counted_separately() {
    for mode in [Mode::Minor, Mode::Missing] {
        let region = Arc::new(Region::new(GPA, 16 * PAGE, Backing::Shmem).unwrap());
        let pager = Pager::new().unwrap();
        let source = Pool::new(HalfZero, PoolConfig::default()).unwrap();
        match pager.add(RegionConfig::local(region, mode, Contents::Source(source))) {
            Ok(_) => {}
            Err(AddError::Open(error)) => {
                println!("SKIP: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        }
        let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        let mut resolver = pager.resolver(Some(0)).unwrap();
        for page in [0, 8] {
            let gpa = GuestAddress(GPA.0 + page * PAGE);
            let _ = resolver.resolve_exit(gpa, Access::Read).unwrap();
        }
        let batch_bytes = PAGE;
        let prefetch = Prefetch::spawn(&pager, PrefetchConfig { batch_bytes }).unwrap();
        assert!(prefetch.finish().unwrap().is_complete);
        drop(resolver);
        readers.stop();
        // A thread of the pool counts a page after others have seen it.
        eventually("the last count", || pager.counted().pages >= 16);
        let counted = pager.counted();
        let found = (counted.pages, counted.ahead_pages, counted.zero_pages);
        assert_eq!(found, (16, 14, 8), "{mode:?}");
    }
}
