//! Counting tests.

use std::collections::BTreeMap;

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
    /// Adds a test.
    pub(super) fn add(&mut self, group: &str, name: &str, verdict: Verdict) {
        if let Verdict::Failed(cause) = &verdict {
            println!("FAILED {group}: {name}: {cause}");
        }
        self.count((group.to_owned(), name.to_owned()), verdict);
    }

    /// Adds what another tally has; who made it has told of its failures.
    pub(super) fn merge(&mut self, other: Self) {
        for (key, verdict) in other.tests {
            self.count(key, verdict);
        }
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
        }
        .counts()
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
    fn nothing_run_is_not_ok() {
        assert!(!Tally::default().ok());
    }
}
