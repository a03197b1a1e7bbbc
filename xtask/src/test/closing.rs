//! The tables at the end of a run: what each step cost, and which tests were the slowest.

use std::time::Duration;

/// How many of the slowest tests are shown.
const SLOWEST: usize = 10;

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
    use super::*;

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
