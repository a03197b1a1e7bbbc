//! `cargo xtask trace`: which functions of ours one fault takes, from a recorded trace of it.
//!
//! crates/vmm/examples/one_fault.rs is compiled without optimisation, so that no function is inlined, and so that each
//! calls trace/mcount.c when it is entered.

mod functions;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use fs_err as fs;

use crate::command::Run;
use crate::paths::Paths;
use functions::{Function, document};

/// Ours that the development profile optimises.
const OPTIMISED: [&str; 5] = ["kvm", "memory", "pager", "uapi", "vmm"];

/// What begins a kind of fault in the program, and what the document calls it.
const KINDS: [(&str, &str); 2] = [
    ("exit_begins", "An exit, with the content in the page cache"),
    (
        "message_begins",
        "A userfaultfd's message, with the content from a source",
    ),
];

/// Runs the verb.
pub(crate) fn run(paths: &Paths) -> Result<()> {
    let dir = paths.target().join("trace");
    fs::create_dir_all(&dir)?;
    let program = build(&dir, paths)?;
    let trace = record(&program, &dir)?;
    let names = name(&program, &trace, paths)?;
    let mut kinds = Vec::new();
    for (begins, title) in KINDS {
        kinds.push((title, between(&trace, &names, begins)?));
    }
    let place = paths.in_root("docs/design/functions-of-a-fault.md");
    fs::write(&place, document(&kinds))?;
    println!("{}", place.display());
    Ok(())
}

/// Compiles the program for this machine, in a directory of its own: no other build has these flags.
fn build(dir: &Path, paths: &Paths) -> Result<PathBuf> {
    let object = dir.join("mcount.o");
    Run::new("gcc")
        .words("-c -O2 -Wall -Wextra -Werror -o")
        .arg(&object)
        .arg(paths.in_root("xtask/src/trace/mcount.c"))
        .output()?;
    let host = Run::new("rustc").args(["--print", "host-tuple"]).text()?;
    let mut cargo = Run::new("cargo")
        .words("build --locked --package pagetide-vmm --example one_fault --target")
        .arg(&host)
        .arg("--target-dir")
        .arg(dir);
    for package in OPTIMISED {
        let setting = format!("profile.dev.package.pagetide-{package}.opt-level=0");
        cargo = cargo.args(["--config", &setting]);
    }
    // The flag is rustc's own business so far: it may change with the compiler. The addresses are those of the file.
    let flags = format!(
        "-Zinstrument-mcount -Crelocation-model=static -Clink-arg={}",
        object.display()
    );
    cargo
        .dir(paths.root())
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", flags)
        .output()?;
    Ok(dir.join(host).join("debug/examples/one_fault"))
}

/// Runs the program. Returns where functions were entered, in order.
fn record(program: &Path, dir: &Path) -> Result<Vec<String>> {
    let out = dir.join("entered");
    Run::new(program).env("PAGETIDE_TRACE", &out).output()?;
    let text = fs::read_to_string(&out)?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// The functions at these addresses, as far as they are ours. A closure belongs to the function around it.
fn name(program: &Path, trace: &[String], paths: &Paths) -> Result<BTreeMap<String, Function>> {
    let addresses: BTreeSet<_> = trace.iter().collect();
    let lines = Run::new("addr2line")
        .args(["--functions", "--demangle", "--exe"])
        .arg(program)
        .args(&addresses)
        .text()?;
    let lines: Vec<_> = lines.lines().collect();
    let pairs = lines.as_chunks::<2>().0;
    ensure!(pairs.len() == addresses.len(), "addr2line has lost lines");
    let crates = paths.in_root("crates");
    let mut texts = BTreeMap::new();
    let mut names = BTreeMap::new();
    for (address, [name, place]) in addresses.into_iter().zip(pairs) {
        let Some((path, line)) = place.rsplit_once(':') else {
            continue;
        };
        let path = Path::new(path);
        let Some(file) = path.strip_prefix(&crates).ok().and_then(Path::to_str) else {
            continue;
        };
        if name.ends_with('}') {
            continue;
        }
        if !texts.contains_key(file) {
            texts.insert(file, fs::read_to_string(path)?);
        }
        let line = line.split(' ').next().and_then(|line| line.parse().ok());
        let function = line.and_then(|line| Function::at(file, &texts[file], line));
        names.extend(function.map(|function| (address.clone(), function)));
    }
    Ok(names)
}

/// What was entered between the markers of one kind: each function once, in the order of first entry.
fn between(
    trace: &[String],
    names: &BTreeMap<String, Function>,
    begins: &str,
) -> Result<Vec<Function>> {
    let mut found = Vec::new();
    let entered = trace.iter().filter_map(|address| names.get(address));
    let mut behind = entered.skip_while(|function| function.name != begins);
    behind
        .next()
        .with_context(|| format!("{begins} was not entered"))?;
    for function in behind {
        if function.name == "fault_ends" {
            return Ok(found);
        }
        // What the program brings itself is not ours.
        if !function.file.contains("/examples/") && !found.contains(function) {
            found.push(function.clone());
        }
    }
    anyhow::bail!("the fault after {begins} has no end")
}
