//! Marks the measured time for a profiler outside of the VM.
//!
//! `cargo xtask profile` counts a software CPU's instructions, and must count those that the clock measures
//! and no others: not the boot, the memory's reset or the verification. It recognises two instructions that
//! change nothing and that no compiler emits, executed where the clock is read. They cost one instruction
//! each.

/// Right after the clock starts.
#[inline]
pub(crate) fn begin() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `xchg r13, r13` writes to r13 what it holds, and touches neither memory nor flags.
    unsafe {
        std::arch::asm!(".byte 0x4d, 0x87, 0xed", options(nostack, preserves_flags));
    }
}

/// Right before the clock ends; of several vCPUs' the last one counts.
#[inline]
pub(crate) fn end() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `xchg r14, r14` writes to r14 what it holds, and touches neither memory nor flags.
    unsafe {
        std::arch::asm!(".byte 0x4d, 0x87, 0xf6", options(nostack, preserves_flags));
    }
}
