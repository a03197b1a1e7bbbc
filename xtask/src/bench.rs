//! `cargo xtask bench` and `report`: the benchmarks in the lab, and where their pages are.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::kernel::{Arch, Variant};
use crate::paths::Paths;
use crate::setup;
use crate::vm::{self, Job, LOST, Output, Timing, VmArgs};

/// How often a measurement whose VM was lost is repeated. Only the parallel software CPU loses VMs.
const TRIES: u32 = 4;

/// A run of `pagetide bench` in a VM.
pub(crate) struct Measurement {
    /// Which benchmark.
    pub(crate) benchmark: &'static str,
    /// Its directory below target/pagetide; empty for that directory itself.
    pub(crate) name: &'static str,
    pub(crate) timing: Timing,
    pub(crate) arguments: &'static str,
    /// For the VM.
    pub(crate) seconds: u64,
    pub(crate) huge_pages: Option<HugePages>,
}

/// What a measurement with huge pages needs of its VM: transparent ones for shmem, and so many in the pool
/// of 2M pages.
pub(crate) struct HugePages {
    pool: u32,
}

/// Runs its arguments with transparent huge pages for shmem.
const WITH_THP: &str =
    "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled && exec \"$@\"";

/// What SPECIFICATION.md promises.
const SPECIFICATION: [Measurement; 7] = [
    Measurement {
        benchmark: "paging",
        name: "instructions",
        timing: Timing::Instructions,
        arguments: "--vcpus 1,2,4,8 --per-vcpu 16M --delivery none,uffd,exit \
                    --fault-around 1,16,64 --populate --readers 1 --runs 7",
        seconds: 3600,
        huge_pages: None,
    },
    Measurement {
        benchmark: "paging",
        name: "parallel",
        timing: Timing::Parallel,
        arguments: "--vcpus 1,2 --per-vcpu 16M --delivery uffd,exit --fault-around 1,16,64 \
                    --populate --readers 1 --runs 7",
        seconds: 1800,
        huge_pages: None,
    },
    Measurement {
        benchmark: "memslots",
        name: "memslots",
        timing: Timing::Instructions,
        arguments: "--vcpus 1,2,8,16 --ops split --commits 8 --method list,quiesce --runs 7",
        seconds: 3600,
        huge_pages: None,
    },
    Measurement {
        benchmark: "populate",
        name: "populate-instructions",
        timing: Timing::Instructions,
        arguments: "--vcpus 1,2 --memory 64M --backing shmem --threads 1,2 --runs 7",
        seconds: 3600,
        huge_pages: None,
    },
    Measurement {
        benchmark: "populate",
        name: "populate-parallel",
        timing: Timing::Parallel,
        arguments: "--vcpus 1,2 --memory 64M --backing shmem --threads 1,2 --runs 7",
        seconds: 1800,
        huge_pages: None,
    },
    Measurement {
        benchmark: "populate",
        name: "populate-threads",
        timing: Timing::Parallel,
        arguments: "--vcpus 2 --memory 256M --backing shmem --method pre-fault,populate \
                    --threads 1,2 --runs 7",
        seconds: 1800,
        huge_pages: None,
    },
    Measurement {
        benchmark: "memcycler",
        name: "memcycler",
        timing: Timing::Instructions,
        arguments: "--vcpus 2 --memory 32M --backing thp,hugetlb-2m --poison 0,5,25 \
                    --policy keep,default --seconds 1 --runs 7",
        seconds: 3600,
        huge_pages: Some(HugePages { pool: 128 }),
    },
];

impl Measurement {
    /// Where its page, drawing and data are.
    pub(crate) fn out(&self, paths: &Paths) -> PathBuf {
        paths.target().join("pagetide").join(self.name)
    }

    /// Kernel parameters of its VM.
    fn parameters(&self) -> Option<String> {
        let huge = self.huge_pages.as_ref()?;
        Some(format!("hugepages={}", huge.pool))
    }
}

/// Takes the measurements of SPECIFICATION.md.
pub(crate) fn bench(paths: &Paths) -> Result<ExitCode> {
    setup::run()?;
    for measurement in &SPECIFICATION {
        println!(
            "== {}: pagetide bench {} {}",
            measurement.name, measurement.benchmark, measurement.arguments
        );
        let code = measure(measurement, paths)?;
        if code != ExitCode::SUCCESS {
            return Ok(code);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Tells where the results are.
pub(crate) fn report(paths: &Paths) -> Result<ExitCode> {
    let top = paths.target().join("pagetide");
    let mut pages = Vec::new();
    if top.exists() {
        find_pages(&top, &mut pages)?;
    }
    if pages.is_empty() {
        bail!(
            "no results below {}: run `make demo` or `make bench`",
            top.display()
        );
    }
    for page in pages {
        println!("{}", page.display());
    }
    Ok(ExitCode::SUCCESS)
}

fn find_pages(dir: &Path, pages: &mut Vec<PathBuf>) -> Result<()> {
    let mut entries: Vec<_> = std::fs::read_dir(dir)
        .with_context(|| format!("read {}", dir.display()))?
        .map(|entry| entry.map(|e| e.path()))
        .collect::<Result<_, _>>()?;
    entries.sort();
    for entry in entries {
        if entry.is_dir() {
            find_pages(&entry, pages)?;
        } else if entry
            .extension()
            .is_some_and(|extension| extension == "html")
        {
            pages.push(entry);
        }
    }
    Ok(())
}

/// Takes a measurement in a VM of the lab; its table goes to standard output, its files to
/// [`Measurement::out`].
pub(crate) fn measure(measurement: &Measurement, paths: &Paths) -> Result<ExitCode> {
    let mut args = VmArgs::new(Variant::patched(Arch::X86_64));
    // The guests of benchmarks take no interrupts, and the first run is to be quick.
    args.builds_qemu = false;
    args.timing = measurement.timing;
    args.timeout = measurement.seconds;
    args.append.extend(measurement.parameters());
    let out = measurement.out(paths);
    for lost in 0..TRIES {
        let job = job(measurement, lost, &out, paths);
        let code = vm::show(&vm::boot(&args, &[job], Output::Pass, paths)?);
        if code != LOST || measurement.timing != Timing::Parallel {
            if code == 0 {
                let page = format!("{}.html", measurement.benchmark);
                println!("the page: {}", out.join(page).display());
            }
            return Ok(ExitCode::from(code));
        }
        eprintln!("the parallel software CPU loses a VM now and then; once more");
    }
    bail!("{TRIES} VMs were lost one after the other")
}

/// The results state how many VMs were lost before.
fn job(measurement: &Measurement, lost: u32, out: &Path, paths: &Paths) -> Job {
    let shell: &[&str] = match measurement.huge_pages {
        Some(_) => &["sh", "-c", WITH_THP, "sh"],
        None => &[],
    };
    let mut command: Vec<_> = shell
        .iter()
        .chain(&["pagetide", "bench", measurement.benchmark])
        .map(std::ffi::OsString::from)
        .collect();
    command.extend(measurement.arguments.split_whitespace().map(Into::into));
    command.extend([
        "--lost-runs".into(),
        lost.to_string().into(),
        "--out".into(),
        out.into(),
    ]);
    Job {
        timeout: None,
        ..Job::new(command, paths.root())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_specification_names_the_commands_that_are_run() {
        let paths = Paths::find().unwrap();
        let promised = std::fs::read_to_string(paths.in_root("SPECIFICATION.md")).unwrap();
        for measurement in &SPECIFICATION {
            let parameters = measurement.parameters();
            let append = parameters.map_or_else(String::new, |p| format!(" --append {p}"));
            let command = format!(
                "`cargo xtask vm --timing {}{append} -- pagetide bench {} {}`",
                measurement.timing.name(),
                measurement.benchmark,
                measurement.arguments
            );
            assert!(promised.contains(&command), "{command}");
        }
    }

    #[test]
    fn a_repeated_measurement_says_how_often() {
        let paths = Paths::find().unwrap();
        let job = job(&SPECIFICATION[0], 2, Path::new("/out"), &paths);
        let words: Vec<_> = job.command.iter().map(|w| w.to_string_lossy()).collect();
        assert!(
            words.windows(2).any(|pair| pair == ["--lost-runs", "2"]),
            "{words:?}"
        );
        assert!(
            words.windows(2).any(|pair| pair == ["--out", "/out"]),
            "{words:?}"
        );
    }
}
