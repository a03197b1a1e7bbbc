//! `pagetide run`: what it refuses. Guests that boot are in the tests of vmm.

#![cfg(target_arch = "x86_64")]

use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use pagetide_test_support::eventually;
use pagetide_uapi::probe::Probe;

fn run(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagetide"))
        .arg("run")
        .args(words)
        .output()
        .expect("it starts")
}

/// Does nothing for ever: jumps to itself.
const SPIN: &[u8] = b"\xeb\xfe";

/// Says x for ever: mov al, 'x'; mov dx, 0x3f8; out dx, al; jumps to the out.
const TALK: &[u8] = b"\xb0x\x66\xba\xf8\x03\xee\xeb\xfd";

/// The smallest file that is taken for a kernel: an ELF header, one segment with `code` at 16 MiB.
fn kernel(path: &Path, code: &[u8]) {
    const START: u64 = 16 << 20;
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    for word in [START, 64, 0] {
        file.extend_from_slice(&word.to_le_bytes());
    }
    file.extend_from_slice(&[0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    file.extend_from_slice(&[1, 0, 0, 0, 5, 0, 0, 0]);
    for word in [120, START, START, code.len() as u64, 4096, 4096] {
        file.extend_from_slice(&word.to_le_bytes());
    }
    file.extend_from_slice(code);
    std::fs::write(path, file).expect("a temporary file");
}

#[test]
fn what_cannot_be_is_refused_in_one_line() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = |name: &str| {
        directory
            .path()
            .join(name)
            .to_str()
            .expect("UTF-8")
            .to_owned()
    };
    let (good, text, large) = (file("vmlinux"), file("text"), file("large"));
    kernel(Path::new(&good), SPIN);
    std::fs::write(&text, "no kernel\n").expect("a temporary file");
    std::fs::write(file("empty"), "").expect("a temporary file");
    let sparse = std::fs::File::create(&large).expect("a temporary file");
    sparse.set_len(300 << 20).expect("a sparse file");
    let (missing, empty, unmade) = (file("missing"), file("empty"), file("content"));

    let long = "x".repeat(3000);
    let cases: &[(&[&str], &str)] = &[
        (&[], "--kernel <FILE>"),
        (
            &["--kernel", &missing],
            "missing: No such file or directory",
        ),
        (
            &["--kernel", &text],
            "text: neither an x86-64 vmlinux (ELF) nor a bzImage",
        ),
        (&["--kernel", "/"], "kernel /: Is a directory"),
        (&["--kernel", &good, "--initrd", &missing], "initrd"),
        (
            &["--kernel", &good, "--initrd", &empty],
            "not a regular file with content",
        ),
        (
            &["--kernel", &good, "--initrd", "/"],
            "not a regular file with content",
        ),
        (
            &["--kernel", &good, "--initrd", &large],
            "large: its 314572800 bytes do not fit: 251654144 are left beside the kernel",
        ),
        (
            &["--kernel", &good, "--memory", "16M"],
            "Linux needs at least 33554432",
        ),
        (
            &["--kernel", &good, "--memory", "64M1"],
            "'64M1' is not a size",
        ),
        (
            &["--kernel", &good, "--memory", "67108865"],
            "no multiple of the page size of shmem",
        ),
        (
            &[
                "--kernel",
                &good,
                "--memory",
                "65M",
                "--backing",
                "hugetlb-2m",
            ],
            "no multiple of the page size of hugetlb-2m, 2097152",
        ),
        (
            &["--kernel", &good, "--backing", "floppy"],
            "[possible values: shmem,",
        ),
        (&["--kernel", &good, "--vcpus", "0"], "at least 1 vCPU"),
        (
            &["--kernel", &good, "--vcpus", "255"],
            "255 vCPUs: there can be at most 254",
        ),
        (
            &["--kernel", &good, "--cmdline", &long],
            "at most 2047 bytes",
        ),
        (&["--kernel", &good, "--cmdline", "a\nb"], "command line"),
        (
            &["--kernel", &good, "--timeout", "0"],
            "invalid value '0' for '--timeout",
        ),
        (
            &["--kernel", &good, "--paging", "tape"],
            "[possible values: uffd, exit, off]",
        ),
        (
            &["--kernel", &good, "--prefetch"],
            "--prefetch needs --paging uffd or --paging exit",
        ),
        (
            &["--kernel", &good, "--content", &missing],
            "--content needs --paging uffd or --paging exit",
        ),
        (
            &["--kernel", &good, "--paging", "uffd", "--content", &empty],
            "0 bytes, and the guest's memory has 268435456",
        ),
        (
            &["--kernel", &good, "--paging", "exit", "--content", "/"],
            "content file /: not a regular file",
        ),
        (
            &[
                "--kernel",
                &missing,
                "--paging",
                "uffd",
                "--content",
                &unmade,
            ],
            "missing: No such file or directory",
        ),
        (
            &["--kernel", &good, "--console", "/proc/x/y"],
            "--console /proc/x/y: No such file",
        ),
    ];
    for (words, wanted) in cases {
        let output = run(words);
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {told}");
        assert!(output.stdout.is_empty(), "{words:?}");
        assert!(told.contains(wanted), "{words:?}: {told}");
        assert_eq!(told.lines().count(), 1, "{words:?}: {told}");
    }
    assert!(!Path::new(&unmade).exists(), "a refused guest has content");
}

#[test]
fn a_poison_map_that_is_none_is_refused_and_left_alone() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (kernel_file, map) = (directory.path().join("k"), directory.path().join("map"));
    kernel(&kernel_file, SPIN);
    std::fs::write(&map, "no poison map").expect("a temporary file");
    let (file, map_file) = (kernel_file.to_str(), map.to_str());
    let words = ["--kernel", file.expect("UTF-8"), "--poison-map"];
    let output = run(&[&words[..], &[map_file.expect("UTF-8")]].concat());
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains("map"), "{told}");
    assert_eq!(told.lines().count(), 1, "{told}");
    let left = std::fs::read(&map).expect("it is there");
    assert_eq!(left, b"no poison map");
}

#[test]
fn a_refused_guest_leaves_the_consoles_file_as_it_was() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("console");
    std::fs::write(&file, "what the last guest said").expect("a temporary file");
    let console = file.to_str().expect("UTF-8");
    let output = run(&["--kernel", "/dev/null", "--console", console]);
    assert_eq!(output.status.code(), Some(2));
    let left = std::fs::read_to_string(&file).expect("it is there");
    assert_eq!(left, "what the last guest said");
}

#[test]
fn the_time_is_up_even_if_nobody_reads() {
    if !Probe::run().has("/dev/kvm") {
        println!("SKIP: no /dev/kvm");
        return;
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("vmlinux");
    kernel(&path, TALK);
    // Nearly full, so that the guest soon waits.
    let (_reader, mut output) = io::pipe().expect("a pipe");
    output.write_all(&[b'x'; 65_000]).expect("64 KiB of room");
    let mut child = Command::new(env!("CARGO_BIN_EXE_pagetide"))
        .args(["run", "--timeout", "1", "--kernel"])
        .arg(&path)
        .stdin(Stdio::piped())
        .stdout(output)
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut keys = child.stdin.take().expect("a pipe");
    keys.write_all(&[b'x'; 1000]).expect("somebody types it in");
    let status = eventually("its end", || child.try_wait().expect("it is our child"));
    assert_eq!(status.code(), Some(1));
}

/// Writes the status 7 to ttyS1: mov dx, 0x2f8; mov al, '7'; out; mov al, newline; out; halts.
const SEVEN: &[u8] = b"\x66\xba\xf8\x02\xb0\x37\xee\xb0\x0a\xee\xf4";

#[test]
fn memory_comes_from_a_content_file_that_is_made_kept_and_refused() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (path, file) = (
        directory.path().join("vmlinux"),
        directory.path().join("content"),
    );
    kernel(&path, SEVEN);
    let kernel_file = path.to_str().expect("UTF-8");
    let content = file.to_str().expect("UTF-8");
    let paged = |more: &[&str]| {
        let words = [
            "--kernel",
            kernel_file,
            "--console",
            "none",
            "--memory",
            "64M",
            "--timeout",
            "100",
        ];
        let output = run(&[&words[..], more].concat());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), told)
    };
    let (status, told) = paged(&["--paging", "uffd"]);
    let lacks = [
        "this kernel has no userfaultfd",
        "no permission for a userfaultfd",
        "this kernel's userfaultfd lacks",
        "/dev/kvm",
    ];
    if status == Some(2) && lacks.iter().any(|lack| told.contains(lack)) {
        println!("SKIP: {told}");
        return;
    }
    assert_eq!(status, Some(7), "{told}");
    let lines: Vec<_> = told.lines().collect();
    assert!(
        matches!(lines[..], [_, end] if end.contains("ended with status 7")),
        "{told}"
    );
    assert!(
        lines[0].contains(" of 16384 pages were paged in: "),
        "{told}"
    );
    assert!(lines[0].contains(" 0 by prefetch ("), "{told}");
    assert!(lines[0].ends_with("the host discarded 0"), "{told}");

    for more in [&[][..], &["--prefetch"]] {
        let (status, told) = paged(&[&["--paging", "uffd", "--content", content], more].concat());
        assert_eq!(status, Some(7), "{told}");
        let made = std::fs::metadata(&file).expect("it is kept");
        assert_eq!(made.len(), 64 << 20);
    }
    let (status, told) = paged(&["--paging", "exit", "--content", content]);
    match status {
        Some(7) => assert!(told.contains(" by fault"), "{told}"),
        Some(2) => assert!(
            told.contains("userfaultfd works without it (uffd)"),
            "{told}"
        ),
        _ => unreachable!("{status:?}: {told}"),
    }
    for more in [&["65M"][..], &["64M", "--cmdline", "quiet"]] {
        let words = [
            "--kernel",
            kernel_file,
            "--paging",
            "uffd",
            "--content",
            content,
            "--memory",
        ];
        let output = run(&[&words[..], more].concat());
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains("it was made for another guest"), "{told}");
    }
}

#[test]
fn help_shows_how_to_begin() {
    let output = run(&["--help"]);
    assert_eq!(output.status.code(), Some(0));
    let help = String::from_utf8_lossy(&output.stdout);
    for wanted in [
        "cargo xtask guest",
        "[default: 256M]",
        "ttyS1",
        "Exit status:",
        "Ctrl-A X",
        "--paging uffd --prefetch",
        "KVM_CAP_ABSENT_MAPPING_FAULT",
        "[default: a temporary file]",
    ] {
        assert!(help.contains(wanted), "{wanted} in\n{help}");
    }
}
