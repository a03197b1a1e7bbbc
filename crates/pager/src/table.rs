//! The current regions of a pager: an immutable table that is replaced when a region is added or
//! removed.

use std::sync::Arc;

use pagetide_memory::{GuestAddress, PageIndex};

use crate::channel::Channel;
use crate::fault::RegionId;
use crate::region::PagedRegion;

/// Regions by number, by home gpa, and their channels.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    /// By number; numbers are not reused.
    regions: Vec<Option<Arc<PagedRegion>>>,
    /// The numbers of the regions in the order of their home gpas.
    by_gpa: Vec<usize>,
    channels: Vec<Arc<Channel>>,
}

impl Table {
    #[inline]
    pub(crate) fn region(&self, id: RegionId) -> Option<&Arc<PagedRegion>> {
        self.regions.get(id.0)?.as_ref()
    }

    /// The regions, in the order of their home gpas.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<PagedRegion>> {
        self.by_gpa
            .iter()
            .filter_map(|&index| self.regions.get(index)?.as_ref())
    }

    /// The region and page of a home gpa.
    #[inline]
    pub(crate) fn locate(&self, gpa: GuestAddress) -> Option<(&Arc<PagedRegion>, PageIndex)> {
        let gpa_of = |&index: &usize| self.regions.get(index)?.as_ref();
        let index = match self.by_gpa.as_slice() {
            [only] => *only,
            many => {
                let after = many
                    .partition_point(|index| gpa_of(index).is_some_and(|region| region.gpa <= gpa));
                *many.get(after.checked_sub(1)?)?
            }
        };
        let region = gpa_of(&index)?;
        Some((region, region.page_at(gpa.offset_from(region.gpa)?)?))
    }

    pub(crate) fn channels(&self) -> &[Arc<Channel>] {
        &self.channels
    }

    #[inline]
    pub(crate) fn channel(&self, token: u64) -> Option<&Arc<Channel>> {
        // Tokens grow, and channels are only ever appended.
        let found = self
            .channels
            .binary_search_by_key(&token, |channel| channel.token);
        self.channels.get(found.ok()?)
    }

    /// The number of the next region.
    pub(crate) fn next_id(&self) -> RegionId {
        RegionId(self.regions.len())
    }

    /// The table with `region` added, which has the next number.
    pub(crate) fn with(&self, region: Arc<PagedRegion>) -> Self {
        let mut table = self.clone();
        for served in &region.served {
            let is_known = |channel: &Arc<Channel>| Arc::ptr_eq(channel, &served.channel);
            if !table.channels.iter().any(is_known) {
                table.channels.push(Arc::clone(&served.channel));
            }
        }
        let index = table.regions.len();
        let at = self.iter().filter(|other| other.gpa <= region.gpa).count();
        table.regions.push(Some(region));
        table.by_gpa.insert(at, index);
        table
    }

    /// The table without region `id`, and without the channels that serve no other region.
    pub(crate) fn without(&self, id: RegionId) -> Self {
        let mut table = self.clone();
        if let Some(slot) = table.regions.get_mut(id.0) {
            *slot = None;
        }
        table.by_gpa.retain(|&index| index != id.0);
        let regions = &table.regions;
        table.channels.retain(|channel| {
            let mut served = regions.iter().flatten().flat_map(|region| &region.served);
            served.any(|served| Arc::ptr_eq(&served.channel, channel))
        });
        table
    }
}
