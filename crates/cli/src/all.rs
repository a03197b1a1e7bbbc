//! `pagetide bench all`: every benchmark, and one file that has all of it.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::Value;

use crate::failure::Failure;
use crate::print;

pub(crate) const EXAMPLES: &str = "\
Examples:
  Everything, as root on a kernel with the series, and then the file to send:
    pagetide bench all --out results
    ls -l results/all.json

  Does everything work here? Small measurements, whose figures mean little:
    pagetide bench all --quick --out trial

  Look at the results of another machine:
    pagetide bench show all.json

Exit status: 0, also if this machine cannot run some of the benchmarks; 1 if one of them failed; 2 if the \
command line makes no sense or this machine can run none of them.";

/// The file that has all reports.
const FILE: &str = "all.json";

/// What the file says that it is.
const SCHEMA: &str = "pagetide.all/1";

/// The benchmarks, and what they compare in README's table. A second line is for a kernel that lacks what the first needs.
pub(crate) const WHOLE: &[&[&str]] = &[
    &["pager"],
    &[
        "paging --vcpus 1,2,4,8 --delivery none,uffd,exit --fault-around 1,16,64 --populate",
        "paging --vcpus 1,2,4,8 --delivery none,uffd",
    ],
    &["populate"],
    &["memslots --ops split"],
    &[
        "memcycler --memory 64M --backing thp,hugetlb-2m",
        "memcycler --memory 64M --backing thp --poison 0",
    ],
];

/// The same, each within seconds, and without memcycler, which takes half a minute and costs memory.
pub(crate) const QUICK: &[&[&str]] = &[
    &["pager --part random --threads 1 --memory 16M"],
    &[
        "paging --vcpus 1 --per-vcpu 2M --fault-around 1,16",
        "paging --vcpus 1 --per-vcpu 2M --delivery uffd",
    ],
    &["populate --vcpus 1 --memory 16M"],
    &["memslots --vcpus 1 --ops split --commits 2"],
];

/// The whole of it takes no parameters.
#[derive(Debug, Args)]
pub(crate) struct AllArguments {
    /// Directory for a page, a drawing and the data of each benchmark (html, svg, json), and for all.json, which has
    /// all of the data; is made if need be
    #[arg(long, value_name = "DIR", default_value = "target/pagetide/all")]
    out: PathBuf,

    /// One round of small measurements: shows that everything works here
    #[arg(long)]
    quick: bool,

    /// Measured rounds of each benchmark
    #[arg(long, value_name = "N", default_value_t = 7, conflicts_with = "quick")]
    runs: u32,

    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
}

/// What the file has.
#[derive(Default)]
struct All {
    /// As they were written: their numbers are not read and written again.
    reports: Vec<String>,
    left_out: Vec<LeftOut>,
}

/// A line that this machine cannot run, or that has failed.
struct LeftOut {
    line: &'static str,
    failure: Failure,
}

/// A file of results cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{}", path.display())]
struct FileError {
    path: PathBuf,
    #[source]
    source: std::io::Error,
}

/// Runs them all, each by its command line after `pagetide bench`, and writes the one file.
pub(crate) fn run(
    arguments: &AllArguments,
    run_line: impl Fn(Vec<OsString>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let (benchmarks, runs) = match arguments.quick {
        true => (QUICK, 1),
        false => (WHOLE, arguments.runs),
    };
    let file = arguments.out.join(FILE);
    let mut all = All::default();
    for lines in benchmarks {
        for line in *lines {
            print(&format!("== pagetide bench {line} --runs {runs}\n\n"))?;
            let ran = run_line(words(line, runs, arguments));
            let can_run = !matches!(ran, Err(Failure::BadInput(_)));
            match ran {
                Ok(()) => all.reports.push(read(&arguments.out, line)?),
                Err(failure) => {
                    print(&format!("not measured: {failure}\n"))?;
                    all.left_out.push(LeftOut { line, failure });
                }
            }
            print("\n")?;
            if can_run {
                break;
            }
        }
        // The next one may be the last thing that this machine does.
        if !all.reports.is_empty() {
            all.write(&file)?;
        }
    }
    if !all.reports.is_empty() {
        print(&format!("All results: {}\n", file.display()))?;
    }
    let is_failed = |left_out: &LeftOut| matches!(left_out.failure, Failure::Failed(_));
    let failed = all.left_out.iter().position(is_failed);
    let nothing = (all.reports.is_empty() && !all.left_out.is_empty()).then_some(0);
    match failed.or(nothing) {
        Some(index) => Err(all.left_out.swap_remove(index).failure),
        None => Ok(()),
    }
}

/// A benchmark's command line after `pagetide bench`.
fn words(line: &str, runs: u32, arguments: &AllArguments) -> Vec<OsString> {
    let mut words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
    words.extend(["--runs".into(), runs.to_string().into()]);
    words.extend(["--out".into(), arguments.out.clone().into()]);
    words.extend(arguments.quiet.then_some("--quiet".into()));
    words
}

/// The report that the benchmark of this line has left.
fn read(directory: &Path, line: &str) -> Result<String, Failure> {
    let benchmark = line.split(' ').next().unwrap_or(line);
    let path = directory.join(format!("{benchmark}.json"));
    let text = std::fs::read_to_string(&path);
    text.map_err(|source| Failure::failed(FileError { path, source }))
}

impl All {
    /// The file is whole on the disk, as before or as now, whatever the machine does next.
    fn write(&self, file: &Path) -> Result<(), Failure> {
        let new = file.with_extension("json.new");
        let write = || {
            let mut written = File::create(&new)?;
            written.write_all(self.text().as_bytes())?;
            written.sync_all()?;
            std::fs::rename(&new, file)
        };
        write().map_err(|source| {
            let path = file.to_owned();
            Failure::failed(FileError { path, source })
        })
    }

    fn text(&self) -> String {
        let left_out = self.left_out.iter().map(|left_out| {
            let reason = left_out.failure.to_string();
            serde_json::json!({"command": format!("pagetide bench {}", left_out.line), "reason": reason})
        });
        let left_out = Value::Array(left_out.collect());
        let reports = self.reports.join(",\n");
        format!(
            "{{\"schema\": \"{SCHEMA}\", \"left_out\": {left_out}, \"reports\": [\n{reports}]}}\n"
        )
    }
}

/// The reports in the text of such a file, and what was left out, in lines; `None` if it is another file.
pub(crate) fn parts_of(text: &str) -> Option<(Vec<String>, String)> {
    let value: Value = serde_json::from_str(text).ok()?;
    if value["schema"] != SCHEMA {
        return None;
    }
    let reports = value["reports"].as_array()?;
    let left_out = value["left_out"].as_array()?.iter().map(|left_out| {
        let of = |name: &str| left_out[name].as_str().unwrap_or("unknown").to_owned();
        format!("Not measured: {}: {}\n", of("command"), of("reason"))
    });
    let reports = reports.iter().map(Value::to_string).collect();
    Some((reports, left_out.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_read_back_with_what_was_left_out() {
        let source = std::io::Error::other("a \"quoted\" reason");
        let path = "file".into();
        let all = All {
            reports: ["{\"a\": 0.1}\n", "{\"b\": [1, 2]}"]
                .map(str::to_owned)
                .to_vec(),
            left_out: vec![LeftOut {
                line: "paging --vcpus 1",
                failure: Failure::bad_input(FileError { path, source }),
            }],
        };
        let (reports, left_out) = parts_of(&all.text()).unwrap();
        assert_eq!(reports, ["{\"a\":0.1}", "{\"b\":[1,2]}"]);
        let wanted = "Not measured: pagetide bench paging --vcpus 1: file: a \"quoted\" reason\n";
        assert_eq!(left_out, wanted);
        assert_eq!(parts_of("{\"schema\": \"pagetide/2\"}"), None);
    }
}
