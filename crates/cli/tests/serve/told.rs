//! `pagetide ctl`: a server is told what to serve.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use pagetide_test_support::eventually;
use rustix::process::Signal;

use super::{Place, assert_refused, ended, get, is_served, signal, unix};

/// `pagetide ctl`, at the control socket of a server in this place.
fn ctl(place: &Place, words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagetide"))
        .current_dir(place.directory.path())
        .args(["ctl", "--control", "control"])
        .args(words)
        .output()
        .expect("it starts")
}

/// What it prints when it succeeds.
fn told(place: &Place, words: &[&str]) -> String {
    let output = ctl(place, words);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {errors}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn a_server_is_told_what_to_serve() {
    let place = Place::new();
    let mut child = place
        .command(&["--control", "control", "--metrics", "unix:metrics"])
        .spawn()
        .expect("it starts");
    eventually("the control socket", || place.path("control").exists());
    // Relative paths are those of whoever asks.
    let added = told(&place, &["add", "socket=image", "--socket-mode", "640"]);
    assert!(added.contains("/socket: served, image "), "{added}");
    let socket = place.path("socket");
    assert!(is_served(&socket));
    let mode = fs::metadata(&socket).expect("it is there").permissions();
    assert_eq!(mode.mode() & 0o777, 0o640);
    let table = told(&place, &["list"]);
    assert!(
        table.starts_with("SOCKET") && table.contains("  served  "),
        "{table}"
    );
    let list: serde_json::Value =
        serde_json::from_str(&told(&place, &["list", "--json"])).expect("JSON");
    assert_eq!(list[0]["state"], "served");
    assert_eq!(list[0]["socket"], socket.display().to_string());

    let refused = ctl(&place, &["add", "other=missing"]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{message}");
    assert!(message.contains("missing does not exist"), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(told(&place, &["remove", "socket"]).contains(": closed, VMs"));
    assert!(!socket.exists());
    told(
        &place,
        &[
            "add",
            "socket=image",
            "--prefetch",
            "off",
            "--on-failure",
            "kill",
        ],
    );
    assert_eq!(
        told(&place, &["drain", "--all"]),
        "all: drained, no VM needs the server\n"
    );
    assert!(!socket.exists());
    let status: serde_json::Value =
        serde_json::from_str(&told(&place, &["status", "--json"])).expect("JSON");
    assert_eq!(status["ready"], false);
    let status = told(&place, &["status"]);
    assert!(
        status.contains("wrong") && status.contains("drained"),
        "{status}"
    );
    let ready = get(unix(&place.path("metrics")), "/ready");
    assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");

    signal(&child, Signal::TERM);
    assert_eq!(ended(&mut child).code(), Some(0));
    assert!(!place.path("control").exists());
    assert_refused(
        &ctl(&place, &["status"]),
        "asking at the control socket control",
    );
    for (words, wanted) in [
        (&["add", "socket"][..], "is not SOCKET=IMAGE"),
        (&["drain"], "--all"),
        (&["drain", "socket", "--all"], "--all"),
        (&["list", "--timeout", "0"], "--timeout"),
    ] {
        assert_refused(&ctl(&place, words), wanted);
    }
}

/// Whoever can connect, for whatever reason, is not yet somebody who may control the server.
#[test]
fn another_user_controls_nothing() {
    use std::os::unix::process::CommandExt;
    const NOBODY: u32 = 65534;
    let place = Place::new();
    let all = fs::Permissions::from_mode(0o755);
    fs::set_permissions(place.directory.path(), all.clone()).expect("it is ours");
    // A copy, since the directories above the command may be closed to others.
    let copy = place.path("pagetide");
    fs::copy(env!("CARGO_BIN_EXE_pagetide"), &copy).expect("there is room");
    fs::set_permissions(&copy, all).expect("it is ours");
    let mut child = place.start(&["--control", "control"]);
    let control = place.path("control");
    fs::set_permissions(&control, fs::Permissions::from_mode(0o666)).expect("it is ours");
    let mut command = Command::new(copy);
    command
        .args(["ctl", "--control"])
        .arg(&control)
        .args(["drain", "--all"]);
    match command.uid(NOBODY).gid(NOBODY).output() {
        Ok(output) => assert_refused(&output, "only root and the server's user are answered"),
        Err(error) => println!("SKIP: no command as another user: {error}"),
    }
    assert!(is_served(&place.path("socket")));
    signal(&child, Signal::TERM);
    assert_eq!(ended(&mut child).code(), Some(0));
}
