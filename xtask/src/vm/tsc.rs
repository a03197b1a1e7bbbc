//! The rate of the time stamp counter, which a lab VM's kernel is given instead of measuring it.
//!
//! QEMU's CPUs count as this machine's do. On a busy machine, the VM's kernel now and then measured a rate that was
//! 0.12 % off, and corrected it a second later. KVM had taken the first rate by then, and its guests' clocks were wrong
//! until the VM ended: the kernel's tests of clocks failed, on the stock kernel as on the series.

use std::sync::OnceLock;
use std::time::Duration;

use super::Timing;

/// How long the counter is watched. Reading both clocks takes less than a microsecond, so the error is below 20 ppm.
const WATCHED: Duration = Duration::from_millis(50);

/// The kernel parameter, if the VM's counter runs as this machine's does.
pub(super) fn parameter(timing: Timing) -> Option<String> {
    match timing {
        Timing::Function | Timing::Parallel => khz().map(|khz| format!("tsc_early_khz={khz}")),
        // The counter counts instructions, and no other process disturbs the measurement.
        Timing::Instructions => None,
    }
}

/// Of this machine's counter, measured once; `None` if this is no x86.
fn khz() -> Option<u64> {
    static KHZ: OnceLock<Option<u64>> = OnceLock::new();
    *KHZ.get_or_init(|| {
        let (start, first) = now_and_counter()?;
        std::thread::sleep(WATCHED);
        let (end, last) = now_and_counter()?;
        let elapsed = u64::try_from(end.duration_since(start).as_nanos()).ok()?;
        last.checked_sub(first)?
            .checked_mul(1_000_000)?
            .checked_div(elapsed)
    })
}

#[cfg(target_arch = "x86_64")]
fn now_and_counter() -> Option<(std::time::Instant, u64)> {
    use std::time::Instant;
    /// How many times both clocks are read, to find a reading that nothing interrupted.
    const READINGS: u32 = 64;
    let reading = |_| {
        let before = Instant::now();
        // SAFETY: RDTSC reads a register and nothing else; Linux permits it unless a process forbids it to itself.
        let counter = unsafe { core::arch::x86_64::_rdtsc() };
        (before.elapsed(), before, counter)
    };
    let shortest = (0..READINGS).map(reading).min()?;
    let (took, before, counter) = shortest;
    Some((before + took / 2, counter))
}

#[cfg(not(target_arch = "x86_64"))]
fn now_and_counter() -> Option<(std::time::Instant, u64)> {
    None
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn a_vm_whose_counter_counts_instructions_measures_it() {
        assert_eq!(parameter(Timing::Instructions), None);
        let [function, parallel] = [Timing::Function, Timing::Parallel].map(parameter);
        assert_eq!(function, parallel);
        let khz = function
            .as_deref()
            .and_then(|text| text.strip_prefix("tsc_early_khz="));
        // From the slowest processors with a counter of constant rate to well above the fastest.
        let khz: u64 = khz.and_then(|khz| khz.parse().ok()).expect("a rate");
        assert!((500_000..10_000_000).contains(&khz), "{khz} kHz");
    }
}
