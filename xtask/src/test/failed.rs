//! What a failure leaves: a folder with all that tells of it.

use std::path::{Path, PathBuf};

use anyhow::Result;
use fs_err as fs;

use super::seed;
use super::tally::Tally;
use crate::files;
use crate::paths::Paths;

/// How many folders are kept; the oldest go.
const KEPT: usize = 20;

/// Makes the folder of a step in which something failed: `output.log`, `console.log` and the like, which the step
/// noted, `failures.log`, and `seed`.
pub(super) fn keep(step: &str, tally: &Tally, paths: &Paths) -> Result<PathBuf> {
    let all = paths.target().join("test/failed");
    let folder = files::one_of_many(&all, &format!("{step}-"), KEPT)?;
    fs::write(folder.join("seed"), format!("{}\n", seed::assignment()))?;
    fs::write(folder.join("failures.log"), tally.failures().join("\n"))?;
    for (name, file) in tally.evidence() {
        copy(file, &folder.join(file_name(step, name)))?;
    }
    Ok(folder)
}

/// The step's own name says nothing in its folder.
fn file_name<'a>(step: &str, name: &'a str) -> &'a str {
    let rest = name.strip_prefix(step);
    rest.and_then(|rest| rest.strip_prefix('-')).unwrap_or(name)
}

/// Copies a file, if it is there: a VM that did not begin has no console.
fn copy(from: &Path, to: &Path) -> Result<()> {
    if from.exists() {
        fs::copy(from, to)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tally::Verdict;
    use super::*;

    #[test]
    fn a_failure_leaves_console_output_and_seed_in_one_folder() {
        let root = tempfile::tempdir().unwrap();
        let paths = Paths::at(root.path());
        let mut tally = Tally::default();
        for (lane, file) in [
            ("lab", "console.log"),
            ("lab", "output.log"),
            ("lab-shadow", "output.log"),
            ("lab", "missing.log"),
        ] {
            let place = root.path().join(format!("{lane}.{file}"));
            if file != "missing.log" {
                std::fs::write(&place, format!("{lane} {file}")).unwrap();
            }
            tally.leaves(lane, file, &place);
        }
        tally.add("kvm/slots", "a", Verdict::Failed("why\nmore".into()));
        let folder = keep("lab", &tally, &paths).unwrap();
        assert!(folder.starts_with(paths.target().join("test/failed")));
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
        assert_eq!(read("console.log"), "lab console.log");
        assert_eq!(read("output.log"), "lab output.log");
        assert_eq!(read("shadow-output.log"), "lab-shadow output.log");
        assert_eq!(read("failures.log"), "kvm/slots: a: why\nmore");
        assert!(read("seed").starts_with("PAGETIDE_SEED="));
        assert!(!folder.join("missing.log").exists());
        assert_ne!(keep("lab", &tally, &paths).unwrap(), folder);
    }

    #[test]
    fn a_lane_keeps_its_name_beside_another() {
        assert_eq!(file_name("debug", "debug-console.log"), "console.log");
        assert_eq!(
            file_name("debug", "debug-shadow-console.log"),
            "shadow-console.log"
        );
        assert_eq!(
            file_name("debug", "debugger-console.log"),
            "debugger-console.log"
        );
    }
}
