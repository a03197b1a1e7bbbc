//! Firecracker's message (`pagetide_serve::handshake`).

use pagetide_memory::PageSize;
use pagetide_serve::handshake::{
    MAX_MEMORY_BYTES, MAX_MESSAGE_BYTES, MAX_REGIONS, Parsed, VmRegion, parse,
};

use crate::memory::bounded;

/// Memory that a message of this length may take: an object takes more as fields than as text of the
/// shortest form, and errors have text.
fn limit(bytes: usize) -> usize {
    16 * bytes + 4096
}

pub(crate) fn run(input: &[u8]) -> bool {
    let parsed = bounded(limit(input.len()), || parse(input));
    let Ok(Parsed::Complete(regions, taken)) = parsed else {
        return false;
    };
    assert!(taken <= input.len().min(MAX_MESSAGE_BYTES));
    // Whatever arrives first, the message is the same: no part of it is refused or understood as another.
    let in_number = |byte: u8| matches!(byte, b'-' | b'+' | b'.' | b'e' | b'E');
    let step = input.len() / 16 + 1;
    for end in 0..input.len() {
        if end % step > 0 && !input.get(end - 1).copied().is_some_and(in_number) {
            continue;
        }
        match parse(&input[..end]) {
            Ok(Parsed::Complete(same, also)) => assert_eq!((&same, also), (&regions, taken)),
            Ok(Parsed::Incomplete) => assert!(end < taken, "{end} of {taken} bytes"),
            Err(error) => panic!("the first {end} bytes are refused: {error}"),
        }
    }
    check_regions(&regions);
    // What was understood is understood again.
    let text = text(&regions);
    match parse(text.as_bytes()) {
        Ok(Parsed::Complete(again, all)) => {
            assert_eq!(again, regions);
            assert_eq!(all, text.len());
        }
        other => panic!("{text}: {other:?}"),
    }
    true
}

/// The bounds of `docs/design/serve.md`.
pub(crate) fn check_regions(regions: &[VmRegion]) {
    assert!(!regions.is_empty() && regions.len() <= MAX_REGIONS);
    let mut total = 0_u64;
    for region in regions {
        let page_size = region.page_size;
        assert!(region.bytes() > 0 && page_size.divides(region.bytes()));
        assert!(page_size.divides(region.range.start().as_u64()));
        assert!(PageSize::Size4K.divides(region.offset));
        let end = region.offset.checked_add(region.bytes());
        assert!(end.is_some_and(|end| i64::try_from(end).is_ok()));
        total = total.checked_add(region.bytes()).expect("a small sum");
    }
    assert!(total <= MAX_MEMORY_BYTES);
    for (index, a) in regions.iter().enumerate() {
        for b in regions.get(index + 1..).unwrap_or_default() {
            assert!(!overlap(a.offset, a.bytes(), b.offset, b.bytes()));
            let (a_start, b_start) = (a.range.start().as_u64(), b.range.start().as_u64());
            assert!(!overlap(a_start, a.bytes(), b_start, b.bytes()));
        }
    }
}

fn overlap(a: u64, a_bytes: u64, b: u64, b_bytes: u64) -> bool {
    a < b.saturating_add(b_bytes) && b < a.saturating_add(a_bytes)
}

/// Regions as Firecracker writes them.
fn text(regions: &[VmRegion]) -> String {
    let objects: Vec<String> = regions
        .iter()
        .map(|region| {
            let (start, bytes, page) = (
                region.range.start().as_u64(),
                region.bytes(),
                region.page_size.bytes(),
            );
            format!(
                r#"{{"base_host_virt_addr":{start},"size":{bytes},"offset":{},"page_size":{page},"page_size_kib":{page}}}"#,
                region.offset,
            )
        })
        .collect();
    format!("[{}]", objects.join(","))
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    [
        // As a Firecracker 1.17-dev sent it.
        r#"[{"base_host_virt_addr":140546496528384,"size":134217728,"offset":0,"page_size":4096,"page_size_kib":4096}]"#,
        // Older ones.
        r#"[{"base_host_virt_addr":8192,"size":8192,"offset":4096}]"#,
        r#"[{"base_host_virt_addr":8192,"size":8192,"offset":4096,"page_size_kib":4}]"#,
        // Huge pages, and a field of the future.
        r#" [ {"base_host_virt_addr":2097152,"size":2097152,"offset":4096,"page_size":2097152,"new":[1.5e3,{"a":null,"\u00e4":"\ud83d\ude00"},true]} ] "#,
        r#"[{"base_host_virt_addr":4294967296,"size":65536,"offset":0,"page_size":4096},{"base_host_virt_addr":4096,"size":4096,"offset":65536,"page_size":4096}]"#,
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}
