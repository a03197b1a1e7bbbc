//! What a userfaultfd says of its process and of the kernel, without a change of any memory.

use rustix::io::Errno;

use super::{InstallError, UserRange, Userfaultfd, Wake};

/// Above what any kernel lets a process map lowest (`vm.mmap_min_addr`), and below where programs are mapped.
const LOW: u64 = 1 << 20;

impl Userfaultfd {
    /// Whether the process has exited, or executes another program. `memory` is memory of it that was registered.
    pub fn is_gone(&self, memory: UserRange) -> bool {
        let ask = |span| self.zero_pages(span, Wake::DontWake);
        no_mapping(memory).map(ask) == Some(Err(InstallError::Gone))
    }

    /// Whether the kernel has `UFFDIO_POISON` (Linux 6.6), if this is the userfaultfd of another process, so that
    /// [`Userfaultfd::available`] says nothing of it. `memory` is memory of it that was registered.
    pub fn can_poison(&self, memory: UserRange) -> bool {
        let ask = |span| self.poison_pages(span, Wake::DontWake);
        // An older kernel does not have the call.
        no_mapping(memory).map(ask) != Some(Err(InstallError::Io(Errno::INVAL)))
    }
}

/// Addresses from where nothing is mapped up to the end of `memory`. No single mapping has them all, so that a call
/// with this range fails before it changes anything, as late as in the look-up of the mapping (`mfill_atomic()`,
/// mm/userfaultfd.c).
fn no_mapping(memory: UserRange) -> Option<UserRange> {
    let end = memory.start.checked_add(memory.bytes)?;
    let bytes = end.checked_sub(LOW)?;
    (memory.start > LOW && bytes > memory.bytes).then_some(UserRange { start: LOW, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_begins_where_nothing_is_mapped_and_ends_with_the_memory() {
        let range = |start, bytes| UserRange { start, bytes };
        let memory = range(0x7000_0000, 0x2000);
        assert_eq!(no_mapping(memory), Some(range(LOW, 0x7000_2000 - LOW)));
        for none in [
            range(0, 4096),
            range(LOW, 4096),
            range(LOW - 4096, 1 << 30),
            range(u64::MAX - 4095, 8192),
        ] {
            assert_eq!(no_mapping(none), None, "{none:?}");
        }
    }
}
