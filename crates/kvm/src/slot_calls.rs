//! The ioctls that change memory slots, one at a time or as a list.

use std::io;
use std::mem::{offset_of, size_of};

use kvm_bindings::{kvm_userspace_memory_region, kvm_userspace_memory_region2};
use pagetide_uapi::generated as abi;
use vmm_sys_util::ioctl::ioctl_with_mut_ptr;

use crate::os_error;
use crate::slot::Slot;
use crate::vm::Inner;

/// The kind of a slot's change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The slot is empty, and receives memory.
    Create,
    /// The slot is emptied.
    Delete,
    /// The slot retains its memory and receives other flags.
    Flags,
}

/// One element of a list: a slot, the kind of its change, and its content afterwards (for a deletion,
/// before).
#[derive(Clone, Debug)]
pub(crate) struct SlotChange {
    pub(crate) slot: u32,
    pub(crate) change: Change,
    pub(crate) state: Slot,
}

/// Why the kernel refused a list.
#[derive(Debug)]
pub(crate) struct ListRefusal {
    /// The index of the refused element, if the kernel reports one.
    pub(crate) element: Option<usize>,
    pub(crate) source: io::Error,
}

/// The ioctls. Tests substitute implementations that fail on purpose. A failed call has changed
/// nothing.
pub(crate) trait SlotCalls {
    /// KVM_SET_USER_MEMORY_REGION2, or KVM_SET_USER_MEMORY_REGION where that is missing.
    fn set_one(&self, slot: u32, state: &Slot, change: Change) -> io::Result<()>;

    /// KVM_SET_USER_MEMORY_REGION_LIST; the caller has checked its capability.
    fn set_list(&self, changes: &[SlotChange]) -> Result<(), ListRefusal>;
}

impl SlotCalls for Inner {
    fn set_one(&self, slot: u32, state: &Slot, change: Change) -> io::Result<()> {
        let request = region2(slot, state, change);
        let result = if self.capabilities().user_memory2 {
            // SAFETY: KVM requires that the memory stays mapped while the slot uses it: the caller
            // keeps the region in the VM's slots, and each is deleted before its region is dropped, or else
            // the region is never dropped (Inner::drop). The
            // guest may change the memory at any time: it is shared memory, to which Region returns no
            // references.
            unsafe { self.fd().set_user_memory_region2(request) }
        } else {
            let request = kvm_userspace_memory_region {
                slot: request.slot,
                flags: request.flags,
                guest_phys_addr: request.guest_phys_addr,
                memory_size: request.memory_size,
                userspace_addr: request.userspace_addr,
            };
            // SAFETY: as above.
            unsafe { self.fd().set_user_memory_region(request) }
        };
        result.map_err(os_error)
    }

    fn set_list(&self, changes: &[SlotChange]) -> Result<(), ListRefusal> {
        let mut list = RegionList::new(changes);
        // SAFETY: the kernel reads the header and as many elements as the header counts, all of which
        // are in the buffer, and writes only to the header. The requirement on the memory is as in
        // set_one(). Gated by KVM_CAP_SET_USER_MEMORY_REGION_LIST, which the caller has checked.
        let status = unsafe {
            ioctl_with_mut_ptr(
                self.fd(),
                abi::KVM_SET_USER_MEMORY_REGION_LIST.into(),
                list.as_mut_ptr(),
            )
        };
        if status == 0 {
            return Ok(());
        }
        let source = io::Error::last_os_error();
        let element = list.failed().filter(|index| *index < changes.len());
        Err(ListRefusal { element, source })
    }
}

fn region2(slot: u32, state: &Slot, change: Change) -> kvm_userspace_memory_region2 {
    kvm_userspace_memory_region2 {
        slot,
        flags: match change {
            Change::Delete => 0,
            Change::Create | Change::Flags => state.flags.bits(),
        },
        guest_phys_addr: state.range.start().0,
        memory_size: match change {
            Change::Delete => 0,
            Change::Create | Change::Flags => state.range.bytes(),
        },
        userspace_addr: state.userspace_address(),
        ..kvm_userspace_memory_region2::default()
    }
}

/// A `struct kvm_userspace_memory_region_list` and its elements, as 64-bit words, which gives the
/// buffer the structure's alignment.
struct RegionList(Vec<u64>);

const HEADER_WORDS: usize = size_of::<abi::kvm_userspace_memory_region_list>() / 8;
const ELEMENT_WORDS: usize = size_of::<abi::kvm_userspace_memory_region2>() / 8;
/// `nr` and `flags` are the first word; this one has `failed` in its lower half.
const FAILED_WORD: usize = offset_of!(abi::kvm_userspace_memory_region_list, failed) / 8;

const _: () = assert!(
    offset_of!(abi::kvm_userspace_memory_region_list, nr) == 0
        && offset_of!(abi::kvm_userspace_memory_region_list, flags) == 4
        && offset_of!(abi::kvm_userspace_memory_region_list, failed) % 8 == 0
        && offset_of!(abi::kvm_userspace_memory_region2, slot) == 0
        && offset_of!(abi::kvm_userspace_memory_region2, flags) == 4
        && offset_of!(abi::kvm_userspace_memory_region2, guest_phys_addr) == 8
        && offset_of!(abi::kvm_userspace_memory_region2, memory_size) == 16
        && offset_of!(abi::kvm_userspace_memory_region2, userspace_addr) == 24,
    "the words below are these fields"
);

impl RegionList {
    fn new(changes: &[SlotChange]) -> Self {
        let mut words = vec![0; HEADER_WORDS];
        let count = u32::try_from(changes.len()).unwrap_or(u32::MAX);
        words[0] = pair(count, 0);
        for SlotChange {
            slot,
            change,
            state,
        } in changes
        {
            let region = region2(*slot, state, *change);
            let end = words.len() + ELEMENT_WORDS;
            words.extend([
                pair(region.slot, region.flags),
                region.guest_phys_addr,
                region.memory_size,
                region.userspace_addr,
            ]);
            words.resize(end, 0);
        }
        Self(words)
    }

    fn as_mut_ptr(&mut self) -> *mut abi::kvm_userspace_memory_region_list {
        self.0.as_mut_ptr().cast()
    }

    /// The element that the kernel refused; None if it reports none (-1).
    fn failed(&self) -> Option<usize> {
        let [a, b, c, d, ..] = self.0[FAILED_WORD].to_ne_bytes();
        usize::try_from(i32::from_ne_bytes([a, b, c, d])).ok()
    }
}

/// Combines two 32-bit fields that are adjacent in memory into one word.
fn pair(first: u32, second: u32) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (first.to_ne_bytes(), second.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pagetide_memory::{Backing, GuestAddress, GuestRange, Region};

    use super::*;
    use crate::slot::SlotFlags;

    #[test]
    fn a_list_has_the_kernels_layout() {
        let region = Region::new(GuestAddress(0x10_0000), 0x4000, Backing::Shmem).unwrap();
        let state = Slot {
            offset: 0x1000,
            range: GuestRange::new(GuestAddress(0x20_0000), 0x2000).unwrap(),
            flags: SlotFlags {
                log_dirty: true,
                ..SlotFlags::default()
            },
            region: Arc::new(region),
        };
        let changes = [(7, Change::Delete), (9, Change::Create)].map(|(slot, change)| SlotChange {
            slot,
            change,
            state: state.clone(),
        });
        let mut list = RegionList::new(&changes);
        assert_eq!(list.0.len() * 8, 48 + 2 * 160);
        assert_eq!(list.0[..6], [2, 0, 0, 0, 0, 0]);
        let hva = state.region.guest().start().as_u64() + 0x1000;
        assert_eq!(list.0[6..10], [7, 0x20_0000, 0, hva]);
        assert_eq!(list.0[26..30], [9 | 1 << 32, 0x20_0000, 0x2000, hva]);
        assert!(list.0[10..26].iter().chain(&list.0[30..]).all(|w| *w == 0));
        assert_eq!(list.failed(), Some(0));
        // SAFETY: the buffer starts with a header, whose fields are plain data.
        unsafe { (*list.as_mut_ptr()).failed = -1 };
        assert_eq!(list.failed(), None);
    }
}
