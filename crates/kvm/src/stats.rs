//! KVM's statistics of a VM or a vCPU, in the kernel's binary form (KVM_GET_STATS_FD).
//!
//! The file of the descriptor has a header, descriptors with the name and offset of each value, and the
//! values. Source: `Documentation/virt/kvm/api.rst`, section 4.133.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

use kvm_bindings::KVMIO;
use vmm_sys_util::ioctl::ioctl;
use vmm_sys_util::ioctl_io_nr;

use crate::vcpu::Vcpu;
use crate::vm::Vm;

ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);

/// Header: flags, size of names, number of descriptors, and the offsets of the file's name, the
/// descriptors and the values; 32 bits each.
const HEADER_BYTES: usize = 24;
/// A descriptor without its name: flags (32 bits), exponent, number of values (16 bits each), offset
/// of the first value, size of buckets (32 bits each).
const DESCRIPTOR_BYTES: usize = 16;
/// Limits beyond every kernel's values, because the file must not decide how much memory this process
/// allocates.
const MOST_NAME_BYTES: usize = 4096;
const MOST_DESCRIPTORS: usize = 4096;

/// Why statistics are unavailable.
#[derive(Debug, thiserror::Error)]
pub enum StatsError {
    /// KVM_GET_STATS_FD failed: KVM_CAP_BINARY_STATS_FD (Linux 5.14) is missing, or the process has too
    /// many descriptors.
    #[error("KVM_GET_STATS_FD failed")]
    Open(#[source] io::Error),
    /// The file could not be read.
    #[error("cannot read KVM's statistics")]
    Read(#[source] io::Error),
    /// The file does not follow the kernel's documentation.
    #[error("KVM's statistics have an unknown format: {what}")]
    Form {
        /// The deviation.
        what: &'static str,
    },
}

/// The statistics of a VM or a vCPU. They remain readable as long as this is open.
#[derive(Debug)]
pub struct Stats {
    file: File,
    /// Offsets in the file of values that are a single number.
    offsets: BTreeMap<String, u64>,
}

impl Stats {
    /// Opens a VM's statistics; `pages_4k`, `pages_2m` and `pages_1g` count stage-2 mappings.
    ///
    /// # Errors
    /// See [`StatsError`].
    pub fn of_vm(vm: &Vm) -> Result<Self, StatsError> {
        Self::open(vm.fd())
    }

    /// Opens a vCPU's statistics; `pf_taken` counts stage-2 faults, `pf_fixed` those that mapped a
    /// page.
    ///
    /// # Errors
    /// See [`StatsError`].
    pub fn of_vcpu(vcpu: &Vcpu) -> Result<Self, StatsError> {
        Self::open(vcpu.fd())
    }

    fn open(of: &impl AsRawFd) -> Result<Self, StatsError> {
        // SAFETY: a VM's or vCPU's descriptor; the ioctl takes no argument and touches no memory.
        let fd = unsafe { ioctl(of, KVM_GET_STATS_FD()) };
        if fd < 0 {
            return Err(StatsError::Open(io::Error::last_os_error()));
        }
        // SAFETY: the kernel has just created this descriptor, and it has no other owner.
        let file = unsafe { File::from_raw_fd(fd) };
        let offsets = offsets(&file)?;
        Ok(Self { file, offsets })
    }

    /// The names that [`Stats::value`] accepts.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.offsets.keys().map(String::as_str)
    }

    /// The current value with that name; None if this kernel lacks it.
    ///
    /// # Errors
    /// [`StatsError::Read`].
    pub fn value(&self, name: &str) -> Result<Option<u64>, StatsError> {
        let Some(offset) = self.offsets.get(name) else {
            return Ok(None);
        };
        let mut word = [0; 8];
        self.file
            .read_exact_at(&mut word, *offset)
            .map_err(StatsError::Read)?;
        Ok(Some(u64::from_ne_bytes(word)))
    }
}

/// The offsets of the single values of a statistics file.
fn offsets(file: &File) -> Result<BTreeMap<String, u64>, StatsError> {
    let mut header = [0; HEADER_BYTES];
    file.read_exact_at(&mut header, 0)
        .map_err(StatsError::Read)?;
    let field = |index: usize| word(&header, index * 4);
    let size = |index| usize::try_from(field(index)).unwrap_or(usize::MAX);
    let (name_bytes, count) = (size(1), size(2));
    if name_bytes > MOST_NAME_BYTES {
        let what = "names are too long";
        return Err(StatsError::Form { what });
    }
    if count > MOST_DESCRIPTORS {
        let what = "there are too many";
        return Err(StatsError::Form { what });
    }
    let (descriptors_at, values_at) = (u64::from(field(4)), u64::from(field(5)));
    let each = DESCRIPTOR_BYTES + name_bytes;
    let mut descriptors = vec![0; each * count];
    file.read_exact_at(&mut descriptors, descriptors_at)
        .map_err(StatsError::Read)?;
    let single = descriptors.chunks_exact(each.max(1)).filter_map(|bytes| {
        let values = u16::from_ne_bytes([bytes[6], bytes[7]]);
        let name = bytes[DESCRIPTOR_BYTES..].split(|byte| *byte == 0).next()?;
        let name = String::from_utf8(name.to_vec()).ok()?;
        (values == 1).then(|| (name, values_at + u64::from(word(bytes, 8))))
    });
    Ok(single.collect())
}

/// The 32-bit word at byte `at`.
fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// A statistics file with names of 8 bytes.
    fn file(descriptors: &[(&str, u16, u32)], name_bytes: u32, count: u32) -> File {
        let fd = rustix::fs::memfd_create("stats", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut file = File::from(fd);
        let values_at = 24 + 24 * u32::try_from(descriptors.len()).unwrap();
        let mut bytes: Vec<u8> = [0, name_bytes, count, 0, 24, values_at]
            .iter()
            .flat_map(|word: &u32| word.to_ne_bytes())
            .collect();
        for (name, values, offset) in descriptors {
            bytes.extend(0_u32.to_ne_bytes());
            bytes.extend(0_u16.to_ne_bytes());
            bytes.extend(values.to_ne_bytes());
            bytes.extend(offset.to_ne_bytes());
            bytes.extend(0_u32.to_ne_bytes());
            let mut padded = [0; 8];
            padded[..name.len()].copy_from_slice(name.as_bytes());
            bytes.extend(padded);
        }
        for value in [11_u64, 22, 33] {
            bytes.extend(value.to_ne_bytes());
        }
        file.write_all(&bytes).unwrap();
        file
    }

    #[test]
    fn single_values_are_found_by_name() {
        let file = file(&[("one", 1, 0), ("many", 2, 8), ("eightchr", 1, 16)], 8, 3);
        let offsets = offsets(&file).unwrap();
        let stats = Stats { file, offsets };
        assert_eq!(stats.names().collect::<Vec<_>>(), ["eightchr", "one"]);
        assert_eq!(stats.value("one").unwrap(), Some(11));
        assert_eq!(stats.value("eightchr").unwrap(), Some(33));
        assert_eq!(stats.value("many").unwrap(), None);
    }

    #[test]
    fn invalid_files_are_refused() {
        let bad = |name_bytes, count| offsets(&file(&[("one", 1, 0)], name_bytes, count));
        assert!(matches!(bad(5000, 1), Err(StatsError::Form { .. })));
        assert!(matches!(bad(8, 5000), Err(StatsError::Form { .. })));
        assert!(matches!(bad(8, 100), Err(StatsError::Read(_))));
        assert!(bad(0, 0).unwrap().is_empty());
    }
}
