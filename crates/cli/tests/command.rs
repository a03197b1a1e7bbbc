//! The built command: exit status, what goes to which stream, and what is left behind.

use std::path::Path;
use std::process::{Command, Output};

use pagetide_bench::paging::Plan;
use pagetide_bench::report::Report;
use pagetide_uapi::probe::Probe;

fn pagetide(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetide"));
    command.args(words);
    command
}

/// Runs `pagetide bench paging` with these words, results going below `directory`.
fn paging(directory: &Path, words: &[&str]) -> Output {
    let out = directory.join("out/results");
    pagetide(&["bench", "paging", "--out"])
        .arg(out)
        .args(words)
        .output()
        .expect("it starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text is UTF-8")
}

/// It ended with 2 and one line on standard error, printed nothing and left nothing behind.
fn assert_refused(output: &Output, directory: &Path) -> String {
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert_eq!(text(&output.stdout), "", "{message}");
    assert!(
        message.starts_with("pagetide: ") && message.ends_with('\n'),
        "{message:?}"
    );
    assert_eq!(message.lines().count(), 1, "{message:?}");
    let left = std::fs::read_dir(directory)
        .expect("the directory is there")
        .count();
    assert_eq!(left, 0, "something was left in {}", directory.display());
    message
}

/// What every run here needs; without it the word why not.
fn can_page() -> bool {
    let probe = Probe::run();
    let missing = ["/dev/kvm", "userfaultfd", "UFFD_FEATURE_MINOR_SHMEM"]
        .into_iter()
        .find(|name| !probe.has(name));
    if let Some(missing) = missing {
        println!("SKIP: no {missing}");
    }
    missing.is_none()
}

#[test]
fn bad_arguments_are_refused_in_one_line() {
    let cases: &[(&[&str], &str)] = &[
        (
            &["--vcpus", "0"],
            "--vcpus 0: a virtual machine needs at least one vCPU",
        ),
        (
            &["--vcpus", "two"],
            "invalid value 'two' for '--vcpus <LIST>': invalid digit found in string",
        ),
        (&["--vcpus", ""], "invalid value '' for '--vcpus <LIST>'"),
        (&["--per-vcpu", "64MB"], "'64MB' is not a size"),
        (
            &["--per-vcpu", "5000"],
            "--per-vcpu 5000: not a multiple of the 4096-byte pages",
        ),
        (
            &["--per-vcpu", "0"],
            "--per-vcpu 0: each vCPU needs at least one page",
        ),
        (
            &["--per-vcpu", "99999999T"],
            "is more bytes than 64 bits hold",
        ),
        (
            &["--delivery", "mail"],
            "[possible values: none, uffd, exit]",
        ),
        (
            &["--delivery", "uffd", "--fault-around", "16"],
            "--fault-around 16 needs --delivery exit",
        ),
        (
            &["--fault-around", "3"],
            "--fault-around 3: must be a power of two",
        ),
        (
            &["--backing", "floppy"],
            "[possible values: shmem, thp, hugetlb-2m, hugetlb-1g, anonymous]",
        ),
        (&["--backing", "anonymous"], "use --mode missing"),
        (&["--readers", "0"], "--readers 0: without a reader thread"),
        (&["--runs", "0"], "--runs 0: nothing would be measured"),
        (
            &["--overlap", "--uffds", "per-vcpu"],
            "--uffds per-vcpu with --overlap",
        ),
        (
            &["--no-such-option"],
            "unexpected argument '--no-such-option' found",
        ),
    ];
    let directory = tempfile::tempdir().expect("a temporary directory");
    for (words, wanted) in cases {
        let message = assert_refused(&paging(directory.path(), words), directory.path());
        assert!(message.contains(wanted), "{words:?}: {message}");
    }
}

#[test]
fn an_unknown_timing_mode_is_refused() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let output = pagetide(&["bench", "paging", "--out"])
        .arg(directory.path().join("out"))
        .env("PAGETIDE_TIMING", "warp")
        .output()
        .expect("it starts");
    let message = assert_refused(&output, directory.path());
    assert!(
        message.contains("PAGETIDE_TIMING=warp is no timing mode"),
        "{message}"
    );
}

#[test]
fn what_the_machine_lacks_is_reported_with_the_way_to_get_it() {
    if !can_page() {
        return;
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let uffd = ["--delivery", "uffd", "--vcpus", "1"];
    let mut cases: Vec<(Vec<&str>, &str)> = vec![
        (
            vec!["--per-vcpu", "1T"],
            "lower --per-vcpu or --vcpus, or free memory",
        ),
        (
            vec!["--per-vcpu", "1024G", "--backing", "hugetlb-1g"],
            "--backing hugetlb-1g",
        ),
        (
            vec!["--per-vcpu", "1T", "--backing", "hugetlb-2m"],
            "--backing hugetlb-2m: 524288 free huge pages",
        ),
    ];
    let probe = Probe::run();
    if probe.has("KVM_CAP_ABSENT_MAPPING_FAULT") {
        println!("SKIP: missing exits: this kernel has KVM_CAP_ABSENT_MAPPING_FAULT");
    } else {
        cases.push((
            vec!["--delivery", "exit"],
            "lacks KVM_CAP_ABSENT_MAPPING_FAULT",
        ));
    }
    for (words, wanted) in cases {
        let words = if words.contains(&"--delivery") {
            words
        } else {
            uffd.into_iter().chain(words).collect()
        };
        let message = assert_refused(&paging(directory.path(), &words), directory.path());
        assert!(message.contains(wanted), "{words:?}: {message}");
    }
}

/// Runs a small benchmark with a /dev in which only the devices of `prepare`'s making are, and with
/// the capabilities of a root that may not trace processes. `None`, and a word why, where this
/// process cannot arrange that.
fn paging_with_dev(prepare: &str, directory: &Path) -> Option<Output> {
    let inside = |script: String| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-ec", &script, "sh"]);
        command
    };
    let hidden = format!("mount -t tmpfs none /dev; {prepare}");
    let exec = "exec setpriv --bounding-set=-sys_ptrace --inh-caps=-sys_ptrace";
    let possible = inside(format!("{hidden}; {exec} true")).output();
    let why_not = match &possible {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(text(&output.stderr)),
        Err(error) => Some(error.to_string()),
    };
    if let Some(why_not) = why_not {
        println!("SKIP: cannot hide devices: {}", why_not.trim_end());
        return None;
    }
    let output = inside(format!("{hidden}; {exec} \"$@\""))
        .arg(env!("CARGO_BIN_EXE_pagetide"))
        .args([
            "bench",
            "paging",
            "--delivery",
            "uffd",
            "--vcpus",
            "1",
            "--out",
        ])
        .arg(directory.join("out"))
        .output();
    Some(output.expect("it starts"))
}

#[test]
fn a_machine_without_kvm_is_refused() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let output = if Path::new("/dev/kvm").exists() {
        paging_with_dev("true", directory.path())
    } else {
        Some(paging(directory.path(), &["--delivery", "uffd"]))
    };
    let Some(output) = output else { return };
    let message = assert_refused(&output, directory.path());
    assert!(
        message.contains("no /dev/kvm: load the kvm_intel or kvm_amd module"),
        "{message}"
    );
}

#[test]
fn a_user_without_permission_for_userfaultfd_is_refused() {
    let setting = "/proc/sys/vm/unprivileged_userfaultfd";
    let everybody = std::fs::read_to_string(setting).is_ok_and(|value| value.trim() != "0");
    if everybody || !Path::new("/dev/kvm").exists() {
        println!("SKIP: everybody may use userfaultfd, or there is no /dev/kvm");
        return;
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let Some(output) = paging_with_dev("mknod /dev/kvm c 10 232", directory.path()) else {
        return;
    };
    let message = assert_refused(&output, directory.path());
    assert!(
        message.contains("no permission for a userfaultfd that serves KVM's faults: run as root"),
        "{message}"
    );
}

/// Runs a small benchmark after a shell has done `before`.
fn paging_after(before: &str, directory: &Path, words: &[&str]) -> Output {
    Command::new("sh")
        .args(["-ec", &format!("{before}; exec \"$@\""), "sh"])
        .arg(env!("CARGO_BIN_EXE_pagetide"))
        .args(["bench", "paging", "--delivery", "uffd", "--per-vcpu", "64K"])
        .args(["--runs", "1", "--out"])
        .arg(directory.join("out"))
        .args(words)
        .output()
        .expect("it starts")
}

#[test]
fn descriptors_are_taken_as_far_as_the_limit_goes() {
    if !can_page() {
        return;
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let words = ["--vcpus", "2", "--readers", "9"];
    let output = paging_after("ulimit -n 43", directory.path(), &words);
    let message = assert_refused(&output, directory.path());
    assert!(
        message.contains("2 vCPUs need 44 file descriptors and this process may have 43")
            && message.contains("ulimit -n"),
        "{message}"
    );
    let output = paging_after("ulimit -S -n 12", directory.path(), &words);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn warnings_stay_on_a_terminal() {
    if !can_page() {
        return;
    }
    // KVM recommends as many as there are processors, also those on which this process may not run.
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").expect("processors");
    let processors = cpuinfo.lines().filter(|line| line.starts_with("processor"));
    let vcpus = processors.count() + 1;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let command = format!(
        "{} bench paging --delivery uffd --vcpus {vcpus} --per-vcpu 64K --runs 1 --out {}",
        env!("CARGO_BIN_EXE_pagetide"),
        directory.path().join("out").display()
    );
    // util-linux's script(1) gives the command a terminal.
    let output = Command::new("script")
        .args(["--quiet", "--return", "--command", &command, "/dev/null"])
        .stdin(std::process::Stdio::null())
        .output();
    let output = match output {
        Ok(output) => output,
        Err(error) => {
            println!("SKIP: cannot make a terminal with script(1): {error}");
            return;
        }
    };
    let screen = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{screen}");
    let warning = format!("warning: {vcpus} vCPUs are more than KVM recommends here");
    assert!(screen.contains(&warning), "{screen}");
}

#[test]
fn a_directory_that_cannot_be_is_refused() {
    if !can_page() {
        return;
    }
    // Also root cannot make a directory there.
    let output = pagetide(&[
        "bench",
        "paging",
        "--delivery",
        "uffd",
        "--vcpus",
        "1",
        "--out",
        "/proc/x/y",
    ])
    .output()
    .expect("it starts");
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(
        message.starts_with("pagetide: --out /proc/x/y: cannot make the directory: "),
        "{message}"
    );
}

#[test]
fn a_run_prints_a_table_and_leaves_three_files() {
    if !can_page() {
        return;
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let words = [
        "--delivery",
        "none,uffd",
        "--vcpus",
        "1,2",
        "--per-vcpu",
        "256K",
        "--runs",
        "2",
    ];
    let output = paging(directory.path(), &words);
    let (table, progress) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{progress}");
    assert!(progress.contains("12 of 12 runs done"), "{progress}");
    assert!(
        table.contains("Demand paging: 256K per vCPU, shmem MINOR, sequential writes"),
        "{table}"
    );
    assert!(table.contains("Page: "), "{table}");
    let results = directory.path().join("out/results");
    let json = std::fs::read_to_string(results.join("paging.json")).expect("the data");
    let report = Report::<Plan>::from_json(&json).expect("a report");
    assert_eq!(report.view().expect("its own records").cells.len(), 4);
    for name in ["paging.svg", "paging.html"] {
        assert!(
            results.join(name).metadata().expect("a file").len() > 1000,
            "{name}"
        );
    }
}

#[test]
fn json_and_quiet_leave_the_streams_to_programs() {
    if !can_page() {
        return;
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let words = [
        "--delivery",
        "uffd",
        "--vcpus",
        "1",
        "--per-vcpu",
        "64K",
        "--runs",
        "1",
    ];
    let words: Vec<_> = words
        .into_iter()
        .chain(["--json", "--quiet", "--lost-runs", "3"])
        .collect();
    let output = paging(directory.path(), &words);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stderr), "");
    let report = Report::<Plan>::from_json(&text(&output.stdout)).expect("JSON only");
    assert_eq!(report.origin.lost_runs_outside, 3);
}

#[test]
fn probe_tells_what_there_is() {
    let output = pagetide(&["probe"]).output().expect("it starts");
    assert_eq!(output.status.code(), Some(0));
    let table = text(&output.stdout);
    for wanted in [
        "KVM_CAP_ABSENT_MAPPING_FAULT",
        "userfaultfd",
        "used instead",
        "/dev/kvm",
    ] {
        assert!(table.contains(wanted), "{wanted} in\n{table}");
    }
    let output = pagetide(&["probe", "--json"]).output().expect("it starts");
    let probe: Probe = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(probe.kernel_release, Probe::run().kernel_release);
}

#[test]
fn help_is_no_failure_and_silence_is_one() {
    for words in [
        &["--help"][..],
        &["bench", "paging", "--help"],
        &["bench", "show", "--help"],
        &["--version"],
    ] {
        let output = pagetide(words).output().expect("it starts");
        assert_eq!(output.status.code(), Some(0), "{words:?}");
        assert!(
            !output.stdout.is_empty() && output.stderr.is_empty(),
            "{words:?}"
        );
    }
    let output = pagetide(&[]).output().expect("it starts");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("Usage: pagetide <COMMAND>"));
}
