//! What a reader of any benchmark's report must know.

use super::Origin;

/// How many runs were lost.
pub(crate) fn lost(origin: &Origin) -> String {
    let outside = match origin.lost_runs_outside {
        0 => String::new(),
        lost => format!(" The caller lost and repeated {lost} more."),
    };
    match origin.lost_runs {
        0 => format!("No run was lost.{outside}"),
        1 => format!("1 run was lost and repeated.{outside}"),
        lost => format!("{lost} runs were lost and repeated.{outside}"),
    }
}

/// What makes figures worse than they need be.
pub(crate) fn doubts(origin: &Origin, runs: u32) -> Vec<String> {
    let mut notes = Vec::new();
    if origin.facts.debug_build {
        notes.push("This program was built without optimisation; build with --release.".to_owned());
    }
    if runs < 7 {
        notes.push(format!(
            "{runs} rounds are few; 7 or more make a steady median."
        ));
    }
    notes
}
