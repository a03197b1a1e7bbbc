//! `pagetide image`: exit status, what goes to which stream, and what is left behind.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

use pagetide_test_support::eventually;
use serde_json::Value;

/// A directory in which the commands run.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn image(&self, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagetide"));
        let command = command.arg("image").args(words).current_dir(&self.0);
        command.output().expect("it starts")
    }

    /// Standard output of a run that succeeds and says nothing else.
    fn printed(&self, words: &[&str]) -> String {
        let output = self.image(words);
        let (told, message) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "{words:?}: {message}");
        assert_eq!(message, "", "{words:?}");
        told
    }

    fn json(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.printed(words)).expect("JSON")
    }

    /// The one line of a run that ends with this status and changes no file.
    fn refused(&self, words: &[&str], status: i32) -> String {
        let before = self.files();
        let output = self.image(words);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{words:?}: {message}");
        assert_eq!(text(&output.stdout), "", "{words:?}: {message}");
        let is_told = message.starts_with("pagetide: ") && message.ends_with('\n');
        assert!(is_told, "{words:?}: {message:?}");
        assert_eq!(message.lines().count(), 1, "{words:?}: {message:?}");
        assert!(self.files() == before, "{words:?} has changed something");
        message
    }

    /// All files and their content.
    fn files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let entries = fs::read_dir(&self.0).expect("the directory is there");
        let paths = entries.map(|entry| entry.expect("an entry").path());
        let mut files: Vec<_> = paths
            .map(|path| (path.clone(), fs::read(path).unwrap_or_default()))
            .collect();
        files.sort();
        files
    }

    /// A memory file of 2 MiB and a page: a quarter text, one repeated chunk, a page of numbers, and zeroes.
    fn memory(&self, name: &str) -> Vec<u8> {
        let mut content = vec![0; (2 << 20) + 4096];
        let words = b"what a guest has in its memory ".iter().cycle();
        for (byte, word) in content.iter_mut().zip(words).take(512 << 10) {
            *byte = *word;
        }
        let mut state: u32 = 1;
        for byte in &mut content[1 << 20..(1 << 20) + 70_000] {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = state.to_be_bytes()[0];
        }
        content.copy_within(0..64 << 10, 1_600_000 / 65_536 * 65_536);
        content[(2 << 20) + 100] = 7;
        self.write(name, &content);
        content
    }

    fn write(&self, name: &str, content: &[u8]) {
        fs::write(self.path(name), content).expect("it is written");
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).expect("it is there")
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text is UTF-8")
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("the directory is there");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<_> = names
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn what_is_created_is_extracted() {
    let place = Place::new();
    let content = place.memory("raw");
    let told = place.printed(&["create", "raw", "-o", "image"]);
    for part in [
        "guest memory      2 MiB (2101248 bytes)\n",
        "chunk size        64K\n",
        "base              none\n",
        "time  ",
        "ratio  ",
    ] {
        assert!(told.contains(part), "{part:?} in\n{told}");
    }
    assert_eq!(names(place.0.path()), ["image", "raw"]);
    // Firecracker, and whatever else serves it, may run as somebody else.
    let mode = |name: &str| fs::metadata(place.path(name)).expect("it is there").mode() & 0o777;
    assert_eq!(mode("image"), mode("raw"));

    let info = place.printed(&["info", "image"]);
    assert!(told.starts_with(&info), "{told}\nis not\n{info}");
    let told = place.printed(&["verify", "image"]);
    assert!(
        told.contains("stored chunks") && told.ends_with(": all sound\n"),
        "{told}"
    );
    let told = place.printed(&["extract", "image", "-o", "again"]);
    assert!(told.starts_with("again: 2 MiB of guest memory, "), "{told}");
    assert!(place.read("again") == content);
    let blocks = fs::metadata(place.path("again"))
        .expect("it is there")
        .blocks();
    assert!(blocks * 512 < 1 << 20, "zero chunks are holes");
}

/// Kind: a program that reads or writes memory takes only a regular file.
#[test]
fn pipes_come_and_go_like_files() {
    let place = Place::new();
    let content = place.memory("raw");
    place.printed(&["create", "raw", "-o", "image"]);
    let run = |words: &str| {
        let command = format!("pagetide() {{ \"$0\" image \"$@\"; }}; {words}");
        let output = Command::new("bash")
            .args(["-c", &command, env!("CARGO_BIN_EXE_pagetide")])
            .current_dir(&place.0)
            .output();
        let output = output.expect("it starts");
        assert!(output.status.success(), "{}", text(&output.stderr));
        output.stdout
    };
    run("cat raw | pagetide create - -o piped --json > piped.json");
    run("pagetide create <(cat raw) -o named");
    for name in ["piped", "named"] {
        assert!(place.read(name) == place.read("image"), "{name}");
        let mode = fs::metadata(place.path(name)).expect("it is there").mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    let told: Value = serde_json::from_slice(&place.read("piped.json")).expect("JSON");
    assert_eq!(told["guest_bytes"], content.len());
    assert!(run("pagetide extract image -o -") == content);
    // A diff has holes, and a pipe none.
    run("cat raw | pagetide create - -o above --base image");
    assert!(run("pagetide extract above -o -") == content);
    assert_eq!(place.json(&["info", "above", "--json"])["stored_chunks"], 0);
    let message = place.refused(
        &[
            "create", "-", "-o", "x", "--base", "image", "--holes", "base",
        ],
        2,
    );
    assert!(message.contains("only a local file has holes"), "{message}");
    // Standard input of these is empty.
    let message = place.refused(&["create", "-", "-o", "x"], 2);
    assert!(message.contains("standard input"), "{message}");
    let message = place.refused(&["create", "-", "-o", "image"], 2);
    assert!(message.contains("image exists"), "{message}");
}

#[test]
fn json_has_all_figures() {
    let place = Place::new();
    place.memory("raw");
    let created = place.json(&["create", "raw", "-o", "image", "--chunk", "4K", "--json"]);
    let info = place.json(&["info", "image", "--json"]);
    let expected = [
        ("version", 1),
        ("guest_bytes", 2_101_248),
        ("chunk_bytes", 4096),
        ("chunks", 513),
        ("base_chunks", 0),
    ];
    for (field, value) in expected {
        assert_eq!(info[field], value, "{field}");
    }
    let count = |field: &str| info[field].as_u64().expect("a number");
    let parts = [
        "stored_chunks",
        "zero_chunks",
        "base_chunks",
        "duplicate_chunks",
    ];
    assert_eq!(parts.map(count).iter().sum::<u64>(), count("chunks"));
    assert!(count("zero_chunks") > 300 && count("duplicate_chunks") >= 16);
    let length = fs::metadata(place.path("image"))
        .expect("it is there")
        .len();
    assert_eq!(count("file_bytes"), length);
    assert!(info["ratio"].as_f64().expect("a number") > 10.0);
    assert_eq!(info["digest"].as_str().expect("a text").len(), 64);
    assert_eq!(info["base"], Value::Null);
    assert!(created["seconds"].as_f64().expect("a number") > 0.0);
    let mut created = created;
    for field in ["seconds", "holes", "hole_bytes"] {
        let fields = created.as_object_mut().expect("an object");
        assert!(fields.remove(field).is_some(), "{field}");
    }
    assert_eq!(created, info);
    for (chunk, bytes) in [("1M", 1 << 20), ("131072", 128 << 10), ("4M", 4 << 20)] {
        let words = [
            "create", "raw", "-o", "image", "--force", "--chunk", chunk, "--json",
        ];
        assert_eq!(place.json(&words)["chunk_bytes"], bytes);
    }
}

#[test]
fn a_diff_is_above_its_base() {
    let place = Place::new();
    let mut content = place.memory("raw");
    place.printed(&["create", "raw", "-o", "base.img"]);
    let diff = File::create(place.path("diff")).expect("it is made");
    diff.set_len(content.len() as u64).expect("it has a length");
    diff.write_all_at(&[9; 4096], 40_960)
        .expect("it is written");
    content[40_960..][..4096].fill(9);

    let words = [
        "create", "diff", "-o", "diff.img", "--base", "base.img", "--json",
    ];
    let info = place.json(&words);
    assert_eq!(info["base"], "base.img");
    assert_eq!(
        info["base_digest"],
        place.json(&["info", "base.img", "--json"])["digest"]
    );
    assert_eq!(info["stored_chunks"], 1);
    assert!(info["base_chunks"].as_u64().expect("a number") > 8);
    place.printed(&["extract", "diff.img", "-o", "merged"]);
    assert!(place.read("merged") == content);

    let words = [
        "create", "diff", "-o", "zero.img", "--base", "base.img", "--holes", "zero",
    ];
    place.printed(&words);
    place.printed(&["extract", "zero.img", "-o", "zeroes"]);
    assert!(place.read("zeroes") == place.read("diff"));
    let told = place.printed(&["verify", "diff.img"]);
    assert!(told.contains(" in 2 layers"), "{told}");

    // The base is replaced by another one, and lost.
    place.printed(&["create", "merged", "-o", "base.img", "--force"]);
    for words in [
        &["verify", "diff.img"][..],
        &["extract", "diff.img", "-o", "out"],
    ] {
        let message = place.refused(words, 1);
        assert!(
            message.contains("is not the base that diff.img was made with"),
            "{message}"
        );
    }
    fs::remove_file(place.path("base.img")).expect("it is there");
    let message = place.refused(&["extract", "diff.img", "-o", "out"], 1);
    assert!(
        message.contains("/base.img, the base of diff.img: "),
        "{message}"
    );
    assert_eq!(
        place.json(&["info", "diff.img", "--json"])["base"],
        "base.img"
    );
}

/// tmpfs with huge pages gives 2 MiB to a page that was written: what is clean beside it is no hole.
#[test]
fn a_diff_on_a_file_system_that_gives_space_in_large_pieces_is_refused() {
    let place = Place::new();
    let mut content = vec![3; 4 << 20];
    place.write("raw", &content);
    place.printed(&["create", "raw", "-o", "base.img"]);
    content.fill(0);
    fs::create_dir(place.path("huge")).expect("a directory");
    let program = env!("CARGO_BIN_EXE_pagetide");
    let script = "mount -t tmpfs -o huge=always none huge && test $(stat -c %o huge) -gt 4096 || exit 9
        truncate -s 4M huge/diff && printf x | dd of=huge/diff bs=1 seek=20480 conv=notrunc status=none
        exec $0 image create huge/diff -o diff.img --base base.img";
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", script, program])
        .current_dir(&place.0)
        .output()
        .expect("unshare is there");
    let message = text(&output.stderr);
    if output.status.code() == Some(9) || message.contains("unshare failed") {
        println!("SKIP: no tmpfs with huge pages here: {message}");
        return;
    }
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("in pieces of 2097152 bytes"), "{message}");
    assert!(!place.path("diff.img").exists());
}

#[test]
fn a_diff_that_has_lost_its_holes_is_refused_with_the_way_out() {
    let place = Place::new();
    place.memory("raw");
    place.printed(&["create", "raw", "-o", "base.img"]);
    let words = ["create", "raw", "-o", "x.img", "--base", "base.img"];
    let message = place.refused(&words, 2);
    assert!(message.contains("--holes zero"), "{message}");
    let words = [&words[..], &["--holes", "zero", "--json"]].concat();
    let info = place.json(&words);
    assert_eq!(
        (&info["hole_bytes"], &info["holes"]),
        (&0.into(), &"zero".into())
    );
}

#[test]
fn layers_become_one() {
    let place = Place::new();
    let mut content = place.memory("raw");
    place.printed(&["create", "raw", "-o", "base.img"]);
    let diff = File::create(place.path("diff")).expect("it is made");
    diff.set_len(content.len() as u64).expect("it has a length");
    diff.write_all_at(&[9; 4096], 40_960)
        .expect("it is written");
    content[40_960..][..4096].fill(9);
    place.printed(&["create", "diff", "-o", "top.img", "--base", "base.img"]);
    let told = place.printed(&["merge", "top.img", "-o", "one.img"]);
    assert!(told.contains("base              none\n"), "{told}");
    let info = place.json(&[
        "merge", "top.img", "-o", "two.img", "--base", "base.img", "--json",
    ]);
    assert_eq!(info["base"], "base.img");
    fs::remove_file(place.path("top.img")).expect("it is there");
    for name in ["one.img", "two.img"] {
        place.printed(&["extract", name, "-o", "out", "--force"]);
        assert!(place.read("out") == content, "{name}");
    }
    let message = place.refused(&["merge", "two.img", "-o", "base.img", "--force"], 2);
    assert!(message.contains("is read"), "{message}");
}

/// What QEMU has written, in sources/tests/image/mapped_ram.rs.
const OF_QEMU: &[u8] = include_bytes!("../../sources/tests/image/fixtures/qemu-10.0-pc.zst");

#[test]
fn the_files_of_other_vmms_become_images() {
    let place = Place::new();
    place.write("vm.qemu", &zstd::decode_all(OF_QEMU).expect("it is packed"));
    let refused = place.refused(&["create", "vm.qemu", "-o", "x"], 2);
    assert!(refused.contains("--from qemu-mapped-ram"), "{refused}");
    let from_qemu = ["create", "vm.qemu", "--from", "qemu-mapped-ram"];
    let named = place.image(&[&from_qemu[..], &["-o", "named.img"]].concat());
    let message = text(&named.stderr);
    assert!(
        message.contains("took the RAM block pc.ram (4194304 bytes), and left out"),
        "{message}"
    );
    let above = ["-o", "diff.img", "--base", "vm.img"];
    for more in [
        &["-o", "vm.img"][..],
        &["-o", "bios.img", "--block", "pc.bios"],
        &above,
    ] {
        place.printed(&[&from_qemu, more, &["-q"]].concat());
    }
    place.printed(&["extract", "vm.img", "-o", "memory", "-q"]);
    let memory = place.read("memory");
    assert_eq!(memory.len(), 4 << 20);
    // The loaded file's first word, and its fifth page.
    assert_eq!(memory[1 << 20..][..4], 12_345_u32.to_le_bytes());
    assert_eq!(memory[(1 << 20) + 4 * 4096..][..4096], [0; 4096]);
    let holes = [&from_qemu[..], &above, &["--holes", "base", "--force"]].concat();
    let refused = place.refused(&holes, 2);
    assert!(
        refused.contains("a page that is not in it is zero"),
        "{refused}"
    );

    // Nobody writes to it: to open it would wait for ever.
    let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
    let made = rustix::fs::mknodat(rustix::fs::CWD, place.path("pipe"), kind, mode, 0);
    made.expect("a pipe");
    let piped = ["create", "pipe", "--from", "qemu-mapped-ram", "-o", "x"];
    assert_eq!(place.image(&piped).status.code(), Some(2));
    fs::remove_file(place.path("pipe")).expect("it goes");

    fs::create_dir(place.path("snapshot")).expect("a directory");
    let content = place.memory("snapshot/memory-ranges");
    let of_folder = ["create", "snapshot", "--from", "cloud-hypervisor"];
    place.printed(&[&of_folder[..], &["-o", "ch.img", "-q"]].concat());
    place.printed(&["extract", "ch.img", "-o", "ranges", "-q"]);
    assert!(place.read("ranges") == content);
}

#[test]
fn damage_is_named() {
    let place = Place::new();
    let content = place.memory("raw");
    place.printed(&["create", "raw", "-o", "image"]);
    let mut file = place.read("image");
    file[4096 + 10] ^= 1;
    place.write("image", &file);
    let output = place.image(&["verify", "image"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        text(&output.stdout),
        "image: chunk 0, at offset 4096 of the file, differs from its checksum: the image is damaged\n"
    );
    let message = text(&output.stderr);
    assert!(
        message.starts_with("pagetide: image: 1 of ") && message.lines().count() == 1,
        "{message}"
    );
    let message = place.refused(&["extract", "image", "-o", "out"], 1);
    assert!(message.contains("chunk 0, at offset 4096"), "{message}");

    for (at, what) in [(0, "header"), (3000, "header"), (file.len() - 1, "index")] {
        let mut damaged = file.clone();
        damaged[at] ^= 1;
        place.write("image", &damaged);
        for words in [&["info", "image"][..], &["verify", "image"]] {
            let message = place.refused(words, 1);
            assert!(
                message.contains(&format!("damaged: its {what} differs")),
                "{message}"
            );
        }
    }
    place.write("image", &file[..file.len() / 2]);
    let message = place.refused(&["verify", "image"], 1);
    assert!(
        message.contains("the image is damaged: it has"),
        "{message}"
    );
    assert!(place.read("raw") == content);
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let place = Place::new();
    place.memory("raw");
    place.printed(&["create", "raw", "-o", "image"]);
    fs::create_dir(place.path("directory")).expect("a directory");
    place.write("cut", &[7; 5000]);
    place.write("small", &[7; 4096]);
    let cases: &[(&[&str], &str)] = &[
        (&["create", "none", "-o", "x"], "none does not exist"),
        (&["create", "directory", "-o", "x"], "not a regular file"),
        (&["create", "cut", "-o", "x"], "no whole number of pages"),
        (
            &["create", "small", "-o", "x", "--base", "image"],
            "they are not of one VM",
        ),
        (&["create", "raw"], "--output <IMAGE>"),
        (&["create", "-o", "x"], "<RAW>"),
        (&["create", "raw", "-o", "image"], "image exists"),
        (
            &["create", "raw", "-o", "directory", "--force"],
            "directory exists",
        ),
        (&["create", "raw", "-o", "raw", "--force"], "raw is read"),
        (
            &["create", "raw", "-o", "./directory/../raw", "--force"],
            "raw is read",
        ),
        (
            &["create", "raw", "-o", "none/x"],
            "cannot write to the directory none",
        ),
        (
            &["create", "raw", "-o", "s3://bucket"],
            "nothing can be written to s3://bucket: ",
        ),
        (
            &["extract", "image", "-o", "ftp://host/raw"],
            "no image can be read from ftp://",
        ),
        (
            &["create", "image", "-o", "x"],
            "is a Pagetide image already",
        ),
        (
            &["create", "raw", "-o", "x", "--chunk", "5000"],
            "--chunk 5000: the size must be",
        ),
        (&["create", "raw", "-o", "x", "--chunk", "2K"], "--chunk 2K"),
        (&["create", "raw", "-o", "x", "--chunk", "8M"], "--chunk 8M"),
        (&["create", "raw", "-o", "x", "--chunk", "0"], "--chunk 0"),
        (
            &["create", "raw", "-o", "x", "--chunk", "64T"],
            "--chunk 64T",
        ),
        (
            &["create", "raw", "-o", "x", "--chunk", "big"],
            "'big' is not a size",
        ),
        (
            &["create", "raw", "-o", "x", "--base", "raw"],
            "raw: it is no Pagetide image",
        ),
        (
            &["create", "raw", "-o", "x", "--base", "none"],
            "none does not exist",
        ),
        (
            &["create", "raw", "-o", "x", "--base", "ftp://a/b"],
            "no image can be read from ftp://",
        ),
        (
            &["create", "raw", "-o", "image", "--base", "image", "--force"],
            "image is read",
        ),
        (
            &["create", "raw", "-o", "x", "--holes", "base"],
            "--holes base needs --base",
        ),
        (
            &["create", "raw", "-o", "x", "--holes", "skip"],
            "[possible values: base, zero]",
        ),
        (
            &["create", "raw", "-o", "x", "--from", "qemu-mapped-ram"],
            "raw: it is no file of QEMU's migration",
        ),
        (
            &["create", "raw", "-o", "x", "--block", "pc.ram"],
            "--block: only a file of QEMU's has RAM blocks",
        ),
        (
            &["create", "-", "-o", "x", "--from", "qemu-mapped-ram"],
            "copy what the pipe brings to a file first",
        ),
        (
            &["create", "raw", "-o", "x", "--from", "xen"],
            "[possible values: firecracker, qemu-mapped-ram, cloud-hypervisor]",
        ),
        (
            &[
                "create",
                "directory",
                "-o",
                "x",
                "--from",
                "cloud-hypervisor",
            ],
            "directory/memory-ranges does not exist",
        ),
        (&["info", "raw"], "cannot use raw: it is no Pagetide image"),
        (&["info", "none"], "none does not exist"),
        (&["info", "directory"], "not a regular file"),
        (
            &["verify", "raw"],
            "cannot use raw: it is no Pagetide image",
        ),
        (&["verify", "none"], "none does not exist"),
        (
            &["extract", "raw", "-o", "x"],
            "cannot use raw: it is no Pagetide image",
        ),
        (&["extract", "image", "-o", "raw"], "raw exists"),
        (
            &["extract", "image", "-o", "image", "--force"],
            "image is read",
        ),
        (&["extract", "image"], "--output <RAW>"),
    ];
    for (words, wanted) in cases {
        let message = place.refused(words, 2);
        assert!(message.contains(wanted), "{words:?}: {message}");
    }
}

/// Whether a process has a file without a name, or with a hidden one, in a directory open, and has written to it.
fn part_of_an_image(process: &Child, place: &Place) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{}/fd", process.id())) else {
        return false;
    };
    let top = place.0.path().canonicalize().expect("it is there");
    let is_part = |file: &Path| {
        let name = file.strip_prefix(&top).ok().and_then(Path::to_str);
        name.is_some_and(|name| name.starts_with('.') || name.ends_with(" (deleted)"))
    };
    descriptors.flatten().any(|descriptor| {
        let file = fs::read_link(descriptor.path());
        let bytes = fs::metadata(descriptor.path()).map_or(0, |status| status.len());
        file.is_ok_and(|file| is_part(&file)) && bytes > 0
    })
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let place = Place::new();
    let file = File::create(place.path("raw")).expect("it is made");
    let part: Vec<u8> = (0..1 << 20)
        .map(|n: u32| (n.wrapping_mul(n) >> 7).to_le_bytes()[0])
        .collect();
    for number in 0..256_u64 {
        let part: Vec<u8> = part
            .iter()
            .map(|byte| byte ^ number.to_le_bytes()[0])
            .collect();
        file.write_all_at(&part, number << 20)
            .expect("it is written");
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetide"));
    let command = command.args(["image", "create", "raw", "-o", "image"]);
    let mut running = command.current_dir(&place.0).spawn().expect("it starts");
    // As soon as it has begun to write, long before it has read 256 MiB.
    eventually("a part of the image", || part_of_an_image(&running, &place));
    running.kill().expect("it is there");
    let status = running.wait().expect("it has ended");
    assert!(!status.success(), "it had ended before it was interrupted");
    let left = names(place.0.path());
    let hidden = left.iter().filter(|name| name.starts_with('.')).count();
    // A file system without unnamed files keeps a hidden one.
    assert!(
        !left.contains(&"image".to_owned()) && left.len() == 1 + hidden,
        "{left:?}"
    );
}
