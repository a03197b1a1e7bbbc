//! The lines of the log in a crate's sources.

use std::fs;
use std::path::{Path, PathBuf};

/// The files of Rust in a directory and those below it, each with the number of its lines of the log that users see and that
/// nothing bounds: calls of tracing's own macros, and of serve's `log_labelled`. `None`, and a word on it, where the sources are
/// not on this machine.
pub fn unbounded_log_lines(sources: &Path) -> Option<Vec<(PathBuf, usize)>> {
    if !sources.is_dir() {
        println!("SKIP: the sources are not on this machine");
        return None;
    }
    let (mut found, mut paths) = (Vec::new(), vec![sources.to_owned()]);
    while let Some(path) = paths.pop() {
        if path.is_dir() {
            let entries = fs::read_dir(path).unwrap();
            paths.extend(entries.map(|entry| entry.unwrap().path()));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let macros = [
                "tracing::error!",
                "tracing::warn!",
                "tracing::info!",
                "log_labelled!",
            ];
            let lines = macros.map(|name| text.matches(name).count()).iter().sum();
            found.push((path, lines));
        }
    }
    Some(found)
}
