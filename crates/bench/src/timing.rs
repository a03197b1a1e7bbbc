//! What a nanosecond means where the benchmark runs.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The environment variable that the lab sets to the name of its timing mode.
pub const TIMING_VARIABLE: &str = "PAGETIDE_TIMING";

/// What a nanosecond means where the benchmark runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Timing {
    /// Not in the lab: this machine's own kernel and clock.
    Native,
    /// The lab's default: a software CPU that runs one guest CPU at a time. Made for correctness;
    /// durations are those of the emulator.
    Function,
    /// The lab's instruction counter: a nanosecond of the clock is one executed instruction.
    Instructions,
    /// A software CPU with one host thread per guest CPU: durations are those of the emulator, but
    /// waiting and contention between CPUs are real.
    Parallel,
}

/// The lab set a timing mode that this version does not know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{TIMING_VARIABLE}={0} is no timing mode; unset it, or set it to function, instructions or \
     parallel"
)]
pub struct UnknownTiming(pub String);

impl Timing {
    /// Decodes the value of [`TIMING_VARIABLE`]; `None` or an empty value is [`Timing::Native`].
    ///
    /// # Errors
    /// The value names no mode.
    pub fn from_value(value: Option<&str>) -> Result<Self, UnknownTiming> {
        match value {
            None | Some("" | "native") => Ok(Self::Native),
            Some("function") => Ok(Self::Function),
            Some("instructions") => Ok(Self::Instructions),
            Some("parallel") => Ok(Self::Parallel),
            Some(other) => Err(UnknownTiming(other.to_owned())),
        }
    }

    /// The mode that [`TIMING_VARIABLE`] names.
    ///
    /// # Errors
    /// The value names no mode.
    pub fn from_environment() -> Result<Self, UnknownTiming> {
        let value = std::env::var_os(TIMING_VARIABLE);
        Self::from_value(
            value
                .as_ref()
                .map(|value| value.to_string_lossy())
                .as_deref(),
        )
    }

    /// Whether this is one of the lab's modes.
    #[must_use]
    pub fn is_lab(self) -> bool {
        self != Self::Native
    }

    /// Whether a run may be lost to the environment and repeated. Only the parallel software CPU
    /// loses runs; anywhere else a hang is a finding.
    #[must_use]
    pub fn may_lose_runs(self) -> bool {
        self == Self::Parallel
    }

    /// One sentence for a reader of the figures.
    #[must_use]
    pub fn explanation(self) -> &'static str {
        match self {
            Self::Native => "Durations are wall-clock time of this machine.",
            Self::Function => {
                "The lab's function mode is made for correctness: one software CPU runs everything \
                 in turn, and durations are those of the emulator. Compare nothing but the shape."
            }
            Self::Instructions => {
                "The lab's instruction counter: a nanosecond here is one executed instruction, \
                 user, kernel, hypervisor and guest together. It repeats within a few percent, and \
                 it is blind to caches, to memory latency and to waiting in parallel."
            }
            Self::Parallel => {
                "The lab's parallel mode: one software CPU per host core. Waiting and contention \
                 between CPUs are real, durations are those of the emulator: read the ratios. The \
                 software CPU loses some runs (nothing moves any more, or the guest shuts down); \
                 they are counted and repeated."
            }
        }
    }
}

impl fmt::Display for Timing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Native => "native",
            Self::Function => "function",
            Self::Instructions => "instructions",
            Self::Parallel => "parallel",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_named_as_the_lab_names_them() {
        for mode in [
            Timing::Native,
            Timing::Function,
            Timing::Instructions,
            Timing::Parallel,
        ] {
            assert_eq!(Timing::from_value(Some(&mode.to_string())), Ok(mode));
            assert_eq!(serde_json::to_string(&mode).unwrap(), format!("\"{mode}\""));
        }
        assert_eq!(Timing::from_value(None), Ok(Timing::Native));
        assert_eq!(Timing::from_value(Some("")), Ok(Timing::Native));
    }

    #[test]
    fn an_unknown_mode_is_refused_by_name() {
        let error = Timing::from_value(Some("icount")).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("PAGETIDE_TIMING=icount is no timing mode"),
            "{error}"
        );
    }

    #[test]
    fn only_the_parallel_software_cpu_may_lose_runs() {
        let may: Vec<_> = [
            Timing::Native,
            Timing::Function,
            Timing::Instructions,
            Timing::Parallel,
        ]
        .into_iter()
        .filter(|mode| mode.may_lose_runs())
        .collect();
        assert_eq!(may, [Timing::Parallel]);
    }
}
