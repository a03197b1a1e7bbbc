//! Lossless conversions between `u64` (the kernel's and the guest's numbers) and `usize` (the
//! host's addresses). They are the same width on every host that this project supports.

const _: () = assert!(
    usize::BITS == u64::BITS,
    "Pagetide needs a 64-bit host: guest sizes are kept as u64 and mapped as usize"
);

#[allow(
    clippy::cast_possible_truncation,
    reason = "usize is 64 bits, asserted above"
)]
pub(crate) const fn to_usize(value: u64) -> usize {
    value as usize
}

pub(crate) const fn to_u64(value: usize) -> u64 {
    value as u64
}
