//! Figures that others published for the same experiment, to stand beside ours.

use serde::{Deserialize, Serialize};

use super::plan::Method;

/// Where the figures come from, in a sentence.
pub const SOURCE: &str = "the discussion of atomic memslot updates on the KVM mailing list: time of \
     all memslot commits while a Linux guest boots, an ioctl for all slots against pausing all \
     vCPUs, on an x86 server";

/// Published times at one number of vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PublishedTime {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// By one ioctl, milliseconds a boot.
    pub ioctl_ms: f64,
    /// With all vCPUs paused, milliseconds a boot.
    pub pause_ms: f64,
}

/// The published table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Published {
    /// Where it was published.
    pub source: String,
    /// By number of vCPUs, ascending.
    pub times: Vec<PublishedTime>,
}

const fn time(vcpus: u32, ioctl_ms: f64, pause_ms: f64) -> PublishedTime {
    PublishedTime {
        vcpus,
        ioctl_ms,
        pause_ms,
    }
}

const TIMES: [PublishedTime; 6] = [
    time(1, 2.1, 2.2),
    time(2, 2.5, 3.0),
    time(4, 2.2, 3.1),
    time(8, 2.4, 3.4),
    time(16, 3.6, 12.0),
    time(24, 12.5, 20.0),
];

impl Published {
    /// The table.
    #[must_use]
    pub fn table() -> Self {
        Self {
            source: SOURCE.to_owned(),
            times: TIMES.to_vec(),
        }
    }

    /// The time for one number of vCPUs and the method that is alike.
    #[must_use]
    pub fn at(&self, vcpus: u32, method: Method) -> Option<f64> {
        let found = self.times.iter().find(|time| time.vcpus == vcpus)?;
        match method {
            Method::List => Some(found.ioctl_ms),
            Method::Quiesce => Some(found.pause_ms),
            Method::DeleteCreate => None,
        }
    }
}
