//! The end of a run: what each step cost, which tests were the slowest, and what came of them.

use std::time::Duration;

use super::seed;
use super::tally::Tally;

/// How many of the slowest tests are shown.
const SLOWEST: usize = 10;

/// What has come of steps.
#[derive(Default)]
pub(super) struct Done {
    pub(super) tally: Tally,
    pub(super) costs: Costs,
}

/// What else the last lines of a run say.
pub(super) struct End {
    /// Which round was the last, and how many there were to be, if not just one.
    pub(super) rounds: Option<(u32, u32)>,
    pub(super) took: Duration,
    /// What is special about the kernel's source.
    pub(super) notice: Option<String>,
}

impl Done {
    /// The last lines of a run. The very last one is `N passed, N failed, N skipped`, and the notice.
    pub(super) fn closing(&self, end: &End) -> String {
        let tally = &self.tally;
        let mut text = self.costs.table() + &slowest(tally.times()) + &tally.details();
        let mut line = |line: String| text += &(line + "\n");
        for note in tally.notes() {
            line(note.clone());
        }
        if let Some((last, all)) = end.rounds {
            line(format!("rounds: {last} of {all}"));
        }
        line(format!("seed: {}", seed::assignment()));
        for folder in tally.kept() {
            line(format!("kept: {} has what failed", folder.display()));
        }
        if let Some(advice) = tally.disk_full() {
            line(advice);
        }
        line(format!("tested in {:.0} s", end.took.as_secs_f64()));
        let notice = end.notice.iter();
        let notice: String = notice.map(|notice| format!(" ({notice})")).collect();
        line(format!("{}{notice}", tally.closing_line()));
        text
    }
}

/// What the steps of a run cost, in the order in which they first ended.
#[derive(Debug, Clone, Default)]
pub(super) struct Costs(Vec<(String, Duration)>);

impl Costs {
    /// Adds a step; one that ran several times costs the sum.
    pub(super) fn add(&mut self, step: &str, time: Duration) {
        match self.0.iter_mut().find(|(name, _)| name == step) {
            Some((_, sum)) => *sum += time,
            None => self.0.push((step.to_owned(), time)),
        }
    }

    /// Adds what the steps cost in another round.
    pub(super) fn merge(&mut self, other: Self) {
        for (step, time) in other.0 {
            self.add(&step, time);
        }
    }

    /// A line for each step, the dearest first. Steps run beside each other: their sum is no time of the run.
    pub(super) fn table(&self) -> String {
        let mut costs = self.0.clone();
        costs.sort_by_key(|(_, time)| std::cmp::Reverse(*time));
        let mut text = String::from("seconds  step\n");
        for (step, time) in costs {
            text += &format!("{:7.0}  {step}\n", time.as_secs_f64());
        }
        text
    }
}

/// A line for each of the slowest tests; empty if no time of a test is known.
pub(super) fn slowest<'a>(times: impl Iterator<Item = (&'a str, &'a str, Duration)>) -> String {
    let mut times: Vec<_> = times.collect();
    if times.is_empty() {
        return String::new();
    }
    times.sort_by_key(|(_, _, time)| std::cmp::Reverse(*time));
    let mut text = String::from("seconds  slowest tests, and jobs of VMs\n");
    for (group, name, time) in times.into_iter().take(SLOWEST) {
        text += &format!("{:7.1}  {group}: {name}\n", time.as_secs_f64());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::tally::Verdict;
    use super::*;

    #[test]
    fn the_last_line_counts_and_the_folder_comes_before_it() {
        let mut done = Done::default();
        done.costs.add("lab", Duration::from_secs(3));
        let tally = &mut done.tally;
        tally.time("a", "1", Duration::from_secs(2));
        tally.add("a", "1", Verdict::Failed("No space left on device".into()));
        tally.note("a note".into());
        tally.kept_in("/folder".into());
        let mut end = End {
            rounds: Some((2, 5)),
            took: Duration::from_millis(4400),
            notice: Some("a substitute".into()),
        };
        let text = done.closing(&end);
        let seed = format!("seed: {}", seed::assignment());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[..8],
            [
                "seconds  step",
                "      3  lab",
                "seconds  slowest tests, and jobs of VMs",
                "    2.0  a: 1",
                "FAILED a: 1: No space left on device",
                "a note",
                "rounds: 2 of 5",
                seed.as_str(),
            ]
        );
        assert_eq!(lines[8], "kept: /folder has what failed");
        assert!(lines[9].starts_with("a disk is full"), "{}", lines[9]);
        assert_eq!(lines[10], "tested in 4 s");
        assert_eq!(
            lines[11..],
            ["0 passed, 1 failed, 0 skipped (a substitute)"]
        );
        end.notice = None;
        let text = done.closing(&end);
        assert!(
            text.ends_with("\n0 passed, 1 failed, 0 skipped\n"),
            "{text}"
        );
    }

    #[test]
    fn the_dearest_step_comes_first() {
        let mut costs = Costs::default();
        costs.add("format", Duration::from_millis(1600));
        costs.add("host", Duration::from_secs(60));
        costs.add("lab", Duration::from_secs(90));
        costs.add("host", Duration::from_secs(61));
        assert_eq!(
            costs.table(),
            "seconds  step\n    121  host\n     90  lab\n      2  format\n"
        );
    }

    #[test]
    fn the_ten_slowest_tests_are_shown() {
        let names: Vec<String> = (0..12).map(|n| format!("t{n}")).collect();
        let times = (1..).map(|n| Duration::from_millis(1500) * n);
        let tests = names.iter().zip(times);
        let text = slowest(tests.map(|(name, time)| ("kvm/slots", name.as_str(), time)));
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 11);
        assert_eq!(lines[1], "   18.0  kvm/slots: t11");
        assert_eq!(lines[10], "    4.5  kvm/slots: t2");
        assert_eq!(slowest(std::iter::empty()), "");
    }
}
