//! The state file of a VM, which a snapshot has beside its memory.

use std::path::Path;

use pagetide_memory::Urgency;

use crate::blob::{Blob, BlobError};
use crate::file::{FileBlob, FileIdentity};
use crate::foreign::is_state_of_firecracker;

/// The first bytes that are looked at: magic number, version, and the size of memory.
const HEAD_BYTES: u64 = 64;

/// A state file, as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateFile {
    /// Which file it is.
    pub identity: FileIdentity,
    /// The memory of its VM at least, if its format says that.
    pub memory_bytes: Option<u64>,
}

impl StateFile {
    /// Looks at the file at `path`.
    ///
    /// # Errors
    /// [`BlobError`].
    pub fn at(path: &Path) -> Result<Self, BlobError> {
        let file = FileBlob::open(path)?;
        let bytes = file.bytes().min(HEAD_BYTES);
        let mut head = vec![0; usize::try_from(bytes).unwrap_or_default()];
        file.read_at(0, &mut head, Urgency::Urgent)?;
        Ok(Self {
            identity: file.identity(),
            memory_bytes: memory_bytes(&head),
        })
    }
}

/// What a state file of Firecracker that is encoded with fixed lengths says of its VM's memory: after the magic number comes
/// the version, a text with its length before it, and then the memory in MiB. `None` for any other file.
fn memory_bytes(head: &[u8]) -> Option<u64> {
    let number = |at: usize| {
        let bytes = head.get(at..at.checked_add(8)?)?;
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    };
    if !is_state_of_firecracker(head.get(..8)?) {
        return None;
    }
    let length = usize::try_from(number(8)?).ok()?;
    let end = length.checked_add(16)?;
    let version = head.get(16..end)?;
    let is_version = |byte: &u8| byte.is_ascii_digit() || *byte == b'.';
    if version.is_empty() || !version.iter().all(is_version) {
        return None;
    }
    number(end)?.checked_mul(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(version: &[u8], mib: u64) -> Vec<u8> {
        let magic = 0x0710_1984_8664_0000_u64.to_le_bytes();
        let length = (version.len() as u64).to_le_bytes();
        [&magic[..], &length, version, &mib.to_le_bytes(), &[1; 20]].concat()
    }

    #[test]
    fn a_state_file_says_how_much_memory_its_vm_has() {
        assert_eq!(memory_bytes(&state(b"4.0.0", 128)), Some(128 << 20));
        // Another encoding, numbers that overflow, and what is no state file.
        let long = state(b"4.0.0", u64::MAX);
        let mut lengths = state(b"4.0.0", 1);
        lengths[8..16].fill(0xff);
        let mut other = state(b"4.0.0", 1);
        other[4] = 0;
        for head in [
            long,
            lengths,
            other,
            state(b"", 1),
            state(b"4.0.0-x", 1),
            vec![],
        ] {
            assert_eq!(memory_bytes(&head), None, "{head:x?}");
        }
        assert_eq!(memory_bytes(&state(b"4.0.0", 128)[..27]), None);
    }
}
