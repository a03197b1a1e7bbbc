//! The current regions of a pager: an immutable table that is replaced when a region is added or
//! removed.

use std::sync::Arc;

use pagetide_memory::{GuestAddress, PageIndex};

use crate::channel::Channel;
use crate::chunks::{Order, Slots};
use crate::fault::RegionId;
use crate::region::PagedRegion;

/// Regions by number, by home gpa, and their channels.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    /// By number; numbers are not reused.
    regions: Slots<Option<Arc<PagedRegion>>>,
    /// The numbers of the regions in the order of their home gpas.
    by_gpa: Order,
    channels: Vec<Arc<Channel>>,
    /// How often regions name each of these.
    users: Vec<usize>,
}

impl Table {
    #[inline]
    pub(crate) fn region(&self, id: RegionId) -> Option<&Arc<PagedRegion>> {
        self.regions.get(id.0)?.as_ref()
    }

    /// The regions, in the order of their home gpas.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<PagedRegion>> {
        let region = |number| self.regions.get(number)?.as_ref();
        self.by_gpa.iter().filter_map(region)
    }

    /// The region and page of a home gpa.
    #[inline]
    pub(crate) fn locate(&self, gpa: GuestAddress) -> Option<(&Arc<PagedRegion>, PageIndex)> {
        let number = self.by_gpa.at_or_before(gpa.0)?;
        let region = self.regions.get(number)?.as_ref()?;
        Some((region, region.page_at(gpa.offset_from(region.gpa)?)?))
    }

    /// The regions before and behind the place of a region at `gpa`: no other could overlap it.
    pub(crate) fn neighbours(&self, gpa: GuestAddress) -> impl Iterator<Item = &Arc<PagedRegion>> {
        // A single region is before and behind every place.
        let before = self.by_gpa.at_or_before(gpa.0);
        let behind = self.by_gpa.after(gpa.0);
        let numbers = [before, behind.filter(|_| before != behind)];
        let region = |number| self.regions.get(number)?.as_ref();
        numbers.into_iter().flatten().filter_map(region)
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
            match table.users_of(&served.channel) {
                Some(users) => *users += 1,
                None => {
                    table.channels.push(Arc::clone(&served.channel));
                    table.users.push(1);
                }
            }
        }
        table.by_gpa.insert(region.gpa.0, table.regions.len());
        table.regions.push(Some(region));
        table
    }

    fn users_of(&mut self, channel: &Arc<Channel>) -> Option<&mut usize> {
        let is_it = |known: &Arc<Channel>| Arc::ptr_eq(known, channel);
        let found = self.channels.iter().position(is_it)?;
        self.users.get_mut(found)
    }

    /// The table without region `id`, and without the channels that serve no other region.
    pub(crate) fn without(&self, id: RegionId) -> Self {
        let mut table = self.clone();
        let Some(region) = table.regions.get_mut(id.0).and_then(Option::take) else {
            return table;
        };
        table.by_gpa.remove(region.gpa.0);
        for served in &region.served {
            if let Some(users) = table.users_of(&served.channel) {
                *users = users.saturating_sub(1);
            }
        }
        let mut users = table.users.iter();
        table
            .channels
            .retain(|_| users.next().is_some_and(|&users| users > 0));
        table.users.retain(|&users| users > 0);
        table
    }
}
