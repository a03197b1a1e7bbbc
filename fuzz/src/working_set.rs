//! Working-set files (`pagetide_serve::WorkingSet`, docs/design/working-sets.md).

use std::collections::BTreeSet;

use pagetide_memory::{PageIndex, PageSize};
use pagetide_serve::{Touch, WorkingSet};
use pagetide_sources::Digest;

use crate::memory::bounded;

/// The input is everything before the file's digest.
pub(crate) fn run(input: &[u8]) -> bool {
    let _ = WorkingSet::decode(input);
    let mut file = input.to_vec();
    file.extend(Digest::of(input).0);
    // An entry takes at least two bytes; in memory 16, and 8 more while its page is looked for twice.
    let decoded = bounded(12 * file.len() + 1024, || WorkingSet::decode(&file));
    let Ok(set) = decoded else {
        return false;
    };
    let pages = set.image_bytes >> set.page_size.shift();
    assert!(set.touches.len() as u64 <= pages);
    let mut before = 0;
    let mut touched = BTreeSet::new();
    for touch in &set.touches {
        assert!(touch.page.0 < pages && touch.at_us >= before);
        before = touch.at_us;
        assert!(
            touched.insert(touch.page.0),
            "page {} comes twice",
            touch.page
        );
    }
    assert_eq!(WorkingSet::decode(&set.encode()).as_ref(), Ok(&set));
    // Replay fetches each touched page once, and no other.
    let runs = set.runs();
    assert!(runs.len() <= set.touches.len());
    let fetched: Vec<u64> = runs
        .iter()
        .flat_map(|run| run.iter().map(|page| page.0))
        .collect();
    assert_eq!(fetched.len(), touched.len());
    assert_eq!(fetched.into_iter().collect::<BTreeSet<_>>(), touched);
    // A recording of the same guest adds nothing.
    let mut merged = set.clone();
    merged.merge(&set);
    let merged: BTreeSet<u64> = merged.touches.iter().map(|touch| touch.page.0).collect();
    assert_eq!(merged, touched);
    true
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let file = |page_size: PageSize, touches: &[(u64, u64)]| {
        let set = WorkingSet {
            image: Digest([1; 32]),
            image_bytes: 1 << 30,
            page_size,
            recordings: 1,
            touches: touches
                .iter()
                .map(|&(page, at_us)| Touch {
                    page: PageIndex(page),
                    at_us,
                })
                .collect(),
        };
        let mut bytes = set.encode();
        bytes.truncate(bytes.len() - 32);
        bytes
    };
    vec![
        file(PageSize::Size4K, &[]),
        file(
            PageSize::Size4K,
            &[(7, 0), (8, 1), (3, 70_000), (262_143, 1 << 40)],
        ),
        file(PageSize::Size2M, &[(511, 5), (0, 5)]),
        // The shortest entries, which take the most memory for each byte.
        file(
            PageSize::Size4K,
            &(1..400).map(|page| (page, 0)).collect::<Vec<_>>(),
        ),
    ]
}
