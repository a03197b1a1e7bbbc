//! Tests under loom, which takes a test through every order of its threads' steps.

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::host::{self, How};
use super::log_file;
use super::tally::Tally;
use crate::command::Run;
use crate::paths::Paths;
use crate::progress::Progress;

/// How often threads are preempted in the orders that are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bound {
    /// As often as the test permits; most tests set no bound.
    AsWritten,
    /// In every order, whatever the test permits.
    None,
}

impl Bound {
    /// The step, which names the log.
    fn step(self) -> &'static str {
        match self {
            Self::AsWritten => "loom",
            Self::None => "loom-unbounded",
        }
    }

    /// Before the groups' names.
    fn part(self) -> Option<&'static str> {
        match self {
            Self::AsWritten => None,
            Self::None => Some("unbounded"),
        }
    }

    /// What loom reads.
    fn environment(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::AsWritten => None,
            // More often than in any order of any test.
            Self::None => Some(("LOOM_MAX_PREEMPTIONS", "100")),
        }
    }
}

/// What is compiled in addition, and what the names of such tests contain.
const FILTER: &str = "loom";

/// Runs the loom tests of every crate that has any, each compiled for them: the primitives that
/// threads meet at are loom's then, with which other tests cannot run.
pub(super) fn run(bound: Bound, paths: &Paths, tally: &mut Tally) -> Result<()> {
    let packages = packages(paths)?;
    if packages.is_empty() {
        bail!("no crate of the workspace depends on loom");
    }
    let progress = Progress::spinner("compiling the tests for loom");
    let compile = Run::new("cargo")
        .args(["test", "--lib"])
        .args(packages.iter().flat_map(|name| ["--package", name]))
        .env("RUSTFLAGS", "--cfg loom");
    let programs = host::compile(compile, &paths.target().join("loom"), paths)?;
    progress.done();
    let log = log_file(paths, bound.step())?;
    tally.leaves(bound.step(), "output.log", &log);
    let how = How {
        part: bound.part(),
        filter: Some(FILTER),
        environment: bound.environment(),
        ..How::default()
    };
    for mut program in programs {
        program.group = format!("{} (loom)", program.package);
        host::run_program(&program, &how, &log, tally)?;
    }
    Ok(())
}

/// The packages of the workspace that have loom where they are compiled for it.
fn packages(paths: &Paths) -> Result<Vec<String>> {
    let metadata = Run::new("cargo").args(["metadata", "--no-deps", "--format-version=1"]);
    let metadata = metadata.dir(paths.root()).output()?;
    let metadata: Value = serde_json::from_slice(&metadata).context("cargo metadata")?;
    Ok(depending_on_loom(&metadata))
}

/// Those of the packages in cargo's metadata.
fn depending_on_loom(metadata: &Value) -> Vec<String> {
    let list = |value: &Value, key: &str| -> Vec<Value> {
        value
            .get(key)
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default()
    };
    let is_loom = |dependency: &Value| dependency["name"] == "loom";
    list(metadata, "packages")
        .iter()
        .filter(|package| list(package, "dependencies").iter().any(is_loom))
        .filter_map(|package| package.get("name")?.as_str().map(str::to_owned))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packages_with_loom_are_found() {
        let metadata = serde_json::json!({"packages": [
            {"name": "plain", "dependencies": [{"name": "libc"}]},
            {"name": "checked", "dependencies": [
                {"name": "libc"}, {"name": "loom", "target": "cfg(loom)"},
            ]},
            {"name": "alone", "dependencies": []},
        ]});
        assert_eq!(depending_on_loom(&metadata), ["checked"]);
        assert!(depending_on_loom(&Value::Null).is_empty());
    }
}
