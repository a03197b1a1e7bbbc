//! What a reader must know of every report.

use super::{Origin, Shown, View};

/// The notes for a report: what the figures are in, this benchmark's own, and what makes them doubtful.
pub(super) fn of<B: Shown>(view: &View<'_, B>) -> Vec<String> {
    let origin = &view.report.origin;
    let mut notes = vec![origin.timing.explanation().to_owned(), lost(origin)];
    notes.extend(view.busy().map(crate::noise::Busy::note));
    notes.extend(B::notes(view));
    if origin.facts.debug_build {
        notes.push("This program was built without optimisation; build with --release.".to_owned());
    }
    let runs = view.plan().runs();
    if runs < 7 {
        notes.push(format!(
            "{runs} rounds are few; 7 or more make a steady median."
        ));
    }
    notes
}

/// How many runs were lost.
fn lost(origin: &Origin) -> String {
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
