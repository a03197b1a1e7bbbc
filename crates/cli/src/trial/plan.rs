//! The pages that the guest touches, and their order.

use pagetide_serve::WorkingSet;
use pagetide_sources::{GuestImage, Location};
use serde::Serialize;

use super::guest::PAGE;
use super::{TryArguments, TryError};

/// Touches without a working set.
const TOUCHES: u64 = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Order {
    /// As the recorded guests did
    Recorded,
    /// At random, the same in each run
    Random,
    /// From the first page on
    Upwards,
}

/// The pages to touch, in their order.
pub(super) fn plan(
    arguments: &TryArguments,
    image: &dyn GuestImage,
) -> Result<(Order, Vec<u64>), TryError> {
    let recorded = working_set(&arguments.image, image);
    let order = arguments.order.unwrap_or(match recorded {
        Some(_) => Order::Recorded,
        None => Order::Random,
    });
    let all = image.bytes() / PAGE;
    let most = arguments.touches.unwrap_or(TOUCHES);
    let pages = match order {
        Order::Recorded => {
            let image = arguments.image.to_string();
            let set = recorded.ok_or(TryError::NoWorkingSet { image })?;
            let most = arguments.touches.unwrap_or(u64::MAX);
            let touches = set.touches.iter().map(|touch| touch.page.0);
            let small = touches.filter(|&page| page < all);
            small
                .take(usize::try_from(most).unwrap_or(usize::MAX))
                .collect()
        }
        Order::Upwards => (0..all.min(most)).collect(),
        Order::Random => at_random(all, all.min(most)),
    };
    Ok((order, pages))
}

/// The working set beside an image that is a file, if it is one of this image.
fn working_set(location: &Location, image: &dyn GuestImage) -> Option<WorkingSet> {
    let Location::Path(path) = location else {
        return None;
    };
    let set = WorkingSet::load(&WorkingSet::default_path(path)).ok()??;
    set.is_of(image.digest(), image.bytes()).then_some(set)
}

/// `count` of `all` pages, each once: the same in each run. The step has no divisor in common with `all`, so that it
/// comes by each page once.
fn at_random(all: u64, count: u64) -> Vec<u64> {
    let is_step = |&step: &u64| greatest_common_divisor(step, all) == 1;
    // The golden section of the pages: neighbours in the order are far apart in memory.
    let about = all / 1000 * 618 + all % 1000 * 618 / 1000;
    let step = (about.max(1)..).find(is_step).unwrap_or(1);
    let mut page = 0;
    let next = |_| {
        let this = page;
        page = (page + step) % all;
        this
    };
    (0..count).map(next).collect()
}

fn greatest_common_divisor(mut one: u64, mut other: u64) -> u64 {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_is_touched_once() {
        for all in [1, 2, 3, 7, 64, 1000, 4099] {
            let mut pages = at_random(all, all);
            pages.sort_unstable();
            assert_eq!(pages, (0..all).collect::<Vec<_>>(), "{all}");
        }
        let few = at_random(1 << 20, 3);
        assert!(
            few.windows(2).all(|pair| pair[0].abs_diff(pair[1]) > 1000),
            "{few:?}"
        );
    }
}
