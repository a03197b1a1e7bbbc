//! `cargo xtask profile`: where the instructions of a fault go, by function and group.
//!
//! The benchmark runs in the lab's software CPU, whose plugin (profile/plugin.c) counts the
//! instructions of every block of code while the benchmark's clock runs. profile/groups.txt says what
//! belongs together.

mod counters;
mod groups;
mod sums;
mod symbols;
mod table;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use fs_err as fs;
use serde_json::json;

use crate::command::Run;
use crate::files;
use crate::kernel::{Arch, Variant};
use crate::paths::Paths;
use crate::vm::{self, Job, Output, Timing, VmArgs};
use counters::Counters;
use groups::Groups;
use sums::{Boot, Column, Reported};
use symbols::Symbols;

/// What is compared: a name, and the benchmark's options for it. The first is the floor.
const SERIES: [(&str, &str); 4] = [
    ("none", "--delivery none"),
    ("userfaultfd", "--delivery uffd"),
    ("exit", "--delivery exit"),
    ("exit, 16 around", "--delivery exit --fault-around 16"),
];

/// The verb's arguments.
#[derive(Debug, Args)]
pub(crate) struct ProfileArgs {
    /// vCPUs of the guest
    #[arg(long, value_name = "N", default_value_t = 1)]
    vcpus: u32,
    /// Memory of each vCPU
    #[arg(long, value_name = "BYTES", default_value = "16M")]
    per_vcpu: String,
    /// Measured runs in each boot; one more warms up and is not counted
    #[arg(long, value_name = "N", default_value_t = 5)]
    runs: u32,
    /// Boots of each delivery, for the range
    #[arg(long, value_name = "N", default_value_t = 3)]
    boots: u32,
    /// End a VM, as lost, after so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    timeout: u64,
    /// Use the kernel and the `pagetide` command as they were built last
    #[arg(long)]
    no_build: bool,
    /// Boot nothing: group the functions of the last profile anew
    #[arg(long)]
    regroup: bool,
}

/// Runs the verb.
pub(crate) fn run(args: &ProfileArgs, paths: &Paths) -> Result<ExitCode> {
    if args.vcpus == 0 || args.runs == 0 || args.boots == 0 {
        bail!("--vcpus, --runs and --boots must be at least 1");
    }
    let groups = Groups::ours()?;
    let file = paths.target().join("pagetide/profile.json");
    let (command, boots) = if args.regroup {
        last(&file)?
    } else {
        (benchmark(args, "DELIVERY").join(" "), measure(args, paths)?)
    };
    let columns = SERIES
        .iter()
        .map(|(series, _)| Column::new(series, &boots, &groups))
        .collect::<Result<Vec<_>>>()?;
    write(&file, &command, &boots, &columns, &groups)?;
    println!("{command}\n\n{}", table::show(&columns, &groups));
    println!("all functions: {}", file.display());
    columns.iter().try_for_each(Column::check)?;
    Ok(ExitCode::SUCCESS)
}

fn measure(args: &ProfileArgs, paths: &Paths) -> Result<Vec<Boot>> {
    let plugin = build_plugin(paths)?;
    let dir = paths.target().join("pagetide/profile");
    fs::create_dir_all(&dir)?;
    let mut symbols = None;
    let mut boots = Vec::new();
    // The series alternate, so that whatever else this machine does meets all of them.
    for round in 0..args.boots {
        for (series, options) in SERIES {
            let counters = dir.join("counters");
            let built = args.no_build || !boots.is_empty();
            boot(args, built, &plugin, options, &dir, paths)
                .with_context(|| format!("{series}, boot {}", round + 1))?;
            let names = match symbols.take() {
                Some(names) => names,
                None => Symbols::load(
                    &paths.target().join("kernel/x86_64/vmlinux"),
                    &paths.target().join("release/pagetide"),
                )?,
            };
            let boot = sum_up(series, &counters, &dir.join("paging.json"), &names)?;
            symbols = Some(names);
            eprintln!("{series}, boot {}: {} pages", round + 1, boot.pages);
            boots.push(boot);
        }
    }
    Ok(boots)
}

fn build_plugin(paths: &Paths) -> Result<PathBuf> {
    let dir = paths.target().join("pagetide");
    fs::create_dir_all(&dir)?;
    let plugin = dir.join("profile-plugin.so");
    Run::new("gcc")
        .words("-shared -fPIC -fvisibility=hidden -O2 -Wall -Wextra -Werror -o")
        .arg(&plugin)
        .arg(paths.in_root("xtask/src/profile/plugin.c"))
        .output()?;
    Ok(plugin)
}

/// The benchmark's command line, but for where its results go.
fn benchmark(args: &ProfileArgs, options: &str) -> Vec<String> {
    format!(
        "pagetide bench paging {options} --vcpus {} --per-vcpu {} --runs {} --readers 1 \
         --backing shmem --mode minor --uffds single",
        args.vcpus, args.per_vcpu, args.runs
    )
    .split_whitespace()
    .map(str::to_owned)
    .collect()
}

/// Boots one VM that leaves the counters and the benchmark's results in `dir`.
fn boot(
    args: &ProfileArgs,
    no_build: bool,
    plugin: &Path,
    options: &str,
    dir: &Path,
    paths: &Paths,
) -> Result<()> {
    let mut vm = VmArgs::new(Variant::patched(Arch::X86_64));
    vm.timing = Timing::Instructions;
    vm.timeout = args.timeout;
    vm.no_build = no_build;
    // Addresses must be those that nm knows. The kernel's own do not move: it has no KASLR.
    vm.append.push("norandmaps".into());
    let out = dir.join("counters");
    for path in [plugin, &out] {
        if path.as_os_str().as_encoded_bytes().contains(&b',') {
            bail!("{}: QEMU's options cannot carry a comma", path.display());
        }
    }
    // The first run warms up: the benchmark does not count it either.
    let option = [
        "file=".as_ref(),
        plugin.as_os_str(),
        ",skip=1,out=".as_ref(),
        out.as_os_str(),
    ];
    vm.plugin = Some(option.into_iter().collect());
    files::remove(&out)?;
    files::remove(&dir.join("paging.json"))?;
    let words = benchmark(args, options).into_iter().map(OsString::from);
    let command = words.chain(["--out".into(), dir.into()]).collect();
    let job = Job {
        timeout: None,
        ..Job::new(command, paths.root())
    };
    let mut ignored = |_, _| {};
    let outcome = vm::boot(&vm, &[job], Output::Keep(&mut ignored), paths)?;
    let said = String::from_utf8_lossy(&outcome.stderr);
    match vm::show(&outcome) {
        0 => Ok(()),
        code => bail!(
            "the benchmark ended with status {code}: {}",
            said.trim_end()
        ),
    }
}

fn sum_up(series: &str, counters: &Path, report: &Path, symbols: &Symbols) -> Result<Boot> {
    let counted = Counters::parse(&fs::read_to_string(counters)?);
    let counted = counted.with_context(|| format!("{}", counters.display()))?;
    let reported = Reported::parse(&fs::read_to_string(report)?);
    let reported = reported.with_context(|| format!("{}", report.display()))?;
    let (seen, made) = (counted.windows, reported.runs);
    if seen != made {
        bail!("the plugin saw {seen} measured runs, and the benchmark made {made}");
    }
    let mut functions = BTreeMap::new();
    for (&address, &instructions) in &counted.blocks {
        *functions.entry(symbols.name(address)).or_default() += instructions;
    }
    Ok(Boot {
        series: series.to_owned(),
        pages: reported.pages,
        reported: reported.nanoseconds,
        functions,
    })
}

fn write(
    file: &Path,
    command: &str,
    boots: &[Boot],
    columns: &[Column],
    groups: &Groups,
) -> Result<()> {
    let profile = json!({
        "schema": "pagetide.profile/1",
        "command": command,
        "groups": groups.names().iter().map(String::as_str).chain([groups::OTHER]).collect::<Vec<_>>(),
        "instructions_per_page": columns,
        "boots": boots,
    });
    Ok(fs::write(file, serde_json::to_string_pretty(&profile)?)?)
}

/// The command and the boots of the profile that was taken last.
fn last(file: &Path) -> Result<(String, Vec<Boot>)> {
    let text = fs::read_to_string(file).context("no profile was taken yet")?;
    let mut profile: serde_json::Value = serde_json::from_str(&text)?;
    let command = profile["command"].as_str().unwrap_or_default().to_owned();
    Ok((command, serde_json::from_value(profile["boots"].take())?))
}
