//! Where the figures of a report come from: the part that all reports share.

use serde::{Deserialize, Serialize};

use super::Measured;
use crate::facts::Facts;
use crate::timing::Timing;

/// The environment that the caller knows of.
#[derive(Debug, Clone)]
pub struct Environment {
    /// What a nanosecond means.
    pub timing: Timing,
    /// Where the figures come from.
    pub facts: Facts,
    /// Runs of the whole benchmark that were lost before this one.
    pub lost_runs_outside: u32,
    /// What was found to be doubtful before anything ran.
    pub warnings: Vec<String>,
}

impl Environment {
    /// This machine's, as far as it can be seen from here: nothing lost before, nothing doubtful.
    #[must_use]
    pub fn gather(timing: Timing) -> Self {
        Self {
            timing,
            facts: Facts::gather(timing),
            lost_runs_outside: 0,
            warnings: Vec::new(),
        }
    }
}

/// Where figures come from. In JSON its fields are the report's own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// What a nanosecond means here.
    pub timing: Timing,
    /// Where the figures come from.
    pub facts: Facts,
    /// Runs that were lost and repeated, seen from inside.
    pub lost_runs: u32,
    /// Runs of the whole benchmark that the caller lost before this one and repeated.
    pub lost_runs_outside: u32,
}

impl Origin {
    /// That of `measured` in `environment`, whose warnings go into a report's notes.
    pub(crate) fn of<S, C>(environment: &Environment, measured: &[Measured<S, C>]) -> Self {
        Self {
            timing: environment.timing,
            facts: environment.facts.clone(),
            lost_runs: measured.iter().map(|point| point.lost_runs).sum(),
            lost_runs_outside: environment.lost_runs_outside,
        }
    }

    /// All runs lost, inside and outside.
    #[must_use]
    pub fn all_lost_runs(&self) -> u32 {
        self.lost_runs.saturating_add(self.lost_runs_outside)
    }
}
