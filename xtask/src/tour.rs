//! `cargo xtask tour`: docs/tour.md, and its pictures in docs/images/tour: what each command ends with, from real runs.

mod stops;
mod terminal;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use fs_err as fs;

use crate::command::Run;
use crate::files;
use crate::guest;
use crate::guest_memory;
use crate::kernel::{Arch, Variant};
use crate::paths::Paths;
use crate::progress::Progress;
use crate::vm::{self, Ended, Finished, Job, Output, Timing, VmArgs};
use stops::{Place, STOPS, Stop};

/// The verb's arguments.
#[derive(Debug, Args)]
pub(crate) struct TourArgs {
    /// Only these pictures, by their names in docs/images/tour (may be given several times) [default: all]
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
}

/// Where the pictures are.
const PICTURES: &str = "docs/images/tour";
const DOCUMENT: &str = "docs/tour.md";

/// The memory of the guest that is restored.
const MEMORY_BYTES: usize = 256 << 20;

/// Runs the verb.
pub(crate) fn run(args: &TourArgs, paths: &Paths) -> Result<()> {
    for name in &args.only {
        let known = STOPS.iter().map(|stop| stop.name);
        ensure!(
            known.clone().any(|known| known == name),
            "no picture is named {name:?}: they are {}",
            known.collect::<Vec<_>>().join(", ")
        );
    }
    let chosen =
        |stop: &&Stop| args.only.is_empty() || args.only.iter().any(|name| name == stop.name);
    let stops: Vec<&Stop> = STOPS.iter().filter(chosen).collect();
    let directory = prepare(args.only.is_empty(), paths)?;
    for stop in &stops {
        if stop.place == Place::Host {
            let progress = Progress::spinner(stop.name);
            let text = on_this_machine(stop, &directory, paths)?;
            progress.done();
            draw(stop, &text, &directory, paths)?;
        }
    }
    for place in [Place::Lab, Place::LabWithOneCpu] {
        let there: Vec<&Stop> = stops
            .iter()
            .copied()
            .filter(|stop| stop.place == place)
            .collect();
        if !there.is_empty() {
            in_the_lab(place, &there, &directory, paths)?;
        }
    }
    fs::write(paths.in_root(DOCUMENT), document())?;
    println!("{}", paths.in_root(DOCUMENT).display());
    Ok(())
}

/// What the commands find in their directory, target/tour.
fn prepare(is_whole: bool, paths: &Paths) -> Result<PathBuf> {
    vm::build_pagetide(paths)?;
    let compiles = |line: &str| line.trim_start().starts_with("Compiling ");
    let progress = Progress::start("building restored", None, compiles);
    Run::new("cargo")
        .words("build --release --package pagetide-examples --example restored --target-dir")
        .arg(paths.target())
        .dir(paths.root())
        .logged(&paths.target().join("vm/example.log"), &progress)?;
    progress.done();
    let directory = paths.target().join("tour");
    if !is_whole && directory.join("web.mem").exists() {
        // Some stops take what others have left.
        return Ok(directory);
    }
    files::fresh_dir(&directory)?;
    guest_memory::write(&directory.join("web.mem"), MEMORY_BYTES)?;
    let kernel = Variant::patched(Arch::X86_64).image(paths);
    let vmlinux = kernel.with_file_name("vmlinux");
    std::os::unix::fs::symlink(vmlinux, directory.join("vmlinux"))?;
    std::os::unix::fs::symlink(guest::build(paths)?, directory.join("initramfs.cpio"))?;
    Ok(directory)
}

/// The shell program of a stop, whose output is what a terminal would show.
fn script(stop: &Stop) -> String {
    let lines = stop.commands.lines().map(|line| match stops::hidden(line) {
        Some(hidden) => format!("{{ {hidden}; }} >&3 2>&3\n"),
        None => format!("printf '%s\\n' {}\n{line}\n", quoted(&format!("$ {line}"))),
    });
    let body: String = lines.collect();
    format!("{PROLOGUE}{body}")
}

/// What all stops have before their commands: a server that one has started ends with the stop, and nothing is waited for
/// longer than a minute.
const PROLOGUE: &str = "\
exec 2>&1 3>log.hidden
set -e
server=
trap 'test -z \"$server\" || kill $server 2>/dev/null || true' EXIT
wait_for() { n=0; until \"$@\"; do n=$((n + 1)); test $n -lt 600; sleep 0.1; done; }
";

/// A word for a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

fn on_this_machine(stop: &Stop, directory: &Path, paths: &Paths) -> Result<String> {
    let release = paths.target().join("release");
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!(
        "{}:{}:{path}",
        release.display(),
        release.join("examples").display()
    );
    let output = Run::new("sh")
        .args(["-c", &script(stop)])
        .env("PATH", path)
        .dir(directory)
        .result()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success(),
        "{}: {}\n{text}",
        stop.name,
        output.status
    );
    Ok(text)
}

fn in_the_lab(place: Place, stops: &[&Stop], directory: &Path, paths: &Paths) -> Result<()> {
    let mut args = VmArgs::new(Variant::patched(Arch::X86_64));
    args.timeout = 3600;
    match place {
        Place::LabWithOneCpu => args.cpus = Some(1),
        _ => args.timing = Timing::Instructions,
    }
    let jobs: Vec<Job> = stops
        .iter()
        .map(|stop| {
            let command = ["sh".into(), "-c".into(), script(stop).into()];
            let mut job = Job::new(command.into(), directory);
            let huge = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
            job.settings.push((huge, "advise".into()));
            job.timeout = None;
            job
        })
        .collect();
    let progress = Progress::spinner("in the lab");
    let names: Vec<&str> = stops.iter().map(|stop| stop.name).collect();
    let mut tell = |index: usize, finished: Finished| {
        let name = names.get(index).copied().unwrap_or_default();
        progress.line(&format!("{name}: {:.0} s", finished.time.as_secs_f64()));
    };
    let outcome = vm::boot(&args, &jobs, Output::Keep(&mut tell), paths)?;
    progress.done();
    if let Some(lost) = &outcome.lost {
        bail!("the VM was lost: {lost}\n{}", outcome.console_tail());
    }
    for (stop, job) in stops.iter().zip(outcome.jobs()) {
        let text = String::from_utf8_lossy(&job.stdout).into_owned();
        let ended = job.finished.context("the VM ended before")?.ended;
        ensure!(ended == Ended::Exit(0), "{}: {ended}\n{text}", stop.name);
        draw(stop, &text, directory, paths)?;
    }
    Ok(())
}

/// Writes a stop's picture. Where this checkout is, is nothing that it shows.
fn draw(stop: &Stop, text: &str, directory: &Path, paths: &Paths) -> Result<()> {
    let text = text.replace(&directory.display().to_string(), "/srv/vms");
    let place = paths.in_root(PICTURES).join(format!("{}.svg", stop.name));
    fs::create_dir_all(paths.in_root(PICTURES))?;
    fs::write(&place, terminal::draw(&text))?;
    println!("{}", place.display());
    Ok(())
}

/// The document: for each command what it is for, the command lines, and the picture.
fn document() -> String {
    let mut text = String::from(
        "# A tour\n\n\
         What each command is for, how it is called, and what it ends with. The pictures are real runs by `cargo xtask \
         tour`,\nwhich makes them again: on the machine that drew them, or in the [lab](design/lab.md), whose processor \
         is emulated. In its\nbenchmarks, a nanosecond is an instruction. The memory that is restored, web.mem, is 256 MiB that the \
         tour makes up. `pagetide COMMAND --help`\nhas all options.\n",
    );
    for stop in &STOPS {
        let place = match stop.place {
            Place::Host => "",
            Place::Lab | Place::LabWithOneCpu => " In the lab:",
        };
        text += &format!(
            "\n## {}\n\n{}{place}\n\n```\n{}\n```\n\n![{} in a terminal](images/tour/{}.svg)\n",
            stop.title,
            stop.purpose,
            stop.shown().join("\n"),
            stop.title,
            stop.name
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_is_the_list_and_each_picture_shows_its_commands() {
        let paths = Paths::find().unwrap();
        let written = std::fs::read_to_string(paths.in_root(DOCUMENT)).unwrap();
        assert!(
            written == document(),
            "{DOCUMENT} is not what `cargo xtask tour` writes"
        );
        let mut pictures: Vec<String> = std::fs::read_dir(paths.in_root(PICTURES))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        pictures.sort();
        let mut wanted: Vec<String> = STOPS
            .iter()
            .map(|stop| format!("{}.svg", stop.name))
            .collect();
        wanted.sort();
        assert_eq!(pictures, wanted);
        for stop in &STOPS {
            let place = paths.in_root(PICTURES).join(format!("{}.svg", stop.name));
            let picture = std::fs::read_to_string(place).unwrap();
            for command in stop.shown() {
                let line = terminal::first_row(&format!("$ {command}"));
                assert!(picture.contains(&line), "{}: {line}", stop.name);
            }
        }
    }

    #[test]
    fn hidden_lines_run_and_are_not_shown() {
        let stop = Stop {
            name: "x",
            title: "x",
            purpose: "x",
            place: Place::Host,
            commands: "@echo hidden > made\ncat made && echo 'it''s'\n@exit 0",
        };
        let place = tempfile::tempdir().unwrap();
        let run = Run::new("sh")
            .args(["-c", &script(&stop)])
            .dir(place.path());
        assert_eq!(
            run.text().unwrap(),
            "$ cat made && echo 'it''s'\nhidden\nits"
        );
        assert_eq!(stop.shown(), ["cat made && echo 'it''s'"]);
    }
}
