//! `SPECIFICATION.md`: each row names a test or a command that exists, and says whether `make test` runs it
//! as the row has it. The document's head describes the form.

use std::collections::{BTreeMap, BTreeSet};

use clap::Parser;

use super::markdown;
use crate::kernel::selftests::Runs;
use crate::kernel::{Arch, Variant, selftests};
use crate::paths::Paths;
use crate::{Cli, Verb};

const HEAD: [&str; 4] = ["promise", "seen", "shown by", "in make test"];

/// What one code span of "shown by" names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shown {
    /// `make test` runs it.
    InMakeTest,
    /// Only a person runs it.
    ByHand,
}

/// What the checkout has to name.
struct Named<'a> {
    paths: &'a Paths,
    /// Selftests that `make test` runs, by name and arguments.
    selftests: BTreeMap<String, BTreeSet<&'static str>>,
}

impl<'a> Named<'a> {
    fn new(paths: &'a Paths) -> Self {
        let mut named = Self {
            paths,
            selftests: BTreeMap::new(),
        };
        for arch in [Arch::X86_64, Arch::Arm64] {
            for test in selftests::list(arch, paths).unwrap() {
                if matches!(test.runs, Runs::Always | Runs::Parallel) {
                    let archs = named.selftests.entry(test.label()).or_default();
                    archs.insert(arch.name());
                }
            }
        }
        named
    }

    /// A test function, as `PATH.rs::NAME`.
    fn test(&self, path: &str, name: &str) -> Result<Shown, String> {
        let text = std::fs::read_to_string(self.paths.in_root(path))
            .map_err(|error| format!("{path}: {error}"))?;
        let attributes = attributes(&text, name).ok_or(format!("{path} has no function {name}"))?;
        if !attributes.contains(&"#[test]") {
            return Err(format!("{name} in {path} is no test"));
        }
        let ignored = attributes.iter().any(|a| a.starts_with("#[ignore"));
        Ok(if ignored {
            Shown::ByHand
        } else {
            Shown::InMakeTest
        })
    }

    /// A selftest with its arguments, and the architectures that the row names after it.
    fn selftest(&self, label: &str, after: &str) -> Result<Shown, String> {
        let archs = self
            .selftests
            .get(label)
            .ok_or(format!("make test runs no selftest {label:?}"))?;
        let runs_on = archs.iter().copied().collect::<Vec<_>>().join(", ");
        let names = after
            .strip_prefix(" (")
            .and_then(|rest| rest.split_once(')'))
            .map(|(names, _)| names);
        if names != Some(&runs_on) {
            return Err(format!("after {label:?} must stand ({runs_on})"));
        }
        Ok(Shown::InMakeTest)
    }

    /// A command line. What `pagetide` is given is checked by the command's own tests.
    fn command(&self, line: &str) -> Result<Shown, String> {
        let words = markdown::words(line)?;
        let mut words: Vec<_> = words
            .iter()
            .map(String::as_str)
            .skip_while(|word| word.contains('='))
            .collect();
        if words.starts_with(&["chrt", "-r"]) {
            words.drain(..words.len().min(3));
        }
        match words.as_slice() {
            ["cargo", "xtask", arguments @ ..] => self.xtask(arguments),
            ["cargo", "test", arguments @ ..] => self.cargo_test(arguments),
            _ => Err(format!("{line:?} is neither xtask's nor a test's")),
        }
    }

    fn xtask(&self, arguments: &[&str]) -> Result<Shown, String> {
        let line = std::iter::once(&"cargo xtask").chain(arguments);
        let parsed = Cli::try_parse_from(line).map_err(|error| error.to_string())?;
        match parsed.verb {
            Verb::Test(test) if test.is_default() => Ok(Shown::InMakeTest),
            Verb::Uapi(_) => Ok(Shown::InMakeTest),
            Verb::Kernel(_) if arguments == ["kernel", "check", "--quick"] => Ok(Shown::InMakeTest),
            Verb::Vm(vm) => {
                let program = vm.command().first().ok_or("no command")?;
                self.in_vm(vm.variant(), &program.to_string_lossy())
            }
            _ => Ok(Shown::ByHand),
        }
    }

    /// `pagetide`, or a selftest, by its name or by its path in the VM.
    fn in_vm(&self, variant: Variant, program: &str) -> Result<Shown, String> {
        let (directory, name) = match program.rsplit_once('/') {
            Some((directory, name)) => (Some(self.paths.in_root(directory)), name),
            None => (None, program),
        };
        if name == "pagetide" {
            return Ok(Shown::ByHand);
        }
        let has = |variant| {
            let built = selftests::built(variant, self.paths).unwrap();
            built.iter().any(|test| test.name() == name)
        };
        // A VM of x86_64 shares the file system, and so can run what was built for another kernel.
        let shares = variant.arch == Arch::X86_64;
        let found = directory.map_or_else(
            || has(variant),
            |directory| {
                let is_in = |variant| {
                    has(variant) && directory == selftests::directory_in_vm(variant, self.paths)
                };
                is_in(variant) || shares && is_in(Variant::patched(variant.arch))
            },
        );
        found.then_some(Shown::ByHand).ok_or_else(|| {
            let kernel = variant.name();
            format!("{program} is neither pagetide nor a selftest in a VM of {kernel}")
        })
    }

    fn cargo_test(&self, arguments: &[&str]) -> Result<Shown, String> {
        let after = |option: &str| {
            let mut words = arguments.iter().skip_while(|word| **word != option);
            words.nth(1).copied()
        };
        let (Some(package), Some(test)) = (after("-p"), after("--test")) else {
            return Err("cargo test must name a package (-p) and a file (--test)".into());
        };
        let directory = match package.strip_prefix("pagetide-") {
            Some("examples") => "examples".to_owned(),
            Some(name) => format!("crates/{name}"),
            None => package.to_owned(),
        };
        let tests = self.paths.in_root(&directory).join("tests");
        let exists = tests.join(format!("{test}.rs")).is_file()
            || tests.join(test).join("main.rs").is_file();
        if exists {
            Ok(Shown::ByHand)
        } else {
            Err(format!("{package} has no tests/{test}"))
        }
    }
}

/// The attributes of a function, if the text has it.
fn attributes<'a>(text: &'a str, name: &str) -> Option<Vec<&'a str>> {
    let start = text.find(&format!("fn {name}("))?;
    let before = text.get(..start)?.lines().rev();
    // The first is what stands before `fn` in its own line.
    let before = before.map(str::trim).skip_while(|line| line.is_empty());
    Some(
        before
            .take_while(|line| line.starts_with("#[") || line.starts_with("///"))
            .collect(),
    )
}

/// The commands that rows name by a letter: `- A: ` and a code span at the beginning of a line.
fn definitions(text: &str) -> BTreeMap<&str, &str> {
    text.lines()
        .filter_map(|line| {
            let (letter, rest) = line.strip_prefix("- ")?.split_once(": `")?;
            let is_letter = letter.len() == 1 && letter.chars().all(|c| c.is_ascii_uppercase());
            is_letter.then_some((letter, rest.split_once('`')?.0))
        })
        .collect()
}

/// What is wrong with a row's "shown by", or what it names.
fn shown_by(
    cell: &str,
    letters: &BTreeMap<&str, Shown>,
    named: &Named<'_>,
) -> Vec<Result<Shown, String>> {
    let prose = markdown::prose(cell);
    let words = prose.split(|c: char| !c.is_ascii_alphanumeric());
    let mut found: Vec<_> = words
        .filter(|word| word.len() == 1 && word.chars().all(|c| c.is_ascii_uppercase()))
        .map(|letter| {
            let shown = letters.get(letter).copied();
            shown.ok_or(format!("no command has the letter {letter}"))
        })
        .collect();
    let mut file = None;
    for (span, after) in markdown::code_spans(cell) {
        found.push(match span.split_once("::") {
            Some((path, name)) if path.is_empty() || path.ends_with(".rs") => {
                if !path.is_empty() {
                    file = Some(path);
                }
                file.ok_or(format!("{span} names no file"))
                    .and_then(|file| named.test(file, name))
            }
            _ if span.split(' ').any(|word| word == "cargo") => named.command(span),
            _ => named.selftest(span, after),
        });
    }
    if found.is_empty() {
        found.push(Err("it names neither a test nor a command".into()));
    }
    found
}

/// Whether the last column fits what the row names.
fn claim(cell: &str, shown: &[Shown]) -> Result<(), &'static str> {
    let in_make_test = shown.iter().filter(|s| **s == Shown::InMakeTest).count();
    if cell == "as here" {
        (in_make_test == shown.len())
            .then_some(())
            .ok_or("make test does not run all that the row names")
    } else if cell
        .strip_prefix("smaller: ")
        .is_some_and(|how| !how.is_empty())
    {
        (in_make_test > 0)
            .then_some(())
            .ok_or("make test runs nothing that the row names")
    } else if cell.strip_prefix("no: ").is_some_and(|why| !why.is_empty()) {
        (in_make_test == 0)
            .then_some(())
            .ok_or("make test runs something that the row names")
    } else {
        Err("the last column is none of `as here`, `smaller: HOW` and `no: WHY`")
    }
}

/// What is wrong in a specification.
fn problems(text: &str, named: &Named<'_>) -> Vec<String> {
    let mut found = Vec::new();
    let mut letters = BTreeMap::new();
    for (letter, command) in definitions(text) {
        match named.command(command) {
            Ok(shown) => {
                letters.insert(letter, shown);
            }
            Err(why) => found.push(format!("{letter}: {why}")),
        }
    }
    let mut rows = 0;
    for (number, line) in (1..).zip(text.lines()) {
        let Some(cells) = markdown::row(line) else {
            continue;
        };
        if cells == HEAD || markdown::is_rule(&cells) {
            continue;
        }
        rows += 1;
        let [promise, _seen, by, claimed] = cells.as_slice() else {
            found.push(format!("line {number}: a row has the columns {HEAD:?}"));
            continue;
        };
        let mut shown = Vec::new();
        for result in shown_by(by, &letters, named) {
            match result {
                Ok(one) => shown.push(one),
                Err(why) => found.push(format!("line {number}: {promise}: {why}")),
            }
        }
        if let Err(why) = claim(claimed, &shown) {
            found.push(format!("line {number}: {promise}: {why}"));
        }
    }
    if rows == 0 {
        found.push("it has no rows".into());
    }
    found
}

#[test]
fn each_row_names_what_exists() {
    let paths = Paths::find().unwrap();
    let text = std::fs::read_to_string(paths.in_root("SPECIFICATION.md")).unwrap();
    let found = problems(&text, &Named::new(&paths));
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST: &str = "`crates/vmm/tests/pool.rs::a_stop_ends_vcpus_that_run`";
    const IGNORED: &str = "`crates/pager/tests/outage.rs::an_outage_of_a_minute`";
    const VM: &str = "`cargo xtask vm --cpus 1 -- pagetide probe`";

    /// What is wrong with a row, without its place.
    fn row(shown_by: &str, claimed: &str) -> String {
        let paths = Paths::find().unwrap();
        let text = format!(
            "| promise | seen | shown by | in make test |\n|---|---|---|---|\n\
             | p | s | {shown_by} | {claimed} |\n\n- A: {VM}\n"
        );
        let found = problems(&text, &Named::new(&paths)).join("\n");
        found.replace("line 3: p: ", "")
    }

    #[test]
    fn sound_rows_pass() {
        let two = format!("{TEST}, `::no_vcpus_are_refused`");
        assert_eq!(row(&two, "as here"), "");
        assert_eq!(row("`kick_vcpus_test` (arm64, x86_64)", "as here"), "");
        assert_eq!(row("`hugetlb-mfr -r -s 2M` (arm64, x86_64)", "as here"), "");
        assert_eq!(row("`cargo xtask test --only loom`", "as here"), "");
        assert_eq!(row("`cargo xtask uapi --check`", "as here"), "");
        assert_eq!(row("A", "no: a measurement"), "");
        for selftest in [
            "-- kick_vcpus_test",
            "--stock -- target/kernel/x86_64/selftests/kick_vcpus_test",
            "--arch arm64 -- /selftests/kick_vcpus_test",
        ] {
            assert_eq!(row(&format!("`cargo xtask vm {selftest}`"), "no: why"), "");
        }
        assert_eq!(row(&format!("{TEST}; at length: A"), "smaller: once"), "");
        let stress = "`PAGETIDE_STRESS_SECONDS=3 cargo test -p pagetide-pager --test stress`";
        assert_eq!(row(stress, "no: long"), "");
    }

    #[test]
    fn a_row_without_a_test_or_a_command_is_found() {
        assert!(row("by construction", "as here").contains("neither a test nor a command"));
        assert!(row("", "as here").contains("neither a test nor a command"));
    }

    #[test]
    fn tests_that_do_not_exist_are_found() {
        let missing = "`crates/vmm/tests/pool.rs::no_such_test`";
        assert!(row(missing, "as here").contains("has no function no_such_test"));
        let helper = "`crates/vmm/tests/linux.rs::vmlinux`";
        assert!(!row(helper, "as here").is_empty());
        let file = "`crates/vmm/tests/no_such_file.rs::a`";
        assert!(row(file, "as here").contains("no_such_file.rs: "));
        assert!(row("`::alone`", "as here").contains("names no file"));
        assert!(row("`no_such_selftest` (x86_64)", "as here").contains("no selftest"));
        assert!(row("`hugetlb-mfr -r -s 4M` (x86_64)", "as here").contains("no selftest"));
        assert!(row("`dirty_log_test` (x86_64)", "as here").contains("no selftest"));
    }

    #[test]
    fn architectures_are_those_that_the_selftest_runs_on() {
        let stands = "must stand (arm64, x86_64)";
        assert!(row("`kick_vcpus_test` (x86_64)", "as here").contains(stands));
        assert!(row("`kick_vcpus_test`", "as here").contains(stands));
    }

    #[test]
    fn commands_that_do_not_parse_are_found() {
        for (command, why) in [
            (
                "cargo xtask vm --no-such-option -- pagetide probe",
                "--no-such-option",
            ),
            ("cargo xtask no-such-verb", "no-such-verb"),
            ("cargo xtask vm -- no_such_program", "neither pagetide nor"),
            (
                "cargo test -p pagetide-pager --test no_such_file",
                "has no tests/",
            ),
            ("cargo test --workspace", "must name a package"),
            ("cargo build", "neither xtask's nor"),
            ("cargo xtask vm -- pagetide 'probe", "a quote"),
        ] {
            let found = row(&format!("`{command}`"), "no: why");
            assert!(found.contains(why), "{command}: {found}");
        }
        for selftest in [
            "-- /selftests/kick_vcpus_test",
            "-- /kick_vcpus_test",
            "--stock -- kick_vcpus_test",
            "--arch arm64 -- fault_around_test",
            "--arch arm64 -- target/kernel/x86_64/selftests/kick_vcpus_test",
            "--arch arm64 --stock -- /selftests/kick_vcpus_test",
            "--debug -- target/kernel/x86_64-stock/selftests/memslot_perf_test",
        ] {
            let found = row(&format!("`cargo xtask vm {selftest}`"), "no: why");
            assert!(found.contains("in a VM of"), "{selftest}: {found}");
        }
        assert!(row("B", "no: a measurement").contains("no command has the letter B"));
    }

    #[test]
    fn claims_that_do_not_fit_are_found() {
        assert!(row(TEST, "").contains("the last column"));
        assert!(row(TEST, "yes").contains("the last column"));
        assert!(row(TEST, "no: ").contains("the last column"));
        assert!(row(TEST, "no: slow").contains("make test runs something"));
        assert!(row(IGNORED, "as here").contains("does not run all"));
        assert!(row(VM, "as here").contains("does not run all"));
        assert!(row(VM, "smaller: less").contains("runs nothing"));
        let debug = "`cargo xtask test --only debug`";
        assert!(row(debug, "as here").contains("does not run all"));
    }

    #[test]
    fn a_row_with_other_columns_is_found() {
        let paths = Paths::find().unwrap();
        let named = Named::new(&paths);
        let found = problems("| a | b |\n|---|---|\n| c | d |\n", &named);
        assert!(found.iter().all(|why| why.contains("has the columns")));
        assert_eq!(found.len(), 2);
        assert_eq!(problems("nothing", &named), ["it has no rows"]);
    }
}
