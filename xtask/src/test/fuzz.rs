//! The parsers of hostile input under the fuzzer, each for a short time.

use anyhow::Result;

use super::tally::{Tally, Verdict};
use crate::fuzz::Fuzzer;
use crate::paths::Paths;

/// For how long each target runs.
const SECONDS: u64 = 20;

/// Runs every target; each is one test. So is the fuzzer itself: it has to find a planted failure.
pub(super) fn run(paths: &Paths, tally: &mut Tally) -> Result<()> {
    let fuzzer = Fuzzer::build(paths)?;
    let verdict = |failure: Option<String>| failure.map_or(Verdict::Passed, Verdict::Failed);
    let guidance = fuzzer.check_guidance().err();
    let guidance = guidance.map(|error| format!("{error:#}"));
    tally.add("fuzz", "coverage guides the fuzzer", verdict(guidance));
    for target in &fuzzer.targets {
        let failure = match fuzzer.fuzz(target, SECONDS) {
            Ok(outcome) => {
                println!("   {}: {outcome}", target.name);
                outcome.failure
            }
            Err(error) => Some(format!("{error:#}")),
        };
        tally.add("fuzz", &target.name, verdict(failure));
    }
    Ok(())
}
