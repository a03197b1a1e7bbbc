//! What others published for the same experiment, to stand beside ours.

use serde::{Deserialize, Serialize};

/// Where it comes from, in a sentence.
pub const SOURCE: &str = "\"RFC V2: Direct Build EPT\", KVM mailing list, 2020-09-01: all of memory \
     dirtied, the time to build the tables not counted; guest memory pinned, no MMU notifiers; Intel";

/// A published result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Published {
    /// Where it was published.
    pub source: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Bytes of memory that they dirtied.
    pub memory_bytes: u64,
    /// How much faster the guest was, in percent, as they say it ("about").
    pub guest_faster_percent: u32,
    /// The pages that the tables were built of.
    pub pages: String,
}

impl Published {
    /// The result.
    #[must_use]
    pub fn result() -> Self {
        Self {
            source: SOURCE.to_owned(),
            vcpus: 32,
            memory_bytes: 64 << 30,
            guest_faster_percent: 50,
            pages: "2M/1G".to_owned(),
        }
    }
}
