//! Counting tests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::outside;

/// What became of a test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    Passed,
    /// With what is known of the cause.
    Failed(String),
    /// With the reason.
    Skipped(String),
}

/// Every test that ran, by group and name.
///
/// A test that ran in several places counts once: as failed if it failed anywhere, else as passed
/// if it passed anywhere, so that a test that only the lab can run is not skipped when it ran there.
#[derive(Debug, Clone, Default)]
pub(super) struct Tally {
    tests: BTreeMap<(String, String), Verdict>,
    /// How long tests took, by the same names, and jobs of VMs, by their lanes and names.
    times: BTreeMap<(String, String), Duration>,
    /// What is said at the end of the run.
    notes: Vec<String>,
    /// Folders in which failures were kept.
    kept: Vec<PathBuf>,
    /// Of this step: the files that tell of it, by the names that they have in such a folder.
    evidence: BTreeMap<String, PathBuf>,
    /// Of this step: each failure with its whole cause.
    failures: Vec<String>,
}

/// How many tests there were of each kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

impl Tally {
    /// What a step begins with: the verdicts of the steps before it, and nothing else of them.
    pub(super) fn for_step(&self) -> Self {
        Self {
            tests: self.tests.clone(),
            ..Self::default()
        }
    }

    /// Adds a test.
    pub(super) fn add(&mut self, group: &str, name: &str, verdict: Verdict) {
        if let Verdict::Failed(cause) = &verdict {
            println!("FAILED {group}: {name}: {cause}");
            self.failures.push(format!("{group}: {name}: {cause}"));
        }
        self.count((group.to_owned(), name.to_owned()), verdict);
    }

    /// Adds how long a test took, or a job of a VM. Of several times the longest counts.
    pub(super) fn time(&mut self, group: &str, name: &str, time: Duration) {
        self.longest((group.to_owned(), name.to_owned()), time);
    }

    fn longest(&mut self, key: (String, String), time: Duration) {
        let longest = self.times.entry(key).or_default();
        *longest = time.max(*longest);
    }

    /// Adds a line for the end of the run.
    pub(super) fn note(&mut self, line: String) {
        self.notes.push(line);
    }

    /// Adds a folder in which a failure was kept.
    pub(super) fn kept_in(&mut self, folder: PathBuf) {
        self.kept.push(folder);
    }

    /// Notes a file that tells of what this step does, in case something fails. `lane` is the step's name, or longer.
    pub(super) fn leaves(&mut self, lane: &str, name: &str, file: &Path) {
        self.evidence
            .insert(format!("{lane}-{name}"), file.to_owned());
    }

    /// The files that tell of this step.
    pub(super) fn evidence(&self) -> impl Iterator<Item = (&str, &Path)> {
        let files = self.evidence.iter();
        files.map(|(name, file)| (name.as_str(), file.as_path()))
    }

    /// This step's failures, each with its whole cause.
    pub(super) fn failures(&self) -> &[String] {
        &self.failures
    }

    /// Adds what a step's tally has, but for what belongs to the step alone; who made it has told of its failures.
    pub(super) fn merge(&mut self, other: Self) {
        for (key, verdict) in other.tests {
            self.count(key, verdict);
        }
        for (key, time) in other.times {
            self.longest(key, time);
        }
        self.notes.extend(other.notes);
        self.kept.extend(other.kept);
    }

    /// How long tests took, and jobs of VMs: group, name and time.
    pub(super) fn times(&self) -> impl Iterator<Item = (&str, &str, Duration)> {
        let times = self.times.iter();
        times.map(|((group, name), time)| (group.as_str(), name.as_str(), *time))
    }

    /// The lines for the end of the run.
    pub(super) fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Where failures were kept.
    pub(super) fn kept(&self) -> &[PathBuf] {
        &self.kept
    }

    /// What to do, if a failure tells of a full disk.
    pub(super) fn disk_full(&self) -> Option<String> {
        self.tests.values().find_map(|verdict| match verdict {
            Verdict::Failed(cause) => outside::disk_full(cause),
            Verdict::Passed | Verdict::Skipped(_) => None,
        })
    }

    fn count(&mut self, key: (String, String), verdict: Verdict) {
        match (self.tests.get(&key), &verdict) {
            (Some(Verdict::Failed(_)), _) | (Some(Verdict::Passed), Verdict::Skipped(_)) => {}
            _ => {
                self.tests.insert(key, verdict);
            }
        }
    }

    /// The names of a group's tests that were skipped.
    pub(super) fn skipped(&self, group: &str) -> Vec<&str> {
        let tests = self.tests.iter();
        let skipped = tests.filter(|((g, _), v)| g == group && matches!(v, Verdict::Skipped(_)));
        skipped.map(|((_, name), _)| name.as_str()).collect()
    }

    fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for verdict in self.tests.values() {
            match verdict {
                Verdict::Passed => counts.passed += 1,
                Verdict::Failed(_) => counts.failed += 1,
                Verdict::Skipped(_) => counts.skipped += 1,
            }
        }
        counts
    }

    /// Counts only what was added or changed after an earlier state.
    pub(super) fn since(&self, before: &Self) -> Counts {
        let changed = self
            .tests
            .iter()
            .filter(|(key, verdict)| before.tests.get(*key) != Some(*verdict));
        Self {
            tests: changed.map(|(k, v)| (k.clone(), v.clone())).collect(),
            ..Self::default()
        }
        .counts()
    }

    /// Whether something failed.
    pub(super) fn has_failed(&self) -> bool {
        self.counts().failed > 0
    }

    /// Whether nothing failed and something ran.
    pub(super) fn ok(&self) -> bool {
        let counts = self.counts();
        counts.failed == 0 && counts.passed > 0
    }

    /// A line for each test that was skipped, with the reason, and each that failed.
    pub(super) fn details(&self) -> String {
        let mut text = String::new();
        for ((group, name), verdict) in &self.tests {
            match verdict {
                Verdict::Passed => {}
                Verdict::Skipped(reason) => text += &format!("SKIP {group}: {name}: {reason}\n"),
                Verdict::Failed(cause) => {
                    let first = cause.lines().next().unwrap_or_default();
                    text += &format!("FAILED {group}: {name}: {first}\n");
                }
            }
        }
        text
    }

    /// `N passed, N failed, N skipped`.
    pub(super) fn closing_line(&self) -> String {
        self.counts().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_counts_once_and_failure_wins() {
        let mut tally = Tally::default();
        tally.add("a", "1", Verdict::Skipped("no kvm".into()));
        tally.add("a", "1", Verdict::Passed);
        tally.add("a", "2", Verdict::Passed);
        tally.add("a", "2", Verdict::Skipped("no kvm".into()));
        tally.add("a", "3", Verdict::Failed("why".into()));
        tally.add("a", "3", Verdict::Passed);
        tally.add("a", "4", Verdict::Skipped("no kvm".into()));
        assert_eq!(tally.closing_line(), "2 passed, 1 failed, 1 skipped");
        assert!(!tally.ok());
        assert_eq!(tally.details(), "FAILED a: 3: why\nSKIP a: 4: no kvm\n");
    }

    #[test]
    fn tallies_merge_by_the_same_rule() {
        let (mut lab, mut stock) = (Tally::default(), Tally::default());
        lab.add("a", "1", Verdict::Passed);
        stock.add("a", "1", Verdict::Skipped("no series".into()));
        stock.add("b", "1", Verdict::Failed("why".into()));
        lab.merge(stock);
        assert_eq!(lab.closing_line(), "1 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn a_step_leaves_times_notes_and_folders_to_the_run() {
        let mut run = Tally::default();
        run.add("a", "1", Verdict::Passed);
        run.time("a", "1", Duration::from_secs(2));
        run.note("before".into());
        let mut step = run.for_step();
        assert_eq!(step.times().count() + step.notes().len(), 0);
        let longer = Duration::from_secs(3);
        step.time("a", "1", longer);
        step.time("a", "1", Duration::from_secs(1));
        step.note("slow".into());
        step.leaves("lab", "output.log", Path::new("/log"));
        step.add("a", "2", Verdict::Failed("why".into()));
        step.kept_in(PathBuf::from("/folder"));
        run.merge(step);
        assert_eq!(run.times().collect::<Vec<_>>(), [("a", "1", longer)]);
        assert_eq!(run.notes(), ["before", "slow"]);
        assert_eq!(run.kept(), [PathBuf::from("/folder")]);
        // They have been told of, and copied.
        assert_eq!(run.evidence().count() + run.failures().len(), 0);
        assert!(run.has_failed());
    }

    #[test]
    fn a_full_disk_is_found_among_the_causes() {
        let mut tally = Tally::default();
        tally.add("a", "1", Verdict::Failed("panicked: why".into()));
        assert_eq!(tally.disk_full(), None);
        let full = "write: No space left on device (os error 28)";
        tally.add("a", "2", Verdict::Failed(full.into()));
        assert!(tally.disk_full().is_some());
    }

    #[test]
    fn nothing_run_is_not_ok() {
        assert!(!Tally::default().ok());
    }
}
