//! What others published for the same experiment, to stand beside ours.

use serde::{Deserialize, Serialize};

/// Where it comes from, in a sentence.
pub const SOURCE: &str = "\"Userspace MFR Policy via memfd\", RFC v1, linux-fsdevel mailing list, \
     2025-01-18: MemCycler in a guest with 80 vCPUs and 640 GB on transparent 2M pages, Intel Emerald \
     Rapids; pages split by MADV_HWPOISON and given back to the guest by changes to the kernel";

/// A rate at a share of memory that errors have split.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PublishedRate {
    /// Percent of the memory.
    pub poison_percent: u32,
    /// 64-bit words per microsecond, all vCPUs together.
    pub words_per_us: f64,
    /// How much less that is than without errors, in percent.
    pub loss_percent: f64,
}

/// The published result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Published {
    /// Where it was published.
    pub source: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Bytes of memory that they cycled through, as they say it (640 GB).
    pub memory_bytes: u64,
    /// By percent, ascending.
    pub rates: Vec<PublishedRate>,
}

const fn rate(poison_percent: u32, words_per_us: f64, loss_percent: f64) -> PublishedRate {
    PublishedRate {
        poison_percent,
        words_per_us,
        loss_percent,
    }
}

impl Published {
    /// The result.
    #[must_use]
    pub fn result() -> Self {
        Self {
            source: SOURCE.to_owned(),
            vcpus: 80,
            memory_bytes: 640_000_000_000,
            rates: vec![
                rate(0, 17_204.69, 0.0),
                rate(5, 16_999.14, 1.20),
                rate(25, 16_355.11, 5.06),
            ],
        }
    }

    /// The rate at a share of memory.
    #[must_use]
    pub fn at(&self, poison_percent: u32) -> Option<&PublishedRate> {
        self.rates
            .iter()
            .find(|rate| rate.poison_percent == poison_percent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_follow_from_the_rates() {
        let published = Published::result();
        let free = published.at(0).unwrap().words_per_us;
        for rate in &published.rates {
            let loss = (1.0 - rate.words_per_us / free) * 100.0;
            // Theirs are of what was lost, against what was left (5 %) or all (25 %).
            assert!((loss - rate.loss_percent).abs() < 0.15, "{rate:?}: {loss}");
        }
    }
}
