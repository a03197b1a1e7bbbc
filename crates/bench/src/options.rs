//! The options of benchmarks: their names, and which values are refused.

use std::fmt;

use pagetide_memory::Backing;

use crate::units::ByteSize;

/// Most measured rounds.
pub const MAX_RUNS: u32 = 1000;

/// Why a plan is refused. Each message names the option to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A list is empty.
    #[error("{option} names nothing; try {option} {example}")]
    Nothing {
        /// The option.
        option: &'static str,
        /// A value that it takes.
        example: &'static str,
    },
    /// The same value twice: it would be measured and shown twice.
    #[error("{option} names {value} twice; each value is measured once")]
    Twice {
        /// The option.
        option: &'static str,
        /// The value.
        value: String,
    },
    /// Options that make no sense together, in a sentence.
    #[error("{0}")]
    Meaningless(String),
    /// A value that the benchmark cannot measure with.
    #[error("{option}: {why}")]
    Refused {
        /// The option, or options, with the value.
        option: String,
        /// The reason, and what to do.
        why: String,
    },
}

impl PlanError {
    /// A value is refused.
    pub(crate) fn refused(option: impl fmt::Display, why: impl fmt::Display) -> Self {
        Self::Refused {
            option: option.to_string(),
            why: why.to_string(),
        }
    }
}

/// Whether `--vcpus` makes sense, with up to `most` of them.
pub(crate) fn check_vcpus(vcpus: &[u32], most: u32) -> Result<(), PlanError> {
    for &wanted in vcpus {
        match wanted {
            0 => {
                let why = "a virtual machine needs at least one vCPU";
                return Err(PlanError::refused("--vcpus 0", why));
            }
            wanted if wanted > most => {
                let why = format!("at most {most} vCPUs can be measured");
                return Err(PlanError::refused(format!("--vcpus {wanted}"), why));
            }
            _ => {}
        }
    }
    check_list("--vcpus", "1,2,4", vcpus)
}

/// Whether a list of values to compare makes sense: there are some, each once.
pub(crate) fn check_list<T: PartialEq + fmt::Display>(
    option: &'static str,
    example: &'static str,
    values: &[T],
) -> Result<(), PlanError> {
    if values.is_empty() {
        return Err(PlanError::Nothing { option, example });
    }
    let mut all = values.iter().enumerate();
    match all.find(|(index, value)| values[..*index].contains(value)) {
        Some((_, value)) => Err(PlanError::Twice {
            option,
            value: value.to_string(),
        }),
        None => Ok(()),
    }
}

/// Whether `--runs` makes sense.
pub(crate) fn check_runs(runs: u32) -> Result<(), PlanError> {
    match runs {
        0 => Err(PlanError::refused("--runs 0", "nothing would be measured")),
        runs if runs > MAX_RUNS => {
            let why = format!("at most {MAX_RUNS} rounds");
            Err(PlanError::refused(format!("--runs {runs}"), why))
        }
        _ => Ok(()),
    }
}

/// Whether a size is whole pages of a backing.
pub(crate) fn check_pages(
    option: &str,
    size: ByteSize,
    page: u64,
    backing: Backing,
) -> Result<(), PlanError> {
    if size.0.is_multiple_of(page) {
        return Ok(());
    }
    let why = format!("not a multiple of the {page}-byte pages of --backing {backing}");
    Err(PlanError::refused(format!("{option} {size}"), why))
}

/// The values of an option as the command line takes them.
pub(crate) fn list<T: ToString>(values: &[T]) -> String {
    let words: Vec<_> = values.iter().map(ToString::to_string).collect();
    words.join(",")
}

/// Values that JSON has by the names that the command line takes, for `serde(with)`.
pub(crate) mod by_name {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    /// One value.
    pub(crate) fn serialize<T: Display, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub(crate) fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<T, D::Error> {
        let name = String::deserialize(deserializer)?;
        name.parse().map_err(Error::custom)
    }

    /// A list of them.
    pub(crate) mod all {
        use super::*;

        pub(crate) fn serialize<T: Display, S: Serializer>(
            values: &[T],
            serializer: S,
        ) -> Result<S::Ok, S::Error> {
            let names: Vec<_> = values.iter().map(ToString::to_string).collect();
            names.serialize(serializer)
        }

        pub(crate) fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
            deserializer: D,
        ) -> Result<Vec<T>, D::Error> {
            let names = Vec::<String>::deserialize(deserializer)?;
            let values = names.iter().map(|name| name.parse());
            values.collect::<Result<_, _>>().map_err(Error::custom)
        }
    }
}

/// A text names none of an option's values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{given}' is none of {}", .names.join(", "))]
pub struct UnknownName {
    /// The text.
    pub given: String,
    /// The names that there are.
    pub names: &'static [&'static str],
}

/// Gives an option's values their names, in both directions.
macro_rules! named {
    ($($kind:ty { $($variant:ident => $name:literal),+ $(,)? })+) => { $(
        impl $kind {
            /// The names of all values, as the command line takes them.
            pub const NAMES: &'static [&'static str] = &[$($name),+];
        }

        impl std::fmt::Display for $kind {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(match self { $(Self::$variant => $name),+ })
            }
        }

        impl std::str::FromStr for $kind {
            type Err = $crate::options::UnknownName;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $($name => Ok(Self::$variant),)+
                    _ => Err($crate::options::UnknownName { given: text.to_owned(), names: Self::NAMES }),
                }
            }
        }
    )+ };
}
pub(crate) use named;
