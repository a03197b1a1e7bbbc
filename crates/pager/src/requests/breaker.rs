//! The circuit breaker of bulk requests: after many failures in a row no page is to blame, but the source, or the
//! memory.

use std::time::Instant;

/// So many failures in a row, without a success in between, open the breaker.
pub(crate) const FAILURES_IN_A_ROW: u32 = 64;

/// Closed: bulk requests are made. Open: one at a time is, each after a pause, until one succeeds.
#[derive(Debug)]
pub(crate) enum Breaker {
    Closed {
        /// Failures since the last success.
        failures: u32,
    },
    Open {
        /// The time of the next request.
        until: Instant,
        /// The requests that have failed since it was opened.
        probes: u32,
    },
}

impl Default for Breaker {
    fn default() -> Self {
        Self::Closed { failures: 0 }
    }
}

impl Breaker {
    /// Records a success.
    pub(crate) fn close(&mut self) {
        *self = Self::default();
    }

    /// Records a failure at `now`, after which the next request of an open breaker is made at `until`. Returns whether
    /// the failure has opened it.
    pub(crate) fn fail(&mut self, now: Instant, until: Instant) -> bool {
        match self {
            Self::Closed { failures } => {
                *failures += 1;
                let opens = *failures >= FAILURES_IN_A_ROW;
                if opens {
                    *self = Self::Open { until, probes: 0 };
                }
                opens
            }
            Self::Open { until: at, probes } => {
                // Otherwise the request was in flight before.
                if *at <= now {
                    (*at, *probes) = (until, probes.saturating_add(1));
                }
                false
            }
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        matches!(self, Self::Open { .. })
    }

    /// The time before which no request is made.
    pub(crate) fn until(&self) -> Option<Instant> {
        match self {
            Self::Closed { .. } => None,
            Self::Open { until, .. } => Some(*until),
        }
    }

    /// The requests that have failed since it was opened.
    pub(crate) fn probes(&self) -> u32 {
        match self {
            Self::Closed { .. } => 0,
            Self::Open { probes, .. } => *probes,
        }
    }
}
