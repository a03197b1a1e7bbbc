//! `cargo xtask picture`: README's picture, docs/images/restore.svg, drawn from a run of `pagetide try`.

mod svg;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use fs_err as fs;
use serde::Deserialize;

use crate::command::Run;
use crate::guest_memory;
use crate::paths::Paths;
use crate::progress::Progress;
use crate::vm;

/// The verb's arguments.
#[derive(Debug, Args)]
pub(crate) struct PictureArgs {
    /// Draw this report of `pagetide try --json` and run nothing
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

/// The memory of the guest that is restored.
const MEMORY_BYTES: usize = 1 << 30;
/// The pages that the guest touches, at random.
const TOUCHES: &str = "10000";

/// The part of a report that is drawn.
#[derive(Debug, Deserialize)]
struct Report {
    memory_bytes: u64,
    touches: u64,
    ways: Vec<Way>,
}

/// One way to restore the memory.
#[derive(Debug, Deserialize)]
struct Way {
    way: String,
    is_cold: bool,
    first_page_us: f64,
    all_touches_us: f64,
    #[serde(default)]
    arrivals: Vec<Arrival>,
}

/// How much memory was there, and when.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Arrival {
    at_us: f64,
    bytes: u64,
}

/// Runs the verb.
pub(crate) fn run(args: &PictureArgs, paths: &Paths) -> Result<()> {
    let text = match &args.report {
        Some(file) => fs::read_to_string(file)?,
        None => measure(paths)?,
    };
    let report: Report =
        serde_json::from_str(&text).context("a report of `pagetide try --json`")?;
    let place = paths.in_root("docs/images/restore.svg");
    fs::write(&place, svg::draw(&report)?)?;
    println!("{}", place.display());
    Ok(())
}

/// The report of a run, which is kept in target/picture.
fn measure(paths: &Paths) -> Result<String> {
    vm::build_pagetide(paths)?;
    let directory = paths.target().join("picture");
    fs::create_dir_all(&directory)?;
    let image = directory.join("guest.mem");
    guest_memory::write(&image, MEMORY_BYTES)?;
    let progress = Progress::spinner("pagetide try");
    let report = Run::new(paths.target().join("release/pagetide"))
        .arg("try")
        .arg(&image)
        .args(["--json", "--order", "random", "--touches", TOUCHES])
        .text();
    progress.done();
    // It takes space, and is written in seconds.
    fs::remove_file(&image)?;
    let report = report?;
    fs::write(directory.join("report.json"), &report)?;
    Ok(report)
}

impl Report {
    /// The restore by the server, and the one that reads everything first.
    fn ways(&self) -> Result<[&Way; 2]> {
        let find = |part: &str| {
            let found = self.ways.iter().find(|way| way.way.contains(part));
            found.with_context(|| format!("the report has no way whose name contains {part:?}"))
        };
        let ways = [find("serve")?, find("read first")?];
        for way in ways {
            ensure!(!way.arrivals.is_empty(), "{:?} has no arrivals", way.way);
        }
        Ok(ways)
    }
}
