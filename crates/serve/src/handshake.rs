//! Firecracker's handler protocol: the one message that a VMM sends.
//!
//! A JSON array with one object for each region, without length or end mark, and one descriptor beside it
//! (SCM_RIGHTS): the userfaultfd. Source: Firecracker's documentation, "Handling page faults on snapshot
//! resume", and its `src/vmm/src/persist.rs`. This module parses; it performs no I/O.

use pagetide_memory::{HostAddress, HostRange, PageSize};
use serde::Deserialize;
use thiserror::Error;

/// The longest message. A region takes about 120 bytes.
pub const MAX_MESSAGE_BYTES: usize = 4 << 20;

/// The most regions of one VM.
pub const MAX_REGIONS: usize = 32_768;

/// The largest memory of one VM: 4 TiB.
pub const MAX_MEMORY_BYTES: u64 = 4 << 40;

/// Why a VMM's message was refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum HandshakeError {
    /// The message is no JSON array of regions.
    #[error("the message is no JSON array of memory regions: {reason}")]
    NotRegions {
        /// The parser's words.
        reason: String,
    },
    /// The message is longer than any that Firecracker sends.
    #[error("the message has more than {limit} bytes")]
    TooLong {
        /// The limit.
        limit: usize,
    },
    /// An empty array.
    #[error("the message has no memory region")]
    NoRegions,
    /// More regions than the limit.
    #[error("the message has {count} memory regions, and {limit} is the limit")]
    TooManyRegions {
        /// The number of regions.
        count: usize,
        /// The limit.
        limit: usize,
    },
    /// The regions together are larger than the limit.
    #[error("the memory regions have more than {limit} bytes together")]
    TooLarge {
        /// The limit.
        limit: u64,
    },
    /// A page size that Linux does not have.
    #[error("region {index}: no page has {bytes} bytes: 4096, 2097152 or 1073741824 is meant")]
    PageSize {
        /// The number of the region, from 0 on.
        index: usize,
        /// The size in the message.
        bytes: u64,
    },
    /// An address, a size or an offset that is not whole pages.
    #[error("region {index}: {field} {value:#x} is not a multiple of the page size {page_size}")]
    NotPages {
        /// The number of the region.
        index: usize,
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The region's page size.
        page_size: PageSize,
    },
    /// A size of 0.
    #[error("region {index} is empty")]
    Empty {
        /// The number of the region.
        index: usize,
    },
    /// The region passes the end of the address space, or of the largest file.
    #[error("region {index}: {field} {value:#x} plus the size {bytes:#x} is too large")]
    Wraps {
        /// The number of the region.
        index: usize,
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The region's size.
        bytes: u64,
    },
    /// Two regions have addresses, or bytes of the image, in common.
    #[error("regions {first} and {second} overlap in {space}")]
    Overlap {
        /// The number of one region.
        first: usize,
        /// The number of the other.
        second: usize,
        /// Addresses, or the image.
        space: &'static str,
    },
}

/// A region of a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmRegion {
    /// Its addresses in the VMM.
    pub range: HostRange,
    /// Its page size there.
    pub page_size: PageSize,
    /// The offset of its content in the image, in bytes.
    pub offset: u64,
}

impl VmRegion {
    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.range.bytes() as u64
    }
}

/// A region in the message. Unknown fields are ignored: newer Firecrackers may send more.
#[derive(Deserialize)]
struct Described {
    base_host_virt_addr: u64,
    size: u64,
    #[serde(default)]
    offset: u64,
    page_size: Option<u64>,
    /// In bytes, whatever its name says, and deprecated.
    page_size_kib: Option<u64>,
}

/// The state of a message of which a part has arrived.
#[derive(Debug)]
pub enum Parsed {
    /// More is to come.
    Incomplete,
    /// The regions, and the number of bytes that they took.
    Complete(Vec<VmRegion>, usize),
}

/// Parses the bytes that have arrived so far.
///
/// # Errors
/// [`HandshakeError`] if no further byte can make them a valid message.
pub fn parse(message: &[u8]) -> Result<Parsed, HandshakeError> {
    let mut values = serde_json::Deserializer::from_slice(message).into_iter::<Vec<Described>>();
    let described = match values.next() {
        None => return incomplete(message),
        Some(Ok(described)) => described,
        Some(Err(error)) if error.is_eof() || is_cut_number(message) => {
            return incomplete(message);
        }
        Some(Err(error)) => {
            return Err(HandshakeError::NotRegions {
                reason: error.to_string(),
            });
        }
    };
    let taken = values.byte_offset();
    if taken > MAX_MESSAGE_BYTES {
        return Err(HandshakeError::TooLong {
            limit: MAX_MESSAGE_BYTES,
        });
    }
    if described.is_empty() {
        return Err(HandshakeError::NoRegions);
    }
    if described.len() > MAX_REGIONS {
        return Err(HandshakeError::TooManyRegions {
            count: described.len(),
            limit: MAX_REGIONS,
        });
    }
    let mut regions = Vec::with_capacity(described.len());
    for (index, described) in described.iter().enumerate() {
        regions.push(region(index, described)?);
    }
    check_together(&regions)?;
    Ok(Parsed::Complete(regions, taken))
}

/// A region of another protocol, checked as one of Firecracker's. `index` is its number in the message.
pub(crate) fn checked_region(
    index: usize,
    address: u64,
    bytes: u64,
    offset: u64,
    page_size: PageSize,
) -> Result<VmRegion, HandshakeError> {
    let described = Described {
        base_host_virt_addr: address,
        size: bytes,
        offset,
        page_size: Some(page_size.bytes()),
        page_size_kib: None,
    };
    region(index, &described)
}

/// Checks the regions of one VM against each other.
pub(crate) fn check_together(regions: &[VmRegion]) -> Result<(), HandshakeError> {
    check_total(regions)?;
    let by_address = |region: &VmRegion| (region.range.start().as_u64(), region.bytes());
    check_overlap(regions, "the address space", by_address)?;
    check_overlap(regions, "the image", |region| {
        (region.offset, region.bytes())
    })
}

/// Whether the message ends inside a number of a field that this program does not know, where a digit is
/// missing: the parser calls such a number invalid, and not unfinished.
fn is_cut_number(message: &[u8]) -> bool {
    let is_open = matches!(message.last(), Some(b'-' | b'+' | b'.' | b'e' | b'E'));
    is_open && {
        let longer = [message, b"0"].concat();
        let parsed = serde_json::from_slice::<Vec<Described>>(&longer);
        parsed.is_err_and(|error| error.is_eof())
    }
}

fn incomplete(message: &[u8]) -> Result<Parsed, HandshakeError> {
    if message.len() >= MAX_MESSAGE_BYTES {
        return Err(HandshakeError::TooLong {
            limit: MAX_MESSAGE_BYTES,
        });
    }
    Ok(Parsed::Incomplete)
}

fn region(index: usize, described: &Described) -> Result<VmRegion, HandshakeError> {
    let page_size = page_size(index, described)?;
    let fields = [
        ("base_host_virt_addr", described.base_host_virt_addr),
        ("size", described.size),
        ("offset", described.offset),
    ];
    // A file need not be aligned to huge pages, but it has whole small pages.
    for (field, value) in fields {
        let unit = match field {
            "offset" => PageSize::Size4K,
            _ => page_size,
        };
        if !unit.divides(value) {
            return Err(HandshakeError::NotPages {
                index,
                field,
                value,
                page_size: unit,
            });
        }
    }
    let bytes = described.size;
    if bytes == 0 {
        return Err(HandshakeError::Empty { index });
    }
    let wraps = |field, value| HandshakeError::Wraps {
        index,
        field,
        value,
        bytes,
    };
    let offset_end = described.offset.checked_add(bytes);
    if offset_end.is_none_or(|end| i64::try_from(end).is_err()) {
        return Err(wraps("offset", described.offset));
    }
    let base = described.base_host_virt_addr;
    let range = usize::try_from(base)
        .ok()
        .zip(usize::try_from(bytes).ok())
        .and_then(|(start, bytes)| HostRange::new(HostAddress(start), bytes).ok())
        .ok_or_else(|| wraps("base_host_virt_addr", base))?;
    Ok(VmRegion {
        range,
        page_size,
        offset: described.offset,
    })
}

/// The page size of a region. Firecrackers before 1.7 send none and had pages of 4 KiB only; some later
/// ones send `page_size_kib` alone.
fn page_size(index: usize, described: &Described) -> Result<PageSize, HandshakeError> {
    let bytes = match (described.page_size, described.page_size_kib) {
        (Some(bytes), _) => bytes,
        (None, None) => PageSize::Size4K.bytes(),
        // In KiB, if it cannot be in bytes.
        (None, Some(kib)) if kib < PageSize::Size4K.bytes() => kib.saturating_mul(1024),
        (None, Some(bytes)) => bytes,
    };
    let sizes = [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G];
    let found = sizes.into_iter().find(|size| size.bytes() == bytes);
    found.ok_or(HandshakeError::PageSize { index, bytes })
}

fn check_total(regions: &[VmRegion]) -> Result<(), HandshakeError> {
    let total = regions
        .iter()
        .try_fold(0_u64, |total, region| total.checked_add(region.bytes()));
    match total {
        Some(total) if total <= MAX_MEMORY_BYTES => Ok(()),
        _ => Err(HandshakeError::TooLarge {
            limit: MAX_MEMORY_BYTES,
        }),
    }
}

/// Checks that no two of the regions have a part of a space in common.
fn check_overlap(
    regions: &[VmRegion],
    space: &'static str,
    place: impl Fn(&VmRegion) -> (u64, u64),
) -> Result<(), HandshakeError> {
    let mut order: Vec<usize> = (0..regions.len()).collect();
    let start_of = |index: &usize| regions.get(*index).map_or(0, |region| place(region).0);
    order.sort_by_key(start_of);
    let mut before: Option<(usize, u64)> = None;
    for index in order {
        let Some((start, bytes)) = regions.get(index).map(&place) else {
            continue;
        };
        if let Some((other, end)) = before
            && start < end
        {
            let (first, second) = (other.min(index), other.max(index));
            return Err(HandshakeError::Overlap {
                first,
                second,
                space,
            });
        }
        before = Some((index, start.saturating_add(bytes)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete(message: &str) -> Vec<VmRegion> {
        match parse(message.as_bytes()) {
            Ok(Parsed::Complete(regions, taken)) => {
                assert_eq!(taken, message.trim_end().len());
                regions
            }
            other => panic!("{message}: {other:?}"),
        }
    }

    fn refused(message: &str) -> HandshakeError {
        match parse(message.as_bytes()) {
            Err(error) => error,
            other => panic!("{message}: {other:?}"),
        }
    }

    /// As a Firecracker 1.17-dev sent it.
    const RECORDED: &str = r#"[{"base_host_virt_addr":140546496528384,"size":134217728,"offset":0,"page_size":4096,"page_size_kib":4096}]"#;

    #[test]
    fn the_recorded_message_of_a_firecracker_is_understood() {
        let [region] = complete(RECORDED)[..] else {
            panic!("one region");
        };
        assert_eq!(region.range.start().as_u64(), 140_546_496_528_384);
        assert_eq!(region.bytes(), 128 << 20);
        assert_eq!((region.page_size, region.offset), (PageSize::Size4K, 0));
    }

    #[test]
    fn every_part_of_a_message_is_incomplete() {
        for end in 0..RECORDED.len() {
            let part = &RECORDED.as_bytes()[..end];
            assert!(matches!(parse(part), Ok(Parsed::Incomplete)), "{end}");
        }
    }

    /// Also inside a field that this program does not know.
    #[test]
    fn every_part_of_a_message_of_the_future_is_incomplete() {
        let message = concat!(
            r#"[{"base_host_virt_addr":4096,"size":4096,"new":[-1,-2.5,3E+7,4e-1,0.0,"#,
            r#""a\"\u00e4\ud83d\ude00",true,false,null,{"x":{}}]}]"#
        );
        for end in 0..message.len() {
            let part = &message.as_bytes()[..end];
            let found = parse(part);
            assert!(matches!(found, Ok(Parsed::Incomplete)), "{end}: {found:?}");
        }
        assert_eq!(complete(message).len(), 1);
        let _ = refused(r#"[{"base_host_virt_addr":4096,"size":4096,"new":-x}]"#);
    }

    #[test]
    fn older_messages_have_small_pages() {
        let base = r#""base_host_virt_addr":8192,"size":8192,"offset":4096"#;
        for fields in [
            String::new(),
            r#","page_size_kib":4096"#.into(),
            r#","page_size_kib":4"#.into(),
        ] {
            let [region] = complete(&format!("[{{{base}{fields}}}]"))[..] else {
                panic!("one region");
            };
            assert_eq!((region.page_size, region.offset), (PageSize::Size4K, 4096));
        }
        let huge = r#"[{"base_host_virt_addr":2097152,"size":2097152,"offset":4096,"page_size":2097152,"new":[1]}]"#;
        assert_eq!(complete(huge)[0].page_size, PageSize::Size2M);
    }

    fn one(base: u64, size: u64, offset: u64, page: u64) -> String {
        format!(
            r#"{{"base_host_virt_addr":{base},"size":{size},"offset":{offset},"page_size":{page}}}"#
        )
    }

    #[test]
    fn regions_that_no_memory_can_have_are_refused() {
        let region =
            |base, size, offset, page| refused(&format!("[{}]", one(base, size, offset, page)));
        use HandshakeError as E;
        assert!(matches!(region(4096, 0, 0, 4096), E::Empty { index: 0 }));
        assert!(matches!(
            region(4097, 4096, 0, 4096),
            E::NotPages {
                field: "base_host_virt_addr",
                ..
            }
        ));
        assert!(matches!(
            region(4096, 4095, 0, 4096),
            E::NotPages { field: "size", .. }
        ));
        assert!(matches!(
            region(4096, 4096, 1, 4096),
            E::NotPages {
                field: "offset",
                ..
            }
        ));
        assert!(matches!(
            region(4096, 4096, 0, 8192),
            E::PageSize { bytes: 8192, .. }
        ));
        assert!(matches!(
            region(4096, 4096, 0, 0),
            E::PageSize { bytes: 0, .. }
        ));
        assert!(matches!(
            region(0u64.wrapping_sub(4096), 8192, 0, 4096),
            E::Wraps { .. }
        ));
        assert!(matches!(
            region(4096, 8192, (1 << 63) - 4096, 4096),
            E::Wraps {
                field: "offset",
                ..
            }
        ));
        assert!(matches!(region(4096, 8 << 40, 0, 4096), E::TooLarge { .. }));
    }

    #[test]
    fn overlapping_regions_are_refused() {
        let message = format!(
            "[{},{}]",
            one(1 << 20, 8192, 0, 4096),
            one((1 << 20) + 4096, 4096, 8192, 4096)
        );
        let error = refused(&message);
        assert!(matches!(
            error,
            HandshakeError::Overlap {
                first: 0,
                second: 1,
                space: "the address space"
            }
        ));
        let message = format!(
            "[{},{}]",
            one(1 << 20, 8192, 0, 4096),
            one(2 << 20, 4096, 4096, 4096)
        );
        assert!(matches!(
            refused(&message),
            HandshakeError::Overlap {
                space: "the image",
                ..
            }
        ));
    }

    #[test]
    fn what_is_no_array_of_regions_is_refused() {
        for message in [
            "{}",
            "[1]",
            "[{}]",
            "x",
            "[]",
            "null",
            "[{\"size\":-1}]",
            "[1.x\n\ne",
            "\u{0}",
        ] {
            let _ = refused(message);
        }
        let deep = "[".repeat(100_000);
        let _ = refused(&deep);
        let endless = " ".repeat(MAX_MESSAGE_BYTES);
        assert!(matches!(refused(&endless), HandshakeError::TooLong { .. }));
        let padded = format!("[{}{endless}]", one(4096, 4096, 0, 4096));
        assert!(matches!(refused(&padded), HandshakeError::TooLong { .. }));
        let many = format!(
            "[{}]",
            vec![one(4096, 4096, 0, 4096); MAX_REGIONS + 1].join(",")
        );
        assert!(matches!(
            refused(&many),
            HandshakeError::TooManyRegions { .. }
        ));
    }
}
