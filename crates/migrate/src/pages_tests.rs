use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const PAGES: u64 = 5000;

fn run(first: u64, count: u64) -> PageRange {
    PageRange::new(PageIndex(first), count)
}

proptest! {
    #[test]
    fn a_set_has_what_a_tree_would_have(
        changes in prop::collection::vec((any::<bool>(), 0..PAGES + 20, 0_u64..900), 0..12),
    ) {
        let mut set = PageSet::empty(PAGES);
        let mut tree = BTreeSet::new();
        for (adds, first, count) in changes {
            let range = run(first, count);
            if adds {
                set.insert(range);
                tree.extend(range.iter().filter(|page| page.0 < PAGES));
            } else {
                set.remove(range);
                range.iter().for_each(|page| { tree.remove(&page); });
            }
        }
        prop_assert_eq!(set.iter().collect::<BTreeSet<_>>(), tree.clone());
        prop_assert_eq!(set.count(), tree.len() as u64);
        prop_assert_eq!(set.is_empty(), tree.is_empty());
        // However it has come about.
        let mut anew = PageSet::empty(PAGES);
        tree.iter().for_each(|page| anew.insert(PageRange::single(*page)));
        prop_assert_eq!(&anew, &set);
        // A peer that gets it in parts has the same, and the same digest.
        let mut other = PageSet::full(PAGES);
        for first in (0..PAGES).step_by(72) {
            let count = 72.min(PAGES - first);
            prop_assert_eq!(other.set_part(first, count, &set.part(first, 72)), Ok(()));
        }
        prop_assert_eq!(other.digest(), set.digest());
        prop_assert_eq!(other, set);
    }

    #[test]
    fn a_part_is_taken_whole_or_not_at_all(
        first in 0..PAGES + 20, count in 0_u64..220, bytes in prop::collection::vec(any::<u8>(), 0..30),
    ) {
        let mut set = PageSet::empty(PAGES);
        match set.set_part(first, count, &bytes) {
            Ok(()) => prop_assert_eq!(set.part(first, count), bytes),
            Err(_) => prop_assert!(set.is_empty()),
        }
    }
}

#[test]
fn runs_end_at_gaps_and_limits() {
    let mut set = PageSet::empty(PAGES);
    set.insert(run(60, 10));
    set.insert(run(PAGES - 1, 1));
    assert_eq!(set.next_run(PageIndex(0), 256), Some(run(60, 10)));
    assert_eq!(set.next_run(PageIndex(0), 4), Some(run(60, 4)));
    assert_eq!(set.next_run(PageIndex(64), 256), Some(run(64, 6)));
    assert_eq!(set.next_run(PageIndex(70), 256), Some(run(PAGES - 1, 1)));
    assert_eq!(set.next_run(PageIndex(PAGES), 256), None);
    assert_eq!(format!("{set:?}"), "{60+10 4999+1}");
}

#[test]
fn one_page_more_or_another_length_is_another_digest() {
    let set = PageSet::full(64);
    let mut other = set.clone();
    other.remove(run(63, 1));
    assert_ne!(other.digest(), set.digest());
    assert_ne!(PageSet::empty(64).digest(), PageSet::empty(65).digest());
}

#[test]
fn parts_out_of_bounds_are_refused() {
    let mut set = PageSet::empty(20);
    for (first, count, bytes) in [
        (0, 0, &[][..]),             // no page
        (0, 8, &[]),                 // too short
        (0, 8, &[1, 0]),             // too long
        (4, 8, &[1]),                // not at a byte
        (0, 12, &[1, 0]),            // ends within a byte, and not at the map's end
        (16, 4, &[0x10]),            // a bit behind the end
        (16, 8, &[1]),               // beyond the VM
        (u64::MAX - 7, 16, &[0, 0]), // overflows
    ] {
        assert!(
            set.set_part(first, count, bytes).is_err(),
            "{first} {count}"
        );
        assert!(set.is_empty());
    }
    assert_eq!(set.set_part(16, 4, &[0x0f]), Ok(()));
    assert_eq!(set.count(), 4);
}

/// A VM of a tebibyte, of which each 4099th page is missing: what is done for each record looks at a few words.
#[test]
fn the_work_for_a_page_does_not_grow_with_the_memory() {
    let pages = 1 << 28;
    let mut set = PageSet::empty(pages);
    (0..pages)
        .step_by(4099)
        .for_each(|page| set.insert(run(page, 1)));
    let levels = set.levels.len();
    assert!(levels <= 5, "{levels}");
    let mut left = set.count();
    let mut most = 0;
    while let Some(next) = {
        let mut looks = 0;
        let next = set.next(0, &mut looks);
        most = most.max(looks);
        next
    } {
        set.remove(run(next, 1));
        left -= 1;
        assert_eq!((set.count(), set.is_empty()), (left, left == 0));
    }
    assert_eq!(left, 0);
    assert!(most <= 2 * levels, "{most} words were looked at");
}
