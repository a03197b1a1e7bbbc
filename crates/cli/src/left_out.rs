//! Commands that this program was built without: each says which feature brings it.

use std::ffi::OsString;

use clap::Args;

use crate::failure::Failure;

/// The commands, each with the feature that brings it, and whether this program has it.
const COMMANDS: [(&str, &str, bool); 7] = [
    ("try", "serve", cfg!(feature = "serve")),
    ("serve", "serve", cfg!(feature = "serve")),
    ("ctl", "serve", cfg!(feature = "serve")),
    ("image", "serve", cfg!(feature = "serve")),
    ("working-set", "serve", cfg!(feature = "serve")),
    ("run", "guest", cfg!(feature = "guest")),
    ("bench", "bench", cfg!(feature = "bench")),
];

/// The arguments of a command that is not there: any.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub(crate) struct LeftOut {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    _arguments: Vec<OsString>,
}

/// The command is not in this program.
#[derive(Debug, thiserror::Error)]
#[error(
    "this program was built without the feature `{feature}`, which brings `pagetide {command}`; \
     `cargo install --locked --path crates/cli` builds it with all features"
)]
struct NotBuilt {
    command: &'static str,
    feature: &'static str,
}

/// The failure of a command that is not there.
#[cfg_attr(
    all(feature = "serve", feature = "bench", feature = "guest", not(test)),
    expect(dead_code, reason = "nothing is left out")
)]
pub(crate) fn refusal(command: &'static str) -> Failure {
    let found = COMMANDS.iter().find(|(name, ..)| *name == command);
    let feature = found.map_or("default", |(_, feature, _)| feature);
    Failure::bad_input(NotBuilt { command, feature })
}

/// What `--help` says of the commands that are not there; nothing if all are.
pub(crate) fn note() -> String {
    note_of(&COMMANDS)
}

fn note_of(commands: &[(&str, &str, bool)]) -> String {
    let missing = commands.iter().filter(|(.., is_there)| !is_there);
    let missing: Vec<_> = missing
        .map(|(name, feature, _)| format!("{name} (feature {feature})"))
        .collect();
    match missing.is_empty() {
        true => String::new(),
        false => format!("\n\nThis program was built without {}.", missing.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Alone {
        #[command(flatten)]
        _arguments: LeftOut,
    }

    #[test]
    fn a_command_that_is_not_there_takes_any_words_and_names_its_feature() {
        for words in [
            &["bench"][..],
            &["bench", "--help"],
            &["bench", "a", "--b=c"],
        ] {
            assert!(Alone::try_parse_from(words).is_ok(), "{words:?}");
        }
        let told = refusal("bench").to_string();
        assert!(told.contains("feature `bench`"), "{told}");
    }

    #[test]
    fn the_help_names_what_is_not_there() {
        assert_eq!(note_of(&[("a", "b", true)]), "");
        let note = note_of(&[("a", "b", false), ("c", "d", true), ("e", "f", false)]);
        assert!(
            note.ends_with("without a (feature b), e (feature f)."),
            "{note}"
        );
    }
}
