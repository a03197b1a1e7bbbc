//! Guest physical and host virtual addresses, as distinct types.

use std::fmt;

use crate::convert::to_u64;

/// A guest physical address (gpa), in bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct GuestAddress(pub u64);

/// A host virtual address (hva) of this process, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct HostAddress(pub usize);

impl GuestAddress {
    /// The address `bytes` higher, or `None` if the sum overflows.
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }

    /// The number of bytes from `base` up to `self`, or `None` if `self` lies below `base`.
    pub const fn offset_from(self, base: Self) -> Option<u64> {
        self.0.checked_sub(base.0)
    }
}

impl HostAddress {
    /// The address as the integer that kernel structures take.
    pub const fn as_u64(self) -> u64 {
        to_u64(self.0)
    }

    /// The address `bytes` higher, or `None` if the sum overflows.
    pub const fn checked_add(self, bytes: usize) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }
}

macro_rules! hexadecimal {
    ($($type:ty => $name:literal),*) => {$(
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($name, "({:#x})"), self.0)
            }
        }
    )*};
}

hexadecimal!(GuestAddress => "gpa", HostAddress => "hva");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_print_as_hexadecimal() {
        assert_eq!(GuestAddress(0x1_0000_0000).to_string(), "0x100000000");
        assert_eq!(format!("{:?}", HostAddress(0x1000)), "hva(0x1000)");
    }

    #[test]
    fn overflowing_arithmetic_is_refused() {
        assert_eq!(GuestAddress(u64::MAX).checked_add(1), None);
        assert_eq!(HostAddress(usize::MAX).checked_add(1), None);
        assert_eq!(GuestAddress(4).offset_from(GuestAddress(5)), None);
        assert_eq!(GuestAddress(5).offset_from(GuestAddress(4)), Some(1));
    }
}
