//! `pagetide bench all`: what this machine can run, in one file.

use std::path::Path;
use std::process::{Command, Output};

use pagetide_uapi::userfaultfd::{Features, Userfaultfd};
use serde_json::Value;

fn bench(words: &[&str], directory: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagetide"))
        .current_dir(directory)
        .arg("bench")
        .args(words)
        .output()
        .expect("it starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text is UTF-8")
}

#[test]
fn what_runs_here_is_in_one_file_and_the_rest_says_why_not() {
    match Userfaultfd::available() {
        Ok(features) if features.contains(Features::MINOR_SHMEM) => {}
        found => {
            println!("SKIP: no userfaultfd with minor faults of shmem: {found:?}");
            return;
        }
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let place = directory.path();
    let output = bench(&["all", "--quick", "--quiet", "--out", "out"], place);
    let (printed, message) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{message}{printed}");
    assert!(
        printed.ends_with("All results: out/all.json\n"),
        "{printed}"
    );

    let all = std::fs::read_to_string(place.join("out/all.json")).expect("the file");
    let value: Value = serde_json::from_str(&all).expect("JSON");
    let names = |list: &str| -> Vec<String> {
        let list = value[list].as_array().expect("a list").iter();
        list.map(|entry| match entry["command"].as_str() {
            Some(command) => command.split(' ').nth(2).expect("a name").to_owned(),
            None => entry["benchmark"].as_str().expect("a name").to_owned(),
        })
        .collect()
    };
    let (measured, left_out) = (names("reports"), names("left_out"));
    let mut every = [measured.clone(), left_out].concat();
    every.sort_unstable();
    every.dedup();
    let wanted = ["memslots", "pager", "paging", "populate"];
    assert_eq!(every, wanted);
    assert!(measured.contains(&"pager".to_owned()), "{measured:?}");
    for left_out in value["left_out"].as_array().expect("a list") {
        let reason = left_out["reason"].as_str().expect("a reason");
        assert!(!reason.is_empty() && printed.contains(reason), "{printed}");
    }

    // As if it had been sent: the other files of the directory are not there.
    std::fs::rename(place.join("out/all.json"), place.join("sent.json")).expect("a new name");
    std::fs::remove_dir_all(place.join("out")).expect("the directory goes");
    let shown = bench(&["show", "sent.json", "--out", "pages"], place);
    assert_eq!(shown.status.code(), Some(0), "{}", text(&shown.stderr));
    let lines = text(&shown.stdout).matches("Not measured: ").count();
    assert_eq!(lines, names("left_out").len());
    for name in measured {
        let page = place.join(format!("pages/{name}.html"));
        assert!(page.metadata().expect("a page").len() > 1000, "{name}");
    }
}
