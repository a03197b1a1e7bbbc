//! Lossless conversions between `u64` (sizes of the kernel and the guest) and `usize` (addresses of the
//! host). Both have the same width on every supported host.

const _: () = assert!(
    usize::BITS == u64::BITS,
    "Pagetide needs a 64-bit host: guest sizes are u64, mapped sizes are usize"
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
